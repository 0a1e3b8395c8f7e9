"""Who belongs to the cluster: `Node`, `World`, and the records `n/<number>` by which living nodes know one another.

A record is under its node's lease, which is what being alive means to the others. Nothing here changes anything.
If we die here: nothing was changed.

How a catalog becomes a node of a cluster: it is given a number, once and for ever, under the node's name.

A number belongs to one catalog, because it is in the upper bits of every id that the node makes: a node whose catalog was lost gets another
one, lest it makes the ids of its former life again. `number/<name>` says which catalog has the name, `taken/<number>` that the number is
used. A name whose catalog lives cannot be taken by another one; of one that died a moment ago, the lease is waited for.
Numbers are guessed in a range that doubles, so that ten thousand nodes that join at once do not wait in line for one counter.
If we die here: the number is bound to the catalog in the store, and the next start finds it there.

Owns this node's lease and the record under it, which is what being alive means to the others.

`beat` is called every few seconds: it keeps the lease, or takes a new one and puts the record anew when that is gone. The record is put
only while the node's name is still bound to this catalog, so of two daemons with one name at most one lives.
`until_s` is when the lease may have run out at the latest, by our own clock: what only a living node may do ends then (see `claims`).
If we die here: the lease runs out, and the others see us die.

Who lives, as far as this node knows: from what the store shows and tells, in doubt the last that was known.

Leases run out while the store cannot be reached by those who hold them. So a record that is missing means a death only as long as we are in
touch ourselves: what goes while we are not, or just after, counts for a while longer, in which its node can come back.
Pure but for its own state; one thread at a time. If we die here: the next one begins with the last World that was kept, in doubt.
"""

import contextlib
import json
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from ckptfs import limits
from ckptfs.catalog import identity
from ckptfs.catalog.database import Database
from ckptfs.coherence.store_loss import EpochCheckedStore
from ckptfs.config import Config
from ckptfs.errors import InvalidArgument, StoreUnreachable
from ckptfs.store import etcd
from ckptfs.store.kv import Compare, CompareTarget, Get, Item, Operation, Put, Store, prefix_end


@dataclass(frozen=True, slots=True)
class Node:
    """One node, as it describes itself. `domain` fails together; `incarnation` is "<its catalog>.<which start>"."""

    number: int
    name: str
    address: str
    rank: int
    domain: str
    capacity_bytes: int = 0
    incarnation: str = ""

    @property
    def sort_key(self) -> tuple[int, str]:
        """Its place among all nodes."""
        return self.rank, self.name


@dataclass(frozen=True)
class ClusterView:
    """The nodes that live, in the order of their ranks, then names: a snapshot. `memo` is for placement, which is asked the same often."""

    nodes: tuple[Node, ...] = ()
    by_number: Mapping[int, Node] = field(init=False, compare=False, repr=False)
    placement_cache: dict[Any, Any] = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(sorted(self.nodes, key=lambda node: node.sort_key)))
        object.__setattr__(self, "by_number", {node.number: node for node in self.nodes})

    def __contains__(self, number: object) -> bool:
        """Whether the node of this number lives."""
        return number in self.by_number

    def __len__(self) -> int:
        return len(self.nodes)


def build_view(nodes: Iterable[Node]) -> ClusterView:
    """The World of these nodes."""
    return ClusterView(tuple(nodes))


@dataclass(frozen=True, slots=True)
class ViewChange:
    """One World followed by another. `returned`: nodes that live in both, and were started anew meanwhile."""

    before: ClusterView
    after: ClusterView

    @property
    def dead_nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in self.before.nodes if node.number not in self.after)

    @property
    def joined_nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in self.after.nodes if node.number not in self.before)

    @property
    def restarted_nodes(self) -> tuple[Node, ...]:
        both = (node for node in self.after.nodes if node.number in self.before)
        return tuple(node for node in both if node.incarnation != self.before.by_number[node.number].incarnation)


NODES_PREFIX = b"n/"
NODES_END = prefix_end(NODES_PREFIX)


def node_key(number: int) -> bytes:
    """Where the record of a living node is."""
    return NODES_PREFIX + b"%08x" % number


