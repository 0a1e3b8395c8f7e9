"""How a catalog becomes a node of a cluster: it is given a number, once and for ever, under the node's name.

A number belongs to one catalog, because it is in the upper bits of every id that the node makes: a node whose catalog was lost gets another
one, lest it makes the ids of its former life again. `number/<name>` says which catalog has the name, `taken/<number>` that the number is
used. A name whose catalog lives cannot be taken by another one; of one that died a moment ago, the lease is waited for.
Numbers are guessed in a range that doubles, so that ten thousand nodes that join at once do not wait in line for one counter.
If we die here: the number is bound to the catalog in the store, and the next start finds it there.
"""

import json
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckptfs import limits
from ckptfs.catalog.store import Compare, CompareTarget, Get, Item, Operation, Put, Store
from ckptfs.clique.membership import Node, decode_node, node_key
from ckptfs.errors import InvalidArgument

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
