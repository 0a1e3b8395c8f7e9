"""A child of the supervisor: becomes warm, waits for its role, and runs it.

If we die here: the supervisor sees our link's end, and starts another.
"""

import logging
import os
import signal
import socket

from ckptfs.errors import CkptfsError
from ckptfs_daemon import inherited, logs

log = logging.getLogger(__name__)


def run_child(role: str, link_fd: int) -> int:
    """Serve in the role that the supervisor assigns; the exit code."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logs.configure(role, "info")
    logs.set_process_name(f"ckptfs-{role}")
    link = socket.socket(fileno=link_fd)
    os.set_inheritable(link_fd, False)
    try:
        _preload_modules(role)
        setup = inherited.receive_assignment(link)
        if setup is None:
            return 0
        logs.configure(setup.role, setup.config.log_level)
        logs.set_process_name(f"ckptfs-{setup.role}")
        return _run_role(setup)
    except CkptfsError as failure:
        log.error("%s; %s", failure, failure.remedy)
        return 1
    except Exception:
        log.exception("the %s process ends", role)
        return 1


def _preload_modules(role: str) -> None:
    """Import what the role needs, before there is a hurry."""
    if role == "mover":
        from ckptfs_daemon import mover  # noqa: F401
    else:
        from ckptfs_daemon import mount  # noqa: F401


def _run_role(setup: inherited.ChildSetup) -> int:
    if setup.role == "mover":
        from ckptfs_daemon import mover

        return mover.run(setup)
    from ckptfs_daemon import mount

    return mount.run(setup)
