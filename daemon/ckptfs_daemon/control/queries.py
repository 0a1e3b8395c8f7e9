"""Replies to queries: status, records of files, and waits. Reads the catalog and tiers, never the PFS.

Inode numbers come from the client's own stat(2) through the mount. Any user may ask about any number. So digests are never returned, and
names only of directories that every user may list (`public_listings`).

`LevelCheck` is one wait. It checks a bounded number of inodes at a time, and fewer while they lack the level, so that waiting for a large
tree stays cheap. Changes made after the wait began do not count: it ends at the last row that the journal had then.
"""

import errno
import functools
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import grpc

from ckptfs import limits
from ckptfs.catalog import handles, history_names, inodes, namespace, pfs_hold, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.summary import ListedFile
from ckptfs.config.schema import list_effective
from ckptfs.errors import ContentLost, InvalidArgument, posix_error
from ckptfs.event_log import Position
from ckptfs.lifecycle import is_on_pfs
from ckptfs.model import WAITABLE_LEVELS, ContentState, Level
from ckptfs.protocol import control_pb2 as pb
from ckptfs.protocol import control_pb2_grpc as rpc
from ckptfs.series.completeness import find_incomplete_reason
from ckptfs_daemon.control import public_listings
from ckptfs_daemon.control.control_context import ControlContext
from ckptfs_daemon.control.methods import is_inode_number, require_inode_number, stream_changes, translate_errors, translate_stream_errors
from ckptfs_daemon.control.status import build_capacity

CHECKED_MAX = 4096
INCOMPLETE_MAX = 64
POLL_FIRST_S = 0.02
POLL_LAST_S = 0.5
REST_RATIO = 4
REFRESH_INTERVAL_S = 2.0
START_NODES = "start the nodes that are down, and see that they reach etcd"


