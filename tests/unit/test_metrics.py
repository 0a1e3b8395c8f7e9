"""F5: the metrics for Prometheus, their dashboard and alerts, and the endpoint, which no caller and no failure ends."""

import errno
import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
import yaml
from ckptfs_daemon.control.metrics import METRICS, STEP_METRICS, MetricsEndpoint, encode_metrics
from control_served import serving
from daemon_under_test import eventually, list_readable
from etcd_server import free_ports
from local_node import Node
from prometheus_client.parser import text_string_to_metric_families

from ckptfs import http_server, limits, step_durations
from ckptfs.catalog import summary
from ckptfs.protocol import control_pb2 as pb

REPOSITORY = Path(__file__).resolve().parents[2]
ALERTS = REPOSITORY / "deploy/prometheus/ckptfs-alerts.yaml"
DASHBOARD = REPOSITORY / "deploy/grafana/ckptfs.json"
OPERATIONS = REPOSITORY / "docs/operations.md"
LEFT_OUT = {
    "drain_deadline_s", "request_timeout_s", "counts.files", "processes.pid", "troubles.age_s", "notice.age_s", "notice.deadline_s",
    "write_back.current_copied_bytes", "write_back.current_size_bytes", "clique.short.copies", "clique.links.rtt_s",
    "clique.links.bytes_per_s", "scrub.copies",
}  # fmt: skip
"""Figures of status that are no metrics: settings, a sum of others, and what belongs to one file, process or node."""
SUMS = {"clique.links.waiting_files", "clique.links.sending_files", "clique.links.waiting_bytes", "clique.links.sending_bytes"}
WORDS = {"tiers.name": "ram", "tiers.health": "full", "processes.role": "mount", "troubles.where": "files set aside 2"}
GET = b"GET /metrics HTTP/1.1\r\nHost: node7\r\n\r\n"

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def fill(message: Any, numbers: Iterator[int], prefix: str = "") -> dict[str, int]:
    """Give every figure of a message a number of its own; {path: number}."""
    given: dict[str, int] = {}
    for field in message.DESCRIPTOR.fields:
        path = f"{prefix}{field.name}"
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)["pfs"] = given[path] = next(numbers)
        elif field.message_type is not None:
            below = getattr(message, field.name)
            given |= fill(below.add() if field.is_repeated else below, numbers, f"{path}.")
        elif field.cpp_type == field.CPPTYPE_STRING:
            if not field.is_repeated:
                setattr(message, field.name, WORDS.get(path, field.name))
        elif field.cpp_type == field.CPPTYPE_BOOL:
            setattr(message, field.name, True)
        else:
            given[path] = next(numbers)
            setattr(message, field.name, given[path])
    return given


def read(text: bytes) -> Series:
    """The samples of an exposition."""
    found: Series = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def plain(series: Series) -> dict[str, float]:
    """Samples as NAME or NAME{a="b"}, labels in order."""
    return {
        name + (f"{{{','.join(f'{key}={value}' for key, value in sorted(labels))}}}" if labels else ""): number
        for (name, labels), number in series.items()
    }


@pytest.fixture
def full() -> pb.Status:
    """A Status with everything in it."""
    message = pb.Status()
    fill(message, count(1001))
    return message


def test_every_figure_of_status_is_a_metric() -> None:
    """A new field of Status gets a metric, or a reason why not."""
    status = pb.Status()
    given = fill(status, count(1001))
    # The figures of steps count this process's own steps: one of them may be any number.
    values = {value for (name, _), value in read(encode_metrics(status)).items() if not name.startswith(STEP_METRICS)}
    missing = {path for path, number in given.items() if number not in values}
    assert missing == LEFT_OUT | SUMS
    found = plain(read(encode_metrics(status)))
    link = status.clique.links[0]
    assert found["ckptfs_clique_queued_files"] == link.waiting_files + link.sending_files
    assert found["ckptfs_clique_queued_bytes"] == link.waiting_bytes + link.sending_bytes
    assert found["ckptfs_clique_failed_links"] == 1


