"""A node without FUSE whose files are made, changed and removed by path as the mount would do it, and its PFS: for tests of write-back."""

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import catalog_names
import pytest
from local_node import Node
from shared_sets import delete_whole_set

from ckptfs import disk
from ckptfs.catalog import contents, history, inodes, namespace, summary
from ckptfs.digest import RunningDigest
from ckptfs.errors import TierUnavailable
from ckptfs.flow.write_back import WriteBack
from ckptfs.model import ROOT, ContentState, Tier
from ckptfs.tiers import local_copies

Tree = dict[bytes, tuple[Any, ...]]
CHANGES = ("put", "link", "move", "swap", "unlink", "rmdir", "conflict")


def memory() -> Path:
    """A new directory in memory where there is one: hundreds of small trees wait for no disk there."""
    return Path(tempfile.mkdtemp(prefix="ckptfs-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))


class Killed(BaseException):
    """Stands for SIGKILL: from then on no disk operation happens."""


class Mount(Node):
    """The acts of an application, each with what the mount does about it. Paths are bytes, relative to the mount."""

    def __init__(self, root: Path, *, seal_at_once: bool = True) -> None:
        super().__init__(root)
        self.seal_at_once = seal_at_once
        self.pfs = root / "pfs"

    def at(self, path: bytes) -> tuple[int, bytes]:
        head, _, name = path.rpartition(b"/")
        return catalog_names.resolve(self.db, head), name

    def number(self, path: bytes) -> int:
        return catalog_names.resolve(self.db, path)

    def mkdir(self, path: bytes, mode: int = 0o755) -> None:
        with self.db.transaction():
            namespace.create(self.db, *self.at(path), stat.S_IFDIR | mode, uid=0, gid=0)

    def symlink(self, path: bytes, target: bytes) -> None:
        with self.db.transaction():
            namespace.create(self.db, *self.at(path), stat.S_IFLNK | 0o777, uid=0, gid=0, target=target)

    def mknod(self, path: bytes, mode: int, rdev: int = 0) -> None:
        with self.db.transaction():
            namespace.create(self.db, *self.at(path), mode, uid=0, gid=0, rdev=rdev)

    def put(self, path: bytes, data: bytes, *, closed: bool = True, tier: Tier = Tier.RAM) -> int:
        """creat, write, close; the content."""
        with self.db.transaction():
            found = namespace.find_child(self.db, *self.at(path))
            inode = namespace.create(self.db, *self.at(path), 0o100644, uid=0, gid=0).id if found is None else found.id
            if found is not None and found.history:
                history.separate(self.db, inode)
            content = contents.insert_content(self.db, inode, tier)
            with os.fdopen(self.tiers[tier].create(content), "wb") as file:
                file.write(data)
        if closed:
            self.close(content, len(data))
        return content

    def append(self, path: bytes, data: bytes, *, closed: bool = True) -> int:
        """Open in place, write at the end, close; the content."""
        content = self.shown(self.number(path))
        assert content is not None
        with self.db.transaction():
            if inodes.get(self.db, self.inode(content)).history:
                self.separate(content)
            contents.mark_open(self.db, self.inode(content), content, Tier.RAM)
        with os.fdopen(self.tiers[Tier.RAM].open(content, os.O_RDWR), "r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(data)
            size = file.tell()
        if closed:
            self.close(content, size)
        return content

    def separate(self, content: int) -> None:
        """Give the history a copy, as an open for writing does before it opens the content."""
        with self.db.transaction():
            copied = contents.insert_reserved_content(self.db, Tier.RAM)
            os.close(local_copies.copy_open(self.tiers[Tier.RAM].open(content), self.tiers[Tier.RAM], copied))
            history.separate(self.db, self.inode(content), copied)

    def close(self, content: int, size: int) -> None:
        found = os.stat(self.tiers[Tier.RAM].root / "contents" / f"{content:016x}") if self.copies(content).get(Tier.RAM) else None
        with self.db.transaction():
            when = 1 if found is None else found.st_mtime_ns
            contents.mark_closed(self.db, self.inode(content), content, size, when, when)
        if self.seal_at_once:
            self.seal(content)

    def seal(self, content: int) -> None:
        row = contents.get_content(self.db, content)
        assert row is not None
        tier = next(iter(self.copies(content)))
        running = RunningDigest()
        running.update(self.data(content, tier))
        whole, blocks = running.finish()
        with self.db.transaction():
            contents.mark_sealed(self.db, [contents.SealResult(content, row.inode, row.change, tier, running.size, whole, blocks)])

    def synced(self, content: int) -> None:
        """fsync while open."""
        size = len(self.data(content))
        with self.db.transaction():
            contents.record_fsync(self.db, self.inode(content), content, size, 5, 5)

    def link(self, old: bytes, new: bytes) -> None:
        with self.db.transaction():
            namespace.link(self.db, self.number(old), *self.at(new))

    def rename(self, old: bytes, new: bytes, flags: int = 0) -> None:
        with self.db.transaction():
            replaced = namespace.rename(self.db, *self.at(old), *self.at(new), flags)
            self._reap(None if replaced is None else replaced.id)

    def unlink(self, path: bytes) -> None:
        with self.db.transaction():
            self._reap(namespace.unlink(self.db, *self.at(path)).id)

    def rmdir(self, path: bytes) -> None:
        with self.db.transaction():
            self._reap(namespace.rmdir(self.db, *self.at(path)).id)

    def chmod(self, path: bytes, mode: int) -> None:
        with self.db.transaction():
            inodes.set_attributes(self.db, self.number(path), mode=mode)

    def chown(self, path: bytes, uid: int) -> None:
        with self.db.transaction():
            inodes.set_attributes(self.db, self.number(path), uid=uid)

    def utime(self, path: bytes, mtime_ns: int) -> None:
        with self.db.transaction():
            inodes.set_attributes(self.db, self.number(path), atime_ns=mtime_ns, mtime_ns=mtime_ns)

    def setxattr(self, path: bytes, name: bytes, value: bytes) -> None:
        with self.db.transaction():
            inodes.set_xattr(self.db, self.number(path), name, value)

    def keep(self, path: bytes) -> None:
        """Make a set of one file, as the tracker does. Raises EISDIR for anything else."""
        (parent, name), file = self.at(path), inodes.get(self.db, self.number(path))
        if not file.is_file:
            raise IsADirectoryError(path)
        with self.db.transaction():
            series = history.insert_series(self.db, parent, name + b"*").directory
            record = history.SetRecord(history.get_next_number(self.db, series), name, (1,), 1, file.size, 1, is_group=True)
            directory = history.begin_set(self.db, series, record)
            history.insert_link(self.db, file.id, directory, name)
            history.finish_set(self.db, directory)

    def forget(self, _: bytes) -> None:
        """Delete the oldest set. Raises ENOENT without one."""
        sets = [found.directory for one in history.list_series(self.db) for found in history.list_sets(self.db, one.directory)]
        if not sets:
            raise FileNotFoundError
        with self.db.transaction():
            delete_whole_set(self.db, min(sets))
            for inode in namespace.list_orphans(self.db):
                self._reap(inode)

    def _reap(self, inode: int | None) -> None:
        if inode is not None:
            for content in namespace.delete_forgotten(self.db, [inode]).get(inode, []):
                self.tiers[Tier.RAM].remove(content)

    # --- trees --------------------------------------------------------------------------------------------------------

    def tree(self) -> Tree:
        """What the mount shows, of files those whose bytes were closed."""
        found: Tree = {}
        todo = [(ROOT, b"")]
        while todo:
            parent, path = todo.pop()
            for name, child in self.db.rows("SELECT name, child FROM entry WHERE parent = ?", parent):
                inode = inodes.get(self.db, child)
                here = path + b"/" + name if path else bytes(name)
                if inode.is_directory:
                    found[here] = ("directory", stat.S_IMODE(inode.mode))
                    todo.append((child, here))
                elif stat.S_ISLNK(inode.mode):
                    found[here] = ("symlink", inode.target)
                elif inode.is_file:
                    data = b"" if inode.content is None else self._bytes(inode.content)
                    if data is not None:
                        found[here] = ("file", data, stat.S_IMODE(inode.mode))
                else:
                    found[here] = ("other", inode.mode)
        return found

    def _bytes(self, content: int) -> bytes | None:
        if self.state(content) is ContentState.OPEN:
            return None
        return self.data(content, next(iter(self.copies(content))))

    def on_pfs(self) -> Tree:
        """What the PFS shows to people: temporary names and our work area left out."""
        return pfs_tree(self.pfs)

    def temporaries(self) -> list[str]:
        return [str(path) for path in self.pfs.rglob(".ckptfs.*") if path.name != os.fsdecode(history.NAME)]

    def troubles(self) -> list[dict[str, str]]:
        """What `status` shows."""
        return [value for _, value, _ in summary.list_troubles(self.db)]

    # --- write-back ---------------------------------------------------------------------------------------------------

    def write_back(self) -> WriteBack:
        return WriteBack(self.db, self.tiers, self.config, self.told)

    def settle(self, flow: WriteBack | None = None, steps: int = 400) -> None:
        """Write back until there is nothing to do."""
        flow = flow or self.write_back()
        for _ in range(steps):
            if not flow.step():
                break
        assert self.db.value("SELECT count(*) FROM journal") == 0, "the journal is empty when write-back rests"

    def settle_exactly(self, flow: WriteBack | None = None) -> None:
        self.settle(flow)
        self.exact()

    def exact(self) -> None:
        """The PFS shows the mount's tree, the catalog knows it, and nothing is left over."""
        assert self.on_pfs() == self.tree()
        assert self.temporaries() == []
        for table in ("journal", "pfs_batch", "pfs_pending", "pfs_stale_times"):
            assert self.db.rows(f"SELECT * FROM {table}") == [], table
        entries = self.db.rows("SELECT parent, name, inode FROM pfs_entry")
        shown = {self._path(parent, bytes(name)): inode for parent, name, inode in entries}
        assert shown == {path: self.number(path) for path in self.tree()}
        for inode, size, mtime_ns, pfs_inode in self.db.rows("SELECT inode, size, mtime_ns, pfs_inode FROM pfs_file"):
            path = next(path for path, number in shown.items() if number == inode)
            found = os.lstat(os.path.join(os.fsencode(self.pfs), path))
            assert (found.st_size, found.st_mtime_ns, found.st_ino) == (size, mtime_ns, pfs_inode)

    def _path(self, parent: int, name: bytes) -> bytes:
        above = namespace.get_path(self.db, parent)
        return above + b"/" + name if above else name


def pfs_tree(root: Path) -> Tree:
    found: Tree = {}
    top = os.fsencode(root)
    for base, directories, files in os.walk(top):
        if base == top and b".ckptfs" in directories:
            directories.remove(b".ckptfs")
        for name in directories + files:
            if name.startswith(b".ckptfs.") and name != history.NAME:
                continue
            path = os.path.join(base, name)
            here = os.path.relpath(path, top)
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                found[here] = ("symlink", os.readlink(path))
            elif stat.S_ISDIR(status.st_mode):
                found[here] = ("directory", stat.S_IMODE(status.st_mode))
            elif stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    found[here] = ("file", file.read(), stat.S_IMODE(status.st_mode))
            else:
                found[here] = ("other", status.st_mode)
    return found


def rest(flow: WriteBack, failures_max: int = 20) -> None:
    """Step until write-back rests. So many errors of the PFS are tried again, as the lane does."""
    for _ in range(400):
        try:
            if not flow.step():
                return
        except TierUnavailable:
            failures_max -= 1
            if failures_max < 0:
                raise
    raise AssertionError("write-back never rests")


@contextmanager
def mended_after(mount: Mount) -> Iterator[tuple[WriteBack, pytest.MonkeyPatch]]:
    """What the block makes the PFS refuse, it takes afterwards, and everything is exact."""
    flow = mount.write_back()
    with pytest.MonkeyPatch.context() as patch:
        yield flow, patch
    flow.retry_now()
    mount.settle_exactly(flow)


class Refusal:
    """A PFS that refuses one kind of system call for names that `is_refused` knows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str, is_refused: Callable[[bytes], bool], code: int) -> None:
        self.calls = 0
        original = getattr(os, call)

        def refusing(*values: Any, **named: Any) -> Any:
            names = [os.fsencode(value) for value in values if isinstance(value, str | bytes)]
            if named.keys() & {"dir_fd", "src_dir_fd", "dst_dir_fd"} and any(is_refused(name) for name in names):
                self.calls += 1
                raise OSError(code, os.strerror(code))
            return original(*values, **named)

        monkeypatch.setattr(os, call, refusing)


@contextmanager
def unreadable(directory: bytes, call: str, code: int) -> Iterator[None]:
    """A PFS that does not open this directory, or opens it and tells nothing of its entries (`call`: stat)."""
    original = getattr(os, call)

    def failing(*values: Any, **named: Any) -> Any:
        place = values[0] if call == "open" else os.readlink(b"/proc/self/fd/%d" % (named.get("dir_fd") or 0))
        if os.fsencode(place).rpartition(b"/")[2] == directory:
            raise OSError(code, os.strerror(code))
        return original(*values, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, failing)
        yield


@contextmanager
def intercepted(before: Callable[[str], None], after: Callable[[str], None] = lambda label: None) -> Iterator[None]:
    """Let `before` and `after` see the label of every disk operation; either may raise."""
    original = disk.act

    def act(label: str, call: Callable[..., Any], *values: Any, **named: Any) -> Any:
        assert label in disk.LABELS, label
        before(label)
        result = original(label, call, *values, **named)
        after(label)
        return result

    disk.act = act
    try:
        yield
    finally:
        disk.act = original


@contextmanager
def killed_at(number: int, *, after: bool) -> Iterator[list[str]]:
    """Kill the mover before or after its `number`-th disk operation (from 0); the labels that it came to."""
    seen: list[str] = []
    dead = False

    def strike(label: str) -> None:
        nonlocal dead
        if dead or len(seen) > number:
            dead = True
            raise Killed

    def count(label: str) -> None:
        if dead:
            raise Killed
        seen.append(label)
        if not after:
            strike(label)

    with intercepted(count, strike if after else lambda label: None):
        yield seen
