"""Nodes that share one tree and write it back to one PFS, in one process: what mounts and movers do, interleaved at every disk operation.

A step of write-back runs in a thread of its own. At a disk operation, when the dice say so, it stands still while an application changes
something on any node, or another node's write-back takes a step, which may be interrupted in the same way. The same seed does the same.
"""

import contextlib
import errno
import functools
import os
import random
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import trio
from local_node import Told
from memory_store import WAIT_S, MemoryEtcd, MemoryStore
from shared_catalogs import Node, running, settled, stored, stored_tree
from write_back_world import Killed, Tree, intercepted, pfs_tree

from ckptfs import limits
from ckptfs.catalog import contents, copies, exposure, identity, journal, mover_requests, namespace, peer_copies, remote_contents
from ckptfs.catalog.exposure import UrgentOrder
from ckptfs.catalog.remote_contents import RemoteState
from ckptfs.clique import membership
from ckptfs.clique.cluster import Cluster, ClusterLocks
from ckptfs.clique.membership import ClusterView, NodeBinding, NodeLease, name_key
from ckptfs.coherence.keys import INODE, PFS_STATE
from ckptfs.config import Config
from ckptfs.digest import RunningDigest
from ckptfs.errors import CkptfsError, TierUnavailable
from ckptfs.flow.scan import Scan
from ckptfs.flow.take_over import TakeOver
from ckptfs.flow.write_back.coordination import ClusterWriteBack
from ckptfs.limits import MIB
from ckptfs.model import ContentState, Tier
from ckptfs.store.kv import Get, Outcome, Put
from ckptfs.tiers.storage import Tiers

DEPTH_MAX = 3
# What a directory that no name may be added to or taken from refuses.
NAME_CHANGES = {"create", "make", "put", "link", "move", "swap", "unlink", "rmdir", "conflict", "discard", "late", "probe"}


