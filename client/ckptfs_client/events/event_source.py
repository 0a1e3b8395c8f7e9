"""Where the commands get the events of a mount from: its log if they may read it, else the daemon.

The daemon leaves names out of events of directories that not every user may list. Where the caller may list the series in the history,
its name is put in again.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ckptfs import event_log
from ckptfs.event_log import LoggedEvent, Position
from ckptfs.protocol import control_pb2 as pb
from ckptfs_client.client import Client
from ckptfs_client.errors import CommandFailed
from ckptfs_client.mounts import Mount
from ckptfs_client.sets.set_history import SetHistory

NAMES_FRESH_S = 5.0


class EventSource:
    """The events of a mount."""

    def __init__(self, mount: Mount) -> None:
        self._mount = mount
        self._directory = find_log(mount)
        self._names: dict[int, str] = {}
        self._named_s = float("-inf")

    def list_events(self, since_ns: int = 0) -> list[LoggedEvent]:
        """Return all events since a time, in order of time."""
        return sorted(self._iterate(since_ns, None), key=lambda event: event.time_ns)

    def follow(self, since_ns: int, wait: Callable[[], None]) -> Iterator[LoggedEvent]:
        """Yield events since a time, in the order of the log, and then those that come, without end.

        `wait` is called at the end of the log, and returns when to look again.
        """
        return self._iterate(since_ns, wait)

    def _iterate(self, since_ns: int, wait: Callable[[], None] | None) -> Iterator[LoggedEvent]:
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
        raise CommandFailed(f"{directory} is no event log", remedy=remedy)
    return found
