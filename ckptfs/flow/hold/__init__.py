"""Takes: offers of peers, block by block, and their questions for what lies here; by content id only.
Leaves: verified copies that count (`content.peer = 1`), in the share of the tiers that is set aside for peers.
If we die here: a reception is a FILLING copy without a content, which recovery removes with its file; the peer offers again.

What arrives lies under an id of its own until every digest was right, and takes the content's name then: whoever reads an older
generation keeps the file that he has open, and a part is never taken for the whole (P4, P7). Called by the peer server's threads.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence

from ckptfs import digest, disk, limits
from ckptfs.catalog import holding, settling
from ckptfs.catalog.database import Database
from ckptfs.catalog.holding import RemoteState
from ckptfs.clique.shelf import CopyNotFound, CopyUnavailable, Offer, OpenCopy, Reception
from ckptfs.clique.surroundings import Cluster
from ckptfs.errors import Busy, CkptfsError, InvalidArgument
from ckptfs.flow.hold.arriving import Arriving
from ckptfs.flow.hold.believed import Believed
from ckptfs.flow.hold.open_states import OpenStates
from ckptfs.flow.hold.room import Room
from ckptfs.model import Content, ContentState, CopyState, Notifier, Tier
from ckptfs.tiers import older, transfer
from ckptfs.tiers.place import Place, Places

log = logging.getLogger(__name__)

transfer.labels("hold:check")
disk.declare_labels("hold:fsync", "hold:directory", "hold:outdated", "hold:rename", "hold:counted", "hold:persist")

SEAL_LOOK_S = 0.01
SOUGHT_BYTES_MIN = 256 * limits.KIB
"""Less than this is sent sooner than looked for."""


class Hold:
    """The shelf: what peers may do on this node."""

    def __init__(self, db: Database, places: Places, share: float, notify: Notifier, around: Cluster) -> None:
        self._db = db
        self._believed = Believed(db, around)
        self._places = places
        self._notify = notify
        self._room = Room(db, places, share)
        self._lock = threading.Lock()
        self._tokens = itertools.count(1)
        self._arriving: dict[int, Arriving] = {}
        self._busy: dict[int, int] = {}
        """Content -> the token of who is sending it now."""
        self._pause = threading.Event()
        self._open = OpenStates(db, places)
        self.doubted: set[int] = set()
        """Contents that a peer said need not be held: the reconcile flow asks the store."""

    def step(self) -> bool:
        """Drop what nobody went on sending. Never more to do."""
        self._drop_stale()
        return False

    def next_due_s(self) -> float | None:
        """Until the next look."""
        return limits.RECEPTION_KEPT_S if self._arriving else None

    # --- receiving ---------------------------------------------------------------------------------------------------

    def begin_reception(self, offer: Offer) -> Reception:
        """Prepare for the blocks of `offer`."""
        _demand_whole(offer)
        self._demand_wanted(offer)
        self._believed.demand(offer)
        token = self._take(offer.content)
        try:
            arriving = self._prepared(offer)
        except BaseException:
            self._leave(offer.content)
            raise
        return Reception(token, arriving.fd, arriving.lacking)

    def _take(self, content: int) -> int:
        with self._lock:
            if content in self._busy:
                raise Busy(f"content {content} is arriving already")
            if len(self._busy) >= limits.RECEPTIONS_MAX:
                raise Busy(f"{limits.RECEPTIONS_MAX} contents are arriving already")
            token = self._busy[content] = next(self._tokens)
        self._drop_stale()
        return token

    def _leave(self, content: int) -> None:
        with self._lock:
            self._busy.pop(content, None)

    def _demand_wanted(self, offer: Offer) -> None:
        """Refuse what is older than what is known here, and what somebody writes here just now."""
        known = settling.get_content(self._db, offer.content)
        ahead = offer.generation - (0 if known is None else known.generation)
        if ahead > limits.GENERATIONS_AHEAD_MAX:
            raise InvalidArgument(f"generation {offer.generation} of this content is too far ahead of what is known here")
        if known is None:
            return
        if known.state is ContentState.OPEN:
            raise Busy("somebody writes this content here")
        if known.state is ContentState.DOOMED:
            raise InvalidArgument("this content was deleted")
        if known.generation > offer.generation:
            raise InvalidArgument(f"generation {known.generation} of this content is known here; offered: {offer.generation}")
        if known.generation == offer.generation and None not in (known.digest, offer.digest) and known.digest != offer.digest:
            raise InvalidArgument("this generation of the content has another digest here")

    def _prepared(self, offer: Offer) -> Arriving:
        """What arrived of this content before, or a new file with what blocks are here already."""
        with self._lock:
            arriving = self._arriving.pop(offer.content, None)
        if arriving is None:
            if offer.digest is not None and (here := self._here(offer)) is not None:
                arriving = Arriving.whole(offer, *here)
            else:
                arriving = Arriving.begin(self._db, self._places[self._room.choose(offer.size)], offer)
        try:
            arriving.aim(offer)
            if not arriving.done:
                self._fill_from_here(arriving)
        except BaseException:
            arriving.give_up(self._db)
            raise
        with self._lock:
            self._arriving[offer.content] = arriving
        return arriving

    def _here(self, offer: Offer) -> tuple[Place, int] | None:
        """(place, descriptor) of a verified copy of exactly this; None when there is none."""
        try:
            loan, place = self._lend(offer.content, offer.digest)
        except CopyNotFound:
            return None
        return place, loan.fd

    def _fill_from_here(self, arriving: Arriving) -> None:
        """Blocks of an older generation, or of whatever came last."""
        number = arriving.offer.content
        if arriving.fresh and arriving.offer.size >= SOUGHT_BYTES_MIN:
            known = settling.get_content(self._db, number)
            for copy in settling.list_copies(self._db, number):
                if copy.state in (CopyState.GOOD, CopyState.STALE) and copy.tier in self._places and copy.tier is not Tier.PFS:
                    good = known is not None and copy.state is CopyState.GOOD
                    arriving.know(self._places[copy.tier], number, known.block_digests if known is not None and good else None)
            left = limits.BLOCK_SOURCES_BLOCKS_MAX
            for content, tier, blocks in holding.list_recent_blocks(self._db, SOUGHT_BYTES_MIN, limits.BLOCK_SOURCES_MAX):
                left -= len(blocks) // digest.BLOCK_DIGEST_BYTES
                if content != number and tier in self._places and left >= 0:
                    arriving.know(self._places[tier], content, blocks)
        arriving.fresh = False
        arriving.take_from_here()

    def finish_reception(self, token: int) -> bool:
        """Every lacking block was written, and its digest was right as it arrived."""
        arriving = self._of(token)
        offer = arriving.offer
        try:
            if arriving.done:
                arriving.close()
                counts = holding.record_remote(self._db, _heard(offer))
                holding.mark_unannounced(self._db, offer.content)
                return self._end(arriving, counts)
            arriving.came()
            if offer.is_early:
                arriving.idle_s = time.monotonic()
                return True
            return self._end(arriving, self._count(arriving, offer))
        except BaseException:
            self._end(arriving, False)
            raise
        finally:
            self._leave(offer.content)

    def _end(self, arriving: Arriving, counted: bool) -> bool:
        with self._lock:
            self._arriving.pop(arriving.offer.content, None)
        if not counted:
            arriving.give_up(self._db)
        return counted

    def _count(self, arriving: Arriving, offer: Offer) -> bool:
        """Make what is all there a copy that counts, under the content's own name."""
        if not arriving.right() or not self._kept(arriving.place, arriving.fd, offer):
            log.error("what arrived of content %d does not have the digest that was offered; it was thrown away", offer.content)
            return False
        place = arriving.place
        # What the file held so far must not count any more before it is another one. What was written here since does not give way.
        with self._db.transaction():
            self._demand_way(offer)
            disk.act("hold:outdated", holding.mark_copies_stale, self._db, offer.content)
        with self._db.transaction():
            # Only one generation of a content can arrive at a time. Who fetches it just now finds this one in its place.
            self._demand_way(offer)
            disk.act("hold:rename", place.rename, arriving.number, offer.content)
            if not holding.record_hosted_copy(self._db, _heard(offer), arriving.number, place.tier):
                raise Busy("the content moved on")
        arriving.close()
        disk.act("hold:counted", lambda: None)
        if place.tier is not Tier.RAM:
            place.persist_names()
            disk.act("hold:persist", self._db.persist)
        self._drop_former(offer.content, place.tier)
        self._notify.wake_lanes()
        return True

    def _demand_way(self, offer: Offer) -> None:
        """Refuse when what is known here does not give way to what is offered any more: somebody wrote here meanwhile, or deleted it."""
        known = settling.get_content(self._db, offer.content)
        if known is None:
            return
        mine = known.state is ContentState.CLOSED and not known.is_remote
        same = known.generation == offer.generation and known.digest in (None, offer.digest)
        gives_way = known.generation < offer.generation and not holding.is_own_unpublished(self._db, offer.content)
        if known.state in (ContentState.OPEN, ContentState.DOOMED) or mine or not (same or gives_way):
            raise Busy("the content moved on")

    def _kept(self, place: Place, fd: int, offer: Offer) -> bool:
        """On a disk the bytes are read back from where they lie; in RAM they were written a moment ago by the one who checked them."""
        if place.tier is Tier.RAM:
            return True
        disk.act("hold:fsync", os.fsync, fd)
        disk.act("hold:directory", place.persist_names)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return transfer.read(fd, label="hold:check") == (offer.size, offer.digest, offer.blocks)

    def _drop_former(self, content: int, tier: Tier) -> None:
        """Copies of the former generation in other tiers."""
        for copy in settling.list_copies(self._db, content):
            if copy.tier is not tier and copy.state is CopyState.STALE and copy.tier is not Tier.PFS and copy.tier in self._places:
                settling.delete_copy(self._db, content, copy.tier)
                self._places[copy.tier].remove(content)

    def abort_reception(self, token: int, *, keep_blocks: bool = True) -> None:
        """The transfer ended early: what came is looked at again when the rest is offered."""
        try:
            arriving = self._of(token)
        except InvalidArgument:
            return
        if arriving.done:
            arriving.close()
            self._end(arriving, True)
        elif not (keep_blocks or arriving.begun):
            self._end(arriving, False)
        else:
            arriving.doubt()
            arriving.idle_s = time.monotonic()
        self._leave(arriving.offer.content)

    def _of(self, token: int) -> Arriving:
        with self._lock:
            for content, known in self._busy.items():
                if known == token and content in self._arriving:
                    return self._arriving[content]
        raise InvalidArgument("no such transfer is under way")

    def _drop_stale(self) -> None:
        """What nobody went on sending goes, the oldest first where there are too many."""
        now_s = time.monotonic()
        with self._lock:
            idle = sorted((one.idle_s, content) for content, one in self._arriving.items() if content not in self._busy)
            many = len(idle) - limits.RECEPTIONS_MAX
            gone = [content for rank, (since_s, content) in enumerate(idle) if rank < many or now_s - since_s > limits.RECEPTION_KEPT_S]
            stale = [self._arriving.pop(content) for content in gone]
        for arriving in stale:
            arriving.give_up(self._db)

    # --- lending -----------------------------------------------------------------------------------------------------

    def open_copy(self, content: int, digest: bytes | None) -> OpenCopy:
        """A copy to read from. It stays readable when it is dropped meanwhile."""
        return self._lend(content, digest)[0]

    def _lend(self, number: int, digest: bytes | None) -> tuple[OpenCopy, Place]:
        known = settling.get_content(self._db, number)
        if known is not None and known.state is ContentState.OPEN and (loan := self._open.lend(number, digest)) is not None:
            return loan
        if known is not None and known.is_remote and known.state is ContentState.CLOSED and digest is not None:
            return self._lend_older(known, digest)
        if known is None or known.state is not ContentState.SEALED or known.digest is None or digest not in (None, known.digest):
            raise _not_here(known, f"content {number} is not here, or not in that state")
        for copy in settling.list_copies(self._db, number):
            if copy.state is not CopyState.GOOD or copy.tier not in self._places or copy.tier is Tier.PFS:
                continue
            try:
                fd = self._places[copy.tier].open(number)
            except FileNotFoundError:
                continue
            if settling.is_unchanged(self._db, known):
                return OpenCopy(
                    number, known.inode, known.generation, known.size, known.digest, known.block_digests or b"", fd
                ), self._places[copy.tier]
            os.close(fd)
        raise _not_here(known, f"no copy of content {number} is here")

    def _lend_older(self, known: Content, wanted: bytes) -> tuple[OpenCopy, Place]:
        """What lay here before its writer told that there is more, and has not sealed it: all that is left when that one dies."""
        found = older.find(self._db, self._places, known.id, wanted)
        if found is None:
            raise CopyNotFound(f"content {known.id} is not here in that state")
        return OpenCopy(known.id, known.inode, known.generation, found.size, wanted, found.blocks, found.fd), found.place

    def seal_and_open(self, content: int, timeout_s: float) -> OpenCopy | None:
        """Wait until a content that is closed here is sealed. Of one that is still written: what it holds now."""
        until_s = time.monotonic() + min(timeout_s, limits.SEAL_SOON_MAX_S)
        while True:
            known = settling.get_content(self._db, content)
            if known is None or known.is_remote:
                raise CopyNotFound(f"content {content} is not this node's own")
            if known.state is ContentState.SEALED:
                return self.open_copy(content, None)
            if known.state not in (ContentState.OPEN, ContentState.CLOSED):
                raise CopyNotFound(f"content {content} is gone")
            if known.state is ContentState.OPEN and (loan := self._open.now(content)) is not None:
                return loan
            if time.monotonic() > until_s:
                return None
            self._notify.wake_lanes()
            self._pause.wait(SEAL_LOOK_S)

    # --- the rest ----------------------------------------------------------------------------------------------------

    def release_copies(self, contents: Sequence[int]) -> None:
        """Nothing goes at a peer's word alone: the store is asked first."""
        with self._lock:
            # What is too much is found by the next sweep.
            self.doubted.update(contents[: max(0, limits.DOUBTED_MAX - len(self.doubted))])
        self._notify.wake_lanes()

    def get_free_bytes(self) -> int:
        """How many more bytes this node would hold for its peers."""
        return self._room.free()

    def close(self) -> None:
        """Give back what is arriving."""
        with self._lock:
            every, self._arriving = list(self._arriving.values()), {}
        for arriving in every:
            try:
                arriving.give_up(self._db)
            except (OSError, CkptfsError) as failure:
                log.warning("what had arrived of content %d stays until the next start: %s", arriving.offer.content, failure)


