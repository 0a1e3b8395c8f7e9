"""What a peer may do on this node: contents by id only, never a name or a path. Values and a Protocol, no effects of its own.

The peer server checks everything from the wire against `limits` before it calls the shelf, writes into the descriptor that `receive` gave
and compares the digest of every block that arrives; the shelf decides what is taken, lent and counted. All calls come from the server's
worker threads, several at once. Digests are those of `ckptfs.digest`: xxh3-128 of each block, joined, and one over all.
If we die here: a reception that never came to `received` is a file that nobody believes; the shelf finds it at the next start.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
