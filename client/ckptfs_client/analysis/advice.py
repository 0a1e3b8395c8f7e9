"""What `ckptfs advise` measures of a series, computes and says: how often to save (H9, X9).

Each of the newest sets is compared with the one before it. A save ends when its last file is changed. It begins at the earliest time since
the set before was complete that is known: an access time is that of the creation, for the directory of the set always, for a file until a
program reads it. That may be later than the beginning, so the cost is at least what is measured.

The model: a job works for `interval_s`, saves for `cost_s`, and works again. Failures come at random, on average every `mtbf_s`. After a
failure the job needs `restart_s` before it works again, from its last checkpoint. All times are in seconds.

Sources:
- J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9), 1974, p. 530-531.
- J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22(3),
  2006, p. 303-312: the higher-order interval, and the expected time of a job whose failures are Poisson, even while it saves or restarts.
"""

import contextlib
import math
import os
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ckptfs.protocol import control_pb2 as pb
from ckptfs.quantities import format_count, format_duration, format_size
from ckptfs_client.json_answers import AdviceJson, AdviceRowJson
from ckptfs_client.render import escape_unprintable, format_columns
from ckptfs_client.sets.set_history import FoundSet, ListedSeries, SetHistory
from ckptfs_client.sets.set_listing import MANIFEST_FILES

MEASURED_MAX = 16
NANO = 1e9
NOW, YOUNG, DALY = "now", "Young 1974", "Daly 2006"


@dataclass(frozen=True, slots=True)
class SeriesMeasure:
    """What is known of the newest sets of a series; without one nothing.

    The period is from one complete set to the next; None: not known.
    """

    series: str = ""
    sets: int = 0
    size: int = 0
    costs_s: tuple[float, ...] = ()
    period_s: float | None = None

    @property
    def cost_s(self) -> float | None:
        return median(self.costs_s) if self.costs_s else None


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What the advice rests on.

    `is_given`: the cost was given, not measured. `failures`: the failures from which the rate was computed; 0: it was given.
    """

    mtbf_s: float
    cost_s: float
    restart_s: float
    is_given: bool
    failures: int = 0


def measure_series(history: SetHistory, one: ListedSeries) -> SeriesMeasure:
    """Measure the sets of a series that were completed last."""
    sets = sorted(history.list_sets(one), key=lambda each: each.number, reverse=True)
    last = sets[: MEASURED_MAX + 1]
    costs = (_measure_cost_s(FoundSet(one, newer), older) for newer, older in pairwise(last))
    periods = [(newer.completed_ns - older.completed_ns) / NANO for newer, older in pairwise(last)]
    known = [period for period in periods if period > 0]
    size = sets[0].size if sets else 0
    return SeriesMeasure(one.shown, len(sets), size, tuple(cost for cost in costs if cost), median(known) if known else None)


def _measure_cost_s(found: FoundSet, older: pb.SetInfo) -> float:
    """Return for how long the files of a set were being written, at least; 0 if their times do not tell."""
    times: list[int] = []
    changed: list[int] = []
    with contextlib.suppress(OSError):
        if found.set.in_place and not found.set.group:
            times.append(os.stat(found.place).st_atime_ns)
    for directory, _, names in os.walk(found.history):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(directory, name))
                if directory != str(found.history) or name not in MANIFEST_FILES:
                    changed.append(status.st_mtime_ns)
                    times.append(status.st_atime_ns)
    last = max(changed, default=0)
    began = min((one for one in times + changed if older.completed_ns < one <= last), default=last)
    return (last - began) / NANO


# --- the interval -----------------------------------------------------------------------------------------------------


def compute_young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return Young's interval: sqrt(2 cost mtbf)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def compute_daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return Daly's interval, of higher order; the MTBF if a checkpoint takes twice as long as that."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return compute_young_interval_s(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def compute_overhead(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Return the time for checkpoints, lost work and restarts, as a share of the work.

    It is infinite if the job hardly gets on.
    Daly: a job takes mtbf e^(restart / mtbf) (e^((interval + cost) / mtbf) - 1) for each interval of work.
    """
    try:
        taken_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + cost_s) / mtbf_s)
    except OverflowError:
        return math.inf
    return taken_s / interval_s - 1


