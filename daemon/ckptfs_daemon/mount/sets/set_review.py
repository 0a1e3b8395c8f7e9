"""The reviews of series: which sets stay in the history, and the removal of the others.

A series is reviewed after a set of it was made, after a file of it lost a name, and at the start. `retention` and the rule of the series
(`SetExpiry`) say what stays. A review is repeated while an older set only waits until a newer one is as safe, while a program may be about
to read a set, and when the rule says so. If the history holds more than `history_size`, the oldest sets that only a rule keeps go.

Crash safety: nothing is stored. The next process reviews all series.
"""

import logging
import math
import os
from collections import defaultdict
from collections.abc import Iterable

import trio

from ckptfs import limits
from ckptfs.catalog import history, set_members, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import CheckpointSet
from ckptfs.errors import CkptfsError
from ckptfs.model import Level
from ckptfs.series import retention
from ckptfs.series.expiry import list_beyond
from ckptfs.series.retention import KeepReason, SetFacts
from ckptfs_daemon.mount.context import MountContext
from ckptfs_daemon.mount.sets.member_reader import MountMemberReader
from ckptfs_daemon.mount.sets.set_events import record_expired
from ckptfs_daemon.mount.sets.set_expiry import SetExpiry
from ckptfs_daemon.mount.sets.set_maker import SetMaker
from ckptfs_daemon.mount.sets.set_refresh import SetRefresh

log = logging.getLogger(__name__)


class SetReview:
    """The reviews that are due, and what the last ones found. Belongs to the trio thread."""

    def __init__(self, context: MountContext, reader: MountMemberReader, refresh: SetRefresh, maker: SetMaker, expiry: SetExpiry) -> None:
        self._context, self._reader, self._refresh = context, reader, refresh
        self._maker, self._expiry = maker, expiry
        self._due_s: dict[int, float] = {}
        """When to review each series next."""
        self._delays_s: dict[int, float] = {}
        """How long the last wait was until a newer set is as safe."""
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
        if directory not in self._due_s:
            await self._refresh.refresh_series(directory)
            self._due_s[directory] = trio.current_time() + self._refresh.choose_delay_s()
        self._sets_that_lost_names[directory].add(set_directory)

    async def run_due(self) -> None:
        """Review the series whose time has come. A review that fails stays due."""
        for directory, due_s in list(self._due_s.items()):
            if due_s <= trio.current_time():
                del self._due_s[directory]
                try:
                    await self._review(directory)
                except (OSError, CkptfsError):
                    self._due_s.setdefault(directory, due_s)
                    raise
                self._has_changed = True
        if self._has_changed:
            await self._keep_bound()

    async def _keep_bound(self) -> None:
        """Remove sets that nothing but a rule keeps while the history holds too many bytes, the oldest first."""
        excess = self._expiry.get_excess(await trio.to_thread.run_sync(set_members.count_history_bytes, self._context.db))
        known = {one.directory: one for sets in self._kept_by_rule.values() for one in sets}
        beyond = list_beyond([(one.directory, one.record.completed_ns, one.record.size) for one in known.values()], excess)
        self._kept_by_rule = {series: [one for one in sets if one.directory not in beyond] for series, sets in self._kept_by_rule.items()}
        for directory in beyond:
            record_expired(self._context.db, directory, "the history holds more than history_size")
            await self._maker.remove(directory)
            log.info("%s: removed from the history: it holds more than history_size", os.fsdecode(known[directory].name))

    async def _review(self, directory: int) -> None:
        """Remove the sets of a series that nothing protects."""
        db, lost_names = self._context.db, self._sets_that_lost_names.pop(directory, set())
        await self._refresh.refresh_series(directory)
        known = history.get_series(db, directory)
        if known is None:
            self._kept_by_rule.pop(directory, None)
            return
        listed = await trio.to_thread.run_sync(history.list_sets, db, directory)
        for number, one in enumerate(listed):
            if number < len(Level) or one.directory in lost_names:
                await self._refresh.refresh_set(one.directory, with_copies=True)
        await self._expiry.refresh(known, listed)
        facts = await trio.to_thread.run_sync(_load_facts, db, directory, listed)
        ruled = await self._expiry.review(known, listed, facts)
        if ruled.has_deleted:
            facts = await trio.to_thread.run_sync(_load_facts, db, directory, listed)
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
        if any(why == {KeepReason.NEWEST} and number != max(sets) for number, why in reasons.items()):
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

    async def report(self) -> None:
        """Record the figures of `status`, if they have changed."""
        if not self._has_changed:
            return
        self._has_changed = False
        figures = await trio.to_thread.run_sync(_load_figures, self._context.db)
        summary.set_report(self._context.db, "sets", figures)


def _load_facts(db: Database, directory: int, sets: Iterable[CheckpointSet]) -> list[SetFacts]:
    """Return the facts for the retention of the sets of a series, newest first.

    Sets of which not all files are known are left out.

    Of several sets of one name, only the newest may count as in its place.
    """
    with db.read_transaction():
        directories = history.list_set_directories(db, directory)
        levels, known = summary.list_lowest_levels(db, directories), set_members.list_known_sets(db, directories)
    found, names = [], set()
    for one in sets:
        if one.directory in known and one.directory in levels:
            is_in_place = known[one.directory] and one.record.name not in names
            found.append(SetFacts(one.record.number, levels[one.directory], is_in_place, one.is_pinned, one.record.size))
        names.add(one.record.name)
    return found


def _load_figures(db: Database) -> dict[str, int]:
    """Return how many series and sets there are, and the bytes that only the history holds."""
    directories = [one.directory for one in history.list_series(db)]
    sets = sum(len(history.list_sets(db, directory)) for directory in directories)
    return {"series": len(directories), "sets": sets, "bytes": set_members.count_history_bytes(db)}
