"""F4, P3, P5: three whole nodes write into one tree while others change it on their PFS, in virtual time.

In the end all nodes show what the PFS shows, nothing waits, and all bytes that nobody removed are on the PFS.
"""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import trio
from simulated_cluster import SETTLE_S, SimulatedCluster, SimulatedNode
from simulated_mount import simulated

from ckptfs.catalog import inodes, mover_requests
from ckptfs.config.schema import RetentionRule
from ckptfs.errors import CkptfsError
from ckptfs.model import ROOT

REFRESH_S = 20.0
STEPS = 12


class World:
    """What was written, and what may be gone."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        assert cluster.pfs is not None
        self.cluster, self.dice, self.pfs = cluster, cluster.dice, cluster.pfs
        self.count = 0
        self.written: set[bytes] = set()
        self.gone: set[bytes] = set()

    def new_name(self, directory: str) -> str:
        self.count += 1
        return f"{directory}/{self.count}".strip("/")

    def list_pfs(self) -> dict[str, bytes | None]:
        """Return path -> bytes of all that the PFS shows; None for a directory."""
        paths = [path for path in self.pfs.rglob("*") if ".ckptfs" not in str(path.relative_to(self.pfs))]
        return {str(path.relative_to(self.pfs)): path.read_bytes() if path.is_file() else None for path in paths}

    def choose(self, found: dict[str, bytes | None], *, is_file: bool) -> str:
        names = sorted(path for path, data in found.items() if (data is not None) == is_file)
        return self.dice.choice(names) if names else ""

    async def work(self, node: SimulatedNode) -> None:
        """What applications do on one node, with names that it knows."""
        for _ in range(STEPS):
            await trio.sleep(self.dice.uniform(0.0, 6.0))
            known = {path.decode().strip("/"): (None if mode & 0o40000 else b"") for path, (_, mode, _, _) in (await node.tree()).items()}
            directory, file = self.choose(known, is_file=False), self.choose(known, is_file=True)
            with contextlib.suppress(OSError, CkptfsError):
                match self.dice.choice(["write"] * 4 + ["mkdir", "rename", "move", "unlink"]):
                    case "write":
                        data = b"%d" % self.count
                        await node.write(self.new_name(directory), data)
                        self.written.add(data)
                    case "mkdir":
                        await node.mkdir(self.new_name(directory))
                    case "rename":
                        await node.rename(file, self.new_name(directory))
                    case "move":
                        await node.rename(directory, self.new_name(self.choose(known, is_file=False)))
                    case "unlink":
                        self.gone.add(await node.mount.read(file))
                        await node.unlink(file)

    async def change(self) -> None:
        """What others do on the PFS."""
        for _ in range(STEPS):
            await trio.sleep(self.dice.uniform(0.0, 12.0))
            found = self.list_pfs()
            directory, file = self.choose(found, is_file=False), self.choose(found, is_file=True)
            new = self.pfs / self.new_name(directory)
            match self.dice.choice(["write", "mkdir", "remove", "move", "move"]):
                case "write":
                    new.write_bytes(b"external %d" % self.count)
                    os.utime(new, ns=(0, self.cluster.time.now_ns()))
                case "mkdir":
                    new.mkdir()
                case "remove" if file:
                    self.gone.add(found[file] or b"")
                    (self.pfs / file).unlink()
                case "move" if directory:
                    with contextlib.suppress(OSError):  # Into itself.
                        (self.pfs / directory).rename(self.pfs / self.new_name(self.choose(found, is_file=False)))

    async def see(self, node: SimulatedNode) -> dict[str, bytes | None]:
        """Return what a node shows, as `list_pfs` does."""
        shown: dict[str, bytes | None] = {}
        todo = [(Path(), ROOT)]
        while todo:
            path, directory = todo.pop()
            await node.sharing.refresh_directory(directory)
            if not inodes.get(node.db, directory).is_imported:
                await node._request(mover_requests.SCAN, directory)
            for name, child in node.db.rows("SELECT name, child FROM entry WHERE parent = ?", directory):
                inside = path / os.fsdecode(name)
                is_directory = inodes.get(node.db, child).is_directory
                shown[str(inside)] = None if is_directory else await node.mount.read_inode(child)
                todo += [(inside, child)] if is_directory else []
        return {name: data for name, data in shown.items() if not name.startswith(".ckptfs")}


@simulated(RetentionRule("step_*", keep=10), seeds=range(4))
async def test_all_nodes_show_what_others_made_of_the_pfs(cluster: SimulatedCluster) -> None:
    world = World(cluster)
    for node in cluster.living:
        node.config = replace(node.config, refresh_interval_s=REFRESH_S)
        node.restart_mover()
    for path in ("a", "b", "a/c"):
        await cluster.nodes[1].mkdir(path)
    await trio.sleep(SETTLE_S)
    async with trio.open_nursery() as nursery:
        for node in cluster.living:
            nursery.start_soon(world.work, node)
        nursery.start_soon(world.change)
    await trio.sleep(25 * REFRESH_S)
    shown = world.list_pfs()
    for node in cluster.living:
        assert await world.see(node) == shown
        assert [node.db.rows(f"SELECT * FROM {table}") for table in ("journal", "pfs_pending")] == [[], []]
    assert world.written - world.gone <= set(shown.values())
