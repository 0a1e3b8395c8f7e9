"""Pure: messages of peers, checked against the limits before anything is touched, as values. Each raises Refusal with what was wrong."""

from ckptfs import digest, limits
from ckptfs.clique.shelf import UNKNOWN_BLOCK, Offer
from ckptfs.protocol import peer_pb2 as pb
from ckptfs_daemon.peer_frames import Command, count_blocks
from ckptfs_daemon.peer_refusals import Rejection, RejectReason

ID_MAX = 2**63 - 1


def require(condition: bool, message: str) -> None:
    """Refuse as malformed unless `condition`."""
    if not condition:
        raise Rejection(RejectReason.MALFORMED, message)


def parse_content_id(number: int) -> int:
    require(0 < number <= ID_MAX, f"{number} is no content")
    return number


def parse_digest(value: bytes) -> bytes | None:
    """A digest, or None where there is none."""
    require(len(value) in (0, digest.BLOCK_DIGEST_BYTES), f"a digest has {digest.BLOCK_DIGEST_BYTES} bytes, not {len(value)}")
    return value or None


def parse_offer(request: pb.OfferRequest) -> Offer:
    """What a peer offers. Its digest is over its blocks' digests, or it is refused here."""
    parse_content_id(request.content)
    require(0 < request.inode <= ID_MAX, f"{request.inode} is no inode")
    require(request.generation <= limits.GENERATION_MAX, f"{request.generation} is no generation")
    require(request.size <= limits.PEER_BLOCKS_MAX * limits.BLOCK_BYTES, f"{request.size} bytes are more than peers hold of one content")
    count = count_blocks(request.size)
    require(len(request.blocks) == count * digest.BLOCK_DIGEST_BYTES, f"{request.size} bytes have {count} blocks, not as many digests")
    found = parse_digest(request.digest)
    if found is not None:
        require(digest.hash_content(request.blocks, request.size) == found, "the digest is not the one over the blocks' digests")
    if request.whole:
        require(found is not None and len(request.whole) == request.size, "a content that travels inside its offer is sealed and whole")
        require(request.size <= limits.PEER_WHOLE_BYTES_MAX, f"{request.size} bytes are too many to travel inside an offer")
    return Offer(request.content, request.inode, request.generation, request.size, found, bytes(request.blocks))


def parse_offers(request: pb.OffersRequest) -> list[Offer]:
    """What a peer offers in one message: small contents, sealed and whole, each once, and their bytes are those of their digests."""
    require(0 < len(request.offers) <= limits.PEER_MANY_MAX, f"{len(request.offers)} contents are not between 1 and {limits.PEER_MANY_MAX}")
    size = sum(len(one.whole) for one in request.offers)
    require(size <= limits.PEER_MANY_BYTES_MAX, f"{size} bytes are too many to travel in one message")
    require(len({one.content for one in request.offers}) == len(request.offers), "a content is offered twice")
    for one in request.offers:
        require(bool(one.digest) and len(one.whole) == one.size, "what travels together is sealed and whole")
    found = [parse_offer(one) for one in request.offers]
    for one in request.offers:
        if digest.hash_block(one.whole) != one.blocks and one.size:
            raise Rejection(RejectReason.WRONG_DIGEST, "the bytes are not those of the digest")
    return found


def get_block_digest(offer: Offer, number: int) -> bytes:
    """The digest that block `number` must have."""
    return offer.blocks[number * digest.BLOCK_DIGEST_BYTES : (number + 1) * digest.BLOCK_DIGEST_BYTES]


def are_valid_missing_blocks(offer: Offer, numbers: list[int]) -> bool:
    """Whether what a receiver says it lacks can be lacking: in order, in range, and offered."""
    count = count_blocks(offer.size)
    return all(0 <= number < count and get_block_digest(offer, number) != UNKNOWN_BLOCK for number in numbers)


def parse_block_range(command: Command, size: int) -> range:
    """The blocks that a READ asks for."""
    require(0 < command.count <= limits.PEER_RUN_BLOCKS_MAX, f"{command.count} blocks are not between 1 and {limits.PEER_RUN_BLOCKS_MAX}")
    require(command.first + command.count <= count_blocks(size), f"there are only {count_blocks(size)} blocks")
    return range(command.first, command.first + command.count)


def parse_seal_timeout_s(request: pb.SealRequest) -> float:
    """Seconds to wait at most."""
    require(request.timeout_ms <= limits.PEER_SEAL_WAIT_S_MAX * 1000, f"waits are at most {limits.PEER_SEAL_WAIT_S_MAX:g} s")
    return request.timeout_ms / 1000


def parse_forgotten_contents(request: pb.ForgetRequest) -> list[int]:
    """The contents to forget."""
    require(len(request.contents) <= limits.PEER_FORGET_MAX, f"more than {limits.PEER_FORGET_MAX} contents at once")
    return [parse_content_id(number) for number in request.contents]
