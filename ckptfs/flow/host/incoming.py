"""Incoming copies: the file of a content from a peer, validation of its offer, quota of peers.

An offer is accepted from the node that made the content, from its last writer as the store says, and from a node that offers what the store
says. Other offers are deferred, since the store may not have the writer's news yet. An island accepts the offers of its peers.

Invariants:
- `_present` names only blocks whose digest was verified, by this module or by the server as they arrived.
- No peer can make this node hold and show bytes that a file never had.
- Hosted copies never exceed their share of a tier, and leave RAM below its watermark.

If we die here: recovery removes the FILLING copy and its file.
"""

import contextlib
import errno
import os
import time

from ckptfs import digest, disk
from ckptfs.catalog import contents, copies, identity, remote_contents
from ckptfs.catalog.database import Database
from ckptfs.clique import locations
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.peer_api import UNKNOWN_BLOCK, Offer
from ckptfs.errors import Busy, CkptfsError, NoSpace, StoreRefused, StoreUnreachable
from ckptfs.model import Tier
from ckptfs.tiers import space, transfer
from ckptfs.tiers.space import Capacity
from ckptfs.tiers.storage import Tiers, TierStorage

transfer.declare_labels("host")
disk.declare_labels("host:create", "host:allocate")


class IncomingCopy:
    """A reception between its first offer and its end. Used by one thread at a time."""

    def __init__(self, storage: TierStorage, reserved_id: int, fd: int, offer: Offer) -> None:
        self.storage = storage
        self.reserved_id = reserved_id
        self.fd = fd
        self.offer = offer
        self.missing_blocks: list[int] = []
        self.is_complete = False  # This node had all of it before: nothing is received, and nothing is made of it.
        self.is_unsearched = True  # Nothing was looked for on this node yet.
        self.has_received = False  # A peer has sent some of it.
        self.idle_s = time.monotonic()
        self._present: dict[int, bytes] = {}
        self._unverified: set[int] = set()
        self._sources: list[tuple[TierStorage, int, dict[bytes, int]]] = []

    @classmethod
    def create(cls, db: Database, storage: TierStorage, offer: Offer) -> "IncomingCopy":
        """Create a file for an offer. Raises NoRoom."""
        reserved_id = copies.insert_reserved_copy(db, storage.tier)
        try:
            storage.remove(reserved_id)
            return cls(storage, reserved_id, disk.act("host:create", storage.create, reserved_id), offer)
        except BaseException:
            _delete_reserved(db, storage, reserved_id)
            raise

    @classmethod
    def from_local_copy(cls, offer: Offer, storage: TierStorage, fd: int) -> "IncomingCopy":
        """Return the complete copy that this node has already."""
        incoming = cls(storage, 0, fd, offer)
        incoming.is_complete = True
        return incoming

    def set_offer(self, offer: Offer) -> None:
        """Make `offer` the expected content, and list its missing blocks in `missing_blocks`."""
        self.offer = offer
        if self.is_complete:
            return
        digests = digest.split_digests(offer.blocks)
        os.ftruncate(self.fd, offer.size)
        self._present = {number: known for number, known in self._present.items() if number < len(digests)}
        buffer = transfer.BlockBuffer("host")
        for number in sorted(self._unverified):
            if (
                number < len(digests)
                and digests[number] != UNKNOWN_BLOCK
                and digest.hash_block(buffer.read(self.fd, number)) == digests[number]
            ):
                self._present[number] = digests[number]
        self._unverified = set()
        if self.is_unsearched:
            # A hole reads as zeros, and need not come.
            self._present |= {number: known for number, known in enumerate(digests) if known == digest.ZERO_BLOCK}
        self._set_missing_blocks(digests)

    def _set_missing_blocks(self, digests: list[bytes]) -> None:
        self.missing_blocks = [
            number for number, wanted in enumerate(digests) if wanted != UNKNOWN_BLOCK and self._present.get(number) != wanted
        ]

    def allocate_missing(self) -> None:
        """Reserve the room of all that has to come. Raises NoSpace."""
        try:
            for start, length in digest.list_block_ranges(self.missing_blocks, self.offer.size):
                with self.storage.growing(length):
                    disk.act("host:allocate", os.posix_fallocate, self.fd, start, length)
        except OSError as failure:
            if failure.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise NoSpace(f"{self.storage.tier} is full") from failure

    def add_source(self, storage: TierStorage, content: int, block_digests: bytes | None) -> None:
        """Add a file that may have blocks of this content. Without `block_digests` they are computed now."""
        if block_digests is None:
            block_digests = _read_digests(storage, content)
        self._sources.append((storage, content, {known: number for number, known in enumerate(digest.split_digests(block_digests))}))

    def copy_local_blocks(self) -> None:
        """Copy what blocks those files have in common with what is lacking."""
        digests = digest.split_digests(self.offer.blocks)
        buffer = transfer.BlockBuffer("host")
        for storage, content, index in self._sources:
            wanted = [number for number in self.missing_blocks if digests[number] in index]
            if wanted:
                with contextlib.suppress(FileNotFoundError), disk.closing(storage.open(content)) as fd:
                    for number in wanted:
                        if buffer.copy(fd, index[digests[number]], self.fd, number, self.offer.size, digests[number]):
                            self._present[number] = digests[number]
                self._set_missing_blocks(digests)

    def mark_received(self) -> None:
        """Mark all missing blocks as present and verified."""
        digests = digest.split_digests(self.offer.blocks)
        for number in self.missing_blocks:
            self._present[number] = digests[number]
        self.has_received |= bool(self.missing_blocks)
        self.missing_blocks = []

    def mark_unverified(self) -> None:
        """Mark the missing blocks as unverified: some of them may have arrived."""
        self.has_received = True
        self._unverified = set(self.missing_blocks)
        for number in self.missing_blocks:
            self._present.pop(number, None)
        self.missing_blocks = []

    def has_whole_offer(self) -> bool:
        """Return True if every block of the offer is in place and the file has its length."""
        has_all_blocks = all(self._present.get(number) == wanted for number, wanted in enumerate(digest.split_digests(self.offer.blocks)))
        return has_all_blocks and os.fstat(self.fd).st_size == self.offer.size

    def close(self) -> None:
        """Give the descriptor back."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def discard(self, db: Database) -> None:
        """Throw away what came."""
        self.close()
        if self.reserved_id:
            _delete_reserved(db, self.storage, self.reserved_id)


def _delete_reserved(db: Database, storage: TierStorage, reserved_id: int) -> None:
    with contextlib.suppress(OSError, CkptfsError):
        storage.remove(reserved_id)
    copies.delete_filling_copy(db, reserved_id, storage.tier)


def _read_digests(storage: TierStorage, content: int) -> bytes:
    """Return the digests of the blocks of a file. Returns no digests if the file is gone."""
    try:
        fd = storage.open(content)
    except FileNotFoundError:
        return b""
    with disk.closing(fd):
        return transfer.read(fd, label="host")[2]


class OfferValidator:
    """Any thread."""

    def __init__(self, db: Database, cluster: Cluster) -> None:
        self._db = db
        self._cluster = cluster

    def validate(self, offer: Offer) -> None:
        """Raise Busy if no authorised node says that the content holds this. An early offer passes."""
        if offer.is_early or self._is_node(identity.get_origin_node(offer.content), offer.sender) or self._is_known(offer):
            return
        try:
            shared = locations.load(self._cluster.store, [offer.content])[offer.content]
        except (StoreUnreachable, StoreRefused):
            return
        remote_state = shared.state
        if self._is_node(shared.writer, offer.sender) or (
            remote_state is not None and (remote_state.generation, remote_state.digest) == (offer.generation, offer.digest)
        ):
            return
        if offer.digest is None or not shared.list_holders_of(offer.generation, offer.digest):
            raise Busy("the store does not say that this content holds what is offered")

    def _is_node(self, number: int | None, name: str) -> bool:
        node = None if number is None else self._cluster.view().by_number.get(number)
        return node is not None and node.name == name

    def _is_known(self, offer: Offer) -> bool:
        known = contents.get_content(self._db, offer.content)
        return known is not None and (known.inode, known.generation, known.digest) == (offer.inode, offer.generation, offer.digest)


WATERMARKS = {Tier.RAM: 0.80, Tier.NVME: 0.90}


class PeerQuota:
    """The peers' share of RAM and NVMe."""

    def __init__(self, db: Database, tiers: Tiers, share: float) -> None:
        self._db = db
        self._tiers = tiers
        self._share = share

    def choose_tier(self, size: int) -> Tier:
        """Return the tier for `size` more bytes, RAM first; prepared memory makes way. Raises NoSpace."""
        for tier in WATERMARKS:
            if tier in self._tiers and self._get_free_bytes(self._tiers.get_capacity(tier), tier) >= size:
                return tier
            if tier is Tier.RAM and self._tiers.give_back_prepared(lambda ram: self._get_free_bytes(ram, Tier.RAM) >= size, 0):
                return tier
        raise NoSpace(f"the share of this node's tiers that is set aside for peers has no room for {size} bytes")

    def get_free_bytes_in(self, tier: Tier) -> int:
        """Return the bytes that a tier may still hold. Prepared memory counts as free: it makes way."""
        capacity = self._tiers.get_capacity(tier)
        return self._get_free_bytes(space.add_free(capacity, self._tiers.prepared.get_bytes()) if tier is Tier.RAM else capacity, tier)

    def _get_free_bytes(self, capacity: Capacity, tier: Tier) -> int:
        share = int(self._share * capacity.total) - remote_contents.count_hosted_bytes(self._db, tier)
        return max(0, min(share, capacity.free, int(WATERMARKS[tier] * capacity.total) - capacity.used))
