"""Takes: what the PFS refuses: a file's owner is over the quota, may not write there, or the name or the file is too long for it.
Leaves: files that are set aside while everything else goes on, each tried again after a while; words for people.
If we die here: nothing is remembered; the rows of these files are still in the journal, and the next mover begins with them.

Only the bytes of regular files are set aside. What happens to their names goes on in its order, as with a file that is not sealed yet.
All rows of such a file wait together and are taken again in their order: an older generation never covers a newer one.

Takes: how long the copies of open files took, and which of them are fsynced again.
Leaves: turns: a large file that stays open and is fsynced all the time does not keep the PFS busy with nothing else.
If we die here: turns are forgotten; the next fsync or the close of the file begins anew.

Takes: what planning asks of the catalog.
Leaves: the answers, with what write-back itself has learned on the PFS: what it cannot hold, what changes all the time.
If we die here: what was learned is learned again.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptfs.catalog import contents, journal, pfs_state
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_state import PublishedRow
from ckptfs.errors import CkptfsError, TierUnavailable
from ckptfs.limits import MIB
from ckptfs.model import Content, Inode
from ckptfs.tiers import health

log = logging.getLogger(__name__)
SINGLE_FILE_ERRNOS = {errno.EDQUOT, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EFBIG}

FILES_MAX = 1024
"""When so many are refused it is the PFS that refuses, and write-back waits for it as a whole."""
LOGGED_MAX = 10
RETRY_FIRST_S = 1.0
RETRY_LAST_S = 120.0
TROUBLE = "trouble:files set aside"

_REMEDIES = {
    errno.ENOSPC: "make room on the PFS",
    errno.EDQUOT: "make room within the quota on the PFS, or have it raised",
    errno.EROFS: "mount the PFS for writing",
    errno.EACCES: "let the file's owner write to this directory on the PFS",
    errno.EPERM: "let the file's owner write to this directory on the PFS",
    errno.ENAMETOOLONG: "give the file a shorter name",
    errno.EFBIG: "raise the PFS's limit on the size of a file, or keep the file elsewhere",
    errno.ESTALE: "mount the PFS anew",
    errno.ENOTCONN: "mount the PFS anew",
}


def build_unavailable_error(failure: OSError, path: str) -> CkptfsError:
    """What a failing PFS is called for people: which path, what happened, what helps."""
    sentence = f"write-back of {path} to the PFS failed: {failure.strerror or failure}"
    error = TierUnavailable(sentence, remedy=_REMEDIES.get(failure.errno or 0, ""))
    error.errno = failure.errno or errno.EIO
    return error


@dataclass(frozen=True, slots=True)
class _DeferredFile:
    """A file that is set aside."""

    until_s: float
    delay_s: float
    path: str
    what: str
    remedy: str


class DeferredFiles:
    """The files that are set aside. `after`: up to this row the journal holds nothing but rows of such files."""

    def __init__(self, report: Callable[[str, Mapping[str, Any] | None], None]) -> None:
        """`report(key, value)` tells people."""
        self.after_seq = 0
        self._report = report
        self._files: dict[int, _DeferredFile] = {}
        self._delays_s: dict[int, float] = {}
        self._retries_all = False

    def defer(self, inode: int, path: str, failure: OSError) -> bool:
        """Set a file aside for what the PFS said of it. False: that concerns more than this file, or there are too many."""
        if failure.errno not in SINGLE_FILE_ERRNOS or len(self._files) >= FILES_MAX:
            return False
        before_s = self._delays_s.pop(inode, 0.0)
        delay_s = min(max(2 * before_s, RETRY_FIRST_S), RETRY_LAST_S)
        what, remedy = health.describe(failure), _REMEDIES.get(failure.errno or 0, "")
        self._files[inode] = _DeferredFile(time.monotonic() + delay_s, delay_s, path, what, remedy)
        level = logging.WARNING if not before_s and len(self._files) <= LOGGED_MAX else logging.DEBUG
        log.log(level, "%s is not written back for now: %s (%s); everything else is", path, what, remedy)
        self._report_deferred()
        return True

    def is_deferred(self, inode: int) -> bool:
        """Whether this file is set aside now. Once it is, until the journal is begun anew: its rows keep their order."""
        return inode in self._files

    def start_batch(self) -> None:
        """Call it before each batch: when some files' time has come, the journal is begun anew, without holding them."""
        retries_all, self._retries_all = self._retries_all, False
        now = time.monotonic()
        due = [inode for inode, one in self._files.items() if retries_all or one.until_s <= now]
        for inode in due:
            self._delays_s[inode] = self._files.pop(inode).delay_s
        if due:
            self.after_seq = 0

    def finish_journal(self) -> None:
        """The journal was gone through to its end: whatever was tried again and is not set aside anew is well, or gone."""
        if self._delays_s:
            self._delays_s.clear()
            self._report_deferred()

    def next_due_s(self) -> float | None:
        """Until the first one's time has come."""
        if not self._files:
            return None
        return max(0.0, min(one.until_s for one in self._files.values()) - time.monotonic())

    def retry_now(self) -> None:
        """Somebody drains: all of them are tried now. May be called from another thread."""
        self._retries_all = True

    def _report_deferred(self) -> None:
        self._report(TROUBLE, _describe(self._files.values()))


