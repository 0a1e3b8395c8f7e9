"""Takes: wants of the kind 'visit', and directories that the PFS was not compared with for a while.
Leaves: a catalog that shows what strangers put on the PFS, changed there and took away; new directories complete=0 until their own visit.
If we die here: what was imported stays, the directory is as complete as before and is visited again.

Lists outside of any transaction and takes over in short ones. What was written here and is not on the PFS yet always stays.
"""

import errno
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

from ckptfs import disk, limits
from ckptfs.catalog import pfs_paths, settling, visits, wants
from ckptfs.catalog.database import Database
from ckptfs.catalog.visits import Pending, Verdict
from ckptfs.config import Config
from ckptfs.errors import TierUnavailable
from ckptfs.model import ROOT, Notify, Seen, Tier
from ckptfs.tiers import health, pfs_listing
from ckptfs.tiers.place import Places

log = logging.getLogger(__name__)

Item = TypeVar("Item")

disk.labels("visit:begin", "visit:import", "visit:vanish", "visit:end")

LISTED_TOGETHER = 256
IMPORTED_TOGETHER = limits.CHANGE_ROWS_MAX // 8
"""Names in one transaction: each takes four rows, and some more for its xattrs."""

# A refresh that took t seconds is followed by a pause of this many times t, so that refreshing never loads the PFS.
PAUSE_RATIO = 9

BUSY_TRIES = 5

THEIRS = {errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBUSY}
"""Errors of one directory, not of the PFS."""


def refresh(db: Database, inode: int, *, recursive: bool, wait_s: float = limits.VISIT_WAIT_S) -> int:
    """Want the directory `inode` to be compared with the PFS now, with all visited ones below it if `recursive`. The want's id."""
    return wants.ask(db, wants.VISIT, inode, wants.TREE if recursive else wants.AGAIN, wait_s=wait_s)


