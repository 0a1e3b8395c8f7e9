"""The client of other nodes: `PeerApi` of `ckptfs.clique.peer_api`, with one link for each node.

Its methods are those of `PeerApi`. Any thread may call; calls block. The number of links is bounded: the least recently used one is closed
when there are too many.

Crash safety: peers end unfinished transfers.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ckptfs import digest, limits
from ckptfs.clique.certificates import Identity, RevocationList
from ckptfs.clique.peer_api import (
    ContentManifest,
    Offer,
    OnBlock,
    PeerAddress,
    PeerCorrupt,
    PeerFailed,
    PeerRefused,
    PingResult,
    SendResult,
    UrgentBlocks,
)
from ckptfs.errors import InvalidArgument
from ckptfs.peers import block_client, messages
from ckptfs.peers.link import Link
from ckptfs.peers.messages import Rejection, block_bytes, decode_bitmap
from ckptfs.protocol import peer_pb2 as pb

CORES_A_STREAM = 4
RETRY_S = 0.1


class PeerClient:
    """The other nodes of `cluster`, for the node `me`."""

    def __init__(
        self, me: str, cluster: str, identity: Identity | None, *, streams: int | None = None, revoked: RevocationList | None = None
    ) -> None:
        self._link_arguments = me, cluster, identity
        self._revoked = revoked or RevocationList(None)
        cores = os.cpu_count() or 1
        self._streams = streams or max(1, min(limits.PEER_LINK_STREAMS_MAX, cores // CORES_A_STREAM))
        self._links: dict[str, Link] = {}
        self._lock = threading.Lock()

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, node: PeerAddress, offer: Offer, source_fd: int, *, is_wanted: Callable[[], bool] = lambda: True) -> SendResult:
        link = self._get_link(node)
        if digest.count_blocks(offer.size) > limits.PEER_BLOCKS_MAX:
            raise InvalidArgument(f"{offer.size} bytes are more than peers hold of one content")
        if not offer.is_early and 0 < offer.size <= limits.PEER_INLINE_BYTES_MAX:
            (result,) = self.send_many(node, [(offer, source_fd)])
            if isinstance(result, PeerFailed):
                raise result
            return result
        with link.reserve_content(offer.content, is_wanted):
            return self._send_missing(link, offer, source_fd, is_wanted)

    def _send_missing(self, link: Link, offer: Offer, source_fd: int, is_wanted: Callable[[], bool]) -> SendResult:
        """Offer a content and send the blocks that the peer asks for."""
        reply = link.call(link.stub.Offer, pb.OfferRequest(**messages.build_fields(offer)), limits.PEER_DISK_S)
        missing_blocks = _decode_missing(link, offer, reply.lacking)
        try:
            moved = self._send_blocks(link, offer, source_fd, reply.transfer, missing_blocks, is_wanted)
            verified = link.call(link.stub.Finish, pb.TransferRequest(transfer=reply.transfer), limits.PEER_DISK_S).verified
        except BaseException:
            link.notify(link.stub.Abandon, pb.TransferRequest(transfer=reply.transfer))
            raise
        if not verified:
            raise PeerCorrupt(f"{link.name} received other bytes than were offered")
        return SendResult(len(missing_blocks), moved, not offer.is_early)

    def send_many(self, node: PeerAddress, offers: Sequence[tuple[Offer, int]]) -> list[SendResult | PeerFailed]:
        link = self._get_link(node)
        request, found = pb.OffersRequest(), dict[int, SendResult | PeerFailed]()
        asked: list[int] = []
        for index, (offer, fd) in enumerate(offers):
            try:
                request.offers.append(_embed_content(pb.OfferRequest(**messages.build_fields(offer)), fd))
                asked.append(index)
            except PeerCorrupt as failure:
                found[index] = failure
        verdicts = link.call(link.stub.OfferMany, request, limits.PEER_DISK_S).verdicts if asked else ()
        if len(verdicts) != len(asked):
            raise PeerCorrupt(f"{link.name} answers {len(verdicts)} of {len(asked)} offers")
        found |= {index: _interpret_verdict(link, offers[index][0], verdict) for index, verdict in zip(asked, verdicts, strict=True)}
        return [found[index] for index in range(len(offers))]

    def _send_blocks(
        self, link: Link, offer: Offer, fd: int, transfer: int, missing_blocks: list[int], is_wanted: Callable[[], bool]
    ) -> int:
        """Send until no block is missing, again after progress. Return the bytes on the wire."""
        moved, failures = 0, 0
        while missing_blocks:
            job = block_client.SendJob(fd, offer.size, transfer, missing_blocks[::-1], is_wanted, link.stats.should_compress)
            begun = time.monotonic()
            try:
                block_client.send_blocks(link, job, min(self._streams, len(missing_blocks)))
                sent = sum(block_bytes(offer.size, number) for number in missing_blocks)
                link.stats.record_transfer(sent, job.sent_bytes, time.monotonic() - begun)
                return moved + job.sent_bytes
            except PeerFailed as failure:
                moved += job.sent_bytes
                if isinstance(failure, PeerCorrupt) or not is_wanted():
                    raise
                before = len(missing_blocks)
                missing_blocks = _decode_missing(link, offer, _ask_progress(link, transfer, RETRY_S * 2**failures).lacking)
                failures = 0 if len(missing_blocks) < before else failures + 1
                if failures >= limits.PEER_TRIES_MAX:
                    raise
        return moved

    # --- fetching ----------------------------------------------------------------------------------------------------

    def fetch(
        self,
        sources: Sequence[PeerAddress],
        manifest: ContentManifest,
        blocks: Sequence[int],
        target_fd: int,
        on_block: OnBlock = lambda number: None,
        urgent_blocks: UrgentBlocks = tuple,
        *,
        can_wait: bool = False,
    ) -> int:
        if not blocks:
            return 0
        if not sources:
            raise PeerFailed("there is no node to fetch from")
        streams = min(self._streams, len(blocks))
        workers = max(streams, min(len(sources), limits.PEER_SOURCES_MAX))
        fetching = block_client.FetchJob(manifest, blocks, target_fd, on_block, workers, urgent_blocks, can_wait=can_wait)
        return block_client.fetch_blocks([self._get_link(node) for node in sources], fetching, streams)

    def get_manifest(
        self, node: PeerAddress, content: int, digest: bytes | None, *, timeout_s: float = limits.PEER_STALL_S, can_wait: bool = False
    ) -> ContentManifest:
        link = self._get_link(node)
        reply = link.call(link.stub.GetRecord, pb.RecordRequest(content=content, digest=digest or b"", queued=can_wait), timeout_s)
        return _check_manifest(link, reply, content, digest)

    def request_seal(self, node: PeerAddress, content: int, timeout_s: float) -> ContentManifest | None:
        link = self._get_link(node)
        timeout_s = min(timeout_s, limits.PEER_SEAL_WAIT_S_MAX)
        request = pb.SealRequest(content=content, timeout_ms=int(timeout_s * 1000))
        reply = link.call(link.stub.SealSoon, request, timeout_s + limits.PEER_CALL_S)
        return _check_manifest(link, reply.record, content, None) if reply.HasField("record") else None

    # --- the rest ----------------------------------------------------------------------------------------------------

    def release_copies(self, node: PeerAddress, contents: Sequence[int]) -> None:
        link = self._get_link(node)
        for start in range(0, len(contents), limits.PEER_FORGET_MAX):
            link.call(link.stub.Forget, pb.ForgetRequest(contents=contents[start : start + limits.PEER_FORGET_MAX]))

    def ping(self, node: PeerAddress) -> PingResult:
        link = self._get_link(node)
        begun, begun_ns = time.monotonic(), time.time_ns()
        reply = link.call(link.stub.Ping, pb.Nothing())
        took_s = time.monotonic() - begun
        link.stats.record_rtt(took_s)
        # The peer read its clock half a round trip ago.
        return PingResult(took_s, (reply.now_ns - begun_ns) / 1e9 - took_s / 2)

    def rank(self, nodes: Sequence[PeerAddress]) -> list[PeerAddress]:
        with self._lock:
            links = {node.name: self._links.get(node.name) for node in nodes}

        def order(node: PeerAddress) -> tuple[bool, float]:
            link = links[node.name]
            return (link.stats.has_failed_recently, -(link.stats.bytes_per_s or 0.0)) if link else (False, 0.0)

        return sorted(nodes, key=order)

    def get_figures(self) -> dict[str, dict[str, float | None]]:
        """Return {node: figures} for the status."""
        with self._lock:
            links = list(self._links.values())
        return {
            link.name: {"rtt_s": link.stats.rtt_s, "bytes_per_s": link.stats.bytes_per_s, "failed": float(link.stats.has_failed_recently)}
            for link in links
        }

    def close_except(self, names: Sequence[str]) -> None:
        with self._lock:
            gone = [self._links.pop(name) for name in set(self._links) - set(names)]
        for link in gone:
            link.close()

    def close(self) -> None:
        self.close_except(())

    def _get_link(self, node: PeerAddress) -> Link:
        """Return the link to a node; a new one if its address changed or its keys were revoked."""
        old: list[Link] = []
        revocations = self._revoked.get_counts().get(node.name, 0)
        with self._lock:
            link = self._links.get(node.name)
            if link is None or (link.address, link.revocations) != (node.address, revocations):
                old += [link] if link else []
                link = self._links[node.name] = Link(*self._link_arguments, node.name, node.address, revocations=revocations)
                while len(self._links) > limits.PEER_LINKS_MAX:
                    oldest = min(self._links.values(), key=lambda one: (one is link, one.used_at))
                    old.append(self._links.pop(oldest.name))
        for one in old:
            one.close()
        return link


def _embed_content(request: Any, fd: int) -> Any:
    """Return an offer that contains the content. Raises PeerCorrupt if the digest does not match."""
    request.whole = os.pread(fd, request.size, 0)
    if len(request.whole) != request.size or (request.size and digest.hash_block(request.whole) != request.blocks):
        raise PeerCorrupt("the file does not match its digest")
    return request


def _interpret_verdict(link: Link, offer: Offer, verdict: Any) -> SendResult | PeerFailed:
    """Return what a peer says of one of several contents."""
    if verdict.verified:
        return SendResult(min(1, offer.size), offer.size, True)
    if verdict.code:
        return link.translate_rejection(verdict.code, verdict.why)
    return PeerCorrupt(f"{link.name} received other bytes than were offered")


def _ask_progress(link: Link, transfer: int, pause_s: float) -> Any:
    """Ask what has arrived, after a pause, and once more if that failed. Raises PeerFailed."""
    request = pb.TransferRequest(transfer=transfer)
    time.sleep(pause_s)
    try:
        return link.call(link.stub.Progress, request)
    except PeerRefused:
        raise
    except PeerFailed:
        time.sleep(2 * pause_s)
        return link.call(link.stub.Progress, request)


def _decode_missing(link: Link, offer: Offer, bits: bytes) -> list[int]:
    try:
        numbers = decode_bitmap(bits, digest.count_blocks(offer.size))
    except Rejection as refusal:
        raise link.record_failure(refusal) from refusal
    if not messages.are_valid_missing_blocks(offer, numbers):
        raise PeerCorrupt(f"{link.name} asks for blocks that were not offered")
    return numbers


def _check_manifest(link: Link, reply: Any, content: int, expected_digest: bytes | None) -> ContentManifest:
    """Return the manifest of a peer, if its block digests make the digest that was asked for."""
    whole = reply.size <= limits.PEER_BLOCKS_MAX * limits.BLOCK_BYTES and digest.has_all_digests(reply.blocks, reply.size)
    if (
        reply.content != content
        or not whole
        or not (0 < reply.inode <= messages.ID_MAX and reply.generation <= limits.GENERATION_MAX)
        or digest.hash_content(reply.blocks, reply.size) != reply.digest
        or expected_digest not in (None, reply.digest)
    ):
        raise PeerCorrupt(f"{link.name} describes another content than the requested one")
    return ContentManifest(reply.content, reply.inode, reply.generation, reply.size, reply.digest, reply.blocks)
