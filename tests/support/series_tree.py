"""A tree of files in memory that a search for the newest checkpoint reads: made by hand, or taken from a real directory."""

import os
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ckptfs.model import Level
from ckptfs.series import file_formats
from ckptfs.series.file_formats import FileFormat
from ckptfs.series.patterns import Series, choose_part, parse
from ckptfs.series.pickle_scan import ReadRange
from ckptfs.series.search import MANIFESTS, KnownSet, KnownSets, Listing, SearchResult, find_newest, judge_kept
from ckptfs.series.set_kinds import MemberFile

Result = TypeVar("Result")
HISTORY = b"@history/"
"""Where sets are: no member has such a name."""
OLD_NS = 1_000_000_000_000_000_000
"""When files were written, unless a test says otherwise."""


@dataclass(frozen=True)
class TreeFile:
    """A file. `reason`: what the catalog has against it; `error`: the errno of reading it."""

    data: bytes
    mtime_ns: int = OLD_NS
    level: Level = Level.LOCAL
    reason: str = ""
    error: int = 0


@dataclass
class SeriesTree:
    """`search.MemberReader` over a dictionary from paths to files."""

    files: dict[bytes, TreeFile] = field(default_factory=dict)
    age_s: float = 3600.0
    """How long ago OLD_NS is."""
    known: KnownSets[bytes] = field(default_factory=KnownSets)
    private: frozenset[bytes] = frozenset()
    """Paths that the caller may not read."""
    read_bytes: int = 0
    waited_s: float = 0.0
    while_waiting: Callable[["SeriesTree"], None] = lambda tree: None

    @classmethod
    def of(cls, files: Mapping[str, bytes | TreeFile], **more: object) -> "SeriesTree":
        """Build a tree from paths and bytes."""
        found = {os.fsencode(path): one if isinstance(one, TreeFile) else TreeFile(one) for path, one in files.items()}
        return cls(found, **more)  # type: ignore[arg-type]

    @classmethod
    def of_directory(cls, directory: Path) -> "SeriesTree":
        """Take a real directory, with the times of its files. They count as an hour old."""
        paths = [path for path in directory.rglob("*") if path.is_file()]
        found = {os.fsencode(path.relative_to(directory)): TreeFile(path.read_bytes(), path.stat().st_mtime_ns) for path in paths}
        return cls(found, age_s=(max(one.mtime_ns for one in found.values()) - OLD_NS) / 1e9 + 3600)

    def without(self, *paths: str) -> "SeriesTree":
        return replace(self, files={path: one for path, one in self.files.items() if path not in map(os.fsencode, paths)})

    def with_files(self, files: Mapping[str, bytes | TreeFile]) -> "SeriesTree":
        return replace(self, files=self.files | SeriesTree.of(files).files)

    @property
    def siblings(self) -> dict[bytes, bytes]:
        return {path.partition(b"/")[0]: path.partition(b"/")[0] for path in self.files if not path.startswith(HISTORY)}

    def with_set(self, name: str, number: int = 1, *, is_group: bool = False) -> "SeriesTree":
        """Keep a member in the history, as it is now: its files get a second name there."""
        member = os.fsencode(name)
        one = KnownSet(tuple(map(int, re.findall(r"[0-9]+", name))), member, number, is_group, HISTORY + b"%s@%d" % (member, number))
        own = {path: file for path, file in self.files.items() if path == member or path.startswith(member + (b"." if is_group else b"/"))}
        linked = {one.entry + b"/" + (path if is_group else path.removeprefix(member + b"/")): file for path, file in own.items()}
        manifest = {one.entry + b"/MANIFEST.json": TreeFile(b"{}", level=Level.NONE)}
        return replace(self, files=self.files | linked | manifest, known=KnownSets([*self.known.sets, one], None, b"run/step_*"))

    def rolled_back_to(self, number: int) -> "SeriesTree":
        """Make a set the newest, before any other set is made."""
        target = next(one for one in self.known.sets if one.number == number)
        return replace(self, known=KnownSets([], target, self.known.path))

    def search(
        self, pattern: "str | Series", wanted: Level = Level.LOCAL, *, first: int = 0, at_most: int | None = None, last_names: bool = False
    ) -> SearchResult:
        """Search as the mount does; with `last_names` as in a directory."""
        one = pattern if isinstance(pattern, Series) else parse(os.fsencode(pattern))
        assert one is not None
        one = choose_part(one, self.siblings.keys())
        found = find_newest(
            one, self.siblings, self, wanted, self.known, may_read=lambda entry: entry not in self.private, first=first, at_most=at_most,
            last_names=last_names,
        )  # fmt: skip
        return run(found)

    def find_flaw(self, pattern: str) -> str:
        """What the rules have against the first set of the history."""
        one, known = parse(os.fsencode(pattern)), next(one for one in self.known.sets if one.number == 1)
        assert one is not None
        return run(judge_kept(one, known, self, lambda entry: entry not in self.private)).incomplete_reason

    def find(self, pattern: "str | Series") -> str:
        """The name that is found, or the path below the history; empty if there is none."""
        newest = self.search(pattern).newest
        return "" if newest is None else os.fsdecode(newest.path or newest.name)

    def find_reasons(self, pattern: "str | Series") -> dict[str, str]:
        """Why members were rejected."""
        return {os.fsdecode(one.name): one.verdict.incomplete_reason for one in self.search(pattern).rejected}

    # --- MemberReader ---------------------------------------------------------------------------------------------------

    async def find_unreadable(self, files: Mapping[bytes, bytes]) -> None:
        return None

    async def list_files(self, entry: bytes) -> Listing[bytes]:
        if entry in self.files:
            return Listing({b"": (self._build(self.files[entry]), entry)}, {})
        below = {path.removeprefix(entry + b"/"): path for path in self.files if path.startswith(entry + b"/")}
        if not below:
            raise FileNotFoundError(entry)
        files = {name: (self._build(self.files[path]), path) for name, path in below.items() if b"/" not in name}
        return Listing(files, {name.partition(b"/")[0]: entry + b"/" + name.partition(b"/")[0] for name in below if b"/" in name})

    def _build(self, file: TreeFile) -> MemberFile:
        return MemberFile(len(file.data), file.level, file.reason, file.mtime_ns, file.mtime_ns)

    async def inspect(self, entry: bytes, name: bytes, file: MemberFile) -> FileFormat:
        assert name == entry.rpartition(b"/")[2]
        return await self.examine(entry, file, lambda size, read: file_formats.inspect(name, size, read))

    async def examine(self, entry: bytes, file: MemberFile, act: Callable[[int, ReadRange], Result]) -> Result:
        one = self.files[entry]
        if one.error:
            raise OSError(one.error, os.strerror(one.error))

        def read(offset: int, length: int) -> bytes:
            found = one.data[offset : offset + length]
            self.read_bytes += len(found)
            return found

        return act(len(one.data), read)

    async def find_missing(self, files: Mapping[bytes, bytes], known: KnownSet[bytes]) -> set[bytes] | None:
        top = known.entry + b"/"
        in_set = {path.removeprefix(top): id(file) for path, file in self.files.items() if path.startswith(top)}
        in_place = {path: id(self.files[entry]) for path, entry in files.items()}
        return in_set.keys() - in_place.keys() - {*MANIFESTS} if in_place.items() <= in_set.items() else None

    async def compute(self, act: Callable[[], Result]) -> Result:
        return act()

    async def wait(self, seconds: float) -> None:
        self.waited_s += seconds
        self.while_waiting(self)

    def get_now_ns(self) -> int:
        return OLD_NS + int((self.age_s + self.waited_s) * 1e9)


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that never waits for another one."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: Result = end.value
        return result
    raise AssertionError("it waits")


def prefixes(data: bytes, count: int) -> Iterable[int]:
    """Lengths at which a killed writer may have stopped: all near both ends, and evenly spread ones between."""
    ends = {*range(min(64, len(data))), *range(max(0, len(data) - 64), len(data))}
    return sorted(ends | {number * len(data) // count for number in range(count)})
