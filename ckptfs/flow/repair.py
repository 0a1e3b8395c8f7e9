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
from ckptfs.catalog.peers import Known
from ckptfs.clique import holders, placement
from ckptfs.clique.holders import Shared
from ckptfs.clique.membership import World
from ckptfs.clique.surroundings import Surroundings
from ckptfs.model import Content, Notify

log = logging.getLogger(__name__)


class Repair:
    """Follows the world, and after a death looks through what is held here, one batch a step."""

    def __init__(self, db: Database, notify: Notify, around: Surroundings) -> None:
        self._db = db
        self._notify = notify
        self._around = around
        self._seen: World | None = None
        self._after: int | None = None
        self._wanted = 0
        self._asked: list[int] = []
        self._refill_after: int | None = None
        self._refill_s = time.monotonic()

    def step(self) -> bool:
        """True: there is more to look through."""
        world = self._around.see()
        if world is not self._seen:
            self._follow(world)
            self._seen = world
            self._refill_s = time.monotonic()
        self._refill()
        return self._after is not None and self._look_through(world, self._after)

    def due_s(self) -> float | None:
        """When the world changes; and until what was lost here is looked for again."""
        return limits.WANT_LOOK_S if self._asked else max(0.0, self._refill_s - time.monotonic())

    # --- the world ---------------------------------------------------------------------------------------------------

    def _follow(self, world: World) -> None:
        """Take the new world into the catalog, together with what it means for this node's own contents."""
        now = {node.number: Known(node.number, node.name, node.domain, node.incarnation) for node in world.nodes}
        factor = self._around.factor
        with self._db.change():
            before = peers.living(self._db)
            if before == now and factor == peers.factor(self._db):
                return
            died = [node for node in before.values() if node.number not in now]
            lacking = sum(peers.lost_with(self._db, node.number) for node in died)
            lacking += sum(peers.doubt_node(self._db, number) for number in self._reborn(now))
            if _more_is_possible(before, now, factor) or factor != peers.factor(self._db):
                lacking += peers.lack_all(self._db)
            peers.set_world(self._db, self._around.number, factor, now.values())
        if died:
            self._after = 0
        if lacking:
            log.info("the nodes have changed: %d contents of this one may want copies elsewhere", lacking)
        self._notify.work()

    def _reborn(self, now: dict[int, Known]) -> list[int]:
        """Nodes that live another life than the one in which they were last seen."""
        seen = {number: peers.ever_seen(self._db, number) for number in now if number != self._around.number}
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
            content = peers.lost_here(self._db, self._refill_after)
            self._refill_after = None if content is None else content.id
            if content is not None:
                self._asked.append(wants.ask(self._db, wants.FETCH, content.inode, wait_s=limits.FETCH_STALL_S))
                self._notify.work()

    # --- what is held here -------------------------------------------------------------------------------------------

    def _look_through(self, world: World, after: int) -> bool:
        """Which contents of dead nodes are this one's to copy. Raises Unreachable; then the same batch comes again."""
        batch = holding.held_after(self._db, after, holders.LOOKED_AT_MAX)
        told = holders.refresh(self._db, self._around.store, [content.id for content in batch], self._around.number)
        mine = [content.id for content in batch if self._is_mine(content, told[content.id], world)]
        if peers.lacks(self._db, mine):
            self._wanted += len(mine)
            self._notify.work()
        self._after = batch[-1].id if batch else None
        if not batch and self._wanted:
            log.info("%d contents of nodes that died are copied from here, to have as many copies as before", self._wanted)
            self._wanted = 0
        return bool(batch)

    def _is_mine(self, content: Content, shared: Shared, world: World) -> bool:
        """Whether this node is the one to copy a content that it holds."""
        around, heard = self._around, shared.heard
        if heard is None or shared.writer is None or shared.writer in world:
            return False
        # What was still open when its writer died is what was fsynced of it last: nobody can say more of it now.
        written = (heard.generation, heard.digest) if heard.digest is not None else shared.newest(world)
        if written != (content.generation, content.digest):
            return False
        living = {number for number in shared.having(*written) if number in world} | {around.number}
        if not placement.wanted(world, living, shared.writer, around.factor, around.jump):
            return False
        return min(living) == around.number


def _more_is_possible(before: dict[int, Known], now: dict[int, Known], factor: int) -> bool:
    """Whether contents that could not have all their copies may have them now: there were too few nodes, or too few failure domains."""
    nodes, domains = len(before), len({node.domain for node in before.values()})
    joined = now.keys() - before.keys()
    return bool(joined) and (nodes < factor or domains < factor)
