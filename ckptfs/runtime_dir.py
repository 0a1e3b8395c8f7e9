"""The runtime directory of a user: three files for each mount, by which clients find its daemons.

`NAME.json` registers the mount, `NAME.sock` answers queries of any user, `NAME.admin.sock` accepts orders of the owner of the mount.

Invariants:
- The directory belongs to the user of the daemon; a directory of another owner is not used.

Crash safety: at most stale files remain; the next daemon replaces them.
"""

import os
import stat
from pathlib import Path


def get_path(uid: int | None = None) -> Path:
    """Return the runtime directory of `uid` (default: this user). Tests set CKPTFS_RUNTIME_DIR."""
    if override := os.environ.get("CKPTFS_RUNTIME_DIR"):
        return Path(override)
    own_uid = os.geteuid()
    uid = own_uid if uid is None else uid
    if uid == 0:
        return Path("/run/ckptfs")
    session = Path((os.environ.get("XDG_RUNTIME_DIR") if uid == own_uid else None) or f"/run/user/{uid}")
    return session / "ckptfs" if _get_owner_uid(session) == uid else Path(f"/tmp/ckptfs-{uid}")


def create() -> Path:
    """Create our runtime directory if needed. Raises PermissionError if another user owns it."""
    path = get_path()
    path.mkdir(mode=0o755, exist_ok=True, parents=True)
    if _get_owner_uid(path) != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    return path


def registry_path(name: str, uid: int | None = None) -> Path:
    """Return the registry file of a mount."""
    return get_path(uid) / f"{name}.json"


def socket_path(name: str, uid: int | None = None) -> Path:
    """Return the socket for queries."""
    return get_path(uid) / f"{name}.sock"


def admin_socket_path(name: str, uid: int | None = None) -> Path:
    """Return the socket for orders."""
    return get_path(uid) / f"{name}.admin.sock"


def _get_owner_uid(path: Path) -> int:
    """Return the owner of `path`, -1 if it is missing or a symlink, which could point anywhere."""
    try:
        status = os.lstat(path)
    except OSError:
        return -1
    return -1 if stat.S_ISLNK(status.st_mode) else status.st_uid
