"""The choice of the tier of a new content and of the way of its bytes, and the wait for space.

A choice neither waits nor touches the rows. A request waits for space before it answers ENOSPC (P10): space comes while the mover seals,
writes back, evicts or removes. It also comes when a program below a memory limit closes its file, which gives back what was prepared ahead
of it. The wait goes on while such work is pending and something changes, and while a tier does not answer. The mover learns how much is
wanted, and drops copies that it would keep otherwise.

Crash safety: a prepared file that was enlarged or given back belongs to no row. A demand in the catalog expires by its time.
"""

import os
from collections.abc import Container
from typing import NamedTuple

import trio

from ckptfs import disk, limits
from ckptfs.catalog import mover_requests, summary
from ckptfs.model import DataPath, Tier
from ckptfs.tiers import space
from ckptfs.tiers.prepared import PreparedFile
from ckptfs.tiers.storage import TierStorage
from ckptfs_daemon import ipc
from ckptfs_daemon.fuse import killable
from ckptfs_daemon.mount.context import MountContext
from ckptfs_daemon.mount.open_files.handle_ways import Reason
from ckptfs_daemon.mount.open_files.open_file import STAT_BLOCK_BYTES
from ckptfs_daemon.mount.open_files.tier_calls import close_logged, run_if_answered
from ckptfs_daemon.mount.opening.open_request import OpenRequest


class PfsFacts(NamedTuple):
    """The status of a file on the PFS, and the capacity of the PFS, when the file was opened."""

    status: os.stat_result
    capacity: space.Capacity


def read_pfs_facts(fd: int) -> PfsFacts:
    """May hang."""
    return PfsFacts(disk.fstat(fd), space.read_capacity(fd))


async def create_file(storage: TierStorage, content: int, flags: int, times: tuple[int, int]) -> tuple[int, PfsFacts | None]:
    """Create the file of a content outside RAM, in a thread. Return a descriptor, and facts of the PFS.

    Raises OSError; ETIMEDOUT if the tier does not answer, as another one may have room.
    """

    def create() -> tuple[int, PfsFacts | None]:
        with disk.closing_on_failure(storage.create(content, flags)) as fd:
            os.utime(fd, ns=times)
            return fd, read_pfs_facts(fd) if storage.tier is Tier.PFS else None

    def discard(created: tuple[int, PfsFacts | None]) -> None:
        close_logged(created[0], storage.tier)
        storage.remove(content)

    return await run_if_answered(storage, create, discard)


class Placement(NamedTuple):
    """Where a new content begins.

    `buffered_reason`: why its writer must not use passthrough; NONE if it may. `prepared_file`: the one to take, in RAM.
    """

    tier: Tier
    buffered_reason: Reason
    prepared_file: PreparedFile | None


def find_limit_reason(context: MountContext, open_request: OpenRequest) -> Reason:
    """Return why the caller must not fill fresh memory. On the buffered path this process fills it."""
    if open_request.fuse_request is None or context.data_path is not DataPath.PASSTHROUGH:
        return Reason.NONE
    limit = context.memory_limits.find(open_request.pid)
    return Reason.NONE if not limit.is_limited else Reason.LIMITED if limit.is_known else Reason.UNKNOWN


def find_hole_reason(context: MountContext, open_request: OpenRequest, storage: TierStorage, fd: int) -> Reason:
    """Return why a reader must not map this file: a page is added to a tmpfs where a hole is touched."""
    if not storage.is_memory:
        return Reason.NONE
    status = os.fstat(fd)
    return find_limit_reason(context, open_request) if status.st_blocks * STAT_BLOCK_BYTES < status.st_size else Reason.NONE


