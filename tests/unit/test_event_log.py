"""The event log: its records, its writer in several processes, rotation, and readers that follow it. G6."""

import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ckptfs_daemon import event_writer
from ckptfs_daemon.event_writer import EventWriter, append_lines
from ckptfs_daemon.supervisor import children
from daemon_under_test import eventually

from ckptfs import disk, event_log
from ckptfs.event_log import EventKind, LoggedEvent, Position

NOW_NS = 1_763_894_000_123_456_000


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / event_log.DIRECTORY


@pytest.fixture
def short_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are full after some lines."""
    monkeypatch.setattr(event_log, "FILE_BYTES", 200)
    monkeypatch.setattr(event_log, "FILES_MAX", 3)


def line(number: int) -> bytes:
    return event_log.build_line(LoggedEvent(NOW_NS + number, EventKind.COMPLETE, {"number": number}))


def numbers(directory: Path, since_ns: int = 0) -> list[float | None]:
    return [event.get_number("number") for event in event_log.read_events(directory, since_ns)]


# --- records -------------------------------------------------------------------------------------------------------------


def test_a_record_comes_back() -> None:
    event = LoggedEvent(NOW_NS, EventKind.COMPLETE, {"node": "n1", "set": "step_1", "number": 7, "files": 0, "producers": [{"pid": 3}]})
    assert event_log.parse_line(event_log.build_line(event)) == event
    assert json.loads(event_log.build_line(event))["time"] == "2025-11-23T10:33:20.123456Z"


def test_what_is_not_known_is_left_out() -> None:
    """A zero is known."""
    found = event_log.parse_line(event_log.build_line(LoggedEvent(NOW_NS, EventKind.LOAD, {"set": "", "job": None, "step": 0})))
    assert found is not None and found.fields == {"step": 0}


def test_a_record_is_bounded() -> None:
    """It says that it was cut, and keeps its numbers."""
    made = event_log.build_line(LoggedEvent(NOW_NS, EventKind.TROUBLE, {"node": "n1", "what": "x" * 100_000, "files": 3}))
    found = event_log.parse_line(made)
    assert len(made) < event_log.LINE_BYTES_MAX and found is not None and found.fields == {"node": "n1", "files": 3, "cut": True}


@pytest.mark.parametrize(
    "bad", [b"", b"{", b"[]", b"7", b"null", b'{"kind": "load"}', b'{"time": "x", "kind": "load"}', b'{"time": 7, "kind": "load"}',
            b'{"time": "2025-11-23T10:33:20Z", "kind": 7}', b"\xff\0", b"[" * 100_000],
)  # fmt: skip
def test_what_is_no_event_is_none(bad: bytes) -> None:
    assert event_log.parse_line(bad) is None


def test_fields_of_other_types_are_not_taken() -> None:
    event = LoggedEvent(0, "load", {"set": 7, "number": "7", "step": True, "producers": [1, {"pid": 2}], "loaders": {}})
    assert (event.get_text("set"), event.get_number("number"), event.get_number("step")) == ("", None, None)
    assert event.list_objects("producers") == [{"pid": 2}] and event.list_objects("loaders") == []


# --- files ---------------------------------------------------------------------------------------------------------------


def test_there_is_no_log(log: Path) -> None:
    assert event_log.read_lines(log, Position()) == ([], Position()) and numbers(log) == []


@pytest.mark.usefixtures("short_files")
def test_rotation_keeps_the_newest(log: Path) -> None:
    """Of 40 events, the last ones stay, without a gap, in at most three files."""
    for number in range(40):
        append_lines(log, [line(number)])
    left = numbers(log)
    assert left and left == list(range(int(left[0] or 0), 40)) and len(left) < 15
    assert len(event_log.list_files(log)) == 3 and event_log.list_files(log)[0] > 1


@pytest.mark.usefixtures("short_files")
def test_a_reader_follows_through_rotations(log: Path) -> None:
    """Each event once; a reader that is left behind goes on with the oldest that there is."""
    position, seen = Position(), []
    for number in range(40):
        append_lines(log, [line(number)])
        while number < 20 and (found := event_log.read_lines(log, position))[0]:
            position = found[1]
            seen += [event.get_number("number") for event in event_log.parse_lines(found[0])]
    assert seen == list(range(20))
    late, position = event_log.read_lines(log, position)
    assert late and event_log.parse_line(late[0]) is not None and position.file > 1


def test_a_torn_line_is_skipped_and_ended(log: Path) -> None:
    """A writer that was killed leaves half a line. A reader waits behind the last whole line."""
    append_lines(log, [line(1)])
    path = event_log.build_path(log, 1)
    whole = path.stat().st_size
    with open(path, "ab") as file:
        file.write(line(2)[:20])
    assert event_log.read_lines(log, Position())[1] == Position(1, whole)
    append_lines(log, [line(3)])
    assert numbers(log) == [1, 3]


@pytest.mark.usefixtures("short_files")
def test_a_torn_line_at_the_end_of_a_full_file(log: Path) -> None:
    for number in range(2):
        append_lines(log, [line(number)])
    with open(event_log.build_path(log, 1), "ab") as file:
        file.write(b"x" * 200)
    append_lines(log, [line(2)])
    assert event_log.list_files(log) == [1, 2] and numbers(log) == [0, 1, 2]


def test_bytes_without_a_line_are_passed_over(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that failed left zeros, more than are read at once."""
    monkeypatch.setattr(event_log, "READ_BYTES", 512)
    log.mkdir()
    event_log.build_path(log, 1).write_bytes(line(1) + bytes(5000) + b"\n" + line(2))
    assert numbers(log) == [1, 2]


