"""Catalogs of several nodes on one store, in one process and in virtual time: what mount processes do, without mounts.

A `Node` does what the kernel and a mount do for a path: look up every part of it, change, return when that is told. `Slow` is a way to the
store that takes its time, and loses answers; cut off, a node is an island. Run it under `replayed`, or where nothing random happens under
`trio.testing.MockClock(autojump_threshold=0)`.
"""

import functools
import inspect
import itertools
import os
import random
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import trio
import trio.testing
from ckptfs_daemon.mount.cluster.shared_namespace import SharedNamespace
from memory_store import MemoryEtcd, MemoryStore

from ckptfs.catalog import database, identity, namespace
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get, set_attributes
from ckptfs.coherence import keys, ownership
from ckptfs.coherence.key_state import DirtyKeyTracker
from ckptfs.coherence.keys import INODE, NAME
from ckptfs.errors import StoreFull, StoreUnreachable
from ckptfs.model import HISTORY_NAME, ROOT, Inode
from ckptfs.store.kv import Compare, Get, Operation, Outcome

T = TypeVar("T")
Tree = dict[bytes, tuple[int, int, int, int]]
"""Path -> (inode, type and mode, links, size)."""
Act = Callable[..., Awaitable[None]]
EPOCH_NS = 10**18
CLOCK_OFF_NS: ContextVar[int] = ContextVar("clock_off_ns", default=0)
"""How far the clock is off of the node to which a task belongs."""


def in_virtual_time(act: Callable[[], Awaitable[None]]) -> None:
    trio.run(act, clock=trio.testing.MockClock(autojump_threshold=0))


def async_tests(play: Callable[[Path, Act], None], given: int = 2) -> Callable[[Act], Callable[..., None]]:
    """A decorator for async tests, which `play(tmp_path, test)` runs. It supplies the first `given` arguments; the others are fixtures."""

    def decorate(act: Act) -> Callable[..., None]:
        fixtures = list(inspect.signature(act).parameters.values())[given:]
        names = [parameter.name for parameter in fixtures]

        @functools.wraps(act)
        def test(tmp_path: Path, **values: object) -> None:
            values |= {"tmp_path": tmp_path} if "tmp_path" in names else {}
            play(tmp_path, lambda *supplied: act(*supplied, **values))

        place = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([place, *(one for one in fixtures if one.name != "tmp_path")])  # type: ignore[attr-defined]
        return test

    return decorate


def play_on_nodes(directory: Path, act: Act, run: Callable[..., object] = in_virtual_time, *, count: int = 2) -> None:
    """Nodes on a slow store do `act(a, b, ...)`; afterwards all show what the store has."""
    etcd = MemoryEtcd()

    async def main() -> None:
        nodes = [Node(directory / str(number), number, Slow(etcd, random.Random(number))) for number in range(1, count + 1)]

        async def act_and_compare() -> None:
            await act(*nodes)
            await settled(nodes)
            there = stored_tree(etcd)
            for node in nodes:
                assert await node.tree() == there

        await running(nodes, act_and_compare)

    run(main)


def list_seeds(given: Iterable[int]) -> list[int]:
    """These seeds, and those that CKPTFS_SEED=N or N-M asks for."""
    first, _, last = os.environ.get("CKPTFS_SEED", "").partition("-")
    return [*dict.fromkeys([*given, *(range(int(first), int(last or first) + 1) if first else ())])]


def replayed(seed: int, act: Callable[[], Awaitable[T]]) -> T:
    """Do `act` in virtual time, and always in the same order for the same seed.

    The time of day is virtual, too; each look at it finds another one. What never ends fails after 150 virtual seconds.
    """
    ticks = itertools.count()

    async def main() -> T:
        with trio.fail_after(150.0), mock.patch("time.time_ns", read_clock):
            return await act()

    def read_clock() -> int:
        return EPOCH_NS + int(trio.current_time() * 10**9) + next(ticks) + CLOCK_OFF_NS.get()

    return run_seeded(seed, main, clock=trio.testing.MockClock(autojump_threshold=0))


