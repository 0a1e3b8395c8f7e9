"""Takes: what is known of a file that somebody opens for writing or truncates (`contents.Held`).
Leaves: which way that goes; the mount process goes it.
If we die here: nothing was changed, the decision is taken again.

An overwritten content stays until its successor is sealed (P5), so whoever truncates a file that nobody else has open begins a new one.
Everything else is written in place: the same content opens again as the next generation.

Takes: what is known of a file that somebody opens for reading only (`contents.Held`).
Leaves: which way that goes; the mount process goes it.
If we die here: nothing was changed, the decision is taken again.
"""

import re
from enum import Enum

from ckptfs.catalog.contents import FileContent
from ckptfs.model import ContentState

_DIGITS = re.compile(rb"\d+")


class WriteTarget(Enum):
    """NEW: begin a content. IN_PLACE: the one that is here. FETCH: bring it here first. LOST: there are no bytes any more."""

    NEW = "new"
    IN_PLACE = "in place"
    FETCH = "fetch"
    LOST = "lost"


def choose_write_target(held: FileContent, *, truncate: bool, shared: bool) -> WriteTarget:
    """How to open `held` for writing. `truncate`: to nothing at all; `shared`: somebody has it open already."""
    if held.tiers and (shared or not truncate) and held.state is not ContentState.DOOMED:
        return WriteTarget.IN_PLACE
    if truncate or (held.content is None and not held.is_on_pfs):
        return WriteTarget.NEW
    if held.is_remote and held.state in {ContentState.CLOSED, ContentState.SEALED}:
        return WriteTarget.FETCH
    if held.state in {ContentState.LOST, ContentState.DOOMED, ContentState.OPEN, ContentState.CLOSED}:
        # Without a copy, only a sealed content can be somewhere else.
        return WriteTarget.LOST
    return WriteTarget.FETCH


def get_series_pattern(name: bytes) -> bytes:
    """What files of one series have in common: their name without its numbers."""
    return _DIGITS.sub(b"#", name)


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
