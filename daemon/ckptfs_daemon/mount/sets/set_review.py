"""The reviews of series: which sets stay, expire, go to the PFS or leave the tiers (D5, D7, D8, H6).

A series is reviewed after a set of it was made, after a file of it lost a name, and at the start. `retention` says what protects a set, and
`series.expiry` what the rule of the series says. A review is repeated while an older set only waits until a newer one is as safe, while a
program may be about to read a set, and when the rule says so. If the history holds more than `history_size`, the oldest sets that only a
rule keeps go.

Of a set that expires by a rule, the names in the application's directories go. Its directory in the history is then without a reason to
stay. Incomplete members of a series are reaped.

Crash safety: reviews are not stored; the next process reviews all series. Choosing a set is one transaction. A set whose names do not all
go in one is marked first, and the next process goes on.
"""

import contextlib
import logging
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import trio

from ckptfs import limits
from ckptfs.catalog import history, history_names, namespace, retention_state, set_members, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import CheckpointSet, SeriesRecord
from ckptfs.catalog.set_members import MANIFEST_NAMES
from ckptfs.config.rule_tables import find_rule
from ckptfs.config.schema import RetentionRule
from ckptfs.errors import CkptfsError
from ckptfs.model import Inode, Level
from ckptfs.series import patterns, retention
from ckptfs.series.expiry import RuledSeries, Ruling, apply_rule, assume_final, list_beyond
from ckptfs.series.patterns import Member, Order, Series
from ckptfs.series.retention import KeepReason, SetFacts
from ckptfs.series.search import judge
from ckptfs_daemon import ipc
from ckptfs_daemon.mount.context import ChangeRunner, MountContext
from ckptfs_daemon.mount.sets.member_reader import MountMemberReader
from ckptfs_daemon.mount.sets.set_events import record_expired
from ckptfs_daemon.mount.sets.set_maker import SetMaker
from ckptfs_daemon.mount.sets.set_refresh import SetRefresh
from ckptfs_daemon.newest_sets import load_set_order

import pyfuse3  # isort: skip

log = logging.getLogger(__name__)

Name = tuple[int, bytes]


class RuleOutcome(NamedTuple):
    """What the rule of a series has done.

    `kept`: sets that it keeps in the history. `has_deleted`: whether names were deleted. `again_s`: when to look again.
    """

    kept: frozenset[int] = frozenset()
    has_deleted: bool = False
    again_s: float | None = None


