"""The messages between nodes: block messages, checks of gRPC messages, reasons of rejections.

Blocks travel as raw messages of gRPC streams. Each block is a *header* (number, bytes, encoding) and its bytes in pieces of
`limits.PEER_PIECE_BYTES`, the last one shorter. An END header ends the blocks. So both sides know the length of the next message; a block
is written only when it is complete and has its digest. The first message of a stream says what it is about.

Any other message is checked against the limits before memory or disk is touched; a wrong one raises Rejection.

Crash safety: blocks that were written are complete and correct; the others are missing.
"""

import errno
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, Protocol

import xxhash
import zstandard

from ckptfs import digest, limits
from ckptfs.catalog.remote_contents import RemoteState
from ckptfs.clique.peer_api import UNKNOWN_BLOCK, Offer
from ckptfs.errors import CkptfsError
from ckptfs.protocol import peer_pb2 as pb

PROTOCOL_VERSION = 3
"""The version of everything between nodes. Nodes of different versions refuse each other."""


class RejectReason(IntEnum):
    """The reason, as the errno that is sent."""

    MALFORMED = errno.EINVAL
    OUT_OF_ORDER = errno.EPROTO
    UNKNOWN = errno.ENOENT
    FULL = errno.ENOSPC
    BUSY = errno.EBUSY
    TOO_MANY = errno.EAGAIN
    STRANGER = errno.EACCES
    WRONG_DIGEST = errno.EILSEQ
    INCOMPLETE = errno.ENODATA
    ENDED = errno.ECANCELED
    STALLED = errno.ETIMEDOUT
    BROKEN = errno.EIO
    NO_METHOD = errno.ENOSYS
    VERSION = errno.EPROTONOSUPPORT


