"""What `ckptfs latest` finds: which series is meant, and its newest complete member.

All is read through the mount: names and times with readdir(3) and lstat(2), what the daemon knows with getxattr(2), and index files with
read(2). So the kernel checks the caller's permissions, and in a cluster lstat refreshes the name from the other nodes.

A directory that is given is searched inside, always. So the answer is never in another directory than the one that was named.

Listing a directory with thousands of names takes long. So the daemon tells the newest ones by an attribute of the directory, for which the
kernel wants the same permission. Only if the answer is not among them, all are listed (`SearchStart`).
"""

import contextlib
import ctypes
import errno
import functools
import os
import stat
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ckptfs import limits, series
from ckptfs.errors import posix_error
from ckptfs.model import Level
from ckptfs.series import MANIFESTS, KnownSet, KnownSets, LatestMember, Listing, MemberFile, SearchResult, SearchStart, Series
from ckptfs.series.file_formats import FileFormat
from ckptfs.series.pickle_scan import ReadRange
from ckptfs_client import render
from ckptfs_client.errors import CommandFailed, UsageError
from ckptfs_client.json_answers import LatestJson
from ckptfs_client.mounts import HISTORY, SET_XATTR, build_path_error, find, find_inode

FORMAT_XATTR = "user.ckptfs.format"
MEMBER_XATTR = "user.ckptfs.member"
NEWEST_XATTR_PREFIX = b"user.ckptfs.newest."
SETS_XATTR_PREFIX = b"user.ckptfs.sets."
RULES_XATTR = "user.ckptfs.rules"
COPIES_XATTR = "user.ckptfs.copies"
_INSIDE_HISTORY = os.fsencode(f"/{HISTORY}/")
CHOICES_MAX = 4
NOTES_MAX = 4
SEARCHED_MAX = 64
"""How many subdirectories a remedy looks into."""
SEAL_REMEDY = "wait until what was written is closed and sealed: ckptfs wait PATH --level local"
DESCRIPTORS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
T = TypeVar("T")


class NamedSeries(NamedTuple):
    """A series in a directory, and what a search in it begins with, if that is known already."""

    directory: Path
    series: Series
    start: SearchStart | None = None

    @property
    def pattern(self) -> str:
        return str(self.directory / os.fsdecode(self.series.name))


class Found(NamedTuple):
    """The answer of a search: what was searched, the outcome, and the path of the history."""

    searched: NamedSeries
    result: SearchResult
    history: bytes

    def build_path(self, found: LatestMember) -> Path:
        """Return the path of a member, or of a set in the history."""
        place = (self.history, found.path) if found.path else (os.fsencode(self.searched.directory), found.name)
        return Path(os.fsdecode(os.path.join(*place)))


def find_newest(named: Sequence[Path], wanted: Level) -> Found:
    """Return the newest complete member, at least as safe as `wanted`, of the series that `named` means.

    Raises CommandFailed or UsageError if no series is meant, or several.
    """
    _list_names.cache_clear()
    _install_rules(named[0])
    searched = _find_series(named)
    top, history = os.fsencode(searched.directory), _find_history(searched.directory)
    start = searched.start or _ask_start(top, searched.series.name, history)

    def search(names: list[bytes], known: KnownSets[bytes]) -> SearchResult:
        members = {name: os.path.join(top, name) for name in names}
        return run_reader(series.find_newest(searched.series, members, PathReader(), wanted, known))

    found = search(start.names, start.known)
    if start.series != [searched.series] or not start.is_enough(found):
        found = search(_list_names(searched.directory), _ask_known_sets(top, searched.series.name, history))
    return Found(searched, found, history)


def build_failure(found: Found, wanted: Level) -> CommandFailed:
    """Return the error for a search that found nothing."""
    what = f"{found.searched.pattern}: no complete checkpoint at the level {wanted.value}: "
    if not found.result.rejected:
        names = _list_names(found.searched.directory)
        meant = [NamedSeries(found.searched.directory, one) for one in series.suggest_series(found.searched.series.name, names)]
        return CommandFailed(what + "there is no member", remedy=f"did you mean {_join_choices(meant)}?" if meant else "")
    newest = found.result.rejected[0]
    more = f", nor is any of the {len(found.result.rejected) - 1} before it complete" if len(found.result.rejected) > 1 else ""
    why = f"of {os.fsdecode(newest.name)}, {newest.find_obstacle(wanted)}{more}"
    return CommandFailed(what + why, remedy=SEAL_REMEDY if "not sealed" in why or "holds no file" in why else "")


