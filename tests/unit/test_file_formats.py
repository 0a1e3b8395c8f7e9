"""What a file shows of itself, with files that the real writers made, cut wherever a killed writer may stop: N7, D6, H4."""

import io
import json
import lzma
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from series_tree import prefixes

from ckptfs.series import file_formats, pickle_scan
from ckptfs.series.file_formats import FileFormat

CUTS = 400


def inspect(name: str, data: bytes) -> FileFormat:
    return file_formats.inspect(name.encode(), len(data), lambda offset, length: data[offset : offset + length])


def write_npz(path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    numpy.savez(path, x=numpy.arange(1000), y=numpy.ones((3, 4), "f2"))


def write_npy(path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    numpy.save(path, numpy.ones((5, 7), "c16"))


def write_texts(path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    numpy.save(path, numpy.array(["abc", "de"]))


def write_safetensors(path: Path) -> None:
    numpy, safetensors = pytest.importorskip("numpy"), pytest.importorskip("safetensors.numpy")
    safetensors.save_file({"a": numpy.ones((10, 10), "f4"), "b": numpy.zeros(3, "i8")}, path, metadata={"format": "np"})


def write_like_a_pickle(path: Path) -> None:
    """Its header has 640 bytes: the file begins like a pickle of protocol 2."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [2000], "data_offsets": [0, 2000]}}).encode().ljust(0x280)
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2000))


def write_hdf5(version: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        h5py, numpy = pytest.importorskip("h5py"), pytest.importorskip("numpy")
        with h5py.File(path, "w", libver=version) as file:
            file["x"] = numpy.arange(5000)
            file.create_group("g").attrs["q"] = 1

    return write


def write_torch(**how: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        torch = pytest.importorskip("torch")
        values = {"m": torch.ones(30, 30).half(), "b": torch.zeros(4, dtype=torch.bool), "view": torch.ones(10)[2:4], "lr": 0.1}
        torch.save(values, path, **how)

    return write


def write_pickle(protocol: int) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(pickle.dumps({"a": list(range(3000)), "b": b"." * 9000, "c": "." * 70_000}, protocol))


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("x"), io.BytesIO(b""))
    path.write_bytes(path.read_bytes()[:1536])


def write_commented_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "y" * 1000)
        archive.comment = b"PK\x05\x06 is in it"


# GROMACS 2022 and LAMMPS begin and end so; `tests/apps/test_simulations.py` asks the programs themselves.
GROMACS = b"\x00\x02\x9f\x29" + bytes(1000) + b"\x00\x02\x9f\x2b"
LAMMPS = b"LammpS RestartT\0" + bytes(1000) + b"LammpS RestartT\0"

WRITERS: list[tuple[str, str, Callable[[Path], object]]] = [
    ("x.npz", "zip", write_npz),
    ("x.npy", "numpy", write_npy),
    ("texts.npy", "numpy", write_texts),
    ("x.safetensors", "safetensors", write_safetensors),
    ("model", "safetensors", write_safetensors),
    ("adapter.safetensors", "safetensors", write_like_a_pickle),
    ("earliest.h5", "HDF5", write_hdf5("earliest")),
    ("latest.h5", "HDF5", write_hdf5("latest")),
    ("x.pt", "zip", write_torch()),
    ("legacy.pt", "pickle", write_torch(_use_new_zipfile_serialization=False)),
    ("two.pkl", "pickle", write_pickle(2)),
    ("four.pkl", "pickle", write_pickle(4)),
    ("five", "pickle", write_pickle(5)),
    ("x.tar", "tar", write_tar),
    ("x.xz", "xz", lambda path: path.write_bytes(lzma.compress(bytes(100_000)))),
    ("x.zip", "zip", write_commented_zip),
    ("trainer_state.json", "json", lambda path: path.write_text(json.dumps({"step": 1, "log": [1, 2, {"a": None}]}))),
    ("state.xml", "xml", lambda path: path.write_bytes(b'<State time="1">\n' + b'  <Position x="1"/>\n' * 40 + b"</State>")),
    ("empty.xml", "xml", lambda path: path.write_bytes(b'<State time="1"/>')),
    ("prolog.xml", "xml", lambda path: path.write_bytes(b"<?xml version='1.0'?>\n<!-- by q -->\n<q:a x='1'><b>1</b></q:a>")),
    ("state.cpt", "GROMACS", lambda path: path.write_bytes(GROMACS)),
    ("melt.100.restart", "LAMMPS", lambda path: path.write_bytes(LAMMPS)),
]


def test_comments_may_follow_an_xml_document() -> None:
    assert inspect("a.xml", b"<a><b>1</b></a>\n<!-- 7 s -->\n").is_whole and not inspect("a.xml", b"<a><b>1</b>\n<!-- 7 s -->\n").is_whole


@pytest.mark.parametrize(("name", "format_name", "write"), WRITERS, ids=[name for name, _, _ in WRITERS])
def test_a_file_that_was_cut_is_never_whole(name: str, format_name: str, write: Callable[[Path], object], tmp_path: Path) -> None:
    """N7, D6: whole as it was written; cut anywhere, or with a byte too many, it says so."""
    path = tmp_path / name
    write(path)
    data = path.read_bytes()
    assert inspect(name, data) == FileFormat(format_name)
    for length in prefixes(data, CUTS):
        found = inspect(name, data[:length])
        assert not found.is_whole, f"cut after {length} of {len(data)} bytes"
        # A name without a known extension tells nothing as long as the first bytes do not.
        assert found.flaw or length < 10, f"cut after {length} of {len(data)} bytes"
    assert inspect(name, data + b"x").flaw


@pytest.mark.parametrize(
    ("name", "data", "flaw"),
    [
        ("x.safetensors", b"\xff" * 100, "header is complete"),
        ("x.safetensors", (10).to_bytes(8, "little") + b"{}        rest", "has 22 bytes, but its safetensors header says 18"),
        ("x.safetensors", (8).to_bytes(8, "little") + b"not JSON", "cannot be read"),
        ("x.safetensors", (13).to_bytes(8, "little") + b'{"a": [1, 2]}', "cannot be read"),
        ("x.h5", bytes(4096), "does not begin like a file of HDF5"),
        ("x.h5", b"\x89HDF\r\n\x1a\n" + b"\x09" + bytes(200), "cannot be read"),
        ("x.npz", b"garbage", "does not begin like a file of zip"),
        ("x.npy", b"\x93NUMPY\1\0\x0a\0{'descr': ", "cannot be read"),
        ("x.pt", b"", "is empty"),
        (".metadata", b"", "is empty"),
        ("x.pkl", b"\x80\x04\xff", "ends before its pickle"),
        ("x.pt", b"PK\x03", "first bytes"),
        ("x.pt", b"PK\x03\x04" + bytes(200), "zip directory"),
    ],
)
def test_what_is_no_such_file(name: str, data: bytes, flaw: str) -> None:
    """P11: bytes that no writer left are refused, not believed."""
    assert flaw in inspect(name, data).flaw


RAW = ("rank0", b"\x80\x03\xd2\x11\xb7\x3c\x0f\x40" * 100)
"""Numbers that begin like a pickle."""


@pytest.mark.parametrize(
    ("name", "data"), [("rank0.pt", b"x" * 100), ("state", b"\0" * 100), ("notes.txt", b""), ("done", b""), ("a.bin", b"\x80x"), RAW]
)
def test_what_is_not_known(name: str, data: bytes) -> None:
    """An unknown format is neither whole nor flawed: others decide."""
    assert inspect(name, data) == FileFormat() and not inspect(name, data).is_whole


JOBLIB = (
    b"\x80\x04\x95\xd8\0\0\0\0\0\0\0}\x94(\x8c\1w\x94\x8c\x13joblib.numpy_pickle\x94\x8c\x11NumpyArrayWrapper\x94\x93\x94)\x81\x94}\x94(\x8c\x08su"
    b"bclass\x94\x8c\5numpy\x94\x8c\7ndarray\x94\x93\x94\x8c\5shape\x94K\xc8\x85\x94\x8c\5order\x94\x8c\1C\x94\x8c\5dtype\x94h\x08\x8c\5dtype\x94\x93\x94"
    b"\x8c\2u1\x94\x89\x88\x87\x94R\x94(K\3\x8c\1|\x94NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0t\x94b\x8c\nallow_mmap\x94\x88\x8c\x1bnumpy_array_"
    b"alignment_bytes\x94K\x10ub\x0c" + b"\xff" * 12 + bytes(range(200)) + b"\x95\x08\0\0\0\0\0\0\0\x8c\1n\x94K\7u."
)
"""What joblib.dump({"w": numpy.arange(200, dtype="u1"), "n": 7}) writes."""


def test_arrays_of_joblib() -> None:
    """N7: their bytes stand in the middle of the pickle. So it is not known where it goes on, but it ends as any pickle does."""
    assert len(JOBLIB) == 457 and inspect("model.joblib", JOBLIB) == FileFormat()
    cut = [length for length in range(1, len(JOBLIB)) if not inspect("model.joblib", JOBLIB[:length]).flaw]
    assert len(cut) < 5 and not any(inspect("model.joblib", JOBLIB[:length]).is_whole for length in cut)


@pytest.mark.parametrize("name", ["_METADATA", "_sharding", "w/.zarray", "process_0"])
def test_json_without_an_extension(name: str) -> None:
    """N7: as Orbax and zarr write it."""
    assert "is no JSON" in inspect(name, b'{"a": [1, 2').flaw
    assert not inspect(name, b"{" + bytes(range(256)) * 8).flaw, "raw numbers may begin with that byte"
    for data in (b'{"a": [1, 2]}', b'{"line": 1}\n{"line": 2}\n', b"text"):
        assert inspect(name, data) == FileFormat()


def test_a_swmr_writer_that_was_killed(tmp_path: Path) -> None:
    """N7: HDF5 marks a file that is open for writing."""
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("x", (1,), dtype="f4", maxshape=(None,), chunks=(100,))
        file.swmr_mode = True
        file["x"].flush()
        assert inspect("x.h5", path.read_bytes()).flaw
    assert inspect("x.h5", path.read_bytes()) == FileFormat("HDF5")


def build_netcdf(version: int, *, records: int = 3) -> bytes:
    """A classic netCDF file with an attribute, a variable of 5 numbers, and two variables with records, one of 5 bytes padded to 8."""
    count, offset = (">Q" if version == 5 else ">I"), (">I" if version == 1 else ">Q")

    def text(name: bytes) -> bytes:
        return struct.pack(count, len(name)) + name + bytes(-len(name) % 4)

    def listed(tag: int, *items: bytes) -> bytes:
        return struct.pack(">I", tag if items else 0) + struct.pack(count, len(items)) + b"".join(items)

    def variable(name: bytes, dimensions: list[int], kind: int, size: int, begin: int) -> bytes:
        shape = struct.pack(count, len(dimensions)) + b"".join(struct.pack(count, one) for one in dimensions)
        return text(name) + shape + listed(12) + struct.pack(">I", kind) + struct.pack(count, size) + struct.pack(offset, begin)

    def header(begin: int) -> bytes:
        dimensions = listed(10, text(b"time") + struct.pack(count, 0), text(b"x") + struct.pack(count, 5))
        attributes = listed(12, text(b"title") + struct.pack(">I", 2) + text(b"melt"))
        fixed = variable(b"u", [1], 6, 40, begin)
        recorded = [variable(b"b", [0, 1], 1, 8, begin + 40), variable(b"t", [0], 5, 4, begin + 48)]
        return b"CDF" + bytes([version]) + struct.pack(count, records) + dimensions + attributes + listed(11, fixed, *recorded)

    return header(len(header(0))) + bytes(40) + bytes(12) * records


@pytest.mark.parametrize("version", [1, 2, 5])
def test_a_classic_netcdf_file_that_was_cut(version: int) -> None:
    """H4, N7: it is flawed if it ends before its last variable. It never counts as whole: cut before its first record, it looks so."""
    data = build_netcdf(version)
    assert inspect("restart.nc", data) == inspect("restart", data + b"more") == FileFormat()
    assert all(inspect("restart.nc", data[:length]).flaw for length in range(4, len(data)))
    assert f"has {len(data) - 1} bytes, but its netCDF header says {len(data)}" in inspect("restart.nc", data[:-1]).flaw
    assert inspect("restart.nc", build_netcdf(version, records=0)) == FileFormat()
    streamed = data[:4] + b"\xff" * (8 if version == 5 else 4) + data[12 if version == 5 else 8 :]
    assert inspect("restart.nc", streamed) == FileFormat(), "its number of records is not known"
    bad_type = data.replace(b"\0\0\0\2" + (4).to_bytes(8 if version == 5 else 4, "big") + b"melt", b"\0\0\0\x63" + bytes(8) + b"melt")
    assert "cannot be read" in inspect("restart.nc", bad_type).flaw


def count_read_bytes(name: str, data: bytes) -> int:
    """How much of a whole file is read."""
    counts = []

    def read(offset: int, length: int) -> bytes:
        counts.append(len(data[offset : offset + length]))
        return data[offset : offset + length]

    assert file_formats.inspect(name.encode(), len(data), read).is_whole
    return sum(counts)


def test_only_headers_and_ends_are_read() -> None:
    """N2: a large file costs a few reads."""
    torch = pytest.importorskip("torch")
    for how in ({}, {"_use_new_zipfile_serialization": False}):
        file = io.BytesIO()
        torch.save({"x": torch.zeros(2_000_000)}, file, **how)
        assert count_read_bytes("x.pt", file.getvalue()) < 400_000
    assert count_read_bytes("x.pkl", pickle.dumps([bytes(50_000_000), b"end"])) < 400_000


def test_a_pickle_of_too_many_parts_is_of_no_known_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan is bounded; then sizes decide."""
    data = pickle.dumps(list(range(1000)))
    with pytest.raises(pickle_scan.TooLong):
        list(pickle_scan.scan(lambda offset, length: data[offset : offset + length], len(data), opcodes_max=100))
    monkeypatch.setattr(pickle_scan.scan, "__kwdefaults__", {"opcodes_max": 100})
    assert inspect("x.pkl", data) == FileFormat()


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("trap"),))


def test_no_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6: what is in a file is data of others."""
    monkeypatch.chdir(tmp_path)
    assert inspect("x.pkl", pickle.dumps(Trap())).is_whole and not (tmp_path / "trap").exists()
    pickle.loads(pickle.dumps(Trap()))
    assert (tmp_path / "trap").exists(), "the trap works"


@pytest.mark.parametrize("one", [FileFormat(), FileFormat("zip"), FileFormat("zip", "ends: early"), FileFormat("", "is empty")])
def test_a_format_as_text(one: FileFormat) -> None:
    assert FileFormat.decode(one.encode()) == one
