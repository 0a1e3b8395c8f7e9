"""The figures of `ckptfs status` and `ckptfs df`, from the catalog, the local tiers and /proc.

The PFS is not touched: its figures come from reports in the catalog.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from ckptfs import __version__, cgroups, limits, procfs, runtime_dir
from ckptfs.catalog import copies, pfs_hold, remote_contents, summary
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.config.rule_tables import describe_rule
from ckptfs.errors import CkptfsError
from ckptfs.flow.host.incoming import PeerQuota
from ckptfs.model import Tier
from ckptfs.protocol import control_pb2 as pb
from ckptfs.quantities import format_count
from ckptfs.tiers import space
from ckptfs.tiers.storage import Tiers
from ckptfs_daemon.drain import Pending, get_deadline_s

Value = TypeVar("Value")

CACHE_RATIO = 20
"""Counting in a large catalog takes long: a result is kept for this many times as long as it took."""
ROLES = ("supervisor", "mount", "mover")


class CachedFigure(Generic[Value]):
    """A figure that is computed again when it is old compared with its cost. One thread computes it."""

    def __init__(self, ask: Callable[[], Value], fresh_s: float = 0.0) -> None:
        """`fresh_s`: it is not computed again before this age, for any caller."""
        self._ask = ask
        self._fresh_s = fresh_s
        self._lock = threading.Lock()
        self._value: tuple[Value, float] | None = None

    def get(self) -> Value:
        """Return the figure, at most `CACHE_RATIO` times as old as its computation took, or `fresh_s`."""
        with self._lock:
            begun = time.monotonic()
            if self._value is None or begun > self._value[1]:
                value = self._ask()
                self._value = (value, time.monotonic() + max(self._fresh_s, CACHE_RATIO * (time.monotonic() - begun)))
            return self._value[0]


class StatusFigures:
    """Builds a Status. Thread-safe."""

    def __init__(self, config: Config, db: Database, tiers: Tiers) -> None:
        self._config = config
        self._db = db
        self._tiers = tiers
        self._counts = CachedFigure(lambda: summary.load_counts(db))
        self._write_back_counts = CachedFigure(lambda: summary.load_write_back_figures(db))
        self._copies = CachedFigure(lambda: summary.count_copies_by_tier(db))
        self._checks = CachedFigure(lambda: copies.load_check_figures(db))
        self._bytes = CachedFigure(lambda: {tier: summary.count_bytes_in_tier(db, tier) for tier in (Tier.RAM, Tier.NVME)})

    def build_status(self) -> pb.Status:
        config, processes = self._config, runtime_dir.load_processes(self._config.state)
        status = pb.Status(
            name=config.name, mountpoint=str(config.mountpoint), state=str(config.state), version=__version__,
            data_path=processes.get("data_path", ""), data_path_reason=processes.get("data_path_reason", ""),
            fsync=config.fsync.value, pfs=str(config.pfs or ""), drain_deadline_s=self.get_drain_deadline_s(),
            tiers=self._build_tiers(), write_back=self._build_write_back(), counts=self._build_counts(),
            processes=_build_processes(processes), troubles=self.list_troubles(),
            handles=[pb.HandleCount(**row) for row in summary.get_report(self._db, summary.HANDLES_REPORT).get("ways", ())],
            memory=build_service_memory(config, self._tiers), survives_kill=bool(processes),
            survives_supervisor_kill=bool(processes.get("is_kept_by_systemd")),
            request_timeout_s=int(processes.get("request_timeout_s") or 0), history=build_history(config, self._db, self._tiers),
            scrub=self._build_scrub(),
        )  # fmt: skip
        if notice := summary.get_report(self._db, summary.NOTICE_REPORT):  # This node is about to be taken away.
            status.notice.CopyFrom(pb.Notice(age_s=max(0.0, time.time() - notice.pop("at_s")), **notice))
        has_bad_tier = any(tier.health not in ("", "normal") for tier in status.tiers)
        is_sound = not (has_bad_tier or status.troubles or status.HasField("notice"))
        status.health = "ok" if is_sound else "degraded"
        return status

    def get_drain_deadline_s(self) -> float:
        """Return how long an unmount that begins now waits for the write-back."""
        found = self._write_back_counts.get()
        pending = Pending(found.dirty_files, found.dirty_bytes, found.changes)
        return get_deadline_s(self._config.drain_deadline_s, pending, summary.get_pfs_speed(self._db))

    def list_troubles(self) -> list[pb.Trouble]:
        """Return current problems: tiers that are not normal, and failures that the lanes report."""
        found = []
        for where, value, at_ns in summary.list_obstacles(self._db):
            path = value.get("path") or next((self._root(tier) for tier in Tier if tier == where), None)
            fields = {name: str(text or "") for name, text in (("what", value["what"]), ("path", path), ("remedy", value.get("remedy")))}
            found.append(pb.Trouble(where=where, age_s=max(0.0, (time.time_ns() - at_ns) / 1e9), **fields))
        if what := self._tiers[Tier.RAM].failure:  # No monitor watches it.
            root = str(self._root(Tier.RAM))
            found.insert(0, pb.Trouble(where=Tier.RAM, what=what, path=root, remedy="unmount ckptfs, and mount it again"))
        if lost := self._counts.get().lost:
            what = "no copy of its content is left" + (f", nor of {format_count(lost - 1, 'other')}" if lost > 1 else "")
            found.append(pb.Trouble(where="lost", what=what, path=summary.find_lost_path(self._db), remedy="write it again, or delete it"))
        return found

    def get_current_write_back(self) -> dict[str, Any]:
        """Return inode, path, copied_bytes and size_bytes of the large file being written back, or {}."""
        return summary.get_report(self._db, "write_back")

    def _build_write_back(self) -> pb.WriteBack:
        found, now = self._write_back_counts.get(), self.get_current_write_back()
        return pb.WriteBack(
            dirty_bytes=found.dirty_bytes, dirty_files=found.dirty_files, changes=found.changes,
            lag_s=found.lag_s, unsealed_files=found.unsealed_files, current_path=str(now.get("path", "")),
            current_copied_bytes=int(now.get("copied_bytes", 0)), current_size_bytes=int(now.get("size_bytes", 0)),
        )  # fmt: skip

    def _build_scrub(self) -> pb.Scrub:
        found, counts = self._checks.get(), self._copies.get()
        copies_here = sum(count for tier, count in counts.items() if tier is not Tier.PFS)
        age_s = max(0.0, time.time() - found.oldest_ns / 1e9) if found.oldest_ns else 0.0
        return pb.Scrub(copies=copies_here, oldest_age_s=age_s, bad_found=found.bad_found, quarantined=found.quarantined)

    def _build_counts(self) -> pb.Counts:
        found = self._counts.get()
        return pb.Counts(
            files=found.files, directories=found.directories, by_level={level.value: count for level, count in found.by_level.items()},
            open_handles=found.open_handles, writers=found.writers, lost=found.lost,
            bytes_by_level={level.value: size for level, size in found.bytes_by_level.items()},
        )  # fmt: skip

    def _build_tiers(self) -> list[pb.TierStatus]:
        counts = self._copies.get()
        return [self._build_tier(tier, counts.get(tier, 0)) for tier in Tier if self._root(tier) is not None]

    def _root(self, tier: Tier) -> Path | None:
        return {Tier.RAM: self._config.state / "ram", Tier.NVME: self._config.nvme, Tier.PFS: self._config.pfs}[tier]

    def _build_tier(self, tier: Tier, count: int) -> pb.TierStatus:
        """Build one tier. The used bytes are those of a tmpfs of ckptfs, otherwise those of its files."""
        health = summary.get_report(self._db, f"tier:{tier}")
        answer = pb.TierStatus(name=tier.value, path=str(self._root(tier)), contents=count, health=str(health.get("state", "normal")))
        if tier is Tier.PFS:
            answer.budget_bytes, answer.free_bytes = int(health.get("total", 0)), int(health.get("free", 0))
            answer.shared_bytes = summary.get_report(self._db, summary.SHARED_ON_PFS_REPORT).get("bytes", 0)
            if answer.health == "normal" and any(value.get("is_full") for _, value, _ in summary.list_troubles(self._db, "write back")):
                answer.health = "full"  # A full tier answers well, and its figures are some seconds old.
            return answer
        storage = self._tiers.get(tier)
        with contextlib.suppress(OSError, CkptfsError):
            if storage is not None:
                answer.path = str(storage.root)
                doomed_bytes = copies.count_doomed_bytes(self._db, tier)
                capacity = space.add_free(storage.get_capacity(), doomed_bytes)
                answer.budget_bytes, answer.free_bytes = capacity.total, capacity.free
                if storage.failure and answer.health == "normal":
                    answer.health = "suspect"  # The monitor has not probed it since.
                answer.prepared_bytes = self._tiers.prepared.get_bytes() if tier is Tier.RAM else 0
                answer.shared_bytes = storage.get_shared_bytes()
                if os.path.ismount(storage.root):  # Only ckptfs uses this filesystem.
                    used_bytes = space.read_capacity(storage.root).used
                else:
                    used_bytes = self._bytes.get()[tier] - answer.shared_bytes
                answer.used_bytes = max(0, used_bytes - doomed_bytes)
                return answer
        answer.health = "down"
        return answer


def _build_processes(processes: dict[str, Any]) -> list[pb.Process]:
    found = []
    for role in ROLES:
        one = processes.get(role) or {}
        if pid := int(one.get("pid") or 0):
            restarts = int(one.get("restarts") or 0)
            found.append(
                pb.Process(role=role, pid=pid, rss_bytes=procfs.get_resident_bytes(pid), restarts=restarts, uptime_s=_get_uptime_s(pid))
            )
    return found


def _get_uptime_s(pid: int) -> float:
    """Return the age of a process, 0 if it is gone."""
    started_s = procfs.get_start_ticks(pid) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s) if started_s else 0.0


def build_service_memory(config: Config, tiers: Tiers) -> pb.ServiceMemory:
    """Build what the daemon's control group must allow, and what it allows."""
    ram_bytes = config.ram_bytes
    if ram_bytes is None:
        with contextlib.suppress(OSError, CkptfsError):
            ram_bytes = tiers[Tier.RAM].get_capacity().total
    limit = cgroups.find_own_limit()
    needed = (ram_bytes or 0) + limits.SERVICE_BYTES
    return pb.ServiceMemory(needed_bytes=needed, limit_known=limit.is_known, limit_bytes=limit.limit_bytes or 0, group=limit.group)


