"""The test that the directory `pfs=` is the PFS of this catalog: a mark on it, or else a pin.

The mountpoint of a filesystem that is not mounted looks like an empty PFS. If it were taken for the PFS, files would vanish from the mount,
and new files would be written below the mountpoint.

The mark is the file `.ckptfs/tier-id` with a uuid. Root makes it; where the PFS squashes root, the owner of the directory does. If
neither may make it (a directory of root with root squashed, a read-only or full PFS), the catalog keeps a pin: the type, source and id of
the filesystem, and number and birth of the directory. Another mount of the same filesystem has the same pin, except for what the kernel
numbers again (devices). A pin becomes a mark as soon as one can be made.

The catalog stores the identity as one string, the uuid of its tier `pfs`: the text of the mark, or `pin:` and JSON. It is taken at the
first contact. At that moment a directory without any of the files that the catalog expects is refused. If the identity changed although the
PFS is the right one, the operator confirms it by a file `accept-pfs` in the state directory, which is removed when it was used.

A catalog also knows where its PFS was mounted last (`require_pfs_of_catalog`). At the same path it may be away for now, so that path is not
looked at before the mount: the tier is `down` until the PFS is back. At another path the PFS must be there, and be the same one: otherwise
files that lie only on the former one would fail, and changes that it lacks would never reach it.

Every call may hang as long as the PFS does, but for `require_pfs_of_catalog`.

Crash safety: the mark is linked into place whole; the catalog is changed in one transaction, before `accept-pfs` is removed.
"""

import contextlib
import ctypes
import errno
import json
import logging
import os
import struct
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ckptfs import disk, libc, limits, procfs
from ckptfs.bounded_waits import run_in_time
from ckptfs.catalog import copies, journal, scans
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.errors import ConfigError, TierUnavailable, TimedOut
from ckptfs.model import ROOT, Tier
from ckptfs.tiers import pfs_ownership

log = logging.getLogger(__name__)
disk.declare_labels("pfs:mark")

WORK_DIRECTORY = b".ckptfs"
MARK = b"tier-id"
ACCEPT_PFS = "accept-pfs"
"""A file of this name in the state directory confirms that the PFS is the right one, although it looks like another."""
EXPECTED_NAMES_MAX = 64
_PIN = "pin:"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_MARK = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.ELOOP}
"""A mark cannot be made there. Other errors mean that the PFS does not work now."""
_WITHOUT_LASTING_NUMBERS = ("fuse", "vfat", "exfat")
_ANONYMOUS_TYPES = {"tmpfs", "ramfs", "overlay"}
"""Filesystems whose source says nothing: each mount of them is another one."""
_AT_EMPTY_PATH, _STATX_BTIME = 0x1000, 0x800
_STATX_BYTES, _STATX_BTIME_AT = 256, 0x50


@dataclass(frozen=True, slots=True)
class PfsPin:
    """The identity of a directory without a mark; `fsid` (statfs) and `birth_ns` may be 0: unknown."""

    fstype: str
    source: str
    fsid: int
    device: int
    inode: int
    birth_ns: int

    @property
    def stable_fsid(self) -> int:
        """Return the id of the filesystem if it is more than the number of the device, else 0."""
        return 0 if self.fsid == self.device else self.fsid


def find_pin_difference(pinned: PfsPin, found: PfsPin) -> str:
    """Return why `found` is not the directory that was pinned, or an empty string. Pure."""
    if found == pinned:
        return ""
    if (found.fstype, found.inode) != (pinned.fstype, pinned.inode):
        return f"it is directory {found.inode} of {found.source} ({found.fstype}), not {pinned.inode} of {pinned.source} ({pinned.fstype})"
    if found.birth_ns and pinned.birth_ns and found.birth_ns != pinned.birth_ns:
        return "it was created at another time"
    if found.stable_fsid and pinned.stable_fsid and found.stable_fsid != pinned.stable_fsid:
        return f"its filesystem has another id, {found.fsid:x} and not {pinned.fsid:x}"
    has_same_birth, has_same_id = 0 != found.birth_ns == pinned.birth_ns, 0 != found.stable_fsid == pinned.stable_fsid
    if has_same_birth or has_same_id or (found.source == pinned.source and found.fstype not in _ANONYMOUS_TYPES):
        return ""
    return f"nothing tells whether {found.source} ({found.fstype}) is the filesystem that {pinned.source} was"


def read_pin(fd: int) -> PfsPin:
    """Return the pin of an open directory. Raises OSError."""
    mounted = procfs.find_mount_of(fd)
    found, figures = os.fstat(fd), os.fstatvfs(fd)
    fstype, source = (mounted.fstype, mounted.source) if mounted else ("", "")
    return PfsPin(fstype, source, figures.f_fsid, found.st_dev, found.st_ino, _get_birth_ns(fd))