class Visit:
    """One directory a step: those that somebody waits for first."""

    def __init__(self, db: Database, places: Places, config: Config, notify: Notify) -> None:
        self._db = db
        self._places = places
        self._config = config
        self._notify = notify
        self._trees: dict[int, deque[int]] = {}
        self._not_before_s = 0.0

    def prepare(self) -> None:
        """Once, before the mover is ready: forget visits that died. Asks nothing of the PFS."""
        if self._config.pfs is not None:
            visits.prepare(self._db, os.fsdecode(self._config.pfs))

    def step(self) -> bool:
        """Visit one directory. True: there may be more at once."""
        wants.sweep(self._db)
        wanted = wants.wanted(self._db, wants.VISIT)
        single = next((want for want in wanted if want.argument != wants.TREE), None)
        if single is not None:
            self._answer(single)
            return True
        self._trees = {want.id: self._trees.get(want.id) or deque([want.inode]) for want in wanted}
        if wanted:
            self._climb(wanted[0])
            return True
        return self._refresh_due()

    def due_s(self) -> float | None:
        """Until the next directory is to be compared again."""
        interval_ns = int(self._config.refresh_interval_s * 1e9)
        oldest = visits.due(self._db, time.time_ns())
        if oldest is None:
            return self._config.refresh_interval_s
        return max(self._not_before_s - time.monotonic(), (oldest[1] + interval_ns - time.time_ns()) / 1e9, 0.0)

    # --- what is asked --------------------------------------------------------------------------------------------------

    def _answer(self, want: wants.Want) -> None:
        """Visit what one want asks for. It fails with the visit, at once: whoever asked may ask again."""
        try:
            if want.argument == wants.AGAIN or not visits.complete(self._db, want.inode):
                self._visit_undisturbed(want.inode)
        except Exception as failure:
            if self._failed(want.id, want.inode, failure):
                return
            raise
        wants.done(self._db, want.id)
        self._notify.wants()

    def _failed(self, want: int, inode: int, failure: Exception) -> bool:
        """Answer with what went wrong; whether that is the asker's business only, and no trouble of the PFS."""
        code = failure.errno if isinstance(failure, OSError) and _theirs(failure) else errno.EIO
        wants.failed(self._db, want, code or errno.EIO)
        self._notify.wants()
        log.debug("visit of inode %d: %s", inode, failure)
        return _theirs(failure)

    def _climb(self, want: wants.Want) -> None:
        """Visit the next directory of a tree; the want is done with the last one. One below that cannot be listed is left out."""
        queue = self._trees[want.id]
        directory = queue.popleft()
        try:
            self._visit_undisturbed(directory)
        except Exception as failure:
            if not _theirs(failure) or directory == want.inode:
                del self._trees[want.id]
                if self._failed(want.id, directory, failure):
                    return
                raise
        queue.extend(visits.directories_in(self._db, directory))
        if queue:
            wants.progress(self._db, want.id, wait_s=limits.VISIT_WAIT_S)
            return
        del self._trees[want.id]
        wants.done(self._db, want.id)
        self._notify.wants()

    def _refresh_due(self) -> bool:
        """Compare the directory whose turn it is; never True, so that the pause after it is kept."""
        if time.monotonic() < self._not_before_s:
            return False
        found = visits.due(self._db, time.time_ns() - int(self._config.refresh_interval_s * 1e9))
        if found is None:
            return False
        started_s = time.monotonic()
        try:
            self._visit(found[0])
        except Exception as failure:
            visits.postpone(self._db, found[0])
            if not _theirs(failure):
                raise
        finally:
            ended_s = time.monotonic()
            self._not_before_s = ended_s + PAUSE_RATIO * (ended_s - started_s)
        return False

    def _visit_undisturbed(self, directory: int) -> None:
        """Write-back may be renaming a directory on the way just now: look again in a moment."""
        for _ in range(BUSY_TRIES):
            try:
                return self._visit(directory)
            except OSError as failure:
                if failure.errno != errno.EBUSY:
                    raise
            time.sleep(limits.RETRY_FIRST_S)
        return self._visit(directory)

    # --- one visit ------------------------------------------------------------------------------------------------------

    def _visit(self, directory: int) -> None:
        """Compare one directory with the PFS. Raises OSError and TierUnavailable when it cannot be listed."""
        root_fd = self._root()
        try:
            pending = disk.act("visit:begin", visits.begin, self._db, directory)
            names = pfs_paths.path_on_pfs(self._db, directory)
            if names is None:
                visits.end(self._db, directory, whole=True)  # Not on the PFS: there is nothing to import.
                return
            with _closing(self._reach(root_fd, names, directory)) as fd:
                _Comparison(self._db, self._notify, pending, fd).run()
        except BaseException:
            visits.end(self._db, directory, whole=False)
            raise
        finally:
            os.close(root_fd)
        disk.act("visit:end", visits.end, self._db, directory, whole=True)

    def _root(self) -> int:
        if self._config.pfs is None:
            raise TierUnavailable("there is no PFS to visit")
        if settling.tier_uuid(self._db, Tier.PFS) is None:
            self._mark()
        try:
            return pfs_listing.open_root(self._config.pfs, settling.tier_uuid(self._db, Tier.PFS))
        except OSError as failure:
            remedy = health.remedy(failure.errno)
            raise TierUnavailable(f"{self._config.pfs} cannot be opened: {failure.strerror}", remedy=remedy) from failure

    def _mark(self) -> None:
        """The first time: leave a mark by which this PFS is known again. One that takes no mark is believed whatever it shows."""
        try:
            mark = self._places[Tier.PFS].uuid
        except (OSError, TierUnavailable) as failure:
            log.info("the PFS takes no mark of ours: %s", failure)
            return
        settling.adopt(self._db, Tier.PFS, mark)

    def _reach(self, root_fd: int, names: tuple[bytes, ...], directory: int) -> int:
        """A descriptor of the directory itself, also while write-back is about to rename what is above it."""
        try:
            fd = pfs_listing.walk(root_fd, names)
        except (FileNotFoundError, NotADirectoryError):
            if pfs_paths.disturbed(self._db, directory):
                raise _disturbed(names) from None
            self._look_above(root_fd, names, directory)
            raise
        known = pfs_paths.identity(self._db, directory)
        if directory != ROOT and known != os.fstat(fd).st_ino and pfs_paths.disturbed(self._db, directory):
            os.close(fd)
            raise _disturbed(names)
        return fd

    def _look_above(self, root_fd: int, names: tuple[bytes, ...], directory: int) -> None:
        """A directory is gone from the PFS: compare the nearest one above that is there, so that the catalog learns of it."""
        above = directory
        for depth in range(len(names) - 1, -1, -1):
            above = pfs_paths.parent_on_pfs(self._db, above)
            try:
                fd = pfs_listing.walk(root_fd, names[:depth])
            except (FileNotFoundError, NotADirectoryError):
                continue
            with _closing(fd):
                pending = visits.begin(self._db, above)
                try:
                    _Comparison(self._db, self._notify, pending, fd).vanished_only(names[depth])
                finally:
                    visits.end(self._db, above, whole=False)
            return


def _theirs(failure: Exception) -> bool:
    return isinstance(failure, OSError) and failure.errno in THEIRS


def _disturbed(names: tuple[bytes, ...]) -> OSError:
    return OSError(errno.EBUSY, "a directory on the way is being renamed", os.fsdecode(b"/".join(names)))


