"""The first exchange on a FUSE connection: what the kernel offers (INIT) and what we take of it. Pure: bytes in, bytes out.

We answer INIT ourselves, because libfuse 3.14 knows neither passthrough nor sending again. Layouts and numbers are those of the
kernel's include/uapi/linux/fuse.h, protocol 7.40.
"""

import struct
from dataclasses import dataclass

from ckptfs import limits
from ckptfs.errors import CkptfsError
from ckptfs.model import DataPath

OPCODE_INIT = 26
MINOR = 40
"""The protocol we speak; a kernel of less is answered with its own number."""

ASYNC_READ = 1 << 0
ATOMIC_O_TRUNC = 1 << 3
BIG_WRITES = 1 << 5
DO_READDIRPLUS = 1 << 13
ASYNC_DIO = 1 << 15
WRITEBACK_CACHE = 1 << 16
PARALLEL_DIROPS = 1 << 18
MAX_PAGES = 1 << 22
HANDLE_KILLPRIV_V2 = 1 << 28
INIT_EXT = 1 << 30
DIRECT_IO_ALLOW_MMAP = 1 << 36
PASSTHROUGH = 1 << 37
HAS_RESEND = 1 << 39

COMMON = (
    ASYNC_READ
    | ATOMIC_O_TRUNC
    | BIG_WRITES
    | DO_READDIRPLUS
    | ASYNC_DIO
    | PARALLEL_DIROPS
    | MAX_PAGES
    | HANDLE_KILLPRIV_V2
    | INIT_EXT
    | DIRECT_IO_ALLOW_MMAP
    | HAS_RESEND
)

BACKGROUND_MAX = 128
CONGESTION = 96
STACK_DEPTH = 1
PAGE_BYTES = 4096

HEADER = struct.Struct("=IIQQIIIHH")
BODY = struct.Struct("=IIII")
FLAGS2_AT = HEADER.size + BODY.size
ANSWER_HEADER = struct.Struct("=IiQ")
ANSWER = struct.Struct("=IIIIHHIIHHII24x")


class BadHandshake(CkptfsError):
    """The kernel's first request is not what the protocol says."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What the kernel said in its INIT request."""

    unique: int
    major: int
    minor: int
    max_readahead: int
    flags: int


def parse(request: bytes) -> Offer:
    """Read an INIT request. Raises BadHandshake."""
    if len(request) < HEADER.size + BODY.size:
        raise BadHandshake(f"the kernel's first FUSE request has {len(request)} bytes, an INIT has at least {HEADER.size + BODY.size}")
    _length, opcode, unique, *_rest = HEADER.unpack_from(request)
    if opcode != OPCODE_INIT:
        raise BadHandshake(f"the kernel's first FUSE request has opcode {opcode}, not {OPCODE_INIT} (INIT)")
    major, minor, max_readahead, flags = BODY.unpack_from(request, HEADER.size)
    if flags & INIT_EXT and len(request) >= FLAGS2_AT + 4:
        flags |= struct.unpack_from("=I", request, FLAGS2_AT)[0] << 32
    if major != 7:
        raise BadHandshake(f"the kernel speaks FUSE protocol {major}.{minor}, ckptfs speaks 7.{MINOR}")
    return Offer(unique, major, minor, max_readahead, flags)


def wanted(offer: Offer, data_path: DataPath, *, alone: bool) -> int:
    """The flags we take of those offered. The kernel refuses PASSTHROUGH together with WRITEBACK_CACHE, so it is one or the other.

    With WRITEBACK_CACHE the kernel believes nobody else about a file's size and times: only where no other node changes them (`alone`).
    """
    cached = WRITEBACK_CACHE if alone else 0
    return (COMMON | (PASSTHROUGH if data_path is DataPath.PASSTHROUGH else cached)) & offer.flags


def answer(offer: Offer, flags: int) -> bytes:
    """The reply to INIT."""
    body = ANSWER.pack(
        7,
        min(offer.minor, MINOR),
        min(offer.max_readahead, limits.READ_AHEAD_KIB * limits.KIB),
        flags & 0xFFFFFFFF,
        BACKGROUND_MAX,
        CONGESTION,
        limits.WRITE_BYTES_MAX,
        1,
        limits.WRITE_BYTES_MAX // PAGE_BYTES,
        0,
        flags >> 32,
        STACK_DEPTH if flags & PASSTHROUGH else 0,
    )
    return ANSWER_HEADER.pack(ANSWER_HEADER.size + len(body), 0, offer.unique) + body
