"""The changes of one batch on the PFS.

Takes: a batch that the catalog has, whose temporary files are whole.
Leaves: its changes on the PFS, in order and on disk there, and the stat of every name of the batch afterwards.
If we die here: the next mover applies the same batch again. Each change first checks whether it was done: then the inode that it moves
is not under its old name any more (the st_ino of all files in the batch are known), or its temporary file is gone.

In a cluster a call may hang in the kernel until the node's lease has ended, and land after other nodes went on. No such call reaches what
is newer: a file gets its name by a rename from a temporary name, which the node that resolves the intent removes first; a file loses its
name by a rename to one, and gets it back if it is another file than was meant. Of a directory, and after an exchange, a look afterwards
finds out and undoes it.

A name that shows an unknown inode was changed externally. The mount's version wins; the external one is kept in the same directory as
NAME.ckptfs-conflict-N. Entries that turn out to be missing at the end go to the journal again.
"""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ckptfs import disk, limits
from ckptfs.catalog import inodes, pfs_state
from ckptfs.catalog.database import Database
from ckptfs.catalog.pfs_batch import ObservedNames, ObservedStat, PfsAction, PfsBatch
from ckptfs.catalog.pfs_state import Fingerprint, PfsLocation
from ckptfs.errors import Busy, posix_error
from ckptfs.flow.write_back.stage import drop_taken, remove_temporary
from ckptfs.lifecycle import is_same_file
from ckptfs.model import Inode
from ckptfs.tiers import pfs_ownership, transfer
from ckptfs.tiers.pfs_ownership import find_stat, run_as_owner
from ckptfs.tiers.pfs_tree import DirectoryMissing, DirectoryPath, PfsTree, exchange, parse_parked_name, rename_to_free_name

log = logging.getLogger(__name__)

