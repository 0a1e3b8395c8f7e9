"""P8: a node whose mover died is alive while the next one begins, since its mount keeps the lease; and not for ever."""

from typing import Any

import trio
import trio.testing
from ckptfs_daemon.mount.cluster_recovery import StandbyLease

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


def play(act: Any) -> None:
    """Run `act(store, standing_in, clock)` beside the task; time passes only when it says so."""

    async def main() -> None:
        store = Store()
        standing_in = StandbyLease(store.keep_alive)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(standing_in.run)
            await trio.testing.wait_all_tasks_blocked()
            await act(store, standing_in, clock)
            nursery.cancel_scope.cancel()

    clock = trio.testing.MockClock()
    trio.run(main, clock=clock)


async def passed(clock: trio.testing.MockClock, seconds: float) -> None:
    clock.jump(seconds)
    await trio.testing.wait_all_tasks_blocked()


def test_while_the_mover_keeps_the_lease_the_mount_does_not() -> None:
    async def act(store: Store, standing_in: StandbyLease, clock: trio.testing.MockClock) -> None:
        await passed(clock, 100.0)
        for _ in range(20):
            standing_in.record_renewal(7)
            await passed(clock, limits.NODE_LEASE_RENEW_S)
        assert store.kept == []

    play(act)


def test_when_it_is_silent_the_mount_does_until_it_speaks_again() -> None:
    async def act(store: Store, standing_in: StandbyLease, clock: trio.testing.MockClock) -> None:
        standing_in.record_renewal(7)
        await passed(clock, limits.NODE_SILENT_S)
        store.answers = False  # An answer that does not come is no reason to give up.
        await passed(clock, limits.NODE_LEASE_RENEW_S)
        store.answers = True
        await passed(clock, limits.NODE_LEASE_RENEW_S)
        standing_in.record_renewal(8)
        await passed(clock, limits.NODE_LEASE_RENEW_S)
        assert store.kept == [7, 7, 7]
        await passed(clock, limits.NODE_SILENT_S - limits.NODE_LEASE_RENEW_S)
        assert store.kept == [7, 7, 7, 8]

    play(act)


def test_a_node_without_a_mover_does_not_live_for_ever() -> None:
    async def act(store: Store, standing_in: StandbyLease, clock: trio.testing.MockClock) -> None:
        standing_in.record_renewal(7)
        await passed(clock, limits.STANDBY_LEASE_S)
        for _ in range(20):
            await passed(clock, limits.NODE_LEASE_RENEW_S)
        assert store.kept == []

    play(act)


def test_a_lease_that_is_gone_is_left_alone() -> None:
    async def act(store: Store, standing_in: StandbyLease, clock: trio.testing.MockClock) -> None:
        store.left_s = 0.0
        standing_in.record_renewal(7)
        await passed(clock, limits.NODE_SILENT_S)
        for _ in range(5):
            await passed(clock, limits.NODE_LEASE_RENEW_S)
        assert store.kept == [7]

    play(act)
