"""A catalog, tiers and a PFS in plain directories, with the flows that use the PFS, without a mount and a mover."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import catalog_names
from local_node import Told

from ckptfs import disk, limits
from ckptfs.catalog import copies, database, mover_requests
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.flow.fetch import Fetch
from ckptfs.flow.recover import Recover
from ckptfs.flow.scan import Scan
from ckptfs.model import ROOT, Tier
from ckptfs.tiers.storage import Tiers


class World:
    """One node as the flows see it."""

    def __init__(self, root: Path, **options: object) -> None:
        self.root = root
        self.pfs = root / "pfs"
        self.state = root / "state"
        for directory in (self.pfs, self.state, root / "mnt"):
            directory.mkdir(exist_ok=True)
        self.config = Config("test", root / "mnt", self.state, pfs=self.pfs, ram_bytes=2**30, **options)  # type: ignore[arg-type]
        database.create(self.state / "catalog.db")
        self.db = Database(self.state / "catalog.db", journalled=True)
        self.tiers = Tiers.from_config(self.config)
        self.told = Told()
        self.failure: Exception | None = None
        self.scan = Scan(self.db, self.tiers, self.config, self.told)
        self.fetch = Fetch(self.db, self.tiers, self.config, self.told)
        Recover(self.db, self.tiers, self.told).run()
        self.scan.prepare()
        self.fetch.prepare()

    def look(self, path: str = "", *, again: bool = True, tree: bool = False) -> mover_requests.MoverRequest:
        """Have a directory visited; the answered want."""
        want = mover_requests.insert_request(
            self.db, mover_requests.SCAN, self.inode(path), mover_requests.TREE if tree else mover_requests.COMPARE_AGAIN if again else ""
        )
        return self.run(self.scan, want)

    def visit(self, *paths: str) -> None:
        """Have directories visited for the first time, in this order."""
        for path in paths:
            self.look(path, again=False)

    def bring(self, path: str, argument: str = "") -> mover_requests.MoverRequest:
        """Have a file fetched; the answered want."""
        return self.run(self.fetch, mover_requests.insert_request(self.db, mover_requests.FETCH, self.inode(path), argument))

    def run(self, flow: Scan | Fetch, want: int) -> mover_requests.MoverRequest:
        """Steps until a want is answered."""
        pause, end = threading.Event(), time.monotonic() + 60
        while time.monotonic() < end:
            row = mover_requests.get(self.db, want)
            assert row is not None, "nobody answered in time"
            if row.state != mover_requests.OPEN:
                return row
            try:
                self.scan.step()
                flow.step()
            except Exception as failure:
                self.failure = failure
            pause.wait(0.001)
        raise AssertionError("never answered")

    def inode(self, path: str) -> int:
        return catalog_names.resolve(self.db, os.fsencode(path))

    def names(self, path: str = "") -> set[str]:
        """What the catalog shows in a directory."""
        return {os.fsdecode(row[0]) for row in self.db.rows("SELECT name FROM entry WHERE parent = ?", self.inode(path))}

    def column(self, path: str, name: str) -> object:
        """A column of the file's inode."""
        return self.db.value(f"SELECT {name} FROM inode WHERE id = ?", self.inode(path))

    def published(self, path: str, name: str) -> object:
        return self.db.value(f"SELECT {name} FROM pfs_file WHERE inode = ?", self.inode(path))

    def check(self) -> None:
        """What must hold whenever nothing is under way."""
        assert self.db.rows("SELECT * FROM scan") == self.db.rows("SELECT * FROM scan_dirty_name") == []
        assert self.db.rows("SELECT * FROM copy WHERE state = 0") == []
        links = self.db.rows(
            "SELECT i.id FROM inode i WHERE i.mode & 61440 = 16384 AND i.nlink > 0 AND i.nlink <> 2 + (SELECT count(*) FROM entry e"
            " JOIN inode c ON c.id = e.child WHERE e.parent = i.id AND c.mode & 61440 = 16384)"
        )
        assert links == [], "a directory's nlink is 2 plus its subdirectories"
        wrong = self.db.rows(
            "SELECT i.id FROM inode i WHERE i.mode & 61440 <> 16384 AND i.nlink <> (SELECT count(*) FROM entry WHERE child = i.id)"
        )
        assert wrong == [], "a file's nlink is the number of its names"

    def killed_at(self, fault: str, code: Callable[["World"], object]) -> bool:
        """Run `code` on this world in a fork under a fault; whether it was killed. The world must be used again through `reborn` only."""
        self.db.close()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                disk._fault = fault
                disk._calls.clear()
                code(World(self.root))
            os._exit(0)
        return os.waitpid(child, 0)[1] == signal.SIGKILL

    def in_a_process(self, code: str, wrapper: tuple[str, ...]) -> int:
        """Run `code` on this world under another command; its exit code. `w` is the world there."""
        self.db.close()
        start = f"import sys; sys.path[:0] = {sys.path!r}\nfrom pathlib import Path\nfrom pfs_world import World\n"
        command = [*wrapper, sys.executable, "-c", f"{start}w = World(Path({str(self.root)!r}))\n{code}"]
        return subprocess.run(command, timeout=120, check=False).returncode

    def reborn(self) -> "World":
        """The same node after its mover died and the next one has recovered."""
        self.db.close()
        return World(self.root)


def bytes_here(world: World, path: str) -> tuple[Tier, bytes]:
    """What a tier holds of a file."""
    content = int(str(world.column(path, "content")))
    (copy,) = copies.list_copies(world.db, content)
    assert copy.state == 1 and copy.verified_ns > 0
    with os.fdopen(world.tiers[copy.tier].open(content), "rb") as file:
        return copy.tier, file.read()


def lose_copies(world: World, path: str) -> None:
    """As eviction does."""
    content = int(str(world.column(path, "content")))
    for copy in copies.list_copies(world.db, content):
        copies.delete_copy(world.db, content, copy.tier)
        world.tiers[copy.tier].remove(content)


def corrupt(path: Path) -> None:
    """Change one byte, and nothing else that can be seen."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(4 * limits.MIB + 1)
        byte = file.read(1)
        file.seek(4 * limits.MIB + 1)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


__all__ = ["ROOT", "World", "bytes_here", "corrupt", "lose_copies"]
