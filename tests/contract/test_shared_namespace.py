"""The namespace on catalogs that share one store: what two nodes do at once comes out as if one had done it after the other (N1)."""

import errno
import random
import stat
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import trio
import trio.testing
from memory_store import MemoryEtcd, MemoryStore
from shared_catalogs import Node, Slow, async_tests, in_virtual_time, play_on_nodes, reconnect, running, settled, stored_tree

from ckptfs import limits
from ckptfs.catalog import handles, inodes, journal, namespace
from ckptfs.coherence import key_state, read
from ckptfs.coherence.keys import INODE, SharedKey
from ckptfs.coherence.read import StoreValue
from ckptfs.model import ROOT
from ckptfs.store.kv import Compare, Get, Operation, Outcome

two_nodes = async_tests(play_on_nodes)


async def both(*acts: Callable[[], Awaitable[object]]) -> list[int]:
    """Do them at once; the errno of each, 0 for success."""
    codes = [0] * len(acts)

    async def one(number: int, act: Callable[[], Awaitable[object]]) -> None:
        try:
            await act()
        except OSError as failure:
            codes[number] = failure.errno or -1

    async with trio.open_nursery() as nursery:
        for number, act in enumerate(acts):
            nursery.start_soon(one, number, act)
    return codes


@two_nodes
async def test_a_name_is_made_by_one(a: Node, b: Node) -> None:
    """O_EXCL."""
    for name in map(str, range(10)):
        assert sorted(await both(lambda name=name: a.make(name), lambda name=name: b.mkdir(name))) == [0, errno.EEXIST]  # type: ignore[misc]


@two_nodes
async def test_a_removed_file_goes_together_with_its_name(a: Node, b: Node) -> None:
    """Its first change and its removal do not fit into one transaction."""
    made = (await a.make("f")).id
    a.db.run("UPDATE inode SET mode = mode | 1 WHERE id = ?", made)
    for number in range(limits.ETCD_OPERATIONS_MAX):
        with a.db.transaction():
            namespace.create(a.db, ROOT, b"other%d" % number, stat.S_IFREG | 0o644, uid=0, gid=0)
    await a.unlink("f")
    assert len({event.revision for event in a.store.etcd.events_from(b"e/", b"j", 0) if event.item is None}) == 1
    assert b"f" not in await b.names()


@pytest.mark.parametrize("is_ours", [True, False])
@two_nodes
async def test_what_the_mover_had_asked_before_a_removal_does_not_bring_the_file_back(a: Node, b: Node, is_ours: bool) -> None:
    """P6: it would have no name, and the drain would wait for it. The mover does not know what the mount removes."""
    number = (await (a if is_ours else b).make("f")).id
    await a.stat("f")
    keys_ = [SharedKey(INODE, number)]
    answer = read.parse_outcome(keys_, a.store.read(read.build_gets(keys_)))
    await a.unlink("f")
    await settled([a])
    read.apply_values(a.db, answer, read.RecentDeletes())
    assert not inodes.get(a.db, number).nlink
    if is_ours:
        assert namespace.delete_forgotten(a.db, [number])
        read.apply_values(a.db, answer, read.RecentDeletes())
        assert a.db.value("SELECT 1 FROM inode WHERE id = ?", number) is None


@two_nodes
async def test_what_the_mover_reads_of_a_file_leaves_the_bytes_of_its_writer_alone(a: Node, b: Node) -> None:
    """P2: a scan applies what another node has changed of a file that a program on this one writes."""
    number = (await a.make("f")).id
    with key_state.change_unmarked(a.db):
        handles.insert(a.db, number, None, is_writer=True, backing_id=0)
        a.db.run("UPDATE inode SET size = 7 WHERE id = ?", number)
    await b.set("f", mode=stat.S_IFREG | 0o600)
    keys_ = [SharedKey(INODE, number)]
    read.apply_values(a.db, read.parse_outcome(keys_, a.store.read(read.build_gets(keys_))), read.RecentDeletes())
    found = inodes.get(a.db, number)
    assert (stat.S_IMODE(found.mode), found.size) == (0o600, 7)
    handles.delete_all(a.db)
    await a.grow("f", 8, 1)


