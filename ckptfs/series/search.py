"""The search for the newest complete member of a series (N2, D4).

The mount searches, for `.ckptfs/latest` and for `ckptfs latest`. It reads through `MemberReader`. Members are judged newest first, and
only as many as it takes.

A set in the history is complete; only its files may have become unreadable. A member whose files are those of a set needs no other verdict,
and a set whose files are not all in their place any more is named by its path in the history. So while a member is overwritten, the set
with the bytes before is the answer. After a rollback, only sets count that were made later, and then its target.
"""

import contextlib
import errno
import functools
import heapq
import itertools
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ckptfs.model import Level
from ckptfs.series import completeness, patterns, rules, set_kinds
from ckptfs.series.completeness import Completeness, MemberFacts, OlderMember
from ckptfs.series.file_formats import FileFormat
from ckptfs.series.patterns import Member, Series
from ckptfs.series.pickle_scan import ReadRange
from ckptfs.series.set_kinds import MemberFile, SetIndex, text

TAG_BYTES_MAX = 4096
TAGS = (b"latest_checkpointed_iteration.txt", b"checkpoint")
"""Files beside the members that name the newest one when it is complete: of Megatron and TensorFlow.

Not `latest` of DeepSpeed: rank 0 writes it while other ranks still write their files.
"""

Entry = TypeVar("Entry")
"""How a caller identifies a file or directory: by path, or by inode number."""
Result = TypeVar("Result")
MANIFESTS = (b"MANIFEST.json", b"MANIFEST.xxh128")
"""What ckptfs itself writes into a set of the history."""
REJECTED_MAX = 64
"""How many members one answer of the mount rejects at most; the command asks for the rest."""
_SERIES_NAMED_MAX = 5
UNNUMBERED = -1
"""The number of `last.ckpt`, which has none."""
NODES_MAX = 1000
"""How many nodes of a tree a search follows."""


class Listing(NamedTuple, Generic[Entry]):
    """The regular files and the subdirectories of a directory by name.

    Of a file, it has only the file itself under the name b"".
    """

    files: dict[bytes, tuple[MemberFile, Entry]]
    directories: dict[bytes, Entry]


class KnownSet(NamedTuple, Generic[Entry]):
    """A set in the history."""

    numbers: tuple[int, ...]  # Those of the member that it was, as `name`.
    name: bytes
    number: int  # Its number in the series.
    is_group: bool  # Its directory holds a file, or several, under their own names.
    entry: Entry  # Its directory.


class KnownSets(NamedTuple, Generic[Entry]):
    """What the history has of a series: the sets that count, and the path of the series below the history.

    After a rollback, `sets` are those made since, and `target` is what counts without them. `replaced`: sets that were deleted before one
    of an earlier step was saved.
    """

    sets: Sequence[KnownSet[Entry]] = ()
    target: KnownSet[Entry] | None = None
    path: bytes = b""
    replaced: Sequence[KnownSet[Entry]] = ()

    def build_path(self, one: KnownSet[Entry]) -> bytes:
        """Return the path below the history that a program is given for a set."""
        return b"%s/%s@%d" % (self.path, one.name, one.number) + (b"/" + one.name if one.is_group else b"")

    def get(self, path: bytes) -> KnownSet[Entry] | None:
        """Return the set with this path. Returns None if it does not count."""
        return next((one for one in (*self.sets, self.target, *self.replaced) if one is not None and self.build_path(one) == path), None)


class MemberReader(Protocol[Entry]):
    """How a search reads.

    `inspect` and `examine` raise OSError if a file cannot be read, and never fetch a large one for that.
    """

    async def list_files(self, entry: Entry) -> Listing[Entry]:
        """List an entry; may leave out what follows the first incomplete file. Raises FileNotFoundError."""

    async def inspect(self, entry: Entry, name: bytes, file: MemberFile) -> FileFormat:
        """Return `file_formats.inspect` of a file."""

    async def examine(self, entry: Entry, file: MemberFile, act: Callable[[int, ReadRange], Result]) -> Result:
        """Return `act(size, read)` of a file that is small or needed as a whole."""

    async def find_missing(self, files: Mapping[bytes, Entry], known: KnownSet[Entry]) -> Collection[bytes] | None:
        """Return the paths of a set that are not among files of the application.

        `files` has their paths in a set. Returns None if one of them is not that of the set.
        """

    async def find_unreadable(self, files: Mapping[bytes, Entry]) -> tuple[bytes, OSError] | None:
        """Return a file that cannot be read now, although the catalog has nothing against it, and why."""

    async def compute(self, act: Callable[[], Result]) -> Result:
        """Return `act()`, which computes for as long as there are names."""

    async def wait(self, seconds: float) -> None:
        """Wait."""

    def get_now_ns(self) -> int:
        """Return the time to which the times of files are compared."""


