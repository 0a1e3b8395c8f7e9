"""What `ckptfs latest` prints: which series is meant, and what the mount answers.

The mount searches, as for `.ckptfs/latest`. A directory shows the newest complete member of a series in it as an extended attribute, and
only to a caller that may list the directory. What the caller may not read is no answer for it. Names that a user gives are looked up
through the mount, too, so the kernel checks the permissions.

A directory that is given is searched inside, always. So the answer is never in another directory than the one that was named.
"""

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptfs import limits
from ckptfs.errors import posix_error
from ckptfs.model import Level
from ckptfs.series import patterns, rules
from ckptfs.series.patterns import Series
from ckptfs.series.search import LatestAnswer, LatestMember, SearchResult
from ckptfs_client import render
from ckptfs_client.errors import CommandFailed, UsageError
from ckptfs_client.json_answers import LatestJson
from ckptfs_client.mounts import build_path_error, find, find_inode

LATEST_XATTR = b"user.ckptfs.latest.%s.%d.%s"
"""Level, where the search begins, and series."""
RULES_XATTR = "user.ckptfs.rules"
CHOICES_MAX = 4
NOTES_MAX = 4
SEARCHED_MAX, SEARCHED_DEPTH = 64, 2
"""How many subdirectories of each depth are looked into for other series."""
SEAL_REMEDY = "wait until what was written is closed and sealed: ckptfs wait PATH --level local"


class NamedSeries(NamedTuple):
    """A series in a directory, and what a search in it found, if that is known already."""

    directory: Path
    series: Series
    result: SearchResult | None = None

    @property
    def pattern(self) -> str:
        return str(self.directory / os.fsdecode(self.series.name))


class Found(NamedTuple):
    """The answer of a search: what was searched, the outcome, and the path of the history."""

    searched: NamedSeries
    result: SearchResult
    history: bytes

    def build_path(self, found: LatestMember) -> str:
        """Return the path of a member, or of a set in the history.

        It is never one that a command takes for an option.
        """
        place = (self.history, found.path) if found.path else (os.fsencode(self.searched.directory), found.name)
        path = str(Path(os.fsdecode(os.path.join(*place))))
        return os.path.join(os.curdir, path) if path.startswith("-") else path


def find_newest(named: Sequence[Path], wanted: Level) -> Found:
    """Return the newest complete member, at least as safe as `wanted`, of the series that `named` means.

    Raises CommandFailed or UsageError if no series is meant, or several.
    """
    _list_names.cache_clear()
    _install_rules(named[0])
    searched = _find_series(named, wanted)
    # Behind a symlink may be another filesystem, whose inode numbers say nothing here.
    mount, _ = find_inode(os.path.realpath(searched.directory))
    result = searched.result or _ask(searched.directory, searched.series.name, wanted).result
    return Found(searched, result, os.fsencode(mount.history))


def build_failure(found: Found, wanted: Level) -> CommandFailed:
    """Return the error for a search that found nothing."""
    what = f"{found.searched.pattern}: no complete checkpoint at the level {wanted.value}: "
    if not found.result.rejected:
        names = _list_names(found.searched.directory)
        meant = [NamedSeries(found.searched.directory, one) for one in patterns.suggest_series(found.searched.series.name, names)]
        return CommandFailed(what + "there is no member", remedy=f"did you mean {_join_choices(meant)}?" if meant else "")
    newest = found.result.rejected[0]
    why = f"of {os.fsdecode(newest.name)}, {newest.find_obstacle(wanted)}"
    return CommandFailed(what + why, remedy=SEAL_REMEDY if "not sealed" in why or "holds no file" in why else "")


def print_newest(named: Sequence[Path], wanted: Level, *, is_json: bool) -> None:
    """Print the path of the newest complete member, and on stderr what was passed over.

    Raises as `find_newest`.
    """
    found = find_newest(named, wanted)
    member, rejected, _ = found.result
    if is_json:
        answer: LatestJson = {}
        if rejected:
            answer["rejected"] = [{"path": found.build_path(one), "reason": one.find_obstacle(wanted)} for one in rejected]
        if member is not None:
            verdict = member.verdict
            number: LatestJson = {"number": member.number} if member.number >= 0 else {}
            answer |= number | {
                "path": found.build_path(member), "level": verdict.level.value, "size": verdict.size, "files": verdict.files,
            }  # fmt: skip
        render.print_json(answer)
    else:
        # The error says why the newest one is not named.
        notes = rejected if member is not None else rejected[1:]
        for one in notes[:NOTES_MAX]:
            words = f"{found.build_path(one)} was passed over: {one.find_obstacle(wanted)}"
            print(f"ckptfs: {render.escape_unprintable(words)}", file=sys.stderr)
        if len(notes) > NOTES_MAX:
            print(f"ckptfs: {len(notes) - NOTES_MAX} more were passed over; --json lists them", file=sys.stderr)
    if member is None:
        raise build_failure(found, wanted)
    if not is_json:
        # A program reads this: the bytes of the name, unchanged.
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(found.build_path(member)) + b"\n")


