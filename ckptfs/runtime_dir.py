"""The files by which a user's clients find daemons and their processes.

The runtime directory of a user has three files for each mount.
`NAME.json` registers the mount, `NAME.sock` answers queries of any user, `NAME.admin.sock` accepts orders of the owner of the mount.

Invariants:
- The directory belongs to the user of the daemon; a directory of another owner is not used.

Crash safety: at most stale files remain; the next daemon replaces them.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

PROCESSES_FILE = "processes.json"
"""In a state directory: the processes, as the supervisor names them."""


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


def load_processes(state: Path) -> dict[str, Any]:
    """Return what the supervisor said last; empty if that cannot be read. A dead one may have left it."""
    try:
        found = json.loads((state / PROCESSES_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def get_pid(state: Path, role: str) -> int:
    """Return the process of a supervisor, mount or mover as it was last; 0 if it is not known."""
    one = load_processes(state).get(role)
    pid = one.get("pid") if isinstance(one, dict) else 0
    return pid if isinstance(pid, int) else 0


def _get_owner_uid(path: Path) -> int:
    """Return the owner of `path`, -1 if it is missing or a symlink, which could point anywhere."""
    try:
        status = os.lstat(path)
    except OSError:
        return -1
    return -1 if stat.S_ISLNK(status.st_mode) else status.st_uid
