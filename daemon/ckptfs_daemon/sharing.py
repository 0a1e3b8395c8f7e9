"""Owns the mount's talk with the store of its cluster: reading before rows answer a question, telling before a change is answered.

Reads that are asked for at once go in one transaction, and so do changes; one commit is under way at a time, and what gathers meanwhile
goes with the next: one of those who wait for that tells it. When the store does not answer this node is an island: rows answer, changes
are marked and wait, nobody waits for them, until the store is back and has them all. Everything here belongs to the trio thread; only
futures of the store come from others.
If we die here: what was not told is marked in the catalog, and the next process begins by telling it.
"""

import errno
import functools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

import trio

from ckptfs import limits
from ckptfs.catalog import identity, peers, settling
from ckptfs.catalog.database import Database
from ckptfs.catalog.same_store import EpochCheckedStore
from ckptfs.catalog.sharing import alone, anew, applying, batch, forgetting, island, lost, outcome, reading, touching
from ckptfs.catalog.sharing.applying import RecentDeletes, StoreValue
from ckptfs.catalog.sharing.kinds import LAST_COMMIT, NAME, SharedKey
from ckptfs.catalog.sharing.refusal import CommitResult, ConflictResolver
from ckptfs.catalog.store import Get, Outcome, Store
from ckptfs.clique import holders
from ckptfs.errors import CkptfsError, StoreLost, StoreUnreachable, posix_error
from ckptfs_daemon import meeting, returning
from ckptfs_daemon.store_calls import Question, Rounds, Written, answer_of

log = logging.getLogger(__name__)

T = TypeVar("T")

Name = tuple[int, bytes]
TROUBLE = "trouble:sharing"


