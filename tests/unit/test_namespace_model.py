"""The catalog's namespace against a real one: the same random operations on a directory of this machine, errno by errno (P2, F4)."""

import contextlib
import ctypes
import errno
import functools
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs.catalog import database, inodes, namespace
from ckptfs.catalog.database import Database
from ckptfs.model import ROOT, Inode

libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100

paths = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3).map("/".join)
steps = st.one_of(
    st.tuples(st.sampled_from(["file", "mkdir", "mkdir", "symlink", "unlink", "rmdir"]), paths),
    st.tuples(st.just("link"), paths, paths),
    st.tuples(st.sampled_from(["rename", "rename", "noreplace", "exchange"]), paths, paths),
)
FLAGS = {"rename": 0, "noreplace": namespace.NOREPLACE, "exchange": namespace.EXCHANGE}


class Real:
    """The operations on a directory of this machine."""

    def __init__(self, root: str) -> None:
        self.root = root

    def act(self, op: str, first: str, second: str = "") -> None:
        one, two = f"{self.root}/{first}", f"{self.root}/{second}"
        if op == "file":
            os.close(os.open(one, os.O_CREAT | os.O_EXCL, 0o644))
        elif op == "mkdir":
            os.mkdir(one)
        elif op == "symlink":
            os.symlink("target", one)
        elif op == "link":
            os.link(one, two, follow_symlinks=False)
        elif op in FLAGS:
            if libc.renameat2(AT_FDCWD, one.encode(), AT_FDCWD, two.encode(), FLAGS[op]) != 0:
                raise OSError(ctypes.get_errno(), op)
        else:
            {"unlink": os.unlink, "rmdir": os.rmdir}[op](one)

    def tree(self) -> dict[str, tuple[int, int]]:
        """Path -> (type, link count)."""
        found = {"": (stat.S_IFDIR, os.lstat(self.root).st_nlink)}
        for base, names, files in os.walk(self.root):
            for name in names + files:
                path = f"{base}/{name}"
                figures = os.lstat(path)
                found[path.removeprefix(self.root)] = (stat.S_IFMT(figures.st_mode), figures.st_nlink)
        return found


class Ours:
    """The same on a catalog, where the kernel would have walked the path."""

    def __init__(self, db: Database) -> None:
        self.db = db

    def walk(self, path: str) -> tuple[int, bytes]:
        """(the directory that holds the last name, that name)."""
        *above, name = path.split("/")
        directory = ROOT
        for part in above:
            inode = namespace.lookup(self.db, directory, part.encode())
            if not inode.is_directory:
                # A symlink's target does not exist, for the kernel follows it; anything else is no directory.
                raise OSError(errno.ENOENT if stat.S_ISLNK(inode.mode) else errno.ENOTDIR, part)
            directory = inode.id
        return directory, name.encode()

    def make(self, path: str, mode: int, target: bytes | None = None) -> None:
        namespace.create(self.db, *self.walk(path), mode, uid=os.geteuid(), gid=os.getegid(), target=target)

    def act(self, op: str, first: str, second: str = "") -> None:
        with self.db.transaction():
            if op == "file":
                self.make(first, stat.S_IFREG | 0o644)
            elif op == "mkdir":
                self.make(first, stat.S_IFDIR | 0o755)
            elif op == "symlink":
                self.make(first, stat.S_IFLNK | 0o777, b"target")
            elif op == "link":
                source = namespace.lookup(self.db, *self.walk(first))
                namespace.link(self.db, source.id, *self.walk(second))
            elif op in FLAGS:
                old, new = self.walk(first), self.walk(second)
                namespace.rename(self.db, *old, *new, FLAGS[op])
            else:
                {"unlink": namespace.unlink, "rmdir": namespace.rmdir}[op](self.db, *self.walk(first))

    def tree(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        self._gather(inodes.get(self.db, ROOT), "", found)
        return found

    def _gather(self, inode: Inode, path: str, found: dict[str, tuple[int, int]]) -> None:
        found[path] = (stat.S_IFMT(inode.mode), inode.nlink)
        if inode.is_directory:
            for entry, child in namespace.iterate_entries(self.db, inode.id):
                assert not child.is_directory or child.parent == inode.id
                self._gather(child, f"{path}/{entry.name.decode()}", found)


def outcome(act: Callable[[], None]) -> str:
    """The name of the errno, or ok."""
    try:
        act()
    except OSError as refusal:
        return errno.errorcode[refusal.errno or 0]
    return "ok"


@contextlib.contextmanager
def both() -> Iterator[tuple[Real, Ours]]:
    # A tmpfs where there is one: link counts of directories differ on filesystems like btrfs.
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ckptfs-model-", dir=shm) as base:
        os.mkdir(f"{base}/tree")
        database.create(Path(base, "catalog.db"))
        db = Database(Path(base, "catalog.db"), journalled=False)
        try:
            yield Real(f"{base}/tree"), Ours(db)
        finally:
            db.close()


@given(st.lists(steps, max_size=40))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_every_outcome_and_the_tree_are_those_of_a_real_directory(operations: list[tuple[str, ...]]) -> None:
    with both() as (real, ours):
        for operation in operations:
            expected = outcome(functools.partial(real.act, *operation))
            assert outcome(functools.partial(ours.act, *operation)) == expected, operation
        assert ours.tree() == real.tree()


changes = st.tuples(st.sampled_from(["make", "remove", "rename", "read"]), st.integers(0, 30), st.integers(0, 30))


@given(st.lists(changes, max_size=80))
@settings(max_examples=60, deadline=None)
def test_a_name_that_stays_is_read_exactly_once_whatever_comes_and_goes(operations: list[tuple[str, int, int]]) -> None:
    with both() as (_, ours):
        for number in range(0, 31, 2):
            ours.act("file", f"n{number}")
        staying = {f"n{number}" for number in range(0, 31, 2)}
        seen: list[str] = []
        cookie = 0
        for op, first, second in operations:
            one, two = f"n{first}", f"n{second}"
            if op == "read":
                batch = next(namespace.iterate_entries(ours.db, ROOT, cookie), None)
                if batch is not None:
                    cookie = batch[0].cookie
                    seen.append(batch[0].name.decode())
                continue
            arguments = ("file", one) if op == "make" else ("unlink", one) if op == "remove" else ("rename", one, two)
            done = outcome(functools.partial(ours.act, *arguments))
            if done == "ok" and (op == "remove" or (op == "rename" and one != two)):
                staying.discard(one)
        for entry, _ in namespace.iterate_entries(ours.db, ROOT, cookie):
            seen.append(entry.name.decode())
        for name in staying:
            assert seen.count(name) == 1, name
