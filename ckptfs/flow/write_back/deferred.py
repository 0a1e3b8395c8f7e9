"""Everything that write-back puts off.

Takes: errors of the PFS, and the durations of copies.
Leaves: which files wait, until when, and a report of them for `ckptfs status`.
If we die here: nothing of this is persistent. The rows of deferred files are still in the journal, and the next mover begins with them.

`DeferredFiles`: the PFS refuses something for one file or directory: the owner's quota is exceeded, the owner may not write there, a name
is too long or has bytes that the PFS does not take, a rename crosses filesystems, or no copy of the content can be read. It waits while
all others proceed, and is tried again after a pause, or when it is renamed. There are three kinds:
- The bytes of a file: changes of its names still apply in order. All rows with its bytes wait together, so that an older generation never
  replaces a newer one.
- The names of an inode: the PFS keeps showing it as it does, or does not. See `plan.py`. Its bytes go where it is shown.
- Its attributes: everything else applies.
An error that concerns the whole PFS defers nothing. It does if the same change fails again and again while the PFS takes another file.

If a directory cannot be synced, its new names are there already, and stay. The bytes of its files are deferred as if they were not there.

A full PFS is the exception: removals make room, and they may stand in the journal behind the file that does not fit. So the rest of the
journal is written back once without the bytes of any file. Only then does write-back wait for room.

`CopyPacing`: pauses between copies of a large file that stays open and is fsynced all the time, so that it does not occupy the PFS.
"""

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ckptfs import disk, limits
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_batch import PfsAction
from ckptfs.catalog.pfs_state import PfsLocation
from ckptfs.catalog.summary import DEFERRED_TROUBLE
from ckptfs.errors import CkptfsError, TierUnavailable
from ckptfs.tiers import health
from ckptfs.tiers.pfs_ownership import run_as_owner
from ckptfs.tiers.pfs_tree import DirectoryPath, PfsTree

log = logging.getLogger(__name__)

disk.declare_labels("write_back:probe")

# After so many failures with an error of the whole PFS, a change is deferred if the PFS takes another file; so is one that was deferred
# before, and so are all further ones up to the end of the journal: each failure that is not deferred makes the next try wait longer.
TRIES_MAX = 3
# If so many files are refused, a PFS that takes no other file refuses all, and write-back waits for it.
FILES_MAX = 1024
LOGGED_MAX = 10
REPORTED_MAX = 20
# A file of so many bytes needs blocks of its own on the PFS.
PROBE_BYTES = 64 * limits.KIB
RETRY_FIRST_S = 1.0
RETRY_LAST_S = 120.0
PAUSE_S_MIN = 0.25


class SourceFailed(OSError):
    """No copy of a content can be read, which is no fault of the PFS. `remedy` says what helps."""

    def __init__(self, code: int, message: str, remedy: str) -> None:
        super().__init__(code, message)
        self.remedy = remedy


class RefusedKind(Enum):
    """What of a file or directory the PFS refuses."""

    BYTES = "it is not written back for now"
    NAMES = "its {act} is not made on the PFS for now"
    ATTRIBUTES = "its owner, mode and times are not set on the PFS for now"


def choose_kind(action: PfsAction, row: JournalRow | None) -> RefusedKind:
    """Return what the PFS refuses of a file, if it refuses an action of a row of the journal."""
    if action.act == "attributes":
        return RefusedKind.ATTRIBUTES
    has_bytes = row is not None and row.op in {"content", "synced"} and row.inode == action.inode
    return RefusedKind.BYTES if action.act == "put" and has_bytes else RefusedKind.NAMES


@dataclass(frozen=True, slots=True)
class _DeferredFile:
    until_s: float
    delay_s: float
    path: str
    what: str
    remedy: str
    lacks_room: bool


