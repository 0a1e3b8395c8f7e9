"""What `ckptfs ls` and `ckptfs latest` find out about files.

Names and inodes are read through the mount with lstat(2) and readdir(3), and digests with getxattr(2), so the kernel checks the caller's
permissions. In a cluster, lstat also refreshes the name from the other nodes. Levels and copies come from the daemon.
"""

import contextlib
import os
import stat
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ckptfs import series
from ckptfs.model import Level
from ckptfs.series import LatestMember, MemberFile, Series
from ckptfs_client import render
from ckptfs_client.client import Client, open_client
from ckptfs_client.errors import CommandFailed, UsageError
from ckptfs_client.json_answers import LsJson

DIGEST_XATTR = "user.ckptfs.digest"
CHOICES_MAX = 4
SEAL_REMEDY = "wait until what was written is closed and sealed: ckptfs wait PATH --level local"
T = TypeVar("T")


def list_rows(path: Path, *, itself: bool) -> list[dict[str, Any]]:
    """Return one row for `path`, or for each entry of a directory, sorted by name. Raises CommandFailed, NoMount."""
    client, inode = open_client(path)
    with client:
        if itself or not path.is_dir() or path.is_symlink():
            return _build_rows(client, [(str(path), path, inode)])
        try:
            with os.scandir(path) as entries:
                found = sorted((entry.name, Path(entry.path), entry.inode()) for entry in entries)
        except OSError as failure:
            raise _build_error(path, failure) from failure
        return _build_rows(client, found)


def _build_rows(client: Client, found: list[tuple[str, Path, int]]) -> list[dict[str, Any]]:
    records = client.list_records(inode for _, _, inode in found)
    answers: list[dict[str, Any]] = []
    for (name, path, _), record in zip(found, records, strict=True):
        if record.known:
            row = render.message_to_dict(record)
            del row["known"]
            answer: LsJson = {"name": name, **row, "digest": _read_digest(path) if record.kind == "file" else ""}
            answers.append({**answer})
    return answers


def _read_digest(path: Path) -> str:
    """Return the digest in hex; empty if it is not known yet, or if the caller may not read the file."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            return os.getxattr(path, DIGEST_XATTR, follow_symlinks=False).decode("ascii", "replace")
    return ""


def find_newest(named: Sequence[Path], wanted: Level) -> tuple[Path, LatestMember]:
    """Return the newest complete member, at least as safe as `wanted`, of the series that `named` means. Raises CommandFailed if none."""
    directory, one = _find_series(named)
    client, _ = open_client(directory)

    async def read(path: bytes) -> tuple[dict[bytes, MemberFile], dict[bytes, bytes]]:
        return _read_member(client, path)

    top = os.fsencode(directory)
    with client:
        members = {name: os.path.join(top, name) for name in _list_names(directory)}
        found = _run(series.find_newest(one, members, read, wanted))
    if found is not None and found.verdict.has_level(wanted):
        return directory / os.fsdecode(found.name), found
    why = "there is no member"
    if found is not None:
        name, verdict = os.fsdecode(found.name), found.verdict
        lacks = verdict.incomplete_reason
        why = f"of {name}, {lacks}" if lacks else f"{name} has the level {verdict.level.value} only"
    words = f"{directory / os.fsdecode(one.name)}: no complete checkpoint at the level {wanted.value}: {why}"
    raise CommandFailed(words, remedy=SEAL_REMEDY if found is not None else "")


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("the coroutine waits")


def _read_member(client: Client, path: bytes) -> tuple[dict[bytes, MemberFile], dict[bytes, bytes]]:
    """Read a file or directory as `series.ReadMember` says."""
    inodes, directories = {}, {}
    try:
        names = os.listdir(path) if stat.S_ISDIR(os.lstat(path).st_mode) else [b""]
        for name in names:
            below = path + b"/" + name if name else path
            found = os.lstat(below)
            if stat.S_ISREG(found.st_mode):
                inodes[name] = found.st_ino
            elif stat.S_ISDIR(found.st_mode):
                directories[name] = below
    except FileNotFoundError:
        raise
    except OSError as failure:
        raise _build_error(os.fsdecode(failure.filename or path), failure) from failure
    files = {}
    for name, record in zip(inodes, client.list_records(inodes.values()), strict=True):
        if not record.known:
            raise FileNotFoundError(path)
        files[name] = MemberFile(record.size, Level(record.level), record.incomplete_reason)
    return files, directories


def _find_series(named: Sequence[Path]) -> tuple[Path, Series]:
    """Return the directory and the series that a user names: by a pattern with `*`, by its directory, or by members.

    Raises UsageError, CommandFailed.
    """
    where = named[0]
    if len(named) > 1:
        # The shell has expanded an unquoted `*`.
        names = [os.fsencode(one.name) for one in named]
        expanded = [one for one in series.list_series(names) if all(one.parse_number(name) is not None for name in names)]
        if len(expanded) != 1 or len({one.parent for one in named}) > 1:
            raise UsageError("these names are not members of one series", remedy="put it in quotes: 'run1/step_*'")
        return where.parent, expanded[0]
    if "*" in str(where):
        found = series.parse(os.fsencode(where.name))
        if found is None or "*" in str(where.parent):
            raise UsageError(f"{where}: one * is accepted, in the last part of the path, for the number", remedy="such as 'run1/step_*'")
        return where.parent, found
    own = _find_series_of_member(where)
    inside = series.list_series(_list_names(where)) if where.is_dir() else []
    # Both names in run1/step_100 have a number: the one that counts steps is meant.
    if own is not None and inside and any(one.is_step_count for one in inside) != own.is_step_count:
        inside, own = ([], own) if own.is_step_count else (inside, None)
    readings = [(where, one) for one in inside] + ([(where.parent, own)] if own else [])
    if not readings:
        remedy = "name one with * for the number: 'run1/step_*'"
        raise CommandFailed(f"{where}: there is no series: no name there has a number", remedy=remedy)
    if len(readings) > 1:
        choice = " or ".join(f"'{directory / os.fsdecode(one.name)}'" for directory, one in readings[:CHOICES_MAX])
        raise UsageError(f"{where} may mean several series", remedy=f"say which, in quotes: {choice}")
    return readings[0]


def _find_series_of_member(where: Path) -> Series | None:
    """Return the series to which a path belongs by its own name. The root of a mount belongs to none."""
    client, _ = open_client(where)
    client.close()
    if os.path.realpath(where) == os.path.realpath(client.mount.mountpoint):
        return None
    return series.find_series(os.fsencode(where.name), _list_names(where.parent))


def _list_names(directory: Path) -> list[bytes]:
    try:
        return os.listdir(os.fsencode(directory))
    except OSError as failure:
        raise _build_error(directory, failure) from failure


def _build_error(path: Path | str, failure: OSError) -> CommandFailed:
    return CommandFailed(f"{path}: {os.strerror(failure.errno or 0)}")