def print_newest(named: Sequence[Path], wanted: Level, *, is_json: bool) -> None:
    """Print the path of the newest complete member, and on stderr what was passed over.

    Raises as `find_newest`.
    """
    found = find_newest(named, wanted)
    member, rejected = found.result
    if is_json:
        answer: LatestJson = {}
        if rejected:
            answer["rejected"] = [{"path": str(found.build_path(one)), "reason": one.find_obstacle(wanted)} for one in rejected]
        if member is not None:
            verdict = member.verdict
            answer |= {
                "number": member.number, "path": str(found.build_path(member)), "level": verdict.level.value, "size": verdict.size,
                "files": verdict.files,
            }  # fmt: skip
        render.print_json(answer)
    if member is None:
        raise build_failure(found, wanted)
    if not is_json:
        for one in rejected[:NOTES_MAX]:
            print(f"ckptfs: {found.build_path(one)} was passed over: {one.find_obstacle(wanted)}", file=sys.stderr)
        if len(rejected) > NOTES_MAX:
            print(f"ckptfs: {len(rejected) - NOTES_MAX} more were passed over; --json lists them", file=sys.stderr)
        # A program reads this: the bytes of the name, unchanged.
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(found.build_path(member)) + b"\n")


def _find_history(directory: Path) -> bytes:
    """Return the path of the history of the mount in which a directory is. Raises NoMount, CommandFailed."""
    # Behind a symlink may be another filesystem, whose inode numbers say nothing here.
    mount, _ = find_inode(os.path.realpath(directory))
    return os.fsencode(mount.history)


def _ask_start(directory: bytes, name: bytes, history: bytes) -> SearchStart:
    """Return the start of a search for a series in a directory.

    If the name is empty, it is that for the only series.
    """
    return SearchStart.decode(_read_attribute(directory, NEWEST_XATTR_PREFIX + name), history)


def _ask_known_sets(top: bytes, name: bytes, history: bytes) -> KnownSets[bytes]:
    """Return all that the history has of a series, which may be more than fits into one attribute."""
    sets: list[KnownSet[bytes]] = []
    while True:
        told = KnownSets.decode(_read_attribute(top, b"%s%d.%s" % (SETS_XATTR_PREFIX, len(sets), name)), history)
        sets += told.sets
        if not told.sets:
            return told._replace(sets=sets)


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
            series.install_rules(series.decode_rules(os.getxattr(directory, RULES_XATTR)))
            return


# --- which series -----------------------------------------------------------------------------------------------------


def _find_series(named: Sequence[Path]) -> NamedSeries:
    """Return the series that a user names: by a pattern with `*`, by its directory, or by files of it."""
    where = named[0]
    if len(named) > 1:
        return _find_series_of_names(named)
    if "*" in str(where):
        found = series.parse(os.fsencode(where.name))
        if found is None or "*" in str(where.parent):
            words = "one * is accepted, in the last part of the path, for each number in the name"
            raise UsageError(f"{where}: {words}", remedy="such as 'run1/step_*'")
        _require_directory(where.parent, where)
        return NamedSeries(where.parent, found)
    _require_directory(where.parent if where.exists() else where, where)
    if where.is_dir():
        return _find_series_inside(where)
    find_inode(where)
    own = series.find_series(os.fsencode(where.name), _list_names(where.parent))
    if own is None:
        raise CommandFailed(
            f"{where}: there is no series: its name has no number", remedy="name the directory, or a pattern: 'run1/step_*'"
        )
    return NamedSeries(where.parent, own)


def _require_directory(directory: Path, where: Path) -> None:
    """Raise CommandFailed if the directory of a series is gone. Its sets may be in the history."""
    if not directory.exists() and _find_in_history(directory) is not None:
        raise CommandFailed(f"{directory}: No such file or directory", remedy=f"the history has its sets: ckptfs list '{where}'")


def _find_series_of_names(named: Sequence[Path]) -> NamedSeries:
    """Return the series of names that a shell made of an unquoted `*`."""
    directory = named[0].parent
    names = {os.fsencode(one.name) for one in named}
    found = series.list_series(names)
    members = series.list_members(found[0], names) if len(found) == 1 else []
    others = {name for name in names if not series.is_temporary(name)} - {name for one in members for name in (one.entry, *one.files)}
    if len(found) != 1 or others or any(one.parent != directory for one in named):
        raise UsageError("these names are not members of one series", remedy="put it in quotes: 'run1/step_*'")
    return NamedSeries(directory, found[0])


def _find_series_inside(where: Path) -> NamedSeries:
    """Return the only series in a directory. Never one beside it."""
    find_inode(where)
    start = _ask_start(os.fsencode(where), b"", _find_history(where))
    found = [NamedSeries(where, one, start) for one in start.series] or [NamedSeries(where, one) for one in _list_kept_series(where)]
    if not found:
        raise CommandFailed(
            f"{where}: there is no series in it: no name there has a number that counts checkpoints", remedy=_suggest(where)
        )
    if len(found) > 1:
        raise UsageError(f"{where} may mean several series", remedy=f"say which, in quotes: {_join_choices(found)}")
    return found[0]


def _list_kept_series(where: Path) -> list[Series]:
    """Return the series of a directory of which the history has sets."""
    place = _find_in_history(where)
    patterns = [] if place is None else sorted(name for name in os.listdir(os.fsencode(place)) if b"*" in name)
    return [found for found in map(series.parse, patterns) if found is not None]