def compute_lost_s(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return the time that a failure undoes, on average: from the last complete checkpoint to the failure.

    It is the mean of the exponential distribution, given that the failure comes before the next checkpoint is complete.
    """
    period_s = interval_s + cost_s
    share = period_s / mtbf_s
    if share < 1e-4:  # The difference below loses all its digits.
        return period_s * (0.5 - share / 12)
    return mtbf_s - (period_s / math.expm1(share) if share < 700 else 0.0)


# --- the answer -------------------------------------------------------------------------------------------------------


def build_advice(measure: SeriesMeasure, facts: JobFacts) -> AdviceJson:
    intervals = [(YOUNG, compute_young_interval_s(facts.cost_s, facts.mtbf_s)), (DALY, compute_daly_interval_s(facts.cost_s, facts.mtbf_s))]
    if measure.period_s is not None and measure.period_s > facts.cost_s:
        intervals.insert(0, (NOW, measure.period_s - facts.cost_s))
    rows = [_build_row(name, interval_s, facts) for name, interval_s in intervals]
    return {
        "series": measure.series, "sets": measure.sets, "size": measure.size, "cost_s": facts.cost_s,
        "cost_sets": 0 if facts.is_given else len(measure.costs_s), "period_s": measure.period_s, "mtbf_s": facts.mtbf_s,
        "mtbf_failures": facts.failures, "restart_s": facts.restart_s, "intervals": rows, "sentence": _build_sentence(rows, facts),
    }  # fmt: skip


def _build_row(name: str, interval_s: float, facts: JobFacts) -> AdviceRowJson:
    overhead = compute_overhead(interval_s, facts.cost_s, facts.mtbf_s, facts.restart_s)
    return {
        "name": name,
        "interval_s": interval_s,
        "saving": facts.cost_s / interval_s,
        "lost_s": compute_lost_s(interval_s, facts.cost_s, facts.mtbf_s),
        "overhead": overhead if math.isfinite(overhead) else None,
    }


def _build_sentence(rows: list[AdviceRowJson], facts: JobFacts) -> str:
    best, first = rows[-1], rows[0]
    if facts.cost_s >= 2 * facts.mtbf_s:
        cost, mtbf = format_duration(facts.cost_s), format_duration(facts.mtbf_s)
        return f"A checkpoint takes {cost} and the job fails every {mtbf}: no interval lets it get on; make checkpoints smaller or faster."
    words = f"Save after every {format_duration(best['interval_s'])} of work"
    if first["name"] == NOW:
        words += f", instead of {format_duration(first['interval_s'])}"
    words += f": checkpoints, lost work and restarts then add {_format_share(best['overhead'])} to the time of the job"
    return words + (f", instead of {_format_share(first['overhead'])}." if first["name"] == NOW else ".")


def _format_share(share: float | None) -> str:
    return "without end" if share is None else f"{100 * share:.3g} %" if share < 10 else f"{100 * share:.0f} %"


def format_advice(advice: AdviceJson) -> str:
    """Format the answer: what it rests on, the table, the sentence."""
    lines = []
    if advice["series"]:
        amount = f"{format_count(advice['sets'], 'set')}, the newest of {format_size(advice['size'])}"
        lines.append(f"{escape_unprintable(advice['series'])}: {amount}")
    sets = advice["cost_sets"]
    source = f"at least, the median of {format_count(sets, 'set')}" if sets else "as given"
    lines.append(f"  {'checkpoint':<10} {format_duration(advice['cost_s'])} ({source})")
    failures = advice["mtbf_failures"]
    observed = f" (observed: {format_count(failures, 'failure')})" if failures else ""
    lines.append(f"  {'failure':<10} every {format_duration(advice['mtbf_s'])}{observed}")
    cells = [
        [row["name"], format_duration(row["interval_s"]), _format_share(row["saving"]), format_duration(row["lost_s"]),
         _format_share(row["overhead"])]
        for row in advice["intervals"]
    ]  # fmt: skip
    table = format_columns(("interval", "work>", "saving>", "lost by a failure>", "overhead>"), cells)
    return "\n".join([*lines, "", table, "", advice["sentence"]])
