"""P5, P6 and P8 as properties of write-back, whatever an application does.

Whenever the mover is killed, the PFS shows a state that the mount was in, never goes back, and shows the mount's tree in the end. While
the PFS refuses some names, all that has nothing to do with them is there, and no file that was there is lost.
"""

import contextlib
import errno
import itertools
import os
import shutil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from write_back_world import CHANGES, Killed, Mount, Refusal, Tree, intercepted, killed_at, memory, pfs_tree, rest

from ckptfs.catalog import exposure, namespace, pfs_hold
from ckptfs.catalog.exposure import UrgentOrder
from ckptfs.errors import TierUnavailable

Step = tuple[Any, ...]
names = st.sampled_from([b"a", b"b", b"d", b"d/a", b"d/b", b"e", b"e/a", b"d/f", b"d/f/a"])
changes = [
    st.tuples(st.just("put"), names, st.integers(0, 3)),
    st.tuples(st.just("mkdir"), names),
    st.tuples(st.just("symlink"), names),
    st.tuples(st.just("link"), names, names),
    st.tuples(st.just("rename"), names, names, st.sampled_from([0, 0, 0, namespace.EXCHANGE])),
    st.tuples(st.just("unlink"), names),
    st.tuples(st.just("rmdir"), names),
    st.tuples(st.just("chmod"), names, st.sampled_from([0o600, 0o755])),
    st.tuples(st.just("utime"), names, st.sampled_from([1, 2_000_000_000])),
]
hurries = st.tuples(st.just("hurry"), st.lists(st.lists(names, min_size=1, max_size=3), min_size=1, max_size=3))
writes = st.tuples(st.just("write back"), st.sampled_from([0, 1, 2, 3, 5, 8, 13, 21, 34, 1000]), st.booleans())
kills = st.one_of(
    *changes,
    st.tuples(st.just("mknod"), names),
    st.tuples(st.just("do twice")),
    st.tuples(st.just("refuse"), st.sets(st.integers(0, 5), min_size=1), st.booleans()),
    hurries,
    writes,
)
kept = st.tuples(st.sampled_from(["keep", "keep", "forget", "append"]), names)
refusals = st.one_of(*changes, st.sampled_from([("rest",), ("rest",), ("restart",), ("retry",)]))


class Application:
    """A mount in memory, and what an application does to it."""

    def __init__(self, *, rewrite: bool) -> None:
        self.root = memory()
        self.mount = Mount(self.root)
        self.rewrite = rewrite
        self.serial = 0

    def close(self) -> None:
        self.mount.db.close()
        self.mount.tiers.close()
        shutil.rmtree(self.root)

    def change(self, name: str, path: bytes, *values: Any) -> bool:
        """Return False if it may not.

        Each file is written once if every state is to be told apart: a second writing may make the first one's bytes vanish.
        """
        self.serial += 1
        if name == "put":
            found = self.mount.tree().get(path)
            if found is not None and (found[0] != "file" or not self.rewrite):
                return False
            values = (b"%d " % self.serial * (values[0] + 1),)
        elif name == "append":
            found = self.mount.tree().get(path)
            if found is None or found[0] != "file" or not found[1]:
                return False
            values = (b"more",)
        elif name in ("symlink", "mknod"):
            values = (b"%d" % self.serial if name == "symlink" else 0o100600,)
        try:
            getattr(self.mount, name)(path, *values)
        except OSError:
            return False
        return True


