"""The events of troubles: what `ckptfs status` shows as a trouble, when it began and when it was over.

Crash safety: the next mover begins without troubles, and records those that are still there as new ones.
"""

import trio

from ckptfs.catalog import summary
from ckptfs.catalog.database import Database
from ckptfs.event_log import EventKind
from ckptfs_daemon.event_writer import events

POLL_S = 2.0


async def watch(db: Database) -> None:
    """Record troubles until cancelled. A task."""
    known: set[str] = set()
    while True:
        known = record_changes(db, known)
        await trio.sleep(POLL_S)


def record_changes(db: Database, known: set[str]) -> set[str]:
    """Record the troubles that began or ended since the last look; return those that are there."""
    found = {where: value for where, value, _ in summary.list_troubles(db)}
    for where in sorted(found.keys() - known):
        value = found[where]
        events.record(EventKind.TROUBLE, where=where, **{name: value.get(name) for name in ("what", "path", "remedy")})
    for where in sorted(known - found.keys()):
        events.record(EventKind.TROUBLE_OVER, where=where)
    return set(found)
