"""The checkpoint sets of a mount as the caller may see them, and what words for a set mean (D1, D12).

Figures come from the daemon. Names and notes come from it, too, where every user may list the directories. Of all others the daemon tells
figures only, and this module reads the names through the mount, where the kernel checks the caller's permissions.

A set is named by its path in the mount (`/ckpt/run1/step_100`), by a path with its number (`/ckpt/run1/step_100@17`,
`/ckpt/run1/step_*@17`), or by its path in the history (`/ckpt/.ckptfs/history/run1/step_*/step_100@17`).
"""

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ckptfs.model import Level
from ckptfs.protocol import control_pb2 as pb
from ckptfs_client.client import Client
from ckptfs_client.errors import ClientError, CommandFailed, UsageError
from ckptfs_client.mounts import HISTORY, SET_XATTR, Mount, find

LATEST = ".ckptfs/latest"
NOTE_XATTR = "user.ckptfs.note"
CHOICES_MAX = 4
REFRESHED_MAX = 256
"""Of how many sets of a series a command in a cluster asks what other nodes say: each takes a question to etcd."""
FORMS = "a path such as RUN/step_100, RUN/step_100@NUMBER, 'RUN/step_*@NUMBER', or a path in .ckptfs/history"


@dataclass(frozen=True, slots=True)
class ListedSeries:
    """A series that has complete sets. `path` is below the history."""

    mount: Mount
    directory: int
    origin: int
    path: str
    pattern: str
    rollback: int
    sets: int
    size: int
    newest: pb.SetInfo | None

    @property
    def history(self) -> Path:
        """Its directory in the history."""
        return self.mount.history / self.path

    @property
    def place(self) -> Path:
        """The directory in which the application writes."""
        return self.mount.mountpoint / os.path.dirname(self.path)

    @property
    def own_path(self) -> str:
        """Its pattern in the directory of the application, below the mount."""
        return os.path.join(os.path.dirname(self.path), self.pattern)

    @property
    def shown(self) -> str:
        """Its name for people: `/ckpt/run1/step_*`."""
        return str(self.place / self.pattern)

    def has_member(self, name: str) -> bool:
        """Return True if a name in the directory of the application belongs to the series."""
        from ckptfs.series import patterns

        one = patterns.parse(os.fsencode(self.pattern))
        if one is not None:
            return one.parse_numbers(os.fsencode(name)) is not None
        stem, extension = os.path.splitext(self.pattern)
        return name in (self.pattern, f"{stem}_prev{extension}")


@dataclass(frozen=True, slots=True)
class FoundSet:
    series: ListedSeries
    set: pb.SetInfo

    @property
    def name(self) -> str:
        """The name of the member."""
        return os.fsdecode(self.set.name)

    @property
    def place(self) -> Path:
        """The directory of the application in which its files are, or were."""
        return self.series.place if self.set.group else self.series.place / self.name

    @property
    def history(self) -> Path:
        """Its directory in the history."""
        return self.series.history / f"{self.name}@{self.set.number}"

    @property
    def shown(self) -> str:
        """Its name for people: `/ckpt/run1/step_100@17`."""
        return str(self.series.place / self.history.name)


def split_number(name: str) -> tuple[str, int | None]:
    """Split `NAME@NUMBER`. The number is None if there is none."""
    found = re.fullmatch(r"(.+)@([0-9]{1,18})", name, re.DOTALL)
    return (name, None) if found is None else (found[1], int(found[2]))


def get_pattern(history: str) -> str:
    """Return the pattern of a series from the path of its directory in the history."""
    return re.sub(r"~[0-9]+$", "", os.path.basename(history))


def find_named(sets: Iterable[pb.SetInfo], name: str, number: int | None) -> pb.SetInfo | None:
    """Return the first set of that name (empty: any) and of that number (None: any)."""
    return next((one for one in sets if number in (None, one.number) and name in ("", os.fsdecode(one.name))), None)


