"""Rows of the table `content` as values: the columns and their order."""

from typing import Any

from ckptfs.catalog.database import Database
from ckptfs.errors import Busy
from ckptfs.model import Content, ContentState

CONTENT_COLUMNS = "k.id, k.inode, k.generation, k.state, k.size, k.digest, k.blocks, k.change, k.remote"
"""SQL: the columns of `content k` that `build_content` reads."""
CONTENT_COLUMNS_WITHOUT_BLOCKS = CONTENT_COLUMNS.replace("k.blocks", "NULL")
"""The same for queries of many rows: the digests of all blocks are long, and few callers need them."""

TOTAL = "CAST(total({}) AS INTEGER)"
"""SQL: the sum of sizes, to be formatted with the column. Where sum() fails beyond 64 bits, this is 2^63-1; without rows it is 0."""

HAS_GOOD_COPY = "EXISTS (SELECT 1 FROM copy g WHERE g.content = {0}.id AND g.state = 1)"
"""SQL: a tier of this node has a good copy of a row of `content`. To be formatted with its alias."""

IS_ON_PFS = (
    "EXISTS (SELECT 1 FROM pfs_file p WHERE p.inode = {0}.inode AND p.complete = 1 AND p.generation = {0}.generation"
    " AND p.digest = {0}.digest)"
)
"""SQL: the PFS shows exactly this content, a row of `content`. To be formatted with its alias. See lifecycle.is_on_pfs."""

IS_LEAVING_PFS = (
    "(EXISTS (SELECT 1 FROM inode l JOIN pfs_pending w ON w.inode = l.id WHERE l.id = {0}.inode AND l.history > 0 AND l.history = l.nlink)"
    " AND NOT EXISTS (SELECT 1 FROM pfs_entry e JOIN inode d ON d.id = e.parent WHERE e.inode = {0}.inode AND d.history > 0))"
)
"""SQL: only the history names the file of a row of `content`, and the PFS shows it under other names, which go. See history.py."""

HELD_XATTR = b"ckptfs.held"
"""The internal attribute of an inode that is held back from the PFS, see `pfs_hold`."""
IS_HELD_MARK = f"h.name = x'{HELD_XATTR.hex()}'"
"""SQL: a row `xattr h` holds back its inode."""
IS_HELD = f"EXISTS (SELECT 1 FROM xattr h WHERE h.inode = {{}} AND {IS_HELD_MARK})"
"""SQL: a retention rule holds back an inode from the PFS."""
UNPUBLISHED = (
    "content c JOIN inode i ON i.id = c.inode AND i.content = c.id AND i.nlink > 0 WHERE c.remote = 0 AND c.state = 2"
    f" AND {HAS_GOOD_COPY.format('c')}"
    " AND NOT EXISTS (SELECT 1 FROM pfs_file p WHERE p.inode = c.inode AND p.generation = c.generation AND p.complete = 1"
    " AND coalesce(p.digest, c.digest) = c.digest)"
    f" AND NOT {IS_HELD.format('c.inode')}"
)
"""SQL: own sealed contents that their files hold, and that the PFS is to show and does not."""


def build_content(row: tuple[Any, ...]) -> Content:
    """Return the content in the first columns of a row. Further columns are ignored."""
    number, inode, generation, state, size, digest, block_digests, change, remote = row[:9]
    return Content(number, inode, generation, ContentState(state), size, digest, block_digests, change, bool(remote))


def build_content_and_rest(row: tuple[Any, ...]) -> tuple[Content, tuple[Any, ...]]:
    """Return the content in the first columns of a row, and its further columns."""
    return build_content(row), row[9:]


def count_sizes(db: Database, column: str, source: str, *arguments: int | str | None) -> tuple[int, int]:
    """Return (number, sum of the column) of the rows behind this FROM."""
    ((count, size),) = db.rows(f"SELECT count(*), {TOTAL.format(column)} FROM {source}", *arguments)
    return int(count), int(size)


def get_content(db: Database, content: int) -> Content | None:
    """Return the row of a content. Returns None if there is none."""
    row = db.row(f"SELECT {CONTENT_COLUMNS} FROM content k WHERE k.id = ?", content)
    return None if row is None else build_content(row)


def is_unchanged(db: Database, seen: Content) -> bool:
    """Return True if the content is still in the state and at the change that the caller saw."""
    return db.row("SELECT state, change FROM content WHERE id = ?", seen.id) == (seen.state, seen.change)


def require_unchanged(db: Database, seen: Content) -> None:
    """Raise Busy if the content is not as the caller saw it: it was opened for writing, or deleted."""
    if not is_unchanged(db, seen):
        raise Busy("the file was opened for writing")
