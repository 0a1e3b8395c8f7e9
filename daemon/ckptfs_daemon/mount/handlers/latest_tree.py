"""The read-only trees `.ckptfs/latest` (N2) and `.ckptfs/complete` (D6): symlinks to checkpoints.

They are at the root of the mount. Both show the directories of the mount. `latest` has the series of each as symlinks to their newest
complete member: `.ckptfs/latest/run1/step_*` leads to `run1/step_100`. A checkpoint of TensorFlow has a symlink for each of its files.
Each readlink(2) searches again, with the rules of `ckptfs.series`; while no checkpoint is complete it fails with ENOENT.

`complete` has the members that are sets: `.ckptfs/complete/run1/step_100` leads to the newest set of that name in the history. If there is
none, readlink(2) waits for it, and so does every open through the link, until the set is complete or a signal comes. Such a link is
found by its name and is not listed.

The kernel caches nothing of the trees, and the catalog has no rows for them. A caller that may list a directory may look up its series.

Inode numbers are a hash of what they stand for, so the next mount process assigns the same ones. Only the entries that were looked up last
are remembered; any other number gets ESTALE, and the kernel then looks the name up again.
"""

import contextlib
import errno
import stat
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from ckptfs import limits
from ckptfs.bounded_table import BoundedTable
from ckptfs.catalog import namespace
from ckptfs.errors import posix_error
from ckptfs.model import ROOT
from ckptfs.series import patterns
from ckptfs_daemon.fuse import killable, request
from ckptfs_daemon.mount.context import MountContext
from ckptfs_daemon.mount.handlers.history_tree import HISTORY, HistoryTree, ReadOnlyTree
from ckptfs_daemon.mount.sets.member_reader import MountMemberReader

# After fuse.session, which loads the shim before pyfuse3.
from pyfuse3 import EntryAttributes  # isort: skip
import pyfuse3  # isort: skip

if TYPE_CHECKING:
    from pyfuse3 import ReaddirToken, RequestContext

FIRST_INODE = limits.VIRTUAL_NODE << 40
_COUNT = 1 << 40


LATEST = b"latest"
COMPLETE = b"complete"


class VirtualEntry(NamedTuple):
    """A directory of the mount (0: `.ckptfs` itself), or a symlink in it if `link` is not empty.

    The link is a series in the tree LATEST, a member in the tree COMPLETE.
    """

    directory: int
    link: bytes = b""
    tree: bytes = LATEST


TOP = VirtualEntry(0)


def is_virtual(inode: int) -> bool:
    return inode >= FIRST_INODE


class VirtualInodes:
    """The numbers of the entries that were looked up last."""

    def __init__(self, at_most: int = limits.VIRTUAL_NAMES_MAX) -> None:
        self._entries = BoundedTable[int, VirtualEntry](at_most)

    def assign_inode(self, entry: VirtualEntry) -> int:
        """Return the inode number of an entry, and remember it."""
        number = xxhash.xxh3_64_intdigest(b"%d/%s/%s" % entry) % _COUNT
        while self._entries.get(FIRST_INODE + number, entry) != entry:
            number = (number + 1) % _COUNT
        self._entries[FIRST_INODE + number] = entry
        return FIRST_INODE + number

    def find_entry(self, number: int) -> VirtualEntry | None:
        """Return the entry of an inode number. Returns None if it is no longer remembered."""
        return self._entries.get(number)


