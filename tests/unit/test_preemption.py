"""G1: notices that a node is about to be taken away, from clouds' metadata servers (served here on loopback) and from hooks."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import trio
from ckptfs_client import render
from ckptfs_daemon.drain import Drain
from ckptfs_daemon.mover import preemption
from control_served import serving
from daemon_under_test import eventually
from local_node import Node

from ckptfs import config, limits
from ckptfs.catalog import summary
from ckptfs.errors import ConfigError


@dataclass
class Metadata:
    """A metadata server. `answers`: (status, body) by "METHOD path"; `headers`: what each request has to bring."""

    answers: dict[str, tuple[int, bytes]]
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def serve() -> Iterator[Callable[[Metadata], Metadata]]:
    servers: list[http.server.HTTPServer] = []

    def start(metadata: Metadata) -> Metadata:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                metadata.asked.append(f"{self.command} {self.path}")
                name, value = next(iter(metadata.headers.items()), ("", ""))
                allowed = self.command == "PUT" or not name or self.headers.get(name) == value
                status, body = metadata.answers.get(metadata.asked[-1], (404, b"")) if allowed else (401, b"")
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            do_PUT = do_GET

            def log_message(self, *values: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        metadata.url = f"http://127.0.0.1:{server.server_port}"
        return metadata

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


GCE = "GET /computeMetadata/v1/instance/preempted"
AWS_TOKEN, AWS = "PUT /latest/api/token", "GET /latest/meta-data/spot/instance-action"
AZURE = "GET /metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "GET /metadata/instance/compute/name?api-version=2021-02-01&format=text"


def azure_event(kind: str, *machines: str) -> bytes:
    return json.dumps({"Events": [{"EventType": kind, "Resources": machines, "NotBefore": "noon"}]}).encode()


@pytest.mark.parametrize(
    ("source", "headers", "answers", "what"),
    [
        ("gce", {"Metadata-Flavor": "Google"}, {GCE: (200, b"FALSE")}, ""),
        ("gce", {"Metadata-Flavor": "Google"}, {GCE: (200, b"TRUE\n")}, "the instance is being preempted"),
        ("aws", {"X-aws-ec2-metadata-token": "t0k"}, {AWS_TOKEN: (200, b"t0k")}, ""),
        ("aws", {"X-aws-ec2-metadata-token": "t0k"},
         {AWS_TOKEN: (200, b"t0k"), AWS: (200, b'{"action": "terminate", "time": "noon"}')}, "terminate at noon"),
        ("azure", {"Metadata": "true"}, {AZURE: (200, b'{"Events": []}')}, ""),
        ("azure", {"Metadata": "true"}, {AZURE: (200, azure_event("Freeze", "vm1")), AZURE_NAME: (200, b"vm1")}, ""),
        ("azure", {"Metadata": "true"}, {AZURE: (200, azure_event("Preempt", "vm2")), AZURE_NAME: (200, b"vm1")}, ""),
        ("azure", {"Metadata": "true"}, {AZURE: (200, azure_event("Preempt", "vm2", "vm1")), AZURE_NAME: (200, b"vm1")}, "Preempt at noon"),
    ],
)  # fmt: skip
def test_what_a_cloud_says(
    serve: Callable[[Metadata], Metadata], source: str, headers: dict[str, str], answers: dict[str, tuple[int, bytes]], what: str
) -> None:
    metadata = serve(Metadata(answers, headers))
    assert preemption.SOURCES[source](preemption.build_ask(metadata.url)) == what


@pytest.mark.parametrize(
    ("source", "answers"),
    [("gce", {GCE: (500, b"")}), ("aws", {}), ("aws", {AWS_TOKEN: (200, b"t"), AWS: (200, b"[]")}), ("azure", {AZURE: (200, b"<html>")})],
)
def test_an_answer_that_makes_no_sense_is_no_notice(
    serve: Callable[[Metadata], Metadata], source: str, answers: dict[str, tuple[int, bytes]]
) -> None:
    metadata = serve(Metadata(answers))
    with pytest.raises(preemption.NoAnswer):
        preemption.SOURCES[source](preemption.build_ask(metadata.url))


class Watched:
    """A node that watches for a notice, in the thread of the test."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "PREEMPTION_POLL_S", 0.01)
        self.node = node

    def watch(self, source: str, url: str = "", deadline_s: float = 5.0, then: Callable[[], None] = lambda: None) -> None:
        node = self.node
        node.config = replace(node.config, preemption=source, preemption_url=url, preemption_deadline_s=deadline_s)

        async def act() -> None:
            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.to_thread.run_sync, then)
                    await preemption.watch(node.config, node.db, Drain(node.db, node.config, lambda: None))

        trio.run(act)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(Node(tmp_path), monkeypatch)


