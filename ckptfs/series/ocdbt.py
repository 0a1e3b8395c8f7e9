"""OCDBT, in which Orbax keeps arrays: which bytes of which files it needs (H4). Pure.

It is the store of keys and values of TensorStore.

`manifest.ocdbt` says where the root of a B-tree is. A node says where its children or values are, by a table of files. The format is that
of `tensorstore/kvstore/ocdbt/format`. Each of its documents has a magic number, its length, a version, and a compression.
"""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import zstandard

from ckptfs.series.pickle_scan import ReadRange, TooLong

MANIFEST = b"manifest.ocdbt"
_MANIFEST_MAGIC, _NODE_MAGIC = bytes.fromhex("0cdb3a2a"), bytes.fromhex("0cdb20de")
_NODE_BYTES_MAX = 64 << 20
"""Of 100 MB, which Orbax allows, a node of 400,000 arrays has less."""
_CRC_BYTES, _UUID_BYTES = 4, 16
_INLINE = 0


class TreeNode(NamedTuple):
    """Where a node of the tree is.

    `base` is the directory of its file, to which the files that it names belong.
    """

    base: bytes
    path: bytes
    offset: int
    length: int


class Needs(NamedTuple):
    """The bytes that each file has at least, by its path, and the nodes that say more."""

    files: Mapping[bytes, int]
    nodes: tuple[TreeNode, ...] = ()


class _Document:
    """The content of a manifest or node, read from its beginning. Raises ValueError if it ends early."""

    def __init__(self, data: bytes, magic: bytes) -> None:
        if data[:4] != magic or int.from_bytes(data[4:12], "little") != len(data):
            raise ValueError("no such document")
        self._data, self._at = data[: len(data) - _CRC_BYTES], 12
        version, compression = self.read_number(), self.read_number()
        if version or compression > 1:
            raise TooLong  # Of a later TensorStore.
        if compression:
            try:
                unpacked = zstandard.ZstdDecompressor().stream_reader(self._data[self._at :]).read(_NODE_BYTES_MAX + 1)
            except zstandard.ZstdError as failure:
                raise ValueError(str(failure)) from failure
            if len(unpacked) > _NODE_BYTES_MAX:
                raise TooLong
            self._data, self._at = unpacked, 0

    def read(self, length: int) -> bytes:
        self._at += length
        if self._at > len(self._data):
            raise ValueError("it ends early")
        return self._data[self._at - length : self._at]

    def read_number(self) -> int:
        value = 0
        for shift in range(0, 64, 7):
            byte = self.read(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("no number")

    def read_numbers(self, count: int) -> list[int]:
        return [self.read_number() for _ in range(count)]

    def read_files(self, base: bytes) -> list[tuple[bytes, bytes]]:
        """Return (base, path) of each file of the table; paths share their beginnings with the one before."""
        count = self.read_number()
        shared, own, bases = [0, *self.read_numbers(count - 1)][:count], self.read_numbers(count), self.read_numbers(count)
        found, before = [], b""
        for prefix, suffix, length in zip(shared, own, bases, strict=True):
            before = before[:prefix] + self.read(suffix)
            found.append((base + before[:length], base + before))
        return found


def load_manifest(size: int, read: ReadRange) -> Needs:
    """Return the needs of the last version. Raises ValueError, TooLong."""
    if size > _NODE_BYTES_MAX:
        raise TooLong
    document = _Document(read(0, size), _MANIFEST_MAGIC)
    document.read(_UUID_BYTES)
    if document.read(1) != b"\0":
        return Needs({})  # Numbered manifests, as on object stores.
    document.read_numbers(2)
    document.read(1)
    if document.read_number():
        document.read(4)
    files = document.read_files(b"")
    count = document.read_number()
    document.read_numbers(count)
    document.read(count)
    file, offset, length = (document.read_numbers(count)[-1] for _ in range(3))
    return _build_needs([(*files[file], offset, length)], are_nodes=True) if length < 1 << 63 else Needs({})


def load_node(node: TreeNode, read: ReadRange) -> Needs:
    """Return the needs of a node. Raises ValueError, TooLong."""
    if node.length > _NODE_BYTES_MAX:
        raise TooLong
    document = _Document(read(node.offset, node.length), _NODE_MAGIC)
    height = document.read(1)[0]
    files = document.read_files(node.base)
    count = document.read_number()
    document.read_numbers(count - 1)
    suffixes = document.read_numbers(count)
    document.read_numbers(count if height else 0)
    document.read(sum(suffixes))
    if height:
        numbers, offsets, lengths = (document.read_numbers(count) for _ in range(3))
    else:
        every = document.read_numbers(count)
        lengths = [length for length, kind in zip(every, document.read(count), strict=True) if kind != _INLINE]
        numbers, offsets = document.read_numbers(len(lengths)), document.read_numbers(len(lengths))
    found = [(*files[number], offset, length) for number, offset, length in zip(numbers, offsets, lengths, strict=True)]
    return _build_needs(found, are_nodes=bool(height))


def _build_needs(found: list[tuple[bytes, bytes, int, int]], *, are_nodes: bool) -> Needs:
    ends = sorted((path, offset + length) for _, path, offset, length in found)
    files = {path: max(end for _, end in one) for path, one in itertools.groupby(ends, key=lambda one: one[0])}
    return Needs(files, tuple(TreeNode(*one) for one in found) if are_nodes else ())
