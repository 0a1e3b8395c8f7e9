"""What `ckptfs list` and `ckptfs show` print: series, sets, and all that is known of one set."""

import contextlib
import json
import os
import stat
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ckptfs.model import Level
from ckptfs.protocol import control_pb2 as pb
from ckptfs.quantities import format_age, format_count, format_size
from ckptfs_client import mounts
from ckptfs_client.client import Client, ask_answering
from ckptfs_client.errors import ClientError, CommandFailed, NoMount
from ckptfs_client.json_answers import ProducerJson, SeriesJson, SetFileJson, SetJson, ShowJson
from ckptfs_client.render import escape_unprintable, format_columns, print_json
from ckptfs_client.sets.set_history import FoundSet, ListedSeries, SetHistory

MANIFEST = "MANIFEST.json"
MANIFEST_FILES = frozenset({MANIFEST, "MANIFEST.xxh128"})
COMPLETE, ONLY_IN_HISTORY, INCOMPLETE = "complete", "in history only", "incomplete"
SHOWN_MAX = 500
"""How many sets of a series people see, unless they ask for all."""


# --- list -------------------------------------------------------------------------------------------------------------


def print_list(where: Path | None, wanted: Level | None, *, lists_all: bool = False, is_json: bool) -> None:
    """Print the series of all mounts or of a directory, or the sets of a series.

    All mounts are asked at once. Ends with an exit code if one does not answer. `wanted`: only sets with this level, of all series.
    """

    def ask(client: Client) -> tuple[list[SeriesJson], list[SetJson]]:
        history = SetHistory(client.mount, client, figures=wanted is None and (where is None or "*" not in str(where)))
        found = history.series if where is None else history.find_series(where)
        if wanted is not None:
            return [], [row for one in found for row in list_set_rows(history, one, wanted)]
        if where is None or len(found) > 1:
            return list(map(build_series_row, found)), []
        return [], list_all_rows(history, where, found[0] if found else None, None if lists_all or is_json else SHOWN_MAX)

    answers, has_silent = ask_answering(mounts.choose_all(where), ask)
    series_rows = [row for _, (found, _) in answers for row in found]
    rows = [row for _, (_, found) in answers for row in found]
    if is_json:
        print_json(series_rows or rows)
    elif series_rows or rows:
        print(format_series(series_rows) if series_rows else format_sets(rows))
    elif answers:
        print(f"ckptfs: {escape_unprintable(str(where or 'the mounts'))}: no checkpoint sets", file=sys.stderr)
    if has_silent:
        sys.exit(NoMount.exit_code)


def build_series_row(one: ListedSeries) -> SeriesJson:
    newest = one.newest
    return {
        "series": one.shown, "sets": one.sets, "size": one.size, "newest": FoundSet(one, newest).shown if newest else "",
        "level": newest.level if newest else "", "completed_ns": newest.completed_ns if newest else 0, "rollback": one.rollback or None,
    }  # fmt: skip


def list_set_rows(history: SetHistory, one: ListedSeries, wanted: Level = Level.NONE) -> list[SetJson]:
    """Return the rows of the sets of a series that have the level, the newest first."""
    enough = [level for level in Level if level.rank >= wanted.rank]
    return _build_set_rows(one, [each for each in history.list_sets(one) if each.level in enough])


def _build_set_rows(one: ListedSeries, sets: Iterable[pb.SetInfo]) -> list[SetJson]:
    shown, place, top, has_steps = one.shown, f"{one.place}/", f"{one.history}/", "*" in one.pattern
    return [
        {
            "series": shown, "set": (name := f"{(own := os.fsdecode(each.name))}@{each.number}"), "number": each.number,
            "step": int(each.step) if has_steps and each.step else None, "files": each.files, "size": each.size, "level": each.level,
            "completed_ns": each.completed_ns, "pinned": each.pinned, "rollback": each.number == one.rollback, "note": each.note,
            "state": COMPLETE if each.in_place else ONLY_IN_HISTORY, "reason": "",
            "path": place + own if each.in_place else top + name,
        }
        for each in sets
    ]  # fmt: skip


