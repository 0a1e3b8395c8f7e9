"""Which files are brought to safety first if there is no time for all of them (G1). Pure.

Files that have not reached the level are put together as members of series; a member is safe only as a whole. The order:

1. Of each series the newest member that is whole, i.e. no process writes it any more and it has as many files as the one before it. The
   member with the fewest bytes missing comes first, so that most are safe soonest.
2. Of each series the newest member, if it is not whole: what is closed of it.
3. All other members, newer ones first, and then all other files as they were closed.

A file belongs to the member of the innermost series that counts steps, by its own name or that of a directory above it; without one, to
that of the outermost series. Members and their order are those of `patterns`, which `latest` uses too. After a rollback, what was written
since is newest, then comes its target.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from ckptfs.quantities import format_count, format_size
from ckptfs.series import patterns
from ckptfs.series.patterns import Member, Series

if TYPE_CHECKING:
    from ckptfs.protocol import control_pb2 as pb

Path = tuple[tuple[int, bytes], ...]
"""(directory, name in it) of each step from the root to a file."""


File = TypeVar("File", bound="UnsafeFile")


class Place(NamedTuple):
    """A member of a series in a directory. `rank`: 0 is the newest of its series."""

    directory: int
    series: Series
    member: Member
    rank: int

    @property
    def key(self) -> tuple[int, bytes, bytes]:
        """What the member is known by: the directory, the name of its series, its own name."""
        return self.directory, self.series.name, self.member.name


class UnsafeFile(Protocol):
    """A file that has not reached the level."""

    @property
    def inode(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def path(self) -> Path: ...


@dataclass(slots=True)
class UnsafeMember:
    """What a member lacks: closed files in their order, their bytes, and the number of open files."""

    place: Place
    inodes: list[int] = field(default_factory=list)
    size: int = 0
    open_files: int = 0


Sort = Callable[[int, Series, list[Member]], list[Member]]


class SeriesIndex:
    """The series of each directory and the members in them."""

    def __init__(self, list_names: Callable[[int], Collection[bytes]], sort: Sort = lambda directory, series, members: members) -> None:
        """`list_names` returns the names in a directory; `sort` gets members, the newest names first."""
        self._list_names = list_names
        self._sort = sort
        self._places: dict[int, dict[bytes, Place]] = {}
        self._members: dict[int, dict[Series, list[Member]]] = {}

    def find_place(self, path: Path) -> Place | None:
        """Return the member to which a file belongs. Returns None if it belongs to none."""
        outermost: Place | None = None
        for directory, name in reversed(path):
            place = self._load(directory).get(name)
            if place is not None and place.series.is_step_count:
                return place
            outermost = place or outermost
        return outermost

    def list_members(self, directory: int, series: Series) -> list[Member]:
        """Return the members of a series, newest first."""
        self._load(directory)
        return self._members[directory].get(series, [])

    def _load(self, directory: int) -> dict[bytes, Place]:
        if directory not in self._places:
            names = self._list_names(directory)
            found = {series: self._sort(directory, series, patterns.list_members(series, names)) for series in patterns.list_series(names)}
            self._members[directory] = found
            places = self._places[directory] = {}
            for series, members in found.items():
                for rank, member in enumerate(members):
                    for name in member.files:  # Files of ranks form a series for each rank, of the same members.
                        places.setdefault(name, Place(directory, series, member, rank))
        return self._places[directory]


def list_unsafe_members(files: Iterable[File], index: SeriesIndex) -> tuple[list[UnsafeMember], list[File]]:
    """Return what each member of a series lacks, and the files that belong to none."""
    found: dict[tuple[int, bytes, bytes], UnsafeMember] = {}
    loose = []
    for file in files:
        place = index.find_place(file.path)
        if place is None:
            loose.append(file)
            continue
        member = found.setdefault(place.key, UnsafeMember(place))
        if file.is_open:
            member.open_files += 1
        else:
            member.inodes.append(file.inode)
            member.size += file.size
    return list(found.values()), loose


def is_whole(member: UnsafeMember, index: SeriesIndex, count_files: Callable[[int, Member], int]) -> bool:
    """Return whether no process writes a member any more and it has as many files as the one before it.

    `count_files` returns how many files a member in a directory has.
    """
    place = member.place
    before = index.list_members(place.directory, place.series)[place.rank + 1 : place.rank + 2]
    return not member.open_files and all(count_files(place.directory, place.member) >= count_files(place.directory, one) for one in before)


def choose_order(
    members: Sequence[UnsafeMember], loose: Iterable[UnsafeFile], is_whole: Callable[[UnsafeMember], bool]
) -> tuple[list[UnsafeMember], list[tuple[int, ...]]]:
    """Return (the members that come first, all groups of inodes in the order of their urgency)."""
    by_series: dict[tuple[int, bytes], list[UnsafeMember]] = defaultdict(list)
    for member in members:
        by_series[member.place.directory, member.place.series.name].append(member)
    whole, newest = [], []
    for found in by_series.values():
        found.sort(key=lambda one: one.place.rank)
        nearest = next(filter(is_whole, found), None)
        whole += [nearest] if nearest is not None else []
        newest += [found[0]] if nearest is not found[0] else []
    whole.sort(key=lambda one: one.size)
    newest.sort(key=lambda one: one.size)
    first = whole + newest
    taken = {id(one) for one in first}
    rest = sorted((one for one in members if id(one) not in taken), key=lambda one: (one.place.rank, one.size))
    groups = [tuple(one.inodes) for one in [*first, *rest] if one.inodes]
    others = tuple(file.inode for file in loose if not file.is_open)
    return first, [*groups, *([others] if others else [])]


# --- the report at the end --------------------------------------------------------------------------------------------


def list_safety_lines(safety: "pb.Safety") -> list[str]:
    """Return the report as sentences."""
    lines = [_describe_series(one) for one in safety.series]
    if safety.other_files:
        size = format_size(safety.other_bytes)
        lines.append(f"{format_count(safety.other_files, 'other file')} ({size}) not at the level {safety.level}")
    if safety.open_files:
        lines.append(f"{format_count(safety.open_files, 'open file')}: {safety.secured_files} secured on other nodes")
    return lines


def _describe_series(one: "pb.SeriesSafety") -> str:
    if one.safe:
        return f"{one.series}: {one.name} is safe ({one.level}): {format_count(one.files, 'file')}, {format_size(one.bytes)}"
    sizes = f"{format_size(one.missing_bytes)} of {format_size(one.bytes)}"
    missing = [f"{one.missing_files} of {format_count(one.files, 'file')} missing ({sizes})"] if one.missing_files else []
    missing += [f"{format_count(one.open_files, 'file')} still open"] if one.open_files else []
    missing += ["not all under their names on the PFS yet"] if one.names_pending and not missing else []
    missing += ["a rule holds it back from the PFS"] if one.held and not missing else []
    older = f"the newest safe one is {one.safe_name} ({one.safe_level})" if one.safe_name else "no older one is safe"
    return f"{one.series}: {one.name} is NOT safe ({one.level}): {', '.join(missing)}; {older}"
