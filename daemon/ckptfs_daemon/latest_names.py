"""Owns the inode numbers of what `.ckptfs` at the top of the mount shows, which is in no catalog.

A number follows from what it stands for, so the next mount process gives the same ones to whoever looks again. Only those that were
looked up last are kept: of any other nobody here knows what it stands for.
If we die here: the kernel looks up again.
"""

from collections import OrderedDict
from typing import NamedTuple

import xxhash

from ckptfs import limits

FIRST_INODE = limits.VIRTUAL_NODE << 40
_COUNT = 1 << 40


class VirtualEntry(NamedTuple):
    """What is shown: of a directory of the mount its series and directories, or (`series` is not empty) one of its series.

    Directory 0 is `.ckptfs` itself.
    """

    directory: int
    series: bytes = b""


TOP = VirtualEntry(0)


def is_virtual(inode: int) -> bool:
    """Whether a number is one of these."""
    return inode >= FIRST_INODE


class VirtualInodes:
    """The places that were looked up last."""

    def __init__(self, at_most: int = limits.VIRTUAL_NAMES_MAX) -> None:
        self._at_most = at_most
        self._entries: OrderedDict[int, VirtualEntry] = OrderedDict()

    def assign_inode(self, entry: VirtualEntry) -> int:
        """The number of a place."""
        number = xxhash.xxh3_64_intdigest(b"%d/%s" % entry) % _COUNT
        while self._entries.get(FIRST_INODE + number, entry) != entry:
            number = (number + 1) % _COUNT
        self._entries[FIRST_INODE + number] = entry
        self._entries.move_to_end(FIRST_INODE + number)
        if len(self._entries) > self._at_most:
            self._entries.popitem(last=False)
        return FIRST_INODE + number

    def find_entry(self, number: int) -> VirtualEntry | None:
        """What a number stands for; None where that is not known any more."""
        return self._entries.get(number)
