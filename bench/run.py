"""The benchmarks: the mount against raw tmpfs, as the median of ratios within one run, A and B in turns.

Usage: run.py [--quick] [--json FILE] [--data-path auto|passthrough|buffered] [--only WORD]. Needs root and some GiB of memory.
A ratio above 1 means that the mount is faster. Absolute numbers depend on the machine and its load.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests" / "support")]

import clique  # noqa: E402 - beside this file; the tests' daemon is found by the line above
import limited  # noqa: E402
import peers  # noqa: E402
import simulated  # noqa: E402
import suites  # noqa: E402
from daemon_under_test import DaemonUnderTest, environment, eventually  # noqa: E402

GIB = 1 << 30
TARGETS = {
    "write 4 MiB pieces": 0.95, "write 64 KiB pieces": 0.9, "write 4 KiB pieces": 0.65, "hot read": 0.9,
    "first checkpoint of 1 GiB": 0.95, "second checkpoint of 1 GiB": 2.0, "first torch.save": 0.95, "second torch.save": 1.3,
    "torch.save": 1.0, "torch.load": 0.9, "create + 4 KiB + close /s": 2000, "write-back against cp": 0.9,
    "idle memory MB": 200, "replicate against raw TCP": 1.6, "fetch against raw TCP": 0.6, "etcd: 10,000 nodes against 10": 1.4,
    "close to clique, eager": 0.25, "two ranks to the clique, s": 0.82, "saved again, rewritten: moved": 0.12,
    "saved again, renamed: moved": 0.12, "write speed while replicating": 0.85, "limited, 4 KiB pieces": 1.0, "limited, 64 KiB pieces": 1.0,
}  # fmt: skip
AT_MOST = {
    "idle memory MB", "replicate against raw TCP", "etcd: 10,000 nodes against 10", "close to clique, eager", "two ranks to the clique, s",
    "saved again, rewritten: moved", "saved again, renamed: moved",
}  # fmt: skip


class Bench:
    """One run: the mount, a directory on raw tmpfs, and the results."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.quick: bool = arguments.quick
        self.only: str = arguments.only
        self.rounds = 3 if self.quick else 5
        self.size = GIB // 4 if self.quick else GIB
        self.daemon = DaemonUnderTest(arguments.data_path, ram="6G", nvme=None)
        self.raw = Path(tempfile.mkdtemp(prefix="ckptfs-bench-", dir="/dev/shm"))
        self.results: dict[str, Any] = {}

    def is_wanted(self, name: str) -> bool:
        return self.only in name

    def compare(self, name: str, once: Callable[..., float], **values: int) -> None:
        """Record the median of `rounds` ratios mount/tmpfs, after one warm-up round."""
        if not self.is_wanted(name):
            return
        once(self.daemon.path, **values)
        once(self.raw, **values)
        pairs = []
        for number in range(self.rounds):
            self.daemon.settle()  # A round must not pay for the write-back of the previous one.
            pairs.append(_both(once, self.daemon.path, self.raw, number, **values))
        self.note_pairs(name, pairs)

    def compare_reading(self, name: str, prepare: Callable[..., None], once: Callable[..., float], **values: int) -> None:
        """Do the same for reads. Each round has new files, because some memory of a virtual machine is slower than other."""
        if not self.is_wanted(name):
            return
        pairs = []
        for number in range(self.rounds):
            ours, raw = self.daemon.path / f"read-{number}", self.raw / "read"
            for path in (ours, raw) if number % 2 else (raw, ours):
                prepare(path, **values)
            self.daemon.settle()
            pairs.append(_both(once, ours, raw, number, **values))
            ours.unlink()
            raw.unlink()
        self.note_pairs(name, pairs)

    def note_pairs(self, name: str, pairs: list[tuple[float, float]]) -> None:
        """Record the median of the ratios of (mount, tmpfs)."""
        ratio = statistics.median(ours / raw for ours, raw in pairs)
        ours, raw = (statistics.median(column) / 1e9 for column in zip(*pairs, strict=True))
        self.note(name, ratio, f"{ours:.2f} GB/s, tmpfs {raw:.2f} GB/s")

    def note(self, name: str, value: float, text: str = "") -> None:
        """Record a result, and print it with its target."""
        target = TARGETS.get(name)
        met = target is None or (value <= target if name in AT_MOST else value >= target)
        self.results[name] = {"value": round(value, 4), "target": target, "met": met, "detail": text}
        aim = "" if target is None else f"target {target:g}"
        print(f"{name:32} {value:10.2f}  {aim:12} {'' if met else 'MISSED':7} {text}", flush=True)


