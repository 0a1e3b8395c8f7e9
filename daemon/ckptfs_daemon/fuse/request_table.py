"""The table of requests in flight: shared memory that the supervisor holds and the mount process maps.

The mount process reads each request of the kernel straight into a slot of the table, payload of writes included. So a request that the
kernel has handed over lies in memory that outlives the process, and the next process goes on from there. No kernel feature is needed for
this: `FUSE_HAS_RESEND` (Linux 6.9) would have the kernel send such requests again, and adds nothing to it.

The supervisor makes the table and never looks inside. shim.c fills it. Its first bytes are not requests: they are what a supervisor that
systemd restarts must know of the connection. Then come small slots, then large ones, of `limits.REQUEST_*` each.

Invariants:
- A slot holds a request if its first word, the length in the request's header, is not 0. The kernel writes it.
- Every request to which the kernel still waits for a reply is in a slot. Whether it waits is asked of the kernel, never remembered: a
  slot is reused once its request has been answered, so no crash can leave a slot that says the wrong thing.
"""

import os

from ckptfs import limits

SAVED_BYTES_MAX = 64 * limits.KIB
SMALL_OFFSET = SAVED_BYTES_MAX
LARGE_OFFSET = SMALL_OFFSET + limits.REQUEST_SMALL_SLOTS * limits.REQUEST_SMALL_BYTES
TABLE_BYTES = LARGE_OFFSET + limits.REQUEST_LARGE_SLOTS * limits.REQUEST_LARGE_BYTES


def create(saved: bytes) -> int:
    """Return the descriptor of an empty table, which grows in use. `saved`: what `read_saved` returns."""
    if len(saved) > SAVED_BYTES_MAX:
        raise ValueError(f"{len(saved)} bytes to save, and there is room for {SAVED_BYTES_MAX}")
    fd = os.memfd_create("ckptfs-requests")
    os.truncate(fd, TABLE_BYTES)
    os.pwrite(fd, saved, 0)
    return fd


def read_saved(fd: int) -> bytes:
    """Return what `create` saved. Raises ValueError if `fd` is no table of this version."""
    found = os.fstat(fd).st_size
    if found != TABLE_BYTES:
        raise ValueError(f"a table of requests has {TABLE_BYTES} bytes, this one {found}")
    return os.pread(fd, SAVED_BYTES_MAX, 0).rstrip(b"\0")
