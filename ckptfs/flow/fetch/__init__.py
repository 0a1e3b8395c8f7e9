"""Takes: wants of the kind 'fetch': files that somebody opens and that lie on other nodes or on the PFS only.
Leaves: a sealed content with a verified copy in RAM or NVMe, or the word that the file on the PFS may be read itself.
If we die here: a FILLING copy and its file, which recovery removes; the want is still open and is taken again.

Bytes that do not have the digest that is known of them are never served (P4, P7). Several steps may run at once, in threads of their own.
"""

import errno
import logging
import os
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass

from ckptfs import disk, limits
from ckptfs.catalog import contents, fetching, handles, pfs_paths, report, settling, wants
from ckptfs.catalog.database import Database
from ckptfs.catalog.fetching import FetchedContent, FetchState
from ckptfs.catalog.sharing import truth
from ckptfs.clique.peers import PeerFailed, PeerRefused
from ckptfs.clique.surroundings import Cluster
from ckptfs.config import Config
from ckptfs.digest import hash_content
from ckptfs.errors import Busy, CkptfsError, DigestMismatch, NoSpace, posix_error
from ckptfs.flow.fetch.alone import Alone, Elsewhere
from ckptfs.flow.fetch.by_blocks import ByBlocks
from ckptfs.flow.fetch.from_peers import FromPeers, NoneLeft
from ckptfs.flow.fetch.left import Left
from ckptfs.flow.fetch.patience import Patience
from ckptfs.flow.fetch.telling import Telling
from ckptfs.model import Content, ContentState, Notifier, Tier
from ckptfs.tiers import arrival, pfs_open, transfer
from ckptfs.tiers.place import Place, Places

log = logging.getLogger(__name__)

transfer.labels("fetch")
disk.declare_labels("fetch:check:read")
disk.declare_labels("fetch:reserved", "fetch:fsync", "fetch:directory", "fetch:arrived", "fetch:answered")

MOVED_ON = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.ELOOP}
"""What opening a file says when the PFS shows something else than the catalog knows."""


@dataclass(frozen=True, slots=True)
class Tries:
    """Of one want: how often it was tried, since when, and when it is tried again."""

    count: int
    since_s: float
    next_s: float