def test_the_words_of_status_become_labels() -> None:
    status = pb.Status(name="run1", version="1.2", health="degraded", data_path="passthrough", fsync="local")
    status.tiers.add(name="ram", budget_bytes=100, free_bytes=30, used_bytes=70, health="normal")
    status.tiers.add(name="pfs", budget_bytes=1000, free_bytes=0, health="full")
    status.counts.by_level["pfs"] = 7
    for role, restarts in (("mount", 2), ("mover", 0)):
        status.processes.add(role=role, restarts=restarts)
    for who, number in (("a", 2), ("b", 3)):
        status.refused.add(where="peers", who=who, reason="busy", count=number)
    found = plain(read(encode_metrics(status)))
    expected = {
        "ckptfs_info{data_path=passthrough,fsync=local,name=run1,version=1.2}": 1, "ckptfs_healthy": 0, "ckptfs_preemption_notice": 0,
        "ckptfs_tier_used_bytes{tier=ram}": 70, "ckptfs_tier_free_bytes{tier=pfs}": 0, "ckptfs_tier_state{state=full,tier=pfs}": 1,
        "ckptfs_tier_state{state=normal,tier=pfs}": 0, "ckptfs_files{level=pfs}": 7, "ckptfs_files{level=local}": 0,
        "ckptfs_process_restarts_total{process=mount}": 2, "ckptfs_refused_calls_total{reason=busy,where=peers}": 5,
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected
    assert "ckptfs_tier_used_bytes{tier=pfs}" not in found


def test_what_is_not_known_has_no_sample() -> None:
    """Zero would be a figure: the size of a tier that does not answer, and the copies of a node in no cluster."""
    status = pb.Status(health="ok")
    status.tiers.add(name="pfs", health="down")
    found = plain(read(encode_metrics(status)))
    absent = ("ckptfs_tier_capacity", "ckptfs_tier_free", "ckptfs_clique", "ckptfs_service_memory_limit", "ckptfs_troubles")
    assert [name for name in found if name.startswith(absent)] == []
    assert found["ckptfs_healthy"] == 1 and found["ckptfs_tier_state{state=down,tier=pfs}"] == 1


def test_names_follow_the_conventions(full: pb.Status) -> None:
    families = list(text_string_to_metric_families(encode_metrics(full).decode()))
    assert len(families) - len(STEP_METRICS) == len(METRICS) == len({row.name for row in METRICS})
    counters = {name for name in (*STEP_METRICS, *(row.name for row in METRICS)) if name.endswith("_total")}
    assert {f"{family.name}_total" for family in families if family.type == "counter"} == counters
    assert {family.name for family in families if family.type == "histogram"} == {"ckptfs_step_duration_seconds"}
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}
    for row in METRICS:
        assert re.fullmatch(r"ckptfs(_[a-z]+)+", row.name) and not re.search(r"_(s|ms|ns|mib|gib|count)$", row.name)
        assert row.description.endswith(".") and len(row.description) < 100


def test_the_number_of_series_does_not_grow_with_the_data() -> None:
    """Troubles of many inodes and lanes, and refusals of many peers, are counted by kind."""
    status = pb.Status()
    for number in range(300):
        status.troubles.add(where=f"hidden:{number:016x}", path=f"a/{number}")
        status.troubles.add(where=f"fetch {number}")
        status.refused.add(where="peers", who=f"node{number}", reason="busy", count=1)
        status.handles.add(way="buffered", tier="ram", reason=f"{number}", count=1)
        status.clique.links.add(node=f"node{number}", waiting_files=1)
        status.clique.short.add(copies=number, files=1)
    found = {name: value for name, value in plain(read(encode_metrics(status))).items() if not name.startswith(STEP_METRICS)}
    assert {name: value for name, value in found.items() if name.startswith("ckptfs_troubles")} == {
        "ckptfs_troubles{kind=hidden}": 300, "ckptfs_troubles{kind=fetch}": 300,
    }  # fmt: skip
    assert len(found) < 60 and {value for value in found.values() if value > 1} == {300}


