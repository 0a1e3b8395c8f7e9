"""The kernel's FUSE protocol without libfuse: the INIT exchange, and the table of backing files.

ckptfs answers INIT itself, because libfuse 3.14 does not know passthrough. Everything but the protocol version is negotiated: what the
kernel does not offer is not used. Layouts and numbers are those of the kernel's
include/uapi/linux/fuse.h, protocol 7.40. Parsing and building are pure: bytes in, bytes out.

A backing file is a descriptor registered under an id, which the OPEN reply carries. Ids belong to the FUSE connection, not to the
process: they outlive the mount process, and the catalog's handles record them.

Crash safety: an id that no handle records stays until the connection ends; it costs one open file.
"""

import fcntl
import struct
from dataclasses import dataclass
from enum import IntFlag

from ckptfs import limits
from ckptfs.errors import CkptfsError, InvalidArgument
from ckptfs.model import DataPath
from ckptfs.procfs import FuseTimeouts

OPCODE_INIT = 26

PROTOCOL_MINOR = 40
"""The protocol version of ckptfs. An older kernel is answered with its own version."""

PROTOCOL_MINOR_MIN = 28
"""Linux 4.20. From then on the kernel tells whether it still waits for a reply, and numbers its requests evenly."""


class Feature(IntFlag):
    """The flags of INIT. A test can hide them from ckptfs by their names (CKPTFS_KERNEL_WITHOUT)."""

    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    ASYNC_DIO = 1 << 15
    WRITEBACK_CACHE = 1 << 16
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22
    KILLPRIV_V2 = 1 << 28
    INIT_EXT = 1 << 30
    DIRECT_IO_ALLOW_MMAP = 1 << 36
    PASSTHROUGH = 1 << 37
    RESEND = 1 << 39
    REQUEST_TIMEOUT = 1 << 42


READDIRPLUS = 1 << 13
"""All supported kernels offer it, and pyfuse3 has no other way to list a directory. So a test cannot hide it."""

COMMON = READDIRPLUS | int(
    Feature.ASYNC_READ | Feature.ATOMIC_O_TRUNC | Feature.BIG_WRITES | Feature.ASYNC_DIO | Feature.PARALLEL_DIROPS
    | Feature.MAX_PAGES | Feature.KILLPRIV_V2 | Feature.INIT_EXT | Feature.DIRECT_IO_ALLOW_MMAP
)  # fmt: skip
BACKGROUND_MAX = 128
CONGESTION = 96
STACK_DEPTH = 1
REQUEST_TIMEOUT_S = 0xFFFF
"""The longest time that a server may ask for: an application may wait for a PFS that hangs, and must not lose its mount for that."""
PAGE_BYTES = 4096
REQUEST_HEADER = struct.Struct("=IIQQIIIHH")
INIT_REQUEST = struct.Struct("=IIII")
INIT_FLAGS2_OFFSET = REQUEST_HEADER.size + INIT_REQUEST.size
REPLY_HEADER = struct.Struct("=IiQ")
INIT_REPLY = struct.Struct("=IIIIHHIIHHIIH22x")
BACKING_OPEN = 0x4010E501  # _IOW(229, 1, struct {s32 fd; u32 flags; u64 padding})
BACKING_CLOSE = 0x4004E502  # _IOW(229, 2, u32)


class BadHandshake(CkptfsError):
    """The kernel's first request does not follow the protocol."""


@dataclass(frozen=True, slots=True)
class KernelInit:
    """The kernel's INIT request."""

    unique: int
    major: int
    minor: int
    max_readahead: int
    flags: int


def parse_init(request: bytes) -> KernelInit:
    if len(request) < REQUEST_HEADER.size + INIT_REQUEST.size:
        raise BadHandshake(
            f"the kernel's first FUSE request has {len(request)} bytes, an INIT has at least {REQUEST_HEADER.size + INIT_REQUEST.size}"
        )
    _length, opcode, unique, *_rest = REQUEST_HEADER.unpack_from(request)
    if opcode != OPCODE_INIT:
        raise BadHandshake(f"the kernel's first FUSE request has opcode {opcode}, not {OPCODE_INIT} (INIT)")
    major, minor, max_readahead, flags = INIT_REQUEST.unpack_from(request, REQUEST_HEADER.size)
    if flags & Feature.INIT_EXT and len(request) >= INIT_FLAGS2_OFFSET + 4:
        flags |= struct.unpack_from("=I", request, INIT_FLAGS2_OFFSET)[0] << 32
    if major != 7:
        raise BadHandshake(f"the kernel speaks FUSE protocol {major}.{minor}, ckptfs speaks 7.{PROTOCOL_MINOR}")
    if minor < PROTOCOL_MINOR_MIN:
        words = f"the kernel speaks FUSE protocol 7.{minor}, ckptfs needs 7.{PROTOCOL_MINOR_MIN} or later"
        raise BadHandshake(words, remedy="use Linux 4.20 or later, or a distribution's kernel with that FUSE")
    return KernelInit(unique, major, minor, max_readahead, flags)


