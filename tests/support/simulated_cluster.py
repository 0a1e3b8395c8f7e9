"""Hundreds of whole nodes in one process and in virtual time, and what they ask of the store that they share.

A node has a catalog and tiers of its own, the mount's sharing of the namespace, and the mover's lanes of all flows that ask the store or
other nodes: seal, replicate, announce, repair, reconcile, salvage, take-over, write-back, fetch, membership with lease and watch, figures.
Only FUSE, the network between nodes and etcd itself are not there: peers call one another's host, and the store is `SimulatedEtcd`.

`measure` takes a cluster through checkpoints and events, and returns what each cost.
"""

import contextlib
import errno
import logging
import os
import random
import resource
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import trio
import trio.testing
from ckptfs_daemon.control import cluster_status
from ckptfs_daemon.mover.lanes import Flow, Lane, Lanes
from ckptfs_daemon.mover.membership_service import MembershipService, record_node_start
from clique_world import LocalPeers
from shared_catalogs import Node as Station
from shared_catalogs import run_seeded
from simulated_store import BACKGROUND, SimulatedEtcd, SimulatedStore, SimulatedWatch, Usage, VirtualTime
from write_back_world import memory

from ckptfs import limits
from ckptfs.catalog import contents, copies, identity, journal, mover_requests
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.membership import NODES_END, NODES_PREFIX, Node, register
from ckptfs.coherence.store_loss import EpochCheckedStore
from ckptfs.config import Config
from ckptfs.config.schema import RetentionRule
from ckptfs.flow.copy_records import AnnounceCopies, DropDeadRecords
from ckptfs.flow.fetch import Fetch
from ckptfs.flow.find_lost import FindLost
from ckptfs.flow.host import Host
from ckptfs.flow.inspect_file import InspectFile
from ckptfs.flow.reclaim import Reclaim
from ckptfs.flow.reconcile import Reconcile
from ckptfs.flow.recover import Recover
from ckptfs.flow.repair import Repair
from ckptfs.flow.replicate import Replicate
from ckptfs.flow.salvage import Salvage
from ckptfs.flow.scan import Scan
from ckptfs.flow.seal import Seal
from ckptfs.flow.take_over import TakeOver
from ckptfs.flow.write_back.coordination import ClusterWriteBack
from ckptfs.model import ROOT, Inode, Tier
from ckptfs.peers.transfer_table import TransferTable
from ckptfs.series.expiry import build_hold_check
from ckptfs.tiers.storage import Tiers

if TYPE_CHECKING:
    from simulated_mount import SimulatedMount

FILES = 2
"""That each node writes in a checkpoint."""
BARRIER_S = 0.05
"""Ranks leave a barrier within this time."""
SETTLE_S = 60.0
IDLE_S = 120.0


class SimulatedMembership(MembershipService):
    """The mover's, with a watch that a task waits for."""

    async def _watch_nodes(self, revision: int) -> None:
        watch = self._store.watch(NODES_PREFIX, NODES_END, revision)
        assert isinstance(watch, SimulatedWatch)
        try:
            while True:
                self._apply_events(await watch.wait())
        finally:
            watch.close()