def selectors(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The metrics of a PromQL expression, with the matchers of labels that ckptfs sets: {label: regular expression}."""
    for name, matchers in re.findall(r"\b(ckptfs_\w+)(\{[^}]*\})?", expression):
        wanted = re.findall(r'(\w+)(=~?)"([^"]*)"', matchers)
        yield name, {key: text if how == "=~" else re.escape(text) for key, how, text in wanted if key != "instance"}


def expressions() -> Iterator[str]:
    for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
        yield rule["expr"]
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query")


def test_alerts_and_dashboard_ask_for_what_is_there(full: pb.Status) -> None:
    """Each selector finds a sample of a mount that has everything."""
    series = read(encode_metrics(full))
    asked = [(name, wanted) for expression in expressions() for name, wanted in selectors(expression)]
    assert len(asked) > 30
    lost = [
        (name, wanted)
        for name, wanted in asked
        if not any(one == name and all(re.fullmatch(wanted[key], dict(labels).get(key, "")) for key in wanted) for one, labels in series)
    ]
    assert lost == []
    by_labels = [
        (label, name)
        for expression in expressions()
        for labels in re.findall(r"by \(([\w, ]+)\)", expression)
        for label in re.split(r", *", labels)
        for name, _ in selectors(expression)
        if label != "instance" and not any(one == name and label in dict(found) for one, found in series)
    ]
    assert by_labels == []


def test_an_alert_says_what_it_means() -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    for rule in rules:
        assert set(rule["annotations"]) == {"summary", "description"} and rule["labels"]["severity"] in ("warning", "critical")


def test_a_dashboard_has_no_panel_twice() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken = [
        (column, row)
        for place in (panel["gridPos"] for panel in panels)
        for column in range(place["x"], place["x"] + place["w"])
        for row in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken)) and max(column for column, _ in taken) < 24


def test_the_documents_name_metrics_that_exist() -> None:
    named = set(re.findall(r"`(ckptfs_[a-z_]+)`", OPERATIONS.read_text()))
    assert named and named - {row.name for row in METRICS} - {*STEP_METRICS} == set()


def test_how_long_steps_take(tmp_path: Path) -> None:
    """A histogram for each step, also for one that never ran: buckets that count up, their sum, and the bytes."""
    before = plain(read(encode_metrics(pb.Status())))
    for seconds in (0.001, 0.002, 2.0, 5000.0):
        step_durations.record(step_durations.FETCH, seconds, 100)
    Node(tmp_path).make_sealed(b"sealed", b"y" * 300)
    after = plain(read(encode_metrics(pb.Status())))
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    buckets = [grown[f"ckptfs_step_duration_seconds_bucket{{le={bound},step=fetch}}"] for bound in ("0.001", "0.003", "1.0", "3.0", "+Inf")]
    assert buckets == [1, 2, 2, 3, 4] and grown["ckptfs_step_duration_seconds_count{step=fetch}"] == 4
    assert grown["ckptfs_step_duration_seconds_sum{step=fetch}"] == pytest.approx(5002.003)
    assert (grown["ckptfs_step_bytes_total{step=fetch}"], grown["ckptfs_step_bytes_total{step=seal}"]) == (400, 300)
    assert grown["ckptfs_step_duration_seconds_count{step=seal}"] == 1
    steps = {match[1] for name in after if (match := re.search("step=(\\w+)", name))}
    assert steps == {"seal", "replicate", "fetch", "write_back"} and not any("step=replicate" in name for name in grown)


# --- the endpoint --------------------------------------------------------------------------------------------------------


@contextmanager
def endpoint(address: str, build_status: Callable[[], pb.Status] = lambda: pb.Status(health="ok")) -> Iterator[None]:
    """An endpoint in a thread of its own."""
    scope, tokens = trio.CancelScope(), []

    async def main() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        with scope:
            await MetricsEndpoint(address, build_status).serve()

    thread = threading.Thread(target=trio.run, args=(main,), daemon=True)
    thread.start()
    try:
        yield
        assert thread.is_alive(), "the endpoint has ended"
    finally:
        eventually(lambda: tokens, what="the thread runs")
        tokens[0].run_sync_soon(scope.cancel)
        thread.join(30)
        assert not thread.is_alive()


def connect(address: str) -> socket.socket:
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)))
    connection.settimeout(30)
    return connection


def ask(address: str, request: bytes = GET) -> tuple[int, str, bytes]:
    """Status, headers and body of a reply."""
    with connect(address) as connection:
        connection.sendall(request)
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = reply.partition(b"\r\n\r\n")
    if not head:
        raise ConnectionResetError("the connection ended without a reply")
    return int(head.split()[1]), head.decode(), body


def answers(address: str) -> bool:
    try:
        return ask(address)[0] == 200
    except OSError:
        return False


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest.mark.usefixtures("never_cached")
def test_an_endpoint_serves_the_figures_of_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the control servers of a node, on a unix socket; the refusals that these count are in it, too."""
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path / "run"))
    node, address = Node(tmp_path), f"unix:{tmp_path / 'metrics.sock'}"
    node.config = replace(node.config, metrics=address)
    with serving(node) as served:
        eventually(lambda: answers(address), what="the metrics")
        node.make(b"closed", b"y" * 300)
        summary.set_trouble(node.db, "write back", {"what": "EACCES: no", "path": "a/b", "remedy": "chmod it"})
        told = served.client.get_status()
        code, head, body = ask(address)
        found = plain(read(body))
        assert code == 200 and "Content-Type: text/plain; version=0.0.4; charset=utf-8" in head and f"Content-Length: {len(body)}" in head
        assert found["ckptfs_troubles{kind=write back}"] == 1 and found["ckptfs_healthy"] == 0
        assert found["ckptfs_write_back_pending_bytes"] == told.write_back.dirty_bytes == 300
        assert found["ckptfs_tier_capacity_bytes{tier=ram}"] == told.tiers[0].budget_bytes > 0
        assert b"a/b" not in body


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (GET, 200),
        (b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", 200),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/../x HTTP/1.1\r\n\r\n", 404),
        (b"\x16\x03\x01 hello\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics SPDY/3\r\n\r\n", 400),
        (b"x" * 70_000, 414),
        (b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 101, 431),
    ],
)
def test_only_a_get_of_the_metrics_is_answered(request_bytes: bytes, code: int, address: str) -> None:
    """P11."""
    with endpoint(address):
        eventually(lambda: answers(address), what="the metrics")
        assert ask(address, request_bytes)[0] == code
        assert answers(address)