class _closing:
    """Closes a descriptor at the end of its block."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class _Comparison:
    """One listed directory and the catalog."""

    def __init__(self, db: Database, notify: Notify, pending: Pending, fd: int) -> None:
        self._db = db
        self._notify = notify
        self._pending = pending
        self._directory = pending.directory
        self._fd = fd
        self._cached = visits.cached(db, pending.directory)
        self._names_changed = False

    def run(self) -> None:
        """Take over everything: what is there, then what is not there any more, then what stands where a directory was."""
        if self._directory == ROOT:
            self._take_root()
        names: set[bytes] = set()
        replaced: list[Seen] = []
        listing = pfs_listing.listing(self._fd, root=self._directory == ROOT)
        for batch in _batches(listing, LISTED_TOGETHER):
            names.update(seen.name for seen in batch)
            replaced += self._take(self._differing(batch))
        self._forget(name for name, _, _ in visits.believed(self._db, self._directory) if name not in names)
        for seen in replaced:
            self._clear(seen.name)
            self._take([seen])
        if self._names_changed:
            with self._db.change():
                visits.stranger_was_here(self._db, self._directory, pfs_listing.look_at(self._fd))
            self._notify.inode(self._directory)

    def _take_root(self) -> None:
        with visits.importing(self._db, ROOT):
            taken = visits.root_attributes(self._db, self._pending, pfs_listing.look_at(self._fd))
        if taken:
            self._notify.inode(ROOT)

    def vanished_only(self, name: bytes) -> None:
        """Take over that one name is not there any more."""
        self._forget([name])
        if self._names_changed:
            self._notify.inode(self._directory)

    def _differing(self, batch: list[Seen]) -> list[Seen]:
        """Those for which there may be something to do; the others cost one query and no transaction."""
        with self._db.snapshot():
            return [seen for seen in batch if visits.verdict(seen, visits.known(self._db, self._directory, seen.name)) is not Verdict.SAME]

    def _take(self, batch: list[Seen]) -> list[Seen]:
        """Take over what differs; what stands where a directory was is left, and returned."""
        left = []
        for part in _batches(self._whole(batch), IMPORTED_TOGETHER):
            done: list[tuple[Seen, Verdict, int | None]] = []
            with visits.importing(self._db, self._directory):
                self._pending.update(self._db)
                for seen in part:
                    verdict = visits.apply(self._db, self._pending, seen)
                    done.append((seen, verdict, visits.known(self._db, self._directory, seen.name).child))
                disk.act("visit:import", lambda: None)
            for seen, verdict, inode in done:
                self._tell(seen, verdict, inode)
                if verdict is Verdict.REPLACED and seen.is_directory != visits.is_directory(self._db, inode):
                    left.append(seen)
        return left

    def _whole(self, batch: Iterable[Seen]) -> Iterator[Seen]:
        for seen in batch:
            try:
                yield pfs_listing.whole(self._fd, seen)
            except FileNotFoundError:
                continue

    def _tell(self, seen: Seen, verdict: Verdict, inode: int | None) -> None:
        """Let the mount's kernel forget what is not true any more. Of an unvisited directory it knows no absent names."""
        if verdict in {Verdict.NEW, Verdict.REPLACED}:
            self._names_changed = self._names_changed or self._cached
            if self._cached:
                self._notify.entry(self._directory, seen.name)
        if verdict in {Verdict.ATTRIBUTES, Verdict.CONTENT, Verdict.ADOPT} and inode is not None:
            self._notify.inode(inode)
        if verdict is Verdict.CONTENT and inode is not None:
            # A kernel that caches writes believes its own size and times for as long as it knows the inode: it must forget its names.
            for parent, name in visits.names_of(self._db, inode):
                self._notify.entry(parent, name)
            log.info("%s was changed on the PFS by somebody else", os.fsdecode(seen.name))

    def _forget(self, candidates: Iterable[bytes]) -> None:
        """Take over that these names are gone, once each was looked for by itself."""
        for name in candidates:
            if pfs_listing.absent(self._fd, name):
                self._clear(name)

    def _clear(self, name: bytes) -> None:
        """Forget a name with all that is below it, from the bottom up; what is newer than the PFS stays, with what holds it."""
        inode = visits.known(self._db, self._directory, name).inode
        if inode is None or self._is_pending(name, inode):
            return
        for directory, below in visits.tree(self._db, inode):
            pending = visits.begin(self._db, directory)
            try:
                self._drop(pending, below)
            finally:
                visits.end(self._db, directory, whole=False)
        self._names_changed = self._drop(self._pending, [name]) or self._names_changed

    def _is_pending(self, name: bytes, inode: int) -> bool:
        self._pending.update(self._db)
        return self._pending.has(self._db, name, inode)

    def _drop(self, pending: Pending, names: list[bytes]) -> bool:
        """Forget names in one directory; whether any went."""
        gone: list[bytes] = []
        for part in _batches(names, IMPORTED_TOGETHER):
            with visits.importing(self._db, pending.directory):
                pending.update(self._db)
                gone += [name for name in part if visits.vanish(self._db, pending, name)]
                disk.act("visit:vanish", lambda: None)
        for name in gone:
            self._notify.entry(pending.directory, name)
        if gone:
            self._notify.work()
        return bool(gone)


def _batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
