"""`ckptfs goodput` and the failure rate of `ckptfs advise` from constructed logs. G6, X9."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ckptfs_client.analysis import goodput
from ckptfs_client.analysis.goodput import Goodput, compute_goodput, list_saves

from ckptfs import event_log
from ckptfs.event_log import EventKind, LoggedEvent, format_time

SECOND = 10**9
BEGAN_NS = 1_700_000_000 * SECOND
SERIES = "run1/step_*"


def at(seconds: float) -> int:
    return BEGAN_NS + int(seconds * SECOND)


def process(pid: int, started_s: float | None = None, job: str = "", host: str = "n1") -> dict[str, Any]:
    started = {} if started_s is None else {"started": format_time(at(started_s))}
    return {"host": host, "pid": pid, **({"job": job} if job else {}), **started}


def complete(step: int, number: int, ended_s: float, *by: dict[str, Any], takes_s: float = 10.0, **more: Any) -> LoggedEvent:
    """A set whose files were open until `ended_s`; it was found complete a second later."""
    fields = {"series": SERIES, "set": f"step_{step}@{number}", "number": number, "step": step, "producers": list(by)}
    return LoggedEvent(at(ended_s + 1), "complete", {**fields, "began": format_time(at(ended_s - takes_s)), "duration_s": takes_s, **more})


def begun(step: int, seconds: float, *by: dict[str, Any]) -> LoggedEvent:
    return LoggedEvent(at(seconds), "begun", {"series": SERIES, "set": f"step_{step}", "step": step, "producers": list(by)})


def load(step: int, seconds: float, by: dict[str, Any]) -> LoggedEvent:
    return LoggedEvent(at(seconds), "load", {"series": SERIES, "set": f"step_{step}@{step // 100}", "step": step, "reader": by})


def compute(*events: LoggedEvent) -> Goodput:
    found = compute_goodput(events)
    assert found is not None
    parts = [getattr(found, f"{name}_s") for name in ("effective", "saving", "lost", "down", "starting")]
    assert sum(parts) == pytest.approx(found.total_s) and min(parts) >= 0
    return found


def seconds(found: Goodput, *names: str) -> list[float]:
    return [round(getattr(found, f"{name}_s"), 6) for name in names]


def job(pid: int, started_s: float, steps: Sequence[int], first_number: int, **more: Any) -> list[LoggedEvent]:
    """A run that saves every 100 s for 10 s, 100 steps each."""
    by = process(pid, started_s, **more)
    return [complete(step, first_number + at_, started_s + 100 * (at_ + 1), by) for at_, step in enumerate(steps)]


def test_without_a_save_there_is_nothing() -> None:
    assert compute_goodput([]) is None and compute_goodput([load(100, 5, process(1))]) is None


def test_one_run_without_a_failure() -> None:
    """By hand: 300 s, of which 30 s for three sets."""
    found = compute(*job(1, 0, [100, 200, 300], 1))
    assert (found.restarts, found.saves, found.incomplete, found.steps, found.lost_steps, found.mtbf_s) == (0, 3, 0, 300, 0, None)
    assert found.total_s == 300 and seconds(found, "saving", "lost", "down", "starting") == [30, 0, 0, 0]
    assert found.effective == pytest.approx(0.9)


def test_a_run_that_fails_while_it_saves_and_goes_on() -> None:
    """Two sets; the third is begun at 290 s and lost. 60 s later a process starts, loads step 200 and takes 20 s more until it works."""
    again = process(2, 350)
    found = compute(
        *job(1, 0, [100, 200], 1), begun(300, 290, process(1, 0)), load(200, 360, again),
        complete(300, 3, 470, again), complete(400, 4, 570, again),
    )  # fmt: skip
    assert (found.restarts, found.saves, found.incomplete, found.loads) == (1, 4, 1, 1)
    assert (found.runs[1].resumed, found.steps, found.lost_steps) == (200, 400, 100)
    assert seconds(found, "lost", "down", "starting", "saving") == [90, 60, 20, 40]
    assert found.total_s == 570 and found.effective == pytest.approx(360 / 570)
    assert found.failures == 1 and found.mtbf_s == 510


def test_a_kill_between_two_saves() -> None:
    """No sign of what was done since the last set: it counts as time, and as no step."""
    found = compute(*job(1, 0, [100, 200], 1), *job(2, 290, [300], 3))
    assert (found.restarts, found.lost_steps, found.runs[1].resumed) == (1, 0, 200)
    assert seconds(found, "lost", "down") == [0, 90] and found.failures == 1


def test_steps_that_go_back_without_a_load() -> None:
    """The second run saves 200 again: it resumed from 100, so that 200 and 300 of the first are lost with the time behind 100."""
    found = compute(*job(1, 0, [100, 200, 300], 1), *job(2, 300, [200, 300, 400], 4))
    assert (found.runs[1].resumed, found.lost_steps, found.steps) == (100, 200, 400)
    assert seconds(found, "lost", "down", "saving") == [200, 0, 40] and found.total_s == 600


def test_steps_that_go_back_over_two_runs() -> None:
    """The third run begins at 100: 200 to 300 of the first and all of the second are lost."""
    events = [*job(1, 0, [100, 200, 300], 1), *job(2, 300, [400, 500], 4), load(100, 510, process(3, 505)), *job(3, 505, [200], 6)]
    found = compute(*events)
    assert [run.lost_steps for run in found.runs] == [200, 200, 0] and found.steps == 200
    assert [run.lost_s for run in found.runs] == [200, 200, 0] and found.failures == 2


def test_from_the_beginning_again() -> None:
    """A run that saves a step before all others has resumed from nothing."""
    found = compute(*job(1, 0, [100, 200], 1), *job(2, 200, [50], 3))
    assert (found.runs[1].resumed, found.lost_steps, found.steps) == (0, 200, 50)


def test_two_jobs_one_after_the_other() -> None:
    """The second one goes on where the first one ended: a restart, and no failure. One that repeats steps is a failure."""
    found = compute(*job(1, 0, [100, 200], 1, job="7"), *job(2, 1000, [300], 3, job="8"))
    assert (found.jobs, found.restarts, found.failures, found.lost_steps) == (2, 1, 0, 0)
    assert seconds(found, "down", "lost") == [800, 0] and found.mtbf_s is None
    found = compute(*job(1, 0, [100, 200], 1, job="7"), *job(2, 1000, [200], 3, job="8"))
    assert (found.failures, found.lost_steps, found.mtbf_s) == (1, 100, 300)


def test_the_same_job_again() -> None:
    """Slurm requeues it under its own number: a failure."""
    found = compute(*job(1, 0, [100], 1, job="7"), *job(2, 200, [200], 2, job="7"))
    assert (found.jobs, found.failures) == (1, 1)


def test_a_script_that_copies_is_one_run() -> None:
    """Each set has a process of its own, which lives as long as it copies."""
    sets = [complete(step, step // 100, step, process(step, step - 10.5)) for step in (100, 200, 300)]
    assert compute(*sets).restarts == 0


@pytest.mark.parametrize("sign", ["it has read", "it has worked", "another job"])
def test_what_makes_a_new_process_a_new_run(sign: str) -> None:
    by = process(2, 60 if sign == "it has worked" else 189, job="8" if sign == "another job" else "7")
    reads = [load(100, 150, by)] if sign == "it has read" else []
    assert compute(complete(100, 1, 100, process(1, 0, job="7")), *reads, complete(200, 2, 200, by)).restarts == 1


def test_a_restore_is_no_run() -> None:
    """`ckptfs restore` writes an older set again, and the job goes on."""
    by, tool = process(1, 0), process(9, 340)
    read = load(200, 345, tool)
    restored = LoggedEvent(read.time_ns, "restored", read.fields)
    saves = job(1, 0, [100, 200, 300], 1)
    found = compute(*saves, restored, begun(200, 346), complete(200, 4, 350, tool, takes_s=4), complete(400, 5, 400, by))
    assert (found.restarts, found.failures, found.saves, found.incomplete, found.lost_steps, found.mtbf_s) == (0, 0, 4, 0, 0, None)


def test_a_reader_that_writes_nothing_is_no_run() -> None:
    """An evaluation reads each set."""
    found = compute(*job(1, 0, [100, 200], 1), load(100, 120, process(9)), load(200, 220, process(9)), complete(300, 3, 300, process(1, 0)))
    assert (found.restarts, found.loads, found.lost_steps) == (0, 2, 0)


def test_ranks_of_several_nodes() -> None:
    """Each node logs what it sees of the same set; the job loses one rank and goes on with the others: one run."""
    ranks = [process(pid, 0, host=host) for host in ("n1", "n2") for pid in (1, 2)]
    events = [begun(100, 91, *ranks[2:]), begun(100, 90, *ranks[:2]), complete(100, 1, 100, *ranks), complete(100, 1, 100.5, *ranks)]
    found = compute(*events, complete(200, 2, 200, *ranks[:3]))
    assert (found.restarts, found.saves, found.incomplete) == (0, 2, 0) and len(list_saves(events)) == 1
    assert list_saves(events)[0].began_ns == at(90)


def test_a_log_that_was_rotated() -> None:
    """The first set in it has number 50: what was before is not known, and its run begins with it."""
    by = process(1, 0)
    found = compute(begun(4900, 4990, by), *(complete(number * 100, number, number * 100.0, by) for number in (50, 51, 52)))
    assert found.is_cut and (found.saves, found.steps, found.total_s) == (3, 200, 200)
    assert seconds(found, "saving", "starting", "lost") == [20, 0, 0]


def test_a_gap_in_the_log() -> None:
    """Sets 2 to 4 are missing, as after a disk that failed: their time is in the run."""
    by = process(1, 0)
    found = compute(complete(100, 1, 100, by), complete(500, 5, 500, by))
    assert (found.saves, found.steps, found.restarts) == (2, 500, 0) and found.total_s == 500


def test_a_daemon_that_was_killed_says_begun_twice() -> None:
    found = compute(begun(100, 50, process(1, 0)), begun(100, 60), complete(100, 1, 100, process(1, 0)))
    assert (found.saves, found.incomplete) == (1, 0)


def test_the_set_that_is_being_written_is_not_lost() -> None:
    found = compute(*job(1, 0, [100], 1), begun(200, 190, process(1, 0)))
    assert (found.incomplete, found.lost_steps) == (1, 0) and seconds(found, "lost") == [0]


def test_a_series_without_steps() -> None:
    """`state.cpt` is written again and again: runs and times are known, steps are not."""
    events = []
    for number, by in ((1, process(1, 0)), (2, process(1, 0)), (3, process(2, 240))):
        fields = {"set": f"state.cpt@{number}", "number": number, "producers": [by], "duration_s": 5}
        events.append(LoggedEvent(at(100 * number), "complete", fields))
    found = compute(*events)
    assert (found.saves, found.restarts, found.steps, found.lost_steps) == (3, 1, 0, 0)


def test_events_of_other_forms_do_no_harm() -> None:
    """A newer version, or a hand, wrote them."""
    odd: list[tuple[str, dict[str, Any]]] = [
        ("complete", {}), ("complete", {"number": 1.5, "step": "x", "producers": [{"pid": None}, 3]}), ("load", {"reader": []}),
        ("begun", {"began": "soon", "duration_s": -5}), ("?", {}),
    ]  # fmt: skip
    assert compute_goodput(LoggedEvent(at(number), *one) for number, one in enumerate(odd)) is not None


def test_a_hundred_runs_take_no_time_and_agree_with_the_sum(tmp_path: Path) -> None:
    """Through a log on disk: every run loses its last 100 steps, begun at its end, and 50 s."""
    events: list[LoggedEvent] = []
    for number in range(100):
        by = process(number + 1, 300 * number)
        events += [load(200 * number, 300 * number + 1, by)] if number else []
        events += [complete(200 * number + 100 * one, 2 * number + one, 300 * number + 100 * one, by) for one in (1, 2)]
        events += [begun(200 * number + 300, 300 * number + 250, by)]
    (tmp_path / "00000001.jsonl").write_bytes(b"".join(map(event_log.build_line, events)))
    found = compute(*event_log.read_events(tmp_path))
    assert (found.restarts, found.failures, found.lost_steps, found.steps) == (99, 99, 9900, 20_100)
    assert seconds(found, "lost", "down", "saving", "starting") == [99 * 50, 99 * 50, 2000, 0]
    assert EventKind.LOAD == "load" and found.effective == pytest.approx((100 * 180 + 50) / found.total_s)


def test_the_work_grows_with_the_number_of_events() -> None:
    """A full log, of a run that reads its own sets: each set is looked at once."""
    by = process(1, 0)
    counted = CountedProcesses({("n1", 1): 0})
    events = [complete(number, number, 20.0 * number, by) for number in range(1, 3001)]
    saves = list_saves(events)
    for save in saves:
        save.processes = counted
    loads = [goodput.Load(save.ended_ns, save.step, ("n1", 2)) for save in saves]
    assert len(goodput._split_runs(saves, loads)) == 1
    assert counted.looks <= 10 * len(saves)


class CountedProcesses(dict[goodput.Process, int]):
    """Processes of a set that count how often they are looked at."""

    looks = 0

    def __iter__(self) -> Iterator[goodput.Process]:
        self.looks += 1
        return super().__iter__()

    def keys(self) -> Any:
        self.looks += 1
        return super().keys()
