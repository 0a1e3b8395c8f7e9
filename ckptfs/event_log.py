"""The event log of a mount: the form of a record, and reading (G6, X9).

The log is a directory of files with ascending numbers: `00000001.jsonl`, ... Each line is one event, a JSON object with `time`, `kind`,
`node` and `mount`. The daemon appends to the last file. When that is full, it begins the next one and deletes the oldest.

A `Position` says up to where a reader has come. It stays valid while the log is rotated: a reader that is left behind goes on with the
oldest file.

Invariants:
- Nothing is appended to a file once there is a later one.
- A line that is cut off, or that is no event, is skipped.
"""

import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

DIRECTORY = "events"
"""Its name in the state directory of the mount."""
FILE_BYTES = 8 << 20
"""A file of this size is full."""
FILES_MAX = 8
LINE_BYTES_MAX = 16 << 10
READ_BYTES = 256 << 10
_FILE = re.compile(r"([0-9]{8,})\.jsonl")
NANO = 1_000_000_000


class EventKind(StrEnum):
    """What happened. docs/operations.md explains each kind."""

    MOUNTED = "mounted"
    ENDED = "ended"
    RESTARTED = "restarted"
    BEGUN = "begun"
    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    START = "start"
    LOAD = "load"
    RESTORED = "restored"
    LEVEL = "level"
    UNCHANGED = "unchanged"
    ROLLED_BACK = "rolled-back"
    EXPIRED = "expired"
    TIER_DOWN = "tier-down"
    TIER_UP = "tier-up"
    TROUBLE = "trouble"
    TROUBLE_OVER = "trouble-over"
    NOTICE = "notice"
    DRAINED = "drained"
    REPAIRED = "repaired"


class Position(NamedTuple):
    """A place in the log: the number of a file, and bytes."""

    file: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One event. `fields`: what else the record says, by name."""

    time_ns: int
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def get_text(self, name: str) -> str:
        """Return a field that is a text; "" without it."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""

    def get_number(self, name: str) -> float | None:
        """Return a field that is a number. Returns None without it."""
        value = self.fields.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def list_objects(self, name: str) -> list[Mapping[str, Any]]:
        """Return a field that is a list of objects; an empty list without it."""
        value = self.fields.get(name)
        return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


# --- the form of a record ---------------------------------------------------------------------------------------------


def build_line(event: LoggedEvent) -> bytes:
    """Return the line of an event. Fields that are None or empty are left out."""
    known = {name: value for name, value in event.fields.items() if value not in (None, "", [])}
    line = json.dumps({"time": format_time(event.time_ns), "kind": str(event.kind), **known}).encode()
    if len(line) >= LINE_BYTES_MAX:
        short = {
            name: value for name, value in known.items() if isinstance(value, int | float) or name in ("node", "mount", "series", "set")
        }
        line = json.dumps({"time": format_time(event.time_ns), "kind": str(event.kind), **short, "cut": True}).encode()
    return line + b"\n"


def parse_line(line: bytes | str) -> LoggedEvent | None:
    """Return the event of a line. Returns None if it is none: torn, or of a disk that failed."""
    try:
        fields = json.loads(line)
        time_ns, kind = parse_time(fields.pop("time")), fields.pop("kind")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return LoggedEvent(time_ns, kind, fields) if isinstance(kind, str) else None


def format_time(time_ns: int) -> str:
    """Format a time: "2026-11-23T10:32:53.123456Z"."""
    seconds, rest_ns = divmod(time_ns, NANO)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest_ns // 1000:06d}Z"


def parse_time(text: str) -> int:
    """Return a time in ns. A text without a zone is local time. Raises ValueError."""
    found = datetime.fromisoformat(text)
    return int(found.timestamp()) * NANO + found.microsecond * 1000


# --- the files --------------------------------------------------------------------------------------------------------


def build_path(directory: Path, number: int) -> Path:
    return directory / f"{number:08d}.jsonl"


def list_files(directory: Path) -> list[int]:
    """Return the numbers of the files, the oldest first; empty if there is no log. Raises PermissionError."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _FILE.fullmatch(name)))


def read_lines(directory: Path, position: Position, since_ns: int = 0) -> tuple[list[bytes], Position]:
    """Return some lines behind a position, and the position behind them; no lines at the end of the log.

    Files that were last written before `since_ns` are left out. Raises PermissionError.
    """
    numbers = list_files(directory)
    if numbers and position.file > numbers[-1]:
        position = Position()  # It is another log by now.
    for number in numbers[bisect_left(numbers, position.file) :]:
        offset = position.offset if number == position.file else 0
        is_last = number == numbers[-1]
        try:
            lines, offset = _read_piece(build_path(directory, number), offset, since_ns, is_last=is_last)
        except FileNotFoundError:
            continue  # It was deleted just now.
        position = Position(number, offset)
        if lines:
            return lines, position
    return [], position


def _read_piece(path: Path, offset: int, since_ns: int, *, is_last: bool) -> tuple[list[bytes], int]:
    """Return whole lines of a file, and the offset behind them."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if offset >= status.st_size or (not is_last and status.st_mtime_ns < since_ns):
            return [], offset
        while True:
            file.seek(offset)
            piece = file.read(READ_BYTES)
            end = piece.rfind(b"\n") + 1
            if end or len(piece) < READ_BYTES:
                return piece[:end].splitlines(), offset + end
            offset += len(piece)  # No line is that long.


def read_events(directory: Path, since_ns: int = 0) -> Iterator[LoggedEvent]:
    """Yield the events of a log since a time, in the order of the log. Raises PermissionError."""
    position = Position()
    while True:
        lines, position = read_lines(directory, position, since_ns)
        if not lines:
            return
        yield from parse_lines(lines, since_ns)


def parse_lines(lines: Iterable[bytes | str], since_ns: int = 0) -> Iterator[LoggedEvent]:
    """Yield the events of lines since a time."""
    for line in lines:
        event = parse_line(line)
        if event is not None and event.time_ns >= since_ns:
            yield event
