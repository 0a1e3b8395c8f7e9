"""Files whose writer dies before another node has the newest state: the acts of these tests (see clique_world)."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from clique_world import LocalCluster, Node, cluster_of, is_at_rest, replicate, until
from local_node import run_until_idle

from ckptfs.catalog import contents, mover_requests, namespace
from ckptfs.clique import locations
from ckptfs.coherence import keys
from ckptfs.coherence.keys import CONTENT, INODE, SharedKey
from ckptfs.flow.copy_records import AnnounceCopies
from ckptfs.flow.fetch import Fetch
from ckptfs.flow.reclaim import Reclaim
from ckptfs.flow.reconcile import Reconcile
from ckptfs.flow.salvage import Salvage
from ckptfs.model import ROOT, Tier
from ckptfs.store.kv import Delete, Put

OLD, NEW = b"old" * 3000, b"newer" * 4000


def publish(node: Node) -> None:
    """All that the node's mount would have told: of a file that goes on in a new content nothing until a size is recorded."""
    begun = "SELECT i.id FROM inode i JOIN content k ON k.id = i.content AND k.generation > i.generation AND k.state = 0"
    told = [SharedKey(INODE, row[0]) for row in node.db.rows(f"SELECT id FROM inode WHERE id NOT IN ({begun})")]
    told += [SharedKey(CONTENT, row[0]) for row in node.db.rows("SELECT id FROM content WHERE remote = 0 OR superseded_mtime_ns > 0")]
    for key in told:
        value = keys.encode_value(keys.get_value(node.db, key))
        node.cluster.store.commit([], [Delete(keys.encode_key(key)) if value is None else Put(keys.encode_key(key), value)])


def hear(node: Node, *contents_: int) -> None:
    """The node learns what the store says of these contents, and tells of what it has."""
    locations.refresh(node.db, node.store, contents_, node.number)
    AnnounceCopies(node.db, cluster_of(node)).step()


def replicated(cluster: LocalCluster) -> int:
    """A file with copies on the first two nodes; its content."""
    one, two = cluster.nodes[:2]
    content = one.make(b"file", OLD)
    one.seal()
    publish(one)
    send(one, content)
    AnnounceCopies(two.db, cluster_of(two)).step()
    return content


def make_replicated(root: Path, count: int) -> tuple[Any, ...]:
    """Return a cluster, a content with copies on its first two nodes, and each of its nodes."""
    cluster = LocalCluster(root, count)
    return cluster, replicated(cluster), *cluster.nodes


def send(node: Node, content: int) -> None:
    flow = replicate(node, content)
    until(lambda: is_at_rest(flow))
    flow.step()
    flow.close()


def overwrite(node: Node, content: int, how: str) -> int:
    """Write the file anew on this node, as programs do; the new content, which nobody else has."""
    if how == "in place":
        newer = change(node, content, appended, mtime_ns=4)
        tidy(node)
        return newer
    if how == "truncated":
        newer = node.write(node.inode(content), NEW)
    else:
        newer = node.make(b"file.tmp", NEW)
        with node.db.transaction():
            replaced = namespace.rename(node.db, ROOT, b"file.tmp", ROOT, b"file")
            assert replaced is not None and namespace.delete_forgotten(node.db, [replaced.id]) == {replaced.id: []}
        node.cluster.store.commit([], [Delete(b"i/%016x" % replaced.id)])
    node.seal()
    publish(node)
    tidy(node)
    return newer


def change(node: Node, content: int, act: Callable[[bytearray], None], *, stop: str = "sealed", mtime_ns: int = 3) -> int:
    """Change the file in place. `stop`: how far its writer comes: open, closed, sealed. The others are told of it. Its content then."""
    inode = node.inode(content)
    content = node.reopen(content, Tier.RAM)
    publish(node)
    data = bytearray(node.data(content))
    act(data)
    with os.fdopen(node.tiers[Tier.RAM].open(content, os.O_RDWR), "wb") as file:
        file.write(data)
    if stop == "open":
        return content
    with node.db.transaction():
        contents.mark_closed(node.db, inode, content, len(data), 1, mtime_ns)
    publish(node)
    if stop == "sealed":
        node.seal()
        publish(node)
    return content


def knows(node: Node, inode: int, content: int) -> None:
    """The node knows a file that another one made, as after a look-up of its name."""
    told = locations.load(node.store, [content])[content]
    assert told.state is not None
    node.learn(inode, b"file", content, told.state.size)
    node.db.run("UPDATE inode SET mtime_ns = 2 WHERE id = ?", inode)
    locations.refresh(node.db, node.store, [content], node.number)
    node.db.run("INSERT OR REPLACE INTO cached_key VALUES ('c', ?, x'', 1, ?)", content, told.items[0].value)


def cache_file(node: Node, inode: int) -> None:
    """The node has read the file in the store before; what it said does not matter."""
    node.db.run("INSERT OR REPLACE INTO cached_key VALUES ('i', ?, x'', 1, ?)", inode, keys.encode_fields({"names": []}))


def appended(data: bytearray) -> None:
    """What a log does."""
    data += NEW


def tidy(*nodes: Node) -> None:
    """Reconcile and reclaim on each of these nodes, in this order."""
    for node in nodes:
        run_until_idle(Reconcile(node.db, node.tiers, node.told, cluster_of(node), node.host.reported_unneeded))
        Reclaim(node.db, node.tiers, node.config, node.told, (Tier.RAM,)).step()


def come_back(writer: Node, other: Node, inode: int) -> None:
    """The writer of a file is alive again: it hears from another node what is missed, and tells what it shows."""
    writer.revive()
    cache_file(writer, inode)
    decide(other)
    tidy(writer)
    publish(writer)
    decide(other)


def fall_back_of(node: Node) -> Salvage:
    return Salvage(node.db, node.tiers, node.told, cluster_of(node))


def salvage_file(node: Node, inode: int) -> int:
    """Somebody opens the file there, and nobody gives what it holds; how that ended."""
    want = mover_requests.insert_request(node.db, mover_requests.SALVAGE, inode)
    decide(node)
    found = mover_requests.get(node.db, want)
    assert found is not None
    return found.state


def opens(node: Node, inode: int) -> int | None:
    """Somebody opens a file for reading, on a node that has a PFS; the content that the file shows then."""
    node.config = replace(node.config, pfs=node.root / "pfs")
    fetch, back = Fetch(node.db, node.tiers, node.config, node.told, cluster_of(node)), fall_back_of(node)
    want = mover_requests.insert_request(node.db, mover_requests.FETCH, inode)
    until(lambda: not mover_requests.is_open(node.db, want), lambda: (fetch.step(), back.step()))
    found = mover_requests.get(node.db, want)
    assert found is not None and found.result == mover_requests.FETCHED
    return node.shown(inode)


def decide(*nodes: Node) -> None:
    """Salvage on each of these nodes, in this order."""
    for node in nodes:
        flow = fall_back_of(node)
        for _ in range(3):
            run_until_idle(flow)


def file_of(cluster: LocalCluster, inode: int) -> locations.SharedFile:
    return locations.load_files(cluster.store, [inode])[inode]


def shown(cluster: LocalCluster, inode: int) -> tuple[int, int, int, int]:
    """(content, generation, size, mtime) that the store says a file has."""
    file = file_of(cluster, inode)
    return file.content or 0, file.value["generation"], file.value["size"], file.value["mtime_ns"]


def held(node: Node, inode: int) -> bytes:
    """What this node has of what the file holds."""
    content = file_of(node.cluster, inode).content
    assert content is not None and contents.get_content(node.db, content) is not None
    return node.data(content)
