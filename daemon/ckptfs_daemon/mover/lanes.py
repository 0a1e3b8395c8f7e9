"""Lanes: each runs the steps of one flow in turn in a worker thread, and sleeps while there are none.

A hint wakes a lane after a short delay in which more hints may come. The delay grows while they keep coming, so that one transaction takes
more under load. An urgent hint (an application waits) wakes the lane at once. A step that fails is reported and retried with backoff;
`retry_now` resets backoffs. Hints carry no data: the catalog says what there is to do.

Crash safety: every step leaves the catalog consistent, and each lane of the next process begins with a step.
"""

import logging
import math
import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import trio

from ckptfs import limits
from ckptfs.errors import CkptfsError
from ckptfs.tiers import health

log = logging.getLogger(__name__)

SILENT_LOOKS = 4
"""A step that hangs at so many looks, PFS_STALL_S apart, is a trouble."""

Report = Callable[[str, Mapping[str, Any] | None], None]


class Flow(Protocol):
    """What a lane runs.

    Its methods are called in a worker thread. A flow that several lanes share (`Fetch`) locks its own state.
    """

    def step(self) -> bool:
        """Do one bounded piece of work. Returns True if there may be more at once."""

    def next_due_s(self) -> float | None:
        """Return the seconds until the next step without a hint. Returns None if only a hint starts it."""


@runtime_checkable
class Retryable(Protocol):
    """A flow with backoffs of its own."""

    def retry_now(self) -> None:
        """Reset all backoffs. Called in the trio thread, possibly during a step."""


class Relievable(Flow, Protocol):
    """A flow that several lanes share, and whose steps may hang."""

    def list_stalled(self) -> list[int]:
        """Return the inodes whose steps hang at the PFS: for each there must be a lane more from now on."""


class Lane:
    """One flow and its schedule. All methods belong to the trio thread."""

    def __init__(self, name: str, flow: Flow, report: Report) -> None:
        """`report(key, value)` publishes a failure in the catalog. It is called in a worker thread."""
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
        self._is_ended = False

    # --- waking ------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        if self._wake_requested_at_s is None:
            self._wake_requested_at_s = trio.current_time()
            self._wake_event.set()

    def wake_now(self) -> None:
        """Run now, even if the last step has just failed: an application waits."""
        self._is_urgent = True
        self._gather_s = limits.HINT_GATHER_S
        self._wake_event.set()

    def retry_now(self) -> None:
        """Run now, and reset all backoffs, those of the flow included."""
        self._retry_s = 0.0
        if isinstance(self._flow, Retryable):
            self._flow.retry_now()
        self.wake_now()

    @property
    def is_in_trouble(self) -> bool:
        """Return True if the last step failed, which only the next one can take back."""
        return bool(self._trouble)

    def end(self) -> None:
        """Run no step any more after the present one."""
        self._is_ended = True
        self.wake_now()

    # --- running -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while not self._is_ended:
            due_s = await self._run_steps()
            await self._wait_for_work(due_s)

    async def _run_steps(self) -> float | None:
        """Run steps until none is left or one fails. Returns the seconds until the next step without a hint."""
        while not self._is_ended:
            self._clear_wake_ups()
            try:
                more, due_s = await trio.to_thread.run_sync(self._run_step, abandon_on_cancel=True, limiter=self._limiter)
            except Exception as failure:
                return await self._handle_failure(failure)
            if not more:
                return due_s
        return None

    def _run_step(self) -> tuple[bool, float | None]:
        more = self._flow.step()
        if self._trouble:
            self._report(self.name, None)
            log.info("%s: works again", self.name)
            self._trouble = ""
        self._retry_s = 0.0
        return more, None if more else self._flow.next_due_s()

    def _clear_wake_ups(self) -> None:
        """Clear the hints that the next step covers.

        A fresh hint stays, because the wake channel may have skipped a later one in its favour.
        """
        self._is_urgent = False
        self._wake_event = trio.Event()
        if self._wake_requested_at_s is not None and trio.current_time() - self._wake_requested_at_s >= limits.HINT_GATHER_S:
            self._wake_requested_at_s = None

    async def _wait_for_work(self, due_s: float | None) -> None:
        if self._retry_s:
            await self._sleep_unless_urgent(due_s or 0.0)
            return
        began_s = trio.current_time()
        if self._wake_requested_at_s is None and not self._is_urgent:
            with trio.move_on_after(math.inf if due_s is None else max(0.0, due_s)):
                await self._wake_event.wait()
        if self._wake_requested_at_s is not None:
            busy = trio.current_time() - began_s < limits.HINT_GATHER_MAX_S
            self._gather_s = min(2 * self._gather_s, limits.HINT_GATHER_MAX_S) if busy else limits.HINT_GATHER_S
            await self._sleep_unless_urgent(self._wake_requested_at_s + self._gather_s - trio.current_time())

    async def _sleep_unless_urgent(self, wait_s: float) -> None:
        """Sleep for `wait_s`. Only an urgent hint ends the sleep early."""
        deadline_s = trio.current_time() + wait_s
        while not self._is_urgent and trio.current_time() < deadline_s:
            self._wake_event = trio.Event()
            with trio.move_on_at(deadline_s):
                await self._wake_event.wait()

    # --- failing -----------------------------------------------------------------------------------------------------

    async def _handle_failure(self, failure: Exception) -> float:
        """Report a failed step. Returns the delay before the retry."""
        self._retry_s = min(max(2 * self._retry_s, limits.RETRY_FIRST_S), limits.RETRY_LAST_S)
        value = describe_failure(failure)
        what = f"{value['path']}: {value['what']}" if value["path"] else value["what"]
        if not isinstance(failure, OSError | CkptfsError):
            log.error("%s: failed unexpectedly; retrying", self.name, exc_info=failure)
        elif what != self._trouble:
            log.warning("%s: %s%s; retrying", self.name, what, f" ({value['remedy']})" if value["remedy"] else "")
        else:
            log.debug("%s: still %s; retrying in %.1f s", self.name, what, self._retry_s)
        if what != self._trouble:
            self._trouble = what
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._report_trouble, value)
        return self._retry_s * random.uniform(0.5, 1.0)

    def _report_trouble(self, value: Mapping[str, Any]) -> None:
        try:
            self._report(self.name, value)
        except CkptfsError as failure:
            log.warning("%s: its failure cannot be recorded: %s", self.name, failure)
        except Exception:
            log.exception("%s: its failure cannot be recorded in the catalog", self.name)


