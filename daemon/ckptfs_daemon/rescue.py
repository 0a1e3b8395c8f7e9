"""A drain that may run out of time: urgent files first, and a report of what is safe (G1).

`Rescue` keeps the order of urgency in the catalog up to date, from which replication and write-back take their work. Files that are still
open are not waited for: once the most urgent members are safe, or half of the time has passed, their present bytes are sent to other
nodes as for an fsync. To the PFS they go with their close only.

Crash safety: the order ends with its time, and the next mover deletes it. Requests for open files are rows that the next mover answers.
"""

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence

from ckptfs import limits
from ckptfs.catalog import exposure, history, history_names, inodes, mover_requests, peer_copies, pfs_hold, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.exposure import ExposedFile, UrgentOrder
from ckptfs.config import Config
from ckptfs.errors import InvalidArgument
from ckptfs.model import Level
from ckptfs.protocol import control_pb2 as pb
from ckptfs.series import urgency
from ckptfs.series.patterns import Member, Series
from ckptfs.series.set_kinds import text
from ckptfs.series.urgency import SeriesIndex, UnsafeMember

log = logging.getLogger(__name__)

MEMBERS_LOOKED_AT_MAX = 100
SHOWN_HISTORY = b".ckptfs/history"
LOGGED_SERIES_MAX = 100
ORDER_VALID_S = 3600.0


def parse_drain_level(config: Config, text: str) -> Level | None:
    """Return the level of a drain by its name; the highest one for "". Raises InvalidArgument."""
    if not text:
        return config.highest_level
    if text not in (Level.CLIQUE, Level.PFS):
        raise InvalidArgument(f"{text[:20]!r} is not a level to drain to; accepted: clique, pfs")
    if text == Level.PFS and config.pfs is None:
        raise InvalidArgument("this mount has no PFS", remedy="drain to the level clique, or mount it with pfs=DIRECTORY")
    if text == Level.CLIQUE and config.cluster is None:
        raise InvalidArgument("this mount belongs to no cluster", remedy="drain to the level pfs, or mount it with cluster=NAME")
    if text == Level.CLIQUE and not config.keeps_copies:
        raise InvalidArgument("this cluster keeps one copy of each file", remedy="drain to the level pfs, or raise replication_factor")
    return Level(text)


def get_needed_s(size_bytes: int, changes: int, bytes_per_s: float) -> float:
    """Return how long write-back takes for so much. `bytes_per_s`: the speed of the PFS, 0 if unknown."""
    return size_bytes / (bytes_per_s or limits.PFS_BYTES_PER_S_ASSUMED) + changes * limits.DRAIN_FILE_S


