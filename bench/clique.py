"""Copies between real nodes: a lab of two with mounts, mutual TLS and an etcd; tmpfs on both sides, no PFS.

Each measure runs in rounds and returns medians; A and B take turns. "To the clique" ends when the level of the last file is `clique`, as an
application sees it. Alone: clique.py [--gib N] [--rounds N] [--only WORD].
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("tests/support", "daemon", "client", ".")]

from ckptfs_client.client import Client, open_client  # noqa: E402 - found by the line above
from ckptfs_client.lab import network  # noqa: E402
from ckptfs_client.mounts import find  # noqa: E402
from cluster_lab import ClusterUnderTest, NodeUnderTest  # noqa: E402
from daemon_under_test import ENVIRONMENT  # noqa: E402

MIB = 1 << 20
PIECE = 4 * MIB
WAIT_S = 120.0
PACE_BYTES_PER_S = 500e6
"""The pace of a writer whose file is nearly complete on the peer at its close; about torch.save on one core."""
RANK_BYTES = 256 * MIB
SMALL_FILES, SMALL_BYTES, SMALL_WRITERS, SMALL_ROUNDS = 1000, 4096, 8, 3
OPERATIONS = 200


class Clique:
    """Two nodes of a lab."""

    def __init__(self) -> None:
        os.environ.update(ENVIRONMENT)
        self.lab = ClusterUnderTest(2, 2, with_pfs=False, ram="6G")
        self.nodes = self.lab.nodes
        self._number = 0

    def fresh(self, node: int, word: str) -> Path:
        """Return an unused path on a node."""
        self._number += 1
        return self.nodes[node].path / f"{word}-{self._number}"

    def settle(self) -> None:
        """Delete the files and drain both nodes, so that a round does not pay for the previous one."""
        for node in self.nodes:
            for path in node.path.iterdir():
                if path.is_file():  # The directories of small files stay: deleting them takes long and frees little.
                    path.unlink()
        for node in self.nodes:
            with Client(find(node.path)) as client:
                for _ in client.drain(WAIT_S):
                    pass

    def close(self) -> None:
        self.lab.close()


@contextlib.contextmanager
def lab() -> Iterator[Clique]:
    """Start a lab of two nodes; delete it at the end."""
    made = Clique()
    try:
        yield made
    finally:
        made.close()


# --- acts ------------------------------------------------------------------------------------------------------------


class Noise:
    """Random bytes, made once. Every block is changed before each use, so no node has it."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(os.urandom(PIECE) * (size // PIECE))
        self.view = memoryview(self.data)

    def renew(self, share: float = 1.0) -> memoryview:
        """Change the first `share` of all blocks."""
        for start in range(0, int(len(self.data) * share), PIECE):
            self.data[start : start + 16] = os.urandom(16)
        return self.view


def write(path: Path, data: memoryview, pace: float = float("inf")) -> None:
    """Write and close, at most `pace` bytes a second."""
    begun = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(data), PIECE):
            file.write(data[start : start + PIECE])
            time.sleep(max(0.0, begun + min(start + PIECE, len(data)) / pace - time.perf_counter()))


def await_clique(path: Path) -> None:
    """Wait until a file, or all below a directory, has the level `clique`, as `ckptfs wait` does."""
    client, inode = open_client(path)
    with client:
        for _ in client.wait(inode, "clique", WAIT_S):
            pass


def timed(act: Callable[[], object]) -> float:
    """Return the seconds that `act` takes."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def pids(node: NodeUnderTest) -> dict[str, int]:
    """Return the daemon's processes by role."""
    found: dict[str, Any] = json.loads((node.state / "processes.json").read_text())
    return {role: value["pid"] for role, value in found.items() if isinstance(value, dict) and value.get("pid")}


@contextlib.contextmanager
def held(*nodes: NodeUnderTest) -> Iterator[None]:
    """Stop the movers of these nodes for a while."""
    movers = [pids(node)["mover"] for node in nodes]
    for pid in movers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in movers:
            os.kill(pid, signal.SIGCONT)


