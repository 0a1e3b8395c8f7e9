"""The upgrade of a running daemon to the version of this command.

The daemon tries this version first. If it refuses, nothing was changed. Otherwise its process becomes this version, and the upgrade is
over once new mover and mount processes serve.

Crash safety: the daemon goes on with the upgrade, or without it, if this command is interrupted.
"""

import contextlib
import os
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

from ckptfs import limits
from ckptfs_client.client import Client
from ckptfs_client.errors import ClientError, CommandFailed, NotInTime
from ckptfs_client.json_answers import UpgradeJson
from ckptfs_client.mounts import Mount

POLL_S = 0.05
SERVING_WAIT_S = limits.READY_WAIT_S
STATUS_WAIT_S = 1.0


def upgrade(mount: Mount) -> UpgradeJson:
    """Upgrade the daemon of a mount. Raises ClientError."""
    with Client(mount) as client:
        before = client.get_status()
        mover = next((process.pid for process in before.processes if process.role == "mover"), 0)
        begun_s = time.monotonic()
        client.upgrade(sys.executable, _find_places())
        version = _wait_until_replaced(mount, mover)
    os.statvfs(mount.mountpoint)  # Waits for the mount process.
    return {"name": before.name, "former": before.version, "version": version, "seconds": round(time.monotonic() - begun_s, 1)}


def _find_places() -> list[str]:
    """Return the directories of the packages of this installation."""
    places = []
    for package in ("ckptfs", "ckptfs_daemon"):
        found = find_spec(package)
        if found is None or not found.submodule_search_locations:
            raise CommandFailed(f"this installation of ckptfs lacks the package {package}", remedy="install all of it")
        places.append(str(Path(found.submodule_search_locations[0]).absolute().parent))
    return list(dict.fromkeys(places))


def _wait_until_replaced(mount: Mount, mover: int) -> str:
    """Wait until another mover answers; return its version.

    One that the same supervisor restarted does not count.
    """
    until = time.monotonic() + SERVING_WAIT_S
    while time.monotonic() < until:
        with contextlib.suppress(ClientError), Client(mount, answer_s=STATUS_WAIT_S) as client:
            status = client.get_status()
            if any(process.role == "mover" and process.pid != mover and not process.restarts for process in status.processes):
                return status.version
        threading.Event().wait(POLL_S)
    raise NotInTime(f"the daemon of {mount.name} did not answer in time after the upgrade", remedy="its log says why")
