"""Formats that science writes: safetensors, HDF5 with a reader beside the writer. H4."""

import subprocess
import sys
from pathlib import Path

import pytest
from daemon_under_test import Area
from programs import PROGRAM_S

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
