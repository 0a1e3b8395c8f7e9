"""A campaign: applications and readers on all nodes, seeded faults, and checks of the promises.

A round is a few faults and the repair of everything; then applications rest until every file has its copies, and all nodes are compared.
Faults stay within what is promised. With R copies at most R-1 nodes are away at a time, and the next ones go after the repair.

Checked are: no call fails on a node that reaches the others, even if its mount process or mover is killed (P8); no reader sees a mixture
(P7); what had reached the clique is there and has the right bytes on every node that lives (P9); `latest` is whole (N2); the PFS shows
whole files in order (P6); at the end all nodes and the PFS show the same tree, and no copy is bad (P4).
"""

import contextlib
import errno
import functools
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ckptfs_client.chaos import schedule
from ckptfs_client.chaos.applications import KINDS, Application, Track, WrongContent, find_newest_step, identify_version, read_step
from ckptfs_client.errors import ClientError, CommandFailed
from ckptfs_client.json_answers import FaultResultJson, VerifyJson
from ckptfs_client.lab.laboratory import WAIT_S, LiveCluster, LiveNode, Tree, get_level, wait_until
from ckptfs_client.sets.set_files import verify

REPAIR_S = 150.0
TURN_S = 120.0
PFS_S = 60.0
SETTLE_S = 120.0
WARM_UP_S = 4.0
READS_MAX = 3
DIRECTORY = "campaign"
SAFE = ("clique", "pfs")
RATE_BITS_PER_S = 100_000_000
CUT, DEAD, WIPED, STOPPED, RESTARTED = "cut", "dead", "wiped", "stopped", "restarted"
"""How a node is away."""


class _Over(Exception):
    """The campaign is over: a promise is broken."""


