"""A node without FUSE: a catalog and tiers in a temporary directory, and the acts of the mount that the mover's steps depend on."""

import atexit
import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptfs import disk
from ckptfs.catalog import contents, copies, database, namespace
from ckptfs.catalog.database import Database
from ckptfs.coherence import key_state
from ckptfs.config import Config
from ckptfs.flow.seal import Seal
from ckptfs.model import ROOT, Content, ContentState, CopyState, Tier
from ckptfs.tiers import local_copies
from ckptfs.tiers.space import Capacity
from ckptfs.tiers.storage import Tiers, TierStorage

MIB = 1024 * 1024


class Told:
    """A `Notify` that remembers."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, bytes]] = []
        self.inodes: list[int] = []
        self.works = 0

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        self.entries.append((parent, name))

    def invalidate_inode(self, inode: int) -> None:
        self.inodes.append(inode)

    def notify_sealed(self) -> None:
        """No mount waits for sets."""

    def notify_replies(self) -> None:
        """Not used here."""

    def wake_lanes(self, urgent_lane: str = "") -> None:
        self.works += 1


class Node:
    """RAM, NVMe and a PFS as plain directories. `files` may be made, closed, sealed and read as the mount would."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("state/ram", "nvme", "pfs"):
            (root / name).mkdir(parents=True, exist_ok=True)
        database.create(root / "state" / "catalog.db")
        self.config = Config(
            name="test", mountpoint=root / "mnt", state=root / "state", ram_bytes=64 * MIB, nvme=root / "nvme", pfs=root / "pfs"
        )
        self.db = Database(root / "state" / "catalog.db", journalled=True)
        self.tiers = Tiers.from_config(self.config)
        _ = self.tiers[Tier.PFS].uuid
        self.told = Told()

    # --- what the mount does -----------------------------------------------------------------------------------------

    def make(self, name: bytes, data: bytes, *, tier: Tier = Tier.RAM, closed: bool = True) -> int:
        """Create a file, write it, close it; its content."""
        with self.db.transaction():
            inode = namespace.create(self.db, ROOT, name, 0o100644, uid=0, gid=0, allow_unimported=True).id
        return self.write(inode, data, tier=tier, closed=closed)

    def write(self, inode: int, data: bytes, *, tier: Tier = Tier.RAM, closed: bool = True) -> int:
        """The next content of a file."""
        with self.db.transaction():
            content = contents.insert_content(self.db, inode, tier)
            fd = self.tiers[tier].create(content)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        if closed:
            self.close_content(content, len(data))
        return content

    def make_sealed(self, name: bytes, data: bytes) -> int:
        """Create, write, close and seal a file; its content."""
        content = self.make(name, data)
        Seal(self.db, self.tiers, self.config, self.told).step()
        return content

    def reopen(self, content: int, tier: Tier) -> int:
        """Open a file for writing in place, as the mount does; the content that is open then."""
        held = contents.get_file_content(self.db, self.inode(content))
        assert held is not None and held.content == content
        if not held.is_on_other_nodes:
            with self.db.transaction():
                contents.mark_open(self.db, held.inode.id, content, tier)
            return content
        with self.db.transaction():
            successor = contents.insert_reserved_content(self.db, tier)
        assert self.tiers[tier].link(content, successor)
        with self.db.transaction():
            assert contents.record_successor(self.db, held.inode.id, content, successor)
            with key_state.change_unmarked(self.db):
                contents.set_current(self.db, held.inode.id, successor)
        local_copies.remove_unrecorded(self.db, self.tiers[tier], content)
        return successor

    def close_content(self, content: int, size: int) -> None:
        """Record the last close of a content that was written."""
        with self.db.transaction():
            contents.mark_closed(self.db, self.inode(content), content, size, 1, 2)

    def copy_to_tier(self, content: int, tier: Tier) -> None:
        """Copy a sealed content from RAM to `tier`."""
        local_copies.copy_to_tier(self.db, self.tiers, self.row(content), Tier.RAM, tier)

    def hold(self, content: int, *, writer: bool = False) -> int:
        """An open handle."""
        with self.db.transaction():
            return self.db.insert("INSERT INTO handle (inode, content, writer) VALUES (?, ?, ?)", self.inode(content), content, int(writer))

    # --- looking -----------------------------------------------------------------------------------------------------

    def inode(self, content: int) -> int:
        return int(self.db.value("SELECT inode FROM content WHERE id = ?", content))

    def shown(self, inode: int) -> int | None:
        found: int | None = self.db.value("SELECT content FROM inode WHERE id = ?", inode)
        return found

    def state(self, content: int) -> ContentState | None:
        found = contents.get_content(self.db, content)
        return None if found is None else found.state

    def copies(self, content: int) -> dict[Tier, CopyState]:
        return {copy.tier: copy.state for copy in copies.list_copies(self.db, content)}

    def data(self, content: int, tier: Tier = Tier.RAM) -> bytes:
        fd = self.tiers[tier].open(content)
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def path(self, content: int, tier: Tier = Tier.RAM) -> Path:
        """Where a tier keeps the bytes of a content."""
        return self.tiers[tier].root / "contents" / f"{content:016x}"

    def files(self, tier: Tier) -> set[int]:
        return set(self.tiers[tier].contents())

    def row(self, content: int) -> Content:
        """Return the row of a content that exists."""
        found = contents.get_content(self.db, content)
        assert found is not None
        return found

    def publish(self, *contents_: int) -> None:
        """Record these contents as written back, and read back."""
        for row in map(self.row, contents_):
            self.db.run(
                "INSERT OR REPLACE INTO pfs_file (inode, generation, complete, size, mtime_ns, pfs_inode, digest, blocks, checked_ns)"
                " VALUES (?, ?, 1, ?, 2, 77, ?, ?, 9)",
                row.inode, row.generation, row.size, row.digest, row.block_digests,
            )  # fmt: skip

    def spoil(self, content: int, tier: Tier) -> None:
        """Turn one bit of a copy, as failing memory or a failing disk would."""
        path = self.path(content, tier)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def squeeze(self, tier: Tier, total: int) -> None:
        """Let `tier` have `total` bytes, of which our files take their sizes."""
        self.tiers = Tiers(dict(self.tiers) | {tier: Squeezed(self.tiers[tier], total)}, self.config.ram_high)

    def configure(self, **changes: object) -> None:
        self.config = replace(self.config, **changes)  # type: ignore[arg-type]
        self.tiers = Tiers.from_config(self.config)


