"""The figures of `ckptfs status --cluster`: the records of all nodes in the store, and their figures.

A node publishes its figures at `s/<number>` under the lease of its record, so they disappear with it. Only this command reads them.
For `ckptfs doctor`, the other nodes are also pinged: whether they answer, how fast, and what their clocks say. Any user of the machine may
ask, so the results are cached for a while, and only one round runs at a time.
"""

import contextlib
import datetime
import json
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import trio

from ckptfs import limits
from ckptfs.catalog import identity, peer_copies, remote_contents, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.identity import list_last_members
from ckptfs.catalog.summary import ListedFile
from ckptfs.clique import locations, membership, placement
from ckptfs.clique.certificates import Identity
from ckptfs.clique.membership import ClusterView, Node
from ckptfs.clique.peer_api import PeerFailed, PingResult
from ckptfs.coherence import key_state, pfs_coordination, read, value_checks
from ckptfs.coherence.keys import INODE, SharedKey
from ckptfs.config import Config
from ckptfs.config.schema import is_loopback
from ckptfs.errors import CkptfsError, Compacted
from ckptfs.flow.replicate.peer_queues import PeerLoad
from ckptfs.model import ContentState
from ckptfs.protocol import control_pb2 as pb
from ckptfs.store.etcd import EtcdStore, open_store
from ckptfs.store.kv import Get, Put, Store, read_all
from ckptfs_daemon.control.status import CACHE_RATIO, CachedFigure

Ping = Callable[[Node], PingResult]

ProbeResult = PingResult | str
"""The reply of a node, or the reason why there is none."""
FIGURES_PREFIX = b"s/"

PROGRESS_FIELDS = {
    "behind_files": "under_replicated_files", "behind_bytes": "under_replicated_bytes", "copies_wanted": "copies_wanted",
    "copies_there": "copies_present", "refill_files": "rebuild_files", "refill_bytes": "rebuild_bytes", "repair_files": "repair_files",
    "repair_bytes": "repair_bytes",
}  # fmt: skip
"""Stored name of a figure: field of control.proto. Nodes of several versions read the stored names, so these stay."""

LEASE_POLL_S = 0.5


def probe_nodes(ping: Ping, nodes: Sequence[Node]) -> dict[int, ProbeResult]:
    """Ping nodes, several at once and at most `limits.PROBED_MAX`; return {number: result}."""

    def probe(node: Node) -> ProbeResult:
        try:
            return ping(node)
        except PeerFailed as failure:
            return str(failure)

    asked = nodes[: limits.PROBED_MAX]
    with ThreadPoolExecutor(limits.PROBES_AT_ONCE, thread_name_prefix="probe") as threads:
        return dict(zip((node.number for node in asked), threads.map(probe, asked), strict=True))


def figures_key(number: int) -> bytes:
    return FIGURES_PREFIX + b"%08x" % number


def encode_figures(db: Database) -> bytes:
    """Return this node's figures as they are stored. They change with the catalog only, not with the time."""
    held_files, held_bytes = remote_contents.count_hosted(db)
    figures = {"oldest_ns": peer_copies.get_replication_lag(db)[2], "held_files": held_files, "held_bytes": held_bytes}
    progress = count_progress(db)
    figures |= {stored: progress[field] for stored, field in PROGRESS_FIELDS.items()}
    return json.dumps(figures, separators=(",", ":")).encode()


def count_progress(db: Database) -> dict[str, int]:
    """Return how far replication, rebuild and repair are: {field of `pb.Clique` and `pb.Member`: count}."""
    (lacking_files, lacking_bytes, _), (wanted, present) = peer_copies.get_replication_lag(db), peer_copies.count_wanted_copies(db)
    counts = (lacking_files, lacking_bytes, wanted, present, *peer_copies.count_rebuildable(db), *peer_copies.count_repairable(db))
    return dict(zip(PROGRESS_FIELDS.values(), counts, strict=True))


async def publish_figures(db: Database, store: Store, number: int, lease: Callable[[], int]) -> None:
    """Keep this node's figures in the store until cancelled, under the lease of its record (0: none).

    Seldom does anyone read them, so while they go on changing they are published less and less often.
    """
    published: tuple[bytes, int] | None = None
    pause_s = limits.FIGURES_INTERVAL_S
    while True:
        begun, previous = trio.current_time(), published
        with contextlib.suppress(CkptfsError):
            published = await trio.to_thread.run_sync(
                _publish_if_changed, db, store, figures_key(number), lease(), previous, abandon_on_cancel=True
            )
        pause_s = limits.FIGURES_INTERVAL_S if published == previous else min(2 * pause_s, limits.FIGURES_INTERVAL_S_MAX)
        # Counting in a large catalog takes long. It must not slow down the flows.
        rest_s = CACHE_RATIO * (trio.current_time() - begun)
        await trio.sleep(max(rest_s, pause_s * random.uniform(0.75, 1.25)) if published else LEASE_POLL_S)


