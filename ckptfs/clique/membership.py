"""Membership of the cluster: node numbers, leases, records of live nodes, this node's view of them.

- A number belongs to one catalog for life, and is in the upper bits of every id that the node makes. `number/<name>` binds a name to a
  number and a catalog; `taken/<number>` marks numbers in use. Random numbers spare ten thousand joining nodes a common counter.
- A live node has a record `n/<number>` under its lease, put only while the name is bound to this catalog: at most one of two daemons with
  one name is alive. A node with a read-only mount has no record: other nodes do not see it.
- `MemberTable` keeps the last known nodes. A missing record means a death only while this node is connected; after an outage the nodes have
  `limits.NODE_RETURN_S` to return.

Crash safety: the next start finds its number in the store, and begins with the view that was saved last. The lease expires.
"""

import contextlib
import json
import logging
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, field
from typing import Any

from ckptfs import limits
from ckptfs.catalog import identity
from ckptfs.catalog.database import Database
from ckptfs.coherence import value_checks
from ckptfs.coherence.keys import CONTENT, INODE, SharedKey, encode_key
from ckptfs.coherence.store_loss import EpochCheckedStore
from ckptfs.config import Config
from ckptfs.errors import InvalidArgument, StoreUnreachable
from ckptfs.store import etcd
from ckptfs.store.kv import Compare, CompareTarget, Get, Item, Operation, Put, Store, Transactions, prefix_end, read_all, split_changes

log = logging.getLogger(__name__)
NODES_PREFIX = b"n/"
NODES_END = prefix_end(NODES_PREFIX)
NAMES_PREFIX = b"number/"
TAKEN_PREFIX = b"taken/"
ADOPTED_PREFIX = b"adopted/"
NAME_POLL_S = 0.5
GUESSES_MAX = 1000
FIRST_NUMBER_RANGE = 1024
"""The first range of random numbers. It makes a number improbable that a store without data gave to another node before."""
FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class Node:
    """One node. Nodes of one `domain` fail together. `incarnation`: "<catalog>.<number of the start>"."""

    number: int
    name: str
    address: str
    rank: int
    domain: str
    capacity_bytes: int = 0
    incarnation: str = ""


@dataclass(frozen=True)
class ClusterView:
    """A snapshot of the live nodes, ordered by rank and name. `placement_cache` serves repeated placement."""

    nodes: tuple[Node, ...] = ()
    by_number: Mapping[int, Node] = field(init=False, compare=False, repr=False)
    placement_cache: dict[Any, Any] = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(sorted(self.nodes, key=lambda node: (node.rank, node.name))))
        object.__setattr__(self, "by_number", {node.number: node for node in self.nodes})

    def build_without(self, numbers: frozenset[int]) -> "ClusterView":
        """Return the view without these nodes. The last one is kept, with its placement."""
        if not numbers:
            return self
        kept: tuple[frozenset[int], ClusterView] | None = self.placement_cache.get("without")
        if kept is None or kept[0] != numbers:
            kept = numbers, ClusterView(tuple(node for node in self.nodes if node.number not in numbers))
            self.placement_cache["without"] = kept
        return kept[1]

    def __contains__(self, number: object) -> bool:
        """Return True if the node of this number is alive."""
        return number in self.by_number

    def __len__(self) -> int:
        return len(self.nodes)


def build_view(nodes: Iterable[Node]) -> ClusterView:
    return ClusterView(tuple(nodes))


@dataclass(frozen=True, slots=True)
class ViewChange:
    """The change from one view to the next. `restarted_nodes` are in both but have a new incarnation."""

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


def node_key(number: int) -> bytes:
    """Return the key of the record of a live node."""
    return NODES_PREFIX + b"%08x" % number


def load_nodes(store: Store) -> tuple[list[Node], int]:
    """Return (nodes with a record, revision of the read). Raises Compacted: start again."""
    revision, items = read_all(store, NODES_PREFIX)
    return [node for item in items if (node := decode_node(item.value)) is not None], revision


def list_live(store: Transactions, numbers: Sequence[int]) -> set[int]:
    """Return the numbers of those nodes that hold their leases now."""
    results = store.read([Get(node_key(number)) for number in numbers]).results if numbers else ()
    return {number for number, items in zip(numbers, results, strict=True) if items}


def encode_node(node: Node) -> bytes:
    """Encode a record. Every node reads all records, so fields have no names."""
    return json.dumps(astuple(node), separators=(",", ":")).encode()


