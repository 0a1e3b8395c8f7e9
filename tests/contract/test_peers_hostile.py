"""Strangers and liars at the peer port (F6, X7): refused with a status that says why, counted, and nothing grows.

The clients here are independent of the product's: raw gRPC, raw sockets, and messages made by hand.
"""

import datetime
import errno
import os
import resource
import secrets
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import grpc
import pytest
import trio
from ckptfs_daemon.mover.cluster_services import serve_peers
from daemon_under_test import eventually
from etcd_server import free_ports
from peer_world import CLUSTER, Keyring, MemoryContentHost, PeerNode, client, offer_of
from peer_world import keyring as keyring

from ckptfs import limits, server_limits
from ckptfs.clique import certificates, peer_api
from ckptfs.clique.certificates import Identity, RevocationList
from ckptfs.clique.peer_api import PeerFailed, PeerRefused
from ckptfs.peers import grpc_server
from ckptfs.peers.grpc_server import PeerServer
from ckptfs.peers.link import Link
from ckptfs.peers.peer_client import PeerClient
from ckptfs.protocol import peer_pb2 as pb
from ckptfs.server_limits import RefusedCalls

BLOCK = limits.BLOCK_BYTES
PIECE = limits.PEER_PIECE_BYTES
DATA = os.urandom(2 * BLOCK)
Status = grpc.StatusCode
VERSION = (("ckptfs-protocol", "3"),)


Metadata = tuple[tuple[str, str], ...]


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path, keyring: Keyring, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerNode]:
    for name, value in getattr(request, "param", {}).items():
        monkeypatch.setattr(limits, name, value)
    made = PeerNode(tmp_path, "node1", keyring("node1"))
    yield made
    made.stop()
    assert made.host.arriving() == 0


def with_limits(**values: float) -> pytest.MarkDecorator:
    """Set limits before `node` starts."""
    return pytest.mark.parametrize("node", [values], indirect=True, ids=["quick"])


@contextmanager
def fails(status: Status) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as failure:
        yield
    assert failure.value.code() is status


