"""P1, P8: wants: shared, bounded, surviving either side; and how the mount waits for them."""

import errno
import time
from collections.abc import Callable

import pytest
import trio
from ckptfs_daemon.mount.open_files.mover_client import MoverClient
from trio.testing import MockClock, wait_all_tasks_blocked

from ckptfs import limits
from ckptfs.catalog import mover_requests
from ckptfs.catalog.database import Database
from ckptfs.errors import TimedOut


class RecordedChannel:
    """A wake channel that records its messages, and lets a test answer."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def notify(self, message: bytes) -> None:
        self.messages.append(message)


def test_who_asks_the_same_shares_a_row(db: Database) -> None:
    first = mover_requests.insert_request(db, mover_requests.FETCH, 7)
    assert mover_requests.insert_request(db, mover_requests.FETCH, 7) == first
    others = [(mover_requests.FETCH, 8), (mover_requests.SCAN, 7), (mover_requests.FETCH, 7, mover_requests.NEEDS_COPY)]
    assert len({first, *(mover_requests.insert_request(db, *other) for other in others)}) == 4
    listed = [request.id for request in mover_requests.list_open(db, mover_requests.FETCH)]
    assert listed == sorted(listed)
    mover_requests.mark_done(db, first, mover_requests.FETCHED)
    assert mover_requests.insert_request(db, mover_requests.FETCH, 7) != first, "an answer belongs to those who asked before it"


def test_an_answer_is_given_once(db: Database) -> None:
    request = mover_requests.insert_request(db, mover_requests.FETCH, 7)
    mover_requests.mark_failed(db, request, errno.EIO)
    mover_requests.mark_done(db, request, mover_requests.FETCHED)
    row = mover_requests.get(db, request)
    assert row is not None and (row.state, row.error, row.result) == (mover_requests.FAILED, errno.EIO, "")


def test_what_nobody_waits_for_any_more_is_swept(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long, answered = (
        mover_requests.insert_request(db, mover_requests.SCAN, inode, wait_s=wait_s)
        for inode, wait_s in ((1, 1.0), (2, 1000.0), (3, 1000.0))
    )
    mover_requests.mark_done(db, answered)
    assert mover_requests.delete_stale(db) == 0
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 2 * 10**9)
    assert mover_requests.delete_stale(db) == 1 and mover_requests.get(db, short) is None
    mover_requests.record_progress(db, long, wait_s=5000.0)
    monkeypatch.setattr(time, "time_ns", lambda: now + 2000 * 10**9)
    assert mover_requests.delete_stale(db) == 1 and mover_requests.get(db, answered) is None and mover_requests.get(db, long) is not None


def asked(db: Database, answer: Callable[[MoverClient, int], None] | None) -> tuple[str, RecordedChannel]:
    """The answer of one request that `answer` gives once somebody waits for it, and the messages."""
    channel = RecordedChannel()
    asking = MoverClient(db, channel)
    results: list[str] = []

    async def main() -> None:
        async def ask() -> None:
            results.append(await asking.request(mover_requests.FETCH, 7, timeout_s=20.0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            if answer is not None:
                answer(asking, mover_requests.list_open(db, mover_requests.FETCH)[0].id)

    trio.run(main, clock=MockClock(autojump_threshold=0.01))
    return results[0], channel


def test_the_answer_wakes_who_waits(db: Database) -> None:
    def answer(asking: MoverClient, request: int) -> None:
        mover_requests.mark_done(db, request, mover_requests.DIRECT)
        asking.wake_waiters()

    result, channel = asked(db, answer)
    assert result == mover_requests.DIRECT and channel.messages[0] == b"!fetch"


def test_a_lost_answer_is_found_by_looking(db: Database) -> None:
    result, channel = asked(db, lambda asking, request: mover_requests.mark_done(db, request, mover_requests.FETCHED))
    assert result == mover_requests.FETCHED and len(channel.messages) == 2, "notified again: the mover may be a new one"


def test_a_failure_is_raised(db: Database) -> None:
    with pytest.raises(ExceptionGroup) as failures:
        asked(db, lambda asking, request: mover_requests.mark_failed(db, request, errno.ESTALE))
    assert failures.group_contains(OSError, match=r"Stale")


def test_a_row_that_was_swept_is_asked_again(db: Database) -> None:
    def answer(asking: MoverClient, request: int) -> None:
        db.run("DELETE FROM mover_request")
        db.run(
            "CREATE TRIGGER answer_at_once AFTER INSERT ON mover_request BEGIN"
            " UPDATE mover_request SET state = 1, result = 'here' WHERE id = NEW.id; END"
        )
        asking.wake_waiters()

    assert asked(db, answer)[0] == mover_requests.FETCHED


@pytest.mark.parametrize("jump_s", [0, 7200, -7200])
def test_no_answer_ends_in_a_timeout_and_progress_puts_it_off(db: Database, monkeypatch: pytest.MonkeyPatch, jump_s: int) -> None:
    """A jump of the clock neither ends a wait nor prolongs it, and the mover still sees that a caller waits."""
    clock = [time.time_ns()]
    rings = []

    class Clock(RecordedChannel):
        def notify(self, message: bytes) -> None:
            rings.append(message)
            clock[0] += int(limits.REQUEST_POLL_S * 1e9)
            if len(rings) == 3:
                clock[0] += jump_s * 10**9
            if len(rings) == 6:
                mover_requests.record_progress(db, mover_requests.list_open(db, mover_requests.FETCH)[0].id)

    monkeypatch.setattr(time, "time_ns", lambda: clock[0])
    with pytest.raises(TimedOut):
        trio.run(lambda: MoverClient(db, Clock()).request(mover_requests.FETCH, 7, timeout_s=10.0), clock=MockClock(autojump_threshold=0))
    assert 14 <= len(rings) <= 18
