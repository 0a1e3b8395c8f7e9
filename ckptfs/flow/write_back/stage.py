"""The temporary files of one plan: whole, verified (P4), and on disk before the batch is applied.

Takes: the puts of a plan, and the copies of contents on this node.
Leaves: temporary files in the directories where their names will appear, with their final attributes, and the batch in the catalog.
If we die here: the batch in hand names its temporary files. The next mover resumes large ones and removes the rest.

A sealed content is copied without a lock against writers: the digest decides. If the copied bytes match it they are that generation,
even if the file changed since; if not, the content changed during the copy and is planned again. The same holds for a large
content that is copied while the seal lane reads it: it is whole once the content is sealed with the digest of the copied bytes.
"""

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from ckptfs import digest, disk, limits, step_durations
from ckptfs.catalog import contents, pfs_batch, pfs_state, summary
from ckptfs.catalog.copies import list_copies, list_good_tiers
from ckptfs.catalog.database import Database
from ckptfs.catalog.pfs_batch import KEYS_PER_ROW, PfsAction, PfsBatch
from ckptfs.catalog.pfs_state import Fingerprint, PfsLocation
from ckptfs.errors import Busy, CkptfsError
from ckptfs.flow.write_back.deferred import RefusedKind, SourceFailed
from ckptfs.flow.write_back.plan_facts import BatchPlan, Facts, PlannedFile, SourceKind
from ckptfs.model import Content, ContentState, Inode, PublishedRow, Tier
from ckptfs.tiers import local_copies, pfs_ownership, pfs_sync, pfs_tree, reflink, transfer
from ckptfs.tiers.pfs_ownership import find_stat, run_as_owner
from ckptfs.tiers.pfs_tree import DirectoryMissing, PfsTree
from ckptfs.tiers.reflink import BlockIndex
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)

transfer.declare_labels("write_back")

disk.declare_labels(
    "write_back:source", "write_back:create", "write_back:resume", "write_back:make", "write_back:discard", "write_back:check:read",
    "write_back:late", "write_back:unlink", "write_back:begun", "write_back:written_down",
)  # fmt: skip

STABLE_ATTEMPTS = 3
PROGRESS_EVERY_S = 0.25
BLOCK_FILES_MAX = 4096
"""Files on the PFS whose blocks are loaded at the first use."""
_TAKES_A_NAME = {"move", "unlink", "remove"}
_NO_SUCH_KIND = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True, slots=True)
class Staged:
    """A complete temporary file. `is_merged`: the directory exists already and is used instead."""

    fingerprint: Fingerprint
    published: PublishedRow | None = None
    is_merged: bool = False


class PfsBlocks:
    """The blocks of files that this node has written back lately. A copy begins as a clone of them.

    A clone is made by the PFS itself. Nothing is believed of it: the copy that follows compares every piece with the content, as it does
    with what an interrupted copy left, and writes what differs. So other programs may change the files on the PFS at any time (P4).
    """

    def __init__(self, db: Database, pfs: Path) -> None:
        self._db = db
        self._pfs = pfs
        self._index: BlockIndex | None = None
        self._can_share: bool | None = None  # None until the PFS was asked.
        self._sharing: set[int] = set()

    def has_any(self, fd: int, size: int) -> bool:
        """Return whether an empty temporary file may share blocks; digests are worth waiting for then."""
        if self._can_share is False or size < limits.SHARED_BYTES_MIN or os.fstat(fd).st_size or self._load().is_empty:
            return False
        if self._can_share is None:
            self._can_share = reflink.is_possible(fd)
            log.info("%s: %s", self._pfs, "equal blocks are stored once" if self._can_share else "the filesystem cannot share blocks")
        return self._can_share

    def clone_into(self, fd: int, content: Content) -> None:
        """Clone what other files on the PFS have into an empty temporary file; the copy does the rest."""
        if not self.has_any(fd, content.size):
            return
        by_file: dict[int, list[tuple[int, int]]] = {}
        for number, (other, there) in self._load().find(content.block_digests or b"").items():
            by_file.setdefault(other, []).append((number, there))
        for other, blocks in by_file.items():
            try:
                self._clone_from(other, blocks, fd, content.size)
            except (OSError, CkptfsError) as failure:
                log.debug("inode %d: shares no blocks with inode %d on the PFS: %s", content.inode, other, failure)
            else:
                self._sharing |= {content.inode, other}

    def _clone_from(self, other: int, blocks: list[tuple[int, int]], fd: int, size: int) -> None:
        with disk.closing(pfs_tree.open_inode(self._db, self._pfs, other)) as source:
            for number, there in blocks:
                start = number * limits.BLOCK_BYTES
                reflink.clone_range(source, there * limits.BLOCK_BYTES, fd, start, min(limits.BLOCK_BYTES, size - start))

    def record(self, rows: list[PublishedRow]) -> None:
        """Note what the PFS shows now: the next files may share its blocks."""
        if self._index is not None:
            for row in rows:
                if row.block_digests and row.size >= limits.SHARED_BYTES_MIN:
                    self._index.add(row.inode, row.block_digests)
        if self._sharing:
            pfs_state.mark_sharing(self._db, self._sharing)
            self._sharing = set()

    def _load(self) -> BlockIndex:
        if self._index is None:
            self._index = BlockIndex()
            for inode, block_digests in reversed(pfs_state.list_recent_blocks(self._db, limits.SHARED_BYTES_MIN, BLOCK_FILES_MAX)):
                self._index.add(inode, block_digests)
        return self._index


