"""P1, P9: an island that wrote a file on, which the others took for lost and show as it was before, returns: nobody else wrote it, so it
stays one file. What another node did write in place stays beside it.
"""

import json
import stat
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from memory_store import MemoryEtcd, MemoryStore
from shared_catalogs import Node, async_tests, play_on_nodes, reconnect, settled, stored

from ckptfs import limits
from ckptfs.catalog import contents, copies, handles, namespace
from ckptfs.coherence import key_state, keys, merge
from ckptfs.coherence.keys import INODE, SharedKey
from ckptfs.model import ROOT, ContentState, Tier
from ckptfs.store.kv import Put

two_nodes, three_nodes = async_tests(play_on_nodes), async_tests(partial(play_on_nodes, count=3), given=3)
OURS, THEIRS = 5 << 20, 6 << 20
MISSED = {"node": 2, "content": OURS, "generation": 2, "mtime_ns": 2, "shows": THEIRS, "shown": 1}


def wrote(node: Node, inode: int, generation: int, size: int) -> None:
    with node.db.transaction():
        node.db.run("INSERT OR IGNORE INTO copy (content, tier, state) VALUES (?, 'ram', 1)", OURS)
        node.db.run(
            "INSERT INTO content (id, inode, generation, state, size, digest, closed_ns) VALUES (?1, ?2, ?3, 2, ?4, zeroblob(16), ?3)"
            " ON CONFLICT (id) DO UPDATE SET generation = ?3, size = ?4, closed_ns = ?3",
            OURS, inode, generation, size,
        )  # fmt: skip
        node.db.run(
            "UPDATE inode SET content = ?1, generation = ?2, size = ?3, mtime_ns = ?2, closed_ns = ?2 WHERE id = ?4",
            OURS,
            generation,
            size,
            inode,
        )


def put(etcd: MemoryEtcd, key: SharedKey, **changes: Any) -> None:
    value = {**stored(etcd).get(key, {}), **changes}
    assert MemoryStore(etcd).commit([], [Put(keys.encode_key(key), keys.encode_fields(value))]).succeeded


@pytest.mark.parametrize(
    ("inode", "files"),
    [
        ({"content": THEIRS, "generation": 1, "size": 1, "missed": json.dumps(MISSED)}, 1),
        ({"generation": 3, "size": 3}, 1),
        ({"content": THEIRS, "generation": 4, "size": 4, "missed": json.dumps(MISSED)}, 2),
    ],
    ids=["shown as it was before", "as its writer gave it again", "written since"],
)
@two_nodes
async def test_a_file_that_a_disconnected_node_wrote_on(a: Node, b: Node, inode: dict[str, Any], files: int) -> None:
    number = (await b.make("log")).id
    wrote(b, number, 2, 20)
    await b.sharing.wait_published()
    b.cut(True)
    wrote(b, number, 5, 50)
    while not b.sharing.is_disconnected:
        await trio.sleep(0.1)
    put(a.store.etcd, SharedKey(INODE, number), **inode)
    b.cut(False)
    await settled([a, b])
    assert len(await a.names()) == files, await a.names()
    assert (await a.stat("log")).size == 50
    shown = stored(a.store.etcd)[SharedKey(INODE, (await a.stat("log")).id)]
    assert shown["generation"] == 5 and "missed" not in shown


