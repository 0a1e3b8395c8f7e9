"""What this node may ask of its peers: values and a Protocol, so that the flows need no gRPC. All calls block; use worker threads.

Each call is bounded by progress, not by total time: a peer that moves nothing for `limits.PEER_STALL_S` has failed, a slow one has not.
Descriptors stay the caller's and are only used until the call has returned. Raises `PeerFailed` and its kinds.
If we die here: nothing is kept here but what was measured.
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptfs import limits
from ckptfs.clique.shelf import Offer
from ckptfs.errors import CkptfsError


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

        At most `limits.PEER_MANY_MAX`, together `limits.PEER_MANY_BYTES_MAX`, each `limits.PEER_WHOLE_BYTES_MAX`. Raises what ends all.
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
