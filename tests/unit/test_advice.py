"""`ckptfs advise`: Young's and Daly's interval, what is measured of a series, and what the command says. H9, X9, P11."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from ckptfs_client import cli
from ckptfs_client.analysis import advice
from ckptfs_client.analysis.advice import compute_daly_interval_s, compute_lost_s, compute_overhead, compute_young_interval_s
from ckptfs_client.errors import ClientError, UsageError
from ckptfs_client.sets.set_history import SetHistory
from history_directory import HistoryDirectory

MINUTE, HOUR = 60.0, 3600.0
SECOND_NS = 10**9
START_NS = 1_700_000_000 * SECOND_NS
STEP = "run1/step_*"


# --- formulas ------------------------------------------------------------------------------------------------------------


def test_youngs_interval() -> None:
    """By hand: sqrt(2 x 5 x 1440) = 120 minutes; sqrt(2 x 5 x 360) = 60 minutes."""
    assert compute_young_interval_s(5 * MINUTE, 24 * HOUR) == pytest.approx(120 * MINUTE)
    assert compute_young_interval_s(5 * MINUTE, 6 * HOUR) == pytest.approx(60 * MINUTE)


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, "117"), (6 * HOUR, "57"), (15 * MINUTE, "9.1")])
def test_dalys_interval_is_that_of_his_figures(mtbf_s: float, minutes: str) -> None:
    """Figures 3 to 5 of the paper: a checkpoint of 5 minutes."""
    found = compute_daly_interval_s(5 * MINUTE, mtbf_s) / MINUTE
    assert f"{found:.{1 if '.' in minutes else 0}f}" == minutes


def test_the_limits_of_the_intervals() -> None:
    """A cheap checkpoint: both agree. One that takes twice the MTBF: the MTBF."""
    assert compute_daly_interval_s(1e-6, HOUR) == pytest.approx(compute_young_interval_s(1e-6, HOUR), rel=1e-4)
    assert compute_daly_interval_s(2 * HOUR, HOUR) == compute_daly_interval_s(9 * HOUR, HOUR) == HOUR


@pytest.mark.parametrize("cost_s", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("restart_s", [0.0, 600.0])
def test_dalys_interval_has_nearly_the_least_overhead(cost_s: float, restart_s: float) -> None:
    """Against the minimum over a fine grid; Young's is no better."""
    mtbf_s = 2 * HOUR
    grid = (compute_overhead(10 * 1.005**step, cost_s, mtbf_s, restart_s) for step in range(1500))
    daly = compute_overhead(compute_daly_interval_s(cost_s, mtbf_s), cost_s, mtbf_s, restart_s)
    young = compute_overhead(compute_young_interval_s(cost_s, mtbf_s), cost_s, mtbf_s, restart_s)
    assert daly == pytest.approx(min(grid), rel=1e-3) and daly <= young


def test_the_overhead_by_hand_and_at_its_limits() -> None:
    """Interval and cost together are one MTBF: e - 1 for half an MTBF of work. Without failures only the checkpoints cost."""
    assert compute_overhead(0.5, 0.5, 1.0) == pytest.approx(2 * (math.e - 1) - 1)
    assert compute_overhead(0.5, 0.5, 1.0, 1.0) == pytest.approx(2 * math.e * (math.e - 1) - 1)
    assert compute_overhead(100.0, 1.0, 1e12) == pytest.approx(0.01, rel=1e-6)
    assert compute_overhead(100.0, 1.0, 0.1) == math.inf


def test_lost_work_by_hand_and_at_its_limits() -> None:
    """A period of one MTBF: 1 - 1 / (e - 1). Rare failures undo half a period, frequent ones an MTBF; nothing jumps in between."""
    assert compute_lost_s(0.5, 0.5, 1.0) == pytest.approx(1 - 1 / (math.e - 1))
    assert compute_lost_s(90.0, 10.0, 1e12) == pytest.approx(50.0)
    assert compute_lost_s(90.0, 10.0, 1e-3) == pytest.approx(1e-3)
    assert compute_lost_s(0.99999e-4, 0.0, 1.0) == pytest.approx(compute_lost_s(1.00001e-4, 0.0, 1.0), rel=1e-4)


# --- what is measured ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> HistoryDirectory:
    (tmp_path / "mnt").mkdir()
    return HistoryDirectory(tmp_path / "mnt")


def save(tree: HistoryDirectory, number: int, begins_s: int, files: dict[str, tuple[int, int]], **more: object) -> Path:
    """A set of files with (access time, time of the last change), in seconds from the beginning; its directory is made at `begins_s`."""
    ends_s = max(changed for _, changed in files.values())
    completed_ns = START_NS + (ends_s + 1) * SECOND_NS
    made = tree.add(STEP, f"step_{number}", dict.fromkeys(files, b"12345"), completed_ns=completed_ns, **more)
    for name, times in files.items():
        accessed_ns, changed_ns = (START_NS + one * SECOND_NS for one in times)
        os.utime(made / name, ns=(accessed_ns, changed_ns))
    place = tree.root / "run1" / f"step_{number}"
    if place.exists():
        os.utime(place, ns=(START_NS + begins_s * SECOND_NS, START_NS + ends_s * SECOND_NS))
    return made


def measure(tree: HistoryDirectory) -> advice.SeriesMeasure:
    history = tree.open()
    return advice.measure_series(history, history.find_one_series(tree.root / STEP))


