"""P9: what another node's file held is told to belong to the one that was renamed over it, in the transaction that does that. Who wrote
what is deleted is to hear of it.
"""

import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from memory_store import MemoryEtcd, MemoryStore
from shared_catalogs import Node, Slow, async_tests, in_virtual_time, reconnect, running

from ckptfs.catalog import contents, copies, namespace, peer_copies
from ckptfs.catalog.peer_copies import KnownNode, PeerCopy
from ckptfs.model import ContentState, Inode, Tier
from ckptfs.store.kv import Get

DIGEST = b"d" * 16


def write(node: Node, inode: Inode, *, sealed: bool) -> int:
    """The file's content, closed; `sealed`: and on node 2, too."""
    with node.db.transaction():
        content = contents.insert_content(node.db, inode.id, Tier.RAM)
        contents.mark_closed(node.db, inode.id, content, 3, 1, 2)
    if sealed:
        seal(node, content)
    return content


def seal(node: Node, content: int) -> None:
    """Seal it, and have a copy on node 2."""
    row = contents.get_content(node.db, content)
    assert row is not None
    contents.mark_sealed(node.db, [contents.SealResult(content, row.inode, row.change, Tier.RAM, 3, DIGEST, DIGEST)])
    peer_copies.insert_peer_copy(node.db, PeerCopy(content, 2, row.generation, DIGEST))


def play(root: Path, act: Callable[[Node, Node, MemoryEtcd], Awaitable[None]]) -> None:
    """Two nodes that know of each other, in virtual time."""
    etcd = MemoryEtcd()
    nodes = [Node(root / f"n{number}", number, Slow(etcd, random.Random(number))) for number in (1, 2)]
    for node in nodes:
        peer_copies.set_live_nodes(node.db, node.number, 2, [KnownNode(number, f"n{number}", f"d{number}") for number in (1, 2)])

    in_virtual_time(lambda: running(nodes, lambda: act(*nodes, etcd)))


two_nodes = async_tests(play, 3)


@two_nodes
async def test_what_was_renamed_over_is_the_former_content_of_the_newer_file(one: Node, two: Node, etcd: MemoryEtcd) -> None:
    reaped = []
    one.sharing.on_nameless = lambda inodes: reaped.append(namespace.delete_forgotten(one.db, inodes))
    replaced = await one.make("file")
    former = write(one, replaced, sealed=True)
    await one.sharing.wait_published()
    heir = await two.make("file.tmp")
    write(two, heir, sealed=False)
    await two.sharing.wait_published()
    await two.rename("file.tmp", "file")
    await one.sharing.refresh_inode(replaced.id)
    await one.sharing.wait_published()
    assert reaped == [{replaced.id: []}], "it stays here until the store was asked"
    (items,) = MemoryStore(etcd).read([Get(b"c/%016x" % former)]).results
    value = json.loads(items[0].value)
    assert (value["node"], value["inode"], value["former_ns"], value["digest"]) == (1, heir.id, 2, DIGEST.hex())


@two_nodes
async def test_who_wrote_what_another_node_deletes_is_to_hear_of_it(one: Node, two: Node, etcd: MemoryEtcd) -> None:
    """It counts as no copy, and what this node wrote itself is told to nobody else by that."""
    theirs = write(one, await one.make("theirs"), sealed=True)
    await one.sharing.wait_published()
    own = await two.make("own")
    write(two, own, sealed=True)
    await two.sharing.wait_published()
    inode = await two.unlink("theirs")
    await two.unlink("own")
    with two.db.transaction():
        namespace.delete_forgotten(two.db, [inode.id, own.id])
    copies.delete_doomed(two.db, copies.list_doomed(two.db, (Tier.RAM,), 0, 10))
    assert [copy for copy in peer_copies.list_unneeded(two.db, 10) if copy.node == 1] == [PeerCopy(theirs, 1, 0, b"")]
    (found,) = MemoryStore(etcd).read([Get(b"c/%016x" % theirs)]).results
    assert not found