class SimulatedMover:
    """One life of a mover process."""

    def __init__(self, node: "SimulatedNode") -> None:
        db, config, tiers = node.db, node.config, node.tiers
        self._node = node
        self._store = store = EpochCheckedStore(node.store, db)
        self.membership = SimulatedMembership(db, store, record_node_start(config, db, node.number, 1 << 38), lambda _key, _value: None)
        self._lease = lambda: self.membership.node_lease.lease_id
        self.cluster = Cluster(
            db,
            node.number,
            config.replication_factor,
            1,
            node.peers,
            store,
            lambda: self.membership.view,
            self.membership.locks,
        )
        node.member = self.membership.node_lease.node
        node.host = Host(db, tiers, 0.5, self, self.cluster)
        node.table = TransferTable(node.host)
        self._recover = Recover(db, tiers, self)
        self.seal = Seal(db, tiers, config, self, (Tier.RAM,))
        announce, fetch = AnnounceCopies(db, self.cluster), Fetch(db, tiers, config, self, self.cluster)
        flows: list[tuple[str, Flow]] = [
            ("seal", self.seal), ("reclaim", Reclaim(db, tiers, config, self, (Tier.RAM,))),
            ("replicate", Replicate(db, tiers, self, self.cluster)), ("announce", announce), ("repair", Repair(db, self, self.cluster)),
            ("reconcile", Reconcile(db, tiers, self, self.cluster, node.host.reported_unneeded)), ("fetch", fetch),
            ("salvage", Salvage(db, tiers, self, self.cluster)), ("inspect", InspectFile(db, self, self.cluster)), ("host", node.host),
            ("dead records", DropDeadRecords(db, self.cluster)), ("find lost", FindLost(db, self.cluster)),
        ]  # fmt: skip
        self._prepare: list[Callable[[], object]] = [self._recover.run, announce.prepare, fetch.prepare]
        if config.pfs is not None:
            scan, write_back = Scan(db, tiers, config, self, self.cluster), ClusterWriteBack(db, tiers, config, self, self.cluster)
            flows += [("scan", scan), ("write back", write_back), ("take over", TakeOver(db, self, self.cluster))]
            self._prepare += [write_back.prepare, scan.prepare]
        self.lanes = Lanes([Lane(name, flow, lambda _key, _value: None) for name, flow in flows])
        self.membership.subscribe(lambda _: self.lanes.wake())

    async def run(self) -> None:
        """Until cancelled, as a process until it is killed."""
        for act in self._prepare:
            act()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.membership.run, name="membership")
            nursery.start_soon(self.lanes.run, name="lanes")
            figures = cluster_status.publish_figures
            nursery.start_soon(figures, self._node.db, self._store, self._node.number, self._lease, name="figures")

    # --- what flows tell -----------------------------------------------------------------------------------------------

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """The kernel keeps no names of a cluster."""

    def invalidate_inode(self, inode: int) -> None:
        """The kernel keeps no attributes of a cluster."""

    def notify_replies(self) -> None:
        self._node.replied.set()
        self._node.replied = trio.Event()

    def notify_sealed(self) -> None:
        self._node.on_sealed()

    def wake_lanes(self, urgent_lane: str = "") -> None:
        self.lanes.wake()
        if urgent_lane:
            self.lanes.wake_now(urgent_lane)


class SimulatedNode(Station):
    """One node: its catalog, its tiers, its mount's side of the tree, and its mover."""

    store: SimulatedStore
    member: Node
    host: Host
    table: TransferTable
    mount: "SimulatedMount"

    def __init__(self, cluster: "SimulatedCluster", number: int) -> None:
        name = f"n{number:05}"
        place = cluster.place / name
        super().__init__(place, number, SimulatedStore(cluster.etcd, number), journalled=cluster.pfs is not None, has_mover=True)
        register(EpochCheckedStore(self.store, self.db), name, identity.get_catalog_id(self.db), number)
        (place / "ram").mkdir()
        self.name, self.cluster = name, cluster
        self.config = Config(
            name="simulated", mountpoint=place / "mnt", state=place, ram_bytes=512 * limits.MIB, pfs=cluster.pfs, cluster="c", node=name,
            rank=number, address=f"{name}.cluster.example.org:7420", failure_domain=name, replication_factor=cluster.factor,
            retention=cluster.retention,
        )  # fmt: skip
        self.db.holds_back = build_hold_check(self.config.retention)
        self.tiers = Tiers.from_config(self.config, journal.get_instance_id(self.db), lambda: copies.get_tier_uuid(self.db, Tier.PFS))
        self.peers = LocalPeers(cluster, self)  # type: ignore[arg-type]
        self.alive = True
        self.replied = trio.Event()
        self.on_sealed: Callable[[], None] = lambda: None
        self.before_change: Callable[[int], Awaitable[None]] = self._change_at_once
        self.tracking = trio.CancelScope()
        self._mover_life = trio.CancelScope()
        self._life = trio.CancelScope()

    async def live(self) -> None:
        """Until it is killed."""
        with self._life:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.sharing.run, name="names")
                while True:
                    with trio.CancelScope() as self._mover_life:
                        self.mover = SimulatedMover(self)
                        await self.mover.run()

    async def track(self, run: Callable[[], Awaitable[None]]) -> None:
        """Track sets until it is killed."""
        with self.tracking:
            await run()

    def kill(self) -> None:
        self.alive = False
        self.tracking.cancel()
        self._life.cancel()

    def restart_mover(self) -> None:
        """kill -9; the supervisor starts the next one at once."""
        self._mover_life.cancel()

    def seal(self) -> None:
        """Seal what is closed: a peer asks for it."""
        while self.mover.seal.step():
            pass

    # --- what applications do -----------------------------------------------------------------------------------------

    async def ensure_directory(self, path: str) -> None:
        """mkdir -p of the last part."""
        with contextlib.suppress(FileExistsError):
            await self.mkdir(path)

    async def write(self, path: str, data: bytes) -> int:
        """Create, write, close; the content."""
        inode = (await self.make(path)).id
        with self.db.transaction():
            content = contents.insert_content(self.db, inode, Tier.RAM)
            fd = self.tiers[Tier.RAM].create(content)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            now_ns = self.cluster.time.now_ns()
            contents.mark_closed(self.db, inode, content, len(data), now_ns, now_ns)
        await self.sharing.wait_published()
        self.mover.wake_lanes()
        return content

    async def _change_at_once(self, inode: int) -> None:
        """No tracker of sets wants to look at it first."""

    async def unlink(self, path: str) -> Inode:
        await self.before_change((await self.stat(path)).id)
        return await super().unlink(path)

    async def rename(self, path: str, new: str, flags: int = 0) -> Inode | None:
        with contextlib.suppress(FileNotFoundError):
            await self.before_change((await self.stat(new)).id)
        return await super().rename(path, new, flags)

    async def visit_root(self) -> None:
        """Look for what lies on the PFS already, as the first look-up does."""
        await self._request(mover_requests.SCAN, ROOT)

    async def read(self, path: str) -> int:
        """Open for reading, and wait for its bytes; the errno, 0 if they came."""
        return await self._request(mover_requests.FETCH, (await self.stat(path)).id)

    async def _request(self, kind: str, inode: int) -> int:
        request = mover_requests.insert_request(self.db, kind, inode, wait_s=limits.FETCH_STALL_S)
        self.mover.wake_lanes(mover_requests.LANE_BY_KIND[kind])
        while mover_requests.is_open(self.db, request):
            with trio.move_on_after(limits.REQUEST_POLL_S):
                await self.replied.wait()
        answer = mover_requests.get(self.db, request)
        return errno.ETIMEDOUT if answer is None or answer.state == mover_requests.OPEN else answer.error

    async def remove_tree(self, path: str) -> None:
        """rm -r."""
        for name in await self.names(path):
            inside = f"{path}/{name.decode()}"
            await (self.remove_tree(inside) if (await self.stat(inside)).is_directory else self.unlink(inside))
        await self.rmdir(path)
        self.mover.wake_lanes()


