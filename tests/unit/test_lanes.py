"""A lane sleeps until there is work, gathers hints, retries failures, and runs at once for urgent requests. In virtual time.

A step takes no time here: the lane's thread is replaced by a plain call, so that the clock can jump.
"""

import errno
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import trio
from ckptfs_daemon.mover import lanes
from ckptfs_daemon.mover.lanes import Lane, Lanes
from trio.testing import MockClock, wait_all_tasks_blocked

from ckptfs import limits
from ckptfs.errors import TierUnavailable


@pytest.fixture(autouse=True)
def direct_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    async def call(function: Callable[..., Any], *values: Any, **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*values)

    monkeypatch.setattr(lanes.trio.to_thread, "run_sync", call)
    monkeypatch.setattr(lanes.random, "uniform", lambda *_: 1.0)
    yield


class Steps:
    """A flow that notes when it ran, and does what it was told to: True (more), False (idle) or an error; idle when told nothing."""

    def __init__(self, *script: bool | Exception, due_s: float | None = None) -> None:
        self.script = list(script)
        self.ran: list[float] = []
        self.due = due_s

    def step(self) -> bool:
        self.ran.append(round(trio.current_time(), 3))
        told = self.script.pop(0) if self.script else False
        if isinstance(told, Exception):
            raise told
        return told

    def next_due_s(self) -> float | None:
        return self.due


Told = list[tuple[str, Mapping[str, Any] | None]]


def run(flow: Steps, scenario: Callable[[Lane], Any]) -> Told:
    """Run a lane while `scenario(lane)` plays, on a clock that jumps; what the lane reported."""
    told: Told = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            lane = Lane("test", flow, lambda key, value: told.append((key, value)))
            nursery.start_soon(lane.run)
            await wait_all_tasks_blocked()
            await scenario(lane)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return told


def at(flow: Steps) -> list[float]:
    return [round(when - flow.ran[0], 3) for when in flow.ran]


def test_it_begins_with_a_step_and_goes_on_while_there_is_more() -> None:
    flow = Steps(True, True, False)
    run(flow, lambda lane: trio.sleep(3600))
    assert at(flow) == [0, 0, 0], "and then nothing for an hour: no CPU when idle"


def test_hints_are_gathered() -> None:
    flow = Steps()

    async def scenario(lane: Lane) -> None:
        for _ in range(10):
            lane.wake()
            await trio.sleep(0.001)
        await trio.sleep(10)

    run(flow, scenario)
    assert len(flow.ran) == 2 and 0 < at(flow)[1] <= 2 * limits.HINT_GATHER_S


def test_under_load_the_gathering_grows_and_falls_back_afterwards() -> None:
    flow = Steps(*[True, False] * 20)

    async def scenario(lane: Lane) -> None:
        for _ in range(5000):
            lane.wake()
            await trio.sleep(0.001)
        flow.script.clear()
        await trio.sleep(2)
        lane.wake()
        await trio.sleep(2)
        lane.wake()
        before = len(flow.ran)
        begun = trio.current_time()
        await trio.sleep(2)
        assert flow.ran[before] - begun == pytest.approx(limits.HINT_GATHER_S, abs=0.001)

    run(flow, scenario)
    pauses = [later - earlier for earlier, later in zip(flow.ran, flow.ran[1:], strict=False)]
    assert max(pause for pause in pauses if pause < 1) == pytest.approx(limits.HINT_GATHER_MAX_S, abs=0.002)


def test_who_waits_is_served_at_once() -> None:
    flow = Steps()

    async def scenario(lane: Lane) -> None:
        await trio.sleep(1)
        lane.wake_now()
        await trio.sleep(1)

    run(flow, scenario)
    assert at(flow) == [0, 1]


def test_an_urgent_run_does_not_swallow_a_fresh_hint() -> None:
    """The wake channel leaves out hints that follow one another closely: a hint younger than the gathering still gets its run."""
    flow = Steps()

    async def scenario(lane: Lane) -> None:
        await trio.sleep(1)
        lane.wake()
        await trio.sleep(0.002)
        lane.wake_now()
        await trio.sleep(1)

    run(flow, scenario)
    assert at(flow)[:2] == [0, 1.002] and len(flow.ran) == 3


def test_a_timer_of_the_flow_wakes_it() -> None:
    flow = Steps(due_s=7.0)
    run(flow, lambda lane: trio.sleep(15))
    assert at(flow) == [0, 7, 14]