class World(Application):
    """The PFS is watched at every change. `history` holds the states of the mount; the PFS may only go forward in it."""

    def __init__(self, *, rewrite: bool) -> None:
        super().__init__(rewrite=rewrite)
        self.history: list[Tree] = [{}]
        self.place = 0
        self.is_hurried = False

    def do(self, step: Step) -> None:
        name, *values = step
        if name in ("write back", "refuse", "do twice", "hurry"):
            getattr(self, name.replace(" ", "_"))(*values)
        elif self.change(name, *values):
            self.history.append(_without_modes(self.mount.tree()))

    def write_back(self, operations: int, after: bool) -> None:
        """Let the mover come as far as its so-manieth disk operation."""
        with contextlib.suppress(Killed), self.watched(), killed_at(operations, after=after):
            self.mount.settle()

    def hurry(self, groups: list[list[bytes]]) -> None:
        """A drain without enough time names files that are urgent. From now on new ones may be on the PFS ahead of their turn."""
        self.is_hurried = True
        tree = self.mount.tree()
        numbers = tuple(tuple(self.mount.number(path) for path in group if path in tree) for group in groups)
        exposure.set_order(self.mount.db, UrgentOrder(numbers, is_ahead=True, token="t"), 3600.0)

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
            rest(flow, 0)
        if goes_on:
            flow.retry_now()
            self.mount.settle(flow)

    def finish(self) -> None:
        with self.watched():
            self.mount.settle()
        self.mount.exact()

    def watched(self) -> contextlib.AbstractContextManager[None]:
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
        return all(
            state.get(path) == value or (state[path] in gone if path in state else self.is_ahead(path, value, place))
            for path, value in shown.items()
        )

    def is_ahead(self, path: bytes, value: tuple[Any, ...], place: int) -> bool:
        """G1: something that a later state has; of those before it none had anything there."""
        later = [tree.get(path) for tree in self.history[place + 1 :]]
        return self.is_hurried and value in later


def _without_modes(tree: Tree) -> Tree:
    return {path: value if value[0] == "symlink" else value[:2] if value[0] == "file" else value[:1] for path, value in tree.items()}


class RefusedWorld(Application):
    """The PFS refuses `calls` for names whose last part is in `refused`, until the end."""

    def __init__(self, refused: set[bytes], calls: set[str]) -> None:
        super().__init__(rewrite=True)
        self.flow = self.mount.write_back()
        self.refused = refused
        self.calls = calls
        self.touched: set[bytes] = set()

    def do(self, step: Step) -> None:
        name, *values = step
        if name in ("rest", "restart", "retry"):
            if name == "restart":
                self.flow = self.mount.write_back()
            elif name == "retry":
                self.flow.retry_now()
            with pytest.MonkeyPatch.context() as patch:
                for call in self.calls:
                    Refusal(patch, call, self.refused.__contains__, errno.EACCES)
                # A refusal of one name is not taken for one of the whole PFS.
                rest(self.flow, 0)
            self.check()
        elif self.change(name, *values):
            paths = [value for value in values if isinstance(value, bytes)]
            if any(self.is_touched(path) for path in paths):
                self.touched.update(paths)

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
            entries = self.mount.db.rows("SELECT parent, name FROM pfs_entry WHERE inode = ?", inode)
            assert entries, inode
            for parent, name in entries:
                path = os.path.join(os.fsencode(self.mount.pfs), *(pfs_path(self.mount, parent)), bytes(name))
                found = os.lstat(path)
                assert (found.st_size, found.st_ino) == (size, pfs_inode), path

    def finish(self) -> None:
        self.flow.retry_now()
        self.mount.settle_exactly(self.flow)


def pfs_path(mount: Mount, directory: int) -> list[bytes]:
    if directory == 1:
        return []
    row = mount.db.row("SELECT parent, name FROM pfs_entry WHERE inode = ?", directory)
    assert row is not None
    return [*pfs_path(mount, row[0]), bytes(row[1])]


def play(world: World | RefusedWorld, steps: list[Step]) -> None:
    with contextlib.closing(world):
        for step in steps:
            world.do(step)
        world.finish()


def test_a_batch_that_is_done_again_keeps_a_later_link() -> None:
    play(World(rewrite=False), [("put", b"b", 0), ("rename", b"b", b"a", 0), ("link", b"a", b"b"), ("do twice",)])


@settings(max_examples=60)
@given(st.lists(kills, max_size=40))
def test_every_state_on_the_pfs_was_one_of_the_mount(steps: list[Step]) -> None:
    play(World(rewrite=False), steps)


some_changes = st.lists(st.one_of(*changes), min_size=4, max_size=15)