class Sharing:
    """This node's side of the shared tree."""

    def __init__(
        self, db: Database, store: Store, label: str, is_written: Callable[[int], bool], again: Callable[[int, int], bool]
    ) -> None:
        """`label` names this node in names; `is_written`: whether an inode is open for writing here; `again(content, other)` gives the
        bytes of a content a second id, and says whether it could.
        """
        self.db = db
        self.number = identity.get_node_number(db)
        self._label = label
        self._again = again
        self._is_written = is_written
        self.counts = {"reads": 0, "commits": 0, "conflicts": 0}
        self.island_ns = alone.get_disconnected_ns(db)
        self._store = EpochCheckedStore(store, db)
        self._written = Written(is_written)
        self._nameless: Callable[[Iterable[int]], None] = lambda _: None
        self._recent = RecentDeletes()
        self._asked: deque[Question] = deque()
        self._reading = 0
        self._to_tell = trio.Event()
        self._rounds = Rounds()
        self._reverted: dict[SharedKey, int] = {}
        self._reverts = 0
        self._sent: batch.StoreTransaction | None = None
        self._is_lost = False
        self._look_s = 0.0

    def serve(self, nameless: Callable[[Iterable[int]], None]) -> None:
        """`nameless` is told from now on of inodes that lost their names elsewhere."""
        self._nameless = nameless

    @property
    def island(self) -> bool:
        """Whether the store does not answer."""
        return self.island_ns != 0

    # --- reading ------------------------------------------------------------------------------------------------------

    async def fresh_name(self, parent: int, name: bytes, *ahead: Name) -> None:
        """The rows of a name, and of what it leads to, are as the store has them; those of names that will be asked for next, too."""
        await self._fresh([key for at, what in ((parent, name), *ahead) for key in reading.list_name_keys(self.db, at, what)])

    async def fresh_inode(self, inode: int, *ahead: Name) -> None:
        """The rows of an inode are as the store has them; those of names that will be asked for next, too."""
        await self._fresh([*reading.list_inode_keys(self.db, inode), *(key for at, what in ahead for key in reading.list_name_keys(self.db, at, what))])

    async def fresh_copies(self, inode: int) -> None:
        """Who has what another node wrote of this file is known here as the store has it."""
        content = peers.find_remote_content(self.db, inode)
        if content is None:
            return
        found = await self._read([*holders.build_gets(content)])
        if found is not None:
            with self.db.transaction():
                holders.record(self.db, content, holders.parse(content, found.results[0], found.results[1]), identity.get_node_number(self.db))

    async def fresh_directory(self, inode: int, at_most: int | None = None) -> None:
        """The names in a directory, and inodes of which nothing was known; `at_most`: only the first few."""
        after: bytes | None = b""
        while after is not None and not self.island:
            items = at_most or limits.ETCD_PAGE_ITEMS
            found = await self._read([reading.build_page_get(inode, after, items)])
            if found is None:
                return
            told, after = reading.parse_page(self.db, inode, after, items, found)
            keys = reading.list_uncached(self.db, reading.list_missing_keys(self.db, told))
            self._apply({**told, **await self._told(keys)})
            if at_most:
                return

    async def fresh_change(self, names: Iterable[Name]) -> None:
        """All that a change of these names depends on: them, where their directories lie, whether what they lead to is empty."""
        for parent, name in names:
            await self.fresh_ancestors(parent)
            await self.fresh_name(parent, name)
            child = reading.find_directory(self.db, parent, name)
            if child is not None:
                await self.fresh_directory(child, at_most=1)

    async def fresh_ancestors(self, inode: int) -> None:
        """Where a directory lies: it, and every directory above."""
        passed: set[int] = set()
        while inode and inode not in passed:
            passed.add(inode)
            await self._fresh(reading.load_directory_location(self.db, inode)[0])
            inode = reading.load_directory_location(self.db, inode)[1]

    async def _fresh(self, keys: list[SharedKey]) -> None:
        told = await self._told(keys)
        while told and (more := reading.list_missing_keys(self.db, told) or reading.list_overtaken_names(told)):
            found = await self._told(more)
            if not found:
                return
            told.update(found)
        self._apply(told)

    async def _told(self, keys: list[SharedKey]) -> dict[SharedKey, StoreValue]:
        """What the store says of these; nothing when it does not answer."""
        if not keys:
            return {}
        found = await self._read(reading.build_gets(keys))
        return {} if found is None else reading.parse_outcome(keys, found)

    def _apply(self, told: Mapping[SharedKey, StoreValue]) -> None:
        nameless = applying.apply_values(self.db, told, self._recent, self._written)
        if nameless:
            self._nameless(nameless)

    async def _read(self, gets: list[Get]) -> Outcome | None:
        """Ask, together with whoever asks now; None when the store does not answer."""
        if self.island:
            return None
        question = Question(gets)
        self._asked.append(question)
        if self._reading < limits.SHARED_READS_MAX:
            self._reading += 1
            try:
                await self._ask()
            finally:
                self._reading -= 1
                self._hand_over()
        await question.done.wait()
        return question.answer

    def _hand_over(self) -> None:
        """Somebody whose question still waits asks for all."""
        if self._asked and self._reading < limits.SHARED_READS_MAX:
            self._reading += 1
            trio.lowlevel.spawn_system_task(self._ask_on, name="shared reads")

    async def _ask_on(self) -> None:
        try:
            await self._ask()
        finally:
            self._reading -= 1
            self._hand_over()

    async def _ask(self) -> None:
        questions: list[Question] = []
        count = 0
        while self._asked and (not questions or count + len(self._asked[0].gets) <= limits.ETCD_OPERATIONS_MAX):
            questions.append(self._asked.popleft())
            count += len(questions[-1].gets)
        if not questions or self.island:
            for question in questions:
                question.done.set()
            return
        gets = [get for question in questions for get in question.gets]
        self._look_s = trio.current_time() + limits.STORE_LOOK_S
        try:
            self.counts["reads"] += 1
            found = await answer_of(self._store.read_soon(gets))
            start = 0
            for question in questions:
                end = start + len(question.gets)
                question.answer = Outcome(True, found.revision, found.results[start:end])
                start = end
        except CkptfsError as failure:
            self._failed(failure)
        finally:
            for question in questions:
                question.done.set()

    # --- telling ------------------------------------------------------------------------------------------------------

    def touched(self) -> None:
        """Something was changed that others must learn; in the trio thread."""
        self._to_tell.set()

    async def published(self, names: Iterable[Name] = ()) -> bool:
        """Everything that was changed up to now is in the store, or this node is an island. False: these names were taken back."""
        reverts = self._reverts
        last = touching.get_last_change(self.db)
        while last and not self.island and touching.has_dirty(self.db, last):
            await self._rounds.one(self._tell)
        return not any(self._reverted.get(SharedKey(NAME, parent, name), 0) > reverts for parent, name in names)

    async def agreed(
        self,
        act: Callable[[], Awaitable[T]],
        fresh: Callable[[], Awaitable[None]],
        names: Iterable[Name] = (),
        undo: Callable[[T], None] = lambda _: None,
    ) -> T:
        """Do `act` and have it in the store; again on what is true now (`fresh`) when it failed on what was known, or another was faster.

        `undo` is told what came of an act that was taken back.
        """
        is_fresh = False
        for _ in range(limits.SHARED_TRIES_MAX):
            try:
                result = await act()
            except (OSError, CkptfsError):
                if is_fresh or self.island:
                    raise
                await fresh()
                is_fresh = True
                continue
            if await self.published(names):
                return result
            undo(result)
            await fresh()
            is_fresh = True
        raise posix_error(errno.EAGAIN)

    async def run(self) -> None:
        """The task: tell what is touched and nobody waits for; on an island, look for the store."""
        touching.mark_root_dirty(self.db)
        await self._look_back()
        self._rounds.end()
        while True:
            if self.island:
                await self._probe()
                continue
            self._to_tell = trio.Event()
            if touching.get_last_change(self.db):
                await trio.sleep(limits.SHARED_GATHER_S)
                if not self.island and touching.get_last_change(self.db):
                    await self._rounds.one(self._tell)
                continue
            with trio.move_on_after(limits.WANT_LOOK_S):
                await self._to_tell.wait()
            if trio.current_time() > self._look_s:
                await self._read([])

    async def tend(self) -> None:
        """The task: say how it goes, and forget what is too much."""
        told: dict[str, int] = {}
        after = 0
        while True:
            meeting.keep(self.db, self._store)
            figures = self.figures()
            if figures != told:
                settling.set_report(self.db, "sharing", figures)
                told = figures
            after = forgetting.delete_unneeded(self.db, after) if not self.island and forgetting.is_cache_full(self.db) else 0
            await trio.sleep(limits.SHARED_REPORT_S if after else limits.FORGET_INTERVAL_S)

    def figures(self) -> dict[str, int]:
        """What `status` shows: round trips by kind, since when this node is an island (ns, 0: it is none), what waits to be told."""
        return {**self.counts, "island_ns": self.island_ns, "waiting": touching.count_dirty(self.db)}

    async def _tell(self) -> bool:
        """One batch. False: the store does not answer."""
        await trio.lowlevel.checkpoint()
        made = batch.build_transaction(self.db, self.number)
        if made is None:
            return True
        try:
            if not made.new_values:
                self._note(outcome.record_commit(self.db, made, 0, self._recent, recount_links=self.island))
                return True
            self._sent = made
            self.counts["commits"] += 1
            came = await answer_of(self._store.commit_soon(made.build_compares(), made.build_changes(), made.build_conflict_gets()))
            if came.succeeded:
                self._note(outcome.record_commit(self.db, made, came.revision, self._recent, recount_links=self.island))
            else:
                self.counts["conflicts"] += 1
                settling = await self._returning(made, came) if self.island else ConflictResolver
                self._note(outcome.resolve_conflict(self.db, made, came, self._recent, settling))
            self._sent = None
        except CkptfsError as failure:
            self._failed(failure)
            return False
        return True

    async def _returning(self, made: batch.StoreTransaction, came: Outcome) -> Callable[..., ConflictResolver]:
        """Who settles a refusal of what applications were told long ago; after what else has to be read for that."""
        look = returning.Look(self.db, self._store, self._apply)
        more = await look.beyond(made, came)
        settling = anew.RebuildResolver if lost.is_rebuilding(self.db) else island.ReintegrationResolver
        return functools.partial(settling, more=more, label=self._label, again=self._again, is_written=self._is_written)

    def _note(self, result: CommitResult) -> None:
        if result.reverted_names:
            self._reverts += 1
            self._reverted = {key: at for key, at in self._reverted.items() if at > self._reverts - limits.SHARED_TRIES_MAX}
            self._reverted.update(dict.fromkeys(result.reverted_names, self._reverts))
        if result.unlinked_inodes:
            self._nameless(result.unlinked_inodes)

    # --- without the store --------------------------------------------------------------------------------------------

    def _failed(self, failure: CkptfsError) -> None:
        if isinstance(failure, StoreLost):
            self._is_lost = True
            if not self.island:
                self._enter_island()  # What applications do goes on until the store knows everything again.
        elif not self.island:
            self._enter_island()
            what = "etcd does not answer: this node goes on alone, and other nodes do not see what changes here"
            remedy = "see that etcd runs and can be reached; what was changed here is told then"
            settling.set_report(self.db, TROUBLE, {"what": what, "path": "", "remedy": remedy})
            log.warning("the store of the cluster does not answer (%s): going on alone with what is known here", failure)
        if not isinstance(failure, StoreUnreachable):
            log.error("the store of the cluster refused: %s", failure)
        self._to_tell.set()
        self._rounds.wake()

    def _enter_island(self) -> None:
        self.island_ns = time.time_ns()
        alone.mark_disconnected(self.db, self.island_ns)

    async def _probe(self) -> None:
        """Look whether the store is back."""
        await trio.sleep(limits.ISLAND_PROBE_S)
        await self._rounds.rest()
        if self._is_lost and not await self._begin_anew():
            return
        if not await self._look_back():
            return
        touching.delete_older_marks(self.db)
        while touching.get_last_change(self.db) and await self._tell():
            pass
        if touching.get_last_change(self.db) == 0:
            log.info("the store of the cluster answers again, and knows what was changed here meanwhile")
            self.island_ns = 0
            alone.mark_reintegrated(self.db, time.time_ns())
            settling.set_report(self.db, TROUBLE, None)
            lost.end_rebuild(self.db)

    async def _begin_anew(self) -> bool:
        """The store has lost its data, or seemed to. False: it does not answer."""
        try:
            begun = await meeting.begin_anew(self.db, self._store, self._label)
        except CkptfsError as failure:
            self._failed(failure)
            return False
        self._is_lost = False
        if begun:
            self._recent, self._sent = RecentDeletes(), None
        return True

    async def _look_back(self) -> bool:
        """Find out whether the last batch passed whose answer did not come. False: the store does not answer."""
        own = SharedKey(LAST_COMMIT, self.number)
        try:
            await meeting.agree(self.db, self._store)
            came = await answer_of(self._store.read_soon(reading.build_gets([own]), timeout_s=limits.ISLAND_PROBE_WAIT_S))
        except CkptfsError as failure:
            self._failed(failure)
            return False
        result = outcome.recover_lost_answer(self.db, reading.parse_outcome([own], came)[own], self._sent, self._recent)
        self._sent = None
        if result is not None:
            self._note(result)
        return True
