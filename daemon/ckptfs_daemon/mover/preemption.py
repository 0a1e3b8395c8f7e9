"""Notices that this node is about to be taken away, and the drain that follows (G1). Off by default.

A notice (`preemption=`) comes from the metadata server of a cloud, which is asked every PREEMPTION_POLL_S, or from a hook: an executable
that runs until it knows, and exits with 0 then. The first notice ends the watch. It is logged, shown by `ckptfs status`, and all that was
closed is drained with the deadline `preemption_deadline`.

A source that fails is asked again, and said once. Nothing else waits for it.

Crash safety: the next mover watches again. A notice that still exists is found again, and drained again.
"""

import contextlib
import http.client
import json
import logging
import os
import signal
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import trio

from ckptfs import limits
from ckptfs.catalog import summary
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.event_log import EventKind
from ckptfs_daemon.drain import Drain
from ckptfs_daemon.event_writer import events

log = logging.getLogger(__name__)

Ask = Callable[[str, str, Mapping[str, str]], tuple[int, bytes]]
"""(method, path, headers) of a request; (status, body) of its answer. Raises OSError or HTTPException."""

AZURE_EVENTS = {"Preempt", "Terminate", "Reboot", "Redeploy"}
"""Events after which the memory of the machine is gone. A Freeze keeps it."""


class NoAnswer(Exception):
    """The metadata server, or the hook, gives no answer that is understood."""


def look_at_gce(ask: Ask) -> str:
    """Return what the metadata server of Google Compute Engine says; "" without a notice."""
    status, body = ask("GET", "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    _require(status, 200)
    return "the instance is being preempted" if body.strip().upper() == b"TRUE" else ""


def look_at_aws(ask: Ask) -> str:
    """Return the same of Amazon EC2, whose server wants a token."""
    status, token = ask("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    _require(status, 200)
    headers = {"X-aws-ec2-metadata-token": token.decode("ascii", errors="replace").strip()}
    status, body = ask("GET", "/latest/meta-data/spot/instance-action", headers)
    if status == http.HTTPStatus.NOT_FOUND:
        return ""
    _require(status, 200)
    found = _parse_object(body)
    return f"{found.get('action', 'interruption')} at {found.get('time', 'an unknown time')}"


def look_at_azure(ask: Ask) -> str:
    """Return the same of Azure. Events of other machines do not count."""
    headers = {"Metadata": "true"}
    status, body = ask("GET", "/metadata/scheduledevents?api-version=2020-07-01", headers)
    _require(status, 200)
    events = [event for event in _parse_object(body).get("Events") or () if event.get("EventType") in AZURE_EVENTS]
    if not events:
        return ""
    status, name = ask("GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
    own = name.decode(errors="replace").strip() if status == http.HTTPStatus.OK else ""
    for event in events:
        resources = event.get("Resources") or ()
        if not own or not resources or own in resources:
            return f"{event['EventType']} at {event.get('NotBefore') or 'once'}"
    return ""


SOURCES: dict[str, Callable[[Ask], str]] = {"gce": look_at_gce, "aws": look_at_aws, "azure": look_at_azure}


def build_ask(url: str) -> Ask:
    """Return a function that asks the server at `url`, without a proxy and in bounded time."""
    parsed = urllib.parse.urlsplit(url)
    assert parsed.hostname is not None

    def ask(method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(parsed.hostname or "", parsed.port or 80, timeout=limits.PREEMPTION_ANSWER_S)
        with contextlib.closing(connection):
            connection.request(method, path, headers=dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read(limits.PREEMPTION_ANSWER_BYTES_MAX)

    return ask


async def watch(config: Config, db: Database, drain: Drain) -> None:
    """Wait for a notice, and drain then."""
    source = config.preemption
    assert source is not None
    what = await (_poll(SOURCES[source], source, build_ask(config.preemption_url)) if source in SOURCES else _run_hook(source))
    deadline_s = config.preemption_deadline_s
    log.warning("preemption: notice from %s: %s; draining for up to %.0f s", source, what, deadline_s)
    events.record(EventKind.NOTICE, source=source, what=what, deadline_s=deadline_s)
    notice = {"source": source, "what": what, "at_s": time.time(), "deadline_s": deadline_s}
    await trio.to_thread.run_sync(summary.set_report, db, summary.NOTICE_REPORT, notice | {"drain": "running"})
    is_done = await drain.drain_noticed(deadline_s)
    await trio.to_thread.run_sync(summary.set_report, db, summary.NOTICE_REPORT, notice | {"drain": "done" if is_done else "missed"})


async def _poll(look: Callable[[Ask], str], source: str, ask: Ask) -> str:
    """Ask a metadata server until it has a notice. Return what it says."""
    trouble = ""
    while True:
        try:
            what = await trio.to_thread.run_sync(look, ask, abandon_on_cancel=True)
            problem = ""
        except (OSError, http.client.HTTPException, NoAnswer) as failure:
            what, problem = "", str(failure) or type(failure).__name__
        if what:
            return what[: limits.PREEMPTION_WORDS_MAX]
        trouble = _report_trouble(source, trouble, problem)
        await trio.sleep(limits.PREEMPTION_POLL_S)


async def _run_hook(path: str) -> str:
    """Run a hook until it exits with 0. One that fails is started again."""
    trouble, delay_s = "", limits.PREEMPTION_POLL_S
    while True:
        began_s = trio.current_time()
        try:
            done = await trio.run_process([path], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True, deliver_cancel=_end_group)  # fmt: skip
            problem = f"it ended with {done.returncode}"
            if done.returncode == 0:
                return "the hook has ended"
        except OSError as failure:
            problem = str(failure)
        if trio.current_time() - began_s > limits.RETRY_LAST_S:
            delay_s = limits.PREEMPTION_POLL_S
        trouble = _report_trouble(path, trouble, problem)
        await trio.sleep(delay_s)
        delay_s = min(2 * delay_s, limits.RETRY_LAST_S)


async def _end_group(hook: trio.Process) -> None:
    try:
        os.killpg(hook.pid, signal.SIGTERM)
        await trio.sleep(limits.PREEMPTION_POLL_S)
        os.killpg(hook.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _report_trouble(source: str, before: str, problem: str) -> str:
    """Log that a source begins to fail, or works again."""
    if problem and not before:
        log.warning("preemption: %s gives no answer: %s; a notice would be missed; asking again", source, problem)
    elif before and not problem:
        log.info("preemption: %s answers again", source)
    return problem


def _require(status: int, expected: int) -> None:
    if status != expected:
        raise NoAnswer(f"the metadata server answers with the status {status}")


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError as failure:
        raise NoAnswer(f"the answer is not JSON: {failure}") from failure
    if not isinstance(found, dict):
        raise NoAnswer("the answer is not a JSON object")
    return found
