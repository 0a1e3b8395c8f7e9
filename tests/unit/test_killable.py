"""Waits that end when their caller is killed, and calls on the PFS that are left behind then."""

import os
import threading
from collections.abc import Awaitable, Callable

import pytest
import trio
from ckptfs_daemon.fuse import killable, session
from ckptfs_daemon.mount.open_files.mover_client import MoverClient
from ckptfs_daemon.mount.open_files.open_file import FetchWaiter, OpenFile
from ckptfs_daemon.mount.open_files.tier_calls import run_unless_cancelled
from ckptfs_daemon.mount.opening.tier_choice import SpaceWait
from opener import Opener

from ckptfs import procfs
from ckptfs.catalog import contents, copies, mover_requests
from ckptfs.model import Tier

THREAD = 567
LOOKS = 3
looks: list[int] = []
"""The threads that were looked at."""


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that this task serves a request of a thread, which may have been killed."""
    looks.clear()

    def is_killed(thread: int, killed: bool) -> bool:
        looks.append(thread)
        return killed

    def begin(*, killed: bool = True) -> None:
        monkeypatch.setattr(killable, "POLL_S", 0.0)
        monkeypatch.setattr(session, "request_pid", type("Number", (), {"value": THREAD}))
        monkeypatch.setattr(procfs, "is_killed", lambda thread: is_killed(thread, killed))
        killable.set_request()

    return begin


async def is_ended(wait: Callable[[], Awaitable[object]]) -> bool:
    """Whether the end of waits ends this one."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(killable.end_waits)
        try:
            await wait()
            return False
        except InterruptedError:
            return True
        finally:
            nursery.cancel_scope.cancel()


async def wait() -> None:
    with killable.killable_wait():
        while len(looks) < LOOKS:
            await trio.lowlevel.checkpoint()


async def test_a_wait_ends_if_its_caller_is_killed(serve: Callable[..., None]) -> None:
    serve(killed=False)
    assert not await is_ended(wait)
    serve(killed=True)
    looks.clear()
    assert await is_ended(wait)
    assert set(looks) == {THREAD}


def test_nothing_is_known_of_a_caller_in_a_foreign_pid_namespace() -> None:
    assert not procfs.is_killed(0)


async def test_a_call_on_the_pfs_is_left_behind(serve: Callable[..., None]) -> None:
    """What it returns later is given back."""
    serve()
    answers, discarded = threading.Event(), trio.Event()
    token = trio.lowlevel.current_trio_token()

    def act() -> str:
        answers.wait()
        return "descriptor"

    def discard(found: str) -> None:
        assert found == "descriptor"
        token.run_sync_soon(discarded.set)

    assert await is_ended(lambda: run_unless_cancelled(Tier.PFS, act, discard))
    assert not discarded.is_set()
    answers.set()
    await discarded.wait()


async def test_a_call_on_the_pfs_that_ends_keeps_its_result(serve: Callable[..., None]) -> None:
    serve(killed=False)
    discarded: list[int] = []
    assert await run_unless_cancelled(Tier.PFS, lambda: 7, discarded.append) == 7
    with pytest.raises(FileNotFoundError):
        await run_unless_cancelled(Tier.PFS, lambda: os.open("/nowhere/at/all", os.O_RDONLY), discarded.append)
    assert discarded == []


async def test_a_wait_for_space_ends(serve: Callable[..., None], opener: Opener) -> None:
    async def wait_for_space() -> None:
        space_wait = SpaceWait(opener.context)
        while await space_wait.wait(1):
            pass

    serve()
    assert await is_ended(wait_for_space)


async def test_a_killed_reader_is_no_failure_of_the_fetch(
    serve: Callable[..., None], opener: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is logged, and the request to the mover stays open."""
    db = opener.node.db
    with db.transaction():
        copies.delete_copy(db, opener.content, Tier.RAM)
    content = contents.get_content(db, opener.content)
    assert content is not None
    client = MoverClient(db, opener.context.wake_channel)
    waiter = FetchWaiter(db, opener.node.tiers, client, content)
    file = OpenFile(opener.inode, content.id, None, -1, fetch_waiter=waiter)
    serve()
    assert await is_ended(lambda: waiter.wait_range(file, 0, 1))
    assert caplog.records == []
    assert [one.inode for one in mover_requests.list_open(db, mover_requests.FETCH)] == [opener.inode]
