"""The measures of one directory. Each function does one thing once and returns one number; bench/run.py repeats and compares them."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

MIB = 1 << 20


def name_without_digits(number: int) -> str:
    """Return a name of letters only, so that it is of no series and of a kind of its own."""
    return f"{number:x}".translate(str.maketrans("0123456789", "ghijklmnop"))


def write(directory: Path, *, size: int, piece: int) -> float:
    """Write a new file of `size` bytes in pieces; return bytes/s, close included."""
    path = directory / "sequential"
    speed = write_new(path, size=size, piece=piece)
    path.unlink()
    return speed


def write_new(path: Path, *, size: int, piece: int) -> float:
    """Do the same with a file of this path, and keep it."""
    data = os.urandom(min(piece, MIB)) * max(1, piece // MIB)
    put = os.write
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    for _ in range(size // piece):
        put(fd, data)
    os.close(fd)
    return size / (time.perf_counter() - start)


def prepare_hot(path: Path, *, size: int) -> None:
    """Create a file to read."""
    path.write_bytes(os.urandom(MIB) * (size // MIB))


def hot_read(path: Path, *, size: int) -> float:
    """Read a file twice in pieces of 4 MiB; return bytes/s of the second time."""
    _read(path)
    start = time.perf_counter()
    _read(path)
    return size / (time.perf_counter() - start)


def _read(path: Path) -> None:
    buffer = memoryview(bytearray(4 * MIB))
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def torch_save(directory: Path, *, size: int) -> float:
    """Save 16 tensors with torch.save; return bytes/s."""
    path = directory / "state.pt"
    speed = torch_save_new(path, size=size)
    path.unlink()
    return speed


def torch_save_new(path: Path, *, size: int) -> float:
    """Do the same with a file of this path, and keep it."""
    import torch

    state = {f"layer{number}": torch.ones(size // 64) for number in range(16)}
    start = time.perf_counter()
    torch.save(state, path)
    return size / (time.perf_counter() - start)


def prepare_load(path: Path, *, size: int) -> None:
    """Create a checkpoint to load."""
    import torch

    torch.save({f"layer{number}": torch.ones(size // 64) for number in range(16)}, path)


def torch_load(path: Path, *, size: int) -> float:
    """Load a checkpoint twice with torch.load; return bytes/s of the second time."""
    import torch

    torch.load(path)
    start = time.perf_counter()
    torch.load(path)
    return size / (time.perf_counter() - start)


def small_files(directory: Path, *, count: int) -> dict[str, float]:
    """Return operations/s with `count` files of 4 KiB: create (open, write, close), first stat, readdir, rename, unlink."""
    folder = directory / f"small-{time.monotonic_ns()}"
    folder.mkdir()
    data = os.urandom(4096)
    names = [f"{folder}/file{number}" for number in range(count)]
    rates = {"create": _rate(count, lambda: _each(names, lambda name: _create(name, data)))}
    drop_names()
    rates["first stat"] = _rate(count, lambda: _each(names, os.stat))
    drop_names()
    rates["readdir"] = _rate(count, lambda: os.listdir(folder))
    rates["rename"] = _rate(count, lambda: _each(names, lambda name: os.rename(name, f"{name}.new")))
    rates["unlink"] = _rate(count, lambda: _each(names, lambda name: os.unlink(f"{name}.new")))
    folder.rmdir()
    return rates


def _create(name: str, data: bytes) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, data)
    os.close(fd)


def _each(names: Sequence[str], act: Callable[[str], object]) -> None:
    for name in names:
        act(name)


def _rate(count: int, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


def drop_names() -> None:
    """Drop the kernel's caches of names and attributes, not of data, so that the next stat is a first one. Needs root."""
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("2")
