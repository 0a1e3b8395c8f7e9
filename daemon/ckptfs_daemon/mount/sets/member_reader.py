"""Reads of the members of a series in the mount process: catalog, beginnings and ends of files.

Bytes come from the copy in RAM or NVMe, else from the PFS, else through the mover from another node. All reads run in worker threads, and
none fetches a large file. What a sealed generation shows never changes, so it is remembered; a file that only the PFS has is opened each
time, because the PFS may be gone, and of those on NVMe one. A tier that does not answer is left alone for a while.
"""

import errno
import functools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import trio

from ckptfs import disk, lifecycle, limits
from ckptfs.bounded_table import BoundedTable
from ckptfs.catalog import contents, copies, history, history_names, inodes, mover_requests, namespace, set_members, summary
from ckptfs.catalog.copies import FetchState
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import SeriesRecord
from ckptfs.catalog.history_names import SetName
from ckptfs.catalog.namespace import NotImported
from ckptfs.coherence import salvage_records
from ckptfs.errors import CkptfsError, posix_error
from ckptfs.model import ROOT, ContentState, CopyState, Inode, Level, Tier
from ckptfs.series import file_formats
from ckptfs.series.completeness import find_incomplete_reason
from ckptfs.series.file_formats import FileFormat
from ckptfs.series.file_groups import replace_group
from ckptfs.series.patterns import Series, build_series, choose_part, find_series, list_series, parse
from ckptfs.series.pickle_scan import ReadRange
from ckptfs.series.search import MANIFESTS, KnownSet, KnownSets, LatestAnswer, LatestMember, Listing, find_newest, judge_kept
from ckptfs.series.set_kinds import MemberFile
from ckptfs.tiers import health, pfs_tree
from ckptfs_daemon.mount.context import ChangeRunner, MountContext
from ckptfs_daemon.mount.open_files.tier_calls import run_in_thread
from ckptfs_daemon.newest_sets import list_newest_first, load_set_order

Result = TypeVar("Result")


class FoundLatest(NamedTuple):
    """What a search found, and what the history has of the series."""

    answer: LatestAnswer
    known: KnownSets[int]