def build_history(config: Config, db: Database, tiers: Tiers) -> pb.History:
    """Build the figures of the history. The mount process counts its sets when they change."""
    found = summary.get_report(db, "sets")
    held_files, held_bytes = pfs_hold.count_held(db)
    answer = pb.History(
        series=int(found.get("series", 0)), sets=int(found.get("sets", 0)), bytes=int(found.get("bytes", 0)),
        held_files=held_files, held_bytes=held_bytes, rules=[describe_rule(rule) for rule in config.retention],
    )  # fmt: skip
    with contextlib.suppress(OSError, CkptfsError):
        answer.bytes_max = tiers.get_share_bytes(config.history_size)
    return answer


def build_capacity(config: Config, db: Database, tiers: Tiers) -> pb.Capacity:
    """Build the reply of `ckptfs df`: all tiers of this node."""
    clustered = config.cluster is not None
    answer = pb.Capacity(clustered=clustered, replication_factor=config.replication_factor if clustered else 1, node=config.node or "")
    answer.memory.CopyFrom(build_service_memory(config, tiers))
    answer.history.CopyFrom(build_history(config, db, tiers))
    for tier in (Tier.RAM, Tier.NVME):
        if tier in tiers:
            with contextlib.suppress(OSError, CkptfsError):
                answer.tiers.append(_build_local_tier(config, db, tiers, tier))
    if config.pfs is not None:
        answer.tiers.append(_build_pfs_tier(db, config.pfs))
    return answer


