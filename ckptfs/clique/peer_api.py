"""What this node may ask of its peers: values and a Protocol, so that the flows need no gRPC. All calls block; use worker threads.

Each call is bounded by progress, not by total time: a peer that moves nothing for `limits.PEER_STALL_S` has failed, a slow one has not.
Descriptors stay the caller's and are only used until the call has returned. Raises `PeerFailed` and its kinds.
If we die here: nothing is kept here but what was measured.

What a peer may do on this node: contents by id only, never a name or a path. Values and a Protocol, no effects of its own.

The peer server checks everything from the wire against `limits` before it calls the shelf, writes into the descriptor that `receive` gave
and compares the digest of every block that arrives; the shelf decides what is taken, lent and counted. All calls come from the server's
worker threads, several at once. Digests are those of `ckptfs.digest`: xxh3-128 of each block, joined, and one over all.
If we die here: a reception that never came to `received` is a file that nobody believes; the shelf finds it at the next start.
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptfs import limits
from ckptfs.digest import BLOCK_DIGEST_BYTES
from ckptfs.errors import CkptfsError

UNKNOWN_BLOCK = bytes(BLOCK_DIGEST_BYTES)
"""In an early offer: a block that may still change, and is not offered yet."""


class CopyNotFound(CkptfsError):
    """This node has no verified copy of that content (or not with that digest)."""

    errno = errno.ENOENT


class CopyUnavailable(CopyNotFound):
    """This node cannot lend that content now. But it is its own, and a copy that another node has of it may be the last one."""

    errno = errno.EBUSY


@dataclass(frozen=True, slots=True)
class Offer:
    """A content that a node would like another one to hold. `digest` is None while it is still being written (an *early* offer).

    `blocks` are the digests of all `size` bytes, 16 bytes for each 4 MiB begun; in an early offer a block that may still change is
    `UNKNOWN_BLOCK`. A later offer of the same content, early or not, begins where the earlier ones ended: equal blocks are not lacking.
    `sender`: the name of the node that offers, as it is known to be; who makes an offer leaves it empty.
    """

    content: int
    inode: int
    generation: int
    size: int
    digest: bytes | None
    blocks: bytes
    sender: str = ""

    @property
    def is_early(self) -> bool:
        return self.digest is None


@dataclass(frozen=True, slots=True)
class Reception:
    """An offer that was taken. `fd` is open for both ways, as long as the offer says and prepared with fallocate; it is the shelf's.

    Whatever blocks of the offer this node had, of an older generation or elsewhere, are in place already. `lacking` are the others'
    numbers, ascending; none of them is `UNKNOWN_BLOCK`. `fd` stays open until `received` or `abandon` has returned.
    """

    token: int
    fd: int
    missing_blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class OpenCopy:
    """A sealed, verified copy to read from. `fd` belongs to whoever borrowed it, who closes it; the file's removal does not disturb it."""

    content: int
    inode: int
    generation: int
    size: int
    digest: bytes
    blocks: bytes
    fd: int


class ContentHost(Protocol):
    """Whatever raises may raise `ckptfs.errors`: Refused, NoRoom, Busy, NotHere..., or OSError; the caller is told which."""

    def begin_reception(self, offer: Offer) -> Reception:
        """Prepare for the blocks of `offer`. Raises NoRoom when the peers' share is full, Refused, Busy when it is arriving already.

        An older generation of the content goes; a newer one, or the same with another digest, is refused.
        """

    def finish_reception(self, token: int) -> bool:
        """Every lacking block was written, and its digest was right as it arrived.

        Checks what else there is to check (the blocks that were in place, the digest over all) and makes the copy count: True.
        False: something is wrong, and was thrown away. An early reception is kept for the next offer: True, but it does not count.
        """

    def abort_reception(self, token: int, *, keep_blocks: bool = True) -> None:
        """The transfer ended early. Whole blocks may be kept for the next offer: their digests are checked again then. Not `keep`: no block
        has come, so that its room is given back at once unless it has some of an earlier offer.
        """

    def open_copy(self, content: int, digest: bytes | None) -> OpenCopy:
        """A copy to read from, the one with `digest` where that is given; raises NotHere."""

    def seal_and_open(self, content: int, timeout_s: float) -> OpenCopy | None:
        """Seal a content that is closed here, and lend it; None when it was not sealed in time. Raises NotHere."""

    def release_copies(self, contents: Sequence[int]) -> None:
        """The asking node no longer wants these held for it. What is this node's own is never touched."""

    def get_free_bytes(self) -> int:
        """How many more bytes this node would hold for its peers."""


