"""Takes: wants of the kind 'fetch': files that somebody opens and that lie on other nodes or on the PFS only.
Leaves: a sealed content with a verified copy in RAM or NVMe, or the word that the file on the PFS may be read itself.
If we die here: a FILLING copy and its file, which recovery removes; the want is still open and is taken again.

Bytes that do not have the digest that is known of them are never served (P4, P7). Several steps may run at once, in threads of their own.

Owns how long a file that did not come is tried for: by what is known of those who may have it, and not by how often it was tried.

While a node lives that told of it, its processes may be on their way back (P8). When the last such node has died, a former content of the
file may be shown soon (flow/fall_back.py), which is then what is opened (P9). Otherwise nothing is worth waiting for.
If we die here: nothing is kept here; the want is still open, and its patience begins anew.

Owns that somebody decides what is left of a file that nobody gives: the PFS may have a former state, which may be all there is, or
that of a file which this one has replaced. A want of the kind 'left' asks for it (flow/fall_back.py answers it).

If we die here: nothing is kept here; who still waits has it asked again.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Container
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from ckptfs import disk, limits
from ckptfs.catalog import contents, copies, handles, mover_requests, namespace, pfs_state
from ckptfs.catalog.copies import FetchedContent, FetchState
from ckptfs.catalog.database import Database
from ckptfs.clique import locations
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.locations import ContentLocations
from ckptfs.clique.peer_api import PeerFailed, PeerRefused
from ckptfs.coherence import pfs_coordination
from ckptfs.config import Config
from ckptfs.digest import hash_content
from ckptfs.errors import Busy, CkptfsError, DigestMismatch, NoSpace, StoreRefused, StoreUnreachable, posix_error
from ckptfs.flow.fetch.fetch_progress import FetchProgress
from ckptfs.flow.fetch.from_peers import NoCopyLeft, PeerFetcher
from ckptfs.flow.fetch.from_pfs import BlockwiseCopy, FetchedElsewhere, PfsSingleFlight
from ckptfs.model import Content, ContentState, Notifier, Tier
from ckptfs.tiers import fetch_map, pfs_tree, transfer
from ckptfs.tiers.storage import Tiers, TierStorage


class RetryPolicy:
    """One for all fetches of a node; any thread."""

    def __init__(self, db: Database, cluster: Cluster) -> None:
        self._db = db
        self._cluster = cluster
        self._view_since = (cluster.view(), time.monotonic())

    def record_view(self) -> None:
        """Note when the world changes. Called before each fetch."""
        view = self._cluster.view()
        if view is not self._view_since[0]:
            self._view_since = view, time.monotonic()

    def is_connected(self) -> bool:
        """Whether this node is no island."""
        return bool(self._cluster.lease())

    def should_retry(self, inode: int, since_s: float, *, is_denied: bool) -> bool:
        """Whether a file that was first tried at `since_s` is to be tried again. `denied`: those who were asked say that they have it not.

        An island has nobody to ask, and does not wait. When it fell back, what it holds now is taken over, with what the PFS shows of it.
        """
        number = copies.get_content_id(self._db, inode)
        if number is None or not self.is_connected():
            return False
        try:
            file = locations.load_files(self._cluster.store, [inode]).get(inode)
            shared = locations.load(self._cluster.store, [number])[number]
        except (StoreUnreachable, StoreRefused):
            return False
        if file is None:
            return False
        waited_s = time.monotonic() - since_s
        if file.content != number:
            with suppress(CkptfsError):
                pfs_coordination.load_inodes(self._db, self._cluster.store, inode)
            return waited_s < limits.FETCH_PATIENCE_S + _get_salvage_wait_s()
        if not is_denied and self._is_on_live_node(shared):
            return waited_s < limits.FETCH_PATIENCE_S
        return self._may_be_salvaged() and waited_s < limits.FETCH_PATIENCE_S + _get_salvage_wait_s()

    def _is_on_live_node(self, shared: ContentLocations) -> bool:
        """Whether another node lives that wrote what the file holds, or said that it has it."""
        remote_state, view = shared.state, self._view_since[0]
        if remote_state is None:
            return False
        candidates = [copy.node for copy in shared.copies if copy.generation == remote_state.generation]
        if not shared.is_lost and shared.writer is not None:
            candidates.append(shared.writer)
        return any(node in view and node != self._cluster.node_number for node in candidates)

    def _may_be_salvaged(self) -> bool:
        """Whether the world changed so short a time ago that others may not have decided yet what is left of the file."""
        return self._cluster.factor > 1 and time.monotonic() - self._view_since[1] < _get_salvage_wait_s()


def _get_salvage_wait_s() -> float:
    return limits.SALVAGE_RIVALS_S + limits.SALVAGE_POLL_S + limits.SALVAGE_MARGIN_S


class SalvageWait:
    """One for all fetches of a node; any thread."""

    def __init__(self, db: Database, cluster: Cluster, notify: Notifier) -> None:
        self._db = db
        self._cluster = cluster
        self._notify = notify
        self._lock = threading.Lock()
        self._salvage_requests: dict[int, int] = {}
        self._known_decisions: set[int] = set()

    def forget_others(self, open_requests: Container[int]) -> None:
        """Forget all but these fetches."""
        with self._lock:
            self._salvage_requests = {want: asked for want, asked in self._salvage_requests.items() if want in open_requests}
            self._known_decisions = {want for want in self._known_decisions if want in open_requests}

    def should_retry(self, request: mover_requests.MoverRequest) -> bool:
        """Whether what is left is being looked for, or was just decided: a fetch that failed is to be tried again then. Where nothing can
        be shown yet, as long as the writer counts as living, it is asked for anew each time, and nothing else waits for that. An island
        cannot decide.
        """
        if not self._cluster.lease():
            return False
        found = copies.load_fetch_state(self._db, request.inode)
        if found is None or found.content is None:
            return self._take_decision(request)
        with self._lock:
            salvage_request = self._salvage_requests.get(request.id)
        if salvage_request is not None and mover_requests.is_open(self._db, salvage_request):
            return True
        answer = None if salvage_request is None else mover_requests.get(self._db, salvage_request)
        if answer is not None and answer.state == mover_requests.DONE:
            return self._take_decision(request)
        new_request = mover_requests.insert_request(
            self._db, mover_requests.SALVAGE, request.inode, wait_s=limits.SALVAGE_RIVALS_S + limits.FETCH_STALL_S
        )
        with self._lock:
            self._salvage_requests[request.id] = new_request
        self._notify.wake_lanes("salvage")
        return salvage_request is None

    def _take_decision(self, request: mover_requests.MoverRequest) -> bool:
        """Whether this fetch was not tried since it was decided."""
        with self._lock:
            is_new = request.id in self._salvage_requests and request.id not in self._known_decisions
            self._known_decisions.add(request.id)
            return is_new


log = logging.getLogger(__name__)
transfer.declare_labels("fetch")
disk.declare_labels("fetch:check:read")
disk.declare_labels("fetch:reserved", "fetch:fsync", "fetch:directory", "fetch:arrived", "fetch:answered")

CHANGED_ERRNOS = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.ELOOP}
"""What opening a file says when the PFS shows something else than the catalog knows."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Of one want: how often it was tried, since when, and when it is tried again."""

    tries: int
    since_s: float
    next_s: float


