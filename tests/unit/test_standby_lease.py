"""P8: a node whose mover died is alive while the next one begins, since its mount keeps the lease; and not for ever."""

from collections.abc import Callable
from typing import Any

import trio
from ckptfs_daemon.mount.cluster.cluster_recovery import StandbyLease
from trio.testing import MockClock, wait_all_tasks_blocked

from ckptfs import limits
from ckptfs.errors import StoreUnreachable


class Store:
    """Keeps every lease, or does what it is told to."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.left_s = 10.0
        self.answers = True

    async def keep_alive(self, lease: int) -> float:
        self.kept.append(lease)
        await trio.lowlevel.checkpoint()
        if not self.answers:
            raise StoreUnreachable("the store is away")
        return self.left_s


def play(test: Any) -> Callable[[], None]:
    """Turn `test(store, standing_in, clock)` into one that runs beside the task. Only the test moves the clock."""

    async def main(clock: MockClock) -> None:
        store = Store()
        standing_in = StandbyLease(store.keep_alive)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(standing_in.run)
            await wait_all_tasks_blocked()
            await test(store, standing_in, clock)
            nursery.cancel_scope.cancel()

    def run() -> None:
        clock = MockClock()
        trio.run(main, clock, clock=clock)

    run.__doc__ = test.__doc__
    return run


async def passed(clock: MockClock, seconds: float) -> None:
    clock.jump(seconds)
    await wait_all_tasks_blocked()


@play
async def test_while_the_mover_keeps_the_lease_the_mount_does_not(store: Store, standing_in: StandbyLease, clock: MockClock) -> None:
    await passed(clock, 100.0)
    for _ in range(20):
        standing_in.record_renewal(7)
        await passed(clock, limits.NODE_LEASE_RENEW_S)
    assert store.kept == []


@play
async def test_when_it_is_silent_the_mount_does_until_it_speaks_again(store: Store, standing_in: StandbyLease, clock: MockClock) -> None:
    standing_in.record_renewal(7)
    await passed(clock, limits.STANDBY_AFTER_S)
    store.answers = False  # An answer that does not come is no reason to give up.
    await passed(clock, limits.NODE_LEASE_RENEW_S)
    store.answers = True
    await passed(clock, limits.NODE_LEASE_RENEW_S)
    standing_in.record_renewal(8)
    await passed(clock, limits.NODE_LEASE_RENEW_S)
    assert store.kept == [7, 7, 7]
    await passed(clock, limits.STANDBY_AFTER_S - limits.NODE_LEASE_RENEW_S)
    assert store.kept == [7, 7, 7, 8]


@play
async def test_a_node_without_a_mover_does_not_live_for_ever(store: Store, standing_in: StandbyLease, clock: MockClock) -> None:
    standing_in.record_renewal(7)
    await passed(clock, limits.STANDBY_LEASE_S)
    for _ in range(20):
        await passed(clock, limits.NODE_LEASE_RENEW_S)
    assert store.kept == []


@play
async def test_a_lease_that_is_gone_is_left_alone(store: Store, standing_in: StandbyLease, clock: MockClock) -> None:
    store.left_s = 0.0
    standing_in.record_renewal(7)
    await passed(clock, limits.STANDBY_AFTER_S)
    for _ in range(5):
        await passed(clock, limits.NODE_LEASE_RENEW_S)
    assert store.kept == [7]