def test_a_save_begins_with_its_directory(tree: HistoryDirectory) -> None:
    """X9: 20 s and 30 s of writing, a set every 600 s. The oldest set has none before it, so its own times do not count."""
    save(tree, 1, 0, {"a": (0, 500), "b": (0, 510)})
    save(tree, 2, 1090, {"a": (1092, 1100), "b": (1100, 1110)})
    save(tree, 3, 1680, {"a": (1690, 1700), "b": (1700, 1710)})
    found = measure(tree)
    assert (found.sets, found.size, found.period_s) == (3, 10, 600.0)
    assert found.costs_s == (30.0, 20.0) and found.cost_s == 25.0


def test_the_times_of_completion_count_and_not_the_steps(tree: HistoryDirectory) -> None:
    """The set of a later step may be completed first."""
    save(tree, 2, 0, {"a": (0, 10)})
    save(tree, 1, 90, {"a": (95, 110)})
    save(tree, 3, 190, {"a": (195, 210)})
    assert (measure(tree).period_s, measure(tree).costs_s) == (100.0, (20.0, 20.0))


def test_a_file_that_nobody_has_read_shows_when_it_was_created(tree: HistoryDirectory) -> None:
    """A set of single files has no directory of its own."""
    save(tree, 1, 0, {"step_1.pt": (0, 10)}, group=True)
    save(tree, 2, 0, {"step_2.pt": (95, 110)}, group=True)
    assert measure(tree).costs_s == (15.0,)


def test_times_that_are_of_no_use(tree: HistoryDirectory) -> None:
    """A file that was read since, one that was there before the last set, and a directory of before: the others tell, or nothing does."""
    save(tree, 1, 0, {"a": (0, 10)})
    save(tree, 2, 5, {"read": (500, 100), "kept": (3, 4), "late": (500, 107)})
    assert measure(tree).costs_s == (7.0,)
    save(tree, 3, 5, {"a": (900, 200)})
    assert measure(tree).costs_s == (7.0,), "one file, and somebody has read it"


def test_a_set_that_is_in_the_history_only(tree: HistoryDirectory) -> None:
    save(tree, 1, 0, {"a": (0, 10)})
    save(tree, 2, 0, {"a": (98, 100), "b": (99, 104)}, in_place=False)
    assert measure(tree).costs_s == (6.0,)


# --- the command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tree: HistoryDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    monkeypatch.setattr(SetHistory, "of", lambda path: tree.open())

    def call(*words: str | Path) -> str:
        cli.build_command()(["advise", *map(str, words)], standalone_mode=False)
        return capsys.readouterr().out

    return call


def test_the_advice_for_a_series(tree: HistoryDirectory, run: Callable[..., str]) -> None:
    """H9: measured cost, given rate; the table and the sentence, and the same as JSON."""
    save(tree, 1, 0, {"a": (0, 10)})
    save(tree, 2, 580, {"a": (590, 610)})
    found = json.loads(run(tree.root / STEP, "--mtbf", "6h", "--json"))
    assert (found["sets"], found["cost_s"], found["cost_sets"], found["period_s"], found["mtbf_s"]) == (2, 30.0, 1, 600.0, 21600.0)
    now, young, daly = found["intervals"]
    assert (now["interval_s"], young["interval_s"]) == (570.0, pytest.approx(math.sqrt(2 * 30 * 21600)))
    assert daly["interval_s"] == compute_daly_interval_s(30, 21600) and daly["saving"] == 30 / daly["interval_s"]
    assert daly["overhead"] < now["overhead"] == compute_overhead(570, 30, 21600)
    out = run(tree.root / STEP, "--mtbf", "6h")
    assert "30.0 s (at least, the median of 1 set)" in out and "every 6 h 0 min" in out
    assert out.endswith(f"{found['sentence']}\n") and found["sentence"].startswith("Save after every 18 min of work, instead of 9 min: ")


def test_the_rate_of_many_nodes(run: Callable[..., str]) -> None:
    """10 nodes that fail every 10 weeks: the job fails every week."""
    found = json.loads(run("--cost", "30s", "--nodes", "10", "--node-mtbf", "10w", "--json"))
    assert found["mtbf_s"] == 7 * 86400 and found["cost_sets"] == 0
    assert [row["name"] for row in found["intervals"]] == ["Young 1974", "Daly 2006"]
    assert "as given" in run("--cost", "30s", "--mtbf", "1w")


def test_a_job_that_does_not_get_on(run: Callable[..., str]) -> None:
    found = json.loads(run("--cost", "1h", "--mtbf", "1s", "--json"))
    assert found["intervals"][-1]["overhead"] is None and "no interval lets it get on" in found["sentence"]
    assert "without end" in run("--cost", "1h", "--mtbf", "1s")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "say how often failures come"),
        (["--mtbf", "1h", "--node-mtbf", "1y"], "say how often failures come"),
        (["--node-mtbf", "1y"], "--node-mtbf needs --nodes"),
        (["--mtbf", "soon"], "--mtbf 'soon' is not a duration; accepted: "),
        (["--mtbf", "0"], "--mtbf '0' is not a duration"),
        (["--mtbf", "1h"], "--cost TIME"),
    ],
)
def test_what_it_refuses(run: Callable[..., str], words: list[str], what: str) -> None:
    """P11."""
    with pytest.raises(UsageError) as failure:
        run(*words)
    assert what in str(failure.value)


def test_a_cost_that_cannot_be_measured(tree: HistoryDirectory, run: Callable[..., str]) -> None:
    """One set tells nothing, and the remedy is named."""
    save(tree, 1, 0, {"a": (0, 10)})
    with pytest.raises(ClientError, match="do not tell how long a checkpoint takes; give --cost 30s"):
        run(tree.root / STEP, "--mtbf", "1h")
    assert json.loads(run(tree.root / STEP, "--mtbf", "1h", "--cost", "3s", "--json"))["sets"] == 1