class DeferredFiles:
    """What the PFS refuses, by inode. Up to row `after_seq` the journal holds only rows of such inodes."""

    def __init__(self, report: Callable[[str, Mapping[str, Any] | None], None], tree: PfsTree, probe: bytes) -> None:
        """`report(key, value)` publishes a trouble, or clears it if that is None. `probe`: a temporary name."""
        self.after_seq = 0
        self.fence_seq = 0  # A row that could not be staged together with those before it: a batch ends before it.
        self._report = report
        self._tree = tree
        self._probe = probe
        self._files: dict[tuple[int, RefusedKind], _DeferredFile] = {}
        self._released: dict[tuple[int, RefusedKind], _DeferredFile] = {}
        """Those that are tried again up to the end of the journal. They are reported until then."""
        self._failures = 0
        self._reported_count = 0
        self._retries_all = False
        self._can_release = False
        self._released_s = time.monotonic()
        self._full_failure: OSError | None = None
        self._has_made_room = False

    def skip_bytes(self, failure: OSError) -> None:
        """Refuse the bytes of all files until the end of the journal, because the PFS is full."""
        self._full_failure, self._has_made_room = failure, False

    @property
    def skips_bytes(self) -> bool:
        return self._full_failure is not None

    def is_pfs_full(self) -> bool:
        """Return True if the PFS had no room for something that waits."""
        return self.skips_bytes or any(one.lacks_room for one in self._files.values())

    def note_removal(self) -> None:
        """Note that something went from the PFS: the bytes of files may fit now."""
        self._has_made_room = True

    def try_bytes_again(self) -> None:
        """Read the journal again with the bytes of files. Raises TierUnavailable if nothing made room."""
        full, self._full_failure, self.after_seq = self._full_failure, None, 0
        if full is not None and not self._has_made_room:
            raise build_unavailable_error(full, str(full.filename))

    def defer(self, action: PfsAction, kind: RefusedKind, failure: OSError, size: int = 0) -> bool:
        """Defer what the PFS refused. Return False if that concerns more than this file, or too many wait.

        `size`: the bytes of the file.
        """
        is_known_full = self.skips_bytes and failure.errno == errno.ENOSPC
        is_own = is_known_full or self._concerns_entry(action.target.path, failure)
        if not is_own:
            self._failures += 1
            if not self._is_stubborn((action.inode, kind), failure, size):
                return False
        if len(self._files) >= FILES_MAX and not isinstance(failure, SourceFailed) and not self._takes_a_file():
            return False
        what = f"{health.describe(failure)}: {kind.value.format(act=_describe_act(action))}"
        self.set_aside(action.inode, kind, action.target, what, failure)
        return True

    def set_aside(self, inode: int, kind: RefusedKind, location: PfsLocation, what: str, failure: OSError) -> None:
        """Defer something of an inode. `what`: the error and what it means, for `ckptfs status`."""
        key = (inode, kind)
        before = self._released.pop(key, None)
        delay_s = min(max(2 * before.delay_s, RETRY_FIRST_S), RETRY_LAST_S) if before is not None else RETRY_FIRST_S
        remedy = getattr(failure, "remedy", "") or health.pfs_remedy(failure.errno) or "see the PFS's own log"
        self._files[key] = _DeferredFile(time.monotonic() + delay_s, delay_s, location.text, what, remedy, failure.errno == errno.ENOSPC)
        level = logging.WARNING if before is None and len(self._files) <= LOGGED_MAX else logging.DEBUG
        log.log(level, "%s: %s; all others are written back (%s)", location.text, what, remedy)
        self._report_deferred()

    def _is_stubborn(self, key: tuple[int, RefusedKind], failure: OSError, size: int) -> bool:
        """Return True if a change fails again and again while the PFS takes other files and has room."""
        if self._failures < TRIES_MAX and key not in self._released:
            return False
        return self._takes_a_file(size if failure.errno == errno.ENOSPC else 0)

    def _concerns_entry(self, path: DirectoryPath, failure: OSError) -> bool:
        """Return True if an error concerns one entry, a mount inside of the PFS, or a directory with a quota."""
        if isinstance(failure, SourceFailed) or failure.errno not in health.PFS_FAILURE_ERRNOS:
            return True
        try:
            directory, root = self._tree.get_directory(path), self._tree.get_directory(())
            found, whole = os.fstatvfs(directory), os.fstatvfs(root)
            is_mounted = os.fstat(directory).st_dev != os.fstat(root).st_dev
        except OSError:
            return False
        if failure.errno == errno.ENOSPC and found.f_blocks != whole.f_blocks:
            return True  # XFS and ext4 report the quota of a project as the size of its directory.
        # Subvolumes have devices of their own, but the same figures.
        return is_mounted and (found.f_blocks, found.f_bfree) != (whole.f_blocks, whole.f_bfree)

    def concerns_part(self, path: DirectoryPath, failure: OSError) -> bool:
        """Return True if an error in a directory says nothing about the whole PFS: it takes another file."""
        return self._concerns_entry(path, failure) or self._takes_a_file()

    def _takes_a_file(self, size: int = 0) -> bool:
        """Return True if the PFS takes another file, and says that it has room for `size` bytes."""
        root = self._tree.get_directory(())
        try:
            space = os.fstatvfs(root)
            if space.f_blocks and size > space.f_bavail * space.f_frsize:  # Some PFS have no figures.
                return False
            run_as_owner(root, self._probe, lambda: disk.act("write_back:probe", _make_and_remove, root, self._probe))
        except OSError as failure:
            log.debug("the PFS does not take a file: %s", failure)
            return False
        return True

    def is_refused(self, kind: RefusedKind, inode: int) -> bool:
        """Return True if the PFS refuses this of an inode, until `start_batch` releases it."""
        return (self.skips_bytes and kind is RefusedKind.BYTES) or (inode, kind) in self._files

    def start_batch(self) -> None:
        """Release the files that are due, and read the journal again for them. Call before each batch.

        While write-back is busy it goes on with the journal first: to try many files may take longer than their pauses.
        """
        retries_all, self._retries_all = self._retries_all, False
        now = time.monotonic()
        due = [key for key, one in self._files.items() if retries_all or one.until_s <= now]
        if due and (retries_all or self._can_release or now - self._released_s >= RETRY_LAST_S):
            self._can_release, self._released_s = False, now
            self._release(due)

    def note_rest(self) -> None:
        """Note that write-back has come as far as it can for now."""
        self._can_release = True

    def release(self, inodes: Iterable[int]) -> None:
        """Release renamed or new inodes, and read the journal again for rows that wait for them."""
        self._release([(inode, kind) for inode in inodes for kind in RefusedKind if (inode, kind) in self._files])

    def _release(self, keys: list[tuple[int, RefusedKind]]) -> None:
        for key in keys:
            self._released[key] = self._files.pop(key)
        self.after_seq = 0

    def finish_journal(self) -> None:
        """Forget released files that were not deferred again. Call at the end of the journal."""
        if not self.skips_bytes:
            self._failures = 0
        if self._released:
            self._released.clear()
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
        reports = _build_reports([*self._files.values(), *self._released.values()])
        for number, value in enumerate(reports + [None] * (self._reported_count - len(reports)), 1):
            self._report(DEFERRED_TROUBLE if number == 1 else f"{DEFERRED_TROUBLE} {number}", value)
        self._reported_count = len(reports)


