"""P7, P9: a node dies with a generation of an open file that it had not told (an fsync gives it one), another node goes on with the
file, and the first one returns: the file is what was written last, its size and its bytes of one generation.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import trio
from memory_store import MemoryEtcd, MemoryStore
from shared_catalogs import Node, Slow, in_virtual_time

from ckptfs.catalog import contents, peer_copies, remote_contents
from ckptfs.catalog.peer_copies import KnownNode
from ckptfs.catalog.remote_contents import RemoteState
from ckptfs.model import Tier
from ckptfs.store.kv import Get


def write(node: Node, inode: int, content: int, size: int, mtime_ns: int, digest: bytes) -> None:
    """Somebody closes what is open, and it is sealed."""
    with node.db.transaction():
        contents.mark_closed(node.db, inode, content, size, 1, mtime_ns, closed_ns=mtime_ns)
    row = contents.get_content(node.db, content)
    assert row is not None
    contents.mark_sealed(node.db, [contents.SealResult(content, inode, row.change, Tier.RAM, size, digest, digest)])


def said(etcd: MemoryEtcd, key: bytes) -> dict[str, Any]:
    (items,) = MemoryStore(etcd).read([Get(key)]).results
    return dict(json.loads(items[0].value))


@pytest.mark.parametrize("times", [1, 2])
def test_what_another_node_wrote_in_place_meanwhile_stays(tmp_path: Path, times: int) -> None:
    """Its generation is the same as that of the one that returns, or a later one."""

    async def run() -> None:
        etcd, first = MemoryEtcd(), trio.CancelScope()
        one, two = (Node(tmp_path / f"n{number}", number, Slow(etcd, random.Random(number))) for number in (1, 2))
        for node in (one, two):
            peer_copies.set_live_nodes(node.db, node.number, 2, [KnownNode(number, f"n{number}", f"d{number}") for number in (1, 2)])

        async def live() -> None:
            with first:
                await one.sharing.run()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(live)
            nursery.start_soon(two.sharing.run)
            inode = (await one.make("log")).id
            with one.db.transaction():
                content = contents.insert_content(one.db, inode, Tier.RAM)
            write(one, inode, content, 3, 2, b"a" * 16)
            with one.db.transaction():
                contents.mark_open(one.db, inode, content, Tier.RAM)
            await one.sharing.wait_published()
            first.cancel()
            peer_copies.record_open_snapshot(one.db, content)
            await two.stat("log")
            seen = contents.get_content(two.db, content)
            assert seen is not None
            remote_contents.restore_verified(two.db, seen, RemoteState(content, inode, 1, 3, b"a" * 16, b"a" * 16))
            two.db.run("INSERT INTO copy (content, tier, state, used_ns) VALUES (?, 'ram', 1, 1)", content)
            with two.db.transaction():
                newer = contents.insert_reserved_content(two.db, Tier.RAM)
                assert contents.record_successor(two.db, inode, content, newer)
                contents.set_current(two.db, inode, newer)
            write(two, inode, newer, 7, 20, b"b" * 16)
            if times > 1:
                with two.db.transaction():
                    contents.mark_open(two.db, inode, newer, Tier.RAM)
                write(two, inode, newer, 7, 21, b"b" * 16)
            await two.sharing.wait_published()
            write(one, inode, content, 5, 10, b"c" * 16)
            nursery.start_soon(one.sharing.run)
            await one.sharing.wait_published()
            file, bytes_ = said(etcd, b"i/%016x" % inode), said(etcd, b"c/%016x" % newer)
            assert (file["content"], file["generation"], file["size"], file["mtime_ns"]) == (newer, 2 + times, 7, 19 + times)
            assert (bytes_["node"], bytes_["generation"], bytes_["size"], bytes_["digest"]) == (2, 2 + times, 7, (b"b" * 16).hex())
            known = contents.get_content(one.db, content)
            assert known is not None and not known.is_remote and known.digest == b"c" * 16, "what it wrote is a content of its own"
            nursery.cancel_scope.cancel()

    in_virtual_time(run)