class Raw:
    """A client that speaks gRPC and nothing else."""

    def __init__(self, node: PeerNode, identity: Identity | None, *, target: str = certificates.target_name(CLUSTER, "node1")) -> None:
        options = [("grpc.ssl_target_name_override", target), ("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        if identity is None:
            self.channel = grpc.insecure_channel(node.there.address, options)
        else:
            credentials = grpc.ssl_channel_credentials(identity.ca, identity.key or None, identity.certificate or None)
            self.channel = grpc.secure_channel(node.there.address, credentials, options)

    def call(self, method: str, message: bytes, version: Metadata = VERSION) -> bytes:
        return bytes(self.channel.unary_unary(f"/ckptfs.peer.Peer/{method}", bytes, bytes)(message, timeout=30, metadata=version))

    def send(self, *messages: bytes) -> bytes:
        return bytes(self.channel.stream_unary("/ckptfs.peer.Peer/Send", bytes, bytes)(iter(messages), timeout=30, metadata=VERSION))

    def read(self, command: bytes) -> list[bytes]:
        return list(self.channel.unary_stream("/ckptfs.peer.Peer/Read", bytes, bytes)(command, timeout=30, metadata=VERSION))

    def offer(self, data: bytes = DATA, content: int = 7) -> int:
        reply = pb.OfferReply.FromString(self.call("Offer", offered(data, content).SerializeToString()))
        return reply.transfer

    def refused(self, method: str, message: bytes) -> Status:
        with pytest.raises(grpc.RpcError) as failure:
            self.call(method, message)
        return failure.value.code()


Connect = Callable[[Identity | str | None], Raw]


@pytest.fixture
def connect(node: PeerNode, keyring: Keyring) -> Iterator[Connect]:
    """Makes clients of `node`, by name or with any identity; they end with the test."""
    with ExitStack() as opened:

        def make(identity: Identity | str | None) -> Raw:
            made = Raw(node, keyring(identity) if isinstance(identity, str) else identity)
            opened.callback(made.channel.close)
            return made

        yield make


@pytest.fixture
def raw(connect: Connect) -> Raw:
    return connect("node2")


def silence(over: threading.Event) -> Iterator[bytes]:
    """The messages of a call that sends its headers only."""
    over.wait(60)
    yield from ()


def offered(data: bytes, content: int = 7) -> pb.OfferRequest:
    one = offer_of(data, content)
    return pb.OfferRequest(
        content=one.content, inode=one.inode, generation=one.generation, size=one.size, digest=one.digest or b"", blocks=one.blocks
    )


def named(transfer: int) -> bytes:
    """The first message of a stream of blocks."""
    return pb.TransferRequest(transfer=transfer).SerializeToString()


def reading(first: int, count: int, data: bytes = DATA, content: int = 7) -> bytes:
    request = pb.ReadRequest(content=content, digest=offer_of(data, content).digest or b"", first=first, count=count)
    return request.SerializeToString()


def header(number: int, length: int, encoding: int = 0) -> bytes:
    return struct.pack("<QIB3x", number, length, encoding)


def block(number: int, data: bytes = DATA) -> list[bytes]:
    body = data[number * BLOCK : (number + 1) * BLOCK]
    return [header(number, len(body)), *(body[start : start + PIECE] for start in range(0, len(body), PIECE))]


END = 2
FIRST = b"the first message"


# --- who ---------------------------------------------------------------------------------------------------------------


def test_nobody_comes_in_without_a_certificate_of_this_cluster(
    connect: Connect, keyring: Keyring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = keyring("node2")
    other = Keyring(tmp_path / "other")("node2")
    bare = Identity("", "", ours.ca, b"", b"", ours.expires)
    strange = Identity("node2", CLUSTER, ours.ca, other.certificate, other.key, ours.expires)
    monkeypatch.setattr(certificates, "NODE_DAYS", -1)
    monkeypatch.setattr(certificates, "SKEW", datetime.timedelta(days=9))
    late = certificates.issue(keyring.directory, "late")
    expired = Identity("late", CLUSTER, ours.ca, (late / "node.pem").read_bytes(), (late / "node.key").read_bytes(), ours.expires)
    for identity in (None, bare, strange, expired):
        assert connect(identity).refused("Ping", b"") is Status.UNAVAILABLE
    assert pb.PingReply.FromString(connect(ours).call("Ping", b"")).now_ns


@pytest.mark.parametrize(
    "named", [("stranger", "mars"), ("../stranger", CLUSTER), ("a\nERROR of its own", CLUSTER), ("a\0b", CLUSTER)], ids=str
)
def test_who_is_no_node_of_this_cluster_is_refused_and_counted(
    node: PeerNode, connect: Connect, keyring: Keyring, monkeypatch: pytest.MonkeyPatch, named: tuple[str, str]
) -> None:
    """Also with a certificate of the same authority."""
    with monkeypatch.context() as changed:
        changed.setattr(certificates, "_check_name", lambda *_: None)
        changed.setattr(certificates, "_build_name", lambda _cluster, _common, plain=certificates._build_name: plain(named[1], named[0]))
        stranger = certificates.load(certificates.issue(keyring.directory, secrets.token_hex(4)))
    assert certificates.get_subject(stranger.certificate) == named
    assert connect(stranger).refused("Ping", b"") is Status.PERMISSION_DENIED
    assert node.server.rejections.get_counts() == {"unknown": {"stranger": 1}}


def test_a_client_refuses_the_wrong_node_and_the_wrong_authority(node: PeerNode, keyring: Keyring, tmp_path: Path) -> None:
    """Whoever answers at the address of node3 must be node3."""
    for identity, name in ((keyring("node2"), "node3"), (Keyring(tmp_path / "other")("node2"), "node1")):
        link = Link("node2", CLUSTER, identity, name, node.there.address)
        with pytest.raises(peer_api.PeerFailed, match="without valid keys of node3" if name == "node3" else "does not answer"):
            link.call(link.stub.Ping, pb.Nothing())
        link.close()


def test_an_answer_that_is_no_message_fails_the_call(caplog: pytest.LogCaptureFixture) -> None:
    """And leaves no line in the log: a node that lies could fill it."""
    server = grpc.server(ThreadPoolExecutor(1))
    junk = grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"\xff" * 100)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ckptfs.peer.Peer", {"Ping": junk}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    link = Link("node2", CLUSTER, None, "node1", address)
    with pytest.raises(PeerFailed, match="node1 does not answer"):
        link.call(link.stub.Ping, pb.Nothing())
    link.close()
    server.stop(None)
    assert caplog.records == []


def test_without_keys_a_caller_must_name_our_cluster(tmp_path: Path) -> None:
    node = PeerNode(tmp_path, "node1", None)
    client = Raw(node, None)
    assert client.refused("Ping", b"") is Status.PERMISSION_DENIED
    client.channel.close()
    node.stop()


@pytest.mark.parametrize("version", [(), (("ckptfs-protocol", "4"),), (("ckptfs-protocol", "x2"),)], ids=["none", "later", "nonsense"])
def test_another_version_of_the_protocol_is_refused(node: PeerNode, raw: Raw, version: Metadata) -> None:
    """2.7: every call is; the refusal names both versions. Who states none is of 0.2.0."""
    for method in ("Ping", "Offer", "GetRecord"):
        with pytest.raises(grpc.RpcError) as failure:
            raw.call(method, b"", version)
        assert failure.value.code() is Status.FAILED_PRECONDITION
        theirs = "1" if not version else "4" if version[0][1] == "4" else "unknown"
        assert f"speaks version 3 of the protocol between nodes, the caller version {theirs}" in (failure.value.details() or "")
    assert node.server.rejections.get_counts() == {"node2": {"version": 3}}


@pytest.mark.parametrize("theirs", [1, 4])
def test_a_client_refuses_a_server_of_another_version(
    node: PeerNode, keyring: Keyring, monkeypatch: pytest.MonkeyPatch, theirs: int
) -> None:
    """2.7: version 1 states none, and checks none; nothing is sent to it."""
    monkeypatch.setattr(grpc_server, "require_version", lambda context: None)
    monkeypatch.setattr(grpc_server, "PROTOCOL_VERSION", theirs if theirs > 1 else 0)
    made = client("node2", keyring("node2"))
    with pytest.raises(PeerRefused, match=f"it speaks version {theirs} of the protocol between nodes, the caller version 3"):
        made.ping(node.there)
    made.close()


def test_revoked_keys_lose_what_they_had_while_the_node_serves(tmp_path: Path, keyring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read again at run time: calls and transfers of the lost keys end, the others' go on, new keys are good."""
    monkeypatch.setattr(limits, "REVOKED_POLL_S", 0.0)
    monkeypatch.setattr(limits, "PEER_SWEEP_S", 0.05)
    node = PeerNode(tmp_path, "node1", keyring("node1"), revoked=RevocationList(tmp_path))
    lost, other = Raw(node, keyring("node4")), Raw(node, keyring("node2"))
    transfer = pb.TransferRequest(transfer=lost.offer(content=8)).SerializeToString()
    kept = other.offer(content=9)
    certificates.write_revocations(tmp_path, {"node4": 1})
    assert lost.refused("Finish", transfer) is Status.PERMISSION_DENIED
    eventually(lambda: node.server.table.transfer_count == 1, what="what it had begun ends")
    other.call("Progress", pb.TransferRequest(transfer=kept).SerializeToString())
    eventually(lambda: node.server.rejections.get_counts()["unknown"] == {"stranger": 1}, what="it is counted")
    certificates.revoke(keyring.directory, "node4")
    new = Raw(node, keyring("node4"))
    new.call("Ping", b"")
    for one in (lost, other, new):
        one.channel.close()
    node.stop()


def test_a_node_with_revoked_keys_counts_a_refusal_as_a_failure_of_the_peer(tmp_path: Path, keyring: Keyring) -> None:
    """X11: not as the refusal of one content. So its status says why its files get no copies."""
    node = PeerNode(tmp_path, "node1", keyring("node1"), revoked=RevocationList(tmp_path))
    made = client("node5", keyring("node5"))
    assert made.ping(node.there).rtt_s
    certificates.write_revocations(tmp_path, {"node5": 1})
    with pytest.raises(PeerFailed, match="node1 refuses: these keys were revoked") as failure:
        eventually(lambda: not made.ping(node.there), what="the list is read again")
    assert not isinstance(failure.value, PeerRefused)
    made.close()
    node.stop()


def test_clients_refuse_a_server_with_revoked_keys(node: PeerNode, keyring: Keyring, tmp_path: Path) -> None:
    """TLS itself refuses it: the name that is demanded is not in the old certificate."""
    (tmp_path / "list").mkdir()
    made = client("node2", keyring("node2"), revoked=RevocationList(tmp_path / "list"))
    assert made.ping(node.there).rtt_s
    certificates.write_revocations(tmp_path / "list", {"node1": 1})
    eventually(lambda: refuses(made, node), what="the list is read again")
    made.close()


def refuses(made: PeerClient, node: PeerNode) -> bool:
    try:
        made.ping(node.there)
    except PeerFailed as failure:
        assert "without valid keys of node1: another node, or its keys were revoked" in str(failure)
        return True
    return False


SERVES = """
import sys
from pathlib import Path
from ckptfs_daemon.__main__ import silence_grpc
silence_grpc()
from ckptfs.clique import certificates
from peer_world import PeerNode
node = PeerNode(Path(sys.argv[1]), "node1", certificates.load(Path(sys.argv[2])))
print(node.server.port, flush=True)
sys.stdin.read()
node.stop()
"""


def test_unauthenticated_connections_leave_no_line_each_in_the_log(tmp_path: Path, keyring: Keyring) -> None:
    """In the daemon gRPC writes nothing of its own: whoever can reach the port could fill the disk."""
    mine = keyring("node1")
    keyring("node2")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("GRPC_VERBOSITY", None)
    command = [sys.executable, "-c", SERVES, str(tmp_path), str(keyring.directory / "node1")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as served:  # fmt: skip
        assert served.stdout is not None
        port = int(served.stdout.readline())
        for _ in range(20):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(secrets.token_bytes(200))
            context = ssl.create_default_context(cadata=mine.ca.decode())
            context.load_cert_chain(keyring.directory / "node2" / "node.pem", keyring.directory / "node2" / "node.key")
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as stranger:
                context.wrap_socket(stranger, server_hostname="n-0.ckptfs")
        _, said = served.communicate(timeout=60)
    assert served.returncode == 0 and said == ""


def test_a_busy_port_is_reported_and_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P11: one sentence, for status."""
    monkeypatch.setattr(limits, "RETRY_LAST_S", 0.05)
    (port,) = free_ports(1)
    taken = socket.create_server(("127.0.0.1", port))
    said: list[str] = []

    async def main() -> None:
        def failed(what: str) -> None:
            said.append(what)
            taken.close()

        async with trio.open_nursery() as nursery:
            begin = partial(PeerServer, MemoryContentHost(tmp_path), f"127.0.0.1:{port}", CLUSTER, None)
            nursery.start_soon(serve_peers, begin, lambda server: serves.set(), failed)
            with trio.fail_after(60):
                while not serves.is_set():
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

    serves = threading.Event()
    trio.run(main)
    assert len(said) == 1 and f"127.0.0.1:{port}" in said[0] and "VERBOSITY" not in said[0]


# --- what --------------------------------------------------------------------------------------------------------------


def changed(**values: object) -> bytes:
    request = offered(DATA)
    for name, value in values.items():
        setattr(request, name, value)
    return request.SerializeToString()


MALFORMED = {
    "no content": changed(content=0),
    "content too large": changed(content=2**63),
    "no inode": changed(inode=0),
    "generation too large": changed(generation=2**64 - 1),
    "last generation": changed(generation=2**63 - 1),
    "size beyond the limit": changed(size=2**63, blocks=b""),
    "more size than blocks": changed(size=len(DATA) + 1),
    "less size than blocks": changed(size=BLOCK),
    "half a digest of a block": changed(blocks=bytes(31)),
    "short digest": changed(digest=bytes(15)),
    "path as digest": changed(digest=b"../../etc/passwd"[:16]),
    "another digest": changed(digest=bytes(16)),
    "whole of another length": changed(whole=b"x"),
    "whole too large": changed(whole=DATA),
    "whole of an early offer": changed(digest=b"", whole=DATA),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_offer_touches_nothing(node: PeerNode, raw: Raw, name: str) -> None:
    assert raw.refused("Offer", MALFORMED[name]) is Status.INVALID_ARGUMENT
    assert list(node.host.directory.iterdir()) == []
    assert node.server.rejections.get_counts() == {"node2": {"malformed": 1}}


def test_a_message_that_is_no_protobuf_is_refused(node: PeerNode, raw: Raw, caplog: pytest.LogCaptureFixture) -> None:
    """Counted, and no line in the log for each."""
    for method in ("Offer", "Finish", "GetRecord", "Forget"):
        assert raw.refused(method, b"\xff" * 100) is Status.INVALID_ARGUMENT
    assert raw.refused("GetRecord", b"\x0a\x0d../etc/passwd") is Status.INVALID_ARGUMENT
    assert raw.refused("GetRecord", b"\x08" + b"\xff" * 9 + b"\x01") is Status.INVALID_ARGUMENT, "a negative id"
    assert raw.refused("Nonsense", b"") is Status.UNIMPLEMENTED
    assert caplog.records == []
    assert node.server.rejections.get_counts() == {"node2": {"malformed": 6, "no_method": 1}}
    assert raw.refused("Offer", bytes(limits.PEER_MESSAGE_BYTES_MAX + 1)) is Status.RESOURCE_EXHAUSTED
    assert list(node.host.directory.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "message", "status"),
    [
        ("Finish", pb.TransferRequest(transfer=1), Status.NOT_FOUND),
        ("Progress", pb.TransferRequest(transfer=2**64 - 1), Status.NOT_FOUND),
        ("Abandon", pb.TransferRequest(), Status.NOT_FOUND),
        ("GetRecord", pb.RecordRequest(content=0), Status.INVALID_ARGUMENT),
        ("GetRecord", pb.RecordRequest(content=5, digest=b"/etc/passwd"), Status.INVALID_ARGUMENT),
        ("GetRecord", pb.RecordRequest(content=5), Status.NOT_FOUND),
        ("SealSoon", pb.SealRequest(content=5, timeout_ms=2**32 - 1), Status.INVALID_ARGUMENT),
        ("Forget", pb.ForgetRequest(contents=[0]), Status.INVALID_ARGUMENT),
        ("Forget", pb.ForgetRequest(contents=range(1, limits.PEER_FORGET_MAX + 2)), Status.INVALID_ARGUMENT),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_ids_and_numbers_out_of_range(node: PeerNode, raw: Raw, method: str, message: object, status: Status) -> None:
    assert raw.refused(method, message.SerializeToString()) is status  # type: ignore[attr-defined]
    assert sum(node.server.rejections.get_counts()["node2"].values()) == 1
    assert node.host.forgotten == [] and node.host.sealed_soon == []


def test_a_second_finish_and_the_transfer_of_another_peer(node: PeerNode, raw: Raw, connect: Connect) -> None:
    transfer = pb.TransferRequest(transfer=raw.offer()).SerializeToString()
    assert raw.refused("Finish", transfer) is Status.FAILED_PRECONDITION
    other = connect("node3")
    for method in ("Finish", "Progress", "Abandon"):
        assert other.refused(method, transfer) is Status.NOT_FOUND
    with fails(Status.NOT_FOUND):
        other.send(transfer, *block(0), header(1, 0, END))
    raw.send(transfer, *block(1), *block(0), header(2, 0, END))
    assert pb.FinishReply.FromString(raw.call("Finish", transfer)).verified
    assert raw.refused("Finish", transfer) is Status.NOT_FOUND
    assert node.host.path(7).read_bytes() == DATA


STREAMS = {
    "nothing": ([], Status.NOT_FOUND),
    "no message": ([b"x"], Status.INVALID_ARGUMENT),
    "path as message": ([b"/../../../../etc/passwd".ljust(32, b"\0")], Status.INVALID_ARGUMENT),
    "a read": ([reading(0, 1)], Status.NOT_FOUND),
    "no end": ([FIRST, *block(0)], Status.FAILED_PRECONDITION),
    "end in the middle": ([FIRST, *block(0)[:2]], Status.FAILED_PRECONDITION),
    "short piece": ([FIRST, header(0, BLOCK), b"x"], Status.FAILED_PRECONDITION),
    "long piece": ([FIRST, header(0, BLOCK), DATA[: 2 * PIECE]], Status.FAILED_PRECONDITION),
    "block that does not exist": ([FIRST, header(2, BLOCK)], Status.INVALID_ARGUMENT),
    "block far away": ([FIRST, header(2**64 - 1, BLOCK)], Status.INVALID_ARGUMENT),
    "too short a block": ([FIRST, header(0, 5)], Status.INVALID_ARGUMENT),
    "too long a block": ([FIRST, header(0, 2**32 - 1)], Status.INVALID_ARGUMENT),
    "unknown encoding": ([FIRST, header(0, BLOCK, 9)], Status.INVALID_ARGUMENT),
    "zstd bomb": ([FIRST, header(0, 13, 1), b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**62)], Status.INVALID_ARGUMENT),
    "zstd of nothing": ([FIRST, header(0, 0, 1)], Status.INVALID_ARGUMENT),
    "no zstd": ([FIRST, header(0, 9, 1), b"not zstd!"], Status.INVALID_ARGUMENT),
    "a block again": ([FIRST, *block(0), *block(0)], Status.FAILED_PRECONDITION),
    "wrong bytes": ([FIRST, *block(0, bytes(len(DATA)))], Status.DATA_LOSS),
    "another block's bytes": ([FIRST, header(0, BLOCK), *block(1)[1:]], Status.DATA_LOSS),
    "wrong count at the end": ([FIRST, *block(0), header(2, 0, END)], Status.FAILED_PRECONDITION),
    "more after the end": ([FIRST, *block(0), header(1, 0, END), *block(1)], Status.FAILED_PRECONDITION),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_is_not_as_it_should_be(node: PeerNode, raw: Raw, name: str) -> None:
    """Whatever came before the fault and was right stays; the transfer goes on from there and ends well."""
    messages, status = STREAMS[name]
    number = raw.offer()
    with fails(status):
        raw.send(*(named(number) if one is FIRST else one for one in messages))
    assert sum(node.server.rejections.get_counts()["node2"].values()) == 1
    request = pb.TransferRequest(transfer=number).SerializeToString()
    bits = pb.ProgressReply.FromString(raw.call("Progress", request)).lacking[0]
    left = [one for one in (0, 1) if bits >> one & 1]
    raw.send(named(number), *(message for one in left for message in block(one)), header(len(left), 0, END))
    assert pb.FinishReply.FromString(raw.call("Finish", request)).verified


@pytest.mark.parametrize(
    ("first", "count"), [(0, 0), (0, 3), (2, 1), (2**63, 1), (0, limits.PEER_RUN_BLOCKS_MAX + 1), (2**64 - 1, 2**32 - 1)]
)
def test_reading_out_of_range(node: PeerNode, raw: Raw, first: int, count: int) -> None:
    node.host.hold(DATA)
    with fails(Status.INVALID_ARGUMENT):
        raw.read(reading(first, count))
    assert b"".join(one for one in raw.read(reading(0, 2)) if len(one) > 16) == DATA


@pytest.mark.parametrize("content", [0, 5, 7, 2**63])
def test_reading_what_is_not_here(node: PeerNode, raw: Raw, content: int) -> None:
    """Another content, and other bytes of this one; a read without a digest means nothing."""
    node.host.hold(DATA)
    for digest in (b"", b"/etc/passwd", bytes(16)):
        with pytest.raises(grpc.RpcError) as failure:
            raw.read(pb.ReadRequest(content=content, digest=digest, count=1).SerializeToString())
        is_malformed = content in (0, 2**63) or len(digest) == 11
        assert failure.value.code() is (Status.INVALID_ARGUMENT if is_malformed else Status.NOT_FOUND)
    assert node.server.table.read_count == 0


# --- several in one message ------------------------------------------------------------------------------------------------


def whole(data: bytes, content: int, **values: object) -> pb.OfferRequest:
    request = offered(data, content)
    request.whole = data
    for name, value in values.items():
        setattr(request, name, value)
    return request


SMALL = b"small"
LARGE = bytes(limits.PEER_INLINE_BYTES_MAX + 1)
NOT_TOGETHER = {
    "none": ([], Status.INVALID_ARGUMENT),
    "too many": ([whole(b"", 10 + number) for number in range(limits.PEER_BATCH_MAX + 1)], Status.INVALID_ARGUMENT),
    "too many bytes": (
        [whole(LARGE[:-1], 10 + number) for number in range(limits.PEER_BATCH_BYTES_MAX // len(LARGE) + 2)],
        Status.INVALID_ARGUMENT,
    ),
    "one too large": ([whole(SMALL, 10), whole(LARGE, 11)], Status.INVALID_ARGUMENT),
    "one twice": ([whole(SMALL, 10), whole(SMALL, 10)], Status.INVALID_ARGUMENT),
    "one without its bytes": ([whole(SMALL, 10), offered(SMALL, 11)], Status.INVALID_ARGUMENT),
    "one early": ([whole(SMALL, 10), whole(SMALL, 11, digest=b"")], Status.INVALID_ARGUMENT),
    "one without a number": ([whole(SMALL, 10), whole(SMALL, 0)], Status.INVALID_ARGUMENT),
    "one with a path": ([whole(SMALL, 10), whole(SMALL, 11, blocks=b"../../etc/passwd")], Status.INVALID_ARGUMENT),
    "one with other bytes": ([whole(SMALL, 10), whole(SMALL, 11, whole=b"smell")], Status.DATA_LOSS),
}


@pytest.mark.parametrize("name", NOT_TOGETHER)
def test_several_of_which_one_is_not_as_it_should_be_touch_nothing(node: PeerNode, raw: Raw, name: str) -> None:
    offers, status = NOT_TOGETHER[name]
    assert raw.refused("OfferMany", pb.OffersRequest(offers=offers).SerializeToString()) is status
    assert list(node.host.directory.iterdir()) == [] and node.host.arriving() == 0
    assert sum(node.server.rejections.get_counts()["node2"].values()) == 1


def test_what_the_shelf_refuses_of_several_does_not_concern_the_others(node: PeerNode, raw: Raw) -> None:
    """And is counted; nothing is left of it that would be in the way of the next offer."""
    number = raw.offer(DATA, 12)
    other = node.host.begin_reception(offer_of(SMALL, 11))
    reply = pb.OffersReply.FromString(
        raw.call("OfferMany", pb.OffersRequest(offers=[whole(SMALL, content) for content in (10, 11, 12)]).SerializeToString())
    )
    assert [verdict.verified for verdict in reply.verdicts] == [True, False, True]
    assert reply.verdicts[1].code == errno.EBUSY and node.server.rejections.get_counts() == {"node2": {"busy": 1}}
    assert raw.refused("Finish", pb.TransferRequest(transfer=number).SerializeToString()) is Status.NOT_FOUND
    node.host.abort_reception(other.token)
    again = pb.OffersRequest(offers=[whole(SMALL, 11)]).SerializeToString()
    assert pb.OffersReply.FromString(raw.call("OfferMany", again)).verdicts[0].verified
    assert node.host.path(11).read_bytes() == SMALL and node.host.arriving() == 0


# --- how much ------------------------------------------------------------------------------------------------------------


@with_limits(PEER_SWEEP_S=0.05)
def test_transfers_and_copies_of_a_peer_are_bounded_and_end_when_they_are_idle(
    node: PeerNode, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw.call("Ping", b"")
    before = len(os.listdir("/proc/self/fd"))
    for content in range(1, limits.PEER_TRANSFERS_PER_PEER_MAX + 1):
        raw.offer(b"x" * (limits.PEER_INLINE_BYTES_MAX + 1), 100 + content)
    assert raw.refused("Offer", offered(b"y", 99).SerializeToString()) is Status.RESOURCE_EXHAUSTED
    monkeypatch.setattr(limits, "PEER_IDLE_COPIES_MAX", 3)
    for content in range(1, 6):
        node.host.hold(b"x", content)
        raw.read(reading(0, 1, b"x", content))
    assert node.server.table.read_count == 3
    assert node.server.rejections.get_counts() == {"node2": {"too_many": 1}}
    monkeypatch.setattr(limits, "PEER_IDLE_S", -1.0)
    eventually(lambda: node.host.arriving() == 0 and node.server.table.read_count == 0, what="what is idle ends")
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, what="descriptors are given back")


@with_limits(PEER_SWEEP_S=0.05)
def test_what_a_node_had_begun_ends_when_it_dies_and_room_for_what_never_came_is_given_back(node: PeerNode, connect: Connect) -> None:
    """P10: also when it says so itself. What others have begun goes on."""
    one, other = connect("node2"), connect("node3")
    one.offer(DATA, 1)
    some = one.offer(DATA, 2)
    one.send(named(some), *block(0), header(1, 0, END))
    going_on = other.offer(DATA, 3)
    node.server.end_all_of_node("node2")
    eventually(lambda: node.host.arriving() == 1, what="what the dead node had begun ends")
    assert (node.host.abandoned, node.host.kept) == (2, 1)
    other.call("Abandon", pb.TransferRequest(transfer=going_on).SerializeToString())
    assert (node.host.abandoned, node.host.kept) == (3, 1)


def test_refusals_leave_nothing_behind(node: PeerNode, raw: Raw) -> None:
    """No growth of threads or descriptors, whatever is asked."""
    raw.refused("Offer", MALFORMED["no content"])
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        for message in MALFORMED.values():
            raw.refused("Offer", message)
    number = raw.offer()
    for name in ("wrong bytes", "long piece", "block far away"):
        with pytest.raises(grpc.RpcError):
            raw.send(named(number), *STREAMS[name][0][1:])
    raw.call("Abandon", pb.TransferRequest(transfer=number).SerializeToString())
    # gRPC fills its bounded pool first, then no more threads come.
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, what="descriptors are given back")
    assert threading.active_count() <= threads + limits.PEER_WORKERS


def test_peers_that_are_refused_are_counted_in_bounded_memory() -> None:
    refusals = RefusedCalls()
    for number in range(3 * limits.PEER_COUNTERS_MAX):
        refusals.record("full", f"node{number}")
    figures = refusals.get_counts()
    assert len(figures) == limits.PEER_COUNTERS_MAX + 1
    assert sum(count for counts in figures.values() for count in counts.values()) == 3 * limits.PEER_COUNTERS_MAX


@with_limits(PEER_SWEEP_S=0.05)
def test_what_large_messages_took_is_given_back(node: PeerNode, raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when every one of them is refused."""
    trimmed: list[int] = []
    monkeypatch.setattr(grpc_server, "_trim", trimmed.append)
    assert raw.refused("Offer", MALFORMED["no content"]) is Status.INVALID_ARGUMENT
    assert raw.refused("Offer", bytes(2 * grpc_server.LARGE_BYTES)) is Status.INVALID_ARGUMENT
    eventually(lambda: trimmed, what="memory is given back")
    node.stop()
    assert trimmed == [0]


@pytest.mark.parametrize("method", ["Send", "Read", "Ping", "Offer"])
def test_calls_that_say_nothing_leave_room_for_the_others(raw: Raw, connect: Connect, method: str) -> None:
    """Whoever opens many, and sends their headers only, gets few, and nobody else waits for him."""
    over = threading.Event()
    most = limits.PEER_STREAMS_PER_PEER_MAX if method == "Send" else limits.PEER_AWAITED_PER_PEER_MAX
    called = raw.channel.stream_unary(f"/ckptfs.peer.Peer/{method}", bytes, bytes)
    calls = [called.future(silence(over), metadata=VERSION) for _ in range(2 * limits.PEER_CALLS_MAX)]
    try:
        eventually(lambda: sum(call.done() for call in calls) == len(calls) - most, what="the rest is refused")
        assert {call.code() for call in calls if call.done()} == {Status.RESOURCE_EXHAUSTED}
        assert connect("node3").offer(content=8)
    finally:
        over.set()
    eventually(lambda: all(call.done() for call in calls), what="the silent ones end")


@pytest.mark.parametrize("method", ["Send", "Read", "Ping", "Nonsense"])
@with_limits(PEER_PIECE_S=0.05, PEER_STALL_S=0.05, PEER_SWEEP_S=0.05)
def test_a_call_without_its_message_ends(node: PeerNode, raw: Raw, method: str) -> None:
    """Its thread is free again, and it is counted."""
    over = threading.Event()
    with fails(Status.UNIMPLEMENTED if method == "Nonsense" else Status.CANCELLED):
        raw.channel.stream_unary(f"/ckptfs.peer.Peer/{method}", bytes, bytes)(silence(over), timeout=60, metadata=VERSION)
    over.set()
    counted = "no_method" if method == "Nonsense" else "stalled"
    eventually(lambda: node.server.rejections.get_counts() == {"node2": {counted: 1}}, what="it is counted")


@with_limits(PEER_HANDSHAKE_S=0.5)
def test_a_connection_that_does_not_introduce_itself_ends(node: PeerNode) -> None:
    """Half-open connections hold nothing for long."""
    held = [socket.create_connection(("127.0.0.1", node.server.port)) for _ in range(10)]
    for one in held:
        one.settimeout(60)
        assert ended(one)


def ended(connected: socket.socket) -> bool:
    try:
        while connected.recv(1 << 16):
            pass
    except (ConnectionError, ssl.SSLError):
        pass
    connected.close()
    return True


def test_unauthenticated_connections_leave_descriptors_for_peers(tmp_path: Path, keyring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: what is not closed of thousands of connections without keys takes a part of what this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(server_limits, "CONNECTIONS_SHARE", 8 / soft)
    node = PeerNode(tmp_path, "node1", keyring("node1"))
    good = Raw(node, keyring("node2"))
    good.call("Ping", b"")
    before = len(os.listdir("/proc/self/fd"))
    silent = [socket.create_connection(("127.0.0.1", node.server.port)) for _ in range(40)]
    eventually(lambda: sum(map(is_closed, silent)) >= 30, what="most are closed at once")
    good.call("Ping", b"")
    assert len(os.listdir("/proc/self/fd")) - before <= len(silent) + 10 and resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
    for one in silent:
        one.close()
    good.channel.close()
    node.stop()


def is_closed(connected: socket.socket) -> bool:
    connected.setblocking(False)
    try:
        return not connected.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
