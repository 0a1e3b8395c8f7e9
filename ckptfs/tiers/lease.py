"""Owns the read lease: how the mover learns that nobody can be writing to a file of ours, and that nobody began to.

The kernel refuses the lease while anybody has the file open for writing, also through a mapping that outlived its handle. A later
opener for writing waits until we let go, which we do at the next block: `check` raises Busy then. SIGIO, which tells of that, must be
ignored by the process (`ignore_signal`); its default is death. On a filesystem without leases the file's times are compared instead.
If we die here: the kernel drops the lease with the descriptor.
"""

import contextlib
import errno
import fcntl
import os
import signal
from collections.abc import Callable, Iterator

from ckptfs.errors import Busy

NO_LEASE_ERRNOS = {errno.EINVAL, errno.EACCES, errno.EPERM, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


def ignore_lease_signal() -> None:
    """Let the kernel's word that a lease is wanted back pass; call it once, in the main thread."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)


@contextlib.contextmanager
def hold_read_lease(fd: int, *, insist: bool = True) -> Iterator[Callable[[], None]]:
    """Hold a read lease on `fd`, which must be open for reading only. Gives `check`, to be called before each block and at the end.

    Both raise Busy when somebody has the file open for writing or is about to. Not to `insist` takes a refusal for the filesystem's
    own: NFS refuses with EAGAIN whatever nobody has open, when its server gave no delegation.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as failure:
        if failure.errno == errno.EAGAIN and insist:
            raise Busy("somebody still has the file open for writing") from failure
        if failure.errno in {errno.EAGAIN, *NO_LEASE_ERRNOS}:
            yield _build_times_check(fd)
            return
        raise

    def check() -> None:
        if fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
            raise Busy("somebody opens the file for writing")

    try:
        yield check
    finally:
        with contextlib.suppress(OSError):  # The kernel took it away from whoever gave it up too late.
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _build_times_check(fd: int) -> Callable[[], None]:
    """The weaker check: the file's size and times stay what they were."""

    def state() -> tuple[int, int, int]:
        status = os.fstat(fd)
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    initial = state()

    def check() -> None:
        if state() != initial:
            raise Busy("somebody writes to the file")

    return check