class Stager:
    """Makes the temporary files of one plan after the other."""

    def __init__(self, db: Database, tiers: Tiers, tree: PfsTree, facts: Facts) -> None:
        """`facts` gets what the next plan must know about a file that was not made."""
        self._db = db
        self._tiers = tiers
        self._facts = facts
        self._deferred = facts.deferred
        self._tree = tree
        self.blocks = PfsBlocks(db, tree.root)
        self._path = ""
        self._open: list[tuple[int, PfsAction, int]] = []
        self._reported_s = 0.0
        self._is_reporting = False

    def stage(self, plan: BatchPlan) -> PfsBatch:
        """Make the temporary files of a plan, and store the batch. Raises Busy if it must be planned again."""
        puts = [planned.action for planned in plan.puts.values()]
        plan.batch.abandoned = self.remove_leftovers(puts)
        begun = PfsBatch(plan.batch.last_seq, puts, abandoned=plan.batch.abandoned)
        if puts:
            pfs_batch.set_batch(self._db, begun, ready=False)
            disk.reach("write_back:begun")
        try:
            began_s = time.monotonic()
            staged = {key: self._stage_or_refuse(plan, planned) for key, planned in plan.puts.items()}
            self._persist(plan)
            spent_s = time.monotonic() - began_s
        except BaseException:
            with contextlib.suppress(OSError):
                self.discard(begun)
            raise
        finally:
            self._close()
        batch = finish_batch(plan, staged)
        batch.after_seq = self._deferred.after_seq
        summary.record_pfs_speed(self._db, plan.planned_bytes, spent_s)
        if batch.actions:
            pfs_batch.set_batch(self._db, batch, ready=True)
            disk.reach("write_back:written_down")
        return batch

    def discard(self, batch: PfsBatch) -> None:
        """Remove the temporary files of a batch that is planned again. It stays as an interrupted one.

        So the next step finds files that the PFS did not let go, or of which another node has moved the directory.
        """
        pfs_batch.set_batch(self._db, batch, ready=False)
        self.remove([*batch.actions, *batch.abandoned])

    def _close(self) -> None:
        """Close the descriptors of the temporary files, and end the report of the copy."""
        for fd, _, _ in self._open:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._open = []
        if self._is_reporting:
            self._is_reporting = False
            summary.set_report(self._db, "write_back", None)

    def remove(self, actions: Iterable[PfsAction]) -> list[PfsAction]:
        """Remove the temporary files of these actions. Return those that the PFS does not let go."""
        self._close()
        return [action for action in actions if action.temporary and not self._remove_one(action)]

    def _remove_one(self, action: PfsAction) -> bool:
        for location in filter(None, (action.location, action.new_location)):
            try:
                if location is action.location and action.act in _TAKES_A_NAME:
                    with contextlib.suppress(FileNotFoundError):
                        drop_taken(self._tree.get_directory(location.path), action)
                # The temporary name of an exchange may hold one of its two files.
                if action.act in {"put", "link", "move"}:
                    remove_temporary(self._tree, location, action.temporary)
            except OSError as failure:
                if not self._deferred.concerns_part(location.path, failure):
                    raise
                log.debug("%s: %s stays on the PFS: %s", location.text, os.fsdecode(action.temporary), failure)
                return False
        return True

    def remove_leftovers(self, planned: Iterable[PfsAction]) -> list[PfsAction]:
        """Remove temporary files of earlier batches, but for `planned` ones. Return those that have to stay."""
        found = pfs_batch.find_batch(self._db)
        if found is None:
            return []
        again = {(action.location, action.temporary) for action in planned}
        leftovers = [*found[1].actions, *found[1].abandoned]
        stuck = self.remove(action for action in leftovers if (action.location, action.temporary) not in again)
        if not again:
            pfs_batch.set_leftovers(self._db, stuck)
        return stuck

    def _persist(self, plan: BatchPlan) -> None:
        """Persist all temporary files. Refuses one that does not have its size on the PFS (F3)."""
        try:
            pfs_sync.persist_files([fd for fd, _, _ in self._open])
            for fd, action, size in self._open:
                found = os.fstat(fd).st_size
                if found != size:
                    raise OSError(errno.EIO, f"the PFS holds {found} of {size} bytes", os.fsdecode(action.location.name))
        except OSError as failure:
            puts = [*plan.puts.values()]
            if len(puts) > 1:
                self._deferred.fence_seq = puts[len(puts) // 2].action.key // KEYS_PER_ROW
                raise Busy(str(failure)) from failure  # The PFS may have room for half of them.
            self._refuse(plan, puts[0], failure)

    def _refuse(self, plan: BatchPlan, refused: PlannedFile, failure: OSError) -> NoReturn:
        """Defer a file if the error is its own, so that others proceed. Raises Busy then, and else OSError."""
        if not self._defer(refused, failure):
            raise OSError(failure.errno, failure.strerror, refused.action.location.text) from failure
        with contextlib.suppress(Busy):
            # The files after it are tried up to the first that is not refused: no plan for each.
            for planned in [one for one in plan.puts.values() if one.action.key > refused.action.key]:
                try:
                    self._stage_one(planned)
                    break
                except DirectoryMissing:
                    break
                except OSError as next_failure:
                    if not self._defer(planned, next_failure):
                        break
        raise Busy(f"{refused.action.location.text} is deferred") from failure

    def _defer(self, planned: PlannedFile, failure: OSError) -> bool:
        """Defer a file that could not be made. Return False if the error concerns more than this file."""
        kind, size = (RefusedKind.NAMES, 0) if planned.content is None else (RefusedKind.BYTES, planned.content.size)
        return self._deferred.defer(planned.action, kind, failure, size)

    # --- one temporary file -------------------------------------------------------------------------------------------

    def _stage_or_refuse(self, plan: BatchPlan, planned: PlannedFile) -> Staged:
        """Make one temporary file. Raises Busy if it must be planned again, and OSError."""
        content, began_s = planned.content, time.monotonic()
        try:
            staged = self._stage_one(planned)
        except DirectoryMissing:
            raise
        except OSError as failure:
            self._deferred.fence_seq = planned.action.key // KEYS_PER_ROW
            if plan.batch.actions[0] is not planned.action:
                raise Busy(str(failure)) from failure  # The rows before this one are written back without it.
            self._refuse(plan, planned, failure)
        if content is not None:
            duration_s = time.monotonic() - began_s
            step_durations.record(step_durations.WRITE_BACK, duration_s, content.size)
            if planned.kind is SourceKind.STABLE:
                self._facts.pacing.record_duration(content.id, duration_s)
        return staged

    def _stage_one(self, planned: PlannedFile) -> Staged:
        """Make one temporary file. Raises Busy if it must be planned again, and OSError."""
        action, self._path = planned.action, planned.action.location.text
        wanted, xattrs = pfs_state.find_attributes(self._db, action.inode) or (_build_gone_directory(planned), {})

        def make() -> Staged:
            directory = self._tree.get_directory(action.location.path)
            left = find_stat(directory, action.temporary)
            resumed_fd = None if left is None else self._open_resumable(directory, left, planned, wanted)
            there = find_stat(directory, action.location.name) if planned.can_merge else None
            if there is not None and stat.S_ISDIR(there.st_mode):
                return Staged(Fingerprint(disk.get_lasting_ino(there)), is_merged=True)
            try:
                if stat.S_ISREG(wanted.mode):
                    return self._stage_file(directory, planned, wanted, xattrs, resumed_fd)
                return self._stage_special(directory, action.temporary, wanted, xattrs)
            except BaseException:
                with contextlib.suppress(OSError):
                    remove_temporary(self._tree, action.location, action.temporary)
                raise

        return pfs_ownership.retry_as_owner(
            make, lambda: [(wanted.uid, wanted.gid), pfs_ownership.get_owner(self._tree.get_directory(action.location.path))]
        )

    def _open_resumable(self, directory: int, there: os.stat_result, planned: PlannedFile, wanted: Inode) -> int | None:
        """Open a large temporary file that an interrupted batch left. Remove any other, and return None."""
        # Another owner's process may still have the file open for writing.
        owners = {os.geteuid(), wanted.uid, os.fstat(directory).st_uid}
        is_ours = stat.S_ISREG(there.st_mode) and not there.st_mode & 0o7022 and there.st_nlink == 1 and there.st_uid in owners
        if is_ours and planned.content is not None and there.st_size >= limits.BLOCK_BYTES:
            return disk.open_file("write_back:resume", planned.action.temporary, os.O_RDWR | os.O_NOFOLLOW, dir_fd=directory)
        remove_temporary(self._tree, planned.action.location, planned.action.temporary)
        return None

    def _stage_file(
        self, directory: int, planned: PlannedFile, wanted: Inode, xattrs: dict[bytes, bytes], resumed_fd: int | None
    ) -> Staged:
        action = planned.action
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = disk.open_file("write_back:create", action.temporary, flags, 0o600, dir_fd=directory) if resumed_fd is None else resumed_fd
        try:
            if resumed_fd is None:
                _check_owner(os.fstat(fd))
            fill = {SourceKind.SEALED: self._fill_sealed, SourceKind.EARLY: self._fill_early, SourceKind.STABLE: self._fill_stable}
            size, whole, blocks = fill[planned.kind](fd, planned.content) if planned.content else (0, *digest.RunningDigest().finish())
            pfs_ownership.apply_attributes(directory, action.temporary, wanted, xattrs, is_new=resumed_fd is None)
            found = disk.fstat(fd)
        except BaseException:
            os.close(fd)
            raise
        self._open.append((fd, action, size))
        generation = wanted.generation if planned.content is None else planned.content.generation
        complete = planned.kind is not SourceKind.STABLE
        ino = disk.get_lasting_ino(found)
        fingerprint = Fingerprint(ino, size, found.st_mtime_ns)
        published = PublishedRow(action.inode, generation, complete, size, found.st_mtime_ns, ino, whole, blocks, action.key)
        return Staged(fingerprint, published)

    def _stage_special(self, directory: int, name: bytes, wanted: Inode, xattrs: dict[bytes, bytes]) -> Staged:
        try:
            disk.act("write_back:make", _make_special, directory, name, wanted)
        except OSError as failure:
            is_special = not (stat.S_ISDIR(wanted.mode) or stat.S_ISLNK(wanted.mode))
            unsupported = _NO_SUCH_KIND - {errno.EPERM} if pfs_ownership.is_root() else _NO_SUCH_KIND
            if is_special and failure.errno in unsupported:
                log.warning("%s: not written back: the PFS cannot hold this type of file", self._path)
                self._facts.unfit_inodes.add(wanted.id)
                raise Busy("the PFS cannot hold this") from failure
            raise
        made = find_stat(directory, name)
        assert made is not None
        _check_owner(made)
        pfs_ownership.apply_attributes(directory, name, wanted, xattrs, is_new=True)
        return Staged(Fingerprint(disk.get_lasting_ino(made)))

    def _fill_sealed(self, fd: int, content: Content) -> transfer.ContentDigests:
        """Copy from the first copy that has the digest; quarantine those that have not."""
        self.blocks.clone_into(fd, content)
        refusal: SourceFailed | None = None
        for tier in list_good_tiers(self._db, content.id, self._tiers):
            try:
                copied = self._copy(fd, content, tier)
            except SourceFailed as failure:
                self._require_unchanged(content)
                refusal = refusal or failure
                continue
            if (copied[0], copied[1]) == (content.size, content.digest):
                return copied
            local_copies.quarantine(self._db, content, tier, "its digest differs")
        if not contents.is_unchanged(self._db, content):
            raise Busy("the content was deleted, lost or opened for writing")
        if refusal is not None:
            raise refusal
        beyond = [copy.tier for copy in list_copies(self._db, content.id) if copy.tier not in self._tiers]
        if beyond:
            remedy = f"mount with {beyond[0]}= as before"
            raise SourceFailed(errno.ENODEV, f"its content is in {beyond[0]}, which is not available", remedy)
        if not contents.mark_lost(self._db, content):
            raise OSError(errno.EIO, "no copy of its content can be read")
        log.error("%s: content lost: no copy is left on this node", self._path)
        raise Busy("no copy of the content is left")

    def _fill_early(self, fd: int, content: Content) -> transfer.ContentDigests:
        """Copy while the seal lane reads, then wait for the seal; first, if blocks may be shared."""
        self._facts.last_unsealed = (content.id, content.change)  # If this is of no use, the next plan waits for the seal.
        if self.blocks.has_any(fd, content.size):
            return self._fill_sealed(fd, self._wait_for_seal(content))
        tiers = list_good_tiers(self._db, content.id, self._tiers)
        if not tiers:
            raise Busy("the content has no readable copy")
        try:
            copied = self._copy(fd, content, tiers[0])
        except SourceFailed as failure:
            raise Busy(str(failure)) from failure
        if self._wait_for_seal(content).digest != copied[1]:
            raise Busy("the content was sealed with another digest")
        return copied

    def _wait_for_seal(self, content: Content) -> Content:
        """Return the content as it was sealed. Raises Busy if it is not, or not in time."""
        deadline_s = time.monotonic() + limits.EARLY_SEAL_WAIT_S
        while (now := contents.get_content(self._db, content.id)) == content:
            if time.monotonic() > deadline_s:
                raise Busy("the seal takes too long")
            time.sleep(limits.EARLY_SEAL_POLL_S)
        if now is None or now.change != content.change or now.digest is None:
            raise Busy("the content was deleted or opened for writing")
        return now

    def _copy(self, fd: int, content: Content, tier: Tier) -> transfer.ContentDigests:
        """Copy from one tier. Raises SourceFailed if that fails, Busy if the content changed, or OSError."""
        blocks = 0

        def before_block() -> None:
            nonlocal blocks
            blocks += 1
            if blocks % 4 == 0:
                self._report_progress(content, min(blocks * limits.BLOCK_BYTES, content.size))
                self._require_unchanged(content)

        with self._opened(tier, content) as source:
            return transfer.copy(source, fd, label="write_back", before_block=before_block)

    @contextlib.contextmanager
    def _opened(self, tier: Tier, content: Content) -> Iterator[int]:
        """Open a copy inside the block. Raises SourceFailed if it cannot be opened or read."""
        try:
            with pfs_ownership.as_process_user():  # No other user may open files in the tiers.
                source = disk.act("write_back:source", self._tiers[tier].open, content.id)
        except OSError as failure:
            raise _build_source_error(tier, failure) from failure
        with disk.closing(source):
            try:
                yield source
            except transfer.SourceReadFailed as failure:
                raise _build_source_error(tier, failure) from failure

    def _report_progress(self, content: Content, copied: int) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s >= PROGRESS_EVERY_S:
            self._reported_s, self._is_reporting = now_s, True
            value = {"inode": content.inode, "path": self._path, "copied_bytes": copied, "size_bytes": content.size}
            summary.set_report(self._db, "write_back", value)

    def _require_unchanged(self, content: Content) -> None:
        """Raise Busy if the content changed since it was planned. A doomed content keeps its sealed bytes."""
        now = contents.get_content(self._db, content.id)
        if now is None or now.change == content.change:
            return
        if now.state is not ContentState.DOOMED or content.state is not ContentState.SEALED:
            raise Busy("the content was opened for writing, or deleted before its seal")

    def _fill_stable(self, fd: int, content: Content) -> transfer.ContentDigests:
        """Copy an open file in a state that it had between two equal readings. Raises Busy if there is none.

        Then the file is left out until it changes or is closed.
        """
        tiers = list_good_tiers(self._db, content.id, self._tiers)
        for _ in range(STABLE_ATTEMPTS if tiers else 0):
            os.ftruncate(fd, 0)
            with self._opened(tiers[0], content) as source:
                copied = transfer.copy(source, fd, label="write_back")
                if transfer.read(source, label="write_back:check", at_most=copied[0]) == copied:
                    return copied
        reason = "the open file keeps changing" if tiers else "the open file has no readable copy"
        log.info("%s: not written back yet: %s; the next fsync or the close tries again", self._path, reason)
        self._facts.unstable_contents.add((content.id, content.change))
        raise Busy(reason)


def remove_temporary(tree: PfsTree, location: PfsLocation, name: bytes) -> None:
    """Remove the temporary file or directory `name` in the directory of a location, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        directory = tree.get_directory(location.path)
        found = find_stat(directory, name)
        if found is None:
            return
        call = os.rmdir if stat.S_ISDIR(found.st_mode) else os.unlink
        run_as_owner(directory, name, lambda: disk.act("write_back:discard", call, name, dir_fd=directory))


def drop_taken(directory: int, action: PfsAction, found: os.stat_result | None = None) -> None:
    """Remove the file whose name an action has taken away.

    `found`: its last stat; None: it is the file of the action. If the call landed late and took another file, that one gets its name back,
    unless the name is in use again. It may have the st_ino of the file that was meant: filesystems use the numbers of removed files again.
    """
    taken, meant_ino = find_stat(directory, action.temporary), action.fingerprint.ino if found is None else disk.get_lasting_ino(found)
    if taken is None or stat.S_ISDIR(taken.st_mode):
        return

    is_meant = meant_ino in (0, taken.st_ino)
    if found is not None:
        is_meant = is_meant and (found.st_size, found.st_mtime_ns) == (taken.st_size, taken.st_mtime_ns)

    def drop() -> None:
        if not is_meant and find_stat(directory, action.location.name) is None:
            disk.rename("write_back:late", action.temporary, action.location.name, old_fd=directory, new_fd=directory)
        else:
            disk.unlink("write_back:unlink", action.temporary, dir_fd=directory)

    run_as_owner(directory, action.temporary, drop)


def finish_batch(plan: BatchPlan, staged: dict[int, Staged]) -> PfsBatch:
    """Return the batch of a plan; the fingerprint of each staged file is its st_ino on the PFS."""
    batch, restamped = plan.batch, set(plan.batch.inodes_with_set_attributes)
    made = {-key: one.fingerprint for key, one in staged.items()}
    # A file that this batch makes and whose times it sets later is recognised by its st_ino alone.
    replaced = {-key: Fingerprint(made[-key].ino) if plan.puts[key].action.inode in restamped else made[-key] for key in staged}
    batch.actions = [
        replace(
            one,
            fingerprint=made.get(one.fingerprint.ino, one.fingerprint),
            replaced_fingerprint=one.replaced_fingerprint and replaced.get(one.replaced_fingerprint.ino, one.replaced_fingerprint),
        )
        for one in batch.actions
    ]
    batch.name_changes = [replace(one, fingerprint=made.get(one.fingerprint.ino, one.fingerprint)) for one in batch.name_changes]
    batch.published_rows += [one.published for one in staged.values() if one.published is not None]
    batch.merged_directories = [plan.puts[key].action.inode for key, one in staged.items() if one.is_merged]
    return batch


def _build_source_error(tier: Tier, failure: OSError) -> SourceFailed:
    code = failure.errno or errno.EIO
    remedy = f"see what is wrong with {tier}; write the file again if it cannot be read"
    return SourceFailed(code, f"its copy in {tier} cannot be read: {os.strerror(code)}", remedy)


def _build_gone_directory(planned: PlannedFile) -> Inode:
    """Return a directory that is gone from the catalog, with the journal's mode. Raises Busy for others."""
    if not stat.S_ISDIR(planned.mode):
        raise Busy("the inode is gone")
    return Inode(planned.action.inode, planned.mode, os.geteuid(), os.getegid(), 0, 0, 0, 0, 0, 0, None, None, 0, 0, True)


def _check_owner(made: os.stat_result) -> None:
    """Raise RootSquashed if root's new file belongs to another user: the file has to be made by its owner."""
    if pfs_ownership.is_root() and made.st_uid != os.geteuid():
        raise pfs_ownership.RootSquashed(errno.EPERM, os.strerror(errno.EPERM))


def _make_special(directory: int, name: bytes, wanted: Inode) -> None:
    if stat.S_ISDIR(wanted.mode):
        os.mkdir(name, 0o700, dir_fd=directory)
    elif stat.S_ISLNK(wanted.mode):
        os.symlink(wanted.target or b"", name, dir_fd=directory)
    else:
        os.mknod(name, stat.S_IFMT(wanted.mode) | 0o600, wanted.rdev, dir_fd=directory)
