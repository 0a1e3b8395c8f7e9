"""Jobs on all nodes at once, readers on the others, and seeded faults among them; when all is mended everything is compared.

Faults stay within what is promised: with R copies at most R-1 nodes are away at a time, and before the next ones go all has its copies.
"""

import contextlib
import errno
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cluster_faults import USUAL, Faults
from cluster_jobs import KINDS, Job, newest_step
from cluster_lab import ClusterUnderTest, level
from cluster_model import Track, number_of

REPAIR_S = 150.0
TURN_S = 120.0
PFS_S = 60.0
SAFE = ("clique", "pfs")
Tree = dict[str, bytes | int | None]


class Ended(Exception):
    """The storm is over, somebody has complained."""


class Storm:
    """`run(episodes)` makes faults; `finish` compares."""

    def __init__(
        self, cluster: ClusterUnderTest, source: random.Random, losses: int, longest_s: float = 15.0, jobs: int = 2, *,
        kinds: Sequence[type[Job]] = KINDS, faults: Sequence[str] = USUAL, synced: bool = False,
    ) -> None:  # fmt: skip
        """At most `losses` nodes are away at a time; `longest_s` bounds the pauses between faults; `jobs` run on each node.

        `synced`: fsync waits for the clique, the jobs call it, and what it has acknowledged must outlive the node.
        """
        self.cluster, self.source, self.synced = cluster, source, synced
        self.away: dict[int, str] = {}
        self.etcd = True
        self.members_away = 0
        self.epoch = 0
        self._lives = [0] * len(cluster.nodes)
        self.go = threading.Event()
        self.over = threading.Event()
        self.complaints: list[str] = []
        self.told: list[str] = []
        self.turns = 0
        self.reads = 0
        self._began_s, self._longest_s = time.monotonic(), longest_s
        nodes = range(len(cluster.nodes))
        self.jobs: list[Job] = []
        for number in range(jobs * len(cluster.nodes)):
            kind = kinds[number % len(kinds)]
            self.jobs.append(kind(f"{kind.__name__.lower()}{number}", number % len(cluster.nodes), random.Random(source.random()), self))
        self.tracks = [track for job in self.jobs for track in job.tracks]
        self.faults = Faults(self, losses, faults)
        self._shown: dict[str, int] = {}
        self._resting = {job.name: threading.Event() for job in self.jobs}
        self._threads = [threading.Thread(target=self._guarded, args=(self._work, job), daemon=True) for job in self.jobs]
        self._threads += [threading.Thread(target=self._guarded, args=(self._read, node), daemon=True) for node in nodes]
        self._threads.append(threading.Thread(target=self._guarded, args=(self._look, 0), daemon=True))
        if cluster.pfs.exists():
            self._threads.append(threading.Thread(target=self._guarded, args=(self._read_pfs, 0), daemon=True))

    # --- what jobs ask ------------------------------------------------------------------------------------------------

    def mark(self, node: int) -> object:
        return self.epoch if self.connected(node) else -1

    def clean(self, node: int, mark: object) -> bool:
        """With a mark: whether the node reached everybody all the time; without: whether it lives at all."""
        if mark is None:
            return self.away.get(node) in (None, "cut")
        return self.connected(node) and mark == self.epoch

    def connected(self, node: int) -> bool:
        return self.etcd and node not in self.away

    def changed(self, *nodes: int) -> None:
        for node in nodes:
            self._lives[node] += 1
        self.epoch += 1

    def life(self, node: int) -> int:
        """Stays the same as long as a node reaches everybody who lives; -1 while it does not."""
        return self._lives[node] if self.connected(node) else -1

    def another(self, node: int) -> int:
        there = [found for found in range(len(self.cluster.nodes)) if found not in self.away]
        return random.choice([found for found in there if found != node] or there or [node])

    def say(self, what: str) -> None:
        self.told.append(f"{time.monotonic() - self._began_s:7.2f} {what}")

    def complain(self, what: str) -> None:
        self.say(f"COMPLAINT {what}")
        self.complaints.append(what)

    # --- threads ------------------------------------------------------------------------------------------------------

    def _guarded(self, act: Callable[..., None], subject: object) -> None:
        try:
            while not self.over.is_set():
                act(subject)
        except Ended:
            pass
        except BaseException:
            self.complain(traceback.format_exc())

    def _work(self, job: Job) -> None:
        """One job, until the storm is over."""
        begun, epoch = False, -1
        while not self.over.is_set():
            if not self.go.is_set():
                job.end()
                self._resting[job.name].set()
                self._wait(self.go)
                self._resting[job.name].clear()
            root = self.cluster[job.node].path / "campaign" / job.name
            epoch, node, life = self.epoch if self.connected(job.node) else -1, job.node, self.life(job.node)
            try:
                if not begun:
                    job.begin(root)
                    begun = True
                job.turn(root)
                self.turns += 1
            except OSError as failure:
                steady = self.epoch == epoch or (self.life(node) == life and all(track.writer in (-1, node) for track in job.tracks))
                if steady and self.connected(node) and not _excused(job, failure):
                    self.complain(f"{job.name} on node {job.node}: {failure}\n{traceback.format_exc()}")
                    raise Ended from None
                self.say(f"{job.name} on node {job.node}: {failure}")
                job.end()
                begun = False
                self._next_place(job)
            self.over.wait(job.source.random() * 0.3)
        job.end()

    def _next_place(self, job: Job) -> None:
        """Start again elsewhere, or when the node is back."""
        if self.away.get(job.node) in (None, "cut"):
            self.over.wait(0.5)
            return
        there = [node for node in range(len(self.cluster.nodes)) if node not in self.away]
        if there and job.source.random() < 0.5:
            job.node = job.source.choice(there)
            self.say(f"{job.name} goes on on node {job.node}")
            # Its own node's death is found out after a while.
            self.over.wait(2.0)
            return
        while self.away.get(job.node) not in (None, "cut") and not self.over.is_set():
            if not self.go.is_set():
                self._resting[job.name].set()
            self.over.wait(0.1)

    def _wait(self, event: threading.Event) -> None:
        while not event.wait(0.1):
            if self.over.is_set():
                raise Ended

    def _read(self, node: int) -> None:
        self.over.wait(0.03)
        if self.away.get(node) not in (None, "cut"):
            return
        track = random.choice(self.tracks)
        self.check(node, track)
        self.reads += 1

    def _read_pfs(self, _: int) -> None:
        """What the PFS shows is whole, and was so once."""
        self.over.wait(0.05)
        track = random.choice(self.tracks)
        path = self.cluster.pfs / "campaign" / track.path
        with contextlib.suppress(FileNotFoundError):
            try:
                found = _seen(track, path, newest=False)
            except AssertionError as wrong:
                if not track.is_broken_off(wrong.args[1] if len(wrong.args) > 1 else b"?"):
                    self.complain(f"the PFS: {wrong}")
                return
            if found is None or track.history is not None:
                return
            if not self._shown.get(track.path, 0) <= found <= track.latest:
                self.complain(f"the PFS shows {found} of {track}, after {self._shown.get(track.path, 0)}")
            self._shown[track.path] = found

    def check(self, node: int, track: Track) -> int | None:
        """What one node shows of one track must be what may be shown."""
        mark, floor, lost, life = self.mark(node), track.floor, track.lost, track.history and len(track.history.now)
        path = self.cluster[node].path / "campaign" / track.path
        found: int | None = None
        try:
            found = _seen(track, path, newest=False)
        except FileNotFoundError:
            if track.path.endswith("steps") and track.floor > floor:
                return None
        except OSError as failure:
            if self.clean(node, mark) and mark != -1 and not (lost or track.lost) and self._writer_lives(track):
                self.complain(f"node {node}: {failure} of {track}")
            return None
        except AssertionError as wrong:
            data = wrong.args[1] if len(wrong.args) > 1 else b"?"
            if not track.is_being_written(data, floor) and not (track.writer == node and track.is_written_over(data, floor)):
                self.complain(f"node {node}: {wrong.args[0]}\nof {track}, {life}")
            return None
        if not self._writer_lives(track):
            floor = min(floor, track.durable)
        if not track.may_show(found, floor, strict=mark != -1 and self.clean(node, mark)):
            self.complain(f"node {node} shows {found} of {track}, floor was {floor}")
        return found

    def _writer_lives(self, track: Track) -> bool:
        return track.writer not in self.away

    def _look(self, _: int) -> None:
        """What has reached the clique."""
        self.over.wait(0.3)
        for track in self.tracks:
            node = next((node for node in range(len(self.cluster.nodes)) if self.connected(node)), None)
            if node is None or self.over.is_set():
                return
            with contextlib.suppress(OSError):
                number = track.latest
                if number and all(level(path) in SAFE for path in self._files(node, track)):
                    track.safe(number)

    def _files(self, node: int, track: Track) -> list[Path]:
        path = self.cluster[node].path / "campaign" / track.path
        if track.path.endswith("steps"):
            return sorted((path / f"step_{track.latest}").iterdir())
        if track.latest in track.absent:
            return []
        return [path]

    def until(self, condition: Callable[[], object], seconds: float, what: Callable[[], str]) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"not so within {seconds:.0f} s: {what()}"
            threading.Event().wait(0.05)

    # --- the course -----------------------------------------------------------------------------------------------------

    def run(self, episodes: int) -> None:
        (self.cluster[0].path / "campaign").mkdir(exist_ok=True)
        (self.cluster[0].path / "campaign" / "common").mkdir(exist_ok=True)
        self.go.set()
        for thread in self._threads:
            thread.start()
        self.pause(4.0)
        for _ in range(episodes):
            for _ in range(self.source.randint(1, 3)):
                self.faults.draw()
                self.pause(min(self._longest_s, self.source.choice([0.5, 3.0, 8.0, 15.0])))
            self.mend()

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert not self.complaints, self.story()
            self.over.wait(0.1)

    # --- and their end ------------------------------------------------------------------------------------------------

    def mend(self) -> None:
        """All is well again; the jobs rest until all has its copies."""
        self.say("mend")
        self.faults.resume()
        self.cluster.mend()
        self.changed(*range(len(self.cluster.nodes)))
        self.etcd, self.members_away = True, 0
        self.away.clear()
        self.changed(*range(len(self.cluster.nodes)))
        self.say("mended")
        self.pause(self.source.choice([0.0, 5.0]))
        with self.resting():
            self.say("all rest")
            self.until(self.repaired, REPAIR_S, lambda: f"every file has its copies again: {self.unsafe}\n{self.story()}")
            for track in self.tracks:
                track.returned()
            self.say("repaired")
            for node in range(len(self.cluster.nodes)):
                for track in self.tracks:
                    found = self.check(node, track)
                    if not track.hopeless and (found or 0) < track.durable and not track.loose_name:
                        self.complain(f"node {node} shows {found} at rest of {track}")
            self.say("compared")
        assert not self.complaints, self.story()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """All jobs stop between two turns."""
        self.go.clear()
        try:
            self.until(
                lambda: self.complaints or all(event.is_set() for event in self._resting.values()),
                TURN_S,
                lambda: f"the jobs rest\n{self.story()}",
            )
            assert not self.complaints, self.story()
            yield
        finally:
            self.go.set()

    unsafe = ""

    def repaired(self) -> bool:
        """Whether every file that has a copy has enough of them."""
        for track in self.tracks:
            for path in self._existing(track):
                with contextlib.suppress(FileNotFoundError):
                    if (found := level(path)) not in SAFE and not (found == "none" and track.lost and track.hopeless):
                        self.unsafe = f"{path} is {found}, {track}"
                        return False
        return True

    def _existing(self, track: Track) -> list[Path]:
        path = self.cluster[0].path / "campaign" / track.path
        return [found for found in path.rglob("*") if found.is_file()] if track.path.endswith("steps") else [path]

    def finish(self) -> None:
        """All nodes and the PFS show the same tree, every file what it should, and no copy is bad."""
        self.say(f"end: {self.turns} turns, {self.reads} reads")
        assert self.turns > len(self.jobs), self.story()
        with self.resting():
            self.over.set()
            for thread in self._threads:
                thread.join(TURN_S)
        self.cluster.settle()
        first = self.cluster.tree(self.cluster[0].path / "campaign")
        for node in self.cluster.nodes[1:]:
            self._demand_same(node.name, first, self.cluster.tree(node.path / "campaign"))
        if self.cluster.pfs.exists():
            # Of what was lost before it was safe a name is left, and no bytes.
            whole = {path: data for path, data in first.items() if not isinstance(data, int)}
            self.until(lambda: self._pfs_tree() == whole, PFS_S, lambda: f"the PFS differs in {_differing(whole, self._pfs_tree())}")
        for node in self.cluster.nodes:
            node.command("verify", node.path)
        assert not self.complaints, self.story()

    def _demand_same(self, name: str, first: Tree, tree: Tree) -> None:
        differing = _differing(first, tree)
        assert not differing, f"{name} and {self.cluster[0].name} differ in {differing}\n{self.story()}"

    def _pfs_tree(self) -> Tree:
        return self.cluster.tree(self.cluster.pfs / "campaign")

    def story(self) -> str:
        return "\n".join([*self.told, *self.complaints])


def _differing(one: Tree, other: Tree) -> list[str]:
    return sorted(path for path in one.keys() | other.keys() if one.get(path, 0) != other.get(path, 0))


def _seen(track: Track, path: Path, *, newest: bool) -> int | None:
    if track.path.endswith("steps"):
        return newest_step(path, track.origin)
    data = path.read_bytes()
    return number_of(track.origin, data) if track.history is None else track.history.records(data, newest=newest)


def _excused(job: Job, failure: OSError) -> bool:
    """A file whose last bytes went with a node cannot be read until it is written anew; its name can."""
    return failure.errno == errno.EIO and any(track.lost for track in job.tracks)