def _get_birth_ns(fd: int) -> int:
    """Return when an inode was created, by statx(2), which Python lacks; 0 if that is unknown."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        libc.call("statx", fd, b"", _AT_EMPTY_PATH, _STATX_BTIME, buffer)
    except OSError:
        return 0
    has_birth = struct.unpack_from("=I", buffer, 0)[0] & _STATX_BTIME
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, _STATX_BTIME_AT)
    return int(seconds * 10**9 + nanoseconds) if has_birth else 0


# --- the mark ---------------------------------------------------------------------------------------------------------


def read_mark(root_fd: int) -> str:
    """Return the text of the mark, or an empty string without one. Raises OSError."""

    def read() -> str:
        try:
            with disk.closing(os.open(WORK_DIRECTORY, _DIRECTORY, dir_fd=root_fd)) as fd:
                return read_text(fd)
        except (FileNotFoundError, NotADirectoryError):
            return ""

    return pfs_ownership.retry_as_owner(read, lambda: _list_owners(root_fd))


def make_mark(root_fd: int, text: str = "") -> str:
    """Return the text of the mark, which is made if it is missing. Raises OSError, TierUnavailable."""

    def make() -> str:
        return disk.act("pfs:mark", _make_mark, root_fd, text or uuid.uuid4().hex)

    return pfs_ownership.retry_as_owner(make, lambda: _list_owners(root_fd))


def _make_mark(root_fd: int, text: str) -> str:
    is_ours = True
    try:
        os.mkdir(WORK_DIRECTORY, 0o700, dir_fd=root_fd)
    except FileExistsError:
        is_ours = False
    with disk.closing(os.open(WORK_DIRECTORY, _DIRECTORY, dir_fd=root_fd)) as fd:
        if not is_ours and os.fstat(fd).st_uid not in {os.geteuid(), os.fstat(root_fd).st_uid}:
            raise TierUnavailable(f"{WORK_DIRECTORY.decode()} on the PFS belongs to another user", remedy="remove it; ckptfs creates it")
        if found := read_text(fd):
            return found
        write_text(fd, text)
        return read_text(fd)


def write_text(fd: int, text: str) -> None:
    """Make the mark with this text in an open directory, whole, unless another process was faster."""
    temporary = b"%s.%s" % (MARK, uuid.uuid4().hex.encode())
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=fd), "w") as file:
        file.write(f"{text}\n")
        file.flush()
        _fsync(file.fileno())
    try:
        os.link(temporary, MARK, src_dir_fd=fd, dst_dir_fd=fd)
    except FileExistsError:
        pass
    except OSError:  # A PFS without links may answer with any error.
        os.rename(temporary, MARK, src_dir_fd=fd, dst_dir_fd=fd)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=fd)
    _fsync(fd)


def _fsync(fd: int) -> None:
    """Call fsync(2), if the filesystem can."""
    try:
        os.fsync(fd)
    except OSError as failure:
        if failure.errno not in {errno.EINVAL, errno.EROFS}:
            raise


def read_text(fd: int) -> str:
    """Return the text of the mark in an open directory, or an empty string without one. Raises OSError."""
    try:
        with os.fdopen(os.open(MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd), "rb") as file:
            return file.read(64).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return ""


def _list_owners(root_fd: int) -> list[pfs_ownership.Owner]:
    """Return the owner of the directory, and that of the work area if it exists."""
    owners = [pfs_ownership.get_owner(root_fd)]
    with contextlib.suppress(OSError):
        found = os.stat(WORK_DIRECTORY, dir_fd=root_fd, follow_symlinks=False)
        owners.append((found.st_uid, found.st_gid))
    return owners


# --- the identity -----------------------------------------------------------------------------------------------------


def is_mark(identity: str) -> bool:
    """Return True if the identity is that of a mark, False for a pin."""
    return not identity.startswith(_PIN)


def find_difference(root_fd: int, identity: str) -> str:
    """Return why an open directory is not the PFS of this identity, or an empty string. Raises OSError."""
    if is_mark(identity):
        mark = f"{WORK_DIRECTORY.decode()}/{MARK.decode()}"
        found = read_mark(root_fd)
        return "" if found == identity else f"{mark} is {'another one' if found else 'missing'}"
    return find_pin_difference(PfsPin(**json.loads(identity.removeprefix(_PIN))), read_pin(root_fd))


def open_directory(label: str, pfs: Path) -> int:
    """Open the directory `pfs=`, as its owner if root may not. Raises OSError."""

    def owners() -> list[pfs_ownership.Owner]:
        found = os.stat(pfs)
        return [(found.st_uid, found.st_gid)]

    return pfs_ownership.retry_as_owner(lambda: disk.open_file(label, os.fsencode(pfs), os.O_RDONLY | os.O_DIRECTORY), owners)


def open_adopted_root(db: Database, pfs: Path, *, may_mark: bool = True) -> int:
    """Open the root of the PFS of this catalog, marked if it `may_mark`. Raises TierUnavailable."""
    return open_checked(pfs, lambda fd: adopt(db, fd, pfs, may_mark=may_mark))


def open_checked(pfs: Path, check: Callable[[int], None]) -> int:
    """Open the directory `pfs=`. Close it if `check` raises."""
    with disk.closing_on_failure(open_directory("scan:root", pfs)) as fd:
        disk.record_inode_numbers(os.fstat(fd).st_dev, are_lasting=_has_lasting_inode_numbers(fd))
        check(fd)
    return fd


def _has_lasting_inode_numbers(fd: int) -> bool:
    """Return False for a filesystem that may give a file another inode number later.

    Filesystems in user space do so after a rename, a new mount, or when the kernel has forgotten the file, if their server has no numbers
    (sshfs, rclone, s3fs). FAT has none either.
    """
    mounted = procfs.find_mount_of(fd)
    return mounted is None or not mounted.fstype.startswith(_WITHOUT_LASTING_NUMBERS)


def require_same(root_fd: int, pfs: Path, identity: str | None) -> None:
    """Raise TierUnavailable if an open directory is not the PFS of this identity."""
    if identity is not None and (difference := find_difference(root_fd, identity)):
        raise _build_refusal(pfs, difference, "the state directory")


def _build_refusal(pfs: Path, difference: str, state: str) -> TierUnavailable:
    return TierUnavailable(
        f"{pfs} is not the directory that this catalog belongs to: {difference}",
        remedy=f"mount the filesystem that belongs at {pfs}; if it is mounted and the right one, create the file {ACCEPT_PFS} in {state}",
    )


def require_pfs_of_catalog(db: Database, config: Config) -> None:
    """Refuse a configuration with another PFS than the catalog's, or with none. Raises ConfigError."""
    former, pfs = scans.get_pfs_path(db), config.pfs
    if pfs is None:
        journal.require_no_pfs(db, config.state, former)
        return
    if config.cluster is not None:
        journal.require_recorded(db, config.cluster, config.state)
    if former in ("", os.fsdecode(pfs)) or (config.state / ACCEPT_PFS).exists():
        return
    if difference := _compare_in_time(db, pfs):
        raise ConfigError(
            f"the files of {config.name} belong to the PFS that was at {former}, and {pfs} is not that PFS: {difference}",
            remedy=f"give pfs={former}, or another name for pfs={pfs}; if the PFS has moved to {pfs}, mount it there first",
        )


