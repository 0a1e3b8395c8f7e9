"""Keys of the store whose values cannot be read: logged once, and listed in the catalog.

The process that meets such a key notes it in memory, since readers of the store hold no transaction of the catalog. Mount and mover bring
their notes to the catalog in their own time. `ckptfs.flow.check_values` looks which of the keys still hold what was found. The catalog
lists no more keys than one read of the store takes.

Crash safety: what was not brought to the catalog is noted again when the next process reads the key.
"""

import collections
import functools
import logging
from typing import NamedTuple

from ckptfs import limits
from ckptfs.catalog import summary
from ckptfs.catalog.database import Database

log = logging.getLogger(__name__)

_REPORT_PREFIX = "unreadable:"


class UnreadableKey(NamedTuple):
    """A key, the revision at which its value was found (0: the key itself is none), and what is wrong."""

    key: bytes
    revision: int
    fault: str


_found: collections.deque[UnreadableKey] = collections.deque(maxlen=limits.ETCD_OPERATIONS_MAX)


@functools.lru_cache(1024)
def log_unreadable(key: bytes, revision: int, fault: str) -> None:
    """Log and note once what is wrong with a value of the store."""
    log.error("etcd key %a: not readable: %s; the name or inode answers EIO (%s)", key, fault, describe_remedy(revision))
    _found.append(UnreadableKey(key, revision, fault))


def describe_remedy(revision: int) -> str:
    """Return what a person can do about a value of this revision."""
    return f"put back the value that it had before revision {revision}, or delete the key" if revision else "delete the key"


def record_found(db: Database) -> None:
    """Bring to the catalog what this process has noted."""
    count = len(summary.list_reports(db, _REPORT_PREFIX)) if _found else 0
    while _found:
        one = _found.popleft()
        if count < limits.ETCD_OPERATIONS_MAX:
            summary.set_report(db, _REPORT_PREFIX + one.key.hex(), {"revision": one.revision, "fault": one.fault})
            count += 1


def list_recorded(db: Database) -> list[UnreadableKey]:
    """Return the keys that the catalog lists, in their order."""
    found = []
    for name, _, _ in summary.list_reports(db, _REPORT_PREFIX):
        found.append(UnreadableKey(bytes.fromhex(name.removeprefix(_REPORT_PREFIX)), **summary.get_report(db, name)))
    return found


def forget(db: Database, key: bytes) -> None:
    """Remove a key from the list: it does not hold any more what was found."""
    summary.set_report(db, _REPORT_PREFIX + key.hex(), None)
