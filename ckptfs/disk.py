"""Labelled disk operations: a test can make one of them fail, or loop over all of them.

`CKPTFS_FAULT` holds comma-separated `LABEL=ACTION[@N]`. At the N-th call with that label (default 1; `*`: every call) the action
replaces the call: an errno name (`ENOSPC`), `kill` (SIGKILL to this process before the call), `kill-after` (after it) or `hang` (before
it, until the specification changes). `@/path` names a file with the specification; it is read at each call. Labels are `step:act`;
modules declare theirs in `LABELS`.
"""

import contextlib
import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Result = TypeVar("Result")

HANG_POLL_S = 0.02
INTEGER_MAX = 2**63 - 1
LABELS: set[str] = set()
_calls: Counter[str] = Counter()
_renumbering_device = 0
_fault = os.environ.get("CKPTFS_FAULT", "")


def declare_labels(*names: str) -> None:
    """Declare the labels of a module; a call with an undeclared label is an error."""
    LABELS.update(names)


def act(label: str, call: Callable[..., Result], *values: Any, **named: Any) -> Result:
    """Run `call(*values, **named)` under `label`, or the fault that a test requested."""
    if not _fault:
        return call(*values, **named)
    action = _count_call(label)
    while action == "hang":
        time.sleep(HANG_POLL_S)
        action = _get_action(label)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action and action != "kill-after":
        raise OSError(getattr(errno, action), f"injected at {label}")
    result = call(*values, **named)
    if action == "kill-after":
        os.kill(os.getpid(), signal.SIGKILL)
    return result


def reach(label: str) -> None:
    """Mark a point between two disk operations, where a test can fail or kill."""
    act(label, lambda: None)


def fstat(fd: int) -> os.stat_result:
    """Call fstat(2) for numbers that the catalog can hold."""
    return bound_status(os.fstat(fd))


def bound_status(found: os.stat_result) -> os.stat_result:
    """Return a status whose numbers fit into the signed 64 bits of SQLite.

    The highest bit of an inode number is dropped: some filesystems make their numbers of hashes. Times beyond the year 2262 become that.
    """
    times = [found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns]
    if found.st_ino <= INTEGER_MAX and all(abs(time_ns) <= INTEGER_MAX for time_ns in times):
        return found
    fields = dict(zip(("st_atime_ns", "st_mtime_ns", "st_ctime_ns"), map(bound_time, times), strict=True))
    fields |= {name: getattr(found, name) for name in ("st_blksize", "st_blocks", "st_rdev")}
    return os.stat_result((found.st_mode, found.st_ino & INTEGER_MAX, *found[2:]), fields)


def record_inode_numbers(device: int, *, are_lasting: bool) -> None:
    """Record whether the files of the PFS, at `device`, keep their inode numbers as long as they exist."""
    global _renumbering_device
    _renumbering_device = 0 if are_lasting else device


def get_lasting_ino(found: os.stat_result) -> int:
    """Return the inode number of a file; 0 if its filesystem may give it another one later."""
    return 0 if found.st_dev == _renumbering_device else found.st_ino


def bound_time(time_ns: int) -> int:
    """Return the nearest time that the catalog can hold."""
    return max(-INTEGER_MAX, min(time_ns, INTEGER_MAX))


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def closing_on_failure(fd: int) -> Iterator[int]:
    """Close a descriptor if the block fails. Otherwise it is the caller's."""
    try:
        yield fd
    except BaseException:
        os.close(fd)
        raise


def _count_call(label: str) -> str:
    """Count a call of `label` and return its action; empty for none."""
    assert label in LABELS, f"undeclared disk label {label}"
    _calls[label] += 1
    return _get_action(label)


def _get_action(label: str) -> str:
    text = _fault
    if text.startswith("@"):
        try:
            with open(text[1:], encoding="ascii") as file:
                text = file.read()
        except FileNotFoundError:
            return ""
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, rest = item.partition("=")
        action, _, number = rest.partition("@")
        if name == label and (number == "*" or int(number or 1) == _calls[label]):
            return action
    return ""


def open_file(label: str, path: str | bytes, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
    """Call openat(2) with O_CLOEXEC."""
    return act(label, os.open, path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)


def rename(label: str, old: str | bytes, new: str | bytes, *, old_fd: int | None = None, new_fd: int | None = None) -> None:
    """Call renameat(2). It is atomic and replaces an existing target."""
    act(label, os.rename, old, new, src_dir_fd=old_fd, dst_dir_fd=new_fd)


def unlink(label: str, path: str | bytes, *, dir_fd: int | None = None) -> None:
    """Call unlinkat(2)."""
    act(label, os.unlink, path, dir_fd=dir_fd)


def fsync(label: str, fd: int) -> None:
    """Call fsync(2)."""
    act(label, os.fsync, fd)


def write_all(label: str, fd: int, data: bytes | memoryview, offset: int) -> None:
    """Call pwrite(2) until every byte is written."""
    view = memoryview(data)
    while view:
        count = act(label, os.pwrite, fd, view, offset)
        view, offset = view[count:], offset + count