def decode_node(value: bytes) -> Node | None:
    """Decode a record; None if it is invalid. A newer or broken node may have written it."""
    try:
        number, name, address, rank, domain, capacity_bytes, incarnation, *_ = value_checks.parse_json(value)
        node = Node(int(number), str(name), str(address), int(rank), str(domain), int(capacity_bytes), str(incarnation))
    except (ValueError, TypeError):
        return None
    are_texts = all(map(value_checks.is_plain_text, (node.name, node.address, node.domain, node.incarnation)))
    are_numbers = 0 < node.number <= limits.NODE_NUMBER_MAX and all(0 <= number < 1 << 63 for number in (node.rank, node.capacity_bytes))
    return node if are_texts and are_numbers else None


class NameTaken(InvalidArgument):
    """Another live daemon has the name of this node."""


@dataclass(frozen=True, slots=True)
class NodeBinding:
    """The number and the catalog (a uuid) that a name is bound to."""

    number: int
    catalog: str

    def encode(self) -> bytes:
        return json.dumps([self.number, self.catalog], separators=(",", ":")).encode()


def name_key(name: str) -> bytes:
    return NAMES_PREFIX + name.encode()


def taken_key(number: int) -> bytes:
    """Return the key that exists for every number ever given."""
    return TAKEN_PREFIX + b"%08x" % number


def ensure_registered(config: Config, db: Database) -> None:
    """Register this node. Raises InvalidArgument if its name is taken, or if it needs etcd to join."""
    assert config.cluster is not None
    known = identity.get_node_number(db)
    last_ids: Mapping[str, int] = {}
    with closing(EpochCheckedStore(etcd.open_store(config), db)) as store:
        try:
            number = register(store, config.node, identity.get_catalog_id(db), known)
            last_ids = find_last_ids(store, db) if known else {}
        except StoreUnreachable as failure:
            if not known:
                raise InvalidArgument(
                    f"node {config.node} has never been in the cluster {config.cluster}, and needs its etcd to join: {failure}",
                    remedy=f"check that etcd runs and can be reached at {' or '.join(config.etcd)}; later starts do not need it",
                ) from failure
            log.warning("node %s: %s; it starts with its catalog and registers later", config.node, failure)
            number = known
    with db.transaction():
        identity.set_cluster(db, config.cluster)
        identity.set_node_number(db, number)
        identity.bump_last_ids(db, last_ids)
    db.persist()


def find_last_ids(store: Store, db: Database) -> dict[str, int]:
    """Return the last id of this node by table, of those that the store and the catalog know."""
    inode, content = (identity.get_last_id(db, table) for table in identity.COUNTED_TABLES)
    bit = identity.HISTORY_DIRECTORY_BIT
    end = (identity.get_node_number(db) << limits.ID_COUNTER_BITS) + bit
    in_history = _find_last_id(store, INODE, inode + bit, end + bit) - bit
    return {"inode": max(in_history, _find_last_id(store, INODE, inode, end)), "content": _find_last_id(store, CONTENT, content, end)}


def _find_last_id(store: Store, kind: str, last: int, end: int) -> int:
    """Return the greatest number below `end` with a key of a kind in the store; `last` if none is greater."""
    middle = last + 1
    while last + 1 < end:
        get = Get(encode_key(SharedKey(kind, middle)), encode_key(SharedKey(kind, end)), limit=1, keys_only=True)
        if store.read([get]).results[0]:
            last = middle
        else:
            end = middle
        middle = (last + end) // 2
    return last


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
    """Bind `name` to `catalog` (a uuid) and return its number; `known_number` 0 means none yet.

    Raises NameTaken while a node with another catalog is alive under that name, and StoreUnreachable.
    """
    rng = rng or random.Random()
    deadline_s = clock() + limits.NAME_WAIT_S
    for attempt in range(GUESSES_MAX):
        item, bound = _find_binding(store, name)
        if bound is not None and bound.catalog == catalog:
            return bound.number
        while bound is not None and (living := _find_live_node(store, bound)) is not None:
            if clock() >= deadline_s:
                problem = f"another daemon is in the cluster as node {name}, at {living.address}"
                raise NameTaken(problem, remedy="give node=ANOTHER-NAME; two mounts of one machine are two nodes")
            sleep(NAME_POLL_S)
        if known_number and (other := _find_other_owner(store, known_number, catalog)):
            remedy = f"stop {other}, give it an empty state directory, and start {name} first"
            raise InvalidArgument(_describe_duplicate(name, known_number, other), remedy=remedy)
        number = known_number or rng.randint(1, min(FIRST_NUMBER_RANGE << attempt, limits.NODE_NUMBER_MAX))
        if _bind_name(store, name, item, NodeBinding(number, catalog), known_number):
            return number
    raise InvalidArgument(f"no free number was found for node {name}", remedy="start it again")


