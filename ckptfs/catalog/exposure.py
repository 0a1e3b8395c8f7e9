"""Files that have not reached a level yet, and the order in which a drain brings them there.

The order is one row of the table `report`. Replication and write-back read it and take the files in it first. A row whose time has passed
does not count, and the next mover deletes it. So an order ends with its drain, or with the daemon.
"""

import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ckptfs.catalog import inodes, peer_copies, summary
from ckptfs.catalog.content_rows import IS_HELD, IS_ON_PFS
from ckptfs.catalog.database import Database
from ckptfs.catalog.set_members import MANIFEST_NAMES
from ckptfs.model import HISTORY_NAME, ROOT, ContentState, Level

Path = tuple[tuple[int, bytes], ...]
_SET_NAME = re.compile(rb".+@[0-9]+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ExposedFile:
    """A file of this node that lacks the level. `path`: (directory, name in it) from the root on."""

    inode: int
    content: int
    size: int
    is_open: bool
    closed_ns: int
    path: Path


@dataclass(frozen=True, slots=True)
class UrgentOrder:
    """Files in the order of their urgency, in groups that are safe only together.

    `is_ahead`: write-back may put new files of a group on the PFS ahead of older changes. `token` tells one drain from another.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    is_ahead: bool = False
    token: str = ""


def list_exposed(db: Database, level: Level) -> list[ExposedFile]:
    """Return the files of this node that have yet to reach `level` (clique or pfs), the oldest first."""
    return _list_own_files(db, _build_condition(db, level))


def list_held(db: Database) -> list[ExposedFile]:
    """Return the files that this node wrote and that are held back from the PFS."""
    return _list_own_files(db, _IS_HELD)


def _list_own_files(db: Database, condition: str) -> list[ExposedFile]:
    with db.read_transaction():
        rows = db.rows(
            "SELECT k.inode, k.id, CASE k.state WHEN 0 THEN i.size ELSE k.size END, k.state, k.closed_ns FROM content k"
            " JOIN inode i ON i.id = k.inode AND i.content = k.id AND i.nlink > 0"
            f" WHERE k.remote = 0 AND k.state IN (0, 1, 2) AND NOT {IS_ON_PFS.format('k')} AND {condition}"
            " ORDER BY k.closed_ns, k.id"
        )
        paths: dict[int, Path] = {ROOT: ()}
        found = []
        for inode, content, size, state, closed_ns in rows:
            path = _load_path(db, inode, paths)
            if path[:1] == ((ROOT, HISTORY_NAME),):
                if path[-1][1] in MANIFEST_NAMES:
                    continue  # A set is safe without its manifest.
                path = _cut_below_set(path)
            found.append(ExposedFile(inode, content, size, state == ContentState.OPEN, closed_ns, path))
    return found


def _cut_below_set(path: Path) -> Path:
    """Return the path of the set in the history to which a file belongs: it is safe as a whole."""
    depth = next((depth for depth, (_, name) in enumerate(path, 1) if _SET_NAME.fullmatch(name)), len(path))
    return path[:depth]


_IS_HELD = IS_HELD.format("i.id")


def _build_condition(db: Database, level: Level) -> str:
    """Return the SQL condition that a content `k` of `i`, which is not on the PFS, lacks the level."""
    if level is not Level.CLIQUE:
        return f"NOT {_IS_HELD}"
    domains, required = peer_copies.COUNT_DOMAINS.format("k"), peer_copies.count_domains(db).required
    return f"(k.state <> 2 OR {domains} < {required} OR {peer_copies.IS_UNCOMMITTED.format('k.id', 'i.id')})"


def _load_path(db: Database, inode: int, known: dict[int, Path]) -> Path:
    """Return the path of `inode` by its oldest name outside of the history. `known` keeps directories."""
    steps: list[tuple[int, int, bytes]] = []
    while inode not in known and len(steps) < 4096:
        named = (
            "SELECT e.parent, e.name FROM entry e JOIN inode p ON p.id = e.parent WHERE e.child = ? ORDER BY p.history, e.cookie LIMIT 1"
        )
        row = db.row(named, inode)
        if row is None:
            break
        parent, name = row
        steps.append((inode, parent, bytes(name)))
        inode = parent
    path = known.get(inode, ())
    for child, parent, name in reversed(steps):
        path = (*path, (parent, name))
        known[child] = path
    return path


def list_names(db: Database, directory: int) -> list[bytes]:
    return [bytes(row[0]) for row in db.rows("SELECT name FROM entry WHERE parent = ?", directory)]


def list_children(db: Database, directory: int, names: Iterable[bytes]) -> list[int]:
    """Return the inodes under these names in a directory, as far as they exist."""
    found = (inodes.find_child_id(db, directory, name) for name in names)
    return [child for child in found if child is not None]


def get_last_close_ns(db: Database, roots: Iterable[int]) -> int:
    """Return when a file among these inodes, or below them, was written last; 0 without one."""
    return int(db.value(f"{inodes.WITH_TREE} SELECT max(i.closed_ns) FROM tree JOIN inode i ON i.id = tree.id", json.dumps([*roots])) or 0)


def has_held(db: Database, roots: Iterable[int]) -> bool:
    """Return True if one of these inodes, or anything below them, is held back from the PFS."""
    held = f"SELECT 1 FROM tree WHERE {IS_HELD.format('tree.id')} LIMIT 1"
    return db.value(f"{inodes.WITH_TREE} {held}", json.dumps([*roots])) is not None


def has_pending_names(db: Database, roots: Iterable[int]) -> bool:
    """Return True if the PFS has yet to learn a name of these inodes, or of anything below them."""
    pending = "SELECT 1 FROM tree JOIN journal j ON j.inode = tree.id WHERE j.op IN ('make', 'link', 'rename', 'exchange') LIMIT 1"
    return db.value(f"{inodes.WITH_TREE} {pending}", json.dumps([*roots])) is not None


# --- the order ---------------------------------------------------------------------------------------------------------


def set_order(db: Database, order: UrgentOrder, valid_s: float) -> None:
    """Publish the order for the next `valid_s` seconds. It replaces that of any other drain."""
    value = {"groups": order.groups, "is_ahead": order.is_ahead, "token": order.token, "until_s": time.time() + valid_s}
    summary.set_report(db, summary.URGENT_REPORT, value)


def delete_order(db: Database, token: str) -> None:
    """Delete the order of a drain, unless another drain has replaced it."""
    db.change("DELETE FROM report WHERE key = ? AND json_extract(value, '$.token') = ?", summary.URGENT_REPORT, token)


def load_order(db: Database) -> UrgentOrder | None:
    """Return the order of the running drain. Returns None if no drain has set one."""
    value = summary.get_report(db, summary.URGENT_REPORT)
    if value.get("until_s", 0) < time.time():
        return None
    return UrgentOrder(tuple(tuple(group) for group in value["groups"]), bool(value["is_ahead"]), str(value["token"]))
