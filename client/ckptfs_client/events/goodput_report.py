"""What `ckptfs goodput` prints: a table, shares of the time as bars, and the steps over time.

Plain characters.
"""

from datetime import datetime

from ckptfs.event_log import NANO, format_time
from ckptfs.quantities import format_count, format_duration
from ckptfs_client.events.goodput import Goodput, Run
from ckptfs_client.json_answers import GoodputJson, RunJson
from ckptfs_client.render import escape_unprintable, format_columns

PARTS = ("effective", "saving", "lost", "starting", "down")
PLOT_ROWS = 12
WIDTH_MIN, WIDTH_MAX = 40, 160
COMPLETE, INCOMPLETE, START = "*", "x", "|"
RUNS_SHOWN_MAX = 20


def build_answer(series: str, found: Goodput) -> GoodputJson:
    """Build the answer for --json."""
    return {
        "series": series, "began": format_time(found.runs[0].began_ns), "ended": format_time(found.runs[-1].ended_ns),
        "is_cut": found.is_cut, "runs": [_build_run(run) for run in found.runs], "jobs": found.jobs, "restarts": found.restarts,
        "failures": found.failures, "loads": found.loads, "saves": found.saves, "incomplete": found.incomplete, "steps": found.steps,
        "lost_steps": found.lost_steps, "total_s": found.total_s, "effective_s": found.sum_seconds("effective"),
        "saving_s": found.sum_seconds("saving"), "lost_s": found.sum_seconds("lost"), "down_s": found.sum_seconds("down"),
        "starting_s": found.sum_seconds("starting"), "effective": found.effective, "mtbf_s": found.mtbf_s,
    }  # fmt: skip


def _build_run(run: Run) -> RunJson:
    complete = sum(save.is_complete for save in run.saves)
    return {
        "began": format_time(run.began_ns), "ended": format_time(run.ended_ns), "jobs": sorted(run.jobs), "resumed": run.resumed,
        "reached": run.reached, "lost_steps": run.lost_steps, "saves": complete, "incomplete": len(run.saves) - complete,
        "failed": run.is_failed,
    }  # fmt: skip


def format_goodput(series: str, found: Goodput, width: int) -> str:
    """Format the answer for a terminal of this width."""
    width = min(max(width, WIDTH_MIN), WIDTH_MAX)
    blocks = [_format_head(series, found), _format_runs(found), _format_bars(found, width), *_format_plot(found, width)]
    return "\n\n".join(filter(None, blocks))


def _format_head(series: str, found: Goodput) -> str:
    jobs = f" of {format_count(found.jobs, 'job')}" if found.jobs else ""
    saves = format_count(found.saves, "save") + (f", {found.incomplete} not completed" if found.incomplete else "")
    lines = [
        f"{escape_unprintable(series)}: {found.effective:.1%} of {format_duration(found.total_s)} were effective",
        f"  {format_count(len(found.runs), 'run')}{jobs}: {format_count(found.restarts, 'restart')},"
        f" {format_count(found.failures, 'failure')}, {saves}, {format_count(found.loads, 'load')}",
        f"  {format_count(found.steps, 'step')} done, {found.lost_steps} lost and repeated",
    ]
    if found.mtbf_s is not None:
        lines.append(f"  a failure every {format_duration(found.mtbf_s)} of running, on average")
    if found.is_cut:
        lines.append("  the log does not go back to the first set: what was before is left out")
    return "\n".join(lines)


def _format_runs(found: Goodput) -> str:
    shown = found.runs[-RUNS_SHOWN_MAX:]
    rows = [
        [_format_local(run.began_ns), format_duration((run.ended_ns - run.began_ns) / NANO), " ".join(sorted(run.jobs)), str(run.resumed),
         str(run.reached), str(run.lost_steps), str(sum(save.is_complete for save in run.saves))]
        for run in shown
    ]  # fmt: skip
    table = format_columns(("run began", "ran>", "job", "from step>", "to step>", "lost>", "saves>"), rows)
    left = len(found.runs) - len(shown)
    return (f"({format_count(left, 'older run')} not shown)\n" if left else "") + table


def _format_bars(found: Goodput, width: int) -> str:
    lines = []
    for part in PARTS:
        seconds = found.sum_seconds(part)
        share = seconds / found.total_s if found.total_s else 0.0
        bar = "#" * round(share * (width - 36))
        lines.append(f"{part:<10} {share:>6.1%} {format_duration(seconds):>14}  {bar}".rstrip())
    return "\n".join(lines)


def _format_plot(found: Goodput, width: int) -> list[str]:
    """Format the steps of sets over time. Returns nothing if they have no steps, or no time passed."""
    points = [
        (save.ended_ns, save.step, COMPLETE if save.is_complete else INCOMPLETE)
        for run in found.runs for save in run.saves if save.step is not None
    ]  # fmt: skip
    began_ns, ended_ns = found.runs[0].began_ns, found.runs[-1].ended_ns
    low, high = min((step for _, step, _ in points), default=0), max((step for _, step, _ in points), default=0)
    if ended_ns <= began_ns or high <= low:
        return []
    margin = len(str(high)) + 1
    columns = width - margin - 2
    cells = [[" "] * columns for _ in range(PLOT_ROWS)]

    def find_column(time_ns: int) -> int:
        return min(columns - 1, max(0, (time_ns - began_ns) * columns // (ended_ns - began_ns)))

    for run in found.runs[1:]:
        for row in cells:
            row[find_column(run.began_ns)] = START
    for time_ns, step, mark in points:
        cells[PLOT_ROWS - 1 - (step - low) * (PLOT_ROWS - 1) // (high - low)][find_column(time_ns)] = mark
    labels = {0: str(high), PLOT_ROWS - 1: str(low)}
    lines = [f"{labels.get(number, ''):>{margin}} |{''.join(row)}".rstrip() for number, row in enumerate(cells)]
    first, last = _format_local(began_ns), _format_local(ended_ns)
    axis = " " * (margin + 1) + "+" + "-" * columns
    legend = f"{'step':>{margin}}  {COMPLETE} set complete  {INCOMPLETE} not completed  {START} restart"
    return ["\n".join([legend, *lines, axis, f"{'':{margin + 2}}{first}{last:>{max(len(last) + 1, columns - len(first))}}"])]


def _format_local(time_ns: int) -> str:
    return f"{datetime.fromtimestamp(time_ns / NANO):%Y-%m-%d %H:%M}"
