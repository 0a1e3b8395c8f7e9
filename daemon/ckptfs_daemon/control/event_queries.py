"""Replies to questions about the event log, for any user.

An event names a series, its sets and commands only if every user may list the directory of the application. Other events of sets have
numbers only. A caller that may list the series in the history finds its name there.
"""

import functools
from pathlib import Path

from ckptfs import event_log
from ckptfs.catalog.database import Database
from ckptfs.event_log import LoggedEvent, Position
from ckptfs.protocol import control_pb2 as pb
from ckptfs_daemon.control.set_queries import may_all_list

PUBLIC_FIELDS = frozenset(
    ("node", "mount", "directory", "number", "step", "files", "size", "began", "duration_s", "after_s", "level", "processes", "reason")
)
"""What any user may know of a set."""
PUBLIC_PROCESS_FIELDS = frozenset(("host", "pid", "job", "rank", "started"))


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