class SimulatedCluster:
    """The nodes. `cut` holds names of nodes that no peer reaches."""

    def __init__(self, count: int, place: Path, dice: random.Random, *, factor: int, with_pfs: bool) -> None:
        self.time, self.dice = VirtualTime(), dice
        self.count, self.place, self.factor = count, place, factor
        self.pfs = place / "pfs" if with_pfs else None
        if self.pfs is not None:
            self.pfs.mkdir()
        self.cut: set[str] = set()
        self.retention: tuple[RetentionRule, ...] = ()
        self.nodes: dict[int, SimulatedNode] = {}
        self._by_name: dict[str, SimulatedNode] = {}

    def node(self, name: str) -> SimulatedNode:
        return self._by_name[name]

    @property
    def living(self) -> list[SimulatedNode]:
        return [node for node in self.nodes.values() if node.alive]

    async def add(self, nursery: trio.Nursery, number: int) -> SimulatedNode:
        node = self.nodes[number] = SimulatedNode(self, number)
        self._by_name[node.name] = node
        await self.time.settle()
        nursery.start_soon(node.live, name=f"node {number}")
        return node

    async def each(self, act: Callable[[SimulatedNode], Awaitable[None]]) -> None:
        """All nodes that live do it, as ranks behind a barrier."""

        async def behind_barrier(node: SimulatedNode, wait_s: float) -> None:
            await trio.sleep(wait_s)
            await act(node)

        async with trio.open_nursery() as nursery:
            for node in self.living:
                nursery.start_soon(behind_barrier, node, self.dice.uniform(0, BARRIER_S), name="names")

    async def write_checkpoint(self, step: int) -> None:
        """Each rank makes a directory in that of the step, and files in it; then rank 0 says that it is whole."""

        async def save(node: SimulatedNode) -> None:
            await node.ensure_directory(f"step_{step}")
            await node.mkdir(f"step_{step}/rank_{node.number}")
            for number in range(FILES):
                await node.write(f"step_{step}/rank_{node.number}/part_{number}.pt", self.dice.randbytes(32))

        await self.each(save)
        first = self.living[0]
        await first.write(f"step_{step}/done", b"%d" % step)

    def count_copies_short(self) -> int:
        """How many contents have too few copies, as their nodes know."""
        return sum(node.db.value("SELECT count(*) FROM content WHERE under_replicated = 1 AND state = 2") for node in self.living)


