"""The protocol with systemd, without a library: sd_notify(3) messages and the descriptor store.

Two descriptors are stored: the FUSE connection, and the memory with its requests in flight (`request_table`). A supervisor that systemd
restarts finds both in LISTEN_FDS and resumes the mount, so its death is only a pause.

Invariants:
- Nothing here waits for systemd. Its socket holds few notes (`net.unix.max_dgram_qlen`), and a supervisor that waited in send(2) would not
  restart a dead mount.

Crash safety: systemd keeps the descriptors.
"""

import contextlib
import os
import re
import socket
import subprocess
from pathlib import Path

FUSE_NAME = "ckptfs-fuse"
SAVED_NAME = "ckptfs-saved"
FIRST_FD = 3
ANSWER_WAIT_S = 5.0
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class Systemd:
    """The service manager. Without one, every method does nothing."""

    def __init__(self) -> None:
        """Read and remove NOTIFY_SOCKET and WATCHDOG_*, so that children do not notify systemd."""
        self.environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        """What a successor in this process needs."""
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        self._unsent: dict[tuple[str, ...], tuple[bytes, int | None]] = {}
        period_us = os.environ.pop("WATCHDOG_USEC", "")
        ours = os.environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_interval_s: float | None = int(period_us) / 1e6 / 2 if period_us.isdigit() and int(period_us) and ours else None

    @property
    def keeps_descriptors(self) -> bool:
        """True if systemd runs this process, and so keeps its descriptors should it die."""
        return bool(self._address)

    @property
    def unit(self) -> str:
        """The unit of this process, as its control group names it; empty without a service manager."""
        with contextlib.suppress(OSError):
            found = re.findall(r"/([^/\n]+\.service)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
            return found[-1] if found and self._address else ""
        return ""

    def is_restarting(self) -> bool:
        """Return True if systemd stops this unit only to start it again.

        Waits for its answer; without one: False. During `systemctl restart`, the job of the unit is of the type restart until the process
        has ended.
        """
        if not (unit := self.unit):
            return False
        manager = ["systemctl", "--user"] if "MANAGERPID" in os.environ else ["systemctl"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [*manager, "list-jobs", "--no-legend", "--plain", "--full"]
            jobs = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_WAIT_S, check=True).stdout
            return any(line.split()[1:3] == [unit, "restart"] for line in jobs.splitlines())
        return False

    def notify(self, *lines: str, descriptor: int | None = None) -> None:
        """Send lines such as READY=1, with a descriptor if given.

        What systemd does not take now waits for `flush`. Of waiting notes of one kind or about one stored descriptor the last counts.
        """
        if not self._address:
            return
        named = [line for line in lines if line.startswith("FDNAME=")]
        kind = tuple(named or [line.partition("=")[0] for line in lines])
        self._unsent.pop(kind, None)
        self._unsent[kind] = ("\n".join(lines).encode(), descriptor)
        self.flush()

    def flush(self) -> None:
        """Send the notes that wait, as far as systemd takes them. If there is no systemd, they are dropped."""
        if not self._unsent:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as channel:
            try:
                channel.connect(address)
                for kind, (body, descriptor) in list(self._unsent.items()):
                    socket.send_fds(channel, [body], [] if descriptor is None else [descriptor])
                    del self._unsent[kind]
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()

    def store_descriptors(self, fuse_fd: int, table_fd: int) -> None:
        """Store the connection in systemd. FDPOLL=0: a FUSE descriptor reports an error when it ends."""
        self.notify("FDSTORE=1", f"FDNAME={SAVED_NAME}", "FDPOLL=0", descriptor=table_fd)
        self.notify("FDSTORE=1", f"FDNAME={FUSE_NAME}", "FDPOLL=0", descriptor=fuse_fd)

    def remove_descriptors(self) -> None:
        self.notify("FDSTOREREMOVE=1", f"FDNAME={FUSE_NAME}")
        self.notify("FDSTOREREMOVE=1", f"FDNAME={SAVED_NAME}")


def take_stored_descriptors() -> tuple[int, int] | None:
    """Return the descriptors of connection and table that systemd kept, or None; close any other."""
    count = os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if os.environ.pop("LISTEN_PID", "") != str(os.getpid()) or not count.isdigit():
        return None
    kept: dict[str, int] = {}
    for fd, name in zip(range(FIRST_FD, FIRST_FD + int(count)), names, strict=False):
        os.set_inheritable(fd, False)
        if name in (FUSE_NAME, SAVED_NAME) and name not in kept:
            kept[name] = fd
        else:
            os.close(fd)
    if len(kept) == 2:
        return kept[FUSE_NAME], kept[SAVED_NAME]
    for fd in kept.values():
        os.close(fd)
    return None