class Campaign:
    """`run` plays rounds; `finish` compares everything. Both raise ClientError if a promise is broken."""

    def __init__(
        self, cluster: LiveCluster, seed: int, setup: schedule.Setup, *, applications: int = 2, kinds: Sequence[type[Application]] = KINDS,
        synced: bool = False, report: Callable[[FaultResultJson], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """`applications` run on each node. `synced`: fsync waits for the clique, and the applications call it."""
        self.cluster, self.setup, self.synced = cluster, setup, synced
        self.away: dict[int, str] = {}
        self.has_etcd, self.has_pfs_refused = True, False
        self.had_islands = False
        """Since the last repair: of two files that islands closed under one name, one lies beside the other."""
        self.tracks: list[Track] = []
        self.results: list[FaultResultJson] = []
        self.complaints: list[str] = []
        self.turns, self.reads, self.loads = 0, 0, 0
        self.over = threading.Event()
        self._rounds, self._source = schedule.iterate_rounds(seed, setup), random.Random(seed)
        self._report, self._go, self._began_s = report, threading.Event(), time.monotonic()
        self._epoch, self._lives, self._story = 0, [0] * len(cluster.nodes), list[str]()
        self._faults = FaultMaker(self)
        self._shown: dict[str, int] = {}
        self.applications: list[Application] = []
        for number in range(applications * len(cluster.nodes)):
            kind, source = kinds[number % len(kinds)], random.Random(self._source.random())
            self.applications.append(kind(f"{kind.__name__.lower()}{number}", number % len(cluster.nodes), source, self))
        self.tracks = [track for one in self.applications for track in one.tracks]
        self._resting = {one.name: threading.Event() for one in self.applications}
        acts: list[tuple[Callable[..., None], object]] = [(self._work, one) for one in self.applications]
        acts += [(self._read, number) for number in range(len(cluster.nodes))] + [(self._observe_levels, 0)]
        acts += [(self._read_pfs, 0)] if setup.with_pfs else []
        self._threads = [threading.Thread(target=self._guard, args=one, daemon=True) for one in acts]

    # --- what applications ask ----------------------------------------------------------------------------------------

    def get_epoch(self, node: int) -> int:
        """Return the number of changes so far; -1 if the node does not reach all others now."""
        return self._epoch if self.is_connected(node) else -1

    def get_life(self, node: int) -> int:
        """Return a number that changes when the node fails to reach all living nodes; -1 while it does."""
        return self._lives[node] if self.is_connected(node) else -1

    def is_alive(self, node: int) -> bool:
        """Return True if the node's applications run, even if it is cut off."""
        return self.away.get(node) in (None, CUT)

    def is_connected(self, node: int) -> bool:
        """Return True if a node reaches etcd and the others."""
        return self.has_etcd and node not in self.away

    def is_connected_since(self, node: int, epoch: int) -> bool:
        """Return True if the node reached all others since `get_epoch`."""
        return self.is_connected(node) and epoch == self._epoch

    def note_change(self, *nodes: int) -> None:
        """Note that nodes go or come back."""
        for node in nodes:
            self._lives[node] += 1
        self._epoch += 1

    def say(self, what: str) -> None:
        """Add a line to the story."""
        self._story.append(f"{time.monotonic() - self._began_s:7.2f} {what}")

    def complain(self, what: str) -> None:
        """Note a broken promise."""
        self.say(f"COMPLAINT {what}")
        self.complaints.append(what)

    @property
    def story(self) -> str:
        """What happened, and what was wrong."""
        return "\n".join([*self._story, *self.complaints])

    def _require_kept(self) -> None:
        if self.complaints:
            raise CommandFailed(f"a promise is broken: {self.complaints[0]}")

    # --- applications -------------------------------------------------------------------------------------------------

    def _guard(self, act: Callable[..., None], subject: object) -> None:
        try:
            while not self.over.is_set():
                act(subject)
        except _Over:
            pass
        except BaseException:
            self.complain(traceback.format_exc())

    def _work(self, one: Application) -> None:
        """Run one application until the campaign is over."""
        begun = False
        while not self.over.is_set():
            if not self._go.is_set():
                one.end()
                self._resting[one.name].set()
                self._wait_until_go()
                self._resting[one.name].clear()
            root = self._get_path(one.node, one.name)
            epoch, node, life = self.get_epoch(one.node), one.node, self.get_life(one.node)
            try:
                if not begun:
                    one.begin(root)
                    begun = True
                one.turn(root)
                self.turns += 1
            except OSError as failure:
                is_own = all(track.writer in (-1, node) for track in one.tracks)
                is_steady = self._epoch == epoch or (self.get_life(node) == life and is_own)
                if is_steady and self.is_connected(node) and not _is_excused(one, failure):
                    self.complain(f"{one.name} on node{node + 1}: {failure}\n{traceback.format_exc()}")
                    raise _Over from None
                self.say(f"{one.name} on node{one.node + 1}: {failure}")
                one.end()
                begun = False
                self._move(one)
            self.over.wait(one.source.random() * 0.3)
        one.end()

    def _move(self, one: Application) -> None:
        """Let an application start again: on another node, or when its node is back."""
        if self.is_alive(one.node):
            self.over.wait(0.5)
            return
        present = [node for node in range(len(self.cluster.nodes)) if node not in self.away]
        if present and one.source.random() < 0.5:
            one.node = one.source.choice(present)
            self.say(f"{one.name} goes on on node{one.node + 1}")
            # The death of its former node is found after a while.
            self.over.wait(2.0)
            return
        while not self.is_alive(one.node) and not self.over.is_set():
            if not self._go.is_set():
                self._resting[one.name].set()
            self.over.wait(0.1)

    def _wait_until_go(self) -> None:
        while not self._go.wait(0.1):
            if self.over.is_set():
                raise _Over

    # --- readers ------------------------------------------------------------------------------------------------------

    def _get_path(self, node: int, path: str) -> Path:
        return self.cluster.nodes[node].path / DIRECTORY / path

    def _read(self, node: int) -> None:
        """Read one file on a node, or load the newest checkpoint of a series."""
        self.over.wait(0.03)
        if not self.is_alive(node):
            return
        track = random.choice(self.tracks)
        self.check(node, track)
        self.reads += 1
        if track.is_directory:
            self._load_latest(node, track)

    def _load_latest(self, node: int, track: Track) -> None:
        """Load what `.ckptfs/latest` shows of a series. It may be gone by now, but never in part."""
        series = self.cluster.nodes[node].path / ".ckptfs" / "latest" / DIRECTORY / track.path / "step_*"
        with contextlib.suppress(OSError):
            try:
                step = Path(os.path.realpath(series))
                if step.name != series.name:
                    read_step(step, track.origin)
                    self.loads += 1
            except WrongContent as wrong:
                self.complain(f"node{node + 1}: latest of {track.path} is {step.name}, which does not load: {wrong.args[0]}")

    def _read_pfs(self, _: int) -> None:
        """Check that the PFS shows whole files, in order."""
        self.over.wait(0.05)
        track = random.choice(self.tracks)
        with contextlib.suppress(FileNotFoundError):
            try:
                found = identify(track, self.cluster.pfs / DIRECTORY / track.path)
            except WrongContent as wrong:
                if not track.is_broken_off(wrong.args[1]):
                    self.complain(f"the PFS: {wrong.args[0]}")
                return
            if found is None or track.records is not None:
                return
            # Files that the PFS refused are set aside, and come out of order.
            shown = 0 if self.has_pfs_refused or self.had_islands else self._shown.get(track.path, 0)
            if not shown <= found <= track.latest:
                self.complain(f"the PFS shows {found} of {track}, after {shown}")
            self._shown[track.path] = found

    def check(self, node: int, track: Track) -> int | None:
        """Read a track on a node, and complain unless that may be shown. Return the version."""
        epoch, floor, lost = self.get_epoch(node), track.floor, track.lost
        found: int | None = None
        try:
            found = identify(track, self._get_path(node, track.path))
        except FileNotFoundError:
            if track.is_directory and track.floor > floor:
                return None
        except OSError as failure:
            if epoch != -1 and self.is_connected_since(node, epoch) and not (lost or track.lost) and self._is_writer_present(track):
                self.complain(f"node{node + 1}: {failure} of {track}")
            return None
        except WrongContent as wrong:
            data = wrong.args[1]
            if not track.is_being_written(data, floor) and not (track.writer == node and track.is_written_over(data, floor)):
                self.complain(f"node{node + 1}: {wrong.args[0]}\nof {track}")
            return track.broken if track.is_broken_off(data) else None
        if not self._is_writer_present(track):
            floor = min(floor, track.durable)
        if not track.may_show(found, floor, strict=epoch != -1 and self.is_connected_since(node, epoch)):
            beside = self._list_beside(node, track)
            if self.had_islands and any(isinstance(version, int) and version >= floor for version in beside.values()):
                track.mark_beside(found or 0)
            else:
                self.complain(f"node{node + 1} shows {found} of {track}, floor was {floor}; beside it: {beside}")
        return found

    def _list_beside(self, node: int, track: Track) -> dict[str, int | str | None]:
        """Return the conflict copies of a track, with their versions."""
        path, found = self._get_path(node, track.path), dict[str, int | str | None]()
        for other in path.parent.glob(f"{path.name}.ckptfs-*"):
            try:
                found[other.name] = identify(track, other)
            except (OSError, WrongContent) as failure:
                found[other.name] = str(failure)
        return found

    def _is_writer_present(self, track: Track) -> bool:
        return track.writer not in self.away

    def _observe_levels(self, _: int) -> None:
        """Note what has reached the clique."""
        self.over.wait(0.3)
        for track in self.tracks:
            node = next((node for node in range(len(self.cluster.nodes)) if self.is_connected(node)), None)
            if node is None or self.over.is_set():
                return
            with contextlib.suppress(OSError):
                number = track.latest
                if number and all(get_level(path) in SAFE for path in self._list_files(node, track)):
                    track.mark_safe(number)

    def _list_files(self, node: int, track: Track) -> list[Path]:
        """Return the files of the latest version."""
        path = self._get_path(node, track.path)
        if track.is_directory:
            return sorted((path / f"step_{track.latest}").iterdir())
        return [] if track.latest in track.absent else [path]

    # --- the course ---------------------------------------------------------------------------------------------------

    def run(self, is_enough: Callable[[int], bool]) -> None:
        """Play rounds until enough are done."""
        self._get_path(0, "common").mkdir(parents=True, exist_ok=True)
        self._go.set()
        for thread in self._threads:
            thread.start()
        self.pause(WARM_UP_S)
        number = 0
        while not is_enough(number):
            number += 1
            for fault in next(self._rounds):
                self._record(number, str(fault), functools.partial(self._faults.make, fault))
                self.pause(fault.pause_s)
            self._record(number, "repair", self._mend)

    def _record(self, number: int, name: str, act: Callable[[], str]) -> None:
        """Act, and record the result, even if it is a failure."""
        self.say(name)
        result = FaultResultJson(at_s=round(time.monotonic() - self._began_s, 1), round=number, fault=name, result="a promise is broken")
        try:
            result["result"] = act()
            self._require_kept()
        finally:
            self.results.append(result)
            self._report(result)
            self.say(f"{name}: {result['result']}")

    def pause(self, seconds: float) -> None:
        """Let applications and readers work for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._require_kept()
            self.over.wait(0.1)

    def _mend(self) -> str:
        """Undo all faults; applications rest until every file has its copies again."""
        began_s = time.monotonic()
        self._faults.resume()
        self.cluster.mend()
        self.note_change(*range(len(self.cluster.nodes)))
        self.has_etcd = True
        self.away.clear()
        self.note_change(*range(len(self.cluster.nodes)))
        self.pause(self._source.choice([0.0, 5.0]))
        with self._rest():
            wait_until(lambda: not self._find_unsafe(), REPAIR_S, lambda: f"every file has its copies again: {self._find_unsafe()}")
            for track in self.tracks:
                track.mark_returned()
            for node in range(len(self.cluster.nodes)):
                for track in self.tracks:
                    found = self.check(node, track)
                    if not track.hopeless and (found or 0) < track.durable and not track.has_gaps:
                        self.complain(f"node{node + 1} shows {found} at rest of {track}")
            self.had_islands = False
        return f"every file has its copies after {time.monotonic() - began_s:.1f} s, and all nodes show them"

    @contextlib.contextmanager
    def _rest(self) -> Iterator[None]:
        """Let all applications rest between two turns."""
        self._go.clear()
        try:
            wait_until(lambda: self.complaints or all(event.is_set() for event in self._resting.values()), TURN_S, lambda: "all rest")
            self._require_kept()
            yield
        finally:
            self._go.set()

    def _find_unsafe(self) -> str:
        """Return a file that has a copy and not enough of them; empty if there is none."""
        for track in self.tracks:
            top = self._get_path(0, track.path)
            for path in [found for found in top.rglob("*") if found.is_file()] if track.is_directory else [top]:
                with contextlib.suppress(FileNotFoundError):
                    if (found := get_level(path)) not in SAFE and not (found == "none" and track.may_be_without_bytes(path)):
                        return f"{path} is {found}, {track}"
        return ""

    def finish(self) -> None:
        """Compare: all nodes and the PFS show the same tree, and no copy is bad."""
        if self.turns <= len(self.applications):
            raise CommandFailed(f"the applications completed only {self.turns} turns")
        with self._rest():
            self.over.set()
            for thread in self._threads:
                thread.join(TURN_S)
        self.cluster.settle(SETTLE_S)
        first = self.cluster.tree(self._get_path(0, ""))
        for node in self.cluster.nodes[1:]:
            if differing := _list_differing(first, self.cluster.tree(node.path / DIRECTORY)):
                self.complain(f"{node.name} and {self.cluster.nodes[0].name} differ in {differing}")
        if self.setup.with_pfs:
            # Of a file that was lost before it was safe, a name is left and no bytes.
            whole: Tree = {path: data for path, data in first.items() if not isinstance(data, int)}

            def differ() -> list[str]:
                return _list_differing(whole, self.cluster.tree(self.cluster.pfs / DIRECTORY))

            wait_until(lambda: not differ(), PFS_S, lambda: f"the PFS shows what the nodes show: {differ()}")
        for node in self.cluster.nodes:
            self._verify(node.path)
        self._require_kept()

    def _verify(self, path: Path) -> None:
        """Read all copies on a node."""
        found: VerifyJson = {"files": 0, "bytes": 0, "findings": [], "formats": []}
        try:
            verify(path, found)
        except ClientError as failure:
            self.complain(str(failure))
        bad = [one for one in found["findings"] if one["verdict"] in ("bad", "unreadable")]
        self.complaints += [f"bad copy: {one['path']}: {one['what']}" for one in bad]
        self.complaints += [f"{one['path']}: {one['flaw']}" for one in found["formats"] if one["flaw"]]


def _list_differing(one: Tree, other: Tree) -> list[str]:
    return sorted(path for path in one.keys() | other.keys() if one.get(path, 0) != other.get(path, 0))


def identify(track: Track, path: Path) -> int | None:
    """Return the version at a path. Raises WrongContent, OSError."""
    if track.is_directory:
        return find_newest_step(path, track.origin)
    data = _read_again(path) if track.is_changed_in_place else path.read_bytes()
    return identify_version(track.origin, data) if track.records is None else track.records.count(data)


def _read_again(path: Path) -> bytes:
    """Return the bytes of a file that may be written in place meanwhile.

    A fetch that is overtaken by another node's write fails with EIO, so it is tried again.
    """
    for _ in range(READS_MAX - 1):
        try:
            return path.read_bytes()
        except OSError as failure:
            if failure.errno != errno.EIO:
                raise
    return path.read_bytes()


def _is_excused(one: Application, failure: OSError) -> bool:
    """Return True if a file cannot be read because its last bytes went with a node. Its name can be."""
    return failure.errno == errno.EIO and any(track.lost for track in one.tracks)


# --- faults -----------------------------------------------------------------------------------------------------------


class FaultMaker:
    """Makes the faults of a schedule.

    A fault takes nodes, links, etcd or the PFS away, or has a node restart. It tells the tracks first, so that readers know what they may
    see.
    """

    def __init__(self, campaign: "Campaign") -> None:
        self._campaign, self._cluster = campaign, campaign.cluster

    def make(self, fault: schedule.Fault) -> str:
        """Make a fault; return what came of it."""
        began_s = time.monotonic()
        return self._act(fault, fault.target) or f"done in {time.monotonic() - began_s:.1f} s"

    def _act(self, fault: schedule.Fault, number: int) -> str:
        """Make a fault. Returns what there is to say of it. `number`: of its node, or of its member of etcd."""
        match fault.kind:
            # Nodes that stay away until the round ends.
            case "kill":
                self._lose(number, DEAD).kill()
                self._note_dead(number)
            case "kill_supervisor":
                self._lose(number, DEAD).kill_supervisor()
                # Like a power cut for the applications: they end with their mount.
                self._cluster[number].kill()
                self._note_dead(number)
            case "wipe":
                self._lose(number, WIPED).wipe(nvme=fault.detail == "nvme")
                self._note_dead(number, wiped=True)
            case "cut":
                self._lose(number, CUT).cut()
            case "cut_etcd":
                self._lose(number, CUT).reach_etcd(up=False)
            case "stand_still":
                self._lose(number, STOPPED).stand_still()
                self._campaign.pause(fault.still_s)
            # Nodes that come back at once.
            case "restart_all":
                self._restart_all(with_end=fault.detail == "SIGTERM")
            case "kill_mount" | "kill_mover":
                return self._replace(number, fault.kind.removeprefix("kill_"))
            # What lies between them.
            case "slow":
                self._cluster[number].slow(RATE_BITS_PER_S)
            case "kill_member" | "pause_member":
                self._cluster.signal_etcd(signal.SIGKILL if fault.kind == "kill_member" else signal.SIGSTOP, number)
            case "stop_etcd":
                self._campaign.has_etcd, self._campaign.had_islands = False, True
                self._campaign.note_change(*range(len(self._cluster.nodes)))
                self._cluster.laboratory.stop_etcd()
            case "refuse_pfs":
                self._campaign.has_pfs_refused = True
                is_done = self._cluster.laboratory.refuse_pfs(refused=True)
                return "" if is_done else "not possible: this filesystem has no immutable directories"
            case _:
                raise ValueError(f"{fault.kind} is no fault")
        return ""

    def resume(self) -> None:
        """Let nodes go on that stand still."""
        for node, how in self._campaign.away.items():
            if how == STOPPED:
                self._cluster[node].go_on()

    def _lose(self, number: int, how: str) -> LiveNode:
        """Note that a node is about to go; return it."""
        campaign = self._campaign
        for track in campaign.tracks:
            if how != CUT:
                track.mark_away(number)
        campaign.away[number] = how
        campaign.had_islands |= how in (CUT, STOPPED)
        campaign.note_change(number)
        return self._cluster[number]

    def _note_dead(self, number: int, *, wiped: bool = False) -> None:
        for track in self._campaign.tracks:
            track.mark_broken_off(number)
            if wiped:
                track.mark_wiped(number)

    def _restart_all(self, *, with_end: bool) -> None:
        """Restart one node after the other, the next one when all live."""
        campaign = self._campaign
        for number in range(len(self._cluster.nodes)):
            node = self._lose(number, RESTARTED)
            node.end() if with_end else node.kill()
            self._note_dead(number)
            node.start()
            wait_until(lambda: self._cluster[0].count_alive() == len(self._cluster.nodes), WAIT_S, lambda: "all nodes live")
            del campaign.away[number]
            campaign.note_change(number)
            campaign.say(f"{node.name} is back")

    def _replace(self, number: int, role: str) -> str:
        began_s = time.monotonic()
        if self._campaign.is_alive(number):
            self._cluster[number].replace(role)
        return f"another {role} process after {time.monotonic() - began_s:.1f} s"
