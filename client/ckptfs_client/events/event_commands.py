"""The commands about what has happened: `ckptfs events` and `ckptfs goodput`.

Heavy modules are imported at their first use.
"""

import select
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptfs_client import mounts, render
from ckptfs_client.errors import EPILOG, CommandFailed, NoMount, UsageError
from ckptfs_client.options import Directory, Json

if TYPE_CHECKING:
    from ckptfs_client.events.goodput import Goodput

app = typer.Typer()
POLL_S = 0.5
Logs = Annotated[
    list[Path] | None,
    typer.Option("--log", metavar="DIR", help="The event log of another node as well: the directory events of a state directory."),
]


def parse_since(text: str | None) -> int:
    """Return the time of an option in ns: a time, or a duration before now. Raises UsageError."""
    from ckptfs import config, event_log
    from ckptfs.errors import ConfigError

    if text is None:
        return 0
    try:
        return time.time_ns() - int(config.parse_seconds(text) * 1e9)
    except ConfigError:
        pass
    try:
        return event_log.parse_time(text)
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"--since {text[:40]!r} is no time; accepted: a duration such as 2h, or a time such as 2026-11-23T10:30") from None


@app.command(epilog=EPILOG)
def events(
    directory: Directory = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with events that come, until interrupted.")] = False,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Since 2h, 3d, or a time such as 2026-11-23T10:30.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each event.")] = False,
) -> None:
    """Show what has happened on this node: saves, loads, restarts, failures.

    The daemon logs when a set was begun, was complete, was read, became safe or expired, when a process or a tier failed, and drains. When
    the log is full, the oldest events are deleted. Events of series that you may not list are not shown.

    Example: ckptfs events /ckpt --since 2h --follow
    """
    from ckptfs import event_log
    from ckptfs_client.events.event_source import EventSource, format_event

    since_ns = parse_since(since)
    source = EventSource(mounts.choose(directory))
    for event in source.follow(since_ns, wait_for_events) if follow else source.list_events(since_ns):
        print(event_log.build_line(event).decode().rstrip() if json else format_event(event), flush=follow)


def wait_for_events() -> None:
    """Wait a moment. Raises BrokenPipeError once no program reads the output any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if any(state & select.POLLERR for _, state in poll.poll(POLL_S * 1000)):
        raise BrokenPipeError


@app.command(epilog=EPILOG)
def goodput(
    series: Annotated[Path, typer.Argument(metavar="SERIES", help="A pattern such as 'run1/step_*', or its directory.")],
    log: Logs = None,
    json: Json = False,
) -> None:
    """Show what a series got done: runs, restarts, lost steps, effective time.

    It is computed from the event log of this node. In a cluster, each node logs the sets of which it wrote a part; --log adds the logs of
    others. With --log, SERIES may be one that this node does not have: its path below the mount.

    Example: ckptfs goodput '/ckpt/run1/step_*'
    """
    from ckptfs_client.events.goodput import build_answer, format_goodput

    name, found = measure_goodput(series, log or [])
    columns = shutil.get_terminal_size().columns
    render.print_answer(build_answer(name, found), lambda: format_goodput(name, found, columns), json=json)


def measure_goodput(series: Path, logs: list[Path]) -> "tuple[str, Goodput]":
    """Return (name, goodput) of a series from the logs of its mount and of others.

    Raises CommandFailed, NoMount, UsageError.
    """
    from ckptfs_client.events.event_source import EventSource, read_log
    from ckptfs_client.events.goodput import compute_goodput, select_series
    from ckptfs_client.sets.set_history import SetHistory

    known = [event for directory in logs for event in read_log(directory)]
    try:
        mount = mounts.find(series)
    except NoMount:
        if not logs:
            raise
        shown, path = str(series), str(series)
    else:
        with SetHistory(mount) as history:
            one = history.find_one_series(series)
        shown, path = one.shown, one.path
        known += EventSource(mount).list_events()
    found = compute_goodput(select_series(known, path))
    if found is None:
        raise CommandFailed(f"{shown}: the event log has no set of it", remedy="`ckptfs events` shows what it has")
    return shown, found
