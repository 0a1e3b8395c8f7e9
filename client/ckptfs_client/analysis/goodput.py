"""What a series got done: runs, restarts, lost steps, and where the time went (G6, X9).

It follows from events alone; the report is plain characters: a table, shares of the time as bars, and the steps over time. Pure.

A *run* is what some processes do between a start and a failure, a stop or the present. New processes that write the next set begin a new
run if they belong to another job, have read a set, repeat a step, or have lived for a while before they saved. Else they belong to the
run: a script that copies starts a process for each set.

A run *resumes* from the set that its processes read last before they saved; if no read is known, from the newest set that is older than
its first one. What the run before had reached beyond that is *lost*: its steps are repeated, and its time is not effective.

The time from the first sign of the first run to the last one of the last run is divided:

- *saving*: files of a set were open; counted in full, even if the job worked meanwhile;
- *lost*: from the end of the set from which the next run resumed to the last sign of the run;
- *down*: from the last sign of a run to the first one of the next. Work that was done there and left no sign is in it;
- *starting*: from the first sign of a run to its first set, beyond what its steps take by the median of all steps;
- *effective*: the rest.

If the log does not go back to the first set of the series, the first set in it is where the time begins.
"""

import functools
import os
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import NamedTuple, cast

from ckptfs.event_log import NANO, EventKind, LoggedEvent, format_time, parse_time
from ckptfs.quantities import format_count, format_duration
from ckptfs_client.json_answers import GoodputJson, RunJson
from ckptfs_client.render import escape_unprintable, format_columns

WORKED_S = 30.0
"""A process that lived this long before its first save did more than copy."""
Process = tuple[str, int]
"""(host, pid)."""
PARTS = ("effective", "saving", "lost", "starting", "down")
PLOT_ROWS = 12
WIDTH_MIN, WIDTH_MAX = 40, 160
COMPLETE, INCOMPLETE, START = "*", "x", "|"
RUNS_SHOWN_MAX = 20


@dataclass(slots=True)
class Save:
    """One set that was written: complete, or left behind.

    Times are in ns. `step`: the number in its name; None without one.
    """

    name: str
    step: int | None
    began_ns: int
    ended_ns: int
    number: int = 0
    processes: dict[Process, int] = field(default_factory=dict)  # When each process started; 0 if that is not known.
    jobs: set[str] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        return self.number > 0


@dataclass(slots=True)
class Load:
    """One process that read a set."""

    time_ns: int
    step: int | None
    process: Process


@dataclass(slots=True)
class Run:
    """The saves of one run, in order of time, and what became of them.

    `resumed`: the step from which it went on; 0: the beginning. `highest`: of its sets. `kept`: the step up to which no later run repeated
    its work.
    """

    began_ns: int
    resumed: int = 0
    saves: list[Save] = field(default_factory=list)
    processes: set[Process] = field(default_factory=set)
    jobs: set[str] = field(default_factory=set)
    highest: int = 0
    kept: int = 0
    is_failed: bool = False
    saving_s: float = 0.0
    lost_s: float = 0.0
    down_s: float = 0.0
    starting_s: float = 0.0

    def add(self, save: Save) -> None:
        """Add a set that belongs to the run."""
        self.saves.append(save)
        self.processes |= save.processes.keys()
        self.jobs |= save.jobs
        self.highest = max(self.highest, save.step or 0)

    def is_other(self, save: Save, mine: Sequence[Load]) -> bool:
        """Return whether a set was written by a run of its own. `mine`: what its processes read."""
        if not save.processes or save.processes.keys() & self.processes:
            return False
        is_of_other_job = bool(save.jobs and self.jobs) and not save.jobs & self.jobs
        has_read = any(self.saves[-1].began_ns <= load.time_ns <= save.began_ns for load in mine)
        repeats = save.step is not None and save.step <= self.reached
        has_worked = any(started and save.began_ns - started >= WORKED_S * NANO for started in save.processes.values())
        return is_of_other_job or has_read or repeats or has_worked

    @property
    def ended_ns(self) -> int:
        """The last sign of it."""
        return max(self.began_ns, *(save.ended_ns for save in self.saves))

    @property
    def reached(self) -> int:
        """The highest step of which it left a sign."""
        return max(self.resumed, self.highest)

    @property
    def lost_steps(self) -> int:
        return self.reached - self.kept

    def get_kept_end_ns(self) -> int:
        """Return the end of its newest complete save that was not lost; its beginning without one."""
        ends = [save.ended_ns for save in self.saves if save.is_complete and (save.step is None or save.step <= self.kept)]
        return max([self.began_ns, *ends])


class Goodput(NamedTuple):
    """What a series got done, as in `GoodputJson`. Runs in order of time; there is at least one."""

    is_cut: bool
    runs: tuple[Run, ...]
    jobs: int
    restarts: int
    failures: int
    loads: int
    saves: int
    incomplete: int
    steps: int
    lost_steps: int
    total_s: float
    effective_s: float
    saving_s: float
    lost_s: float
    down_s: float
    starting_s: float
    effective: float
    mtbf_s: float | None


