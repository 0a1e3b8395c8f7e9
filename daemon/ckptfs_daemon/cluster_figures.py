"""What `ckptfs status --cluster` shows: the records of all nodes in the shared store, and the figures that each keeps there.

A node puts its figures at `s/<number>`, under the lease of its record, so they go when it goes; nobody reads them but who asks for this.
If we die here: nothing was changed.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable

import trio

from ckptfs import limits
from ckptfs.catalog import holding, identity, peers
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import island
from ckptfs.catalog.store import Put, Store, prefix_end, scan
from ckptfs.clique import holders, membership, placement
from ckptfs.clique.membership import Node, World
from ckptfs.config import Config
from ckptfs.errors import CkptfsError
from ckptfs.protocol import control_pb2 as pb

FIGURES = b"s/"
LEASE_LOOK_S = 0.5


def figures_key(number: int) -> bytes:
    """Where a node's figures are."""
    return FIGURES + b"%08x" % number


def told(db: Database) -> bytes:
    """This node's figures, as they are stored. They change only when something else does than the time."""
    (behind_files, behind_bytes, _), (held_files, held_bytes) = peers.lag(db), holding.held(db)
    figures = {
        "oldest_ns": peers.oldest_lacking(db), "behind_files": behind_files, "behind_bytes": behind_bytes,
        "held_files": held_files, "held_bytes": held_bytes,
    }  # fmt: skip
    return json.dumps(figures, separators=(",", ":")).encode()


async def tell(db: Database, store: Store, number: int, lease: Callable[[], int]) -> None:
    """The task: keep this node's figures in the store, under the lease that its record has now (0: it has none)."""
    before: tuple[bytes, int] | None = None
    while True:
        # Not told is not lost: somebody who looks sees older figures, and the next round brings them.
        with contextlib.suppress(CkptfsError):
            before = await trio.to_thread.run_sync(_tell_once, db, store, figures_key(number), lease(), before, abandon_on_cancel=True)
        await trio.sleep(limits.FIGURES_INTERVAL_S if before else LEASE_LOOK_S)


def _tell_once(db: Database, store: Store, key: bytes, lease: int, before: tuple[bytes, int] | None) -> tuple[bytes, int] | None:
    """Put the figures if they, or the lease, are others than those that were put last; what is there then."""
    now = told(db), lease
    if lease and now != before:
        store.commit([], [Put(key, now[0], lease)])
        return now
    return before


class ClusterFigures:
    """Gathers a Cluster. Used by several threads."""

    def __init__(self, config: Config, db: Database, store: Store) -> None:
        self._config = config
        self._db = db
        self._store = store

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

    def described(self) -> pb.Cluster:
        """The cluster now; as it was known last when the store does not answer."""
        config = self._config
        answer = pb.Cluster(
            name=config.cluster or "", node=config.node or "", number=identity.number(self._db), etcd=", ".join(config.etcd),
            replication_factor=config.replication_factor, island=island.since(self._db) != 0,
        )  # fmt: skip
        try:
            nodes = [node for _, value in self._scan(membership.NODES) if (node := membership.from_value(value)) is not None]
            figures = dict(self._scan(FIGURES))
        except CkptfsError:
            answer.island = True
            nodes, figures = [], {}
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


def _tell(member: pb.Member, figures: bytes) -> None:
    """Fill in what a node told; a newer or broken one may have written anything."""
    try:
        found = json.loads(figures)
        oldest_s = int(found["oldest_ns"]) / 1e9
        member.lag_s = max(0.0, time.time() - oldest_s) if oldest_s else 0.0
        for name in ("behind_files", "behind_bytes", "held_files", "held_bytes"):
            setattr(member, name, int(found[name]))
        member.told = True
    except (ValueError, KeyError, TypeError):
        member.told = False
