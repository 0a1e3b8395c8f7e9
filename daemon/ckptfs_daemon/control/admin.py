"""Admin calls of the mount's owner: drain, verify, refresh, log level. The mover's flows do the work.

`FileVerifier` reads every copy of a file, the one on the PFS included, and compares it with the file's seal. Bad copies in tiers are
quarantined and remade from a good copy. If this node has none, the file is fetched from another node or the PFS. A bad file on the PFS is
only reported, because another program may have written it.

Crash safety: a request is a row in the catalog, which the next mover handles, or it is lost with the client's connection, and the
client sees that. The results of a verification stand in the catalog as far as it came.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc

from ckptfs import disk, limits
from ckptfs.catalog import copies, history_names, mover_requests, namespace, summary
from ckptfs.catalog.inodes import get_shown_path
from ckptfs.coherence import key_state, store_loss
from ckptfs.config.schema import LOG_LEVELS
from ckptfs.errors import Busy, CkptfsError, InvalidArgument, TimedOut, posix_error
from ckptfs.event_log import EventKind
from ckptfs.flow import verify
from ckptfs.lifecycle import FileRecord
from ckptfs.model import Content, ContentState, Level, PublishedRow
from ckptfs.protocol import control_pb2 as pb
from ckptfs.protocol import control_pb2_grpc as rpc
from ckptfs.tiers import pfs_tree, transfer
from ckptfs_daemon import logs
from ckptfs_daemon.control.control_context import ControlContext
from ckptfs_daemon.control.methods import require_inode_number, stream_changes, translate_errors, translate_stream_errors
from ckptfs_daemon.drain import DrainEnd, get_end, load_pending, record_result
from ckptfs_daemon.event_writer import events
from ckptfs_daemon.ipc import Successor
from ckptfs_daemon.rescue import Rescue, parse_drain_level

FETCH_POLL_S = 0.02
GOOD, BAD, UNREADABLE, UNKNOWN = "good", "bad", "unreadable", "unknown"

PFS_CHANGED_TEXT = {
    errno.ESTALE: "was changed by another program. `ckptfs refresh` of its directory takes that version and drops the copies here: to keep "
    "yours, write the file again, or copy it to another name first",
    errno.ENOENT: "is no longer on the PFS",
}
POLL_S = 0.05
REST_RATIO = 20
RETRY_INTERVAL_S = 1.0
PROGRESS_INTERVAL_S = 0.5
LOG_LEVEL_WAIT_S = 10.0
REFRESH_WAIT_S = 3600.0
VERIFICATIONS_MAX = 4
"""Fewer than `server.ADMIN_CALLS_MAX`. Each hangs as long as the PFS does, even if its caller has gone; a drain must find a thread then."""


class FileVerifier:
    """Verifies one file at a time."""

    def __init__(self, context: ControlContext) -> None:
        self._config, self._db, self._tiers, self._retry_now = context.config, context.db, context.tiers, context.retry_now
        self._refresh_pfs_path, self._invalidate_inode = context.refresh_pfs_path, context.invalidate_inode

    def verify_file(self, inode: int) -> tuple[list[pb.Finding], int]:
        """Return (a finding for every copy of the file, bytes read)."""
        record = summary.load_file_record(self._db, inode)
        found = self._verify_in_tiers(record) + self._verify_on_pfs(inode, record)
        path = get_shown_path(self._db, inode)
        for finding in found:
            finding.inode, finding.path = inode, path
        size = record.content.size if record.content is not None else 0
        return found, size * sum(finding.verdict in (GOOD, BAD) for finding in found)

    def _verify_in_tiers(self, record: FileRecord) -> list[pb.Finding]:
        content = record.content
        if content is None:
            return []
        if content.state in (ContentState.OPEN, ContentState.CLOSED):
            return [pb.Finding(verdict=UNKNOWN, what="is not sealed yet, so there is no digest to compare with")]
        try:
            checked = verify.verify(self._db, self._tiers, content.id)
            if checked and not any(one.ok for one in checked):
                checked = self._repair_from_elsewhere(content, checked)
        except Busy as failure:
            return [pb.Finding(verdict=UNKNOWN, what=str(failure))]
        except (OSError, CkptfsError) as failure:
            return [pb.Finding(verdict=UNREADABLE, what=str(failure))]
        path = get_shown_path(self._db, content.inode)
        for one in checked:
            if one.repaired:
                self._invalidate_inode(content.inode)
                events.record(EventKind.REPAIRED, path=path, tier=one.tier.value, what=one.problem, source=one.source)
        return [_build_finding(one) for one in checked]

    def _repair_from_elsewhere(self, content: Content, before: list[verify.CheckResult]) -> list[verify.CheckResult]:
        """Fetch the file and verify again; what is good now was repaired. Returns `before` if that failed."""
        request_id = verify.request_repair(self._db, content.id)
        if request_id is None:
            return before
        self._retry_now()
        while mover_requests.is_open(self._db, request_id):
            threading.Event().wait(FETCH_POLL_S)
        if not (source := verify.find_repair_source(self._db, request_id)):
            return before
        after = {one.tier: one for one in verify.verify(self._db, self._tiers, content.id)}
        good = {tier: one.source or source for tier, one in after.items() if one.ok or one.repaired}
        found = [replace(one, source=good.get(one.tier, "")) for one in before]
        return found + [one for tier, one in after.items() if tier not in {bad.tier for bad in before}]

    def _verify_on_pfs(self, inode: int, record: FileRecord) -> list[pb.Finding]:
        if self._config.pfs is None or record.published is None:
            return []
        try:
            self._refresh_pfs_path(inode)
            fetch_state = copies.load_fetch_state(self._db, inode)
            if fetch_state is None or fetch_state.published is None:
                return []  # Another node has deleted it there.
            return [self._compare_with_pfs(fetch_state, fetch_state.published, self._config.pfs)]
        except (OSError, CkptfsError) as failure:
            what = PFS_CHANGED_TEXT.get(failure.errno or 0, str(failure))
            return [pb.Finding(tier="pfs", verdict=UNREADABLE, what=what)]

    def _compare_with_pfs(self, fetch_state: copies.FetchState, published: PublishedRow, pfs: Path) -> pb.Finding:
        expected = published.digest
        with disk.closing(pfs_tree.open_published(pfs, fetch_state)) as fd:
            _, digest, _ = transfer.read(fd, label="verify")
        if expected is None:
            return pb.Finding(tier="pfs", verdict=UNKNOWN, what="was written by another program, so its digest is not known")
        if digest == expected:
            return pb.Finding(tier="pfs", verdict=GOOD)
        what = "its digest differs from that of the file that was written back"
        if fetch_state.has_local_copy and copies.record_pfs_damaged(self._db, fetch_state):
            self._retry_now()
            return pb.Finding(tier="pfs", verdict=BAD, what=f"{what}; it is written back again from the good copy here")
        return pb.Finding(tier="pfs", verdict=BAD, what=f"{what}; restore it from another copy")


def _build_finding(checked: verify.CheckResult) -> pb.Finding:
    what = f"{checked.problem}; repaired from {checked.source}" if checked.repaired else checked.problem
    return pb.Finding(tier=checked.tier.value, verdict=GOOD if checked.ok else BAD, what=what)


def _build_last(progress: pb.Progress, safety: pb.Safety) -> pb.Progress:
    """Build the last message of a drain, which says what is safe."""
    last = pb.Progress(safety=safety)
    last.MergeFrom(progress)
    return last


class AdminService(rpc.AdminServicer):  # type: ignore[misc]
    def __init__(self, context: ControlContext) -> None:
        self.refused = context.refused
        self._context, self._config, self._db, self._retry_now = context, context.config, context.db, context.retry_now
        self._verifier = FileVerifier(context)
        self._verifications = threading.BoundedSemaphore(VERIFICATIONS_MAX)

    @translate_stream_errors
    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> Iterator[pb.Progress]:
        """Bring every file closed before now to its highest level, or to the one that is asked for."""
        level = parse_drain_level(self._config, request.level)
        began_s, progress = time.monotonic(), pb.Progress()
        try:
            for progress in self._drain_to(level, request, context):
                yield progress
        finally:
            record_result(self._db, "command", is_done=progress.done and not progress.files_left, began_s=began_s)

    def _drain_to(self, level: Level | None, request: pb.DrainRequest, context: grpc.ServicerContext) -> Iterator[pb.Progress]:
        if not level or not (request.deadline_s or request.level):
            yield from stream_changes(self._drain(request.deadline_s, self._build_progress), context)
            return
        rescue = Rescue(self._db, level, request.deadline_s or None, self._retry_now, is_last=bool(request.level))
        try:
            rescue.refresh_if_due()
            yield from stream_changes(self._rescue(rescue, level, request.deadline_s), context)
        finally:
            rescue.end()

    def _drain(self, deadline_s: float, build_progress: Callable[[DrainEnd], pb.Progress]) -> Iterator[pb.Progress]:
        end = get_end(self._db)
        until = time.monotonic() + (deadline_s or float("inf"))
        retried_at = 0.0
        while True:
            if time.monotonic() - retried_at > RETRY_INTERVAL_S:
                self._retry_now()
                retried_at = time.monotonic()
            begun = time.monotonic()
            progress = build_progress(end)
            count_s = time.monotonic() - begun
            yield progress
            if time.monotonic() > until:
                if deadline_s >= self._context.figures.get_drain_deadline_s():
                    self._context.record_missed_drain()
                raise TimedOut("not done in time", remedy=progress.remedy)
            # With a large backlog, counting takes long. It must not slow down the flows.
            threading.Event().wait(max(POLL_S, REST_RATIO * count_s))

    def _rescue(self, rescue: Rescue, level: Level, deadline_s: float) -> Iterator[pb.Progress]:
        """Drain with an order of urgency. The last message says what is safe."""

        def build_progress(end: DrainEnd) -> pb.Progress:
            rescue.refresh_if_due()
            if level is Level.PFS:
                progress = self._build_progress(end)
            else:
                files, size = rescue.count_left()
                progress = self._add_obstacle(pb.Progress(done=not files, files_left=files, bytes_left=size))
            progress.done = progress.done and not rescue.is_securing()
            return progress

        last = pb.Progress()
        try:
            for last in self._drain(deadline_s, build_progress):
                if last.done:
                    break
                yield last
        except TimedOut:
            yield _build_last(last, rescue.build_safety())
            raise
        yield _build_last(last, rescue.build_safety())

    def _build_progress(self, end: DrainEnd) -> pb.Progress:
        left = load_pending(self._db, end)
        return self._add_obstacle(
            pb.Progress(done=left.is_nothing, files_left=left.all_files, bytes_left=left.size_bytes, changes_left=left.changes)
        )

    def _add_obstacle(self, progress: pb.Progress) -> pb.Progress:
        if not progress.done:
            progress.blocked_by, progress.remedy = summary.find_obstacle(self._db)
        return progress

    @translate_stream_errors
    def Verify(self, request: pb.VerifyRequest, context: grpc.ServicerContext) -> Iterator[pb.VerifyProgress]:
        """Read every copy of a file, or of all files below a directory."""
        top = history_names.get_known_number(self._db, require_inode_number(request.inode))
        if summary.get_listed_file(self._db, top) is None:
            raise posix_error(errno.ENOENT)
        if not self._verifications.acquire(blocking=False):
            raise OSError(errno.EUSERS, f"{VERIFICATIONS_MAX} verifications are under way already; try again later")
        try:
            yield from self._verify(top, context)
        finally:
            self._verifications.release()

    def _verify(self, top: int, context: grpc.ServicerContext) -> Iterator[pb.VerifyProgress]:
        files = namespace.list_files_below(self._db, top)
        progress, last_sent_at = pb.VerifyProgress(files_total=len(files)), time.monotonic()
        for inode in files:
            if not context.is_active():
                return
            findings, size = self._verifier.verify_file(inode)
            progress.files += 1
            progress.bytes += size
            progress.findings.extend(findings)
            if progress.ByteSize() > limits.CONTROL_MESSAGE_BYTES_MAX // 4 or time.monotonic() - last_sent_at > PROGRESS_INTERVAL_S:
                yield progress
                last_sent_at = time.monotonic()
                del progress.findings[:]
        progress.done = True
        yield progress

    @translate_errors
    def Refresh(self, request: pb.RefreshRequest, context: grpc.ServicerContext) -> pb.RefreshReply:
        """Compare a directory with the PFS again, and all directories below it if asked."""
        if self._config.pfs is None:
            raise InvalidArgument("this mount has no PFS, so there is nothing to compare with", remedy="mount it with pfs=DIRECTORY")
        # A little less than the client's timeout, so that the client receives the reason.
        wait_s = min(0.95 * (context.time_remaining() or REFRESH_WAIT_S), REFRESH_WAIT_S)
        argument = mover_requests.TREE if request.recursive else mover_requests.COMPARE_AGAIN
        request_id = mover_requests.insert_request(
            self._db, mover_requests.SCAN, require_inode_number(request.inode), argument, wait_s=wait_s
        )
        self._retry_now()
        until = time.monotonic() + wait_s
        while context.is_active() and time.monotonic() < until:
            row = mover_requests.get(self._db, request_id)
            if row is None or row.state == mover_requests.DONE:
                return pb.RefreshReply()
            if row.state == mover_requests.FAILED:
                raise OSError(row.error, os.strerror(row.error or errno.EIO))
            threading.Event().wait(POLL_S)
        what, remedy = summary.find_obstacle(self._db)
        raise TimedOut(f"the PFS was not compared in time{f': {what}' if what else ''}", remedy=remedy or "it continues in the background")

    @translate_stream_errors
    def Adopt(self, request: pb.AdoptRequest, context: grpc.ServicerContext) -> Iterator[pb.Progress]:
        """Have the mount process put all that this node knows into a store that lost its data."""
        losses = summary.list_troubles(self._db, store_loss.LOSS_TROUBLE)
        if not losses and not store_loss.is_adopting(self._db):
            raise InvalidArgument(
                "nothing to adopt: this node knows of no loss of etcd's data", remedy="`ckptfs status` says so when it notices one"
            )
        store_loss.order_adoption(self._db, is_last=request.last)
        while context.is_active():
            is_done = store_loss.get_adoption_step(self._db) is None and not (request.last and store_loss.is_adopting(self._db))
            found = summary.list_troubles(self._db, store_loss.LOSS_TROUBLE)
            if is_done and found:
                trouble = found[0][1]
                raise InvalidArgument(f"not adopted: {trouble['what']}", remedy=trouble["remedy"])
            yield pb.Progress(done=is_done, changes_left=0 if is_done else key_state.count_dirty(self._db))
            if is_done:
                return
            threading.Event().wait(PROGRESS_INTERVAL_S)

    @translate_errors
    def LogLevel(self, request: pb.LogLevelRequest, context: grpc.ServicerContext) -> pb.LogLevelReply:
        """Return the log level of the daemon's processes, after changing it if a level is given."""
        if request.level:
            if request.level not in LOG_LEVELS:
                raise InvalidArgument(f"{request.level[:20]!r} is not a log level; accepted: {', '.join(LOG_LEVELS)}")
            self._context.request_log_level(request.level)
            # The supervisor sends the level to the mount first, and to this process last.
            until = time.monotonic() + LOG_LEVEL_WAIT_S
            while logs.get_level() != request.level:
                if time.monotonic() > until:
                    raise TimedOut("the log level was not changed in time", remedy="see `ckptfs status`: its processes may be restarting")
                threading.Event().wait(POLL_S)
        return pb.LogLevelReply(level=logs.get_level())

    @translate_errors
    def Upgrade(self, request: pb.UpgradeRequest, context: grpc.ServicerContext) -> pb.UpgradeReply:
        """Have the supervisor hand over to another version, which ends this process."""
        if not os.path.isabs(request.python) or not request.places or not all(map(os.path.isabs, request.places)):
            raise InvalidArgument("an upgrade needs the absolute paths of an interpreter and of packages")
        self._context.request_upgrade(Successor(request.python, tuple(request.places)))
        return pb.UpgradeReply()
