"""The state of retention rules: chosen and expiring sets, files that were read back, retired contents.

A set that was chosen for the PFS, or whose names in the application's directories are being deleted, has an internal attribute.

Retired contents (D5, table `retired`): a rule keeps the newest sets of a series in RAM and NVMe. The mount process marks the contents of
the others, and the evict step drops their copies as soon as no promise needs them, even if there is room. What is fetched again later
stays until the room is needed.

Functions that change rows join the caller's transaction.
"""

import json
from collections.abc import Iterable

from ckptfs.catalog import inodes
from ckptfs.catalog.content_rows import CONTENT_COLUMNS, build_content
from ckptfs.catalog.copies import IS_AT_REST, IS_SAFE_ELSEWHERE
from ckptfs.catalog.database import Database
from ckptfs.model import Content, Tier

CHOSEN_XATTR = b"ckptfs.pfs"
"""The set was chosen for the PFS: nothing of it has to be held back any more."""
EXPIRING_XATTR = b"ckptfs.expiring"
"""The names of the set in the application's directories are being deleted, also after a crash."""
_WITH_TREES = (
    "WITH RECURSIVE tree(top, id) AS (SELECT value, value FROM json_each(?)"
    " UNION ALL SELECT tree.top, e.child FROM tree JOIN entry e ON e.parent = tree.id)"
)
"""As `inodes.WITH_TREE`; `top` is the inode of the array to which an inode belongs."""
_IS_LOCAL = "c.state = 1 AND c.tier <> 'pfs'"


def list_marked(db: Database, series: int, mark: bytes) -> set[int]:
    """Return the directories of the sets of a series with `CHOSEN_XATTR` or `EXPIRING_XATTR`."""
    return set(db.column("SELECT e.child FROM entry e JOIN xattr x ON x.inode = e.child AND x.name = ? WHERE e.parent = ?", mark, series))


def mark_set(db: Database, set_directory: int, mark: bytes) -> None:
    """Give a set `CHOSEN_XATTR` or `EXPIRING_XATTR`."""
    inodes.set_internal_xattr(db, set_directory, mark, b"1")


def list_unchecked(db: Database, set_directories: Iterable[int]) -> set[int]:
    """Return those sets of which a file that this node wrote back was not read back from the PFS yet."""
    return set(db.column(
        f"{_WITH_TREES} SELECT DISTINCT tree.top FROM tree JOIN inode i ON i.id = tree.id JOIN content k ON k.id = i.content"
        " AND k.remote = 0 JOIN pfs_file p ON p.inode = i.id AND p.checked_ns = 0"
        f" WHERE EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND {_IS_LOCAL})",
        json.dumps([*set_directories]),
    ))  # fmt: skip


def is_in_use(db: Database, directories: Iterable[int]) -> bool:
    """Return True if a process has anything at or below these inodes open."""
    found = f"{_WITH_TREES} SELECT 1 FROM tree JOIN handle h ON h.inode = tree.id LIMIT 1"
    return db.value(found, json.dumps([*directories])) is not None


def get_changed_ns(db: Database, roots: Iterable[int]) -> int:
    """Return when something at or below these inodes was changed last."""
    found = f"{_WITH_TREES} SELECT max(max(i.mtime_ns, i.ctime_ns)) FROM tree JOIN inode i ON i.id = tree.id"
    return int(db.value(found, json.dumps([*roots])) or 0)


# --- retired contents -------------------------------------------------------------------------------------------------


def record_retired(db: Database, leaving: Iterable[int], staying: Iterable[int]) -> None:
    """Mark the contents of leaving sets that no staying set has."""
    files = f"{_WITH_TREES} SELECT i.content FROM tree JOIN inode i ON i.id = tree.id WHERE i.content IS NOT NULL"
    with db.transaction():
        db.run(
            f"INSERT OR IGNORE INTO retired (content) SELECT c.content FROM copy c WHERE {_IS_LOCAL} AND c.content IN ({files})",
            json.dumps([*leaving]),
        )
        db.run(f"DELETE FROM retired WHERE content IN ({files})", json.dumps([*staying]))
        delete_retired(db)


def has_retired(db: Database) -> bool:
    """Return True if a content is to leave RAM or NVMe."""
    return db.value("SELECT 1 FROM retired LIMIT 1") is not None


def list_retired(db: Database, tier: Tier, *, at_most: int, pfs_verify: bool = True) -> list[Content]:
    """Return retired contents with a copy in `tier` that no promise needs and no process has open."""
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS} FROM retired r CROSS JOIN copy c ON c.content = r.content AND c.tier = ?"
        f" CROSS JOIN content k ON k.id = r.content WHERE {IS_AT_REST} AND {IS_SAFE_ELSEWHERE.format(pfs_verify=int(pfs_verify))} LIMIT ?",
        tier, at_most,
    )  # fmt: skip
    return [build_content(row) for row in rows]


def delete_retired(db: Database) -> None:
    """Forget retired contents that have left RAM and NVMe, or are gone."""
    db.run(f"DELETE FROM retired WHERE NOT EXISTS (SELECT 1 FROM copy c WHERE c.content = retired.content AND {_IS_LOCAL})")