def list_all_rows(history: SetHistory, named: Path, one: ListedSeries | None, at_most: int | None = None) -> list[SetJson]:
    """Return the rows of a series: its sets, and before them the newest member if it is not complete.

    If it has more than `at_most` sets, the newest ones, and words on stderr.
    """
    sets = [] if one is None else history.list_sets(one, at_most and at_most + 1)
    if at_most is not None and len(sets) > at_most:
        print(f"ckptfs: only the newest {at_most} sets are listed; --all lists all", file=sys.stderr)
    rows = [] if one is None else _build_set_rows(one, sets[:at_most])
    unfinished = find_unfinished(named, one, rows[0] if rows else None)
    return rows if unfinished is None else [unfinished, *rows]


def find_unfinished(named: Path, one: ListedSeries | None, newest_row: SetJson | None) -> SetJson | None:
    """Return the row of the newest member, if it is not complete.

    Looking at all members takes long. So it is left out if nothing can be newer than the newest set: it is in its place, and no name in its
    directory has changed since it was completed.
    """
    if one is not None and newest_row is not None and newest_row["state"] == COMPLETE:
        with contextlib.suppress(OSError):
            if os.stat(one.place).st_mtime_ns <= (newest_row["completed_ns"] or 0):
                return None
    from ckptfs_client.sets import newest

    try:
        found = newest.find_newest([Path(one.shown) if one is not None else named], Level.LOCAL)
    except ClientError:
        if one is None:
            raise
        return None  # The application's directory is gone; the history is not.
    rejected = next((one for one in found.result.rejected if not one.path), None)
    if rejected is None:
        return None
    return {
        "series": found.searched.pattern, "set": os.fsdecode(rejected.name), "number": None, "step": rejected.number,
        "files": rejected.verdict.files, "size": rejected.verdict.size, "level": rejected.verdict.level.value, "completed_ns": None,
        "pinned": False, "rollback": False, "note": "", "state": INCOMPLETE, "reason": rejected.find_obstacle(Level.LOCAL),
        "path": found.build_path(rejected),
    }  # fmt: skip


def format_series(rows: list[SeriesJson]) -> str:
    now = time.time_ns()
    cells = [
        [str(row["sets"]), format_size(row["size"]), row["level"], _format_age(now, row["completed_ns"]),
         escape_unprintable(os.path.basename(row["newest"])), escape_unprintable(row["series"]), "rolled back" if row["rollback"] else ""]
        for row in rows
    ]  # fmt: skip
    return format_columns(("sets>", "size>", "level", "age>", "newest", "series", "state"), cells)


def format_sets(rows: list[SetJson]) -> str:
    now = time.time_ns()
    several = len({row["series"] for row in rows}) > 1
    cells = [
        [escape_unprintable(os.path.join(os.path.dirname(row["series"]), row["set"]) if several else row["set"]),
         "-" if row["step"] is None else str(row["step"]), str(row["files"]), format_size(row["size"]), row["level"],
         _format_age(now, row["completed_ns"]), "pinned" if row["pinned"] else "", _describe_state(row), escape_unprintable(row["note"])]
        for row in rows
    ]  # fmt: skip
    return format_columns(("set", "step>", "files>", "size>", "level", "age>", "kept", "state", "note"), cells)


def _describe_state(row: SetJson) -> str:
    words = f"{row['state']}: {row['reason']}" if row["reason"] else row["state"]
    return escape_unprintable(f"{words}, rolled back to" if row["rollback"] else words)


def _format_age(now_ns: int, then_ns: int | None) -> str:
    return format_age(now_ns, then_ns) if then_ns else "-"


# --- one set ----------------------------------------------------------------------------------------------------------


