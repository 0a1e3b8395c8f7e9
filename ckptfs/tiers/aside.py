"""Owns the file of a former generation that is put aside while the next one is fetched into its place: until that is here, and was found
right, it may be all that is left of the content (P5).

If we die here: the row and the file are under one id or under the other, and recovery brings them together again.
"""

import contextlib

from ckptfs.catalog import aside
from ckptfs.catalog.database import Database
from ckptfs.tiers.place import Place


def put(db: Database, place: Place, content: int) -> int | None:
    """Put what is kept of a content aside, in the caller's transaction; its id until then, None where there is nothing to keep."""
    number = aside.stash_copy(db, content, place.tier)
    if number is not None:
        try:
            place.rename(content, number)
        except FileNotFoundError:
            aside.delete_stashed(db, number, place.tier)
            return None
    return number


def put_back(db: Database, place: Place, number: int | None) -> None:
    """The fetch failed, or died: what was put aside is what lies here again, unless there is something newer by now."""
    if number is None:
        return
    with db.transaction():
        content = aside.restore_stashed(db, number, place.tier)
        if content is None:
            place.remove(number)
        else:
            with contextlib.suppress(FileNotFoundError):  # It never got its other name.
                place.rename(number, content)


def forget(db: Database, place: Place, number: int | None) -> None:
    """What came after it is here."""
    if number is not None:
        with db.transaction():
            aside.delete_stashed(db, number, place.tier)
        place.remove(number)


def put_all_back(db: Database, place: Place) -> None:
    """A former mover died while it fetched."""
    for number in aside.list_stashed(db, place.tier):
        put_back(db, place, number)
