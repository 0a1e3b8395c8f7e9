"""Health of the tiers that may fail: probes NVMe and PFS, and reports their state in the catalog.

A probe that hangs is awaited in its own thread, and its silence is reported meanwhile. When a tier recovers, the lanes reset their
backoffs. When the PFS first answers, its identity is recorded in the catalog. A directory with another identity is a different
filesystem: the tier is down until the right one is mounted (tiers/pfs_identity.py).

Crash safety: the next mover starts with NORMAL and probes at once.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from ckptfs import disk, limits
from ckptfs.catalog import copies, summary
from ckptfs.catalog.database import Database
from ckptfs.errors import CATALOG_FAILURES, TierUnavailable
from ckptfs.event_log import EventKind
from ckptfs.model import Tier
from ckptfs.quantities import format_count
from ckptfs.tiers import health, pfs_identity
from ckptfs.tiers.health import Health, HealthState
from ckptfs.tiers.space import Capacity
from ckptfs.tiers.storage import TierStorage
from ckptfs_daemon.event_writer import events

log = logging.getLogger(__name__)

SILENCE_REPORT_S = 2.0
CHANGE_RATIO = 0.01
NAMES_LOGGED_MAX = 100
REMEDY = "mount its device again, and start ckptfs again"
ONLY_COPIES_TROUBLE = "files on"


class TierMonitor:
    def __init__(self, db: Database, storage: TierStorage, root: Path, on_recovered: Callable[[], None], *, may_mark: bool = True) -> None:
        """`root` is probed, and marked if it is the PFS and `may_mark`.

        `on_recovered` is called in the trio thread when the tier has recovered.
        """
        self._db = db
        self._storage = storage
        self._root = root
        self._on_recovered = on_recovered
        self._health = Health()
        self._last_reported: dict[str, Any] = {}
        self._capacity = Capacity(0, 0)
        self._may_mark = may_mark
        self._has_tried_mark = not may_mark

    async def run(self) -> None:
        while True:
            await self._probe_once()
            await trio.sleep(health.probe_after_s(self._health))

    async def _probe_once(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_silence, name=f"silence of {self._storage.tier}")
            try:
                self._capacity = await trio.to_thread.run_sync(self._probe_tier, abandon_on_cancel=True)
                verdict = health.after_success(self._health, trio.current_time())
            except OSError as failure:
                verdict = health.after_failure(self._health, trio.current_time(), failure)
            except TierUnavailable as failure:
                verdict = health.after_wrong_tier(self._health, trio.current_time(), str(failure), failure.remedy)
            except CATALOG_FAILURES:
                verdict = self._health  # The catalog failed, not the tier.
            nursery.cancel_scope.cancel()
        await self._set_health(verdict)

    async def _report_silence(self) -> None:
        begun_s = trio.current_time()
        while True:
            await trio.sleep(SILENCE_REPORT_S)
            now_s = trio.current_time()
            verdict = health.after_silence(self._health, now_s, now_s - begun_s)
            if verdict.state is not HealthState.NORMAL and self._storage.tier is Tier.NVME:
                self._storage.record_silence()
            await self._set_health(verdict)

    async def _set_health(self, verdict: Health) -> None:
        """Store the verdict, and report it if it is new."""
        before, self._health = self._health, verdict
        if verdict.state is not before.state:
            self._log_change(verdict)
            if self._storage.tier is Tier.NVME:
                await self._record(self._report_only_copies, verdict)
            if verdict.state is HealthState.NORMAL:
                self._on_recovered()
        value = {
            "state": verdict.state.value,
            "error": verdict.error,
            "remedy": verdict.remedy,
            "total": self._capacity.total,
            "free": self._capacity.free,
        }
        if self._is_worth_reporting(value) and await self._record(summary.set_report, self._db, f"tier:{self._storage.tier}", value):
            self._last_reported = value

    async def _record(self, act: Callable[..., None], *values: Any) -> bool:
        """Write to the catalog. Return False if its disk is full or fails: the next probe tries again."""
        try:
            await trio.to_thread.run_sync(act, *values)
        except CATALOG_FAILURES as failure:
            log.debug("%s: its state is not recorded: %s", self._storage.tier, failure)
            return False
        return True

    def _report_only_copies(self, verdict: Health) -> None:
        """Name the files that cannot be read while NVMe is down, because it has their only copies."""
        where = f"{ONLY_COPIES_TROUBLE} {self._storage.tier}"
        paths = copies.list_paths_only_in(self._db, self._storage.tier, NAMES_LOGGED_MAX) if verdict.state is HealthState.DOWN else []
        if not paths:
            summary.set_trouble(self._db, where, None)
            return
        count = copies.count_only_copies(self._db, self._storage.tier)
        files = format_count(count, "file exists", "files exist")
        what = f"{files} only on {self._storage.tier}, which is down: {verdict.error}; reads fail with EIO"
        summary.set_trouble(self._db, where, {"what": what, "path": paths[0], "remedy": verdict.remedy or REMEDY})
        for path in paths:
            log.error("%s: cannot be read: its only copy is on %s, which is down", path, self._storage.tier)

    def _log_change(self, now: Health) -> None:
        is_up = now.state is HealthState.NORMAL
        events.record(
            EventKind.TIER_UP if is_up else EventKind.TIER_DOWN, tier=self._storage.tier.value, path=str(self._root),
            state=now.state.value, what=now.error, remedy=now.remedy,
        )  # fmt: skip
        if is_up:
            log.info("%s: works again", self._root)
        else:
            log.warning("%s: is %s: %s%s", self._root, now.state, now.error, f" ({now.remedy})" if now.remedy else "")

    def _is_worth_reporting(self, value: dict[str, Any]) -> bool:
        """Return True if the report changes visibly: an idle node writes nothing."""
        if not self._last_reported or any(value[key] != self._last_reported[key] for key in ("state", "error", "remedy", "total")):
            return True
        return bool(abs(value["free"] - self._last_reported["free"]) > CHANGE_RATIO * max(value["total"], limits.MIB))

    def _probe_tier(self) -> Capacity:
        """Probe in a thread, which hangs as long as the tier does."""
        try:
            capacity = health.probe(self._root)
        except OSError as failure:
            self._storage.record_failure(failure)
            raise
        if self._storage.tier is Tier.NVME:
            self._storage.probe()
        if self._storage.tier is Tier.PFS:
            self._identify_pfs()
        return capacity

    def _identify_pfs(self) -> None:
        """Raise TierUnavailable if the root is not our PFS. Once in a process, try to mark a pinned PFS."""
        with disk.closing(pfs_identity.open_adopted_root(self._db, self._root, may_mark=self._may_mark)) as root_fd:
            if not self._has_tried_mark:
                self._has_tried_mark = True
                pfs_identity.replace_pin(self._db, root_fd)
