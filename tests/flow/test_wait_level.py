"""P3: a request for a level is answered when the level is reached, and not before."""

import errno
from pathlib import Path

import pytest
from pfs_world import World

from ckptfs.catalog import contents, journal, mover_requests
from ckptfs.flow.wait_level import WaitLevel
from ckptfs.model import Tier


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


def test_a_level(world: World, settle: WaitLevel) -> None:
    inode = world.inode("file")
    assert state(world, settle, mover_requests.insert_request(world.db, mover_requests.WAIT_LEVEL, inode, "pfs")) == mover_requests.DONE
    assert settle.next_due_s() is None
    with world.db.transaction():
        content = contents.insert_content(world.db, inode, Tier.RAM)
        contents.mark_closed(world.db, inode, content, 0, 0, 0)
    want = mover_requests.insert_request(world.db, mover_requests.WAIT_LEVEL, inode, "pfs")
    assert state(world, settle, want) == mover_requests.OPEN and settle.next_due_s() is not None
    assert state(world, settle, mover_requests.insert_request(world.db, mover_requests.WAIT_LEVEL, inode, "local")) == mover_requests.DONE
    world.db.run("UPDATE content SET state = 2, digest = x'01' WHERE id = ?", content)
    world.db.run("UPDATE pfs_file SET generation = 1, digest = x'01' WHERE inode = ?", inode)
    assert state(world, settle, want) == mover_requests.OPEN, "something about it is still to be told"
    world.db.run("DELETE FROM journal")
    assert state(world, settle, want) == mover_requests.DONE


def test_what_was_recorded(world: World, settle: WaitLevel) -> None:
    inode = world.inode("file")
    with world.db.transaction():
        journal.append(world.db, "synced", inode)
    want = mover_requests.insert_request(
        world.db, mover_requests.WAIT_LEVEL, inode, mover_requests.build_journal_argument(journal.get_last_seq(world.db, inode))
    )
    assert state(world, settle, want) == mover_requests.OPEN
    world.db.run("DELETE FROM journal")
    assert state(world, settle, want) == mover_requests.DONE


def test_a_file_that_is_gone(world: World, settle: WaitLevel) -> None:
    want = mover_requests.insert_request(world.db, mover_requests.WAIT_LEVEL, 4711, "pfs")
    assert state(world, settle, want) == mover_requests.FAILED
    row = mover_requests.get(world.db, want)
    assert row is not None and row.error == errno.ENOENT
