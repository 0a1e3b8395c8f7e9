"""Wires the mover: everything that moves bytes. Read `_serve` as the table of contents.

The lanes meet in the catalog and wake each other by hints; the mount's hints come over the bell; the supervisor's word over the link.
At its word the mover drains until the deadline, then ends with 0. When the supervisor is gone it ends at once.
If we die here: every step leaves the catalog whole, and the next mover recovers before it says that it is ready.
"""

import functools
import logging
import os
import signal

import trio

from ckptfs import limits
from ckptfs.catalog import peers, report, settling, wants
from ckptfs.catalog.adoption import instance
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing.touching import Touching
from ckptfs.config import Config
from ckptfs.flow.drop import Drop
from ckptfs.flow.evict import Evict
from ckptfs.flow.fetch import Fetch
from ckptfs.flow.recover import Recover
from ckptfs.flow.seal import Seal
from ckptfs.flow.settle import Settle
from ckptfs.flow.visit import Visit
from ckptfs.flow.write_back import WriteBack
from ckptfs.model import Notify, Tier
from ckptfs.tiers import lease
from ckptfs.tiers.place import Places
from ckptfs_daemon import bells, control, descriptors, lifeline
from ckptfs_daemon.inherited import READY, Inherited
from ckptfs_daemon.lanes import Flow, Lane, Lanes
from ckptfs_daemon.neighbours import Neighbours
from ckptfs_daemon.probing import Watch
from ckptfs_daemon.pulse import Pulse

log = logging.getLogger(__name__)

NICE = 5
DRAIN_LOOK_S = 0.05
DRAIN_HURRY_S = 1.0
LOCAL = (Tier.RAM, Tier.NVME)
REMOTE = (Tier.PFS,)


def run(inherited: Inherited) -> int:
    """Move bytes until the supervisor says stop; the exit code."""
    os.nice(NICE)
    descriptors.take_all()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lease.ignore_signal()
    config = inherited.config
    bell = bells.Bell(inherited.bell)
    touching = None if config.cluster is None else Touching(lambda: bell.ring(bells.TOUCHED))
    db = Database(config.state / "catalog.db", journalled=config.pfs is not None, clustered=touching is not None, shared=touching)
    return trio.run(_serve, inherited, db, bell)


async def _serve(inherited: Inherited, db: Database, bell: bells.Bell) -> int:
    config = inherited.config
    places = Places.adopt(config, instance(db))
    token = trio.lowlevel.current_trio_token()
    lanes: Lanes
    pulse = Pulse()

    def wake(at_once: str) -> None:
        pulse.beat()
        token.run_sync_soon(lanes.hint, idempotent=True)
        if at_once:
            token.run_sync_soon(lanes.urge, at_once, idempotent=True)

    notify = bells.MountNotify(bell, wake)
    neighbours = Neighbours(db, places, config, notify) if config.cluster is not None else None
    flows = _Flows(db, places, config, notify, neighbours)
    lanes = Lanes([Lane(name, flow, lambda key, value: settling.report(db, key, value)) for name, flow in flows.lanes()])
    await trio.to_thread.run_sync(flows.prepare)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lifeline.send_alive, inherited.link, name="alive")
        nursery.start_soon(_listen, bell, lanes, name="bell")
        nursery.start_soon(lanes.run, name="lanes")
        ask_level = functools.partial(lifeline.ask_level, inherited.link)
        of_cluster = (neighbours.figures, neighbours.find) if neighbours else (None, lambda inode: None)
        nursery.start_soon(control.serve, inherited, db, places, lanes, of_cluster, ask_level, pulse, name="control")
        if neighbours is not None:
            neighbours.member.subscribe(lambda _: lanes.hint())
            neighbours.member.tell_lease(lambda lease: bell.ring(bells.lease_message(lease)))
            nursery.start_soon(neighbours.run, name="neighbours")
        for watch in _watches(db, places, config, lanes):
            nursery.start_soon(watch.run, name="watch")
        if neighbours is not None:
            # Else the first files that are opened would seem to be nowhere.
            with trio.move_on_after(limits.ETCD_WAIT_S):
                await neighbours.member.met.wait()
        inherited.link.send(READY)
        await lifeline.told_to_stop(inherited.link)
        await _drain(db, lanes, config)
        nursery.cancel_scope.cancel()
    return 0