class Rejection(Exception):
    """A rejected request: the reason, and a sentence of numbers and message names for the peer."""

    def __init__(self, reason: RejectReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def build_rejection(failure: Exception) -> Rejection:
    """Return the rejection that tells the peer of a failure. It never contains a path."""
    if isinstance(failure, Rejection):
        return failure
    code = failure.errno if isinstance(failure, CkptfsError | OSError) else errno.EIO
    reason = RejectReason(code) if code in set(RejectReason) else RejectReason.BROKEN
    return Rejection(reason, str(failure) if isinstance(failure, CkptfsError) else reason.name.lower().replace("_", " "))


HEADER = struct.Struct("<QIB3x")
ID_MAX = 2**63 - 1
ZSTD_LEVEL = 1
SAMPLE_BYTES = 64 * limits.KIB
SAMPLE_RATIO_MAX = 0.8


class Encoding(IntEnum):
    """What follows a header."""

    RAW = 0
    ZSTD = 1
    END = 2


def encode_end(count: int) -> bytes:
    """Return the header after the last block."""
    return HEADER.pack(count, 0, Encoding.END)


def block_bytes(size: int, number: int) -> int:
    return min(limits.BLOCK_BYTES, size - number * limits.BLOCK_BYTES)


def encode_bitmap(numbers: Iterable[int], count: int) -> bytes:
    """Return a bit for each of `count` blocks, lowest first."""
    bits = bytearray(-(-count // 8))
    for number in numbers:
        bits[number >> 3] |= 1 << (number & 7)
    return bytes(bits)


def decode_bitmap(bits: bytes, count: int) -> list[int]:
    """Return the numbers below `count` whose bits are set. Raises Rejection for another length."""
    if len(bits) != -(-count // 8):
        raise Rejection(RejectReason.MALFORMED, f"a map of {count} blocks has {-(-count // 8)} bytes, not {len(bits)}")
    return [number for number in range(count) if bits[number >> 3] >> (number & 7) & 1]


class BlockSink(Protocol):
    """The target of arriving blocks. All three methods may raise Rejection."""

    @property
    def size(self) -> int: ...

    def claim_block(self, number: int) -> bytes:
        """Begin a block; return its digest. Raises Rejection if it was not asked for or arrives already."""

    def write_block(self, number: int, pieces: Sequence[bytes]) -> None:
        """Write a block whose digest was checked."""

    def release_block(self, number: int) -> None:
        """Give up a block that was claimed."""


class BlockReceiver:
    """One stream of blocks. The pieces of a block are written as they arrived, without a copy."""

    def __init__(self, sink: BlockSink) -> None:
        self._sink = sink
        self._pieces: list[bytes] = []
        self._missing_bytes = 0
        self._number: int | None = None
        self._digest = b""
        self._is_compressed = False
        self._running = xxhash.xxh3_128()
        self._length = 0
        self.block_count = 0
        self.wire_bytes = 0
        self.has_ended = False

    def accept_message(self, message: bytes) -> None:
        """Handle the next message. Raises Rejection."""
        due = HEADER.size if self._number is None else min(self._missing_bytes, limits.PEER_PIECE_BYTES)
        if len(message) != due:
            raise Rejection(RejectReason.OUT_OF_ORDER, f"a message of {due} bytes was expected, not one of {len(message)}")
        if self._number is None:
            self._handle_header(*HEADER.unpack(message))
            return
        self._pieces.append(message)
        self._missing_bytes -= due
        self.wire_bytes += due
        if not self._is_compressed:
            self._running.update(message)
        if not self._missing_bytes:
            self._finish_block()

    def close(self) -> None:
        """End the stream, however it went."""
        if self._number is not None:
            number, self._number = self._number, None
            self._sink.release_block(number)

    def _handle_header(self, number: int, wire_bytes: int, encoding: int) -> None:
        if self.has_ended:
            raise Rejection(RejectReason.OUT_OF_ORDER, "messages after the end")
        if encoding == Encoding.END:
            if number != self.block_count or wire_bytes:
                raise Rejection(RejectReason.OUT_OF_ORDER, f"the end names {number} blocks, {self.block_count} arrived")
            self.has_ended = True
        else:
            self._begin_block(number, wire_bytes, encoding)

    def _begin_block(self, number: int, wire_bytes: int, encoding: int) -> None:
        if number >= digest.count_blocks(self._sink.size) or encoding not in (Encoding.RAW, Encoding.ZSTD):
            raise Rejection(RejectReason.MALFORMED, f"there is no block {number} with encoding {encoding}")
        self._length = block_bytes(self._sink.size, number)
        self._is_compressed = encoding == Encoding.ZSTD
        if wire_bytes != self._length and not (self._is_compressed and 0 < wire_bytes < self._length):
            raise Rejection(RejectReason.MALFORMED, f"block {number} has {self._length} bytes, not {wire_bytes}")
        self._digest = self._sink.claim_block(number)
        self._number = number
        self._missing_bytes = wire_bytes
        self._running.reset()

    def _finish_block(self) -> None:
        assert self._number is not None
        number, pieces, self._pieces = self._number, self._pieces, []
        if self._is_compressed:
            pieces = [_decompress_block(b"".join(pieces), self._length)]
            self._running.update(pieces[0])
        if self._running.digest() != self._digest:
            raise Rejection(RejectReason.WRONG_DIGEST, f"block {number} has a wrong digest")
        self._sink.write_block(number, pieces)
        self._number = None
        self.block_count += 1


def _decompress_block(body: bytes, length: int) -> bytes:
    """Return the block in `body`. It is never longer than `length`, even if `body` says so."""
    try:
        if zstandard.frame_content_size(body) != length:
            raise Rejection(RejectReason.MALFORMED, "a compressed block announces another length")
        data = zstandard.ZstdDecompressor().decompress(body, max_output_size=length)
    except zstandard.ZstdError as failure:
        raise Rejection(RejectReason.MALFORMED, "a compressed block cannot be read") from failure
    if len(data) != length:
        raise Rejection(RejectReason.MALFORMED, "a compressed block has another length")
    return data


def is_compressible(block: bytes) -> bool:
    """Return whether zstd shrinks a sample of the block enough to pay on a slow link."""
    sample = block[len(block) // 2 :][:SAMPLE_BYTES]
    return len(zstandard.ZstdCompressor(ZSTD_LEVEL).compress(sample)) < SAMPLE_RATIO_MAX * len(sample)


class SourceChanged(Exception):
    """The file that is being sent became shorter."""


def encode_blocks(fd: int, size: int, numbers: Iterable[int], *, compress: bool) -> Iterator[bytes]:
    """Yield the messages of these blocks, without the end. A block that does not shrink is sent raw.

    Raises OSError, SourceChanged.
    """
    for number in numbers:
        start, length = number * limits.BLOCK_BYTES, block_bytes(size, number)
        compressed = _compress_block(_read_exactly(fd, length, start)) if compress else None
        if compressed is not None:
            yield HEADER.pack(number, len(compressed), Encoding.ZSTD)
            for offset in range(0, len(compressed), limits.PEER_PIECE_BYTES):
                yield compressed[offset : offset + limits.PEER_PIECE_BYTES]
            continue
        yield HEADER.pack(number, length, Encoding.RAW)
        for offset in range(0, length, limits.PEER_PIECE_BYTES):
            yield _read_exactly(fd, min(limits.PEER_PIECE_BYTES, length - offset), start + offset)


def _compress_block(block: bytes) -> bytes | None:
    """Return the compressed block. Returns None if it would not shrink enough."""
    if not is_compressible(block):
        return None
    compressed = zstandard.ZstdCompressor(ZSTD_LEVEL).compress(block)
    return compressed if len(compressed) < len(block) else None


def _read_exactly(fd: int, length: int, offset: int) -> bytes:
    """Return these bytes of a file in a tier. A regular file gives fewer only at its end."""
    data = os.pread(fd, length, offset)
    if len(data) != length:
        raise SourceChanged
    return data


def require(condition: bool, message: str) -> None:
    """Refuse as malformed unless `condition`."""
    if not condition:
        raise Rejection(RejectReason.MALFORMED, message)


def parse_content_id(number: int) -> int:
    require(0 < number <= ID_MAX, f"{number} is no content")
    return number


def parse_digest(value: bytes) -> bytes | None:
    """Return the digest, or None without one."""
    require(len(value) in (0, digest.BLOCK_DIGEST_BYTES), f"a digest has {digest.BLOCK_DIGEST_BYTES} bytes, not {len(value)}")
    return value or None


def build_fields(state: RemoteState) -> dict[str, Any]:
    """Return the fields of OfferRequest and Record for a state."""
    return {
        "content": state.content, "inode": state.inode, "generation": state.generation, "size": state.size, "digest": state.digest or b"",
        "blocks": state.blocks or b"",
    }  # fmt: skip


def parse_offer(request: pb.OfferRequest) -> Offer:
    """Return the offer of a peer. Raises Rejection unless its digest is that of its block digests."""
    parse_content_id(request.content)
    require(0 < request.inode <= ID_MAX, f"{request.inode} is no inode")
    require(request.generation <= limits.GENERATION_MAX, f"{request.generation} is no generation")
    require(request.size <= limits.PEER_BLOCKS_MAX * limits.BLOCK_BYTES, f"{request.size} bytes are more than peers hold of one content")
    count = digest.count_blocks(request.size)
    require(digest.has_all_digests(request.blocks, request.size), f"{request.size} bytes have {count} blocks, not as many digests")
    found = parse_digest(request.digest)
    if found is not None:
        require(digest.hash_content(request.blocks, request.size) == found, "the digest is not the one over the blocks' digests")
    if request.whole:
        require(found is not None and len(request.whole) == request.size, "a content that travels inside its offer is sealed and whole")
        require(request.size <= limits.PEER_INLINE_BYTES_MAX, f"{request.size} bytes are too many to travel inside an offer")
    return Offer(request.content, request.inode, request.generation, request.size, found, bytes(request.blocks))


def parse_offers(request: pb.OffersRequest) -> list[Offer]:
    """Return small contents, whole, each once. Raises Rejection unless their bytes have the digests."""
    require(
        0 < len(request.offers) <= limits.PEER_BATCH_MAX, f"{len(request.offers)} contents are not between 1 and {limits.PEER_BATCH_MAX}"
    )
    size = sum(len(one.whole) for one in request.offers)
    require(size <= limits.PEER_BATCH_BYTES_MAX, f"{size} bytes are too many to travel in one message")
    require(len({one.content for one in request.offers}) == len(request.offers), "a content is offered twice")
    for one in request.offers:
        require(bool(one.digest) and len(one.whole) == one.size, "what travels together is sealed and whole")
    found = [parse_offer(one) for one in request.offers]
    for one in request.offers:
        if digest.hash_block(one.whole) != one.blocks and one.size:
            raise Rejection(RejectReason.WRONG_DIGEST, "the bytes do not match the digest")
    return found


def are_valid_missing_blocks(offer: Offer, numbers: list[int]) -> bool:
    """Return whether a list of missing blocks is ascending, in range, and was offered."""
    count = digest.count_blocks(offer.size)
    return all(0 <= number < count and offer.get_block_digest(number) != UNKNOWN_BLOCK for number in numbers)


def parse_block_range(request: pb.ReadRequest, size: int) -> range:
    """Return the blocks that a Read asks for."""
    require(0 < request.count <= limits.PEER_RUN_BLOCKS_MAX, f"{request.count} blocks are not between 1 and {limits.PEER_RUN_BLOCKS_MAX}")
    require(request.first + request.count <= digest.count_blocks(size), f"there are only {digest.count_blocks(size)} blocks")
    return range(request.first, request.first + request.count)


def parse_seal_timeout_s(request: pb.SealRequest) -> float:
    """Return the time to wait at most, in seconds."""
    require(request.timeout_ms <= limits.PEER_SEAL_WAIT_S_MAX * 1000, f"waits are at most {limits.PEER_SEAL_WAIT_S_MAX:g} s")
    return request.timeout_ms / 1000


def parse_forgotten_contents(request: pb.ForgetRequest) -> list[int]:
    require(len(request.contents) <= limits.PEER_FORGET_MAX, f"more than {limits.PEER_FORGET_MAX} contents at once")
    return [parse_content_id(number) for number in request.contents]