class SetReview:
    """The reviews that are due, and what the last ones found. Belongs to the trio thread."""

    def __init__(
        self,
        context: MountContext,
        changes: ChangeRunner,
        reader: MountMemberReader,
        refresh: SetRefresh,
        maker: SetMaker,
        on_unlinked: Callable[[Iterable[int]], None],
        on_chosen: Callable[[Iterable[int]], None],
    ) -> None:
        """`on_unlinked` gets inodes that have lost their last name, `on_chosen` sets chosen for the PFS."""
        self._context, self._changes, self._reader, self._refresh, self._maker = context, changes, reader, refresh, maker
        self._on_unlinked, self._on_chosen = on_unlinked, on_chosen
        self._checked: set[int] = set()
        self._retired: set[int] = set()
        self._due_s: dict[int, float] = {}  # When to review each series next.
        self._delays_s: dict[int, float] = {}  # How long the last wait was until a newer set is as safe.
        self._sets_that_lost_names: dict[int, set[int]] = defaultdict(set)
        """Sets by series of which a file lost a name."""
        self._kept_by_rule: dict[int, list[CheckpointSet]] = {}
        """The sets of each series that nothing but a rule keeps."""
        self._has_changed = True

    def schedule(self, directory: int) -> None:
        """Review a series with the next ones."""
        self._due_s[directory] = trio.current_time()

    def schedule_all(self) -> None:
        """Review all series that no review is planned of."""
        self._due_s |= {one.directory: 0.0 for one in history.list_series(self._context.db) if one.directory not in self._due_s}

    async def add_lost_name(self, directory: int, set_directory: int) -> None:
        """Review a series soon: a file of one of its sets may have lost a name."""
        if self._due_s.get(directory, math.inf) > trio.current_time() + self._refresh.get_spread_s():
            await self._context.shared_namespace.refresh_directory(directory)
            self._due_s[directory] = trio.current_time() + self._refresh.choose_delay_s()
        self._sets_that_lost_names[directory].add(set_directory)

    async def run_due(self) -> None:
        """Review the series whose time has come. A review that fails stays due."""
        for directory, due_s in list(self._due_s.items()):
            if due_s <= trio.current_time():
                del self._due_s[directory]
                try:
                    await self.review(directory)
                except (OSError, CkptfsError):
                    self._due_s.setdefault(directory, due_s)
                    raise
                self._has_changed = True
        if self._has_changed:
            await self._keep_bound()

    async def report(self) -> None:
        """Record the figures of `status`, if they have changed."""
        if not self._has_changed:
            return
        self._has_changed = False
        figures = await trio.to_thread.run_sync(_load_figures, self._context.db)
        summary.set_report(self._context.db, "sets", figures)

    async def _keep_bound(self) -> None:
        """Remove sets that nothing but a rule keeps while the history holds too many bytes, the oldest first."""
        excess = self._get_excess(await trio.to_thread.run_sync(set_members.count_history_bytes, self._context.db))
        known = {one.directory: one for sets in self._kept_by_rule.values() for one in sets}
        beyond = list_beyond([(one.directory, one.record.completed_ns, one.record.size) for one in known.values()], excess)
        self._kept_by_rule = {series: [one for one in sets if one.directory not in beyond] for series, sets in self._kept_by_rule.items()}
        for directory in beyond:
            record_expired(self._context.db, directory, "the history holds more than history_size")
            await self._maker.remove(directory)
            log.info("%s: removed from the history: it holds more than history_size", os.fsdecode(known[directory].name))

    def _get_excess(self, held_bytes: int) -> int:
        """Return how many of the bytes that only the history holds exceed its share.

        Returns 0 while the size of a tier is not known.
        """
        with contextlib.suppress(OSError, CkptfsError):
            return max(0, held_bytes - self._context.tiers.get_share_bytes(self._context.config.history_size))
        return 0

    async def review(self, directory: int) -> None:
        """Do what the rule of a series says of its sets, and remove those that nothing protects."""
        db, lost_names = self._context.db, self._sets_that_lost_names.pop(directory, set())
        await self._context.shared_namespace.refresh_directory(directory)
        if (known := history.get_series(db, directory)) is not None and not known.path:
            await self._refresh.refresh_way(directory)
            known = history.get_series(db, directory)
        if known is None:
            self._kept_by_rule.pop(directory, None)
            return
        if not known.path:  # Which rule it has is not known while the store does not answer.
            self._sets_that_lost_names[directory] |= lost_names
            self._due_s[directory] = trio.current_time() + limits.SET_REVIEW_S
            return
        listed = await trio.to_thread.run_sync(history.list_sets, db, directory)
        for number, one in enumerate(listed):
            if number < len(Level) or one.directory in lost_names:
                await self._refresh.refresh_set(one.directory, with_copies=True)
        rule = find_rule(self._context.config.retention, known.path)
        if rule is not None:
            await self._refresh_levels(directory, listed)
        facts = await trio.to_thread.run_sync(_load_facts, db, known, listed)
        ruled = RuleOutcome() if rule is None else await self._carry_out(known, rule, listed, facts)
        if ruled.has_deleted:
            facts = await trio.to_thread.run_sync(_load_facts, db, known, listed)
        if ruled.again_s is not None:
            self._due_s[directory] = trio.current_time() + ruled.again_s
        sets = {one.record.number: one for one in listed}
        reasons = retention.find_reasons(facts, None if known.rollback is None else known.rollback.number)
        self._kept_by_rule[directory] = [sets[number] for number, why in reasons.items() if not why and number in ruled.kept]
        unneeded = [number for number, why in reasons.items() if not why and number not in ruled.kept]
        if named := self._list_recently_named(sets[number] for number in unneeded):
            unneeded = [number for number in unneeded if sets[number].directory not in named]
            self._due_s[directory] = min([*named.values(), self._due_s.get(directory, math.inf)])
        for number in unneeded:
            record_expired(db, sets[number].directory, "nothing protects it")
            await self._maker.remove(sets[number].directory)
            log.info("%s: removed from the history: nothing protects it", os.fsdecode(sets[number].name))
        former_s = 0.0 if unneeded or lost_names else self._delays_s.pop(directory, 0.0)
        if any(why == {KeepReason.NEWEST} and number != facts[0].number for number, why in reasons.items()):
            self._delays_s[directory] = delay_s = min(max(2 * former_s, limits.SET_REVIEW_S), limits.SET_RETRY_MAX_S)
            due_s = trio.current_time() + delay_s + self._refresh.choose_delay_s()
            self._due_s[directory] = min(due_s, self._due_s.get(directory, due_s))

    def _list_recently_named(self, sets: Iterable[CheckpointSet]) -> dict[int, float]:
        """Return those of the sets that a program may be about to read, and until when.

        Returns none if there is no room for two more.
        """
        named = self._reader.list_recently_named()
        free = sum(capacity.free for capacity in self._context.tiers.get_local_capacities().values()) if named else 0
        return {one.directory: named[one.directory] for one in sets if one.directory in named and 2 * one.record.size < free}

    # --- the rule of a series ------------------------------------------------------------------------------------------

    async def _refresh_levels(self, series: int, sets: Iterable[CheckpointSet]) -> None:
        """Load how safe other nodes have made the sets of a series.

        Only sets that may be safer than this node knows are loaded.
        """
        shared_namespace, db = self._context.shared_namespace, self._context.db
        if not shared_namespace.is_shared:
            return
        levels = summary.list_lowest_levels(db, history.list_set_directories(db, series))
        highest = Level.CLIQUE if self._context.config.pfs is None else Level.PFS
        for one in sets:
            inodes = [] if levels.get(one.directory) is highest else [inode.id for _, inode in history.list_files(db, one.directory)]
            async with trio.open_nursery() as nursery:
                for inode in inodes:
                    nursery.start_soon(shared_namespace.refresh_inode, inode)
                    nursery.start_soon(shared_namespace.refresh_copies, inode)

    def _load(self, series: SeriesRecord, rule: RetentionRule, sets: Sequence[CheckpointSet], facts: Iterable[SetFacts]) -> RuledSeries:
        directories = {one.record.number: one.directory for one in sets}
        chosen = (
            retention_state.list_marked(self._context.db, series.directory, retention_state.CHOSEN_XATTR) if rule.selects_for_pfs else set()
        )
        names = history_names.list_set_names(self._context.db, series.directory)
        records, get_order = [one.record for one in sets], load_set_order(self._context.db, series, names)
        return RuledSeries(
            tuple(self._lower_unchecked(directories, facts)),
            {one.number: get_order(one.name, one.number) for one in records},
            {one.number: one.completed_ns for one in records},
            frozenset(one.record.number for one in sets if one.directory in chosen),
            None if series.rollback is None else series.rollback.number,
            self._context.config.pfs is not None,
            Level.CLIQUE if self._context.config.keeps_copies else Level.LOCAL,
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

    async def _carry_out(
        self, series: SeriesRecord, rule: RetentionRule, sets: Sequence[CheckpointSet], facts: Sequence[SetFacts]
    ) -> RuleOutcome:
        """Do what the rule of a series says of its sets, the newest first."""
        ruled = self._load(series, rule, sets, facts)
        if self._context.shared_namespace.is_disconnected:
            return RuleOutcome(frozenset(one.record.number for one in sets), again_s=limits.SET_REVIEW_S)
        db, ruling = self._context.db, await trio.to_thread.run_sync(apply_rule, rule, ruled)
        final = await trio.to_thread.run_sync(lambda: apply_rule(rule, assume_final(ruled, ruling)))
        if rule.selects_for_pfs:
            self._choose(series, ruled.chosen, [one for one in sets if one.record.number in ruling.for_pfs])
        self._retire(sets, ruling)
        in_place = {one.number for one in facts if one.is_in_place}
        expiring = retention_state.list_marked(db, series.directory, retention_state.EXPIRING_XATTR)
        due = [one for one in sets if one.directory in expiring or one.record.number in ruling.expired & in_place]
        deleted = {one.record.number: await self._delete_place(series, one, has_begun=one.directory in expiring) for one in reversed(due)}
        in_use = {number for number, count in deleted.items() if count is None}
        again_s = await self._reap(series, rule, sets)
        if in_use or final.expired - ruling.expired:
            again_s = min(limits.SET_REVIEW_S, again_s or limits.SET_REVIEW_S)
        return RuleOutcome(ruling.kept | in_use, any(deleted.values()), again_s)

    def _choose(self, series: SeriesRecord, chosen: Container[int], sets: Iterable[CheckpointSet]) -> None:
        """Choose sets for the PFS, and have released what is held back of them. `chosen`: by number."""
        for one in sets:
            if one.record.number not in chosen:
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

        Return their number; None if they are in use. A directory goes if all files of the set are in it; if its deletion has begun, unless
        all its files are others by now.
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

        Return their number; None if a process has something of it open. `expiring`: the set whose names these are, which is marked if they
        do not go at once.
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
                with contextlib.suppress(OSError):
                    inode = namespace.lookup(db, parent, name)
                    found.append((namespace.rmdir if inode.is_directory else namespace.unlink)(db, parent, name))
            return found

        gone = await self._context.shared_namespace.commit_shared(lambda: self._changes.run_change(act), batch)
        self._on_unlinked(inode.id for inode in gone if inode.nlink == 0)

    # --- incomplete members ------------------------------------------------------------------------------------------

    async def _reap(self, series: SeriesRecord, rule: RetentionRule, sets: Sequence[CheckpointSet]) -> float | None:
        """Delete incomplete members that no program will finish (H6).

        Return the seconds until the next may be due; None if there is none. They are older than a complete set, no process has them open,
        and nothing of them has changed for the time of the rule.
        """
        pattern = patterns.parse(series.pattern)
        if rule.incomplete_after_s is None or pattern is None or not sets:
            return None
        newest = max(pattern.get_order(one.record.numbers) for one in sets)
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


def _load_facts(db: Database, series: SeriesRecord, sets: Sequence[CheckpointSet]) -> list[SetFacts]:
    """Return the facts for the retention of the sets of a series, the newest first.

    `sets`: the last one first. Those of which not all files are known are left out. Of several sets of one name, only the last one may
    count as in its place.
    """
    with db.read_transaction():
        listed = history_names.list_set_names(db, series.directory)
        directories, get_order = [one.directory for one in listed], load_set_order(db, series, listed)
        levels, known = summary.list_lowest_levels(db, directories), set_members.list_known_sets(db, directories)
    found, names, orders = [], set(), {one.record.number: get_order(one.record.name, one.record.number) for one in sets}
    for one in sets:
        if one.directory in known and one.directory in levels:
            is_in_place = known[one.directory] and one.record.name not in names
            found.append(SetFacts(one.record.number, levels[one.directory], is_in_place, one.is_pinned, one.record.size))
        names.add(one.record.name)
    return sorted(found, key=lambda one: orders[one.number], reverse=True)


def _load_figures(db: Database) -> dict[str, int]:
    """Return how many series and sets there are, and the bytes that only the history holds."""
    directories = [one.directory for one in history.list_series(db)]
    sets = sum(len(history.list_sets(db, directory)) for directory in directories)
    return {"series": len(directories), "sets": sets, "bytes": set_members.count_history_bytes(db)}


def _list_older(series: Series, names: Iterable[bytes], newest: Order) -> list[tuple[Member | None, tuple[bytes, ...]]]:
    """Return the members of a series before `newest` in their order, with their names.

    Temporary names of such members follow, without a member.
    """
    known = list(names)
    found: list[tuple[Member | None, tuple[bytes, ...]]] = [
        (one, one.files) for one in patterns.list_members(series, known) if series.get_order(one.numbers) < newest
    ]
    part = re.compile(rb"([0-9]+)".join(map(re.escape, series.texts)), re.DOTALL)
    for name in known:
        match = part.search(name) if patterns.is_temporary(name) else None
        numbers = None if match is None else series.parse_numbers(match[0])
        if numbers is not None and series.get_order(numbers) < newest:
            found.append((None, (name,)))
    return found


def _format(series: SeriesRecord) -> str:
    return series.path.decode(errors="backslashreplace")
