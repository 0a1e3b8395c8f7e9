"""Takes: what is known of a file that somebody opens for reading only (`contents.Held`).
Leaves: which way that goes; the mount process goes it.
If we die here: nothing was changed, the decision is taken again.
"""

from enum import Enum

from ckptfs.catalog.contents import FileContent
from ckptfs.model import ContentState


class ReadSource(Enum):
    """HERE: from a tier. EMPTY: never written. FETCH: bring it here, or learn where to read it. LOST: there are no bytes any more."""

    HERE = "here"
    EMPTY = "empty"
    FETCH = "fetch"
    LOST = "lost"


def choose_read_source(held: FileContent) -> ReadSource:
    """How to open `held` for reading."""
    if held.tiers and (held.state is not ContentState.DOOMED or _was_just_unlinked(held)):
        return ReadSource.HERE
    if held.content is None:
        return ReadSource.FETCH if held.is_on_pfs else ReadSource.EMPTY
    elsewhere = held.state in (None, ContentState.SEALED) or (held.is_remote and held.state is ContentState.CLOSED)
    return ReadSource.FETCH if elsewhere else ReadSource.LOST


def _was_just_unlinked(held: FileContent) -> bool:
    """Whether another node took the last name of the file away since it was looked up: it can be opened as long as its bytes are here."""
    return held.inode.nlink == 0 and held.generation == held.inode.generation