def choose_placement(
    context: MountContext, expected_bytes: int, limit_reason: Reason, refusing_tiers: Container[Tier], pfs_facts: PfsFacts | None
) -> Placement:
    """Choose where a content of about `expected_bytes` (0: unknown) begins. Raises NoSpace.

    Changes no file but prepared ones: one may be enlarged, others may be given back.
    """
    tiers, reserved_bytes = context.tiers, context.open_files.get_reserved_bytes()
    prepared_file = tiers.find_prepared(expected_bytes, is_limited=bool(limit_reason))
    tier = None
    if not _may_fill(limit_reason, prepared_file) and Tier.NVME not in refusing_tiers:
        tier = tiers.choose_disk_tier(expected_bytes, reserved_bytes)
    tier = tier or tiers.choose_tier(expected_bytes, reserved_bytes, prepared_file, refusing_tiers)
    taken = prepared_file if tier is Tier.RAM else None
    return Placement(tier, find_buffered_reason(context, tiers[tier], expected_bytes or None, limit_reason, pfs_facts, taken), taken)


def find_buffered_reason(
    context: MountContext, storage: TierStorage, expected_bytes: int | None, limit_reason: Reason,
    pfs_facts: PfsFacts | None = None, prepared_file: PreparedFile | None = None,
) -> Reason:  # fmt: skip
    """Return why a writer's bytes must pass through this process; NONE if they need not.

    `prepared_file`: the one that becomes the file. Any tier may lie in memory, whose pages a limited program would pay for until they go.
    """
    if context.data_path is not DataPath.PASSTHROUGH:
        return Reason.DATA_PATH
    if storage.is_memory and not _may_fill(limit_reason, prepared_file):
        return limit_reason
    if storage.tier is Tier.PFS:  # A full PFS moves files on.
        is_full = pfs_facts is None or space.needs_buffered_path(pfs_facts.capacity, expected_bytes)
    else:
        reserved_bytes = context.open_files.get_reserved_bytes().get(storage.tier, 0)
        is_full = context.tiers.needs_buffered_path(storage.tier, expected_bytes, reserved_bytes, prepared_file)
    return Reason.FULL if is_full else Reason.NONE


def _may_fill(limit_reason: Reason, prepared_file: PreparedFile | None) -> bool:
    """Return True if the caller may write into RAM by passthrough: `prepared_file`, or fresh memory."""
    return not limit_reason or (prepared_file is not None and prepared_file.size_bytes >= limits.TOP_UP_AHEAD_BYTES)


class SpaceWait:
    def __init__(self, context: MountContext) -> None:
        self._context = context
        self._began_s: float | None = None
        self._changed_s = self._checked_s = 0.0
        self._outlook = summary.SpaceOutlook(False, ())

    async def wait(self, wanted_bytes: int) -> bool:
        """Wait a moment for space. Return False if none is to be expected any more.

        Raises EINTR if the caller is killed.
        """
        now_s = trio.current_time()
        if self._began_s is None:
            self._began_s = self._changed_s = now_s
            self._checked_s = float("-inf")
        if now_s - self._checked_s >= limits.NO_SPACE_CHECK_S:
            self._checked_s = now_s
            outlook = summary.load_space_outlook(self._context.db)
            summary.set_space_demand(self._context.db, wanted_bytes)
            if outlook != self._outlook:
                self._changed_s, self._outlook = now_s, outlook
                self._context.mover_client.wake_mover(mover_requests.ALL_LANES)  # A full PFS may take a removal, and then more.
            else:
                self._context.wake_channel.notify(ipc.WORK)
        if self._context.open_files.top_up.is_growing:
            self._changed_s = now_s
        if any(storage.is_silent for storage in self._context.tiers.values()):
            self._began_s = self._changed_s = now_s  # It may have room.
        patience_s = limits.NO_SPACE_PENDING_WAIT_S if self._outlook.is_pending else limits.NO_SPACE_WAIT_S
        if now_s - self._changed_s > patience_s or now_s - self._began_s > limits.NO_SPACE_LONGEST_WAIT_S:
            return False
        await killable.sleep(limits.NO_SPACE_POLL_S)
        return True
