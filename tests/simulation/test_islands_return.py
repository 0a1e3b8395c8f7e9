"""What islands and others write meanwhile is there after the return (P5), and sets keep their names and bytes (P7).

Three nodes do random things to a few files and directories, of which one or two are cut off. Of what any node shows at the end of that
time, each content that was written meanwhile has a name afterwards, whatever others did to the file: removed, replaced, wrote it, or made a
set of it.

`CKPTFS_SEED=N` plays one more seed, `CKPTFS_SEED=N-M` several.
"""

import contextlib
import os
import random
from pathlib import Path

import pytest
from shared_catalogs import Node, list_seeds, play_on_nodes, reconnect, settled
from shared_sets import keep, make_closed, read_history, separate

from ckptfs.catalog import history, inodes, namespace
from ckptfs.errors import CkptfsError
from ckptfs.model import ROOT

ACTS = 8
NAMES = ["f1", "f2", "f3", "other"]
KINDS = {"make": 5, "write": 6, "replace": 4, "unlink": 4, "rename": 4, "link": 3, "mkdir": 2, "remove_directory": 3, "keep": 4}


class World:
    """What happens in one seed."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.kept: set[tuple[bytes, int | None]] = set()
        """Name and content of each file of which a set was made. Sets get other numbers at a return."""
        self.set_count = 0

    async def play(self, *nodes: Node) -> None:
        await self._work(nodes)
        await settled(nodes)
        for node in nodes:
            await read_history(node)
            base = set((await _walk(node))[0].values())
        islands = nodes[: self.dice.choice([1, 2])]
        for node in islands:
            node.cut(True)
        await self._work(nodes)
        for node in nodes[len(islands) :]:
            await node.sharing.wait_published()
        written = {content for node in nodes for content in (await _walk(node))[0].values()} - base
        for node in self.dice.sample(islands, self.dice.choice([0, len(islands)])):  # One after the other, or all at once.
            node.cut(False)
            await settled([node])
        await reconnect(*nodes)
        for node in nodes:
            files, _ = await _walk(node)
            assert written <= {*files.values()}, files
            shown = {(os.path.basename(path), inodes.get(node.db, one).content) for path, one in (await read_history(node)).items()}
            assert shown <= self.kept, shown - self.kept

    async def _work(self, nodes: tuple[Node, ...]) -> None:
        for _ in range(ACTS):
            with contextlib.suppress(OSError, CkptfsError):  # An island waits for the store, and a name may be taken.
                await self._act(self.dice.choice(nodes))

    async def _act(self, node: Node) -> None:
        files, directories = await _walk(node)
        kind = self.dice.choices([*KINDS], [*KINDS.values()])[0]
        new = os.path.join(self.dice.choice(["", *directories]), self.dice.choice(NAMES))
        file = self.dice.choice([*files] or [""])
        if kind == "make" and new not in files:
            await make_closed(node, (await node.make(new)).id)
        elif kind == "mkdir":
            await node.mkdir(new + "_directory")
        elif kind == "remove_directory" and directories:
            top = self.dice.choice(directories)
            for path in [path for path in files if path.startswith(top + "/")]:
                await node.unlink(path)
            for path in sorted((path for path in directories if (path + "/").startswith(top + "/")), reverse=True):
                await node.rmdir(path)
        elif kind == "keep" and (found := [path for path in files if path in NAMES]):
            chosen = self.dice.sample(found, self.dice.randint(1, len(found)))
            self.set_count += 1
            self.kept |= {(path.encode(), files[path]) for path in chosen}
            await keep(node, *chosen, number=self.set_count)
        elif file:
            await self._change_file(node, kind, file, new)

    async def _change_file(self, node: Node, kind: str, file: str, new: str) -> None:
        if kind == "write":
            await make_closed(node, (await separate(node, file)).id)
        elif kind == "replace":
            await make_closed(node, (await node.make(file + ".tmp")).id)
            await node.rename(file + ".tmp", file)
        elif kind == "unlink":
            await node.unlink(file)
        elif kind == "rename":
            await node.rename(file, new)
        elif kind == "link":
            await node.link(file, new)


async def _walk(node: Node) -> tuple[dict[str, int | None], list[str]]:
    """Return path -> content of all files outside the history, and the paths of directories."""
    files: dict[str, int | None] = {}
    directories: list[str] = []
    todo = [("", ROOT)]
    while todo:
        above, directory = todo.pop()
        await node.sharing.refresh_directory(directory)
        for entry, _ in list(namespace.iterate_entries(node.db, directory)):
            if entry.name == history.NAME:
                continue
            await node.sharing.refresh_inode(entry.child)
            inode, path = inodes.get(node.db, entry.child), os.path.join(above, entry.name.decode())
            if inode.is_directory:
                directories.append(path)
                todo.append((path, inode.id))
            else:
                files[path] = inode.content
    return files, directories


@pytest.mark.parametrize("seed", list_seeds(range(60)))
def test_what_was_written_has_a_name(tmp_path: Path, seed: int) -> None:
    play_on_nodes(tmp_path, World(seed).play, count=3)
