"""The verify step: a check of all local copies of a content against its seal.

Takes: a sealed content with copies in any tier.
Leaves: good copies with a new time of verification. Bad copies are quarantined, and rebuilt if a good copy exists.
If we die here: a quarantined copy never counts, rebuilt or not.
"""

import logging
import os
from dataclasses import dataclass
from functools import partial

from ckptfs import disk
from ckptfs.catalog import contents
from ckptfs.catalog.copies import delete_copy, list_copies, set_copy_state
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get_shown_path
from ckptfs.errors import Busy, DigestMismatch
from ckptfs.model import Content, ContentState, Copy, CopyState, Tier
from ckptfs.tiers import local_copies, transfer
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)

transfer.declare_labels("verify")
disk.declare_labels("verify:quarantined", "verify:repaired")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result for one copy. `repaired`: it was bad and was rebuilt."""

    tier: Tier
    ok: bool
    problem: str = ""
    repaired: bool = False


def verify(db: Database, tiers: Tiers, number: int) -> list[CheckResult]:
    """Compare all local copies of a sealed content with its seal; repair bad ones. Raises Busy, OSError."""
    content = contents.get_content(db, number)
    if content is None or content.state not in {ContentState.SEALED, ContentState.LOST}:
        return []
    copies = [copy for copy in list_copies(db, number) if copy.state is not CopyState.FILLING]
    found = [_check_copy(db, tiers, content, copy) for copy in copies]
    good = [checked.tier for checked in found if checked.ok]
    if not good:
        if found and content.state is ContentState.SEALED and contents.mark_lost(db, content):
            log.error("%s: lost: no copy has the sealed digest; reads fail with EIO", get_shown_path(db, content.inode))
        return found
    if content.state is ContentState.LOST:
        contents.set_state(db, number, ContentState.SEALED)
        content = contents.get_content(db, number) or content
    return [checked if checked.ok else _repair_copy(db, tiers, content, good[0], checked) for checked in found]


def _check_copy(db: Database, tiers: Tiers, content: Content, copy: Copy) -> CheckResult:
    problem = _find_problem(db, tiers, content, copy.tier)
    contents.require_unchanged(db, content)
    if not problem:
        set_copy_state(db, content.id, copy.tier, CopyState.GOOD)
        return CheckResult(copy.tier, True)
    if copy.state is not CopyState.QUARANTINED:
        set_copy_state(db, content.id, copy.tier, CopyState.QUARANTINED)
        disk.act("verify:quarantined", lambda: None)
        log.error("%s: the copy in %s is quarantined: %s", get_shown_path(db, content.inode), copy.tier, problem)
    return CheckResult(copy.tier, False, problem)


def _find_problem(db: Database, tiers: Tiers, content: Content, tier: Tier) -> str:
    """Return what is wrong with a copy, or "". Raises OSError if the tier fails: no proof."""
    storage = tiers.get(tier)
    if storage is None:
        return f"the tier {tier} is not configured any more"
    try:
        fd = storage.open(content.id, os.O_RDONLY)
    except FileNotFoundError:
        return "its file is gone"
    with disk.closing(fd):
        size, digest, blocks = transfer.read(fd, label="verify", before_block=partial(contents.require_unchanged, db, content))
    if size != content.size:
        return f"it has {size} bytes instead of {content.size}"
    if digest != content.digest:
        return f"its digest differs{_describe_first_difference(content.block_digests or b'', blocks)}"
    return ""


def _describe_first_difference(expected: bytes, found: bytes) -> str:
    for number in range(len(found) // 16):
        if expected[16 * number : 16 * number + 16] != found[16 * number : 16 * number + 16]:
            return f" in block {number}"
    return ""


def _repair_copy(db: Database, tiers: Tiers, content: Content, source: Tier, bad: CheckResult) -> CheckResult:
    """Rebuild a bad copy from a good one. If that fails, the copy stays quarantined."""
    if bad.tier not in tiers:
        delete_copy(db, content.id, bad.tier)
        return bad
    try:
        local_copies.copy_to_tier(db, tiers, content, source, bad.tier)
    except (OSError, Busy, DigestMismatch) as failure:
        log.warning("%s: the copy in %s cannot be rebuilt: %s", get_shown_path(db, content.inode), bad.tier, failure)
        return bad
    disk.act("verify:repaired", lambda: None)
    log.info("%s: the copy in %s was rebuilt from the one in %s", get_shown_path(db, content.inode), bad.tier, source)
    return CheckResult(bad.tier, False, bad.problem, repaired=True)