class Rescue:
    """One drain to a level. Not thread-safe: one thread at a time calls it."""

    def __init__(
        self, db: Database, level: Level, deadline_s: float | None, retry_now: Callable[[], None] = lambda: None, *, is_last: bool = False
    ) -> None:
        """`deadline_s` from now; None: there is time for everything. `retry_now` runs all lanes.

        `is_last`: the node may not come back, so the newest member of each series goes to the PFS even if a rule holds it back.
        """
        self._db = db
        self._level = level
        self.is_last = is_last
        self._retry_now = retry_now
        self._began_ns = time.time_ns()
        self._began_s = time.monotonic()
        self._deadline_s = math.inf if deadline_s is None else deadline_s
        self._refreshed_s = -math.inf
        self._order = UrgentOrder(token=secrets.token_hex(8))
        self._touched: dict[tuple[int, bytes], Series] = {}
        self._requests: dict[int, int] = {}
        self._secured_s: float | None = None
        self._had_files = False

    def refresh_if_due(self) -> None:
        """Look again what is urgent, unless that was done a moment ago."""
        begun_s = time.monotonic()
        if begun_s < self._refreshed_s:
            return
        index = self._build_index()
        if self.is_last and self._level is Level.PFS:
            self._release_newest(index)
        files = exposure.list_exposed(self._db, self._level)
        members, loose = urgency.list_unsafe_members(files, index)
        first, groups = urgency.choose_order(members, loose, lambda one: urgency.is_whole(one, index, self._count_files))
        self._had_files = self._had_files or bool(files)
        self._touched |= {(one.place.directory, one.place.series.name): one.place.series for one in members}
        self._publish(files, groups)
        half_over = time.monotonic() - self._began_s > self._deadline_s / 2
        if self._secured_s is None and (half_over or not any(one.inodes for one in first)):
            self._secure_open_files(files)
        now_s = time.monotonic()
        self._refreshed_s = now_s + max(limits.URGENT_INTERVAL_S, 10 * (now_s - begun_s))

    def is_securing(self) -> bool:
        """Return True, for a bounded time, while open files are copied. Call it when closed files are safe."""
        if self._secured_s is None:
            self._secure_open_files(exposure.list_exposed(self._db, self._level))
        left_s = min(self._get_left_s(), (self._secured_s or 0.0) + limits.SECURE_WAIT_S - time.monotonic())
        return left_s > 0 and self._count_secured() < len(self._requests)

    def count_left(self) -> tuple[int, int]:
        """Return (files, bytes) of what was closed before the drain began and lacks the level."""
        exposed = exposure.list_exposed(self._db, self._level)
        left = [file.size for file in exposed if not file.is_open and file.closed_ns <= self._began_ns]
        return len(left), sum(left)

    def build_safety(self) -> pb.Safety:
        """Return what is safe now of all that the drain had to do with."""
        files, index = exposure.list_exposed(self._db, self._level), self._build_index()
        members, loose = urgency.list_unsafe_members(files, index)
        self._touched |= {(one.place.directory, one.place.series.name): one.place.series for one in members}
        unsafe = {one.place.key: one for one in members}
        found = [self._build_series(directory, series, index, unsafe) for (directory, _), series in self._touched.items()]
        shown = sorted((one for one in found if one is not None), key=lambda one: one.series)
        closed = [file for file in loose if not file.is_open]
        return pb.Safety(
            level=self._level.value,
            series=shown,
            other_files=len(closed),
            other_bytes=sum(file.size for file in closed),
            open_files=sum(file.is_open for file in files),
            secured_files=self._count_secured(),
        )

    def end(self) -> None:
        """Take back the order, and log the report if there was anything to do."""
        exposure.delete_order(self._db, self._order.token)
        if not self._had_files:
            return
        lines = urgency.list_safety_lines(self.build_safety()) or [f"all files have the level {self._level.value}"]
        for line in lines[:LOGGED_SERIES_MAX]:
            log.info("drain: %s", line)

    # --- the order ----------------------------------------------------------------------------------------------------

    def _publish(self, files: Sequence[ExposedFile], groups: Sequence[tuple[int, ...]]) -> None:
        """Publish the order if it is another one than before, apart from files that are safe by now."""
        left = {file.inode for file in files if not file.is_open}
        known = [kept for group in self._order.groups if (kept := tuple(inode for inode in group if inode in left))]
        is_ahead = self._order.is_ahead or self._is_short_of_time(files)
        bounded = _take_files(groups, limits.URGENT_FILES_MAX)
        if known == bounded and is_ahead == self._order.is_ahead:
            return
        self._order = UrgentOrder(tuple(bounded), is_ahead, self._order.token)
        exposure.set_order(self._db, self._order, min(ORDER_VALID_S, self._get_left_s() + limits.STOP_WAIT_S))
        self._retry_now()

    def _is_short_of_time(self, files: Sequence[ExposedFile]) -> bool:
        """Return whether the PFS will not take all of these files in time, by its measured speed."""
        closed = [file for file in files if not file.is_open]
        needed_s = get_needed_s(sum(file.size for file in closed), len(closed), summary.get_pfs_speed(self._db))
        return self._level is Level.PFS and needed_s > self._get_left_s()

    def _get_left_s(self) -> float:
        return max(0.0, self._began_s + self._deadline_s - time.monotonic())

    def _release_newest(self, index: SeriesIndex) -> None:
        """Release the newest whole member of each series, unless a newer one goes to the PFS."""
        members, _ = urgency.list_unsafe_members(exposure.list_held(self._db), index)
        held = {(one.place.directory, one.place.series.name, one.place.member.name): one for one in members}
        for directory, series in {(one.place.directory, one.place.series) for one in members}:
            for member in index.list_members(directory, series)[:MEMBERS_LOOKED_AT_MAX]:
                found = held.get((directory, series.name, member.name))
                if found is None and self._count_files(directory, member):
                    break
                if found is not None and urgency.is_whole(found, index, self._count_files):
                    with self._db.transaction():
                        for child in exposure.list_children(self._db, directory, member.files):
                            pfs_hold.release_tree(self._db, child)
                    break

    # --- open files ---------------------------------------------------------------------------------------------------

    def _secure_open_files(self, files: Sequence[ExposedFile]) -> None:
        """Request copies of the present bytes of open files on other nodes."""
        self._secured_s = time.monotonic()
        if peer_copies.get_replication_factor(self._db) < 2 or not peer_copies.count_domains(self._db).are_enough:
            return
        wait_s = min(ORDER_VALID_S, self._get_left_s() + limits.STOP_WAIT_S)
        for file in files:
            if file.is_open:
                kind = mover_requests.REPLICATE_NOW
                self._requests[file.inode] = mover_requests.insert_request(self._db, kind, file.inode, wait_s=wait_s)
        self._retry_now()

    def _count_secured(self) -> int:
        answers = (mover_requests.get(self._db, request) for request in self._requests.values())
        return sum(answer is not None and answer.state == mover_requests.DONE for answer in answers)

    # --- the report ---------------------------------------------------------------------------------------------------

    def _build_series(
        self, directory: int, series: Series, index: SeriesIndex, unsafe: dict[tuple[int, bytes, bytes], UnsafeMember]
    ) -> pb.SeriesSafety | None:
        newest: Member | None = None
        safe: Member | None = None
        for member in index.list_members(directory, series)[:MEMBERS_LOOKED_AT_MAX]:
            if not self._count_files(directory, member):
                continue
            newest = newest or member
            if (directory, series.name, member.name) not in unsafe and not any(self._find_pfs_obstacles(directory, member)):
                safe = member
                break
        if newest is None or (safe is newest and inodes.is_history(self._db, directory)):
            return None  # The application's own names tell the same.
        figures = self._load_figures(directory, newest)
        lacking = unsafe.get((directory, series.name, newest.name))
        names_pending, held = self._find_pfs_obstacles(directory, newest)
        above = inodes.get_path(self._db, directory)
        path = b"/".join(part for part in (above, series.name) if part).replace(history.NAME, SHOWN_HISTORY, 1)
        return pb.SeriesSafety(
            series=text(path), name=text(newest.name), level=(figures.level or Level.NONE).value, safe=safe is newest,
            files=figures.files, bytes=figures.size,
            missing_files=len(lacking.inodes) if lacking else 0, missing_bytes=lacking.size if lacking else 0,
            open_files=lacking.open_files if lacking else 0, safe_name=text(safe.name) if safe else "",
            safe_level=(self._load_figures(directory, safe).level or Level.NONE).value if safe else "",
            names_pending=names_pending, held=held,
        )  # fmt: skip

    def _find_pfs_obstacles(self, directory: int, member: Member) -> tuple[bool, bool]:
        """Return whether the PFS has yet to learn names of a member, and whether a rule holds it back."""
        if self._level is not Level.PFS:
            return False, False
        roots = exposure.list_children(self._db, directory, member.files)
        return exposure.has_pending_names(self._db, roots), exposure.has_held(self._db, roots)

    def _build_index(self) -> SeriesIndex:
        return SeriesIndex(lambda directory: exposure.list_names(self._db, directory), self._sort_members)

    def _sort_members(self, directory: int, series: Series, members: list[Member]) -> list[Member]:
        """Put what a rollback passes over last."""
        record = history.find_series(self._db, directory, series.name)
        if record is None or (rollback := record.rollback) is None:
            return members
        sets = history_names.list_set_names(self._db, record.directory)
        target = next((one.member for one in sets if one.number == rollback.number), b"")

        def get_era(member: Member) -> int:
            roots = exposure.list_children(self._db, directory, member.files)
            return 2 if exposure.get_last_close_ns(self._db, roots) > rollback.at_ns else int(member.name == target)

        return sorted(members, key=get_era, reverse=True)

    def _count_files(self, directory: int, member: Member) -> int:
        return self._load_figures(directory, member).files

    def _load_figures(self, directory: int, member: Member) -> summary.TreeFigures:
        return summary.load_tree_figures(self._db, exposure.list_children(self._db, directory, member.files))


def _take_files(groups: Sequence[tuple[int, ...]], at_most: int) -> list[tuple[int, ...]]:
    """Return the first groups, of `at_most` files."""
    found: list[tuple[int, ...]] = []
    for group in groups:
        kept = group[:at_most]
        at_most -= len(kept)
        if kept:
            found.append(kept)
    return found