class LevelCheck:
    """A file, or all below a directory, on its way to the level `wanted`. Raises ENOENT if it is missing.

    For the level pfs, names that this node removed below a directory must be gone from the PFS, too. What retention rules hold back there
    does not count. If that is what the wait is for, it goes on while the checkpoint may still be chosen; else InvalidArgument is raised.
    """

    def __init__(
        self, db: Database, inode: int, wanted: Level, load_file: Callable[[int], ListedFile | None], below: Iterable[int] = ()
    ) -> None:
        """`below`: inodes below a directory of which the catalog may not know the names."""
        if load_file(inode) is None:
            raise posix_error(errno.ENOENT)
        self._db = db
        self._load_file = load_file
        self._wanted = wanted
        self._end = summary.get_journal_end(db)
        self._held = inode if wanted is Level.PFS and pfs_hold.is_held(db, inode) else None
        inodes_below = sorted(namespace.list_inodes_below(db, inode).union(below))
        self._remaining = deque(inodes_below)
        self._directories = namespace.list_directories(db, inodes_below) if wanted is Level.PFS else []
        self._bytes: dict[int, int] = {}
        self._non_files: set[int] = set()
        self._has_writers = self._is_on_dead_nodes = False

    @property
    def remaining_sample(self) -> list[int]:
        """Some of the inodes that still lack the level."""
        return [inode for inode, _ in zip(self._remaining, range(INCOMPLETE_MAX), strict=False)]

    def check_next(self, copied: Mapping[int, int]) -> pb.Progress:
        """Check the next inodes. Returns what is left, less the bytes `copied` of files that are under way.

        Raises ContentLost if one will never have the level.
        """
        self._has_writers = self._is_on_dead_nodes = False
        incomplete_count = 0
        for _ in range(min(len(self._remaining), CHECKED_MAX)):
            inode = self._remaining.popleft()
            if self._check_inode(inode):
                self._bytes.pop(inode, None)
                self._non_files.discard(inode)
                continue
            self._remaining.append(inode)
            incomplete_count += 1
            if incomplete_count == INCOMPLETE_MAX:
                break
        # Inodes that were not checked yet count as files of unknown size.
        files = len(self._remaining) - len(self._non_files)
        size = sum(max(0, size - copied.get(inode, 0)) for inode, size in self._bytes.items())
        names = summary.count_names_left(self._db, self._directories, self._end) if self._directories else 0
        self._directories = self._directories if names else []
        is_done, changes = not (self._remaining or names), len(self._non_files) + names
        progress = pb.Progress(done=is_done, files_left=files, bytes_left=size, changes_left=changes)
        if self._has_writers:
            progress.blocked_by, progress.remedy = "a file is still open for writing", "close it"
        elif self._is_on_dead_nodes:
            progress.blocked_by, progress.remedy = "no node that is alive has a copy", START_NODES
        elif self._held is not None and pfs_hold.is_held(self._db, self._held):
            progress.blocked_by = "a retention rule sends only some sets to the PFS, and this one is not complete yet"
        return progress

    def _check_inode(self, inode: int) -> bool:
        found = self._load_file(inode)
        if found is None or (self._wanted is Level.PFS and self._is_left_out(inode)):
            return True
        if not stat.S_ISREG(found.mode):
            self._non_files.add(inode)
            return self._wanted is not Level.PFS or not summary.has_pending(self._db, inode, self._end)
        content = found.record.content
        if content is not None and content.state is ContentState.LOST and not is_on_pfs(found.record):
            path = inodes.get_shown_path(self._db, inode)
            raise ContentLost(f"{path} is lost: no copy of its content is left", remedy="write it again, or delete it")
        self._bytes[inode] = found.size
        if content is not None and content.state in {ContentState.OPEN, ContentState.CLOSED}:
            # A closed file survives the processes of the daemon, but only a sealed one is a checkpoint.
            self._has_writers |= content.state is ContentState.OPEN
            return False
        self._is_on_dead_nodes |= content is not None and content.is_remote and found.level is Level.NONE
        if self._wanted is not Level.PFS:
            return found.level.rank >= self._wanted.rank
        return found.level is Level.PFS and not summary.has_pending(self._db, inode, self._end)

    def _is_left_out(self, inode: int) -> bool:
        """Return True if a rule keeps an inode off the PFS. Raises InvalidArgument if the wait is for that."""
        if self._held is None:
            return pfs_hold.is_held(self._db, inode)
        if pfs_hold.is_left_out(self._db, self._held):
            path = inodes.get_shown_path(self._db, self._held)
            remedy = "`ckptfs pin` its set, which then goes there; or wait for another level"
            raise InvalidArgument(f"{path} does not go to the PFS: a retention rule sends only some sets there", remedy=remedy)
        return False