def test_failures_are_retried_ever_more_rarely_and_reported_once() -> None:
    flow = Steps(*[OSError(errno.ENOSPC, "No space left on device", "/pfs/a") for _ in range(4)])
    told = run(flow, lambda lane: trio.sleep(60))
    first = limits.RETRY_FIRST_S
    assert at(flow) == pytest.approx([0, first, 3 * first, 7 * first, 15 * first], abs=0.01)
    (key, value), (key_then, nothing) = told
    assert key == key_then == "test" and nothing is None
    assert value is not None and value["path"] == "/pfs/a" and "ENOSPC" in value["what"] and "free space" in value["remedy"]


def test_backoff_is_bounded() -> None:
    flow = Steps(*[OSError(errno.EIO, "x")] * 100)
    run(flow, lambda lane: trio.sleep(600))
    pauses = [later - earlier for earlier, later in zip(flow.ran, flow.ran[1:], strict=False)]
    assert max(pauses) == pytest.approx(limits.RETRY_LAST_S, abs=0.1)


def test_hints_do_not_shorten_a_backoff_but_hurry_ends_it() -> None:
    flow = Steps(*[OSError(errno.EIO, "x")] * 8)

    async def scenario(lane: Lane) -> None:
        await trio.sleep(10)
        before = len(flow.ran)
        lane.wake()
        await trio.sleep(1)
        assert len(flow.ran) == before
        flow.script.clear()
        lane.retry_now()
        await trio.sleep(0.01)
        assert len(flow.ran) == before + 1

    run(flow, scenario)


def test_an_error_that_nobody_foresaw_does_not_end_the_lane(caplog: pytest.LogCaptureFixture) -> None:
    flow = Steps(ZeroDivisionError("oops"), TierUnavailable("the PFS is away", remedy="mount it"))
    told = run(flow, lambda lane: trio.sleep(60))
    assert len(flow.ran) == 3
    assert [value and value["what"] for _, value in told] == ["oops", "the PFS is away", None]
    assert "Traceback" in caplog.text and "(mount it)" in caplog.text


def test_a_step_that_hangs_holds_up_neither_the_others_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, working = Steps(), Steps()

    async def call(function: Callable[..., Any], *values: Any, **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        if getattr(function, "__self__", None) is first:
            await trio.sleep_forever()
        return function(*values)

    monkeypatch.setattr(lanes.trio.to_thread, "run_sync", call)
    first, second = Lane("first", hanging, lambda *_: None), Lane("second", working, lambda *_: None)

    async def main() -> None:
        with trio.move_on_after(10):
            async with trio.open_nursery() as nursery:
                every = Lanes([first, second])
                nursery.start_soon(every.run)
                await trio.sleep(1)
                every.retry_now()
                await trio.sleep(1)
                every.wake()
                await trio.sleep(1)
                nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert len(working.ran) == 3 and hanging.ran == []


@pytest.mark.parametrize("last", [False, TierUnavailable("gone")])
def test_a_lane_that_was_ended_runs_no_step_any_more(last: bool | Exception) -> None:
    """Not by a hint, not by its own timer, not after a failure; the others go on."""
    ended, other = Steps(last, due_s=5.0), Steps(due_s=5.0)

    async def main() -> None:
        every = Lanes([Lane("scan", ended, lambda *_: None), Lane("scan pfs", other, lambda *_: None)])
        with trio.move_on_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(every.run)
                await trio.sleep(1)
                every.end("scan")
                await trio.sleep(1)
                every.wake()
                every.retry_now()
                await trio.sleep_forever()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert len(other.ran) > 10 and all(when - ended.ran[0] <= 1 for when in ended.ran)


def test_a_step_that_hangs_gets_a_lane_in_its_place_until_it_goes_on() -> None:
    """A spare lane that failed stays until it can say that all is well. A step that hangs for long is reported."""
    flow = Steps(False, False, TierUnavailable("gone"), due_s=1.0)
    hanging = [0]
    flow.list_stalled = lambda: [*range(hanging[0])]  # type: ignore[attr-defined]
    silent: list[list[int]] = []
    told: Told = []

    def build(name: str, flow: Any) -> Lane:
        return Lane(name, flow, lambda *values: told.append(values))

    async def main() -> None:
        every = Lanes([])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(every.relieve, "spare", 2, flow, build, lambda _, inodes: silent.append(inodes))
            await trio.sleep(10)
            assert not flow.ran
            hanging[0] = 2
            await trio.sleep(2 * limits.PFS_STALL_S)
            assert not silent, "it may go on soon"
            for wanted in (2, 0):
                hanging[0] = wanted
                await trio.sleep(30)
                assert len(every._lanes) == wanted
            before = len(flow.ran)
            await trio.sleep(30)
            assert len(flow.ran) == before > 20
            hanging[0] = 1
            await trio.sleep(30)
            every.end("spare")
            await trio.sleep(30)
            assert not every._lanes
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert [value is None for _, value in told] == [False, True]
    assert silent == [[0, 1], [], [0], []]
