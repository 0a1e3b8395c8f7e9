"""Takes: one directory that was opened on the PFS, and what is pending in it.
Leaves: the catalog as the PFS shows this directory, but for what is newer here.
If we die here: what was taken over stays; the directory counts as unvisited, or as it was compared before, and is compared again.

The catalog is changed in short transactions, each of which looks again before it believes the listing (catalog/visits.py).
"""

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ckptfs import disk, limits
from ckptfs.catalog import report, settling, visits
from ckptfs.catalog.database import Database
from ckptfs.catalog.visits import PendingChanges, ScanVerdict
from ckptfs.model import ROOT, Notifier, PfsEntryStat
from ckptfs.tiers import acting, pfs_listing

log = logging.getLogger(__name__)

disk.declare_labels("visit:import", "visit:vanish", "visit:parked")

LISTED_BATCH = 256
IMPORT_BATCH = limits.CHANGE_ROWS_MAX // 8
"""Names in one transaction: each takes four rows, and some more for its xattrs."""

CLUSTER_IMPORT_BATCH = limits.ETCD_OPERATIONS_MAX // 10
"""The same in a cluster: the store has to take all that is about a name at once, and that is up to six keys."""

Item = TypeVar("Item")
RefreshNames = Callable[[list[bytes]], set[bytes]]