class LatestTree(ReadOnlyTree):
    """Handlers for the inodes of both trees. Every change fails with EROFS."""

    def __init__(self, context: MountContext, reader: MountMemberReader, history: HistoryTree) -> None:
        self._context, self._reader, self._history = context, reader, history
        self._inodes = VirtualInodes()
        self._listed: tuple[VirtualEntry, list[tuple[bytes, VirtualEntry]]] = TOP, []
        """The directory that was listed last, and its entries."""
        self._waiters = 0

    def owns_name(self, parent_inode: int, name: bytes) -> bool:
        return is_virtual(parent_inode) or (parent_inode == ROOT and name == namespace.RESERVED_NAME)

    setxattr = removexattr = open = ReadOnlyTree.refuse_change

    async def lookup(self, parent_inode: int, name: bytes, _: "RequestContext") -> EntryAttributes:
        if parent_inode == ROOT:
            return self._build_entry_attributes(TOP)
        parent = self._get_entry(parent_inode)
        if parent == TOP and name == HISTORY:
            return await self._history.find_top() or request.build_negative_entry(0)
        entry = await self._find_child(parent, name)
        return request.build_negative_entry(0) if entry is None else self._build_entry_attributes(entry)

    async def getattr(self, inode: int, _: "RequestContext") -> EntryAttributes:
        return self._build_entry_attributes(self._get_entry(inode))

    async def readlink(self, inode: int) -> bytes:
        """Return the target of a symlink. Raises EINVAL, and what the trees raise."""
        entry = self._get_entry(inode)
        if not entry.link:
            raise posix_error(errno.EINVAL)
        return await (self._get_newest_path(entry) if entry.tree == LATEST else self._wait_for_set(entry))

    async def getxattr(self, inode: int, name: bytes, _: "RequestContext") -> bytes:
        raise posix_error(errno.ENODATA)

    async def listxattr(self, inode: int, _: "RequestContext") -> Sequence[bytes]:
        return []

    async def readdir(self, fh: int, start_id: int, token: "ReaddirToken") -> None:
        directory = self._get_entry(fh)
        if start_id == 0 or self._listed[0] != directory:
            # The kernel asks several times for a large directory.
            self._listed = directory, await self._list_entries(directory)
        found: list[tuple[bytes, VirtualEntry | EntryAttributes]] = [(b".", directory), (b"..", directory), *self._listed[1]]
        if directory == TOP and (history := await self._history.find_top()) is not None:
            found.append((HISTORY, history))
        for offset, (name, one) in enumerate(found[start_id:], start_id + 1):
            self._inodes.assign_inode(directory)  # Its number stays known, however many entries it has.
            attributes = self._build_entry_attributes(one) if isinstance(one, VirtualEntry) else one
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(name), attributes, offset):
                return

    # --- entries ------------------------------------------------------------------------------------------------------

    def _get_entry(self, inode: int) -> VirtualEntry:
        entry = self._inodes.find_entry(inode)
        if entry is None:
            raise posix_error(errno.ESTALE)
        return entry

    def _build_entry_attributes(self, virtual: VirtualEntry) -> EntryAttributes:
        """Derive them from the directory of the mount. A caller that may list it may also search it."""
        shown = self._context.get_inode(virtual.directory or ROOT)
        searchable = (shown.mode & 0o444) >> 2 & shown.mode
        mode = stat.S_IFLNK | 0o777 if virtual.link else stat.S_IFDIR | (shown.mode & 0o444) | searchable
        entry = request.build_attributes(
            replace(shown, id=self._inodes.assign_inode(virtual), mode=mode, nlink=1 if virtual.link else 2, size=0)
        )
        entry.entry_timeout = entry.attr_timeout = 0
        return entry

    async def _find_child(self, entry: VirtualEntry, name: bytes) -> VirtualEntry | None:
        if entry == TOP:
            return VirtualEntry(ROOT, tree=name) if name in {LATEST, COMPLETE} else None
        link = VirtualEntry(entry.directory, name, entry.tree)
        if _is_awaited(name) if entry.tree == COMPLETE else patterns.parse(name) is not None:
            return link
        if entry.tree == COMPLETE and await self._reader.find_set_path(entry.directory, name):
            return link
        with contextlib.suppress(FileNotFoundError):
            child = await self._reader.lookup_child(entry.directory, name)
            if child.is_directory:
                return VirtualEntry(child.id, tree=entry.tree)
        if entry.tree == COMPLETE:
            return None
        # A pair such as `state.cpt` and `state_prev.cpt` has the name of its first file, which may be away for a moment.
        found = await self._reader.list_possible_members(entry.directory)
        return link if any(one.name == name for one in patterns.list_series(found)) else None

    async def _list_entries(self, entry: VirtualEntry) -> list[tuple[bytes, VirtualEntry]]:
        if entry == TOP:
            return [(tree, VirtualEntry(ROOT, tree=tree)) for tree in (COMPLETE, LATEST)]
        found = await self._reader.list_possible_members(entry.directory)
        shown = {name: VirtualEntry(inode, tree=entry.tree) for name, (inode, is_directory) in found.items() if is_directory}
        if entry.tree == COMPLETE:
            shown = {name: one for name, one in shown.items() if not _is_awaited(name)}
            links = await self._reader.list_set_members(entry.directory)
        else:
            known = await self._reader.compute(lambda: patterns.list_patterns(found))
            # A set of a name without a number is in the history only: a directory of that name is shown as one.
            links = {*known, *(name for name in self._reader.list_history_patterns(entry.directory) if patterns.parse(name) is not None)}
        return sorted((shown | {link: VirtualEntry(entry.directory, link, entry.tree) for link in links}).items())

    # --- targets ------------------------------------------------------------------------------------------------------

    async def _get_newest_path(self, entry: VirtualEntry) -> bytes:
        """Return the relative path from a series' symlink to its newest complete member. Raises ENOENT."""
        answer, known = await self._reader.find_latest(entry.directory, entry.link)
        newest = answer.result.newest
        if newest is None:
            raise posix_error(errno.ENOENT)
        if newest.path:
            return self._build_history_target(entry, self._reader.find_path(known, newest, entry.link))
        parts = self._list_parts(entry)
        return b"../" * (len(parts) + 2) + b"/".join([*parts, newest.entry])

    async def _wait_for_set(self, entry: VirtualEntry) -> bytes:
        """Wait until a member is a set, and return the relative path to it.

        Raises EINTR at a signal, EAGAIN if too many wait.
        """
        if self._waiters >= limits.SET_WAITERS_MAX:
            raise posix_error(errno.EAGAIN)
        self._waiters += 1
        try:
            while not (path := await self._reader.find_set_path(entry.directory, entry.link)):
                if killable.is_interrupted():
                    raise posix_error(errno.EINTR)
                await killable.sleep(limits.SET_WAIT_POLL_S)
        finally:
            self._waiters -= 1
        return self._build_history_target(entry, path)

    def _build_history_target(self, entry: VirtualEntry, path: bytes) -> bytes:
        return b"../" * (len(self._list_parts(entry)) + 1) + HISTORY + b"/" + path

    def _list_parts(self, entry: VirtualEntry) -> list[bytes]:
        """Return the names on the path of its directory."""
        return [part for part in namespace.get_path(self._context.db, entry.directory).split(b"/") if part]


def _is_awaited(name: bytes) -> bool:
    """Return True if a name may become that of a checkpoint."""
    return patterns.counts_checkpoints(name) and not patterns.is_temporary(name)
