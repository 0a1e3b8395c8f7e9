"""The files of an island on the PFS: below `.ckptfs/island-NODE/`, until they can have their names.

Takes: sealed contents of this node that the PFS lacks, while the node cannot reach the store for longer.
Leaves: plain files under their own paths below the directory of this node, each whole or absent, and on disk. After the return each is
removed when the PFS shows the file under its own name, as new or newer. What else is left there is reported, and is the operator's. What a
dead node has kept is reported by all others: it may never return.
If we die here: a temporary file, which the next copy replaces. Files that are there already are known by size and mtime.

No other node touches the directory, so islands never disagree about a name. Nothing here counts for the level `pfs`.
"""

import contextlib
import os
import stat
import time
from collections.abc import Iterator

from ckptfs import disk, limits
from ckptfs.catalog import contents, copies, inodes, namespace, peer_copies, pfs_state, summary
from ckptfs.catalog.database import Database
from ckptfs.coherence import key_state
from ckptfs.config import Config
from ckptfs.errors import DigestMismatch
from ckptfs.model import ROOT, Content, Inode
from ckptfs.tiers import pfs_identity, pfs_ownership, transfer
from ckptfs.tiers.storage import Tiers

transfer.declare_labels("island")
disk.declare_labels("island:create", "island:fsync", "island:rename", "island:remove")

TROUBLE = "island copies"
_TEMPORARY = b".ckptfs.copy"
_AREA = b"island-"


