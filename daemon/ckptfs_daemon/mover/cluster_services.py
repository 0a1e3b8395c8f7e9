"""The services of the mover in a cluster: membership, peer client and server, flows between nodes.

`ClusterServices` is the table of contents.

Crash safety: peers end what this node left unfinished, and the next mover joins again under the same number.
"""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import trio

from ckptfs import limits
from ckptfs.catalog import identity, summary
from ckptfs.catalog.database import Database
from ckptfs.clique import certificates
from ckptfs.clique.certificates import RevocationList
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.membership import ViewChange
from ckptfs.coherence import pfs_coordination
from ckptfs.coherence.store_loss import EpochCheckedStore
from ckptfs.config import Config
from ckptfs.errors import CkptfsError
from ckptfs.flow.check_values import CheckValues
from ckptfs.flow.copy_records import AnnounceCopies, DropDeadRecords
from ckptfs.flow.find_lost import FindLost
from ckptfs.flow.host import Host
from ckptfs.flow.inspect_file import InspectFile
from ckptfs.flow.keep_island import KeepIsland
from ckptfs.flow.reconcile import Reconcile
from ckptfs.flow.repair import Repair
from ckptfs.flow.replicate import Replicate
from ckptfs.flow.replicate.early import EarlyReplication
from ckptfs.flow.replicate.open_files import FsyncReplication, PeriodicReplication
from ckptfs.flow.salvage import Salvage
from ckptfs.flow.take_over import TakeOver
from ckptfs.model import LOCAL_TIERS, Notifier
from ckptfs.peers.grpc_server import PeerServer
from ckptfs.peers.peer_client import PeerClient
from ckptfs.store.etcd import open_store
from ckptfs.tiers.storage import Tiers
from ckptfs_daemon.control import cluster_status
from ckptfs_daemon.control.cluster_status import ClusterFigures, TransportFigures
from ckptfs_daemon.mover.lanes import Flow
from ckptfs_daemon.mover.membership_service import MembershipService, record_node_start

log = logging.getLogger(__name__)

TROUBLE = "peers"


