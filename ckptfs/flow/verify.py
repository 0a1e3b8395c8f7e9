"""The verify step: checks of all local copies against their seals, on demand and in the background.

Takes: a sealed content with copies in any tier; quarantined copies, wherever they were found bad.
Leaves: good copies with a new time of verification. Bad copies are quarantined, and made again from the nearest good copy: another tier,
another node, the PFS.
If we die here: a quarantined copy never counts, made again or not. The next mover goes on with the copy that was verified longest ago.

`Scrub` is the least urgent work of the mover. Before each block it waits as its bandwidth asks, and while files are being sealed, copied,
fetched or written back, or the machine is short of memory. That wait is bounded: a PFS that is away for days delays it and does not end it.
"""

import logging
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from ckptfs import disk, limits, procfs
from ckptfs.catalog import contents, mover_requests, peer_copies, pfs_state, summary
from ckptfs.catalog.copies import has_copy, list_bad_copies, list_copies, list_unverified, set_copy_state
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get_shown_path
from ckptfs.errors import Busy, CkptfsError, DigestMismatch
from ckptfs.lifecycle import is_on_pfs
from ckptfs.model import LOCAL_TIERS, Content, ContentState, CopyState, Notifier, Tier
from ckptfs.tiers import local_copies, transfer
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)

transfer.declare_labels("verify")
disk.declare_labels("verify:quarantined", "verify:repaired")

INTERVAL_S = 86_400.0
BYTES_PER_S = 256 * limits.MIB
"""Every copy in RAM and on NVMe is read once in this time, at no more than so many bytes per second."""
BATCH_CONTENTS = 256
PATIENCE_S = 1.0
"""How long other work goes first before each block."""
PAUSE_S = 0.1
POLL_S = 60.0
RETRY_S = 3600.0
"""The time until a content that is bad or busy is verified again."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result for one copy: its problem, and the source from which it was repaired; empty without one."""

    tier: Tier
    problem: str = ""
    source: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem

    @property
    def repaired(self) -> bool:
        return bool(self.source)


def verify(
    db: Database, tiers: Tiers, number: int, before_block: Callable[[], None] = lambda: None, first: Container[Tier] = tuple(Tier)
) -> list[CheckResult]:
    """Compare the local copies of a sealed content with its seal; rebuild bad ones. Raises Busy, OSError.

    Copies in other tiers than `first` are read only if no copy there is good.
    """
    content = contents.get_content(db, number)
    if content is None or content.state not in {ContentState.SEALED, ContentState.LOST}:
        return []
    held = [copy.tier for copy in list_copies(db, number) if copy.state is not CopyState.FILLING and copy.tier in tiers]
    found = [CheckResult(tier, _find_problem(db, tiers, content, tier, before_block)) for tier in held if tier in first]
    if found and not any(one.ok for one in found):
        found += [CheckResult(tier, _find_problem(db, tiers, content, tier, before_block)) for tier in held if tier not in first]
    _record(db, content, found)
    disk.reach("verify:quarantined")
    good = [checked.tier for checked in found if checked.ok]
    content = contents.get_content(db, number) or content
    return [checked if checked.ok or not good else _rebuild_copy(db, tiers, content, good[0], checked) for checked in found]


def _find_problem(db: Database, tiers: Tiers, content: Content, tier: Tier, before_block: Callable[[], None]) -> str:
    """Return what is wrong with a copy, or "". Raises Busy if it is written or dropped meanwhile."""

    def check() -> None:
        before_block()
        contents.require_unchanged(db, content)
        if not has_copy(db, content.id, tier):
            raise Busy(f"the copy in {tier} was dropped")

    problem = local_copies.find_problem(tiers[tier], content, label="verify", before_block=check)
    if problem:
        check()
    return problem


def _record(db: Database, content: Content, found: list[CheckResult]) -> None:
    """Record the results in one transaction. Raises Busy if the content has changed."""
    with db.transaction():
        contents.require_unchanged(db, content)
        good = [one.tier for one in found if one.ok]
        for tier in good:
            set_copy_state(db, content.id, tier, CopyState.GOOD)
        for one in found:
            if not one.ok:
                local_copies.quarantine(db, content, one.tier, one.problem)
        if good and content.state is ContentState.LOST:
            contents.set_state(db, content.id, ContentState.SEALED)


def _rebuild_copy(db: Database, tiers: Tiers, content: Content, source: Tier, bad: CheckResult) -> CheckResult:
    """Rebuild a bad copy from a good one. If that fails, the copy stays quarantined."""
    try:
        local_copies.copy_to_tier(db, tiers, content, source, bad.tier)
    except (OSError, Busy, DigestMismatch) as failure:
        log.warning("%s: the copy in %s cannot be rebuilt: %s", get_shown_path(db, content.inode), bad.tier, failure)
        return bad
    disk.reach("verify:repaired")
    log.info("%s: the copy in %s was rebuilt from the one in %s", get_shown_path(db, content.inode), bad.tier, source)
    return replace(bad, source=source.value)


def request_repair(db: Database, number: int) -> int | None:
    """Request a content that is bad here from the other nodes or the PFS. Returns None if they lack it."""
    record = contents.get_file_record(db, number)
    content = record.content
    if content is None or content.state is not ContentState.SEALED or not contents.is_current(db, content.inode, number):
        return None
    if not (is_on_pfs(record) or content.is_remote or peer_copies.list_holders(db, content)):
        return None
    return mover_requests.insert_request(db, mover_requests.FETCH, content.inode, mover_requests.FOR_REPAIR, wait_s=limits.FETCH_STALL_S)


