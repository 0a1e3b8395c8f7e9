"""The fetch step: copies of files whose content is only on other nodes or on the PFS.

Takes: fetch requests for files that an application opens and that have no good copy on this node.
Leaves: a sealed content with a verified copy in RAM or NVMe, or the answer that the PFS's own file may be read.
If we die here: a FILLING copy and its file, which recovery removes. The request is still open and is taken again.

One attempt loads a snapshot of the file, chooses the sources, copies the bytes and records the copy in one transaction. If the attempt
fails, a second snapshot decides whether to try again. What the nodes know about the file decides how long, not the number of attempts:
a node that should have the file may be restarting (P8); if the last such node is dead, salvage may soon show a previous content (P9).

Invariants:
- Bytes whose digest differs from the recorded one are never served (P4, P7).
- Several steps may run at once, each in its own thread. A file that one of them fetches is left alone by the others.
- The PFS may hang (P1), or a part of it. At most FETCHES_PFS_MAX steps are at the PFS, so that others remain for the nodes. Steps that
  hang there do not count as soon as there are other lanes in their place. A file that a step fetches from the PFS is still asked for at
  the nodes, every FETCH_SHARED_POLL_S_MAX. If nothing comes from the PFS, the copy is taken over.
"""

import errno
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ckptfs import disk, limits, step_durations
from ckptfs.bounded_waits import list_stalled
from ckptfs.catalog import copies, mover_requests
from ckptfs.catalog.copies import FetchState
from ckptfs.catalog.database import Database
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.membership import Node
from ckptfs.clique.peer_api import PeerBusy, PeerFailed
from ckptfs.config import Config
from ckptfs.errors import Busy, CkptfsError, DigestMismatch, NoSpace, posix_error
from ckptfs.flow.fetch.fetch_progress import FetchProgress, OthersFirst, choose_pause_s
from ckptfs.flow.fetch.from_peers import NoCopyLeft, PeerFetcher, is_denial
from ckptfs.flow.fetch.from_pfs import PfsFetcher, is_shown_by_pfs
from ckptfs.flow.fetch.retry_policy import RetryPolicy, SalvageWait
from ckptfs.model import ContentState, Notifier, Tier
from ckptfs.tiers import fetch_map, health
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)
disk.declare_labels("fetch:answered")

_REPORTED_ERRNOS = {errno.ESTALE, errno.ENOSPC, errno.EACCES, errno.EFBIG}


class Attempt(NamedTuple):
    """The attempts at one request: their number, the time of the first one, and of the next one.

    `awaits_pfs`: the next one may also begin as soon as fewer fetches are at the PFS.
    """

    tries: int
    since_s: float
    next_s: float
    awaits_pfs: bool = False


class PfsTaken(Busy):
    """Enough fetches are at the PFS, or one of this file. This does not count as a try."""


class Sources(NamedTuple):
    """The sources of a file: live nodes, the fastest first, and the PFS."""

    nodes: Sequence[Node]
    is_on_pfs: bool