@two_nodes
async def test_a_deleted_file_of_which_this_node_has_no_copy_leaves_no_row(one: Node, two: Node, etcd: MemoryEtcd) -> None:
    """The store need not be asked about a previous content of which there is only a row."""
    theirs = write(one, await one.make("theirs"), sealed=True)
    await one.sharing.wait_published()
    inode = await two.stat("theirs")
    with two.db.transaction():
        contents.mark_awaiting_store_check(two.db, inode.id)
    await one.unlink("theirs")
    await two.sharing.refresh_inode(inode.id)
    two.db.change("INSERT OR REPLACE INTO cached_key VALUES ('c', ?, x'', 1, x'')", theirs)
    with two.db.transaction():
        assert namespace.delete_forgotten(two.db, [inode.id]) == {inode.id: [theirs]}


@two_nodes
async def test_a_former_content_that_its_writer_has_dropped_is_gone_from_the_store(one: Node, two: Node, etcd: MemoryEtcd) -> None:
    """Its key says by now what another node made of it, and that is found out when no row of it is left here."""
    former = write(one, await one.make("file"), sealed=True)
    await one.sharing.wait_published()
    write(two, await two.make("file.tmp"), sealed=False)
    await two.sharing.wait_published()
    await two.rename("file.tmp", "file")
    with one.db.transaction():
        contents.set_state(one.db, former, ContentState.DOOMED)
        copies.delete_doomed(one.db, copies.list_doomed(one.db, (Tier.RAM,), 0, 10))
    await one.sharing.wait_published()
    (found,) = MemoryStore(etcd).read([Get(b"c/%016x" % former)]).results
    assert not found and contents.get_content(one.db, former) is None


@two_nodes
async def test_what_was_renamed_over_while_another_node_linked_it_stays_its_own(one: Node, two: Node, etcd: MemoryEtcd) -> None:
    """P5: the node that renamed had no etcd. Its return takes the content back, so the newer file does not expire it."""
    replaced = await one.make("file")
    content = write(one, replaced, sealed=True)
    await one.sharing.wait_published()
    await two.stat("file")
    one.cut(True)
    heir = await one.make("file.tmp")
    newer = write(one, heir, sealed=False)
    await one.rename("file.tmp", "file")
    await two.link("file", "linked")
    await reconnect(one)
    assert (await one.stat("linked")).content == (await two.stat("linked")).content == content
    await expire_previous(one, newer)
    assert_own(one, etcd, content, replaced)


async def expire_previous(node: Node, newer: int) -> None:
    """The newer content is sealed and copied: so those before it may go."""
    seal(node, newer)
    current = contents.get_content(node.db, newer)
    assert current is not None
    contents.expire_previous(node.db, current)
    await node.sharing.wait_published()


def assert_own(node: Node, etcd: MemoryEtcd, content: int, file: Inode) -> None:
    """The content is that of the file, here and in the store."""
    kept = contents.get_content(node.db, content)
    assert kept is not None and (kept.inode, kept.state) == (file.id, ContentState.SEALED)
    (items,) = MemoryStore(etcd).read([Get(b"c/%016x" % content)]).results
    value = json.loads(items[0].value)
    assert value["inode"] == file.id and "former_ns" not in value


@two_nodes
async def test_what_an_island_renamed_over_stays_its_own_if_others_touched_it(one: Node, two: Node, etcd: MemoryEtcd) -> None:
    """P5: they set its time, so the file stays, and with what was written last."""
    replaced = await one.make("file")
    write(one, replaced, sealed=True)
    await one.sharing.wait_published()
    await two.stat("file")
    with one.db.transaction():
        content = contents.insert_content(one.db, replaced.id, Tier.RAM)
    await one.sharing.wait_published()
    await two.stat("file")
    one.cut(True)
    with one.db.transaction():
        contents.mark_closed(one.db, replaced.id, content, 3, 1, 2)
    seal(one, content)
    newer = write(one, await one.make("file.tmp"), sealed=False)
    await one.rename("file.tmp", "file")
    await two._agreed(lambda db: db.run("UPDATE inode SET mtime_ns = 77 WHERE id = ?", replaced.id), (), [])
    await reconnect(one)
    names = [name.decode() for name in await one.names()]
    assert content in [(await one.stat(name)).content for name in names], names
    await expire_previous(one, newer)
    assert_own(one, etcd, content, replaced)