def compute_goodput(events: Iterable[LoggedEvent]) -> Goodput | None:
    """Compute the goodput of one series from its events, of one node or several.

    Returns None if nothing was saved.
    """
    ordered = sorted(events, key=lambda event: event.time_ns)
    saves, loads = list_saves(ordered), _list_readers(ordered, EventKind.LOAD)
    first = next((save for save in saves if save.is_complete), None)
    is_cut = first is not None and first.number > 1
    if first is not None and is_cut:
        saves = saves[saves.index(first) :]
    if not saves:
        return None
    runs = _split_runs(saves, loads)
    if first is not None and is_cut:
        runs[0].began_ns, runs[0].resumed = first.ended_ns, first.step or 0
    for number, run in enumerate(runs):
        run.kept = run.reached
        for before in runs[:number]:
            before.kept = min(before.kept, max(run.resumed, before.resumed))
    for run, following in pairwise(runs):
        is_next_job = bool(run.jobs and following.jobs) and not run.jobs & following.jobs
        run.is_failed = bool(run.lost_steps) or not is_next_job
        run.lost_s = (run.ended_ns - run.get_kept_end_ns()) / NANO
        run.down_s = (following.began_ns - run.ended_ns) / NANO
    step_s = _get_step_s(runs)
    for run in runs:
        run.saving_s = _get_saving_s(run)
        run.starting_s = 0.0 if step_s is None else _get_starting_s(run, step_s)
    return _sum_up(runs, len(loads), is_cut=is_cut)


def _sum_up(runs: Sequence[Run], loads: int, *, is_cut: bool) -> Goodput:
    saves = [save for run in runs for save in run.saves]
    complete, failures = sum(save.is_complete for save in saves), sum(run.is_failed for run in runs)
    total_s = (runs[-1].ended_ns - runs[0].began_ns) / NANO
    saving_s, lost_s = sum(run.saving_s for run in runs), sum(run.lost_s for run in runs)
    down_s, starting_s = sum(run.down_s for run in runs), sum(run.starting_s for run in runs)
    effective_s = max(0.0, total_s - (saving_s + lost_s + down_s + starting_s))
    return Goodput(
        runs=tuple(runs), is_cut=is_cut, jobs=len({job for run in runs for job in run.jobs}), restarts=len(runs) - 1, failures=failures,
        loads=loads, saves=complete, incomplete=len(saves) - complete, steps=sum(run.kept - run.resumed for run in runs),
        lost_steps=sum(run.lost_steps for run in runs), total_s=total_s, effective_s=effective_s, saving_s=saving_s, lost_s=lost_s,
        down_s=down_s, starting_s=starting_s, effective=effective_s / total_s if total_s > 0 else 0.0,
        mtbf_s=(total_s - down_s) / failures if failures else None,
    )  # fmt: skip


# --- what the events say ----------------------------------------------------------------------------------------------


def list_saves(events: Sequence[LoggedEvent]) -> list[Save]:
    """Return the sets that were begun or complete, in the order in which they began.

    `events`: in order of time. A set that `ckptfs restore` made again is no save. Events of one set that several nodes, or several
    processes of one daemon, recorded are put together.
    """
    unfinished: dict[str, list[Save]] = {}
    complete: dict[int, Save] = {}
    for event in events:
        if event.kind not in (EventKind.BEGUN, EventKind.COMPLETE):
            continue
        made = _build_save(event)
        tries = unfinished.setdefault(made.name, [])
        same = [save for save in tries if _is_same_try(save, made)]
        if made.number:
            same += [complete[made.number]] if made.number in complete else []
            unfinished[made.name] = [save for save in tries if save not in same]
            complete[made.number] = functools.reduce(_merge, same, made)
        else:
            unfinished[made.name] = [*(save for save in tries if save not in same), functools.reduce(_merge, same, made)]
    restorers = {one.process for one in _list_readers(events, EventKind.RESTORED)}
    found = [*complete.values(), *(save for tries in unfinished.values() for save in tries)]
    found = [save for save in found if not save.processes or save.processes.keys() - restorers]
    return sorted(found, key=lambda save: save.began_ns)


def _build_save(event: LoggedEvent) -> Save:
    began_ns = _get_time(event.get_text("began")) or event.time_ns
    duration_s, step = event.get_number("duration_s"), event.get_number("step")
    ended_ns = event.time_ns if duration_s is None else began_ns + int(duration_s * NANO)
    save = Save(_get_member(event), None if step is None else int(step), began_ns, ended_ns, int(event.get_number("number") or 0))
    for one in event.list_objects("producers"):
        save.processes[str(one.get("host", "")), int(one.get("pid") or 0)] = _get_time(str(one.get("started") or ""))
        save.jobs |= {str(one["job"])} if one.get("job") else set()
    return save