def _find_in_history(where: Path) -> Path | None:
    """Return the place in the history of a directory of the application. Returns None if there is none."""
    path = Path(os.path.abspath(where))
    mount = find(path)
    place = mount.history / path.relative_to(mount.mountpoint) if path.is_relative_to(mount.mountpoint) else None
    return place if place is not None and place.is_dir() else None


def _suggest(where: Path) -> str:
    """Return a remedy for a directory without series: those below it, or the one it belongs to."""
    below = [where / os.fsdecode(name) for name in sorted(_list_names(where))]
    inside = [NamedSeries(one, found) for one in below[:SEARCHED_MAX] if one.is_dir() for found in series.list_series(_list_names(one))]
    own = series.find_series(os.fsencode(where.name), _list_names(where.parent)) if where.name else None
    if own is not None and own.is_step_count:
        return f"for the series to which it belongs: ckptfs latest '{NamedSeries(where.parent, own).pattern}'"
    return f"say which: {_join_choices(inside)}" if inside else "name one with * for the number: 'run1/step_*'"


def _join_choices(found: Sequence[NamedSeries]) -> str:
    return " or ".join(f"'{one.pattern}'" for one in found[:CHOICES_MAX])


# --- reading ----------------------------------------------------------------------------------------------------------


class PathReader:
    """`series.MemberReader` over paths. Its coroutines never wait for one another."""

    async def list_files(self, entry: bytes) -> Listing[bytes]:
        """List a file or directory through the mount."""
        files: dict[bytes, tuple[MemberFile, bytes]] = {}
        directories: dict[bytes, bytes] = {}
        try:
            names = os.listdir(entry) if stat.S_ISDIR(os.lstat(entry).st_mode) else [b""]
            for name in names:
                below = entry + b"/" + name if name else entry
                status = os.lstat(below)
                if stat.S_ISREG(status.st_mode):
                    files[name] = _load_file(below, status), below
                elif stat.S_ISDIR(status.st_mode):
                    directories[name] = below
        except FileNotFoundError:
            raise
        except OSError as failure:
            raise build_path_error(os.fsdecode(failure.filename or entry), failure) from failure
        return Listing(files, directories)

    async def inspect(self, entry: bytes, name: bytes, file: MemberFile) -> FileFormat:
        """Ask the daemon what a file shows of itself: it reads both ends, wherever the bytes are."""
        return FileFormat.decode(os.getxattr(entry, FORMAT_XATTR, follow_symlinks=False))

    async def examine(self, entry: bytes, file: MemberFile, act: Callable[[int, ReadRange], T]) -> T:
        """Run `act` on an index file.

        Raises OSError if it is large and this node has no copy: opening it would fetch all of it.
        """
        if file.size > limits.FETCH_WHOLE_BYTES and not {b"ram:good", b"nvme:good"} & set(os.getxattr(entry, COPIES_XATTR).split()):
            raise posix_error(errno.ENODATA)
        fd = os.open(entry, DESCRIPTORS)
        try:
            return act(os.fstat(fd).st_size, lambda offset, length: os.pread(fd, length, offset))
        finally:
            os.close(fd)

    async def find_missing(self, files: Mapping[bytes, bytes], known: KnownSet[bytes]) -> set[bytes] | None:
        """Ask the daemon to which set each file belongs."""
        in_set = {os.path.relpath(os.path.join(top, name), known.entry) for top, _, names in os.walk(known.entry) for name in names}
        own = known.entry.partition(_INSIDE_HISTORY)[2]
        is_part = files.keys() <= in_set and all(_get_attribute(path, SET_XATTR) == own for path in files.values())
        return in_set - {*MANIFESTS} - files.keys() if is_part else None

    async def compute(self, act: Callable[[], T]) -> T:
        """Return `act()`."""
        return act()

    async def wait(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def get_now_ns(self) -> int:
        """Return the time by the clock of this node."""
        return time.time_ns()


def _load_file(path: bytes, status: os.stat_result) -> MemberFile:
    """Ask the daemon what it knows of a file. Raises FileNotFoundError."""
    try:
        return MemberFile.decode(os.getxattr(path, MEMBER_XATTR, follow_symlinks=False), status.st_mtime_ns, status.st_ctime_ns)
    except OSError as failure:
        if failure.errno in (errno.ENOENT, errno.ESTALE):
            raise FileNotFoundError(path) from failure
        return MemberFile(status.st_size, Level.NONE, f"cannot be read: {os.strerror(failure.errno or 0)}")


def _get_attribute(path: bytes, name: str) -> bytes:
    """Return an extended attribute; empty if there is none."""
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError as failure:
        if failure.errno != errno.ENODATA:
            raise
        return b""


def run_reader(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits for another one."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("the coroutine waits")


@functools.lru_cache(maxsize=SEARCHED_MAX)
def _list_names(directory: Path) -> list[bytes]:
    """Return the names in a directory, which may have very many; one search lists it once."""
    try:
        return os.listdir(os.fsencode(directory))
    except OSError as failure:
        raise build_path_error(directory, failure) from failure
