"""Formats of single files: does a file itself show that it was written to its end?

A file is known by its first bytes, or its name where it is too short or has lost them. What the format keeps at its beginning and at its
end must fit the size of the file: the directory of a zip archive (`torch.save`, Lightning, `numpy.savez`), the header of safetensors,
netCDF and `.npy`, the end of file in the superblock of HDF5, the storages of an old `torch.save`, the end of a pickle, the mark that
GROMACS and LAMMPS write last. Only headers and ends are read, so the check of a file of a terabyte takes a few reads.

All functions are pure over `ReadRange`. They never raise for what the bytes are.
"""

import ast
import json
import math
import re
from collections.abc import Callable
from typing import NamedTuple

from ckptfs.series import pickle_scan
from ckptfs.series.pickle_scan import DamagedPickle, NoOpcode, ReadRange, TooLong

HEADER_BYTES_MAX = 32 << 20
"""Longer headers are not believed; a header of 1 MiB describes 10,000 tensors."""
JSON_BYTES_MAX = 16 << 20
LAMMPS, LAMMPS_PART, LAMMPS_END = "LAMMPS", "LAMMPS part", b"LammpS RestartT\0"
_HEAD_BYTES = 512
_ZIP_COMMENT_MAX = (1 << 16) - 1
_XML_COMMENTS = re.compile(rb"(?:\s|<!--[^<>]*-->)+\Z")
_XML_ROOT = re.compile(rb"(?:\s|<!--.*?-->|<[?!][^>]*>)*<([^\s<>/?!]+)", re.DOTALL)
_NO_TEXT = re.compile(rb"[\0-\x08\x0e-\x1f\x7f]")
_NO_JSON = "is no JSON; its writer did not finish it"
_ENDS_EARLY = "ends before its {}; its writer did not finish it"
_NO_PICKLE = _ENDS_EARLY.format("pickle is complete")


class FileFormat(NamedTuple):
    """What a file shows of itself.

    `name` is empty if its format is not known, `flaw` if nothing speaks against it.
    """

    name: str = ""
    flaw: str = ""

    @property
    def is_whole(self) -> bool:
        """Return True if the file itself shows that it was written to its end."""
        return bool(self.name) and not self.flaw

    def encode(self) -> bytes:
        """Return it as one text, for `decode`."""
        return f"{self.name or 'unknown'}: {self.flaw}".removesuffix(": ").encode()

    @classmethod
    def decode(cls, text: bytes) -> "FileFormat":
        """Return what `encode` was given."""
        name, _, flaw = text.decode(errors="replace").partition(": ")
        return cls(name.removeprefix("unknown"), flaw)


FindFlaw = Callable[[int, bytes, ReadRange], str]
"""(size, first bytes, read) -> what is wrong; empty if nothing is."""


def inspect(name: bytes, size: int, read: ReadRange) -> FileFormat:
    """Return what the file `name` of `size` bytes shows of itself."""
    extension = _get_extension(name)
    if not size:
        return FileFormat("", "is empty") if extension in _NEVER_EMPTY else FileFormat()
    head = read(0, min(size, _HEAD_BYTES))
    if len(head) < min(size, _HEAD_BYTES):
        return FileFormat("", "is shorter than its size")
    try:
        return _inspect(extension, size, head, read)
    except TooLong:
        return FileFormat()
    except NoOpcode:
        return FileFormat("pickle", _NO_PICKLE) if extension in _PICKLES else FileFormat()


