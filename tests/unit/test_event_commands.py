"""What `ckptfs events` and `ckptfs goodput` print, what the daemon tells other users, and what commands refuse. G6, X9, P11."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ckptfs_client.analysis import analysis_commands
from ckptfs_client.analysis.event_source import format_event
from ckptfs_client.analysis.goodput import WIDTH_MIN, compute_goodput, format_goodput
from ckptfs_client.errors import UsageError
from ckptfs_daemon.control.public_listings import hide_names
from ckptfs_daemon.event_writer import append_lines
from ckptfs_daemon.mover import main
from control_served import serving
from local_node import Node

from ckptfs import event_log
from ckptfs.catalog import summary
from ckptfs.catalog.database import Database
from ckptfs.event_log import EventKind, LoggedEvent, Position

Run = Callable[..., tuple[int, str, str]]
REPOSITORY = Path(__file__).resolve().parents[2]
SECOND = 10**9
BEGAN_NS = 1_700_000_000 * SECOND
SET = {"series": "run1/step_*", "directory": 7, "origin": 2, "set": "step_100@1", "number": 1, "step": 100}
PROCESS = {"host": "n1", "pid": 5, "command": "python train.py --key secret", "job": "9", "rank": "0"}


def complete(number: int, pid: int) -> LoggedEvent:
    fields = {**SET, "set": f"step_{number}00@{number}", "number": number, "step": 100 * number, "duration_s": 1.0}
    return LoggedEvent(BEGAN_NS + number * 100 * SECOND, "complete", {**fields, "producers": [{**PROCESS, "pid": pid}]})


# --- lines ---------------------------------------------------------------------------------------------------------------

FIELDS: dict[EventKind, tuple[dict[str, Any], str]] = {
    EventKind.COMPLETE: (
        {**SET, "files": 8, "size": 1 << 30, "duration_s": 3.21, "processes": 3, "producers": [PROCESS]},
        "run1/step_100@1  8 files, 1.0 GiB, saved in 3.2 s, by n1:5 (job 9, rank 0) python train.py --key secret and 2 other processes",
    ),
    EventKind.LOAD: ({**SET, "reader": {"pid": 5}}, "run1/step_100@1  by 5"),
    EventKind.LEVEL: ({**SET, "level": "pfs", "after_s": 61}, "run1/step_100@1  pfs after 1 min"),
    EventKind.RESTARTED: ({"process": "mover", "pid": 7, "exit_code": -9}, "mover process 7 was killed"),
    EventKind.TIER_DOWN: (
        {"tier": "pfs", "state": "down", "path": "/p", "what": "EIO", "remedy": "mount it"}, "pfs down: /p: EIO (mount it)",
    ),
    EventKind.DRAINED: (
        {"cause": "command", "done": False, "files_left": 2, "bytes_left": 5, "duration_s": 25},
        "NOT done, 2 files (5 B) left after 25.0 s, cause: command",
    ),
    EventKind.ROLLED_BACK: ({**SET, "set": ""}, "run1/step_*  ended"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FIELDS)
def test_a_line_says_what_happened(kind: EventKind) -> None:
    fields, expected = FIELDS[kind]
    line = format_event(LoggedEvent(BEGAN_NS, kind, {"node": "n1", **fields}))
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d  n1  {kind} +{re.escape(expected)}", line)


@pytest.mark.parametrize("kind", [*EventKind, "of a later version"])
def test_every_kind_is_one_printable_line(kind: str) -> None:
    """Also without its fields, with fields of other types, and with names that are no text."""
    odd = {name: ["x"] for name in ("set", "reader", "producers", "exit_code", "done", "what")}
    for fields in ({}, odd, {"set": "a\nb\udcff", "what": "x\ty"}):
        line = format_event(LoggedEvent(BEGAN_NS, kind, {"node": "n1", **fields}))
        assert line.isprintable() and kind in line


def test_the_documents_explain_every_kind() -> None:
    text = (REPOSITORY / "docs" / "operations.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", text.partition("## Events\n")[2].partition("\n## ")[0], re.MULTILINE))
    assert set(rows) == set(EventKind) and all(rows.values())


# --- goodput -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0, 40, 80, 10_000])
def test_the_plot_fits_the_terminal(width: int) -> None:
    """A restart, sets in their place, and no line that is too wide but for the head and the table."""
    found = compute_goodput([complete(1, 1), complete(2, 1), complete(1, 2), complete(3, 2), complete(4, 2)])
    assert found is not None
    plot = format_goodput("/ckpt/run1/step_*", found, width).split("\n\n")[3].splitlines()
    assert max(map(len, plot[1:])) <= max(width, WIDTH_MIN) + 1 and len(plot) == 15
    assert "*" in plot[1] and plot[1].strip().startswith("400") and plot[12].strip().startswith("100")
    assert sum("*" in line for line in plot[1:]) == found.saves


def test_a_series_with_one_set_has_no_plot() -> None:
    found = compute_goodput([complete(1, 1)])
    assert found is not None and "1 run" in format_goodput("s", found, 80) and "|" not in format_goodput("s", found, 80)


def test_goodput_of_logs_of_other_nodes(run: Run, tmp_path: Path) -> None:
    """No mount is needed: the series is named as the logs name it. The logs are put together."""
    for node, numbers in (("a", (1, 2)), ("b", (2, 3))):
        append_lines(tmp_path / node, [event_log.build_line(complete(number, 1)) for number in numbers])
    logs = ("--log", tmp_path / "a", "--log", tmp_path / "b")
    code, out, err = run("goodput", "run1/step_*", *logs, "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "") and (answer["saves"], answer["steps"], answer["restarts"], answer["mtbf_s"]) == (3, 300, 0, None)
    assert "300 steps done" in run("goodput", "run1/step_*", *logs)[1]
    assert run("goodput", "run2/step_*", *logs)[0] == 1
    code, _, err = run("goodput", "run1/step_*", "--log", tmp_path)
    assert code == 1 and "is not an event log" in err
    assert run("goodput", tmp_path / "step_*")[0] == 3


# --- the command ---------------------------------------------------------------------------------------------------------


def test_since() -> None:
    now_ns = time.time_ns()
    assert analysis_commands.parse_since(None) == 0
    assert abs(analysis_commands.parse_since("2h") - (now_ns - 7200 * SECOND)) < 60 * SECOND
    assert analysis_commands.parse_since("2023-11-14T22:13:20Z") == BEGAN_NS
    for text in ("yesterday", "", "2023-13-01", "-1h"):
        with pytest.raises(UsageError, match="--since"):
            analysis_commands.parse_since(text)


# --- what the daemon tells -----------------------------------------------------------------------------------------------


def test_names_are_hidden() -> None:
    """Of a directory that not every user may list: what is left are numbers, and processes without their commands."""
    more = {"former": "step_99@0", "duration_s": 1.5, "later": "secret", "producers": [PROCESS], "reader": PROCESS}
    text = event_log.build_line(hide_names(LoggedEvent(BEGAN_NS, "complete", {"node": "n1", **SET, **more}))).decode()
    assert "secret" not in text and "step_" not in text and "run1" not in text
    told = json.loads(text)
    assert (told["number"], told["step"], told["directory"], told["duration_s"]) == (1, 100, 7, 1.5)
    assert told["reader"] == told["producers"][0] == {"host": "n1", "pid": 5, "job": "9", "rank": "0"}


def test_the_daemon_answers_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the end of the log, whatever position is asked for; a directory that is gone counts as private."""
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(event_log, "READ_BYTES", 1000)
    node = Node(tmp_path)
    events = [
        LoggedEvent(BEGAN_NS + number, "level", {**SET, "origin": 1 if number % 2 else 10**6, "number": number}) for number in range(20)
    ]
    append_lines(node.config.state / event_log.DIRECTORY, [event_log.build_line(event) for event in events])
    with serving(node) as served:
        found, position, calls = [], Position(), 0
        while (reply := served.client.list_events(position)).events:
            found += map(json.loads, reply.events)
            position, calls = Position(reply.file, reply.offset), calls + 1
        assert [one["number"] for one in found] == list(range(20)) and calls > 2
        assert {one["number"] % 2 for one in found if "series" in one} == {1}
        for beyond in (Position(reply.file, reply.offset), Position(1, 2**63)):
            assert not served.client.list_events(beyond).events
        assert served.client.list_events(Position(2**63, 7)).events, "of a log that is another one by now"


# --- troubles ------------------------------------------------------------------------------------------------------------


def test_troubles_begin_and_end(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, as `status` shows them."""
    seen: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(main.events, "record", lambda kind, **fields: seen.append((kind, fields)))
    summary.set_trouble(db, "write back", {"what": "EACCES", "path": "a/b", "remedy": "chmod it"})
    known = main.record_troubles(db, set())
    assert main.record_troubles(db, known) == known == {"write back"}
    summary.set_trouble(db, "write back", None)
    assert main.record_troubles(db, known) == set()
    assert seen == [
        ("trouble", {"where": "write back", "what": "EACCES", "path": "a/b", "remedy": "chmod it"}),
        ("trouble-over", {"where": "write back"}),
    ]  # fmt: skip