def parse_hidden_features(names: str) -> int:
    """Return the flags of the features in CKPTFS_KERNEL_WITHOUT. Raises InvalidArgument."""
    hidden = 0
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name.upper() not in Feature.__members__:
            known = ", ".join(Feature.__members__).lower()
            raise InvalidArgument(f"CKPTFS_KERNEL_WITHOUT={names}: no feature is called {name}", remedy=f"accepted: {known}")
        hidden |= int(Feature[name.upper()])
    # A kernel without INIT_EXT has no second word of flags.
    return hidden | ~0xFFFFFFFF if hidden & Feature.INIT_EXT else hidden


def choose_init_flags(init: KernelInit, data_path: DataPath, *, is_single_node: bool, has_default_timeout: bool = False) -> int:
    """Return the flags to accept of those offered. PASSTHROUGH and WRITEBACK_CACHE exclude one another.

    With WRITEBACK_CACHE the kernel trusts only itself about sizes and times of files. It is used only if no other node changes them
    (`is_single_node`). Beside passthrough, a file that is not passed through can be mapped only with DIRECT_IO_ALLOW_MMAP. A timeout is
    asked for only in place of a shorter default.
    """
    cached = Feature.WRITEBACK_CACHE if is_single_node else 0
    timeout = Feature.REQUEST_TIMEOUT if has_default_timeout else 0
    passed = Feature.PASSTHROUGH if init.flags & Feature.DIRECT_IO_ALLOW_MMAP else 0
    return (COMMON | timeout | (passed if data_path is DataPath.PASSTHROUGH else cached)) & init.flags


def get_request_timeout_s(flags: int, timeouts: FuseTimeouts) -> int:
    """Return after how many seconds without an answer the kernel ends such a connection; 0: never."""
    asked_s = REQUEST_TIMEOUT_S if flags & Feature.REQUEST_TIMEOUT else timeouts.default_s
    return min(asked_s or timeouts.max_s, timeouts.max_s or asked_s)


def build_init_reply(init: KernelInit, flags: int) -> bytes:
    body = INIT_REPLY.pack(
        7,
        min(init.minor, PROTOCOL_MINOR),
        min(init.max_readahead, limits.READ_AHEAD_KIB * limits.KIB),
        flags & 0xFFFFFFFF,
        BACKGROUND_MAX,
        CONGESTION,
        limits.WRITE_BYTES_MAX,
        1,
        limits.WRITE_BYTES_MAX // PAGE_BYTES,
        0,
        flags >> 32,
        STACK_DEPTH if flags & Feature.PASSTHROUGH else 0,
        REQUEST_TIMEOUT_S if flags & Feature.REQUEST_TIMEOUT else 0,
    )
    return REPLY_HEADER.pack(REPLY_HEADER.size + len(body), 0, init.unique) + body


class Passthrough:
    """The backing files of one FUSE connection."""

    def __init__(self, fuse_fd: int) -> None:
        self._fuse_fd = fuse_fd

    def register(self, fd: int) -> int:
        """Register the open file `fd`, which may be closed afterwards. Returns its backing id, greater than 0.

        Raises OSError: EPERM without CAP_SYS_ADMIN, ELOOP if the file is on a stacked filesystem such as overlayfs, EOPNOTSUPP or ENOTTY
        if the kernel has no passthrough.
        """
        # Only with a mutable buffer does fcntl.ioctl return the result of the ioctl, which is the id.
        backing: int = fcntl.ioctl(self._fuse_fd, BACKING_OPEN, bytearray(struct.pack("=iIQ", fd, 0, 0)), True)
        return backing

    def release(self, backing: int) -> None:
        """Release an id; open files that use it go on. Raises OSError (ENOENT) if the kernel does not know it."""
        fcntl.ioctl(self._fuse_fd, BACKING_CLOSE, struct.pack("=I", backing))
