"""Takes: a catalog and tiers as the last mover, a reboot or a lost RAM left them.
Leaves: no row for a copy that is not there, and no content that claims bytes nobody has: it falls back to what is left, or is LOST.
If we die here: every part is one short transaction, and what was done need not be done again.

The PFS is not touched here, because it may hang: contents in its work area are believed until somebody reads them.
"""

import logging
import os

from ckptfs import disk, lifecycle
from ckptfs.catalog import contents, copies, namespace, peer_copies
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.model import Content, ContentState, CopyState, Notifier, Tier
from ckptfs.tiers import local_copies
from ckptfs.tiers.storage import Tiers, TierStorage, adopt_tiers

log = logging.getLogger(__name__)

disk.declare_labels("recover:filling", "recover:adopt", "recover:missing", "recover:fate")

NAMES_LOGGED_MAX = 100
WITH_SIZE = {ContentState.CLOSED, ContentState.SEALED}


class Recover:
    """Runs once, before the mover says that it is ready."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier) -> None:
        self._db = db
        self._tiers = tiers
        self._notify = notify
        self._logged_count = 0

    def step(self) -> bool:
        """All of it. Never more to do."""
        disk.act("recover:adopt", adopt_tiers, self._db, self._tiers)
        for tier in Tier:
            if tier not in self._tiers:
                self._log_unreachable(tier)
            elif tier is not Tier.PFS:
                self._check_tier(self._tiers[tier])
        for content in contents.list_without_copy(self._db):
            self._decide_fate(content)
        return False

    def next_due_s(self) -> float | None:
        """Never again."""
        return None

    # --- tiers -------------------------------------------------------------------------------------------------------

    def _log_unreachable(self, tier: Tier) -> None:
        """A tier that the configuration no longer names, or that was left out: what is there waits for it to come back."""
        unreachable = len(copies.list_copies_in_tier(self._db, tier))
        if unreachable:
            log.warning("%d contents in %s cannot be reached: there is no such tier now", unreachable, tier)

    def _check_tier(self, storage: TierStorage) -> None:
        """A tier that fails now may come back: what is in it is believed until somebody reads it."""
        try:
            self._remove_unfinished(storage)
            self._forget_missing(storage)
        except OSError as failure:
            log.error("%s cannot be looked through (%s); what the catalog says of it is believed", storage.root, failure)

    def _remove_unfinished(self, storage: TierStorage) -> None:
        for number, _ in copies.list_copies_in_state(self._db, CopyState.FILLING, storage.tier):
            storage.remove(number)
            disk.act("recover:filling", copies.delete_copy, self._db, number, storage.tier)
        local_copies.restore_all_stashed(self._db, storage)

    def _forget_missing(self, storage: TierStorage) -> None:
        """Forget copies whose file is gone; quarantine those that a power cut made shorter or longer than they were."""
        files = set(storage.contents())
        for number, (copy, state, size) in copies.list_copies_in_tier(self._db, storage.tier).items():
            if number not in files and not storage.exists(number):
                disk.act("recover:missing", copies.delete_copy, self._db, number, storage.tier)
            elif copy is CopyState.GOOD and state in WITH_SIZE and self._has_wrong_size(storage, number, size):
                disk.act("recover:missing", self._quarantine_wrong_size, storage, number)

    def _has_wrong_size(self, storage: TierStorage, number: int, size: int) -> bool:
        found = storage.stat(number)
        return found is not None and found.st_size != size

    def _quarantine_wrong_size(self, storage: TierStorage, number: int) -> None:
        """The same look again, in a transaction: the mount may have opened the content for writing since the rows were read."""
        with self._db.transaction():
            content = contents.get_content(self._db, number)
            if content is not None and content.state in WITH_SIZE and self._has_wrong_size(storage, number, content.size):
                log.error("%s has not its %d bytes in %s: this copy does not count", self._name(content), content.size, storage.tier)
                copies.set_copy_state(self._db, number, storage.tier, CopyState.QUARANTINED)

    # --- contents without a copy -------------------------------------------------------------------------------------

    def _decide_fate(self, content: Content) -> None:
        """A content that no tier has: it is on the PFS, or an earlier state of the file takes its place, or it is lost."""
        disk.act("recover:fate", lambda: None)
        with self._db.transaction():
            record = contents.get_file_record(self._db, content.id)
            if record.content != content or lifecycle.is_on_pfs(record) or any(map(lifecycle.is_good, record.copies)):
                return
            if content.state is ContentState.SEALED and peer_copies.list_holders(self._db, content):
                return  # A peer has it: it comes back when somebody opens it, or when copies are repaired.
            if not contents.is_shown(self._db, content):
                contents.set_state(self._db, content.id, ContentState.DOOMED)
                return
            unfinished = content.state is ContentState.OPEN or contents.is_fsynced_on_pfs(self._db, content)
            fallback = contents.restore_previous(self._db, content) if unfinished else ""
            if not fallback:
                contents.set_state(self._db, content.id, ContentState.LOST)
        self._notify.invalidate_inode(content.inode)
        if fallback:
            how = "still open" if content.state is ContentState.OPEN else "not sealed yet"
            self._log_bounded(logging.WARNING, "%s was %s when its tier was lost; it shows %s again", self._name(content), how, fallback)
        else:
            self._log_bounded(logging.ERROR, "%s is lost: its tier is gone and it was not written back; it gives EIO", self._name(content))

    def _log_bounded(self, level: int, message: str, *values: object) -> None:
        """Log, but not a million lines."""
        self._logged_count += 1
        if self._logged_count <= NAMES_LOGGED_MAX:
            log.log(level, message, *values)
        elif self._logged_count == NAMES_LOGGED_MAX + 1:
            log.log(level, "more files were lost; `ckptfs status` counts them")

    def _name(self, content: Content) -> str:
        return os.fsdecode(namespace.get_path(self._db, content.inode))