def test_a_notice_drains_and_status_shows_it(
    watched: Watched,
    serve: Callable[[Metadata], Metadata],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A server that fails at first is said once, and asked again."""
    metadata = serve(Metadata({GCE: (500, b"")}))

    def preempt() -> None:
        eventually(lambda: len(metadata.asked) > 3, what="the server is asked again")
        metadata.answers[GCE] = (200, b"FALSE")
        count = len(metadata.asked)
        eventually(lambda: len(metadata.asked) > count + 3, what="and again")
        metadata.answers[GCE] = (200, b"TRUE")

    watched.watch("gce", metadata.url, then=preempt)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "preemption: gce gives no answer: the metadata server answers with the status 500; a notice would be missed; asking again",
        "preemption: notice from gce: the instance is being preempted; draining for up to 5 s",
    ]
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path / "run"))
    with serving(watched.node) as served:
        status = served.client.get_status()
    assert (status.notice.source, status.notice.drain, status.notice.deadline_s) == ("gce", "done", 5.0)
    assert "notice from gce" in "".join(render._describe_notice(status))
    summary.delete_reports(watched.node.db)
    assert summary.list_reports(watched.node.db, summary.NOTICE_REPORT) == [], "the next mover has not heard of it"


def test_a_drain_that_misses_its_deadline_is_said(watched: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hook = tmp_path / "hook"
    hook.write_text("#!/bin/sh\nexit 0\n")
    hook.chmod(0o755)
    watched.node.make_sealed(b"step_1.pt", b"x" * 100)
    caplog.set_level("INFO")
    watched.watch(str(hook), deadline_s=0.05)
    ((_, text, _),) = summary.list_reports(watched.node.db, summary.NOTICE_REPORT)
    assert json.loads(text)["drain"] == "missed"
    assert "drain: step_*.pt: step_1.pt is NOT safe (local): 1 of 1 file missing (100 B of 100 B); no older one is safe" in caplog.messages


def test_a_hook_that_fails_is_started_again(watched: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It runs as long as it likes; only its end with 0 is a notice."""
    hook, count = tmp_path / "hook", tmp_path / "count"
    hook.write_text(f"#!/bin/sh\necho x >> {count}\ntest $(wc -l < {count}) -ge 3\n")
    hook.chmod(0o755)
    watched.watch(str(hook))
    assert count.read_text() == "x\n" * 3
    assert sum("gives no answer: it ended with 1" in message for message in caplog.messages) == 1
    assert any(f"notice from {hook}" in message for message in caplog.messages)


def test_a_hook_ends_with_its_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PREEMPTION_POLL_S", 0.01)
    hook, pid = tmp_path / "hook", tmp_path / "pid"
    hook.write_text(f"#!/bin/sh\nsleep 1000 & echo $! > {pid}.new; mv {pid}.new {pid}; wait\n")
    hook.chmod(0o755)

    async def act() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(preemption._run_hook, str(hook))
            await trio.to_thread.run_sync(lambda: eventually(pid.exists, what="the hook runs"))
            nursery.cancel_scope.cancel()

    trio.run(act)
    status = Path("/proc") / pid.read_text().strip() / "status"
    eventually(lambda: not status.exists() or "(zombie)" in status.read_text(), what="what the hook has started is gone")


@pytest.mark.parametrize("value", ["gce", "aws", "azure", "/opt/hook"])
def test_sources_of_notices(value: str) -> None:
    assert config.schema.parse_preemption(value) == value


@pytest.mark.parametrize("value", ["", "gcp", "hook", "./hook"])
def test_other_sources_are_refused(value: str) -> None:
    """P11."""
    with pytest.raises(ConfigError, match="accepted: gce, aws, azure, or the absolute path"):
        config.schema.parse_preemption(value)


@pytest.mark.parametrize("value", ["169.254.169.254", "https://host", "http://", "http://host/path", "http://host:x"])
def test_other_addresses_are_refused(value: str) -> None:
    """P11."""
    with pytest.raises(ConfigError, match="accepted: http://HOST"):
        config.schema.parse_http_url(value)
