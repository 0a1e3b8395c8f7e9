"""What systemd is told, and what it keeps for us: sd_notify(3) messages and the descriptor store, by socket and without a library.

Two descriptors are stored: the FUSE connection, and a memfd with what is needed to go on serving it. A supervisor that systemd starts
again finds both in LISTEN_FDS and takes the same mount up, so that even its death is only a pause.
If we die here: systemd holds what it was given.
"""

import contextlib
import os
import socket

FUSE_NAME = "ckptfs-fuse"
SAVED_NAME = "ckptfs-saved"
FIRST_FD = 3
SAVED_BYTES_MAX = 1 << 20


class Systemd:
    """The service manager, if there is one; otherwise everything here does nothing."""

    def __init__(self) -> None:
        """Reads and removes NOTIFY_SOCKET and WATCHDOG_*, so that children do not speak for us."""
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        period_us = os.environ.pop("WATCHDOG_USEC", "")
        ours = os.environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_interval_s: float | None = int(period_us) / 1e6 / 2 if period_us.isdigit() and int(period_us) and ours else None

    def notify(self, *lines: str, descriptor: int | None = None) -> bool:
        """Send lines such as READY=1, with a descriptor if given; whether they were sent."""
        if not self._address:
            return False
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel, contextlib.suppress(OSError):
            channel.connect(address)
            body = "\n".join(lines).encode()
            if descriptor is None:
                channel.send(body)
            else:
                socket.send_fds(channel, [body], [descriptor])
            return True
        return False

    def store_descriptors(self, fuse_fd: int, saved: bytes) -> None:
        """Let systemd keep the connection. It must not watch it: a FUSE descriptor always looks as if it had failed when it ends."""
        memory = os.memfd_create("ckptfs-saved")
        try:
            os.write(memory, saved)
            self.notify("FDSTORE=1", f"FDNAME={SAVED_NAME}", "FDPOLL=0", descriptor=memory)
            self.notify("FDSTORE=1", f"FDNAME={FUSE_NAME}", "FDPOLL=0", descriptor=fuse_fd)
        finally:
            os.close(memory)

    def remove_descriptors(self) -> None:
        """Take back what was stored: the connection has ended."""
        self.notify("FDSTOREREMOVE=1", f"FDNAME={FUSE_NAME}")
        self.notify("FDSTOREREMOVE=1", f"FDNAME={SAVED_NAME}")


def take_stored_descriptors() -> tuple[int, bytes] | None:
    """(FUSE descriptor, saved bytes) that systemd kept for us, or None. What else it hands over is closed."""
    count = os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if os.environ.pop("LISTEN_PID", "") != str(os.getpid()) or not count.isdigit():
        return None
    fuse_fd, saved = -1, b""
    for fd, name in zip(range(FIRST_FD, FIRST_FD + int(count)), names, strict=False):
        os.set_inheritable(fd, False)
        if name == FUSE_NAME and fuse_fd < 0:
            fuse_fd = fd
            continue
        if name == SAVED_NAME:
            saved = os.pread(fd, SAVED_BYTES_MAX, 0)
        os.close(fd)
    if fuse_fd >= 0 and not saved:
        os.close(fuse_fd)
    return (fuse_fd, saved) if fuse_fd >= 0 and saved else None
