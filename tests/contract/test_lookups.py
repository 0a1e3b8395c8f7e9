"""Walks along paths: one round trip brings what a thread will look up next, and nothing older than its system call answers it (P2, T7)."""

import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio
from ckptfs_daemon.mount.cluster.lookups import LookupPrefetch, read_syscall
from daemon_under_test import eventually
from memory_store import MemoryEtcd, MemoryStore
from shared_catalogs import Node, async_tests, in_virtual_time, running

from ckptfs import limits
from ckptfs.catalog import namespace
from ckptfs.model import ROOT

THREAD, OTHER = 7, 8


class Walker:
    """A thread's system calls on a node, as the kernel asks for them."""

    def __init__(self, node: Node) -> None:
        self.node, self.walks = node, LookupPrefetch(node.sharing, lambda _: self.call)
        self.call = b"stat"

    async def stat(self, path: str, pid: int = THREAD) -> int:
        inode = ROOT
        for part in path.encode().split(b"/"):
            await self.walks.refresh_name(inode, part, pid=pid)
            inode = namespace.lookup(self.node.db, inode, part).id
            self.walks.record_reached(pid, inode)
        return inode

    async def reads(self, act: Callable[[], Awaitable[object]]) -> int:
        before = self.node.sharing.counts["reads"]
        await act()
        return self.node.sharing.counts["reads"] - before


def run(root: Path, act: Callable[[Node, Walker], Awaitable[None]]) -> None:
    etcd = MemoryEtcd()
    nodes = [Node(root / f"n{number}", number, MemoryStore(etcd)) for number in (1, 2)]

    async def body() -> None:
        for path in ("a", "a/b", "a/b/c"):
            await nodes[0].mkdir(path)
        for path in ("a/b/c/f", "a/b/c/g"):
            await nodes[0].make(path)
        walker = Walker(nodes[1])
        await walker.stat("a/b/c/f")
        await act(nodes[0], walker)

    in_virtual_time(lambda: running(nodes, body))


walking = async_tests(run)


@walking
async def test_a_path_that_was_walked_before_costs_one_round_trip(_: Node, walker: Walker) -> None:
    """Another file in the same directory costs two, opening it none beyond that."""
    assert await walker.reads(lambda: walker.stat("a/b/c/f")) == 1
    await walker.stat("a/b/c/g")
    await walker.stat("a/b/c/f")
    inode = await walker.stat("a/b/c/g")
    assert await walker.reads(lambda: walker.stat("a/b/c/f")) == 2
    inode = await walker.stat("a/b/c/f")
    assert await walker.reads(lambda: walker.walks.refresh_inode(inode, pid=THREAD)) == 0
    assert await walker.reads(lambda: walker.walks.refresh_inode(inode, pid=THREAD)) == 1


@walking
async def test_what_others_did_before_a_system_call_it_sees(other: Node, walker: Walker) -> None:
    """A thread that has just looked, and hears at once that something has changed."""
    before = await walker.stat("a/b/c/f")
    await other.rename("a/b/c/g", "a/b/c/f")
    assert await walker.stat("a/b/c/f") != before
    await other.rename("a/b", "a/x")
    await other.build("a/b/", "a/b/c/")
    made = await other.make("a/b/c/f")
    assert await walker.stat("a/b/c/f") == made.id


@walking
async def test_a_guess_serves_one_thread_once_and_not_for_long(_: Node, walker: Walker) -> None:
    walks = walker.walks
    top = await walker.stat("a")
    assert await walker.reads(lambda: walks.refresh_name(top, b"b", pid=OTHER)) == 1
    assert await walker.reads(lambda: walks.refresh_name(top, b"b", pid=THREAD)) == 0
    assert await walker.reads(lambda: walks.refresh_name(top, b"b", pid=THREAD)) == 1
    await walker.stat("a")
    await trio.sleep(2 * limits.LOOKUP_FRESH_S)
    assert await walker.reads(lambda: walks.refresh_name(top, b"b", pid=THREAD)) == 1
    assert await walker.reads(lambda: walker.stat("a", pid=0)) == 1
    assert await walker.reads(lambda: walks.refresh_inode(top, pid=0)) == 1


@walking
async def test_a_walk_begins_where_the_kernel_asks_whether_it_may(_: Node, walker: Walker) -> None:
    """It asks for the attributes of the directory first: all the rest of the path comes with them."""

    async def stat() -> None:
        await walker.walks.refresh_inode(ROOT, pid=THREAD)
        await walker.stat("a/b/c/f")

    assert await walker.reads(stat) == 1
    assert await walker.reads(stat) == 1


@walking
async def test_a_step_that_comes_late_is_asked_for_anew(_: Node, walker: Walker) -> None:
    top = await walker.stat("a")
    await trio.sleep(1.1 * limits.LOOKUP_STEP_S)
    assert await walker.reads(lambda: walker.walks.refresh_name(top, b"b", pid=THREAD)) == 1


@walking
async def test_a_step_of_another_system_call_is_asked_for_anew(_: Node, walker: Walker) -> None:
    """T7: the thread has come back in between, and may have been told of what another node did. Where nobody says, it may have, too."""
    for before, after, reads in ((b"stat", b"stat", 0), (b"stat", b"open", 1), (b"", b"", 1)):
        walker.call = before
        top = await walker.stat("a")
        walker.call = after
        assert await walker.reads(lambda top=top: walker.walks.refresh_name(top, b"b", pid=THREAD)) == reads


def test_the_system_call_of_a_thread() -> None:
    """It is the same while it lasts, and another one in the next; nothing is said of a thread that is gone."""
    assert read_syscall(2**22) == b""
    source, target = os.pipe()
    reader = threading.Thread(target=lambda: (os.read(source, 1), os.read(source, 2)))
    reader.start()
    calls = []
    for count in (1, 2):
        # The thread also waits in a futex for the interpreter's lock: only a read of `count` bytes from this pipe is meant.
        arguments = [b"%#x" % source, b"%#x" % count]
        calls.append(
            eventually(lambda arguments=arguments: (said := read_syscall(reader.native_id or 0)).split()[1:4:2] == arguments and said)
        )
        assert read_syscall(reader.native_id or 0) == calls[-1]
        os.write(target, b"x")
    reader.join()
    assert calls[0].split()[0] == calls[1].split()[0] and calls[0] != calls[1]
