"""X3, D1: kill -9 of mount and mover at random moments while sets are made and an application deletes its own. CKPTFS_SEED has others."""

import contextlib
import os
import random
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, eventually
from set_history import list_sets, write_archive

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]
KILLS = 6
PAUSE_S = 0.7


@contextlib.contextmanager
def killing(daemon: DaemonUnderTest, dice: random.Random) -> Iterator[Future[None]]:
    """Kill one process after the other until the block ends; the future says that all kills are done."""
    ended = threading.Event()

    def kill() -> None:
        for _ in range(KILLS):
            if ended.wait(dice.uniform(0.05, PAUSE_S)):
                return
            daemon.kill(dice.choice(["mount", "mover"]))

    with ThreadPoolExecutor(1) as threads:
        kills = threads.submit(kill)
        try:
            yield kills
        finally:
            ended.set()
    kills.result()


def get_steps(daemon: DaemonUnderTest) -> dict[int, str]:
    """Return the paths of the sets in the history by their steps."""
    return {int(path.partition("@")[0].rpartition("_")[2].removesuffix(".pt")): path for path in list_sets(daemon)}


def save_file(run: Path, step: int, data: bytes) -> None:
    write_archive(run / f"step_{step}.pt", data)


def save_directory(run: Path, step: int, data: bytes) -> None:
    """Many files, and the name when all are there."""
    part = run / f"tmp-{step}"
    part.mkdir()
    for number in range(60):
        write_archive(part / f"layer_{number}.pt", data + b"%d" % number)
    part.rename(run / f"step_{step}")


@pytest.mark.parametrize("save", [save_file, save_directory])
def test_the_last_set_survives(fresh_mount: DaemonUnderTest, save: Callable[[Path, int, bytes], None]) -> None:
    """The application keeps one set, deletes the old one before or after it saves, and in the end deletes everything."""
    dice = random.Random(f"{os.environ.get('CKPTFS_SEED', '1')} {save.__name__}")
    daemon, run, contents = fresh_mount, fresh_mount.path / "run", {}
    daemon.expect_warning("checkpoint sets: cannot be kept")
    run.mkdir()
    step = newest = 0
    with killing(daemon, dice) as kills:
        while not kills.done() or step < 5:
            step += 1
            first, contents[step] = dice.random() < 0.5, dice.randbytes(2000)
            for place in list(run.glob("step_*")) if first else ():
                shutil.rmtree(place) if place.is_dir() else place.unlink()
            save(run, step, contents[step])
            for place in () if first else [place for place in run.glob("step_*") if f"step_{step}" not in place.name]:
                shutil.rmtree(place) if place.is_dir() else place.unlink()
            if dice.random() < 0.7:
                eventually(lambda wanted=step: wanted in get_steps(daemon), what=f"step {step} is in the history")
            known = get_steps(daemon)
            assert not known or max(known) >= newest, "a set went before a newer one was there"
            newest = max(newest, *known, 0)
    shutil.rmtree(run)
    assert newest and max(get_steps(daemon)) >= newest
    eventually(lambda: len(list_sets(daemon, hidden=True)) == 1, what="one set is left, and none is unfinished")
    daemon.settle()
    ((step, path),) = get_steps(daemon).items()
    files = sorted((daemon.pfs / ".ckptfs.history" / path).glob("*.pt"))
    assert len(files) == (1 if save is save_file else 60)
    for file in files:
        with zipfile.ZipFile(file) as archive:
            number = b"" if save is save_file else file.stem.removeprefix("layer_").encode()
            assert archive.read("data") == contents[step] + number
