"""The events of a mount: from its log if the caller may read it, else from the daemon; their lines.

The daemon leaves names out of events of directories that not every user may list. Where the caller may list the series in the history,
its name is put in again.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ckptfs import event_log
from ckptfs.event_log import EventKind, LoggedEvent, Position
from ckptfs.protocol import control_pb2 as pb
from ckptfs.quantities import format_count, format_duration, format_size
from ckptfs_client.client import Client
from ckptfs_client.errors import CommandFailed
from ckptfs_client.mounts import Mount
from ckptfs_client.render import escape_unprintable
from ckptfs_client.sets.set_history import SetHistory

NAMES_FRESH_S = 5.0
KIND_WIDTH = max(len(kind) for kind in EventKind)


class EventSource:
    def __init__(self, mount: Mount) -> None:
        self._mount = mount
        self._directory = find_log(mount)
        self._names: dict[int, str] = {}
        self._named_s = float("-inf")

    def list_events(self, since_ns: int = 0) -> list[LoggedEvent]:
        """Return all events since a time, in order of time."""
        return sorted(self.follow(since_ns, None), key=lambda event: event.time_ns)

    def follow(self, since_ns: int, wait: Callable[[], None] | None) -> Iterator[LoggedEvent]:
        """Yield events since a time, in the order of the log, and then those that come, without end.

        `wait` is called at the end of the log, and returns when to look again. Without it, the end of the log is the end.
        """
        position = Position()
        with Client(self._mount) as client:
            while True:
                before = position
                lines, position = self._read(client, position, since_ns)
                for event in event_log.parse_lines(lines, since_ns):
                    if (named := self._add_name(event)) is not None:
                        yield named
                if position == before:
                    if wait is None:
                        return
                    wait()

    def _read(self, client: Client, position: Position, since_ns: int) -> tuple[list[str] | list[bytes], Position]:
        if self._directory is not None:
            return event_log.read_lines(self._directory, position, since_ns)
        reply: pb.EventList = client.list_events(position, since_ns)
        return list(reply.events), Position(reply.file, reply.offset)

    def _add_name(self, event: LoggedEvent) -> LoggedEvent | None:
        """Return an event with the name of its series. Returns None if the caller may not know the series."""
        directory = event.get_number("directory")
        if directory is None or event.get_text("series"):
            return event
        if directory not in self._names and time.monotonic() - self._named_s > NAMES_FRESH_S:
            self._named_s = time.monotonic()
            with SetHistory(self._mount) as history:
                self._names = {one.directory: one.path for one in history.series}
        name = self._names.get(int(directory))
        return None if name is None else replace(event, fields={**event.fields, "series": name})


def find_log(mount: Mount) -> Path | None:
    """Return the directory of the log of a mount. Returns None if the caller may not read it."""
    state = mount.load_registered("state")
    if isinstance(state, str):
        with contextlib.suppress(OSError):
            directory = Path(state) / event_log.DIRECTORY
            event_log.list_files(directory)
            return directory
    return None


def read_log(directory: Path) -> list[LoggedEvent]:
    """Return the events of a log of another node: a directory with its files. Raises CommandFailed."""
    try:
        numbers = event_log.list_files(directory)
        found = list(event_log.read_events(directory))
    except OSError as failure:
        raise CommandFailed(f"{directory}: cannot be read: {failure.strerror}") from failure
    if not numbers:
        remedy = "it is the directory `events` in the state directory of a mount"
        raise CommandFailed(f"{directory} is not an event log", remedy=remedy)
    return found


# --- lines for people -------------------------------------------------------------------------------------------------


def format_event(event: LoggedEvent) -> str:
    """Format an event: local time, node, kind, the set, and what there is to say."""
    time = f"{datetime.fromtimestamp(event.time_ns // event_log.NANO):%Y-%m-%d %H:%M:%S}"
    series, name = event.get_text("series"), event.get_text("set")
    subject = os.path.join(os.path.dirname(series), name) if name else series
    details = _DETAILS.get(event.kind, _list_fields)(event)
    words = [f"{time}  {event.get_text('node')}  {event.kind:{KIND_WIDTH}}", subject, ", ".join(filter(None, details))]
    return escape_unprintable("  ".join(filter(None, words)))


def _list_fields(event: LoggedEvent) -> list[str]:
    """Describe an event of a kind that this version does not know."""
    return [f"{name}={value}" for name, value in event.fields.items() if name not in ("node", "mount", "series", "set")]


def _describe_begun(event: LoggedEvent) -> list[str]:
    producers = event.list_objects("producers")
    others = int(event.get_number("processes") or 0) - 1
    more = f" and {format_count(others, 'other process', 'other processes')}" if others > 0 else ""
    return [f"by {_describe_process(producers[0])}{more}"] if producers else []


def _describe_complete(event: LoggedEvent) -> list[str]:
    took_s = event.get_number("duration_s")
    saved = "" if took_s is None else f"saved in {format_duration(took_s)}"
    size = format_size(event.get_number("size") or 0)
    return [format_count(int(event.get_number("files") or 0), "file"), size, saved, *_describe_begun(event)]


def _describe_load(event: LoggedEvent) -> list[str]:
    reader = event.fields.get("reader")
    return [f"by {_describe_process(reader)}"] if isinstance(reader, dict) else []


def _describe_process(process: Mapping[str, Any]) -> str:
    """Describe a process: "node7:4711 (job 99, rank 0) python train.py"."""
    known = ", ".join(f"{name} {process[name]}" for name in ("job", "rank") if process.get(name) not in (None, ""))
    place = ":".join(str(process[name]) for name in ("host", "pid") if process.get(name))
    return " ".join(filter(None, (place, f"({known})" if known else "", str(process.get("command") or "")))).strip()


def _describe_level(event: LoggedEvent) -> list[str]:
    return [f"{event.get_text('level')} after {format_duration(event.get_number('after_s') or 0)}"]


def _describe_restart(event: LoggedEvent) -> list[str]:
    code = int(event.get_number("exit_code") or 0)
    end = "was killed" if code == -9 else f"ended with {code}"
    return [f"{event.get_text('process')} process {int(event.get_number('pid') or 0)} {end}"]


def _describe_trouble(event: LoggedEvent) -> list[str]:
    subject = event.get_text("where") or f"{event.get_text('tier')} {event.get_text('state')}"
    words = ": ".join(filter(None, (subject, event.get_text("path"), event.get_text("what"))))
    return [words + (f" ({event.get_text('remedy')})" if event.get_text("remedy") else "")]


def _describe_drain(event: LoggedEvent) -> list[str]:
    left = f"{format_count(int(event.get_number('files_left') or 0), 'file')} ({format_size(event.get_number('bytes_left') or 0)})"
    end = "done" if event.fields.get("done") is True else f"NOT done, {left} left"
    return [f"{end} after {format_duration(event.get_number('duration_s') or 0)}", f"cause: {event.get_text('cause')}"]


_DETAILS: dict[str, Callable[[LoggedEvent], list[str]]] = {
    EventKind.MOUNTED: lambda event: [f"at {event.get_text('mountpoint')}", f"version {event.get_text('version')}"],
    EventKind.ENDED: lambda event: ["in order" if event.fields.get("clean") is True else "cut off"],
    EventKind.RESTARTED: _describe_restart,
    EventKind.BEGUN: _describe_begun,
    EventKind.COMPLETE: _describe_complete,
    EventKind.INCOMPLETE: lambda event: [],
    EventKind.START: _describe_begun,
    EventKind.LOAD: _describe_load,
    EventKind.RESTORED: _describe_load,
    EventKind.LEVEL: _describe_level,
    EventKind.UNCHANGED: lambda event: [f"same bytes as {event.get_text('former')}: training may not progress"],
    EventKind.ROLLED_BACK: lambda event: [] if event.get_text("set") else ["ended"],
    EventKind.EXPIRED: lambda event: [event.get_text("reason")],
    EventKind.TIER_DOWN: _describe_trouble,
    EventKind.TIER_UP: _describe_trouble,
    EventKind.TROUBLE: _describe_trouble,
    EventKind.TROUBLE_OVER: _describe_trouble,
    EventKind.NOTICE: lambda event: [f"{event.get_text('source')}: {event.get_text('what')}"],
    EventKind.DRAINED: _describe_drain,
    EventKind.REPAIRED: lambda event: [
        f"{event.get_text('path')}: the copy in {event.get_text('tier')} from {event.get_text('source')}: {event.get_text('what')}"
    ],
}
