"""X10, P8: what the mount process has in hand outlives it, on every kernel: requests in the table that the supervisor holds.

The processes here are the shim alone, without pyfuse3: each does exactly what it is told on a real FUSE connection, and ends.
"""

import contextlib
import errno
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ckptfs_daemon.fuse import connection, request_table, shim_build
from ckptfs_daemon.fuse.connection import Connection
from daemon_under_test import environment, eventually
from programs import need

from ckptfs import libc, limits
from ckptfs.config import Config
from ckptfs.model import DataPath

pytestmark = [pytest.mark.fuse, pytest.mark.root]
GETATTR, STATFS, SETXATTR = 3, 17, 21
HEADER = struct.Struct("=IIQ24x")
HEADER_BYTES = HEADER.size
ATTRIBUTES = struct.pack("=Q2I6Q10I", 60, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0)
"""The reply to a GETATTR of the root directory."""

WAIT_S = 60
SLOTS = (limits.REQUEST_SMALL_SLOTS, limits.REQUEST_SMALL_BYTES, limits.REQUEST_LARGE_SLOTS, limits.REQUEST_LARGE_BYTES)

PROCESS = """
import ctypes, json, sys
library, fuse_fd, table_fd, offset, slots, count, kept = json.loads(sys.argv[1])
shim = ctypes.CDLL(library)
shim.shim_map_table.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64] + [ctypes.c_uint32] * 4
class Buffer(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("flags", ctypes.c_int), ("mem", ctypes.c_void_p), ("fd", ctypes.c_int), ("pos", ctypes.c_int64)]
said = {"failed": shim.shim_map_table(fuse_fd, table_fd, offset, *slots)}
said["left"] = ctypes.c_uint32.in_dll(shim, "shim_left").value
session = ctypes.create_string_buffer(65536)
said["sizes"] = [shim.fuse_session_receive_buf(session, ctypes.byref(Buffer())) for _ in range(count)]
print("received", flush=True)
sys.stdin.readline()
shim.shim_trim_table(kept)
said["full"] = ctypes.c_uint32.in_dll(shim, "shim_is_full").value
print(json.dumps(said))
"""


