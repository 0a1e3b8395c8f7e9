"""Changes of series and sets: rollback, pin, note, commit, removal (D2, X3).

Each is an extended attribute that is set through the mount, so the filesystem checks the caller's rights. Only a removal also takes away
names of the application: those that still lead to the very files of the set.
"""

import contextlib
import errno
import os
from operator import itemgetter
from pathlib import Path

from ckptfs import limits
from ckptfs.model import Level
from ckptfs.quantities import format_count
from ckptfs.series import retention
from ckptfs.series.retention import KeepReason, SetFacts
from ckptfs.series.set_order import build_set_order
from ckptfs_client.errors import ClientError, CommandFailed, NotPermitted, UsageError
from ckptfs_client.mounts import build_path_error, find
from ckptfs_client.sets.set_history import NOTE_XATTR, FoundSet, ListedSeries, SetHistory, find_named, split_number
from ckptfs_client.sets.set_listing import FileOfSet, list_set_files

PIN_XATTR = "user.ckptfs.pin"
REMOVE_XATTR = "user.ckptfs.remove"
ROLLBACK_XATTR = "user.ckptfs.rollback"
COMMIT_XATTR = "user.ckptfs.commit"
WHY_KEPT = {
    KeepReason.PINNED: "it is pinned",
    KeepReason.ROLLBACK: "a rollback made it the latest",
    KeepReason.NEWEST: "no newer set is as safe",
}


def set_attribute(path: Path, name: str, value: str | None) -> bool:
    """Set an attribute, or remove it. Return False if there was none to remove.

    Raises NotPermitted, CommandFailed.
    """
    try:
        if value is None:
            os.removexattr(path, name, follow_symlinks=False)
        else:
            os.setxattr(path, name, os.fsencode(value), follow_symlinks=False)
    except OSError as failure:
        if value is None and failure.errno == errno.ENODATA:
            return False
        raise _translate_error(path, failure) from failure
    return True


def _translate_error(path: str | os.PathLike[str], failure: OSError) -> ClientError:
    if failure.errno in (errno.EPERM, errno.EACCES):
        return NotPermitted(f"{os.fspath(path)}: only its owner may do this", remedy="run it as root, or as the user who writes there")
    return build_path_error(path, failure)


def set_pin(found: FoundSet, *, pinned: bool) -> str:
    """Pin a set, or unpin it. Return what was done."""
    changed = set_attribute(found.history, PIN_XATTR, "1" if pinned else None)
    if not changed:
        return f"{found.shown} was not pinned"
    return f"{found.shown} is pinned: no rule deletes it" if pinned else f"{found.shown} is no longer pinned"


def annotate(found: FoundSet, note: str) -> str:
    """Set the note of a set, or delete it if it is empty. Return what was done."""
    size = len(os.fsencode(note))
    is_printable = all(char.isprintable() or char in "\n\t" for char in note)
    if size > limits.NOTE_BYTES_MAX or not is_printable:
        fault = f"{size} bytes" if is_printable else "characters that cannot be printed"
        raise UsageError(f"the note has {fault}; accepted: printable text of up to {limits.NOTE_BYTES_MAX} bytes")
    set_attribute(found.history, NOTE_XATTR, note or None)
    return f"{found.shown} has a new note" if note else f"{found.shown} has no note"


def commit(path: Path) -> str:
    """Say that a member is complete. Return what was done. Raises UsageError for what cannot become a set."""
    mount = find(path)
    where = Path(os.path.abspath(path))
    if where == mount.mountpoint or where.is_relative_to(mount.history.parent):
        raise UsageError(f"{path} cannot become a set; accepted: a file or directory that an application saved below {mount.mountpoint}")
    set_attribute(path, COMMIT_XATTR, "1")
    return f"{path} is committed: it becomes a set as soon as its files are sealed"


# --- rollback ---------------------------------------------------------------------------------------------------------