def _ask(directory: Path, name: bytes, wanted: Level) -> LatestAnswer:
    """Return what the mount finds. If the name is empty, it searches the only series there."""
    rejected: list[LatestMember] = []
    position = 0
    while True:
        attribute = LATEST_XATTR % (wanted.value.encode(), position, name)
        found, result = LatestAnswer.decode(_read_attribute(os.fsencode(directory), attribute))
        # A member and its set may stand on both sides of the border.
        rejected += [one for one in result.rejected if one not in rejected[-1:]]
        if not (position := result.next_position):
            return LatestAnswer(found, SearchResult(result.newest, rejected))


def _read_attribute(path: bytes, name: bytes) -> bytes:
    """Return an attribute that may be long.

    `os.getxattr` asks with a small buffer first, so the daemon would find out the value twice.
    """
    call, buffer = ctypes.CDLL(None, use_errno=True).getxattr, ctypes.create_string_buffer(limits.XATTR_VALUE_BYTES_MAX)
    call.restype = ctypes.c_ssize_t
    length = call(path, name, buffer, ctypes.c_size_t(len(buffer)))
    if length < 0:
        failure = posix_error(ctypes.get_errno())
        raise build_path_error(os.fsdecode(path), failure) from failure
    return buffer.raw[:length]


def _install_rules(named: Path) -> None:
    """Ask the mount for the rules of its configuration. What is in no mount is refused later."""
    for directory in (named, named.parent):
        with contextlib.suppress(OSError):
            rules.install_rules(rules.decode_rules(os.getxattr(directory, RULES_XATTR)))
            return


# --- which series -----------------------------------------------------------------------------------------------------


def _find_series(named: Sequence[Path], wanted: Level) -> NamedSeries:
    """Return the series that a user names: by a pattern with `*`, by its directory, or by files of it."""
    where = named[0]
    if len(named) > 1:
        return _find_series_of_names(named)
    if "*" in str(where) and not where.is_dir():
        found = patterns.parse(os.fsencode(where.name))
        if found is None or ("*" in str(where.parent) and not where.parent.is_dir()):
            words = "one * is accepted, in the last part of the path, for each number in the name"
            raise UsageError(f"{where}: {words}", remedy="such as 'run1/step_*'")
        _require_directory(where.parent, where)
        return NamedSeries(where.parent, found)
    if not os.path.lexists(where) and (without_file := _find_series_without_file(where)) is not None:
        return without_file
    _require_directory(where.parent if where.exists() else where, where)
    if where.is_dir():
        return _find_series_inside(where, wanted)
    find_inode(where)
    own = patterns.find_series(os.fsencode(where.name), _list_names(where.parent))
    if own is not None:
        return NamedSeries(where.parent, own)
    if (committed := _find_committed(where, wanted)) is not None:
        return committed
    remedy = "name the directory, or a pattern: 'run1/step_*'"
    raise CommandFailed(f"{where}: there is no series: its name has no number", remedy=remedy)


def _find_series_without_file(where: Path) -> NamedSeries | None:
    """Return the series that has this name, or a member that has it, although no file does.

    Such as the prefix of TensorFlow, or the newer file of GROMACS if only the former one is left.
    """
    name, names = os.fsencode(where.name), _list_names(where.parent) if where.parent.is_dir() else []
    for one in patterns.list_series(names):
        if name in {one.name, *(member.name for member in patterns.list_members(one, names))}:
            return NamedSeries(where.parent, one)
    return None


def _require_directory(directory: Path, where: Path) -> None:
    """Raise CommandFailed if the directory of a series is gone. Its sets may be in the history."""
    if not directory.exists() and _find_in_history(directory) is not None:
        raise CommandFailed(f"{directory}: No such file or directory", remedy=f"the history has its sets: ckptfs list '{where}'")


def _find_series_of_names(named: Sequence[Path]) -> NamedSeries:
    """Return the series of names that a shell made of an unquoted `*`."""
    directory = named[0].parent
    names = {os.fsencode(one.name) for one in named}
    found = patterns.list_series(names)
    members = patterns.list_members(found[0], names) if len(found) == 1 else []
    others = {name for name in names if not patterns.is_temporary(name)} - {name for one in members for name in (one.entry, *one.files)}
    if len(found) != 1 or others or any(one.parent != directory for one in named):
        raise UsageError("these names are not members of one series", remedy="put it in quotes: 'run1/step_*'")
    return NamedSeries(directory, found[0])