class Fetch:
    """Brings one file a step. Steps may overlap: a file that one of them has in hand is left alone by the others."""

    def __init__(self, db: Database, places: Places, config: Config, notify: Notifier, around: Cluster | None = None) -> None:
        """`around`: the other nodes; None on a node that is alone."""
        self._peers = None if around is None else FromPeers(db, places, around)
        self._alone = None if around is None else Alone(db, around)
        self._patience = None if around is None else Patience(db, around)
        self._left = None if around is None or config.pfs is None else Left(db, around, notify)
        self._store = None if around is None else around.store
        self._db = db
        self._places = places
        self._config = config
        self._notify = notify
        self._lock = threading.Lock()
        self._in_hand: set[int] = set()
        self._again: dict[int, Tries] = {}

    def step(self) -> bool:
        """Answer one want. True: there may be more at once."""
        if self._patience is not None:
            self._patience.follow()
        want = self._take()
        if want is None:
            return False
        try:
            self._answer(want)
        finally:
            with self._lock:
                self._in_hand.discard(want.inode)
        return True

    def next_due_s(self) -> float | None:
        """Until the first want that has to wait for something is tried again."""
        with self._lock:
            times = [tries.next_s for tries in self._again.values()]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def prepare(self) -> None:
        """Once, before the first step: forget what a former mover did not finish."""
        fetching.delete_filling_pfs_copies(self._db)
        arrival.forget_all(self._places[Tier.RAM].root)

    def _take(self) -> wants.MoverRequest | None:
        """The next want that nobody has in hand; its file is ours until the end of the step."""
        wanted = wants.list_open(self._db, wants.FETCH)
        now_s = time.monotonic()
        if self._left is not None:
            self._left.keep({want.id for want in wanted})
        with self._lock:
            self._again = {want.id: self._again[want.id] for want in wanted if want.id in self._again}
            for want in wanted:
                if want.inode not in self._in_hand and (want.id not in self._again or self._again[want.id].next_s <= now_s):
                    self._in_hand.add(want.inode)
                    return want
        return None

    # --- answering ------------------------------------------------------------------------------------------------------

    def _answer(self, want: wants.MoverRequest) -> None:
        try:
            result = self._fetch(want)
        except Elsewhere:
            self._soon(want)
        except (Busy, NoneLeft) as reason:
            if self._later(want, reason):
                return
            level = logging.WARNING if isinstance(reason, Busy) else logging.ERROR
            level = logging.DEBUG if self._failed(want, errno.EIO) else level
            log.log(level, "%s cannot be read: %s", self._name(want.inode), reason)
        except DigestMismatch as failure:
            level = logging.DEBUG if self._failed(want, errno.EIO) else logging.ERROR
            log.log(level, "%s cannot be read: %s", self._name(want.inode), failure)
        except (OSError, CkptfsError) as failure:
            code = failure.errno or errno.EIO
            self._failed(want, code if code in {errno.ESTALE, errno.ENOSPC, errno.EACCES} else errno.EIO)
            deleted = fetching.load_fetch_state(self._db, want.inode) is None
            level = logging.DEBUG if deleted else logging.WARNING
            log.log(level, "%s cannot be fetched: %s", self._name(want.inode), failure)
        except Exception:
            self._failed(want, errno.EIO)
            raise
        else:
            disk.act("fetch:answered", wants.mark_done, self._db, want.id, result)
            self._notify.notify_replies()

    def _failed(self, want: wants.MoverRequest, code: int) -> bool:
        """Whether the file is gone: what lost its last name since it was looked up the kernel looks up again, as ESTALE tells it to."""
        gone = self._is_gone(want)
        wants.mark_failed(self._db, want.id, errno.ESTALE if gone else code)
        self._notify.notify_replies()
        return gone

    def _is_gone(self, want: wants.MoverRequest) -> bool:
        return not contents.has_name(self._db, want.inode) or (self._peers is not None and self._peers.is_gone(want.inode))

    def _later(self, want: wants.MoverRequest, reason: Busy | NoneLeft) -> bool:
        """Try this want again after a while, each time a longer one; False when that is of no use, as where another file has its name."""
        if self._is_gone(want) and not handles.is_open(self._db, want.inode):
            return False
        now_s = time.monotonic()
        with self._lock:
            before = self._again.get(want.id, Tries(0, now_s, now_s))
            pause_s = min(limits.RETRY_FIRST_S * 2**before.count / 2, limits.FETCH_PAUSE_MAX_S)
            self._again[want.id] = Tries(before.count + 1, before.since_s, now_s + pause_s)
        soon = isinstance(reason, Busy) and before.count + 1 < limits.FETCH_TRIES_MAX and not self._is_vain(now_s - before.since_s)
        soon = (self._left is not None and self._left.may_come(want)) or soon
        if not soon and not self._may_come(want, before.since_s, reason):
            return False
        wants.record_progress(self._db, want.id)
        return True

    def _is_vain(self, waited_s: float) -> bool:
        """An island asks the store, which takes its time not to answer, with each try; there is no more to hear from it."""
        return self._patience is not None and not self._patience.in_touch() and waited_s >= limits.ETCD_WAIT_S

    def _may_come(self, want: wants.MoverRequest, since_s: float, reason: Busy | NoneLeft) -> bool:
        cause = reason.__cause__
        denied = isinstance(cause, PeerRefused) and cause.code == errno.ENOENT
        return self._patience is not None and self._patience.lasts(want.inode, since_s, denied=denied)

    def _soon(self, want: wants.MoverRequest) -> None:
        """Another node is at it: that is no try of ours."""
        wants.record_progress(self._db, want.id)
        now_s = time.monotonic()
        with self._lock:
            before = self._again.get(want.id, Tries(0, now_s, now_s))
            self._again[want.id] = Tries(before.count, before.since_s, now_s + limits.FETCH_SHARED_LOOK_S)

    def _fetch(self, want: wants.MoverRequest) -> str:
        """Do what is wanted; the result. Raises Busy when it has to wait for something."""
        found = fetching.load_fetch_state(self._db, want.inode)
        if self._peers is not None and found is not None and not found.has_local_copy:
            found = self._peers.look(want.inode, self._progress(want))
        if found is None:
            raise posix_error(errno.ESTALE)
        if found.content is None and found.published is None and fetching.get_content_id(self._db, want.inode) is not None:
            raise DigestMismatch("the cluster knows nothing of the content that the file should have")
        if found.has_local_copy or (found.content is None and found.published is None):
            return wants.FETCHED
        if found.content is not None and self._from_peers(want, found.content, shown=_shown(found)):
            return wants.FETCHED
        if not _shown(found):
            raise NoneLeft("no good copy is left, and the PFS does not show this generation of the file")
        assert found.published is not None
        with nullcontext() if self._alone is None else self._alone.reading(found):
            return self._from_pfs(want, found)

    def _from_pfs(self, want: wants.MoverRequest, found: FetchState) -> str:
        assert found.published is not None
        demanded = want.argument == wants.FOR_WRITING
        tier = self._tier(found.published.size, demanded, strange=found.published.digest is None)
        with disk.closing(self._open(found)) as source:
            if tier is not None and self._finds_room(want, found, tier, source):
                return wants.FETCHED
            if demanded:
                self._bring(want, found, Tier.PFS, source)
                return wants.FETCHED
            self._check_in_place(want, found, source)
        return wants.DIRECT

    def _finds_room(self, want: wants.MoverRequest, found: FetchState, tier: Tier, source: int) -> bool:
        """Bring it; False: others have taken the room in that tier meanwhile."""
        try:
            self._bring(want, found, tier, source)
        except OSError as failure:
            if failure.errno != errno.ENOSPC or tier is Tier.PFS:
                raise
            log.info("%s finds no room in %s any more", self._name(want.inode), tier)
            self._notify.wake_lanes()
            return False
        return True

    def _from_peers(self, want: wants.MoverRequest, content: Content, *, shown: bool) -> bool:
        """Bring a file from the nodes that have it; False when none of them gave it and the PFS may. Raises Busy to be tried again."""
        if self._peers is None or content.state is not ContentState.SEALED:
            return False
        sources = self._peers.sources(content)
        if not sources:
            return False
        tier = self._tier(content.size, want.argument == wants.FOR_WRITING or not shown)
        if tier is None:
            return False
        try:
            self._peers.bring(content, sources, tier, self._progress(want))
        except PeerFailed as failure:
            if shown:
                log.info("%s comes from the PFS: %s", self._name(want.inode), failure)
                return False
            raise Busy(str(failure)) from failure
        return True

    # --- where to ---------------------------------------------------------------------------------------------------------

    def _tier(self, size: int, demanded: bool, *, strange: bool = False) -> Tier | None:
        """Where the file shall go; None: nowhere, the PFS's own will do. `demanded`: it must come here; `strange`: never read before."""
        if demanded:
            return self._places.choose(size)
        generous = strange and size > limits.FETCH_WHOLE_BYTES
        with suppress(NoSpace):
            tier = self._places.choose(size * limits.FETCH_ROOM_RATIO if generous else size)
            if tier is not Tier.PFS:
                return tier
        self._notify.wake_lanes()  # Let others make room for the next one.
        return None

    # --- the file on the PFS -----------------------------------------------------------------------------------------------

    def _open(self, found: FetchState) -> int:
        """The file on the PFS, in the state that the catalog knows. Where a stranger changed it, its directory is visited first."""
        assert self._config.pfs is not None and found.published is not None
        self._find(found.inode)
        try:
            fd = pfs_open.open_named(self._db, self._config.pfs, found.inode)
        except OSError as failure:
            if failure.errno in MOVED_ON:
                raise self._moved_on(found) from failure
            raise
        try:
            if not pfs_open.same(fd, found.published):
                raise self._moved_on(found)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _find(self, inode: int) -> None:
        """Where the PFS shows a file now: other nodes may have moved what is above it."""
        if self._store is not None:
            with suppress(CkptfsError):
                truth.load_inodes(self._db, self._store, inode)

    def _moved_on(self, found: FetchState) -> Busy:
        """Have the directory compared; the want is tried again after it."""
        wants.insert_request(self._db, wants.SCAN, pfs_paths.get_parent(self._db, found.inode), wants.COMPARE_AGAIN)
        self._notify.wake_lanes()
        return Busy("the PFS shows another file than the one that is known")

    # --- bringing it here ---------------------------------------------------------------------------------------------------

    def _bring(self, want: wants.MoverRequest, found: FetchState, tier: Tier, source: int) -> None:
        number = self._announce(found, tier)
        place = self._places[tier]
        try:
            disk.act("fetch:reserved", lambda: None)
            place.remove(number)
            what = self._copy(want, found, place, number, source)
            self._compare(found, what.size, what.digest, source)
            if not disk.act("fetch:arrived", fetching.record_fetched, self._db, found, what):
                raise Busy("the file changed while it was fetched")
        except BaseException:
            with suppress(OSError, CkptfsError):
                place.remove(number)
            fetching.delete_filling_copy(self._db, number, tier)
            raise

    def _announce(self, found: FetchState, tier: Tier) -> int:
        if found.content is None:
            return fetching.insert_reserved_copy(self._db, tier)
        if not settling.insert_filling_copy(self._db, found.content, tier):
            raise Busy("the file changed while it was fetched")
        return found.content.id

    def _copy(self, want: wants.MoverRequest, found: FetchState, place: Place, number: int, source: int) -> FetchedContent:
        with disk.closing(place.create(number)) as target:
            size, digest, blocks = self._copied(want, found, place.tier, source, target)
            if place.tier is not Tier.RAM:
                disk.act("fetch:fsync", os.fsync, target)
                disk.act("fetch:directory", place.persist_names)
                os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)
                if transfer.read(target, label="fetch:check", before_block=self._progress(want)) != (size, digest, blocks):
                    raise DigestMismatch(f"what was written to {place.tier} reads back as something else")
        return FetchedContent(number, place.tier, size, digest, blocks)

    def _copied(self, want: wants.MoverRequest, found: FetchState, tier: Tier, source: int, target: int) -> transfer.Digested:
        """Copy the bytes, where their digests are known so that they can be read as they come; what was copied."""
        telling, content = self._progress(want), found.content
        if content is None or not _known_by_blocks(content):
            return transfer.copy(source, target, label="fetch", before_block=telling)
        assert content.digest is not None and content.block_digests is not None
        disk.act("fetch:truncate", os.ftruncate, target, content.size)
        one = ByBlocks(content.size, content.block_digests)
        with telling.published(content, tier, target, one.lacking) as blocks:
            if os.fstat(source).st_size != content.size or not one.bring(source, target, blocks):
                return 0, b"", b""
        return content.size, content.digest, content.block_digests

    def _compare(self, found: FetchState, size: int, digest: bytes, source: int) -> None:
        """What was read must be what the catalog knows, and the file must not have changed meanwhile."""
        assert found.published is not None
        if not pfs_open.same(source, found.published):
            raise self._moved_on(found)
        known = found.content.digest if found.content is not None else found.published.digest
        if size != found.published.size or (known is not None and digest != known):
            raise DigestMismatch("the file on the PFS does not have the digest that it was sealed with, and no other copy is left")

    def _check_in_place(self, want: wants.MoverRequest, found: FetchState, source: int) -> None:
        """Read a file on the PFS where it lies, once, when its digest is known: it will be read there by others."""
        assert found.published is not None
        if found.published.digest is None or found.published.is_verified:
            return
        size, digest, blocks = transfer.read(source, label="fetch:check", before_block=self._progress(want))
        self._compare(found, size, digest, source)
        if not fetching.record_pfs_verified(self._db, found, digest, blocks):
            raise Busy("the file changed while it was read")

    def _progress(self, want: wants.MoverRequest) -> Telling:
        return Telling(self._db, self._places, self._notify, want)

    def _name(self, inode: int) -> str:
        return os.fsdecode(report.get_path(self._db, inode))


def _known_by_blocks(content: Content) -> bool:
    """Whether each block of it can be found right by itself. What is small is here at once anyway."""
    if content.size <= limits.BLOCK_BYTES or not content.block_digests or content.digest is None:
        return False
    return hash_content(content.block_digests, content.size) == content.digest


def _shown(found: FetchState) -> bool:
    """Whether the PFS shows exactly what the file is to be."""
    if found.published is None:
        return False
    content: Content | None = found.content
    if content is None:
        return found.published.is_complete
    return content.state is ContentState.SEALED and found.published.is_complete and found.published.generation == content.generation