def _find_binding(store: Store, name: str) -> tuple[Item | None, NodeBinding | None]:
    found = store.read([Get(name_key(name))]).results[0]
    if not found:
        return None, None
    try:
        number, catalog = value_checks.parse_json(found[0].value)
        return found[0], NodeBinding(int(number), str(catalog))
    except (ValueError, TypeError) as failure:
        raise InvalidArgument(f"the key number/{name} of etcd is not readable", remedy="delete it in etcd") from failure


def list_replaced(store: Store, numbers: Iterable[int]) -> set[int]:
    """Return those of these numbers whose names are bound to other numbers by now: they never return."""
    wanted = sorted(numbers)[: limits.ETCD_OPERATIONS_MAX]
    taken = store.read([Get(taken_key(number)) for number in wanted]).results if wanted else ()
    names = {number: items[0].value.decode(errors="replace") for number, items in zip(wanted, taken, strict=True) if items}
    bound = {number: _find_binding(store, name)[1] for number, name in names.items()}
    return {number for number, binding in bound.items() if binding is not None and binding.number != number}


def find_number_conflict(name: str, number: int, taken: Iterable[Item]) -> str:
    """Return why the number of this node belongs to another one in a store to adopt; empty if it does not."""
    for item in taken:
        if item.key == taken_key(number) and item.value not in (b"", name.encode()):
            return _describe_duplicate(name, number, item.value.decode(errors="replace"))
    return ""


def _describe_duplicate(name: str, number: int, other: str) -> str:
    return f"the number {number} of node {name} was given to node {other}, which joined after etcd had lost its data"


def build_reregistration(name: str, catalog: str, number: int, others: Iterable[int], taken: Iterable[Item]) -> list[list[Operation]]:
    """Return transactions that bind this node's name again and mark the numbers of all known nodes."""
    present = {item.key for item in taken}
    missing = [Put(taken_key(other), b"") for other in sorted({*others} - {number}) if taken_key(other) not in present]
    return split_changes([Put(name_key(name), NodeBinding(number, catalog).encode()), Put(taken_key(number), name.encode()), *missing])


def build_adopted(numbers: Iterable[int], epoch: bytes) -> list[list[Operation]]:
    """Return transactions that record that these nodes have adopted the store, or are not awaited."""
    return split_changes([Put(ADOPTED_PREFIX + b"%08x" % number, epoch) for number in numbers])


def list_awaited(taken: Iterable[Item], adopted: Iterable[Item], epoch: bytes) -> list[int]:
    """Return the numbers of the nodes that have not adopted the store of this epoch yet."""
    known = {item.key[len(ADOPTED_PREFIX) :] for item in adopted if item.value == epoch}
    numbers = [rest for item in taken if (rest := item.key[len(TAKEN_PREFIX) :]) not in known]
    return [int(rest, 16) for rest in numbers if re.fullmatch(rb"[0-9a-f]{8}", rest)]


def _find_other_owner(store: Store, number: int, catalog: str) -> str:
    """Return the name of a node with another catalog that has this number; empty without one."""
    (taken,) = store.read([Get(taken_key(number))]).results
    _, bound = _find_binding(store, taken[0].value.decode()) if taken and taken[0].value else (None, None)
    return taken[0].value.decode() if bound is not None and (bound.number == number and bound.catalog != catalog) else ""


def _find_live_node(store: Store, bound: NodeBinding) -> Node | None:
    found = store.read([Get(node_key(bound.number))]).results[0]
    return decode_node(found[0].value) if found else None


def _bind_name(store: Store, name: str, previous: Item | None, bound: NodeBinding, known_number: int) -> bool:
    """Bind the name and the number. Return False if another node was faster."""
    compares = [Compare(name_key(name), CompareTarget.MOD, "=", previous.mod_revision if previous is not None else 0)]
    if not known_number:
        compares.append(Compare(taken_key(bound.number), CompareTarget.VERSION, "=", 0))
    return store.commit(compares, [Put(name_key(name), bound.encode()), Put(taken_key(bound.number), name.encode())]).succeeded