def run_until_idle(flow: Any) -> None:
    """Call `flow.step` until there is nothing left to do."""
    while flow.step():
        pass


def inject_fault(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Let `fault` ("LABEL=ACTION", empty for none) hit the disk operations from now on."""
    monkeypatch.setattr(disk, "_fault", fault)
    monkeypatch.setattr(disk, "_calls", type(disk._calls)())


class Squeezed(TierStorage):
    """A place with little room, counted exactly."""

    def __init__(self, storage: TierStorage, total: int) -> None:
        super().__init__(storage.tier, storage.root)
        self._total = total

    def get_capacity(self) -> Capacity:
        used = sum(found.st_size for number in self.contents() if (found := self.stat(number)) is not None)
        return Capacity(self._total, max(0, self._total - used))


_FORKER = """
import json, os, sys
from pathlib import Path
from local_node import *
from ckptfs import disk
from ckptfs.flow import evict, reclaim, recover, seal, verify
for line in sys.stdin:
    root, script, fault = json.loads(line)
    child = os.fork()
    if not child:
        try:
            disk._fault = fault
            exec(script, {**globals(), "node": Node(Path(root))})
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _forker() -> "subprocess.Popen[str]":
    """A process that has imported everything, has no catalog open, and forks for each script: new interpreters would take minutes."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(place for place in sys.path if place))
    command = [sys.executable, "-c", _FORKER]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    return process


def in_process(root: Path, script: str, *, fault: str = "") -> int:
    """Run `script` in a process of its own, with `node` made and a fault asked for; its exit code (negative: the signal)."""
    process = _forker()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([str(root), script, fault]) + "\n")
    process.stdin.flush()
    code = int(process.stdout.readline())
    assert code in {0, -9}, "the script failed; its traceback is above"
    return code