@pytest.mark.parametrize("is_reclaimed", [False, True], ids=["reclaimed later", "reclaimed before"])
@three_nodes
async def test_a_disconnected_node_answers_for_what_it_linked_and_its_writer_deleted(
    writer: Node, linker: Node, reader: Node, is_reclaimed: bool
) -> None:
    """P1, P9: its new name leads to the bytes that it has, on each node; the writer may still be deleting its own copy."""

    def reclaim() -> None:
        copies.delete_doomed(writer.db, [(content, Tier.RAM)])

    inode = (await writer.make("f")).id
    content = await make_sealed(writer, inode)
    for node in (linker, reader):
        await node.stat("f")
    linker.db.change("INSERT INTO copy (content, tier, state) VALUES (?, 'ram', 1)", content)
    linker.cut(True)
    await linker.link("f", "g")
    await writer.unlink("f")
    with writer.db.transaction():
        contents.set_state(writer.db, content, ContentState.DOOMED)
    await writer.sharing.wait_published()
    if is_reclaimed:
        reclaim()
    await reconnect(writer, linker, reader)
    for node in (writer, linker, reader):
        await node.stat("g")
    if not is_reclaimed:
        reclaim()
    value = stored(writer.store.etcd)[SharedKey(keys.CONTENT, content)]
    assert (value["node"], value["inode"], value["digest"]) == (2, inode, bytes(16).hex())
    for node in (writer, linker, reader):
        found = await node.stat("g")
        await node.sharing.refresh_inode(found.id)
        seen = contents.get_content(node.db, content)
        assert seen is not None and found.content == content and seen.is_remote == (node is not linker)
        assert seen.state is ContentState.SEALED


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("is_written", [False, True])
@two_nodes
async def test_a_disconnected_node_keeps_the_bytes_of_what_it_deleted_until_others_know(
    writer: Node, linker: Node, is_replaced: bool, is_written: bool
) -> None:
    """P5: another node gives the file a name meanwhile. What the store never had goes at once."""
    inode = (await writer.make("f")).id
    content = await make_sealed(writer, inode)
    await linker.stat("f")
    writer.cut(True)
    await writer.make("not in the store")
    if is_written:
        content = await make_sealed(writer, inode)
    for name in ("own", "f"):
        new = (await writer.make("tmp")).id
        own = await make_sealed(writer, new)
        await writer.rename("tmp", name) if is_replaced or name == "own" else await writer.unlink("f")
    await writer.unlink("own")
    deleted = namespace.delete_forgotten(writer.db, namespace.list_orphans(writer.db))
    assert inode not in deleted and len(deleted) == 1
    await linker.link("f", "g")
    await reconnect(writer, linker)
    namespace.delete_forgotten(writer.db, namespace.list_orphans(writer.db))
    for node in (writer, linker):
        assert (await node.stat("g")).content == content
    seen = contents.get_content(writer.db, content)
    assert seen is not None and (seen.is_remote, seen.state, seen.inode) == (False, ContentState.SEALED, inode)
    assert stored(writer.store.etcd)[SharedKey(keys.CONTENT, content)]["node"] == writer.number
    assert (await linker.stat("f")).content == own if is_replaced else b"f" not in await linker.names()
    await linker.unlink("g")
    await writer.sharing.refresh_inode(inode)
    assert content in namespace.delete_forgotten(writer.db, namespace.list_orphans(writer.db))[inode]


@two_nodes
async def test_a_disconnected_node_keeps_the_bytes_of_what_the_store_may_have(writer: Node, linker: Node) -> None:
    """P5: the answer to the creation was lost, and another node names the file before its removal is published."""
    for node in (writer, linker):
        await node.make(f"of {node.number}")
    writer.store.lose(10_000)
    with writer.db.transaction():
        inode = namespace.create(writer.db, ROOT, b"f", stat.S_IFREG, uid=0, gid=0).id
        content = insert_sealed(writer, inode)
    await writer.sharing.wait_published()
    writer.cut(True)
    own = (await writer.make("own")).id
    for name in ("f", "own"):
        await writer.unlink(name)
    assert [*namespace.delete_forgotten(writer.db, namespace.list_orphans(writer.db))] == [own]
    await linker.link("f", "g")
    writer.store.lose(0)
    await reconnect(writer, linker)
    namespace.delete_forgotten(writer.db, namespace.list_orphans(writer.db))
    assert (await linker.stat("g")).content == content == (await writer.stat("g")).content
    assert stored(writer.store.etcd)[SharedKey(keys.CONTENT, content)]["node"] == writer.number


