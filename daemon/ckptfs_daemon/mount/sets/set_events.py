"""The events of checkpoint sets: begun, complete, read, safe, gone (G6, X9, X11).

The tracker reports what it finds, and an event that cannot be described is left out. What is noted here, such as the time at which the
first file of a member was opened, ends with the mount process: a set that was begun before then has no duration.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import trio

from ckptfs import limits
from ckptfs.bounded_table import BoundedTable
from ckptfs.catalog import history, history_names, inodes, set_members, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import CheckpointSet, SeriesRecord
from ckptfs.errors import CkptfsError
from ckptfs.event_log import EventKind, format_time
from ckptfs.model import Level
from ckptfs.series.rules import WILDCARD
from ckptfs_daemon.event_writer import events
from ckptfs_daemon.mount.context import MountContext
from ckptfs_daemon.mount.open_files.producers import Process, WrittenFile
from ckptfs_daemon.mount.sets.set_maker import FoundMember
from ckptfs_daemon.mount.sets.set_refresh import SetRefresh

log = logging.getLogger(__name__)

PRODUCERS_MAX = 16
"""Processes that an event names."""
WRITERS_MAX = 4096
"""Processes that are noted for a set: a script may start one for each file."""
BEGUN_MAX = 1024
BEGUN_AGAIN_S = 10.0
OWN_COMMANDS = ("ckptfs", "ckptfs_client")
LOADS_MAX = 16_384
WATCHED_MAX = 64
SETS_LOOKED_AT = 16
NANO = 1e9


@contextlib.contextmanager
def _leaving_out() -> Iterator[None]:
    """Leave an event out if its rows have gone: no set, and no answer to a user, depends on it."""
    try:
        yield
    except (OSError, CkptfsError) as failure:
        log.debug("events: one is left out: %s", failure)


@dataclass(slots=True)
class _Begun:
    """A member that has no set yet.

    `writers`: when each process had its files open. `recorded_ns`: when its event was recorded last; 0: never.
    """

    found: FoundMember
    writers: dict[int, WrittenFile] = field(default_factory=dict)
    recorded_ns: int = 0


@dataclass(slots=True)
class _Watched:
    """A set below the highest level, and when to look again."""

    level: Level
    due_s: float
    delay_s: float = limits.SET_REVIEW_S


class SetEvents:
    """The events that the tracker reports. Belongs to the trio thread."""

    def __init__(self, context: MountContext, refresh: SetRefresh) -> None:
        self._context, self._refresh = context, refresh
        self._highest = context.config.highest_level
        self._begun = BoundedTable[tuple[int, bytes], _Begun](BEGUN_MAX)
        self._loads = BoundedTable[tuple[int, int], None](LOADS_MAX)
        self._watched = BoundedTable[int, _Watched](WATCHED_MAX)

    async def start(self) -> None:
        """Watch the set of each series that was completed last, if it is not as safe as it can be."""
        db = self._context.db
        last = [one for series in history.list_series(db) for one in history.list_set_directories(db, series.directory)[:1]]
        levels = await trio.to_thread.run_sync(summary.list_lowest_levels, db, last)
        for directory, level in levels.items():
            self._watch(directory, level)

    # --- saving -------------------------------------------------------------------------------------------------------

    def note_written(self, found: FoundMember, file: WrittenFile) -> None:
        """Note that a process has closed a file of a member."""
        writers = self._open(found).writers
        known = writers.get(file.process.pid, file)
        if len(writers) < WRITERS_MAX or file.process.pid in writers:
            opened_ns, closed_ns = min(known.opened_ns, file.opened_ns), max(known.closed_ns, file.closed_ns)
            writers[file.process.pid] = WrittenFile(file.process, opened_ns, closed_ns)

    def _open(self, found: FoundMember) -> _Begun:
        self._begun[found.key] = begun = self._begun.get(found.key) or _Begun(found)
        return begun

    def record_begun(self, found: FoundMember) -> None:
        """Record that some files of a member are closed: once, and again for processes that started since."""
        begun = self._open(found)
        with _leaving_out():
            self._record_try(found, begun)

    def _record_try(self, found: FoundMember, begun: _Begun) -> None:
        fresh = [one for one in begun.writers.values() if not begun.recorded_ns or one.process.started_ns > begun.recorded_ns]
        now_ns = time.time_ns()
        if not begun.recorded_ns or (fresh and now_ns - begun.recorded_ns > BEGUN_AGAIN_S * NANO):
            begun.recorded_ns = now_ns
            known = history.find_series(self._context.db, found.directory, found.series.name)
            opened_ns = min((one.opened_ns for one in fresh), default=None)
            producers = [_describe(one.process) for one in fresh if one.process.text][:PRODUCERS_MAX]
            self._record_member(EventKind.BEGUN, found, known, time_ns=opened_ns, producers=producers)

    def _record_member(self, kind: EventKind, found: FoundMember, known: SeriesRecord | None, **more: Any) -> None:
        series = _describe_series(known) if known is not None else self._describe_directory(found)
        events.record(kind, **series, set=os.fsdecode(found.member.name), step=_get_step(found.series.name, found.member.numbers), **more)

    def _describe_directory(self, found: FoundMember) -> dict[str, Any]:
        path = inodes.get_path(self._context.db, found.directory)
        return {"series": os.fsdecode(b"/".join(filter(None, (path, found.series.name)))), "origin": found.directory}

    async def record_complete(self, found: FoundMember, series_directory: int, made: CheckpointSet | None) -> None:
        """Record that a member is complete.

        `made`: its set; None if it had one already, or another node made it.
        """
        begun = self._begun.pop(found.key, None)
        if made is not None or (begun is not None and self._context.shared_namespace.is_shared):
            with _leaving_out():
                await self._record_set(found, series_directory, made, list(begun.writers.values()) if begun is not None else [])

    async def _record_set(
        self, found: FoundMember, series_directory: int, made: CheckpointSet | None, writers: Sequence[WrittenFile]
    ) -> None:
        db = self._context.db
        last = (await trio.to_thread.run_sync(history.list_set_directories, db, series_directory))[:SETS_LOOKED_AT]
        sets = [each for directory in last if (each := history.get_set(db, directory)) is not None]
        one = made or next((each for each in sets if each.record.name == found.member.name), None)
        known = history.get_series(db, series_directory)
        if known is None or one is None:
            return
        if made is not None:
            former = next((each for each in sets if each.record.number < made.record.number), None)
            self._record_start(known, made, former, writers)
            self._watch(made.directory, Level.LOCAL)
        producers = _describe_producers(one, writers)
        times = _describe_times(one, writers)
        more = {"files": one.record.files, "size": one.record.size, "processes": len(one.record.producers), "producers": producers}
        events.record(EventKind.COMPLETE, time_ns=one.record.completed_ns, **_describe_set(known, one), **times, **more)
        self._record_incomplete(found, known)

    def _record_start(self, known: SeriesRecord, made: CheckpointSet, former: CheckpointSet | None, writers: Sequence[WrittenFile]) -> None:
        """Record a start if none of the producers wrote the set before."""
        before = {(one.host, one.pid) for one in (former.record.producers if former is not None else ())}
        mine = {(one.host, one.pid) for one in made.record.producers}
        if mine and not mine & before:
            more = {"processes": len(mine), "producers": _describe_producers(made, writers)}
            events.record(EventKind.START, time_ns=made.record.completed_ns, **_describe_set(known, made), **more)

    def _record_incomplete(self, complete: FoundMember, known: SeriesRecord) -> None:
        """Record the older members of the series that were begun and have no set."""
        for key, begun in list(self._begun.items()):
            found = begun.found
            same, get_order = (found.directory, found.series) == (complete.directory, complete.series), found.series.get_order
            if same and get_order(found.member.numbers) < get_order(complete.member.numbers):
                del self._begun[key]
                if begun.recorded_ns:
                    self._record_member(EventKind.INCOMPLETE, found, known)

    def record_unchanged(self, directory: int, former: str) -> None:
        """Record that a set has the same bytes as the one before it."""
        _record_of_set(self._context.db, EventKind.UNCHANGED, directory, former=former)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def record_loads(self) -> None:
        """Record which processes read sets that others wrote."""
        for inode, process in self._context.open_files.producers.take_reads():
            with _leaving_out():
                if not set_members.is_manifest(self._context.db, inode):
                    await self._record_load(inode, process)

    async def _record_load(self, inode: int, process: Process) -> None:
        db, reader = self._context.db, _describe(process)
        places = await self._refresh.list_sets_of_file(inode)
        sets = [one for _, directory in places if (one := history.get_set(db, directory)) and set_members.is_finished(db, directory)]
        kind = _get_read_kind(reader.get("command", ""))
        if not sets or kind is None:
            return
        one = max(sets, key=lambda each: each.record.number)
        key = (one.directory, reader["pid"])
        if key in self._loads or any((each.host, each.pid) == (reader.get("host"), reader["pid"]) for each in one.record.producers):
            return
        self._loads[key] = None
        _record_of_set(db, kind, one.directory, reader=reader)

    # --- levels -------------------------------------------------------------------------------------------------------

    def _watch(self, directory: int, level: Level) -> None:
        if self._highest is not None and level is not self._highest:
            self._watched[directory] = _Watched(level, trio.current_time() + limits.SET_POLL_S)

    async def record_levels(self) -> None:
        """Record which sets are safer than they were at the last look."""
        db, now_s = self._context.db, trio.current_time()
        due = {directory: one for directory, one in self._watched.items() if one.due_s <= now_s}
        if not due:
            return
        for directory in due:
            with _leaving_out():
                if history.get_set(db, directory) is not None:
                    await self._refresh.refresh_set(directory, with_copies=True)
        levels = await trio.to_thread.run_sync(summary.list_lowest_levels, db, list(due))
        for directory, one in due.items():
            level = levels.get(directory)
            one.delay_s = min(one.delay_s * 1.5, limits.SET_RETRY_MAX_S)
            one.due_s = trio.current_time() + one.delay_s
            if level is not None and level.rank > one.level.rank:
                one.level = level
                if level is not Level.LOCAL:
                    _record_of_set(db, EventKind.LEVEL, directory, level=level.value)
            if level is None or level is self._highest:
                self._watched.pop(directory, None)


# --- the fields of events ---------------------------------------------------------------------------------------------


def record_expired(db: Database, directory: int, reason: str) -> None:
    """Record that a set goes, while it is still there."""
    _record_of_set(db, EventKind.EXPIRED, directory, reason=reason)


def record_rollback(db: Database, series_directory: int) -> None:
    """Record which set of a series is the latest because a user said so. None: that has ended."""
    with _leaving_out():
        known = history.get_series(db, series_directory)
        if known is None:
            return
        number = known.rollback.number if known.rollback is not None else 0
        named = (one.directory for one in history_names.list_set_names(db, series_directory) if one.number == number)
        chosen = history.get_set(db, next(named, 0))
        events.record(EventKind.ROLLED_BACK, **(_describe_series(known) if chosen is None else _describe_set(known, chosen)))


def _record_of_set(db: Database, kind: EventKind, directory: int, **more: Any) -> None:
    with _leaving_out():
        one = history.get_set(db, directory)
        known = None if one is None else history.get_series(db, inodes.get(db, directory).parent)
        if one is not None and known is not None:
            after_s = round((time.time_ns() - one.record.completed_ns) / NANO, 3)
            events.record(kind, **_describe_set(known, one), size=one.record.size, after_s=after_s, **more)


def _describe_series(known: SeriesRecord) -> dict[str, Any]:
    return {"series": os.fsdecode(known.path), "directory": known.directory, "origin": known.origin}


def _describe_set(known: SeriesRecord, one: CheckpointSet) -> dict[str, Any]:
    step = _get_step(known.pattern, one.record.numbers)
    return {**_describe_series(known), "set": os.fsdecode(one.name), "number": one.record.number, "step": step}


def _get_step(pattern: bytes, numbers: tuple[int, ...]) -> int | None:
    """Return the number that counts steps. Returns None if the names have none."""
    return numbers[0] if numbers and WILDCARD in pattern else None


def _describe(process: Process) -> dict[str, Any]:
    known: Mapping[str, Any] = json.loads(process.text) if process.text else {"pid": process.pid}
    return _drop_unknown({**known, "started": format_time(process.started_ns) if process.started_ns else None})


def _describe_producers(one: CheckpointSet, writers: Iterable[WrittenFile]) -> list[dict[str, Any]]:
    """Describe the processes that wrote a set. When they started is known of those on this node."""
    here = {(each.get("host"), each["pid"]): each for each in (_describe(writer.process) for writer in writers)}
    named = one.record.producers[:PRODUCERS_MAX]
    return [here.get((each.host, each.pid)) or _drop_unknown(asdict(each)) for each in named]


def _describe_times(one: CheckpointSet, writers: Iterable[WrittenFile]) -> dict[str, Any]:
    """Return when its files were open. What processes wrote that others have replaced does not count."""
    producers = {(each.host, each.pid) for each in one.record.producers}
    known = [writer for writer in writers if not producers or _get_identity(writer.process) in producers]
    if not known:
        return {}
    began_ns = min(writer.opened_ns for writer in known)
    return {"began": format_time(began_ns), "duration_s": (max(writer.closed_ns for writer in known) - began_ns) / NANO}


def _get_identity(process: Process) -> tuple[str, int]:
    known = _describe(process)
    return str(known.get("host", "")), int(known["pid"])


def _drop_unknown(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _get_read_kind(command: str) -> EventKind | None:
    """Return the kind of event for what a command reads.

    Returns None for commands of ckptfs that load nothing.
    """
    words = command.split()
    for number, word in enumerate(words[:3]):
        if os.path.basename(word) in OWN_COMMANDS:
            return EventKind.RESTORED if words[number + 1 : number + 2] == ["restore"] else None
    return EventKind.LOAD
