"""Rounds of commits: one of the waiting tasks commits one batch at a time."""

import trio
from ckptfs_daemon.mount.cluster.shared_namespace import CommitRounds
from trio.testing import wait_all_tasks_blocked


async def test_one_round_at_a_time() -> None:
    """None before the first `end`; who comes meanwhile waits and does nothing; `rest` comes after it, and `wake` does not end it."""
    events: list[str] = []
    rounds, done = CommitRounds(), trio.Event()

    async def act() -> None:
        events.append("begins")
        await done.wait()
        events.append("ends")

    async def come(name: str) -> None:
        await rounds.run_or_wait(act)
        events.append(name)

    async def rest() -> None:
        await rounds.wait_idle()
        events.append("rest")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(come, "early")
        await wait_all_tasks_blocked()
        assert events == []
        rounds.end_round()
        await wait_all_tasks_blocked()
        nursery.start_soon(come, "first")
        await wait_all_tasks_blocked()
        nursery.start_soon(come, "second")
        nursery.start_soon(rest)
        await wait_all_tasks_blocked()
        assert events == ["early", "begins"]
        rounds.wake_waiters()
        await wait_all_tasks_blocked()
        assert events == ["early", "begins", "second"]
        done.set()
    assert events[3:4] == ["ends"] and sorted(events[4:]) == ["first", "rest"]


async def test_a_round_that_fails_ends() -> None:
    rounds = CommitRounds()
    rounds.end_round()

    async def fails() -> None:
        raise ValueError

    for _ in range(2):
        try:
            await rounds.run_or_wait(fails)
        except ValueError:
            continue
        raise AssertionError("it did nothing")
