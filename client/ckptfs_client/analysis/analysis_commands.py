"""The commands about what to expect and what has happened: advise, simulate, events, goodput.

Heavy modules are imported at their first use.
"""

import math
import re
import select
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from ckptfs import limits
from ckptfs_client import mounts, render
from ckptfs_client.errors import CommandFailed, NoMount, UsageError
from ckptfs_client.options import Directory, Json, parse_option, time_option

if TYPE_CHECKING:
    from ckptfs_client.analysis.goodput import Goodput

app = typer.Typer()
POLL_S = 0.5
LONG_UNITS = {"w": 7 * 86400.0, "y": 365.25 * 86400.0}
NODES_MAX = 100_000
SAY_RATE = "say how often failures come: --mtbf TIME for the whole job, or --nodes N and --node-mtbf TIME"
Logs = Annotated[
    list[Path] | None,
    Option("--log", metavar="DIR", help="The event log of another node as well: the directory events of a state directory."),
]
JobMtbf = Annotated[str | None, Option("--mtbf", metavar="TIME", help="Mean time between failures of the job, all nodes together.")]
NodeMtbf = Annotated[str | None, Option("--node-mtbf", metavar="TIME", help="Mean time between failures of one node, such as 5y.")]


def parse_time(option: str, text: str) -> float:
    """Return the seconds of an option: as in the configuration, and w and y. Raises UsageError."""
    from ckptfs import config
    from ckptfs.errors import ConfigError

    long = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([wy])", text.strip())
    try:
        found = float(long[1]) * LONG_UNITS[long[2]] if long else config.parse_seconds(text)
    except ConfigError:
        found = 0.0
    if found <= 0:
        raise UsageError(f"{option} {text!r} is not a duration; accepted: a number above 0 with ms, s, m, h, d, w or y, as in 30s or 5y")
    return found


def parse_failure_rate(mtbf: str | None, nodes: int | None, node_mtbf: str | None) -> float:
    """Return the mean time between failures of the job, in seconds. Raises UsageError."""
    if (mtbf is None) == (node_mtbf is None):
        raise UsageError(SAY_RATE)
    if mtbf is not None:
        return parse_time("--mtbf", mtbf)
    if nodes is None:
        raise UsageError("--node-mtbf needs --nodes N")
    return parse_time("--node-mtbf", node_mtbf or "") / nodes


