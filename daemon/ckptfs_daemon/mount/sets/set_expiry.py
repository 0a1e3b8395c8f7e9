"""Retention rules carried out: sets go to the PFS, leave RAM and NVMe, and expire (D5, D7, D8, H6).

Incomplete sets are reaped.

`series.expiry` decides. The tracker of sets asks for a review after each change of a series. Of a set that expires the names in the
application's directories go. Its directory in the history is then without a reason to stay, and the tracker deletes it.

Crash safety: choosing a set is one transaction. A set whose names do not all go in one is marked first, and the next process goes on.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import trio

from ckptfs import limits
from ckptfs.catalog import history, namespace, retention_state, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import CheckpointSet, SeriesRecord
from ckptfs.catalog.set_members import MANIFEST_NAMES
from ckptfs.config.rule_tables import find_rule
from ckptfs.config.schema import RetentionRule
from ckptfs.errors import CkptfsError
from ckptfs.model import Inode, Level
from ckptfs.series import Series, judge, patterns
from ckptfs.series.expiry import RuledSeries, Ruling, apply_rule, assume_final
from ckptfs.series.patterns import Member
from ckptfs.series.retention import SetFacts
from ckptfs_daemon import ipc
from ckptfs_daemon.mount.context import ChangeRunner, MountContext
from ckptfs_daemon.mount.sets.member_reader import MountMemberReader
from ckptfs_daemon.mount.sets.set_events import record_expired

import pyfuse3  # isort: skip

log = logging.getLogger(__name__)

Name = tuple[int, bytes]


class Review(NamedTuple):
    """The result of a review of a series.

    `kept`: sets that its rule keeps in the history. `has_deleted`: whether names were deleted. `again_s`: when to look again.
    """

    kept: frozenset[int] = frozenset()
    has_deleted: bool = False
    again_s: float | None = None


class SetExpiry:
    """What the retention rules of a mount do to its sets. Belongs to the trio thread."""

    def __init__(
        self,
        context: MountContext,
        changes: ChangeRunner,
        reader: MountMemberReader,
        add_unlinked: Callable[[Iterable[int]], None],
        on_chosen: Callable[[Iterable[int]], None],
    ) -> None:
        """`add_unlinked` gets inodes that have lost their last name, `on_chosen` sets chosen for the PFS."""
        self._on_chosen = on_chosen
        self._context, self._changes, self._reader, self._add_unlinked = context, changes, reader, add_unlinked
        self._checked: set[int] = set()
        self._retired: set[int] = set()

    def get_excess(self, held_bytes: int) -> int:
        """Return how many of the bytes that only the history holds exceed its share.

        Returns 0 while the size of a tier is not known.
        """
        with contextlib.suppress(OSError, CkptfsError):
            return max(0, held_bytes - self._context.tiers.get_share_bytes(self._context.config.history_size))
        return 0

    async def refresh(self, series: SeriesRecord, sets: Iterable[CheckpointSet]) -> None:
        """Load how safe other nodes have made the sets of a series with a rule.

        Only sets that may be safer than this node knows are loaded.
        """
        shared_namespace, db = self._context.shared_namespace, self._context.db
        if not shared_namespace.is_shared or self.find_rule(series) is None:
            return
        levels = summary.list_lowest_levels(db, history.list_set_directories(db, series.directory))
        highest = Level.CLIQUE if self._context.config.pfs is None else Level.PFS
        for one in sets:
            inodes = [] if levels.get(one.directory) is highest else [inode.id for _, inode in history.list_files(db, one.directory)]
            async with trio.open_nursery() as nursery:
                for inode in inodes:
                    nursery.start_soon(shared_namespace.refresh_inode, inode)
                    nursery.start_soon(shared_namespace.refresh_copies, inode)

    def find_rule(self, series: SeriesRecord) -> RetentionRule | None:
        """Return the rule of a series. Returns None if it has none."""
        return find_rule(self._context.config.retention, series.path)

    def _load(self, series: SeriesRecord, sets: Sequence[CheckpointSet], facts: Iterable[SetFacts]) -> RuledSeries | None:
        rule = self.find_rule(series)
        if rule is None:
            return None
        directories = {one.record.number: one.directory for one in sets}
        chosen = (
            retention_state.list_marked(self._context.db, series.directory, retention_state.CHOSEN_XATTR) if rule.selects_for_pfs else set()
        )
        has_copies = self._context.config.cluster is not None and self._context.config.replication_factor > 1
        rollback_ns = 0 if series.rollback is None else series.rollback.at_ns
        records = [one.record for one in sets]
        return RuledSeries(
            tuple(self._lower_unchecked(directories, facts)),
            {one.number: (one.completed_ns > rollback_ns, one.numbers, one.number) for one in records},
            {one.number: one.completed_ns for one in records},
            frozenset(one.record.number for one in sets if one.directory in chosen),
            None if series.rollback is None else series.rollback.number,
            self._context.config.pfs is not None,
            Level.CLIQUE if has_copies else Level.LOCAL,
        )

    def _lower_unchecked(self, directories: dict[int, int], facts: Iterable[SetFacts]) -> list[SetFacts]:
        """Return the facts, with a lower level for sets that were not read back from the PFS.

        Nothing is dropped because of such sets yet.
        """
        found = list(facts)
        if self._context.config.pfs_verify:
            on_pfs = {directories[one.number] for one in found if one.level is Level.PFS and one.number in directories}
            unchecked = retention_state.list_unchecked(self._context.db, on_pfs - self._checked)
            self._checked |= on_pfs - unchecked
            found = [replace(one, level=Level.LOCAL) if directories.get(one.number) in unchecked else one for one in found]
        return found

    async def review(self, series: SeriesRecord, sets: Sequence[CheckpointSet], facts: Sequence[SetFacts]) -> Review:
        """Do what the rule of a series says of its sets, the newest first."""
        ruled = self._load(series, sets, facts)
        rule = self.find_rule(series)
        if ruled is None or rule is None:
            return Review()
        if self._context.shared_namespace.is_disconnected:
            return Review(frozenset(one.record.number for one in sets), again_s=limits.SET_REVIEW_S)
        db, ruling = self._context.db, await trio.to_thread.run_sync(apply_rule, rule, ruled)
        final = await trio.to_thread.run_sync(lambda: apply_rule(rule, assume_final(ruled, ruling)))
        self._choose(series, rule, [one for one in sets if one.record.number in ruling.for_pfs])
        self._retire(sets, ruling)
        in_place = {one.number for one in facts if one.is_in_place}
        expiring = retention_state.list_marked(db, series.directory, retention_state.EXPIRING_XATTR)
        due = [one for one in sets if one.directory in expiring or one.record.number in ruling.expired & in_place]
        deleted = {one.record.number: await self._delete_place(series, one, has_begun=one.directory in expiring) for one in reversed(due)}
        in_use = {number for number, count in deleted.items() if count is None}
        again_s = await self._reap(series, rule, sets)
        if in_use or final.expired - ruling.expired:
            again_s = min(limits.SET_REVIEW_S, again_s or limits.SET_REVIEW_S)
        return Review(ruling.kept | in_use, any(deleted.values()), again_s)

    def _choose(self, series: SeriesRecord, rule: RetentionRule, sets: Iterable[CheckpointSet]) -> None:
        """Choose sets for the PFS, and have released what is held back of them."""
        chosen = retention_state.list_marked(self._context.db, series.directory, retention_state.CHOSEN_XATTR)
        for one in [one for one in sets if rule.selects_for_pfs]:
            if one.directory not in chosen:
                with self._context.open_files.change() as db:
                    retention_state.mark_set(db, one.directory, retention_state.CHOSEN_XATTR)
                log.info("%s: set %d goes to the PFS", _format(series), one.record.number)
            self._on_chosen([one.directory])

    def _retire(self, sets: Sequence[CheckpointSet], ruling: Ruling) -> None:
        leaving = {one.directory for one in sets if one.record.number in ruling.not_local} - self._retired
        if leaving:
            staying = [one.directory for one in sets if one.record.number not in ruling.not_local]
            with self._context.db.transaction() as db:
                retention_state.record_retired(db, leaving, staying)
            self._retired |= leaving
            self._context.wake_channel.notify(ipc.WORK)

    # --- deleting what the application has ---------------------------------------------------------------------------

    async def _delete_place(self, series: SeriesRecord, one: CheckpointSet, *, has_begun: bool) -> int | None:
        """Delete the names of an expired set in the application's directories.

        Return their number; None if they are in use.

        A directory goes if all files of the set are in it; if its deletion has begun, unless all its files are others by now.
        """
        db, name = self._context.db, one.record.name
        files = {path: inode.id for path, inode in history.list_files(db, one.directory) if inode.is_file and path not in MANIFEST_NAMES}
        place, tops = self._find_child(series.origin, name), {}
        if one.record.is_group:
            tops = {path: inode for path, inode in files.items() if self._find_child(series.origin, path) == inode}
        elif place is not None:
            await self._refresh_below([place])
            found, wanted = set(namespace.list_files_below(db, place)), set(files.values())
            tops = {name: place} if wanted <= found or (has_begun and (wanted & found or not found)) else {}
        count = await self._delete_names(series.origin, tops, one.directory)
        if count:
            log.info("%s: set %d expired", _format(series), one.record.number)
            record_expired(db, one.directory, "a retention rule")
        return count

    async def _refresh_below(self, tops: Iterable[int]) -> None:
        """Load the names that other nodes of the cluster have made below these inodes."""
        for inode in tops if self._context.shared_namespace.is_shared else ():
            if self._context.get_inode(inode).is_directory:
                await self._reader.list_tree(inode)

    def _find_child(self, parent: int, name: bytes) -> int | None:
        found = namespace.find_child(self._context.db, parent, name)
        return None if found is None else found.id

    async def _delete_names(self, parent: int, tops: dict[bytes, int], expiring: int | None = None) -> int | None:
        """Delete names in a directory with all below them.

        Return their number; None if a process has something of it open.

        `expiring`: the set whose names these are, which is marked if they do not go at once.
        """
        db = self._context.db
        if retention_state.is_in_use(db, tops.values()):
            return None
        names = [(above, name) for inode in tops.values() for above, name, _ in namespace.iterate_names_below(db, inode)]
        names += [(parent, name) for name in tops]
        for start in range(0, len(names), limits.EXPIRED_NAMES_MAX):
            batch = names[start : start + limits.EXPIRED_NAMES_MAX]
            is_first_of_many = start == 0 and len(names) > len(batch)
            await self._delete_batch(batch, expiring if is_first_of_many else None)
        for name in tops:
            with contextlib.suppress(OSError):
                await trio.to_thread.run_sync(pyfuse3.invalidate_entry, parent, name)
        return len(names)

    async def _delete_batch(self, batch: list[Name], expiring: int | None) -> None:
        def act(db: Database, _: bool) -> list[Inode]:
            if expiring is not None:
                retention_state.mark_set(db, expiring, retention_state.EXPIRING_XATTR)
            found = []
            for parent, name in batch:
                with contextlib.suppress(FileNotFoundError, OSError):
                    inode = namespace.lookup(db, parent, name)
                    found.append((namespace.rmdir if inode.is_directory else namespace.unlink)(db, parent, name))
            return found

        gone = await self._context.shared_namespace.commit_shared(lambda: self._changes.run_change(act), batch)
        self._add_unlinked(inode.id for inode in gone if inode.nlink == 0)

    # --- incomplete members ------------------------------------------------------------------------------------------

    async def _reap(self, series: SeriesRecord, rule: RetentionRule, sets: Sequence[CheckpointSet]) -> float | None:
        """Delete incomplete members that no program will finish (H6).

        Return the seconds until the next may be due; None if there is none.

        They are older than a complete set, no process has them open, and nothing of them has changed for the time of the rule.
        """
        pattern = patterns.parse(series.pattern)
        if rule.incomplete_after_s is None or pattern is None or not sets:
            return None
        newest = max(one.record.numbers for one in sets)
        complete = {one.record.name for one in sets}
        entries = {entry.name: inode.id for entry, inode in namespace.iterate_entries(self._context.db, series.origin)}
        waits = []
        for member, names in _list_older(pattern, entries, newest):
            if member is not None and member.name in complete:
                continue
            tops = {name: entries[name] for name in names}
            age_s = (time.time_ns() - retention_state.get_changed_ns(self._context.db, tops.values())) / 1e9
            if age_s < rule.incomplete_after_s:
                waits.append(rule.incomplete_after_s - age_s)
                continue
            if member is not None and not (await judge(pattern, entries, self._reader, member)).incomplete_reason:
                continue
            await self._refresh_below(tops.values())
            count = await self._delete_names(series.origin, tops)
            if count is None:
                waits.append(limits.SET_REVIEW_S)
            elif count:
                log.info("%s: %s was never completed; it is deleted", _format(series), os.fsdecode(names[0]))
        return min(waits, default=None)


def _list_older(series: Series, names: Iterable[bytes], newest: tuple[int, ...]) -> list[tuple[Member | None, tuple[bytes, ...]]]:
    """Return the members of a series before `newest` with their names.

    Temporary names of such members follow, without a member.
    """
    known = list(names)
    found: list[tuple[Member | None, tuple[bytes, ...]]] = [
        (one, one.files) for one in patterns.list_members(series, known) if one.numbers < newest
    ]
    part = re.compile(rb"([0-9]+)".join(map(re.escape, series.texts)), re.DOTALL)
    for name in known:
        match = part.search(name) if patterns.is_temporary(name) else None
        numbers = None if match is None else series.parse_numbers(match[0])
        if numbers is not None and numbers < newest:
            found.append((None, (name,)))
    return found


def _format(series: SeriesRecord) -> str:
    return series.path.decode(errors="backslashreplace")