def _is_same_try(save: Save, other: Save) -> bool:
    """Return False if a set was begun again, by processes that started later."""
    is_known = bool(save.processes and other.processes) and not save.processes.keys() & other.processes.keys()
    return not (is_known and any(started > save.began_ns for started in other.processes.values()))


def _merge(one: Save, other: Save) -> Save:
    one.began_ns = min(one.began_ns, other.began_ns)
    if not one.number or other.number:
        one.ended_ns = max(one.ended_ns, other.ended_ns)
    for process, started_ns in other.processes.items():
        one.processes[process] = max(one.processes.get(process, 0), started_ns)
    one.jobs |= other.jobs
    return one


def _get_member(event: LoggedEvent) -> str:
    """Return the name of a set without its number. A set whose name is hidden has its step."""
    name = event.get_text("set")
    if not name:
        return f"step {event.get_number('step')}"
    return name.rpartition("@")[0] if event.get_number("number") else name


def _get_time(text: str) -> int:
    try:
        return parse_time(text)
    except ValueError:
        return 0


def _list_readers(events: Iterable[LoggedEvent], kind: EventKind) -> list[Load]:
    """Return which processes read sets, by events of this kind."""
    found = []
    for event in events:
        reader, step = event.fields.get("reader"), event.get_number("step")
        if event.kind == kind and isinstance(reader, dict):
            process = str(reader.get("host", "")), int(reader.get("pid") or 0)
            found.append(Load(event.time_ns, None if step is None else int(step), process))
    return found


# --- runs -------------------------------------------------------------------------------------------------------------


def _split_runs(saves: Sequence[Save], loads: Sequence[Load]) -> list[Run]:
    runs: list[Run] = []
    known: list[int] = []
    read: dict[Process, list[Load]] = defaultdict(list)
    for load in loads:
        read[load.process].append(load)
    for save in saves:
        until_ns = max(save.began_ns, save.ended_ns)
        mine = [load for process in save.processes for load in read.get(process, ()) if load.time_ns <= until_ns]
        if not runs or runs[-1].is_other(save, mine):
            signs = [save.began_ns, *filter(None, save.processes.values()), *(load.time_ns for load in mine)]
            runs.append(Run(max(min(signs), runs[-1].ended_ns if runs else 0), _find_resumed(save, mine, known)))
        runs[-1].add(save)
        if save.is_complete and save.step is not None:
            insort(known, save.step)
    return runs


def _find_resumed(first: Save, mine: Sequence[Load], known: Sequence[int]) -> int:
    """Return the step from which a run resumed.

    `known`: the steps of the complete sets before it, in order.
    """
    if steps := [load.step for load in sorted(mine, key=lambda load: load.time_ns) if load.step is not None]:
        return steps[-1]
    place = 0 if first.step is None else bisect_left(known, first.step)
    return known[place - 1] if place else 0


# --- time -------------------------------------------------------------------------------------------------------------


def _get_step_s(runs: Iterable[Run]) -> float | None:
    """Return the median time of a step between two saves of a run."""
    found = []
    for run in runs:
        done = [save for save in run.saves if save.is_complete and save.step is not None]
        for one, following in pairwise(done):
            steps = (following.step or 0) - (one.step or 0)
            if steps > 0 and following.began_ns >= one.ended_ns:
                found.append((following.began_ns - one.ended_ns) / NANO / steps)
    return median(found) if found else None


def _get_saving_s(run: Run) -> float:
    """Return for how long files of kept sets were open."""
    end_ns, covered_ns, until_ns = run.get_kept_end_ns(), 0, run.began_ns
    for save in run.saves:
        from_ns, to_ns = max(save.began_ns, until_ns), min(save.ended_ns, end_ns)
        covered_ns += max(0, to_ns - from_ns)
        until_ns = max(until_ns, to_ns)
    return covered_ns / NANO


def _get_starting_s(run: Run, step_s: float) -> float:
    """Return what a run took until its first set, beyond its steps."""
    first = run.saves[0]
    if first.step is None or first.step > run.kept or not first.is_complete:
        return 0.0
    return max(0.0, (first.began_ns - run.began_ns) / NANO - (first.step - run.resumed) * step_s)


def select_series(events: Iterable[LoggedEvent], series: str) -> Iterator[LoggedEvent]:
    """Yield the events of a series: a path below the mount with its pattern."""
    wanted = os.path.normpath(series)
    return (event for event in events if event.get_text("series") == wanted)


# --- the report -------------------------------------------------------------------------------------------------------


def build_answer(series: str, found: Goodput) -> GoodputJson:
    figures = found._asdict() | {"runs": [_build_run(run) for run in found.runs]}
    began, ended = format_time(found.runs[0].began_ns), format_time(found.runs[-1].ended_ns)
    return cast(GoodputJson, {"series": series, "began": began, "ended": ended, **figures})


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
        seconds = getattr(found, f"{part}_s")
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
