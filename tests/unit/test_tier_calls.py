"""Calls of the mount process on a tier of which a part hangs."""

import threading

import pytest
import trio
from ckptfs_daemon.mount.open_files import tier_calls
from ckptfs_daemon.mount.open_files.tier_calls import SlowCalls, TierThreads, run_in_thread

from ckptfs import limits
from ckptfs.model import Tier

PATIENCE_S = 30.0


@pytest.fixture
def goes_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have four threads for the PFS; calls that wait for the event count as hanging at once."""
    monkeypatch.setattr(limits, "TIER_THREADS_MAX", 4)
    monkeypatch.setattr(limits, "PFS_STALLED_MAX", 2)
    monkeypatch.setattr(limits, "PFS_STALL_S", 0.01)
    monkeypatch.setattr(tier_calls, "_THREADS", {Tier.NVME: TierThreads(), Tier.PFS: TierThreads()})
    return threading.Event()


@pytest.mark.parametrize("tier", [Tier.NVME, Tier.PFS])
def test_calls_that_hang_hold_up_no_other_call(goes_on: threading.Event, tier: Tier) -> None:
    """P1: as many calls hang as there are threads, and another part of the tier answers."""
    begun = threading.Semaphore(0)

    async def main() -> None:
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(SlowCalls().run)
                async with trio.open_nursery() as hanging:
                    for _ in range(limits.TIER_THREADS_MAX):
                        hanging.start_soon(run_in_thread, tier, lambda: begun.release() or goes_on.wait())
                    for _ in range(limits.TIER_THREADS_MAX):
                        await trio.to_thread.run_sync(begun.acquire)
                    assert await run_in_thread(tier, lambda: "answer") == "answer"
                    goes_on.set()
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_the_number_of_calls_that_hang_is_bounded(goes_on: threading.Event) -> None:
    threads, begun = TierThreads(), threading.Semaphore(0)
    most = limits.TIER_THREADS_MAX + limits.PFS_STALLED_MAX

    def hang() -> None:
        begun.release()
        goes_on.wait()

    async def main() -> None:
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for _ in range(most + 1):
                    nursery.start_soon(threads.run, hang)
                for _ in range(most):
                    while not begun.acquire(blocking=False):
                        threads.relieve()
                        await trio.lowlevel.checkpoint()
                for _ in range(100):
                    threads.relieve()
                    await trio.lowlevel.checkpoint()
                assert not begun.acquire(blocking=False)
                goes_on.set()

    trio.run(main)