def test_since(log: Path) -> None:
    append_lines(log, [line(number) for number in range(5)])
    assert numbers(log, NOW_NS + 2000) == [] and numbers(log, NOW_NS) == [0, 1, 2, 3, 4]


# --- the writer ----------------------------------------------------------------------------------------------------------


def test_the_writer_writes_what_was_recorded(tmp_path: Path, log: Path) -> None:
    """Of several threads; with the node and the mount. It takes nothing before and after."""
    writer = EventWriter()
    writer.record(EventKind.LOAD, number=-1)
    writer.open(tmp_path, node="n1", mount="run1")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: [writer.record(EventKind.LOAD, number=one) for one in range(100)], range(4)))
    writer.close()
    writer.record(EventKind.LOAD, number=-2)
    found = list(event_log.read_events(log))
    assert sorted(event.get_number("number") or 0 for event in found) == sorted([*range(100)] * 4)
    assert {(event.get_text("node"), event.get_text("mount")) for event in found} == {("n1", "run1")}
    assert (log.stat().st_mode & 0o777, event_log.build_path(log, 1).stat().st_mode & 0o777) == (0o700, 0o600)


PROCESS = """
import sys
from pathlib import Path
from ckptfs import event_log
from ckptfs_daemon.event_writer import append_lines
event_log.FILE_BYTES = 3000
for number in range(200):
    append_lines(Path(sys.argv[1]), [event_log.build_line(event_log.LoggedEvent(1, "load", {"number": number, "who": sys.argv[2]}))])
"""


def test_several_processes_write_one_log(log: Path) -> None:
    """No line is torn or lost, also while the log is rotated."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    made = [subprocess.Popen([sys.executable, "-c", PROCESS, str(log), str(one)], env=environment) for one in range(3)]
    seen: set[tuple[str, float | None]] = set()
    position = Position()
    while True:
        have_ended = all(process.poll() is not None for process in made)
        lines, position = event_log.read_lines(log, position)
        events = [event_log.parse_line(line) for line in lines]
        assert None not in events
        seen |= {(event.get_text("who"), event.get_number("number")) for event in events if event is not None}
        if have_ended and not lines:
            break
    assert [process.returncode for process in made] == [0, 0, 0]
    assert seen == {(str(who), number) for who in range(3) for number in range(200)}


def test_a_disk_that_fails_loses_events_and_nothing_else(tmp_path: Path, log: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once; when the disk works again, events are written again."""
    log.write_text("no directory")
    writer = EventWriter()
    writer.open(tmp_path, node="n1", mount="run1")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            writer.record(EventKind.LOAD, number=1)
            writer.close()
            writer.open(tmp_path, node="n1", mount="run1")
    assert [record.message.partition(":")[0] for record in caplog.records] == ["events"]
    log.unlink()
    writer.record(EventKind.LOAD, number=2)
    writer.close()
    assert numbers(log) == [2]


def test_a_disk_that_hangs_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`record` does not wait, the queue is bounded, and the end waits for a bounded time."""
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(directory: Path, lines: list[bytes]) -> None:
        hangs.set()
        goes_on.wait(60)

    monkeypatch.setattr(event_writer, "append_lines", hang)
    monkeypatch.setattr(event_writer, "PENDING_MAX", 50)
    monkeypatch.setattr(event_writer, "END_WAIT_S", 0.01)
    writer = EventWriter()
    writer.open(tmp_path, node="n1", mount="run1")
    writer.record(EventKind.LOAD)
    assert hangs.wait(60)
    for _ in range(1000):
        writer.record(EventKind.LOAD)
    assert writer._queue.qsize() == 50
    writer.close()
    goes_on.set()


def test_a_fork_writes_what_it_records_and_nothing_else(tmp_path: Path, log: Path) -> None:
    """It has the queue of its parent, but not the thread that writes it."""
    writer = EventWriter()
    writer.open(tmp_path, node="n1", mount="run1")
    log.mkdir()

    def record_another() -> int:
        writer.open(tmp_path, node="n1", mount="run1")
        writer.record(EventKind.LOAD, number=3)
        writer.close()
        return 0

    with disk.closing(os.open(log, os.O_RDONLY | os.O_DIRECTORY)) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        writer.record(EventKind.LOAD, number=1)
        eventually(writer._queue.empty, what="the thread has taken it and waits for the lock")
        writer.record(EventKind.LOAD, number=2)
        pid = children.fork(record_another, [])
    assert os.waitpid(pid, 0)[1] == 0
    writer.close()
    assert sorted(number or 0 for number in numbers(log)) == [1, 2, 3]
