"""Orders of the mount's owner: drain, verify, refresh, what to log. The acts are the mover's; here they are asked for and watched.

If we die here: what was ordered is either a row in the catalog, which the next mover takes up, or lost with the client's connection,
which tells the client.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from ckptfs import limits
from ckptfs.catalog import peers, report, wants
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.config.table import LOG_LEVELS
from ckptfs.errors import InvalidArgument, TimedOut, posix_error
from ckptfs.protocol import control_pb2 as pb
from ckptfs.protocol import control_pb2_grpc as rpc
from ckptfs.tiers.place import Tiers
from ckptfs_daemon import logs
from ckptfs_daemon.control_edge import RefusedCalls, require_inode_number, translate_errors, translate_stream_errors
from ckptfs_daemon.control_figures import StatusFigures
from ckptfs_daemon.control_verify import FileVerifier

POLL_S = 0.05
REST_RATIO = 20
RETRY_INTERVAL_S = 1.0
KEEPALIVE_S = 2.0
PROGRESS_INTERVAL_S = 0.5
LOG_LEVEL_WAIT_S = 10.0
REFRESH_WAIT_S = 3600.0


class AdminService(rpc.OrdersServicer):  # type: ignore[misc]
    """The service `Orders`. `hurry` makes the lanes work at once; it may be called from any thread but trio's."""

    def __init__(
        self, config: Config, db: Database, tiers: Tiers, retry_now: Callable[[], None], refused: RefusedCalls | None = None,
        request_log_level: Callable[[str], None] = logs.set_level, refresh_pfs_path: Callable[[int], None] = lambda inode: None,
    ) -> None:  # fmt: skip
        self._refresh_pfs_path = refresh_pfs_path
        self.refused = refused or RefusedCalls()
        self._config = config
        self._db = db
        self._tiers = tiers
        self._retry_now = retry_now
        self._request_log_level = request_log_level
        self._figures = StatusFigures(config, db, tiers)

    @translate_stream_errors
    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> Iterator[pb.Progress]:
        """Bring everything that was closed before now up to the highest level there is."""
        end = report.get_journal_end(self._db)
        retried_at = last_sent_at = 0.0
        last_sent = pb.Progress()
        while context.is_active():
            if time.monotonic() - retried_at > RETRY_INTERVAL_S:
                self._retry_now()
                retried_at = time.monotonic()
            begun = time.monotonic()
            progress = self._build_progress(end)
            looked_s = time.monotonic() - begun
            if progress != last_sent or time.monotonic() - last_sent_at > KEEPALIVE_S:
                last_sent, last_sent_at = progress, time.monotonic()
                yield progress
            if progress.done:
                return
            # With very much to do looking takes a while, and must not take it from those who do it.
            threading.Event().wait(max(POLL_S, REST_RATIO * looked_s))

    def _build_progress(self, end: int) -> pb.Progress:
        files, size, changes = report.count_journal_left(self._db, end)
        unsealed, copied = report.count_unsealed(self._db), sum(self._figures.get_copied_bytes().values())
        unsafe = peers.count_unsafe(self._db)
        left = files or changes or unsealed or unsafe
        progress = pb.Progress(
            done=not left, files_left=max(files, unsealed, unsafe), bytes_left=max(0, size - copied), changes_left=changes
        )
        if not progress.done:
            progress.obstacle, progress.remedy = self._figures.get_first_trouble()
        return progress

    @translate_stream_errors
    def Verify(self, request: pb.VerifyRequest, context: grpc.ServicerContext) -> Iterator[pb.VerifyProgress]:
        """Read every copy of a file, or of all files below a directory."""
        if report.get_listed_file(self._db, require_inode_number(request.inode)) is None:
            raise posix_error(errno.ENOENT)
        files = report.list_files_below(self._db, request.inode)
        verification = FileVerifier(self._config, self._db, self._tiers, self._retry_now, self._refresh_pfs_path)
        progress, last_sent_at = pb.VerifyProgress(files_total=len(files)), time.monotonic()
        for inode in files:
            if not context.is_active():
                return
            findings, size = verification.verify_file(inode)
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
        """Compare a directory on the PFS again, with all below when asked."""
        if self._config.pfs is None:
            raise InvalidArgument("this mount has no PFS, so there is nothing to compare with", remedy="mount it with pfs=DIRECTORY")
        # A little less than the client waits, so that it is told why it waited in vain.
        wait_s = min(0.95 * (context.time_remaining() or REFRESH_WAIT_S), REFRESH_WAIT_S)
        argument = wants.TREE if request.recursive else wants.COMPARE_AGAIN
        request_id = wants.insert_request(self._db, wants.SCAN, require_inode_number(request.inode), argument, wait_s=wait_s)
        self._retry_now()
        until = time.monotonic() + wait_s
        while context.is_active() and time.monotonic() < until:
            row = wants.get(self._db, request_id)
            if row is None or row.state == wants.DONE:
                return pb.RefreshReply()
            if row.state == wants.FAILED:
                raise OSError(row.error, os.strerror(row.error or errno.EIO))
            threading.Event().wait(POLL_S)
        what, remedy = self._figures.get_first_trouble()
        raise TimedOut(f"the PFS was not compared in time{f': {what}' if what else ''}", remedy=remedy or "it goes on in the background")

    @translate_errors
    def LogLevel(self, request: pb.LogLevelRequest, context: grpc.ServicerContext) -> pb.LogLevelReply:
        """What the processes of this daemon log at least; changed when a level is given."""
        if request.level:
            if request.level not in LOG_LEVELS:
                raise InvalidArgument(f"{request.level[:20]!r} is not a log level; accepted: {', '.join(LOG_LEVELS)}")
            self._request_log_level(request.level)
            # The word goes from here to the supervisor, which tells the others before it tells us.
            until = time.monotonic() + LOG_LEVEL_WAIT_S
            while logs.get_level() != request.level:
                if time.monotonic() > until:
                    raise TimedOut("the log level was not changed in time", remedy="see `ckptfs status`: its processes may be restarting")
                threading.Event().wait(POLL_S)
        return pb.LogLevelReply(level=logs.get_level())
