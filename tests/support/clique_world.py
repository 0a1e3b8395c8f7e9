"""Several nodes in one process, without FUSE: catalogs and tiers of their own, one store in memory, peers that call one another's host.

What the sharing of the namespace would do (`c/` keys, rows of files that other nodes made) is done here by hand, as simply as can be.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from local_node import Node as LocalNode
from local_node import run_until_idle
from memory_store import MemoryEtcd, MemoryStore

from ckptfs import digest, disk, limits
from ckptfs.catalog import contents, copies, identity, mover_requests, remote_contents, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.remote_contents import RemoteState
from ckptfs.clique import membership
from ckptfs.clique.cluster import Cluster, ClusterLocks
from ckptfs.clique.membership import ClusterView, NodeLease
from ckptfs.clique.peer_api import (
    UNKNOWN_BLOCK,
    ContentManifest,
    Offer,
    OnBlock,
    OpenCopy,
    PeerAddress,
    PeerBusy,
    PeerCorrupt,
    PeerFailed,
    PeerRefused,
    PingResult,
    SendResult,
    UrgentBlocks,
)
from ckptfs.errors import CkptfsError, StoreUnreachable
from ckptfs.flow.copy_records import AnnounceCopies
from ckptfs.flow.fetch import Fetch
from ckptfs.flow.host import Host
from ckptfs.flow.repair import Repair
from ckptfs.flow.replicate import Replicate
from ckptfs.flow.replicate.open_files import FsyncReplication
from ckptfs.flow.seal import Seal
from ckptfs.model import ROOT, ContentState, Level, Tier
from ckptfs.peers.messages import Rejection, RejectReason
from ckptfs.peers.transfer_table import TransferTable
from ckptfs.store.kv import Put
from ckptfs.tiers.storage import Tiers

MIB = limits.MIB
LEASE_S = 1_000_000


class Node(LocalNode):
    """One node of the clique."""

    def __init__(self, root: Path, number: int, cluster: "LocalCluster", *, domain: str = "", nvme: bool = False) -> None:
        super().__init__(root)
        self.number = number
        self.cluster = cluster
        self.member = membership.Node(number, root.name, f"{root.name}:7420", number, domain or root.name)
        self.config = replace(self.config, pfs=None, nvme=self.config.nvme if nvme else None, ram_bytes=512 * MIB)
        self.db = Database(root / "state" / "catalog.db", journalled=False, clustered=True)
        identity.set_node_number(self.db, number)
        self.tiers = Tiers.from_config(self.config)
        self.store = MemoryStore(cluster.etcd)
        self.presence = SimpleNamespace(node=self.member, lease_id=cluster.etcd.grant(LEASE_S))
        self.peers = LocalPeers(cluster, self)
        self.renew_host()
        self.alive = True
        self.repair = Repair(self.db, self.told, cluster_of(self))

    def renew_host(self) -> None:
        """With the tiers as they are now."""
        self.host = Host(self.db, self.tiers, 0.5, self.told, cluster_of(self))
        self.table = TransferTable(self.host)

    @property
    def view(self) -> ClusterView:
        return self.cluster.view

    def written(self, name: bytes, data: bytes) -> int:
        """A file that was written and closed here, known everywhere; its content, sealed."""
        content = self.make(name, data)
        self.seal()
        self.publish_shared(content)
        return content

    def rewrite(self, content: int, change: Callable[[bytearray], None]) -> int:
        """Open a file for writing in place, change it, close and seal it; its content then."""
        tier = copies.list_copies(self.db, content)[0].tier
        content = self.reopen(content, tier)
        data = bytearray(self.data(content, tier))
        change(data)
        fd = self.tiers[tier].open(content, os.O_RDWR)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        with self.db.transaction():
            contents.mark_closed(self.db, self.inode(content), content, len(data), 1, 2)
        self.seal()
        self.publish_shared(content)
        return content

    def seal(self) -> None:
        seal = Seal(self.db, self.tiers, self.config, self.told, (Tier.RAM, Tier.NVME))
        run_until_idle(seal)

    def publish_shared(self, content: int) -> None:
        """What `ckptfs.catalog.sharing` does for a content and its file."""
        row = self.row(content)
        value = {
            "node": self.number, "inode": row.inode, "generation": row.generation, "state": int(row.state), "size": row.size,
            "digest": None if row.digest is None else row.digest.hex(), "closed_ns": 1,
        }  # fmt: skip
        self.cluster.put(f"c/{content:016x}", value)
        name = self.db.value("SELECT name FROM entry WHERE child = ?", row.inode)
        self.cluster.put_file(row.inode, content)
        for other in self.cluster.nodes:
            if other is not self and name is not None:
                other.learn(row.inode, name, content, row.size)
                heard = RemoteState(content, row.inode, row.generation, row.size, row.digest, is_open=row.state is ContentState.OPEN)
                remote_contents.record_remote(other.db, heard)

    def learn(self, inode: int, name: bytes, content: int, size: int) -> None:
        """A file that another node made."""
        with self.db.transaction():
            self.db.run("INSERT OR IGNORE INTO entry (parent, name, child) VALUES (?, ?, ?)", ROOT, name, inode)
            self.db.run(
                "INSERT OR REPLACE INTO inode"
                " (id, mode, uid, gid, nlink, size, atime_ns, mtime_ns, ctime_ns, birth_ns, content, generation)"
                " VALUES (?, 33188, 0, 0, 1, ?, 1, 1, 1, 1, ?, 1)",
                inode, size, content,
            )  # fmt: skip

    def lose_ram(self) -> None:
        """What a reboot does."""
        for number in list(self.tiers[Tier.RAM].contents()):
            self.tiers[Tier.RAM].remove(number)
        self.db.run("DELETE FROM copy WHERE tier = 'ram'")

    def kill(self) -> None:
        """The node answers nobody, and its lease runs out."""
        self.alive = False
        self.cluster.etcd.revoke(self.presence.lease_id)
        self.cluster.changed()

    def revive(self) -> None:
        self.alive = True
        self.presence.lease_id = self.cluster.etcd.grant(LEASE_S)
        self.cluster.changed()


class LocalCluster:
    """The nodes, what they share, and faults: `cut` holds names of nodes that nobody reaches although they live."""

    def __init__(self, root: Path, count: int, *, domains: Sequence[str] = (), nvme: bool = False, factor: int = 2) -> None:
        self.factor = factor
        self.etcd = MemoryEtcd()
        self.cut: set[str] = set()
        self.nodes: list[Node] = []
        self.store = MemoryStore(self.etcd)
        self.view = ClusterView()
        for number in range(1, count + 1):
            self.nodes.append(Node(root / f"n{number}", number, self, domain=domains[number - 1] if domains else "", nvme=nvme))
        self.changed()

    def changed(self) -> None:
        """Every node that lives sees who lives."""
        self.view = membership.build_view(node.member for node in self.nodes if node.alive)
        for node in self.nodes:
            if node.alive:
                with contextlib.suppress(StoreUnreachable):
                    node.repair.step()

    def put(self, key: str, value: object) -> None:
        self.store.commit([], [Put(key.encode(), json.dumps(value).encode())])

    def put_file(self, inode: int, content: int) -> None:
        """Say that a file has this content."""
        zero = dict.fromkeys(("uid", "gid", "rdev", "size", "generation", "atime_ns", "mtime_ns", "ctime_ns", "birth_ns", "complete"), 0)
        file = {"mode": 0o100644, "target": None, "parent": 0, "names": [[ROOT, "file"]], "content": content}
        self.put(f"i/{inode:016x}", {**zero, **file})

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.member.name == name)


def make_cluster(root: Path, count: int, **options: Any) -> tuple[Any, ...]:
    """Return a cluster and each of its nodes."""
    cluster = LocalCluster(root, count, **options)
    return cluster, *cluster.nodes


class LocalPeers:
    """`Peers` that call the other nodes' shelves. `fault(act, node)` may raise, or change what is sent."""

    def __init__(self, cluster: LocalCluster, here: Node) -> None:
        self._cluster = cluster
        self._here = here
        self.sent: list[tuple[str, int, int]] = []
        self.together: list[int] = []
        self.fault: Callable[[str, str], None] = lambda act, name: None
        self.spoil: set[str] = set()
        self.asked: list[tuple[str, str]] = []

    def fail(self, act: str, times: int) -> list[int]:
        """Let the next `times` calls of `act` fail; the number that is left is the only item of the answer."""
        left = [times]

        def fault(called: str, _: str) -> None:
            if called == act and left[0] > 0:
                left[0] -= 1
                raise PeerFailed("try again")

        self.fault = fault
        return left

    def _host_of(self, act: str, node: PeerAddress) -> Host:
        self.asked.append((act, node.name))
        self.fault(act, node.name)
        there = self._cluster.node(node.name)
        if not there.alive or not self._here.alive or {node.name, self._here.member.name} & self._cluster.cut:
            raise PeerFailed(f"{node.name} does not answer")
        return there.host

    def send(self, node: PeerAddress, offer: Offer, source_fd: int, *, is_wanted: Callable[[], bool] = lambda: True) -> SendResult:
        host = self._host_of("send", node)
        try:
            reception = host.begin_reception(replace(offer, sender=self._here.member.name))
        except (CkptfsError, OSError) as failure:
            raise PeerRefused(str(failure), failure.errno or 5) from failure
        moved = 0
        for number in reception.missing_blocks:
            data = os.pread(source_fd, limits.BLOCK_BYTES, number * limits.BLOCK_BYTES)[: offer.size - number * limits.BLOCK_BYTES]
            if not is_wanted() or digest.hash_block(data) != offer.blocks[16 * number : 16 * number + 16]:
                host.abort_reception(reception.token)
                raise PeerCorrupt("these are not the bytes that were offered")
            try:
                self.fault("block", node.name)
            except PeerFailed:
                host.abort_reception(reception.token)
                raise
            os.pwrite(reception.fd, data, number * limits.BLOCK_BYTES)
            moved += len(data)
        verified = host.finish_reception(reception.token) and not offer.is_early
        self.sent.append((node.name, offer.content, moved))
        return SendResult(len(reception.missing_blocks), moved, verified)

    def send_many(self, node: PeerAddress, offers: Sequence[tuple[Offer, int]]) -> list[SendResult | PeerFailed]:
        self.fault("many", node.name)
        assert 1 < len(offers) <= limits.PEER_BATCH_MAX and sum(offer.size for offer, _ in offers) <= limits.PEER_BATCH_BYTES_MAX
        found: list[SendResult | PeerFailed] = []
        for offer, fd in offers:
            try:
                found.append(self.send(node, offer, fd))
            except (PeerRefused, PeerCorrupt) as failure:
                found.append(failure)
        self.together.append(len(offers))
        return found

    @contextlib.contextmanager
    def _lent(self, node: PeerAddress, content: int, expected: bytes, can_wait: bool) -> Iterator[OpenCopy]:
        """A copy of another node, within the bounds that its peer server has."""
        me, there = self._here.member.name, self._cluster.node(node.name)
        self._host_of("fetch", node)
        with contextlib.ExitStack() as opened:
            opened.callback(there.table.end_reading, me, content)
            try:
                copy = opened.enter_context(there.table.lend_copy(me, content, expected, can_wait=can_wait))
            except Rejection as refusal:
                raise (PeerBusy if refusal.reason is RejectReason.TOO_MANY else PeerRefused)(str(refusal), refusal.reason) from refusal
            except CkptfsError as refusal:
                raise PeerRefused(str(refusal), refusal.errno) from refusal
            yield copy

    def fetch(
        self, sources: Sequence[PeerAddress], manifest: ContentManifest, blocks: Sequence[int], target_fd: int,
        on_block: OnBlock = lambda number: None, urgent_blocks: UrgentBlocks = tuple, *, can_wait: bool = False,
    ) -> int:  # fmt: skip
        left, moved = list(blocks), 0
        failure = PeerFailed("no source")
        for node in sources:
            try:
                with self._lent(node, manifest.content, manifest.digest, can_wait) as copy:
                    while left:
                        first = urgent_blocks()
                        left.sort(key=lambda number: number not in first)
                        self.fault("fetch block", node.name)
                        data = bytearray(os.pread(copy.fd, limits.BLOCK_BYTES, left[0] * limits.BLOCK_BYTES))
                        if node.name in self.spoil and data:
                            data[0] ^= 1
                        if digest.hash_block(data) != manifest.blocks[16 * left[0] : 16 * left[0] + 16]:
                            raise PeerCorrupt(f"{node.name} lies")
                        os.pwrite(target_fd, data, left[0] * limits.BLOCK_BYTES)
                        moved += len(data)
                        on_block(left.pop(0))
                return moved
            except PeerFailed as refusal:
                failure = failure if isinstance(failure, PeerBusy) else refusal
        if left:
            raise failure
        return moved

    def get_manifest(
        self, node: PeerAddress, content: int, expected: bytes | None, *, timeout_s: float = limits.PEER_STALL_S, can_wait: bool = False
    ) -> ContentManifest:
        self._host_of("record", node)
        me, there = self._here.member.name, self._cluster.node(node.name)
        try:
            copy = there.table.describe_copy(me, content, expected, can_wait=can_wait)
        except Rejection as refusal:
            raise PeerBusy(str(refusal), refusal.reason) from refusal
        except CkptfsError as refusal:
            raise PeerRefused(str(refusal), refusal.errno) from refusal
        return copy

    def request_seal(self, node: PeerAddress, content: int, timeout_s: float) -> ContentManifest | None:
        there = self._cluster.node(node.name)
        host = self._host_of("seal_soon", node)
        there.seal()
        try:
            copy = host.seal_and_open(content, min(timeout_s, 0.1))
        except CkptfsError as refusal:
            raise PeerRefused(str(refusal), refusal.errno) from refusal
        if copy is None:
            return None
        os.close(copy.fd)
        return copy

    def release_copies(self, node: PeerAddress, contents_: Sequence[int]) -> None:
        self._host_of("forget", node).release_copies(contents_)

    def ping(self, node: PeerAddress) -> PingResult:
        self._host_of("ping", node)
        return PingResult(0.001, 0.0)

    def rank(self, nodes: Sequence[PeerAddress]) -> list[PeerAddress]:
        return list(nodes)

    def close_except(self, names: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        pass


def early(data: bytes, content: int, inode: int, stable: int) -> Offer:
    """An early offer of the first `stable` blocks."""
    pieces = [data[start : start + limits.BLOCK_BYTES] for start in range(0, len(data), limits.BLOCK_BYTES)]
    blocks = b"".join(digest.hash_block(piece) if number < stable else UNKNOWN_BLOCK for number, piece in enumerate(pieces))
    return Offer(content, inode, 1, len(data), None, blocks)


def offer_of(node: Node, content: int) -> Offer:
    """What `node` would offer of a sealed content of its own."""
    row = node.row(content)
    assert row.state is ContentState.SEALED and row.digest is not None
    return Offer(content, row.inode, row.generation, row.size, row.digest, row.block_digests or b"")


def is_at_rest(flow: Replicate) -> bool:
    """Nothing is queued or being sent, and no thread is about to plan what to send next."""
    return not any(queue.threads for queue in flow._queues._queues.values())


def cluster_of(node: Node) -> Cluster:
    """What the flows of a node know of the others."""
    locks = ClusterLocks(node.store, cast(NodeLease, node.presence))
    return Cluster(node.db, node.number, node.cluster.factor, 1, node.peers, node.store, lambda: node.view, locks)


def send_copy(source: Node, target: Node, content: int) -> bool:
    """Send a sealed content; True if the target verified it."""
    fd = source.tiers[Tier.RAM].open(content)
    with disk.closing(fd):
        return source.peers.send(target.member, offer_of(source, content), fd).is_verified


def replicate_of(node: Node) -> Replicate:
    return Replicate(node.db, node.tiers, node.told, cluster_of(node))


def replicate(node: Node, content: int) -> Replicate:
    """Copy until the file that holds a content is `clique`; the flow that did it."""
    flow = replicate_of(node)
    until(lambda: level(node, content) is Level.CLIQUE, flow.step)
    return flow


def until(condition: Callable[[], object], step: Callable[[], object] = lambda: None) -> None:
    """Steps until a condition holds, at most a minute."""
    end, pause = time.monotonic() + 60, threading.Event()
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        step()
        pause.wait(0.005)


def level(node: Node, content: int) -> Level:
    """The level of the file that holds a content, as `node` knows it."""
    return summary.get_level(node.db, node.inode(content))


def fetch_of(node: Node) -> Fetch:
    return Fetch(node.db, node.tiers, node.config, node.told, cluster_of(node))


def bring(node: Node, inode: int, argument: str = "", flow: Fetch | None = None) -> mover_requests.MoverRequest:
    """Have a file fetched; the answered want."""
    flow = flow or fetch_of(node)
    want = mover_requests.insert_request(node.db, mover_requests.FETCH, inode, argument)

    row = mover_requests.get(node.db, want)

    def answered() -> bool:
        nonlocal row
        row = mover_requests.get(node.db, want)
        return row is None or row.state != mover_requests.OPEN

    until(answered, flow.step)
    assert row is not None
    return row


def is_done(node: Node, want: int) -> bool:
    row = mover_requests.get(node.db, want)
    return row is not None and row.state == mover_requests.DONE


def request_fsync(node: Node, content: int, argument: str = "1") -> int:
    return mover_requests.insert_request(node.db, mover_requests.REPLICATE_NOW, node.inode(content), argument)


def fsync_to_peers(node: Node, content: int) -> None:
    """Have an open file copied as fsync=clique does."""
    flow, want = FsyncReplication(node.db, node.tiers, node.told, cluster_of(node)), request_fsync(node, content, os.urandom(4).hex())
    until(lambda: is_done(node, want), flow.step)


def replicated(cluster: LocalCluster, name: bytes, data: bytes) -> int:
    """A file of node 1 that node 2 holds, and of which the store knows."""
    one, two = cluster.nodes[:2]
    content = one.written(name, data)
    replicate(one, content)
    AnnounceCopies(two.db, cluster_of(two)).step()
    return content
