"""The wake-ups between mount and mover: hints that may be lost, never a wait."""

import os
import socket
import sys

import pytest
import trio
from ckptfs_daemon import ipc
from ckptfs_daemon.ipc import MountNotify, Successor, WakeChannel

from ckptfs.errors import InvalidArgument, TimedOut


@pytest.fixture
def ends() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def heard(end: socket.socket, count: int) -> list[bytes]:
    async def main() -> list[bytes]:
        found: list[bytes] = []
        with trio.move_on_after(30):
            async for message in WakeChannel(end).receive_messages():
                found.append(message)
                if len(found) == count:
                    break
        return found

    return trio.run(main)


def test_what_is_rung_is_heard(ends: tuple[socket.socket, socket.socket]) -> None:
    notify = MountNotify(WakeChannel(ends[0]), lambda _: None)
    notify.invalidate_inode(2**40 + 1)
    notify.invalidate_entry(7, b"a name \xff")
    notify.notify_replies()
    messages = heard(ends[1], 3)
    assert [ipc.parse_message(message) for message in messages] == [
        (ipc.INVALIDATE_INODE, 2**40 + 1, b""), (ipc.INVALIDATE_ENTRY, 7, b"a name \xff"), (ipc.REPLIES, 0, b""),
    ]  # fmt: skip


def test_a_name_of_255_bytes_fits(ends: tuple[socket.socket, socket.socket]) -> None:
    MountNotify(WakeChannel(ends[0]), lambda _: None).invalidate_entry(1, b"n" * 255)
    assert ipc.parse_message(heard(ends[1], 1)[0])[2] == b"n" * 255


def test_nobody_listens_and_nobody_waits(ends: tuple[socket.socket, socket.socket]) -> None:
    channel = WakeChannel(ends[0])
    for _ in range(100_000):
        channel.notify(ipc.URGENT_REQUEST)
    ends[1].close()
    channel.notify(ipc.URGENT_REQUEST)


def test_hints_that_follow_closely_are_left_out_and_urgent_ones_never(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(ipc.time, "monotonic", lambda: now_s)
    channel = WakeChannel(ends[0])
    for _ in range(5):
        channel.notify(ipc.WORK)
        channel.notify(ipc.URGENT_REQUEST)
    now_s += ipc.WORK_INTERVAL_MIN_S
    channel.notify(ipc.WORK)
    assert heard(ends[1], 7) == [ipc.WORK, *[ipc.URGENT_REQUEST] * 5, ipc.WORK]


def test_a_child_that_is_ready_after_the_end_of_its_supervisor_exits_in_one_line(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P8: whoever waits for its link may not have run yet."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    ends[1].close()
    with pytest.raises(SystemExit):
        ipc.announce_ready(ends[0])
    assert caplog.messages == ["the supervisor has ended; exiting"]


def test_an_upgrade_is_asked_for_once_at_a_time(ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    successor = Successor("/bin/python", ("/one", "/two"))
    requests = ipc.UpgradeRequests(ends[1])
    requests.refuse("it is broken")
    with pytest.raises(ipc.UpgradeRefused, match="it is broken"):
        requests.ask(successor)
    assert ipc.parse_successor(ends[0].recv(1024).removeprefix(ipc.UPGRADE)) == successor
    monkeypatch.setattr(ipc.limits, "UPGRADE_WAIT_S", 0.01)
    with pytest.raises(TimedOut, match="the supervisor does not answer"):
        requests.ask(successor)
    with pytest.raises(InvalidArgument, match="more than 1024 bytes"):
        requests.ask(Successor("/" * 1024, ()))


def test_a_thread_that_outlives_the_loop_wakes_nothing() -> None:
    """A peer may take a file after the mover's loop has ended, just before the process does."""

    async def give_token() -> trio.lowlevel.TrioToken:
        token, called = trio.lowlevel.current_trio_token(), trio.Event()
        await trio.to_thread.run_sync(ipc.call_soon, token, called.set)
        await called.wait()
        return token

    ipc.call_soon(trio.run(give_token), pytest.fail, "the loop has ended")
