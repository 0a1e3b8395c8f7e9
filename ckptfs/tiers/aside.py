"""Owns the file of a former generation that is put aside while the next one is fetched into its place: until that is here, and was found
right, it may be all that is left of the content (P5).

If we die here: the row and the file are under one id or under the other, and recovery brings them together again.
"""

import contextlib

from ckptfs.catalog import aside
from ckptfs.catalog.database import Database
from ckptfs.tiers.place import TierStorage


def stash(db: Database, storage: TierStorage, content: int) -> int | None:
    """Put what is kept of a content aside, in the caller's transaction; its id until then, None where there is nothing to keep."""
    stash_id = aside.stash_copy(db, content, storage.tier)
    if stash_id is not None:
        try:
            storage.rename(content, stash_id)
        except FileNotFoundError:
            aside.delete_stashed(db, stash_id, storage.tier)
            return None
    return stash_id


def restore_stashed(db: Database, storage: TierStorage, stash_id: int | None) -> None:
    """The fetch failed, or died: what was put aside is what lies here again, unless there is something newer by now."""
    if stash_id is None:
        return
    with db.transaction():
        content = aside.restore_stashed(db, stash_id, storage.tier)
        if content is None:
            storage.remove(stash_id)
        else:
            with contextlib.suppress(FileNotFoundError):  # It never got its other name.
                storage.rename(stash_id, content)


def drop_stashed(db: Database, storage: TierStorage, stash_id: int | None) -> None:
    """What came after it is here."""
    if stash_id is not None:
        with db.transaction():
            aside.delete_stashed(db, stash_id, storage.tier)
        storage.remove(stash_id)


def restore_all_stashed(db: Database, storage: TierStorage) -> None:
    """A former mover died while it fetched."""
    for stash_id in aside.list_stashed(db, storage.tier):
        restore_stashed(db, storage, stash_id)
