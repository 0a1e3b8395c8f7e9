"""`Peers`, as `ckptfs.clique.peers` describes it: one link for each node, and what is done over them.

Any thread may call; calls block. Links are bounded: the one that was used longest ago goes when there are too many.
If we die here: peers end what we left; nothing is kept here but figures.
"""

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ckptfs import digest, limits
from ckptfs.clique.keys import Identity
from ckptfs.clique.peers import Asked, OnBlock, PeerFailed, PeerLied, PeerRefused, Reachable, Record, Sent, Speed
from ckptfs.clique.revoked import Revoked
from ckptfs.clique.shelf import Offer
from ckptfs.errors import Refused
from ckptfs.protocol import peer_pb2 as pb
from ckptfs_daemon import peer_checks, peer_fetch, peer_send
from ckptfs_daemon.peer_frames import block_bytes, blocks_of, numbers_of
from ckptfs_daemon.peer_link import Link
from ckptfs_daemon.peer_refusals import Refusal

CORES_A_STREAM = 4
AGAIN_S = 0.1


class PeerClient:
    """The other nodes of `cluster`, for the node `me`."""

    def __init__(
        self, me: str, cluster: str, identity: Identity | None, *, bulk: bool = True, streams: int | None = None,
        revoked: Revoked | None = None,
    ) -> None:  # fmt: skip
        self._about = me, cluster, identity
        self._revoked = revoked or Revoked(None)
        self._bulk = bulk
        cores = os.cpu_count() or 1
        self._streams = streams or max(1, min(limits.PEER_LINK_STREAMS_MAX, cores // CORES_A_STREAM))
        self._links: dict[str, Link] = {}
        self._lock = threading.Lock()

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, node: Reachable, offer: Offer, source_fd: int, *, wanted: Callable[[], bool] = lambda: True) -> Sent:
        """See `Peers.send`."""
        link = self._link(node)
        if blocks_of(offer.size) > limits.PEER_BLOCKS_MAX:
            raise Refused(f"{offer.size} bytes are more than peers hold of one content")
        request = _request(offer)
        if not offer.early and 0 < offer.size <= limits.PEER_WHOLE_BYTES_MAX:
            return _send_whole(link, request, source_fd)
        with link.content(offer.content, wanted):
            return self._send_lacking(link, offer, request, source_fd, wanted)

    def _send_lacking(self, link: Link, offer: Offer, request: Any, source_fd: int, wanted: Callable[[], bool]) -> Sent:
        """Offer a content and send the blocks that the peer asks for."""
        reply = link.ask(link.calls.Offer, request, limits.PEER_DISK_S)
        lacking = _lacking(link, offer, reply.lacking)
        try:
            moved = self._send_blocks(link, offer, source_fd, reply.transfer, lacking, wanted)
            verified = link.ask(link.calls.Finish, pb.TransferRequest(transfer=reply.transfer), limits.PEER_DISK_S).verified
        except BaseException:
            link.tell(link.calls.Abandon, pb.TransferRequest(transfer=reply.transfer))
            raise
        if not verified:
            raise PeerLied(f"{link.name} found that what it has is not what was offered")
        return Sent(len(lacking), moved, not offer.early)

    def send_many(self, node: Reachable, offers: Sequence[tuple[Offer, int]]) -> list[Sent | PeerFailed]:
        """See `Peers.send_many`."""
        link = self._link(node)
        request, found = pb.OffersRequest(), dict[int, Sent | PeerFailed]()
        asked: list[int] = []
        for index, (offer, fd) in enumerate(offers):
            try:
                request.offers.append(_filled(_request(offer), fd))
                asked.append(index)
            except PeerLied as failure:
                found[index] = failure
        try:
            verdicts = link.ask(link.calls.OfferMany, request, limits.PEER_DISK_S).verdicts if asked else ()
        except PeerRefused as refusal:
            if refusal.code != errno.ENOSYS:
                raise
            return [self._sent_alone(node, offer, fd) for offer, fd in offers]  # It is of an earlier version.
        if len(verdicts) != len(asked):
            raise PeerLied(f"{link.name} answers {len(verdicts)} of {len(asked)} offers")
        found |= {index: _judged(link, offers[index][0], verdict) for index, verdict in zip(asked, verdicts, strict=True)}
        return [found[index] for index in range(len(offers))]

    def _sent_alone(self, node: Reachable, offer: Offer, fd: int) -> Sent | PeerFailed:
        try:
            return self.send(node, offer, fd)
        except PeerFailed as failure:
            return failure

    def _send_blocks(self, link: Link, offer: Offer, fd: int, transfer: int, lacking: list[int], wanted: Callable[[], bool]) -> int:
        """Send until nothing is lacking. A try that brought something forward is followed by another. The bytes on the wire."""
        moved, failures = 0, 0
        while lacking:
            work = peer_send.Work(fd, offer.size, transfer, lacking[::-1], wanted, link.measured.squeeze)
            begun = time.monotonic()
            try:
                peer_send.streams(link, work, min(self._streams, len(lacking)))
                sent = sum(block_bytes(offer.size, number) for number in lacking)
                link.measured.moved(sent, work.moved, time.monotonic() - begun)
                return moved + work.moved
            except PeerFailed as failure:
                moved += work.moved
                if isinstance(failure, PeerLied) or not wanted():
                    raise
                before = len(lacking)
                time.sleep(AGAIN_S * 2**failures)
                reply = link.ask(link.calls.Progress, pb.TransferRequest(transfer=transfer))
                lacking = _lacking(link, offer, reply.lacking)
                failures = 0 if len(lacking) < before else failures + 1
                if failures >= limits.PEER_TRIES_MAX:
                    raise
        return moved

    # --- fetching ----------------------------------------------------------------------------------------------------

    def fetch(
        self,
        sources: Sequence[Reachable],
        record: Record,
        wanted: Sequence[int],
        target_fd: int,
        on_block: OnBlock = lambda number: None,
        asked: Asked = tuple,
    ) -> int:
        """See `Peers.fetch`."""
        if not wanted:
            return 0
        if not sources:
            raise PeerFailed("nobody to fetch from")
        streams = min(self._streams, len(wanted))
        workers = max(streams, min(len(sources), limits.PEER_SOURCES_MAX))
        fetching = peer_fetch.Fetching(record, wanted, target_fd, on_block, workers, asked)
        return peer_fetch.fetch([self._link(node) for node in sources], fetching, streams)

    def record(self, node: Reachable, content: int, digest: bytes | None, *, timeout_s: float = limits.PEER_STALL_S) -> Record:
        """See `Peers.record`."""
        link = self._link(node)
        reply = link.ask(link.calls.GetRecord, pb.RecordRequest(content=content, digest=digest or b""), timeout_s)
        return _record(link, reply, content, digest)

    def seal_soon(self, node: Reachable, content: int, timeout_s: float) -> Record | None:
        """See `Peers.seal_soon`."""
        link = self._link(node)
        timeout_s = min(timeout_s, limits.PEER_SEAL_WAIT_S_MAX)
        request = pb.SealRequest(content=content, timeout_ms=int(timeout_s * 1000))
        reply = link.ask(link.calls.SealSoon, request, timeout_s + limits.PEER_CALL_S)
        return _record(link, reply.record, content, None) if reply.HasField("record") else None

    # --- the rest ----------------------------------------------------------------------------------------------------

    def forget(self, node: Reachable, contents: Sequence[int]) -> None:
        """See `Peers.forget`."""
        link = self._link(node)
        for start in range(0, len(contents), limits.PEER_FORGET_MAX):
            link.ask(link.calls.Forget, pb.ForgetRequest(contents=contents[start : start + limits.PEER_FORGET_MAX]))

    def ping(self, node: Reachable) -> Speed:
        """See `Peers.ping`."""
        link = self._link(node)
        begun, begun_ns = time.monotonic(), time.time_ns()
        reply = link.ask(link.calls.Ping, pb.Nothing())
        took_s = time.monotonic() - begun
        link.measured.room = reply.room
        link.measured.rtt(took_s)
        # Half of the way there it was read.
        link.measured.clock_s = (reply.now_ns - begun_ns) / 1e9 - took_s / 2 if reply.now_ns else None
        return link.measured.speed()

    def speed(self, node: Reachable) -> Speed:
        """See `Peers.speed`."""
        with self._lock:
            link = self._links.get(node.name)
        return link.measured.speed() if link else Speed(None, None, None)

    def ranked(self, nodes: Sequence[Reachable]) -> list[Reachable]:
        """See `Peers.ranked`."""
        with self._lock:
            links = {node.name: self._links.get(node.name) for node in nodes}

        def order(node: Reachable) -> tuple[bool, float]:
            link = links[node.name]
            return (link.measured.doubtful, -(link.measured.bytes_per_s or 0.0)) if link else (False, 0.0)

        return sorted(nodes, key=order)

    def figures(self) -> dict[str, dict[str, float | None]]:
        """{node: what was measured}, for status."""
        with self._lock:
            links = list(self._links.values())
        return {
            link.name: {"rtt_s": link.measured.rtt_s, "bytes_per_s": link.measured.bytes_per_s, "failed": float(link.measured.doubtful)}
            for link in links
        }

    def keep(self, names: Sequence[str]) -> None:
        """See `Peers.keep`."""
        with self._lock:
            gone = [self._links.pop(name) for name in set(self._links) - set(names)]
        for link in gone:
            link.close()

    def close(self) -> None:
        """See `Peers.close`."""
        self.keep(())

    def _link(self, node: Reachable) -> Link:
        """The link to a node; a new one when it has another address now, or its keys were revoked."""
        old: list[Link] = []
        revocations = self._revoked.count(node.name)
        with self._lock:
            link = self._links.get(node.name)
            if link is None or (link.address, link.revocations) != (node.address, revocations):
                old += [link] if link else []
                link = self._links[node.name] = Link(*self._about, node.name, node.address, bulk=self._bulk, revocations=revocations)
                while len(self._links) > limits.PEER_LINKS_MAX:
                    oldest = min(self._links.values(), key=lambda one: (one is link, one.used))
                    old.append(self._links.pop(oldest.name))
        for one in old:
            one.close()
        return link


def _request(offer: Offer) -> Any:
    return pb.OfferRequest(
        content=offer.content,
        inode=offer.inode,
        generation=offer.generation,
        size=offer.size,
        digest=offer.digest or b"",
        blocks=offer.blocks,
    )


def _filled(request: Any, fd: int) -> Any:
    """An offer with the content itself inside. Raises PeerLied when that is not what its digest says."""
    request.whole = os.pread(fd, request.size, 0)
    if len(request.whole) != request.size or (request.size and digest.block(request.whole) != request.blocks):
        raise PeerLied("the file is not what its digest says")
    return request


def _judged(link: Link, offer: Offer, verdict: Any) -> Sent | PeerFailed:
    """What a peer says of one of several contents."""
    if verdict.verified:
        return Sent(min(1, offer.size), offer.size, True)
    if verdict.code:
        return link.refused(verdict.code, verdict.why)
    return PeerLied(f"{link.name} found that what it has is not what was offered")


def _send_whole(link: Link, request: Any, fd: int) -> Sent:
    """A small content travels inside its offer."""
    reply = link.ask(link.calls.Offer, _filled(request, fd), limits.PEER_DISK_S)
    if not reply.verified:
        raise PeerLied(f"{link.name} found that what it has is not what was offered")
    return Sent(1, request.size, True)


def _lacking(link: Link, offer: Offer, bits: bytes) -> list[int]:
    try:
        numbers = numbers_of(bits, blocks_of(offer.size))
    except Refusal as refusal:
        raise link.failed(refusal) from refusal
    if not peer_checks.lacking_makes_sense(offer, numbers):
        raise PeerLied(f"{link.name} asks for blocks that were not offered")
    return numbers


def _record(link: Link, reply: Any, content: int, wanted: bytes | None) -> Record:
    """What a peer says, checked: its blocks' digests are those of its digest, which is the one that was asked for."""
    whole = (
        reply.size <= limits.PEER_BLOCKS_MAX * limits.BLOCK_BYTES and len(reply.blocks) == blocks_of(reply.size) * digest.BLOCK_DIGEST_BYTES
    )
    if (
        reply.content != content
        or not whole
        or not (0 < reply.inode <= peer_checks.ID_MAX and reply.generation <= limits.GENERATION_MAX)
        or digest.whole(reply.blocks, reply.size) != reply.digest
        or wanted not in (None, reply.digest)
    ):
        raise PeerLied(f"{link.name} tells of another content than the one asked for")
    return Record(reply.content, reply.inode, reply.generation, reply.size, reply.digest, reply.blocks)
