"""The root directory of a tier: identity, descriptor of the directory of contents, failures.

NVMe may die while it is in use, and a person may remove what RAM holds. A call that fails with an error of the tier
(`health.is_tier_failure`) makes it unusable for new files for `limits.TIER_RETRY_S`; then the next file tries it. If its root cannot be
opened any more either, the descriptor of the dead filesystem is given up, so that it can be unmounted. The root is opened again when it has
the same `tier-id`.

Invariants:
- Nothing is created below a root that does not have the known `tier-id`: it may be a mountpoint without its device.
- The number of the descriptor is never closed while threads may use it; another file takes its place.

Crash safety: nothing is stored but `tier-id`, which appears whole or not at all.
"""

import contextlib
import errno
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from ckptfs import disk, limits
from ckptfs.errors import TierUnavailable
from ckptfs.model import Tier
from ckptfs.tiers import health, pfs_identity

log = logging.getLogger(__name__)
disk.declare_labels("tier:root")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Detached(OSError):
    """The root was given up, and it is too early to try it again. The errno is that of the failure."""


class TierRoot:
    """The root of one tier. Methods raise OSError of its filesystem."""

    def __init__(self, tier: Tier, root: Path, *, instance: str = "", get_pfs_identity: Callable[[], str | None] = lambda: None) -> None:
        """`instance` separates catalogs in one root.

        `get_pfs_identity` returns the identity of the PFS that the catalog belongs to; None if it is not known yet.
        """
        self.tier = tier
        self.root = root
        self._get_pfs_identity = get_pfs_identity
        self._contents = f"contents-{instance}" if instance else "contents"
        self._directory = -1
        self._lock = threading.Lock()
        self._uuid = ""
        self._failure: OSError | None = None
        self._failed_s = float("-inf")
        self._is_detached = False

    # --- a tier that dies ---------------------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Return False if a new file must not go to this tier, because it failed a moment ago."""
        return self._failure is None or time.monotonic() - self._failed_s > limits.TIER_RETRY_S

    @property
    def is_silent(self) -> bool:
        """Return True while a call hangs, and none has been answered since."""
        return self._failure is not None and self._failed_s == math.inf

    @property
    def failure(self) -> str:
        """Return the error of a tier that fails; empty if it works."""
        return "" if self._failure is None else health.describe(self._failure)

    def record_failure(self, failure: OSError) -> None:
        """Note an error of a call in RAM or on NVMe.

        If it is one of the tier, new files go elsewhere for a while.
        """
        self._failed_s = min(self._failed_s, time.monotonic())  # An answer ends a silence.
        if self.tier is Tier.PFS or isinstance(failure, _Detached) or not health.is_tier_failure(failure):
            return
        with self._lock:
            is_new, self._failure, self._failed_s = self._failure is None, failure, time.monotonic()
            if not self._is_detached:
                self._reattach()
        if is_new:
            self._log_failure(failure)

    def record_silence(self) -> None:
        """Note that a call hangs. New files go elsewhere until a call is answered."""
        if self.is_usable:
            failure = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            self._failure, self._failed_s = failure, math.inf
            self._log_failure(failure)

    def _log_failure(self, failure: OSError) -> None:
        remedy = health.remedy(failure.errno)
        log.warning("%s: %s; new files go elsewhere (%s)", self.root, self.failure, remedy or "check the kernel log")

    def record_success(self) -> None:
        """Note that a file was made in this tier."""
        if self._failure is not None:
            self._failure = None
            log.info("%s: works again", self.root)

    def expect_uuid(self, uuid_: str) -> None:
        """Let only the root with this uuid be opened from now on."""
        self._uuid = uuid_

    def _reattach(self) -> None:
        """Open the root again if it is the same one; else give up the dead filesystem."""
        try:
            fresh = self._open_known_root()
        except (OSError, TierUnavailable):
            fresh = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # Calls relative to it fail with ENOTDIR.
            self._is_detached = True
        else:
            self._is_detached = False
        if self._directory < 0:
            self._directory = fresh
            return
        os.dup2(fresh, self._directory, inheritable=False)
        os.close(fresh)

    def _open_known_root(self) -> int:
        """Return a descriptor of the directory of contents. Creates nothing."""
        with disk.closing(os.open(self.root, _DIRECTORY)) as root:
            found = pfs_identity.read_text(root)
            if not found or self._uuid not in ("", found):
                raise TierUnavailable(f"{self.root} is not the directory that this catalog knows", remedy=f"mount it at {self.root}")
            return os.open(self._contents, _DIRECTORY, dir_fd=root)

    def _require_attached(self) -> None:
        """Try a root that was given up every `TIER_RETRY_S`. Raises the tier's last error."""
        with self._lock:
            if self._is_detached and self.is_usable:
                self._failed_s = time.monotonic()
                self._reattach()
                if not self._is_detached:
                    self._failed_s = float("-inf")  # The next file may use it at once.
            if self._is_detached:
                assert self._failure is not None
                raise _Detached(self._failure.errno, os.strerror(self._failure.errno or 0), str(self.root))

    # --- the directory ------------------------------------------------------------------------------------------------

    @property
    def directory(self) -> int:
        """Return a descriptor of the directory of contents.

        On the PFS it exists only after `uuid` was read: the mountpoint of a PFS that is not mounted must not be filled.
        """
        if self._directory < 0 and self.tier is Tier.PFS:
            self._require_mark()
        if self._is_detached:
            self._require_attached()
        return self._open_directory()

    def _require_mark(self) -> None:
        with disk.closing(pfs_identity.open_directory("tier:root", self.root.parent)) as root_fd:
            if not pfs_identity.read_mark(root_fd):
                raise TierUnavailable(f"{self.root.parent} has no ckptfs work area", remedy="mount the filesystem that belongs there")
            pfs_identity.require_same(root_fd, self.root.parent, self._get_pfs_identity())

    def _open_directory(self) -> int:
        if self._directory < 0:
            try:
                self._directory = self._open_contents()  # A filesystem that is frozen can still be opened.
            except FileNotFoundError:
                if self.tier is not Tier.PFS:
                    self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                with disk.closing(self._open_root()) as root, contextlib.suppress(FileExistsError):
                    os.mkdir(self._contents, 0o700, dir_fd=root)
                self._directory = self._open_contents()
        return self._directory

    def _open_contents(self) -> int:
        with disk.closing(self._open_root()) as root:
            return os.open(self._contents, _DIRECTORY, dir_fd=root)

    def _open_root(self) -> int:
        try:
            root = os.open(self.root, _DIRECTORY)
        except PermissionError:
            root = -1
        if root >= 0 and os.fstat(root).st_uid == os.geteuid():
            return root
        if root >= 0:
            os.close(root)
        remedy = "let root use the directory" if self.tier is Tier.PFS else "remove it; ckptfs creates it"
        raise TierUnavailable(f"{self.root} belongs to another user", remedy=remedy)

    @property
    def uuid(self) -> str:
        """Return the identity of this root, created if missing; concurrent callers get the same one."""
        if self.tier is Tier.PFS:
            with disk.closing(pfs_identity.open_directory("tier:root", self.root.parent)) as root_fd:
                return pfs_identity.make_mark(root_fd)
        self._uuid = self._read_uuid()
        return self._uuid

    def _read_uuid(self) -> str:
        self._open_directory()
        with disk.closing(self._open_root()) as root:
            if not (found := pfs_identity.read_text(root)):
                pfs_identity.write_text(root, uuid.uuid4().hex)
                found = pfs_identity.read_text(root)
            return found

    def close(self) -> None:
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1
