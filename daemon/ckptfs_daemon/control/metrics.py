"""The figures of `ckptfs status` as metrics for Prometheus: `METRICS` maps a Status to samples.

Labels name tiers, levels, processes, and kinds of troubles and refusals. They never name paths, series or nodes, so the number of time
series does not grow with the data. What is not known, or what this mount does not have, has no sample.

How long steps take, and how many bytes they move, this process knows itself (`step_durations`).

`MetricsEndpoint` serves them at GET /metrics on a TCP address or a unix socket (`metrics=`). It never disturbs the mover: its server has
few threads, of which one at a time makes the text, and the text is used again while it is fresh. Without figures it answers 503.
"""

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import trio
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ckptfs import limits, step_durations
from ckptfs.errors import CkptfsError
from ckptfs.http_server import HttpReply, HttpRequest, HttpServer, refuse
from ckptfs.model import Level, Tier
from ckptfs.protocol import control_pb2 as pb
from ckptfs_daemon.control.status import CachedFigure

log = logging.getLogger(__name__)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TIER_STATES = ("normal", "full", "suspect", "down")

Samples = Iterable[tuple[tuple[str, ...], float]]
"""(values of the labels, value) of each sample."""
ListSamples = Callable[[pb.Status], Samples]


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric. A name that ends with `_total` makes it a counter; all others are gauges."""

    name: str
    description: str
    labels: tuple[str, ...]
    list_samples: ListSamples

    def build_family(self, status: pb.Status) -> Metric:
        metric: CounterMetricFamily | GaugeMetricFamily
        if self.name.endswith("_total"):
            metric = CounterMetricFamily(self.name, self.description, labels=self.labels)
        else:
            metric = GaugeMetricFamily(self.name, self.description, labels=self.labels)
        for values, value in self.list_samples(status):
            metric.add_metric(values, value)
        return metric


class StatusCollector(Collector):
    """All metrics of one Status, as the encoder of prometheus_client takes them."""

    def __init__(self, status: pb.Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        for row in METRICS:
            yield row.build_family(self._status)
        yield from build_step_families()


STEP_METRICS = ("ckptfs_step_duration_seconds", "ckptfs_step_bytes_total")


def build_step_families() -> Iterator[Metric]:
    """Yield how long the steps of files took, and how many bytes they moved."""
    durations = HistogramMetricFamily(STEP_METRICS[0], "Time that a step took for a file.", labels=("step",))
    moved = CounterMetricFamily(STEP_METRICS[1], "Bytes of the files that went through a step.", labels=("step",))
    bounds = [*map(str, step_durations.BOUNDS_S), "+Inf"]
    for step, found in step_durations.get_histograms().items():
        durations.add_metric((step,), list(zip(bounds, map(float, itertools.accumulate(found.counts)), strict=True)), found.sum_s)
        moved.add_metric((step,), found.size_bytes)
    yield from (durations, moved)


def encode_metrics(status: pb.Status) -> bytes:
    return generate_latest(StatusCollector(status))


def _one(name: str, description: str, read: Callable[[pb.Status], float]) -> MetricRow:
    """Make the row of a figure of the mount."""
    return MetricRow(name, description, (), lambda status: [((), read(status))])


def _tier(name: str, description: str, field: str, is_known: Callable[[Any], bool] = lambda tier: True) -> MetricRow:
    """Make the row of a figure of each tier."""
    return MetricRow(
        name, description, ("tier",),
        lambda status: [((tier.name,), getattr(tier, field)) for tier in status.tiers if is_known(tier)],
    )  # fmt: skip


def _process(name: str, description: str, field: str) -> MetricRow:
    """Make the row of a figure of each process of the daemon."""
    return MetricRow(name, description, ("process",), lambda status: [((one.role,), getattr(one, field)) for one in status.processes])


def _clique(name: str, description: str, read: Callable[[pb.Clique], float]) -> MetricRow:
    """Make the row of a figure that only nodes of a cluster have."""
    return MetricRow(name, description, (), lambda status: [((), read(status.clique))] if status.HasField("clique") else [])


def _sum_by(pairs: Iterable[tuple[tuple[str, ...], int]]) -> Samples:
    """Add up values that have the same labels."""
    sums: Counter[tuple[str, ...]] = Counter()
    for labels, value in pairs:
        sums[labels] += value
    return sorted(sums.items())


def _get_kind(where: str) -> str:
    """Return the kind of a trouble: without the number of a lane (`fetch 2`) or inode (`hidden:...`)."""
    return where.partition(":")[0].rstrip(" 0123456789")


def _has_budget(tier: pb.TierStatus) -> bool:
    return bool(tier.budget_bytes)


def _is_local_and_up(tier: pb.TierStatus) -> bool:
    return _has_budget(tier) and tier.name != Tier.PFS.value


METRICS: tuple[MetricRow, ...] = (
    MetricRow("ckptfs_info", "The mount and its version; always 1.", ("name", "version", "data_path", "fsync"),
        lambda status: [((status.name, status.version, status.data_path, status.fsync), 1)]),
    _one("ckptfs_healthy", "1 if the health in `ckptfs status` is ok, else 0.", lambda status: status.health == "ok"),
    MetricRow("ckptfs_troubles", "Troubles that `ckptfs status` shows now, by kind.", ("kind",),
        lambda status: _sum_by(((_get_kind(trouble.where),), 1) for trouble in status.troubles)),
    _one("ckptfs_preemption_notice", "1 after a notice that this node is about to be taken away.",
        lambda status: status.HasField("notice")),

    _tier("ckptfs_tier_capacity_bytes", "Size of the tier.", "budget_bytes", _has_budget),
    _tier("ckptfs_tier_free_bytes", "Bytes that are free in the tier.", "free_bytes", _has_budget),
    _tier("ckptfs_tier_used_bytes", "Bytes that the files of this mount use in a local tier.", "used_bytes", _is_local_and_up),
    _tier("ckptfs_tier_prepared_bytes", "Used bytes that are prepared for the next checkpoint.", "prepared_bytes", _is_local_and_up),
    _tier("ckptfs_tier_shared_bytes", "Bytes that need no space because files share equal blocks.", "shared_bytes"),
    _tier("ckptfs_tier_contents", "Copies of files in the tier.", "contents"),
    MetricRow("ckptfs_tier_state", "1 for the state that the tier has, 0 for the others.", ("tier", "state"),
        lambda status: [((tier.name, state), tier.health == state) for tier in status.tiers for state in TIER_STATES]),

    MetricRow("ckptfs_files", "Files by the level that they have now.", ("level",),
        lambda status: [((level.value,), status.counts.by_level.get(level.value, 0)) for level in Level]),
    MetricRow("ckptfs_file_bytes", "Bytes of these files.", ("level",),
        lambda status: [((level.value,), status.counts.bytes_by_level.get(level.value, 0)) for level in Level]),
    _one("ckptfs_directories", "Directories.", lambda status: status.counts.directories),
    _one("ckptfs_lost_files", "Files of which no copy is left.", lambda status: status.counts.lost),
    _one("ckptfs_open_handles", "Open files.", lambda status: status.counts.open_handles),
    _one("ckptfs_open_writers", "Files that are open for writing.", lambda status: status.counts.writers),
    MetricRow("ckptfs_handle_ways", "Open files by the way of their bytes: passthrough, prepared or buffered.", ("way", "tier"),
        lambda status: _sum_by(((one.way, one.tier), one.count) for one in status.handles)),

    _one("ckptfs_write_back_pending_files", "Closed files that are not on the PFS yet.", lambda status: status.write_back.dirty_files),
    _one("ckptfs_write_back_pending_bytes", "Bytes of closed files that are not on the PFS yet.",
        lambda status: status.write_back.dirty_bytes),
    _one("ckptfs_write_back_pending_changes", "Renames, deletions and so on that are missing on the PFS.",
        lambda status: status.write_back.changes),
    _one("ckptfs_write_back_lag_seconds", "Age of the oldest file or change that is missing on the PFS; 0 without one.",
        lambda status: status.write_back.lag_s),
    _one("ckptfs_unsealed_files", "Closed files that await their digests.", lambda status: status.write_back.unsealed_files),

    _clique("ckptfs_clique_under_replicated_files", "Files of this node that need copies on other nodes.",
        lambda clique: clique.under_replicated_files),
    _clique("ckptfs_clique_under_replicated_bytes", "Bytes of these files.", lambda clique: clique.under_replicated_bytes),
    _clique("ckptfs_clique_lag_seconds", "Age of the oldest of these files; 0 without one.", lambda clique: clique.lag_s),
    _clique("ckptfs_clique_short_files", "Files of this node without the copies that the level clique needs.",
        lambda clique: sum(short.files for short in clique.short)),
    _clique("ckptfs_clique_copies_wanted", "Copies that files to be replicated or repaired should have.",
        lambda clique: clique.copies_wanted),
    _clique("ckptfs_clique_copies_present", "Copies that these files have.", lambda clique: clique.copies_present),
    _clique("ckptfs_clique_rebuild_files", "Files of this node that are fetched back from other nodes.",
        lambda clique: clique.rebuild_files),
    _clique("ckptfs_clique_rebuild_bytes", "Bytes of these files.", lambda clique: clique.rebuild_bytes),
    _clique("ckptfs_clique_repair_files", "Files of dead nodes that are to be copied from this node.", lambda clique: clique.repair_files),
    _clique("ckptfs_clique_repair_bytes", "Bytes of these files.", lambda clique: clique.repair_bytes),
    _clique("ckptfs_clique_queued_files", "Files that wait to be sent, or are being sent, to other nodes.",
        lambda clique: sum(link.waiting_files + link.sending_files for link in clique.links)),
    _clique("ckptfs_clique_queued_bytes", "Bytes of these files.",
        lambda clique: sum(link.waiting_bytes + link.sending_bytes for link in clique.links)),
    _clique("ckptfs_clique_failed_links", "Nodes to which a connection failed lately.",
        lambda clique: sum(link.failed_recently for link in clique.links)),
    _clique("ckptfs_clique_incoming_transfers", "Files that other nodes are sending to this one.",
        lambda clique: clique.incoming_transfers),
    _clique("ckptfs_clique_outgoing_reads", "Files that other nodes are reading from this one.", lambda clique: clique.outgoing_reads),

    _one("ckptfs_scrub_age_seconds", "Time in which every copy in RAM and on NVMe was verified.", lambda status: status.scrub.oldest_age_s),
    _one("ckptfs_bad_copies_total", "Copies that differed from their seals.", lambda status: status.scrub.bad_found),
    _one("ckptfs_quarantined_copies", "Copies that differ from their seals and are not repaired.",
        lambda status: status.scrub.quarantined),

    _one("ckptfs_history_series", "Series of checkpoints that have sets.", lambda status: status.history.series),
    _one("ckptfs_history_sets", "Checkpoint sets that are kept.", lambda status: status.history.sets),
    _one("ckptfs_history_bytes", "Bytes that only the history holds.", lambda status: status.history.bytes),
    _one("ckptfs_history_limit_bytes", "Bytes that only the history may hold.", lambda status: status.history.bytes_max),
    _one("ckptfs_history_held_files", "Files that a retention rule keeps off the PFS.", lambda status: status.history.held_files),
    _one("ckptfs_history_held_bytes", "Bytes of these files.", lambda status: status.history.held_bytes),

    _process("ckptfs_process_restarts_total", "Restarts of the process since the daemon was started.", "restarts"),
    _process("ckptfs_process_resident_memory_bytes", "Resident memory of the process.", "rss_bytes"),
    _process("ckptfs_process_uptime_seconds", "Age of the process.", "uptime_s"),
    _one("ckptfs_service_memory_needed_bytes", "Memory that the control group of the daemon must allow.",
        lambda status: status.memory.needed_bytes),
    MetricRow("ckptfs_service_memory_limit_bytes", "Memory that it allows; no sample without a limit.", (),
        lambda status: [((), status.memory.limit_bytes)] if status.memory.limit_bytes else []),
    MetricRow("ckptfs_refused_calls_total", "Calls that were refused since the mover was started.", ("where", "reason"),
        lambda status: _sum_by(((one.where, one.reason), one.count) for one in status.refused)),
)  # fmt: skip
"""`where` of a refused call: `peers` or `control`."""


class MetricsEndpoint:
    """Serves one address."""

    def __init__(self, address: str, build_status: Callable[[], pb.Status]) -> None:
        """`address`: HOST:PORT or unix:/PATH. `build_status` is called in threads of the server."""
        self._address = address
        self._text = CachedFigure(lambda: encode_metrics(build_status()), limits.METRICS_FRESH_S)
        self._threads = trio.CapacityLimiter(1)

    async def serve(self) -> None:
        """Serve until cancelled. An address that cannot be had is tried again."""
        reported = ""
        while True:
            try:
                server = await trio.to_thread.run_sync(HttpServer, self._address, self._answer, limiter=self._threads)
            except (OSError, ValueError) as failure:
                if str(failure) != reported:
                    reported = str(failure)
                    log.warning("metrics at %s: cannot be served: %s; Prometheus gets no answer; trying again", self._address, reported)
                await trio.sleep(limits.RETRY_LAST_S)
                continue
            log.info("metrics at %s: served", self._address)
            with contextlib.closing(server):
                await trio.to_thread.run_sync(server.serve, abandon_on_cancel=True, limiter=self._threads)

    def _answer(self, request: HttpRequest) -> HttpReply:
        if request.path != "/metrics":
            return refuse(HTTPStatus.NOT_FOUND)
        try:
            return HttpReply(self._text.get(), CONTENT_TYPE)
        except (CkptfsError, OSError) as failure:
            log.debug("metrics: no figures: %s", failure)
            return refuse(HTTPStatus.SERVICE_UNAVAILABLE)