@two_nodes
async def test_what_one_changes_the_other_sees(a: Node, b: Node) -> None:
    await a.mkdir("d")
    made = await b.make("d/f")
    assert (await a.stat("d/f")).id == made.id and await a.names("d") == [b"f"]
    await a.set("d/f", mode=0o600)
    assert (await b.stat("d/f")).mode & 0o777 == 0o600
    await b.rename("d", "e")
    assert await a.names() == [b"e"] and (await a.stat("e/f")).id == made.id
    await a.link("e/f", "g")
    assert (await b.stat("g")).nlink == 2
    await b.unlink("e/f")
    assert (await a.stat("g")).nlink == 1
    await a.rmdir("e")
    assert await b.names() == [b"g"]


@two_nodes
async def test_a_name_is_never_missing_while_another_file_takes_its_place(a: Node, b: Node) -> None:
    """P2: nor when that happens between two questions, of the name and of what it leads to; and once more between the next two."""
    await a.make("x")
    others = ["y", "z"]
    for name in others:
        await a.make(name)
    told = b.sharing._load_values

    async def slowly(keys: list[SharedKey]) -> dict[SharedKey, StoreValue]:
        found = await told(keys)
        if others:
            await a.rename(others.pop(), "x")
        return found

    b.sharing._load_values = slowly  # type: ignore[method-assign]
    assert (await b.stat("x")).id == (await a.stat("x")).id and not others


@two_nodes
async def test_an_older_answer_brings_no_name_back_into_a_listing(a: Node, b: Node) -> None:
    """P7: the tracker of sets asked before a rename, and its answer is applied while a program lists the directory after it."""
    await a.make("ckpt.tmp")
    load_values, is_listed = b.sharing._load_values, trio.Event()
    is_first = True

    async def slowly(keys: list[SharedKey]) -> dict[SharedKey, StoreValue]:
        nonlocal is_first
        is_older, is_first = is_first, False
        found = await load_values(keys)
        if is_older:
            await is_listed.wait()
        else:
            is_listed.set()
            await trio.testing.wait_all_tasks_blocked()
        return found

    b.sharing._load_values = slowly  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(b.sharing.refresh_directory, ROOT)
        await trio.testing.wait_all_tasks_blocked(0.001)
        await a.rename("ckpt.tmp", "ckpt")
        assert await b.names() == [b"ckpt"]


@two_nodes
async def test_success_takes_one_round_trip(a: Node, b: Node) -> None:
    await a.mkdir("d")
    for change in (lambda: a.make("d/f"), lambda: a.rename("d/f", "d/g"), lambda: a.unlink("d/g"), lambda: a.mkdir("d/e")):
        before = dict(a.sharing.counts)
        await change()
        assert a.sharing.counts["commits"] == before["commits"] + 1
        assert a.sharing.counts["conflicts"] == before["conflicts"]


@two_nodes
async def test_a_directory_moves_with_what_the_other_made_in_it(a: Node, b: Node) -> None:
    await a.mkdir("d")
    await b.make("d/f")
    await a.mkdir("e")
    codes = await both(lambda: a.rename("d", "e/d"), lambda: b.make("d/g"))
    assert codes[0] == 0 and codes[1] in (0, errno.ENOENT)
    assert set(await b.names("e/d")) >= {b"f"}


@two_nodes
async def test_no_loop(a: Node, b: Node) -> None:
    """mv a b/ on one node, mv b a/ on the other."""
    for name in ("a", "b", "a/1", "b/1"):
        await a.mkdir(name)
    await b.names()
    codes = await both(lambda: a.rename("a", "b/1/a"), lambda: b.rename("b", "a/1/b"))
    assert sorted(codes) in ([0, errno.ENOENT], [0, errno.EINVAL])


@two_nodes
async def test_rmdir_against_create(a: Node, b: Node) -> None:
    for number in range(10):
        await a.mkdir(f"{number}")
        await b.stat(f"{number}")
        codes = await both(lambda n=number: a.rmdir(f"{n}"), lambda n=number: b.make(f"{n}/f"))  # type: ignore[misc]
        assert codes in ([0, errno.ENOENT], [errno.ENOTEMPTY, 0])


@two_nodes
async def test_link_against_unlink(a: Node, b: Node) -> None:
    for number in range(10):
        await a.make(f"{number}")
        await b.stat(f"{number}")
        codes = await both(lambda n=number: a.unlink(f"{n}"), lambda n=number: b.link(f"{n}", f"l{n}"))  # type: ignore[misc]
        assert codes in ([0, 0], [0, errno.ENOENT])
        assert ((f"l{number}".encode() in await a.names()) == (codes[1] == 0)) and f"{number}".encode() not in await a.names()


