"""The search for the newest complete member of a series (N2, D4). `ckptfs latest` and `.ckptfs/latest` both call it.

It reads through `MemberReader`, each caller with its own way. Members are judged newest first, and only as many as it takes.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from ckptfs.model import Level
from ckptfs.series import completeness, patterns, set_kinds
from ckptfs.series.completeness import Completeness, MemberFacts, OlderMember
from ckptfs.series.file_formats import FileFormat
from ckptfs.series.patterns import Member, Series
from ckptfs.series.pickle_scan import ReadRange
from ckptfs.series.set_kinds import MemberFile, SetIndex, text

TAG_BYTES_MAX = 4096
TAGS = (b"latest", b"latest_checkpointed_iteration.txt", b"checkpoint")
"""Files beside the members that name the newest one: of DeepSpeed, Megatron and TensorFlow."""

Entry = TypeVar("Entry")
"""How a caller identifies a file or directory: by path, or by inode number."""
Result = TypeVar("Result")


class Listing(NamedTuple, Generic[Entry]):
    """The regular files and the subdirectories of a directory by name; for a file, only itself under the name b""."""

    files: dict[bytes, tuple[MemberFile, Entry]]
    directories: dict[bytes, Entry]


class MemberReader(Protocol[Entry]):
    """How a search reads. `inspect` and `examine` raise OSError if a file cannot be read, and never fetch a large one for that."""

    async def list_files(self, entry: Entry) -> Listing[Entry]:
        """List an entry; may leave out what follows the first incomplete file. Raises FileNotFoundError."""

    async def inspect(self, entry: Entry, name: bytes, file: MemberFile) -> FileFormat:
        """Return `file_formats.inspect` of a file."""

    async def examine(self, entry: Entry, file: MemberFile, act: Callable[[int, ReadRange], Result]) -> Result:
        """Return `act(size, read)` of a file that is small or needed as a whole."""

    async def compute(self, act: Callable[[], Result]) -> Result:
        """Return `act()`, which computes for as long as there are names."""

    async def wait(self, seconds: float) -> None:
        """Wait."""

    def get_now_ns(self) -> int:
        """Return the time to which the times of files are compared."""


class LatestMember(NamedTuple):
    """A member and the verdict on it. `entry` is its name in the directory, `name` what a program is given."""

    number: int
    name: bytes
    entry: bytes
    verdict: Completeness

    def find_obstacle(self, wanted: Level) -> str:
        """Return why it is not the answer; empty if it is."""
        if self.verdict.has_level(wanted):
            return ""
        return self.verdict.incomplete_reason or f"has the level {self.verdict.level.value} only"


class SearchResult(NamedTuple):
    """The newest complete member, None without one, and the newer ones that were rejected, newest first."""

    newest: LatestMember | None
    rejected: list[LatestMember]


async def find_newest(series: Series, siblings: Mapping[bytes, Entry], reader: MemberReader[Entry], wanted: Level) -> SearchResult:
    """Return the newest complete member that has the level."""
    members = await reader.compute(lambda: patterns.list_members(series, siblings.keys()))
    return await _Search(members, siblings, reader).find_newest(wanted)


async def judge(
    series: Series, siblings: Mapping[bytes, Entry], reader: MemberReader[Entry], member: Member, *, is_committed: bool = False
) -> Completeness:
    """Return the verdict on one member as it is now. `is_committed`: a user says that nothing is still to come."""
    members = await reader.compute(lambda: patterns.list_members(series, siblings.keys()))
    search = _Search(members or [member], siblings, reader, waits=False)
    if is_committed:
        return await search.judge_committed(member)
    return await search.judge(member, [one for one in members if one.numbers < member.numbers])


class _Search(Generic[Entry]):
    """One search. Listings are kept: a member is judged, and then compared with the one after it."""

    def __init__(
        self, members: Sequence[Member], siblings: Mapping[bytes, Entry], reader: MemberReader[Entry], *, waits: bool = True
    ) -> None:
        """`waits`: wait for the end of a short quiet period."""
        self._members, self._siblings, self._reader, self._waits = members, siblings, reader, waits
        self._are_groups = any(len(member.files) > 1 for member in self._members)
        self._listed: dict[Member, dict[bytes, tuple[MemberFile, Entry]]] = {}

    async def find_newest(self, wanted: Level) -> SearchResult:
        rejected: list[LatestMember] = []
        for number, member in enumerate(self._members):
            verdict = await self.judge(member, self._members[number + 1 :])
            found = LatestMember(member.numbers[0], member.name, member.entry, verdict)
            if verdict.has_level(wanted):
                return SearchResult(found, rejected)
            rejected.append(found)
        return SearchResult(None, rejected)

    async def judge_committed(self, member: Member) -> Completeness:
        """Return the verdict on a member that a user calls complete: only the catalog can contradict."""
        files = {path: file for path, (file, _) in (await self._list(member)).items()}
        return completeness.judge_committed(files)

    async def judge(self, member: Member, before: Sequence[Member]) -> Completeness:
        """Return the verdict on a member. `before`: those before it, the newest first."""
        facts = await self._load(member)
        older = await self._load_older(before) if completeness.is_comparable(facts) else []
        verdict = await self._compute_verdict(facts, older, self._get_age_s(facts))
        if verdict.quiet_s and await self._is_tagged(member):
            return await self._compute_verdict(facts, older, verdict.quiet_s)
        if self._waits and 0 < verdict.quiet_s <= completeness.QUIET_S:
            await self._reader.wait(verdict.quiet_s - max(0.0, min(self._get_age_s(facts), verdict.quiet_s)))
            self._listed.pop(member)
            again = await self._load(member)
            return await self._compute_verdict(again, older, verdict.quiet_s if again.files == facts.files else 0.0)
        return verdict

    async def _compute_verdict(self, facts: MemberFacts, older: Sequence[OlderMember], age_s: float) -> Completeness:
        return await self._reader.compute(lambda: completeness.judge(facts, older, age_s))

    def _get_age_s(self, facts: MemberFacts) -> float:
        changed_ns = max((max(file.mtime_ns, file.ctime_ns) for file in facts.files.values()), default=0)
        return (self._reader.get_now_ns() - changed_ns) / 1e9

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _load(self, member: Member) -> MemberFacts:
        """Load what is known of a member. Files are read only if the catalog has nothing against any of them."""
        listed = await self._list(member)
        files = {path: file for path, (file, _) in listed.items()}
        facts = MemberFacts(member.numbers, files)
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
        return MemberFacts(member.numbers, files, formats, indexes)

    async def _load_index(self, entry: Entry, name: bytes, file: MemberFile) -> SetIndex:
        return await self._reader.examine(entry, file, lambda size, read: set_kinds.load_index(name, size, read))

    async def _load_older(self, before: Sequence[Member]) -> list[OlderMember]:
        found = []
        for member in before[: completeness.COMPARED_MAX]:
            sizes = {path: file.size for path, (file, _) in (await self._list(member)).items()}
            if sizes:
                found.append(OlderMember(text(member.name), member.numbers, sizes))
        return found

    async def _list(self, member: Member) -> dict[bytes, tuple[MemberFile, Entry]]:
        """Return the regular files of a member by their paths below it, up to the directory with the first incomplete file."""
        if member not in self._listed:
            found: dict[bytes, tuple[MemberFile, Entry]] = {}
            todo = [(name if self._are_groups else b"", self._siblings[name]) for name in member.files]
            while todo:
                path, entry = todo.pop()
                try:
                    files, directories = await self._reader.list_files(entry)
                except FileNotFoundError:
                    found = {path: (MemberFile(0, Level.NONE, "was deleted just now"), entry)}
                    break
                found |= {_join(path, name): file for name, file in files.items()}
                if any(file.incomplete_reason for file, _ in files.values()):
                    break
                todo += [(_join(path, name), child) for name, child in directories.items()]
            self._listed[member] = found
        return self._listed[member]

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