def _build_local_tier(config: Config, db: Database, tiers: Tiers, tier: Tier) -> pb.TierCapacity:
    capacity = space.add_free(tiers[tier].get_capacity(), copies.count_doomed_bytes(db, tier))
    leaving = summary.count_leaving_bytes(db, tier) if config.pfs is not None else 0
    limit = int((config.ram_high if tier is Tier.RAM else 1.0) * capacity.total)
    prepared = tiers.prepared.get_bytes() if tier is Tier.RAM else 0
    answer = pb.TierCapacity(
        name=tier.value, path=str(tiers[tier].root), total_bytes=capacity.total, used_bytes=capacity.used, free_bytes=capacity.free,
        held_bytes=remote_contents.count_hosted_bytes(db, tier),
        usable_bytes=max(0, min(capacity.free, limit - capacity.used) + leaving + prepared), prepared_bytes=prepared,
        shared_bytes=tiers[tier].get_shared_bytes(),
    )  # fmt: skip
    if config.cluster is not None:
        answer.share_bytes = int(config.peer_share * capacity.total)
        answer.usable_for_peers_bytes = min(answer.usable_bytes, PeerQuota(db, tiers, config.peer_share).get_free_bytes_in(tier))
    return answer


def _build_pfs_tier(db: Database, root: Path) -> pb.TierCapacity:
    answer = pb.TierCapacity(
        name=Tier.PFS.value, path=str(root), shared_bytes=summary.get_report(db, summary.SHARED_ON_PFS_REPORT).get("bytes", 0)
    )
    found = summary.get_report(db, f"tier:{Tier.PFS}")
    answer.total_bytes, answer.free_bytes = int(found.get("total", 0)), int(found.get("free", 0))
    answer.used_bytes = max(0, answer.total_bytes - answer.free_bytes)
    return answer