def get_boot_clock_s() -> float:
    """Return a clock that continues while the machine is suspended, as the store's does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class NodeLease:
    """The lease of this node and its record. One thread calls `renew`; any thread may read."""

    def __init__(
        self, store: Store, node: Node, catalog: str, clock: Callable[[], float] = get_boot_clock_s, *, is_member: bool = True
    ) -> None:
        """A node that is no member has a lease and no record: it holds no copies, and nothing waits for it."""
        self.node = node
        self._is_member = is_member
        self._store = store
        self._binding_value = NodeBinding(node.number, catalog).encode()
        self._clock = clock
        self._lease = (0, 0.0)
        self._revision = 0
        self._is_displaced = False

    @property
    def lease_id(self) -> int:
        """Return the lease while it certainly holds, else 0."""
        lease, until_s = self._lease
        return lease if self._clock() < until_s else 0

    def renew(self) -> bool:
        """Renew the lease. Return True if a new one was needed. Raises NameTaken, and errors of the store."""
        if self._is_displaced:
            raise NameTaken(
                f"another daemon runs with a copy of the catalog of node {self.node.name}",
                remedy="stop one of them and give it an empty state directory; both make the same ids",
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
        """Note this node's record. Another incarnation later means a daemon with a copied catalog."""
        if node.number == self.node.number and node.incarnation != self.node.incarnation and 0 < self._revision < revision:
            self._is_displaced = True
            self._lease = (0, 0.0)

    def _keep_alive(self, lease: int) -> bool:
        # Measured before the request: the store starts the lease later, never earlier.
        began_s = self._clock()
        left_s = self._store.keep_alive(lease)
        if left_s > 0:
            self._lease = (lease, began_s + min(left_s, limits.NODE_LEASE_S))
        return left_s > 0

    def _put_record(self, lease: int) -> None:
        name = name_key(self.node.name)
        record = Put(node_key(self.node.number), encode_node(self.node), lease)
        records = [record] if self._is_member else []
        outcome = self._store.commit([Compare(name, CompareTarget.VALUE, "=", self._binding_value)], records)
        if not outcome.succeeded:
            raise NameTaken(
                f"another daemon has joined the cluster as node {self.node.name}",
                remedy="give node=ANOTHER-NAME to one of them and start it again",
            )
        self._revision = outcome.revision


class MemberTable:
    """The nodes that count as alive. `now_s` is any clock that does not jump."""

    def __init__(self, own_node: Node, last_nodes: Iterable[Node] = ()) -> None:
        """Start with `last_nodes`, which were alive in the last view of the previous process."""
        self._own_node = own_node
        self._present = {node.number: node for node in last_nodes if node.number != own_node.number}
        self._absent: dict[int, tuple[Node, float]] = {}
        self.is_connected = False
        self._doubt_until_s = 0.0

    def mark_disconnected(self) -> None:
        self.is_connected = False

    def mark_connected(self, now_s: float) -> None:
        """Note that the store answers again. Other nodes may notice this a moment later."""
        if not self.is_connected:
            self.is_connected = True
            self._doubt_until_s = now_s + limits.NODE_RETURN_S
            self._absent = {number: (node, min(until_s, self._doubt_until_s)) for number, (node, until_s) in self._absent.items()}

    def mark_alive(self, node: Node) -> None:
        if node.number != self._own_node.number:
            self._present[node.number] = node
            self._absent.pop(node.number, None)

    def mark_gone(self, number: int, now_s: float) -> None:
        """Note that the record of a node is gone. After an outage of the store the node counts for longer."""
        node = self._present.pop(number, None)
        if node is not None and (not self.is_connected or now_s < self._doubt_until_s):
            self._absent[number] = (node, self._doubt_until_s if self.is_connected else FOREVER)

    def replace_nodes(self, nodes: Iterable[Node], now_s: float) -> None:
        found = {node.number: node for node in nodes}
        for number in [number for number in self._present if number not in found]:
            self.mark_gone(number, now_s)
        for node in found.values():
            self.mark_alive(node)

    def delete_expired(self, now_s: float) -> None:
        """Drop nodes that did not return in time."""
        self._absent = {number: (node, until_s) for number, (node, until_s) in self._absent.items() if until_s > now_s}

    def next_due_s(self) -> float | None:
        """Return when the first absent node counts as dead; None if no node is absent."""
        due_s = min((until_s for _, until_s in self._absent.values()), default=FOREVER)
        return None if due_s == FOREVER else due_s

    def build_view(self) -> ClusterView:
        """Return the live nodes, always including this one."""
        return build_view([self._own_node, *self._present.values(), *(node for node, _ in self._absent.values())])
