"""Which processes belong to a part of a lab, and their end: everything that runs in its network namespace.

That is exact where a list of pids is not: nothing else on the machine runs there, and a pid that was given to somebody else does not match.
Signals go through pidfds, so that between looking and killing no pid can change hands.
If we die here: the rest is found again in the same way.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptfs_client.failures import CommandFailed
from ckptfs_client.lab import namespaces

END_WAIT_S = 20.0
END_POLL_S = 0.05


def list_processes(namespace: Path) -> list[int]:
    """The processes in a namespace that run (zombies do not)."""
    wanted = namespaces.get_namespace_id(namespace)
    return [pid for pid in _list_pids() if wanted is not None and _get_namespace_id(pid) == wanted]


def list_processes_named(namespace: Path, name: str) -> list[int]:
    """The processes in a namespace whose name begins so."""
    return [pid for pid in list_processes(namespace) if _get_process_name(pid).startswith(name)]


def kill_processes(namespace: Path) -> int:
    """kill -9 of everything in a namespace; how many there were. Raises Failed when something does not end.

    All of them are stopped first: nobody notices another one's death and says or does something about it, as at a node's death.
    """
    ended: set[int] = set()
    until = time.monotonic() + END_WAIT_S
    while found := list_processes(namespace):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in list_processes(namespace) if number == signal.SIGSTOP else found:
                _send_signal(pid, namespace, number)
        ended.update(found)
        _wait_for_exit(found, until)
        if time.monotonic() > until:
            raise CommandFailed(f"process {found[0]} is killed but still hangs in a system call", remedy="try again in a moment")
    return len(ended)


def spawn(namespace: Path, command: Sequence[str], log: Path, *, pass_fds: Sequence[int] = ()) -> int:
    """Start a program in a namespace, in a session of its own, its words going to `log`; its pid. Raises OSError."""

    def act() -> int:
        with open(log, "ab") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd="/", start_new_session=True, pass_fds=pass_fds,
            )  # fmt: skip
        # It shall outlive us, so nobody waits for it; this keeps Python from complaining of that.
        process.returncode = 0
        return process.pid

    return namespaces.run_in_namespace(namespace, act)


def _list_pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _get_namespace_id(pid: int) -> tuple[int, int] | None:
    """Of a process that runs. A zombie has none any more."""
    with contextlib.suppress(OSError):
        found = os.stat(f"/proc/{pid}/ns/net")
        return found.st_dev, found.st_ino
    return None


def _get_process_name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _send_signal(pid: int, namespace: Path, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if _get_namespace_id(pid) == namespaces.get_namespace_id(namespace):
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def _wait_for_exit(pids: Sequence[int], until: float) -> None:
    """Until these have ended, or it is late."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll(max(0.0, until - time.monotonic()) * 1000)
            finally:
                os.close(pidfd)
            # A child of ours stays a zombie until somebody asks for it.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
