"""P1: what an island changed goes in several transactions when it is much. A name and the files that get or lose it go together."""

import random
from collections.abc import Awaitable, Callable
from itertools import groupby
from pathlib import Path

import trio
from memory_store import MemoryEtcd
from shared_catalogs import Node, Slow, replayed, running, settled, stored_tree

from ckptfs import limits
from ckptfs.coherence import keys

MANY = limits.ETCD_OPERATIONS_MAX


def play(place: Path, act: Callable[[Node, Node, MemoryEtcd], Awaitable[None]]) -> None:
    """Two nodes; `act` cuts off the second one."""
    etcd = MemoryEtcd()

    async def main() -> None:
        nodes = [Node(place / str(number), number, Slow(etcd, random.Random(number))) for number in (1, 2)]
        await running(nodes, lambda: act(*nodes, etcd))

    replayed(0, main)


async def cut(node: Node) -> None:
    node.cut(True)
    while not node.sharing.is_disconnected:
        await node.sharing.refresh_name(1, b"anything")
        await trio.sleep(0.1)


async def returned(*nodes: Node) -> None:
    for node in nodes:
        node.cut(False)
    await settled(nodes)


def test_what_gives_way_to_a_later_file_loses_its_name_with_that(tmp_path: Path) -> None:
    async def act(a: Node, b: Node, etcd: MemoryEtcd) -> None:
        await cut(b)
        await b.make("best")
        for number in range(MANY):
            await b.make(f"other{number}")
        await b.grow("best", 2, 2**62)
        theirs = await a.make("best")
        await returned(a, b)
        beside = await a.stat("best.ckptfs-conflict-n2-1")
        assert (beside.id, beside.nlink) == (theirs.id, 1)
        assert await a.tree() == await b.tree() == stored_tree(etcd)

    play(tmp_path, act)


def test_what_was_renamed_and_changed_much_later_is_called_what_it_is(tmp_path: Path) -> None:
    async def act(a: Node, b: Node, etcd: MemoryEtcd) -> None:
        await b.make("old")
        await cut(b)
        await b.rename("old", "new")
        for number in range(MANY):
            await b.make(f"other{number}")
        await b.set("new", mode=0o600)
        await returned(a, b)
        assert (await a.stat("new")).nlink == 1
        assert await a.tree() == await b.tree() == stored_tree(etcd)

    play(tmp_path, act)


def test_what_was_deleted_there_and_has_new_names_here_keeps_them_all(tmp_path: Path) -> None:
    async def act(a: Node, b: Node, etcd: MemoryEtcd) -> None:
        await b.make("old")
        await cut(b)
        await b.link("old", "early")
        for number in range(MANY):
            await b.make(f"other{number}")
        await b.unlink("old")
        for number in range(MANY):
            await b.make(f"more{number}")
        await b.link("early", "late")
        await a.make("theirs")
        await a.rename("theirs", "old")
        await returned(a, b)
        assert (await a.stat("early")).id == (await a.stat("late")).id != (await a.stat("old")).id
        assert await a.tree() == await b.tree() == stored_tree(etcd)

    play(tmp_path, act)


def test_a_directory_that_lost_what_has_another_name_by_now_goes(tmp_path: Path) -> None:
    """The removal and what it waits for do not fit into one transaction."""

    async def act(a: Node, b: Node, etcd: MemoryEtcd) -> None:
        await b.mkdir("old")
        await b.mkdir("old/moved")
        await cut(b)
        await b.rename("old/moved", "moved")
        await b.rmdir("old")
        await b.mkdir("new")
        await b.rename("moved", "new/moved")
        await returned(a, b)
        assert await a.names() == [b"new"] and await a.names("new") == [b"moved"]
        assert await a.tree() == await b.tree() == stored_tree(etcd)

    play(tmp_path, act)