def choose_rollback(history: SetHistory, one: ListedSeries, wanted: str | None) -> FoundSet:
    """Return the set that becomes the latest; without `wanted` the one before the latest.

    Raises CommandFailed, UsageError.
    """
    if wanted is not None and "/" in wanted:
        found = history.find_set(Path(wanted))
        if found.series != one:
            raise UsageError(f"{wanted} is not a set of {one.shown}")
        return found
    sets = history.list_sets(one)
    if wanted is None:
        get_order = build_set_order(os.fsencode(one.pattern))  # What an earlier rollback has passed over is not before its target.
        orders = [get_order(each.name, each.number) for each in sets]
        before = [(order, each) for order, each in zip(orders, sets, strict=True) if order < orders[0]]
        if not before:
            raise CommandFailed(f"{one.shown} has no set before the latest one", remedy=f"ckptfs list '{one.shown}' shows all")
        return FoundSet(one, max(before, key=itemgetter(0))[1])
    name, number = split_number(wanted)
    if wanted.removeprefix("@").isdigit():
        name, number = "", int(wanted.removeprefix("@"))
    if (chosen := find_named(sets, name, number)) is not None:
        return FoundSet(one, chosen)
    raise CommandFailed(f"{one.shown} has no set {wanted}", remedy="accepted: NAME, NUMBER or NAME@NUMBER, as `ckptfs list` shows them")


def roll_back(target: FoundSet) -> str:
    """Make a set the latest of its series. Return what was done."""
    set_attribute(target.series.history, ROLLBACK_XATTR, str(target.set.number))
    return (
        f"{target.shown} is the latest of {target.series.shown} until a newer set is complete; no data moved, and nothing was deleted"
        f" (ckptfs rollback --undo '{target.series.shown}' ends this)"
    )


def undo_rollback(one: ListedSeries) -> str:
    """End a rollback. Return what was done."""
    changed = set_attribute(one.history, ROLLBACK_XATTR, None)
    return f"the newest set of {one.shown} is the latest again" if changed else f"{one.shown} was not rolled back"


# --- removal ----------------------------------------------------------------------------------------------------------


def remove(history: SetHistory, found: FoundSet, *, now: bool) -> str:
    """Remove the application's names of a set, and with `now` the set itself. Return what was done."""
    count = _remove_own_files(history, found)
    words = f"{found.shown}: {format_count(count, 'file')} removed" if count else f"{found.shown}: the application had removed its files"
    if now:
        with contextlib.suppress(FileNotFoundError):
            os.lstat(found.history)
            set_attribute(found.history, REMOVE_XATTR, "now")
        return f"{words}; the set goes from the history"
    facts = [
        SetFacts(each.number, Level(each.level), each.in_place and each.number != found.set.number, each.pinned)
        for each in history.list_sets(found.series)
    ]
    reasons = retention.find_reasons(facts, found.series.rollback or None).get(found.set.number, frozenset())
    why = ", and ".join(words for reason, words in WHY_KEPT.items() if reason in reasons)
    if why:
        return f"{words}; the history keeps the set, because {why} (--now deletes it)"
    return f"{words}; the history drops the set as soon as no rule keeps it"


def _remove_own_files(history: SetHistory, found: FoundSet) -> int:
    """Remove the application's names of files of the set, and empty directories. Return how many files."""
    count = 0
    for file in list_set_files(history, found):
        own = os.path.join(os.fsencode(found.place), file.path)
        if is_same_file(found, file, own):
            try:
                os.unlink(own)
            except OSError as failure:
                raise _translate_error(os.fsdecode(own), failure) from failure
            count += 1
    if not found.set.group:
        for directory, _, _ in os.walk(found.history, topdown=False):
            with contextlib.suppress(OSError):  # Not empty: the application has other files there.
                os.rmdir(found.place / os.path.relpath(directory, found.history))
    return count


def is_same_file(found: FoundSet, file: FileOfSet, own: bytes) -> bool:
    """Return True if a name leads to a file of a set: the same inode, or a symlink with the same target."""
    try:
        mine = os.lstat(own)
        if file.is_symlink:
            return os.readlink(own) == os.readlink(os.path.join(os.fsencode(found.history), file.path))
    except OSError:
        return False
    return mine.st_dev == found.series.mount.device and mine.st_ino == file.record.inode