class Fetch:
    """Fetches one file a step. Its steps may overlap."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier, cluster: Cluster | None = None) -> None:
        """`cluster` is None on a node that has no peers."""
        self._peers = None if cluster is None else PeerFetcher(db, tiers, cluster)
        self._pfs = PfsFetcher(db, tiers, config, notify, cluster)
        self._retry_policy = None if cluster is None else RetryPolicy(db, cluster)
        self._salvage_wait = None if cluster is None or config.pfs is None else SalvageWait(db, cluster, notify)
        self._db = db
        self._tiers = tiers
        self._notify = notify
        self._excluded = (Tier.PFS,) if config.is_read_only else ()
        self._lock = threading.Lock()
        self._active_inodes: set[int] = set()
        self._steps_at_pfs: dict[int, FetchProgress] = {}
        self._spare_lanes = 0
        self._attempts: dict[int, Attempt] = {}

    def prepare(self) -> None:
        """Remove the unfinished fetches of the previous mover. Called once, before the first step."""
        copies.delete_filling_pfs_copies(self._db)
        fetch_map.delete_all(self._tiers[Tier.RAM].root)

    def step(self) -> bool:
        """Answer one request. Return True if there may be more at once."""
        if self._retry_policy is not None:
            self._retry_policy.record_view()
        request = self._take_request()
        if request is None:
            return False
        with self._lock:
            attempt = self._attempts.get(request.id)
        since_s = time.monotonic() if attempt is None else attempt.since_s
        progress = FetchProgress(self._db, self._tiers, self._notify, request, since_s, self._list_in_hand)
        try:
            self._answer(progress)
        finally:
            with self._lock:
                if progress.is_at_pfs:
                    del self._steps_at_pfs[request.inode]
                else:
                    self._active_inodes.discard(request.inode)
        return True

    def next_due_s(self) -> float | None:
        """Return the seconds until the first deferred request is tried again; None without one."""
        with self._lock:
            times = [attempt.next_s for attempt in self._attempts.values()]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def list_stalled(self) -> list[int]:
        """Return the files whose steps hang at the PFS: for each there must be a lane more from now on."""
        with self._lock:
            stalled = list_stalled({inode: step.moved_s for inode, step in self._steps_at_pfs.items()})
            self._spare_lanes = len(stalled)
            return stalled

    def _take_request(self) -> mover_requests.MoverRequest | None:
        """Reserve and return the next request that is due and whose file no step has, except at the PFS."""
        requests = mover_requests.list_open(self._db, mover_requests.FETCH)
        now_s = time.monotonic()
        if self._salvage_wait is not None:
            self._salvage_wait.forget_others({request.id for request in requests})
        with self._lock:
            self._attempts = {request.id: self._attempts[request.id] for request in requests if request.id in self._attempts}
            for request in requests:
                attempt = self._attempts.get(request.id)
                is_due = attempt is None or attempt.next_s <= now_s or (attempt.awaits_pfs and self._has_place_at_pfs(request.inode))
                if request.inode not in self._active_inodes and is_due:
                    self._active_inodes.add(request.inode)
                    return request
        return None

    def _list_in_hand(self) -> set[int]:
        """Return the inodes of all steps."""
        with self._lock:
            return self._active_inodes | self._steps_at_pfs.keys()

    def _has_place_at_pfs(self, inode: int) -> bool:
        """Return whether a step may go to the PFS with a file. The caller holds the lock."""
        return inode not in self._steps_at_pfs and len(self._steps_at_pfs) < limits.FETCHES_PFS_MAX + self._spare_lanes

    def _go_to_pfs(self, progress: FetchProgress) -> None:
        """Take a place at the PFS until the end of the step; others may ask nodes. Raises PfsTaken."""
        if progress.is_at_pfs:
            return
        request = progress.request
        with self._lock:
            if not self._has_place_at_pfs(request.inode):
                raise PfsTaken("other fetches are at the PFS")
            self._steps_at_pfs[request.inode] = progress
            self._active_inodes.discard(request.inode)
            progress.go_to_pfs()
        self._defer(request, limits.FETCH_SHARED_POLL_S_MAX)

    def _answer(self, progress: FetchProgress) -> None:
        request = progress.request
        state = copies.load_fetch_state(self._db, request.inode)
        try:
            result = self._fetch(state, progress)
        except OthersFirst as failure:
            log.debug("%s: waiting for other nodes: %s", "?" if state is None else state.path, failure)
            mover_requests.record_progress(self._db, request.id)
            self._defer(request, choose_pause_s(time.monotonic() - progress.since_s))  # This is not counted as a try.
        except PfsTaken:
            self._defer(request, limits.FETCH_SHARED_POLL_S_MAX, awaits_pfs=True)
        except (OSError, CkptfsError) as failure:
            if not self._is_left_to_others(progress):
                self._handle_failure(request, "?" if state is None else state.path, failure)
        except Exception:
            mover_requests.mark_failed(self._db, request.id, errno.EIO)
            self._notify.notify_replies()
            raise
        else:
            if result == mover_requests.FETCHED and state is not None and not state.has_local_copy:
                size = state.content.size if state.content is not None else state.published.size if state.published is not None else 0
                step_durations.record(step_durations.FETCH, time.monotonic() - progress.since_s, size)
            if request.argument == mover_requests.FOR_REPAIR and result == mover_requests.FETCHED:
                result = progress.sources or result
            disk.act("fetch:answered", mover_requests.mark_done, self._db, request.id, result)
            self._notify.notify_replies()

    # --- one attempt -----------------------------------------------------------------------------------------------------

    def _fetch(self, state: FetchState | None, progress: FetchProgress) -> str:
        """Fetch a file; return the result of its request. Raises Busy to try again."""
        with self._lock:
            at_pfs = self._steps_at_pfs.get(progress.request.inode)
        if at_pfs is not None and at_pfs.filling is not None and not at_pfs.has_stalled():
            raise PfsTaken("the file comes from the PFS just now")
        if self._peers is not None and state is not None and not state.has_local_copy:
            state = self._peers.refresh(state, progress)
        if state is None:
            raise posix_error(errno.ESTALE)
        sources = _choose_sources(state, [] if self._peers is None else self._peers.list_sources(state))
        if sources is None or self._fetch_from_peers(state, sources, progress, at_pfs):
            return mover_requests.FETCHED
        assert state.published is not None
        if state.published.size > limits.FILE_BYTES_MAX:
            raise posix_error(errno.EFBIG)
        self._go_to_pfs(progress)
        tier = self._choose_tier(state.published.size, is_required=progress.is_copy_required, is_never_read=state.published.digest is None)
        with self._retry_elsewhere(tier):
            progress.sources = "the PFS"
            return self._pfs.fetch(state, tier, progress)

    def _fetch_from_peers(self, state: FetchState, sources: Sources, progress: FetchProgress, at_pfs: FetchProgress | None) -> bool:
        """Fetch from other nodes. False: the PFS may have it. Raises Busy, or OthersFirst for now."""
        if self._peers is None or state.content is None or not sources.nodes:
            return False
        tier = self._choose_tier(state.content.size, is_required=progress.is_copy_required or not sources.is_on_pfs)
        if tier is None:
            return False
        if tier is Tier.PFS:
            self._go_to_pfs(progress)
        progress.is_pfs_next = sources.is_on_pfs and at_pfs is None
        try:
            with self._retry_elsewhere(tier):
                progress.sources = ", ".join(node.name for node in sources.nodes)
                self._peers.fetch(state, sources.nodes, tier, progress, at_pfs)
        except PeerFailed as failure:
            if isinstance(failure, PeerBusy) and progress.can_wait(state.content.size):
                raise OthersFirst(str(failure)) from failure
            if sources.is_on_pfs:
                log.info("%s: reading from the PFS instead of the peers: %s", state.path, failure)
                return False
            raise Busy(str(failure)) from failure
        except OSError as failure:
            if failure.errno not in health.FULL_ERRNOS:
                raise
            self._notify.wake_lanes()  # Other lanes make room, or the next try takes another tier.
            raise Busy(f"no room is left in {tier}") from failure
        return True

    def _choose_tier(self, size: int, *, is_required: bool, is_never_read: bool = False) -> Tier | None:
        """Return the tier for a copy; None: the PFS's own file will do. Raises NoSpace."""
        if is_required:
            return self._tiers.choose_tier(size, excluded=self._excluded)
        needs_more_room = is_never_read and size > limits.FETCH_WHOLE_BYTES
        with suppress(NoSpace):
            tier = self._tiers.choose_tier(size * limits.FETCH_SPACE_RATIO if needs_more_room else size)
            if tier is not Tier.PFS:
                return tier
        self._notify.wake_lanes()  # Other lanes make room for the next fetch.
        return None

    @contextmanager
    def _retry_elsewhere(self, tier: Tier | None) -> Iterator[None]:
        """Raise Busy if the tier of the copy fails: the next try takes another one."""
        try:
            yield
        except OSError as failure:
            if tier is None or self._tiers[tier].is_usable:
                raise
            raise Busy(f"{tier} fails: {self._tiers[tier].failure}") from failure

    # --- after a failure -------------------------------------------------------------------------------------------------

    def _is_left_to_others(self, progress: FetchProgress) -> bool:
        """Return whether another step answers this request, or did, while this one was at the PFS."""
        with self._lock:
            is_taken = progress.is_at_pfs and progress.request.inode in self._active_inodes
        row = mover_requests.get(self._db, progress.request.id)
        return is_taken or (row is not None and row.state != mover_requests.OPEN)

    def _handle_failure(self, request: mover_requests.MoverRequest, path: str, failure: Exception) -> None:
        """Defer the request, or answer it; ESTALE makes the kernel look a deleted name up again."""
        state = copies.load_fetch_state(self._db, request.inode)
        is_gone = state is None or not state.has_name or (self._peers is not None and self._peers.is_gone(request.inode))
        if isinstance(failure, Busy | NoCopyLeft) and self._retry_later(request, state, failure, is_gone=is_gone):
            return
        code = getattr(failure, "errno", 0)
        code = errno.ENOSPC if code in health.FULL_ERRNOS else code
        code = errno.ESTALE if is_gone else code if code in _REPORTED_ERRNOS else errno.EIO
        mover_requests.mark_failed(self._db, request.id, code)
        self._notify.notify_replies()
        is_content_failure = isinstance(failure, Busy | DigestMismatch)
        level = logging.ERROR if isinstance(failure, DigestMismatch) else logging.WARNING
        level = logging.DEBUG if (is_gone if is_content_failure else state is None) else level
        log.log(level, "%s cannot be %s: %s", path, "read" if is_content_failure else "fetched", failure)

    def _retry_later(
        self, request: mover_requests.MoverRequest, state: FetchState | None, failure: Busy | NoCopyLeft, *, is_gone: bool
    ) -> bool:
        """Defer a request, longer each time. Return False if retrying is pointless.

        A request is tried again if

        - salvage has still to decide on the file, or has just decided; this asks it to;
        - or the failure may pass, and the tries are not used up. An island that has waited would only wait for the store again;
        - or the file may still arrive, according to what the store says now. This node learns that.
        """
        now_s = time.monotonic()
        with self._lock:
            previous = self._attempts.get(request.id, Attempt(0, now_s, now_s))
            pause_s = min(limits.RETRY_FIRST_S * 2**previous.tries / 2, limits.FETCH_PAUSE_MAX_S)
            self._attempts[request.id] = Attempt(previous.tries + 1, previous.since_s, now_s + pause_s)
        is_connected = self._retry_policy is None or self._retry_policy.is_connected() or now_s - previous.since_s < limits.ETCD_WAIT_S
        may_pass = isinstance(failure, Busy) and previous.tries + 1 < limits.FETCH_TRIES_MAX and is_connected
        is_unreachable = is_gone and not (state is not None and state.is_open)
        awaits_salvage = not is_unreachable and self._salvage_wait is not None and self._salvage_wait.request_salvage(request, state)
        should_retry = awaits_salvage or may_pass
        if not should_retry and self._retry_policy is not None:
            should_retry = self._retry_policy.refresh_and_judge(state, previous.since_s, is_denied=is_denial(failure.__cause__))
        if should_retry:
            mover_requests.record_progress(self._db, request.id)
        return should_retry

    def _defer(self, request: mover_requests.MoverRequest, pause_s: float, *, awaits_pfs: bool = False) -> None:
        now_s = time.monotonic()
        with self._lock:
            previous = self._attempts.get(request.id, Attempt(0, now_s, now_s))
            self._attempts[request.id] = previous._replace(next_s=now_s + pause_s, awaits_pfs=awaits_pfs)


def _choose_sources(state: FetchState, live_nodes: Sequence[Node]) -> Sources | None:
    """Return the sources; None: nothing is to be fetched. Raises DigestMismatch or NoCopyLeft."""
    if state.content is None and state.published is None and state.content_id is not None:
        raise DigestMismatch("the cluster knows nothing of the content that the file should have")
    if state.has_local_copy or (state.content is None and state.published is None):
        return None
    is_sealed = state.content is not None and state.content.state is ContentState.SEALED
    sources = Sources(live_nodes if is_sealed else (), is_shown_by_pfs(state))
    if not sources.nodes and not sources.is_on_pfs:
        raise NoCopyLeft("no good copy can be reached, and the PFS does not show this generation of the file")
    return sources
