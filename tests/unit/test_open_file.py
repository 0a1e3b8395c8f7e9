"""The descriptor of an open file in the mount process while threads use it. P7, P10."""

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from ckptfs_daemon.mount.file_handlers import FileHandlers
from ckptfs_daemon.mount.open_file import OpenFile
from ckptfs_daemon.mount.open_file_table import OpenFileTable
from local_node import Node

from ckptfs.errors import TimedOut
from ckptfs.model import Tier

QUIET = cast(Any, SimpleNamespace(notify=lambda message: None))


def test_a_file_moves_on_only_when_nobody_writes_it(tmp_path: Path) -> None:
    """A write that a thread still has in hand is there after the move."""
    node = Node(tmp_path)
    content = node.make(b"file", b"." * 8, closed=False)
    ram = node.tiers[Tier.RAM]
    file = OpenFile(node.inode(content), content, ram, ram.open(content, os.O_RDWR), is_writable=True)
    stopped: list[Tier | None] = []
    open_files = SimpleNamespace(stop_fast_writes=lambda moving: stopped.append(moving.tier))
    context = SimpleNamespace(db=node.db, tiers=node.tiers, wake_channel=QUIET, open_files=open_files)
    handlers = FileHandlers(cast(Any, context), cast(Any, None))
    begun, go_on = threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        begun.set()
        assert go_on.wait(60)
        os.pwrite(fd, b"slow", 0)

    def full_once(fd: int) -> None:
        if file.tier is Tier.RAM:
            raise OSError(errno.ENOSPC, "full")
        os.pwrite(fd, b"late", 4)

    async def scenario() -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: handlers.with_room(file, slow, long=True))
                await trio.to_thread.run_sync(begun.wait)
                nursery.start_soon(handlers.with_room, file, full_once)
                await trio.testing.wait_all_tasks_blocked()
                assert file.tier is Tier.RAM, "it waits for the thread"
                assert stopped == [Tier.RAM], "the shim writes no more to what is left behind"
                go_on.set()

    trio.run(scenario)
    file.close()
    assert file.tier is Tier.NVME and node.data(content, Tier.NVME) == b"slowlate"


def test_another_descriptor_takes_the_number_of_the_former(tmp_path: Path) -> None:
    """A thread that reads by the number meanwhile never meets another file."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    file = OpenFile(1, None, None, os.open(tmp_path / "one", os.O_RDONLY))
    number = file.fd
    file.replace_fd(os.open(tmp_path / "two", os.O_RDWR))
    assert file.fd == number and os.pread(number, 9, 0) == b"two" and not os.get_inheritable(number)
    file.close()
    file.close()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(number)


def test_open_files_on_a_pfs_that_hangs_are_waited_for_once(tmp_path: Path) -> None:
    """P8: a mount process with many of them starts in bounded time."""
    node = Node(tmp_path)
    files = OpenFileTable(node.db, node.tiers, None, QUIET)
    hangs = threading.Event()

    async def scenario() -> None:
        files._pfs_until_s = trio.current_time() + 0.1
        for _ in range(3):
            with pytest.raises(TimedOut):
                await files._run_until_deadline(Tier.PFS, lambda: hangs.wait(60))

    try:
        trio.run(scenario)
    finally:
        hangs.set()
