"""Pure: messages of peers, checked against the limits before anything is touched, as values. Each raises Refusal with what was wrong."""

from ckptfs import digest, limits
from ckptfs.clique.shelf import UNKNOWN_BLOCK, Offer
from ckptfs.protocol import peer_pb2 as pb
from ckptfs_daemon.peer_frames import Command, blocks_of
from ckptfs_daemon.peer_refusals import Refusal, Why

ID_MAX = 2**63 - 1


def need(condition: bool, message: str) -> None:
    """Refuse as malformed unless `condition`."""
    if not condition:
        raise Refusal(Why.MALFORMED, message)


def content_id(number: int) -> int:
    need(0 < number <= ID_MAX, f"{number} is no content")
    return number


def content_digest(value: bytes) -> bytes | None:
    """A digest, or None where there is none."""
    need(len(value) in (0, digest.BLOCK_DIGEST_BYTES), f"a digest has {digest.BLOCK_DIGEST_BYTES} bytes, not {len(value)}")
    return value or None


def offer(request: pb.OfferRequest) -> Offer:
    """What a peer offers. Its digest is over its blocks' digests, or it is refused here."""
    content_id(request.content)
    need(0 < request.inode <= ID_MAX, f"{request.inode} is no inode")
    need(request.generation <= limits.GENERATION_MAX, f"{request.generation} is no generation")
    need(request.size <= limits.PEER_BLOCKS_MAX * limits.BLOCK_BYTES, f"{request.size} bytes are more than peers hold of one content")
    count = blocks_of(request.size)
    need(len(request.blocks) == count * digest.BLOCK_DIGEST_BYTES, f"{request.size} bytes have {count} blocks, not as many digests")
    found = content_digest(request.digest)
    if found is not None:
        need(digest.whole(request.blocks, request.size) == found, "the digest is not the one over the blocks' digests")
    if request.whole:
        need(found is not None and len(request.whole) == request.size, "a content that travels inside its offer is sealed and whole")
        need(request.size <= limits.PEER_WHOLE_BYTES_MAX, f"{request.size} bytes are too many to travel inside an offer")
    return Offer(request.content, request.inode, request.generation, request.size, found, bytes(request.blocks))


def offers(request: pb.OffersRequest) -> list[Offer]:
    """What a peer offers in one message: small contents, sealed and whole, each once, and their bytes are those of their digests."""
    need(0 < len(request.offers) <= limits.PEER_MANY_MAX, f"{len(request.offers)} contents are not between 1 and {limits.PEER_MANY_MAX}")
    size = sum(len(one.whole) for one in request.offers)
    need(size <= limits.PEER_MANY_BYTES_MAX, f"{size} bytes are too many to travel in one message")
    need(len({one.content for one in request.offers}) == len(request.offers), "a content is offered twice")
    for one in request.offers:
        need(bool(one.digest) and len(one.whole) == one.size, "what travels together is sealed and whole")
    found = [offer(one) for one in request.offers]
    for one in request.offers:
        if digest.block(one.whole) != one.blocks and one.size:
            raise Refusal(Why.WRONG_DIGEST, "the bytes are not those of the digest")
    return found


def offered(offer: Offer, number: int) -> bytes:
    """The digest that block `number` must have."""
    return offer.blocks[number * digest.BLOCK_DIGEST_BYTES : (number + 1) * digest.BLOCK_DIGEST_BYTES]


def lacking_makes_sense(offer: Offer, numbers: list[int]) -> bool:
    """Whether what a receiver says it lacks can be lacking: in order, in range, and offered."""
    count = blocks_of(offer.size)
    return all(0 <= number < count and offered(offer, number) != UNKNOWN_BLOCK for number in numbers)


def run(command: Command, size: int) -> range:
    """The blocks that a READ asks for."""
    need(0 < command.count <= limits.PEER_RUN_BLOCKS_MAX, f"{command.count} blocks are not between 1 and {limits.PEER_RUN_BLOCKS_MAX}")
    need(command.first + command.count <= blocks_of(size), f"there are only {blocks_of(size)} blocks")
    return range(command.first, command.first + command.count)


def seal_timeout(request: pb.SealRequest) -> float:
    """Seconds to wait at most."""
    need(request.timeout_ms <= limits.PEER_SEAL_WAIT_S_MAX * 1000, f"waits are at most {limits.PEER_SEAL_WAIT_S_MAX:g} s")
    return request.timeout_ms / 1000


def forgotten(request: pb.ForgetRequest) -> list[int]:
    """The contents to forget."""
    need(len(request.contents) <= limits.PEER_FORGET_MAX, f"more than {limits.PEER_FORGET_MAX} contents at once")
    return [content_id(number) for number in request.contents]