@dataclass
class Costs:
    """What a cluster of `nodes` asked of its store: `phases` by name."""

    nodes: int
    checkpoints: int = 0
    phases: dict[str, Usage] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def checkpoint(self) -> tuple[float, float]:
        """(operations, bytes) of a node for one checkpoint; what it asks while idle is not counted."""
        usage, idle = self.phases["checkpoint"], self.phases["idle"]
        share = usage.seconds / idle.seconds
        parts = self.nodes * self.checkpoints
        return (usage.total - share * idle.total) / parts, (usage.total_bytes - share * idle.total_bytes) / parts

    @property
    def idle_rate(self) -> float:
        """Operations of a node in a second in which no application does anything."""
        return self.phases["idle"].total / self.phases["idle"].seconds / self.nodes


async def _run_outage(cluster: SimulatedCluster) -> Costs:
    """No member of etcd answers for a while; before and after it the nodes write checkpoints."""
    costs = Costs(cluster.count)
    cluster.etcd = SimulatedEtcd(cluster.time)
    async with trio.open_nursery() as nursery:
        for number in range(1, cluster.count + 1):
            await cluster.add(nursery, number)
        await trio.sleep(SETTLE_S)
        await cluster.each(SimulatedNode.visit_root)
        await cluster.write_checkpoint(0)
        await trio.sleep(SETTLE_S)
        cluster.etcd.take_usage()
        cluster.etcd.is_down = True
        await trio.sleep(45.0)
        costs.phases["outage"] = cluster.etcd.take_usage()
        cluster.etcd.is_down = False
        await trio.sleep(SETTLE_S)
        costs.phases["return"] = cluster.etcd.take_usage()
        costs.problems += [f"{node.name} is disconnected" for node in cluster.living if node.sharing.is_disconnected]
        await cluster.write_checkpoint(1)
        await trio.sleep(SETTLE_S)
        if short := cluster.count_copies_short():
            costs.problems.append(f"{short} contents lack copies")
        nursery.cancel_scope.cancel()
    return costs


def measure_outage(count: int) -> Costs:
    """Measure what nodes ask while etcd is away, and when it is back."""
    return run_simulated(count, _run_outage)


EVENTS = ("death", "mover restart", "join")
MODEL_BYTES = 2 * limits.FETCH_SHARED_BYTES_MIN


async def _run_readers(cluster: SimulatedCluster, reading_s: float) -> Costs:
    """All nodes open one file of the PFS, which the first one takes `reading_s` to read."""
    costs = Costs(cluster.count)
    cluster.etcd = SimulatedEtcd(cluster.time)
    assert cluster.pfs is not None
    (cluster.pfs / "model.pt").write_bytes(bytes(MODEL_BYTES))

    async def read(node: SimulatedNode) -> None:
        if failure := await node.read("model.pt"):
            costs.problems.append(f"{node.name}: {os.strerror(failure)}")

    async with trio.open_nursery() as nursery:
        for number in range(1, cluster.count + 1):
            await cluster.add(nursery, number)
        await trio.sleep(SETTLE_S)
        await cluster.each(SimulatedNode.visit_root)
        await trio.sleep(SETTLE_S)
        first = cluster.nodes[1]
        lock = first.mover.membership.locks.try_acquire(f"fetch/file/{(await first.stat('model.pt')).id:016x}")
        assert lock is not None
        await cluster.time.settle()
        cluster.etcd.take_usage()
        async with trio.open_nursery() as readers:
            for node in list(cluster.nodes.values())[1:]:
                readers.start_soon(read, node, name="names")
            await trio.sleep(reading_s)
            costs.phases["readers"] = cluster.etcd.take_usage()
            first.mover.membership.locks.release(lock)
        nursery.cancel_scope.cancel()
    return costs


def measure_readers(count: int, *, reading_s: float = 20.0) -> Costs:
    """Measure what nodes ask that wait for another one to read a file from the PFS."""
    return run_simulated(count, lambda cluster: _run_readers(cluster, reading_s))