@two_nodes
async def test_chmod_and_close_at_once_both_count(a: Node, b: Node) -> None:
    await a.make("f")
    await both(lambda: a.set("f", mode=0o400), lambda: b.grow("f", 77, 88))
    found = await a.stat("f")
    assert (found.mode & 0o777, found.size, found.mtime_ns) == (0o400, 77, 88)


@two_nodes
async def test_a_disconnected_node_reintegrates(a: Node, b: Node) -> None:
    """P1: what was done alone is there afterwards; the file closed later has the name, the other stays beside it; directories are one."""
    await a.build("gone", "emptied/")
    await b.names()
    await b.stat("gone")
    b.cut(True)
    await b.make("x")
    await b.grow("x", 1, 2**62)
    await b.build("d/", "d/b", "emptied/kept")
    await b.grow("gone", 5, 5)
    await a.make("x")
    await a.grow("x", 2, 1)
    await a.build("d/", "d/a")
    await a.rmdir("emptied")
    await a.unlink("gone")
    assert b.sharing.is_disconnected and not a.sharing.is_disconnected
    await reconnect(a, b)
    assert await a.names() == [b"d", b"emptied", b"gone", b"x", b"x.ckptfs-conflict-n2-1"]
    assert await a.names("d") == [b"a", b"b"] and await a.names("emptied") == [b"kept"]
    assert (await a.stat("x")).size == 2 and (await a.stat("x.ckptfs-conflict-n2-1")).size == 1


@two_nodes
async def test_an_answer_that_was_lost_is_not_done_twice(a: Node, b: Node) -> None:
    """The store has taken a rename and a removal, and nobody heard of it."""
    await a.build("d/", "d/f")
    store = a.store
    assert isinstance(store, Slow)
    for change in (lambda: a.rename("d/f", "g"), lambda: a.unlink("g"), lambda: a.mkdir("e"), lambda: a.rmdir("e")):
        store.lose(1)
        await change()
    assert await b.names() == [b"d"]


@two_nodes
async def test_what_other_nodes_have_is_forgotten_in_time(a: Node, b: Node) -> None:
    """A node's catalog does not grow with the cluster; what was forgotten is found again."""
    await a.mkdir("d")
    for number in range(50):
        await a.make(f"d/{number}")
    assert len(await b.names("d")) == 50
    await b.make("own")
    assert read.is_cache_full(b.db, 20)
    after = 0
    while after := read.delete_unneeded(b.db, after, 7):
        pass
    read.delete_unneeded(b.db, 0)
    assert not read.is_cache_full(b.db, 20)
    assert key_state.get_cached(b.db, SharedKey(INODE, ROOT)).revision and key_state.count_dirty(b.db) == 0
    assert len(await b.names("d")) == 50 and (await b.stat("own")).nlink == 1


@pytest.mark.parametrize("count", [40, 300])
@two_nodes
async def test_many_changes_go_in_several_transactions(a: Node, b: Node, count: int) -> None:
    a.cut(True)
    await a.mkdir("d")
    for number in range(count):
        await a.make(f"d/{number}")
    for number in range(0, count, 3):
        await a.rename(f"d/{number}", f"m{number}")
    a.cut(False)
    await settled([a])
    assert len(await b.names()) == 1 + len(range(0, count, 3))


def start_next(node: Node, directory: Path) -> Node:
    """The next process of a node, on the catalog as it is now: what this process still does is as if it had died before it noted that."""
    (directory / "again").mkdir()
    node.db.connection.execute("VACUUM INTO ?", (str(directory / "again" / "catalog.db"),))
    return Node(directory / "again", node.number, node.store)


@two_nodes
async def test_a_process_that_died_before_it_noted_its_success_did_it_all_the_same(a: Node, b: Node, tmp_path: Path) -> None:
    """P8: the store has taken the change, the catalog does not know; the next process finds out, and takes nothing back."""
    await a.make("old")
    a.cut(True)
    made = await a.mkdir("d")
    await a.unlink("old")
    next_one = start_next(a, tmp_path)
    await reconnect(a)
    next_one.db.run("DELETE FROM meta WHERE key = 'island'")
    next_one.sharing.disconnected_ns = 0

    async def look() -> None:
        assert await next_one.sharing.wait_published([(ROOT, b"d"), (ROOT, b"old")])
        assert (await next_one.stat("d")).id == made.id and await next_one.names() == [b"d"]

    await running([next_one], look)


