"""Owns `copy.aside`: a former generation that may be all that is left of a content, put aside while the next one is fetched into its place.

Its row has an id of its own, under which its file lies meanwhile, and says of which content it is. It is put back when the fetch failed,
and goes when it did not. Functions that change something join the caller's transaction.
If we die here: SQLite undoes the unfinished change; recovery puts back what is aside.
"""

from ckptfs.catalog import identity
from ckptfs.catalog.database import Database
from ckptfs.model import Tier


def stash_copy(db: Database, content: int, tier: Tier) -> int | None:
    """Put what is kept of a content in `tier` aside: the id for its file. None: there is nothing of which it is known what it is."""
    with db.transaction():
        if db.value("SELECT 1 FROM copy WHERE content = ? AND tier = ? AND state = 3 AND digest IS NOT NULL", content, tier) is None:
            return None
        stash = db.insert("INSERT INTO content (id, inode, generation, state) VALUES (?, 0, 0, 3)", identity.allocate_id(db, "content"))
        db.run("DELETE FROM content WHERE id = ?", stash)
        db.run("UPDATE copy SET content = ?1, aside = ?2 WHERE content = ?2 AND tier = ?3", stash, content, tier)
        return stash


def restore_stashed(db: Database, stash: int, tier: Tier) -> int | None:
    """It is what lies here of its content again, whose id is given; None, and it is forgotten, when there is another copy by now."""
    with db.transaction():
        content: int | None = db.value("SELECT aside FROM copy WHERE content = ? AND tier = ?", stash, tier)
        is_replaced = db.value("SELECT 1 FROM copy WHERE content = ? AND tier = ?", content, tier) is not None
        if content is None or is_replaced or db.value("SELECT 1 FROM content WHERE id = ? AND state <> 3", content) is None:
            delete_stashed(db, stash, tier)
            return None
        db.run("UPDATE copy SET content = ?, aside = NULL WHERE content = ? AND tier = ?", content, stash, tier)
        return content


def delete_stashed(db: Database, stash: int, tier: Tier) -> None:
    """Nobody needs it any more."""
    db.run("DELETE FROM copy WHERE content = ? AND tier = ? AND aside IS NOT NULL", stash, tier)


def list_stashed(db: Database, tier: Tier) -> list[int]:
    """The ids of all that is aside in `tier`."""
    return [row[0] for row in db.rows("SELECT content FROM copy WHERE tier = ? AND aside IS NOT NULL", tier)]


def list_stashed_contents(db: Database) -> set[int]:
    """The contents of which something is aside."""
    return {row[0] for row in db.rows("SELECT aside FROM copy WHERE aside IS NOT NULL")}