@settings(max_examples=60)
@given(some_changes, some_changes, hurries, st.lists(st.one_of(writes, writes, hurries, *changes), max_size=10))
def test_only_new_files_are_ahead_of_a_state_of_the_mount(shown: list[Step], pending: list[Step], hurry: Step, rest: list[Step]) -> None:
    """G1: a drain without enough time takes urgent files first, and the PFS loses nothing by it."""
    play(World(rewrite=False), [*shown, ("write back", 1000, True), *pending, hurry, *rest])


@settings(max_examples=60)
@given(st.lists(st.one_of(kills, kept, kept), max_size=50))
def test_the_end_is_exact_whatever_is_rewritten_and_killed(steps: list[Step]) -> None:
    play(World(rewrite=True), steps)


@settings(max_examples=100)
@given(
    st.lists(refusals, max_size=40),
    st.sets(st.sampled_from([b"a", b"b", b"d", b"f"]), min_size=1, max_size=2),
    st.sets(st.sampled_from(["link", "mkdir", "rename", "rmdir", "symlink", "unlink"]), min_size=1),
)
def test_the_rest_is_there_and_nothing_is_lost(steps: list[Step], refused: set[bytes], calls: set[str]) -> None:
    play(RefusedWorld(refused, calls), steps)


unlinked = st.one_of(*(change for change in changes if change is not changes[3]), kept, kept, kept, st.just(("write back",)))


@settings(max_examples=100)
@given(st.lists(unlinked, max_size=40))
def test_a_pfs_without_hard_links_has_all_files_and_keeps_what_only_the_history_names(steps: list[Step]) -> None:
    world = Application(rewrite=True)
    mount, flow = world.mount, world.mount.write_back()
    with contextlib.closing(world), pytest.MonkeyPatch.context() as patch:
        Refusal(patch, "link", lambda _: True, errno.EPERM)
        for name, *values in steps:
            if name != "write back":
                world.change(name, *values)
                continue
            mount.settle(flow)
            tree, pfs = mount.tree(), mount.on_pfs()
            assert pfs.items() <= tree.items()
            shown = {mount.number(path) for path in pfs}
            missing = {path for path in tree if path not in pfs}
            assert all(path.startswith(b".ckptfs.history/") and mount.number(path) in shown for path in missing)
        for path in sorted(mount.tree(), reverse=True):
            if not path.startswith(b".ckptfs.history"):
                (mount.rmdir if mount.tree()[path][0] == "directory" else mount.unlink)(path)
        mount.settle(flow)
        tree, pfs = mount.tree(), mount.on_pfs()
        assert pfs.items() <= tree.items() and {mount.number(path) for path in pfs} == {mount.number(path) for path in tree}


# --- what retention rules hold back (D7) ------------------------------------------------------------------------------


def is_held_place(directory: bytes, name: bytes) -> bool:
    return name in (b"d", b"f") or (directory, name) == (b"e", b"a")


def list_shown(mount: Mount) -> Tree:
    """What the PFS should show: all but what is held."""
    shown: Tree = {}
    for path, entry in mount.tree().items():
        inodes = [mount.number(path[:end]) for end in range(1, len(path) + 1) if path[end : end + 1] in (b"", b"/")]
        if not any(pfs_hold.is_held(mount.db, inode) for inode in inodes):
            shown[path] = entry
        else:
            assert pfs_hold.is_held(mount.db, inodes[-1]), f"{path!r} is not held, but something above it is"
    return shown


@settings(max_examples=150)
@given(st.lists(st.one_of(*changes, st.tuples(st.just("release"), names), st.just(("write back",))), max_size=25))
def test_whatever_an_application_does_the_pfs_shows_all_but_what_is_held(steps: list[tuple[Any, ...]]) -> None:
    world = Application(rewrite=True)
    mount = world.mount
    try:
        mount.db.holds_back = is_held_place
        for name, *values in steps:
            if name == "write back":
                mount.settle()
            elif name == "release":
                with contextlib.suppress(OSError), mount.db.transaction():
                    pfs_hold.release_tree(mount.db, mount.number(values[0]))
            else:
                world.change(name, *values)
        mount.settle()
        assert mount.on_pfs() == list_shown(mount)
        with mount.db.transaction():
            mount.db.holds_back = None
            pfs_hold.release_misplaced(mount.db)
        mount.settle_exactly()
    finally:
        world.close()
