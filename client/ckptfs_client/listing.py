"""What `ckptfs ls` gathers: names and inodes through the mount, what is known of each from the daemon, digests through the mount again.

Everything that tells something about a file passes the kernel's permission checks first: names by reading the directory, digests by
reading an attribute of the file.

The newest complete member of a series, as `ckptfs latest` finds it: names and inodes through the mount, the rest from the daemon.

Every name is looked at with lstat(2), so the kernel's permissions hold, and in a cluster the daemon asks the others before it answers.
What is complete is decided in `ckptfs.series`.
If we die here: nothing was changed.
"""

import contextlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptfs import series
from ckptfs.model import Level
from ckptfs.series import DELETED, Completeness, MemberFile, Series
from ckptfs_client import render
from ckptfs_client.client import Client, open_client
from ckptfs_client.errors import CommandFailed, UsageError
from ckptfs_client.json_answers import LsJson

DIGEST_XATTR = "user.ckptfs.digest"


def list_rows(path: Path, *, itself: bool) -> list[dict[str, Any]]:
    """What is known of `path`, or of the entries of the directory it is, sorted by name. Raises Failed, NoMount."""
    client, inode = open_client(path)
    with client:
        if itself or not path.is_dir() or path.is_symlink():
            return _build_rows(client, [(str(path), path, inode)])
        try:
            with os.scandir(path) as entries:
                found = sorted((entry.name, Path(entry.path), entry.inode()) for entry in entries)
        except OSError as failure:
            raise CommandFailed(f"{path}: {os.strerror(failure.errno or 0)}") from failure
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
    """The digest in hex, as far as the caller may read the file; empty while it is not known."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            return os.getxattr(path, DIGEST_XATTR, follow_symlinks=False).decode("ascii", "replace")
    return ""


CHOICES_MAX = 4
SEAL_REMEDY = "wait until what was written is closed and sealed: ckptfs wait PATH --level local"


@dataclass(frozen=True, slots=True)
class LatestMember:
    """A complete member."""

    number: int
    path: Path
    verdict: Completeness


def find_newest(named: Sequence[Path], wanted: Level = Level.NONE) -> LatestMember:
    """The newest complete member, at least as safe as `wanted`, of the series so named. Raises Failed when there is none."""
    directory, one = find_series(named)
    members = one.sort_newest_first(_list_names(directory))
    why = "there is no member"
    client, _ = open_client(directory)
    with client:
        for name in members:
            path = directory / os.fsdecode(name)
            verdict = series.judge_completeness(_list_files(client, path))
            if verdict.has_level(wanted):
                return LatestMember(one.parse_number(name) or 0, path, verdict)
            if name == members[0]:
                why = (
                    f"of {path.name}, {verdict.incomplete_reason}"
                    if verdict.incomplete_reason
                    else f"{path.name} has the level {verdict.level.value} only"
                )
    level = "" if wanted is Level.NONE else f" at the level {wanted.value}"
    raise CommandFailed(f"{directory / os.fsdecode(one.name)}: no complete checkpoint{level}: {why}", remedy=SEAL_REMEDY if members else "")


def find_series(named: Sequence[Path]) -> tuple[Path, Series]:
    """The directory and the series that a person names: with `*` for the number, by its directory, or by members. Raises Usage, Failed."""
    where = named[0]
    if len(named) > 1:
        # What a shell makes of a * without quotes.
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
    # Of run1/step_100 both names have a number: the one that counts steps is meant.
    if own is not None and inside and any(one.is_step_count for one in inside) != own.is_step_count:
        inside, own = ([], own) if own.is_step_count else (inside, None)
    readings = [(where, one) for one in inside] + ([(where.parent, own)] if own else [])
    if not readings:
        raise CommandFailed(
            f"{where}: there is no series: no name there has a number", remedy="name one with * for the number: 'run1/step_*'"
        )
    if len(readings) > 1:
        choice = " or ".join(f"'{directory / os.fsdecode(one.name)}'" for directory, one in readings[:CHOICES_MAX])
        raise UsageError(f"{where} may mean several series", remedy=f"say which, in quotes: {choice}")
    return readings[0]


def _find_series_of_member(where: Path) -> Series | None:
    """The series to which a path belongs by its own name; a mount's top belongs to none."""
    client, _ = open_client(where)
    with client:
        top = os.path.realpath(where) == os.path.realpath(client.mount.mountpoint)
    return None if top else series.find_series(os.fsencode(where.name), _list_names(where.parent))


def _list_names(directory: Path) -> list[bytes]:
    try:
        return [os.fsencode(name) for name in os.listdir(directory)]
    except OSError as failure:
        raise CommandFailed(f"{directory}: {os.strerror(failure.errno or 0)}") from failure


def _list_files(client: Client, member: Path) -> dict[bytes, MemberFile]:
    """The regular files of a member by their paths below it; a member that is a file has one, b""."""
    inodes: dict[bytes, int] = {}
    todo = [(b"", os.fsencode(member))]
    gone = {}
    while todo:
        below, path = todo.pop()
        try:
            found = os.lstat(path)
            if stat.S_ISREG(found.st_mode):
                inodes[below] = found.st_ino
            elif stat.S_ISDIR(found.st_mode):
                todo += [(below + b"/" + name if below else name, path + b"/" + name) for name in os.listdir(path)]
        except FileNotFoundError:
            gone[below] = DELETED
        except OSError as failure:
            raise CommandFailed(f"{os.fsdecode(path)}: {os.strerror(failure.errno or 0)}") from failure
    known = zip(inodes, client.list_records(inodes.values()), strict=True)
    return gone | {below: MemberFile(one.size, Level(one.level), one.incomplete_reason) if one.known else DELETED for below, one in known}