def sequential(bench: Bench) -> None:
    """Measure large files."""
    for piece, name in ((4 << 20, "4 MiB"), (64 << 10, "64 KiB"), (4 << 10, "4 KiB")):
        bench.compare(f"write {name} pieces", suites.write, size=bench.size, piece=piece)
    bench.compare("torch.save", suites.torch_save, size=bench.size // 2)
    bench.compare_reading("hot read", suites.prepare_hot, suites.hot_read, size=bench.size)
    bench.compare_reading("torch.load", suites.prepare_load, suites.torch_load, size=bench.size // 2)


def series(bench: Bench) -> None:
    """Measure checkpoints of a series, against fresh files on tmpfs.

    A virtual machine is slow with memory that its host has not backed. Both sides therefore write and delete two files right before each
    measure, so that their pages have the same history; the mount may then prepare its memory, as it does between checkpoints.
    """
    acts = {
        "checkpoint of 1 GiB": (lambda path: suites.write_new(path, size=bench.size, piece=4 << 20), bench.size),
        "torch.save": (lambda path: suites.torch_save_new(path, size=bench.size // 2), bench.size // 2),
    }
    for what, (act, size) in acts.items():
        for ordinal in ("first", "second"):
            if bench.is_wanted(name := f"{ordinal} {what}"):
                pairs = [_checkpoint_pair(bench, act, size, number, is_second=ordinal == "second") for number in range(bench.rounds)]
                bench.note_pairs(name, pairs)


def _checkpoint_pair(bench: Bench, act: Callable[[Path], float], size: int, number: int, *, is_second: bool) -> tuple[float, float]:
    """Return the speeds of one checkpoint in the mount and on tmpfs. The second of a series has a predecessor of its name."""
    series_name = suites.name_without_digits(time.monotonic_ns())

    def ours() -> float:
        warm_ups = [
            bench.daemon.path / name for name in ((f"{series_name}_step0", f"{series_name}_step1") if is_second else ("warm", "hot"))
        ]
        for warm_up in warm_ups:
            suites.write_new(warm_up, size=size, piece=4 << 20)
        bench.daemon.settle()
        for warm_up in warm_ups:
            if is_second:
                _remove(bench, warm_up)
            else:  # A name without a number: no history keeps it, and its memory is free at once, as on tmpfs.
                warm_up.unlink()
        ram = bench.daemon.root / "state" / "ram"
        eventually(lambda: sum(one.stat().st_size for one in (ram / "contents").iterdir()) < size, what="their memory is free")
        if is_second:
            eventually(lambda: any(size <= one < 2 * size for one in limited.list_prepared(ram)), what="the next checkpoint is prepared")
        path = bench.daemon.path / f"{series_name}_step2"
        speed = act(path)
        _remove(bench, path)
        return speed

    def raw() -> float:
        for warm_up in range(2):
            suites.write_new(bench.raw / f"warm_up{warm_up}", size=size, piece=4 << 20)
        for warm_up in range(2):
            (bench.raw / f"warm_up{warm_up}").unlink()
        speed = act(bench.raw / "checkpoint")
        (bench.raw / "checkpoint").unlink()
        return speed

    if number % 2:
        return ours(), raw()
    theirs = raw()
    return ours(), theirs


def _remove(bench: Bench, path: Path) -> None:
    """Remove a checkpoint and the set that the history keeps of it, as soon as it is one."""
    eventually(lambda: not bench.daemon.command("rm", "--now", path, check=False).returncode, what=f"{path} is a set")


def _both(once: Callable[..., float], ours: Path, raw: Path, number: int, **values: int) -> tuple[float, float]:
    """Measure both, in alternating order; return (ours, raw)."""
    if number % 2:
        return once(ours, **values), once(raw, **values)
    theirs = once(raw, **values)
    return once(ours, **values), theirs


def names(bench: Bench) -> None:
    """Measure small files: ckptfs, tmpfs and other FUSE filesystems."""
    if not bench.is_wanted("create + 4 KiB + close /s small files"):
        return
    places: dict[str, Path] = {"ckptfs": bench.daemon.path, "tmpfs": bench.raw}
    with Baselines(bench.daemon.root, bench.raw) as baselines:
        places |= baselines.places
        rounds = []
        for _ in range(bench.rounds):
            bench.daemon.settle()
            rounds.append({place: suites.small_files(directory, count=1000) for place, directory in places.items()})
    median = {place: {act: statistics.median(found[place][act] for found in rounds) for act in rounds[0][place]} for place in places}
    bench.note("create + 4 KiB + close /s", median["ckptfs"]["create"])
    for act in median["ckptfs"]:
        bench.note(f"{act} /s", median["ckptfs"][act], ", ".join(f"{place} {rates[act]:.0f}" for place, rates in median.items()))


def cluster(bench: Bench) -> None:
    """Measure the traffic of a checkpoint with the shared store, for clusters of several sizes."""
    if bench.is_wanted(name := "etcd: 10,000 nodes against 10"):
        costs = simulated.run()
        operations, length = costs[-1].checkpoint
        what = f"{operations:.0f} operations, {length / 1000:.1f} kB a checkpoint and node, with {costs[-1].nodes} nodes"
        bench.note(name, simulated.growth(costs), what)


def transport(bench: Bench) -> None:
    """Measure replicate and fetch against a plain socket: the time of the first, the speed of the second."""
    for word, once in peers.MEASURES.items():
        if bench.is_wanted(name := f"{word} against raw TCP"):
            pairs = peers.measure(once, size=bench.size, rounds=bench.rounds)
            value = peers.ratio(pairs)
            bench.note(name, value if word == "replicate" else 1 / value, peers.detail(pairs, bench.size))


def copies(bench: Bench) -> None:
    """Measure copies between two real nodes."""
    wanted = {name: measure for name, measure in clique.MEASURES.items() if bench.is_wanted(name)}
    if wanted:
        with clique.lab() as nodes:
            for name, measure in wanted.items():
                bench.note(name, *measure(nodes, bench.size, bench.rounds))


def limited_programs(bench: Bench) -> None:
    """Measure a program with a memory limit against the same on a buffered mount."""
    wanted = {
        piece: name for piece, what in ((4 << 10, "4 KiB"), (64 << 10, "64 KiB")) if bench.is_wanted(name := f"limited, {what} pieces")
    }
    if wanted:
        with limited.mounts(has_nvme=False) as (nodes, group):
            for piece, name in wanted.items():
                pairs = limited.measure(nodes, group, size=bench.size, piece=piece, rounds=bench.rounds)
                ours, theirs = (statistics.median(column) / 1e9 for column in zip(*pairs, strict=True))
                bench.note(
                    name, statistics.median(one / other for one, other in pairs), f"{ours:.2f} GB/s, buffered mount {theirs:.2f} GB/s"
                )


class Baselines:
    """Other FUSE filesystems: plain pyfuse3 in memory, and bindfs on tmpfs if it is installed."""

    def __init__(self, root: Path, raw: Path) -> None:
        self.places: dict[str, Path] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._commands = {"plain pyfuse3": [sys.executable, str(Path(__file__).with_name("plain_pyfuse3.py"))]}
        if shutil.which("bindfs"):
            source = raw / "below-bindfs"
            source.mkdir()
            self._commands["bindfs"] = ["bindfs", "-f", str(source)]
        self._root = root

    def __enter__(self) -> "Baselines":
        for name, command in self._commands.items():
            directory = self._root / name.replace(" ", "-")
            directory.mkdir()
            self._processes.append(subprocess.Popen([*command, str(directory)], env=environment()))
            eventually(partial(os.path.ismount, directory), what=f"{name} is mounted")
            self.places[name] = directory
        return self

    def __exit__(self, *_: object) -> None:
        for directory in self.places.values():
            subprocess.run(["umount", str(directory)], check=False)
        for process in self._processes:
            process.wait(30)


def write_back(bench: Bench) -> None:
    """Measure the time from close to the PFS, against cp and sync to the same directory."""
    if not bench.is_wanted("write-back against cp"):
        return
    source = bench.raw / "source"
    source.write_bytes(os.urandom(1 << 20) * (bench.size >> 20))
    bench.daemon.settle()
    pairs = []
    for number in range(bench.rounds):
        begun = time.perf_counter()
        subprocess.run(["cp", str(source), str(bench.daemon.pfs / f".plain-{number}")], check=True)
        subprocess.run(["sync", str(bench.daemon.pfs / f".plain-{number}")], check=True)
        plain = time.perf_counter() - begun
        (bench.daemon.pfs / f".plain-{number}").unlink()
        shutil.copyfile(source, bench.daemon.path / f"ours-{number}")
        begun = time.perf_counter()
        bench.daemon.settle()
        pairs.append((time.perf_counter() - begun, plain))
        (bench.daemon.path / f"ours-{number}").unlink()
        bench.daemon.settle()
    ours, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(plain / ours for ours, plain in pairs)
    bench.note("write-back against cp", ratio, f"{ours:.2f} s from close to published, cp and sync {plain:.2f} s")


def kill_pause(bench: Bench) -> None:
    """Measure the longest system call of a busy program during a kill -9 of the mount process."""
    if not bench.is_wanted("longest pause at kill -9, s"):
        return
    bench.note("longest pause at kill -9, s", statistics.median(_one_pause(bench) for _ in range(bench.rounds)))


def _one_pause(bench: Bench) -> float:
    """Kill the mount process under a program that creates, writes, stats and deletes; return the longest call in s."""
    done = threading.Event()
    longest = [0.0]

    def work() -> None:
        number = 0
        while not done.is_set():
            number += 1
            begun = time.perf_counter()
            path = bench.daemon.path / f"pause-{number}"
            path.write_bytes(b"x" * 4096)
            path.stat()
            path.unlink()
            longest[0] = max(longest[0], time.perf_counter() - begun)

    worker = threading.Thread(target=work)
    worker.start()
    bench.daemon.kill("mount")
    done.set()
    worker.join()
    return longest[0]


def idle(bench: Bench) -> None:
    """Measure memory and CPU of all processes together when idle."""
    if not bench.is_wanted("idle memory MB, CPU"):
        return
    bench.daemon.settle()
    pids = [process["pid"] for process in bench.daemon.processes().values() if isinstance(process, dict) and process.get("pid")]
    threading.Event().wait(3)
    seconds = 5 if bench.quick else 20
    before = sum(_cpu_s(pid) for pid in pids)
    threading.Event().wait(seconds)
    bench.note("idle CPU, share of a core", (sum(_cpu_s(pid) for pid in pids) - before) / seconds)
    bench.note("idle memory MB", sum(_memory_bytes(pid) for pid in pids) / 1e6, f"proportional set size of {len(pids)} processes")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_bytes(pid: int) -> int:
    """Return the proportional set size, in which shared pages count once over all processes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main() -> int:
    """Run the suites; return 0 if every target is met, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the bytes, three rounds")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--data-path", default="auto", choices=["auto", "passthrough", "buffered"])
    parser.add_argument("--only", default="", help="run only measures with this word in their names")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    try:
        bench.daemon.start()
        bench.results["data path"] = bench.daemon.processes().get("data_path")
        print(f"data path: {bench.results['data path']} ({bench.daemon.processes().get('data_path_reason')})")
        for suite in (idle, series, sequential, names, write_back, kill_pause, transport, copies, cluster, limited_programs):
            suite(bench)
    finally:
        bench.daemon.close()
        shutil.rmtree(bench.raw)
    if arguments.json:
        arguments.json.write_text(json.dumps(bench.results, indent=2) + "\n")
    return 0 if all(result["met"] for result in bench.results.values() if isinstance(result, dict)) else 1


if __name__ == "__main__":
    sys.exit(main())
