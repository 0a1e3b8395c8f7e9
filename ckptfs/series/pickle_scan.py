"""A scan of pickles that runs none of them: opcodes are read and skipped, and no object is made.

Large values are skipped without being read. A scan is bounded by its number of opcodes.
"""

import pickletools
from collections.abc import Callable, Iterator
from typing import NamedTuple

ReadRange = Callable[[int, int], bytes]
"""Return the bytes at (offset, length); fewer at the end of the file."""

OPCODES_MAX = 1_000_000
"""About a second of scanning."""
TEXT_BYTES_MAX = 4096
"""Longer values are skipped, not returned."""
_WINDOW_BYTES = 1 << 16
_LENGTH_BYTES = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4, pickletools.TAKEN_FROM_ARGUMENT4U: 4,
                 pickletools.TAKEN_FROM_ARGUMENT8U: 8}  # fmt: skip
_BY_CODE = {ord(one.code): (one.name, 0 if one.arg is None else one.arg.n) for one in pickletools.opcodes}
_LINES = {"GLOBAL": 2, "INST": 2}
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING"}
_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1", "LONG4"}
_PUTS = {"BINPUT", "LONG_BINPUT"}
_GETS = {"BINGET", "LONG_BINGET"}

Value = bytes | int | None


class DamagedPickle(Exception):
    """The bytes are no pickle, or one that ends early."""


class NoOpcode(DamagedPickle):
    """A byte is no opcode."""


class TooLong(Exception):
    """The pickle has more opcodes than a scan may read."""


class Step(NamedTuple):
    """One opcode.

    `value` is a short text, a global as b"module name", or an integer, also where it comes from the memo; `end`: its end.
    """

    name: str
    value: Value
    end: int


class _Window:
    """Reads a file forwards through a window."""

    def __init__(self, read: ReadRange, size: int) -> None:
        self._read, self._size = read, size
        self._start, self._data = 0, b""

    def get(self, offset: int, length: int) -> bytes:
        if offset + length > self._size:
            raise DamagedPickle
        if not (self._start <= offset and offset + length <= self._start + len(self._data)):
            self._start, self._data = offset, self._read(offset, max(length, _WINDOW_BYTES))
            if len(self._data) < length:
                raise DamagedPickle
        return self._data[offset - self._start : offset - self._start + length]

    def get_line(self, offset: int) -> bytes:
        """Return a line without its end."""
        data = self.get(offset, min(TEXT_BYTES_MAX, self._size - offset))
        line, end, _ = data.partition(b"\n")
        if not end:
            raise DamagedPickle
        return line


def scan(read: ReadRange, size: int, start: int = 0, *, opcodes_max: int = OPCODES_MAX) -> Iterator[Step]:
    """Yield the opcodes of the pickle at `start` up to its STOP. Raises DamagedPickle, TooLong."""
    window, offset = _Window(read, size), start
    memo: dict[int, Value] = {}
    memoized, last = 0, None
    for _ in range(opcodes_max):
        name, value, offset = _read_opcode(window, offset)
        if name == "MEMOIZE":
            memo[memoized] = last
            memoized += 1
        elif name in _PUTS:
            memo[int(value or 0)] = last
            memoized += 1
        elif name in _GETS:
            value = memo.get(int(value or 0))
        elif name == "STACK_GLOBAL":
            value = None
        last = None if name in _PUTS or name == "MEMOIZE" else value
        yield Step(name, None if name in _PUTS else value, offset)
        if name == "STOP":
            return
    raise TooLong


def _read_opcode(window: _Window, offset: int) -> tuple[str, Value, int]:
    """Return (name, value, end) of the opcode at `offset`."""
    code = window.get(offset, 1)[0]
    if code not in _BY_CODE:
        raise NoOpcode
    name, length = _BY_CODE[code]
    offset += 1
    if length == pickletools.UP_TO_NEWLINE:
        lines = []
        for _ in range(_LINES.get(name, 1)):
            lines.append(window.get_line(offset))
            offset += len(lines[-1]) + 1
        return name, b" ".join(lines), offset
    if length >= 0:
        data = window.get(offset, length)
        is_number = name in _NUMBERS | _PUTS | _GETS
        return name, int.from_bytes(data, "little", signed=name == "BININT") if is_number else None, offset + length
    width = _LENGTH_BYTES[length]
    length = int.from_bytes(window.get(offset, width), "little")
    offset += width
    if length > TEXT_BYTES_MAX or name not in _TEXTS | _NUMBERS:
        if length:
            window.get(offset + length - 1, 1)
        return name, None, offset + length
    data = window.get(offset, length)
    return name, int.from_bytes(data, "little", signed=True) if name in _NUMBERS else data, offset + length