transfer.declare_labels("write_back:double")
disk.declare_labels(
    "write_back:put", "write_back:link", "write_back:move", "write_back:swap", "write_back:rmdir", "write_back:conflict",
    "write_back:attributes", "write_back:directory", "write_back:look", "write_back:copy",
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
        require_lease: Callable[[], None] | None,
        gone_directory: DirectoryPath | None,
        unsynced: dict[DirectoryPath, OSError],
    ) -> None:
        """`require_lease` raises Busy if this node may not change the PFS any more; None on a single node.

        If other nodes write to the same PFS, their temporary files in a directory to remove will soon be gone, and a missing directory may
        just have been moved: only `gone_directory` is known to be gone. `unsynced`: directories of which fsync failed when it was called
        last; `run` brings it up to date.
        """
        self._require_lease = require_lease
        self._is_shared = require_lease is not None
        self._gone_directory = gone_directory
        self._unsynced = unsynced
        self._tree = tree
        self._batch = batch
        with_attributes = {action.inode for action in batch.actions if action.act in {"attributes", "link", "move"}}
        self._attributes = {inode: pfs_state.find_attributes(db, inode) for inode in with_attributes}
        self._batch_inodes = {
            fingerprint.ino
            for action in batch.actions
            for fingerprint in (action.fingerprint, action.replaced_fingerprint)
            if fingerprint is not None and fingerprint.ino
        }
        self._final_inodes = {show.location.pfs_name: show.inode for show in batch.expected_entries}
        self._history_links = {one.key for one in batch.actions if one.act == "link" and inodes.is_history(db, one.target.parent)}
        self._copied_inodes: dict[int, int] = {}
        self._directories: dict[tuple[bytes, ...], None] = {}
        self.current_action: PfsAction | None = None
        self.is_half_done = False  # The current change is neither done nor undone: the batch must not end before it.
        self.has_both_names = False  # The file of the current move has its new name, and could not lose the old one.

    def run(self) -> ObservedNames:
        """Make all changes. Return the stat of every name of the batch, None if it shows another inode."""
        for action in self._batch.actions:
            if action.act in {"rmdir", "remove"}:  # The batch may have made another directory under this name already.
                self._tree.expect_any((*action.location.path, action.location.name))
        for action in self._batch.actions:
            self.current_action = action
            try:
                {
                    "put": self._put, "link": self._link, "move": self._move, "exchange": self._exchange,
                    "unlink": self._unlink, "rmdir": self._rmdir, "remove": self._remove_entry, "attributes": self._set_attributes,
                }[action.act](action)  # fmt: skip
            except DirectoryMissing as missing:
                if self._is_shared and missing.names != self._gone_directory:
                    raise
                # The directory was removed externally, or by this batch in an earlier attempt.
                continue
            if action.act != "attributes":
                self._directories |= dict.fromkeys((action.location.path, action.target.path))
        self.current_action = None
        self._sync_directories()
        observed: ObservedNames = {}
        for show in self._batch.expected_entries:
            if show.inode is None:
                continue
            try:
                found = disk.act("write_back:look", find_stat, self._fd(show.location), show.location.name)
            except DirectoryMissing:
                found = None
            seen = ObservedStat.of(found) if found is not None and self._matches(found, show.fingerprint) else None
            observed[show.location.pfs_name] = seen
        return observed

    def _sync_directories(self) -> None:
        """Make the names of the batch durable, with those above them that were not durable before."""
        above = [one for one in self._unsynced if any(path[: len(one)] == one for path in self._directories)]
        for path in dict.fromkeys([*self._directories, *above]):
            self._unsynced.pop(path, None)
            try:
                sync_directory(self._tree.get_directory(path))
            except DirectoryMissing:
                continue
            except OSError as failure:
                self._unsynced[path] = failure

    # --- one method per act -------------------------------------------------------------------------------------------

    def _put(self, action: PfsAction) -> None:
        directory = self._fd(action.location)
        temporary = find_stat(directory, action.temporary)
        if temporary is None:
            return
        self._preserve_external(action)
        try:
            self._rename("write_back:put", action.location, action.temporary, action.location)
        except OSError as failure:
            if failure.errno not in _NAME_TAKEN_ERRNOS:
                raise
            there = find_stat(directory, action.location.name)
            if there is not None and stat.S_ISDIR(there.st_mode) and stat.S_ISDIR(temporary.st_mode):
                self._remove("write_back:rmdir", action.location, action.temporary, temporary)
                return
            self._free_name(action)
            self._rename("write_back:put", action.location, action.temporary, action.location)

    def _link(self, action: PfsAction) -> None:
        source, target = self._stat(action.location), self._stat(action.target)
        if not self._matches(source, action.fingerprint) or (target is not None and source is not None and target.st_ino == source.st_ino):
            return
        self._preserve_external(action)
        failure = self._link_aside(action)
        if failure is not None:
            if self.is_history_link(action, failure) or source is None or not stat.S_ISREG(source.st_mode):
                raise failure
            log.warning("%s: the PFS cannot link: %s; a copy is made instead", action.target.text, failure.strerror)
            self._change("write_back:copy", self._fd(action.location), action.location.name, self._copy, action)
        self._rename("write_back:put", action.target, action.temporary, action.target)

    def is_history_link(self, action: PfsAction, failure: OSError) -> bool:
        """Return True if the PFS cannot link into the history; see `Planner._find_history_name`."""
        return action.key in self._history_links and failure.errno in _NO_LINKS

    def _copy(self, action: PfsAction) -> None:
        source, target = self._fd(action.location), self._fd(action.target)
        create = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            disk.closing(os.open(action.location.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source)) as read,
            disk.closing(os.open(action.temporary, create, 0o600, dir_fd=target)) as written,
        ):
            transfer.copy(read, written, label="write_back:double")
            self._apply_attributes(action.inode, self._fd(action.target), action.temporary)
            found = os.fstat(read)
            os.utime(written, ns=(found.st_atime_ns, found.st_mtime_ns))
            os.fsync(written)

    def _move(self, action: PfsAction) -> None:
        if self._is_shared:
            self._drop_taken(self._fd(action.location), action)
        source = self._stat(action.location)
        if source is None or not self._matches(source, action.fingerprint):
            return
        target = self._stat(action.target)
        if target is not None and target.st_ino == source.st_ino and not stat.S_ISDIR(source.st_mode):
            # rename(2) would leave both names. A batch that is done again may already show a later link under the old one.
            if self._final_inodes.get(action.location.pfs_name) != action.inode:
                self._take_old_name(action, source)
            return
        if target is not None and self._is_copied(action, source, target):
            self._copied_inodes[source.st_ino] = target.st_ino
            self._take_name(action, source)  # The previous mover died after the copy.
            return
        is_replaced = action.replaced_fingerprint is not None and self._matches(target, action.replaced_fingerprint)
        if target is not None and target.st_ino in self._batch_inodes and not is_replaced:
            return  # A later change of this batch was done under this name: then this one was, too.
        self._preserve_external(action)
        try:
            self._rename_entry(action, source)
        except OSError as failure:
            if failure.errno == errno.EXDEV and not stat.S_ISDIR(source.st_mode):
                self._move_across(action, source)
                return
            if failure.errno not in _NAME_TAKEN_ERRNOS:
                raise
            self._free_name(action)
            self._rename_entry(action, source)
        if stat.S_ISDIR(source.st_mode):
            self._tree.clear_cache()

    def _rename_entry(self, action: PfsAction, source: os.stat_result) -> None:
        """Rename an entry; in a cluster so that nothing newer is replaced or moved if the call lands late."""
        new = action.target
        if self._is_shared and not stat.S_ISDIR(source.st_mode) and self._link_aside(action) is None:
            self._rename("write_back:move", new, action.temporary, new)
            self._take_old_name(action, source)
            return
        name, old_fd, new_fd, there = action.location.name, self._fd(action.location), self._fd(new), self._stat(new)
        if not self._is_shared or (there is not None and stat.S_ISDIR(there.st_mode)):
            self._rename("write_back:move", action.location, name, new)
        else:
            self._change("write_back:move", old_fd, name, rename_to_free_name, old_fd, name, new_fd, new.name)
        if self._is_late(new_fd, new.name, source):
            run_as_owner(new_fd, new.name, lambda: disk.act("write_back:late", rename_to_free_name, new_fd, new.name, old_fd, name))

    def _link_aside(self, action: PfsAction) -> OSError | None:
        """Link a file under its temporary name beside its new name. Return the error if the PFS cannot."""
        source, target = self._fd(action.location), self._fd(action.target)
        name, temporary = action.location.name, action.temporary
        remove_temporary(self._tree, action.target, temporary)
        how: dict[str, Any] = {"src_dir_fd": source, "dst_dir_fd": target, "follow_symlinks": False}
        try:
            self._change("write_back:link", source, name, os.link, name, temporary, **how)
        except OSError as failure:
            if failure.errno not in _NO_LINKS:
                raise
            return failure
        return None

    def _take_old_name(self, action: PfsAction, source: os.stat_result) -> None:
        try:
            self._take_name(action, source)
        except OSError:
            self.has_both_names = True
            raise

    def _take_name(self, action: PfsAction, found: os.stat_result) -> None:
        """Remove the name of a file, of which `found` was the last stat."""
        if not self._is_shared:
            self._remove("write_back:unlink", action.location, action.location.name, found)
            return
        self._rename("write_back:unlink", action.location, action.location.name, replace(action.location, name=action.temporary))
        self._drop_taken(self._fd(action.location), action, found)

    def _drop_taken(self, directory: int, action: PfsAction, found: os.stat_result | None = None) -> None:
        """Remove the file that has lost its name. If the PFS refuses, the batch waits; the change is done."""
        self.is_half_done = found is not None or find_stat(directory, action.temporary) is not None
        drop_taken(directory, action, found)
        self.is_half_done = False

    def _is_late(self, directory: int, name: bytes, moved: os.stat_result | None) -> bool:
        """Return True if a call took effect after other nodes gave the name to another than `moved`."""
        if self._require_lease is None:
            return False
        try:
            self._require_lease()
        except Busy:
            found = find_stat(directory, name)
            return found is not None and moved is not None and found.st_ino != moved.st_ino
        return False

    def _is_copied(self, action: PfsAction, source: os.stat_result, target: os.stat_result) -> bool:
        """Return True if `_move_across` has put the copy into place already, and the source is left."""
        if not stat.S_ISREG(source.st_mode) or (target.st_dev, target.st_ino) == (source.st_dev, source.st_ino):
            return False
        if action.replaced_fingerprint is not None and self._matches(target, action.replaced_fingerprint):
            return False
        if (source.st_mode, source.st_size, source.st_mtime_ns) != (target.st_mode, target.st_size, target.st_mtime_ns):
            return False
        return self._digest(action.location) == self._digest(action.target)

    def _digest(self, location: PfsLocation) -> transfer.ContentDigests:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        directory = self._fd(location)
        with disk.closing(run_as_owner(directory, location.name, lambda: os.open(location.name, flags, dir_fd=directory))) as fd:
            return transfer.read(fd, label="write_back:double")

    def _move_across(self, action: PfsAction, source: os.stat_result) -> None:
        """Move a file to another filesystem or quota project: copy, rename, remove the source."""
        new, directory = action.target, self._fd(action.target)
        remove_temporary(self._tree, new, action.temporary)
        try:
            self._change("write_back:copy", self._fd(action.location), action.location.name, self._copy_entry, action, source)
            copied = find_stat(directory, action.temporary)
            if copied is None:
                raise posix_error(errno.ENOENT)
            self._rename("write_back:move", new, action.temporary, new)
        except BaseException:
            with contextlib.suppress(OSError):
                remove_temporary(self._tree, new, action.temporary)
            raise
        self._copied_inodes[source.st_ino] = copied.st_ino
        sync_directory(directory)
        try:
            self._take_name(action, source)
        except OSError:
            if not self.is_half_done:  # The old name is still there, and the file must not appear twice.
                with contextlib.suppress(OSError):
                    remove_temporary(self._tree, new, new.name)
            raise

    def _copy_entry(self, action: PfsAction, source: os.stat_result) -> None:
        directory, new_directory = self._fd(action.location), self._fd(action.target)
        if stat.S_ISREG(source.st_mode):
            self._copy(action)
            return
        if stat.S_ISLNK(source.st_mode):
            os.symlink(os.readlink(action.location.name, dir_fd=directory), action.temporary, dir_fd=new_directory)
        else:
            os.mknod(action.temporary, source.st_mode, source.st_rdev, dir_fd=new_directory)
        self._apply_attributes(action.inode, new_directory, action.temporary)

    def _exchange(self, action: PfsAction) -> None:
        assert action.replaced_fingerprint is not None
        directory, new_directory = self._fd(action.location), self._fd(action.target)
        one, other = find_stat(directory, action.location.name), find_stat(new_directory, action.target.name)
        if self._matches(find_stat(directory, action.temporary), action.fingerprint):
            self._finish_exchange(action, other)
        elif self._matches(one, action.fingerprint) and self._matches(other, action.replaced_fingerprint):
            try:
                name, new = action.location.name, action.target.name
                self._change("write_back:swap", directory, name, exchange, directory, name, new_directory, new)
                if self._is_late(new_directory, new, one):
                    run_as_owner(directory, name, lambda: disk.act("write_back:late", exchange, directory, name, new_directory, new))
            except OSError as failure:
                if failure.errno not in _NO_EXCHANGE:
                    raise
                self._exchange_by_renames(action, other)
        self._tree.clear_cache()

    def _exchange_by_renames(self, action: PfsAction, other: os.stat_result | None) -> None:
        """Exchange two names on a PFS without RENAME_EXCHANGE. If it refuses a part of it, undo the rest."""
        parked = replace(action.location, name=action.temporary)
        one, directory = self._stat(action.location), self._fd(parked)
        self._rename("write_back:move", action.location, action.location.name, parked)
        if self._is_late(directory, parked.name, one):
            back = partial(disk.act, "write_back:late", rename_to_free_name, directory, parked.name, directory, action.location.name)
            run_as_owner(directory, parked.name, back)
        try:
            self._finish_exchange(action, other)
        except OSError:
            self.is_half_done = True
            if self._stat(action.target) is None:
                self._rename("write_back:move", action.location, action.location.name, action.target)
            self._rename("write_back:move", parked, parked.name, action.location)
            self.is_half_done = False
            raise

    def _finish_exchange(self, action: PfsAction, other: os.stat_result | None) -> None:
        """Finish an exchange by renames, of which the first is done. A name is missing a moment."""
        assert action.replaced_fingerprint is not None
        if self._matches(other, action.replaced_fingerprint):
            self._rename("write_back:move", action.target, action.target.name, action.location)
        self._rename("write_back:move", action.location, action.temporary, action.target)

    def _unlink(self, action: PfsAction) -> None:
        if self._is_shared:
            self._drop_taken(self._fd(action.location), action)
        found = self._stat(action.location)
        if found is None or stat.S_ISDIR(found.st_mode):
            return
        if not self._matches(found, action.fingerprint):
            if found.st_ino not in self._batch_inodes:
                log.warning("%s: removed in the mount, but replaced externally on the PFS; it stays there", action.location.text)
            return
        self._take_name(action, found)

    def _remove_entry(self, action: PfsAction) -> None:
        found = self._stat(action.location)
        (self._rmdir if found is not None and stat.S_ISDIR(found.st_mode) else self._unlink)(action)

    def _rmdir(self, action: PfsAction) -> None:
        found = self._stat(action.location)
        if found is None or not stat.S_ISDIR(found.st_mode) or not self._matches(found, action.fingerprint):
            return
        try:
            self._remove("write_back:rmdir", action.location, action.location.name, found)
        except OSError as failure:
            if failure.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
            if self._is_shared and self._drop_temporaries(action.location):
                raise Busy("another node was making files in a directory that is being removed") from failure
            log.warning("%s: removed in the mount, but holds other files on the PFS; it stays there", action.location.text)
        self._tree.clear_cache()

    def _drop_temporaries(self, removed: PfsLocation) -> bool:
        """Remove what other nodes were making in a directory. Return False if it holds anything else.

        A dead node will not remove it; a living one finds out that the directory is gone. Parked entries will be moved.
        """
        inside = PfsLocation(removed.parent, removed.name, (*removed.path, removed.name))
        names = [os.fsencode(name) for name in os.listdir(self._fd(inside))]
        if not all(name.startswith(b".ckptfs.") for name in names):
            return False
        for name in names:
            found = find_stat(self._fd(inside), name) if parse_parked_name(name) is None else None
            if found is not None:
                with contextlib.suppress(FileNotFoundError):
                    self._remove("write_back:discard", inside, name, found)
        return True

    def _set_attributes(self, action: PfsAction) -> None:
        directory, name = self._fd(action.location), action.location.name
        if self._matches(find_stat(directory, name), action.fingerprint):
            self._change("write_back:attributes", directory, name, self._apply_attributes, action.inode, directory, name)

    def _apply_attributes(self, number: int, directory: int, name: bytes) -> None:
        if (known := self._attributes.get(number)) is not None:
            with contextlib.suppress(FileNotFoundError):
                pfs_ownership.apply_attributes(directory, name, *known)

    # --- names in the way ---------------------------------------------------------------------------------------------

    def _preserve_external(self, action: PfsAction) -> None:
        """Keep an external file or change under a conflict name before it is replaced."""
        there, made, expected = self._stat(action.target), action.fingerprint, action.replaced_fingerprint
        if there is None or stat.S_ISDIR(there.st_mode):
            return
        if self._matches(there, made) and (made.ino or is_same_file((made.size, made.mtime_ns, 0), (there.st_size, there.st_mtime_ns, 0))):
            return  # Also what a batch that was cut off made of the same bytes.
        if expected is not None and self._matches(there, expected):
            if _is_externally_changed(there, expected):
                self._keep_as_conflict(action.target, there)
        elif there.st_ino not in self._batch_inodes:
            self._keep_as_conflict(action.target, there)

    def _free_name(self, action: PfsAction) -> None:
        """Free a name that the rename does not replace. Remove our own file there: the mount deleted it."""
        location, there, expected = action.target, self._stat(action.target), action.replaced_fingerprint
        if there is None:
            return
        is_ours = expected is not None and self._matches(there, expected) and not stat.S_ISDIR(there.st_mode)
        if not is_ours:
            self._keep_as_conflict(location, there)
        still_there = self._stat(location)
        if still_there is not None and not stat.S_ISDIR(still_there.st_mode):
            # The conflict name has an external file by now.
            if action.act == "put":
                self._remove("write_back:unlink", location, location.name, still_there)
            else:
                self._take_name(replace(action, location=location), still_there)

    def _keep_as_conflict(self, location: PfsLocation, there: os.stat_result | None) -> None:
        """Give an external entry a conflict name. A file keeps its name as well, so that it is never missing."""
        if there is None:
            return
        directory = self._fd(location)
        for number in range(1, 10_000):
            suffix = CONFLICT_SUFFIX % number
            conflict_name = location.name[: limits.NAME_BYTES_MAX - len(suffix)] + suffix
            found = find_stat(directory, conflict_name)
            if found is not None and found.st_ino == there.st_ino and not stat.S_ISDIR(there.st_mode):
                return
            if found is None:
                break
        log.warning("%s: changed externally on the PFS; that version is kept there as %s", location.text, os.fsdecode(conflict_name))
        self._change("write_back:conflict", directory, location.name, _link_or_rename, directory, location.name, conflict_name, there)

    def _matches(self, found: os.stat_result | None, fingerprint: Fingerprint) -> bool:
        """Return True if `found` is the inode of `fingerprint`, or an unknown one of equal size and mtime."""
        if found is None:
            return False
        if found.st_ino in (fingerprint.ino, self._copied_inodes.get(fingerprint.ino)) or fingerprint.ino == 0:
            return True
        if found.st_ino in self._batch_inodes or fingerprint.size < 0 or not stat.S_ISREG(found.st_mode):
            return False
        return (found.st_size, found.st_mtime_ns) == (fingerprint.size, fingerprint.mtime_ns)

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _fd(self, location: PfsLocation) -> int:
        return self._tree.get_directory(location.path)

    def _stat(self, location: PfsLocation) -> os.stat_result | None:
        return find_stat(self._fd(location), location.name)

    def _rename(self, label: str, old: PfsLocation, old_name: bytes, new: PfsLocation) -> None:
        old_fd = self._fd(old)
        self._change(label, old_fd, old_name, os.rename, old_name, new.name, src_dir_fd=old_fd, dst_dir_fd=self._fd(new))

    def _remove(self, label: str, location: PfsLocation, name: bytes, found: os.stat_result) -> None:
        directory = self._fd(location)
        call = os.rmdir if stat.S_ISDIR(found.st_mode) else os.unlink
        self._change(label, directory, name, call, name, dir_fd=directory)

    def _change(self, label: str, directory: int, name: bytes, call: Callable[..., None], *values: Any, **named: Any) -> None:
        """Make a visible change of a name with a valid lease; as an owner if root is refused."""

        def change() -> None:
            if self._require_lease is not None:
                self._require_lease()
            disk.act(label, call, *values, **named)

        run_as_owner(directory, name, change)


