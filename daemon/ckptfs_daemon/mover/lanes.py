"""Owns the lanes: each runs one flow's steps, one after the other in a worker thread, and sleeps while there is nothing to do.

A hint wakes a lane after a moment in which more of them may gather; the moment grows while they keep coming, so that one
transaction takes more under load. An urgent hint (somebody waits) wakes it at once. A step that fails is reported, and tried again with
backoff; `hurry` forgets backoffs. Nothing but hints comes in from outside: what there is to do stands in the catalog.
If we die here: every step leaves the catalog whole; the next process begins each lane with a step.
"""

import logging
import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import trio

from ckptfs import limits
from ckptfs.errors import CkptfsError
from ckptfs.tiers import health

log = logging.getLogger(__name__)

Report = Callable[[str, Mapping[str, Any] | None], None]


class Flow(Protocol):
    """What a lane runs. Both methods are called in a worker thread, never at the same time."""

    def step(self) -> bool:
        """Do one bounded piece of work. True: there may be more at once."""

    def next_due_s(self) -> float | None:
        """Seconds until it wants to run without a hint; None: only after one."""


@runtime_checkable
class Retryable(Protocol):
    """A flow that puts things off by itself."""

    def retry_now(self) -> None:
        """Put nothing off any more. Called in the trio thread, whatever the flow is doing in its own."""


class Lane:
    """One flow and when it runs. All methods belong to the trio thread."""

    def __init__(self, name: str, flow: Flow, report: Report) -> None:
        """`report(key, value)` is called in the worker thread, to tell people what fails."""
        self.name = name
        self._flow = flow
        self._report = report
        self._limiter = trio.CapacityLimiter(1)
        self._wake_event = trio.Event()
        self._wake_requested_at_s: float | None = None
        self._is_urgent = False
        self._gather_s = limits.HINT_GATHER_S
        self._retry_s = 0.0
        self._trouble = ""

    # --- waking ------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to do."""
        if self._wake_requested_at_s is None:
            self._wake_requested_at_s = trio.current_time()
            self._wake_event.set()

    def wake_now(self) -> None:
        """Somebody waits: run now, also when the last step failed a moment ago."""
        self._is_urgent = True
        self._gather_s = limits.HINT_GATHER_S
        self._wake_event.set()

    def retry_now(self) -> None:
        """Run now, and forget every backoff, the flow's own too."""
        self._retry_s = 0.0
        if isinstance(self._flow, Retryable):
            self._flow.retry_now()
        self.wake_now()

    # --- running -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled. A step that hangs is left behind in its thread then."""
        while True:
            due_s = await self._run_steps()
            await self._wait_for_work(due_s)

    async def _run_steps(self) -> float | None:
        """Steps until there is nothing to do or one fails; when to run again without a hint."""
        while True:
            self._clear_wake_ups()
            try:
                more, due_s = await trio.to_thread.run_sync(self._run_step, abandon_on_cancel=True, limiter=self._limiter)
            except Exception as failure:
                return await self._handle_failure(failure)
            if not more:
                return due_s

    def _run_step(self) -> tuple[bool, float | None]:
        more = self._flow.step()
        if self._trouble:
            self._report(f"trouble:{self.name}", None)
            log.info("%s works again", self.name)
            self._trouble = ""
        self._retry_s = 0.0
        return more, None if more else self._flow.next_due_s()

    def _clear_wake_ups(self) -> None:
        """The step that begins covers what was hinted until now. A fresh hint stays: the bell may have left out a later one for it."""
        self._is_urgent = False
        self._wake_event = trio.Event()
        if self._wake_requested_at_s is not None and trio.current_time() - self._wake_requested_at_s >= limits.HINT_GATHER_S:
            self._wake_requested_at_s = None

    async def _wait_for_work(self, due_s: float | None) -> None:
        """Wait for a hint, or until `due_s` is over."""
        if self._retry_s:
            await self._sleep_unless_urgent(due_s or 0.0)
            return
        began_s = trio.current_time()
        if self._wake_requested_at_s is None and not self._is_urgent:
            with trio.move_on_after(_seconds(due_s)):
                await self._wake_event.wait()
        if self._wake_requested_at_s is not None:
            busy = trio.current_time() - began_s < limits.HINT_GATHER_MAX_S
            self._gather_s = min(2 * self._gather_s, limits.HINT_GATHER_MAX_S) if busy else limits.HINT_GATHER_S
            await self._sleep_unless_urgent(self._wake_requested_at_s + self._gather_s - trio.current_time())

    async def _sleep_unless_urgent(self, wait_s: float) -> None:
        """Wait out `wait_s`; hints do not end it, urgent ones do."""
        deadline_s = trio.current_time() + wait_s
        while not self._is_urgent and trio.current_time() < deadline_s:
            self._wake_event = trio.Event()
            with trio.move_on_at(deadline_s):
                await self._wake_event.wait()

    # --- failing -----------------------------------------------------------------------------------------------------

    async def _handle_failure(self, failure: Exception) -> float:
        """Report what failed; how long to wait before it is tried again."""
        self._retry_s = min(max(2 * self._retry_s, limits.RETRY_FIRST_S), limits.RETRY_LAST_S)
        value = describe_failure(failure)
        what = f"{value['path']}: {value['what']}" if value["path"] else value["what"]
        if not isinstance(failure, OSError | CkptfsError):
            log.error("%s failed in a way that nobody foresaw", self.name, exc_info=failure)
        elif what != self._trouble:
            log.warning("%s: %s%s; it is tried again", self.name, what, f" ({value['remedy']})" if value["remedy"] else "")
        else:
            log.debug("%s: still %s; again in %.1f s", self.name, what, self._retry_s)
        if what != self._trouble:
            self._trouble = what
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._report_trouble, value)
        return self._retry_s * random.uniform(0.9, 1.1)

    def _report_trouble(self, value: Mapping[str, Any]) -> None:
        try:
            self._report(f"trouble:{self.name}", value)
        except Exception:
            log.exception("the trouble of %s cannot be recorded in the catalog", self.name)


class Lanes:
    """All lanes of the mover; `hint` and `hurry` wake every one of them."""

    def __init__(self, lanes: list[Lane]) -> None:
        self._lanes = lanes

    def wake(self, name: str = "") -> None:
        """There may be something to do, for all lanes or only those whose names begin with `name`."""
        for lane in self._lanes:
            if lane.name.startswith(name):
                lane.wake()

    def wake_now(self, kind: str = "") -> None:
        """Somebody waits for a want of this kind. Lanes named after a kind answer it alone; any other needs all of them."""
        for lane in [lane for lane in self._lanes if kind and lane.name.startswith(kind)] or self._lanes:
            lane.wake_now()

    def retry_now(self) -> None:
        """Work now: forget every backoff and every gathering of hints."""
        for lane in self._lanes:
            lane.retry_now()

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            for lane in self._lanes:
                nursery.start_soon(lane.run, name=f"lane {lane.name}")


def describe_failure(failure: Exception) -> dict[str, Any]:
    """What, where and what to do about it, in words."""
    path = getattr(failure, "path", None) or getattr(failure, "filename", None) or ""
    if isinstance(path, bytes):
        path = path.decode(errors="replace")
    remedy = getattr(failure, "remedy", "")
    if isinstance(failure, OSError):
        return {"what": health.describe(failure), "path": str(path), "remedy": remedy or health.remedy(failure.errno)}
    return {"what": str(failure) or type(failure).__name__, "path": str(path), "remedy": remedy}


def _seconds(due_s: float | None) -> float:
    """A wait as trio takes it: None means for ever."""
    return float("inf") if due_s is None else max(0.0, due_s)