class KeepIsland:
    """Copies one file a step while the node is an island, and cleans its directory afterwards."""

    def __init__(self, db: Database, tiers: Tiers, config: Config) -> None:
        self._db = db
        self._tiers = tiers
        self._config = config
        self._kept: dict[bytes, int] = {}
        self._after = 0
        self._next_s = 0.0
        self._tidy_for: set[str] | None = None

    def step(self) -> bool:
        """Copy or remove. Return True if there may be more at once. Raises OSError and TierUnavailable."""
        if self._config.pfs is None or time.monotonic() < self._next_s:
            return False
        since_ns = key_state.get_disconnected_ns(self._db)
        if since_ns:
            self._tidy_for = None
            is_long = time.time_ns() - since_ns >= limits.ISLAND_KEEP_AFTER_S * 1e9
            if is_long and self._keep_next():
                return True
        else:
            live_nodes = {node.name for node in peer_copies.list_live_nodes(self._db).values()}
            if live_nodes != self._tidy_for and not pfs_state.has_work(self._db):
                self._tidy(live_nodes)
        self._next_s = time.monotonic() + limits.ISLAND_LOOK_S
        return False

    def next_due_s(self) -> float | None:
        """Return the seconds until the next look: nothing announces an island."""
        return max(0.0, self._next_s - time.monotonic())

    # --- an island ----------------------------------------------------------------------------------------------------

    def _keep_next(self) -> bool:
        """Copy the next file. Return False if there is none, and remove what has another name by now."""
        inode, number = pfs_state.find_unpublished(self._db, self._after) or (0, 0)
        self._after = number
        with self._open_area() as area:
            if not inode:
                for path in [path for path in self._kept if self._find_inode(path) is None]:
                    self._remove(area, path)
                self._report(self._count_kept("are kept"), "let etcd answer again; they get their names then", self._config.node)
                return False
            content, path = contents.get_content(self._db, number), namespace.get_path(self._db, inode)
            if content is None or not path:
                return True
            wanted = inodes.get(self._db, inode)
            found = _find_stat(area + b"/" + path)
            if found is None or (found.st_size, found.st_mtime_ns) != (content.size, wanted.mtime_ns):
                self._copy(area, path, content, wanted)
            self._kept[path] = inode
        return True

    def _copy(self, area: bytes, path: bytes, content: Content, wanted: Inode) -> None:
        target = area + b"/" + path
        parent = os.path.dirname(target)
        os.makedirs(parent, mode=0o700, exist_ok=True)
        temporary = parent + b"/" + _TEMPORARY
        with disk.closing(disk.open_file("island:create", temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)) as fd:
            self._fill(fd, content)
            with contextlib.suppress(PermissionError):
                os.fchown(fd, wanted.uid, wanted.gid)
            os.fchmod(fd, stat.S_IMODE(wanted.mode) & 0o777)
            os.utime(fd, ns=(wanted.atime_ns, wanted.mtime_ns))
            disk.fsync("island:fsync", fd)
        disk.rename("island:rename", temporary, target)
        while len(parent) >= len(area):
            with disk.closing(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
                disk.fsync("island:fsync", directory)
            parent = os.path.dirname(parent)

    def _fill(self, fd: int, content: Content) -> None:
        """Copy a content from the first copy that has its digest. Raises DigestMismatch if none has."""
        for tier in copies.list_good_tiers(self._db, content.id, self._tiers):
            with pfs_ownership.as_process_user():
                source = self._tiers[tier].open(content.id)
            with disk.closing(source):
                if transfer.copy(source, fd, label="island")[:2] == (content.size, content.digest):
                    return
        raise DigestMismatch(f"no copy of content {content.id} on this node is right")

    # --- after the return ---------------------------------------------------------------------------------------------

    def _tidy(self, live_nodes: set[str]) -> None:
        """Remove the files that the PFS shows under their own names. Report others, and those of dead nodes."""
        with self._open_area() as area:
            for base, _, names in os.walk(area, topdown=False):
                for name in names:
                    path = os.path.relpath(os.path.join(base, name), area)
                    if name == _TEMPORARY or self._is_published(path, disk.bound_status(os.lstat(os.path.join(base, name))).st_mtime_ns):
                        self._remove(area, path)
                with contextlib.suppress(OSError):
                    os.rmdir(base)
            self._kept = {path: self._kept.get(path, 0) for path in _list_files(area)}
            areas = next(os.walk(os.path.dirname(area)), (area, [], []))[1] if live_nodes else []
        others = sorted({os.fsdecode(name.removeprefix(_AREA)) for name in areas if name.startswith(_AREA)} - live_nodes)
        self._tidy_for = None if self._kept or others else live_nodes
        if others and not self._kept:
            remedy = "let that node reach etcd; if it is lost, copy what is missing, and remove the directory"
            self._report(f"files of {others[0]}, which other nodes do not see, are", remedy, others[0])
        else:
            remedy = "compare them with the files of these names, copy what is missing, and remove the directory"
            self._report(self._count_kept("are left"), remedy, self._config.node)

    def _is_published(self, path: bytes, mtime_ns: int) -> bool:
        """Return True if the PFS has this file or a newer state, or it was deleted after the copy."""
        inode = self._kept.get(path) or self._find_inode(path)
        if inode is None:
            return False
        try:
            is_deleted = inodes.get(self._db, inode).nlink == 0
        except FileNotFoundError:
            is_deleted = True
        published = pfs_state.get_published(self._db, inode)
        return is_deleted or (published is not None and published.is_complete and published.mtime_ns >= mtime_ns)

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _find_inode(self, path: bytes) -> int | None:
        inode = ROOT
        for name in path.split(b"/"):
            child = namespace.find_child(self._db, inode, name)
            if child is None:
                return None
            inode = child.id
        return inode

    def _remove(self, area: bytes, path: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            disk.unlink("island:remove", area + b"/" + path)
        self._kept.pop(path, None)

    @contextlib.contextmanager
    def _open_area(self) -> Iterator[bytes]:
        """Yield the path of this node's directory, which may be missing, on the recognised PFS."""
        assert self._config.pfs is not None
        with disk.closing(pfs_identity.open_adopted_root(self._db, self._config.pfs)) as root:
            yield b"/proc/self/fd/%d/%s/%s" % (root, pfs_identity.WORK_DIRECTORY, _AREA + os.fsencode(self._config.node))

    def _count_kept(self, state: str) -> str:
        return f"{len(self._kept)} files of this node {state}" if self._kept else ""

    def _report(self, files: str, remedy: str, node: str) -> None:
        """Set the trouble about files in the directory of `node`; an empty string ends it."""
        path = os.path.join(str(self._config.pfs), os.fsdecode(pfs_identity.WORK_DIRECTORY), os.fsdecode(_AREA) + node)
        summary.set_trouble(self._db, TROUBLE, {"what": f"{files} below {path} only", "path": path, "remedy": remedy} if files else None)


def _find_stat(path: bytes) -> os.stat_result | None:
    try:
        return disk.bound_status(os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _list_files(area: bytes) -> Iterator[bytes]:
    for base, _, names in os.walk(area):
        yield from (os.path.relpath(os.path.join(base, name), area) for name in names)
