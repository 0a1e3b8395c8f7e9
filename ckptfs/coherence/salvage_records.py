"""Salvage records (`inode.salvaged`): files that show a previous generation, as the newest is lost.

The record is JSON: `content` and `generation` are what the file should hold, written by `node`, with the mtime `mtime_ns`. `shows` and
`shown` are the content and generation that it shows instead; without a content the PFS shows it. Other writers of the file leave the
record, so that the node that returns finds its own data. A node that returns while it has the file open for writing leaves the same record
of what it overwrites. `earlier` are the records of contents that were lost before, without a field of that name.

Crash safety: SQLite rolls the change back; the store has all records.
"""

import time

from ckptfs.catalog import identity, journal, namespace, remote_contents
from ckptfs.catalog.database import Database
from ckptfs.coherence import key_state, keys, merge, read
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
    return merge.encode_missed([{**record, "shows": None, "shown": 0}, *merge.list_missed(file)]) or ""


def record_previous_shown(db: Database, content: Content, inode: int, values: tuple[Value, Value], revision: int) -> None:
    """Record that the store shows `inode` with `content`. `values`: those of the file and the content."""
    with db.transaction():
        remote_contents.mark_own(db, content.id, inode, content.generation, values[1]["closed_ns"])
        journal.append(db, "content", inode, content=content.id)
        key_state.set_cached(db, SharedKey(CONTENT, content.id), CachedValue(revision, keys.encode_value(values[1])))
        read.record_values(db, [(SharedKey(INODE, inode), values[0], revision)])


def list_salvaged(db: Database) -> list[tuple[int, str]]:
    """Return (inode, the state it should have) of the files that show a previous content."""
    return [(row[0], row[1]) for row in db.rows("SELECT id, salvaged FROM inode WHERE salvaged IS NOT NULL AND nlink > 0")]


def is_previous_shown(db: Database, inode: int) -> bool:
    """Return True if a file shows a previous state, because the newest one is lost."""
    row = db.row("SELECT generation, content, salvaged FROM inode WHERE id = ? AND salvaged IS NOT NULL", inode)
    return row is not None and merge.is_showing_previous(dict(zip(("generation", "content", "missed"), row, strict=True)))


def delete_salvage_record(db: Database, inode: int, content: int | None = None) -> None:
    """Record that a lost content of a file, or all of them, is not missed any more."""
    with db.transaction():
        raw = db.value("SELECT salvaged FROM inode WHERE id = ?", inode)
        kept = [record for record in merge.decode_missed(raw) if content not in (None, record["content"])]
        db.run("UPDATE inode SET salvaged = ? WHERE id = ?", merge.encode_missed(kept), inode)


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
        delete_salvage_record(db, content.inode, content.id)
        return conflict_name