def sent_bytes(node: NodeUnderTest) -> int:
    """Return the bytes that a node has sent over its interface."""
    place = node.namespace
    lines = network.run_in_namespace(place, lambda: Path("/proc/thread-self/net/dev").read_text()).splitlines()
    return int(next(line for line in lines if line.strip().startswith(network.CARD)).split(":")[1].split()[8])


# --- measures --------------------------------------------------------------------------------------------------------


def eager(clique: Clique, size: int, rounds: int) -> tuple[float, str]:
    """Compare the time from close to the clique, after a write at a checkpoint's pace, with replication that starts at the close."""
    noise, pairs = Noise(size), []
    for number in range(rounds):
        pair = {}
        for ahead in (True, False) if number % 2 else (False, True):
            clique.settle()
            path, data = clique.fresh(0, "eager"), noise.renew()
            with contextlib.nullcontext() if ahead else held(clique.nodes[0]):
                write(path, data, PACE_BYTES_PER_S if ahead else float("inf"))
            pair[ahead] = timed(partial(await_clique, path))
        pairs.append(pair)
    short, whole = (statistics.median(pair[ahead] for pair in pairs) for ahead in (True, False))
    ratio = statistics.median(pair[True] / pair[False] for pair in pairs)
    return ratio, f"{short:.3f} s after a write at {PACE_BYTES_PER_S / 1e6:.0f} MB/s, {whole:.3f} s when nothing went ahead"


def ranks(clique: Clique, _size: int, rounds: int) -> tuple[float, str]:
    """Measure two ranks that write through two nodes at once, until both files are in the clique."""
    noises = [Noise(RANK_BYTES), Noise(RANK_BYTES)]
    whole, written = [], []
    for _ in range(rounds):
        clique.settle()
        paths = [clique.fresh(node, "rank") for node in (0, 1)]
        closed = [0.0, 0.0]
        datas = [noise.renew() for noise in noises]

        def rank(number: int, paths: list[Path] = paths, datas: list[memoryview] = datas, closed: list[float] = closed) -> None:
            closed[number] = timed(lambda: write(paths[number], datas[number]))
            await_clique(paths[number])

        threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        whole.append(time.perf_counter() - begun)
        written.append(max(closed))
    text = f"{statistics.median(written):.2f} s until both had closed; rounds {min(whole):.2f} to {max(whole):.2f} s"
    return statistics.median(whole), text


def saved_again(clique: Clique, size: int, rounds: int, *, renamed: bool) -> tuple[float, str]:
    """Measure the share of bytes that is sent when a file is saved again with a tenth changed."""
    noise, shares = Noise(size // 4), []
    clique.settle()
    path = clique.fresh(0, "again")
    write(path, noise.renew())
    await_clique(path)
    for _ in range(rounds):
        data = noise.renew(0.1)
        before = sent_bytes(clique.nodes[0])
        target = path.with_suffix(".tmp") if renamed else path
        write(target, data)
        if renamed:
            target.rename(path)
        await_clique(path)
        shares.append((sent_bytes(clique.nodes[0]) - before) / len(data))
    return statistics.median(shares), f"{len(noise.data) / MIB:.0f} MiB, at the interface of the node"


def measure_write_speed(clique: Clique, size: int, rounds: int) -> tuple[float, str]:
    """Compare the speed of a writer while its node replicates with that while all movers are stopped.

    The writer has one processor, all processes of all nodes share another one. Only the writer's processor time counts, so other
    programs on the machine have no influence.
    """
    noise = Noise(size)
    all_pids = [pid for node in clique.nodes for pid in node.pids()]
    ratios, speeds = [], []
    with pinned(all_pids, 1), pinned([0], 0):
        for number in range(rounds):
            seconds = {}
            for moving in (True, False) if number % 2 else (False, True):
                clique.settle()
                path, data = clique.fresh(0, "written"), noise.renew()
                with contextlib.nullcontext() if moving else held(*clique.nodes):
                    begun = time.thread_time()
                    write(path, data)
                    seconds[moving] = time.thread_time() - begun
                await_clique(path)
            ratios.append(seconds[False] / seconds[True])
            speeds.append(size / seconds[True] / 1e9)
    return statistics.median(ratios), f"{statistics.median(speeds):.2f} GB/s; the writer on one processor, all of ckptfs on the other"


@contextlib.contextmanager
def pinned(processes: list[int], processor: int) -> Iterator[None]:
    """Run every thread of these processes (0: this one), and of their children, on one processor for a while."""
    every = os.sched_getaffinity(0)
    set_affinity(processes, {processor})
    try:
        yield
    finally:
        set_affinity(processes, every)


def set_affinity(processes: list[int], processors: set[int]) -> None:
    for pid in processes:
        for thread in Path(f"/proc/{pid or 'self'}/task").iterdir():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread.name), processors)