class PeerFailed(CkptfsError):
    """A peer did not do what it was asked: it is gone, too slow, or broke off. Another one, or a later time, may be better."""

    errno = errno.EHOSTUNREACH


class PeerRefused(PeerFailed):
    """A peer answered no: `code` is the errno of its reason (ENOSPC, ENOENT, EBUSY, EINVAL, EACCES)."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class PeerCorrupt(PeerFailed):
    """A peer sent bytes that do not have the digest they should have; nothing of them was kept."""


class PeerAddress(Protocol):
    """What is needed of a node to reach it."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...


@dataclass(frozen=True, slots=True)
class SendResult:
    """How a content came to a peer. `verified`: its copy counts there (never for an early offer)."""

    blocks_missing: int
    bytes_moved: int
    is_verified: bool


@dataclass(frozen=True, slots=True)
class ContentManifest:
    """What a peer says about a content that it has sealed; `blocks` was checked against `digest`."""

    content: int
    inode: int
    generation: int
    size: int
    digest: bytes
    blocks: bytes


@dataclass(frozen=True, slots=True)
class PeerStats:
    """What was measured of a peer, exponentially averaged; None: not yet."""

    rtt_s: float | None
    bytes_per_s: float | None
    free_bytes: int | None
    clock_offset_s: float | None = None
    """How far its clock is before ours, as far as the round trip lets one say."""


OnBlock = Callable[[int], None]
"""Told in a worker thread: this block was written into the target and is right."""

UrgentBlocks = Callable[[], Sequence[int]]
"""Which blocks somebody waits for just now; asked often, by any thread."""


class PeerApi(Protocol):
    """The other nodes, as far as bytes are concerned."""

    def send(self, node: PeerAddress, offer: Offer, source_fd: int, *, wanted: Callable[[], bool] = lambda: True) -> SendResult:
        """Offer a content and send what the peer lacks of it. `wanted` is asked now and then; False ends the call with PeerFailed.

        A source that no longer has the offered digests (it is written again) makes the peer refuse: PeerLied.
        """

    def send_many(self, node: PeerAddress, offers: Sequence[tuple[Offer, int]]) -> list["SendResult | PeerFailed"]:
        """Small sealed contents in one message, each with a descriptor to read it from; what became of each, in order.

        At most `limits.PEER_BATCH_MAX`, together `limits.PEER_BATCH_BYTES_MAX`, each `limits.PEER_INLINE_BYTES_MAX`. Raises what ends all.
        """

    def fetch(
        self,
        sources: Sequence[PeerAddress],
        manifest: ContentManifest,
        blocks: Sequence[int],
        target_fd: int,
        on_block: OnBlock = lambda number: None,
        urgent_blocks: UrgentBlocks = tuple,
    ) -> int:
        """Write the blocks `wanted` of a content into `target_fd`, from several sources at once; how many bytes came. Those that are
        `asked` come before all others, then what follows them.

        Every block is compared with its digest before `on_block` hears of it. A source that stalls, lies or ends is left and its blocks
        are asked of the others; raises the last failure when none is left. `sources` in order of preference.
        """

    def get_manifest(
        self, node: PeerAddress, content: int, digest: bytes | None, *, timeout_s: float = limits.PEER_STALL_S
    ) -> ContentManifest:
        """Size, generation and blocks' digests of a content that the peer has; PeerRefused with ENOENT when it has none."""

    def request_seal(self, node: PeerAddress, content: int, timeout_s: float) -> ContentManifest | None:
        """Ask the node that wrote a content to seal it; None when it could not in time (it has writers)."""

    def release_copies(self, node: PeerAddress, contents: Sequence[int]) -> None:
        """These contents need not be held there any more."""

    def ping(self, node: PeerAddress) -> PeerStats:
        """Measure the round trip and the room."""

    def get_stats(self, node: PeerAddress) -> PeerStats:
        """What is known, without asking."""

    def rank(self, nodes: Sequence[PeerAddress]) -> list[PeerAddress]:
        """The fastest first; unknown ones before those that failed lately."""

    def close_except(self, names: Sequence[str]) -> None:
        """Connections to all other nodes are closed: they have left."""

    def close(self) -> None:
        """End every call and connection."""