@two_nodes
async def test_the_next_process_takes_back_what_one_that_died_has_published(a: Node, b: Node, tmp_path: Path) -> None:
    """P8: the store has taken a new file, a rename and a mode. The catalog does not know, and by now it is as it was before."""
    await a.build("mode", "d/", "d/name")
    a.cut(True)
    await a.make("f")
    await a.rename("d", "e")
    await a.set("mode", mode=stat.S_IFREG | 0o600)
    next_one = start_next(a, tmp_path)
    await reconnect(a)

    async def undo() -> None:
        await next_one.unlink("f")
        await next_one.rename("e", "d")
        await next_one.set("mode", mode=stat.S_IFREG | 0o644)
        await next_one.unlink("d/name")
        await next_one.rmdir("d")
        await reconnect(next_one)
        assert await b.names() == [b"mode"] and (await b.stat("mode")).mode == stat.S_IFREG | 0o644

    assert next_one.sharing.is_disconnected
    await running([next_one], undo)


@two_nodes
async def test_the_next_process_replaces_a_directory_that_one_that_died_has_published(a: Node, b: Node, tmp_path: Path) -> None:
    """P8: it removes the directory before it learns that others see it, and the return ends."""
    await a.make("before")
    a.cut(True)
    await a.build("d/", "d/old")
    key_state.mark_returning(a.db)
    next_one = start_next(a, tmp_path)
    await reconnect(a)

    async def replace() -> None:
        await next_one.unlink("d/old")
        await next_one.rmdir("d")
        assert not namespace.delete_forgotten(next_one.db, namespace.list_orphans(next_one.db)), "the store may have both"
        await next_one.build("d/", "d/ours")
        await b.make("d/theirs")
        await reconnect(next_one)
        assert {*await b.tree()} >= {b"/d", b"/d/theirs"} and sum(path.endswith(b"/ours") for path in await b.tree()) == 1

    await running([next_one], replace)


@pytest.mark.parametrize("others", ["move", "remove", "fill"])
@two_nodes
async def test_the_next_process_leaves_a_directory_where_others_put_it(a: Node, b: Node, others: str, tmp_path: Path) -> None:
    """P8: the process died before it learned that others see its rename. Another node has moved, removed or filled the directory since."""
    await a.build("d.tmp/", "other/")
    a.cut(True)
    await a.rename("d.tmp", "d")
    key_state.mark_returning(a.db)
    next_one = start_next(a, tmp_path)
    await reconnect(a)
    if others == "remove":
        await b.rmdir("d")
    else:
        await b.rename("d", "other/e" if others == "move" else "e")

    async def act() -> None:
        if others == "fill":
            await b.make("e/f")
            await next_one.rmdir("d")
        await reconnect(next_one)

    await running([next_one], act)
    expected = {"move": {b"/other", b"/other/e"}, "remove": {b"/other", b"/d"}, "fill": {b"/other", b"/e", b"/e/f"}}
    assert {*await b.tree()} == expected[others]


@two_nodes
async def test_a_directorys_times_do_not_go_back(a: Node, b: Node) -> None:
    """An island tells of an older change after a newer one was told: the newer one stays, everywhere."""
    made = await a.mkdir("d")
    await b.names("d")
    b.cut(True)
    await b.make("d/b")
    await a.make("d/a")
    newest = (await a.stat("d")).mtime_ns
    assert newest > inodes.get(b.db, made.id).mtime_ns
    await reconnect(a, b)
    for node in (a, b, a, b):
        assert (await node.stat("d")).mtime_ns == newest
        await settled([a, b])


def test_a_change_that_was_rolled_back_leaves_no_journal_row(tmp_path: Path) -> None:
    """P6: a name that another node made first never was, nor what was to become of it on the PFS."""
    etcd = MemoryEtcd()
    nodes = [Node(tmp_path / str(n), n, Slow(etcd, random.Random(n)), journalled=True) for n in (1, 2)]
    a, b = nodes

    async def race() -> None:
        await a.make("gone")
        await b.stat("gone")
        codes = await both(lambda: a.mkdir("d"), lambda: b.mkdir("d"))
        assert sorted(codes) == [0, errno.EEXIST]
        rows = [(row.op, row.name) for node in nodes for row in journal.list_oldest(node.db, 100)]
        assert sorted(rows) == [("make", b"d"), ("make", b"gone")]

    in_virtual_time(lambda: running(nodes, race))