def _publish_if_changed(
    db: Database, store: Store, key: bytes, lease: int, published: tuple[bytes, int] | None
) -> tuple[bytes, int] | None:
    """Publish the figures if they or the lease have changed. Returns what is published."""
    now = encode_figures(db), lease
    if lease and now != published:
        store.commit([], [Put(key, now[0], lease)])
        return now
    return published


@dataclass(frozen=True, slots=True)
class TransportFigures:
    """Sources of figures: the queues, the measurements of the links, this node's server, and the ping."""

    list_loads: Callable[[], list[PeerLoad]]
    get_link_figures: Callable[[], dict[str, dict[str, float | None]]]
    get_server_figures: Callable[[], dict[str, Any]]
    ping: Ping


def _build_links(loads: list[PeerLoad], link_figures: dict[str, dict[str, float | None]]) -> list[pb.Link]:
    """Build a link for each node with traffic, by name."""
    by_name = {load.node: load for load in loads}
    links = []
    for name in sorted(by_name.keys() | link_figures.keys()):
        load, found = by_name.get(name, PeerLoad(name, 0, 0, 0, 0)), link_figures.get(name, {})
        rtt_s, bytes_per_s = found.get("rtt_s"), found.get("bytes_per_s")
        link = pb.Link(node=name, rtt_s=-1 if rtt_s is None else rtt_s, bytes_per_s=-1 if bytes_per_s is None else bytes_per_s)
        link.waiting_files, link.waiting_bytes = load.waiting_files, load.waiting_bytes
        link.sending_files, link.sending_bytes = load.sending_files, load.sending_bytes
        link.failed_recently = bool(found.get("failed"))
        links.append(link)
    return links


def _list_due(done_s: dict[int, float], numbers: list[int]) -> list[int]:
    """Return those of `numbers` that were not done lately; forget what was done long ago."""
    now_s = time.monotonic()
    for number in [number for number, at_s in done_s.items() if now_s >= at_s + limits.COPIES_FRESH_S]:
        del done_s[number]
    return [number for number in numbers if number not in done_s]


def examine_etcd(config: Config) -> pb.EtcdHealth:
    """Ask etcd for its size, quota, alarms, compaction and authentication. Raises StoreUnreachable."""
    with closing(open_store(config)) as store:
        revision, is_compacted = _find_compaction(store)
        status = store.get_member_status(timeout_s=limits.STORE_PROBE_WAIT_S)
        try:
            alarms = store.list_alarms(timeout_s=limits.STORE_PROBE_WAIT_S)
        except CkptfsError:
            alarms = []
    return pb.EtcdHealth(
        size_bytes=status.size_bytes, quota_bytes=status.quota_bytes, alarms=alarms, revision=revision, compacted=is_compacted,
        tls=config.etcd_ca is not None, open=_is_open(config), remote=not all(map(is_loopback, config.etcd)),
    )  # fmt: skip


def _find_compaction(store: EtcdStore) -> tuple[int, bool]:
    """Return (the revision of etcd, whether the first one has been forgotten)."""
    revision = store.read([Get(b"epoch")], timeout_s=limits.STORE_PROBE_WAIT_S).revision
    try:
        store.read([Get(b"epoch", revision=1)], timeout_s=limits.STORE_PROBE_WAIT_S)
    except Compacted:
        return revision, True
    return revision, False


def _is_open(config: Config) -> bool:
    """Return True if etcd answers a client without a certificate."""
    assert config.cluster is not None
    with closing(EtcdStore(config.etcd, config.cluster, ca=config.etcd_ca)) as anonymous:
        try:
            anonymous.read([Get(b"epoch")], timeout_s=limits.STORE_PROBE_WAIT_S)
        except CkptfsError:
            return False
    return True


