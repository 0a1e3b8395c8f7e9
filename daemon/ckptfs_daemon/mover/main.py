"""The mover process: everything that moves bytes. `_serve` is the table of contents.

Each flow runs in a lane. Lanes share the catalog and wake each other with hints; the mount's hints come over the wake channel. When the
supervisor asks it to drain, the mover does so and goes on working. When asked to stop, it drains once more and exits with 0. If the
supervisor has ended, it exits at once.

Crash safety: every step leaves the catalog consistent, and the next mover recovers before it reports that it is ready.
"""

import contextlib
import functools
import logging
import os
import signal
import socket

import trio

from ckptfs import limits, server_limits
from ckptfs.catalog import copies, mover_requests, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get_shown_path
from ckptfs.catalog.journal import get_instance_id
from ckptfs.coherence.key_state import DirtyKeyTracker
from ckptfs.config import Config
from ckptfs.errors import CATALOG_FAILURES
from ckptfs.event_log import EventKind
from ckptfs.flow.check_pfs import CheckPfs
from ckptfs.flow.evict import Evict
from ckptfs.flow.fetch import Fetch
from ckptfs.flow.prepare import Prepare
from ckptfs.flow.reclaim import Reclaim
from ckptfs.flow.recover import Recover
from ckptfs.flow.scan import Scan
from ckptfs.flow.seal import Seal
from ckptfs.flow.share_blocks import ShareBlocks
from ckptfs.flow.verify import CheckResult, Scrub
from ckptfs.flow.write_back import WriteBack
from ckptfs.flow.write_back.coordination import ClusterWriteBack
from ckptfs.model import Notifier, Tier
from ckptfs.quantities import format_count
from ckptfs.series.rules import install_rules
from ckptfs.tiers import transfer
from ckptfs.tiers.storage import Tiers
from ckptfs_daemon import ipc
from ckptfs_daemon.control import server
from ckptfs_daemon.control.control_context import ControlContext
from ckptfs_daemon.drain import Drain
from ckptfs_daemon.event_writer import events
from ckptfs_daemon.ipc import ChildSetup, ProgressSignal, UpgradeRequests
from ckptfs_daemon.mover import preemption
from ckptfs_daemon.mover.cluster_services import ClusterServices
from ckptfs_daemon.mover.lanes import Flow, Lane, Lanes
from ckptfs_daemon.mover.tier_monitor import TierMonitor

log = logging.getLogger(__name__)

NICE = 5
TROUBLES_POLL_S = 2.0
SILENCE_TROUBLE = "silent pfs:"
SILENCE_REMEDY = "check whether the server of the PFS that holds it answers"


def run(setup: ChildSetup) -> int:
    """Move bytes until the supervisor asks to stop. Returns the exit code."""
    os.nice(NICE)
    server_limits.raise_descriptor_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transfer.ignore_lease_signal()
    config = setup.config
    install_rules(config.series)
    wake_channel = ipc.WakeChannel(setup.wake_socket)
    dirty_keys = None if config.cluster is None else DirtyKeyTracker(lambda: wake_channel.notify(ipc.DIRTY_KEYS))
    db = Database(config.state / "catalog.db", journalled=config.pfs is not None, clustered=dirty_keys is not None, hooks=dirty_keys)
    return trio.run(_serve, setup, db, wake_channel)


