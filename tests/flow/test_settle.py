"""P3: who waits for a level is told when it is reached, and not before."""

import errno
from pathlib import Path

import pytest
from pfs_world import World, wants

from ckptfs.catalog import contents, journal
from ckptfs.flow.settle import Settle
from ckptfs.model import Tier


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    (world.pfs / "file").write_bytes(b"there")
    world.look(again=False)
    return world


@pytest.fixture
def settle(world: World) -> Settle:
    return Settle(world.db, world.places, world.config, world.told)


def state(world: World, settle: Settle, want: int) -> int:
    settle.step()
    row = wants.get(world.db, want)
    assert row is not None
    return row.state


def test_a_level(world: World, settle: Settle) -> None:
    inode = world.inode("file")
    assert state(world, settle, wants.ask(world.db, wants.SETTLE, inode, "pfs")) == wants.DONE
    assert settle.due_s() is None
    with world.db.change():
        content = contents.begin(world.db, inode, Tier.RAM)
        contents.close(world.db, inode, content, 0, 0, 0)
    want = wants.ask(world.db, wants.SETTLE, inode, "pfs")
    assert state(world, settle, want) == wants.WANTED and settle.due_s() is not None
    assert state(world, settle, wants.ask(world.db, wants.SETTLE, inode, "local")) == wants.DONE
    world.db.run("UPDATE content SET state = 2, digest = x'01' WHERE id = ?", content)
    world.db.run("UPDATE published SET generation = 1, digest = x'01' WHERE inode = ?", inode)
    assert state(world, settle, want) == wants.WANTED, "something about it is still to be told"
    world.db.run("DELETE FROM journal")
    assert state(world, settle, want) == wants.DONE


def test_what_was_recorded(world: World, settle: Settle) -> None:
    inode = world.inode("file")
    with world.db.change():
        journal.append(world.db, "synced", inode)
    want = wants.ask(world.db, wants.SETTLE, inode, wants.until_told(journal.last(world.db, inode)))
    assert state(world, settle, want) == wants.WANTED
    world.db.run("DELETE FROM journal")
    assert state(world, settle, want) == wants.DONE


def test_a_file_that_is_gone(world: World, settle: Settle) -> None:
    want = wants.ask(world.db, wants.SETTLE, 4711, "pfs")
    assert state(world, settle, want) == wants.FAILED
    row = wants.get(world.db, want)
    assert row is not None and row.error == errno.ENOENT
