"""Everything that write-back puts off, and the facts that the planner reads.

Takes: errors of the PFS, the durations of copies, and rows of the catalog.
Leaves: which files wait, until when, and a report of them for `ckptfs status`.
If we die here: nothing of this is persistent. The rows of deferred files are still in the journal, and the next mover begins with them.
`DeferredFiles`: the PFS refuses the bytes of a regular file: the owner's quota is exceeded, the owner may not write there, or the name
or the file is too long. The file waits while all others proceed, and is tried again after a pause. Changes of its names still apply in
order. All rows with its bytes wait together, so that an older generation never replaces a newer one.

`CopyPacing`: pauses between copies of a large file that stays open and is fsynced all the time, so that it does not occupy the PFS.

`CatalogFacts`: `plan.Facts` from the catalog, with what earlier attempts found out about the PFS.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptfs.catalog import contents, journal, pfs_state
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get
from ckptfs.catalog.journal import JournalRow
from ckptfs.errors import CkptfsError, TierUnavailable
from ckptfs.limits import MIB
from ckptfs.model import Content, Inode
from ckptfs.tiers import health

log = logging.getLogger(__name__)

SINGLE_FILE_ERRNOS = {errno.EDQUOT, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EFBIG}
# If so many files are refused the whole PFS refuses, and write-back waits for it.
FILES_MAX = 1024
LOGGED_MAX = 10
RETRY_FIRST_S = 1.0
RETRY_LAST_S = 120.0
PAUSE_S_MIN = 0.25
# A content may block the rows behind it until its seal for as long as its digest takes on a slow disk, and a margin.
SEAL_WAIT_S = 10.0
SEAL_WAIT_REPEATED_S = 2.0
SEAL_BYTES_PER_S = 200 * MIB
TROUBLE = "trouble:files set aside"

_REMEDIES = {
    errno.ENOSPC: "make room on the PFS",
    errno.EDQUOT: "make room within the quota on the PFS, or have it raised",
    errno.EROFS: "mount the PFS for writing",
    errno.EACCES: "let the file's owner write to this directory on the PFS",
    errno.EPERM: "let the file's owner write to this directory on the PFS",
    errno.ENAMETOOLONG: "give the file a shorter name",
    errno.EFBIG: "raise the PFS's limit on the size of a file, or keep the file elsewhere",
    errno.ESTALE: "mount the PFS again",
    errno.ENOTCONN: "mount the PFS again",
}


@dataclass(frozen=True, slots=True)
class _DeferredFile:
    until_s: float
    delay_s: float
    path: str
    what: str
    remedy: str


class DeferredFiles:
    """The files that the PFS refuses. Up to row `after_seq` the journal holds only rows of such files."""

    def __init__(self, report: Callable[[str, Mapping[str, Any] | None], None]) -> None:
        """`report(key, value)` publishes the trouble, or clears it if `value` is None."""
        self.after_seq = 0
        self._report = report
        self._files: dict[int, _DeferredFile] = {}
        self._delays_s: dict[int, float] = {}
        self._retries_all = False

    def defer(self, inode: int, path: str, failure: OSError) -> bool:
        """Defer a file that the PFS refused.

        Returns False if the error concerns more than this file, or if too many files are deferred.
        """
        if failure.errno not in SINGLE_FILE_ERRNOS or len(self._files) >= FILES_MAX:
            return False
        before_s = self._delays_s.pop(inode, 0.0)
        delay_s = min(max(2 * before_s, RETRY_FIRST_S), RETRY_LAST_S)
        what, remedy = health.describe(failure), _REMEDIES.get(failure.errno or 0, "")
        self._files[inode] = _DeferredFile(time.monotonic() + delay_s, delay_s, path, what, remedy)
        level = logging.WARNING if not before_s and len(self._files) <= LOGGED_MAX else logging.DEBUG
        log.log(level, "%s: not written back for now: %s; all other files are (%s)", path, what, remedy)
        self._report_deferred()
        return True

    def is_deferred(self, inode: int) -> bool:
        """Return True if the file is deferred. Its rows keep their order: only `start_batch` releases it."""
        return inode in self._files

    def start_batch(self) -> None:
        """Release the files that are due, and read the journal anew for them. Call before each batch."""
        retries_all, self._retries_all = self._retries_all, False
        now = time.monotonic()
        due = [inode for inode, one in self._files.items() if retries_all or one.until_s <= now]
        for inode in due:
            self._delays_s[inode] = self._files.pop(inode).delay_s
        if due:
            self.after_seq = 0

    def finish_journal(self) -> None:
        """Forget released files that were not deferred again. Call at the end of the journal."""
        if self._delays_s:
            self._delays_s.clear()
            self._report_deferred()

    def next_due_s(self) -> float | None:
        """Return the seconds until the first file is due; None if there is none."""
        if not self._files:
            return None
        return max(0.0, min(one.until_s for one in self._files.values()) - time.monotonic())

    def retry_now(self) -> None:
        """Release all files before the next batch. May be called from another thread."""
        self._retries_all = True

    def _report_deferred(self) -> None:
        self._report(TROUBLE, _build_report(self._files.values()))


def _build_report(deferred: Iterable[_DeferredFile]) -> dict[str, str] | None:
    """Describe the first deferred file, and count the others. Returns None if there is none."""
    files = sorted(deferred, key=lambda file: os.fsencode(file.path))
    if not files:
        return None
    more = f", nor are {len(files) - 1} other files" if len(files) > 1 else ""
    return {"what": f"{files[0].what}: it is not written back for now{more}", "path": files[0].path, "remedy": files[0].remedy}


class CopyPacing:
    """When each open content may be copied again, by the clock of this process."""

    def __init__(self, ratio: float) -> None:
        """A copy that took t seconds is followed by a pause of `ratio` times t."""
        self._ratio = ratio
        self._until_s: dict[int, float] = {}
        self.deferred: dict[int, int] = {}

    def record_duration(self, content: int, seconds: float) -> None:
        """Record that an open content was copied in `seconds`."""
        if seconds * self._ratio > PAUSE_S_MIN:
            now = time.monotonic()
            self._until_s = {number: until_s for number, until_s in self._until_s.items() if until_s > now}
            self._until_s[content] = time.monotonic() + seconds * self._ratio

    def defer_if_early(self, inode: int, content: int) -> bool:
        """Return True, and remember the content, if its pause is not over."""
        if time.monotonic() >= self._until_s.get(content, 0.0):
            self._until_s.pop(content, None)
            return False
        self.deferred[content] = inode
        return True

    def take_due(self) -> list[tuple[int, int]]:
        """Return (inode, content) of the deferred contents whose pause is over."""
        now = time.monotonic()
        due = [content for content in self.deferred if now >= self._until_s.get(content, 0.0)]
        return [(self.deferred.pop(content), content) for content in due]

    def next_due_s(self) -> float:
        """Return the seconds until the first pause is over. Requires a deferred content."""
        return max(0.0, min(self._until_s.get(content, 0.0) for content in self.deferred) - time.monotonic())

    def retry_now(self) -> None:
        """End all pauses."""
        self._until_s.clear()


class CatalogFacts:
    """`plan.Facts` from the catalog and from earlier attempts."""

    def __init__(self, db: Database, pacing: CopyPacing, deferred: DeferredFiles) -> None:
        self._db = db
        self.is_deferred = deferred.is_deferred
        self.get_content = partial(contents.get_content, db)
        self.get_published = partial(pfs_state.get_published, db)
        self.is_repeated = partial(journal.is_repeated_later, db)
        self._pacing = pacing
        self.unfit_inodes: set[int] = set()
        self.unstable_contents: set[tuple[int, int]] = set()
        self.last_unsealed = (0, 0)

    def get_inode(self, inode: int) -> Inode | None:
        try:
            return get(self._db, inode)
        except FileNotFoundError:
            return None

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


def build_unavailable_error(failure: OSError, path: str) -> CkptfsError:
    """Return the error that describes a failing PFS: the path, the cause and the remedy."""
    sentence = f"write-back of {path} to the PFS failed: {failure.strerror or failure}"
    error = TierUnavailable(sentence, remedy=_REMEDIES.get(failure.errno or 0, ""))
    error.errno = failure.errno or errno.EIO
    return error
