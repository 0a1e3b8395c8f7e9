"""Programs that use a mount while its daemon is killed. Each knows what every byte must be.

Run as `actors.py KIND DIRECTORY SEED`. An actor fails at the first system call that fails, and at the first byte that is wrong; it ends
when its standard input does, after a last look at everything.
"""

import mmap
import os
import random
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

END_S = 240.0
Step = Callable[[], None]
ACTS = ("create", "create", "create", "rewrite", "rename", "replace", "link", "unlink", "unlink", "symlink", "look", "list")


def checkpointer(root: Path, dice: random.Random) -> tuple[Step, Step]:
    """Writes files of some MiB under a temporary name and renames them over the old ones, as training does."""
    latest: dict[Path, tuple[int, int]] = {}

    def content(seed: int, size: int) -> bytes:
        return random.Random(seed).randbytes(4096) * (size // 4096)

    def step() -> None:
        path = root / f"model{dice.randrange(4)}.pt"
        seed, size = dice.randrange(1 << 30), 4096 * dice.randrange(1, 1500)
        data = content(seed, size)
        with open(path.with_suffix(".tmp"), "wb", buffering=0) as file:
            for start in range(0, size, 1 << 20):
                assert file.write(data[start : start + (1 << 20)]) == len(data[start : start + (1 << 20)])
            if dice.random() < 0.3:
                os.fsync(file.fileno())
        os.rename(path.with_suffix(".tmp"), path)
        latest[path] = (seed, size)
        look(dice.choice(list(latest)))

    def look(path: Path) -> None:
        assert path.read_bytes() == content(*latest[path]), f"{path} has wrong bytes"

    def end() -> None:
        for path in latest:
            look(path)
        assert {path.name for path in root.iterdir()} == {path.name for path in latest}

    return step, end


def small_files(root: Path, dice: random.Random) -> tuple[Step, Step]:
    """Creates, rewrites, renames, links and deletes small files, and compares directory listings."""
    known: dict[str, bytes] = {}
    count = 0

    def fresh() -> str:
        nonlocal count
        count += 1
        return f"f{count}"

    def step() -> None:
        act = dice.choice(ACTS)
        if act == "create" or not known:
            name = fresh()
            known[name] = dice.randbytes(dice.randrange(8000))
            fd = os.open(root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            assert os.write(fd, known[name]) == len(known[name])
            os.close(fd)
            return
        name = dice.choice(list(known))
        if act == "rewrite":
            with open(root / name, "rb") as file:
                linked = os.fstat(file.fileno()).st_nlink > 1
            if not linked:
                known[name] = dice.randbytes(dice.randrange(5000))
                (root / name).write_bytes(known[name])
        elif act == "rename":
            new = fresh()
            os.rename(root / name, root / new)
            known[new] = known.pop(name)
        elif act == "replace" and len(known) > 1:
            new = dice.choice([other for other in known if other != name])
            if not os.path.samefile(root / name, root / new):
                os.rename(root / name, root / new)
                known[new] = known.pop(name)
        elif act == "link":
            new = fresh()
            os.link(root / name, root / new)
            known[new] = known[name]
        elif act == "symlink":
            new = fresh()
            os.symlink(name, root / new)
            assert os.readlink(root / new) == name
            os.unlink(root / new)
        elif act == "unlink":
            os.unlink(root / name)
            del known[name]
            assert not (root / name).exists()
        elif act == "look":
            assert (root / name).read_bytes() == known[name], f"{name} has wrong bytes"
        else:
            assert set(os.listdir(root)) == set(known), "the directory shows other names"

    def end() -> None:
        assert set(os.listdir(root)) == set(known), "the directory shows other names"
        for name, data in known.items():
            assert (root / name).read_bytes() == data, f"{name} has wrong bytes"

    return step, end


def appender(root: Path, dice: random.Random) -> tuple[Step, Step]:
    """Keeps a log open, appends and syncs, as a simulation does, and reads it by another descriptor."""
    path = root / "run.log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    expected = bytearray()

    def step() -> None:
        line = f"step {len(expected)} {dice.random()}\n".encode() * dice.randrange(1, 50)
        assert os.write(fd, line) == len(line)
        expected.extend(line)
        if dice.random() < 0.2:
            os.fsync(fd)
        assert os.stat(path).st_size == len(expected), "the size is wrong"
        if dice.random() < 0.1:
            end()

    def end() -> None:
        assert path.read_bytes() == expected, "the log has wrong bytes"

    return step, end


def overwriter(root: Path, dice: random.Random) -> tuple[Step, Step]:
    """Writes into the middle of a file by system calls and through a mapping, and truncates it."""
    path = root / "grid"
    expected = bytearray(dice.randbytes(1 << 20))
    path.write_bytes(expected)
    fd = os.open(path, os.O_RDWR)

    def step() -> None:
        nonlocal fd
        offset, data = dice.randrange(len(expected) - 5000), dice.randbytes(dice.randrange(1, 5000))
        act = dice.randrange(5)
        if act == 0:
            with mmap.mmap(fd, len(expected)) as mapped:
                mapped[offset : offset + len(data)] = data
                mapped.flush()
        elif act == 1:
            size = dice.randrange(1 << 19, 1 << 20)
            os.ftruncate(fd, size)
            os.ftruncate(fd, 1 << 20)
            expected[size:] = bytes((1 << 20) - size)
            return
        elif act == 2:
            os.close(fd)
            fd = os.open(path, os.O_RDWR)
            return
        else:
            assert os.pwrite(fd, data, offset) == len(data)
        expected[offset : offset + len(data)] = data
        assert os.pread(fd, len(data), offset) == data, "what was written is not read"

    def end() -> None:
        os.close(fd)
        assert path.read_bytes() == expected, "the file has wrong bytes"

    return step, end


def trees(root: Path, dice: random.Random) -> tuple[Step, Step]:
    """Makes directories with files, moves them about, and removes them."""
    known: dict[str, bytes] = {}
    count = 0

    def step() -> None:
        nonlocal count
        act = dice.randrange(4)
        if act < 2 or not known:
            count += 1
            name = f"d{count}"
            known[name] = dice.randbytes(3000)
            (root / name / "a" / "b").mkdir(parents=True)
            (root / name / "a" / "b" / "file").write_bytes(known[name])
            (root / name).chmod(0o750)
            return
        name = dice.choice(list(known))
        if act == 2:
            count += 1
            os.rename(root / name, root / f"d{count}")
            known[f"d{count}"] = known.pop(name)
        elif len(known) > 5:
            shutil.rmtree(root / name)
            del known[name]

    def end() -> None:
        assert set(os.listdir(root)) == set(known), "the directory shows other names"
        for name, data in known.items():
            assert (root / name / "a" / "b" / "file").read_bytes() == data, f"{name} has wrong bytes"
            assert (root / name).stat().st_mode & 0o777 == 0o750

    return step, end


KINDS = {"checkpointer": checkpointer, "small_files": small_files, "appender": appender, "overwriter": overwriter, "trees": trees}


def acting(directory: Path, seed: int, kinds: Iterable[str] = ()) -> "dict[str, subprocess.Popen[str]]":
    """One process for each kind of actor, or for these, each in a directory of its own below `directory`."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return {kind: subprocess.Popen([sys.executable, __file__, kind, directory / kind, str(seed)], **pipes) for kind in kinds or KINDS}


def ended(actors: "dict[str, subprocess.Popen[str]]") -> list[str]:
    """Let them finish and look at everything once more; what those said that failed."""
    failures = []
    for kind, process in actors.items():
        output, _ = process.communicate(timeout=END_S)
        if process.returncode != 0:
            failures.append(f"{kind}: {output[-2000:]}")
    return failures


def main() -> None:
    kind, root, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    root.mkdir()
    step, end = KINDS[kind](root, random.Random(seed))
    steps = 0
    pace = random.Random(seed + 1)
    while not select.select([sys.stdin], [], [], pace.random() * 0.02)[0]:
        step()
        steps += 1
    end()
    print(f"{kind}: {steps} steps")


if __name__ == "__main__":
    main()