class LatestMember(NamedTuple):
    """A member and the verdict on it.

    `entry` is its name in the directory, `name` what a program is given. `path`: below the history, if it is a set that is not in its
    place; otherwise empty.
    """

    number: int
    name: bytes
    entry: bytes
    verdict: Completeness
    path: bytes = b""

    def find_obstacle(self, wanted: Level) -> str:
        """Return why it is not the answer; empty if it is."""
        if self.verdict.has_level(wanted):
            return ""
        return self.verdict.incomplete_reason or f"has the level {self.verdict.level.value} only"


class SearchResult(NamedTuple):
    """The newest complete member, None without one, and the newer ones that were rejected, newest first.

    `next_position`: where the search goes on; 0: it is over.
    """

    newest: LatestMember | None
    rejected: list[LatestMember]
    next_position: int = 0


class LatestAnswer(NamedTuple):
    """The answer of the mount to `ckptfs latest`: the series that is meant, and what a search found.

    With several series, or none, nothing was searched.
    """

    series: list[Series]
    result: SearchResult = SearchResult(None, [])

    def encode(self) -> bytes:
        """Encode it as the value of an extended attribute."""
        newest, rejected, next_position = self.result
        series = [[one.name, one.previous] for one in self.series[:_SERIES_NAMED_MAX]]
        fields = [series, newest and _list_fields(newest), [_list_fields(one) for one in rejected], next_position]
        return json.dumps(fields, default=os.fsdecode, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, text: bytes) -> "LatestAnswer":
        """Return what `encode` has encoded."""
        series, newest, rejected, next_position = json.loads(text)
        result = SearchResult(newest and _build_latest(*newest), [_build_latest(*one) for one in rejected], next_position)
        return cls([Series(tuple(os.fsencode(name).split(rules.WILDCARD)), os.fsencode(previous)) for name, previous in series], result)


def _list_fields(one: LatestMember) -> list[Any]:
    verdict = one.verdict
    return [one.number, one.name, one.entry, one.path, verdict.files, verdict.size, verdict.level, verdict.incomplete_reason]


def _build_latest(number: int, name: str, entry: str, path: str, files: int, size: int, level: str, reason: str) -> LatestMember:
    return LatestMember(number, os.fsencode(name), os.fsencode(entry), Completeness(files, size, Level(level), reason), os.fsencode(path))


async def find_newest(
    series: Series,
    siblings: Mapping[bytes, Entry],
    reader: MemberReader[Entry],
    wanted: Level,
    known: KnownSets[Entry] | None = None,
    *,
    may_read: Callable[[Entry], bool] = lambda entry: True,
    first: int = 0,
    at_most: int | None = None,
    last_names: bool = False,
) -> SearchResult:
    """Return the newest complete member that has the level, or the newest such set of the history.

    `known`: what the history has. `may_read`: whether the caller may read a file or list a directory; others are no answer for it. `first`:
    where a search begins that ended after `at_most` rejected members. `last_names`: a file such as `last.ckpt` counts as well.
    """
    members = await reader.compute(lambda: patterns.list_members(series, siblings.keys()))
    is_first = last_names and not first and not (known and known.target)
    names = patterns.find_last_names(series, siblings.keys()) if is_first else ()
    search = _Search(series, members, siblings, reader, known or KnownSets(), may_read)
    return await search.find_newest(wanted, first, at_most, names)


async def judge(
    series: Series, siblings: Mapping[bytes, Entry], reader: MemberReader[Entry], member: Member, *, is_committed: bool = False
) -> Completeness:
    """Return the verdict on one member as it is now.

    `is_committed`: a user says that nothing is still to come.
    """
    members = await reader.compute(lambda: patterns.list_members(series, siblings.keys()))
    search = _Search(series, members or [member], siblings, reader, KnownSets(), waits=False)
    if is_committed:
        return await search.judge_committed(member)
    return await search.judge(member, [one for one in members if series.get_order(one.numbers) < series.get_order(member.numbers)])