def _describe(deferred: Iterable[_DeferredFile]) -> dict[str, str] | None:
    """The first of them, and how many more there are."""
    every = sorted(deferred, key=lambda one: os.fsencode(one.path))
    if not every:
        return None
    more = f", nor are {len(every) - 1} other files" if len(every) > 1 else ""
    return {"what": f"{every[0].what}: it is not written back for now{more}", "path": every[0].path, "remedy": every[0].remedy}


PAUSE_S_MIN = 0.25


class CopyPacing:
    """When each open content may be copied again, by the clock of this process."""

    def __init__(self, ratio: float) -> None:
        """A copy that took t seconds is followed by a pause of `ratio` times t."""
        self._ratio = ratio
        self._until_s: dict[int, float] = {}
        self.deferred: dict[int, int] = {}

    def record_duration(self, content: int, seconds: float) -> None:
        """An open content was copied."""
        if seconds * self._ratio > PAUSE_S_MIN:
            now = time.monotonic()
            self._until_s = {number: until_s for number, until_s in self._until_s.items() if until_s > now}
            self._until_s[content] = time.monotonic() + seconds * self._ratio

    def defer_if_early(self, inode: int, content: int) -> bool:
        """Whether this content's turn is still to come; it is remembered then."""
        if time.monotonic() >= self._until_s.get(content, 0.0):
            self._until_s.pop(content, None)
            return False
        self.deferred[content] = inode
        return True

    def take_due(self) -> list[tuple[int, int]]:
        """(inode, content) of those whose turn has come."""
        now = time.monotonic()
        due = [content for content in self.deferred if now >= self._until_s.get(content, 0.0)]
        return [(self.deferred.pop(content), content) for content in due]

    def next_due_s(self) -> float:
        """Until the first one's turn."""
        return max(0.0, min(self._until_s.get(content, 0.0) for content in self.deferred) - time.monotonic())

    def retry_now(self) -> None:
        """It is everybody's turn now."""
        self._until_s.clear()


# How long a content may keep the others waiting for its seal: what its digest takes on a slow disk, and a while.
SEAL_WAIT_S = 10.0
SEAL_WAIT_REPEATED_S = 2.0
SEAL_BYTES_PER_S = 200 * MIB


class CatalogFacts:
    """`Facts` for the planner: what the catalog says, and what was learned on the PFS."""

    def __init__(self, db: Database, pacing: CopyPacing, deferred: DeferredFiles) -> None:
        self._db = db
        self.is_deferred = deferred.is_deferred
        self._pacing = pacing
        self.unfit_inodes: set[int] = set()
        self.unstable_contents: set[tuple[int, int]] = set()
        self.last_unsealed = (0, 0)

    def get_inode(self, inode: int) -> Inode | None:
        try:
            return get(self._db, inode)
        except FileNotFoundError:
            return None

    def get_content(self, content: int) -> Content | None:
        return contents.get_content(self._db, content)

    def get_published(self, inode: int) -> PublishedRow | None:
        return pfs_state.get_published(self._db, inode)

    def is_repeated(self, row: JournalRow) -> bool:
        return journal.is_repeated_later(self._db, row)

    def is_seal_overdue(self, row: JournalRow, content: Content) -> bool:
        waited_s, has_waited_before = journal.get_seal_wait(self._db, row)
        return waited_s > (SEAL_WAIT_REPEATED_S if has_waited_before else SEAL_WAIT_S + content.size / SEAL_BYTES_PER_S)

    def can_copy_early(self, content: Content) -> bool:
        return (content.id, content.change) != self.last_unsealed

    def is_unstable(self, content: Content) -> bool:
        return (content.id, content.change) in self.unstable_contents

    def is_paused(self, content: Content) -> bool:
        return self._pacing.defer_if_early(content.inode, content.id)

    def is_unfit(self, inode: int) -> bool:
        return inode in self.unfit_inodes
