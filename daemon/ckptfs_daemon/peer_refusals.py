"""Why a peer's request is refused, in one word for every transport, and how often that happened, by peer and reason (for status).

If we die here: the counts begin anew.
"""

import errno
import logging
import threading
from collections import Counter
from enum import IntEnum

from ckptfs import limits
from ckptfs.errors import CkptfsError

log = logging.getLogger(__name__)

OTHERS = "others"


class RejectReason(IntEnum):
    """The reason, as the errno that travels."""

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


class Rejection(Exception):
    """What was asked is not done; `why` and a sentence for the other side. Names nothing but numbers."""

    def __init__(self, reason: RejectReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def build_rejection(failure: Exception) -> Rejection:
    """What the other side is told of a failure of the shelf or the disk: never a path."""
    if isinstance(failure, Rejection):
        return failure
    code = failure.errno if isinstance(failure, CkptfsError | OSError) else errno.EIO
    reason = RejectReason(code) if code in set(RejectReason) else RejectReason.BROKEN
    return Rejection(reason, str(failure) if isinstance(failure, CkptfsError) else reason.name.lower().replace("_", " "))


class PeerRejections:
    """Counts what was refused. Bounded: peers beyond `limits.PEER_COUNTED_MAX` are counted together."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}
        self._lock = threading.Lock()

    def record(self, peer: str, rejection: Rejection) -> None:
        """One more."""
        log.debug("refused to %s: %s, %s", peer, rejection.reason.name.lower(), rejection)
        with self._lock:
            name = peer if peer in self._counts or len(self._counts) < limits.PEER_COUNTED_MAX else OTHERS
            self._counts.setdefault(name, Counter())[rejection.reason.name.lower()] += 1

    def get_counts(self) -> dict[str, dict[str, int]]:
        """{peer: {reason: count}}; a snapshot."""
        with self._lock:
            return {peer: dict(counts) for peer, counts in self._counts.items()}
