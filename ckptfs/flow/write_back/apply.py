"""Takes: a batch that is written down, whose temporary files are whole.
Leaves: its changes on the PFS, in order and on disk there, and what every name was seen to show at the end.
If we die here: the next mover does the same batch again. Each change looks first whether it was done: what it would move is not under
its old name any more (the numbers of all files in the batch are known), or its temporary file is gone.

A name that shows something unknown was given it by a stranger. Ours wins; theirs is kept beside it as NAME.ckptfs-conflict-N.
What turns out to be missing at the end is told to the journal again.
"""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable

from ckptfs import disk, limits
from ckptfs.catalog import pfs_state
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get
from ckptfs.catalog.pfs_state import Fingerprint, ObservedStat, PfsAction, PfsBatch, PfsLocation
from ckptfs.errors import Busy
from ckptfs.model import Inode
from ckptfs.tiers import pfs_ownership, transfer
from ckptfs.tiers.pfs_tree import DirectoryMissing, DirectoryPath, PfsTree, exchange, find_stat

log = logging.getLogger(__name__)

transfer.declare_labels("write_back:double")
disk.declare_labels(
    "write_back:put", "write_back:link", "write_back:move", "write_back:swap", "write_back:unlink", "write_back:rmdir", "write_back:aside",
    "write_back:attributes", "write_back:directory", "write_back:look",
)  # fmt: skip

CONFLICT_SUFFIX = b".ckptfs-conflict-%d"
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_NO_FSYNC = {errno.EINVAL, errno.EOPNOTSUPP}
_NAME_TAKEN_ERRNOS = {errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR}