def run_seeded(seed: int, act: Callable[[], Awaitable[T]], **how: Any) -> T:
    """trio.run, which runs what is ready in a random order: as trio's plugins for tests do, that is seeded here. So is jitter."""
    scheduler = trio._core._run
    scheduler._r.seed(seed)
    random.seed(seed)
    with mock.patch.object(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", True):
        return trio.run(act, **how)


class Slow(MemoryStore):
    """Requests and answers take up to `delay_s` each; a `loss` of answers never comes, and the store asks again, as the real one does.

    After a `late` commit it asks again, or tells the failure.
    """

    def __init__(self, etcd: MemoryEtcd, dice: random.Random, delay_s: float = 0.002, loss: float = 0.0, late: float = 0.0) -> None:
        super().__init__(etcd, late, dice)
        self._dice, self._delay_s, self._loss, self._losing = dice, delay_s, loss, 0

    def lose(self, answers: int) -> None:
        """So many of the next commits are done, and their answers do not come."""
        self._losing = answers

    def read_soon(self, gets: Sequence[Get], *, timeout_s: float = 3.0) -> Future[Outcome]:
        return self._later(lambda: self.read(gets), timeout_s)

    def commit_soon(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = 3.0
    ) -> Future[Outcome]:
        return self._later(lambda: self.commit(compares, changes, otherwise), timeout_s, commits=True)

    def _later(self, act: Callable[[], Outcome], timeout_s: float, *, commits: bool = False) -> Future[Outcome]:
        future: Future[Outcome] = Future()

        async def run() -> None:
            deadline = trio.current_time() + timeout_s
            is_repeated = False
            while trio.current_time() < deadline:
                await trio.sleep(self._dice.uniform(0, self._delay_s))
                try:
                    outcome = replace(act(), is_repeated=is_repeated)
                except StoreFull as failure:
                    future.set_exception(failure)
                    return
                except StoreUnreachable:
                    is_repeated = True
                    if self.reachable and self._dice.random() < 0.5:
                        continue
                    break
                await trio.sleep(self._dice.uniform(0, self._delay_s))
                lost = commits and self._losing > 0
                self._losing -= lost
                if self._reachable and not lost and self._dice.random() >= self._loss:
                    future.set_result(outcome)
                    return
                is_repeated = True
            future.set_exception(StoreUnreachable("no answer"))

        trio.lowlevel.spawn_system_task(run)
        return future


class Node:
    """One node: its catalog and its side of the shared tree."""

    clock_off_s = 0.0

    def __init__(self, directory: Path, number: int, store: MemoryStore, *, journalled: bool = False, has_mover: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        database.create(directory / "catalog.db")
        self.store, self.number = store, number
        self.touching = touching = DirtyKeyTracker()
        self.db = Database(directory / "catalog.db", journalled=journalled, clustered=True, hooks=touching)
        identity.set_node_number(self.db, number)
        self.sharing = SharedNamespace(self.db, store, f"n{number}", is_member=has_mover)
        touching.on_dirty = self.sharing.notify_dirty

    def cut(self, off: bool) -> None:
        self.store.reachable = not off

    # --- what applications do -----------------------------------------------------------------------------------------

    async def parent(self, path: str) -> tuple[int, bytes]:
        """(the directory of a path's last part, that part), as the kernel walks there."""
        *above, name = path.encode().split(b"/")
        directory = ROOT
        for part in above:
            directory = (await self.lookup(directory, part)).id
        return directory, name

    async def lookup(self, directory: int, name: bytes) -> Inode:
        await self.sharing.refresh_name(directory, name)
        return namespace.lookup(self.db, directory, name)

    async def make(self, path: str, mode: int = stat.S_IFREG | 0o644) -> Inode:
        parent, name = await self.parent(path)
        return await self._agreed(lambda db: namespace.create(db, parent, name, mode, uid=0, gid=0), [(parent, name)])

    async def mkdir(self, path: str) -> Inode:
        return await self.make(path, stat.S_IFDIR | 0o755)

    async def build(self, *paths: str) -> None:
        """Make files, and directories where a path ends with a slash."""
        for path in paths:
            await (self.mkdir(path[:-1]) if path.endswith("/") else self.make(path))

    async def unlink(self, path: str) -> Inode:
        parent, name = await self.parent(path)
        await self.lookup(parent, name)
        return await self._agreed(lambda db: namespace.unlink(db, parent, name), [(parent, name)])

    async def rmdir(self, path: str) -> Inode:
        parent, name = await self.parent(path)
        await self.lookup(parent, name)
        return await self._agreed(lambda db: namespace.rmdir(db, parent, name), [(parent, name)])

    async def link(self, path: str, new: str) -> Inode:
        parent, name = await self.parent(path)
        inode = (await self.lookup(parent, name)).id
        new_parent, new_name = await self.parent(new)
        return await self._agreed(lambda db: namespace.link(db, inode, new_parent, new_name), [(new_parent, new_name)], [inode])

    async def rename(self, path: str, new: str, flags: int = 0) -> Inode | None:
        parent, name = await self.parent(path)
        new_parent, new_name = await self.parent(new)
        await self.lookup(parent, name)
        await self.sharing.refresh_name(new_parent, new_name)
        names = [(parent, name), (new_parent, new_name)]
        return await self._agreed(
            lambda db: namespace.rename(db, parent, name, new_parent, new_name, flags),
            names,
            is_own=lambda: ownership.can_rename(self.db, parent, name, new_parent, new_name, flags),
        )

    async def set(self, path: str, **fields: Any) -> Inode:
        parent, name = await self.parent(path)
        inode = (await self.lookup(parent, name)).id
        return await self._agreed(lambda db: set_attributes(db, inode, **fields), (), [inode])

    async def grow(self, path: str, size: int, mtime_ns: int) -> None:
        """What a writer's close tells. The mtime may be anything."""
        parent, name = await self.parent(path)
        inode = (await self.lookup(parent, name)).id
        what = (size, mtime_ns, time.time_ns(), inode)
        await self._agreed(lambda db: db.run("UPDATE inode SET size = ?, mtime_ns = ?, closed_ns = ? WHERE id = ?", *what), (), [inode])

    async def stat(self, path: str) -> Inode:
        parent, name = await self.parent(path)
        return await self.lookup(parent, name)

    async def names(self, path: str = "") -> list[bytes]:
        inode = (await self.stat(path)).id if path else ROOT
        await self.sharing.refresh_directory(inode)
        return sorted(entry.name for entry, _ in namespace.iterate_entries(self.db, inode))

    async def _agreed(
        self,
        change: Callable[[Database], T],
        names: Sequence[tuple[int, bytes]],
        inodes: Sequence[int] = (),
        is_own: Callable[[], bool] = lambda: True,
    ) -> T:
        async def act() -> T:
            with self.db.transaction() as db:
                return change(db)

        return await self.sharing.commit_shared(act, names, inodes, is_own=is_own)

    async def tree(self) -> Tree:
        found: Tree = {}
        todo = [(b"", ROOT)]
        while todo:
            path, directory = todo.pop()
            await self.sharing.refresh_directory(directory)
            for entry, _ in list(namespace.iterate_entries(self.db, directory)):
                await self.sharing.refresh_inode(entry.child)
                inode = get(self.db, entry.child)
                found[path + b"/" + entry.name] = (inode.id, inode.mode, *((0, 0) if inode.is_directory else (inode.nlink, inode.size)))
                if inode.is_directory:
                    todo.append((path + b"/" + entry.name, inode.id))
        return found


def stored(etcd: MemoryEtcd) -> dict[keys.SharedKey, keys.Value]:
    """Every shared value of the store."""
    found = {}
    for item in MemoryStore(etcd).read([Get(b"", b"\0")]).results[0]:
        if item.key.split(b"/")[0].decode() not in keys.KINDS:
            continue
        value = keys.decode_value(item.value)
        assert value is not None
        found[keys.decode_key(item.key)] = value
    return found


def stored_tree(etcd: MemoryEtcd) -> Tree:
    """The tree in the store; fails where it is not one: names that lead nowhere, inodes without names, wrong links, loops."""
    values = stored(etcd)
    names = {key: value["child"] for key, value in values.items() if key.kind == NAME}
    inodes = {key.number: value for key, value in values.items() if key.kind == INODE}
    assert set(names.values()) <= set(inodes), (
        f"names lead nowhere: { {key: child for key, child in names.items() if child not in inodes} }"
    )
    assert set(inodes) <= {*names.values(), ROOT}, f"without a name: {set(inodes) - {*names.values(), ROOT}}"
    found: Tree = {}
    todo, passed = [(b"", ROOT)], set()
    while todo:
        path, directory = todo.pop()
        assert directory not in passed, "a directory has two names"
        passed.add(directory)
        children = {key.name: child for key, child in names.items() if key.number == directory}
        for name, child in children.items():
            value = inodes[child]
            links = len(value.get("names", ()))
            found[path + b"/" + name] = (child, value["mode"], links, value.get("size", 0))
            if stat.S_ISDIR(value["mode"]):
                assert value["parent"] == directory, f"parent of {name!r}"
                todo.append((path + b"/" + name, child))
            else:
                known = [[key.number, key.name.decode("latin-1")] for key, other in names.items() if other == child]
                assert value["names"] == sorted(known), f"names of {path + b'/' + name!r}"
    assert {number for number, value in inodes.items() if stat.S_ISDIR(value["mode"])} == passed, "a directory is out of reach"
    hidden = b"/" + HISTORY_NAME
    return {path: entry for path, entry in found.items() if path != hidden and not path.startswith(hidden + b"/")}


def start_on(nursery: trio.Nursery, node: Node, act: Callable[..., Awaitable[None]], *arguments: object) -> None:
    """Start a task that has the clock of a node."""
    before = CLOCK_OFF_NS.set(int(node.clock_off_s * 1e9))
    nursery.start_soon(act, *arguments)
    CLOCK_OFF_NS.reset(before)


async def running(nodes: Sequence[Node], act: Callable[[], Awaitable[T]]) -> T:
    """Do `act` while the nodes tell what they change."""
    async with trio.open_nursery() as nursery:
        for node in nodes:
            start_on(nursery, node, node.sharing.run)
        result = await act()
        nursery.cancel_scope.cancel()
    return result


async def reconnect(*nodes: Node) -> None:
    """End the disconnection of these nodes, and wait until they have published all."""
    for node in nodes:
        node.cut(False)
    await settled(nodes)


async def settled(nodes: Sequence[Node]) -> None:
    """Every node has told everything."""
    for node in nodes:
        while node.sharing.is_disconnected or not await node.sharing.wait_published() or node.sharing.is_disconnected:
            await trio.sleep(0.1)
