"""The interfaces between nodes: `PeerApi` for the caller, `ContentHost` for the node that is called.

Values and Protocols only, so that flows need no gRPC. Peers name contents by id, never by path. Calls block; use worker threads. A call is
bounded by progress, not by total time: a peer that moves nothing for `limits.PEER_STALL_S` has failed, a slow one has not. Descriptors
belong to the caller and are used only until the call returns.

The peer server checks all input against `limits` before it calls the host. It writes into the descriptor of `begin_reception` and verifies
the digest of each block that arrives; the host decides which contents are accepted, opened and counted. Its methods are called from several
threads of the server. Digests are those of `ckptfs.digest`.

Crash safety: a reception that did not reach `finish_reception` is a file that does not count; the next start finds it.
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ckptfs import limits
from ckptfs.catalog.remote_contents import RemoteState
from ckptfs.digest import BLOCK_DIGEST_BYTES
from ckptfs.errors import CkptfsError

UNKNOWN_BLOCK = bytes(BLOCK_DIGEST_BYTES)
"""In an early offer: a block that may still change and is not offered."""


class CopyNotFound(CkptfsError):
    """This node has no verified copy of that content, or not with that digest."""

    errno = errno.ENOENT


class CopyUnavailable(CopyNotFound):
    """This node cannot open its own content now. A copy on another node may be the last one."""

    errno = errno.EBUSY


@dataclass(frozen=True, slots=True)
class Offer(RemoteState):
    """A content that one node asks another to hold. An *early* offer is of one that is still written.

    `digest` is None in an early offer, and a block that may still change is `UNKNOWN_BLOCK`. A later offer continues the earlier ones.
    `sender`: its authenticated node.
    """

    blocks: bytes
    sender: str = ""

    @property
    def is_early(self) -> bool:
        return self.digest is None


@dataclass(frozen=True, slots=True)
class Reception:
    """An accepted offer. `fd` is the host's until the reception ends; it has its final size, allocated.

    `missing_blocks`: the blocks that were not in place already, ascending, without `UNKNOWN_BLOCK`.
    """

    token: int
    fd: int
    missing_blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class ContentManifest(RemoteState):
    """A peer's description of a sealed content; `blocks` was verified against `digest`."""

    digest: bytes
    blocks: bytes


@dataclass(frozen=True, slots=True)
class OpenCopy(ContentManifest):
    """A sealed, verified copy to read. The caller closes `fd`; the removal of the file does not affect it."""

    fd: int = field(kw_only=True)


class ContentHost(Protocol):
    """Contents of this node for its peers. Errors of `ckptfs.errors` and OSError are reported to the peer."""

    def begin_reception(self, offer: Offer) -> Reception:
        """Prepare for the blocks of `offer`. Raises NoSpace, Busy if the content is arriving already.

        An older generation than the known one, and another digest of the same one, are refused.
        """

    def finish_reception(self, token: int) -> bool:
        """Verify the content after all missing blocks arrived; make the copy count.

        False: what is wrong was dropped. An early reception is kept for the next offer: True, but it does not count.
        """

    def abort_reception(self, token: int, *, keep_blocks: bool = True) -> None:
        """End a transfer early. Complete blocks may be kept for the next offer, which verifies them again.

        `keep_blocks=False`: no block arrived, so the space is freed unless an earlier offer left blocks.
        """

    def open_copy(self, content: int, digest: bytes | None) -> OpenCopy:
        """Open a copy, the one with `digest` if given. Raises CopyNotFound."""

    def seal_and_open(self, content: int, timeout_s: float) -> OpenCopy | None:
        """Seal a closed content and open it; None if that took too long. Raises CopyNotFound."""

    def release_copies(self, contents: Sequence[int]) -> None:
        """Note that a peer no longer needs these copies. Contents of this node are not affected."""


class PeerFailed(CkptfsError):
    """A peer is down, too slow, or broke off. Another peer, or a later try, may succeed."""

    errno = errno.EHOSTUNREACH