def test_a_directory_that_is_left_and_removed_has_its_links_where_others_use_it(tmp_path: Path) -> None:
    """What leaves it is told before its removal, which cannot be."""

    async def act(a: Node, b: Node, etcd: MemoryEtcd) -> None:
        await b.mkdir("used")
        await b.mkdir("used/moved")
        await cut(b)
        await b.rename("used/moved", "moved")
        await b.rmdir("used")
        await a.make("used/theirs")
        await returned(a, b)
        assert (await b.stat("used")).nlink == 2
        assert await a.tree() == await b.tree() == stored_tree(etcd)

    play(tmp_path, act)


def test_a_file_that_loses_all_names_one_after_the_other_keeps_what_others_gave_it(tmp_path: Path) -> None:
    async def act(a: Node, b: Node, etcd: MemoryEtcd) -> None:
        await b.make("first")
        await b.link("first", "last")
        await cut(b)
        await b.unlink("first")
        for number in range(MANY):
            await b.make(f"other{number}")
        await b.unlink("last")
        await a.link("last", "theirs")
        await returned(a, b)
        assert (await b.stat("theirs")).nlink == 1
        assert await a.tree() == await b.tree() == stored_tree(etcd)

    play(tmp_path, act)


def test_nobody_sees_a_directory_under_two_names(tmp_path: Path) -> None:
    """What has its former name by now is told much later."""

    async def act(a: Node, b: Node, etcd: MemoryEtcd) -> None:
        moved = (await b.mkdir("old")).id
        await cut(b)
        await b.rename("old", "new")
        for number in range(MANY):
            await b.make(f"other{number}")
        await b.make("old")
        await returned(a, b)
        names: dict[bytes, int] = {}
        for _, events in groupby(etcd.events_from(b"e/", b"e0", 0), key=lambda event: event.revision):
            names |= {event.key: (keys.decode_value(event.item.value if event.item else None) or {"child": 0})["child"] for event in events}
            assert list(names.values()).count(moved) == 1
        assert await a.tree() == await b.tree() == stored_tree(etcd)

    play(tmp_path, act)


def test_what_was_replaced_by_what_comes_back_does_not_get_its_name_again(tmp_path: Path) -> None:
    async def act(a: Node, b: Node, etcd: MemoryEtcd) -> None:
        await b.mkdir("replaced")
        await b.mkdir("kept")
        await b.make("replaced/file")
        await cut(b)
        await b.rename("replaced/file", "kept/file")
        await b.rename("kept", "replaced")
        await a.rmdir("kept")
        await a.rename("replaced/file", "file")
        await returned(a, b)
        assert {b"file", b"replaced"} <= set(await a.names())
        assert await a.tree() == await b.tree() == stored_tree(etcd)

    play(tmp_path, act)


def test_what_comes_back_is_told_with_a_name(tmp_path: Path) -> None:
    """It was written early, and its name is told again when it turns out that it was deleted there."""

    async def act(a: Node, b: Node, etcd: MemoryEtcd) -> None:
        kept = await b.make("name")
        await cut(b)
        await b.grow("name", 2, 2)
        for number in range(MANY):
            await b.make(f"other{number}")
        await a.unlink("name")
        await a.mkdir("name")
        await returned(a, b)
        assert (await a.stat("name.ckptfs-conflict-n2-1")).id == kept.id
        assert await a.tree() == await b.tree() == stored_tree(etcd)

    play(tmp_path, act)


def test_a_directory_that_was_moved_lives_on_although_an_island_has_replaced_it(tmp_path: Path) -> None:
    """Others had given it another name before."""

    async def act(a: Node, b: Node, etcd: MemoryEtcd) -> None:
        moved = await b.mkdir("replaced")
        await b.mkdir("new")
        await cut(b)
        await b.rename("new", "replaced")
        await a.rename("replaced", "moved")
        await returned(a, b)
        found = await b.stat("moved")
        assert (found.id, found.nlink) == (moved.id, 2) and (await b.stat("replaced")).id != moved.id
        assert await a.tree() == await b.tree() == stored_tree(etcd)

    play(tmp_path, act)