def _is_externally_changed(found: os.stat_result, fingerprint: Fingerprint) -> bool:
    """Return True if a file was written externally since its fingerprint was taken."""
    if fingerprint.size < 0 or not stat.S_ISREG(found.st_mode):
        return False
    return found.st_size != fingerprint.size or found.st_mtime_ns > fingerprint.mtime_ns


def _link_or_rename(directory: int, name: bytes, conflict_name: bytes, there: os.stat_result) -> None:
    if stat.S_ISREG(there.st_mode):
        try:
            os.link(name, conflict_name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
            return
        except OSError as failure:
            if failure.errno not in _NO_LINKS:
                raise
    os.rename(name, conflict_name, src_dir_fd=directory, dst_dir_fd=directory)


def sync_directory(fd: int) -> None:
    """Make the names in a directory durable, as far as its filesystem can."""
    try:
        disk.fsync("write_back:directory", fd)
    except OSError as failure:
        if failure.errno not in _NO_FSYNC:
            raise


def set_directory_times(fd: int, inode: Inode) -> None:
    """Set the times of a directory as in the mount, if permitted."""
    found = os.fstat(fd)
    with contextlib.suppress(PermissionError):
        pfs_ownership.retry_as_owner(lambda: os.utime(fd, ns=(inode.atime_ns, inode.mtime_ns)), lambda: [(found.st_uid, found.st_gid)])