async def _serve(setup: ChildSetup, db: Database, wake_channel: ipc.WakeChannel) -> int:
    config = setup.config
    tiers = Tiers.from_config(config, get_instance_id(db), lambda: copies.get_tier_uuid(db, Tier.PFS))
    token = trio.lowlevel.current_trio_token()
    lanes: Lanes
    progress = ProgressSignal()

    def wake(urgent_lane: str) -> None:
        progress.notify()
        ipc.call_soon(token, lanes.wake)
        if urgent_lane:
            ipc.call_soon(token, lanes.wake_now, urgent_lane)

    notify = ipc.MountNotify(wake_channel, wake)
    cluster_services = ClusterServices(db, tiers, config, notify) if config.cluster is not None else None
    flows = _Flows(db, tiers, config, notify, cluster_services)

    def build_lane(name: str, flow: Flow) -> Lane:
        return Lane(name, flow, lambda where, value: summary.set_trouble(db, where, value))

    report_silence = functools.partial(_report_silence, db)
    lanes = Lanes([build_lane(name, flow) for name, flow in flows.lanes])
    await trio.to_thread.run_sync(flows.prepare)
    drain = Drain(db, config, lanes.retry_now)
    upgrades = UpgradeRequests(setup.link)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ipc.send_heartbeats, setup.link, name="heartbeats")
        nursery.start_soon(_handle_wake_ups, wake_channel, lanes, name="wake-ups")
        nursery.start_soon(lanes.run, name="lanes")
        nursery.start_soon(
            lanes.relieve, "fetch", limits.FETCHES_SHARED_MAX + 1, flows.fetch, build_lane, report_silence, name="spare lanes"
        )
        nursery.start_soon(lanes.relieve, "scan", 2, flows.scan, build_lane, report_silence, name="spare lanes")
        nursery.start_soon(lanes.relieve, "check pfs", 2, flows.check_pfs, build_lane, report_silence, name="spare lanes")
        control = _build_control(setup, db, tiers, lanes, cluster_services, progress, drain, upgrades, notify)
        nursery.start_soon(server.serve, control, name="control")
        if cluster_services is not None:
            cluster_services.membership.subscribe(lambda _: lanes.wake())
            cluster_services.membership.on_lease_renewed = lambda lease: wake_channel.notify(ipc.build_message(ipc.LEASE_RENEWED, lease))
            nursery.start_soon(cluster_services.run, name="cluster")
        for monitor in _build_monitors(db, tiers, config, lanes):
            nursery.start_soon(monitor.run, name="tier monitor")
        nursery.start_soon(_watch_troubles, db, name="events of troubles")
        if config.preemption is not None:
            nursery.start_soon(preemption.watch, config, db, drain, name="preemption")
        if cluster_services is not None:
            # Without a view, files on other nodes would seem to have no copies.
            with trio.move_on_after(limits.ETCD_WAIT_S):
                await cluster_services.membership.view_loaded.wait()
        ipc.announce_ready(setup.link)
        await _drain_at_the_end(setup.link, drain, upgrades, lanes)
        db.persist()
        nursery.cancel_scope.cancel()
    await trio.to_thread.run_sync(flows.stop)
    return 0


def _build_control(
    setup: ChildSetup, db: Database, tiers: Tiers, lanes: Lanes, cluster_services: ClusterServices | None, progress: ProgressSignal,
    drain: Drain, upgrades: UpgradeRequests, notify: Notifier,
) -> ControlContext:  # fmt: skip
    token = trio.lowlevel.current_trio_token()
    context = ControlContext(
        setup.config, db, tiers, progress=progress,
        retry_now=functools.partial(trio.from_thread.run_sync, lanes.retry_now, trio_token=token),
        wake_lanes=functools.partial(ipc.call_soon, token, lanes.wake), invalidate_inode=notify.invalidate_inode,
        request_log_level=functools.partial(ipc.request_log_level, setup.link), record_missed_drain=drain.record_missed,
        request_upgrade=upgrades.ask,
    )  # fmt: skip
    if cluster_services is not None:
        context.cluster, context.refresh_pfs_path = cluster_services.figures, cluster_services.refresh_pfs_path
    return context


def _report_silence(db: Database, lane: str, inodes: list[int]) -> None:
    """Name the files or directories whose steps hang at the PFS, or say that none does."""
    value = None
    if inodes:
        what = "the PFS does not answer for it" + (f", nor for {format_count(len(inodes) - 1, 'other')}" if len(inodes) > 1 else "")
        value = {"what": what, "path": get_shown_path(db, inodes[0]), "remedy": SILENCE_REMEDY}
    with contextlib.suppress(*CATALOG_FAILURES):
        summary.set_trouble(db, f"{SILENCE_TROUBLE} {lane}", value)


async def _drain_at_the_end(link: socket.socket, drain: Drain, upgrades: UpgradeRequests, lanes: Lanes) -> None:
    """Wait until the supervisor asks to stop, and drain. Drains before, with the mount attached, if asked."""
    report = functools.partial(ipc.report_drain, link)

    async def drain_attached() -> None:
        await drain.drain_attached(report)
        link.send(ipc.DRAINED)

    async with trio.open_nursery() as nursery:
        await ipc.wait_for_stop(link, lambda: nursery.start_soon(drain_attached, name="drain"), upgrades.refuse)
        nursery.cancel_scope.cancel()
    lanes.end("scan", "check pfs")  # Only a mount publishes what they record; write-back would wait for that.
    await drain.drain_rest(report)


