"""P3: who waits for a level is told when it is reached, and not before."""

import errno
from pathlib import Path

import pytest
from pfs_world import World, wants

from ckptfs.catalog import contents, journal
from ckptfs.flow.settle import WaitLevel
from ckptfs.model import Tier


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    (world.pfs / "file").write_bytes(b"there")
    world.look(again=False)
    return world


@pytest.fixture
def settle(world: World) -> WaitLevel:
    return WaitLevel(world.db, world.tiers, world.config, world.told)


def state(world: World, settle: WaitLevel, want: int) -> int:
    settle.step()
    row = wants.get(world.db, want)
    assert row is not None
    return row.state


def test_a_level(world: World, settle: WaitLevel) -> None:
    inode = world.inode("file")
    assert state(world, settle, wants.insert_request(world.db, wants.WAIT_LEVEL, inode, "pfs")) == wants.DONE
    assert settle.next_due_s() is None
    with world.db.transaction():
        content = contents.insert_content(world.db, inode, Tier.RAM)
        contents.mark_closed(world.db, inode, content, 0, 0, 0)
    want = wants.insert_request(world.db, wants.WAIT_LEVEL, inode, "pfs")
    assert state(world, settle, want) == wants.OPEN and settle.next_due_s() is not None
    assert state(world, settle, wants.insert_request(world.db, wants.WAIT_LEVEL, inode, "local")) == wants.DONE
    world.db.run("UPDATE content SET state = 2, digest = x'01' WHERE id = ?", content)
    world.db.run("UPDATE published SET generation = 1, digest = x'01' WHERE inode = ?", inode)
    assert state(world, settle, want) == wants.OPEN, "something about it is still to be told"
    world.db.run("DELETE FROM journal")
    assert state(world, settle, want) == wants.DONE


def test_what_was_recorded(world: World, settle: WaitLevel) -> None:
    inode = world.inode("file")
    with world.db.transaction():
        journal.append(world.db, "synced", inode)
    want = wants.insert_request(world.db, wants.WAIT_LEVEL, inode, wants.build_journal_argument(journal.get_last_seq(world.db, inode)))
    assert state(world, settle, want) == wants.OPEN
    world.db.run("DELETE FROM journal")
    assert state(world, settle, want) == wants.DONE


def test_a_file_that_is_gone(world: World, settle: WaitLevel) -> None:
    want = wants.insert_request(world.db, wants.WAIT_LEVEL, 4711, "pfs")
    assert state(world, settle, want) == wants.FAILED
    row = wants.get(world.db, want)
    assert row is not None and row.error == errno.ENOENT
