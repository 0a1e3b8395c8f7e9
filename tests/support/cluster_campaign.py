"""A seeded campaign: a mixed load and faults on a lab, and a model of what every reader may see.

Files are of three kinds: written as a whole, written aside and renamed, and logs that are appended to. Every byte follows from the
file's name and a version (or a record's number), so whatever a reader gets can be told: a version, the beginning of a log, or garbage.
`floor` is the oldest version that may still be shown: the last one that was closed while its writer reached everybody, brought back to
`durable`, the last one that had reached the clique, when the writer loses its RAM before the later ones did.
"""

import contextlib
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cluster_lab import ClusterUnderTest, level
from daemon_under_test import eventually

RECORD_BYTES = 4096
WHOLE, ASIDE, LOG = "whole", "aside", "log"
NAMES = {WHOLE: 5, ASIDE: 4, LOG: 3}
SMALL, LARGE = (100, 60_000), (4_000_000, 9_000_000)
RATE_BITS_PER_S = 50_000_000
REPAIR_S = 120.0
SAFE = ("clique", "pfs")


def version_bytes(name: str, number: int) -> bytes:
    source = random.Random(f"{name}:{number}")
    size = source.randint(*(LARGE if source.random() < 0.2 else SMALL))
    return f"{name}:{number}\n".encode() + source.randbytes(size)


def log_bytes(name: str, records: int) -> bytes:
    return b"".join(random.Random(f"{name}:{number}").randbytes(RECORD_BYTES) for number in range(records))


def version_of(name: str, kind: str, data: bytes) -> int:
    """Which version these bytes are, or how many whole records. Fails the test for what nobody wrote."""
    if kind == LOG:
        records = len(data) // RECORD_BYTES
        assert data == log_bytes(name, records + 1)[: len(data)], f"{name}: {len(data)} bytes that are no beginning of the log"
        return records
    told, _, number = data[:100].partition(b"\n")[0].decode(errors="replace").rpartition(":")
    assert told == name and number.isdigit(), f"{name}: begins with {data[:60]!r}"
    assert data == version_bytes(name, int(number)), f"{name}: version {number} is mixed or damaged"
    return int(number)


@dataclass
class File:
    """One name. `latest`: written last; 0: nothing. `writer`: who wrote that, a node's index."""

    name: str
    kind: str
    latest: int = 0
    floor: int = 0
    durable: int = 0
    writer: int = -1


