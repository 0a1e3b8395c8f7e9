"""The task that finds complete checkpoint sets and keeps them in the history (D1, X3, T6).

Rows of `set_candidate` say where to look. For each, `MemberSearch` finds the members of series of which the inode is a part. The tracker
judges a member as `latest` does, has `SetMaker` link what is complete into the history, and has `SetReview` remove what nothing protects.

Wakes: a seal, a change of names and a request that waits for sets wake the tracker; else it runs every `SET_POLL_S`.

Holds: when each candidate is due, members that are not complete, and until when a directory is left alone: for a multiple of the time that
the read of its names took. A candidate stays while its member may become complete without a change that would make a new one: until a quiet
period is over, or while it is the newest.

Crash safety: candidates are rows, and a set appears with one rename. The next process begins with the rows and removes unfinished sets.
"""

import contextlib
import functools
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import trio

from ckptfs import limits
from ckptfs.catalog import history, history_names, inodes, namespace, set_members, user_settings
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import CheckpointSet
from ckptfs.catalog.set_members import SetTree
from ckptfs.errors import Busy, CkptfsError
from ckptfs.model import ROOT, Level
from ckptfs.series import patterns, set_kinds
from ckptfs.series.patterns import Member, Series
from ckptfs.series.retention import is_unchanged
from ckptfs.series.search import judge
from ckptfs.series.set_kinds import DirectoryFacts
from ckptfs_daemon.mount.context import ChangeRunner, MountContext
from ckptfs_daemon.mount.sets.member_reader import MountMemberReader
from ckptfs_daemon.mount.sets.set_events import SetEvents, record_expired
from ckptfs_daemon.mount.sets.set_maker import FoundMember, SetMaker
from ckptfs_daemon.mount.sets.set_refresh import SetRefresh
from ckptfs_daemon.mount.sets.set_release import SetRelease
from ckptfs_daemon.mount.sets.set_review import SetReview

log = logging.getLogger(__name__)
Row = tuple[int, int]
"""A candidate: (inode, when it was noted)."""


@dataclass(slots=True)
class _Waiting:
    """A candidate whose member is not complete.

    `due_s`: when to judge it again; `delay_s`: how long that is after the last verdict.
    """

    row: Row
    due_s: float
    delay_s: float
    is_contended: bool  # Another node makes a set of the series now.


