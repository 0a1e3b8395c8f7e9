"""What peers do for one another, with and without keys (N1, N2): the client and the server of the product together."""

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from daemon_under_test import eventually
from peer_world import Keyring, PeerNode, There, client, digests, offer_of, record_of
from peer_world import keyring as keyring

from ckptfs import limits
from ckptfs.clique.peer_api import UNKNOWN_BLOCK, Offer, PeerBusy, PeerCorrupt, PeerFailed, PeerRefused, SendResult
from ckptfs.peers.link import Link
from ckptfs.peers.messages import RejectReason
from ckptfs.peers.peer_client import PeerClient
from ckptfs.protocol import peer_pb2 as pb

BLOCK = limits.BLOCK_BYTES


class Pair:
    def __init__(self, directory: Path, keyring: Keyring | None, streams: int = 2) -> None:
        self.node = PeerNode(directory, "node1", keyring("node1") if keyring else None)
        self.peers = client("node2", keyring("node2") if keyring else None, streams=streams)

    def stop(self) -> None:
        self.peers.close()
        self.node.stop()


@pytest.fixture(params=["TLS", "without keys"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, keyring: Keyring) -> Iterator[Pair]:
    made = Pair(tmp_path, keyring if request.param == "TLS" else None)
    yield made
    made.stop()
    assert made.node.host.arriving() == 0


@pytest.fixture
def fast(tmp_path: Path, keyring: Keyring) -> Iterator[Pair]:
    made = Pair(tmp_path, keyring)
    yield made
    made.stop()


def file_of(directory: Path, data: bytes) -> int:
    path = directory / f"source-{random.getrandbits(48):x}"
    path.write_bytes(data)
    return os.open(path, os.O_RDONLY)


def send(peers: PeerClient, there: There, directory: Path, data: bytes, offer: Offer | None = None) -> tuple[int, int, bool]:
    fd = file_of(directory, data)
    try:
        sent = peers.send(there, offer or offer_of(data), fd)
    finally:
        os.close(fd)
    return sent.blocks_missing, sent.bytes_moved, sent.is_verified


SIZES = [0, 1, limits.PEER_INLINE_BYTES_MAX, limits.PEER_INLINE_BYTES_MAX + 1, BLOCK, BLOCK + 16, 3 * BLOCK + limits.PEER_PIECE_BYTES + 5]


@pytest.mark.parametrize("size", SIZES)
def test_what_was_sent_is_there_and_can_be_fetched(pair: Pair, tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    _, _, verified = send(pair.peers, pair.node.there, tmp_path, data)
    assert verified
    assert pair.node.host.held[7].sender == "node2", "the sender is the authenticated node"
    assert pair.node.host.path(7).read_bytes() == data
    record = pair.peers.get_manifest(pair.node.there, 7, digests(data)[0])
    assert record == record_of(offer_of(data))
    target, blocks = tmp_path / "target", list(range(-(-size // BLOCK)))
    came: list[int] = []
    with open(target, "w+b") as file:
        assert pair.peers.fetch([pair.node.there], record, blocks, file.fileno(), came.append) == size
    assert target.read_bytes() == data and sorted(came) == blocks
    assert pair.node.server.rejections.get_counts() == {}


def test_small_contents_travel_together_and_are_judged_one_by_one(fast: Pair, tmp_path: Path) -> None:
    """P4: each counts, or not, for itself."""
    datas = {content: os.urandom(content) for content in range(20)}
    fds = {content: file_of(tmp_path, data) for content, data in datas.items()}
    offers = [(offer_of(data, 100 + content), fds[content]) for content, data in datas.items()]
    offers[3] = (offer_of(b"was", 103), fds[3])
    blocking = fast.node.host.begin_reception(offer_of(b"x", 105))
    outcomes = fast.peers.send_many(fast.node.there, offers)
    assert isinstance(outcomes[3], PeerCorrupt) and isinstance(outcomes[5], PeerRefused) and outcomes[5].code == errno.EBUSY
    assert all(isinstance(one, SendResult) and one.is_verified for number, one in enumerate(outcomes) if number not in (3, 5))
    assert {content - 100: fast.node.host.path(content).read_bytes() for content in fast.node.host.held} == {
        content: data for content, data in datas.items() if content not in (3, 5)
    }
    assert {offer.sender for offer in fast.node.host.held.values()} == {"node2"}
    fast.node.host.abort_reception(blocking.token)
    for fd in fds.values():
        os.close(fd)


def test_only_what_is_lacking_travels(pair: Pair, tmp_path: Path) -> None:
    data = bytearray(os.urandom(5 * BLOCK))
    assert send(pair.peers, pair.node.there, tmp_path, bytes(data))[0] == 5
    data[BLOCK + 3] ^= 1
    lacking, moved, verified = send(pair.peers, pair.node.there, tmp_path, bytes(data), offer_of(bytes(data), generation=2))
    assert (lacking, verified) == (1, True) and BLOCK <= moved < BLOCK + 1024
    assert send(pair.peers, pair.node.there, tmp_path, bytes(data), offer_of(bytes(data), generation=2)) == (0, 0, True)


def test_an_early_offer_brings_what_no_longer_changes(pair: Pair, tmp_path: Path) -> None:
    data = os.urandom(3 * BLOCK)
    _, blocks = digests(data)
    early = Offer(7, 8, 1, len(data), None, blocks[:16] + UNKNOWN_BLOCK + blocks[32:])
    assert send(pair.peers, pair.node.there, tmp_path, data, early)[::2] == (2, False)
    assert 7 not in pair.node.host.held
    assert send(pair.peers, pair.node.there, tmp_path, data)[::2] == (1, True)


def test_what_goes_ahead_is_not_broken_off_by_the_rest(fast: Pair, tmp_path: Path) -> None:
    """X7: the offer after the seal waits for the early one that is still on its way, and brings only what that one did not."""
    data = os.urandom(3 * BLOCK)
    _, blocks = digests(data)
    early = Offer(7, 8, 1, len(data), None, blocks[:16] + UNKNOWN_BLOCK + blocks[32:])
    begun, go_on = threading.Event(), threading.Event()
    fd = file_of(tmp_path, data)

    def is_wanted() -> bool:
        begun.set()
        return go_on.wait(60)

    with ThreadPoolExecutor(1) as threads:
        ahead = threads.submit(fast.peers.send, fast.node.there, early, fd, is_wanted=is_wanted)
        assert begun.wait(60)
        rest = fast.peers.send(fast.node.there, offer_of(data), fd, is_wanted=lambda: go_on.set() or True)
    os.close(fd)
    assert [(one.blocks_missing, one.is_verified) for one in (ahead.result(), rest)] == [(2, False), (1, True)]
    assert fast.node.server.rejections.get_counts() == {}


def test_a_source_that_changed_is_found_out(pair: Pair, tmp_path: Path) -> None:
    """P4: a copy counts only with the digest that was offered."""
    data = os.urandom(3 * BLOCK)
    offer = offer_of(data)
    changed = data[: BLOCK + 9] + b"?" + data[BLOCK + 10 :]
    with pytest.raises(PeerCorrupt):
        send(pair.peers, pair.node.there, tmp_path, changed, offer)
    with pytest.raises(PeerCorrupt):
        send(pair.peers, pair.node.there, tmp_path, data[:BLOCK], offer)
    eventually(lambda: pair.node.host.arriving() == 0, what="what had arrived is given up")
    assert not pair.node.host.held
    assert send(pair.peers, pair.node.there, tmp_path, data)[2]


def test_a_small_source_that_changed_is_found_out(fast: Pair, tmp_path: Path) -> None:
    with pytest.raises(PeerCorrupt):
        send(fast.peers, fast.node.there, tmp_path, b"now", offer_of(b"was"))


def test_no_room_says_so(pair: Pair, tmp_path: Path) -> None:
    pair.node.host.room_bytes = BLOCK
    with pytest.raises(PeerRefused) as refused:
        send(pair.peers, pair.node.there, tmp_path, os.urandom(BLOCK + 1))
    assert refused.value.code == errno.ENOSPC
    assert pair.node.server.rejections.get_counts() == {"node2": {"full": 1}}


def test_a_missing_content_is_not_lent(pair: Pair) -> None:
    with pytest.raises(PeerRefused) as refused:
        pair.peers.get_manifest(pair.node.there, 99, None)
    assert refused.value.code == errno.ENOENT
    offer = pair.node.host.hold(b"x", 99)
    assert pair.peers.get_manifest(pair.node.there, 99, None) == record_of(offer)
    with pytest.raises(PeerRefused):
        pair.peers.get_manifest(pair.node.there, 99, bytes(16))


@pytest.mark.parametrize("lie", [{"generation": 2**63}, {"generation": limits.GENERATION_MAX + 1}, {"inode": 2**64 - 1}, {"inode": 0}])
def test_numbers_that_cannot_be_are_a_lie(fast: Pair, lie: dict[str, int]) -> None:
    """They would break the catalog of whoever believes them."""
    fast.node.host.held[5] = replace(fast.node.host.hold(b"abc", 5), **lie)  # type: ignore[arg-type]
    with pytest.raises(PeerCorrupt):
        fast.peers.request_seal(fast.node.there, 5, 3.0)
    with pytest.raises(PeerCorrupt):
        fast.peers.get_manifest(fast.node.there, 5, None)


def test_the_rest_of_the_calls(fast: Pair) -> None:
    offer = fast.node.host.hold(b"abc", 5)
    assert fast.peers.request_seal(fast.node.there, 5, 3.0) == record_of(offer)
    assert fast.peers.request_seal(fast.node.there, 6, 1e9) is None
    assert fast.node.host.sealed_soon == [(5, 3.0), (6, limits.PEER_SEAL_WAIT_S_MAX)]
    fast.peers.release_copies(fast.node.there, list(range(1, limits.PEER_FORGET_MAX + 2)))
    assert len(fast.node.host.forgotten) == limits.PEER_FORGET_MAX + 1
    answer = fast.peers.ping(fast.node.there)
    assert answer.rtt_s > 0 and abs(answer.clock_offset_s) <= answer.rtt_s, "both read one clock"


def test_a_call_that_is_no_longer_wanted_ends(pair: Pair, tmp_path: Path) -> None:
    data = os.urandom(4 * BLOCK)
    asked = iter([True, True, False])
    fd = file_of(tmp_path, data)
    with pytest.raises(PeerFailed, match="no longer wanted"):
        pair.peers.send(pair.node.there, offer_of(data), fd, is_wanted=lambda: next(asked, False))
    os.close(fd)
    eventually(lambda: pair.node.host.arriving() == 0, what="what had arrived is given up")


def test_nobody_there_says_so_at_once(keyring: Keyring) -> None:
    peers = client("node2", keyring("node2"))
    with pytest.raises(PeerFailed, match="does not answer"):
        peers.ping(There("node1", "127.0.0.1:9"))
    assert [node.name for node in peers.rank([There("node1", "127.0.0.1:9"), There("node3", "127.0.0.1:9")])] == ["node3", "node1"]
    peers.close()


def test_copies_are_closed_after_the_last_read(fast: Pair, tmp_path: Path) -> None:
    offer = fast.node.host.hold(os.urandom(2 * BLOCK))
    with open(tmp_path / "target", "w+b") as file:
        for _ in range(3):
            fast.peers.fetch([fast.node.there], record_of(offer), [0, 1], file.fileno())
    eventually(lambda: fast.node.server.table.read_count == 0, what="the copies are closed")


def test_a_content_that_is_deleted_while_it_is_read_stays_readable(pair: Pair, tmp_path: Path) -> None:
    """P7: what a peer reads is open for its next read, too."""
    data = os.urandom(3 * BLOCK)
    offer = pair.node.host.hold(data)

    def delete(_: int) -> None:
        if pair.node.host.held.pop(offer.content, None) is not None:
            pair.node.host.path(offer.content).unlink()

    with open(tmp_path / "target", "w+b") as file:
        pair.peers.fetch([pair.node.there], record_of(offer), [0, 1, 2], file.fileno(), delete)
    assert (tmp_path / "target").read_bytes() == data and not pair.node.host.held


def test_a_stream_that_fails_takes_nothing_from_the_other_streams_of_its_reader(
    fast: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P7: the next of them reads the copy that the peer kept open, although the content was deleted meanwhile."""
    data = os.urandom(3 * BLOCK)
    offer, has_begun, failed = fast.node.host.hold(data), threading.Event(), list[threading.Thread]()
    open_read_stream = Link.open_read_stream

    def fail_once(link: Link, request: pb.ReadRequest) -> Any:
        if request.first == 1 and not failed:
            assert has_begun.wait(60)
            failed.append(threading.current_thread())
            raise PeerBusy("this one is too many", RejectReason.TOO_MANY)
        return open_read_stream(link, request)

    def notify(link: Link, call: Callable[..., Any], request: Any) -> None:
        """In order with the reads that follow."""
        link.call(call, request)

    def delete(number: int) -> None:
        if number == 0:
            fast.node.host.path(offer.content).unlink()
            has_begun.set()
            eventually(lambda: failed and not failed[0].is_alive(), what="the other stream has ended")

    monkeypatch.setattr(Link, "open_read_stream", fail_once)
    monkeypatch.setattr(Link, "notify", notify)
    with open(tmp_path / "target", "w+b") as file:
        fast.peers.fetch([fast.node.there], record_of(offer), [0, 1, 2], file.fileno(), delete)
    assert (tmp_path / "target").read_bytes() == data
    eventually(lambda: fast.node.server.table.read_count == 0, what="the copy is closed")


def test_a_stream_that_ends_after_its_reader_leaves_no_copy_open(fast: Pair) -> None:
    """A peer that has all it wants says so while its last stream ends, or has died; the space of a deleted content is needed."""
    offer, table = fast.node.host.hold(os.urandom(BLOCK)), fast.node.server.table
    assert offer.digest is not None
    ends = (partial(table.end_reading, "node2", offer.content), partial(table.end_all_of_peer, "node2"), partial(table.end_idle, True))
    for end in ends:
        with table.lend_copy("node2", offer.content, offer.digest) as copy:
            end()
            assert os.fstat(copy.fd).st_size == BLOCK
        with pytest.raises(OSError):
            os.fstat(copy.fd)
    with table.lend_copy("node2", offer.content, offer.digest) as copy:
        assert table.read_count == 1
    assert table.read_count == 1 and os.fstat(copy.fd).st_size == BLOCK
    table.end_reading("node2", offer.content)
    assert table.read_count == 0


def test_many_at_once(pair: Pair, tmp_path: Path) -> None:
    datas = {content: os.urandom(BLOCK + content) for content in range(10, 16)}

    def send(content: int) -> bool:
        fd = file_of(tmp_path, datas[content])
        try:
            return pair.peers.send(pair.node.there, offer_of(datas[content], content), fd).is_verified
        finally:
            os.close(fd)

    with ThreadPoolExecutor(len(datas)) as threads:
        assert all(threads.map(send, datas))
    assert {content: pair.node.host.path(content).read_bytes() for content in datas} == datas
