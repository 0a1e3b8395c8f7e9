"""What `ckptfs status --cluster` shows: the records of all nodes in the shared store, and the figures that each keeps there.

A node puts its figures at `s/<number>`, under the lease of its record, so they go when it goes; nobody reads them but who asks for this.
If we die here: nothing was changed.
"""

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import trio

from ckptfs import limits
from ckptfs.catalog import belonging, holding, identity, peers
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import alone, truth
from ckptfs.catalog.store import Put, Store, prefix_end, scan
from ckptfs.clique import holders, membership, placement
from ckptfs.clique.keys import Identity
from ckptfs.clique.membership import Node, World
from ckptfs.config import Config
from ckptfs.errors import CkptfsError
from ckptfs.flow.replicate.queues import Load
from ckptfs.protocol import control_pb2 as pb
from ckptfs_daemon.cluster_probe import Answer, Ping, Probe
from ckptfs_daemon.control_figures import KEPT_RATIO, Kept

FIGURES = b"s/"
LEASE_LOOK_S = 0.5


def figures_key(number: int) -> bytes:
    """Where a node's figures are."""
    return FIGURES + b"%08x" % number


def told(db: Database) -> bytes:
    """This node's figures, as they are stored. They change only when something else does than the time."""
    held_files, held_bytes = holding.held(db)
    figures = {"oldest_ns": peers.oldest_lacking(db), "held_files": held_files, "held_bytes": held_bytes, **progress(db)}
    return json.dumps(figures, separators=(",", ":")).encode()


def progress(db: Database) -> dict[str, int]:
    """How far replication, refill and repair are, by the names that `Clique` and `Member` have for it."""
    (behind_files, behind_bytes, _), (wanted, there) = peers.lag(db), peers.copies_of_lacking(db)
    (refill_files, refill_bytes), (repair_files, repair_bytes) = peers.to_refill(db), peers.to_repair(db)
    return {
        "behind_files": behind_files, "behind_bytes": behind_bytes, "copies_wanted": wanted, "copies_there": there,
        "refill_files": refill_files, "refill_bytes": refill_bytes, "repair_files": repair_files, "repair_bytes": repair_bytes,
    }  # fmt: skip


async def tell(db: Database, store: Store, number: int, lease: Callable[[], int]) -> None:
    """The task: keep this node's figures in the store, under the lease that its record has now (0: it has none)."""
    before: tuple[bytes, int] | None = None
    while True:
        # Not told is not lost: somebody who looks sees older figures, and the next round brings them.
        begun = trio.current_time()
        with contextlib.suppress(CkptfsError):
            before = await trio.to_thread.run_sync(_tell_once, db, store, figures_key(number), lease(), before, abandon_on_cancel=True)
        # Counting in a large catalog takes a while, and must not take it from those who work.
        rest_s = KEPT_RATIO * (trio.current_time() - begun)
        await trio.sleep(max(rest_s, limits.FIGURES_INTERVAL_S) if before else LEASE_LOOK_S)


def _tell_once(db: Database, store: Store, key: bytes, lease: int, before: tuple[bytes, int] | None) -> tuple[bytes, int] | None:
    """Put the figures if they, or the lease, are others than those that were put last; what is there then."""
    now = told(db), lease
    if lease and now != before:
        store.commit([], [Put(key, now[0], lease)])
        return now
    return before


@dataclass(frozen=True, slots=True)
class Transport:
    """Who knows what moves: what the queues hold, what was measured of the other nodes, and what this node's server does for them."""

    loads: Callable[[], list[Load]]
    measured: Callable[[], dict[str, dict[str, float | None]]]
    served: Callable[[], dict[str, Any]]
    ping: Ping


def _links(loads: list[Load], measured: dict[str, dict[str, float | None]]) -> list[pb.Link]:
    """A link for each node with which there was something to do, by name."""
    by_name = {load.node: load for load in loads}
    links = []
    for name in sorted(by_name.keys() | measured.keys()):
        load, found = by_name.get(name, Load(name, 0, 0, 0, 0)), measured.get(name, {})
        rtt_s, bytes_per_s = found.get("rtt_s"), found.get("bytes_per_s")
        link = pb.Link(node=name, rtt_s=-1 if rtt_s is None else rtt_s, bytes_per_s=-1 if bytes_per_s is None else bytes_per_s)
        link.waiting_files, link.waiting_bytes = load.waiting_files, load.waiting_bytes
        link.sending_files, link.sending_bytes = load.sending_files, load.sending_bytes
        link.doubtful = bool(found.get("failed"))
        links.append(link)
    return links