class MountMemberReader:
    """`search.MemberReader` over inode numbers. Belongs to the trio thread."""

    def __init__(self, context: MountContext, changes: ChangeRunner) -> None:
        self._context, self._changes = context, changes
        self._known = BoundedTable[tuple[int, int, bytes], FileFormat](limits.INSPECTED_FILES_MAX)
        self._silent_until_s = dict.fromkeys(Tier, float("-inf"))
        self._named_until_s: dict[int, float] = {}

    # --- the catalog --------------------------------------------------------------------------------------------------

    async def list_directory(self, directory: int) -> dict[bytes, Inode]:
        """Return the entries of a directory of the mount."""
        await self._refresh_directory(directory)
        return {entry.name: inode for entry, inode in namespace.iterate_entries(self._context.db, directory)}

    async def list_tree(self, directory: int) -> dict[bytes, Inode]:
        """Return all that is below a directory, but the directories themselves, by path.

        Each directory is read once: in the store, directories may be moved into each other while they are read.
        """
        found, todo, seen = dict[bytes, Inode](), [(b"", directory)], {directory}
        while todo:
            path, one = todo.pop()
            for name, inode in (await self.list_directory(one)).items():
                if inode.is_directory and inode.id not in seen:
                    seen.add(inode.id)
                    todo.append((path + name + b"/", inode.id))
                elif not inode.is_directory:
                    found[path + name] = inode
        return found

    async def list_possible_members(self, directory: int) -> dict[bytes, tuple[int, bool]]:
        """Return (inode, whether it is a directory) of the files and directories in a directory, by name.

        Fast, however many there are.
        """
        await self._refresh_directory(directory)
        return await self.compute(functools.partial(set_members.list_possible_members, self._context.db, directory))

    async def find_latest(
        self,
        directory: int,
        name: bytes,
        wanted: Level = Level.LOCAL,
        *,
        may_read: Callable[[int], bool] = lambda entry: True,
        first: int = 0,
        at_most: int | None = None,
    ) -> FoundLatest:
        """Find the newest complete member of a series; an empty name means the only one in the directory.

        The other arguments are those of `search.find_newest`. Any caller that may list the directory may ask.
        """
        await self._refresh_directory(directory)
        siblings = await self.compute(functools.partial(history_names.list_shown_names, self._context.db, directory))
        found = await self.compute(lambda: _find_series(name, siblings))
        if not found and await self._find_series_record(directory, name) is not None:
            found = [Series((name,))]  # A user has committed something of this name.
        if len(found) != 1:
            return FoundLatest(LatestAnswer(found), KnownSets())
        known = await self.load_known_sets(directory, found[0].name)
        result = await find_newest(
            found[0], siblings, self, wanted, known, may_read=may_read, first=first, at_most=at_most, last_names=not name
        )
        return FoundLatest(LatestAnswer(found, result), known)

    async def find_flaw(self, directory: int, may_read: Callable[[int], bool]) -> str | None:
        """Return what the rules of its kind have against a set of the history.

        Returns None for any other directory.
        """
        db, one = self._context.db, history.get_set(self._context.db, directory)
        record = None if one is None else history.get_series(db, inodes.get_parent(db, directory))
        series = None if record is None else parse(record.pattern)
        if one is None or series is None:
            return None if record is None else ""
        known = KnownSet(one.record.numbers, one.record.name, one.record.number, one.record.is_group, directory)
        return (await judge_kept(series, known, self, may_read)).incomplete_reason

    async def _refresh_directory(self, directory: int) -> None:
        await self._context.shared_namespace.refresh_directory(directory)
        if not self._context.get_inode(directory).is_imported:
            await self._changes.request_scan(directory, must_succeed=True)

    async def lookup_child(self, directory: int, name: bytes) -> Inode:
        """Return the inode of a name. Raises FileNotFoundError."""
        await self._context.shared_namespace.refresh_name(directory, name)
        try:
            return namespace.lookup(self._context.db, directory, name)
        except NotImported:
            return await self._changes.lookup_after_scan(directory, name)

    async def list_files(self, entry: int) -> Listing[int]:
        """List a file or directory, up to its first incomplete file."""
        await self._changes.refresh_inode(entry)
        inode = self._context.get_inode(entry)
        inside = await self.list_directory(entry) if inode.is_directory else {b"": inode}
        files: dict[bytes, tuple[MemberFile, int]] = {}
        for name, child in inside.items():
            # A large member must not keep other requests waiting.
            await trio.lowlevel.checkpoint()
            if child.is_file:
                files[name] = await self._load_member_file(child.id, is_part=inode.is_directory), child.id
                if files[name][0].incomplete_reason:
                    break
        return Listing(files, {name: child.id for name, child in inside.items() if child.is_directory})

    async def _load_member_file(self, number: int, *, is_part: bool) -> MemberFile:
        await self._changes.refresh_inode(number)
        await self._context.shared_namespace.refresh_copies(number)
        inode, record = self._context.get_inode(number), summary.load_file_record(self._context.db, number)
        reason = find_incomplete_reason(record, inode.size)
        if is_part and salvage_records.is_previous_shown(self._context.db, number):
            reason = "shows its former content, which may be of another save: the newer one is lost"
        return MemberFile(inode.size, lifecycle.level(record), reason, inode.mtime_ns, inode.ctime_ns)

    async def compute(self, act: Callable[[], Result]) -> Result:
        """Return `act()`, from a thread: other requests go on, however many names there are."""
        return await trio.to_thread.run_sync(act)

    async def wait(self, seconds: float) -> None:
        """Wait; other requests go on."""
        await trio.sleep(seconds)

    def get_now_ns(self) -> int:
        """Return the time by the clock of this node."""
        return time.time_ns()

    # --- the history --------------------------------------------------------------------------------------------------

    async def load_known_sets(self, directory: int, series_name: bytes) -> KnownSets[int]:
        """Return what the history has of a series. The newest set counts as named from now on."""
        record = await self._find_series_record(directory, series_name) or self._find_group_series(directory, series_name)
        if record is None:
            return KnownSets()
        await self._context.shared_namespace.refresh_directory(record.directory)
        known = await self.compute(functools.partial(_load_known_sets, self._context.db, record))
        get_order = build_series(record.pattern).get_order
        newest = max(known.sets, key=lambda one: (get_order(one.numbers), one.number), default=known.target)
        if newest is not None:
            self._named_until_s = {**self.list_recently_named(), newest.entry: trio.current_time() + limits.SET_NAMED_S}
        return known

    def list_recently_named(self) -> dict[int, float]:
        """Return sets that programs got as the newest, and may be about to read.

        The value says until when they stay for that.
        """
        return {one: until_s for one, until_s in self._named_until_s.items() if trio.current_time() < until_s}

    def _find_group_series(self, directory: int, series_name: bytes) -> SeriesRecord | None:
        """Return the series of groups of which this is the pattern of one file."""
        return next((one for one in self._list_series(directory) if series_name in self._list_patterns(one)), None)

    def list_history_patterns(self, directory: int) -> list[bytes]:
        """Return the patterns of a directory's series that the history has."""
        return [pattern for one in self._list_series(directory) for pattern in self._list_patterns(one)]

    def _list_series(self, directory: int) -> list[SeriesRecord]:
        return [one for one in history.list_series(self._context.db) if one.origin == directory]

    def _list_patterns(self, record: SeriesRecord) -> list[bytes]:
        """Return the patterns under which a series can be opened.

        They are its own name, or those of the files of its newest group.
        """
        newest = next(iter(list_newest_first(self._context.db, record)), None)
        if newest is None or not newest.is_group:
            return [record.pattern] if newest is not None else []
        names = [entry.name for entry, _ in namespace.iterate_entries(self._context.db, newest.directory)]
        return [replace_group(record.pattern, newest.member, name) for name in names if name not in MANIFESTS]

    def find_path(self, known: KnownSets[int], found: LatestMember, series_name: bytes) -> bytes:
        """Return the path below the history of a set; of a group, that of the file to which a pattern belongs."""
        one = known.get(found.path)
        series = known.path.rpartition(b"/")[2]
        if one is None or not one.is_group or series_name == series:
            return found.path
        names = [entry.name for entry, _ in namespace.iterate_entries(self._context.db, one.entry)]
        own = next((name for name in names if replace_group(series, one.name, name) == series_name), one.name)
        return found.path.removesuffix(one.name) + own

    async def list_set_members(self, directory: int) -> set[bytes]:
        """Return the names of the members in a directory of the application that are sets."""
        await self._refresh_directory(directory)
        return {
            one.member
            for record in self._list_series(directory)
            for one in history_names.list_set_names(self._context.db, record.directory)
        }

    async def find_set_path(self, directory: int, name: bytes) -> bytes:
        """Return the path below the history of the newest set of a member, or of a file of a group.

        It is empty if there is none. A group has the name of its first file, so its series does not follow from the names of the others.
        """
        pattern = series.name if (series := find_series(name, ())) is not None else name
        own = await self._find_series_record(directory, pattern)
        for record in ([] if own is None else [own]) + [one for one in self._list_series(directory) if one != own]:
            await self._context.shared_namespace.refresh_directory(record.directory)
            if path := await self.compute(functools.partial(_find_set_path, self._context.db, record, name)):
                return path
        return b""

    async def _find_series_record(self, directory: int, pattern: bytes) -> SeriesRecord | None:
        """Return the series with this pattern.

        It is that of the directory, or of one that is gone and had the same path.
        """
        db = self._context.db
        place = await self.find_place(directory, pattern)  # That also tells what other nodes rolled back to.
        own = history.find_series(db, directory, pattern)
        found = None if place is None else history.get_series(db, place)
        return own or (found if found is not None and not contents.has_name(db, found.origin) else None)

    async def find_place(self, directory: int, pattern: bytes) -> int | None:
        """Return the directory of the history that has the path of a series. Returns None if there is none."""
        db, place = self._context.db, ROOT
        for name in (history.NAME, *filter(None, namespace.get_path(db, directory).split(b"/")), pattern):
            await self._context.shared_namespace.refresh_name(place, name)
            child = namespace.find_child(db, place, name)
            if child is None:
                return None
            place = child.id
        return place

    async def find_missing(self, files: Mapping[bytes, int], known: KnownSet[int]) -> set[bytes] | None:
        """Return the paths of a set that are not among these files.

        Returns None if one of them is not that of the set. Names of the application and of the history lead to the same inodes.
        """
        below = await self.list_tree(known.entry)
        found = {path: inode.id for path, inode in below.items() if inode.is_file and path not in MANIFESTS}
        return found.keys() - files.keys() if files.items() <= found.items() else None

    async def find_unreadable(self, files: Mapping[bytes, int]) -> tuple[bytes, OSError] | None:
        """Return a file that is not in RAM and cannot be read, and the error; None if there is none.

        One file on NVMe stands for all, and one on the PFS: there may be thousands, and each takes a call.
        """
        tried = {Tier.RAM}
        for path, number in files.items():
            state = copies.load_fetch_state(self._context.db, number)
            if state is None or state.holders or (state.published is None and not state.copies):
                continue
            tier = next(iter(self._list_tiers(state)), Tier.PFS)
            if tier in tried:
                continue
            tried.add(tier)
            try:
                await self._read_here(state, lambda size, read: read(0, min(size, 1)))
            except OSError as failure:
                return path, failure
        return None

    # --- bytes --------------------------------------------------------------------------------------------------------

    async def inspect(self, entry: int, name: bytes, file: MemberFile) -> FileFormat:
        """Return what a file shows of itself. Raises OSError if it cannot be read."""
        state = copies.load_fetch_state(self._context.db, entry)
        if state is None:
            raise posix_error(errno.ENOENT)
        if not file.size:
            return file_formats.inspect(name, 0, lambda offset, length: b"")
        is_elsewhere = not (state.has_local_copy or state.holders)
        key = (state.content.id, state.content.generation, name) if state.content is not None else (0, 0, b"")
        if key in self._known and not is_elsewhere:
            found = self._known[key]
        else:
            found = await self._inspect(state, name)
        if key[0]:
            self._known[key] = found
        return found

    async def _inspect(self, state: FetchState, name: bytes) -> FileFormat:
        try:
            return await self._read_here(state, functools.partial(file_formats.inspect, name))
        except OSError:
            if not state.holders or state.has_local_copy:
                raise
        said = await self._ask_mover(mover_requests.INSPECT, state.inode)
        return FileFormat.decode(said.encode())

    async def examine(self, entry: int, file: MemberFile, act: Callable[[int, ReadRange], Result]) -> Result:
        """Return `act(size, read)`.

        A file that only other nodes have is fetched. Raises OSError if it cannot be read.
        """
        state = copies.load_fetch_state(self._context.db, entry)
        if state is None:
            raise posix_error(errno.ENOENT)
        try:
            return await self._read_here(state, act)
        except OSError:
            if not state.holders or state.has_local_copy or file.size > limits.FETCH_WHOLE_BYTES:
                raise
        await self._ask_mover(mover_requests.FETCH, entry, mover_requests.NEEDS_COPY)
        return await self._read_here(copies.load_fetch_state(self._context.db, entry) or state, act)

    async def _ask_mover(self, kind: str, inode: int, argument: str = "") -> str:
        try:
            return await self._context.mover_client.request(kind, inode, argument, timeout_s=limits.INSPECT_WAIT_S)
        except CkptfsError as failure:
            raise posix_error(failure.errno, str(failure)) from failure

    async def _read_here(self, state: FetchState, act: Callable[[int, ReadRange], Result]) -> Result:
        """Run `act` on the first copy in a tier of this node that can be read, or on the file of the PFS.

        Raises OSError if there is none.
        """
        content, pfs = state.content, self._context.config.pfs
        failure = posix_error(errno.ENODATA if state.holders else errno.EIO)
        for tier in self._list_tiers(state):
            open_copy = functools.partial(self._context.tiers[tier].open, cast(int, state.content_id))
            try:
                return await self._read_in_time(tier, functools.partial(_run_on, open_copy, act))
            except OSError as error:
                if not health.is_tier_failure(error):
                    raise
                failure = error
        if pfs is not None and state.published is not None and (content is None or content.state is not ContentState.OPEN):
            return await self._read_in_time(Tier.PFS, lambda: _run_on(lambda: pfs_tree.open_published(pfs, state), act))
        raise failure

    def _list_tiers(self, state: FetchState) -> list[Tier]:
        """Return the tiers of this node that have a good copy, RAM first."""
        return [copy.tier for copy in state.copies if copy.state is CopyState.GOOD and copy.tier in self._context.tiers]

    async def _read_in_time(self, tier: Tier, act: Callable[[], Result]) -> Result:
        """Run `act` in a thread that may hang as long as the tier does.

        Raises OSError, for instance if the tier does not answer in time.
        """
        if trio.current_time() < self._silent_until_s[tier]:
            raise posix_error(errno.ETIMEDOUT)
        found: Any = None
        with trio.move_on_after(limits.INSPECT_WAIT_S) as scope:
            try:
                found = await run_in_thread(tier, act)
            except CkptfsError as failure:
                raise posix_error(failure.errno, str(failure)) from failure
        if scope.cancelled_caught:
            self._silent_until_s[tier] = trio.current_time() + limits.INSPECT_REST_S
            raise posix_error(errno.ETIMEDOUT)
        return cast(Result, found)


