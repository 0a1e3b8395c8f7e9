"""P3: a request that waits for the PFS is answered when the PFS has everything, and not before."""

from pathlib import Path

import pytest
from pfs_world import World

from ckptfs.catalog import journal, mover_requests
from ckptfs.flow.wait_level import WaitLevel


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    (world.pfs / "file").write_bytes(b"there")
    world.visit("")
    return world


@pytest.fixture
def settle(world: World) -> WaitLevel:
    return WaitLevel(world.db, world.tiers, world.config, world.told)


def state(world: World, settle: WaitLevel, want: int) -> int:
    settle.step()
    row = mover_requests.get(world.db, want)
    assert row is not None
    return row.state


def test_what_was_recorded(world: World, settle: WaitLevel) -> None:
    inode = world.inode("file")
    with world.db.transaction():
        journal.append(world.db, "synced", inode)
    want = mover_requests.insert_request(
        world.db, mover_requests.WAIT_LEVEL, inode, mover_requests.build_journal_argument(journal.get_last_seq(world.db, inode))
    )
    assert state(world, settle, want) == mover_requests.OPEN and settle.next_due_s() is not None
    world.db.run("DELETE FROM journal")
    assert state(world, settle, want) == mover_requests.DONE and settle.next_due_s() is None