def _inspect(extension: str, size: int, head: bytes, read: ReadRange) -> FileFormat:
    if extension == "distcp":
        return FileFormat()  # Any number of archives in a row: only `.metadata` knows their ends.
    if extension == "safetensors" or _has_safetensors_header(head):
        return FileFormat("safetensors", _find_safetensors_flaw(size, head, read))
    for format_name, magic, find_flaw in _BY_MAGIC:
        if head.startswith(magic):
            return FileFormat(format_name, find_flaw(size, head, read))
        if size < len(magic) and magic.startswith(head):
            return FileFormat(format_name, _ENDS_EARLY.format("first bytes are complete"))
    if head.startswith(_NETCDF):
        return FileFormat(flaw=_find_netcdf_flaw(size, head, read))  # A file that is cut before its first record looks whole.
    if head[257:262] == b"ustar":
        return FileFormat("tar", _find_tar_flaw(size, head, read))
    if extension == "json":
        return FileFormat("json", _find_json_flaw(size, read))
    if extension in _JSON_WITHOUT_EXTENSION and head[:1] == b"{" and not _NO_TEXT.search(head):
        is_ended = read(max(0, size - _HEAD_BYTES), _HEAD_BYTES).rstrip()[-1:] == b"}"
        return FileFormat(flaw="" if is_ended else _NO_JSON)
    if extension == "xml" and head.startswith(b"<"):
        return FileFormat("xml", _find_xml_flaw(size, head, read))
    if read(size - min(size, len(LAMMPS_END)), len(LAMMPS_END)) == LAMMPS_END:
        return FileFormat(LAMMPS_PART)  # Only its end tells.
    if extension in _BY_EXTENSION:
        return FileFormat(_BY_EXTENSION[extension], f"does not begin like a file of {_BY_EXTENSION[extension]}")
    return FileFormat()


def _get_extension(name: bytes) -> str:
    base = name.rpartition(b"/")[2]
    return "metadata" if base == b".metadata" else base.rpartition(b".")[2].decode("ascii", "replace").lower() if b"." in base else ""


# --- archives ---------------------------------------------------------------------------------------------------------


def _find_zip_flaw(size: int, _: bytes, read: ReadRange) -> str:
    """Find the flaw of a zip archive, which begins with the file and ends with its directory."""
    found = _find_zip_end(size, read)
    if found is None:
        return _ENDS_EARLY.format("zip directory")
    directory_at, directory_bytes, end = found
    if directory_at + directory_bytes != end or (directory_bytes and read(directory_at, 4) != b"PK\x01\x02"):
        return "has a zip directory that does not fit its size; it was overwritten or cut"
    return ""


def _find_zip_end(size: int, read: ReadRange) -> tuple[int, int, int] | None:
    """Return (offset of the directory, its size, offset of what follows it)."""
    start = max(0, size - 22)
    tail = read(start, 22)
    if not tail.startswith(b"PK\x05\x06") or tail[20:] != b"\0\0":
        start = max(0, size - 22 - _ZIP_COMMENT_MAX)
        tail = read(start, size - start)
        position = _find_commented_end(tail)
        if position < 0:
            return None
        start, tail = start + position, tail[position:]
    directory_bytes, directory_at = int.from_bytes(tail[12:16], "little"), int.from_bytes(tail[16:20], "little")
    locator = read(start - 20, 20) if start >= 20 else b""
    if not locator.startswith(b"PK\x06\x07"):
        return directory_at, directory_bytes, start
    end_64 = int.from_bytes(locator[8:16], "little")
    record = read(end_64, 56) if end_64 + 56 <= start else b""
    if not record.startswith(b"PK\x06\x06"):
        return None
    return int.from_bytes(record[48:56], "little"), int.from_bytes(record[40:48], "little"), end_64


def find_zip_member(size: int, read: ReadRange, suffix: bytes) -> tuple[int, int]:
    """Return where the first member whose name ends like this begins and ends in the archive.

    Raises LookupError if it is compressed.
    """
    directory_at, directory_bytes, _ = _find_zip_end(size, read) or (0, 0, 0)
    directory, at = read(directory_at, min(directory_bytes, HEADER_BYTES_MAX)), 0
    while directory[at : at + 4] == b"PK\x01\x02":
        fields = directory[at : at + 46]
        name_bytes, more = int.from_bytes(fields[28:30], "little"), sum(int.from_bytes(fields[one : one + 2], "little") for one in (30, 32))
        method, member_bytes, start = (int.from_bytes(fields[a:b], "little") for a, b in ((10, 12), (20, 24), (42, 46)))
        if not method and directory[at + 46 : at + 46 + name_bytes].endswith(suffix):
            local = read(start, 30)
            begin = start + 30 + sum(int.from_bytes(local[one : one + 2], "little") for one in (26, 28))
            return begin, begin + member_bytes
        at += 46 + name_bytes + more
    raise LookupError(suffix)