class ClusterFigures:
    """Gathers a Cluster. Used by several threads."""

    def __init__(
        self, config: Config, db: Database, store: Store, transport: Transport | None = None, identity: Identity | None = None
    ) -> None:
        """`identity`: the keys that this node shows."""
        self._config = config
        self._db = db
        self._store = store
        self._transport = transport
        self._keys = identity
        self._probe = None if transport is None else Probe(transport.ping)
        self._progress = Kept(lambda: progress(db))

    def refused(self) -> dict[str, dict[str, int]]:
        """{node: {reason: how often it was refused}}."""
        return {} if self._transport is None else self._transport.served().get("refused", {})

    def under_way(self) -> pb.Clique:
        """What is under way between this node and the others."""
        answer = pb.Clique(lag_s=peers.lag(self._db)[2])
        for name, count in self._progress.now().items():
            setattr(answer, name, count)
        if self._transport is not None:
            served = self._transport.served()
            answer.receiving, answer.lending = served.get("transfers", 0), served.get("loans", 0)
            answer.links.extend(_links(self._transport.loads(), self._transport.measured()))
        return answer

    def ask_for(self, inodes: Iterable[int]) -> None:
        """Learn from the store what it says of these files now, and what the PFS shows of them; then who has what they hold."""
        inodes = list(inodes)
        with contextlib.suppress(CkptfsError):
            truth.look_up(self._db, self._store, *inodes)
        self.ask_for_copies(inodes)

    def ask_for_copies(self, inodes: Iterable[int]) -> None:
        """Learn from the store who has what other nodes wrote of these files: of that this node is not told by itself."""
        here = identity.number(self._db)
        contents = [number for inode in inodes if (number := peers.strange_content(self._db, inode)) is not None]
        with contextlib.suppress(CkptfsError):
            for start in range(0, len(contents), holders.LOOKED_AT_MAX):
                holders.refresh(self._db, self._store, contents[start : start + holders.LOOKED_AT_MAX], here)

    def is_alone(self) -> bool:
        """Whether no other node lives, as far as is known."""
        return len(peers.living(self._db)) < 2

    def examined(self) -> pb.Cluster:
        """The same, and what the nodes that live say when they are asked themselves."""
        answer = self.described()
        if self._keys is not None:
            answer.keys = str(self._config.keys)
            answer.keys_expire_s = (self._keys.expires - datetime.datetime.now(datetime.UTC)).total_seconds()
        try:
            self._scan(membership.node_key(answer.number))
        except CkptfsError as failure:
            answer.etcd_trouble = str(failure)
        known = {node.number: node for node in self._nodes_or_last()}
        others = [known[member.number] for member in answer.members if member.number in known and member.number != answer.number]
        found = {} if self._probe is None else self._probe.answers(others)
        for member in answer.members:
            _answered(member, found.get(member.number))
        return answer

    def _nodes_or_last(self) -> list[Node]:
        """Every node's record; those that were known last when the store does not answer."""
        try:
            return self._records()
        except CkptfsError:
            return self._last_nodes()

    def _last_nodes(self) -> list[Node]:
        return [node for record in belonging.last_world(self._db) if (node := membership.from_value(record)) is not None]

    def described(self) -> pb.Cluster:
        """The cluster now; as it was known last when the store does not answer."""
        config = self._config
        answer = pb.Cluster(
            name=config.cluster or "", node=config.node or "", number=identity.number(self._db), etcd=", ".join(config.etcd),
            replication_factor=config.replication_factor, island=alone.since(self._db) != 0,
        )  # fmt: skip
        try:
            nodes = self._records()
            figures = dict(self._scan(FIGURES))
        except CkptfsError:
            answer.island = True
            nodes, figures = self._last_nodes(), {}
        world = membership.world(nodes)
        answer.members.extend(self._living(world, node, figures.get(figures_key(node.number))) for node in world.nodes)
        # A node that came back without its catalog has another number now; its former life is nobody's concern.
        names = {node.name for node in world.nodes}
        answer.members.extend(
            pb.Member(name=name, number=number, domain=domain, alive=alive and answer.island)
            for number, name, domain, alive in sorted(peers.known(self._db), key=lambda one: one[1])
            if number not in world and name not in names
        )
        return answer

    def _records(self) -> list[Node]:
        return [node for _, value in self._scan(membership.NODES) if (node := membership.from_value(value)) is not None]

    def _scan(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        return [(item.key, item.value) for _, item in scan(self._store, prefix, prefix_end(prefix))]

    def _living(self, world: World, node: Node, figures: bytes | None) -> pb.Member:
        config = self._config
        peers = placement.peers_of(world, node.number, config.replication_factor, config.replication_jump)
        answer = pb.Member(
            name=node.name, number=node.number, alive=True, address=node.address, rank=node.rank, domain=node.domain,
            capacity_bytes=node.capacity_bytes, peers=[peer.name for peer in peers],
        )  # fmt: skip
        if figures is not None:
            _tell(answer, figures)
        return answer


def _answered(member: pb.Member, answer: Answer | None) -> None:
    """Fill in what a node said when it was asked."""
    if answer is None:
        return
    member.probed = True
    if isinstance(answer, str):
        member.silent = answer
    else:
        member.rtt_s, member.clock_s = answer.rtt_s or 0.0, answer.clock_s or 0.0


def _tell(member: pb.Member, figures: bytes) -> None:
    """Fill in what a node told; a newer or broken one may have written anything."""
    try:
        found = json.loads(figures)
        oldest_s = int(found["oldest_ns"]) / 1e9
        member.lag_s = max(0.0, time.time() - oldest_s) if oldest_s else 0.0
        for name in ("behind_files", "behind_bytes", "held_files", "held_bytes"):
            setattr(member, name, int(found[name]))
        for name in ("copies_wanted", "copies_there", "refill_files", "refill_bytes", "repair_files", "repair_bytes"):
            setattr(member, name, int(found.get(name, 0)))  # Older nodes do not tell these.
        member.told = True
    except (ValueError, KeyError, TypeError):
        member.told = False
