"""Salvage records (`inode.salvaged`): files that show a previous generation, as the newest is lost.

The record is JSON: `content` and `generation` are what the file should hold, written by `node`, with the mtime `mtime_ns`. `shows` and
`shown` are the content and generation that it shows instead; without a content the PFS shows it. Other writers of the file leave the
record, so that the node that returns finds its own data. A node that returns while it has the file open for writing leaves the same record
of what it overwrites.

Crash safety: SQLite rolls the change back; the store has all records.
"""

import json
import time
from collections.abc import Iterable

from ckptfs.catalog import identity, journal, namespace
from ckptfs.catalog.database import Database
from ckptfs.coherence import key_state, keys
from ckptfs.coherence.key_state import CachedValue
from ckptfs.coherence.keys import CONTENT, INODE, SharedKey, Value
from ckptfs.model import ROOT, Content, ContentState


def build_content_value(content: Content, inode: int, node: int) -> Value:
    """Return the value of a previous content that is shown again; `node` answers for it."""
    assert content.digest is not None
    return {
        "node": node, "inode": inode, "generation": content.generation, "state": int(ContentState.SEALED), "size": content.size,
        "digest": content.digest.hex(), "closed_ns": time.time_ns(),
    }  # fmt: skip


def build_overwritten(file: Value) -> str:
    """Return the record of the state of a file that a node overwrites without having seen it."""
    record = {"node": identity.get_origin_node(file["content"]), **{name: file[name] for name in ("content", "generation", "mtime_ns")}}
    return keys.encode_fields({**record, "shows": None, "shown": 0}).decode()


def record_previous_shown(db: Database, content: Content, inode: int, values: tuple[Value, Value], revision: int) -> None:
    """Record that the store shows `inode` with `content`. `values`: those of the file and the content."""
    with db.transaction():
        db.run(
            "UPDATE content SET remote = 0, inode = ?, superseded_mtime_ns = NULL, under_replicated = 1, announce_state = 0,"
            " closed_ns = ?, change = change + 1"
            " WHERE id = ? AND generation = ? AND state = 2",
            inode, values[1]["closed_ns"], content.id, content.generation,
        )  # fmt: skip
        journal.append(db, "content", inode, content=content.id)
        key_state.set_cached(db, SharedKey(CONTENT, content.id), CachedValue(revision, keys.encode_value(values[1])))
        apply_values(db, [(SharedKey(INODE, inode), values[0], revision)])


def apply_values(db: Database, store_values: Iterable[tuple[SharedKey, Value | None, int]]) -> None:
    """Apply values of the store, (key, value, revision), in order; not to keys that are dirty here."""
    with key_state.change_unmarked(db):
        for key, value, revision in store_values:
            if not key_state.is_dirty(db, key) and key_state.get_cached(db, key).revision < revision:
                keys.write_value(db, key, value)
                key_state.set_cached(db, key, CachedValue(revision, keys.encode_value(value)))


def restore_own_state(db: Database, inode: int) -> None:
    """Show the lost state of a file if this node wrote it and has it. Joins the caller's transaction.

    A node that stood still was taken for dead. Its programs go on with what they closed; an open must not wait until others know.
    """
    raw = db.value("SELECT salvaged FROM inode WHERE id = ?", inode)
    if raw is None:
        return
    lost = json.loads(raw)
    row = db.row(
        "SELECT k.size FROM content k JOIN inode i ON i.id = ?1"
        " WHERE k.id = ?2 AND k.generation = ?3 AND k.remote = 0 AND k.state IN (1, 2)"
        " AND EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 1)"
        " AND i.generation = ?4 AND (?5 IS NULL OR i.content = ?5)"
        " AND NOT EXISTS (SELECT 1 FROM handle h WHERE h.inode = i.id AND h.writer = 1)",
        inode, lost["content"], lost["generation"], lost["shown"], lost["shows"],
    )  # fmt: skip
    if row is not None:
        what = (lost["content"], lost["generation"], row[0], lost["mtime_ns"], time.time_ns(), inode)
        db.run("UPDATE inode SET content = ?, generation = ?, size = ?, mtime_ns = ?, ctime_ns = ?, salvaged = NULL WHERE id = ?", *what)
        journal.append(db, "content", inode, content=lost["content"])


def list_salvaged(db: Database) -> list[tuple[int, str]]:
    """Return (inode, the state it should have) of the files that show a previous content."""
    return [(row[0], row[1]) for row in db.rows("SELECT id, salvaged FROM inode WHERE salvaged IS NOT NULL AND nlink > 0")]


def delete_salvage_record(db: Database, inode: int) -> None:
    """Record that the lost state of a file will not come back."""
    with db.transaction():
        db.run("UPDATE inode SET salvaged = NULL WHERE id = ?", inode)


def insert_conflict_copy(db: Database, content: Content, file: Value, node_label: str) -> bytes | None:
    """Insert a file for bytes that others missed and overwrote. Return its name; None if they changed."""
    parent, name = file["names"][0]
    if db.value("SELECT 1 FROM inode WHERE id = ? AND nlink > 0", parent) is None:
        parent = ROOT
    with db.transaction():
        if db.row("SELECT state, change FROM content WHERE id = ?", content.id) != (content.state, content.change):
            return None
        candidates = keys.build_conflict_names(name.encode("latin-1"), keys.CONFLICT_MARK, node_label.encode())
        conflict_name = next(one for one in candidates if namespace.find_child(db, parent, one) is None)
        made = namespace.create(db, parent, conflict_name, file["mode"], uid=file["uid"], gid=file["gid"], allow_unimported=True).id
        db.run("UPDATE content SET inode = ?, change = change + 1 WHERE id = ?", made, content.id)
        db.run(
            "UPDATE inode SET content = ?, generation = ?, size = ?, mtime_ns = ? WHERE id = ?",
            content.id, content.generation, content.size, file["missed_mtime_ns"], made,
        )  # fmt: skip
        journal.append(db, "content", made, content=content.id)
        delete_salvage_record(db, content.inode)
        return conflict_name