def test_who_says_nothing_is_let_go(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_REQUEST_S", 0.1)
    with endpoint(address):
        eventually(lambda: answers(address), what="the metrics")
        with connect(address) as connection:
            connection.sendall(b"GET /metr")
            assert connection.recv(100) == b""
        # Whoever speaks has as little time.
        eventually(lambda: answers(address), what="the others are answered")


def test_who_speaks_slowly_is_let_go(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, and the request never ends."""
    monkeypatch.setattr(limits, "HTTP_ANSWER_S", 0.3)
    monkeypatch.setattr(http_server, "CHECK_S", 0.05)
    with endpoint(address):
        eventually(lambda: answers(address), what="the metrics")
        with connect(address) as connection:
            eventually(lambda: not speaks(connection), what="the connection has ended")


def speaks(connection: socket.socket) -> bool:
    """Send one byte more. Returns False if the other side has ended the connection."""
    try:
        connection.sendall(b"x")
    except OSError:
        return False
    return not list_readable(connection)


def test_connections_beyond_the_bound_are_closed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_CONNECTIONS_MAX", 2)
    with endpoint(address), ExitStack() as held:
        eventually(lambda: answers(address), what="the metrics")
        connections = [held.enter_context(connect(address)) for _ in range(5)]
        # The connection of `answers` may still be one of the two.
        eventually(lambda: len(list_readable(*connections)) >= 3, what="three connections are closed")
        closed = list_readable(*connections)
        assert len(closed) < 5 and {one.recv(1) for one in closed} == {b""}
        held.close()
        eventually(lambda: answers(address), what="the metrics again")


@pytest.fixture
def never_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "METRICS_FRESH_S", 0.0)
    monkeypatch.setattr("ckptfs_daemon.control.status.CACHE_RATIO", 0)


@pytest.mark.usefixtures("never_cached")
def test_figures_that_fail_end_nothing(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """A catalog that cannot be read answers 503; what nobody expects answers 500 and is logged. The next scrape is served."""
    failures = iter([None, OSError(errno.EIO, "Input/output error"), ValueError("a bug")])

    def build_status() -> pb.Status:
        if (failure := next(failures, None)) is not None:
            raise failure
        return pb.Status()

    with endpoint(address, build_status):
        eventually(lambda: answers(address), what="the metrics")
        codes = [ask(address)[0] for _ in range(3)]
    assert codes == [503, 500, 200]
    assert [record.levelno for record in caplog.records if record.levelno >= logging.WARNING] == [logging.ERROR]


def test_an_address_that_is_taken_is_tried_again(address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(limits, "RETRY_LAST_S", 0.02)
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as other, endpoint(address):
        eventually(lambda: "cannot be served" in caplog.text, what="a warning")
        other.close()
        eventually(lambda: answers(address), what="the metrics")
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_a_host_that_is_no_name_ends_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(limits, "RETRY_LAST_S", 0.02)
    with endpoint("a..b:9464"):
        eventually(lambda: "cannot be served" in caplog.text, what="a warning")


def test_the_socket_of_a_dead_mover_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One that somebody serves, and a file that is no socket, stay."""
    monkeypatch.setattr(limits, "RETRY_LAST_S", 0.02)
    path, file = tmp_path / "metrics.sock", tmp_path / "file"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with endpoint(f"unix:{path}"):
        eventually(lambda: answers(f"unix:{path}"), what="the metrics")
        with endpoint(f"unix:{path}"):
            eventually(lambda: "another process serves this socket" in caplog.text, what="a warning")
        assert answers(f"unix:{path}")
    file.write_text("kept")
    with endpoint(f"unix:{file}"):
        eventually(lambda: "another file of this name" in caplog.text, what="a warning")
    assert file.read_text() == "kept"
