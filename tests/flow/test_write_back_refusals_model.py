"""P5, P6 as a property: whatever an application does while the PFS refuses some names, what has nothing to do with them is on the PFS, no
file that was there is lost, and everything is exact as soon as the PFS refuses nothing any more.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from write_back_world import Mount, memory

from ckptfs.catalog import namespace
from ckptfs.errors import TierUnavailable
from ckptfs.flow.write_back import WriteBack

NAMES = [b"a", b"b", b"d", b"d/a", b"d/b", b"e", b"e/a", b"d/f", b"d/f/a"]
CALLS = {"rename", "unlink", "rmdir", "link", "mkdir", "symlink"}
act = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(NAMES)),
    st.tuples(st.just("mkdir"), st.sampled_from(NAMES)),
    st.tuples(st.just("symlink"), st.sampled_from(NAMES)),
    st.tuples(st.just("link"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.tuples(st.just("rename"), st.sampled_from(NAMES), st.sampled_from(NAMES), st.sampled_from([0, 0, 0, namespace.EXCHANGE])),
    st.tuples(st.just("unlink"), st.sampled_from(NAMES)),
    st.tuples(st.just("rmdir"), st.sampled_from(NAMES)),
    st.tuples(st.just("chmod"), st.sampled_from(NAMES)),
    st.tuples(st.just("rest")),
    st.tuples(st.just("rest")),
    st.tuples(st.just("restart")),
    st.tuples(st.just("retry")),
)


class RefusedWorld:
    """A mount whose PFS refuses `calls` for names whose last part is in `refused`, until the end."""

    def __init__(self, refused: set[bytes], calls: set[str]) -> None:
        self.root = memory()
        self.mount = Mount(self.root)
        self.flow = self.mount.write_back()
        self.refused = refused
        self.calls = calls
        self.touched: set[bytes] = set()
        self.serial = 0

    def close(self) -> None:
        self.mount.db.close()
        self.mount.tiers.close()
        shutil.rmtree(self.root)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        originals = {name: getattr(os, name) for name in self.calls}

        def build(name: str) -> Any:
            def call(*values: Any, **named: Any) -> Any:
                relative = named.keys() & {"dir_fd", "src_dir_fd", "dst_dir_fd"}
                if relative and any(isinstance(value, bytes) and value in self.refused for value in values):
                    raise OSError(errno.EACCES, "refused")
                return originals[name](*values, **named)

            return call

        try:
            for name in self.calls:
                setattr(os, name, build(name))
            yield
        finally:
            for name, original in originals.items():
                setattr(os, name, original)

    def do(self, step: tuple[Any, ...]) -> None:
        name, *values = step
        if name in {"rest", "restart", "retry"}:
            if name == "restart":
                self.flow = self.mount.write_back()
            if name == "retry":
                self.flow.retry_now()
            with self.refusing():
                rest(self.flow)
            self.check()
            return
        paths = [value for value in values if isinstance(value, bytes)]
        if name in {"put", "symlink"}:
            self.serial += 1
            values.append(b"%d" % self.serial)
        if name == "chmod":
            values.append(0o600)
        try:
            getattr(self.mount, name)(*values) if name != "put" else self.put(*values)
        except OSError:
            return
        if any(self.is_touched(path) for path in paths):
            self.touched.update(paths)

    def put(self, path: bytes, data: bytes) -> None:
        found = self.mount.tree().get(path)
        if found is None or found[0] == "file":
            self.mount.put(path, data)

    def is_touched(self, path: bytes) -> bool:
        """Return True if a path, something above or below it has to do with a refused name."""
        if set(path.split(b"/")) & self.refused:
            return True
        return any(path == other or path.startswith(other + b"/") or other.startswith(path + b"/") for other in self.touched)

    def check(self) -> None:
        mount, pfs = self.mount.tree(), self.mount.on_pfs()
        for path in mount.keys() | pfs.keys():
            if not self.is_touched(path):
                assert mount.get(path) == pfs.get(path), path
        assert self.mount.temporaries() == []
        self.check_shown()

    def check_shown(self) -> None:
        """P5: what the catalog says of the PFS is true: an eviction rests on it."""
        for inode, size, pfs_inode in self.mount.db.rows("SELECT inode, size, pfs_inode FROM pfs_file"):
            names = self.mount.db.rows("SELECT parent, name FROM pfs_entry WHERE inode = ?", inode)
            assert names, inode
            for parent, name in names:
                path = os.path.join(os.fsencode(self.mount.pfs), *(pfs_path(self.mount, parent)), bytes(name))
                found = os.lstat(path)
                assert (found.st_size, found.st_ino) == (size, pfs_inode), path

    def finish(self) -> None:
        self.flow.retry_now()
        self.mount.settle_exactly(self.flow)


def pfs_path(mount: Mount, directory: int) -> list[bytes]:
    names: list[bytes] = []
    while directory != 1:
        row = mount.db.row("SELECT parent, name FROM pfs_entry WHERE inode = ?", directory)
        assert row is not None
        names.insert(0, bytes(row[1]))
        directory = row[0]
    return names


def rest(flow: WriteBack) -> None:
    for _ in range(400):
        try:
            if not flow.step():
                return
        except TierUnavailable as failure:
            raise AssertionError("a refusal of one name is taken for one of the whole PFS") from failure
    raise AssertionError("write-back never rests")


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(act, max_size=40),
    st.sets(st.sampled_from([b"a", b"b", b"d", b"f"]), min_size=1, max_size=2),
    st.sets(st.sampled_from(sorted(CALLS)), min_size=1),
)
def test_the_rest_is_there_and_nothing_is_lost(steps: list[tuple[Any, ...]], refused: set[bytes], calls: set[str]) -> None:
    world = RefusedWorld(refused, calls)
    try:
        for step in steps:
            world.do(step)
        world.finish()
    finally:
        world.close()
