"""The recovery step: catalog and local tiers made consistent after a crash, a reboot or a loss of RAM.

Takes: the catalog and the tiers as the previous mover left them.
Leaves: no row of a copy that does not exist. A content without bytes shows its previous state, or is LOST.
If we die here: every part is one short transaction; finished parts are not repeated.

The PFS is not touched, because it may hang. Copies in its work area count until they are read. After a clean end the files of the tiers
are not compared with the catalog, which takes seconds for a million of them.
"""

import logging

from ckptfs import disk, lifecycle
from ckptfs.catalog import contents, copies, peer_copies
from ckptfs.catalog.database import Database, delete_clean_start
from ckptfs.catalog.inodes import get_shown_path
from ckptfs.model import LOCAL_TIERS, Content, ContentState, CopyState, Notifier, Tier
from ckptfs.tiers import local_copies
from ckptfs.tiers.storage import Tiers, TierStorage, adopt_tiers

log = logging.getLogger(__name__)

disk.declare_labels("recover:filling", "recover:adopt", "recover:missing", "recover:fate")

NAMES_LOGGED_MAX = 100
WITH_SIZE = {ContentState.CLOSED, ContentState.SEALED}
_UNSAFE_STATES = {ContentState.OPEN: "still open", ContentState.CLOSED: "not sealed yet"}


class Recover:
    """Runs once, before the mover reports that it is ready."""

    def __init__(self, db: Database, tiers: Tiers, notify: Notifier) -> None:
        self._db = db
        self._tiers = tiers
        self._notify = notify
        self._logged_count = 0

    def run(self) -> None:
        is_intact = self._are_tiers_known() and delete_clean_start(self._db)
        disk.act("recover:adopt", adopt_tiers, self._db, self._tiers)
        for tier in Tier:
            if tier not in self._tiers:
                self._log_unreachable(tier)
            elif tier is not Tier.PFS:
                self._check_tier(self._tiers[tier], is_intact)
        if not is_intact:
            for content in contents.list_without_copy(self._db):
                self._decide_fate(content)

    def _are_tiers_known(self) -> bool:
        """Return True if every local tier works and is the one that the catalog met last."""
        present = [self._tiers[tier] for tier in LOCAL_TIERS if tier in self._tiers]
        return all(not storage.failure and copies.get_tier_uuid(self._db, storage.tier) in {None, storage.uuid} for storage in present)

    # --- tiers -------------------------------------------------------------------------------------------------------

    def _log_unreachable(self, tier: Tier) -> None:
        """Warn about copies in a tier that is absent. They wait until it returns."""
        unreachable = copies.count_good_copies(self._db, tier)
        if unreachable:
            log.warning("%s: %d contents cannot be reached: this tier is absent", tier, unreachable)

    def _check_tier(self, storage: TierStorage, is_intact: bool) -> None:
        """Check one tier, after a clean end only for unfinished copies. If it fails, its rows stay."""
        try:
            self._remove_unfinished(storage)
            if not is_intact:
                self._forget_missing(storage)
        except OSError as failure:
            log.error("%s: not checked: %s; its copies count until they are read", storage.root, failure)

    def _remove_unfinished(self, storage: TierStorage) -> None:
        for number in copies.list_bad_copies(self._db, CopyState.FILLING, storage.tier):
            storage.remove(number)
            disk.act("recover:filling", copies.delete_copy, self._db, number, storage.tier)
        for stash_id in copies.list_stashed(self._db, storage.tier):
            local_copies.restore_stashed(self._db, storage, stash_id)

    def _forget_missing(self, storage: TierStorage) -> None:
        """Delete rows whose file is gone; quarantine copies whose size changed in a power cut."""
        files = set(storage.contents())
        for number, (copy, state, size) in copies.list_copies_in_tier(self._db, storage.tier).items():
            if number not in files and not storage.exists(number):
                disk.act("recover:missing", self._forget_copy, storage, number)
            elif copy is CopyState.GOOD and state in WITH_SIZE and self._has_wrong_size(storage, number, size):
                disk.act("recover:missing", self._quarantine_wrong_size, storage, number)

    def _forget_copy(self, storage: TierStorage, number: int) -> None:
        """Delete the row of a copy without a file, unless the mount is about to make it, or has made it."""
        with self._db.transaction():
            if not contents.is_reserved(self._db, number) and not storage.exists(number):
                copies.delete_copy(self._db, number, storage.tier)

    def _has_wrong_size(self, storage: TierStorage, number: int, size: int) -> bool:
        found = storage.stat(number)
        return found is not None and found.st_size != size

    def _quarantine_wrong_size(self, storage: TierStorage, number: int) -> None:
        """Quarantine a copy of a wrong size, unless the mount has opened it meanwhile."""
        with self._db.transaction():
            content = contents.get_content(self._db, number)
            if content is not None and content.state in WITH_SIZE and self._has_wrong_size(storage, number, content.size):
                path = get_shown_path(self._db, content.inode)
                log.error("%s: the copy in %s is quarantined: its size is not %d bytes", path, storage.tier, content.size)
                copies.set_copy_state(self._db, number, storage.tier, CopyState.QUARANTINED)

    # --- contents without a copy -------------------------------------------------------------------------------------

    def _decide_fate(self, content: Content) -> None:
        """Restore the previous state of a content that nothing has, or mark it lost."""
        disk.reach("recover:fate")
        with self._db.transaction():
            record = contents.get_file_record(self._db, content.id)
            if record.content != content or lifecycle.is_on_pfs(record) or any(map(lifecycle.is_good, record.copies)):
                return
            if content.state is ContentState.SEALED and peer_copies.list_holders(self._db, content):
                return  # A peer has it: an open fetches it, or a repair does.
            if not contents.is_current(self._db, content.inode, content.id):
                contents.set_state(self._db, content.id, ContentState.DOOMED)
                return
            unfinished = content.state is ContentState.OPEN or contents.is_shown_on_pfs(self._db, content)
            fallback = contents.restore_previous(self._db, content) if unfinished else ""
            if not fallback:
                contents.set_state(self._db, content.id, ContentState.LOST)
        self._notify.invalidate_inode(content.inode)
        path = get_shown_path(self._db, content.inode)
        if fallback:
            how = _UNSAFE_STATES.get(content.state, "not synced on the PFS")
            self._log_bounded(logging.WARNING, "%s: %s when its tier was lost; showing %s", path, how, fallback)
        else:
            self._log_bounded(logging.ERROR, "%s: lost: its tier is gone and it was not on the PFS; reads fail with EIO", path)

    def _log_bounded(self, level: int, message: str, *values: object) -> None:
        """Log at most `NAMES_LOGGED_MAX` files."""
        self._logged_count += 1
        if self._logged_count <= NAMES_LOGGED_MAX:
            log.log(level, message, *values)
        elif self._logged_count == NAMES_LOGGED_MAX + 1:
            log.log(level, "more files were lost; `ckptfs status` counts them")
