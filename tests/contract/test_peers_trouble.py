"""Peers that die, stall and lie in the middle of it (N2, N4, P4): others take over, broken streams go on where they were."""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from daemon_under_test import eventually
from peer_world import Keyring, PeerNode, There, client, offer_of, record_of
from peer_world import keyring as keyring

from ckptfs import limits
from ckptfs.clique.peer_api import PeerCorrupt, PeerFailed, PeerRefused
from ckptfs.peers import block_client, transfer_table
from ckptfs.peers.link import Link, translate_errors
from ckptfs.peers.messages import Rejection, RejectReason
from ckptfs.peers.peer_client import PeerClient
from ckptfs.protocol import peer_pb2 as pb

BLOCK = limits.BLOCK_BYTES
DATA = os.urandom(8 * BLOCK)


class World:
    """Some nodes that hold the same content, and one that asks."""

    def __init__(self, directory: Path, keyring: Keyring) -> None:
        self.directory = directory
        self.nodes = [PeerNode(directory, f"node{number}", keyring(f"node{number}")) for number in range(1, 4)]
        self.peers: PeerClient = client("node9", keyring("node9"), streams=2)
        for node in self.nodes:
            node.host.hold(DATA)
        self.came: list[int] = []
        self.source = directory / "source"
        self.source.write_bytes(DATA)

    def fetch(self, nodes: Sequence[PeerNode], on_block: Any = lambda number: None, asked: Any = tuple) -> bytes:
        def came(number: int) -> None:
            self.came.append(number)
            on_block(number)

        with open(self.directory / "target", "w+b") as file:
            self.peers.fetch([node.there for node in nodes], record_of(offer_of(DATA)), range(8), file.fileno(), came, asked)
        return (self.directory / "target").read_bytes()

    def send(self, node: PeerNode, content: int, **how: Any) -> Any:
        fd = os.open(self.source, os.O_RDONLY)
        try:
            return self.peers.send(node.there, offer_of(DATA, content), fd, **how)
        finally:
            os.close(fd)

    def stop(self) -> None:
        self.peers.close()
        for node in self.nodes:
            node.stop()


@pytest.fixture
def world(tmp_path: Path, keyring: Keyring) -> Iterator[World]:
    made = World(tmp_path, keyring)
    yield made
    made.stop()


def holding_up(node: PeerNode, held: threading.Event, after: int) -> None:
    """From its message `after` on, this node's blocks wait for `held`."""
    streams = node.server._raw_streams
    encode_run = streams.encode_run

    def slow(peer: str, command: Any) -> Iterator[Any]:
        for number, message in enumerate(encode_run(peer, command)):
            if number >= after:
                held.wait(60)
            yield message

    streams.encode_run = slow  # type: ignore[method-assign]


def test_a_node_that_answers_no_has_not_failed(world: World) -> None:
    """N4: what is deleted or replaced meanwhile says nothing about its node, nor does what is wanted no more; one that has gone does."""
    node = world.nodes[0]
    link = world.peers._get_link(node.there)
    with pytest.raises(PeerRefused), translate_errors(link):
        raise Rejection(RejectReason.UNKNOWN, "content 1 is not here")
    with pytest.raises(PeerFailed):
        world.send(node, 2, is_wanted=lambda: False)
    assert not world.peers.get_figures()["node1"]["failed"]
    with pytest.raises(PeerRefused), translate_errors(link):
        raise Rejection(RejectReason.OUT_OF_ORDER, "the stream stopped before its end")
    assert world.peers.get_figures()["node1"]["failed"]
    link.stats.failed_at -= 2 * limits.PEER_SUSPECT_S
    node.stop()
    with pytest.raises(PeerFailed):
        world.fetch([node])
    assert world.peers.get_figures()["node1"]["failed"]


