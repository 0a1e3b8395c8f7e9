"""Any message at all: the peer protocol's parsers refuse or understand, and write nothing that is not right (F6, P4)."""

import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs import digest, limits
from ckptfs.clique.peer_api import Offer
from ckptfs.peers import messages
from ckptfs.peers.messages import BlockReceiver, Rejection, RejectReason, decode_bitmap, encode_bitmap
from ckptfs.protocol import peer_pb2 as pb

BLOCK, PIECE = 64, 16
NUMBERS = st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1))


@pytest.fixture(autouse=True, scope="module")
def short_blocks() -> Iterator[None]:
    """Blocks of 64 bytes in pieces of 16, so that many come and go."""
    patch = pytest.MonkeyPatch()
    patch.setattr(limits, "BLOCK_BYTES", BLOCK)
    patch.setattr(limits, "PEER_PIECE_BYTES", PIECE)
    yield
    patch.undo()


class Landed:
    """A landing that remembers, and demands that claims and ends match."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)
        self.open: set[int] = set()
        self.written: dict[int, bytes] = {}

    def claim_block(self, number: int) -> bytes:
        if number in self.written:
            raise Rejection(RejectReason.OUT_OF_ORDER, "again")
        assert 0 <= number < digest.count_blocks(self.size) and number not in self.open
        self.open.add(number)
        return digest.hash_block(self.data[number * BLOCK : (number + 1) * BLOCK])

    def write_block(self, number: int, pieces: list[bytes]) -> None:
        self.open.remove(number)
        self.written[number] = b"".join(pieces)

    def release_block(self, number: int) -> None:
        self.open.remove(number)


def right(data: bytes, number: int) -> list[bytes]:
    body = data[number * BLOCK : (number + 1) * BLOCK]
    return [struct.pack("<QIB3x", number, len(body), 0), *(body[start : start + PIECE] for start in range(0, len(body), PIECE))]


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A content, and messages: right ones, wrong ones, in any order."""
    data = draw(st.binary(min_size=1, max_size=5 * BLOCK))
    numbers = st.integers(0, digest.count_blocks(len(data)) - 1)
    good = numbers.map(lambda number: right(data, number))
    odd = st.tuples(NUMBERS, st.integers(0, 2**32 - 1), st.integers(0, 255)).map(lambda values: [struct.pack("<QIB3x", *values)])
    anything = st.lists(st.binary(max_size=2 * PIECE), max_size=2)
    torn = good.flatmap(st.permutations)
    parts = draw(st.lists(st.one_of(good, good, good, odd, anything, torn), max_size=8))
    return data, [message for part in parts for message in part]


@settings(max_examples=400)
@given(streams())
def test_whatever_arrives_only_right_blocks_are_written(stream: tuple[bytes, list[bytes]]) -> None:
    data, messages = stream
    landed = Landed(data)
    arriving = BlockReceiver(landed)
    try:
        for message in messages:
            arriving.accept_message(message)
    except Rejection:
        pass
    finally:
        arriving.close()
    assert landed.open == set()
    assert landed.written == {number: data[number * BLOCK : (number + 1) * BLOCK] for number in landed.written}


@settings(max_examples=50)
@given(st.binary(min_size=1, max_size=6 * BLOCK), st.booleans(), st.randoms())
def test_what_departs_arrives(data: bytes, squeeze: bool, random: object) -> None:
    import os

    fd = os.memfd_create("source")
    os.write(fd, data)
    numbers = list(range(digest.count_blocks(len(data))))
    random.shuffle(numbers)  # type: ignore[attr-defined]
    landed = Landed(data)
    arriving = BlockReceiver(landed)
    for message in messages.encode_blocks(fd, len(data), numbers, compress=squeeze):
        arriving.accept_message(message)
    arriving.accept_message(messages.encode_end(len(numbers)))
    os.close(fd)
    assert arriving.has_ended and len(landed.written) == len(numbers)


@settings(max_examples=300)
@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.binary(max_size=20), st.binary(max_size=100), st.binary(max_size=100), st.booleans())
def test_any_offer_is_refused_or_whole(
    content: int, inode: int, generation: int, size: int, found: bytes, blocks: bytes, whole: bytes, honest: bool
) -> None:
    if honest:
        found = digest.hash_content(blocks, size % 2**63)
    request = pb.OfferRequest(content=content, inode=inode, generation=generation, size=size, digest=found, blocks=blocks, whole=whole)
    try:
        offer = messages.parse_offer(pb.OfferRequest.FromString(request.SerializeToString()))
    except Rejection as refusal:
        assert refusal.reason is RejectReason.MALFORMED
        return
    assert offer.content > 0 and offer.inode > 0 and len(offer.blocks) == 16 * digest.count_blocks(offer.size)
    assert offer.is_early or digest.hash_content(offer.blocks, offer.size) == offer.digest
    assert not whole or len(whole) == offer.size


@given(st.binary(max_size=200))
def test_any_bytes_as_an_offer(message: bytes) -> None:
    from google.protobuf.message import DecodeError

    try:
        messages.parse_offer(pb.OfferRequest.FromString(message))
    except (Rejection, DecodeError):
        return


@given(st.sets(st.integers(0, 100)), st.integers(101, 200))
def test_maps_of_blocks_are_read_back(numbers: set[int], count: int) -> None:
    assert decode_bitmap(encode_bitmap(numbers, count), count) == sorted(numbers)
    with pytest.raises(Rejection):
        decode_bitmap(encode_bitmap(numbers, count) + b"\0", count)


@given(NUMBERS, st.integers(0, 2**32 - 1), st.integers(0, 2**40))
def test_runs_stay_inside_the_content(first: int, count: int, size: int) -> None:
    try:
        run = messages.parse_block_range(pb.ReadRequest(first=first, count=count), size)
    except Rejection:
        return
    assert 0 < len(run) <= limits.PEER_RUN_BLOCKS_MAX and run[0] >= 0 and run[-1] < digest.count_blocks(size)


def test_a_receiver_that_asks_for_what_was_not_offered_is_not_believed() -> None:
    offer = Offer(1, 1, 1, 2 * BLOCK, None, digest.hash_block(b"") + bytes(16))
    assert messages.are_valid_missing_blocks(offer, [0])
    assert not messages.are_valid_missing_blocks(offer, [1])
    assert not messages.are_valid_missing_blocks(offer, [2])