class Lanes:
    def __init__(self, lanes: list[Lane]) -> None:
        self._lanes = lanes
        self._ended: set[str] = set()

    def wake(self, name: str = "") -> None:
        for lane in self._lanes:
            if lane.name.startswith(name):
                lane.wake()

    def wake_now(self, kind: str = "") -> None:
        """Wake the lane that is named after this kind of request, otherwise all lanes."""
        for lane in [lane for lane in self._lanes if kind and lane.name.startswith(kind)] or self._lanes:
            lane.wake_now()

    def retry_now(self) -> None:
        """Reset all backoffs and run every lane now."""
        for lane in self._lanes:
            lane.retry_now()

    def end(self, *names: str) -> None:
        """End these lanes, and have no spare ones any more."""
        self._ended.update(names)
        for lane in self._lanes:
            if lane.name in names:
                lane.end()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for lane in self._lanes:
                nursery.start_soon(lane.run, name=f"lane {lane.name}")

    async def relieve(
        self,
        name: str,
        first: int,
        flow: Relievable,
        build_lane: Callable[[str, Relievable], Lane],
        report_silence: Callable[[str, list[int]], None],
    ) -> None:
        """Run a lane more for each step of a flow that hangs, and end it when the step goes on.

        `name`: of the lanes of the flow. The spare ones have numbers as well, from `first` on. `report_silence` gets the name and the
        inodes whose steps hang for long, when they change. It is called in a worker thread.
        """
        spares: list[Lane] = []
        looks: dict[int, int] = {}
        reported: list[int] = []
        async with trio.open_nursery() as nursery:
            while True:
                await trio.sleep(limits.PFS_STALL_S)
                is_ended = name in self._ended
                stalled = [] if is_ended else flow.list_stalled()
                looks = {inode: looks.get(inode, 0) + 1 for inode in stalled}
                if (silent := [inode for inode in looks if looks[inode] >= SILENT_LOOKS]) != reported:
                    await trio.to_thread.run_sync(report_silence, name, silent)
                    reported = silent
                wanted = len(stalled)
                while len(spares) > wanted and (is_ended or not spares[-1].is_in_trouble):
                    self._lanes.remove(spares[-1])
                    spares.pop().end()
                while len(spares) < wanted:
                    spares.append(build_lane(f"{name} {first + len(spares)}", flow))
                    self._lanes.append(spares[-1])
                    nursery.start_soon(spares[-1].run, name=f"lane {spares[-1].name}")


def describe_failure(failure: Exception) -> dict[str, Any]:
    """Return what failed, where, and the remedy, as text; and that the tier is full, if so."""
    path = getattr(failure, "path", None) or getattr(failure, "filename", None) or ""
    if isinstance(path, bytes):
        path = path.decode(errors="replace")
    remedy = getattr(failure, "remedy", "")
    value: dict[str, Any] = {"what": str(failure) or type(failure).__name__, "path": str(path), "remedy": remedy}
    if isinstance(failure, OSError):
        value |= {"what": health.describe(failure), "remedy": remedy or health.remedy(failure.errno)}
    return value | ({"is_full": True} if getattr(failure, "errno", 0) in health.FULL_ERRNOS else {})
