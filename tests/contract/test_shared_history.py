"""The history of sets on catalogs that share one store: names, links and separations of several nodes at once (T6, N1)."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from ckptfs_daemon.mount.opening import separation
from ckptfs_daemon.mount.sets.member_reader import MountMemberReader
from memory_store import MemoryStore
from shared_catalogs import Node, async_tests, play_on_nodes, reconnect, settled, stored
from shared_sets import delete_whole_set, keep, make_closed, read_history, separate

from ckptfs.catalog import contents, handles, history, inodes, namespace, peer_copies, retention_state, set_members
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import SetRecord
from ckptfs.catalog.peer_copies import KnownNode
from ckptfs.coherence import key_state, keys
from ckptfs.coherence.key_state import CachedValue
from ckptfs.coherence.keys import CHOSEN_PREFIX, CONTENT, INODE, SharedKey, decode_chosen_key
from ckptfs.model import ROOT, ContentState, Tier
from ckptfs.store.kv import Get, Put, prefix_end

two_nodes = async_tests(play_on_nodes)


@two_nodes
async def test_a_set_of_one_node_is_seen_by_the_other(a: Node, b: Node) -> None:
    file = await a.make("f1")
    await keep(a, "f1")
    assert await read_history(b) == {b"f*/f@1/f1": file.id}
    seen = await b.stat("f1")
    assert (seen.nlink, seen.history, seen.shown_nlink) == (2, 1, 1) and await b.names() == [b"f1"]
    (series,) = history.list_series(b.db)
    assert [one.record.name for one in history.list_sets(b.db, series.directory)] == [b"f"]
    with a.db.transaction():
        inodes.set_internal_xattr(a.db, history.list_sets(a.db, series.directory)[0].directory, history.PIN_XATTR, b"1")
    await settled([a])
    await read_history(b)
    for one in history.list_sets(b.db, series.directory):
        await b.sharing.refresh_inode(one.directory)
    assert history.list_sets(b.db, series.directory)[0].is_pinned


@two_nodes
async def test_another_node_orders_the_recorded_sets_by_their_epoch(a: Node, b: Node) -> None:
    """N2: all versions record the step first, which is what is shown."""
    pattern = b"epoch_*_iter_*.pt"
    for number, (epoch, step) in enumerate(((1, 900), (2, 200)), 1):
        name = f"epoch_{epoch}_iter_{step}.pt"
        await a.make(name)
        await keep(a, name, number=number, name=name.encode(), pattern=pattern, numbers=(step, epoch))
    await read_history(b)
    context: Any = SimpleNamespace(db=b.db, shared_namespace=b.sharing)
    reader = MountMemberReader(context, SimpleNamespace(refresh_inode=b.sharing.refresh_inode))  # type: ignore[arg-type]
    known = await reader.load_known_sets(ROOT, pattern)
    assert sorted(one.numbers for one in known.sets) == [(200, 2), (900, 1)]
    (newest,) = reader.list_recently_named()
    found = history.get_set(b.db, newest)
    assert found is not None and (found.record.name, found.record.numbers) == (b"epoch_2_iter_200.pt", (200, 2))


@two_nodes
async def test_the_key_of_a_chosen_set_is_there_as_long_as_the_set(a: Node, b: Node) -> None:
    """D7: nodes that hold files of it watch these keys; one that starts later reads them."""

    def list_chosen() -> list[int]:
        found = a.sharing._store.read([Get(CHOSEN_PREFIX, prefix_end(CHOSEN_PREFIX))])
        return [decode_chosen_key(item.key) for item in found.results[0]]

    await a.make("f1")
    await keep(a, "f1")
    (series,) = history.list_series(a.db)
    (made,) = history.list_sets(a.db, series.directory)
    assert list_chosen() == []
    with a.db.transaction():
        retention_state.mark_set(a.db, made.directory, retention_state.CHOSEN_XATTR)
    await settled([a])
    assert list_chosen() == [made.directory]
    await read_history(b)
    await b.sharing.refresh_inode(made.directory)
    with b.db.transaction():
        delete_whole_set(b.db, made.directory)
    await settled([b])
    assert list_chosen() == []


@pytest.mark.parametrize("raw", [b"h/", b"h/0", b"h/ffffffffffffffff", b"h/000000000000000A", b"h/00000000000000zz", b"h/0000000000000000"])
def test_a_key_that_names_no_set_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        decode_chosen_key(raw)


@two_nodes
async def test_a_file_whose_history_was_never_read_is_known_to_be_in_it(a: Node, b: Node) -> None:
    await a.make("f1")
    await keep(a, "f1")
    seen = await b.stat("f1")
    assert (seen.nlink, seen.history) == (2, 1)
    await b.unlink("f1")
    assert inodes.get(b.db, seen.id).shown_nlink == 0 and list((await read_history(a)).values()) == [seen.id]


@two_nodes
@pytest.mark.parametrize("has_read", [True, False])
async def test_another_node_separates_a_file(a: Node, b: Node, has_read: bool) -> None:
    file = await a.make("f1")
    await keep(a, "f1")
    if has_read:
        await read_history(b)
    after = await separate(b, "f1")
    assert (after.id, after.nlink, after.history) == (file.id, 1, 0)
    for node in (a, b):
        ((path, kept),) = (await read_history(node)).items()
        assert path == b"f*/f@1/f1" and kept != file.id
        assert (inodes.get(node.db, kept).nlink, inodes.get(node.db, kept).history) == (1, 1)
        assert (await node.stat("f1")).id == file.id


@two_nodes
async def test_two_nodes_separate_one_file_at_once(a: Node, b: Node) -> None:
    file = await a.make("f1")
    await keep(a, "f1")
    await read_history(b)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(separate, a, "f1")
        nursery.start_soon(separate, b, "f1")
    await settled([a, b])
    kept = [await read_history(node) for node in (a, b)]
    assert kept[0] == kept[1] and len(kept[0]) == 1 and file.id not in kept[0].values()
    assert [(await node.stat("f1")).history for node in (a, b)] == [0, 0]


@two_nodes
async def test_two_nodes_make_the_same_set_and_one_gives_up(a: Node, b: Node) -> None:
    await a.make("f1")
    codes = []

    async def make(node: Node) -> None:
        try:
            await keep(node, "f1")
        except OSError as failure:
            codes.append(failure.errno)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(make, a)
        nursery.start_soon(make, b)
    kept = [await read_history(node) for node in (a, b)]
    assert kept[0] == kept[1] and len(kept[0]) == 1 and len(codes) == 1
    assert (await a.stat("f1")).history == 1


@pytest.mark.parametrize("theirs", [b"f", b"ff"])
@pytest.mark.parametrize("is_series_new", [False, True])
@two_nodes
async def test_the_sets_of_an_island_get_numbers_that_no_other_set_has(a: Node, b: Node, is_series_new: bool, theirs: bytes) -> None:
    """T6: a set never changes, and no number is used twice."""
    files = {name: (await a.make(name)).id for name in ("f0", "f1", "f2", "f3", *(f"other{number}" for number in range(100)))}
    first = 1 if is_series_new else 2
    if not is_series_new:
        await keep(a, "f0")
    await b.names()
    await read_history(b)
    b.cut(True)
    for number, name in enumerate(["f1", "f2"], first):
        await keep(b, name, number=number)
    for name in list(files)[4:]:
        await b.unlink(name)
    with b.db.transaction() as db:
        series = history.list_series(db)[0].directory
        history.set_rollback(db, series, history.Rollback(first, 5))
    await keep(a, "f3", number=first, name=theirs)
    await reconnect(a, b)
    kept = {f"{theirs.decode()}@{first}/f3": "f3", f"f@{first + 2}/f1": "f1", f"f@{first + 3}/f2": "f2"}
    kept |= {} if is_series_new else {"f@1/f0": "f0"}
    for node in (a, b):
        assert await read_history(node) == {f"f*/{path}".encode(): files[name] for path, name in kept.items()}
        (known,) = history.list_series(node.db)
        found = history.list_sets(node.db, known.directory)
        assert [one.record.number for one in found] == [first + 3, first + 2, first] + ([] if is_series_new else [1])
        assert history.get_next_number(node.db, known.directory) == first + 4
        assert is_series_new or known.rollback == history.Rollback(first + 2, 5)


@two_nodes
async def test_a_set_whose_directory_is_in_the_store_before_its_name_gets_another_number(a: Node, b: Node) -> None:
    """T6: as after a transaction of a return that had no room for the name."""
    for name in ("f0", "f1", "f2"):
        await a.make(name)
    await keep(a, "f0")
    await b.names()
    await read_history(b)
    b.cut(True)
    await keep(b, "f1", number=2)
    series = history.list_series(b.db)[0].directory
    key = SharedKey(INODE, history.list_sets(b.db, series)[0].directory)
    raw = keys.encode_value(keys.get_value(b.db, key))
    assert raw is not None
    revision = MemoryStore(a.store.etcd).commit([], [Put(keys.encode_key(key), raw)]).revision
    key_state.set_cached(b.db, key, CachedValue(revision, raw))
    await keep(a, "f2", number=2)
    await reconnect(a, b)
    for node in (a, b):
        assert set(await read_history(node)) == {b"f*/f@1/f0", b"f*/f@2/f2", b"f*/f@3/f1"}
        assert [one.record.number for one in history.list_sets(node.db, series)] == [3, 2, 1]


@pytest.mark.parametrize("is_series_new", [False, True])
@pytest.mark.parametrize("written", ["f1", "g99"])
@two_nodes
async def test_a_set_of_an_island_goes_if_others_wrote_a_file_of_it(a: Node, b: Node, is_series_new: bool, written: str) -> None:
    """P7: it would show a mixture of two saves. Its names need several transactions, and the last one may find that out."""
    files = ["f1", *(f"g{number}" for number in range(100))]
    for name in ("f0", *files):
        await a.make(name)
    if not is_series_new:
        await keep(a, "f0")
    await b.names()
    await read_history(b)
    b.cut(True)
    await keep(b, *files, number=2)
    await write_file(a, written)
    await reconnect(a, b)
    for node in (a, b):
        assert list(await read_history(node)) == ([] if is_series_new else [b"f*/f@1/f0"])
        assert sorted(await node.names()) == sorted(name.encode() for name in ("f0", *files))
        assert not any(history.list_unfinished(node.db, one.directory) for one in history.list_series(node.db))


@pytest.mark.parametrize("names", [["f1"], ["f1", "second"]])
@two_nodes
async def test_a_file_goes_with_its_last_name_also_if_a_set_is_removed_by_its_directory(a: Node, b: Node, names: list[str]) -> None:
    """The node that removes the set has a change of the file to publish when it reads the set: it keeps a value without that name."""
    file = await a.make("f1")
    for name in names[1:]:
        await a.link("f1", name)
    await b.set("f1", mode=0o600)
    await keep(a, "f1")
    await a.rename("f1", "moved")
    key_state.mark_dirty(b.db, SharedKey(INODE, file.id))
    await b.sharing.refresh_name(ROOT, history.NAME)
    directory = history.find_root(b.db)
    for _ in range(3):
        assert directory is not None
        await b.sharing.refresh_directory(directory)
        directory = b.db.value("SELECT child FROM entry WHERE parent = ?", directory)
    with b.db.transaction() as db:
        delete_whole_set(db, history.list_sets(db, history.list_series(db)[0].directory)[0].directory)
    await settled([b])
    assert [(await node.stat("moved")).nlink for node in (a, b)] == [len(names)] * 2
    for name in ("moved", *names[1:]):
        await b.unlink(name)
    await settled([b])
    assert SharedKey(INODE, file.id) not in stored(a.store.etcd)


@two_nodes
async def test_a_set_stays_removed_if_an_island_wrote_a_file_of_it(a: Node, b: Node) -> None:
    """P7: the separation gave the file another inode in the set. A set is whole or gone."""
    for name in ("f1", "f2"):
        await a.make(name)
    await keep(a, "f1", "f2")
    await b.names()
    await read_history(b)
    series = history.list_series(b.db)[0].directory
    b.cut(True)
    await separate(b, "f1")
    with a.db.transaction() as db:
        delete_whole_set(db, history.list_sets(db, series)[0].directory)
    await reconnect(a, b)
    assert [await read_history(node) for node in (a, b)] == [{}, {}]
    assert history.list_sets(b.db, series) == [] == history.list_unfinished(b.db, series)


@two_nodes
async def test_a_set_keeps_the_bytes_of_a_file_that_an_island_wrote_meanwhile(a: Node, b: Node) -> None:
    """P7: a set never changes. The island did not know that the file belongs to one, so it did not separate the file."""
    inode = (await a.make("f1")).id
    await a.link("f1", "second")
    old = await make_closed(a, inode)
    for name in ("f1", "second"):
        await b.stat(name)
    b.cut(True)
    new = await make_closed(b, inode)
    await keep(a, "f1")
    await reconnect(a, b)
    for node in (a, b):
        ((path, kept),) = (await read_history(node)).items()
        assert (path, inodes.get(node.db, kept).content) == (b"f*/f@1/f1", old)
        shown = [await node.stat(name) for name in ("f1", "second")]
        assert [(one.content, one.nlink, one.history) for one in shown] == [(new, 2, 0)] * 2
        assert await node.names() == [b"f1", b"second"]


@pytest.mark.parametrize(("truncates", "is_forgotten"), [(True, True), (True, False), (False, False)])
@two_nodes
async def test_a_set_keeps_the_bytes_of_a_file_that_an_island_without_its_names_writes(
    a: Node, b: Node, truncates: bool, is_forgotten: bool
) -> None:
    """P7: the island cannot give the names in the history to another inode. The open does not wait for that.

    `is_forgotten`: the island has lost its RAM, and its mover knows nothing of the content any more.
    """
    inode = (await a.make("f1")).id
    old = await make_closed(a, inode)
    a.db.change("UPDATE content SET state = 2, digest = zeroblob(16) WHERE id = ?", old)
    await settled([a])
    await keep(a, "f1")
    await b.stat("f1")
    b.cut(True)
    await b.make("other")
    with b.db.transaction():
        held = contents.get_file_content(b.db, inode)
        assert held is not None and held.inode.history == 1
        context: Any = SimpleNamespace(db=b.db, shared_namespace=b.sharing)
        found = separation.separate_for_writer(context, held, truncates=truncates, request_fetch=b.sharing.run, tries=iter(()))
    new = await make_closed(b, inode)
    assert found is held and not contents.mark_previous_doomed(b.db, inode, new)
    if is_forgotten:
        with key_state.change_unmarked(b.db):
            b.db.run("DELETE FROM content WHERE id = ?", old)
    await reconnect(b)
    assert SharedKey(CONTENT, old) in stored(a.store.etcd)
    await check_kept(a, b, inode, old, new)


@pytest.mark.parametrize("is_kept", [True, False])
@two_nodes
async def test_a_set_keeps_the_state_that_others_showed_while_an_island_had_a_newer_one(a: Node, b: Node, is_kept: bool) -> None:
    """P7, P9: they took that for lost. The file shows it again. The set keeps what the file showed when it was made."""
    inode = (await a.make("f1")).id
    old = await make_closed(a, inode)
    await b.stat("f1")
    new = await make_closed(b, inode)
    await a.stat("f1")
    b.cut(True)
    record = {"content": new, "generation": 2, "mtime_ns": 1, "node": 2, "shown": 1, "shows": old}
    salvage = "UPDATE inode SET content = ?, generation = 1, salvaged = ? WHERE id = ?"
    await a._agreed(lambda db: db.run(salvage, old, json.dumps(record), inode), (), [inode])
    if is_kept:
        await keep(a, "f1")
    await b.set("f1", mode=0o600)
    await reconnect(b)
    for node in (a, b):
        assert [inodes.get(node.db, kept).content for kept in (await read_history(node)).values()] == [old] * is_kept
        file = await node.stat("f1")
        assert (file.id, file.content, file.mode & 0o777) == (inode, new, 0o600) and await node.names() == [b"f1"]
        assert node.db.value("SELECT salvaged FROM inode WHERE id = ?", inode) is None


@pytest.mark.parametrize("is_separated", [True, False])
@two_nodes
async def test_a_set_that_an_island_removed_is_gone_if_others_wrote_a_file_of_it(a: Node, b: Node, is_separated: bool) -> None:
    """T6: the island removed the file, too. The file comes back, the set does not."""
    inode = (await a.make("f1")).id
    await make_closed(a, inode)
    await a.make("f2")
    await keep(a, "f1", "f2")
    await read_history(b)
    for name in ("f1", "f2"):
        await b.stat(name)
    b.cut(True)
    await b.unlink("f1")
    (known,) = history.list_series(b.db)
    with b.db.transaction():
        delete_whole_set(b.db, history.list_sets(b.db, known.directory)[0].directory)
    if is_separated:
        await separate(a, "f1")
    await a._agreed(lambda db: db.run("UPDATE inode SET generation = generation + 1 WHERE id = ?", inode), (), [inode])
    await reconnect(b)
    for node in (a, b):
        assert (await read_history(node), await node.names()) == ({}, [b"f1", b"f2"])


async def cut_off(a: Node, b: Node, *, is_kept: bool, has_two_names: bool = False) -> tuple[int, int]:
    """Make the file f1 on `b`, and cut `b` off. Return its inode and its content. `is_kept`: `a` has made a set of it."""
    inode = (await b.make("f1")).id
    content = await make_closed(b, inode)
    if has_two_names:
        await a.link("f1", "second")
    if is_kept:
        await keep(a, "f1")
        await read_history(b)
    for name in ("f1", *["second"] * has_two_names):
        await b.stat(name)
    b.cut(True)
    return inode, content


@pytest.mark.parametrize("was_kept", [False, True])
@pytest.mark.parametrize("has_two_names", [False, True])
@pytest.mark.parametrize("is_replaced", [False, True])
@two_nodes
async def test_a_file_that_others_wrote_and_keep_is_not_lost_if_an_island_removed_it(
    a: Node, b: Node, was_kept: bool, has_two_names: bool, is_replaced: bool
) -> None:
    """P5: its name in a set that is made meanwhile does not replace the one of the application."""
    inode, _ = await cut_off(a, b, is_kept=was_kept, has_two_names=has_two_names)
    closed = set()
    if is_replaced:
        closed.add(await make_closed(b, (await b.make("f1.tmp")).id))
        await b.rename("f1.tmp", "f1")
    for name in await b.names():
        if is_replaced != (name == b"f1"):
            await b.unlink(name.decode())
    await separate(a, "f1")
    closed.add(written := await make_closed(a, inode))
    await keep(a, "f1", number=2)
    await reconnect(a, b)
    for node in (a, b):
        assert closed == {(await node.stat(name.decode())).content for name in await node.names()}
        assert [inodes.get(node.db, one).content for path, one in (await read_history(node)).items() if b"@2" in path] == [written]


@pytest.mark.parametrize("kept", ["before", "meanwhile", "both"])
@pytest.mark.parametrize("has_two_names", [False, True])
@pytest.mark.parametrize("is_replaced", [False, True])
@two_nodes
async def test_a_file_that_an_island_wrote_is_there_again_if_others_removed_it(
    a: Node, b: Node, kept: str, has_two_names: bool, is_replaced: bool
) -> None:
    """P5, P7: its name in a set does not replace the one of the application, and the set keeps its bytes."""
    inode, old = await cut_off(a, b, is_kept=kept != "meanwhile", has_two_names=has_two_names)
    await separate(b, "f1")
    closed = {await make_closed(b, inode)}
    if kept != "before":
        await keep(a, "f1", number=2)
    if is_replaced:
        closed.add(await make_closed(a, (await a.make("f1.tmp")).id))
        await a.rename("f1.tmp", "f1")
    for name in ("f1", "second"):
        if name.encode() in await a.names() and not (is_replaced and name == "f1"):
            await a.unlink(name)
    await reconnect(a, b)
    for node in (a, b):
        assert closed == {(await node.stat(name.decode())).content for name in await node.names()}
        assert {inodes.get(node.db, one).content for one in (await read_history(node)).values()} == {old}


@two_nodes
async def test_a_set_gets_no_name_if_an_island_and_another_node_wrote_a_file_of_it(a: Node, b: Node) -> None:
    """P7: each of them separated the file from the set. Both states of the file stay, and the bytes of the set."""
    inode, old = await cut_off(a, b, is_kept=True)
    closed = set()
    for node in (a, b):
        await separate(node, "f1")
        closed.add(await make_closed(node, inode))
    await reconnect(a, b)
    for node in (a, b):
        assert closed == {(await node.stat(name.decode())).content for name in await node.names()}
        ((path, kept),) = (await read_history(node)).items()
        assert (path, inodes.get(node.db, kept).content) == (b"f*/f@1/f1", old)
        namespace.delete_forgotten(node.db, namespace.list_orphans(node.db))
        await settled([node])
        row = contents.get_content(node.db, old)
        assert row is None or (row.inode, row.state) == (kept, ContentState.CLOSED)
    assert stored(a.store.etcd)[SharedKey(CONTENT, old)]["inode"] == kept


@two_nodes
async def test_two_nodes_give_two_sets_of_a_series_two_numbers(a: Node, b: Node) -> None:
    """T6: while this node begins its set, the other one begins and ends another."""
    for name in ("f1", "f2", "f3"):
        await a.make(name)
    await keep(a, "f1")
    await b.names()
    await read_history(b)
    series = history.list_series(b.db)[0].directory
    for number, name in enumerate(("f1", "f2"), 2):
        await keep(a, name, number=number, name=b"other")
    with b.db.transaction() as db:
        history.begin_set(db, series, SetRecord(2, b"f", (2,), 1, 0, 5, is_group=True))
    assert not await b.sharing.wait_published([(series, b".new-2")])
    await settled([b])
    assert [history.get_next_number(node.db, series) for node in (a, b)] == [4, 4]
    assert [one.name for one in history.list_sets(a.db, series)] == [b"other@3", b"other@2", b"f@1"]
    assert list(await read_history(b)) == list(await read_history(a)) and len(await read_history(a)) == 3


async def write_file(node: Node, file: str) -> None:
    """What a writer tells when it opens with O_TRUNC: the file has a new content."""
    inode = (await node.stat(file)).id
    query = "UPDATE inode SET content = ?, generation = generation + 1 WHERE id = ?"
    await node._agreed(lambda db: db.run(query, (node.number << 40) + 99, inode), (), [inode])


@two_nodes
async def test_a_set_of_a_file_that_another_node_writes_meanwhile_is_not_made(a: Node, b: Node) -> None:
    """P7: never a mixture of two saves."""
    for name in ("f1", "f2"):
        await a.make(name)
    await keep(a, "f1")
    found = [await b.stat(file) for file in ("f1", "f2")]
    await read_history(b)
    await write_file(a, "f2")
    series = history.list_series(b.db)[0].directory

    def make(db: Database) -> None:
        directory = history.begin_set(db, series, SetRecord(2, b"f", (2,), 2, 0, 5, is_group=True))
        for name, file in zip((b"f1", b"f2"), found, strict=True):
            history.insert_link(db, file.id, directory, name)
        history.finish_set(db, directory)

    with b.db.transaction() as db:
        make(db)
    assert not await b.sharing.wait_published([(series, b"f@2")])
    await settled([b])
    for node in (a, b):
        assert list(await read_history(node)) == [b"f*/f@1/f1"]
        assert [(await node.stat(name)).history for name in ("f1", "f2")] == [1, 0]


@two_nodes
async def test_the_content_of_a_set_belongs_to_it_on_all_nodes_after_the_separation(a: Node, b: Node) -> None:
    """P5: what another node holds of the set is not taken for an old state of the file."""
    file = await a.make("f1")
    with a.db.transaction() as db:
        content = contents.insert_content(db, file.id, Tier.RAM)
        contents.mark_closed(db, file.id, content, 3, 1, 2)
    row = contents.get_content(a.db, content)
    assert row is not None
    contents.mark_sealed(a.db, [contents.SealResult(content, file.id, row.change, Tier.RAM, 3, b"d" * 16, b"d" * 16)])
    await keep(a, "f1")
    await read_history(b)
    await b.stat("f1")

    def overwrite(db: Database) -> None:
        history.separate(db, file.id)
        contents.insert_content(db, file.id, Tier.RAM)

    await a._agreed(overwrite, (), [file.id])
    for node in (a, b):
        ((_, kept),) = (await read_history(node)).items()
        found = contents.get_content(node.db, content)
        assert found is not None and (found.inode, found.state, found.is_remote) == (kept, ContentState.SEALED, node is b)
        assert inodes.get(node.db, kept).content == content != (await node.stat("f1")).content


@pytest.mark.parametrize("is_replaced", [True, False])
@two_nodes
async def test_a_set_of_an_island_keeps_a_file_whose_name_others_changed(a: Node, b: Node, is_replaced: bool) -> None:
    """T6: the file gets a conflict name beside theirs. A set is whole or gone."""
    await a.make("f1")
    await b.stat("f1")
    b.cut(True)
    inode = (await b.make("tmp")).id
    await b.unlink("f1")
    await b.rename("tmp", "f1")
    await keep(b, "f1")
    if is_replaced:
        await a.make("tmp")
        await a.rename("tmp", "f1")
    else:
        await a.unlink("f1")
    await reconnect(a, b)
    for node in (a, b):
        assert await read_history(node) == {b"f*/f@1/f1": inode}
        assert inode in [(await node.stat(name.decode())).id for name in await node.names()]


@two_nodes
async def test_a_set_that_an_island_made_of_what_it_wrote_has_those_bytes(a: Node, b: Node) -> None:
    """P7: another node made a set of the same file, with the bytes before. Each set has what it was made of."""
    inode = (await a.make("f1")).id
    old = await make_closed(a, inode)
    await b.stat("f1")
    await read_history(b)
    b.cut(True)
    new = await make_closed(b, inode)
    await keep(b, "f1", name=b"theirs")
    await keep(a, "f1", name=b"ours")
    await reconnect(a, b)
    for node in (a, b):
        kept = await read_history(node)
        assert {path: inodes.get(node.db, number).content for path, number in kept.items()} == {
            b"f*/ours@1/f1": old,
            b"f*/theirs@2/f1": new,
        }
        assert (await node.stat("f1")).content == new and await node.names() == [b"f1"]


@pytest.mark.parametrize("is_alive", [True, False])
@two_nodes
async def test_a_set_that_an_island_made_goes_if_another_node_writes_a_file_of_it_now(a: Node, b: Node, is_alive: bool) -> None:
    """P7: the writer publishes its bytes at the close, and the set would show them. The claim of a dead node counts no more."""
    peer_copies.set_live_nodes(b.db, 2, 2, [KnownNode(number, f"n{number}", "d") for number in (1, 2)][not is_alive :])
    inode = (await a.make("f1")).id
    await make_closed(a, inode)
    await b.stat("f1")
    b.cut(True)
    await keep(b, "f1")
    with a.db.transaction():
        set_members.insert_claim(a.db, inode)
    await settled([a])
    await reconnect(b)
    for node in (a, b):
        assert list(await read_history(node)) == ([] if is_alive else [b"f*/f@1/f1"])


@pytest.mark.parametrize("knows_set", [True, False])
@two_nodes
async def test_a_set_keeps_the_bytes_of_a_file_that_an_island_has_open_at_its_return(a: Node, b: Node, knows_set: bool) -> None:
    """P7: the return tells others of the new content at once. The names in the history keep the content that the store has."""
    inode = (await a.make("f1")).id
    old = await make_closed(a, inode)
    if knows_set:
        await keep(a, "f1")
    await b.stat("f1")
    b.cut(True)
    await b.make("other")
    with b.db.transaction() as db:
        new = contents.insert_content(db, inode, Tier.RAM)
        handles.insert(db, inode, new, is_writer=True, backing_id=0, generation=2)
    if not knows_set:
        await keep(a, "f1")
    await reconnect(b)
    await check_kept(a, b, inode, old, new)


@two_nodes
async def test_a_set_keeps_its_bytes_if_a_node_closes_a_file_later_that_it_had_open_all_the_time(a: Node, b: Node) -> None:
    """P7: two nodes write one file at once. The set was made of what was closed first."""
    inode = (await a.make("f1")).id
    await make_closed(a, inode)
    await b.stat("f1")
    old = await make_closed(a, inode)
    await keep(a, "f1")
    new = await make_closed(b, inode)
    await check_kept(a, b, inode, old, new)


async def check_kept(a: Node, b: Node, inode: int, old: int, new: int) -> None:
    for node in (a, b):
        ((path, kept),) = (await read_history(node)).items()
        assert (path, inodes.get(node.db, kept).content, inodes.get(node.db, kept).shown_nlink) == (b"f*/f@1/f1", old, 0)
        shown = await node.stat("f1")
        assert (shown.id, shown.content, shown.nlink, shown.history) == (inode, new, 1, 0) and kept != inode
        await node.sharing.refresh_inode(kept)
        assert node.db.value("SELECT inode FROM content WHERE id = ?", old) == kept


@two_nodes
@pytest.mark.parametrize("is_island", [True, False])
async def test_a_set_keeps_its_content_if_its_file_is_written_and_loses_its_last_name(a: Node, b: Node, is_island: bool) -> None:
    """P5: the store hears in one transaction that the set has a file of its own, and that the former file is gone."""
    file = await a.make("f1")
    content = await make_closed(a, file.id)
    await keep(a, "f1")
    if is_island:
        a.cut(True)
        await separate(a, "f1")
        await a.unlink("f1")
        await reconnect(a, b)
    else:
        await b.stat("f1")
        await read_history(b)
        await a.unlink("f1")
        await make_closed(b, file.id)  # It is open since before the set was made.
    await settled([a, b])
    ((_, kept),) = (await read_history(b)).items()
    assert kept != file.id and inodes.get(b.db, kept).content == content
    assert stored(b.store.etcd)[SharedKey(CONTENT, content)]["inode"] == kept


@two_nodes
async def test_a_name_that_another_node_removed_is_not_counted_after_a_separation(a: Node, b: Node) -> None:
    """P2: its entry stays in the catalog until the directory is read again."""
    await a.build("f1", "d/")
    await a.link("f1", "d/f2")
    await b.unlink("d/f2")
    await keep(a, "f1")
    assert (await separate(a, "f1")).nlink == 1
