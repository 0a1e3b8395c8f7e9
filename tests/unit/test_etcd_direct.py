"""The short way to etcd: what it understands it answers, all else it leaves to grpc; against a server that says what the test wants."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from daemon_under_test import eventually

from ckptfs import limits
from ckptfs.catalog.etcd import direct
from ckptfs.catalog.etcd.direct import Direct, is_ok

PLAIN_OK = b"\0\x0bgrpc-status\x010"
HUFFMAN_OK = b" \0\x88\x9a\xca\xc8\xb2\x124\xda\x8f\x010\x00\x89\x9a\xca\xc8\xb5%B\x071\x7f\x00"
REFUSED = b"\x88\0\x0bgrpc-status\x019\0\x0cgrpc-message\x7f\x01" + b"x" * 128


def test_only_status_0_is_well() -> None:
    """A block is read as a whole, whatever stands before the status; one that is cut off says nothing."""
    assert is_ok(PLAIN_OK) and is_ok(HUFFMAN_OK) and is_ok(b"\x88\x40\x01a\x01b" + PLAIN_OK)
    assert not is_ok(REFUSED) and not is_ok(b"\x88") and not is_ok(b"") and not is_ok(REFUSED[:-1])
    assert not any(is_ok(PLAIN_OK[:end]) for end in range(len(PLAIN_OK)))
    assert not is_ok(b"\0\x01x\x0dgrpc-status\x010")


class Server:
    """Takes one connection after the other; `act(number, send)` is what it does with each call."""

    def __init__(self, act: Callable[[int, Callable[[bytes], None]], None]) -> None:
        self._act = act
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.pings = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                connected, _ = self._listening.accept()
            except OSError:
                return
            with connected, connected.makefile("rb") as file:
                assert file.read(len(direct.PREFACE)) == direct.PREFACE
                connected.sendall(frame(direct.SETTINGS, 0, 0, b"") + frame(direct.PING, 0, 0, b"12345678"))
                while head := file.read(direct.FRAME_HEAD_BYTES):
                    file.read(int.from_bytes(head[:3], "big"))
                    self.pings += head[3:5] == bytes((direct.PING, direct.ACK))
                    if head[3] == direct.DATA:
                        try:
                            self._act(int.from_bytes(head[5:], "big"), connected.sendall)
                        except ConnectionAbortedError:
                            break


def frame(kind: int, flags: int, number: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big") + body


def message(body: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(body)) + body


def well(number: int, send: Callable[[bytes], None], body: bytes = b"answer", status: bytes = HUFFMAN_OK) -> None:
    """In as many pieces as can be."""
    raw = message(body)
    answer = frame(direct.HEADERS, direct.END_HEADERS, number, b"\x88")
    answer += frame(direct.DATA, 0, number, raw[:3]) + frame(direct.DATA, 0, number, raw[3:])
    answer += frame(direct.HEADERS, direct.END_HEADERS | direct.END_STREAM, number, status)
    for place in range(len(answer)):
        send(answer[place : place + 1])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[int, Callable[[bytes], None]], None]], Direct]]:
    monkeypatch.setattr(limits, "ETCD_TRY_S", 0.2)
    open_: list[Server | Direct] = []

    def make(act: Callable[[int, Callable[[bytes], None]], None]) -> Direct:
        server = Server(act)
        way = Direct(server.address)
        open_.extend((way, server))
        return way

    yield make
    for one in open_:
        one.close()


def ask(way: Direct, body: bytes = b"question") -> bytes | None:
    """The answer to one call, when there is a connection."""
    came: list[bytes | None] = []
    answered = threading.Event()

    def done(answer: bytes | None) -> None:
        came.append(answer)
        answered.set()

    eventually(lambda: way.begin(body, done), what="a connection")
    assert answered.wait(60)
    return came[0]


Make = Callable[[Callable[[int, Callable[[bytes], None]], None]], Direct]


def test_answers(made: Make) -> None:
    """One after the other, and what comes in pieces."""
    way = made(well)
    assert [ask(way) for _ in range(20)] == [b"answer"] * 20


def test_nobody_connects_for_a_few_calls(made: Make) -> None:
    """Whoever asks once goes by grpc."""
    way = made(well)
    assert not any(way.begin(b"x", lambda _: None) for _ in range(limits.ETCD_DIRECT_CALLS_MIN - 1))
    assert not [thread for thread in threading.enumerate() if thread.name == "etcd-direct"]


def test_a_large_message_goes_another_way(made: Make) -> None:
    way = made(well)
    assert ask(way) == b"answer"
    assert not way.begin(b"x" * (direct.MESSAGE_BYTES_MAX + 1), lambda _: None)
    assert ask(way, b"x" * direct.MESSAGE_BYTES_MAX) == b"answer"


def test_no_more_is_sent_than_the_other_side_takes(made: Make) -> None:
    """A server that never gives leave for more gets 64 KiB; what is asked then goes another way."""
    way = made(well)
    for _ in range(direct.WINDOW_BYTES // (1 << 14)):
        assert ask(way, b"x" * direct.MESSAGE_BYTES_MAX) == b"answer"
    assert not way.begin(b"x" * direct.MESSAGE_BYTES_MAX, lambda _: None)


@pytest.mark.parametrize(
    "trouble",
    [
        lambda number, send: well(number, send, status=REFUSED),
        lambda number, send: send(frame(direct.HEADERS, direct.END_HEADERS | direct.END_STREAM, number, PLAIN_OK)),
        lambda number, send: send(
            frame(direct.DATA, 0, number, message(b"answer")[:-1])
            + frame(direct.HEADERS, direct.END_HEADERS | direct.END_STREAM, number, PLAIN_OK)
        ),
        lambda number, send: send(frame(direct.DATA, direct.END_STREAM, number, message(b"answer"))),
        lambda number, send: send(frame(direct.RST_STREAM, 0, number, bytes(4))),
        lambda number, send: send(frame(direct.GOAWAY, 0, 0, bytes(8))),
        lambda number, send: send(frame(direct.HEADERS, direct.END_STREAM, number, PLAIN_OK)),
        lambda number, send: send(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 1000),
        lambda number, send: (_ for _ in ()).throw(ConnectionAbortedError),
        lambda number, send: None,
    ],
    ids=["refused", "nothing", "cut", "no status", "reset", "goaway", "in parts", "another protocol", "closed", "silent"],
)
def test_all_else_is_left_to_grpc(made: Make, trouble: Callable[[int, Callable[[bytes], None]], None]) -> None:
    """Whoever asked hears that, and a server that is well again is asked this way again."""
    ill = [True]

    def act(number: int, send: Callable[[bytes], None]) -> None:
        if ill[0]:
            trouble(number, send)
        else:
            well(number, send)

    way = made(act)
    assert ask(way) is None
    ill[0] = False
    assert ask(way) == b"answer"


def test_the_end(made: Make) -> None:
    """Who waits when it is closed hears of it, and nobody connects again."""
    way = made(lambda number, send: None)
    came = threading.Event()
    eventually(lambda: way.begin(b"x", lambda _: came.set()), what="a connection")
    way.close()
    assert came.wait(60)
    assert not any(way.begin(b"x", lambda _: None) for _ in range(10))
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "etcd-direct"], what="no thread left")