class ClusterServices:
    """The services of this node's flows to other nodes, and those of this node to other nodes' flows."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier) -> None:
        assert config.cluster is not None
        self._db, self._tiers, self._config, self._notify = db, tiers, config, notify
        self._identity = None if config.keys is None else certificates.load_for(config.keys, config.node, config.cluster)
        self._store = EpochCheckedStore(open_store(config), db)
        self._revoked = RevocationList(config.keys)
        self._peers = PeerClient(config.node, config.cluster, self._identity, revoked=self._revoked)
        capacity = sum(tiers[tier].get_capacity().total for tier in LOCAL_TIERS if tier in tiers)
        node = record_node_start(config, db, identity.get_node_number(db), int(config.peer_share * capacity))
        self.membership = MembershipService(
            db, self._store, node, lambda where, value: summary.set_trouble(db, where, value), is_member=not config.is_read_only
        )
        self.membership.subscribe(self._apply_view_change)
        self.cluster = Cluster(
            db, node.number, config.replication_factor, config.replication_jump, self._peers, self._store, lambda: self.membership.view,
            self.membership.locks,
        )  # fmt: skip
        self._running_server: PeerServer | None = None
        self._host = Host(db, tiers, config.peer_share, notify, self.cluster)
        self._replicate = Replicate(db, tiers, notify, self.cluster)
        transport = TransportFigures(self._replicate.list_loads, self._peers.get_figures, self._get_server_figures, self._peers.ping)
        self.figures = ClusterFigures(config, db, self._store, transport, self._identity, lambda: cluster_status.examine_etcd(config))
        self._announce = AnnounceCopies(db, self.cluster)

    def list_flows(self) -> list[tuple[str, Flow]]:
        """Return (name, flow) of the lanes of a cluster. A read-only mount gives other nodes nothing."""
        db, tiers, config, notify, cluster = self._db, self._tiers, self._config, self._notify, self.cluster
        assert config.cluster is not None
        found: list[tuple[str, Flow]] = [
            ("inspect", InspectFile(db, notify, cluster)),
            ("values", CheckValues(db, self._store, config.cluster)),
        ]
        if config.is_read_only:
            return found
        fsync_replication = FsyncReplication(db, tiers, notify, cluster)
        found += [
            ("replicate", self._replicate), ("announce", self._announce), ("host", self._host), ("repair", Repair(db, notify, cluster)),
            ("reconcile", Reconcile(db, tiers, notify, cluster, self._host.reported_unneeded)),
            ("salvage", Salvage(db, tiers, notify, cluster)), ("early copies", EarlyReplication(db, tiers, cluster)),
            ("copy open files", PeriodicReplication(db, tiers, cluster)), ("dead records", DropDeadRecords(db, cluster)),
            ("find lost", FindLost(db, cluster)),
            *((f"fsync copies {number}", fsync_replication) for number in range(1, limits.FSYNC_REPLICATIONS_MAX + 1)),
        ]  # fmt: skip
        if config.pfs is not None:
            found += [("take over", TakeOver(db, notify, cluster)), ("island copies", KeepIsland(db, tiers, config))]
        return found

    def refresh_pfs_path(self, inode: int) -> None:
        """Read from the store where a file is on the PFS now: another node may have moved it."""
        with contextlib.suppress(CkptfsError):
            pfs_coordination.load_inodes(self._db, self._store, inode)

    def prepare(self) -> None:
        if not self._config.is_read_only:
            self._announce.prepare()

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.membership.run, name="membership")
                if not self._config.is_read_only:
                    started, failed = self._record_server_started, self._record_server_failed
                    nursery.start_soon(serve_peers, self._build_server, started, failed, name="peers")
                    figures = cluster_status.publish_figures
                    nursery.start_soon(figures, self._db, self._store, self.membership.number, self.cluster.lease, name="figures")
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._close)

    def _build_server(self) -> PeerServer:
        assert self._config.cluster is not None
        return PeerServer(self._host, self._config.listen, self._config.cluster, self._identity, revoked=self._revoked)

    def _record_server_started(self, server: PeerServer) -> None:
        self._running_server = server
        summary.set_trouble(self._db, TROUBLE, None)

    def _record_server_failed(self, what: str) -> None:
        remedy = f"see which process listens on {self._config.listen}, or give another listen="
        summary.set_trouble(self._db, TROUBLE, {"what": f"other nodes cannot reach this one: {what}", "path": "", "remedy": remedy})

    def _get_server_figures(self) -> dict[str, Any]:
        return self._running_server.get_figures() if self._running_server else {}

    def _apply_view_change(self, change: ViewChange) -> None:
        self._peers.close_except([node.name for node in change.after.nodes])
        for node in (*change.dead_nodes, *change.restarted_nodes):
            if self._running_server is not None:
                self._running_server.end_all_of_node(node.name)

    def _close(self) -> None:
        self._replicate.close()
        self._peers.close()
        self._store.close()


async def serve_peers(
    build_server: Callable[[], PeerServer], on_started: Callable[[PeerServer], None], on_start_failed: Callable[[str], None]
) -> None:
    """Serve until cancelled. While the port is taken, call `on_start_failed` and retry."""
    while True:
        try:
            running = await trio.to_thread.run_sync(build_server)
        except (OSError, RuntimeError) as failure:
            what = str(failure).partition("; set GRPC_VERBOSITY")[0]
            log.error("peer server: cannot start: %s; other nodes cannot reach this one until it does", what)
            await trio.to_thread.run_sync(on_start_failed, what)
            await trio.sleep(limits.RETRY_LAST_S)
            continue
        try:
            await trio.to_thread.run_sync(on_started, running)
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(running.stop)