class ClusterFigures:
    """Builds a Cluster. Thread-safe."""

    def __init__(
        self, config: Config, db: Database, store: Store, transport: TransportFigures | None = None, identity: Identity | None = None,
        examine_store: Callable[[], pb.EtcdHealth] | None = None,
    ) -> None:  # fmt: skip
        """`identity`: the keys of this node. `examine_store` asks etcd how it is. Raises StoreUnreachable."""
        self._examine_store = examine_store
        self._config = config
        self._db = db
        self._store = store
        self._transport = transport
        self._keys = identity
        self._progress = CachedFigure(lambda: count_progress(db))
        self._short = CachedFigure(lambda: peer_copies.count_short(db))
        # Any user of the machine may ask, in a loop: the store is asked for it seldom, and by one thread at a time.
        self._stored = CachedFigure(self._load_stored, limits.CLUSTER_FIGURES_FRESH_S)
        self._probed = CachedFigure(self._build_probed_cluster, limits.CLUSTER_FIGURES_FRESH_S)
        self._refresh_lock = threading.Lock()
        self._refreshed_s: dict[int, float] = {}
        self._lost: set[int] = set()
        self._gone: set[int] = set()
        self._read_s: dict[int, float] = {}

    def get_rejections(self) -> dict[str, dict[str, int]]:
        """Return {node: {reason: count}} of rejected calls."""
        return {} if self._transport is None else self._transport.get_server_figures().get("refused", {})

    def build_clique(self) -> pb.Clique:
        """Build the figures of the traffic between this node and the others."""
        oldest_ns = peer_copies.get_replication_lag(self._db)[2]
        answer = pb.Clique(lag_s=max(0.0, (time.time_ns() - oldest_ns) / 1e9) if oldest_ns else 0.0)
        for name, count in self._progress.get().items():
            setattr(answer, name, count)
        answer.short.extend(pb.Short(copies=missing, files=files) for missing, files in sorted(self._short.get().items()))
        if self._transport is not None:
            server_figures = self._transport.get_server_figures()
            answer.incoming_transfers, answer.outgoing_reads = server_figures.get("transfers", 0), server_figures.get("reads", 0)
            answer.links.extend(_build_links(self._transport.list_loads(), self._transport.get_link_figures()))
        return answer

    def refresh_files(self, inodes: Iterable[int]) -> None:
        """Read from the store the state of files on nodes and on the PFS, and the holders of their contents."""
        inodes = list(inodes)
        with contextlib.suppress(CkptfsError), self._refresh_lock:
            due = _list_due(self._read_s, inodes)
            if due:
                published = {inode for inode in due if not key_state.is_dirty(self._db, SharedKey(INODE, inode))}
                snapshot = pfs_coordination.load_inodes(self._db, self._store, *due)
                self._gone = self._gone - {*due} | {inode for inode in published if not snapshot.is_alive(inode)}
            self._read_s |= dict.fromkeys(due, time.monotonic())
            self._gone &= self._read_s.keys()
        self.refresh_copies(inodes)

    def load_below(self, directory: int) -> set[int]:
        """Return the inodes that nodes have published below a directory; none if the store does not answer."""
        with contextlib.suppress(CkptfsError):
            return read.load_below(self._db, self._store, directory)
        return set()

    def refresh_copies(self, inodes: Iterable[int]) -> None:
        """Read from the store which nodes hold contents of other writers. No node announces these."""
        own_number = identity.get_node_number(self._db)
        contents = [number for inode in inodes if (number := peer_copies.find_remote_content(self._db, inode)) is not None]
        with contextlib.suppress(CkptfsError), self._refresh_lock:
            contents = _list_due(self._refreshed_s, contents)
            for start in range(0, len(contents), locations.LOAD_CONTENTS_MAX):
                found = locations.refresh(self._db, self._store, contents[start : start + locations.LOAD_CONTENTS_MAX], own_number)
                self._lost = self._lost - found.keys() | {number for number, one in found.items() if one.is_lost and not one.copies}
            self._refreshed_s |= dict.fromkeys(contents, time.monotonic())
            self._lost &= self._refreshed_s.keys()

    def load_file(self, inode: int) -> ListedFile | None:
        """Return a file of the catalog; None if it is gone, on this node or in the store.

        A content is LOST if its writer on another node has lost it.
        """
        found = None if inode in self._gone else summary.get_listed_file(self._db, inode)
        content = None if found is None else found.record.content
        if found is None or content is None or content.id not in self._lost:
            return found
        return replace(found, record=replace(found.record, content=replace(content, state=ContentState.LOST)))

    def find_missing_domains(self) -> str:
        """Say why no file can reach the level clique now; "" if enough failure domains have a live node."""
        domains = peer_copies.count_domains(self._db)
        if domains.are_enough:
            return ""
        return f"the level clique needs live nodes in {domains.required} failure domains, and there are some in {domains.alive}"

    def build_probed_cluster(self) -> pb.Cluster:
        """Build the cluster, and ping its live nodes. Concurrent callers share the answer."""
        return self._probed.get()

    def _build_probed_cluster(self) -> pb.Cluster:
        answer = self.build_cluster()
        if self._keys is not None:
            answer.keys = str(self._config.keys)
            answer.keys_expire_s = (self._keys.expires - datetime.datetime.now(datetime.UTC)).total_seconds()
        try:
            self._scan(membership.node_key(answer.number))
            if self._examine_store is not None:
                answer.etcd_health.CopyFrom(self._examine_store())
        except CkptfsError as failure:
            answer.etcd_trouble = str(failure)
        known = {node.number: node for node in self._list_nodes_or_cached()}
        others = [known[member.number] for member in answer.members if member.number in known and member.number != answer.number]
        found = {} if self._transport is None else probe_nodes(self._transport.ping, others)
        for member in answer.members:
            _set_probe_result(member, found.get(member.number))
        return answer

    def _list_nodes_or_cached(self) -> list[Node]:
        """Return every node's record, or the last known ones if the store does not answer."""
        try:
            return self._stored.get()[0]
        except CkptfsError:
            return self._list_cached_nodes()

    def _list_cached_nodes(self) -> list[Node]:
        return [node for record in list_last_members(self._db) if (node := membership.decode_node(record)) is not None]

    def build_cluster(self) -> pb.Cluster:
        """Build the cluster as it is now, or as it was last known if the store does not answer."""
        config = self._config
        answer = pb.Cluster(
            name=config.cluster or "", node=config.node or "", number=identity.get_node_number(self._db), etcd=", ".join(config.etcd),
            replication_factor=config.replication_factor, island=key_state.get_disconnected_ns(self._db) != 0,
        )  # fmt: skip
        try:
            nodes, figures = self._stored.get()
        except CkptfsError:
            answer.island = True
            nodes, figures = self._list_cached_nodes(), {}
        view = membership.build_view(nodes)
        answer.members.extend(self._build_member(view, node, figures.get(figures_key(node.number))) for node in view.nodes)
        # A node that returned without its catalog has another number now; its old record is left out.
        names = {node.name for node in view.nodes}
        answer.members.extend(
            pb.Member(name=node.name, number=node.number, domain=node.domain, alive=node.is_alive and answer.island)
            for node in sorted(peer_copies.list_nodes(self._db).values(), key=lambda one: one.name)
            if node.number not in view and node.name not in names
        )
        return answer

    def _load_stored(self) -> tuple[list[Node], dict[bytes, bytes]]:
        nodes = [node for _, value in self._scan(membership.NODES_PREFIX) if (node := membership.decode_node(value)) is not None]
        return nodes, dict(self._scan(FIGURES_PREFIX))

    def _scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        return [(item.key, item.value) for item in read_all(self._store, prefix)[1]]

    def _build_member(self, view: ClusterView, node: Node, figures: bytes | None) -> pb.Member:
        config = self._config
        peers = placement.choose_peers(view, node.number, config.replication_factor, config.replication_jump)
        answer = pb.Member(
            name=node.name, number=node.number, alive=True, address=node.address, rank=node.rank, domain=node.domain,
            capacity_bytes=node.capacity_bytes, peers=[peer.name for peer in peers],
        )  # fmt: skip
        if figures is not None:
            _set_figures(answer, figures)
        return answer


def _set_probe_result(member: pb.Member, answer: ProbeResult | None) -> None:
    if answer is None:
        return
    member.probed = True
    if isinstance(answer, str):
        member.probe_error = answer
    else:
        member.rtt_s, member.clock_offset_s = answer.rtt_s, answer.clock_offset_s


def _set_figures(member: pb.Member, figures: bytes) -> None:
    """Fill in published figures. A newer or faulty node may have written anything."""
    try:
        found = value_checks.parse_json(figures)
        oldest_s = int(found["oldest_ns"]) / 1e9
        member.lag_s = max(0.0, time.time() - oldest_s) if oldest_s else 0.0
        member.held_files, member.held_bytes = int(found["held_files"]), int(found["held_bytes"])
        for stored, field in PROGRESS_FIELDS.items():
            # Older nodes publish only the first two of these.
            setattr(member, field, int(found[stored] if stored.startswith("behind") else found.get(stored, 0)))
        member.has_figures = True
    except (ValueError, KeyError, TypeError, OverflowError):
        member.has_figures = False