@app.command()
def advise(
    series: Annotated[
        Path | None, Argument(metavar="SERIES", help="A pattern such as 'run1/step_*', or its directory. Optional with --cost.")
    ] = None,
    mtbf: JobMtbf = None,
    nodes: Annotated[int | None, Option(min=1, metavar="N", help="Nodes of the job, for --node-mtbf.")] = None,
    node_mtbf: NodeMtbf = None,
    cost: Annotated[str | None, time_option("How long a checkpoint keeps the job from its work. Default: measured.")] = None,
    restart: Annotated[
        str | None, Option(metavar="TIME", help="From a failure until the job works again. Default: 0.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Say how often to save, from the cost of a checkpoint and the failure rate.

    The cost is measured from the times of the newest sets. The real one may be higher; give --cost if you know it, or if the job works
    while it saves. The intervals are those of Young and of Daly. Without a failure rate, the one in the event log is used, as
    `ckptfs goodput` shows it.

    Example: ckptfs advise '/ckpt/run1/step_*' --nodes 512 --node-mtbf 5y
    """
    from ckptfs_client.analysis import advice
    from ckptfs_client.sets.set_history import SetHistory

    if series is not None and mtbf is None and node_mtbf is None and nodes is None:
        mtbf_s, failures = _observe_failure_rate(series)
    else:
        mtbf_s, failures = parse_failure_rate(mtbf, nodes, node_mtbf), 0
    cost_s = None if cost is None else parse_time("--cost", cost)
    restart_s = 0.0 if restart is None else parse_time("--restart", restart)
    if series is None and cost_s is None:
        raise UsageError("give SERIES to measure, or --cost TIME: how long a checkpoint takes")
    measure = advice.SeriesMeasure()
    if series is not None:
        with SetHistory.of(series) as history:
            measure = advice.measure_series(history, history.find_one_series(series))
    found_s = cost_s or measure.cost_s
    if found_s is None:
        raise CommandFailed(f"{series}: the times of its sets do not tell how long a checkpoint takes", remedy="give --cost 30s")
    answer = advice.build_advice(measure, advice.JobFacts(mtbf_s, found_s, restart_s, is_given=cost_s is not None, failures=failures))
    render.print_answer(answer, lambda: advice.format_advice(answer), json=json)


def _observe_failure_rate(series: Path) -> tuple[float, int]:
    """Return (mean time between failures, failures) from the event log.

    Raises CommandFailed without a failure.
    """
    shown, found = measure_goodput(series, [])
    if found.mtbf_s is None:
        raise CommandFailed(f"the event log has no failure of {shown}", remedy=SAY_RATE)
    return found.mtbf_s, found.failures


@app.command()
def simulate(
    nodes: Annotated[int, Option(min=1, max=NODES_MAX, metavar="N", help="Nodes of the job.")],
    mtbf: JobMtbf = None,
    node_mtbf: NodeMtbf = None,
    factor: Annotated[
        int, Option(min=1, max=limits.REPLICATION_FACTOR_MAX, metavar="R", help="Copies of each file, as replication_factor=.")
    ] = limits.REPLICATION_FACTOR,
    jump: Annotated[
        int, Option(min=1, max=limits.REPLICATION_JUMP_MAX, metavar="J", help="Distance between ranks, as replication_jump=.")
    ] = 1,
    domains: Annotated[
        int | None, Option(min=1, metavar="D", help="Failure domains, with as many nodes of consecutive ranks each. Default: N.")
    ] = None,
    domain_mtbf: Annotated[str | None, time_option("Mean time between failures of one whole domain. Default: it does not fail.")] = None,
    repair: Annotated[str, time_option("From a failure until the lost copies are remade.")] = "5m",
    write_back: Annotated[str, time_option("Until the set is on the PFS; without a PFS, until the next one.")] = "1h",
    size: Annotated[str, Option(metavar="SIZE", help="What each node writes of a checkpoint.")] = "64G",
    keep: Annotated[int, Option(min=1, help="Complete checkpoints that a node keeps while it writes the next one.")] = 1,
    trials: Annotated[int, Option(min=100, metavar="N", help="Failures to simulate.")] = 50_000,
    seed: Annotated[int, Option(help="The same seed gives the same answer.")] = 1,
    json: Json = False,
) -> None:
    """Compute how likely the loss of a checkpoint set is before the PFS has it.

    A set is lost if all nodes that hold copies of some file fail before the copies are remade. The simulation uses the placement of ckptfs,
    and asks no daemon. Failures are drawn with a seed; the answer has its 95 % confidence interval.

    Example: ckptfs simulate --nodes 10000 --mtbf 4h --factor 2 --domains 625 --domain-mtbf 20y --size 512G
    """
    from ckptfs import config
    from ckptfs_client.analysis import loss_simulation

    size_bytes = parse_option(config.parse_size, size)
    if domains is not None and domains > nodes:
        raise UsageError(f"--domains {domains} is more than --nodes {nodes}")
    node_mtbf_s = parse_failure_rate(mtbf, nodes, node_mtbf) * nodes
    domain_mtbf_s = math.inf if domain_mtbf is None else parse_time("--domain-mtbf", domain_mtbf)
    repair_s, window_s = parse_time("--repair", repair), parse_time("--write-back", write_back)
    model = loss_simulation.LossModel(nodes, factor, jump, domains or 0, node_mtbf_s, domain_mtbf_s, repair_s, window_s)
    answer = loss_simulation.build_report(model, size_bytes, keep, trials, seed)
    render.print_answer(answer, lambda: loss_simulation.format_report(answer), json=json)


# --- what has happened ------------------------------------------------------------------------------------------------


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
        accepted = "a duration such as 2h, or a time such as 2026-11-23T10:30"
        raise UsageError(f"--since {text[:40]!r} is not a time; accepted: {accepted}") from None


@app.command()
def events(
    directory: Directory = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Print new events as they come, until interrupted.")] = False,
    since: Annotated[str | None, time_option("Since 2h, 3d, or a time such as 2026-11-23T10:30.")] = None,
    json: Annotated[bool, Option("--json", help="Print a line of JSON for each event.")] = False,
) -> None:
    """Show what has happened on this node: saves, loads, restarts, failures.

    The daemon logs when a set was begun, was complete, was read, became safe or expired, when a process or a tier failed, and drains. When
    the log is full, the oldest events are deleted. Events of series that you may not list are not shown.

    Example: ckptfs events /ckpt --since 2h --follow
    """
    from ckptfs import event_log
    from ckptfs_client.analysis.event_source import EventSource, format_event

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


@app.command()
def goodput(
    series: Annotated[Path, Argument(metavar="SERIES", help="A pattern such as 'run1/step_*', or its directory.")],
    log: Logs = None,
    json: Json = False,
) -> None:
    """Show what a series got done: runs, restarts, lost steps, effective time.

    It is computed from the event log of this node. In a cluster, each node logs the sets of which it wrote a part; --log adds the logs of
    others. With --log, SERIES may be one that this node does not have: its path below the mount.

    Example: ckptfs goodput '/ckpt/run1/step_*'
    """
    from ckptfs_client.analysis.goodput import build_answer, format_goodput

    name, found = measure_goodput(series, log or [])
    columns = shutil.get_terminal_size().columns
    render.print_answer(build_answer(name, found), lambda: format_goodput(name, found, columns), json=json)


def measure_goodput(series: Path, logs: list[Path]) -> "tuple[str, Goodput]":
    """Return (name, goodput) of a series from the logs of its mount and of others.

    Raises CommandFailed, NoMount, UsageError.
    """
    from ckptfs_client.analysis.event_source import EventSource, read_log
    from ckptfs_client.analysis.goodput import compute_goodput, select_series
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
        raise CommandFailed(f"the event log has no set of {shown}", remedy="`ckptfs events` shows what it has")
    return shown, found