@two_nodes
async def test_a_directory_that_comes_back_has_the_newest_of_the_names_that_were_known(a: Node, b: Node) -> None:
    """Others had renamed it, which the island had seen, and asked for its former name no more."""
    await a.mkdir("former")
    await b.stat("former")
    await a.rename("former", "now")
    await b.stat("now")
    b.cut(True)
    await b.make("now/file")
    await a.rmdir("now")
    await reconnect(a, b)
    assert set(await a.names()) == {b"now"} and await a.names("now") == [b"file"]


@two_nodes
async def test_a_directory_that_comes_back_has_a_name_also_where_its_own_was_given_away(a: Node, b: Node) -> None:
    """A disconnected node makes a directory in one that others delete, and whose name they give to something else."""
    await a.build("into/")
    await b.names()
    b.cut(True)
    await b.build("into/made/", "into/made/file")
    await a.rmdir("into")
    await a.make("into")
    await reconnect(a, b)
    names = await a.names()
    assert names == [b"into", b"into.ckptfs-conflict-n2-1"]
    assert await a.names("into.ckptfs-conflict-n2-1/made") == [b"file"]


class Held(MemoryStore):
    """Commits wait for `release` while `held`; what is read is answered."""

    held = False

    def __init__(self, etcd: MemoryEtcd) -> None:
        super().__init__(etcd)
        self._waiting: list[Callable[[], None]] = []

    def commit_soon(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = 3.0
    ) -> Future[Outcome]:
        if not self.held:
            return super().commit_soon(compares, changes, otherwise, timeout_s=timeout_s)
        future: Future[Outcome] = Future()
        self._waiting.append(lambda: future.set_result(self.commit(compares, changes, otherwise)))
        return future

    def release(self) -> None:
        self.held = False
        for act in self._waiting:
            act()


def test_a_file_created_while_the_target_of_a_refused_move_is_removed(tmp_path: Path) -> None:
    """P1: a file gets the name of a directory that another node removed, while a move into that is on its way and will be refused."""
    etcd = MemoryEtcd()
    store = Held(etcd)
    a, b = Node(tmp_path / "1", 1, MemoryStore(etcd)), Node(tmp_path / "2", 2, store)

    async def act() -> None:
        await a.build("d/", "moved/")
        await b.names()
        store.held = True
        made: list[int] = []

        async def make() -> None:
            made.append((await b.make("d")).id)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(both, lambda: b.rename("moved", "d/moved"))
            await trio.testing.wait_all_tasks_blocked()
            await a.rmdir("d")
            nursery.start_soon(make)
            await trio.testing.wait_all_tasks_blocked()
            store.release()
        await settled([a, b])
        assert (await a.stat("d")).id == (await b.stat("d")).id == made[0]
        assert await a.tree() == await b.tree() == stored_tree(etcd)

    in_virtual_time(lambda: running([a, b], act))


@two_nodes
async def test_a_name_that_another_node_gave_goes_with_the_file_s_move(a: Node, b: Node) -> None:
    """F4: the file has one link afterwards, although this node knew it under a third name only."""
    made = await a.make("old")
    await b.rename("old", "new")
    await a.sharing.refresh_directory(ROOT)
    assert (await a.stat("new")).id == made.id
    await b.rename("new", "newer")
    await a.sharing.refresh_directory(ROOT)
    with a.db.transaction() as db:
        namespace.rename(db, ROOT, b"newer", ROOT, b"newest", 0)
    assert await a.sharing.wait_published([(ROOT, b"newer"), (ROOT, b"newest")])
    assert [(await node.stat("newest")).nlink for node in (a, b)] == [1, 1]
    assert (await a.unlink("newest")).nlink == 0


@two_nodes
async def test_a_name_that_another_node_gave_away_is_free_when_its_file_is_deleted(a: Node, b: Node) -> None:
    """P1: this node has not looked at the name since. Without etcd it asks nobody."""
    await a.build("old", "new")
    await b.link("old", "last")
    await b.stat("old")
    await a.rename("new", "old")
    await b.unlink("last")
    namespace.delete_forgotten(b.db, namespace.list_orphans(b.db))
    b.cut(True)
    made = await b.make("tmp")
    await b.rename("tmp", "old")
    assert (await b.stat("old")).id == made.id
    await reconnect(a, b)
