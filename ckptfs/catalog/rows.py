"""Owns how a row of table `inode` becomes a `model.Inode`: the columns and their order, in one place."""

from typing import Any

from ckptfs.model import Inode

_COLUMN_NAMES = (
    "id", "mode", "uid", "gid", "rdev", "nlink", "size", "atime_ns", "mtime_ns", "ctime_ns", "target", "content", "generation", "parent",
    "complete",
)  # fmt: skip

INODE_COLUMNS = ", ".join(_COLUMN_NAMES)
INODE_COLUMNS_JOINED = ", ".join(f"inode.{name}" for name in _COLUMN_NAMES)


def build_inode(row: tuple[Any, ...]) -> Inode:
    """The inode in a row of `INODE_COLUMNS`."""
    return Inode(*(*row[:14], row[14] == 1))