class SetTracker:
    """The task, and what it has in hand. Belongs to the trio thread."""

    def __init__(
        self, context: MountContext, changes: ChangeRunner, reader: MountMemberReader, on_unlinked: Callable[[Iterable[int]], None]
    ) -> None:
        self._context, self._reader = context, reader
        self._changes = changes
        self._refresh = SetRefresh(context, reader)
        self._events = SetEvents(context, self._refresh)
        self._maker = SetMaker(context, changes, reader, self._refresh, on_unlinked)
        self._releases = SetRelease(context, self._refresh)
        self._review = SetReview(context, changes, reader, self._refresh, self._maker, on_unlinked, self._releases.add)
        self._woken, self._awaited = trio.Event(), trio.Event()
        """There may be new candidates; and a change waits for them."""
        self._search_s = 0.0  # The processor time of the search of the last batch.
        self._wakes, self._wakes_at_last_pass = 0, -1
        """How often it was woken, and how often before it last processed all candidates in one batch."""
        self._last_inode = 0  # The last inode of the former batch of candidates; 0: the next batch is the first of all.
        self._candidate_due_s: dict[Row, float] = {}
        """When to process candidates that wait for their turn or for a directory."""
        self._waiting: dict[tuple[int, bytes], _Waiting] = {}
        self._noted_producers: dict[tuple[int, bytes], set[str]] = {}
        """Processes that are noted on a file of each waiting member."""
        self._directory_pauses: dict[int, float] = {}  # Until when not to read the names of a directory again.
        self._batch_ended = trio.Event()  # The next batch of candidates is processed.
        self._rebuild_due_s = 0.0
        self._wait_pauses: dict[int, float] = {}
        """Until when changes in a directory do not wait for sets: one has waited."""

    def wake(self) -> None:
        """Process candidates soon: there may be new ones. A hint."""
        self._wakes += 1
        self._woken.set()

    async def wait_for_set_before_change(self, inode: int) -> None:
        """Wait until what is complete now is a set.

        The application is about to write a part of it, or to remove a name of it. Only the first of several changes in a directory waits,
        and not for long. In a cluster another node may have sealed the file: this one inserts a candidate for it, too.
        """
        now_s, is_shared = trio.current_time(), self._context.shared_namespace.is_shared
        is_all_processed = not self._candidate_due_s and self._wakes_at_last_pass == self._wakes
        if not is_shared and is_all_processed and not self._context.open_files.producers.has(inode):
            return
        directory = None if inodes.is_history(self._context.db, inode) else self._find_directory(inode)
        if directory is None or now_s < self._wait_pauses.get(directory, 0.0):
            return
        if is_shared:
            with self._context.db.transaction() as db:
                namespace.insert_candidates(db, [inode])
        before_ns = time.time_ns()
        with trio.move_on_after(limits.SET_LOOK_WAIT_S):
            while unprocessed := self._list_unprocessed(before_ns):
                self._candidate_due_s |= dict.fromkeys(unprocessed, now_s)
                for one in self._waiting.values():
                    if one.row in unprocessed:
                        one.due_s = min(one.due_s, trio.current_time() + limits.SET_RETRY_S)
                self.wake()
                self._awaited.set()
                await self._batch_ended.wait()
        if waited_s := trio.current_time() - now_s:
            self._wait_pauses = {one: until_s for one, until_s in self._wait_pauses.items() if until_s > now_s}
            self._wait_pauses[directory] = trio.current_time() + waited_s * limits.SET_SEARCH_PAUSE

    @contextlib.asynccontextmanager
    async def guard_writer(self, inode: int) -> AsyncIterator[None]:
        """Surround the opening of a file for writing.

        Before it, what is complete becomes a set. From then on, no node takes the file for a part of one.
        """
        await self.wait_for_set_before_change(inode)
        db, shared_namespace = self._context.db, self._context.shared_namespace
        if not shared_namespace.is_shared or self._find_directory(inode) is None:
            yield
            return
        is_kept = inodes.is_history(db, inode)
        with self._context.open_files.change():
            set_members.insert_claim(db, inode)
        if not is_kept:
            await shared_namespace.wait_published()
        try:
            yield
        except BaseException:
            with self._context.open_files.change():
                set_members.delete_claim(db, inode)
            raise
        if is_kept:
            await shared_namespace.wait_published()  # One transaction has the claim and the separation from the history.

    def _find_directory(self, inode: int) -> int | None:
        """Return the directory of a file that may belong to a checkpoint. Returns None for any other file."""
        db = self._context.db
        places = set_members.list_places(db, inode)
        is_counted = any(patterns.counts_checkpoints(inodes.get_path(db, directory) + b"/" + name) for directory, name in places[:1])
        return places[0][0] if is_counted else None

    def _list_unprocessed(self, before_ns: int) -> list[Row]:
        waiting = {one.row for one in self._waiting.values() if not one.is_contended}
        rows = namespace.list_candidates(self._context.db, 0)
        return [row for row in rows if row[1] <= before_ns and row not in waiting]

    async def run(self) -> None:
        """Track until cancelled. A task."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._releases.run)
            await self._track()

    async def _track(self) -> None:
        self._review.schedule_all()
        delay_s = limits.SET_GATHER_S
        while True:
            try:
                for one in history.list_series(self._context.db):
                    await self._maker.remove_leftovers(one.directory)
                await self._events.start()
                while True:
                    await self._rebuild_due()
                    more = await self._process_candidates()
                    self._batch_ended.set()
                    self._batch_ended = trio.Event()
                    await self._events.record_loads()  # Before sets go: what was read may be in one of them.
                    for directory in user_settings.list_removals(self._context.db):
                        record_expired(self._context.db, directory, "removed by a user")
                        await self._maker.remove(directory)
                    await self._review.run_due()
                    await self._events.record_levels()
                    await self._review.report()
                    delay_s = limits.SET_GATHER_S
                    await self._wait(0.0 if more else limits.SET_POLL_S)
            except (OSError, CkptfsError) as failure:
                log.warning("checkpoint sets: cannot be kept: %s; trying again in %.0f s", failure, delay_s)
            except Exception:
                log.exception("checkpoint sets: cannot be kept; trying again in %.0f s", delay_s)
            delay_s = min(max(2 * delay_s, limits.RETRY_FIRST_S), limits.RETRY_LAST_S)
            await trio.sleep(delay_s)

    async def _rebuild_due(self) -> None:
        """Rebuild what is missing of the sets on the PFS, once it answers."""
        if trio.current_time() < self._rebuild_due_s:
            return
        try:
            await self._maker.rebuild()
        except (OSError, CkptfsError) as failure:
            log.debug("sets on the PFS: cannot be read yet: %s", failure)
            self._rebuild_due_s = trio.current_time() + limits.RETRY_LAST_S
            return
        self._rebuild_due_s = math.inf
        self._review.schedule_all()

    async def _wait(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self._woken.wait()
        await trio.sleep(limits.SET_GATHER_S)
        with trio.move_on_after(min(limits.SET_SEARCH_PAUSE * self._search_s, limits.SET_POLL_S)):
            await self._awaited.wait()
        self._woken, self._awaited = trio.Event(), trio.Event()

    # --- candidates ---------------------------------------------------------------------------------------------------

    async def _process_candidates(self) -> bool:
        """Process a batch of candidates. Return True if there are more."""
        wakes, is_first = self._wakes, not self._last_inode
        self._search_s = 0.0
        rows = namespace.list_candidates(self._context.db, self._last_inode)
        self._last_inode = rows[-1][0] if len(rows) == limits.SET_CANDIDATES_MAX else 0
        due_s = self._candidate_due_s | {one.row: one.due_s for one in self._waiting.values()}
        now_s = trio.current_time()
        for row in rows:
            if row not in due_s:
                due_s[row] = self._candidate_due_s[row] = now_s + self._refresh.choose_delay_s()
        fresh = [row for row in rows if due_s[row] <= now_s]
        if fresh:
            found = await self._find(fresh)
            await self._note_producers(found)
            done, places = set(found), {one.key: one for members in found.values() for one in members}
            # If another node has made the set, the file is in the history, and its member is not looked for any more.
            seen = {inode for inode, _ in found}
            self._waiting = {key: one for key, one in self._waiting.items() if one.row[0] not in seen or key in places}
            for place in places.values():
                parts = [row for row, members in found.items() if any(one.key == place.key for one in members)]
                done |= await self._process_member(place, parts)
            namespace.delete_candidates(self._context.db, done - {one.row for one in self._waiting.values()})
            self._candidate_due_s = {row: due_s for row, due_s in self._candidate_due_s.items() if row not in done}
        if is_first and not self._last_inode:
            self._wakes_at_last_pass = wakes
        return bool(self._last_inode)

    async def _find(self, rows: list[Row]) -> dict[Row, list[FoundMember]]:
        """Return the members that each candidate is a part of, without candidates in paused directories."""
        db, candidates = self._context.db, [inode for inode, _ in rows]
        now_s = trio.current_time()
        self._directory_pauses = {directory: until_s for directory, until_s in self._directory_pauses.items() if until_s > now_s}
        await self._refresh.refresh_above(candidates, self._directory_pauses)
        self._releases.release_moved(candidates)
        kept = {inode for inode in inodes.list_in_history(db, candidates) if await self._note_sets_of(inode)}
        search = MemberSearch(db, frozenset(self._directory_pauses))
        by_inode = await trio.to_thread.run_sync(search.find, candidates)
        found = {row: by_inode[row[0]] for row in rows}
        self._search_s = search.cpu_s
        self._directory_pauses |= {directory: trio.current_time() + seconds for directory, seconds in search.pauses_s.items()}
        self._candidate_due_s |= {row: max(self._directory_pauses.values()) for row, members in found.items() if members is None}
        # A file that is written gets another inode than its name in the history. So its one member needs no new set because of it.
        return {row: [] if row[0] in kept and len(members) == 1 else members for row, members in found.items() if members is not None}

    async def _note_sets_of(self, inode: int) -> bool:
        """Note that the series whose history has a file must be reviewed.

        Return whether a finished set has it.
        """
        is_kept = False
        await trio.lowlevel.checkpoint()
        for directory, one in await self._refresh.list_sets_of_file(inode):
            await self._review.add_lost_name(directory, one)
            is_kept |= set_members.is_finished(self._context.db, one)
        return is_kept

    async def _note_producers(self, found: dict[Row, list[FoundMember]]) -> None:
        """Note on one file of each member by which process it was written.

        The note of an earlier writer on the other files is deleted.
        """
        notes: dict[int, str] = {}
        for (inode, _), members in found.items():
            file = self._context.open_files.producers.take(inode)
            if file is not None and members:
                self._events.note_written(members[0], file)
                known, producer = self._noted_producers.setdefault(members[0].key, set()), file.process.text
                notes[inode] = "" if producer in known else producer
                known.add(producer)
        if notes:
            await self._changes.run_change(lambda db, _: set_members.set_producers(db, notes))

    # --- members ------------------------------------------------------------------------------------------------------

    async def _process_member(self, found: FoundMember, rows: list[Row]) -> set[Row]:
        """Judge a member, and make its set if it is complete.

        Return candidates that nothing waits for any more.
        """
        former, is_contended = self._waiting.pop(found.key, None), False
        try:
            delay_s = await self._judge(found)
        except (OSError, CkptfsError) as reason:
            is_usual = isinstance(reason, Busy | FileNotFoundError)
            log.log(
                logging.DEBUG if is_usual else logging.WARNING,
                "%s: no set is made now: %s; trying again",
                os.fsdecode(found.member.name),
                reason,
            )
            delay_s, is_contended = limits.SET_RETRY_S, isinstance(reason, Busy) and self._context.shared_namespace.is_shared
        if delay_s is None:
            self._noted_producers.pop(found.key, None)
        else:
            if former is not None and former.row in rows:
                delay_s = max(delay_s, min(2 * former.delay_s, limits.SET_RETRY_MAX_S))
            due_s = trio.current_time() + delay_s + self._refresh.choose_delay_s()
            self._waiting[found.key] = _Waiting(rows[0], due_s, delay_s, is_contended)
        return set() if former is None else {former.row}

    async def _judge(self, found: FoundMember) -> float | None:
        """Make the set of a member if it is complete.

        Return in how many seconds to look again; None: when something changes.
        """
        load = functools.partial(found.load_tree, self._context.db)
        before = await trio.to_thread.run_sync(load)
        is_committed = bool(set_members.list_committed(self._context.db, found.inodes))
        verdict = await judge(found.series, found.siblings, self._reader, found.member, is_committed=is_committed)
        if verdict.incomplete_reason or before is None:
            log.debug("%s: no set yet: %s", os.fsdecode(found.member.name), verdict.incomplete_reason)
            if not verdict.quiet_s:
                self._events.record_begun(found)
            waits_s = verdict.quiet_s or (limits.SET_RETRY_S if found.is_newest else 0.0)
            return min(waits_s, limits.SET_RETRY_MAX_S) or None
        tree = await trio.to_thread.run_sync(load)  # The verdict has loaded what other nodes know of the files.
        if tree is None or tree != before:
            raise Busy("it changes")
        directory, made = await self._maker.make(found, tree)
        self._review.schedule(directory)
        await self._events.record_complete(found, directory, made)
        if made is not None:
            log.info("%s: complete: %d files, %d bytes", os.fsdecode(made.name), made.record.files, made.record.size)
            await self._report_unchanged(directory, made, tree)
        return None

    async def _report_unchanged(self, directory: int, made: CheckpointSet, tree: SetTree) -> None:
        former = await trio.to_thread.run_sync(_find_equal, self._context.db, directory, made, tree)
        if former:
            log.info("%s: has the same bytes as %s: training may not progress", os.fsdecode(made.name), former)
            self._events.record_unchanged(made.directory, former)


def _find_equal(db: Database, series_directory: int, made: CheckpointSet, tree: SetTree) -> str:
    """Return the name of the set before one if it has the same bytes, else ""."""
    before = [one for one in history_names.list_set_names(db, series_directory) if one.number < made.record.number]
    former = max(before, key=lambda one: one.number, default=None)
    old = None if former is None else set_members.load_set_tree(db, [(b"", former.directory)])
    if former is None or old is None:
        return ""
    is_equal = is_unchanged(*([(file.size, file.digest) for file in one.files.values()] for one in (tree, old)))
    return f"{os.fsdecode(former.member)}@{former.number}" if is_equal else ""


# --- the members of which an inode is a part ---------------------------------------------------------------------------


class _DirectoryNames(NamedTuple):
    """The entries of a directory.

    `siblings`: inodes by name. `members`: the members that each name belongs to, with whether a member is the newest.
    """

    siblings: dict[bytes, int]
    directories: set[bytes]
    members: dict[bytes, list[tuple[Series, Member, bool]]]


class MemberSearch:
    """The search for the members of series of which some inodes are a part.

    They are among its siblings, and in the directories above. A series counts if its numbers count checkpoints, or for a member that is a
    directory of a known kind: others are data sets, experiments or users. A file or directory outside any series that a user committed as
    complete is a series of its own. The search runs in a worker thread; each directory is read once.
    """

    def __init__(self, db: Database, paused: frozenset[int]) -> None:
        """`paused`: directories that must not be read now."""
        self._db, self._paused = db, paused
        self._places: dict[int, list[tuple[int, bytes]]] = {}
        """The places of each inode that is looked for, and of each directory above."""
        self._directories: dict[int, _DirectoryNames] = {}
        self._kinds: dict[int, bool] = {}
        self.cpu_s = 0.0  # The processor time of `find`.
        self.pauses_s: dict[int, float] = defaultdict(float)
        """For how long not to read each directory again: a multiple of the time that it took to read."""

    def find(self, inodes: Sequence[int]) -> dict[int, list[FoundMember] | None]:
        """Return the members by inode, the innermost first; None if a directory on the way is paused."""
        began_s = time.thread_time()
        self._places |= set_members.load_places(self._db, inodes)
        found = {inode: self._find(inode) for inode in inodes}
        for inode in set_members.list_committed(self._db, inodes):
            if found[inode] == []:
                found[inode] = self._build_committed(inode)
        self.cpu_s = time.thread_time() - began_s
        return found

    def _find(self, inode: int) -> list[FoundMember] | None:
        found: list[FoundMember] = []
        todo = [*self._places[inode]]
        while todo:  # A tree may be deeper than the stack of Python.
            directory, name = todo.pop(0)
            if directory in self._paused:
                return None
            found += self._match(directory, name)
            if directory != ROOT:
                if directory not in self._places:
                    self._places[directory] = set_members.list_places(self._db, directory)
                todo += self._places[directory]
        return found

    def _match(self, directory: int, name: bytes) -> list[FoundMember]:
        siblings, directories, members = self._load(directory)
        found = []
        for one, member, is_newest in members.get(name, ()):
            source = siblings[name] if name in directories and member.files == (name,) else None
            if one.is_step_count or (source is not None and self._has_kind(source)):
                found.append(FoundMember(directory, one, member, siblings, source, is_newest))
        return found

    def _load(self, directory: int) -> _DirectoryNames:
        """Return what is in a directory. Reading it takes as long as there are names."""
        if directory not in self._directories:
            began_s = time.monotonic()
            names = set_members.list_possible_members(self._db, directory)
            siblings = {name: inode for name, (inode, _) in names.items()}
            directories = {name for name, (_, is_directory) in names.items() if is_directory}
            members: dict[bytes, list[tuple[Series, Member, bool]]] = defaultdict(list)
            for one in patterns.list_series(names):
                # Of another series, only a directory may count.
                for number, member in enumerate(patterns.list_members(one, names) if one.is_step_count or directories else ()):
                    for file in member.files:
                        members[file].append((one, member, number == 0))
            self._directories[directory] = _DirectoryNames(siblings, directories, members)
            self.pauses_s[directory] += (time.monotonic() - began_s) * limits.SET_SEARCH_PAUSE
        return self._directories[directory]

    def _has_kind(self, directory: int) -> bool:
        """Return True if a directory is of a known kind. Reading it takes as long as there are names."""
        if directory not in self._kinds:
            began_s = time.monotonic()
            names = set_members.list_possible_members(self._db, directory)
            files = {name: set_kinds.MemberFile(0, Level.NONE) for name, (_, is_directory) in names.items() if not is_directory}
            self._kinds[directory] = bool(set_kinds.list_kinds(DirectoryFacts(files, frozenset(names.keys() - files.keys()))))
            self.pauses_s[directory] += (time.monotonic() - began_s) * limits.SET_SEARCH_PAUSE
        return self._kinds[directory]

    def _build_committed(self, inode: int) -> list[FoundMember]:
        """Return a file or directory outside any series that a user committed, as a series of its own."""
        found = []
        for directory, name in self._places[inode]:
            is_directory = set_members.list_possible_members(self._db, directory)[name][1]
            member = Member((0,), name, name, (name,))
            found.append(FoundMember(directory, Series((name,)), member, {name: inode}, inode if is_directory else None, True))
        return found