def load_nodes(store: Store) -> tuple[list[Node], int]:
    """(everybody who has a record, the revision at which that was so). Raises Compacted: begin again."""
    nodes: list[Node] = []
    revision, key = 0, NODES_PREFIX
    while True:
        outcome = store.read([Get(key, NODES_END, limit=limits.ETCD_PAGE_ITEMS, revision=revision)])
        revision = revision or outcome.revision
        items = outcome.results[0]
        nodes += (node for item in items if (node := decode_node(item.value)) is not None)
        if len(items) < limits.ETCD_PAGE_ITEMS:
            return nodes, revision
        key = items[-1].key + b"\0"


def list_live(store: Store, numbers: Sequence[int]) -> set[int]:
    """Those of these nodes that hold their leases, as the store says now."""
    results = store.read([Get(node_key(number)) for number in numbers]).results if numbers else ()
    return {number for number, items in zip(numbers, results, strict=True) if items}


def encode_node(node: Node) -> bytes:
    """A record, as it is stored. Every node reads every record, so it is short: fields have no names."""
    return json.dumps(astuple(node), separators=(",", ":")).encode()


def decode_node(value: bytes) -> Node | None:
    """The node of a record; None for what is none, which a newer or broken node may have written."""
    try:
        number, name, address, rank, domain, capacity_bytes, incarnation, *_ = json.loads(value)
        node = Node(int(number), str(name), str(address), int(rank), str(domain), int(capacity_bytes), str(incarnation))
    except (ValueError, TypeError):
        return None
    return node if 0 < node.number <= limits.NODE_NUMBER_MAX else None


NAMES_PREFIX = b"number/"
TAKEN_PREFIX = b"taken/"
NAME_POLL_S = 0.5
GUESSES_MAX = 1000

FIRST_NUMBER_RANGE = 1024
"""Where numbers begin to be guessed: far from those of nodes that a store which lost its data does not know yet."""


class NameTaken(InvalidArgument):
    """Another daemon that lives has this node's name."""


@dataclass(frozen=True, slots=True)
class NodeBinding:
    """What a name stands for: this number, and the catalog (its uuid) that has it."""

    number: int
    catalog: str

    def encode(self) -> bytes:
        return json.dumps([self.number, self.catalog], separators=(",", ":")).encode()


def name_key(name: str) -> bytes:
    """Where it stands whose a name is."""
    return NAMES_PREFIX + name.encode()


def taken_key(number: int) -> bytes:
    """Exists for every number that was ever given."""
    return TAKEN_PREFIX + b"%08x" % number