class Fetch:
    """Brings one file a step. Steps may overlap: a file that one of them has in hand is left alone by the others."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier, cluster: Cluster | None = None) -> None:
        """`around`: the other nodes; None on a node that is alone."""
        self._peers = None if cluster is None else PeerFetcher(db, tiers, cluster)
        self._pfs_single_flight = None if cluster is None else PfsSingleFlight(db, cluster)
        self._retry_policy = None if cluster is None else RetryPolicy(db, cluster)
        self._salvage_wait = None if cluster is None or config.pfs is None else SalvageWait(db, cluster, notify)
        self._store = None if cluster is None else cluster.store
        self._db = db
        self._tiers = tiers
        self._config = config
        self._notify = notify
        self._lock = threading.Lock()
        self._active_inodes: set[int] = set()
        self._attempts: dict[int, Attempt] = {}

    def step(self) -> bool:
        """Answer one want. True: there may be more at once."""
        if self._retry_policy is not None:
            self._retry_policy.record_view()
        request = self._take_request()
        if request is None:
            return False
        try:
            self._answer(request)
        finally:
            with self._lock:
                self._active_inodes.discard(request.inode)
        return True

    def next_due_s(self) -> float | None:
        """Until the first want that has to wait for something is tried again."""
        with self._lock:
            times = [tries.next_s for tries in self._attempts.values()]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def prepare(self) -> None:
        """Once, before the first step: forget what a former mover did not finish."""
        copies.delete_filling_pfs_copies(self._db)
        fetch_map.delete_all(self._tiers[Tier.RAM].root)

    def _take_request(self) -> mover_requests.MoverRequest | None:
        """The next want that nobody has in hand; its file is ours until the end of the step."""
        requests = mover_requests.list_open(self._db, mover_requests.FETCH)
        now_s = time.monotonic()
        if self._salvage_wait is not None:
            self._salvage_wait.forget_others({want.id for want in requests})
        with self._lock:
            self._attempts = {want.id: self._attempts[want.id] for want in requests if want.id in self._attempts}
            for want in requests:
                if want.inode not in self._active_inodes and (want.id not in self._attempts or self._attempts[want.id].next_s <= now_s):
                    self._active_inodes.add(want.inode)
                    return want
        return None

    # --- answering ------------------------------------------------------------------------------------------------------

    def _answer(self, request: mover_requests.MoverRequest) -> None:
        try:
            result = self._fetch(request)
        except FetchedElsewhere:
            self._retry_soon(request)
        except (Busy, NoCopyLeft) as reason:
            if self._retry_later(request, reason):
                return
            level = logging.WARNING if isinstance(reason, Busy) else logging.ERROR
            level = logging.DEBUG if self._fail_request(request, errno.EIO) else level
            log.log(level, "%s cannot be read: %s", self._name(request.inode), reason)
        except DigestMismatch as failure:
            level = logging.DEBUG if self._fail_request(request, errno.EIO) else logging.ERROR
            log.log(level, "%s cannot be read: %s", self._name(request.inode), failure)
        except (OSError, CkptfsError) as failure:
            code = failure.errno or errno.EIO
            self._fail_request(request, code if code in {errno.ESTALE, errno.ENOSPC, errno.EACCES} else errno.EIO)
            is_deleted = copies.load_fetch_state(self._db, request.inode) is None
            level = logging.DEBUG if is_deleted else logging.WARNING
            log.log(level, "%s cannot be fetched: %s", self._name(request.inode), failure)
        except Exception:
            self._fail_request(request, errno.EIO)
            raise
        else:
            disk.act("fetch:answered", mover_requests.mark_done, self._db, request.id, result)
            self._notify.notify_replies()

    def _fail_request(self, request: mover_requests.MoverRequest, code: int) -> bool:
        """Whether the file is gone: what lost its last name since it was looked up the kernel looks up again, as ESTALE tells it to."""
        is_gone = self._is_gone(request)
        mover_requests.mark_failed(self._db, request.id, errno.ESTALE if is_gone else code)
        self._notify.notify_replies()
        return is_gone

    def _is_gone(self, request: mover_requests.MoverRequest) -> bool:
        return not contents.has_name(self._db, request.inode) or (self._peers is not None and self._peers.is_gone(request.inode))

    def _retry_later(self, request: mover_requests.MoverRequest, reason: Busy | NoCopyLeft) -> bool:
        """Try this want again after a while, each time a longer one; False when that is of no use, as where another file has its name."""
        if self._is_gone(request) and not handles.is_open(self._db, request.inode):
            return False
        now_s = time.monotonic()
        with self._lock:
            previous = self._attempts.get(request.id, Attempt(0, now_s, now_s))
            pause_s = min(limits.RETRY_FIRST_S * 2**previous.tries / 2, limits.FETCH_PAUSE_MAX_S)
            self._attempts[request.id] = Attempt(previous.tries + 1, previous.since_s, now_s + pause_s)
        should_retry = (
            isinstance(reason, Busy)
            and previous.tries + 1 < limits.FETCH_TRIES_MAX
            and not self._is_retry_pointless(now_s - previous.since_s)
        )
        should_retry = (self._salvage_wait is not None and self._salvage_wait.should_retry(request)) or should_retry
        if not should_retry and not self._may_still_arrive(request, previous.since_s, reason):
            return False
        mover_requests.record_progress(self._db, request.id)
        return True

    def _is_retry_pointless(self, waited_s: float) -> bool:
        """An island asks the store, which takes its time not to answer, with each try; there is no more to hear from it."""
        return self._retry_policy is not None and not self._retry_policy.is_connected() and waited_s >= limits.ETCD_WAIT_S

    def _may_still_arrive(self, request: mover_requests.MoverRequest, since_s: float, reason: Busy | NoCopyLeft) -> bool:
        cause = reason.__cause__
        is_denied = isinstance(cause, PeerRefused) and cause.code == errno.ENOENT
        return self._retry_policy is not None and self._retry_policy.should_retry(request.inode, since_s, is_denied=is_denied)

    def _retry_soon(self, request: mover_requests.MoverRequest) -> None:
        """Another node is at it: that is no try of ours."""
        mover_requests.record_progress(self._db, request.id)
        now_s = time.monotonic()
        with self._lock:
            previous = self._attempts.get(request.id, Attempt(0, now_s, now_s))
            self._attempts[request.id] = Attempt(previous.tries, previous.since_s, now_s + limits.FETCH_SHARED_POLL_S)

    def _fetch(self, request: mover_requests.MoverRequest) -> str:
        """Do what is wanted; the result. Raises Busy when it has to wait for something."""
        found = copies.load_fetch_state(self._db, request.inode)
        if self._peers is not None and found is not None and not found.has_local_copy:
            found = self._peers.refresh_file(request.inode, self._build_progress(request))
        if found is None:
            raise posix_error(errno.ESTALE)
        if found.content is None and found.published is None and copies.get_content_id(self._db, request.inode) is not None:
            raise DigestMismatch("the cluster knows nothing of the content that the file should have")
        if found.has_local_copy or (found.content is None and found.published is None):
            return mover_requests.FETCHED
        if found.content is not None and self._from_peers(request, found.content, is_on_pfs=_is_shown_by_pfs(found)):
            return mover_requests.FETCHED
        if not _is_shown_by_pfs(found):
            raise NoCopyLeft("no good copy is left, and the PFS does not show this generation of the file")
        assert found.published is not None
        with nullcontext() if self._pfs_single_flight is None else self._pfs_single_flight.hold_lock(found):
            return self._from_pfs(request, found)

    def _from_pfs(self, request: mover_requests.MoverRequest, found: FetchState) -> str:
        assert found.published is not None
        is_required = request.argument == mover_requests.FOR_WRITING
        tier = self._choose_tier(found.published.size, is_required, is_never_read=found.published.digest is None)
        with disk.closing(self._open_on_pfs(found)) as source:
            if tier is not None and self._try_fetch_to_tier(request, found, tier, source):
                return mover_requests.FETCHED
            if is_required:
                self._fetch_to_tier(request, found, Tier.PFS, source)
                return mover_requests.FETCHED
            self._check_in_place(request, found, source)
        return mover_requests.DIRECT

    def _try_fetch_to_tier(self, request: mover_requests.MoverRequest, found: FetchState, tier: Tier, source: int) -> bool:
        """Bring it; False: others have taken the room in that tier meanwhile."""
        try:
            self._fetch_to_tier(request, found, tier, source)
        except OSError as failure:
            if failure.errno != errno.ENOSPC or tier is Tier.PFS:
                raise
            log.info("%s finds no room in %s any more", self._name(request.inode), tier)
            self._notify.wake_lanes()
            return False
        return True

    def _from_peers(self, request: mover_requests.MoverRequest, content: Content, *, is_on_pfs: bool) -> bool:
        """Bring a file from the nodes that have it; False when none of them gave it and the PFS may. Raises Busy to be tried again."""
        if self._peers is None or content.state is not ContentState.SEALED:
            return False
        sources = self._peers.list_sources(content)
        if not sources:
            return False
        tier = self._choose_tier(content.size, request.argument == mover_requests.FOR_WRITING or not is_on_pfs)
        if tier is None:
            return False
        try:
            self._peers.fetch(content, sources, tier, self._build_progress(request))
        except PeerFailed as failure:
            if is_on_pfs:
                log.info("%s comes from the PFS: %s", self._name(request.inode), failure)
                return False
            raise Busy(str(failure)) from failure
        return True

    # --- where to ---------------------------------------------------------------------------------------------------------

    def _choose_tier(self, size: int, is_required: bool, *, is_never_read: bool = False) -> Tier | None:
        """Where the file shall go; None: nowhere, the PFS's own will do. `demanded`: it must come here; `strange`: never read before."""
        if is_required:
            return self._tiers.choose_tier(size)
        wants_spare_room = is_never_read and size > limits.FETCH_WHOLE_BYTES
        with suppress(NoSpace):
            tier = self._tiers.choose_tier(size * limits.FETCH_SPACE_RATIO if wants_spare_room else size)
            if tier is not Tier.PFS:
                return tier
        self._notify.wake_lanes()  # Let others make room for the next one.
        return None

    # --- the file on the PFS -----------------------------------------------------------------------------------------------

    def _open_on_pfs(self, found: FetchState) -> int:
        """The file on the PFS, in the state that the catalog knows. Where a stranger changed it, its directory is visited first."""
        assert self._config.pfs is not None and found.published is not None
        self._refresh_pfs_path(found.inode)
        try:
            fd = pfs_tree.open_unchecked(self._db, self._config.pfs, found.inode)
        except OSError as failure:
            if failure.errno in CHANGED_ERRNOS:
                raise self._request_scan(found) from failure
            raise
        try:
            if not pfs_tree.matches_catalog(fd, found.published):
                raise self._request_scan(found)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _refresh_pfs_path(self, inode: int) -> None:
        """Where the PFS shows a file now: other nodes may have moved what is above it."""
        if self._store is not None:
            with suppress(CkptfsError):
                pfs_coordination.load_inodes(self._db, self._store, inode)

    def _request_scan(self, found: FetchState) -> Busy:
        """Have the directory compared; the want is tried again after it."""
        mover_requests.insert_request(
            self._db, mover_requests.SCAN, pfs_state.get_parent(self._db, found.inode), mover_requests.COMPARE_AGAIN
        )
        self._notify.wake_lanes()
        return Busy("the PFS shows another file than the one that is known")

    # --- bringing it here ---------------------------------------------------------------------------------------------------

    def _fetch_to_tier(self, request: mover_requests.MoverRequest, found: FetchState, tier: Tier, source: int) -> None:
        content_id = self._insert_copy(found, tier)
        storage = self._tiers[tier]
        try:
            disk.act("fetch:reserved", lambda: None)
            storage.remove(content_id)
            fetched = self._copy_to_storage(request, found, storage, content_id, source)
            self._verify_copy(found, fetched.size, fetched.digest, source)
            if not disk.act("fetch:arrived", copies.record_fetched, self._db, found, fetched):
                raise Busy("the file changed while it was fetched")
        except BaseException:
            with suppress(OSError, CkptfsError):
                storage.remove(content_id)
            copies.delete_filling_copy(self._db, content_id, tier)
            raise

    def _insert_copy(self, found: FetchState, tier: Tier) -> int:
        if found.content is None:
            return copies.insert_reserved_copy(self._db, tier)
        if not copies.insert_filling_copy(self._db, found.content, tier):
            raise Busy("the file changed while it was fetched")
        return found.content.id

    def _copy_to_storage(
        self, request: mover_requests.MoverRequest, found: FetchState, storage: TierStorage, content_id: int, source: int
    ) -> FetchedContent:
        with disk.closing(storage.create(content_id)) as target:
            size, digest, blocks = self._copy_bytes(request, found, storage.tier, source, target)
            if storage.tier is not Tier.RAM:
                disk.act("fetch:fsync", os.fsync, target)
                disk.act("fetch:directory", storage.fsync_directory)
                os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)
                if transfer.read(target, label="fetch:check", before_block=self._build_progress(request)) != (size, digest, blocks):
                    raise DigestMismatch(f"what was written to {storage.tier} reads back as something else")
        return FetchedContent(content_id, storage.tier, size, digest, blocks)

    def _copy_bytes(
        self, request: mover_requests.MoverRequest, found: FetchState, tier: Tier, source: int, target: int
    ) -> transfer.ContentDigests:
        """Copy the bytes, where their digests are known so that they can be read as they come; what was copied."""
        progress, content = self._build_progress(request), found.content
        if content is None or not _has_block_digests(content):
            return transfer.copy(source, target, label="fetch", before_block=progress)
        assert content.digest is not None and content.block_digests is not None
        disk.act("fetch:truncate", os.ftruncate, target, content.size)
        blockwise = BlockwiseCopy(content.size, content.block_digests)
        with progress.publish_map(content, tier, target, blockwise.missing_blocks) as blocks:
            if os.fstat(source).st_size != content.size or not blockwise.copy(source, target, blocks):
                return 0, b"", b""
        return content.size, content.digest, content.block_digests

    def _verify_copy(self, found: FetchState, size: int, digest: bytes, source: int) -> None:
        """What was read must be what the catalog knows, and the file must not have changed meanwhile."""
        assert found.published is not None
        if not pfs_tree.matches_catalog(source, found.published):
            raise self._request_scan(found)
        known = found.content.digest if found.content is not None else found.published.digest
        if size != found.published.size or (known is not None and digest != known):
            raise DigestMismatch("the file on the PFS does not have the digest that it was sealed with, and no other copy is left")

    def _check_in_place(self, request: mover_requests.MoverRequest, found: FetchState, source: int) -> None:
        """Read a file on the PFS where it lies, once, when its digest is known: it will be read there by others."""
        assert found.published is not None
        if found.published.digest is None or found.published.is_verified:
            return
        size, digest, blocks = transfer.read(source, label="fetch:check", before_block=self._build_progress(request))
        self._verify_copy(found, size, digest, source)
        if not copies.record_pfs_verified(self._db, found, digest, blocks):
            raise Busy("the file changed while it was read")

    def _build_progress(self, request: mover_requests.MoverRequest) -> FetchProgress:
        return FetchProgress(self._db, self._tiers, self._notify, request)

    def _name(self, inode: int) -> str:
        return os.fsdecode(namespace.get_path(self._db, inode))


def _has_block_digests(content: Content) -> bool:
    """Whether each block of it can be found right by itself. What is small is here at once anyway."""
    if content.size <= limits.BLOCK_BYTES or not content.block_digests or content.digest is None:
        return False
    return hash_content(content.block_digests, content.size) == content.digest


def _is_shown_by_pfs(found: FetchState) -> bool:
    """Whether the PFS shows exactly what the file is to be."""
    if found.published is None:
        return False
    content: Content | None = found.content
    if content is None:
        return found.published.is_complete
    return content.state is ContentState.SEALED and found.published.is_complete and found.published.generation == content.generation