class QueryService(rpc.QueriesServicer):  # type: ignore[misc]
    def __init__(self, context: ControlContext) -> None:
        self.refused = context.refused
        self._context, self._config, self._db, self._cluster = context, context.config, context.db, context.cluster
        self._load_file = self._cluster.load_file if self._cluster is not None else functools.partial(summary.get_listed_file, context.db)
        self._waits = threading.BoundedSemaphore(limits.CONTROL_WAITS_MAX)

    @translate_errors
    def GetStatus(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.Status:
        return self.build_status()

    def build_status(self) -> pb.Status:
        """Build the figures of the mount, for `ckptfs status` and for the metrics."""
        status = self._context.figures.build_status()
        refused = {"control": self.refused.get_counts()}
        if self._cluster is not None:
            status.clique.CopyFrom(self._cluster.build_clique())
            if self._config.replication_factor > 1 and (missing := self._cluster.find_missing_domains()):
                status.troubles.add(where="clique", what=missing, remedy=START_NODES)
                status.health = "degraded"
            refused["peers"] = self._cluster.get_rejections()
        for where, callers in refused.items():
            for who, counts in sorted(callers.items()):
                for reason, count in sorted(counts.items()):
                    status.refused.add(where=where, who=who, reason=reason, count=count)
        return status

    @translate_errors
    def GetCluster(self, request: pb.ClusterRequest, context: grpc.ServicerContext) -> pb.Cluster:
        if self._cluster is None:
            raise InvalidArgument("this mount belongs to no cluster", remedy="mount it with cluster=NAME and etcd=HOST:PORT")
        return self._cluster.build_probed_cluster() if request.probe else self._cluster.build_cluster()

    @translate_errors
    def GetCapacity(self, request: pb.CapacityRequest, context: grpc.ServicerContext) -> pb.Capacity:
        """Return the capacity of this node for the next checkpoint."""
        return build_capacity(self._config, self._db, self._context.tiers)

    @translate_errors
    def GetConfig(self, request: pb.ConfigRequest, context: grpc.ServicerContext) -> pb.ConfigReply:
        """Return the effective settings, and where each was given."""
        found = list_effective(self._config)
        return pb.ConfigReply(settings=[pb.ConfigSetting(name=name, value=value, origin=origin) for name, value, origin in found])

    @translate_errors
    def List(self, request: pb.ListRequest, context: grpc.ServicerContext) -> pb.ListReply:
        """Return the record of each inode."""
        if len(request.inodes) > limits.CONTROL_LIST_MAX:
            raise InvalidArgument(f"{len(request.inodes)} inodes in one question; accepted: up to {limits.CONTROL_LIST_MAX}")
        under_way, open_handles = self._context.figures.get_current_write_back(), handles.count_by_inode(self._db)
        if self._cluster is not None:
            self._cluster.refresh_copies([inode for inode in request.inodes if is_inode_number(inode)])
        records = [self._build_record(inode, under_way, trees=request.trees) for inode in request.inodes]
        for record in records:
            record.open_handles = open_handles.get(record.inode, 0)
        return pb.ListReply(records=records)

    def _build_record(self, inode: int, under_way: dict[str, Any], *, trees: bool) -> pb.Record:
        asked, inode = inode, history_names.get_known_number(self._db, inode)
        found = self._load_file(inode) if is_inode_number(inode) else None
        if found is None:
            return pb.Record(inode=asked, known=False)
        answer = pb.Record(
            inode=inode,
            known=True,
            kind=_get_kind_name(found.mode),
            mode=found.mode,
            size=found.size,
            generation=found.generation,
            pfs_pending=found.has_pending_changes,
        )
        if trees and stat.S_ISDIR(found.mode):
            figures = summary.load_tree_figures(self._db, [inode])
            answer.size, answer.level = figures.size, figures.level or ""
        if stat.S_ISREG(found.mode):
            answer.level = found.level.value
            answer.state = _get_state_name(found)
            answer.incomplete_reason = find_incomplete_reason(found.record, found.size)
            copied_ratio = _get_copied_ratio(under_way) if under_way.get("inode") == inode else 0.0
            answer.progress = 1.0 if self._has_highest_level(found) else copied_ratio
            now = time.time_ns()
            for tier, state, verified_ns in summary.list_copy_places(self._db, inode, found.record):
                answer.copies.add(tier=tier, state=state, verified_age_s=(now - verified_ns) / 1e9 if verified_ns else -1.0)
        return answer

    def _has_highest_level(self, found: ListedFile) -> bool:
        if self._config.pfs is not None:
            return is_on_pfs(found.record)
        return found.record.content is None or found.record.content.state is ContentState.SEALED

    @translate_errors
    def ListSeries(self, request: pb.ListSeriesRequest, context: grpc.ServicerContext) -> pb.ListSeriesReply:
        return public_listings.list_series(self._db, with_figures=request.figures)

    @translate_errors
    def ListEvents(self, request: pb.EventsRequest, context: grpc.ServicerContext) -> pb.EventList:
        """Return some events of the log."""
        return public_listings.list_events(self._db, self._config.state, Position(request.file, request.offset), request.since_ns)

    @translate_stream_errors
    def ListSets(self, request: pb.ListSetsRequest, context: grpc.ServicerContext) -> Iterator[pb.SetList]:
        """Stream the checkpoint sets of a series."""
        refresh_files = self._cluster.refresh_files if self._cluster is not None else lambda inodes: None
        yield from public_listings.list_sets(self._db, require_inode_number(request.directory), refresh_files)

    @translate_stream_errors
    def Wait(self, request: pb.WaitRequest, context: grpc.ServicerContext) -> Iterator[pb.Progress]:
        """Stream how far a file, or a directory with everything below it, is from a level, until it has it."""
        wanted = self._parse_level(request.level)
        if not self._waits.acquire(blocking=False):
            raise OSError(errno.EUSERS, f"{limits.CONTROL_WAITS_MAX} waits are under way already; try again later")
        try:
            inode = history_names.get_known_number(self._db, require_inode_number(request.inode))
            yield from stream_changes(self._check_level(inode, wanted), context)
        finally:
            self._waits.release()

    def _parse_level(self, text: str) -> Level:
        if text not in WAITABLE_LEVELS:
            raise InvalidArgument(f"{text[:20]!r} is not a level that can be waited for; accepted: {', '.join(WAITABLE_LEVELS)}")
        if text == Level.CLIQUE and not self._config.keeps_copies:
            raise InvalidArgument(
                "this mount keeps no copies on other nodes, so no file will ever reach the level clique",
                remedy="mount it with cluster=NAME, etcd=HOST:PORT and a replication_factor of at least 2",
            )
        if text == Level.PFS and self._config.pfs is None:
            raise InvalidArgument("this mount has no PFS, so no file will ever reach the level pfs", remedy="mount it with pfs=DIRECTORY")
        return Level(text)

    def _check_level(self, inode: int, wanted: Level) -> Iterator[pb.Progress]:
        below = self._cluster.load_below(inode) if self._cluster is not None else ()
        level_check = LevelCheck(self._db, inode, wanted, self._load_file, below)
        self._context.wake_lanes()  # A wait does not depend on a hint that may be lost.
        pause, before, refreshed_at = POLL_FIRST_S, pb.Progress(), 0.0
        while True:
            if self._cluster is not None and time.monotonic() - refreshed_at > REFRESH_INTERVAL_S:
                self._cluster.refresh_files(level_check.remaining_sample)
                refreshed_at = time.monotonic()
            seen_count, begun = self._context.progress.count, time.monotonic()
            progress = level_check.check_next(summary.get_copied_bytes(self._db))
            check_s = time.monotonic() - begun
            if not progress.done and not progress.blocked_by:
                progress.blocked_by, progress.remedy = self._find_obstacle(wanted)
            yield progress
            # The client's deadline or its disconnection ends a wait. Each change in the mover wakes it, but checking takes only a small
            # share of the time, and becomes rarer while nothing changes.
            threading.Event().wait(REST_RATIO * check_s)
            self._context.progress.wait(seen_count, pause)
            pause = min(2 * pause, POLL_LAST_S) if progress == before else POLL_FIRST_S
            before = progress

    def _find_obstacle(self, wanted: Level) -> tuple[str, str]:
        if wanted is Level.CLIQUE and self._cluster is not None and (missing := self._cluster.find_missing_domains()):
            return missing, START_NODES
        return summary.find_obstacle(self._db)


def _get_copied_ratio(under_way: dict[str, Any]) -> float:
    """Return the copied share of the file that is being written back; 1 only once it is published."""
    return min(0.99, float(under_way.get("copied_bytes", 0)) / max(1, int(under_way.get("size_bytes", 0))))


def _get_kind_name(mode: int) -> str:
    return {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}.get(stat.S_IFMT(mode), "other")


def _get_state_name(found: ListedFile) -> str:
    """Return the state of the content; without one on this node a file is on the PFS, remote or empty."""
    content = found.record.content
    if content is None:
        return "published" if found.record.published is not None else "remote" if found.size else "empty"
    return content.state.name.lower()
