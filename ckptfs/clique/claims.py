"""What exactly one node of the cluster does: it claims it, under the lease by which it lives, so a claim ends with its node.

A claim is a key that only one can create. Whoever acts on one for long asks `good` in between: it is False as soon as the lease may have
run out, by our own clock, also when the store cannot be asked. What only the claimer may change in the store compares the claim (`guard`).
If we die here: the lease runs out, and another node claims what was left undone.
"""

from dataclasses import dataclass

from ckptfs.catalog.store import Compare, Delete, Get, Item, Put, Store, Target
from ckptfs.clique.presence import Presence
from ckptfs.errors import LeaseGone

CLAIMS = b"claim/"


@dataclass(frozen=True, slots=True)
class Claim:
    """What is claimed; `revision` created it and tells it from every other claim of the same."""

    what: str
    lease: int
    revision: int

    def guard(self) -> Compare:
        """Holds as long as the claim does."""
        return Compare(_key(self.what), Target.CREATE, "=", self.revision)


class Claims:
    """This node's. Any thread may use it."""

    def __init__(self, store: Store, presence: Presence) -> None:
        self._store = store
        self._presence = presence

    def take(self, what: str) -> Claim | None:
        """The claim, also when this node has it already; None while another node has it, or this one has no lease. Raises Unreachable."""
        lease = self._presence.lease
        if not lease:
            return None
        key, value = _key(what), _value(self._presence.node.number, lease)
        try:
            taken = self._store.commit([Compare(key, Target.VERSION, "=", 0)], [Put(key, value, lease), Get(key)], [Get(key)])
        except LeaseGone:
            return None
        item = _only(taken.results[0])
        return Claim(what, lease, item.create_revision) if item is not None and item.value == value else None

    def good(self, claim: Claim) -> bool:
        """Whether it surely still holds."""
        return self._presence.lease == claim.lease

    def release(self, claim: Claim) -> None:
        """Let another node have it. Raises Unreachable; then it ends with the lease."""
        self._store.commit([claim.guard()], [Delete(_key(claim.what))])

    def holder(self, what: str) -> int | None:
        """The number of the node that has it."""
        item = _only(self._store.read([Get(_key(what))]).results[0])
        return None if item is None else int(item.value.split(b" ")[0])


def _key(what: str) -> bytes:
    return CLAIMS + what.encode()


def _value(number: int, lease: int) -> bytes:
    return b"%d %d" % (number, lease)


def _only(items: tuple[Item, ...]) -> Item | None:
    return items[0] if items else None
