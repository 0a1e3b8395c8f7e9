"""Wires what the mover has to do with the other nodes of its cluster. Read `Neighbours` as the table of contents.

If we die here: peers end what we left half done, and the next mover joins again under the same number.
"""

import contextlib
import logging
from typing import Any

import trio

from ckptfs import limits
from ckptfs.catalog import identity, settling
from ckptfs.catalog.database import Database
from ckptfs.catalog.same_store import SameStore
from ckptfs.catalog.sharing import truth
from ckptfs.clique import keys
from ckptfs.clique.membership import Change
from ckptfs.clique.revoked import Revoked
from ckptfs.clique.surroundings import Surroundings
from ckptfs.config import Config
from ckptfs.errors import CkptfsError
from ckptfs.flow.ahead import Ahead
from ckptfs.flow.bury import Bury
from ckptfs.flow.fall_back import FallBack
from ckptfs.flow.hold import Hold
from ckptfs.flow.reconcile import Reconcile
from ckptfs.flow.repair import Repair
from ckptfs.flow.replicate import Replicate
from ckptfs.flow.secure import Secure
from ckptfs.flow.secure.regularly import Regularly
from ckptfs.flow.take_over import TakeOver
from ckptfs.flow.tell import Tell
from ckptfs.model import Bulk, Notify, Tier
from ckptfs.tiers.place import Places
from ckptfs_daemon import cluster_figures, peer_server
from ckptfs_daemon.cluster_figures import ClusterFigures, Transport
from ckptfs_daemon.cluster_store import open_store
from ckptfs_daemon.lanes import Flow
from ckptfs_daemon.member import Member, describe
from ckptfs_daemon.peer_client import PeerClient
from ckptfs_daemon.peer_server import PeerServer

log = logging.getLogger(__name__)

LOCAL = (Tier.RAM, Tier.NVME)
TROUBLE = "trouble:peers"


class Neighbours:
    """The other nodes, for this node's flows, and this node for theirs. Only in a mount with `cluster`."""

    def __init__(self, db: Database, places: Places, config: Config, notify: Notify) -> None:
        assert config.cluster is not None
        self._db = db
        self._config = config
        self._identity = None if config.keys is None else keys.load_for(config.keys, config.node, config.cluster)
        self._store = SameStore(open_store(config), db)
        self._revoked = Revoked(config.keys)
        self._peers = PeerClient(config.node, config.cluster, self._identity, bulk=config.bulk is Bulk.SOCKET, revoked=self._revoked)
        capacity = sum(places[tier].room().total for tier in LOCAL if tier in places)
        node = describe(config, db, identity.number(db), int(config.peer_share * capacity))
        self.member = Member(db, self._store, node, lambda key, value: settling.report(db, key, value))
        self.member.subscribe(self._follow)
        self.around = Surroundings(
            node.number, config.replication_factor, config.replication_jump, self._peers, self._store, lambda: self.member.world,
            self.member.claims, lambda: self.member.presence.lease,
        )  # fmt: skip
        self._served: PeerServer | None = None
        self._hold = Hold(db, places, config.peer_share, notify, self.around)
        self._replicate = Replicate(db, places, notify, self.around)
        transport = Transport(self._replicate.loads, self._peers.figures, self._serving, self._peers.ping)
        self.figures = ClusterFigures(config, db, self._store, transport, self._identity)
        self._tell = Tell(db, self.around)
        self._repair = Repair(db, notify, self.around)
        self._take_over = TakeOver(db, notify, self.around)
        self._fall_back = FallBack(db, places, notify, self.around)
        self._reconcile = Reconcile(db, places, notify, self.around, self._hold.doubted)
        self._bury = Bury(db, self.around)
        self._secure = Secure(db, places, notify, self.around)
        self._regularly = Regularly(db, places, self.around)
        self._ahead = Ahead(db, places, self.around)

    def lanes(self) -> list[tuple[str, Flow]]:
        """(name, flow) of every lane that only a cluster has."""
        return [
            ("replicate", self._replicate), ("tell", self._tell), ("repair", self._repair), ("reconcile", self._reconcile),
            ("fall-back", self._fall_back), ("hold", self._hold), ("ahead", self._ahead),
            ("copy open files", self._regularly), ("bury", self._bury),
            *([("take over", self._take_over)] if self._config.pfs is not None else ()),
            *((f"secure {number}", self._secure) for number in range(1, limits.SECURES_MAX + 1)),
        ]  # fmt: skip

    def find(self, inode: int) -> None:
        """Learn where the PFS shows a file now: another node may have moved it, or what is above it."""
        with contextlib.suppress(CkptfsError):
            truth.look_up(self._db, self._store, inode)

    def prepare(self) -> None:
        """Once, before the first step."""
        self._tell.prepare()

    async def run(self) -> None:
        """Live among them until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.member.run, name="member")
                nursery.start_soon(peer_server.serve, self._server, self._serves, self._serves_not, name="peers")
                nursery.start_soon(self._tell_figures, name="figures")
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._close)

    def _server(self) -> PeerServer:
        assert self._config.cluster is not None
        bulk = self._config.bulk is Bulk.SOCKET
        return PeerServer(self._hold, self._config.listen, self._config.cluster, self._identity, bulk=bulk, revoked=self._revoked)

    def _serves(self, server: PeerServer) -> None:
        self._served = server
        settling.report(self._db, TROUBLE, None)

    def _serves_not(self, what: str) -> None:
        remedy = f"see who else listens on {self._config.listen}, or give another listen="
        settling.report(self._db, TROUBLE, {"what": f"other nodes cannot reach this one: {what}", "path": "", "remedy": remedy})

    def _serving(self) -> dict[str, Any]:
        return self._served.figures() if self._served else {}

    async def _tell_figures(self) -> None:
        await cluster_figures.tell(self._db, self._store, self.member.number, lambda: self.member.presence.lease)

    def _follow(self, change: Change) -> None:
        self._peers.keep([node.name for node in change.after.nodes])
        for node in (*change.died, *change.returned):
            if self._served is not None:
                self._served.left(node.name)

    def _close(self) -> None:
        self._replicate.close()
        self._peers.close()
        self._store.close()
