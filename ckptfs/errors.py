"""Every error that ckptfs raises on purpose, each with the errno an application sees.

Translated once, at the edge: to an errno by the mount, to a status by the control server, to an exit code and a sentence
by the command. `remedy` says what a person can do; it may be empty.
"""

import errno
import os


class CkptfsError(Exception):
    """The base: `errno` is what a system call returns."""

    errno: int = errno.EIO

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class InvalidArgument(CkptfsError):
    """Bad input: names what was wrong and what is accepted (P11)."""

    errno = errno.EINVAL


class ConfigError(InvalidArgument):
    """A configuration key, value or option that cannot be used."""


class CatalogDamaged(CkptfsError):
    """The catalog cannot be read as what it should be; nothing was changed."""


class CatalogTooNew(CkptfsError):
    """The catalog was written by a newer ckptfs; nothing was changed."""


class ContentLost(CkptfsError):
    """No place holds this content any more. The file fails with EIO; it is never shown as empty."""


class DigestMismatch(CkptfsError):
    """A copy does not have the digest that its content was sealed with."""


class Busy(CkptfsError):
    """Somebody still uses what this act needs for itself; the act is tried again later."""

    errno = errno.EBUSY


class NoSpace(CkptfsError):
    """Every tier is full (P10)."""

    errno = errno.ENOSPC


class TimedOut(CkptfsError):
    """A bounded wait came to its end."""

    errno = errno.ETIMEDOUT


class TierUnavailable(CkptfsError):
    """A tier does not answer, or answers with an error. The act is retried with backoff."""


class StoreUnreachable(CkptfsError):
    """The store that the cluster shares does not answer, or takes no changes now. The act is tried again later."""


class StoreLost(StoreUnreachable):
    """The store that answers is not the one that this node knows: it has lost data, or was set back. It counts as not answering."""


class StoreRefused(CkptfsError):
    """The shared store will not do this, however often it is asked."""


class LeaseGone(StoreRefused):
    """The lease has run out or was revoked."""


class Compacted(StoreRefused):
    """The shared store no longer has the revision asked for: read again what is there now."""


def posix_error(code: int, message: str = "") -> OSError:
    """The OSError for `code`: how a POSIX refusal (ENOENT, EEXIST, ...) travels inside the catalog and the mount."""
    return OSError(code, message or os.strerror(code))