class SetHistory:
    """The series and sets of one mount. Use it as a context manager."""

    def __init__(self, mount: Mount, client: Client | None = None, *, figures: bool = False) -> None:
        """`figures`: ask for those of series, too."""
        self.mount = mount
        self.client = client or Client(mount)
        self._figures = figures
        self._is_shared = False

    def __enter__(self) -> "SetHistory":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    @classmethod
    def of(cls, path: Path) -> "SetHistory":
        """Return the history of the mount in which a path lies. Raises NoMount."""
        return cls(find(path))

    @cached_property
    def series(self) -> list[ListedSeries]:
        """All series whose directory the caller may list, by path."""
        reply = self.client.list_series(figures=self._figures)
        self._is_shared = reply.shared
        paths: dict[int, str] = {}
        if reply.shared or not all(one.path for one in reply.series):
            paths = self._list_paths()
            reply = self.client.list_series(figures=self._figures)
        found = []
        for one in reply.series:
            path = os.fsdecode(one.path) or paths.get(one.directory, "")
            pattern = os.fsdecode(one.pattern) or get_pattern(path)
            newest = one.newest if one.HasField("newest") else None
            listed = ListedSeries(self.mount, one.directory, one.origin, path, pattern, one.rollback, one.sets, one.size, newest)
            if newest is not None and not newest.name:
                named = self._add_names(listed, [newest])
                listed = replace(listed, newest=named[0] if named else None)
            found += [listed] if path else []
        return sorted(found, key=lambda one: one.path)

    def _list_paths(self) -> dict[int, str]:
        """Return the paths of all directories of the history that the caller may list, but for those of sets.

        In a cluster, listing a directory also tells this node what the others made there.
        """
        root = self.mount.history
        found: dict[str, int] = {}
        for directory, names, _ in os.walk(root):
            names[:] = [name for name in names if split_number(name)[1] is None]
            for name in names:
                path = os.path.join(directory, name)
                with contextlib.suppress(OSError):
                    if os.access(path, os.R_OK | os.X_OK):
                        found[os.path.relpath(path, root)] = os.lstat(path).st_ino
        records = self.client.list_records(found.values())
        return {record.inode: path for path, record in zip(found, records, strict=True)}

    def list_sets(self, one: ListedSeries, at_least: int | None = None) -> list[pb.SetInfo]:
        """Return the sets of a series, the newest first: all, or `at_least` so many."""
        names = self._refresh_sets(one) if self._is_shared else []
        listed = self.client.list_sets(one.directory, at_least)
        if self._look_at_files(one, names, {each.number for each in listed if each.level == Level.NONE.value}):
            listed = self.client.list_sets(one.directory, at_least)
        return listed if all(each.name for each in listed) else self._add_names(one, listed)

    def _refresh_sets(self, one: ListedSeries) -> list[str]:
        """Look through the mount at the last sets, and at the target of a rollback. Return their names.

        So this node learns what other nodes say of them.
        """
        names: list[str] = []
        with contextlib.suppress(OSError):
            numbers = {name: split_number(name)[1] or 0 for name in os.listdir(one.history)}
            names = sorted(numbers, key=lambda name: (numbers[name] == one.rollback, numbers[name]), reverse=True)[:REFRESHED_MAX]
            for name in names:
                os.lstat(one.history / name)
        return names

    def _look_at_files(self, one: ListedSeries, names: list[str], numbers: set[int]) -> bool:
        """Look at the files of sets, by which this node learns of them. Return True if there are such sets."""
        unknown = [name for name in names if split_number(name)[1] in numbers]
        for name in unknown:
            for _ in os.walk(one.history / name):
                pass
        return bool(unknown)

    def _add_names(self, one: ListedSeries, listed: list[pb.SetInfo]) -> list[pb.SetInfo]:
        """Add names and notes that the caller may read through the mount. Sets without names are left out."""
        names: dict[int | None, str] = {}
        with contextlib.suppress(OSError):
            names = {number: name for name, number in map(split_number, os.listdir(one.history))}
        named = [each for each in listed if each.number in names]
        for each in named:
            each.name = os.fsencode(names[each.number])
            if each.noted:
                with contextlib.suppress(OSError):
                    note = os.getxattr(FoundSet(one, each).history, NOTE_XATTR, follow_symlinks=False)
                    each.note = note.decode(errors="backslashreplace")
        return named

    # --- what words mean ----------------------------------------------------------------------------------------------

    def find_series(self, path: Path) -> list[ListedSeries]:
        """Return the series that a path means: itself, those below it, or those of a member."""
        path = Path(os.path.abspath(path))
        where, is_history = self._locate(path)
        exact = [one for one in self.series if where == one.path or (where == one.own_path and not is_history)]
        if exact:
            return exact
        below = [one for one in self.series if where in ("", ".") or one.path.startswith(where + "/")]
        if is_history:
            return below or [one for one in self.series if where.startswith(one.path + "/")]
        return below or self._list_of_origin(path) or self._list_of_member(path, where)

    def _list_of_origin(self, path: Path) -> list[ListedSeries]:
        """Return the series of a directory that was renamed since."""
        with contextlib.suppress(OSError):
            inode = os.stat(path).st_ino
            return [one for one in self.series if one.origin == inode]
        return []

    def _list_of_member(self, path: Path, where: str) -> list[ListedSeries]:
        directory, name = os.path.split(where)
        beside = [one for one in self.series if os.path.dirname(one.path) == directory] or self._list_of_origin(path.parent)
        return [one for one in beside if one.has_member(name)]

    def find_one_series(self, path: Path) -> ListedSeries:
        """Return the only series that a path means. Raises CommandFailed, UsageError."""
        found = self.find_series(path)
        if not found:
            known = _join(one.shown for one in self.series)
            raise CommandFailed(f"{path}: no set of it is complete", remedy=f"series with sets: {known}" if known else "")
        if len(found) > 1:
            raise UsageError(f"{path} may mean several series", remedy=f"say which: {_join(one.shown for one in found)}")
        return found[0]

    def find_set(self, path: Path) -> FoundSet:
        """Return the set that a path means. Raises CommandFailed, UsageError."""
        path = Path(os.path.abspath(path))
        where, is_history = self._locate(path)
        exists = os.path.lexists(path)
        if is_history:
            return self._find_in_history(path, where)
        if exists and path.is_file() and not path.is_symlink():
            try:
                found_where = os.fsdecode(os.getxattr(path, SET_XATTR))
            except OSError:
                raise self._build_unknown(path, exists=True) from None
            return self._find_in_history(path, found_where)
        name, number = (path.name, None) if exists else split_number(path.name)
        named = path.with_name(name)
        series_named = self.find_series(named)
        is_pattern = number is not None and any(one.pattern == name for one in series_named)
        found = series_named if is_pattern else self._list_of_member(named, self._locate(named)[0])
        if found:
            return self._choose(path, found, "" if is_pattern else name, number)
        if series_named and number is None:
            raise UsageError(f"{path} is a series or holds series, and is not a set", remedy=f"accepted: {FORMS}")
        raise self._build_unknown(path, exists=exists)

    def _find_in_history(self, path: Path, where: str) -> FoundSet:
        """Return the set at or above a path in the history."""
        for one in self.series:
            if where.startswith(one.path + "/"):
                name, number = split_number(where.removeprefix(one.path + "/").split("/")[0])
                return self._choose(path, [one], name, number)
        for one in self.series:
            name, number = split_number(where)
            if number is not None and one.path == name:
                return self._choose(path, [one], "", number)
        raise self._build_unknown(path, exists=os.path.lexists(path))

    def _choose(self, path: Path, found: list[ListedSeries], name: str, number: int | None) -> FoundSet:
        """Return the newest set of that name, or the one of that number."""
        for one in found:
            sets = self.list_sets(one)
            if (chosen := find_named(sets, name, number)) is not None:
                return FoundSet(one, chosen)
            if number is not None:
                newest = f"the newest is {FoundSet(one, sets[0]).shown}" if sets else "the series has none now"
                raise CommandFailed(f"{path}: there is no such set; {newest}", remedy=f"ckptfs list '{one.shown}' shows all")
        raise self._build_unknown(path, exists=os.path.lexists(path))

    def _build_unknown(self, path: Path, *, exists: bool) -> ClientError:
        if exists:
            return CommandFailed(f"{path} belongs to no complete set", remedy=f"ckptfs latest {path.parent} says what is missing")
        known = _join(one.shown for one in self.series)
        return CommandFailed(
            f"{path}: there is no such set; accepted: {FORMS}", remedy=f"series with sets: {known}" if known else "no set is complete yet"
        )

    def _locate(self, path: Path) -> tuple[str, bool]:
        """Return (path below the mount or below the history, whether it is in the history)."""
        top = str(self.mount.mountpoint)
        absolute = os.path.abspath(path)
        if os.path.relpath(absolute, top).startswith(LATEST):
            absolute = os.path.realpath(path)
        if not Path(absolute).is_relative_to(top):
            absolute = os.path.join(os.path.realpath(path.parent), path.name)
        where = os.path.relpath(absolute, top)
        if where == HISTORY or where.startswith(HISTORY + "/"):
            return os.path.relpath(where, HISTORY), True
        return where, False


def _join(names: Iterable[str]) -> str:
    return " or ".join(f"'{one}'" for one in list(names)[:CHOICES_MAX])
