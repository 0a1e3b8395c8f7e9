"""Strangers at the control sockets (F6, P1): whoever may connect is refused with a status, counted, leaves no line in the log, and holds
nothing for long. The clients here speak gRPC and nothing of the product's.
"""

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from ckptfs_daemon.control import server
from control_served import Served, serving
from daemon_under_test import eventually
from local_node import Node

from ckptfs import limits
from ckptfs.protocol import control_pb2 as pb

Status = grpc.StatusCode
BEYOND = [2**63, 2**64 - 1]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path / "run"))
    for bound in ("CONTROL_MESSAGE_S", "CONTROL_IDLE_S"):
        monkeypatch.setattr(limits, bound, 0.5)
    monkeypatch.setattr(server, "SOCKET_CHECK_S", 0.05)
    with serving(Node(tmp_path)) as served:
        yield served


def refused(path: Path, method: str, message: bytes) -> Status:
    """The status of a call of which the first message of the answer is looked at."""
    with grpc.insecure_channel(f"unix:{path}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        with pytest.raises(grpc.RpcError) as failure:
            next(channel.unary_stream(f"/ckptfs.control.{method}", bytes, bytes)(message, timeout=60))
        return failure.value.code()


def counted(served: Served) -> dict[str, int]:
    return {one.reason: one.count for one in served.client.get_status().refused}


def test_what_is_no_message_and_no_method_is_refused_and_counted(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    questions = ["GetStatus", "GetCluster", "GetCapacity", "GetConfig", "List", "Wait"]
    for method in questions:
        assert refused(served.mount.socket, f"Queries/{method}", b"\xff" * 100) is Status.INVALID_ARGUMENT
    for method in ("Drain", "Verify", "Refresh", "LogLevel"):
        assert refused(served.mount.admin_socket, f"Admin/{method}", b"\xff" * 100) is Status.INVALID_ARGUMENT
        assert refused(served.mount.socket, f"Admin/{method}", b"") is Status.UNIMPLEMENTED
    assert refused(served.mount.socket, "Queries/../GetStatus", b"") is Status.UNIMPLEMENTED
    assert counted(served) == {"invalid_argument": 10, "unimplemented": 5}
    assert caplog.records == []


def test_numbers_that_no_inode_has_are_unknown(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for number in (0, *BEYOND):
        wait = pb.WaitRequest(inode=number, level="local").SerializeToString()
        assert refused(served.mount.socket, "Queries/Wait", wait) is Status.NOT_FOUND
        for method, order in (("Verify", pb.VerifyRequest(inode=number)), ("Refresh", pb.RefreshRequest(inode=number))):
            assert refused(served.mount.admin_socket, f"Admin/{method}", order.SerializeToString()) is Status.NOT_FOUND
    assert [record.known for record in served.client.list_records([0, *BEYOND])] == [False] * 3
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_long_words_are_not_sent_back(served: Served) -> None:
    wait = pb.WaitRequest(inode=1, level="x" * (1 << 19)).SerializeToString()
    assert refused(served.mount.socket, "Queries/Wait", wait) is Status.FAILED_PRECONDITION


def test_calls_whose_message_never_comes_end(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """As many as there is room for: others are answered again soon."""
    over = threading.Event()

    def silent() -> Iterator[bytes]:
        over.wait(60)
        yield from ()

    most = limits.CONTROL_CALLS_MAX + limits.CONTROL_WAITS_MAX
    with grpc.insecure_channel(f"unix:{served.mount.socket}") as channel:
        call = channel.stream_unary("/ckptfs.control.Queries/GetStatus", bytes, bytes)
        calls = [call.future(silent()) for _ in range(most + 8)]
        eventually(lambda: all(one.done() for one in calls), what="all are ended")
        codes = [one.code() for one in calls]
        over.set()
    assert set(codes) <= {Status.CANCELLED, Status.RESOURCE_EXHAUSTED}
    eventually(lambda: counted(served) == {"deadline_exceeded": codes.count(Status.CANCELLED)}, what="they are counted")
    assert caplog.records == []


def test_idle_connections_end(served: Served) -> None:
    """Also those that never said anything, and there are no more than `limits.CONTROL_CONNECTIONS_MAX`."""
    served.client.get_status()
    before = len(os.listdir("/proc/self/fd"))
    silent = [socket.socket(socket.AF_UNIX) for _ in range(64)]
    for one in silent:
        one.connect(str(served.mount.socket))
        one.settimeout(60)
    for one in silent:
        with suppress(ConnectionError):
            while one.recv(1 << 10):
                pass
        one.close()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, what="all are closed")
    assert served.client.get_status().name == "test"
