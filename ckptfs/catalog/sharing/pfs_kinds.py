"""The values of what nodes share about their PFS: what it shows of an inode (`f/`), what is under a name there (`x/`), and what each node
still has to tell it (`j/<node>/<catalog>-<row>`).

A value of `x/` with `by` is an intention: that node is about to change what the PFS shows under this name. Digests of blocks stay at home.
If we die here: nothing is kept.
"""

from typing import Any

from ckptfs.catalog import identity, journal
from ckptfs.catalog.database import Database

Value = dict[str, Any]

_PUBLISHED_COLUMNS = ("generation", "complete", "size", "mtime_ns", "pfs_inode", "digest")


def build_name_list(rows: list[tuple[Any, ...]]) -> list[list[Any]]:
    """[directory, name] of rows, in order."""
    return sorted([row[0], bytes(row[1]).decode("latin-1")] for row in rows)


def get_pfs_state_value(db: Database, inode: int, _: bytes) -> Value | None:
    """What the PFS shows of an inode: under which names, as what it was seen there, and which bytes."""
    rows = db.rows(
        "SELECT parent, name, seen_ino, seen_mode, seen_uid, seen_gid FROM pfs_entry WHERE inode = ? ORDER BY parent, name", inode
    )
    if not rows:
        return None
    value: Value = {"names": build_name_list(rows)}
    if rows[0][2] is not None:
        value["seen"] = list(rows[0][2:])
    row = db.row(f"SELECT {', '.join(_PUBLISHED_COLUMNS)} FROM published WHERE inode = ?", inode)
    if row is not None:
        value["published"] = [*row[:5], None if row[5] is None else bytes(row[5]).hex()]
    return value


def write_pfs_state(db: Database, inode: int, _: bytes, value: Value | None) -> None:
    """Make the rows of an inode say so."""
    wanted = {(parent, name.encode("latin-1")) for parent, name in (value or {"names": ()})["names"]}
    before = {(row[0], bytes(row[1])) for row in db.rows("SELECT parent, name FROM pfs_entry WHERE inode = ?", inode)}
    for parent, name in before - wanted:
        db.run("DELETE FROM pfs_entry WHERE parent = ? AND name = ?", parent, name)
    if value is None:
        db.run("DELETE FROM published WHERE inode = ?", inode)
        return
    for parent, name in wanted:
        db.run(
            "INSERT OR REPLACE INTO pfs_entry (parent, name, inode, seen_ino, seen_mode, seen_uid, seen_gid) VALUES (?,?,?,?,?,?,?)",
            parent, name, inode, *value.get("seen", (None,) * 4),
        )  # fmt: skip
    _write_published(db, inode, value.get("published"))


def _write_published(db: Database, inode: int, published: list[Any] | None) -> None:
    if published is None:
        db.run("DELETE FROM published WHERE inode = ?", inode)
        return
    digest = None if published[5] is None else bytes.fromhex(published[5])
    row = [*published[:5], digest]
    known = db.row("SELECT digest, pfs_inode FROM published WHERE inode = ?", inode)
    if known is not None and digest is not None and known == (digest, published[4]):
        db.run("UPDATE published SET generation = ?, complete = ?, size = ?, mtime_ns = ? WHERE inode = ?", *row[:4], inode)
    else:
        db.run(f"INSERT OR REPLACE INTO published (inode, {', '.join(_PUBLISHED_COLUMNS)}) VALUES (?,?,?,?,?,?,?)", inode, *row)


def get_pfs_name_value(db: Database, parent: int, name: bytes) -> Value | None:
    """What the PFS shows under a name."""
    inode = db.value("SELECT inode FROM pfs_entry WHERE parent = ? AND name = ?", parent, name)
    return None if inode is None else {"inode": inode}


def write_pfs_name(db: Database, parent: int, name: bytes, value: Value | None) -> None:
    """Make the row of a name say so. Of an intention the state before it counts."""
    inode = 0 if value is None else value["inode"]
    if not inode:
        db.run("DELETE FROM pfs_entry WHERE parent = ? AND name = ?", parent, name)
    elif db.value("SELECT inode FROM pfs_entry WHERE parent = ? AND name = ?", parent, name) != inode:
        db.run("INSERT OR REPLACE INTO pfs_entry (parent, name, inode) VALUES (?,?,?)", parent, name, inode)


def build_row_name(instance: str, seq: int) -> bytes:
    """How a row of the journal of the catalog `instance` is named in the store: in its order."""
    return f"{instance}-{seq:016x}".encode()


def get_row_value(db: Database, node: int, name: bytes) -> Value | None:
    """What this node still has to tell the PFS."""
    if node != identity.get_node_number(db):
        return None
    row = journal.get(db, int(name.rpartition(b"-")[2], 16))
    if row is None:
        return None
    value: Value = {"op": row.op, "inode": row.inode, "mode": row.mode, "at_ns": row.at_ns}
    if row.name is not None:
        value |= {"parent": row.parent, "name": row.name.decode("latin-1")}
    if row.new_name is not None:
        value |= {"new_parent": row.new_parent, "new_name": row.new_name.decode("latin-1")}
    if row.content is not None:
        value["content"] = row.content
    return value | ({"origin": row.origin} if row.origin else {})


def parse_row(value: Value, node: int) -> journal.JournalRow:
    """The row of `row_value`, which `node` had to tell; it has no number here yet."""
    name, new = value.get("name"), value.get("new_name")
    return journal.JournalRow(
        0, value["op"], value["inode"], value.get("parent", 0), None if name is None else name.encode("latin-1"),
        value.get("new_parent", 0), None if new is None else new.encode("latin-1"), value.get("content"), value["mode"], value["at_ns"],
        value.get("origin", node),
    )  # fmt: skip


def ignore_row(db: Database, number: int, name: bytes, value: Value | None) -> None:
    """What other nodes have to tell is not kept here."""
