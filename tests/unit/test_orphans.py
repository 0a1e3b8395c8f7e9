"""P2, P5: an inode without a name is deleted when the kernel forgets it, not before and not never."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from ckptfs_daemon.mount.handlers.namespace_handlers import OrphanTracker

from ckptfs import limits
from ckptfs.catalog import database, namespace
from ckptfs.catalog.database import Database
from ckptfs.model import ROOT


class World:
    """A catalog, the kernel's memory, and a list of what was deleted."""

    def __init__(self, path: Path) -> None:
        database.create(path / "catalog.db")
        self.db = Database(path / "catalog.db", journalled=False)
        self.kernel: set[int] = set()
        self.removed: list[int] = []
        open_files = SimpleNamespace(delete_ram_files=self.removed.extend)
        wake_channel = SimpleNamespace(notify=lambda _: True)
        self.orphans = OrphanTracker(cast(Any, SimpleNamespace(db=self.db, open_files=open_files, wake_channel=wake_channel)))

    def file(self, name: bytes) -> tuple[int, int]:
        """(inode, content) of a new file that the kernel knows."""
        with self.db.transaction():
            inode = namespace.create(self.db, ROOT, name, 0o100644, uid=0, gid=0).id
            content = self.db.insert("INSERT INTO content (inode, generation, state) VALUES (?, 1, 2)", inode)
        self.kernel.add(inode)
        return inode, content

    def unlink(self, name: bytes) -> None:
        with self.db.transaction():
            inode = namespace.unlink(self.db, ROOT, name)
        self.orphans.track(inode)

    def forget(self, *inodes: int) -> None:
        self.kernel.difference_update(inodes)
        self.orphans.forget([(inode, 1) for inode in inodes])

    def knows(self, inode: int) -> bool:
        return inode in self.kernel

    def exists(self, inode: int) -> bool:
        return self.db.row("SELECT 1 FROM inode WHERE id=?", inode) is not None


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.db.close()


def beside_reaper(test: Callable[..., Any]) -> Callable[..., None]:
    """Turn an async test of `world` into one that runs beside the reaper."""

    @functools.wraps(test)
    def run(world: World) -> None:
        async def main() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(world.orphans.run_deletion, world.knows)
                with trio.fail_after(60):
                    await test(world)
                nursery.cancel_scope.cancel()

        trio.run(main)

    return run


async def until(condition: Any) -> None:
    while not condition():
        await trio.sleep(0.001)


@beside_reaper
async def test_what_is_forgotten_goes_and_its_bytes_in_ram_at_once(world: World) -> None:
    inode, content = world.file(b"a")
    other, _ = world.file(b"b")
    world.unlink(b"a")
    world.forget(inode, other)
    await until(lambda: not world.exists(inode))
    await until(lambda: world.removed == [content])


def test_an_inode_forgotten_before_the_first_round_is_deleted_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    inode, content = world.file(b"a")
    marker, marked = world.file(b"b")
    world.unlink(b"a")
    world.forget(inode)

    @beside_reaper
    async def story(world: World) -> None:
        await until(lambda: not world.exists(inode))
        world.unlink(b"b")
        world.forget(marker)
        await until(lambda: not world.exists(marker))

    story(world)
    assert world.removed == [content, marked]


@beside_reaper
async def test_what_still_has_a_name_stays_when_it_is_forgotten(world: World) -> None:
    inode, _ = world.file(b"a")
    gone, _ = world.file(b"b")
    world.unlink(b"b")
    world.forget(inode, gone)
    await until(lambda: not world.exists(gone))
    assert world.exists(inode)


@beside_reaper
async def test_a_forget_that_is_older_than_a_lookup_takes_nothing(world: World) -> None:
    inode, _ = world.file(b"a")
    marker, _ = world.file(b"b")
    world.unlink(b"a")
    world.unlink(b"b")
    world.orphans.forget([(inode, 1)])  # The kernel knows it still, or again.
    world.forget(marker)
    await until(lambda: not world.exists(marker))
    assert world.exists(inode)
    world.forget(inode)
    await until(lambda: not world.exists(inode))


@beside_reaper
async def test_what_a_dead_process_left_is_found_at_start(world: World) -> None:
    forgotten, _ = world.file(b"a")
    known, _ = world.file(b"b")
    for name in (b"a", b"b"):
        with world.db.transaction():
            namespace.unlink(world.db, ROOT, name)
    world.kernel.discard(forgotten)
    await until(lambda: not world.exists(forgotten))
    assert world.exists(known)
    world.forget(known)
    await until(lambda: not world.exists(known))


@beside_reaper
async def test_many_go_in_several_changes(world: World) -> None:
    count = limits.CHANGE_ROWS_MAX + 10
    inodes = [world.file(b"%d" % number)[0] for number in range(count)]
    for number in range(count):
        world.unlink(b"%d" % number)
    world.forget(*inodes)
    await until(lambda: world.db.value("SELECT count(*) FROM inode") == 1)
    await until(lambda: len(world.removed) == count)
