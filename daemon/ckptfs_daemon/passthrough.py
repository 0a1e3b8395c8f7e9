"""Owns the kernel's table of backing files: a descriptor is registered for an id, which the OPEN reply then carries.

Ids belong to the FUSE connection, not to this process: they outlive us, and the catalog's handles remember them.
If we die here: an id that no handle remembers stays until the connection ends; it costs one open file.
"""

import fcntl
import struct

BACKING_OPEN = 0x4010E501  # _IOW(229, 1, struct {s32 fd; u32 flags; u64 padding})
BACKING_CLOSE = 0x4004E502  # _IOW(229, 2, u32)


class Passthrough:
    """Registers and releases backing files on one FUSE connection."""

    def __init__(self, fuse_fd: int) -> None:
        self._fuse_fd = fuse_fd

    def register(self, fd: int) -> int:
        """The backing id (greater than 0) for the open file `fd`, which may be closed afterwards.

        Raises OSError: EPERM without CAP_SYS_ADMIN, ELOOP when the file lies on a stacked filesystem such as overlayfs,
        EOPNOTSUPP or ENOTTY when the kernel has no passthrough.
        """
        # A bytearray that may be changed: only then does Python hand back the ioctl's own result, the id.
        backing: int = fcntl.ioctl(self._fuse_fd, BACKING_OPEN, bytearray(struct.pack("=iIQ", fd, 0, 0)), True)
        return backing

    def release(self, backing: int) -> None:
        """Forget an id; open files that use it go on. Raises OSError (ENOENT) when the kernel does not know it."""
        fcntl.ioctl(self._fuse_fd, BACKING_CLOSE, struct.pack("=I", backing))