def _find_series(name: bytes, names: Collection[bytes]) -> list[Series]:
    """Return the series with a name, or all series if it is empty. One without a number has to be there."""
    one = parse(name) if name else None
    return [choose_part(one, names)] if one is not None else [each for each in list_series(names) if name in (b"", each.name)]


def _load_known_sets(db: Database, record: SeriesRecord) -> KnownSets[int]:
    series, names = build_series(record.pattern), history_names.list_set_names(db, record.directory)
    get_order = load_set_order(db, record, names)
    eras: dict[int, list[KnownSet[int]]] = defaultdict(list)
    for order, name in sorted(((get_order(one.member, one.number), one) for one in names), reverse=True):
        if (one := _build_known_set(series, name)) is not None:
            eras[order.era].append(one)
    return KnownSets(eras[2], next(iter(eras[1]), None), record.path, () if record.rollback is not None else eras[0])


def _find_set_path(db: Database, record: SeriesRecord, name: bytes) -> bytes:
    for one in list_newest_first(db, record):
        has_file = one.is_group and namespace.find_child(db, one.directory, name) is not None
        if has_file or one.member == name:
            return b"%s/%s@%d" % (record.path, one.member, one.number) + (b"/" + name if has_file else b"")
    return b""


def _build_known_set(series: Series, name: SetName) -> KnownSet[int] | None:
    numbers = series.parse_numbers(name.member)
    return None if numbers is None else KnownSet(numbers, name.member, name.number, name.is_group, name.directory)


def _run_on(open_file: Callable[[], int], act: Callable[[int, ReadRange], Result]) -> Result:
    """Open a file, run `act` on it, and close it."""
    with disk.closing(open_file()) as fd:
        return act(os.fstat(fd).st_size, lambda offset, length: os.pread(fd, length, offset))
