"""Lists of checkpoint sets and of events: figures for anyone, and names that all users may list.

Any user may ask about any series. Names, notes and commands are in a reply only if every user may list the directory of the series and all
those above it. Of other series the caller reads them through the mount, where the kernel checks its rights.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptfs import event_log, limits
from ckptfs.catalog import history, history_names, inodes, set_members, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import CheckpointSet
from ckptfs.errors import InvalidArgument
from ckptfs.event_log import LoggedEvent, Position
from ckptfs.model import ROOT, Level
from ckptfs.protocol import control_pb2 as pb
from ckptfs_daemon.newest_sets import list_newest_first

SETS_AT_ONCE = 1000
MAY_LIST = 0o005

PUBLIC_FIELDS = frozenset(
    ("node", "mount", "directory", "number", "step", "files", "size", "began", "duration_s", "after_s", "level", "processes", "reason")
)
"""What any user may know of a set."""
PUBLIC_PROCESS_FIELDS = frozenset(("host", "pid", "job", "rank", "started"))


def list_series(db: Database, *, with_figures: bool) -> pb.ListSeriesReply:
    reply = pb.ListSeriesReply(shared=db.is_clustered)
    for one in history.list_series(db):
        rollback = one.rollback.number if one.rollback is not None else 0
        found = reply.series.add(directory=one.directory, origin=one.origin, rollback=rollback)
        shows_names = may_all_list(db, one.directory)
        if shows_names:
            found.path, found.pattern = one.path, one.pattern
        if with_figures:
            with db.read_transaction():
                names, found.size = list_newest_first(db, one), history_names.count_bytes(db, one.directory)
                newest = history.get_set(db, names[0].directory) if names else None
            found.sets = len(names)
            if newest is not None:
                level = summary.list_lowest_levels(db, [newest.directory]).get(newest.directory, Level.NONE)
                found.newest.CopyFrom(_build_set(newest, level, False, shows_names))
    return reply


def list_sets(db: Database, series: int, refresh_files: Callable[[list[int]], None]) -> Iterator[pb.SetList]:
    """Yield the sets of a series in several messages, the newest first.

    Raises InvalidArgument if there is no such series. `refresh_files` reads from the store of a cluster how far files are.
    """
    known_series = history.get_series(db, series)
    if known_series is None:
        raise InvalidArgument(f"{series} is not a series of checkpoints", remedy="`ckptfs list` shows all")
    directories = [one.directory for one in list_newest_first(db, known_series)]
    if db.is_clustered:
        files = (inode.id for one in directories for _, inode in history.list_files(db, one))
        refresh_files(list(itertools.islice(files, limits.CONTROL_LIST_MAX)))
    shows_names = may_all_list(db, series)
    # A client that wants the newest ones only ends the call after the first message.
    for start in range(0, len(directories), SETS_AT_ONCE):
        some = directories[start : start + SETS_AT_ONCE]
        with db.read_transaction():
            sets = [one for directory in some if (one := history.get_set(db, directory)) is not None]
            levels, known = summary.list_lowest_levels(db, some), set_members.list_known_sets(db, some)
        found = [_build_set(one, levels.get(one.directory, Level.NONE), known.get(one.directory, False), shows_names) for one in sets]
        yield pb.SetList(sets=found)
    yield pb.SetList(done=True)


def _build_set(one: CheckpointSet, level: Level, is_in_place: bool, shows_names: bool) -> pb.SetInfo:
    record = one.record
    return pb.SetInfo(
        number=record.number, directory=one.directory, name=one.name.rpartition(b"@")[0] if shows_names else b"", files=record.files,
        size=record.size, completed_ns=record.completed_ns, level=level.value, in_place=is_in_place, pinned=one.is_pinned,
        noted=bool(one.note), note=one.note if shows_names else "", group=record.is_group, step="".join(map(str, record.numbers[:1])),
    )  # fmt: skip


def may_all_list(db: Database, directory: int) -> bool:
    """Return True if every user may list a directory and all those above it."""
    while inodes.get(db, directory).mode & MAY_LIST == MAY_LIST:
        if directory == ROOT:
            return True
        directory = inodes.get(db, directory).parent
    return False


def list_events(db: Database, state: Path, position: Position, since_ns: int) -> pb.EventList:
    """Return some events behind a position; none at the end of the log."""
    lines, position = event_log.read_lines(state / event_log.DIRECTORY, position, since_ns)
    is_public = functools.cache(lambda origin: _is_public(db, origin))
    found = []
    for event in event_log.parse_lines(lines):
        origin = event.get_number("origin")
        shown = event if origin is None or is_public(int(origin)) else hide_names(event)
        found.append(event_log.build_line(shown).decode().rstrip())
    return pb.EventList(events=found, file=position.file, offset=position.offset)


def _is_public(db: Database, origin: int) -> bool:
    try:
        return may_all_list(db, origin)
    except OSError:
        return False  # The directory is gone: nothing tells its rights.


def hide_names(event: LoggedEvent) -> LoggedEvent:
    """Return an event of a set without names and commands."""
    fields = {name: value for name, value in event.fields.items() if name in PUBLIC_FIELDS}
    producers = [{name: one[name] for name in one.keys() & PUBLIC_PROCESS_FIELDS} for one in event.list_objects("producers")]
    reader = event.fields.get("reader")
    known = {name: reader[name] for name in reader.keys() & PUBLIC_PROCESS_FIELDS} if isinstance(reader, dict) else None
    return LoggedEvent(event.time_ns, event.kind, {**fields, "producers": producers, "reader": known})