def _build_reports(deferred: Iterable[_DeferredFile]) -> list[dict[str, str] | None]:
    """Describe each deferred file, up to a bound; the last one counts the rest."""
    files = sorted(deferred, key=lambda file: os.fsencode(file.path))
    reports: list[dict[str, str] | None] = []
    for file in files[:REPORTED_MAX]:
        more = f"; so are {len(files) - REPORTED_MAX} other files" if len(reports) + 1 == REPORTED_MAX < len(files) else ""
        reports.append({"what": file.what + more, "path": file.path, "remedy": file.remedy})
    return reports


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

    def defer_if_paused(self, inode: int, content: int) -> bool:
        """Return True, and note the content for a later copy, if its last copy took too long to repeat it now."""
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


def build_unavailable_error(failure: OSError, path: str) -> CkptfsError:
    """Return the error that describes a failing PFS: the path, the cause and the remedy."""
    sentence = f"write-back of {path} to the PFS failed: {failure.strerror or failure}"
    error = TierUnavailable(sentence, remedy=health.pfs_remedy(failure.errno))
    error.errno = failure.errno or errno.EIO
    return error


def _describe_act(action: PfsAction) -> str:
    old = action.location.text
    names = {"put": "creation", "link": f"link to {old}", "move": f"rename from {old}", "exchange": f"exchange with {old}"}
    return names.get(action.act, "removal")


def _make_and_remove(directory: int, name: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
        with os.fdopen(fd, "wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(fd)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
