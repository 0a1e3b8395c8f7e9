"""Takes: what the PFS refuses: a file's owner is over the quota, may not write there, or the name or the file is too long for it.
Leaves: files that are set aside while everything else goes on, each tried again after a while; words for people.
If we die here: nothing is remembered; the rows of these files are still in the journal, and the next mover begins with them.

Only the bytes of regular files are set aside. What happens to their names goes on in its order, as with a file that is not sealed yet.
All rows of such a file wait together and are taken again in their order: an older generation never covers a newer one.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptfs.errors import CkptfsError, TierUnavailable
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
