"""The protocol with systemd: sd_notify(3) messages and the descriptor store, through its socket and without a library.

Two descriptors are stored: the FUSE connection, and a memfd with the data needed to serve it. A supervisor that systemd restarts finds both
in LISTEN_FDS and resumes the mount, so its death is only a pause.

Crash safety: systemd keeps the descriptors.
"""

import contextlib
import os
import socket

FUSE_NAME = "ckptfs-fuse"
SAVED_NAME = "ckptfs-saved"
FIRST_FD = 3
SAVED_BYTES_MAX = 1 << 20


class Systemd:
    """The service manager. Without one, every method does nothing."""

    def __init__(self) -> None:
        """Read and remove NOTIFY_SOCKET and WATCHDOG_*, so that children do not notify systemd."""
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        period_us = os.environ.pop("WATCHDOG_USEC", "")
        ours = os.environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_interval_s: float | None = int(period_us) / 1e6 / 2 if period_us.isdigit() and int(period_us) and ours else None

    def notify(self, *lines: str, descriptor: int | None = None) -> bool:
        """Send lines such as READY=1, with a descriptor if given. Returns True if they were sent."""
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
        """Store the connection in systemd. FDPOLL=0: a FUSE descriptor reports an error when it ends."""
        memory = os.memfd_create("ckptfs-saved")
        try:
            os.write(memory, saved)
            self.notify("FDSTORE=1", f"FDNAME={SAVED_NAME}", "FDPOLL=0", descriptor=memory)
            self.notify("FDSTORE=1", f"FDNAME={FUSE_NAME}", "FDPOLL=0", descriptor=fuse_fd)
        finally:
            os.close(memory)

    def remove_descriptors(self) -> None:
        """Remove the stored descriptors after the connection has ended."""
        self.notify("FDSTOREREMOVE=1", f"FDNAME={FUSE_NAME}")
        self.notify("FDSTOREREMOVE=1", f"FDNAME={SAVED_NAME}")


def take_stored_descriptors() -> tuple[int, bytes] | None:
    """Return the (FUSE descriptor, saved bytes) that systemd kept, or None. Closes any other descriptor."""
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