async def judge_kept(
    series: Series, known: KnownSet[Entry], reader: MemberReader[Entry], may_read: Callable[[Entry], bool] = lambda entry: True
) -> Completeness:
    """Return the verdict on the files of a set, by the rules for a member.

    Raises PermissionError if the caller may not read one.
    """
    return await _Search(series, [], {}, reader, KnownSets(), may_read, waits=False).judge_kept(known)


class _Search(Generic[Entry]):
    """One search. Listings are kept: a member is judged, and then compared with the one after it."""

    def __init__(
        self,
        series: Series,
        members: Sequence[Member],
        siblings: Mapping[bytes, Entry],
        reader: MemberReader[Entry],
        known: KnownSets[Entry],
        may_read: Callable[[Entry], bool] = lambda entry: True,
        *,
        waits: bool = True,
    ) -> None:
        """`waits`: wait for the end of a short quiet period."""
        self._members, self._siblings, self._reader, self._known, self._waits = members, siblings, reader, known, waits
        self._may_read, self._get_order, self._counts_steps = may_read, series.get_order, series.counts_steps
        self._sets = sorted(known.sets, key=lambda one: (series.get_order(one.numbers), one.number), reverse=True)
        self._set_by_name = {one.name: one for one in reversed(self._sets)}
        self._judged_in_place: set[KnownSet[Entry]] = set()
        self._rule, self._marks = series.rule, rules.find_marks(siblings) if series.rule is not None else {}
        self._are_groups = any(member.has_parts or member.files != (member.entry,) for member in self._members)
        self._listed: dict[Member, dict[bytes, tuple[MemberFile, Entry]]] = {}

    async def find_newest(self, wanted: Level, first: int, at_most: int | None, last_names: Collection[bytes] = ()) -> SearchResult:
        """Return what `find_newest` returns.

        `last_names`: files such as `last.ckpt`, which come before the members that are older.
        """
        rejected: list[LatestMember] = []
        await self._order_equal_members()
        unnumbered = [Member((UNNUMBERED,), name, name, (name,)) for name in last_names if not self._are_groups]
        unnumbered.sort(key={one: await self._get_change_ns(one) for one in unnumbered}.__getitem__)
        candidates: Iterable[Member | KnownSet[Entry] | None] = itertools.chain(self._list_candidates(), [None] if unnumbered else ())
        for position, candidate in itertools.islice(enumerate(candidates), first, None):
            if len(rejected) == at_most:
                return SearchResult(None, rejected, position)
            while unnumbered and await self._is_later(unnumbered[-1], candidate):
                found = await self._judge_candidate(unnumbered.pop())
                if found is not None and found.verdict.has_level(wanted):
                    return SearchResult(found, rejected)
                rejected += [found] if found is not None else []
            found = await self._judge_candidate(candidate) if candidate is not None else None
            if found is not None and found.verdict.has_level(wanted):
                return SearchResult(found, rejected)
            rejected += [found] if found is not None else []
        return SearchResult(None, rejected)

    async def _is_later(self, one: Member, other: Member | KnownSet[Entry] | None) -> bool:
        """Return whether a file such as `last.ckpt` is later than a member.

        If it says its step, that decides, else the time. It is about as large: weights alone are none.
        """
        if other is None:
            return True
        step = await self._load_step(one) if self._counts_steps else None
        if await self._get_change_ns(one) < await self._get_change_ns(other) if step is None else step <= other.numbers[0]:
            return False
        part, whole = completeness.NEAR_SIZES
        size, least = [sum(file.size for file, _ in (await self._list_candidate(each)).values()) for each in (one, other)]
        is_file = b"" in await self._list(one) and (other.is_group if isinstance(other, KnownSet) else b"" in await self._list(other))
        return is_file and size * whole >= least * part

    async def _load_step(self, one: Member) -> int | None:
        file, entry = (await self._list(one)).get(b"", (None, None))
        if file is None or entry is None or file.incomplete_reason:
            return None
        with contextlib.suppress(OSError):
            return await self._reader.examine(entry, file, set_kinds.load_step)
        return None

    async def _list_candidate(self, one: Member | KnownSet[Entry]) -> dict[bytes, tuple[MemberFile, Entry]]:
        return await (self._list(one) if isinstance(one, Member) else self._list_set(one))

    async def _order_equal_members(self) -> None:
        """Bring members with equal counters into the order of their last changes.

        A metric does not tell which is newer.
        """
        found: list[Member] = []
        for _, equal in itertools.groupby(self._members, key=lambda one: self._get_order(one.numbers)):
            members = list(equal)
            times = {one: await self._get_change_ns(one) for one in members} if len(members) > 1 else {}
            found += sorted(members, key=lambda one: times.get(one, 0), reverse=True)
        self._members = found

    async def _get_change_ns(self, one: Member | KnownSet[Entry]) -> float:
        """Return when the newest file was changed.

        What is incomplete, or may not be read, is still to be changed.
        """
        with contextlib.suppress(PermissionError):
            files = [file for file, _ in (await self._list_candidate(one)).values()]
            if files and not any(file.incomplete_reason for file in files):
                return max(file.mtime_ns for file in files)
        return math.inf

    async def judge_kept(self, known: KnownSet[Entry]) -> Completeness:
        """Return the verdict on the files of a set: names, and what they show of themselves."""
        member = Member(known.numbers, known.name, known.name, (known.name,))
        listed = await self._list_set(known)
        self._listed[member] = {b"": listed[known.name]} if known.is_group and listed.keys() == {known.name} else listed
        facts = await self._load(member)
        if facts.rule is not None:  # A mark beside it was there when the set was made.
            facts = replace(facts, mark=MemberFile(0, Level.NONE, mtime_ns=max(one.mtime_ns for one in facts.files.values())))
        return await self._compute_verdict(facts, [], math.inf)

    async def judge_committed(self, member: Member) -> Completeness:
        """Return the verdict on a member that a user calls complete: only the catalog can contradict."""
        return completeness.judge_set({path: file for path, (file, _) in (await self._list(member)).items()})

    @cached_property
    def _member_by_name(self) -> dict[bytes, Member]:
        return {one.name: one for one in reversed(self._members)}

    @cached_property
    def _position_by_entry(self) -> dict[bytes, int]:
        return {one.entry: position for position, one in enumerate(self._members)}

    def _list_candidates(self) -> Iterable[Member | KnownSet[Entry]]:
        """Return what may be the answer, newest first."""
        if self._known.target is not None:
            return (*self._sets, self._known.target)
        return itertools.chain(heapq.merge(self._members, self._sets, key=self._get_place, reverse=True), self._known.replaced)

    def _get_place(self, one: Member | KnownSet[Entry]) -> tuple[patterns.Order, bool]:
        return self._get_order(one.numbers), isinstance(one, Member)

    async def _judge_candidate(self, one: Member | KnownSet[Entry]) -> LatestMember | None:
        """Return the verdict. Returns None for a set that was judged in its place."""
        try:
            return await self._judge_readable(one)
        except PermissionError as failure:
            return self._build_answer(one, Completeness(0, 0, Level.NONE, f"{failure.filename or 'it'} cannot be read: {failure.strerror}"))

    def _build_answer(self, one: Member | KnownSet[Entry], verdict: Completeness) -> LatestMember:
        if isinstance(one, Member):
            return LatestMember(one.numbers[0], one.name, one.entry, verdict)
        return LatestMember(one.numbers[0], one.name, one.name, verdict, self._known.build_path(one))

    async def _judge_readable(self, one: Member | KnownSet[Entry]) -> LatestMember | None:
        """Return the verdict. Raises PermissionError if the caller may not read all of it."""
        member, known = one if isinstance(one, Member) else self._member_by_name.get(one.name), self._set_by_name.get(one.name)
        if isinstance(one, KnownSet):
            known = one
        if known in self._judged_in_place:
            return None
        verdict = await self._judge_in_place(member, known) if member is not None and known is not None else None
        if known is one and (verdict is None or verdict.incomplete_reason):
            listed = await self._list_set(known)
            verdict = completeness.judge_set({path: file for path, (file, _) in listed.items()})
            return self._build_answer(known, await self._require_answer(listed, verdict))
        assert member is not None
        first_older = self._position_by_entry[member.entry] + 1 if member.numbers != (UNNUMBERED,) else 0
        if verdict is None:
            verdict = await self.judge(member, self._members[first_older:])
            verdict = await self._require_answer(await self._list(member), verdict)
        return self._build_answer(member, verdict)

    async def _judge_in_place(self, member: Member, known: KnownSet[Entry]) -> Completeness | None:
        """Return the verdict on a member whose files are those of a set. Returns None for any other.

        If it has only some of them, the application is deleting it, or was killed while it did.
        """
        listed = await self._list(member)
        files = {path: file for path, (file, _) in listed.items()}
        if completeness.find_reason(files):
            return None
        missing = await self._reader.find_missing({path or member.entry: entry for path, (_, entry) in listed.items()}, known)
        if missing is None:
            return None
        verdict = completeness.judge_set(files)
        if missing:
            await self._list_set(known)  # Only a caller that may list it gets its names.
            reason = f"{text(min(missing))} is missing, which its set {text(known.name)}@{known.number} has"
            return replace(verdict, incomplete_reason=reason)
        self._judged_in_place.add(known)
        return await self._require_answer(listed, verdict)

    async def _require_answer(self, listed: Mapping[bytes, tuple[MemberFile, Entry]], verdict: Completeness) -> Completeness:
        """Return the verdict on a set, or a worse one if its files cannot be read now: their PFS may be gone."""
        if verdict.incomplete_reason:
            return verdict
        found = await self._reader.find_unreadable({path: entry for path, (_, entry) in listed.items()})
        if found is None:
            return verdict
        return replace(verdict, incomplete_reason=f"{text(found[0]) or 'it'} cannot be read: {os.strerror(found[1].errno or 0)}")

    async def judge(self, member: Member, before: Sequence[Member]) -> Completeness:
        """Return the verdict on a member. `before`: those before it, the newest first."""
        verdict, mark = await self._judge(member, before), patterns.build_unfinished_mark(member.entry)
        if verdict.incomplete_reason or mark not in self._siblings:
            return verdict
        return replace(verdict, incomplete_reason=f"{text(mark)} says that its writer has not finished it", quiet_s=completeness.QUIET_S)

    async def _judge(self, member: Member, before: Sequence[Member]) -> Completeness:
        facts = await self._load(member)
        older = await self._load_older(before) if completeness.is_comparable(facts) else []
        verdict = await self._compute_verdict(facts, older, self._get_age_s(facts))
        if verdict.quiet_s and await self._is_tagged(member):
            return await self._compute_verdict(facts, older, verdict.quiet_s)
        if self._waits and 0 < verdict.quiet_s <= completeness.QUIET_S:
            await self._reader.wait(verdict.quiet_s - min(self._get_age_s(facts), verdict.quiet_s))
            self._listed.pop(member)
            again = await self._load(member)
            return await self._compute_verdict(again, older, verdict.quiet_s if again.files == facts.files else 0.0)
        return verdict

    async def _compute_verdict(self, facts: MemberFacts, older: Sequence[OlderMember], age_s: float) -> Completeness:
        return await self._reader.compute(lambda: completeness.judge(facts, older, age_s))

    def _get_age_s(self, facts: MemberFacts) -> float:
        changed_ns = max((max(file.mtime_ns, file.ctime_ns) for file in facts.files.values()), default=0)
        return max(0, self._reader.get_now_ns() - changed_ns) / 1e9

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _load(self, member: Member) -> MemberFacts:
        """Load what is known of a member. Files are read only if the catalog has nothing against any of them."""
        listed = await self._list(member)
        files = {path: file for path, (file, _) in listed.items()}
        facts = MemberFacts(
            member.numbers, files, name=member.name, rule=self._rule, mark=await self._load_mark(member), has_parts=member.has_parts,
            has_bare_parts=member.has_bare_parts,
        )  # fmt: skip
        if completeness.find_reason(files):
            return facts
        formats, indexes = {}, {}
        for path, (file, entry) in listed.items():
            name = (path or member.entry).rpartition(b"/")[2]
            if completeness.is_left_over(facts, path):
                continue
            try:
                formats[path] = await self._reader.inspect(entry, name, file)
                if path and set_kinds.is_index(name) and not formats[path].flaw:
                    indexes[path] = await self._load_index(entry, name, file)
            except OSError as failure:
                formats[path] = FileFormat("", f"cannot be read: {os.strerror(failure.errno or 0)}")
            if formats[path].flaw:
                break
        for path, index in indexes.items():
            indexes[path] = await self._load_nodes(path.rpartition(b"/")[0], index, listed)
        return replace(facts, formats=formats, indexes=indexes)

    async def _load_mark(self, member: Member) -> MemberFile | None:
        """Return the file beside a member that its rule says is written last. Returns None if it is not there."""
        if member.entry not in self._marks:
            return None
        with contextlib.suppress(FileNotFoundError):
            listing = await self._reader.list_files(self._siblings[self._marks[member.entry]])
            return next((file for file, _ in listing.files.values()), None)
        return None

    async def _load_index(self, entry: Entry, name: bytes, file: MemberFile) -> SetIndex:
        try:
            return await self._reader.examine(entry, file, lambda size, read: set_kinds.load_index(name, size, read))
        except OSError:
            # A large file of other nodes is not fetched for this.
            if set_kinds.is_index_needed(name):
                raise
            return SetIndex()

    async def _load_nodes(self, directory: bytes, index: SetIndex, listed: Mapping[bytes, tuple[MemberFile, Entry]]) -> SetIndex:
        """Return an index with what the nodes of its tree say. The index itself names the files of its nodes."""
        for _ in range(NODES_MAX):
            if not index.nodes:
                break
            node, index = index.nodes[0], replace(index, nodes=index.nodes[1:])
            if (found := listed.get(_join(directory, node.path))) is not None:
                with contextlib.suppress(OSError):  # A large file of other nodes is not fetched for this.
                    index = await self._reader.examine(found[1], found[0], functools.partial(set_kinds.load_node, index, node))
        return index

    async def _load_older(self, before: Sequence[Member]) -> list[OlderMember]:
        found = []
        for member in before[: completeness.COMPARED_MAX]:
            with contextlib.suppress(PermissionError):
                sizes = {path: file.size for path, (file, _) in (await self._list(member)).items()}
                if sizes:
                    found.append(OlderMember(text(member.name), member.numbers, sizes))
        return found

    async def _list(self, member: Member) -> dict[bytes, tuple[MemberFile, Entry]]:
        """Return the regular files of a member by their paths below it.

        The list ends with the directory of the first incomplete file.
        """
        if member not in self._listed:
            self._listed[member] = await self._list_below(
                [(name if self._are_groups else b"", self._siblings[name]) for name in member.files]
            )
        return self._listed[member]

    async def _list_set(self, known: KnownSet[Entry]) -> dict[bytes, tuple[MemberFile, Entry]]:
        """Return the regular files of a set but its manifest, by their paths below it."""
        return {path: one for path, one in (await self._list_below([(b"", known.entry)])).items() if path not in MANIFESTS}

    async def _list_below(self, todo: list[tuple[bytes, Entry]]) -> dict[bytes, tuple[MemberFile, Entry]]:
        """Return the regular files at and below some paths.

        Raises PermissionError if the caller may not read one, or list a directory.
        """
        found: dict[bytes, tuple[MemberFile, Entry]] = {}
        seen = {entry for _, entry in todo}
        while todo:
            path, entry = todo.pop()
            try:
                self._require_readable(path, entry)
                files, directories = await self._reader.list_files(entry)
            except FileNotFoundError:
                return {path: (MemberFile(0, Level.NONE, "was deleted just now"), entry)}
            for name, (_, child) in files.items():
                self._require_readable(_join(path, name), child)
            found |= {_join(path, name): file for name, file in files.items()}
            if any(file.incomplete_reason for file, _ in files.values()):
                break
            todo += [(_join(path, name), child) for name, child in directories.items() if child not in seen]
            seen |= {*directories.values()}
        return found

    def _require_readable(self, path: bytes, entry: Entry) -> None:
        if not self._may_read(entry):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), text(path))

    async def _is_tagged(self, member: Member) -> bool:
        """Return whether a file beside the members says that this one is the newest."""
        for name in TAGS:
            if name not in self._siblings:
                continue
            try:
                listed = (await self._reader.list_files(self._siblings[name])).files.get(b"")
                if listed is not None and not listed[0].incomplete_reason:
                    said = await self._reader.examine(listed[1], listed[0], lambda size, read: read(0, min(size, TAG_BYTES_MAX)))
                    if said.strip() in (member.name, str(member.numbers[0]).encode()) or b'"%s"' % member.name in said:
                        return True
            except OSError:
                continue
        return False


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory and name else directory or name
