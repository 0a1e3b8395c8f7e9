"""Where a daemon and those who ask it meet: one runtime directory per user, and in it the files of each mount.

`NAME.json` says what is mounted where (the registry), `NAME.sock` answers questions for anyone, `NAME.admin.sock` takes
orders from the mount's owner only. The directory belongs to the daemon's user; what lies there under another owner is not believed.
Everything in it is made anew by the next daemon, so dying here leaves at most a stale file.
"""

import os
import stat
from pathlib import Path


def get_path(uid: int | None = None) -> Path:
    """The runtime directory of `uid` (default: ours). `CKPTFS_RUNTIME_DIR` overrides it, for tests."""
    if override := os.environ.get("CKPTFS_RUNTIME_DIR"):
        return Path(override)
    ours = os.geteuid()
    uid = ours if uid is None else uid
    if uid == 0:
        return Path("/run/ckptfs")
    session = Path((os.environ.get("XDG_RUNTIME_DIR") if uid == ours else None) or f"/run/user/{uid}")
    return session / "ckptfs" if _get_owner_uid(session) == uid else Path(f"/tmp/ckptfs-{uid}")


def create() -> Path:
    """Our runtime directory, made if it is missing. Raises PermissionError if somebody else owns it."""
    path = get_path()
    path.mkdir(mode=0o755, exist_ok=True, parents=True)
    if _get_owner_uid(path) != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    return path


def registry_path(name: str, uid: int | None = None) -> Path:
    """The registry file of the mount `name`."""
    return get_path(uid) / f"{name}.json"


def socket_path(name: str, uid: int | None = None) -> Path:
    """Where questions are answered, for anyone."""
    return get_path(uid) / f"{name}.sock"


def admin_socket_path(name: str, uid: int | None = None) -> Path:
    """Where orders are taken, from the mount's owner."""
    return get_path(uid) / f"{name}.admin.sock"


def _get_owner_uid(path: Path) -> int:
    """The uid that owns `path`; -1 when it is not there. A symlink is not followed: whoever made it could point anywhere."""
    try:
        found = os.lstat(path)
    except OSError:
        return -1
    return -1 if stat.S_ISLNK(found.st_mode) else found.st_uid
