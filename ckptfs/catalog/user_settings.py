"""The attributes `user.ckptfs.*` by which users control sets: pin, note, remove, rollback, commit.

The kernel has checked that the caller may write the file or directory. Only its owner and root may set these attributes. They are shown to
callers that name them, and never listed. A removal and a commit are stored as internal attributes. The tracker of sets acts on these.

Functions that change rows join the caller's transaction.
"""

import errno
import itertools
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from ckptfs import limits
from ckptfs.catalog import history, history_names, inodes, namespace, set_members
from ckptfs.catalog.database import Database
from ckptfs.errors import posix_error
from ckptfs.model import Inode

log = logging.getLogger(__name__)
REMOVE_XATTR = b"ckptfs.remove"
_YES, _NOW = b"1", b"now"
_REMOVED = f"SELECT x.inode FROM xattr x JOIN inode i ON i.id = x.inode WHERE x.name = x'{REMOVE_XATTR.hex()}' AND i.nlink > 0"


class UserSetting(NamedTuple):
    """One attribute. A value of None is none; `change` raises ValueError unless it is `accepted`."""

    fits: Callable[[Database, Inode], bool]
    get: Callable[[Database, int], bytes | None]
    change: Callable[[Database, int, bytes | None], None]
    accepted: str
    meaning: str


def get_setting(db: Database, inode: Inode, name: bytes) -> bytes | None:
    """Return the value of an attribute without the prefix `user.ckptfs.`."""
    setting = USER_SETTINGS.get(name)
    return setting.get(db, inode.id) if setting is not None and setting.fits(db, inode) else None


def set_setting(db: Database, inode: Inode, name: bytes, value: bytes | None, uid: int) -> None:
    """Change an attribute for a user; None removes it. Raises EPERM, EINVAL and ENODATA."""
    setting = USER_SETTINGS.get(name)
    if setting is None or not setting.fits(db, inode) or uid not in (0, inode.uid):
        raise posix_error(errno.EPERM)
    if value is None and setting.get(db, inode.id) is None:
        raise posix_error(errno.ENODATA)
    try:
        setting.change(db, inode.id, value)
    except ValueError as failure:
        path = inodes.get_shown_path(db, inode.id)
        log.debug("%s: user.ckptfs.%s is refused: %r is no value of it (accepted: %s)", path, name.decode(), value, setting.accepted)
        raise posix_error(errno.EINVAL) from failure


def list_removals(db: Database) -> list[int]:
    """Return the directories of sets that their owners want removed."""
    return db.column(_REMOVED)


def _is_set(db: Database, inode: Inode) -> bool:
    return inode.is_directory and history_names.is_series(db, inode.parent)


def _is_series(db: Database, inode: Inode) -> bool:
    return inode.is_directory and history_names.is_series(db, inode.id)


def _is_member(_: Database, inode: Inode) -> bool:
    return inode.is_file or (inode.is_directory and not inode.history)


def _build_getter(name: bytes) -> Callable[[Database, int], bytes | None]:
    """Return the function for an attribute whose value is stored as users gave it."""
    return lambda db, inode: inodes.find_xattr(db, inode, name)


def _set_pin(db: Database, inode: int, value: bytes | None) -> None:
    _require(value in (_YES, None))
    inodes.set_internal_xattr(db, inode, history.PIN_XATTR, value)
    # A file of the set leads the tracker to its series, whose rule may say something else now.
    namespace.insert_candidates(db, [file.id for _, file in itertools.islice(history.list_files(db, inode), 1)])


def _set_note(db: Database, inode: int, value: bytes | None) -> None:
    note = (value or b"").decode()  # UnicodeDecodeError is a ValueError.
    _require(len(value or b"") <= limits.NOTE_BYTES_MAX and all(char.isprintable() or char in "\n\t" for char in note))
    inodes.set_internal_xattr(db, inode, history.NOTE_XATTR, value or None)


def _set_removal(db: Database, inode: int, value: bytes | None) -> None:
    _require(value == _NOW)
    inodes.set_xattr(db, inode, REMOVE_XATTR, _NOW)


def _get_rollback(db: Database, inode: int) -> bytes | None:
    found = history.get_series(db, inode)
    return None if found is None or found.rollback is None else b"%d" % found.rollback.number


def _set_rollback(db: Database, inode: int, value: bytes | None) -> None:
    if value is None:
        history.set_rollback(db, inode, None)
        return
    names = history_names.list_set_names(db, inode)
    _require(any(b"%d" % one.number == value for one in names))
    # The clock of the node that made the last set may be ahead of this one.
    last = history.get_set(db, max(names, key=lambda one: one.number).directory)
    at_ns = max(time.time_ns(), 0 if last is None else last.record.completed_ns)
    history.set_rollback(db, inode, history.Rollback(int(value), at_ns))


def _set_commit(db: Database, inode: int, value: bytes | None) -> None:
    _require(value in (_YES, None))
    if value is None:
        set_members.delete_commit(db, [inode])
        return
    inodes.set_xattr(db, inode, set_members.COMMIT_XATTR, _YES)
    namespace.insert_candidates(db, [inode])


def _require(is_accepted: bool) -> None:
    if not is_accepted:
        raise ValueError


USER_SETTINGS = {
    b"pin": UserSetting(
        _is_set, _build_getter(history.PIN_XATTR), _set_pin, "1",
        "On a set in the history: no rule deletes it. Remove the attribute to unpin it.",
    ),
    b"note": UserSetting(
        _is_set, _build_getter(history.NOTE_XATTR), _set_note, f"printable UTF-8, up to {limits.NOTE_BYTES_MAX} bytes",
        "On a set in the history: a note of the owner.",
    ),
    b"remove": UserSetting(
        _is_set, _build_getter(REMOVE_XATTR), _set_removal, "now",
        "On a set in the history: it goes from the history, whatever keeps it.",
    ),
    b"rollback": UserSetting(
        _is_series, _get_rollback, _set_rollback, "the number of a set of this series",
        "On a series in the history: this set is the latest until a newer one completes. Remove the attribute to end that.",
    ),
    b"commit": UserSetting(
        _is_member, _build_getter(set_members.COMMIT_XATTR), _set_commit, "1",
        "On a file or directory: it is a complete checkpoint as it is now, whatever it lacks. The attribute goes when its set is made.",
    ),
}  # fmt: skip
"""By the name without the prefix `user.ckptfs.`."""
