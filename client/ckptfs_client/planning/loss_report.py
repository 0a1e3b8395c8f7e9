"""What `ckptfs simulate` says: how likely a loss is, the traffic of recovery, memory (G7)."""

import math

from ckptfs.quantities import format_count, format_duration, format_size
from ckptfs_client.errors import UsageError
from ckptfs_client.json_answers import SimulateJson
from ckptfs_client.planning.loss_simulation import DAY_S, CopyPlacement, LossEstimate, LossModel, LossSimulation, compute_closed_form
from ckptfs_client.render import format_columns

YEAR_DAYS = 365.25
THREATS_MAX = 0.2
"""So many failures that matter may come during a repair, on average: the simulation takes failures for rare."""


def build_report(model: LossModel, size_bytes: int, keep: int, trials: int, seed: int) -> SimulateJson:
    """Simulate and build the answer. `size_bytes`: what a node writes of a checkpoint. Raises UsageError."""
    copies = CopyPlacement(model)
    if copies.threat_rate * model.repair_s > THREATS_MAX:
        accepted = f"accepted: up to {THREATS_MAX / copies.threat_rate:.3g}s"
        raise UsageError(f"--repair {model.repair_s:.3g}s is too long for nodes and domains that fail so often; {accepted}")
    found = LossSimulation(copies, seed).estimate(trials)
    failures = model.node_count * (model.node_rate + model.domain_rate) * DAY_S
    # On average a node holds as many copies as each file has. A checkpoint that is still written is not remade.
    recovery = copies.copies * size_bytes * keep
    return {
        "nodes": model.node_count,
        "copies": copies.copies,
        "jump": copies.jump,
        "domains": model.domains,
        "node_mtbf_s": model.node_mtbf_s,
        "domain_mtbf_s": model.domain_mtbf_s if math.isfinite(model.domain_mtbf_s) else None,
        "repair_s": model.repair_s,
        "write_back_s": model.window_s,
        "trials": trials,
        "seed": seed,
        "probability": found.probability,
        "low": found.low,
        "high": found.high,
        "closed_form": compute_closed_form(model, copies.copies, copies.group_count),
        "failures_per_day": failures,
        "recovery_bytes": recovery,
        "recovery_bytes_per_day": failures * recovery,
        "memory_bytes": copies.load_max * size_bytes * (keep + 1),
        "memory_bytes_after": copies.load_max_after * size_bytes * (keep + 1),
        "sentence": _build_sentence(model, found),
    }


def _build_sentence(model: LossModel, found: LossEstimate) -> str:
    window = format_duration(model.window_s)
    if found.probability is None:
        return f"No trial met a loss within {window}; raise --trials."
    words = f"One of {format_large(1 / found.probability)} sets is lost before the PFS has it"
    years = model.window_s / DAY_S / YEAR_DAYS / found.probability
    return f"{words}; with a new set every {window}, that is once in {format_large(years)} years."


def format_large(value: float) -> str:
    """Format a number with three digits: "0.0123", "1,230", "1.23e+09"."""
    return f"{value:.3g}" if value < 1000 or value >= 1e9 else f"{float(f'{value:.3g}'):,.0f}"


def format_report(answer: SimulateJson) -> str:
    """Format the answer: what it rests on, the table, the sentence."""
    spread = f"jump {answer['jump']}" if answer["jump"] else "domains spread evenly"
    domain_mtbf = answer["domain_mtbf_s"]
    fails = "" if domain_mtbf is None else f", each fails every {_format_mtbf(domain_mtbf)}"
    lines = [
        f"{format_count(answer['nodes'], 'node')}, each fails every {_format_mtbf(answer['node_mtbf_s'])};"
        f" {format_count(answer['domains'], 'failure domain')}{fails}",
        f"{format_count(answer['copies'], 'copy', 'copies')}, {spread}; remade in {format_duration(answer['repair_s'])},"
        f" on the PFS in {format_duration(answer['write_back_s'])}",
        "",
    ]  # fmt: skip
    low, high, closed = answer["low"], answer["high"], answer["closed_form"]
    cells = [
        ["probability that a set is lost", _format_probability(answer["probability"]),
         "" if low is None or high is None else f"{low:.3g} to {high:.3g} (95 %, {answer['trials']} trials)"],
        *([["by the closed form", _format_probability(closed), "independent failures"]] if closed is not None else []),
        ["nodes that fail in a day", f"{answer['failures_per_day']:.3g}", ""],
        ["copies to remake after each", format_size(answer["recovery_bytes"]), f"{format_size(answer['recovery_bytes_per_day'])} a day"],
        ["memory on a node, at most", format_size(answer["memory_bytes"]),
         f"{format_size(answer['memory_bytes_after'])} once a lost domain is remade" if answer["memory_bytes_after"] else ""],
    ]  # fmt: skip
    return "\n".join([*lines, format_columns(("", "value>", "more"), cells).partition("\n")[2], "", answer["sentence"]])


def _format_probability(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _format_mtbf(seconds: float) -> str:
    days = seconds / DAY_S
    return format_duration(seconds) if days < 3 else f"{days:.3g} days" if days < YEAR_DAYS else f"{days / YEAR_DAYS:.3g} years"