@pytest.mark.parametrize("still_s", [0.0, 60.0])
def test_a_source_that_is_ended_because_all_is_here_has_not_failed(world: World, monkeypatch: pytest.MonkeyPatch, still_s: float) -> None:
    """N2: another one brought its blocks. If it had kept the reader waiting it is asked last for a while."""
    link = world.peers._get_link(world.nodes[0].there)

    class Ended(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.CANCELLED

        def details(self) -> str:
            return ""

    def end(*_: object) -> None:
        raise Ended

    class Over:
        manifest, is_stopped = record_of(offer_of(DATA)), True

    monkeypatch.setattr(Link, "open_read_stream", end)
    worker = block_client.FetchWorker(link, cast(Any, Over()))
    worker.progress_at -= still_s
    with pytest.raises(PeerFailed):
        worker._read_run(pb.ReadRequest(content=1, count=1))
    assert link.stats.has_failed_recently == bool(still_s)


def test_a_source_that_dies_in_the_middle_is_not_noticed(world: World) -> None:
    dying = iter([world.nodes[0]])

    def kill(_number: int) -> None:
        for node in dying:
            threading.Thread(target=node.stop).start()

    assert world.fetch(world.nodes, kill) == DATA
    assert sorted(world.came) == list(range(8))


def test_a_source_that_stalls_is_not_noticed(world: World) -> None:
    held = threading.Event()
    holding_up(world.nodes[0], held, after=2)
    assert world.fetch(world.nodes[:2]) == DATA
    assert sorted(world.came) == list(range(8)) and not held.is_set()
    held.set()


def test_what_a_reader_waits_for_comes_before_the_rest(world: World) -> None:
    """Asked when the first block was there: next comes what was asked, and what follows it."""
    asked: list[int] = []

    def came(number: int) -> None:
        asked[:] = [] if number == 6 else [6] if number == 0 else asked

    world.peers._streams = 1
    assert world.fetch(world.nodes[:1], came, lambda: asked) == DATA
    assert world.came[0] == 0 and world.came.index(6) < world.came.index(7) < world.came.index(5)


def test_what_a_reader_waits_for_is_asked_of_a_second_source(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """X6: long before the slow one counts as stalled, and before the rest is there."""
    monkeypatch.setattr(limits, "PEER_PATIENCE_S", 600.0)
    monkeypatch.setattr(limits, "PEER_STALL_S", 600.0)
    monkeypatch.setattr(limits, "PEER_HEDGE_S", 0.0)
    held = threading.Event()
    owed: list[int] = []
    holding_up(world.nodes[0], held, after=1)
    next_run = block_client.FetchJob.assign_run

    def run(self: Any, worker: Any, *how: Any) -> list[int]:
        found = next_run(self, worker, *how)
        if worker.link.name == "node1" and found:
            owed[:] = found
        elif found and not owed:
            eventually(lambda: owed, what="the slow source owes something")
        return found

    monkeypatch.setattr(block_client.FetchJob, "assign_run", run)
    assert world.fetch(world.nodes[:2], asked=lambda: owed[:1]) == DATA
    assert world.came.index(owed[0]) <= 2 and not held.is_set()
    held.set()


def test_sources_are_ranked_by_what_was_measured_of_them(world: World) -> None:
    """One that was three times as slow as the other comes after it, whichever was named first; who failed comes last."""
    slow, fast, failed = world.nodes
    streams = slow.server._raw_streams
    encode_run, pause = streams.encode_run, threading.Event()
    began_s = time.monotonic()
    assert world.fetch([fast]) == DATA
    # A message of the slow one, of which there are 40, takes an eighth of all that the fast one took, however busy this machine is.
    pause_s = max(0.02, (time.monotonic() - began_s) / 8)
    slowly = lambda peer, command: (message for message in encode_run(peer, command) if not pause.wait(pause_s))  # noqa: E731
    streams.encode_run = slowly  # type: ignore[method-assign]
    assert world.fetch([slow]) == DATA
    failed.host.path(7).write_bytes(bytes(len(DATA)))
    with pytest.raises(PeerCorrupt):
        world.fetch([failed])
    there = [node.there for node in (failed, slow, fast)]
    assert [node.name for node in world.peers.rank(there)] == ["node2", "node1", "node3"]
    speeds = [world.peers.get_figures()[node.there.name]["bytes_per_s"] or 0.0 for node in (slow, fast)]
    assert 0 < speeds[0] < speeds[1]


def test_a_source_that_lies_is_left_and_nothing_of_it_is_kept(world: World) -> None:
    """P4: what the liar sent is never in the file, not even for a moment after `on_block`."""
    liar = world.nodes[0].host.path(7)
    liar.write_bytes(bytes(len(DATA)))
    assert world.fetch(world.nodes) == DATA
    assert sorted(world.came) == list(range(8))


def test_when_all_sources_lie_or_are_gone_it_says_so(world: World) -> None:
    for node in world.nodes[:2]:
        node.host.path(7).write_bytes(bytes(len(DATA)))
    with pytest.raises(PeerCorrupt):
        world.fetch(world.nodes[:2])
    world.nodes[2].host.held.clear()
    with pytest.raises(PeerFailed):
        world.fetch(world.nodes[2:])
    assert world.came == [] and not any((world.directory / "target").read_bytes())


def test_a_failing_target_ends_the_fetch(world: World) -> None:
    with open(world.source, "rb") as file, pytest.raises(OSError):
        world.peers.fetch([node.there for node in world.nodes], record_of(offer_of(DATA)), range(8), file.fileno())


def test_only_what_is_wanted_is_fetched(world: World) -> None:
    with open(world.directory / "target", "w+b") as file:
        assert (
            world.peers.fetch([world.nodes[0].there], record_of(offer_of(DATA)), [1, 5, 6], file.fileno(), world.came.append) == 3 * BLOCK
        )
    assert sorted(world.came) == [1, 5, 6]
    assert (world.directory / "target").read_bytes()[BLOCK : 2 * BLOCK] == DATA[BLOCK : 2 * BLOCK]


class Relay:
    """A port in front of that of a node. `cut` ends the connections through it.

    So many `refusals` later there are new ones.
    """

    def __init__(self, node: PeerNode) -> None:
        self._target = ("127.0.0.1", node.server.port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.there = There(node.there.name, f"127.0.0.1:{self._listening.getsockname()[1]}")
        self._connections: list[socket.socket] = []
        self.refusals = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        while self._connections:
            with suppress(OSError):
                self._connections.pop().shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                there = self._listening.accept()[0]
                if self.refusals:
                    self.refusals -= 1
                    there.close()
                    continue
                ends = [there, socket.create_connection(self._target)]
                self._connections += ends
                for source, sink in (ends, ends[::-1]):
                    threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay(world: World) -> Iterator[Relay]:
    made = Relay(world.nodes[0])
    yield made
    made.stop()


@pytest.mark.parametrize("refusals", [0, 1])
def test_a_sent_stream_that_breaks_goes_on_where_it_was(world: World, relay: Relay, refusals: int) -> None:
    """What had arrived is not sent again, even if the next connection breaks too."""
    asked = iter(range(1000))

    def is_wanted() -> bool:
        if next(asked) == 5:
            relay.refusals = refusals
            relay.cut()
        return True

    fd = os.open(world.source, os.O_RDONLY)
    sent = world.peers.send(relay.there, offer_of(DATA, 50), fd, is_wanted=is_wanted)
    os.close(fd)
    assert sent.is_verified and sent.bytes_moved < 13 * BLOCK
    assert world.nodes[0].host.path(50).read_bytes() == DATA


def test_a_fetched_stream_that_breaks_goes_on_where_it_was(world: World, relay: Relay) -> None:
    """B.3: something between the nodes ends connections in the middle. What came is not fetched again."""
    world.peers._streams = 1

    def came(number: int) -> None:
        world.came.append(number)
        if len(world.came) in (2, 5):
            relay.cut()

    with open(world.directory / "target", "w+b") as file:
        world.peers.fetch([relay.there], record_of(offer_of(DATA)), range(8), file.fileno(), came)
    assert (world.directory / "target").read_bytes() == DATA and sorted(world.came) == list(range(8))


def test_a_stream_that_breaks_before_its_first_block_is_opened_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """B.3: one run of blocks has come, and the connection breaks before the next; one that brings no block is given up."""
    world.peers._streams = 1
    opened: list[Link] = []
    broken = {2, 3}  # The second stream of these was begun before gRPC saw that the connection is broken.

    class Broken(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return "Socket closed"

    def open_stream(link: Link, command: bytes, whole: Callable[[Link, bytes], Any] = Link.open_read_stream) -> Any:
        opened.append(link)
        if len(opened) in broken:
            raise Broken
        return whole(link, command)

    monkeypatch.setattr(Link, "open_read_stream", open_stream)
    assert world.fetch(world.nodes[:1]) == DATA and len(opened) > 3
    broken.update(range(len(opened) + 1, 100))
    with pytest.raises(PeerFailed, match="does not answer"):
        world.fetch(world.nodes[:1])
    assert len(opened) < 100


def test_a_peer_that_stands_still_holds_up_nobody_else(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transfer fails after a while; meanwhile others go on."""
    held, stuck = threading.Event(), world.nodes[0]
    write_at = transfer_table.pwrite_all

    def slow(fd: int, data: list[bytes], offset: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(stuck.host.directory)):
            held.wait(120)
        write_at(fd, data, offset)

    monkeypatch.setattr(transfer_table, "pwrite_all", slow)
    monkeypatch.setattr(limits, "PEER_STALL_S", 1.0)
    failures: list[Exception] = []

    def send_to_stuck() -> None:
        try:
            world.send(stuck, 60)
        except PeerFailed as failure:
            failures.append(failure)

    thread = threading.Thread(target=send_to_stuck)
    thread.start()
    eventually(lambda: stuck.host.arriving() == 1, what="the slow transfer has begun")
    assert world.send(world.nodes[1], 61).is_verified
    thread.join(120)
    assert len(failures) == 1
    held.set()
    eventually(lambda: stuck.host.arriving() == 0, what="the slow peer gives up")
    assert world.peers.rank([stuck.there, world.nodes[1].there])[0] == world.nodes[1].there


def test_a_small_content_that_is_offered_twice_at_once_is_not_mixed(
    tmp_path: Path, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P7: an fsync and the seal that follows it may offer two generations of one file at the same time."""
    node, sender = PeerNode(tmp_path, "one", keyring("one")), client("me", keyring("me"))
    written, refused = transfer_table.pwrite_all, []

    def send(data: bytes, generation: int) -> bool:
        path = tmp_path / f"{generation}"
        path.write_bytes(data)
        with path.open("rb") as file:
            return sender.send(node.there, offer_of(data, generation=generation), file.fileno()).is_verified

    def slowly(fd: int, data: list[bytes], offset: int) -> None:
        monkeypatch.setattr(transfer_table, "pwrite_all", written)
        with pytest.raises(PeerRefused) as refusal:
            send(b"second " * 100, 2)
        refused.append(refusal.value.code)
        written(fd, data, offset)

    monkeypatch.setattr(transfer_table, "pwrite_all", slowly)
    try:
        with pytest.raises(PeerFailed):
            send(b"first " * 100, 1)
        assert refused == [errno.EBUSY] and node.host.arriving() == 0
        assert send(b"second " * 100, 2) and node.host.path(7).read_bytes() == b"second " * 100
    finally:
        sender.close()
        node.stop()


def test_a_node_that_moved_is_found_at_its_new_address(tmp_path: Path, keyring: Keyring) -> None:
    world = World(tmp_path, keyring)
    assert world.send(world.nodes[0], 80).is_verified
    world.nodes[0].stop()
    again = PeerNode(tmp_path / "again", "node1", keyring("node1"))
    assert world.send(again, 80).is_verified
    assert again.host.path(80).read_bytes() == DATA
    world.nodes[0] = again
    world.stop()


def test_slow_links_get_zstd_where_it_pays(world: World) -> None:
    """A link that is known to be slow carries less; noise travels as it is."""
    world.source.write_bytes(bytes(range(256)) * (len(DATA) // 256))
    text = world.source.read_bytes()
    there = world.nodes[0].there
    world.peers.ping(there)
    measured = world.peers._get_link(there).stats
    measured.wire_bytes_per_s = 1e6
    fd = os.open(world.source, os.O_RDONLY)
    sent = world.peers.send(there, offer_of(text, 90), fd)
    assert sent.is_verified and sent.bytes_moved < len(text) // 10
    measured.wire_bytes_per_s = 1e6
    os.pwrite(os.open(world.source, os.O_RDWR), DATA, 0)
    assert world.peers.send(there, offer_of(DATA, 91), fd).bytes_moved > len(DATA)
    os.close(fd)
    measured.wire_bytes_per_s = 1e6
    with open(world.directory / "target", "w+b") as file:
        assert world.peers.fetch([there], record_of(offer_of(text, 90)), range(8), file.fileno()) == len(text)
    assert (world.directory / "target").read_bytes() == text
