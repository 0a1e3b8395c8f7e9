"""The mount process of a simulated node, without FUSE: opens, writes and closes as its handlers do them, and the tracker of sets."""

import functools
import inspect
import os
import random
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from ckptfs_daemon import ipc
from ckptfs_daemon.fuse import session
from ckptfs_daemon.mount.context import ChangeRunner, MountContext
from ckptfs_daemon.mount.handlers.file_handlers import FileHandlers
from ckptfs_daemon.mount.handlers.history_tree import HistoryTree
from ckptfs_daemon.mount.handlers.namespace_handlers import OrphanTracker
from ckptfs_daemon.mount.open_files.mover_client import MoverClient
from ckptfs_daemon.mount.open_files.open_file_table import OpenFileTable
from ckptfs_daemon.mount.sets.member_reader import MountMemberReader
from ckptfs_daemon.mount.sets.set_tracker import SetTracker
from simulated_cluster import SETTLE_S, Costs, SimulatedCluster, SimulatedNode, run_simulated
from simulated_store import SimulatedEtcd

from ckptfs import limits
from ckptfs.catalog import history, set_members
from ckptfs.cgroups import MemoryLimits
from ckptfs.config.schema import RetentionRule
from ckptfs.model import DataPath

NODES = 3
ROOT_USER: Any = SimpleNamespace(uid=0, gid=0, pid=0)


class MountWakes:
    """The mount's end of the wake channel."""

    def __init__(self, node: SimulatedNode) -> None:
        self._node = node

    def notify(self, message: bytes) -> None:
        self._node.mover.wake_lanes(message[1:].decode() if message.startswith(ipc.URGENT_REQUEST) else "")


class SimulatedMount:
    """What applications do with open files, and the tracker of checkpoint sets. Starts with its node."""

    def __init__(self, node: SimulatedNode, nursery: trio.Nursery) -> None:
        with node.db.transaction():
            set_members.delete_own_claims(node.db)
        self.node, node.mount = node, self
        wakes: Any = MountWakes(node)
        mover_client, open_files = MoverClient(node.db, wakes), OpenFileTable(node.db, node.tiers, None, wakes)
        self.context = MountContext(
            node.config, DataPath.BUFFERED, node.db, node.tiers, wakes, mover_client, open_files, MemoryLimits(), node.sharing
        )
        changes, self._orphans = ChangeRunner(self.context), OrphanTracker(self.context)
        self.tracker = SetTracker(self.context, changes, MountMemberReader(self.context, changes), self._orphans.add_unlinked)
        self.files = FileHandlers(self.context, changes)
        attributes: Any = None
        self.history = HistoryTree(self.context, changes, self.files, attributes)
        self.files.guard_writer = self.tracker.guard_writer
        node.sharing.on_nameless = self._orphans.add_unlinked
        node.on_sealed, node.before_change = self.tracker.wake, self.tracker.wait_for_set_before_change
        nursery.start_soon(node.track, self._run, name="checkpoint sets")

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.tracker.run)
            nursery.start_soon(self._orphans.run_deletion, lambda _: False)

    async def open(self, path: str, flags: int) -> int:
        """Return the handle of a file."""
        return await self._open((await self.node.stat(path)).id, flags)

    async def _open(self, inode: int, flags: int) -> int:
        session.request_unique.value += 2
        return int((await self.files.open(inode, flags, ROOT_USER)).fh)

    async def close(self, handle: int) -> None:
        await self.files.flush(handle)
        self.context.open_files.release(handle)
        self.context.open_files.commit_releases()
        await self.node.sharing.wait_published()

    async def overwrite(self, path: str, data: bytes, open_s: float, flags: int = os.O_WRONLY) -> None:
        """Open for writing in place, write at once and after a while, close."""
        handle = await self.open(path, flags)
        await self._write(handle, data[:1])
        await trio.sleep(open_s)
        await self._write(handle, data)
        await self.close(handle)

    async def _write(self, handle: int, data: bytes) -> None:
        await self.files.write(handle, 0, data)
        now_ns = self.node.cluster.time.now_ns()  # The kernel has another clock, by which a file would never be quiet.
        os.utime(self.context.open_files.get_file(handle).fd, ns=(now_ns, now_ns))

    async def read(self, path: str) -> bytes:
        return await self.read_inode((await self.node.stat(path)).id)

    async def read_inode(self, inode: int) -> bytes:
        handle = await self._open(inode, os.O_RDONLY)
        data = await self.files.read(handle, 0, limits.MIB)
        self.context.open_files.release(handle)
        self.context.open_files.commit_releases()
        return data


async def list_history(node: SimulatedNode) -> dict[str, dict[str, int]]:
    """Return the names and inodes of each set in the history, as another node sees them; hidden sets too."""
    await node.sharing.refresh_name(1, history.NAME)
    found: dict[str, dict[str, int]] = {}
    root = history.find_root(node.db)
    todo = [("", root)] if root is not None else []
    while todo:
        path, directory = todo.pop()
        await node.sharing.refresh_inode(directory)
        await node.sharing.refresh_directory(directory)
        rows = node.db.rows(
            "SELECT e.name, e.child, i.mode & 61440 = 16384 FROM entry e JOIN inode i ON i.id = e.child WHERE e.parent = ?", directory
        )
        for name, child, is_directory in rows:
            inside = f"{path}/{bytes(name).decode()}"
            if history.get_set(node.db, child) is not None:
                await node.sharing.refresh_directory(child)
                files = node.db.rows("SELECT name, child FROM entry WHERE parent = ?", child)
                found[inside.strip("/")] = {bytes(name).decode(): inode for name, inode in files}
            elif is_directory:
                todo.append((inside, child))
    return found


def simulate(act: Callable[[SimulatedCluster, random.Random], Awaitable[None]], seed: int, *rules: RetentionRule, factor: int = 2) -> None:
    """Run a cluster of nodes that track sets; with rules, on a PFS."""

    async def run(cluster: SimulatedCluster) -> Costs:
        cluster.etcd = SimulatedEtcd(cluster.time)
        cluster.retention = rules
        async with trio.open_nursery() as nursery:
            for number in range(1, NODES + 1):
                SimulatedMount(await cluster.add(nursery, number), nursery)
            await trio.sleep(SETTLE_S)
            if rules:
                await cluster.each(SimulatedNode.visit_root)
            await act(cluster, cluster.dice)
            nursery.cancel_scope.cancel()
        return Costs(NODES)

    run_simulated(NODES, run, seed=seed, factor=factor, with_pfs=bool(rules))


def simulated(*rules: RetentionRule, seeds: Iterable[int] = (1,), factor: int = 2) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A decorator for async tests `test(cluster, ...)` of nodes that track sets, which run with each of the seeds; see `simulate`."""

    def decorate(act: Callable[..., Any]) -> Callable[..., None]:
        @pytest.mark.parametrize("seed", seeds)
        @functools.wraps(act)
        def test(seed: int, **fixtures: object) -> None:
            simulate(lambda cluster, _: act(cluster, **fixtures), seed, *rules, factor=factor)

        _, *others = inspect.signature(act).parameters.values()
        test.__signature__ = inspect.Signature([inspect.Parameter("seed", inspect.Parameter.POSITIONAL_OR_KEYWORD), *others])  # type: ignore[attr-defined]
        return test

    return decorate