class _Flows:
    """All steps of a file's path, and which of them may hang on their own."""

    def __init__(self, db: Database, places: Places, config: Config, notify: Notify, neighbours: Neighbours | None) -> None:
        self._db = db
        self._config = config
        self._neighbours = neighbours
        self._recover = Recover(db, places, config, notify)
        self._visit = Visit(db, places, config, notify, neighbours.around if neighbours else None)
        self._fetch = Fetch(db, places, config, notify, neighbours.around if neighbours else None)
        self._write_back = WriteBack(db, places, config, notify, neighbours.around if neighbours else None)
        self._lanes: list[tuple[str, Flow]] = [
            ("seal", Seal(db, places, config, notify, LOCAL)),
            ("evict", Evict(db, places, config, notify)),
            ("drop", Drop(db, places, config, notify, LOCAL)),
            ("settle", Settle(db, places, config, notify)),
        ]
        if config.pfs is not None:
            self._lanes += [
                ("seal pfs", Seal(db, places, config, notify, REMOTE)),
                ("drop pfs", Drop(db, places, config, notify, REMOTE)),
                ("write back", self._write_back),
                ("visit", self._visit),
            ]
        if neighbours is not None:
            self._lanes += neighbours.lanes()
        if config.pfs is not None or neighbours is not None:
            fetches = limits.FETCHES_MAX if neighbours is None else limits.FETCHES_SHARED_MAX
            self._lanes += [(f"fetch {number}", self._fetch) for number in range(1, fetches + 1)]

    def lanes(self) -> list[tuple[str, Flow]]:
        """(name, flow) of every lane."""
        return self._lanes

    def prepare(self) -> None:
        """What must be so before the mount asks anything. Asks nothing of the PFS, which may hang."""
        settling.forget_reports(self._db)
        self._recover.step()
        self._write_back.prepare()
        self._fetch.prepare()
        self._visit.prepare()
        if self._neighbours is not None:
            self._neighbours.prepare()


def _watches(db: Database, places: Places, config: Config, lanes: Lanes) -> list[Watch]:
    roots = {Tier.NVME: config.nvme, Tier.PFS: config.pfs}
    return [Watch(db, places[tier], root, lanes.hurry) for tier, root in roots.items() if root is not None and tier in places]


async def _listen(bell: bells.Bell, lanes: Lanes) -> None:
    """The mount's hints."""
    async for message in bell.messages():
        if message[:1] == bells.URGENT:
            lanes.urge(wants.LANES.get(message[1:].decode(), ""))
        elif message == bells.OPENED:
            lanes.hint("ahead")
        else:
            lanes.hint()
            if message == bells.LARGE:
                lanes.urge("seal")


async def _drain(db: Database, lanes: Lanes, config: Config) -> None:
    """Bring what was closed up to the highest level there is, until the deadline."""
    end = report.journal_end(db)
    with trio.move_on_after(config.drain_deadline_s) as deadline:
        while left := _left(db, end):
            lanes.hurry()
            with trio.move_on_after(DRAIN_HURRY_S):
                while _left(db, end) == left:
                    await trio.sleep(DRAIN_LOOK_S)
    if deadline.cancelled_caught:
        changes, unsealed, unsafe = _left(db, end) or (0, 0, 0)
        message = "drained until the deadline: the PFS lacks %d changes, %d files are not sealed%s; they wait here"
        log.warning(message, changes, unsealed, f", {unsafe} lack copies on other nodes" if unsafe else "")
    db.persist()


def _left(db: Database, end: int) -> tuple[int, int, int] | None:
    """(changes that the PFS lacks, files that are not sealed, files without copies elsewhere); None: there is nothing left."""
    files, _, changes = report.journal_left(db, end)
    left = files + changes, report.unsealed(db), peers.unsafe(db)
    return left if any(left) else None
