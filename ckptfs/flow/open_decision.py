"""The decision how to open a file. Pure functions.

Takes: the catalog's record of a file (`contents.FileContent`) that an application opens or truncates.
Leaves: a `WriteTarget` or `ReadSource`, on which the mount process acts.
If we die here: nothing was changed; the decision is taken again.

An overwritten content stays until its successor is sealed (P5). A truncation of a file that no other process has open therefore begins a
new content. All other writes go in place: the same content is opened again as its next generation.
"""

from enum import Enum

from ckptfs.catalog.contents import FileContent
from ckptfs.model import ContentState


class WriteTarget(Enum):
    """The content that a writer gets. FETCH: the local one after a fetch. LOST: no bytes are left."""

    NEW = "new"
    IN_PLACE = "in place"
    FETCH = "fetch"
    LOST = "lost"


def choose_write_target(held: FileContent, *, truncate: bool) -> WriteTarget:
    """Return how to open `held` for writing. `truncate`: to length 0; no process has it open."""
    if held.tiers and not truncate and held.state is not ContentState.DOOMED:
        return WriteTarget.IN_PLACE
    if truncate or (held.content is None and not held.is_on_pfs):
        return WriteTarget.NEW
    if held.is_remote and held.state in {ContentState.CLOSED, ContentState.SEALED}:
        return WriteTarget.FETCH
    if held.state in {ContentState.LOST, ContentState.DOOMED, ContentState.OPEN, ContentState.CLOSED}:
        # Without a local copy, only a sealed content can be on another node or the PFS.
        return WriteTarget.LOST
    return WriteTarget.FETCH


class ReadSource(Enum):
    """The source of a reader. FETCH: the answer of a fetch request. LOST: no bytes are left."""

    HERE = "here"
    EMPTY = "empty"
    FETCH = "fetch"
    LOST = "lost"


def choose_read_source(held: FileContent) -> ReadSource:
    """Return how to open `held` for reading."""
    if held.tiers and (held.state is not ContentState.DOOMED or _was_just_unlinked(held)):
        return ReadSource.HERE
    if held.content is None:
        return ReadSource.FETCH if held.is_on_pfs else ReadSource.EMPTY
    elsewhere = held.state in (None, ContentState.SEALED) or (held.is_remote and held.state is ContentState.CLOSED)
    return ReadSource.FETCH if elsewhere else ReadSource.LOST


def _was_just_unlinked(held: FileContent) -> bool:
    """Return whether another node removed the last name since the lookup: the bytes are still here."""
    return held.inode.nlink == 0 and held.generation == held.inode.generation