def find_repair_source(db: Database, request: int) -> str:
    """Return what an answered repair came from; "" if there is no good copy in a tier of this node yet."""
    answer = mover_requests.get(db, request)
    is_here = answer is not None and answer.state == mover_requests.DONE and answer.result != mover_requests.DIRECT
    return answer.result if is_here and answer is not None else ""


class Scrub:
    """Verifies one content a step: quarantined ones first, then those not verified for the longest time."""

    def __init__(self, db: Database, tiers: Tiers, notify: Notifier, record_repaired: Callable[[str, CheckResult], None]) -> None:
        """`record_repaired` gets the path of the file and the result, for the event log."""
        self._db = db
        self._tiers = tiers
        self._notify = notify
        self._record_repaired = record_repaired
        self._pause = threading.Event()
        self._due: list[int] = []
        self._next_list_s = 0.0
        self._not_before_s: dict[int, float] = {}
        self._repairs: dict[int, tuple[int, CheckResult]] = {}  # Content -> the request for it, and what is bad.
        self._stale_pages: set[int] = set()
        """Contents of which the kernel may have pages of a bad copy: an open file keeps its descriptor, and reads them again."""

    def step(self) -> bool:
        """Verify one content. Return True if there may be another one."""
        self._finish_repairs()
        # Applications fetch, too, and their requests come in the same order.
        number = None if len(self._repairs) >= limits.REFETCHES_MAX else self._take_next()
        if number is None:
            return False
        found: list[CheckResult] = []
        try:
            found = verify(self._db, self._tiers, number, self._wait, LOCAL_TIERS)  # The PFS may hang.
        except (OSError, CkptfsError) as failure:
            log.debug("content %d: not verified: %s; trying again", number, failure)
        if not found or any(not one.ok for one in found):
            self._not_before_s[number] = time.monotonic() + RETRY_S
            self._repair(number, found)
        return True

    def next_due_s(self) -> float | None:
        """Return the seconds until a repair may be done, or copies are due."""
        return limits.REQUEST_POLL_S if self._repairs else max(0.0, self._next_list_s - time.monotonic())

    def _take_next(self) -> int | None:
        now_s = time.monotonic()
        tiers = [tier for tier in LOCAL_TIERS if tier in self._tiers and not self._tiers[tier].failure]
        bad = (number for tier in tiers for number in list_bad_copies(self._db, CopyState.QUARANTINED, tier))
        if (urgent := next((number for number in bad if self._is_due(number, now_s)), None)) is not None:
            return urgent
        if not self._due and now_s >= self._next_list_s:
            self._drop_stale_pages()
            self._not_before_s = {number: until_s for number, until_s in self._not_before_s.items() if until_s > now_s}
            found = list_unverified(self._db, tiers, INTERVAL_S, BATCH_CONTENTS + len(self._not_before_s))
            self._due = [number for number in found if self._is_due(number, now_s)]
            self._next_list_s = now_s if self._due else now_s + POLL_S
        return self._due.pop(0) if self._due else None

    def _is_due(self, number: int, now_s: float) -> bool:
        return number not in self._repairs and self._not_before_s.get(number, 0.0) <= now_s

    def _wait(self) -> None:
        """Keep to the bandwidth, and let all other work go first for a while."""
        until_s = time.monotonic() + PATIENCE_S
        self._pause.wait(limits.BLOCK_BYTES / BYTES_PER_S)
        while time.monotonic() < until_s and self._must_yield():
            self._pause.wait(PAUSE_S)

    def _must_yield(self) -> bool:
        return (
            procfs.get_memory_pressure() >= limits.PREPARED_PRESSURE_HIGH
            or summary.count_unsealed(self._db) > 0
            or pfs_state.has_work(self._db)
            or bool(mover_requests.list_open(self._db, mover_requests.FETCH, at_most=1))
            or bool(peer_copies.list_under_replicated(self._db, 0, 1))
        )

    # --- repair ------------------------------------------------------------------------------------------------------

    def _repair(self, number: int, found: list[CheckResult]) -> None:
        """Report what another tier has repaired; request the content if no copy here is good."""
        if not found or (content := contents.get_content(self._db, number)) is None:
            return
        self._stale_pages.add(number)
        self._drop_stale_pages()
        for one in found:
            if one.repaired:
                self._record_repaired(get_shown_path(self._db, content.inode), one)
        if not any(one.ok or one.repaired for one in found) and (request := request_repair(self._db, number)) is not None:
            self._repairs[number] = request, found[0]
            self._notify.wake_lanes(mover_requests.LANE_BY_KIND[mover_requests.FETCH])

    def _drop_stale_pages(self) -> None:
        """Have the kernel drop its pages of bad copies, again until no process has opened the bad copy."""
        for number in list(self._stale_pages):
            record = contents.get_file_record(self._db, number)
            if record.content is not None:
                self._notify.invalidate_inode(record.content.inode)
            if not record.open_handles:
                self._stale_pages.discard(number)

    def _finish_repairs(self) -> None:
        for number, (request, bad) in list(self._repairs.items()):
            if mover_requests.is_open(self._db, request):
                continue
            del self._repairs[number]
            content, source = contents.get_content(self._db, number), find_repair_source(self._db, request)
            if content is not None and source:
                self._not_before_s.pop(number, None)  # Other copies here may be bad still.
                path = get_shown_path(self._db, content.inode)
                log.info("%s: the copy in %s was bad; repaired from %s", path, bad.tier, source)
                self._record_repaired(path, replace(bad, source=source))