def _find_commented_end(tail: bytes) -> int:
    """Return the offset of the end of the directory; -1 if there is none.

    A comment up to the end of the file must follow it.
    """
    position = tail.rfind(b"PK\x05\x06")
    while position >= 0 and int.from_bytes(tail[position + 20 : position + 22], "little") != len(tail) - position - 22:
        position = tail.rfind(b"PK\x05\x06", 0, position)
    return position


def _find_tar_flaw(size: int, _: bytes, read: ReadRange) -> str:
    return "" if size % 512 == 0 and size >= 1536 and not read(size - 1024, 1024).strip(b"\0") else _ENDS_EARLY.format("end of archive")


# --- arrays -----------------------------------------------------------------------------------------------------------


def _has_safetensors_header(head: bytes) -> bool:
    return 2 <= int.from_bytes(head[:8], "little") <= HEADER_BYTES_MAX and head[8:10] in (b'{"', b"{}")


def _find_safetensors_flaw(size: int, head: bytes, read: ReadRange) -> str:
    """Find the flaw of a safetensors file.

    It has 8 bytes with the length of the header, the header in JSON, and the tensors up to the end of the file.
    """
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or 8 + length > size:
        return _ENDS_EARLY.format("safetensors header is complete")
    if length > HEADER_BYTES_MAX:
        return f"has a safetensors header of {length} bytes; accepted: up to {HEADER_BYTES_MAX}"
    try:
        header = json.loads(read(8, length))
        ends = [int(tensor["data_offsets"][1]) for key, tensor in header.items() if key != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return "has a safetensors header that cannot be read"
    expected = 8 + length + max(ends, default=0)
    return "" if expected == size else f"has {size} bytes, but its safetensors header says {expected}"


def _find_npy_flaw(size: int, head: bytes, read: ReadRange) -> str:
    width = 2 if head[6:7] == b"\1" else 4
    length = int.from_bytes(head[8 : 8 + width], "little")
    start = 8 + width + length
    if len(head) < 8 + width or start > size or length > HEADER_BYTES_MAX:
        return _ENDS_EARLY.format("numpy header is complete")
    try:
        header = ast.literal_eval(read(8 + width, length).decode("latin1").strip())
        shape, kind = header["shape"], re.fullmatch(r"[<>|=]?([a-zA-Z])([0-9]+)(\[.*\])?", str(header["descr"]))
        count = math.prod(int(one) for one in shape)
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        return "has a numpy header that cannot be read"
    if kind is None or kind[1] == "O":
        return ""  # Records, and objects in a pickle: their size is not known.
    expected = start + count * int(kind[2]) * (4 if kind[1] == "U" else 1)
    return "" if expected == size else f"has {size} bytes, but its numpy header says {expected}"


def _find_hdf5_flaw(size: int, head: bytes, _: ReadRange) -> str:
    """Find the flaw of an HDF5 file by its superblock, which says where the file ends.

    The library writes the superblock when it closes the file.
    """
    version = head[8] if len(head) > 8 else 255
    at, flags = {0: (24, 0), 1: (28, 0), 2: (12, 0), 3: (12, 11)}.get(version, (0, 0))
    width = head[13 if version < 2 else 9] if at and len(head) > 13 else 0
    end = at + 3 * width
    if not at or width not in (2, 4, 8) or len(head) < end:
        return _ENDS_EARLY.format("HDF5 superblock is complete") if size < 96 else "has an HDF5 superblock that cannot be read"
    if flags and head[flags] & 0b101:
        return "was not closed: its HDF5 superblock says that it is open for writing"
    base, expected = int.from_bytes(head[at : at + width], "little"), int.from_bytes(head[at + 2 * width : end], "little")
    return "" if base + expected == size else f"has {size} bytes, but its HDF5 superblock says {base + expected}"


_NETCDF = (b"CDF\1", b"CDF\2", b"CDF\5")
_NETCDF_HEADER_BYTES_MAX = 1 << 20
_NETCDF_WIDTHS = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 8, 11: 8}