@two_nodes
async def test_a_file_keeps_the_name_that_a_disconnected_node_gave_to_another(writer: Node, linker: Node) -> None:
    """P5: the node replaced the file under the only name that it knew, and never saw the one that came meanwhile."""
    content = await make_sealed(writer, (await writer.make("f")).id)
    await linker.link("f", "g")
    await linker.unlink("f")
    writer.cut(True)
    await writer.make("tmp")
    await writer.rename("tmp", "f")
    await writer.build(*(f"other{number}" for number in range(limits.ETCD_OPERATIONS_MAX)), "g")
    await reconnect(writer, linker)
    assert [key.number for key in stored(writer.store.etcd) if key.kind == keys.CONTENT] == [content]
    assert (await linker.stat("g.ckptfs-conflict-n1-1")).content == content


@two_nodes
async def test_the_content_of_a_file_is_deleted_with_the_file(writer: Node, linker: Node) -> None:
    """P5: its seal is published in an earlier transaction than its removal, which another node's link takes back."""
    for name in ("f", "gone"):
        await make_sealed(writer, (await writer.make(name)).id)
    content = (await linker.stat("f")).content
    writer.cut(True)
    await writer.build("other")
    writer.db.change("UPDATE content SET digest = ?", b"d" * 16)
    await writer.build(*(f"other{number}" for number in range(limits.ETCD_OPERATIONS_MAX)))
    await writer.unlink("f")
    await writer.unlink("gone")
    await linker.link("f", "g")
    await reconnect(writer, linker)
    assert [key.number for key in stored(writer.store.etcd) if key.kind == keys.CONTENT] == [content]
    assert (await linker.stat("g")).content == (await writer.stat("g")).content == content


@pytest.mark.parametrize("is_opened_before", [True, False])
@two_nodes
async def test_what_others_closed_of_an_open_file_is_kept_for_a_conflict_copy(writer: Node, opener: Node, is_opened_before: bool) -> None:
    """P5: the file is open for writing across the return; the writer keeps its bytes beside it, whatever it writes later."""
    inode, own, content = await write_on_both_sides(writer, opener, is_opened_before=is_opened_before, stays_open=True)
    await reconnect(opener)
    await opener.stat("f")
    with opener.db.transaction():
        handles.delete_all(opener.db)
        contents.mark_closed(opener.db, inode, own, 7, 1, 2)
    await settled([opener])
    assert (await writer.stat("f")).content == own
    contents.mark_previous_doomed(writer.db, inode, await make_sealed(writer, inode))
    shown = stored(writer.store.etcd)[SharedKey(INODE, inode)]
    missed = json.loads(shown["missed"])
    assert (missed["content"], missed["node"]) == (content, writer.number) and not merge.is_showing_previous(shown)
    seen = contents.get_content(writer.db, content)
    assert seen is not None and seen.state is ContentState.SEALED


@two_nodes
async def test_what_others_removed_is_there_again_if_an_island_has_it_open_for_writing(writer: Node, opener: Node) -> None:
    """P1: it may have been removed before the island opened it. Whether it is closed before the return or after makes no difference."""
    inode = (await writer.make("f")).id
    await make_sealed(writer, inode)
    await opener.stat("f")
    opener.cut(True)
    await opener.make("other")
    await writer.make("f.tmp")
    await writer.rename("f.tmp", "f")
    with opener.db.transaction() as db:
        own = contents.insert_reserved_content(db, Tier.RAM)
        db.run("UPDATE content SET inode = ? WHERE id = ?", inode, own)
        with key_state.change_unmarked(db):
            contents.set_current(db, inode, own)
        handles.insert(db, inode, own, is_writer=True, backing_id=0)
    await reconnect(opener)
    with opener.db.transaction() as db:
        handles.delete_all(db)
        contents.mark_closed(db, inode, own, 7, 1, 2)
    await settled([opener])
    beside = await writer.stat("f.ckptfs-conflict-n2-1")
    assert (beside.id, beside.content, beside.size) == (inode, own, 7) and (await writer.stat("f")).id != inode