class _Flows:
    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier, cluster_services: ClusterServices | None) -> None:
        self._db = db
        self._config = config
        self._cluster_services = cluster_services
        self._recover = Recover(db, tiers, notify)
        cluster = cluster_services.cluster if cluster_services else None
        self.scan = Scan(db, tiers, config, notify, cluster)
        self.fetch = Fetch(db, tiers, config, notify, cluster)
        flow = db, tiers, config, notify
        self._write_back = WriteBack(*flow) if cluster is None else ClusterWriteBack(*flow, cluster)
        self.check_pfs = CheckPfs(db, tiers, config, notify)
        self._prepare = Prepare(db, tiers, config, notify)
        self.lanes: list[tuple[str, Flow]] = [
            ("seal", Seal(db, tiers, config, notify, (Tier.RAM,))),
            ("evict", Evict(db, tiers, config, notify)),
            ("reclaim", Reclaim(db, tiers, config, notify, (Tier.RAM,))),
            ("blocks", ShareBlocks(db, tiers)),
            ("scrub", Scrub(db, tiers, notify, _record_repaired)),
        ]
        if not config.is_read_only:
            self.lanes += [("prepare", self._prepare)]
        if config.pfs is not None:
            self.lanes += [("scan", self.scan)]
        if config.pfs is not None and not config.is_read_only:
            self.lanes += [("write back", self._write_back), ("check pfs", self.check_pfs)]
        for tier in tiers:
            if tier is Tier.NVME or (tier is Tier.PFS and not config.is_read_only):  # One that hangs must not hold up another.
                self.lanes.append((f"seal {tier}", Seal(db, tiers, config, notify, (tier,))))
                self.lanes.append((f"reclaim {tier}", Reclaim(db, tiers, config, notify, (tier,))))
        if cluster_services is not None:
            self.lanes += cluster_services.list_flows()
        if config.pfs is not None or cluster_services is not None:
            fetches = limits.FETCHES_MAX if cluster_services is None else limits.FETCHES_SHARED_MAX
            self.lanes += [(f"fetch {number}", self.fetch) for number in range(1, fetches + 1)]

    def stop(self) -> None:
        """Give back what no application needs after an orderly end."""
        self._prepare.stop()

    def prepare(self) -> None:
        """Recover before the mount sends requests. Does not touch the PFS, which may hang."""
        summary.delete_reports(self._db)
        self._recover.run()
        if not self._config.is_read_only:
            self._write_back.prepare()
        self.fetch.prepare()
        self.scan.prepare()
        if self._cluster_services is not None:
            self._cluster_services.prepare()


def _record_repaired(path: str, copy: CheckResult) -> None:
    events.record(EventKind.REPAIRED, path=path, tier=copy.tier.value, what=copy.problem, source=copy.source)


def _build_monitors(db: Database, tiers: Tiers, config: Config, lanes: Lanes) -> list[TierMonitor]:
    roots = {Tier.NVME: config.nvme, Tier.PFS: config.pfs}
    return [
        TierMonitor(db, tiers[tier], root, lanes.retry_now, may_mark=not config.is_read_only)
        for tier, root in roots.items()
        if root is not None and tier in tiers
    ]


async def _handle_wake_ups(wake_channel: ipc.WakeChannel, lanes: Lanes) -> None:
    """Wake lanes as the mount's hints say."""
    async for message in wake_channel.receive_messages():
        if message[:1] == ipc.URGENT_REQUEST:
            lanes.wake_now(mover_requests.LANE_BY_KIND.get(message[1:].decode(), mover_requests.ALL_LANES))
        elif message == ipc.WRITER_OPENED:
            lanes.wake("early copies")
        else:
            lanes.wake()
            if message == ipc.LARGE_FILE_CLOSED:
                lanes.wake_now("seal")


async def _watch_troubles(db: Database) -> None:
    """Record troubles until cancelled. The next mover records those that are still there as new ones."""
    known: set[str] = set()
    while True:
        known = record_troubles(db, known)
        await trio.sleep(TROUBLES_POLL_S)


def record_troubles(db: Database, known: set[str]) -> set[str]:
    """Record the troubles that began or ended since the last look; return those that are there."""
    found = {where: value for where, value, _ in summary.list_troubles(db)}
    for where in sorted(found.keys() - known):
        value = found[where]
        events.record(EventKind.TROUBLE, where=where, **{name: value.get(name) for name in ("what", "path", "remedy")})
    for where in sorted(known - found.keys()):
        events.record(EventKind.TROUBLE_OVER, where=where)
    return set(found)