class _NetcdfHeader:
    """The numbers of a classic netCDF header, one after the other. Raises EOFError where the header ends."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 4
        self._width = 8 if data[3] == 5 else 4

    def take(self, width: int = 0) -> int:
        return int.from_bytes(self._skip(width or self._width), "big")

    def take_record_count(self) -> int:
        """Take the number of records; 0 for a file that was streamed, whose length alone shows it."""
        count = self.take()
        return 0 if count == (1 << 8 * self._width) - 1 else count

    def take_count(self) -> range:
        """Take the tag and the length of a list."""
        self.take(4)
        return range(self.take())

    def take_named(self, width: int = 0) -> int:
        """Take a number behind a name."""
        self._skip(self.take() + 3 & ~3)
        return self.take(width)

    def skip_attributes(self) -> None:
        for _ in self.take_count():
            self._skip(_NETCDF_WIDTHS[self.take_named(4)] * self.take() + 3 & ~3)

    def _skip(self, length: int) -> bytes:
        self._at += length
        if self._at > len(self._data):
            raise EOFError
        return self._data[self._at - length : self._at]


def _find_netcdf_flaw(size: int, head: bytes, read: ReadRange) -> str:
    """Find the flaw of a classic netCDF file, which ends before its last variable does.

    The library pads the file when it closes it.
    """
    data = read(0, min(size, _NETCDF_HEADER_BYTES_MAX))
    header = _NetcdfHeader(data)
    try:
        records = header.take_record_count()
        lengths = [header.take_named() for _ in header.take_count()]
        header.skip_attributes()
        fixed, recorded = [0], list[tuple[int, int]]()  # The ends of variables; where records of others begin, and their bytes.
        for _ in header.take_count():
            shape = [lengths[header.take()] for _ in range(header.take_named())]
            header.skip_attributes()
            width = _NETCDF_WIDTHS[header.take(4)]
            _, begin = header.take(), header.take(4 if head[3] == 1 else 8)
            if shape[:1] == [0]:
                recorded.append((begin, width * math.prod(shape[1:])))
            else:
                fixed.append(begin + width * math.prod(shape))
    except EOFError:
        if len(data) < size:
            raise TooLong from None
        return _ENDS_EARLY.format("netCDF header is complete")
    except LookupError:
        return "has a netCDF header that cannot be read"
    padding = 3 if len(recorded) > 1 else 0  # Records of a single variable follow each other without.
    record_bytes = sum(length + padding & ~padding for _, length in recorded)
    expected = max(fixed + [begin + (records - 1) * record_bytes + length for begin, length in recorded if records])
    return "" if size >= expected else f"has {size} bytes, but its netCDF header says {expected}"


# --- pickles ----------------------------------------------------------------------------------------------------------

_LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first of five pickles of a `torch.save` without zip; the bytes of the tensors follow them."""
_JOBLIB_ARRAY, _STOP = b"NumpyArrayWrapper", b"."
"""What stands before the bytes of an array in the middle of a pickle of joblib, and the last byte of any pickle."""
_STORAGE_BYTES = {
    b"Double": 8, b"Float": 4, b"Half": 2, b"BFloat16": 2, b"Long": 8, b"Int": 4, b"Short": 2, b"Char": 1, b"Byte": 1, b"Bool": 1,
    b"ComplexDouble": 16, b"ComplexFloat": 8, b"Untyped": 1,
}  # fmt: skip


def _find_pickle_flaw(size: int, head: bytes, read: ReadRange) -> str:
    """Find the flaw of a file of pickles in a row, up to the end of the file.

    Raises NoOpcode if one of the first bytes is none: raw numbers may begin like a pickle.
    """
    if head.startswith(_LEGACY_TORCH):
        return _find_legacy_torch_flaw(size, read)
    end = 0
    try:
        while end < size:
            for step in pickle_scan.scan(read, size, end):
                end = step.end
                if isinstance(step.value, bytes) and step.value.endswith(_JOBLIB_ARRAY):
                    if read(size - 1, 1) == _STOP:
                        raise TooLong  # The bytes of an array follow. Only what reads them knows where the pickle goes on.
                    raise DamagedPickle
    except DamagedPickle as damage:
        if isinstance(damage, NoOpcode) and end < _HEAD_BYTES:
            raise
        return _NO_PICKLE
    return ""


