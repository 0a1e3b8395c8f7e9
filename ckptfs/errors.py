"""Errors that ckptfs raises, each with the errno that an application sees.

They are translated once, at the edge: to an errno by the mount, to a status by the control server, to an exit code and a sentence by the
commands. `remedy` says what the user can do; it may be empty.
"""

import errno
import os


class CkptfsError(Exception):
    """The base class. `errno` is the result of a system call."""

    errno: int = errno.EIO

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class InvalidArgument(CkptfsError):
    """Bad input: the message names what was wrong and what is accepted (P11)."""

    errno = errno.EINVAL


class ConfigError(InvalidArgument):
    """An option, key or value of a configuration that cannot be used."""


class CatalogDamaged(CkptfsError):
    """The catalog is not readable as a catalog; no file was changed."""


class CatalogTooNew(CkptfsError):
    """The catalog was written by a newer ckptfs; it was not changed."""


class CatalogUnavailable(CkptfsError):
    """The disk of the catalog fails. Nothing was changed."""


class ContentLost(CkptfsError):
    """No copy of a content is left. Reads fail with EIO; the file is never shown as empty."""


class DigestMismatch(CkptfsError):
    """A copy does not have the digest that its content was sealed with."""


class Busy(CkptfsError):
    """The file is in use; the operation is retried later."""

    errno = errno.EBUSY


class NoSpace(CkptfsError):
    """Every tier is full (P10), or the disk of the catalog."""

    errno = errno.ENOSPC


CATALOG_FAILURES = (NoSpace, CatalogUnavailable)
"""What a change of the catalog raises if its disk is full or fails."""


class TimedOut(CkptfsError):
    """A bounded wait has ended."""

    errno = errno.ETIMEDOUT


class TierUnavailable(CkptfsError):
    """A tier does not answer or fails. The operation is retried with backoff."""


class StoreUnreachable(CkptfsError):
    """The shared store does not answer or accepts no changes. The operation is retried later."""


class StoreFull(StoreUnreachable):
    """The store has no room for changes. It can be read."""

    def __init__(self, store: str) -> None:
        super().__init__(f"{store} is full", remedy="compact and defragment it, or raise its quota; then run `etcdctl alarm disarm`")


class StoreLost(StoreUnreachable):
    """The store lost its data or was set back. This counts as no answer."""


class StoreUnreadable(StoreUnreachable):
    """The store holds something under a key of the cluster that ckptfs never writes there."""


class StoreTooNew(StoreUnreachable):
    """A newer ckptfs wrote the values of the store. This node takes no part until it has that release."""


class StoreRefused(CkptfsError):
    """The shared store rejects an operation; retries do not help."""


class TransactionInvalid(StoreRefused):
    """The store can never apply this transaction: it is too large, or malformed."""


class TooManyOperations(TransactionInvalid):
    """The store is set up for smaller transactions than ckptfs needs."""

    def __init__(self, store: str) -> None:
        remedy = "restart etcd with --max-txn-ops=128, its default, or more"
        super().__init__(f"{store} permits too few operations in a transaction", remedy=remedy)


class LeaseGone(StoreRefused):
    """The lease expired or was revoked."""


class Compacted(StoreRefused):
    """The store no longer has the requested revision: read again at the newest one."""


_CONNECTION_FAULTS = (
    "connection refused", "connection reset", "no route to host", "network is unreachable", "host is unreachable", "connection timed out",
    "broken pipe", "name or service not known", "temporary failure in name resolution",
)  # fmt: skip


def describe_connection_fault(details: str) -> str:
    """Return what broke a connection, from gRPC's details, without gRPC's own words."""
    text = details.lower()
    for words in _CONNECTION_FAULTS:
        if words in text:
            return words
    if "deadline" in text or "timeout" in text:
        return "no answer in time"
    if any(words in text for words in ("stream removed", "socket closed", "goaway", "connection closed", "rst_stream")):
        return "the connection broke off"
    if "failed to connect" in text or not text:
        return "it cannot be reached"
    return details


def posix_error(code: int, message: str = "") -> OSError:
    """Return the OSError for `code`, the form of POSIX errors inside the catalog and the mount."""
    return OSError(code, message or os.strerror(code))