def _find_series_inside(where: Path, wanted: Level) -> NamedSeries:
    """Return the only series in a directory. Never one beside it."""
    find_inode(os.path.realpath(where))
    meant, result = _ask(where, b"", wanted)
    if _find_own_series(where) is not None:
        meant = [one for one in meant if one.is_step_count]  # Other numbers are those of its ranks, layers or processes.
    found = [NamedSeries(where, one, result) for one in meant] or [NamedSeries(where, one) for one in _list_kept_series(where)]
    if not found and (committed := _find_committed(where, wanted)) is not None:
        return committed
    if not found:
        raise CommandFailed(
            f"{where}: there is no series in it: no name there has a number that counts checkpoints", remedy=_suggest(where)
        )
    if len(found) > 1:
        raise UsageError(f"{where} may mean several series", remedy=f"say which, in quotes: {_join_choices(found)}")
    if inside := _list_experiments(found[0]):
        raise CommandFailed(
            f"{where}: there is no series in it: members of {os.fsdecode(found[0].series.name)} hold series themselves",
            remedy=f"say which: {_join_choices(inside)}",
        )
    return found[0]


def _find_committed(where: Path, wanted: Level) -> NamedSeries | None:
    """Return the series of a name outside any series that a user has committed; it is a series of its own."""
    if _find_in_history(where) is None or os.path.ismount(where):
        return None
    meant, result = _ask(where.parent, os.fsencode(where.name), wanted)
    return NamedSeries(where.parent, meant[0], result) if meant else None


def _list_experiments(named: NamedSeries) -> list[NamedSeries]:
    """Return the series that members hold themselves.

    `llama-7b` and `llama-13b` are no checkpoints if each has its own steps. A checkpoint may repeat its number inside:
    `100/ckpt-100.index`.
    """
    if named.series.is_step_count:
        return []
    members = patterns.list_members(named.series, _list_names(named.directory))[:SEARCHED_MAX]
    return [
        one
        for member in members
        for one in _list_series_below(named.directory, member.files)
        if one.series.is_step_count
        and any(inner.numbers[0] != member.numbers[0] for inner in patterns.list_members(one.series, _list_names(one.directory)))
    ]


def _list_series_below(where: Path, names: Iterable[bytes]) -> list[NamedSeries]:
    """Return the series in these subdirectories of a directory, and in those below them.

    What cannot be read has none.
    """
    found, directories = [], [where / os.fsdecode(name) for name in names]
    for _ in range(SEARCHED_DEPTH):
        below: list[Path] = []
        for directory in directories[:SEARCHED_MAX]:
            with contextlib.suppress(OSError), os.scandir(directory) as entries:
                inside = sorted(entries, key=lambda entry: entry.name)
                found += [NamedSeries(directory, one) for one in patterns.list_series([os.fsencode(entry.name) for entry in inside])]
                below += [Path(entry.path) for entry in inside if entry.is_dir(follow_symlinks=False)]
        directories = below
    return found


def _list_kept_series(where: Path) -> list[Series]:
    """Return the series of a directory of which the history has sets."""
    place = _find_in_history(where)
    listed = [] if place is None else sorted(name for name in os.listdir(os.fsencode(place)) if b"*" in name)
    return [found for found in map(patterns.parse, listed) if found is not None]


def _find_in_history(where: Path) -> Path | None:
    """Return the place in the history of a directory of the application. Returns None if there is none."""
    path = Path(os.path.abspath(where))
    mount = find(path)
    place = mount.history / path.relative_to(mount.mountpoint) if path.is_relative_to(mount.mountpoint) else None
    return place if place is not None and place.is_dir() else None


def _suggest(where: Path) -> str:
    """Return a remedy for a directory without series: those below it, or the one it belongs to."""
    inside = _list_series_below(where, sorted(_list_names(where)))
    if (own := _find_own_series(where)) is not None:
        return f"for the series to which it belongs: ckptfs latest '{own.pattern}'"
    return f"say which: {_join_choices(inside)}" if inside else "name one with * for the number: 'run1/step_*'"


def _find_own_series(where: Path) -> NamedSeries | None:
    """Return the series of which a directory is a member itself, by a name that counts checkpoints.

    Returns None if there is none.
    """
    path = Path(os.path.realpath(where))
    own = patterns.find_series(os.fsencode(path.name), _list_names(path.parent))
    return NamedSeries(path.parent, own) if own is not None and own.is_step_count else None


def _join_choices(found: Sequence[NamedSeries]) -> str:
    return " or ".join(f"'{one.pattern}'" for one in found[:CHOICES_MAX])


@functools.lru_cache(maxsize=SEARCHED_MAX)
def _list_names(directory: Path) -> list[bytes]:
    """Return the names in a directory, which may have very many; one search lists it once."""
    try:
        return os.listdir(os.fsencode(directory))
    except OSError as failure:
        raise build_path_error(directory, failure) from failure
