"""P6 and P8 as a property: whatever an application does and whenever the mover is killed, the PFS shows a state that the mount was in,
never goes back, and shows the mount's tree in the end.
"""

import contextlib
import errno
import itertools
import shutil

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from write_back_world import CHANGES, Killed, Mount, Tree, intercepted, killed_at, memory, pfs_tree

from ckptfs.catalog import namespace
from ckptfs.errors import TierUnavailable

NAMES = [b"a", b"b", b"d", b"d/a", b"d/b", b"e", b"e/a", b"d/f", b"d/f/a"]

act = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(NAMES), st.integers(0, 3)),
    st.tuples(st.just("mkdir"), st.sampled_from(NAMES)),
    st.tuples(st.just("symlink"), st.sampled_from(NAMES)),
    st.tuples(st.just("mknod"), st.sampled_from(NAMES)),
    st.tuples(st.just("link"), st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.tuples(st.just("rename"), st.sampled_from(NAMES), st.sampled_from(NAMES), st.sampled_from([0, 0, 0, namespace.EXCHANGE])),
    st.tuples(st.just("unlink"), st.sampled_from(NAMES)),
    st.tuples(st.just("rmdir"), st.sampled_from(NAMES)),
    st.tuples(st.just("chmod"), st.sampled_from(NAMES), st.sampled_from([0o600, 0o755])),
    st.tuples(st.just("do twice")),
    st.tuples(st.just("refuse"), st.sets(st.integers(0, 5), min_size=1), st.booleans()),
    st.tuples(st.just("write back"), st.sampled_from([0, 1, 2, 3, 5, 8, 13, 21, 34, 1000]), st.booleans()),
)


class World:
    """A mount, and the PFS watched at every change. `history` holds the states of the mount; the PFS may only go forward in it."""

    def __init__(self, *, rewrite: bool) -> None:
        self.root = memory()
        self.mount = Mount(self.root)
        self.rewrite = rewrite
        self.serial = 0
        self.history: list[Tree] = [{}]
        self.place = 0

    def close(self) -> None:
        self.mount.db.close()
        self.mount.tiers.close()
        shutil.rmtree(self.root)

    def do(self, step: tuple) -> None:  # type: ignore[type-arg]
        name, *values = step
        if name == "write back":
            self.write_back(*values)
            return
        if name == "refuse":
            self.refuse(*values)
            return
        if name == "do twice":
            self.do_twice()
            return
        try:
            getattr(self, name)(*values)
        except OSError:
            return
        self.history.append(_without_modes(self.mount.tree()))

    def put(self, path: bytes, size: int) -> None:
        """Each file is written once if every state is to be told apart: a second writing may make the first one's bytes vanish."""
        if not self.rewrite and path in self.mount.tree():
            return
        if path in self.mount.tree() and self.mount.tree()[path][0] != "file":
            return
        self.serial += 1
        self.mount.put(path, b"%d " % self.serial * (size + 1))

    def mkdir(self, path: bytes) -> None:
        self.mount.mkdir(path)

    def symlink(self, path: bytes) -> None:
        self.serial += 1
        self.mount.symlink(path, b"%d" % self.serial)

    def mknod(self, path: bytes) -> None:
        self.mount.mknod(path, 0o100600)

    def link(self, old: bytes, new: bytes) -> None:
        self.mount.link(old, new)

    def rename(self, old: bytes, new: bytes, flags: int) -> None:
        self.mount.rename(old, new, flags)

    def unlink(self, path: bytes) -> None:
        self.mount.unlink(path)

    def rmdir(self, path: bytes) -> None:
        self.mount.rmdir(path)

    def chmod(self, path: bytes, mode: int) -> None:
        self.mount.chmod(path, mode)

    def write_back(self, operations: int, after: bool) -> None:
        """Let the mover come as far as its so-manieth disk operation."""
        try:
            with self.watched(), killed_at(operations, after=after):
                self.mount.settle()
        except Killed:
            pass

    def do_twice(self) -> None:
        """The mover dies when its batch is on the PFS, but not in the catalog."""

        def strike(label: str) -> None:
            if label == "write_back:finish":
                raise Killed

        with self.watched(), intercepted(strike), contextlib.suppress(Killed):
            self.mount.settle()

    def refuse(self, which: set[int], goes_on: bool) -> None:
        """The PFS refuses some files. What it shows then is no state that the mount was in, but the end is."""
        if not self.rewrite:
            return
        calls = itertools.count()

        def over_quota(label: str) -> None:
            if label == "write_back:create" and next(calls) in which:
                raise OSError(errno.EDQUOT, "over the quota")

        flow = self.mount.write_back()
        # An empty file from mknod has no bytes to set aside: write-back waits for it.
        with intercepted(over_quota), contextlib.suppress(TierUnavailable):
            for _ in range(100):
                if not flow.step():
                    break
        if goes_on:
            flow.retry_now()
            self.mount.settle(flow)

    def finish(self) -> None:
        with self.watched():
            self.mount.settle()
        self.mount.exact()

    def watched(self):  # type: ignore[no-untyped-def]
        labels = {f"write_back:{change}" for change in CHANGES} | {"pfs:exchange"}
        return intercepted(lambda label: None, lambda label: self.look() if label in labels else None)

    def look(self) -> None:
        """The PFS shows a state that the mount was in, not an earlier one than before."""
        if self.rewrite:
            return
        shown = _without_modes(pfs_tree(self.mount.pfs))
        for place in range(self.place, len(self.history)):
            if self.same(shown, place):
                self.place = place
                return
        raise AssertionError(f"the PFS shows {shown}, which the mount never did; from {self.place}: {self.history[self.place :]}")

    def same(self, shown: Tree, place: int) -> bool:
        """What was removed before its turn came may be missing, and what it stood in for may still be there."""
        state = self.history[place]
        gone = {value for tree in self.history[: place + 1] for value in tree.values()} - set(self.history[-1].values())
        gone.add(("file", b""))  # Files from mknod all look alike.
        missing = {path for path in state if path not in shown}
        if any(state[path] not in gone for path in missing):
            return False
        return all(state.get(path) == value or (path in state and state[path] in gone) for path, value in shown.items())


def _without_modes(tree: Tree) -> Tree:
    return {path: value if value[0] == "symlink" else value[:2] if value[0] == "file" else value[:1] for path, value in tree.items()}


def play(steps: list[tuple], *, rewrite: bool) -> None:  # type: ignore[type-arg]
    world = World(rewrite=rewrite)
    try:
        for step in steps:
            world.do(step)
        world.finish()
    finally:
        world.close()


def test_a_batch_that_is_done_again_keeps_a_later_link() -> None:
    play([("put", b"b", 0), ("rename", b"b", b"a", 0), ("link", b"a", b"b"), ("do twice",)], rewrite=False)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(act, max_size=40))
def test_every_state_on_the_pfs_was_one_of_the_mount(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    play(steps, rewrite=False)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(act, max_size=50))
def test_the_end_is_exact_whatever_is_rewritten_and_killed(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    play(steps, rewrite=True)