def _find_legacy_torch_flaw(size: int, read: ReadRange) -> str:
    end, storages = 0, {}
    try:
        for number in range(5):
            recent: list[pickle_scan.Value] = []
            for step in pickle_scan.scan(read, size, end):
                end = step.end
                if step.value is not None:
                    recent = [*recent[-4:], step.value]
                elif step.name == "BINPERSID" and number == 3:
                    storages[recent[2:3][0] if len(recent) > 2 else None] = _get_storage_bytes(recent)
    except DamagedPickle:
        return _NO_PICKLE
    if None in storages.values():
        raise TooLong  # A storage that this code does not know.
    expected = end + sum(8 + (length or 0) for length in storages.values())
    return "" if expected == size else f"has {size} bytes, but its tensors need {expected}"


def _get_storage_bytes(recent: list[pickle_scan.Value]) -> int | None:
    """Return the bytes of a storage from the last values before its id.

    They are "storage", its type, its key, its place and its length.
    """
    kind, length = (recent[1], recent[4]) if len(recent) == 5 and recent[0] == b"storage" else (None, None)
    if not isinstance(kind, bytes) or not isinstance(length, int):
        return None
    width = _STORAGE_BYTES.get(kind.rpartition(b" ")[2].removesuffix(b"Storage"))
    return None if width is None else width * length


# --- the rest ---------------------------------------------------------------------------------------------------------


def _find_json_flaw(size: int, read: ReadRange) -> str:
    if size > JSON_BYTES_MAX:
        return ""
    try:
        json.loads(read(0, size))
    except (ValueError, RecursionError):
        return _NO_JSON
    return ""


def _find_xml_flaw(size: int, head: bytes, read: ReadRange) -> str:
    """Find the flaw of an XML document, which ends with the tag that closes its first one, and comments."""
    root = _XML_ROOT.match(head)
    if root is None:
        return _ENDS_EARLY.format("first tag") if size <= len(head) else ""
    tail = _XML_COMMENTS.sub(b"", read(max(0, size - _HEAD_BYTES), min(size, _HEAD_BYTES)))
    is_ended = tail.endswith(b"</%s>" % root[1]) or re.fullmatch(rb"[^<>]*/>", head[root.end() :].rstrip())
    return "" if is_ended else _ENDS_EARLY.format("last tag")


def _ends_with(trailer: bytes, words: str) -> FindFlaw:
    def find_flaw(size: int, _: bytes, read: ReadRange) -> str:
        return "" if size >= 2 * len(trailer) and read(size - len(trailer), len(trailer)) == trailer else _ENDS_EARLY.format(words)

    return find_flaw


_BY_MAGIC: tuple[tuple[str, bytes, FindFlaw], ...] = (
    ("zip", b"PK\x03\x04", _find_zip_flaw),
    ("zip", b"PK\x05\x06", _find_zip_flaw),
    ("HDF5", b"\x89HDF\r\n\x1a\n", _find_hdf5_flaw),
    ("numpy", b"\x93NUMPY", _find_npy_flaw),
    *(("pickle", b"\x80" + bytes([protocol]), _find_pickle_flaw) for protocol in (2, 3, 4, 5)),
    ("GROMACS", b"\x00\x02\x9f\x29", _ends_with(b"\x00\x02\x9f\x2b", "last mark")),
    (LAMMPS, LAMMPS_END, _ends_with(LAMMPS_END, "last mark")),
    ("xz", b"\xfd7zXZ\0", _ends_with(b"YZ", "footer")),
)
_BY_EXTENSION = {"tar": "tar", "h5": "HDF5", "hdf5": "HDF5", "npz": "zip", "npy": "numpy", "zip": "zip", "keras": "zip"}
_PICKLES = {"pkl", "pickle", "metadata"}
_JSON_WITHOUT_EXTENSION = {"", "zarray", "zattrs", "zgroup"}
"""As of Orbax and zarr, if they begin so."""
_NEVER_EMPTY = {
    *_BY_EXTENSION, "pt", "pth", "ckpt", "bin", "safetensors", "pkl", "pickle", "metadata", "distcp", "cpt", "restart", "json", "index",
}  # fmt: skip