@pytest.mark.parametrize("is_opened_before", [True, False])
@two_nodes
async def test_what_both_closed_stays_side_by_side(writer: Node, opener: Node, is_opened_before: bool) -> None:
    """P1: an island closed a file. Of one that it had opened before, the store knew content and generation."""
    inode, own, theirs = await write_on_both_sides(writer, opener, is_opened_before=is_opened_before, stays_open=False)
    with opener.db.transaction():
        contents.mark_closed(opener.db, inode, own, 7, 1, 2)
    await reconnect(opener)
    beside = await writer.stat("f.ckptfs-conflict-n2-1")
    assert {(await writer.stat("f")).content, beside.content} == {own, theirs}


@two_nodes
async def test_a_previous_content_that_others_show_again_is_theirs(writer: Node, other: Node) -> None:
    """P9: a disconnected node replaced its own file; others show the previous content, which it wrote, too."""
    inode = (await writer.make("f")).id
    content = await make_sealed(writer, inode)
    await other.stat("f")
    writer.cut(True)
    await writer.make("noticed")
    with writer.db.transaction():
        writer.db.run("UPDATE content SET superseded_mtime_ns = 1, change = change + 1 WHERE id = ?", content)
        insert_sealed(writer, inode)
    known = stored(other.store.etcd)[SharedKey(keys.CONTENT, content)]
    put(other.store.etcd, SharedKey(keys.CONTENT, content), node=other.number, closed_ns=known["closed_ns"] + 1)
    await reconnect(writer, other)
    assert stored(other.store.etcd)[SharedKey(keys.CONTENT, content)]["node"] == other.number
    seen = contents.get_content(writer.db, content)
    assert seen is not None and seen.is_remote and seen.state is ContentState.SEALED


@two_nodes
async def test_a_deletion_of_a_content_that_another_node_has_superseded_is_made_again(writer: Node, other: Node) -> None:
    """The store refuses it, since it does not rest on the newest value. The content stays its writer's, which deletes the key then."""
    content = await make_sealed(writer, (await writer.make("f")).id)
    await settled([writer])
    key = SharedKey(keys.CONTENT, content)
    put(other.store.etcd, key, former_ns=7)
    for state in (ContentState.SEALED, None):
        with writer.db.transaction():
            contents.set_state(writer.db, content, ContentState.DOOMED)
        await settled([writer])
        seen = contents.get_content(writer.db, content)
        assert seen is not None and not seen.is_remote
        assert stored(writer.store.etcd).get(key, {}).get("state") == state


async def write_on_both_sides(writer: Node, opener: Node, *, is_opened_before: bool, stays_open: bool) -> tuple[int, int, int]:
    """Begin to write a file on a node, before or after it becomes an island; another node closes the file meanwhile.

    Return the file, the content that the island has open, and the one that the other node closed.
    """
    inode = (await writer.make("f")).id
    await make_sealed(writer, inode)
    await opener.stat("f")
    opener.cut(not is_opened_before)
    with opener.db.transaction():
        own = contents.insert_content(opener.db, inode, Tier.RAM)
        if stays_open:
            handles.insert(opener.db, inode, own, is_writer=True, backing_id=0)
    await opener.sharing.wait_published()
    opener.cut(True)
    await opener.make("other")
    await writer.stat("f")
    return inode, own, await make_sealed(writer, inode)


async def make_sealed(node: Node, inode: int) -> int:
    """Give a file of this node a sealed content in RAM. Return its id."""
    with node.db.transaction():
        content = insert_sealed(node, inode)
    await node.sharing.wait_published()
    return content


def insert_sealed(node: Node, inode: int) -> int:
    content = contents.insert_content(node.db, inode, Tier.RAM)
    contents.mark_closed(node.db, inode, content, 5, 1, 2)
    node.db.run("UPDATE content SET state = 2, digest = zeroblob(16), change = change + 1 WHERE id = ?", content)
    node.db.run("UPDATE copy SET state = 1 WHERE content = ?", content)
    return content