def _demand_whole(offer: Offer) -> None:
    """An offer that contradicts itself is refused before anything is made for it."""
    count = -(-offer.size // limits.BLOCK_BYTES)
    if not 0 <= offer.size <= limits.FILE_BYTES_MAX or count > limits.BLOCK_DIGESTS_MAX:
        raise InvalidArgument(f"{offer.size} bytes are too many for a copy on another node")
    if len(offer.blocks) != count * digest.BLOCK_DIGEST_BYTES:
        raise InvalidArgument(f"{offer.size} bytes have {count} blocks; {len(offer.blocks)} bytes of digests were offered")
    if offer.digest is not None and digest.hash_content(offer.blocks, offer.size) != offer.digest:
        raise InvalidArgument("the digest that was offered is not that of the blocks")
    if offer.content <= 0 or offer.inode <= 0 or offer.generation < 0:
        raise InvalidArgument("no such content can be")


def _not_here(known: Content | None, message: str) -> CopyNotFound:
    """What this node wrote itself is not gone because it cannot be lent."""
    mine = known is not None and not known.is_remote and known.state is not ContentState.DOOMED
    return CopyUnavailable(message) if mine else CopyNotFound(message)


def _heard(offer: Offer) -> RemoteState:
    return RemoteState(offer.content, offer.inode, offer.generation, offer.size, offer.digest, offer.blocks)