async def _run_phases(cluster: SimulatedCluster, checkpoints: int) -> Costs:
    costs = Costs(cluster.count, checkpoints)
    cluster.etcd = SimulatedEtcd(cluster.time)

    def end_phase(name: str) -> None:
        costs.phases[name] = cluster.etcd.take_usage()
        if short := cluster.count_copies_short():
            costs.problems.append(f"after {name}: {short} contents lack copies")

    async with trio.open_nursery() as nursery:
        for number in range(1, cluster.count + 1):
            await cluster.add(nursery, number)
        await trio.sleep(SETTLE_S)
        if cluster.pfs is not None:
            await cluster.each(SimulatedNode.visit_root)
        costs.problems += [f"{node.name} sees too few" for node in cluster.living if len(node.mover.membership.view) < cluster.count]
        end_phase("start")
        for step in range(checkpoints):
            await cluster.write_checkpoint(step)
            await trio.sleep(SETTLE_S)
            if step:
                await cluster.living[0].remove_tree(f"step_{step - 1}")
                await trio.sleep(SETTLE_S)
        end_phase("checkpoint")
        await trio.sleep(IDLE_S)
        end_phase("idle")
        cluster.nodes[2].kill()
        await trio.sleep(limits.NODE_LEASE_S + SETTLE_S)
        end_phase("death")
        cluster.nodes[3].restart_mover()
        await trio.sleep(SETTLE_S)
        end_phase("mover restart")
        await cluster.add(nursery, cluster.count + 1)
        await trio.sleep(SETTLE_S)
        end_phase("join")
        nursery.cancel_scope.cancel()
    return costs


class ErrorsOnly(logging.Handler):
    """Keeps what is logged as an error: a step that failed unexpectedly would otherwise only look cheap."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@contextlib.contextmanager
def _quiet(errors: ErrorsOnly) -> Iterator[None]:
    """Room for the files of hundreds of catalogs, and no log of what hundreds of nodes do, but for errors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    root = logging.getLogger()
    level = root.manager.disable
    logging.disable(logging.WARNING)
    root.addHandler(errors)
    try:
        yield
    finally:
        root.removeHandler(errors)
        logging.disable(level)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def run_simulated(
    count: int, act: Callable[[SimulatedCluster], Awaitable[Costs]], *, seed: int = 1, factor: int = 2, with_pfs: bool = True
) -> Costs:
    """Do `act` with a cluster that has no nodes yet."""

    found: list[Costs] = []
    errors = ErrorsOnly()

    async def main() -> None:
        random.seed(seed)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_act, name="names")

    async def run_act() -> None:
        found.append(await act(cluster))

    place = memory()
    cluster = SimulatedCluster(count, place, random.Random(seed), factor=factor, with_pfs=with_pfs)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        stack.callback(lambda: [node.db.close() for node in cluster.nodes.values()])
        stack.enter_context(_quiet(errors))
        stack.enter_context(cluster.time.in_force())
        run_seeded(seed, main, clock=trio.testing.MockClock(autojump_threshold=0))
        found[0].problems += errors.found
        return found[0]


def measure(count: int, *, checkpoints: int = 2, seed: int = 1, factor: int = 2, with_pfs: bool = True) -> Costs:
    """Take a cluster through its phases."""
    return run_simulated(count, lambda cluster: _run_phases(cluster, checkpoints), seed=seed, factor=factor, with_pfs=with_pfs)


def fit_slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(value at 0, slope) of the line of least squares."""
    mean_x, mean_y = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


def table(costs: list[Costs]) -> str:
    names = ("ops/checkpoint", "kB/checkpoint", "ops/s idle", "latency ms", *(f"{event}: nodes in 1 s" for event in EVENTS))
    lines = [f"{'nodes':>7} " + " ".join(f"{name:>14}" for name in names)]
    for cost in costs:
        cells = [f"{cost.checkpoint[0]:.1f}", f"{cost.checkpoint[1] / 1000:.1f}", f"{cost.idle_rate:.2f}"]
        cells.append(f"{1000 * cost.phases['checkpoint'].latency_s_mean:.1f}")
        cells += [str(cost.phases[event].nodes_in_a_second) for event in EVENTS]
        lines.append(f"{cost.nodes:>7} " + " ".join(f"{cell:>{len(name)}}" for cell, name in zip(cells, names, strict=True)))
    return "\n".join(lines)


def breakdown(usage: Usage, nodes: int) -> str:
    """Operations of a node by cause."""
    return ", ".join(f"{cause} {count / nodes:.2f}" for cause, count in usage.operations.most_common() if cause not in BACKGROUND)