@dataclass
class Campaign:
    """`run` makes steps; `finish` mends everything and compares all with all."""

    cluster: ClusterUnderTest
    source: random.Random
    losses: int = 1
    away: dict[int, str] = field(default_factory=dict)
    etcd: bool = True
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.files = [File(f"{kind}{number}", kind) for kind, count in NAMES.items() for number in range(count)]
        self.acts: list[tuple[int, Callable[[], None]]] = [
            (30, self.write), (25, self.read), (8, self.look), (4, self.kill), (4, self.wipe), (4, self.cut), (3, self.slow),
            (3, self.stop_etcd), (12, self.mend),
        ]  # fmt: skip

    def run(self, steps: int) -> None:
        """So many acts, drawn by weight."""
        (self.cluster[0].path / "campaign").mkdir(exist_ok=True)
        for node in self.cluster.nodes:
            # An island knows what it has seen.
            os.listdir(node.path / "campaign")
        weights = [weight for weight, _ in self.acts]
        for step in range(steps):
            act = self.source.choices([act for _, act in self.acts], weights)[0]
            self.told.append(f"{step}: {act.__name__}")
            act()

    # --- the load -----------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """The next version of a file, from a node that lives."""
        node, file = self.source.choice(self._living()), self.source.choice(self.files)
        self.told[-1] += f" {file.name} on node {node}"
        try:
            written = self._written(self._path(node, file), file)
        except OSError as failure:
            # An island may not know the directory, and a log's last bytes may be where nobody reaches them now.
            self.told[-1] += f": {failure.strerror}"
            assert not self._must_read(node, file), f"{file} on node {node}: {failure}\n{self.story()}"
            return
        file.latest, file.writer = max(file.latest, written), node
        if self._connected(node):
            file.floor = written

    def _written(self, path: Path, file: File) -> int:
        if file.kind == LOG:
            return self._append(path, file)
        written = file.latest + 1
        temporary = path.with_suffix(".tmp") if file.kind == ASIDE else path
        temporary.write_bytes(version_bytes(file.name, written))
        if temporary != path:
            temporary.rename(path)
        return written

    def _append(self, path: Path, file: File) -> int:
        """Some records more than the node shows now; how many there are then."""
        before = version_of(file.name, LOG, path.read_bytes()) if path.exists() else 0
        after = before + self.source.randint(1, 20)
        with open(path, "r+b" if path.exists() else "wb") as log:
            log.seek(before * RECORD_BYTES)
            log.write(log_bytes(file.name, after)[before * RECORD_BYTES :])
            log.flush()
            os.fsync(log.fileno())
        return after

    def read(self) -> None:
        """What a node shows must be a version that may be shown."""
        node, file = self.source.choice(self._living()), self.source.choice(self.files)
        self.told[-1] += f" {file.name} on node {node}"
        try:
            found = version_of(file.name, file.kind, self._path(node, file).read_bytes())
        except FileNotFoundError:
            found = 0
        except OSError as failure:
            self.told[-1] += f": {failure.strerror}"
            assert not self._must_read(node, file), f"{file} on node {node}: {failure}\n{self.story()}"
            return
        self.told[-1] += f": {found}"
        assert found <= file.latest, f"{file} on node {node} shows {found}\n{self.story()}"
        if self._connected(node):
            assert found >= file.floor, f"{file} on node {node} shows {found}\n{self.story()}"

    def look(self) -> None:
        """What has reached the clique now."""
        node = next((node for node in self._living() if self._connected(node)), None)
        for file in self.files if node is not None else ():
            with contextlib.suppress(OSError):
                found = level(self._path(node, file))
                if found in SAFE and file.floor == file.latest:
                    file.durable = file.latest

    # --- the faults ---------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        self._lose("killed", lambda node: self.cluster[node].kill())

    def wipe(self) -> None:
        """A node dies and all that it had is lost."""
        self.look()
        for file in self.files:
            self.told[-1] += f" {file.name}={file.durable}/{file.latest}"
        self._lose("wiped", lambda node: self.cluster[node].wipe(nvme=True))

    def cut(self) -> None:
        """A node reaches nobody, and goes on by itself."""
        self._lose("cut", lambda node: self.cluster[node].cut())

    def slow(self) -> None:
        """A node's link becomes slow."""
        self.cluster[self.source.choice(self._living())].slow(RATE_BITS_PER_S)

    def stop_etcd(self) -> None:
        if self.etcd:
            self.cluster.stop_etcd()
            self.etcd = False

    def mend(self) -> None:
        """All is well again, and has the copies that it should have: the next fault may come."""
        self.cluster.mend()
        self.away.clear()
        self.etcd = True
        eventually(self._repaired, REPAIR_S, f"every file has its copies again\n{self.story()}")

    def _lose(self, how: str, act: Callable[[int], None]) -> None:
        if len(self.away) >= self.losses:
            self.told[-1] += " not"
            return
        node = self.source.choice(self._living())
        self.told[-1] += f" node {node}"
        act(node)
        self.away[node] = how
        if how == "wiped":
            for file in self.files:
                if file.writer == node:
                    file.floor = min(file.floor, file.durable)

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """All nodes and the PFS show the same tree, and every file a version that it may have."""
        self.told.append("end")
        self.mend()
        self.cluster.settle()
        trees = {node.name: self.cluster.tree(node.path / "campaign") for node in self.cluster.nodes}
        first = trees["node1"]
        for name, tree in trees.items():
            assert tree.keys() == first.keys(), f"{name} shows {sorted(tree)}, node1 {sorted(first)}\n{self.story()}"
            differing = [path for path in first if tree[path] != first[path]]
            assert not differing, f"{name} and node1 differ in {differing}\n{self.story()}"
        whole = {path: data for path, data in first.items() if not isinstance(data, int)}
        if self.cluster.pfs.exists():
            eventually(lambda: whole.items() <= self._pfs().items(), what=f"the PFS shows the same\n{self.story()}")
            assert self._pfs().keys() <= first.keys()
        for file in self.files:
            data = first.get(file.name)
            if isinstance(data, int):
                # Its last version was closed, its writer lost all it had, and no copy had been made yet.
                assert file.durable < file.latest, f"{file} is lost: {os.strerror(data)}\n{self.story()}"
                continue
            found = 0 if data is None else version_of(file.name, file.kind, data)
            assert file.durable <= found <= file.latest, f"{file} is {found} at the end\n{self.story()}"

    def _pfs(self) -> dict[str, bytes | int | None]:
        return self.cluster.tree(self.cluster.pfs / "campaign")

    def story(self) -> str:
        """What happened, for messages."""
        return "\n".join(self.told)

    # --- what is so now -----------------------------------------------------------------------------------------------

    def _path(self, node: int, file: File) -> Path:
        return self.cluster[node].path / "campaign" / file.name

    def _living(self) -> list[int]:
        return [node for node in range(len(self.cluster.nodes)) if self.away.get(node) in (None, "cut")]

    def _connected(self, node: int) -> bool:
        return self.etcd and node not in self.away

    def _must_read(self, node: int, file: File) -> bool:
        """Whether there is no excuse for an error: the reader reaches everybody, and enough copies live."""
        return self._connected(node) and (file.durable == file.latest or file.writer not in self.away)

    def _repaired(self) -> bool:
        """Whether every file that has a copy has enough of them."""
        for file in self.files:
            path = self._path(0, file)
            with contextlib.suppress(FileNotFoundError):
                if level(path) not in (*SAFE, "none"):
                    return False
        return True