def _compare_in_time(db: Database, pfs: Path) -> str:
    """Return why a directory is not the PFS of this catalog, or "". Does not hang, as the PFS may."""

    def compare() -> str:
        with disk.closing(open_directory("scan:root", pfs)) as root_fd:
            return _find_difference_from_known(db, root_fd, copies.get_tier_uuid(db, Tier.PFS))

    try:
        return run_in_time(compare, limits.PFS_ACT_WAIT_S, "it")
    except TimedOut as failure:
        return str(failure)
    except OSError as failure:
        return os.strerror(failure.errno or 0)


def _find_difference_from_known(db: Database, root_fd: int, known: str | None) -> str:
    return _find_unexpected(db, root_fd) if known is None else find_difference(root_fd, known)


def adopt(db: Database, root_fd: int, pfs: Path, *, may_mark: bool) -> None:
    """Take the identity of the PFS at the first contact. Raises OSError and TierUnavailable."""
    known = copies.get_tier_uuid(db, Tier.PFS)
    confirmation = db.path.parent / ACCEPT_PFS
    difference = _find_difference_from_known(db, root_fd, known)
    is_accepted = bool(difference) and confirmation.exists()
    if difference and not is_accepted:
        raise _build_refusal(pfs, difference, str(db.path.parent))
    if known is not None and not is_accepted:
        return
    now = _take_identity(root_fd, known, may_mark=may_mark)
    is_recorded = copies.set_pfs_identity(db, known, now)
    if is_recorded and not is_mark(now):
        log.info("%s: cannot be marked as the PFS: it is recognised by its pin %s", pfs, now)
    if is_accepted:
        log.warning("%s: accepted as the PFS of this catalog, as %s asked, although %s", pfs, confirmation, difference)
        confirmation.unlink(missing_ok=True)


def replace_pin(db: Database, root_fd: int) -> None:
    """Make a mark in place of a pin if one can be made by now. The directory is the PFS of this catalog."""
    known = copies.get_tier_uuid(db, Tier.PFS)
    if known is None or is_mark(known):
        return
    with contextlib.suppress(OSError, TierUnavailable):
        copies.set_pfs_identity(db, known, make_mark(root_fd))


def _take_identity(root_fd: int, known: str | None, *, may_mark: bool) -> str:
    """Return the mark of the PFS, or its pin if none can be made."""
    try:
        if not may_mark:
            return read_mark(root_fd) or _build_pin(root_fd)
        return make_mark(root_fd, known if known is not None and is_mark(known) else "")
    except (OSError, TierUnavailable) as failure:
        if isinstance(failure, OSError) and failure.errno not in _NO_MARK:
            raise
    return _build_pin(root_fd)


def _build_pin(root_fd: int) -> str:
    return _PIN + json.dumps(asdict(read_pin(root_fd)))


def _find_unexpected(db: Database, root_fd: int) -> str:
    """Return why a directory cannot be the PFS: it lacks all known names; or ""."""
    names = scans.list_expected(db, ROOT)[:EXPECTED_NAMES_MAX]
    if not names or any(pfs_ownership.find_stat(root_fd, name) is not None for name in names):
        return ""
    return f"none of the names that should be there is, such as {os.fsdecode(names[0])}"