class WatchedStore(MemoryStore):
    """A store before each of whose reads `before_read` is called."""

    def before_read(self) -> None:
        """Nothing until the cluster is there."""

    def read(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Outcome:
        self.before_read()
        return super().read(gets, timeout_s=timeout_s)


class Writer(Node):
    """A node with tiers and a write-back."""

    def __init__(self, root: Path, number: int, etcd: MemoryEtcd, pfs: Path) -> None:
        super().__init__(root, number, WatchedStore(etcd), journalled=True)
        self.config = Config(name="test", mountpoint=root / "mnt", state=root, ram_bytes=64 * MIB, pfs=pfs)
        (root / "ram").mkdir(exist_ok=True)
        self.tiers = Tiers.from_config(self.config)
        _ = self.tiers[Tier.PFS].uuid
        self.told = Told()
        self.bytes: dict[int, bytes] = {}
        self.member = membership.Node(number, f"n{number}", f"n{number}:7420", number, f"n{number}")
        catalog = identity.get_catalog_id(self.db)
        self.store.commit([], [Put(name_key(self.member.name), NodeBinding(number, catalog).encode())])
        self.clock_s = 0.0
        self.presence = NodeLease(self.store, self.member, catalog, lambda: self.clock_s)
        self.live()
        self.others: list[Writer] = []
        nobody: Any = None
        claims = ClusterLocks(self.store, self.presence)
        self.cluster = Cluster(self.db, number, 2, 1, nobody, self.store, self.see, claims)
        self.take_over = TakeOver(self.db, self.told, self.cluster)
        self.busy = self.is_scanning = False
        self.is_killed = False
        self.revive()

    def see(self) -> ClusterView:
        """Who lives."""
        return membership.build_view(node.member for node in self.others if node.alive)

    def live(self) -> None:
        self.presence.renew()
        self.alive = True

    def die(self) -> None:
        self.store.revoke(self.presence.lease_id)
        self.clock_s += 2 * limits.NODE_LEASE_S
        self.alive = False

    def hold(self, other: "Writer", content: int) -> None:
        """What replication does: a verified copy of another node's content."""
        with os.fdopen(self.tiers[Tier.RAM].create(content), "wb") as file:
            file.write(other.bytes[content])
        row = contents.get_content(other.db, content)
        assert row is not None
        with self.db.transaction():
            remote_contents.record_remote(self.db, RemoteState(content, row.inode, row.generation, row.size, row.digest, row.block_digests))
            self.db.run("INSERT INTO copy (content, tier, state, verified_ns) VALUES (?, 'ram', 1, 1)", content)

    def revive(self) -> None:
        self.write_back = ClusterWriteBack(self.db, self.tiers, self.config, self.told, self.cluster)
        self.scan = Scan(self.db, self.tiers, self.config, self.told, self.cluster)

    async def put(self, path: str, data: bytes, mtime_ns: int = 5) -> int:
        """creat, write, close; the content."""
        parent, name = await self.parent(path)
        await self.sharing.refresh_name(parent, name)
        found = namespace.find_child(self.db, parent, name)
        inode = (await self.make(path)).id if found is None else found.id
        if found is not None and not found.is_file:
            raise IsADirectoryError(errno.EISDIR, path)
        with self.db.transaction():
            content = contents.insert_content(self.db, inode, Tier.RAM)
            with os.fdopen(self.tiers[Tier.RAM].create(content), "wb") as file:
                file.write(data)
        self.bytes[content] = data
        running_digest = RunningDigest()
        running_digest.update(data)
        whole, blocks = running_digest.finish()
        with self.db.transaction():
            contents.mark_closed(self.db, inode, content, len(data), 5, mtime_ns)
        await self.sharing.wait_published()
        row = contents.get_content(self.db, content)
        if row is not None and row.state is ContentState.CLOSED:
            with self.db.transaction():
                contents.mark_sealed(self.db, [contents.SealResult(content, inode, row.change, Tier.RAM, len(data), whole, blocks)])
        await self.sharing.wait_published()
        return content

    async def exchange(self, path: str, new: str) -> None:
        await self.rename(path, new, namespace.EXCHANGE)


class WriterCluster:
    """Some nodes, one PFS, and dice."""

    def __init__(self, root: Path, count: int, seed: int) -> None:
        self.pfs = root / "pfs"
        self.pfs.mkdir()
        self.etcd = MemoryEtcd()
        self.nodes = [Writer(root / f"n{number}", number, self.etcd, self.pfs) for number in range(1, count + 1)]
        for node in self.nodes:
            node.others = self.nodes
            node.store.before_read = self._at_read
            known = [peer_copies.KnownNode(other.number, other.member.name, other.member.domain) for other in self.nodes]
            peer_copies.set_live_nodes(node.db, node.number, 2, known)
        self.dice = random.Random(seed)
        self.disturbing: Callable[[], Any] = self.step_somewhere
        self.disturbance = 0.0
        self.killing = 0.0
        self.cutting = 0.0
        self.hurrying = 0.0
        self.dying = 0.0
        self.dying_at: set[str] = set()
        self.replicates = False
        self.refusing = 0.0
        self.scanning = 0.0
        self.is_pfs_refusing = False
        self.stepping = threading.local()
        self.deadly: set[str] = set()
        self.meanwhile: dict[str, Callable[[], Any]] = {}
        self.depth = 0
        self.serial = 0
        self.log: list[str] = []

    async def run(self, act: Callable[[], Any]) -> Any:
        token = trio.lowlevel.current_trio_token()
        for node in self.nodes:
            node.touching.on_dirty = lambda node=node: token.run_sync_soon(node.sharing.notify_dirty)
        with intercepted(self._at_operation), mock.patch.object(Cluster, "draw_delay_s", lambda *_, **__: 0.0):
            return await running(self.nodes, act)

    def _at_read(self) -> None:
        """Between two reads of the store by a mover, anything may happen, as at a disk operation."""
        if self.scanning and getattr(self.stepping, "node", None) is not None:
            self._at_operation("store:read")

    def _at_operation(self, label: str) -> None:
        node = getattr(self.stepping, "node", None)
        if node is None:
            return
        if node.is_killed:
            raise Killed
        if label in self.meanwhile:
            trio.from_thread.run(self.meanwhile.pop(label))
        if (label in self.dying_at or (self.dying and self.dice.random() < self.dying)) and all(other.alive for other in self.nodes):
            self.dying_at = set()
            self.log.append(f"n{node.number} dies at {label}")
            node.die()
            node.is_killed = True
        if label in self.deadly or self.dice.random() < self.killing:
            self.deadly = set()
            node.is_killed = True
        if node.is_killed:
            raise Killed
        if self.depth < DEPTH_MAX and self.dice.random() < self.disturbance and not node.db.connection.in_transaction:
            trio.from_thread.run(self.disturbing)
        if self.is_pfs_refusing and label.partition(":")[0] == "write_back" and label.partition(":")[2] in NAME_CHANGES:
            raise PermissionError(errno.EPERM, f"refused at {label}")

    # --- movers -------------------------------------------------------------------------------------------------------

    async def step(self, node: Writer) -> bool:
        """One step of its write-back; False: it rests."""
        if node.busy or not node.alive:
            return False
        node.busy, self.depth = True, self.depth + 1

        def step() -> bool:
            before, self.stepping.node = getattr(self.stepping, "node", None), node
            try:
                return node.write_back.step()
            finally:
                self.stepping.node = before

        try:
            more = await trio.to_thread.run_sync(step)
            if self.replicates:
                self.fetch(node)
            return more
        except Killed:
            node.is_killed = False
            node.revive()
            return True
        except TierUnavailable:
            if not self.refusing:
                raise
            return False
        finally:
            node.busy, self.depth = False, self.depth - 1

    async def kill_mover_at(self, node: Writer, label: str) -> None:
        """Let its write-back go on until its mover dies at this disk operation."""
        self.deadly = {label}
        while self.deadly:
            await self.step(node)

    async def step_through(self, node: Writer, label: str, act: Callable[[], Any]) -> None:
        """Let its write-back go on until it comes to this disk operation, at which `act` happens."""
        self.meanwhile[label] = act
        while self.meanwhile:
            await self.step(node)

    async def write_back_all(self, node: Writer) -> None:
        """Let its write-back go on until it rests."""
        while await self.step(node):
            pass

    def fetch(self, node: Writer) -> None:
        """Answer what its write-back asks for, as the fetch lane does."""
        for request, inode in node.db.rows("SELECT id, inode FROM mover_request WHERE kind = 'fetch' AND state = 0"):
            content = copies.get_content_id(node.db, inode)
            holder = next((other for other in self.nodes if content in other.bytes), None)
            if holder is None or content is None:
                mover_requests.mark_failed(node.db, request, errno.EIO)
                continue
            if not journal.has_local_copy(node.db, content):
                node.hold(holder, content)
            mover_requests.mark_done(node.db, request)

    async def compare(self, node: Writer, directory: int) -> None:
        """One comparison of a directory with the PFS by its scan."""
        if node.is_scanning or not node.alive:
            return
        mover_requests.insert_request(node.db, mover_requests.SCAN, directory, mover_requests.COMPARE_AGAIN)

        def step() -> None:
            before, self.stepping.node = getattr(self.stepping, "node", None), node
            try:
                with contextlib.suppress(OSError, CkptfsError):  # Its lane tries again.
                    node.scan.step()
            finally:
                self.stepping.node = before

        node.is_scanning, self.depth = True, self.depth + 1
        try:
            await trio.to_thread.run_sync(step)
        except Killed:
            node.is_killed = False
            node.revive()
            node.scan.prepare()
        finally:
            node.is_scanning, self.depth = False, self.depth - 1

    async def take_over(self, node: Writer) -> None:
        """Its survivors' part."""

        def step() -> bool:
            self.stepping.node = node
            return node.take_over.step()

        try:
            while await trio.to_thread.run_sync(step):
                pass
        except Killed:
            node.is_killed = False

    async def step_somewhere(self) -> None:
        await self.step(self.dice.choice(self.nodes))

    async def settle(self) -> None:
        await settled(self.nodes)
        for _ in range(600):
            alive = [node for node in self.nodes if node.alive]
            for node in alive:
                await self.take_over(node)
            worked = [await self.step(node) for node in alive]
            await settled(self.nodes)
            if not any(worked) and not any(self._left(node) for node in alive):
                return
        left = {node.number: node.db.rows("SELECT * FROM journal LIMIT 5") for node in self.nodes}
        raise AssertionError(f"write-back does not come to an end: {left}; {self.log}")

    def _left(self, node: Writer) -> bool:
        return any(node.db.value(f"SELECT 1 FROM {table} LIMIT 1") for table in ("journal", "pfs_batch"))

    # --- applications -------------------------------------------------------------------------------------------------

    async def act_somewhere(self) -> None:
        """A random act of an application on a random node, or a step of its write-back; or that node loses the store, or finds it again."""
        node = self.dice.choice([node for node in self.nodes if node.alive])
        if self.refusing and self.dice.random() < self.refusing:
            self.is_pfs_refusing = not self.is_pfs_refusing
            self.log.append(f"the PFS {'refuses' if self.is_pfs_refusing else 'takes'} names")
            return
        if self.dying and self.dice.random() < 0.05:
            self.return_dead()
            return
        if self.cutting and self.dice.random() < self.cutting:
            node.cut(node.store.reachable)
            self.log.append(f"n{node.number} {'is back' if node.store.reachable else 'is cut off'}")
            return
        if self.hurrying and self.dice.random() < self.hurrying:
            self.hurry(node)
            return
        if self.scanning and self.dice.random() < self.scanning:
            known = [row[0] for row in node.db.rows("SELECT id FROM inode WHERE mode & 61440 = 16384 ORDER BY id")]
            directory = self.dice.choice(known)
            self.log.append(f"n{node.number} scans {namespace.get_path(node.db, directory)!r}")
            await self.compare(node, directory)
            return
        if self.dice.random() < 0.3:
            await self.step(node)
            return
        files, directories = ["a", "b", "d/a", "d/b", "e/a", "d/f/a", "e/f/a"], ["d", "e", "d/f", "e/f"]
        one, two = self.dice.choice(files), self.dice.choice(files)
        if self.dice.random() < 0.2:
            one, two = self.dice.choice(directories), self.dice.choice(directories)
        if self.dice.random() < 0.05:
            two = self.dice.choice(files + directories)
        some = ["put"] * 5 + ["put again"] * 2 + ["mkdir"] * 3 + ["unlink", "unlink", "rmdir", "link", "chmod", "exchange"] + ["rename"] * 3
        kind = self.dice.choice(some)
        if kind in ("mkdir", "rmdir"):
            one = self.dice.choice(directories)
        self.serial += 1
        with contextlib.suppress(OSError, CkptfsError):
            match kind:
                case "put":
                    await node.put(one, b"%d " % self.serial * (1 + self.serial % 3), self.serial)
                case "put again":
                    await node.put(one, self._get_bytes((await node.stat(one)).content), self.serial)
                case "mkdir" | "unlink" | "rmdir":
                    await getattr(node, kind)(one)
                case "rename" | "link" | "exchange":
                    await getattr(node, kind)(one, two)
                case "chmod":
                    await node.set(one, mode=self.dice.choice([0o600, 0o755, 0o640]), mtime_ns=self.serial * 10**9)
            self.log.append(f"n{node.number} {kind} {one} {two if kind in ('rename', 'link', 'exchange') else ''}")

    def return_dead(self) -> None:
        """Let a dead node come back with its catalog."""
        for node in self.nodes:
            if not node.alive and not node.busy:
                self.log.append(f"n{node.number} comes back")
                node.live()
                node.revive()

    def hurry(self, node: Writer) -> None:
        """A drain of a node is short of time: some of its files are urgent from now on."""
        waiting = [row[0] for row in node.db.rows("SELECT DISTINCT inode FROM journal WHERE op = 'content' ORDER BY inode")]
        self.dice.shuffle(waiting)
        groups = (tuple(waiting[:1]), tuple(waiting[1:3]))
        exposure.set_order(node.db, UrgentOrder(groups, is_ahead=True, token="t"), 3600.0)
        self.log.append(f"n{node.number} hurries with {groups}")

    def _get_bytes(self, content: int | None) -> bytes:
        return next((node.bytes[content] for node in self.nodes if content in node.bytes), b"")

    # --- the end ------------------------------------------------------------------------------------------------------

    def shared(self) -> Tree:
        """The tree that the nodes share, as the PFS should show it."""
        values = stored(self.etcd)
        held = {content: data for node in self.nodes for content, data in node.bytes.items()}
        found: Tree = {}
        for path, (inode, mode, _, _) in stored_tree(self.etcd).items():
            value = next(value for key, value in values.items() if key.kind == INODE and key.number == inode)
            if stat.S_ISDIR(mode):
                found[path[1:]] = ("directory", stat.S_IMODE(mode))
            else:
                data = b"" if value["content"] is None else held[value["content"]]
                found[path[1:]] = ("file", data, stat.S_IMODE(mode))
        return found

    def exact(self) -> None:
        """The PFS shows the shared tree, and the store says so."""
        expected, shown = self.shared(), pfs_tree(self.pfs)
        wrong = {path: (shown.get(path), expected.get(path)) for path in {*shown, *expected} if shown.get(path) != expected.get(path)}
        assert not wrong, (wrong, self.log)
        assert [str(path) for path in self.pfs.rglob(".ckptfs.*")] == [], self.log
        values = stored(self.etcd)
        names = {(key.number, key.name): value["child"] for key, value in values.items() if key.kind == "e"}
        places = {(key.number, key.name): value for key, value in values.items() if key.kind == "x"}
        assert {name: value["inode"] for name, value in places.items()} == names, self.log
        assert not any("by" in value for key, value in values.items() if key.kind in "xf"), self.log
        of_inodes = [(key.number, value["names"]) for key, value in values.items() if key.kind == "f"]
        shown_names = {(parent, name.encode("latin-1")): inode for inode, held in of_inodes for parent, name in held}
        assert shown_names == names, ({name: (shown_names.get(name), names.get(name)) for name in {*shown_names, *names}}, self.log)
        assert not [key for key in values if key.kind == "j"], self.log
        for key, value in values.items():
            for number, name in value["names"] if key.kind == PFS_STATE else ():
                found = os.lstat(self._find_path(places, number, name.encode("latin-1")))
                if stat.S_ISREG(found.st_mode):
                    published = value.get("published")
                    known = published and (published[2], published[3], published[4])
                    assert (found.st_size, found.st_mtime_ns, found.st_ino) == known, (name, found, published, self.log)

    def _find_path(self, places: dict[tuple[int, bytes], Any], directory: int, name: bytes) -> bytes:
        above = next((place for place, value in places.items() if value["inode"] == directory), None)
        return os.path.join(os.fsencode(self.pfs) if above is None else self._find_path(places, *above), name)


def in_cluster(test: Callable[..., Any]) -> Callable[..., None]:
    """Run an async test while the nodes of `cluster` publish what they change."""

    @functools.wraps(test)
    def run(cluster: WriterCluster, **fixtures: Any) -> None:
        trio.run(cluster.run, functools.partial(test, cluster, **fixtures))

    return run