def load_manifest(found: FoundSet) -> dict[str, Any]:
    """Return the manifest of a set. Raises CommandFailed."""
    path = found.history / MANIFEST
    try:
        value = json.loads(path.read_bytes())
        if isinstance(value, dict) and isinstance(value.get("files"), list):
            return value
    except OSError as failure:
        raise mounts.build_path_error(path, failure) from failure
    except ValueError:
        pass
    raise CommandFailed(f"{path} is no manifest", remedy=f"ckptfs verify {found.shown}")


def describe_set(history: SetHistory, found: FoundSet) -> ShowJson:
    (row,) = _build_set_rows(found.series, [found.set])
    manifest = load_manifest(found)
    producers: list[ProducerJson] = [
        {"host": one.get("host", ""), "pid": one.get("pid", 0), "command": one.get("command", ""), "job": one.get("job", ""),
         "rank": one.get("rank", "")}
        for one in manifest.get("producers", [])
    ]  # fmt: skip
    digests = get_digests(manifest)
    members: list[SetFileJson] = [
        {"path": os.fsdecode(one.path), "size": one.status.st_size, "mtime_ns": one.status.st_mtime_ns, "level": one.record.level,
         "digest": digests.get(one.path, "")}
        for one in list_set_files(history, found)
    ]  # fmt: skip
    path = str(found.history / MANIFEST)
    return {**row, "manifest": path, "history": str(found.history), "producers": producers, "members": members}


def get_digests(manifest: dict[str, Any]) -> dict[bytes, str]:
    """Return the digests in a manifest by path; empty if one was not known."""
    return {os.fsencode(one["path"]): one.get("digest") or "" for one in manifest["files"]}


class FileOfSet(NamedTuple):
    """A file of a set: its path there, what lstat(2) shows of it, and what the daemon knows."""

    path: bytes
    status: os.stat_result
    record: pb.Record

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.status.st_mode)


def list_set_files(history: SetHistory, found: FoundSet) -> list[FileOfSet]:
    """Return all files of a set but the manifest, sorted by path. Raises CommandFailed."""
    top = os.fsencode(found.history)
    listed = []
    try:
        for directory, _, names in os.walk(top, onerror=_raise):
            for name in names:
                path = os.path.join(directory, name)
                listed.append((os.path.relpath(path, top), os.lstat(path)))
    except OSError as failure:
        raise mounts.build_path_error(found.history, failure) from failure
    listed = sorted(one for one in listed if os.fsdecode(one[0]) not in MANIFEST_FILES)
    records = history.client.list_records(status.st_ino for _, status in listed)
    return [FileOfSet(path, status, record) for (path, status), record in zip(listed, records, strict=True)]


def _raise(failure: OSError) -> None:
    raise failure


def format_set(shown: ShowJson, title: str) -> str:
    age = _format_age(time.time_ns(), shown["completed_ns"])
    kept = [word for word, holds in (("pinned", shown["pinned"]), ("rolled back to", shown["rollback"])) if holds]
    facts = [
        ("series", shown["series"]), ("state", shown["state"]), ("path", shown["path"]), ("level", shown["level"]),
        ("completed", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((shown["completed_ns"] or 0) / 1e9)) + f" ({age} ago)"),
        ("files", f"{format_count(shown['files'], 'file')}, {format_size(shown['size'])}"), ("kept", ", ".join(kept)),
        ("note", shown["note"]), *(("producer", _describe_producer(one)) for one in shown["producers"]), ("manifest", shown["manifest"]),
    ]  # fmt: skip
    lines = [escape_unprintable(title), *(f"  {name:<10} {escape_unprintable(value)}" for name, value in facts if value), ""]
    cells = [
        [one["level"], format_size(one["size"]), time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["mtime_ns"] / 1e9)), one["digest"],
         escape_unprintable(one["path"])]
        for one in shown["members"]
    ]  # fmt: skip
    return "\n".join([*lines, format_columns(("level", "size>", "changed", "digest", "file"), cells)])


def _describe_producer(one: ProducerJson) -> str:
    words = [f"{one['host']}, pid {one['pid']}", one["job"] and f"job {one['job']}", one["rank"] and f"rank {one['rank']}", one["command"]]
    return ", ".join(filter(None, words))
