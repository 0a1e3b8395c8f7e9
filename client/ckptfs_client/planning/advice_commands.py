"""The commands that compute: how often to save, and how likely a loss is.

Everything heavy is imported where it is used.
"""

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from ckptfs import limits
from ckptfs_client import render
from ckptfs_client.errors import EPILOG, CommandFailed, UsageError
from ckptfs_client.options import Json, parse_option

app = typer.Typer()
LONG_UNITS = {"w": 7 * 86400.0, "y": 365.25 * 86400.0}
NODES_MAX = 100_000
JobMtbf = Annotated[str | None, typer.Option("--mtbf", metavar="TIME", help="Mean time between failures of the job, all nodes together.")]
NodeMtbf = Annotated[str | None, typer.Option("--node-mtbf", metavar="TIME", help="The same of one node, such as 5y.")]


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


SAY_RATE = "say how often failures come: --mtbf TIME for the whole job, or --nodes N and --node-mtbf TIME"


def parse_failure_rate(mtbf: str | None, nodes: int | None, node_mtbf: str | None) -> float:
    """Return the mean time between failures of the job, in seconds. Raises UsageError."""
    if (mtbf is None) == (node_mtbf is None):
        raise UsageError(SAY_RATE)
    if mtbf is not None:
        return parse_time("--mtbf", mtbf)
    if nodes is None:
        raise UsageError("--node-mtbf asks for --nodes N")
    return parse_time("--node-mtbf", node_mtbf or "") / nodes


@app.command(epilog=EPILOG)
def advise(
    series: Annotated[
        Path | None, typer.Argument(metavar="SERIES", help="A pattern such as 'run1/step_*', or its directory. Optional with --cost.")
    ] = None,
    mtbf: JobMtbf = None,
    nodes: Annotated[int | None, typer.Option(min=1, metavar="N", help="Nodes of the job, for --node-mtbf.")] = None,
    node_mtbf: NodeMtbf = None,
    cost: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long a checkpoint keeps the job from its work. Default: measured.")
    ] = None,
    restart: Annotated[
        str | None, typer.Option(metavar="TIME", help="From a failure until the job works again. Default: 0.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Say how often to save, from the cost of a checkpoint and the failure rate.

    The cost is measured from the times of the newest sets. The real one may be higher; give --cost if you know it, or if the job works
    while it saves. The intervals are those of Young and of Daly. Without a failure rate, that of the event log counts, as `ckptfs goodput`
    shows it.

    Example: ckptfs advise '/ckpt/run1/step_*' --nodes 512 --node-mtbf 5y
    """
    from ckptfs_client.planning import advice
    from ckptfs_client.sets.set_history import SetHistory

    if series is not None and mtbf is None and node_mtbf is None and nodes is None:
        mtbf_s, failures = _observe_failure_rate(series)
    else:
        mtbf_s, failures = parse_failure_rate(mtbf, nodes, node_mtbf), 0
    cost_s = None if cost is None else parse_time("--cost", cost)
    restart_s = 0.0 if restart is None else parse_time("--restart", restart)
    if series is None and cost_s is None:
        raise UsageError("say what to measure, SERIES, or how long a checkpoint takes, --cost TIME")
    measure = advice.SeriesMeasure()
    if series is not None:
        with SetHistory.of(series) as history:
            measure = advice.measure_series(history, history.find_one_series(series))
    found_s = cost_s or measure.cost_s
    if found_s is None:
        raise CommandFailed(f"{series}: the times of its sets do not tell how long a checkpoint takes", remedy="say it: --cost 30s")
    answer = advice.build_advice(measure, advice.JobFacts(mtbf_s, found_s, restart_s, is_given=cost_s is not None, failures=failures))
    render.print_answer(answer, lambda: advice.format_advice(answer), json=json)


def _observe_failure_rate(series: Path) -> tuple[float, int]:
    """Return (mean time between failures, failures) from the event log.

    Raises CommandFailed without a failure.
    """
    from ckptfs_client.events.event_commands import measure_goodput

    shown, found = measure_goodput(series, [])
    if found.mtbf_s is None:
        raise CommandFailed(f"{shown}: the event log has no failure of it", remedy=SAY_RATE)
    return found.mtbf_s, found.failures


@app.command(epilog=EPILOG)
def simulate(
    nodes: Annotated[int, typer.Option(min=1, max=NODES_MAX, metavar="N", help="Nodes of the job.")],
    mtbf: JobMtbf = None,
    node_mtbf: NodeMtbf = None,
    factor: Annotated[
        int, typer.Option(min=1, max=limits.REPLICATION_FACTOR_MAX, metavar="R", help="Copies of each file, as replication_factor=.")
    ] = limits.REPLICATION_FACTOR,
    jump: Annotated[
        int, typer.Option(min=1, max=limits.REPLICATION_JUMP_MAX, metavar="J", help="Distance between ranks, as replication_jump=.")
    ] = 1,
    domains: Annotated[
        int | None, typer.Option(min=1, metavar="D", help="Failure domains, with as many nodes of consecutive ranks each. Default: N.")
    ] = None,
    domain_mtbf: Annotated[
        str | None, typer.Option(metavar="TIME", help="Mean time between failures of one whole domain. Default: it does not fail.")
    ] = None,
    repair: Annotated[str, typer.Option(metavar="TIME", help="From a failure until the lost copies are remade.")] = "5m",
    write_back: Annotated[str, typer.Option(metavar="TIME", help="Until the set is on the PFS; without a PFS, until the next one.")] = "1h",
    size: Annotated[str, typer.Option(metavar="SIZE", help="What each node writes of a checkpoint.")] = "64G",
    keep: Annotated[int, typer.Option(min=1, help="Complete checkpoints that a node keeps while it writes the next one.")] = 1,
    trials: Annotated[int, typer.Option(min=100, metavar="N", help="Failures to follow.")] = 50_000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answer.")] = 1,
    json: Json = False,
) -> None:
    """Compute how likely the loss of a checkpoint set is before the PFS has it.

    A set is lost if all nodes that hold copies of some file fail before the copies are remade. The simulation uses the placement of ckptfs,
    and asks no daemon. Failures are drawn with a seed; the answer has its 95 % confidence interval.

    Example: ckptfs simulate --nodes 10000 --mtbf 4h --factor 2 --domains 625 --domain-mtbf 20y --size 512G
    """
    from ckptfs import config
    from ckptfs_client.planning import loss_simulation

    size_bytes = parse_option(config.parse_size, size)
    if domains is not None and domains > nodes:
        raise UsageError(f"--domains {domains} is more than --nodes {nodes}")
    node_mtbf_s = parse_failure_rate(mtbf, nodes, node_mtbf) * nodes
    domain_mtbf_s = math.inf if domain_mtbf is None else parse_time("--domain-mtbf", domain_mtbf)
    repair_s, window_s = parse_time("--repair", repair), parse_time("--write-back", write_back)
    model = loss_simulation.LossModel(nodes, factor, jump, domains or 0, node_mtbf_s, domain_mtbf_s, repair_s, window_s)
    answer = loss_simulation.build_report(model, size_bytes, keep, trials, seed)
    render.print_answer(answer, lambda: loss_simulation.format_report(answer), json=json)
