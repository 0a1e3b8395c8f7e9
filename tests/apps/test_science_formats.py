"""Formats that science writes: safetensors, HDF5 with a reader beside the writer, numpy arrays mapped for writing. H4, F4."""

import subprocess
import sys
from pathlib import Path

import pytest
from daemon_under_test import Area
from programs import PROGRAM_S, python

numpy = pytest.importorskip("numpy", reason="numpy is not installed (./bootstrap.sh setup installs it)")
pytestmark = pytest.mark.apps

SWMR_READER = """
import sys
import h5py
file = h5py.File(sys.argv[1], "r", libver="latest", swmr=True)
data = file["x"]
print("ready", flush=True)
seen = 0
for line in sys.stdin:
    wanted = int(line)
    while len(data) < wanted:
        data.refresh()
    values = data[seen:wanted]
    assert (values == range(seen, wanted)).all(), values
    seen = wanted
    print("seen", seen, flush=True)
"""

LOCK_HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
getattr(fcntl, sys.argv[2])(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("locked", flush=True)
sys.stdin.read()
"""

LOCK_TRIER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
try:
    getattr(fcntl, sys.argv[2])(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("free")
except OSError:
    print("taken")
"""


def started(code: str, *arguments: str | Path) -> "subprocess.Popen[str]":
    """A Python process that talks over its standard input and output."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_safetensors(mount: Area) -> None:
    """H4: written at once, read through a mapping."""
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {"a": numpy.arange(200_000, dtype="f4"), "b": numpy.ones((7, 11), "i8")}
    safetensors.save_file(arrays, mount.path / "x.safetensors")
    read = safetensors.load_file(mount.path / "x.safetensors")
    assert all((read[name] == array).all() for name, array in arrays.items())


def test_hdf5_is_read_while_it_is_written(mount: Area) -> None:
    """H4: HDF5's single writer, multiple readers: another process sees every flush of the writer, in order."""
    h5py = pytest.importorskip("h5py")
    path = mount.path / "swmr.h5"
    with h5py.File(path, "w", libver="latest") as file:
        data = file.create_dataset("x", (0,), maxshape=(None,), dtype="i8", chunks=(1000,))
        file.swmr_mode = True
        reader = started(SWMR_READER, path)
        assert reader.stdin and reader.stdout
        assert reader.stdout.readline() == "ready\n"
        for step in range(1, 6):
            data.resize((step * 700,))
            data[(step - 1) * 700 :] = numpy.arange((step - 1) * 700, step * 700)
            data.flush()
            reader.stdin.write(f"{step * 700}\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == f"seen {step * 700}\n"
        reader.stdin.close()
        assert reader.wait(PROGRAM_S) == 0
    mount.settle()
    with h5py.File(mount.pfs / "swmr.h5", "r") as file:
        assert (file["x"][:] == numpy.arange(3500)).all()


@pytest.mark.parametrize("kind", ["flock", "lockf"])
def test_locks_exclude_other_processes(mount: Area, kind: str) -> None:
    """F4: what HDF5 and GROMACS rely on: flock and fcntl locks hold between processes and end with their holder."""
    path = mount.path / "lock"
    path.write_bytes(b"x" * 10)
    holder = started(LOCK_HOLDER, path, kind)
    assert holder.stdout and holder.stdout.readline() == "locked\n"
    assert python(LOCK_TRIER, path, kind) == "taken\n"
    holder.communicate(timeout=PROGRAM_S)
    assert python(LOCK_TRIER, path, kind) == "free\n"


def test_a_mapped_array_is_shared_both_ways(mount: Area) -> None:
    """F4: numpy's r+ maps shared: what one writes through memory the other reads, by read(2) and by its own mapping, and the reverse."""
    path = mount.path / "array.npy"
    numpy.save(path, numpy.zeros(100_000, "i8"))
    mapped = numpy.load(path, mmap_mode="r+")
    mapped[::1000] = 7
    mapped.flush()
    assert (numpy.load(path)[::1000] == 7).all()
    other = numpy.load(path, mmap_mode="r+")
    other[1] = 99
    assert mapped[1] == 99
    with open(path, "r+b") as file:
        file.seek(-8, 2)
        file.write((12345).to_bytes(8, "little"))
    assert mapped[-1] == 12345
    del mapped, other
    mount.settle()
    read = numpy.load(mount.pfs / "array.npy")
    assert read[0] == 7 and read[1] == 99 and read[-1] == 12345


def test_a_mapping_outlives_its_descriptor(mount: Area) -> None:
    """P7: bytes that are written through a mapping after the last close are in the file, and reach the PFS."""
    path = mount.path / "late.npy"
    numpy.save(path, numpy.zeros(1_000_000, "i8"))
    mapped = numpy.load(path, mmap_mode="r+")
    mapped[5] = 5
    mapped.flush()
    assert numpy.load(path)[5] == 5
    mapped[6] = 6
    mapped.flush()
    del mapped
    assert numpy.load(path)[6] == 6
    mount.settle()
    assert list(numpy.load(mount.pfs / "late.npy")[4:8]) == [0, 5, 6, 0]