class DirectoryScan:
    """One listed directory and the catalog."""

    def __init__(
        self, db: Database, notify: Notifier, pending: PendingChanges, fd: int, progress: Callable[[], None] = lambda: None,
        refresh_names: RefreshNames | None = None, is_gone: Callable[[int], bool] = lambda inode: False,
    ) -> None:  # fmt: skip
        """`look_again` learns what other nodes know of names, and says which must be left to them; `gone`: whether a file certainly has
        no name any more.
        """
        self._is_gone = is_gone
        self._refresh_names = refresh_names
        self._db = db
        self._notify = notify
        self._pending = pending
        self._directory = pending.directory
        self._fd = fd
        self._can_cache_absent_names = visits.can_cache_absent_names(db, pending.directory)
        self._is_first_scan = not visits.is_imported(db, pending.directory)
        self._progress = progress
        self._names_changed = False
        self._external_names: list[bytes] = []

    def run(self) -> None:
        """Take over everything: what is there, then what is not there any more, then what stands where a directory was."""
        if self._directory == ROOT:
            self._import_root()
        names: set[bytes] = set()
        replaced: list[PfsEntryStat] = []
        listing = pfs_listing.list_entries(self._fd, is_root=self._directory == ROOT, on_external=self._external_names.append)
        for batch in _split(listing, LISTED_BATCH):
            self._progress()
            names.update(seen.name for seen in batch)
            self._exclude_pending_elsewhere([seen.name for seen in batch])
            replaced += self._import_entries(self._list_differing(batch))
        self._report_external()
        self._record_vanished(name for name, _, _ in visits.list_expected(self._db, self._directory) if name not in names)
        for seen in replaced:
            self._delete_tree(seen.name)
            self._import_entries([seen])
        if self._names_changed:
            with self._db.transaction():
                visits.record_external_change(self._db, self._directory, pfs_listing.stat_descriptor(self._fd))
            self._notify.invalidate_inode(self._directory)

    def _remove_parked(self, name: bytes) -> bool:
        """What a node that died was about to rename goes when nobody calls it anything any more. What lives stays, and is told of."""
        inode = pfs_listing.parse_parked_name(name)
        if inode is None or not self._is_gone(inode):
            return False
        parent = pfs_listing.stat_descriptor(self._fd)
        try:
            acting.retry_as_owner(lambda: disk.unlink("visit:parked", name, dir_fd=self._fd), lambda: [(parent.uid, parent.gid)])
        except OSError as failure:
            log.debug("%s stays: %s", os.fsdecode(name), failure)
            return False
        log.info("%s is gone from the PFS: a node had died while it renamed it, and it was deleted since", os.fsdecode(name))
        return True

    def _report_external(self) -> None:
        """What somebody calls like what is ours is not shown in the mount: people shall know."""
        self._external_names = [name for name in self._external_names if not self._remove_parked(name)]
        key = f"trouble:hidden:{self._directory:016x}"
        if not self._external_names:
            settling.set_report(self._db, key, None)
            return
        path = b"/".join(part for part in (report.get_path(self._db, self._directory), min(self._external_names)) if part)
        count = len(self._external_names)
        what = "is hidden in the mount" if count == 1 else f"and {count - 1} more are hidden in the mount"
        if not report.list_reports(self._db, key):
            log.warning("%s %s: names like it are for ckptfs's own files", os.fsdecode(path), what)
        remedy = "give it another name on the PFS, one that does not begin with .ckptfs"
        settling.set_report(
            self._db, key, {"what": f"{what}: names like it are for ckptfs's own files", "path": os.fsdecode(path), "remedy": remedy}
        )

    def _import_root(self) -> None:
        with visits.import_transaction(self._db, ROOT):
            is_changed = visits.set_root_attributes(self._db, self._pending, pfs_listing.stat_descriptor(self._fd))
        if is_changed:
            self._notify.invalidate_inode(ROOT)

    def record_vanished_name(self, name: bytes) -> None:
        """Take over that one name is not there any more."""
        self._record_vanished([name])
        if self._names_changed:
            self._notify.invalidate_inode(self._directory)

    def _list_differing(self, batch: list[PfsEntryStat]) -> list[PfsEntryStat]:
        """Those for which there may be something to do; the others cost one query and no transaction."""
        if self._is_first_scan:
            return batch
        with self._db.read_transaction():
            return [
                seen
                for seen in batch
                if visits.choose_verdict(seen, visits.get_known_name(self._db, self._directory, seen.name)) is not ScanVerdict.SAME
            ]

    def _import_entries(self, batch: list[PfsEntryStat]) -> list[PfsEntryStat]:
        """Take over what differs; what stands where a directory was is left, and returned."""
        replaced = []
        for part in _split(self._load_details(batch), IMPORT_BATCH if self._refresh_names is None else CLUSTER_IMPORT_BATCH):
            done: list[tuple[PfsEntryStat, ScanVerdict, int | None]] = []
            with visits.import_transaction(self._db, self._directory):
                self._pending.update(self._db)
                done += [(seen, *visits.import_entry(self._db, self._pending, seen)) for seen in part]
                disk.act("visit:import", lambda: None)
            for seen, verdict, inode in done:
                self._notify_mount(seen, verdict, inode)
                if verdict is ScanVerdict.REPLACED and seen.is_directory != visits.is_directory(self._db, inode):
                    replaced.append(seen)
        return replaced

    def _load_details(self, batch: Iterable[PfsEntryStat]) -> Iterator[PfsEntryStat]:
        for entry in batch:
            try:
                yield pfs_listing.load_details(self._fd, entry)
            except FileNotFoundError:
                continue

    def _notify_mount(self, entry: PfsEntryStat, verdict: ScanVerdict, inode: int | None) -> None:
        """Let the mount's kernel forget what is not true any more. Of an unvisited directory it knows no absent names."""
        if verdict in {ScanVerdict.NEW, ScanVerdict.REPLACED}:
            self._names_changed = self._names_changed or self._can_cache_absent_names
            if self._can_cache_absent_names:
                self._notify.invalidate_entry(self._directory, entry.name)
        if verdict in {ScanVerdict.ATTRIBUTES, ScanVerdict.CONTENT, ScanVerdict.ADOPT} and inode is not None:
            self._notify.invalidate_inode(inode)
        if verdict is ScanVerdict.CONTENT and inode is not None:
            # A kernel that caches writes believes its own size and times for as long as it knows the inode: it must forget its names.
            for parent, name in visits.list_names(self._db, inode):
                self._notify.invalidate_entry(parent, name)
            log.info("%s was changed on the PFS by somebody else", os.fsdecode(entry.name))

    def _exclude_pending_elsewhere(self, names: list[bytes]) -> None:
        if self._refresh_names is not None and names:
            self._pending.names |= self._refresh_names(names)

    def _record_vanished(self, candidates: Iterable[bytes]) -> None:
        """Take over that these names are gone, once each was looked for by itself."""
        gone = list(candidates)
        self._exclude_pending_elsewhere(gone)
        for name in gone:
            if pfs_listing.is_absent(self._fd, name):
                self._delete_tree(name)

    def _delete_tree(self, name: bytes) -> None:
        """Forget a name with all that is below it, from the bottom up; what is newer than the PFS stays, with what holds it."""
        inode = visits.get_known_name(self._db, self._directory, name).inode
        if inode is None or self._is_pending(name, inode):
            return
        for directory, below in visits.list_tree(self._db, inode):
            pending = visits.record_scan_begin(self._db, directory)
            try:
                self._delete_names(pending, below)
            finally:
                visits.record_scan_end(self._db, directory, whole=False)
        self._names_changed = self._delete_names(self._pending, [name]) or self._names_changed

    def _is_pending(self, name: bytes, inode: int) -> bool:
        self._pending.update(self._db)
        return self._pending.is_pending(name, inode)

    def _delete_names(self, pending: PendingChanges, names: list[bytes]) -> bool:
        """Forget names in one directory; whether any went."""
        gone: list[bytes] = []
        for part in _split(names, IMPORT_BATCH):
            with visits.import_transaction(self._db, pending.directory):
                pending.update(self._db)
                gone += [name for name in part if visits.record_vanished(self._db, pending, name)]
                disk.act("visit:vanish", lambda: None)
        for name in gone:
            self._notify.invalidate_entry(pending.directory, name)
        if gone:
            self._notify.wake_lanes()
        return bool(gone)


def _split(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
