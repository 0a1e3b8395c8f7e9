"""The ways of the bytes of open handles, and their reasons, as `ckptfs status` shows them.

The mount process alone knows the reasons. `run_reports` writes the totals into the catalog, where the mover finds them.

Crash safety: a report of a dead mount process is replaced by the next one. Handles of the dead process keep their way; the reason of a
slower one is not known any more.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

import trio

from ckptfs import limits
from ckptfs.catalog import summary
from ckptfs.catalog.database import Database
from ckptfs.model import Tier


class Way(StrEnum):
    """The way of the bytes of a handle.

    PASSTHROUGH: by the kernel. PREPARED: the same, into memory that is charged to the daemon. BUFFERED: through the mount process.
    """

    PASSTHROUGH = "passthrough"
    PREPARED = "prepared"
    BUFFERED = "buffered"


class Reason(StrEnum):
    """Why a handle does not use passthrough into RAM. NONE: it does, or RAM would not be faster."""

    NONE = ""
    DATA_PATH = "the mount uses the buffered data path"
    LIMITED = "the program is below a memory limit"
    UNKNOWN = "the memory limit of the program is not known"
    FULL = "the tier may have too little room for the file"
    REFUSED = "the kernel refuses passthrough to this filesystem"
    FETCHED = "the file is still being fetched"
    SHARED = "another handle of the file needs it"
    HISTORY = "the file is in the history, and may be written under its other name"
    RESTARTED = "opened before the mount process was restarted"


@dataclass(frozen=True, slots=True)
class HandleWay:
    way: Way
    reason: Reason = Reason.NONE


def choose_way(tier: Tier | None, limit_reason: Reason, buffered_reason: Reason | None, *, is_prepared: bool) -> HandleWay:
    """Return the way of a handle. `buffered_reason`: None if the kernel moves its bytes."""
    if buffered_reason is not None:
        return HandleWay(Way.BUFFERED, buffered_reason)
    if is_prepared:
        return HandleWay(Way.PREPARED, limit_reason)
    return HandleWay(Way.PASSTHROUGH, Reason.NONE if tier is Tier.RAM else limit_reason)


def count_ways(handles: Iterable[tuple[HandleWay, Tier | None]]) -> list[dict[str, str | int]]:
    """Return the totals by way, tier and reason. A handle without a tier reads the PFS's own file."""
    counts = Counter((way.way, tier or Tier.PFS, way.reason) for way, tier in handles)
    return [{"way": way, "tier": tier, "reason": reason, "count": count} for (way, tier, reason), count in sorted(counts.items())]


async def run_reports(db: Database, list_handles: Callable[[], Iterable[tuple[HandleWay, Tier | None]]]) -> None:
    """Report the totals whenever they have changed. A task."""
    reported: object = None
    while True:
        found = count_ways(list_handles())
        if found != reported:
            summary.set_report(db, summary.HANDLES_REPORT, {"ways": found})
            reported = found
        await trio.sleep(limits.HANDLES_REPORT_S)