class Served:
    """A mounted connection that nothing serves but the processes of the test."""

    def __init__(self, connected: Connection) -> None:
        self.connected = connected
        self.point = connected.mountpoint
        self.slots = SLOTS
        self.results: list[Any] = []
        os.set_blocking(connected.fd, False)

    def asks(self, act: Callable[[], object]) -> threading.Thread:
        """An application's call that waits for an answer."""

        def run() -> None:
            try:
                self.results.append(act())
            except OSError as failure:
                self.results.append(failure.errno)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def process(
        self, count: int, *, kept: int = SLOTS[2], meanwhile: Callable[[], object] = lambda: None, prefix: Sequence[str] = ()
    ) -> dict[str, Any]:
        """A process that takes up what is left, receives `count` times and ends without an answer: as if killed.

        `meanwhile` runs when it has received; after that it gives back the memory of large slots but for `kept`. `prefix`: a command that
        runs it.
        """
        fds = (self.connected.fd, self.connected.table_fd)
        told = json.dumps([str(shim_build.ensure()), *fds, request_table.SMALL_OFFSET, self.slots, count, kept])
        command = [*prefix, sys.executable, "-c", PROCESS, told]
        with subprocess.Popen(
            command, pass_fds=fds, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == "received\n"
            meanwhile()
            output, _ = process.communicate("\n", timeout=WAIT_S)
        assert process.returncode == 0
        said: dict[str, Any] = json.loads(output)
        assert said["failed"] == 0
        return said

    def takes(self, opcode: int, count: int = 1) -> list[int]:
        """Processes that end until the table holds `count` requests of this kind; their numbers."""

        def taken() -> list[int]:
            self.process(count + 1)
            numbers = [held[1] for held in self.held() if held[0] == opcode]
            return numbers if len(numbers) >= count else []

        return list(eventually(taken, what=f"{count} requests {opcode}"))

    def held(self) -> list[tuple[int, int, bytes]]:
        """(opcode, number, body) of what the slots hold, in the order of the table."""
        found = []
        offset = request_table.SMALL_OFFSET
        for count, size in (self.slots[:2], self.slots[2:]):
            for index in range(count):
                at = offset + index * size
                length, opcode, number = HEADER.unpack(os.pread(self.connected.table_fd, HEADER_BYTES, at))
                if length:
                    body = os.pread(self.connected.table_fd, length - HEADER_BYTES, at + HEADER_BYTES)
                    found.append((opcode, number, body))
            offset += count * size
        return found

    def answer(self, number: int, error: int = 0, body: bytes = b"") -> None:
        os.write(self.connected.fd, struct.pack("=IiQ", 16 + len(body), -error, number) + body)


@pytest.fixture
def served() -> Iterator[Served]:
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("NO MOUNT TESTS HERE: a mount of our own needs root and /dev/fuse")
    place = Path(tempfile.mkdtemp(prefix="ckptfs-test-"))
    connected = connection.connect(Config(name=f"table{os.getpid()}", mountpoint=place, state=place, data_path=DataPath.BUFFERED))
    try:
        yield Served(connected)
    finally:
        connection.abort(connected)
        with contextlib.suppress(OSError):
            connection.unmount_at(place, libc.MNT_DETACH)
        connected.close()
        place.rmdir()


@pytest.mark.parametrize(("error", "size"), [("ECONNABORTED", 0), ("ENODEV", 0), ("ENOENT", -errno.EINTR), ("EIO", -errno.EIO)])
def test_the_end_of_the_connection_is_no_failure(served: Served, error: str, size: int) -> None:
    """The kernel says ECONNABORTED to a read that takes a request at the moment at which the filesystem is unmounted."""
    need("strace")
    prefix = ("strace", "-qq", "-o", os.devnull, "-P", "/dev/fuse", "-e", f"inject=read:error={error}")
    assert served.process(1, prefix=prefix)["sizes"] == [size]


def test_a_request_waits_for_the_next_process(served: Served) -> None:
    """Its process dies without a reply, twice; then it is answered, and no later process sees it."""
    asking = served.asks(lambda: os.statvfs(served.point))
    (number,) = served.takes(STATFS)
    for _ in range(2):
        said = served.process(1)
        assert (said["left"], said["sizes"]) == (1, [HEADER_BYTES])
    served.answer(number, error=errno.ENODATA)
    asking.join(WAIT_S)
    assert served.results == [errno.ENODATA]
    assert served.process(1) == {"failed": 0, "left": 0, "sizes": [-errno.EINTR], "full": 0}


def test_an_answered_request_is_not_taken_up_again(served: Served) -> None:
    """The process dies right after its reply, before it could note anything: done twice, a hole could be punched into newer data."""
    asking = served.asks(lambda: os.statvfs(served.point))
    (number,) = served.takes(STATFS)
    served.answer(number, error=errno.ENODATA)
    asking.join(WAIT_S)
    assert len(served.held()) == 1, "the slot still has it"
    assert served.process(0)["left"] == 0


def test_the_payload_is_kept(served: Served) -> None:
    """A large request stays where the kernel wrote it."""
    value = os.urandom(60_000)
    asking = served.asks(lambda: os.setxattr(served.point, "user.note", value))
    # The kernel checks permissions first.
    served.answer(*served.takes(GETATTR), body=ATTRIBUTES)
    (number,) = served.takes(SETXATTR)
    said = served.process(1)
    assert said["left"] == 1 and said["sizes"][0] > len(value)
    (body,) = (held[2] for held in served.held() if held[0] == SETXATTR)
    assert body.endswith(b"user.note\0" + value)
    served.answer(number)
    asking.join(WAIT_S)
    assert served.results == [None]


def test_many_are_all_kept(served: Served) -> None:
    threads = [served.asks(lambda: os.statvfs(served.point)) for _ in range(30)]
    numbers = served.takes(STATFS, 30)
    assert len(set(numbers)) == 30
    for number in numbers[::2]:
        served.answer(number, error=errno.ENODATA)
    assert served.process(0)["left"] == 15
    for number in numbers[1::2]:
        served.answer(number, error=errno.ENODATA)
    for thread in threads:
        thread.join(WAIT_S)
    assert served.results == [errno.ENODATA] * 30


def test_a_full_table_leaves_requests_in_the_kernel(served: Served) -> None:
    """Nothing is overwritten; the next slot that becomes free takes them."""
    served.slots = (1, SLOTS[1], 2, SLOTS[3])
    threads = [served.asks(lambda: os.statvfs(served.point)) for _ in range(4)]
    eventually(lambda: served.process(9)["full"])
    assert [opcode for opcode, _number, _body in served.held()] == [STATFS] * 2, "the others stay in the kernel"
    answered: set[int] = set()

    def answer_all() -> bool:
        for _opcode, number, _body in served.held():
            if number not in answered:
                served.answer(number, error=errno.ENODATA)
                answered.add(number)
        served.process(9)
        return len(answered) == 4

    eventually(answer_all)
    for thread in threads:
        thread.join(WAIT_S)
    assert served.results == [errno.ENODATA] * 4


def test_memory_of_many_large_requests_is_given_back(served: Served) -> None:
    """By a process that goes on, and by the next one. What is still waited for stays."""

    def count_allocated() -> int:
        return os.fstat(served.connected.table_fd).st_blocks * 512 // SLOTS[3]

    def answer(some: list[int]) -> None:
        for number in some:
            served.answer(number, error=errno.ENODATA)

    threads = [served.asks(lambda: os.statvfs(served.point)) for _ in range(8)]
    numbers = served.takes(STATFS, 8)
    assert count_allocated() >= 8
    assert served.process(8, kept=2, meanwhile=lambda: answer(numbers[3:]))["left"] == 8
    assert 3 <= count_allocated() <= 6
    answer(numbers[:3])
    for thread in threads:
        thread.join(WAIT_S)
    assert served.process(0)["left"] == 0
    assert count_allocated() <= 2, "one large slot, and all small ones"


def test_a_request_that_was_being_moved_is_taken_up_once(served: Served) -> None:
    asking = served.asks(lambda: os.statvfs(served.point))
    (number,) = served.takes(STATFS)
    copy = os.pread(served.connected.table_fd, HEADER_BYTES, request_table.LARGE_OFFSET)
    os.pwrite(served.connected.table_fd, copy, request_table.SMALL_OFFSET)
    assert len(served.held()) == 2
    assert served.process(0)["left"] == 1
    served.answer(number, error=errno.ENODATA)
    asking.join(WAIT_S)


def test_what_the_kernel_does_not_know_is_dropped(served: Served) -> None:
    """A copy that failed in the middle has a header, and the kernel has failed the request. Nor is nonsense taken up."""
    os.pwrite(served.connected.table_fd, HEADER.pack(HEADER_BYTES, STATFS, 4711 << 1), request_table.LARGE_OFFSET)
    os.pwrite(served.connected.table_fd, HEADER.pack(7, STATFS, 2), request_table.SMALL_OFFSET)
    assert served.process(0)["left"] == 0
    assert served.held() == []


def test_a_connection_ends_with_its_mount(served: Served) -> None:
    assert not served.connected.has_ended()
    connection.unmount_at(served.connected.mountpoint)
    assert served.connected.has_ended()
