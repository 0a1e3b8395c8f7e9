"""Owns `inode.missed` here: what the store was told of a file that shows a former content becomes rows, and what was missed becomes a file.

`missed` is JSON: `content` and `generation` are what the file should hold, `node` wrote it, `mtime_ns` is the file's time with it; `shows`
and `shown` are the content and generation that it shows instead, without a content when that is what the PFS shows. Whoever writes the file
leaves it, so that the writer finds its own.
If we die here: SQLite undoes the unfinished change; the store has it all, and who asks for the file reads it again.
"""

import time
from collections.abc import Iterable

from ckptfs.catalog import journal, namespace
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import kinds, seen, touching
from ckptfs.catalog.sharing.kinds import CONTENT, INODE, Key, Value
from ckptfs.catalog.sharing.seen import Seen
from ckptfs.model import ROOT, Content, ContentState


def owned(content: Content, inode: int, node: int) -> Value:
    """What `c/` shall say of a former content that is shown again: `node` answers for it."""
    assert content.digest is not None
    return {
        "node": node, "inode": inode, "generation": content.generation, "state": int(ContentState.SEALED), "size": content.size,
        "digest": content.digest.hex(), "closed_ns": time.time_ns(),
    }  # fmt: skip


def shown(db: Database, content: Content, inode: int, values: tuple[Value, Value], revision: int) -> None:
    """The store was told that `inode` shows `content`, which lies here: (value of the file, value of the content)."""
    with db.change():
        db.run(
            "UPDATE content SET peer = 0, inode = ?, former_ns = NULL, lacking = 1, told = 0, closed_ns = ?, change = change + 1"
            " WHERE id = ? AND generation = ? AND state = 2",
            inode, values[1]["closed_ns"], content.id, content.generation,
        )  # fmt: skip
        journal.append(db, "content", inode, content=content.id)
        seen.put(db, Key(CONTENT, content.id), Seen(revision, kinds.pack(values[1])))
        take_over(db, inode, values[0], revision)


def take_over(db: Database, inode: int, value: Value, revision: int) -> None:
    """The store says this of a file; what was changed here and not told stays."""
    _take_over(db, Key(INODE, inode), value, revision)


def _take_over(db: Database, key: Key, value: Value | None, revision: int) -> None:
    shared = isinstance(db.connection, touching.Marked)
    with touching.applying(db) if shared else db.change():
        if not touching.is_touched(db, key) and seen.get(db, key).revision < revision:
            kinds.write(db, key, value)
            seen.put(db, key, Seen(revision, kinds.pack(value)))


def shown_by_pfs(db: Database, told: Iterable[tuple[Key, Value | None, int]]) -> None:
    """The store was told that a file shows what the PFS has of it: (key, value, revision) of all that says so, in this order."""
    with db.change():
        for key, value, revision in told:
            _take_over(db, key, value, revision)


def shown_again(db: Database, inode: int, value: Value, revision: int, node: int) -> None:
    """The store was told that `inode` holds what was missed, which `node` has: that one may have taken it for superseded, so the PFS is
    told of it from here.
    """
    with db.change():
        take_over(db, inode, value, revision)
        if db.journalled:
            row = journal.Row(0, "content", inode, content=value["content"], mode=value["mode"], at_ns=time.time_ns(), origin=node)
            journal.take(db, [row])


def missed(db: Database) -> list[tuple[int, str]]:
    """(inode, what it should hold) of the files that show a former content, as far as they are known here."""
    return [(row[0], row[1]) for row in db.rows("SELECT id, missed FROM inode WHERE missed IS NOT NULL AND nlink > 0")]


def forget(db: Database, inode: int) -> None:
    """Nobody will bring what this file should hold."""
    with db.change():
        db.run("UPDATE inode SET missed = NULL WHERE id = ?", inode)


def put_beside(db: Database, content: Content, file: Value, label: str) -> bytes | None:
    """What this node wrote, and others missed and wrote anew, becomes a file beside theirs; its name. None when it has moved on."""
    parent, name = file["names"][0]
    if db.value("SELECT 1 FROM inode WHERE id = ? AND nlink > 0", parent) is None:
        parent = ROOT
    with db.change():
        if db.row("SELECT state, change FROM content WHERE id = ?", content.id) != (content.state, content.change):
            return None
        candidates = kinds.names_beside(name.encode("latin-1"), kinds.CONFLICT, label.encode())
        beside = next(one for one in candidates if namespace.find(db, parent, one) is None)
        made = namespace.make(db, parent, beside, file["mode"], uid=file["uid"], gid=file["gid"], blind=True).id
        db.run("UPDATE content SET inode = ?, change = change + 1 WHERE id = ?", made, content.id)
        db.run(
            "UPDATE inode SET content = ?, generation = ?, size = ?, mtime_ns = ? WHERE id = ?",
            content.id, content.generation, content.size, file["missed_mtime_ns"], made,
        )  # fmt: skip
        journal.append(db, "content", made, content=content.id)
        forget(db, content.inode)
        return beside
