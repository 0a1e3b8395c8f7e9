"""The descriptor of an open file in the mount process while threads use it. P7, P10."""

import errno
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import trio
import trio.testing
from ckptfs_daemon.mount.handlers.file_handlers import FileHandlers
from ckptfs_daemon.mount.open_files.handle_ways import HandleWay, Way
from ckptfs_daemon.mount.open_files.open_file import OpenFile
from ckptfs_daemon.mount.open_files.open_file_table import OpenFileTable
from local_node import Node

from ckptfs import limits
from ckptfs.catalog import contents, namespace
from ckptfs.catalog.database import Database
from ckptfs.coherence import key_state
from ckptfs.coherence.key_state import CachedValue
from ckptfs.coherence.keys import INODE, SharedKey
from ckptfs.model import ROOT, ContentState, Tier
from ckptfs.tiers.storage import TierStorage

QUIET = cast(Any, SimpleNamespace(notify=lambda message: None))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_a_file_moves_on_only_when_nobody_writes_it(tmp_path: Path, code: int) -> None:
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
            raise OSError(code, "full")
        os.pwrite(fd, b"late", 4)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: handlers.with_room(file, slow, long=True))
            await trio.to_thread.run_sync(begun.wait)
            nursery.start_soon(handlers.with_room, file, full_once)
            await trio.testing.wait_all_tasks_blocked()
            assert file.tier is Tier.RAM, "it waits for the thread"
            assert stopped == [Tier.RAM], "the shim writes no more to what is left behind"
            go_on.set()
    os.close(file.take_fd())
    assert file.tier is Tier.NVME and node.data(content, Tier.NVME) == b"slowlate"


@pytest.mark.parametrize("has_crashed", [False, True])
@pytest.mark.parametrize(("is_in_store", "state"), [(True, ContentState.CLOSED), (False, ContentState.DOOMED)])
def test_a_file_without_a_name_is_closed_if_others_may_name_it(
    tmp_path: Path, *, is_in_store: bool, state: ContentState, has_crashed: bool
) -> None:
    """P1: removed on an island while it was open. Another node may have given it a name, under which it comes back."""
    node = Node(tmp_path)
    content, ram = node.make(b"file", b"saved", closed=False), node.tiers[Tier.RAM]
    inode, files = node.inode(content), OpenFileTable(node.db, node.tiers, None, QUIET)
    with node.db.transaction():
        if is_in_store:
            key_state.set_cached(node.db, SharedKey(INODE, inode), CachedValue(1, b"{}"))
        namespace.unlink(node.db, ROOT, b"file")
    if has_crashed:
        trio.run(functools.partial(files.start, is_resumed=False))
    else:
        file = OpenFile(inode, content, ram, ram.open(content, os.O_RDWR), is_writable=True)
        files.add_handle(file, 1, True, HandleWay(Way.BUFFERED))
        files.release(1)
        files.commit_releases()
    found = contents.get_content(node.db, content)
    assert found is not None and (found.state, found.size) == (state, len(b"saved") if is_in_store else 0)


def test_another_descriptor_takes_the_number_of_the_former(tmp_path: Path) -> None:
    """A thread that reads by the number meanwhile never meets another file."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    file = OpenFile(1, None, None, os.open(tmp_path / "one", os.O_RDONLY))
    number = file.fd
    file.replace_fd(os.open(tmp_path / "two", os.O_RDWR))
    assert file.fd == number and os.pread(number, 9, 0) == b"two" and not os.get_inheritable(number)
    os.close(file.take_fd())
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(number)


def test_a_pfs_that_hangs_delays_no_start_and_no_other_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1, P8: a mount process starts, serves attributes and closes files while every call on the PFS hangs."""
    node = Node(tmp_path)
    on_pfs, in_ram = node.make(b"far", b"....", tier=Tier.PFS, closed=False), node.make(b"near", b"..", closed=False)
    handles = [node.hold(content, writer=True) for content in (on_pfs, in_ram)]
    abandoned = node.make(b"left", b"...", tier=Tier.PFS, closed=False)
    files = OpenFileTable(node.db, node.tiers, None, QUIET)
    hangs, ended = threading.Event(), list[int]()
    for name in ("open", "stat", "set_times"):
        monkeypatch.setattr(TierStorage, name, hang_on_pfs(getattr(TierStorage, name), hangs))
    monkeypatch.setattr(limits, "PFS_STATUS_WAIT_S", 0.05)

    async def scenario() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(files.slow_calls.run)
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(30):
                await files.start(is_resumed=True)
                for _ in range(3):
                    await files.refresh_status(node.inode(on_pfs))
                for handle in handles:
                    files.release(handle, lambda handle=handle: ended.append(handle))  # type: ignore[misc]
                files.commit_releases()
                assert ended == handles[1:] and node.state(in_ram) is ContentState.CLOSED
                assert node.state(on_pfs) is node.state(abandoned) is ContentState.OPEN, "the release of this one file waits"
                hangs.set()
                while ended != handles[::-1] or node.state(abandoned) is ContentState.OPEN:
                    await trio.sleep(0.01)
                    files.commit_releases()
            nursery.cancel_scope.cancel()

    try:
        trio.run(scenario)
    finally:
        hangs.set()
    assert [(node.state(content), node.row(content).size) for content in (on_pfs, abandoned)] == [
        (ContentState.CLOSED, 4), (ContentState.CLOSED, 3)
    ]  # fmt: skip


def hang_on_pfs(act: Callable[..., Any], hangs: threading.Event) -> Callable[..., Any]:
    def call(storage: TierStorage, *arguments: Any) -> Any:
        if storage.tier is Tier.PFS:
            assert hangs.wait(60)
        return act(storage, *arguments)

    return call


@pytest.mark.parametrize(("failing", "tier"), [("record_move", Tier.NVME), ("persist", Tier.PFS)])
async def test_a_file_that_moves_is_written_where_the_catalog_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, tier: Tier
) -> None:
    """P5: the disk of the catalog fails before the move is recorded, or before that is durable."""
    node = Node(tmp_path)
    content = node.make(b"file", b"bytes", tier=Tier.NVME, closed=False)
    source = node.tiers[Tier.NVME]
    file = OpenFile(node.inode(content), content, source, source.open(content, os.O_RDWR), is_writable=True)
    handlers = FileHandlers(cast(Any, SimpleNamespace(db=node.db, wake_channel=QUIET)), cast(Any, None))
    broken = contents if failing == "record_move" else Database
    monkeypatch.setattr(broken, failing, Mock(side_effect=OSError(errno.EIO, "the disk fails")))
    has_moved = await handlers._move_to(file, source, content, node.tiers[Tier.PFS])
    assert has_moved is (tier is Tier.PFS) and file.tier is tier and list(node.copies(content)) == [tier]
    os.pwrite(file.fd, b"B", 0)
    assert node.data(content, tier) == b"Bytes"
    os.close(file.fd)