def small(clique: Clique, _size: int, rounds: int) -> tuple[float, str]:
    """Measure small files/s of several writers, from the first create until all are in the clique."""
    rates, lags = [], []
    for _ in range(min(rounds, SMALL_ROUNDS)):
        clique.settle()
        directory = clique.fresh(0, "small")
        directory.mkdir()

        def write_some(writer: int, directory: Path = directory) -> None:
            for number in range(writer, SMALL_FILES, SMALL_WRITERS):
                create(directory / f"file-{number:04}")

        def create_all(write_some: Callable[[int], None] = write_some) -> None:
            with ThreadPoolExecutor(SMALL_WRITERS) as writers:
                list(writers.map(write_some, range(SMALL_WRITERS)))

        seconds = timed(create_all)
        lags.append(timed(partial(await_clique, directory)))
        rates.append(SMALL_FILES / (seconds + lags[-1]))
    text = f"{SMALL_FILES} files of {SMALL_BYTES} bytes, {SMALL_WRITERS} writers; the last {statistics.median(lags):.2f} s after its close"
    return statistics.median(rates), text


def operation(clique: Clique, node: int, act: Callable[[Path], object], *, made: bool = True, seen: bool = True) -> tuple[float, str]:
    """Return the median time of one operation on `node`, in ms.

    `made`: the other node wrote the files first, and both nodes have them; `seen`: `node` has looked their names up before.
    """
    clique.settle()
    directory = clique.fresh(node, "operation")
    directory.mkdir()
    if made:
        for number in range(OPERATIONS):
            create(clique.nodes[1 - node].path / directory.name / f"file-{number}")
        await_clique(directory)
        for number in range(OPERATIONS if seen else 0):
            (directory / f"file-{number}").stat()
    times = [timed(partial(act, directory / f"file-{number}")) for number in range(OPERATIONS)]
    return 1e3 * statistics.median(times), f"median of {OPERATIONS}"


def create(path: Path) -> None:
    """Create one small file."""
    with open(path, "wb", buffering=0) as file:
        file.write(os.urandom(SMALL_BYTES))


Measure = Callable[[Clique, int, int], tuple[float, str]]
MEASURES: dict[str, Measure] = {
    "close to clique, eager": eager,
    "two ranks to the clique, s": ranks,
    "saved again, rewritten: moved": lambda clique, size, rounds: saved_again(clique, size, rounds, renamed=False),
    "saved again, renamed: moved": lambda clique, size, rounds: saved_again(clique, size, rounds, renamed=True),
    "write speed while replicating": measure_write_speed,
    "small files to the clique /s": small,
    "create + 4 KiB + close, ms": lambda clique, *_: operation(clique, 0, create, made=False),
    "first stat of another node's, ms": lambda clique, *_: operation(clique, 1, Path.stat, seen=False),
    "stat of another node's, ms": lambda clique, *_: operation(clique, 1, Path.stat),
    "open + read of another node's, ms": lambda clique, *_: operation(clique, 1, Path.read_bytes),
    "rename, ms": lambda clique, *_: operation(clique, 0, lambda path: path.rename(f"{path}-b")),
    "unlink, ms": lambda clique, *_: operation(clique, 0, Path.unlink),
}


def main() -> None:
    """Run every measure."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    with lab() as clique:
        for name, measure in MEASURES.items():
            if arguments.only in name:
                value, text = measure(clique, int(arguments.gib * (1 << 30)), arguments.rounds)
                print(f"{name:32} {value:8.3f}  {text}", flush=True)


if __name__ == "__main__":
    main()