def register(
    store: Store,
    name: str,
    catalog: str,
    known_number: int = 0,
    *,
    rng: random.Random | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """The number of `catalog` (a uuid), which has the name `name` from now on; `known` is the one it has already, 0 for none.

    Raises NameTaken while another catalog lives under that name, and Unreachable.
    """
    rng = rng or random.Random()
    deadline_s = clock() + limits.NAME_WAIT_S
    for attempt in range(GUESSES_MAX):
        item, bound = _find_binding(store, name)
        if bound is not None and bound.catalog == catalog:
            return bound.number
        while bound is not None and (living := _find_live_node(store, bound)) is not None:
            if clock() >= deadline_s:
                raise _build_taken_error(name, living)
            sleep(NAME_POLL_S)
        if known_number and (other := _find_other_owner(store, known_number, catalog)):
            raise _build_duplicate_error(name, known_number, other)
        number = known_number or rng.randint(1, min(FIRST_NUMBER_RANGE << attempt, limits.NODE_NUMBER_MAX))
        if _bind_name(store, name, item, NodeBinding(number, catalog), known_number):
            return number
    raise InvalidArgument(f"no number could be found for the node {name}", remedy="start it again")


def _find_binding(store: Store, name: str) -> tuple[Item | None, NodeBinding | None]:
    found = store.read([Get(name_key(name))]).results[0]
    if not found:
        return None, None
    number, catalog = json.loads(found[0].value)
    return found[0], NodeBinding(int(number), str(catalog))


def build_reregistration(name: str, catalog: str, number: int, others: Iterable[int], taken: Iterable[Item]) -> list[list[Operation]]:
    """What is put into a store that has lost its data, in transactions: who has this number, and that others are `taken`, as far as it
    does not say so.
    """
    there = {item.key for item in taken}
    lacking = [Put(taken_key(other), b"") for other in sorted({*others} - {number}) if taken_key(other) not in there]
    own = [Put(name_key(name), NodeBinding(number, catalog).encode()), Put(taken_key(number), name.encode())]
    changes = [*own, *lacking]
    return [list(changes[start : start + limits.ETCD_OPERATIONS_MAX]) for start in range(0, len(changes), limits.ETCD_OPERATIONS_MAX)]


def _find_other_owner(store: Store, number: int, catalog: str) -> str:
    """The name of a node with another catalog that has this number, too."""
    (taken,) = store.read([Get(taken_key(number))]).results
    _, bound = _find_binding(store, taken[0].value.decode()) if taken and taken[0].value else (None, None)
    return taken[0].value.decode() if bound is not None and (bound.number == number and bound.catalog != catalog) else ""


def _find_live_node(store: Store, bound: NodeBinding) -> Node | None:
    """Who lives under this number."""
    found = store.read([Get(node_key(bound.number))]).results[0]
    return decode_node(found[0].value) if found else None


def _bind_name(store: Store, name: str, previous: Item | None, bound: NodeBinding, known_number: int) -> bool:
    """Give the name and the number to the catalog, if nobody was faster."""
    compares = [Compare(name_key(name), CompareTarget.MOD, "=", previous.mod_revision if previous is not None else 0)]
    if not known_number:
        compares.append(Compare(taken_key(bound.number), CompareTarget.VERSION, "=", 0))
    return store.commit(compares, [Put(name_key(name), bound.encode()), Put(taken_key(bound.number), name.encode())]).succeeded


def _build_duplicate_error(name: str, number: int, other: str) -> InvalidArgument:
    return InvalidArgument(
        f"the number {number} of the node {name} was given to the node {other}, which joined while etcd had lost its data",
        remedy=f"stop {other}, give it an empty state directory, and start {name} first",
    )


def _build_taken_error(name: str, living: Node) -> NameTaken:
    return NameTaken(
        f"another daemon is in the cluster as node {name}, at {living.address}",
        remedy="give node=ANOTHER-NAME; two mounts of one machine are two nodes",
    )


def get_boot_clock_s() -> float:
    """A clock that goes on while the machine sleeps, as the store's does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class NodeLease:
    """One node's. One thread calls `beat`; any thread may look."""

    def __init__(self, store: Store, node: Node, catalog: str, clock: Callable[[], float] = get_boot_clock_s) -> None:
        self.node = node
        self._store = store
        self._binding_value = NodeBinding(node.number, catalog).encode()
        self._clock = clock
        self._lease = (0, 0.0)
        self._revision = 0
        self._is_displaced = False

    @property
    def lease_id(self) -> int:
        """The lease, while it surely holds; 0 otherwise."""
        lease, until_s = self._lease
        return lease if self._clock() < until_s else 0

    @property
    def valid_until_s(self) -> float:
        """Until when it surely holds."""
        return self._lease[1]

    def renew(self) -> bool:
        """Live on; whether that needed a new lease. Raises NameTaken when another catalog has the name now, and what the store raises."""
        if self._is_displaced:
            raise NameTaken(
                f"another daemon runs with a copy of the catalog of node {self.node.name}",
                remedy="stop one of them for good, and give it an empty state directory; both make the same ids",
            )
        lease = self._lease[0]
        if lease and self._keep_alive(lease):
            return False
        self._lease = (0, 0.0)
        began_s = self._clock()
        lease = self._store.grant(limits.NODE_LEASE_S)
        try:
            self._put_record(lease)
        except BaseException:
            with contextlib.suppress(Exception):
                self._store.revoke(lease)
            raise
        self._lease = (lease, began_s + limits.NODE_LEASE_S)
        return True

    def record_seen_node(self, node: Node, revision: int) -> None:
        """A record was put in that revision. Another one under our number, after ours, is that of a second daemon with our catalog."""
        if node.number == self.node.number and node.incarnation != self.node.incarnation and 0 < self._revision < revision:
            self._is_displaced = True
            self._lease = (0, 0.0)

    def _keep_alive(self, lease: int) -> bool:
        # Counted from before we asked: the store begins the time later than that, never earlier.
        began_s = self._clock()
        left_s = self._store.keep_alive(lease)
        if left_s > 0:
            self._lease = (lease, began_s + min(left_s, limits.NODE_LEASE_S))
        return left_s > 0

    def _put_record(self, lease: int) -> None:
        name = name_key(self.node.name)
        record = Put(node_key(self.node.number), encode_node(self.node), lease)
        outcome = self._store.commit([Compare(name, CompareTarget.VALUE, "=", self._binding_value)], [record])
        if not outcome.succeeded:
            raise NameTaken(
                f"another daemon has joined the cluster as node {self.node.name}",
                remedy="give node=ANOTHER-NAME to one of them and start it again",
            )
        self._revision = outcome.revision


FOREVER = float("inf")


class MemberTable:
    """`now_s` is any clock that does not jump."""

    def __init__(self, own_node: Node, last_nodes: Iterable[Node] = ()) -> None:
        """`last` lived when a former process last looked."""
        self._own_node = own_node
        self._present = {node.number: node for node in last_nodes if node.number != own_node.number}
        self._absent: dict[int, tuple[Node, float]] = {}
        self._is_connected = False
        self._doubt_until_s = 0.0

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    def mark_disconnected(self) -> None:
        """The store does not answer."""
        self._is_connected = False

    def mark_connected(self, now_s: float) -> None:
        """The store answers. The others may need a moment to notice it as well."""
        if not self._is_connected:
            self._is_connected = True
            self._doubt_until_s = now_s + limits.NODE_RETURN_S
            self._absent = {number: (node, min(until_s, self._doubt_until_s)) for number, (node, until_s) in self._absent.items()}

    def mark_alive(self, node: Node) -> None:
        """Its record is there."""
        if node.number != self._own_node.number:
            self._present[node.number] = node
            self._absent.pop(node.number, None)

    def mark_gone(self, number: int, now_s: float) -> None:
        """Its record is not there any more."""
        node = self._present.pop(number, None)
        if node is not None and self._is_in_doubt(now_s):
            self._absent[number] = (node, self._doubt_until_s if self._is_connected else FOREVER)

    def replace_nodes(self, nodes: Iterable[Node], now_s: float) -> None:
        """These are all records that there are."""
        found = {node.number: node for node in nodes}
        for number in [number for number in self._present if number not in found]:
            self.mark_gone(number, now_s)
        for node in found.values():
            self.mark_alive(node)

    def delete_expired(self, now_s: float) -> None:
        """Those who did not come back in time are dead."""
        self._absent = {number: (node, until_s) for number, (node, until_s) in self._absent.items() if until_s > now_s}

    def next_due_s(self) -> float | None:
        """When `settle` has something to do."""
        due_s = min((until_s for _, until_s in self._absent.values()), default=FOREVER)
        return None if due_s == FOREVER else due_s

    def build_view(self) -> ClusterView:
        """Who lives, this node in any case."""
        return build_view([self._own_node, *self._present.values(), *(node for node, _ in self._absent.values())])

    def _is_in_doubt(self, now_s: float) -> bool:
        return not self._is_connected or now_s < self._doubt_until_s


log = logging.getLogger(__name__)


def ensure_registered(config: Config, db: Database) -> None:
    """See that this node has its number. Raises Refused: another daemon has its name, or it has none yet and etcd does not answer."""
    assert config.cluster is not None
    known = identity.get_node_number(db)
    store = EpochCheckedStore(etcd.open_store(config), db)
    try:
        number = register(store, config.node, identity.get_catalog_id(db), known)
    except StoreUnreachable as failure:
        if not known:
            raise InvalidArgument(
                f"node {config.node} has never been in the cluster {config.cluster}, and needs its etcd to join: {failure}",
                remedy=f"see that etcd runs and can be reached at {' or '.join(config.etcd)}; later starts do without it",
            ) from failure
        log.warning("%s; this node starts with what it knows, and tells the cluster later", failure)
        return
    finally:
        store.close()
    with db.transaction():
        identity.set_cluster(db, config.cluster)
        identity.set_node_number(db, number)
