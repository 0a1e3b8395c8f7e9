"""The verify step: a check of all local copies of a content against its seal.

Takes: a sealed content with copies in any tier.
Leaves: good copies with a new time of verification. Bad copies are quarantined, and rebuilt if a good copy exists.
If we die here: a quarantined copy never counts, rebuilt or not.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckptfs import disk, limits
from ckptfs.catalog import contents, mover_requests, peer_copies
from ckptfs.catalog.copies import has_copy, list_copies, set_copy_state
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get_shown_path
from ckptfs.errors import Busy, DigestMismatch
from ckptfs.lifecycle import is_on_pfs
from ckptfs.model import Content, ContentState, CopyState, Tier
from ckptfs.tiers import local_copies, transfer
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)

transfer.declare_labels("verify")
disk.declare_labels("verify:quarantined", "verify:repaired")


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


def verify(db: Database, tiers: Tiers, number: int, before_block: Callable[[], None] = lambda: None) -> list[CheckResult]:
    """Compare the local copies of a sealed content with its seal; rebuild bad ones. Raises Busy, OSError."""
    content = contents.get_content(db, number)
    if content is None or content.state not in {ContentState.SEALED, ContentState.LOST}:
        return []
    checked = [copy.tier for copy in list_copies(db, number) if copy.state is not CopyState.FILLING and copy.tier in tiers]
    found = [CheckResult(tier, _find_problem(db, tiers, content, tier, before_block)) for tier in checked]
    _record(db, content, found)
    disk.act("verify:quarantined", lambda: None)
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
    disk.act("verify:repaired", lambda: None)
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
