"""The time of `ckptfs list` and `ckptfs latest` in a series of very many checkpoint sets.

Usage: many_sets.py [--sets N] [--rounds N]. Needs root. Prints the median of the rounds, and that of the CPU time of the command.
"""

import argparse
import contextlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("tests/support", ".")]

from daemon_under_test import DaemonUnderTest, environment  # noqa: E402

from ckptfs.catalog import history, namespace  # noqa: E402
from ckptfs.catalog.database import Database  # noqa: E402
from ckptfs.catalog.history import SetRecord  # noqa: E402

MEDIAN_S_MAX = 0.3
SETS_PER_CHANGE = 500


def main() -> int:
    """Measure; return 0 if no median is beyond `MEDIAN_S_MAX`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    memory = Path(tempfile.mkdtemp(prefix="ckptfs-bench-", dir="/dev/shm"))
    daemon = DaemonUnderTest(pfs=None, nvme=memory)
    try:
        run = daemon.start().path / "run"
        _save(daemon, run, arguments.sets)
        series = str(run / "step_*.pt")
        commands = (["latest", series], ["list"], ["list", series])
        worst_s = max(_measure(command, arguments.rounds) for command in commands)
        return 0 if worst_s <= MEDIAN_S_MAX else 1
    finally:
        daemon.close()
        shutil.rmtree(memory)


def _save(daemon: DaemonUnderTest, run: Path, sets: int) -> None:
    """Write one file for each set, and put all into the history as the tracker does, which takes its time for so many."""
    begun_s = time.monotonic()
    run.mkdir()
    for step in range(sets):  # Under a name that is not tracked.
        with zipfile.ZipFile(run / f"data{step}.pt", "w") as archive:
            archive.writestr("data", b"%d" % step)
    directory = run.stat().st_ino
    daemon.settle()
    daemon.unmount()
    with contextlib.closing(Database(daemon.state / "catalog.db", journalled=False)) as db:
        for start in range(0, sets, SETS_PER_CHANGE):
            with db.transaction():
                for step in range(start, min(sets, start + SETS_PER_CHANGE)):
                    _make_set(db, directory, step)
                db.run("DELETE FROM set_candidate")  # The tracker has nothing to do any more.
    daemon.start()
    print(f"{sets} sets made in {time.monotonic() - begun_s:.0f} s", flush=True)


def _make_set(db: Database, directory: int, step: int) -> None:
    name = b"step_%d.pt" % step
    namespace.rename(db, directory, b"data%d.pt" % step, directory, name)
    file, series = namespace.find_child(db, directory, name), history.insert_series(db, directory, b"step_*.pt").directory
    made = history.begin_set(db, series, SetRecord(step + 1, name, (step,), 1, 100, time.time_ns(), is_group=True))
    assert file is not None
    history.insert_link(db, file.id, made, name)
    history.finish_set(db, made)


def _measure(command: list[str], rounds: int) -> float:
    """Run a command several times. Return the median of its times in seconds."""
    wall_times_s, cpu_times_s = [], []
    for _ in range(rounds):
        before_s, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "ckptfs_client", *command], check=True, capture_output=True, env=environment())
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall_times_s.append(time.monotonic() - before_s)
        cpu_times_s.append(after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime)
    wall_s, words = statistics.median(wall_times_s), " ".join(command[:1] + ["SERIES"] * (len(command) - 1))
    print(f"ckptfs {words:12}  median {wall_s:.3f} s, CPU of the command {statistics.median(cpu_times_s):.3f} s", flush=True)
    return wall_s


if __name__ == "__main__":
    sys.exit(main())