class PeerRefused(PeerFailed):
    """A peer refused a request: `code` is the errno (ENOSPC, ENOENT, EBUSY, EINVAL)."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class PeerBusy(PeerRefused):
    """A peer serves as many others as it can just now: ask again soon."""


class PeerCorrupt(PeerFailed):
    """A peer sent bytes with another digest than expected; none were kept."""


class PeerAddress(Protocol):
    """The name and address of a node."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...


@dataclass(frozen=True, slots=True)
class SendResult:
    """The result of a send. `is_verified`: the copy counts there (never for an early offer)."""

    blocks_missing: int
    bytes_moved: int
    is_verified: bool


@dataclass(frozen=True, slots=True)
class PingResult:
    """The answer to a ping. `clock_offset_s`: how far its clock is ahead of ours, within the round trip."""

    rtt_s: float
    clock_offset_s: float


OnBlock = Callable[[int], None]
"""Called in a worker thread after a block is written to the target and verified."""

UrgentBlocks = Callable[[], Sequence[int]]
"""Returns the blocks that readers wait for now; called often, from any thread."""


class PeerApi(Protocol):
    """The other nodes. Methods raise PeerFailed and its subclasses."""

    def send(self, node: PeerAddress, offer: Offer, source_fd: int, *, is_wanted: Callable[[], bool] = lambda: True) -> SendResult:
        """Offer a content and send the blocks that the peer lacks.

        `is_wanted` is polled; False ends the call with PeerFailed. If the source has changed since the offer, the peer rejects it:
        PeerCorrupt.
        """

    def send_many(self, node: PeerAddress, offers: Sequence[tuple[Offer, int]]) -> list["SendResult | PeerFailed"]:
        """Send small sealed contents in one message, each from a descriptor; return their results in order.

        At most `limits.PEER_BATCH_MAX` contents of `limits.PEER_INLINE_BYTES_MAX`, together `limits.PEER_BATCH_BYTES_MAX`. Raises
        PeerFailed if all failed.
        """

    def fetch(
        self,
        sources: Sequence[PeerAddress],
        manifest: ContentManifest,
        blocks: Sequence[int],
        target_fd: int,
        on_block: OnBlock = lambda number: None,
        urgent_blocks: UrgentBlocks = tuple,
        *,
        can_wait: bool = False,
    ) -> int:
        """Write `blocks` of a content into `target_fd`, from several sources. Return the number of bytes.

        `sources` are in order of preference. `urgent_blocks`, and those that follow them, come first. Each block is verified before
        `on_block` is called. If a source stalls, fails or sends wrong data, the others take over its blocks. If none is left, raises
        PeerBusy if one was busy, else the last failure. `can_wait`: see `get_manifest`.
        """

    def get_manifest(
        self, node: PeerAddress, content: int, digest: bytes | None, *, timeout_s: float = limits.PEER_STALL_S, can_wait: bool = False
    ) -> ContentManifest:
        """Return the manifest of a content of the peer. Raises PeerRefused with ENOENT if it has none.

        `can_wait`: this node will fetch all of it soon, and can wait for its turn. Raises PeerBusy if enough other nodes fetch it.
        """

    def request_seal(self, node: PeerAddress, content: int, timeout_s: float) -> ContentManifest | None:
        """Ask the writer of a content to seal it. Return None if it could not in time (it has writers)."""

    def release_copies(self, node: PeerAddress, contents: Sequence[int]) -> None:
        """Tell the peer that it need not hold these contents any more."""

    def ping(self, node: PeerAddress) -> PingResult:
        """Measure the round trip, and how far its clock is ahead."""

    def rank(self, nodes: Sequence[PeerAddress]) -> list[PeerAddress]:
        """Sort nodes by speed, fastest first; unknown ones precede those that failed lately."""

    def close_except(self, names: Sequence[str]) -> None:
        """Close connections to all other nodes: they have left the cluster."""

    def close(self) -> None:
        """End all calls and connections."""