class Applier:
    """Makes the changes of one batch."""

    def __init__(
        self,
        db: Database,
        tree: PfsTree,
        batch: PfsBatch,
        require_lease: Callable[[], None] = lambda: None,
        *,
        is_shared: bool = False,
        gone_directory: DirectoryPath | None = None,
    ) -> None:
        """`demand` raises Busy when this node may not change the PFS any more. `shared`: other nodes write to this PFS, too; what they
        make in a directory that goes will soon be gone, and one that is not there they may have moved just now: only `gone` is known to be
        gone.
        """
        self._require_lease = require_lease
        self._is_shared = is_shared
        self._gone_directory = gone_directory
        self._db = db
        self._tree = tree
        self._batch = batch
        self._batch_inodes = {
            mark.ino
            for action in batch.actions
            for mark in (action.fingerprint, action.replaced_fingerprint)
            if mark is not None and mark.ino
        }
        self._directories: dict[tuple[bytes, ...], None] = {}
        self.current_action: PfsAction | None = None

    def run(self) -> dict[tuple[int, bytes], ObservedStat | None]:
        """Make all changes; what every name of the batch then shows, None where it is not what it should be."""
        for action in self._batch.actions:
            self.current_action = action
            try:
                self._do(action)
            except DirectoryMissing as missing:
                if self._is_shared and missing.names != self._gone_directory:
                    raise
                # A stranger took the directory away, or the batch is done again and removed it.
        for path in self._directories:
            with contextlib.suppress(DirectoryMissing):
                self._persist(path)
        return {
            (show.location.parent, show.location.name): self._observe(show.location, show.fingerprint)
            for show in self._batch.expected_entries
            if show.inode is not None
        }

    def _do(self, action: PfsAction) -> None:
        {
            "put": self._put, "link": self._link, "move": self._move, "exchange": self._exchange,
            "unlink": self._unlink, "rmdir": self._rmdir, "attributes": self._attributes,
        }[action.act](action)  # fmt: skip
        for spot in (action.location, action.new_location):
            if spot is not None and action.act != "attributes":
                self._directories[spot.path] = None

    def _persist(self, path: tuple[bytes, ...]) -> None:
        try:
            disk.fsync("write_back:directory", self._tree.get_directory(path))
        except OSError as failure:
            if failure.errno not in _NO_FSYNC:
                raise

    # --- the changes ----------------------------------------------------------------------------------------------------

    def _put(self, action: PfsAction) -> None:
        directory = self._fd(action.location)
        temporary = find_stat(directory, action.temporary)
        if temporary is None:
            return
        self._preserve_external(action.location, action.fingerprint, action.replaced_fingerprint)
        try:
            self._rename("write_back:put", action.location, action.temporary, action.location)
        except OSError as failure:
            if failure.errno not in _NAME_TAKEN_ERRNOS:
                raise
            there = find_stat(directory, action.location.name)
            if there is not None and stat.S_ISDIR(there.st_mode) and stat.S_ISDIR(temporary.st_mode):
                self._remove("write_back:rmdir", action.location, action.temporary, temporary)
                return
            self._free_name(action.location, action.replaced_fingerprint)
            self._rename("write_back:put", action.location, action.temporary, action.location)

    def _link(self, action: PfsAction) -> None:
        assert action.new_location is not None
        source, target = (
            find_stat(self._fd(action.location), action.location.name),
            find_stat(self._fd(action.new_location), action.new_location.name),
        )
        if not self._matches(source, action.fingerprint) or (target is not None and source is not None and target.st_ino == source.st_ino):
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(action.temporary, dir_fd=self._fd(action.new_location))
        self._preserve_external(action.new_location, action.fingerprint, action.replaced_fingerprint)
        self._run_as_owner(self._fd(action.location), action.location.name, lambda: disk.act("write_back:link", self._link_or_copy, action))
        self._rename("write_back:put", action.new_location, action.temporary, action.new_location)

    def _link_or_copy(self, action: PfsAction) -> None:
        """Another name under the temporary one; where the PFS has no links, another file with the same bytes."""
        assert action.new_location is not None
        source, target = self._fd(action.location), self._fd(action.new_location)
        try:
            os.link(action.location.name, action.temporary, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
            return
        except OSError as failure:
            found = find_stat(source, action.location.name)
            if failure.errno not in _NO_LINKS or found is None or not stat.S_ISREG(found.st_mode):
                raise
            log.warning("the PFS cannot link %s (%s); it gets a copy", os.fsdecode(action.new_location.name), failure.strerror)
        self._copy(action)

    def _copy(self, action: PfsAction) -> None:
        assert action.new_location is not None
        read = os.open(action.location.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd(action.location))
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            written = os.open(action.temporary, flags, 0o600, dir_fd=self._fd(action.new_location))
            try:
                transfer.copy(read, written, label="write_back:double")
                self._apply_attributes(action.inode, self._fd(action.new_location), action.temporary)
                found = os.fstat(read)
                os.utime(written, ns=(found.st_atime_ns, found.st_mtime_ns))
                os.fsync(written)
            finally:
                os.close(written)
        finally:
            os.close(read)

    def _move(self, action: PfsAction) -> None:
        assert action.new_location is not None
        source = find_stat(self._fd(action.location), action.location.name)
        if source is None or not self._matches(source, action.fingerprint):
            return
        target = find_stat(self._fd(action.new_location), action.new_location.name)
        if target is not None and target.st_ino == source.st_ino and not stat.S_ISDIR(source.st_mode):
            self._remove("write_back:unlink", action.location, action.location.name, source)  # rename(2) would leave both names.
            return
        if self._shows_later_change(target, action.replaced_fingerprint):
            return
        self._preserve_external(action.new_location, action.fingerprint, action.replaced_fingerprint)
        try:
            self._rename("write_back:move", action.location, action.location.name, action.new_location)
        except OSError as failure:
            if failure.errno not in _NAME_TAKEN_ERRNOS:
                raise
            self._free_name(action.new_location, action.replaced_fingerprint)
            self._rename("write_back:move", action.location, action.location.name, action.new_location)
        if stat.S_ISDIR(source.st_mode):
            self._tree.clear_cache()

    def _exchange(self, action: PfsAction) -> None:
        assert action.new_location is not None and action.replaced_fingerprint is not None
        here, there = self._fd(action.location), self._fd(action.new_location)
        one, other = find_stat(here, action.location.name), find_stat(there, action.new_location.name)
        parked = find_stat(here, action.temporary)
        if parked is not None and self._matches(parked, action.fingerprint):
            self._finish_exchange(action, other)
        elif (
            one is not None
            and self._matches(one, action.fingerprint)
            and other is not None
            and self._matches(other, action.replaced_fingerprint)
        ):
            try:
                name, new = action.location.name, action.new_location.name
                self._run_as_owner(here, name, lambda: disk.act("write_back:swap", exchange, here, name, there, new))
            except OSError as failure:
                if failure.errno not in _NO_EXCHANGE:
                    raise
                self._rename(
                    "write_back:move",
                    action.location,
                    action.location.name,
                    PfsLocation(action.location.parent, action.temporary, action.location.path),
                )
                self._finish_exchange(action, other)
        self._tree.clear_cache()

    def _finish_exchange(self, action: PfsAction, other: os.stat_result | None) -> None:
        """Exchange by three renames, of which the first is done: a PFS without RENAME_EXCHANGE shows a name missing for a moment."""
        assert action.new_location is not None and action.replaced_fingerprint is not None
        if other is not None and self._matches(other, action.replaced_fingerprint):
            self._rename("write_back:move", action.new_location, action.new_location.name, action.location)
        self._rename("write_back:move", action.location, action.temporary, action.new_location)

    def _unlink(self, action: PfsAction) -> None:
        found = find_stat(self._fd(action.location), action.location.name)
        if found is None or stat.S_ISDIR(found.st_mode):
            return
        if not self._matches(found, action.fingerprint):
            if found.st_ino not in self._batch_inodes:
                log.warning("%s was removed here, but is somebody else's on the PFS now; it stays there", os.fsdecode(action.location.name))
            return
        self._remove("write_back:unlink", action.location, action.location.name, found)

    def _rmdir(self, action: PfsAction) -> None:
        found = find_stat(self._fd(action.location), action.location.name)
        if found is None or not stat.S_ISDIR(found.st_mode) or not self._matches(found, action.fingerprint):
            return
        try:
            self._remove("write_back:rmdir", action.location, action.location.name, found)
        except OSError as failure:
            if failure.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
            if self._is_shared and _has_only_temporaries(self._fd(action.location), action.location.name):
                raise Busy("another node is making something in a directory that goes") from failure
            log.warning(
                "%s was removed here, but holds somebody else's files on the PFS; it stays there", os.fsdecode(action.location.name)
            )
        self._tree.clear_cache()

    def _attributes(self, action: PfsAction) -> None:
        directory = self._fd(action.location)
        found = find_stat(directory, action.location.name)
        if found is not None and self._matches(found, action.fingerprint):
            name = action.location.name
            self._run_as_owner(
                directory, name, lambda: disk.act("write_back:attributes", self._apply_attributes, action.inode, directory, name)
            )

    def _apply_attributes(self, number: int, directory: int, name: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            pfs_ownership.apply_attributes(directory, name, get(self._db, number), pfs_state.get_xattrs(self._db, number))

    # --- names in the way -----------------------------------------------------------------------------------------------

    def _preserve_external(self, spot: PfsLocation, own: Fingerprint, expected: Fingerprint | None) -> None:
        """Keep what a stranger put under a name, or wrote into what we put there, before ours replaces it."""
        there = find_stat(self._fd(spot), spot.name)
        if there is None or stat.S_ISDIR(there.st_mode) or there.st_ino == own.ino:
            return
        if expected is not None and self._matches(there, expected):
            if _is_externally_changed(there, expected):
                self._keep_as_conflict(spot, there)
        elif there.st_ino not in self._batch_inodes:
            self._keep_as_conflict(spot, there)

    def _free_name(self, spot: PfsLocation, expected: Fingerprint | None) -> None:
        """Free a name for what cannot be renamed over what is there. What we put there has gone in the mount, and goes."""
        there = find_stat(self._fd(spot), spot.name)
        if there is None:
            return
        is_ours = expected is not None and self._matches(there, expected) and not stat.S_ISDIR(there.st_mode)
        if not is_ours:
            self._keep_as_conflict(spot, there)
        still_there = find_stat(self._fd(spot), spot.name)
        if still_there is not None and not stat.S_ISDIR(still_there.st_mode):
            self._remove("write_back:unlink", spot, spot.name, still_there)  # What a stranger wrote is under the name beside it by now.

    def _keep_as_conflict(self, spot: PfsLocation, there: os.stat_result | None) -> None:
        """Give what is under a name another one beside it. A file keeps the name as well, so that it never shows nothing."""
        if there is None:
            return
        directory = self._fd(spot)
        for number in range(1, 10_000):
            suffix = CONFLICT_SUFFIX % number
            conflict_name = spot.name[: limits.NAME_BYTES_MAX - len(suffix)] + suffix
            found = find_stat(directory, conflict_name)
            if found is not None and found.st_ino == there.st_ino and not stat.S_ISDIR(there.st_mode):
                return
            if found is None:
                break
        log.warning("somebody else changed %s on the PFS; theirs is kept there as %s", os.fsdecode(spot.name), os.fsdecode(conflict_name))
        self._run_as_owner(
            directory, spot.name, lambda: disk.act("write_back:aside", _link_or_rename, directory, spot.name, conflict_name, there)
        )

    def _shows_later_change(self, target: os.stat_result | None, expected: Fingerprint | None) -> bool:
        """Whether a name shows what a later change of this batch put there: then this change was done in an earlier life."""
        return target is not None and target.st_ino in self._batch_inodes and not (expected is not None and self._matches(target, expected))

    def _matches(self, found: os.stat_result | None, mark: Fingerprint) -> bool:
        """Whether this is what `mark` describes.

        Numbers are not stable on every filesystem: for a number that the batch does not know, a file's size and time will do.
        """
        if found is None:
            return False
        if mark.ino in (0, found.st_ino):
            return True
        if found.st_ino in self._batch_inodes or mark.size < 0 or not stat.S_ISREG(found.st_mode):
            return False
        return (found.st_size, found.st_mtime_ns) == (mark.size, mark.mtime_ns)

    # --- pieces ---------------------------------------------------------------------------------------------------------

    def _fd(self, spot: PfsLocation) -> int:
        return self._tree.get_directory(spot.path)

    def _rename(self, label: str, old: PfsLocation, old_name: bytes, new: PfsLocation) -> None:
        old_fd, new_fd = self._fd(old), self._fd(new)
        self._run_as_owner(old_fd, old_name, lambda: disk.rename(label, old_name, new.name, old_fd=old_fd, new_fd=new_fd))

    def _remove(self, label: str, spot: PfsLocation, name: bytes, found: os.stat_result) -> None:
        directory = self._fd(spot)
        call = os.rmdir if stat.S_ISDIR(found.st_mode) else os.unlink
        self._run_as_owner(directory, name, lambda: disk.act(label, call, name, dir_fd=directory))

    def _run_as_owner(self, directory: int, name: bytes, call: Callable[[], None]) -> None:
        """`call()` as we are, or as the owner of what it is about, or of its directory. Everything that anybody sees goes through here."""

        def owners() -> list[pfs_ownership.Owner]:
            subjects = (find_stat(directory, name), os.fstat(directory))
            return [(subject.st_uid, subject.st_gid) for subject in subjects if subject is not None]

        def guarded_call() -> None:
            self._require_lease()
            call()

        pfs_ownership.retry_as_owner(guarded_call, owners)

    def _observe(self, spot: PfsLocation, mark: Fingerprint) -> ObservedStat | None:
        """What a name shows, if it is what it should be."""
        try:
            found = disk.act("write_back:look", find_stat, self._fd(spot), spot.name)
        except DirectoryMissing:
            return None
        if found is None or not self._matches(found, mark):
            return None
        return ObservedStat(found.st_ino, found.st_mode, found.st_uid, found.st_gid, found.st_size, found.st_mtime_ns)


def _has_only_temporaries(directory: int, name: bytes) -> bool:
    """Whether a directory holds nothing but what nodes are making in it, to find out that it goes."""
    with disk.closing(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)) as fd:
        return all(found.startswith(".ckptfs.") for found in os.listdir(fd))


def _is_externally_changed(found: os.stat_result, mark: Fingerprint) -> bool:
    """Whether a stranger wrote into a file since we last saw it."""
    if mark.size < 0 or not stat.S_ISREG(found.st_mode):
        return False
    return found.st_size != mark.size or found.st_mtime_ns > mark.mtime_ns


def _link_or_rename(directory: int, name: bytes, conflict_name: bytes, there: os.stat_result) -> None:
    if stat.S_ISREG(there.st_mode):
        try:
            os.link(name, conflict_name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
            return
        except OSError as failure:
            if failure.errno not in _NO_LINKS:
                raise
    os.rename(name, conflict_name, src_dir_fd=directory, dst_dir_fd=directory)


def set_directory_times(fd: int, inode: Inode) -> None:
    """A directory gets the times that it has in the mount, where we may."""
    found = find_stat(fd, b".")
    assert found is not None

    def set_times() -> None:
        os.utime(fd, ns=(inode.atime_ns, inode.mtime_ns))

    with contextlib.suppress(PermissionError):
        pfs_ownership.retry_as_owner(set_times, lambda: [(found.st_uid, found.st_gid)])
