"""Takes: a world of nodes that has changed: some died, some joined, some live again and may have lost what they had.
Leaves: `content.lacking` for every content that has fewer copies now than are wanted, which the replicate flow makes again.
If we die here: the world that was compared with is the one in the catalog, and the comparison is made again.

For a content whose writer lives that one sees to it. For one whose writer is dead the first of the living holders does, who stands for
it in placement too: all of them ask the same store and see the same world, and two that do not only make a copy too many.
What this node wrote and has lost with a tier comes back from the others, a few files at a time, so that whoever waits for one comes first.
"""

import errno
import logging
import time

from ckptfs import limits
from ckptfs.catalog import holding, peers, wants
from ckptfs.catalog.database import Database
from ckptfs.catalog.peers import KnownNode
from ckptfs.clique import holders, placement
from ckptfs.clique.holders import ContentLocations
from ckptfs.clique.membership import ClusterView
from ckptfs.clique.surroundings import Cluster
from ckptfs.model import Content, Notifier

log = logging.getLogger(__name__)


class Repair:
    """Follows the world, and after a death looks through what is held here, one batch a step."""

    def __init__(self, db: Database, notify: Notifier, around: Cluster) -> None:
        self._db = db
        self._notify = notify
        self._around = around
        self._seen: ClusterView | None = None
        self._after: int | None = None
        self._wanted = 0
        self._asked: list[int] = []
        self._refill_after: int | None = None
        self._refill_s = time.monotonic()

    def step(self) -> bool:
        """True: there is more to look through."""
        world = self._around.view()
        if world is not self._seen:
            self._follow(world)
            self._seen = world
            self._refill_s = time.monotonic()
        self._refill()
        return self._after is not None and self._look_through(world, self._after)

    def next_due_s(self) -> float | None:
        """When the world changes; and until what was lost here is looked for again."""
        return limits.WANT_LOOK_S if self._asked else max(0.0, self._refill_s - time.monotonic())

    # --- the world ---------------------------------------------------------------------------------------------------

    def _follow(self, world: ClusterView) -> None:
        """Take the new world into the catalog, together with what it means for this node's own contents."""
        now = {node.number: KnownNode(node.number, node.name, node.domain, node.incarnation) for node in world.nodes}
        factor = self._around.factor
        with self._db.transaction():
            before = peers.list_live_nodes(self._db)
            if before == now and factor == peers.get_replication_factor(self._db):
                return
            died = [node for node in before.values() if node.number not in now]
            lacking = sum(peers.mark_node_copies_lost(self._db, node.number) for node in died)
            lacking += sum(peers.delete_copies_of_node(self._db, number) for number in self._reborn(now))
            if _more_is_possible(before, now, factor) or factor != peers.get_replication_factor(self._db):
                lacking += peers.mark_all_under_replicated(self._db)
            peers.set_live_nodes(self._db, self._around.node_number, factor, now.values())
        if died:
            self._after = 0
        if lacking:
            log.info("the nodes have changed: %d contents of this one may want copies elsewhere", lacking)
        self._notify.wake_lanes()

    def _reborn(self, now: dict[int, KnownNode]) -> list[int]:
        """Nodes that live another life than the one in which they were last seen."""
        seen = {number: peers.find_incarnation(self._db, number) for number in now if number != self._around.node_number}
        return [number for number, incarnation in seen.items() if incarnation not in (None, now[number].incarnation)]

    # --- what was lost here ------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Have the next of this node's own contents fetched that only others have."""
        if time.monotonic() >= self._refill_s:
            self._refill_s = time.monotonic() + limits.RECONCILE_INTERVAL_S
            self._refill_after = 0
        answers = [wants.get(self._db, want) for want in self._asked if not wants.is_open(self._db, want)]
        if any(answer is not None and answer.error == errno.ENOSPC for answer in answers):
            self._refill_after = None  # The next one would not fit either.
        self._asked = [want for want in self._asked if wants.is_open(self._db, want)]
        while self._refill_after is not None and len(self._asked) < limits.REFILLS_MAX:
            content = peers.find_rebuildable(self._db, self._refill_after)
            self._refill_after = None if content is None else content.id
            if content is not None:
                self._asked.append(wants.insert_request(self._db, wants.FETCH, content.inode, wait_s=limits.FETCH_STALL_S))
                self._notify.wake_lanes()

    # --- what is held here -------------------------------------------------------------------------------------------

    def _look_through(self, world: ClusterView, after: int) -> bool:
        """Which contents of dead nodes are this one's to copy. Raises Unreachable; then the same batch comes again."""
        batch = holding.list_hosted(self._db, after, holders.LOAD_CONTENTS_MAX)
        told = holders.refresh(self._db, self._around.store, [content.id for content in batch], self._around.node_number)
        mine = [content.id for content in batch if self._is_mine(content, told[content.id], world)]
        if peers.mark_under_replicated(self._db, mine):
            self._wanted += len(mine)
            self._notify.wake_lanes()
        self._after = batch[-1].id if batch else None
        if not batch and self._wanted:
            log.info("%d contents of nodes that died are copied from here, to have as many copies as before", self._wanted)
            self._wanted = 0
        return bool(batch)

    def _is_mine(self, content: Content, shared: ContentLocations, world: ClusterView) -> bool:
        """Whether this node is the one to copy a content that it holds."""
        around, heard = self._around, shared.state
        if heard is None or shared.writer is None or shared.writer in world:
            return False
        # What was still open when its writer died is what was fsynced of it last: nobody can say more of it now.
        written = (heard.generation, heard.digest) if heard.digest is not None else shared.get_newest(world)
        if written != (content.generation, content.digest):
            return False
        living = {number for number in shared.list_holders_of(*written) if number in world} | {around.node_number}
        if not placement.choose_new_holders(world, living, shared.writer, around.factor, around.jump):
            return False
        return min(living) == around.node_number


def _more_is_possible(before: dict[int, KnownNode], now: dict[int, KnownNode], factor: int) -> bool:
    """Whether contents that could not have all their copies may have them now: there were too few nodes, or too few failure domains."""
    nodes, domains = len(before), len({node.domain for node in before.values()})
    joined = now.keys() - before.keys()
    return bool(joined) and (nodes < factor or domains < factor)
