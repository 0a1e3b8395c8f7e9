"""The libfuse session of the mount process: pyfuse3 and libfuse with the C shim in front of them.

The shim is loaded before pyfuse3, so nothing may import pyfuse3 before this module. `open_session` gives libfuse the connection that the
supervisor opened and processes the saved INIT request. The supervisor has answered that request already. libfuse answers it again under a
number that the kernel no longer knows, and the kernel drops this answer. If an earlier mount process died, its unanswered requests are
taken from the table of requests (`request_table`) before others are read from the kernel.

`TrioAdapter` is what pyfuse3's loop uses instead of trio. For each request pyfuse3 takes a lock, waits for its descriptor and yields to
trio's scheduler, which costs more than most handlers. With the adapter, a worker that finds the next request at once takes it without
yielding. Every `TURN_S` the worker yields in any case, so other tasks are not starved. In a cluster, handlers wait for the store, and
other tasks must run to end these waits: there a worker always yields. pyfuse3 has a place for another `trio` module,
which its asyncio support uses.

Crash safety: the supervisor keeps the connection and the table, and the next mount process opens a session on them.
"""

import ctypes
import errno
import logging
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import trio

from ckptfs import limits
from ckptfs.errors import CkptfsError
from ckptfs_daemon.fuse import request_table, shim_build
from ckptfs_daemon.fuse.connection import Connection

if "pyfuse3" in sys.modules:
    raise ImportError("pyfuse3 was imported before ckptfs_daemon.fuse.session, which must come first")

# PyDLL: the functions call back into pyfuse3's handlers, which expect to hold the GIL.
_shim = ctypes.PyDLL(str(shim_build.ensure()), mode=ctypes.RTLD_GLOBAL)

# Its extension module is linked against libfuse, so it must be loaded after the shim.
import pyfuse3  # isort: skip  # noqa: E402

log = logging.getLogger(__name__)

TURN_S = 0.004

LINGER_MS = 1
"""Time to poll the descriptor before returning to trio's scheduler. A sequential application sends its next request within about 20 us,
and every other task of this process can wait a millisecond."""

SPIN_S = 60e-6
"""Time to poll without sleeping while requests follow each other that closely. Where idle processors are halted, as in most virtual
machines, waking from a sleep takes as long as a whole request (2,570 creates/s with spinning, 1,850 without)."""


class Lock:
    """A lock that its last holder may take again at once. Other tasks get it when the holder yields."""

    def __init__(self) -> None:
        self._held = False
        self._woken = False
        self._waiting: deque[trio.lowlevel.Task] = deque()

    async def __aenter__(self) -> None:
        while self._held:
            await self._park()
        self._held = True

    async def __aexit__(self, *_: object) -> None:
        self._held = False
        # Waking one is enough: it runs when this task yields, and parks again if the lock is taken by then.
        if self._waiting and not self._woken:
            self._woken = True
            trio.lowlevel.reschedule(self._waiting.popleft())

    async def _park(self) -> None:
        task = trio.lowlevel.current_task()
        self._waiting.append(task)

        def abort(_: Any) -> trio.lowlevel.Abort:
            self._waiting.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        self._woken = False


class LowlevelAdapter:
    """`trio.lowlevel` with a `wait_readable` that knows the table of requests."""

    def __getattr__(self, name: str) -> Any:
        return getattr(trio.lowlevel, name)

    async def wait_readable(self, fd: int) -> None:
        """Wait until `fd` is readable, or a request of a dead process is left to be taken up."""
        if _left.value:
            return
        if _is_full.value:
            await trio.sleep(limits.REQUEST_FULL_WAIT_S)
        await self._wait_readable(fd)

    async def _wait_readable(self, fd: int) -> None:
        await trio.lowlevel.wait_readable(fd)


class PollingLowlevelAdapter(LowlevelAdapter):
    """Polls before it yields."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._registered_fds: set[int] = set()
        self._yield_at = 0.0
        self._is_busy = False
        """True if the last request came within SPIN_S. For a slower application, spinning would only burn a processor."""

    async def _wait_readable(self, fd: int) -> None:
        """Wait until `fd` is readable. Does not yield if it is readable now and the turn is not over."""
        if fd not in self._registered_fds:
            self._registered_fds.add(fd)
            self._poll.register(fd, select.POLLIN)
        now = time.monotonic()
        if now < self._yield_at:
            if self._linger(now):
                return
        else:
            self._yield_at = now + TURN_S
        await trio.lowlevel.wait_readable(fd)
        self._yield_at = time.monotonic() + TURN_S

    def _linger(self, now: float) -> bool:
        """Poll for a request; return True if one came."""
        spun = now + SPIN_S
        while self._is_busy and now < spun:
            if self._poll.poll(0):
                return True
            now = time.monotonic()
        came = bool(self._poll.poll(LINGER_MS))
        # A wake-up takes about as long as the spinning would have.
        self._is_busy = came and time.monotonic() < spun + SPIN_S
        return came


class TrioAdapter:
    """The part of the module `trio` that pyfuse3 uses."""

    def __init__(self, *, is_clustered: bool) -> None:
        self.lowlevel = LowlevelAdapter() if is_clustered else PollingLowlevelAdapter()
        self.Lock = trio.Lock if is_clustered else Lock

    def __getattr__(self, name: str) -> Any:
        return getattr(trio, name)


FOPEN_DIRECT_IO = 1 << 0
FOPEN_KEEP_CACHE = 1 << 1
FOPEN_NOFLUSH = 1 << 5
FOPEN_PASSTHROUGH = 1 << 7
WORKERS_IDLE = 8

WORKERS_MAX = 4096
"""Requests that may wait (for the PFS) at once. Further requests are served as these are answered."""

INTERRUPTED_COUNT = 1024
"""As in the shim."""

request_unique = ctypes.c_uint64.in_dll(_shim, "shim_unique")
"""The number of the request, until the first await of its handler. Bit 63: an earlier process died with it."""

request_pid = ctypes.c_uint32.in_dll(_shim, "shim_pid")
"""The thread that waits for its reply; 0 if it has no pid in our namespace."""

interrupted_requests = (ctypes.c_uint64 * INTERRUPTED_COUNT).in_dll(_shim, "shim_interrupted")
"""The numbers of the requests that signals interrupted last."""

request_kills_set_id = ctypes.c_uint32.in_dll(_shim, "shim_kill_privileges")
_open_flags = ctypes.c_uint32.in_dll(_shim, "shim_open_flags")
_left = ctypes.c_uint32.in_dll(_shim, "shim_left")
_is_full = ctypes.c_uint32.in_dll(_shim, "shim_is_full")
_I, _U, _Q, _R = ctypes.c_int, ctypes.c_uint64, ctypes.c_int64, ctypes.c_void_p
FALLOCATE = ctypes.PYFUNCTYPE(None, _R, _U, _I, _Q, _Q, _U)
COPY_FILE_RANGE = ctypes.PYFUNCTYPE(None, _R, _U, _Q, _U, _U, _Q, _U, _U, _I)
LSEEK = ctypes.PYFUNCTYPE(None, _R, _U, _Q, _I, _U)
RELEASE = ctypes.PYFUNCTYPE(None, _R, _U, _U)
LOOKUP = ctypes.PYFUNCTYPE(ctypes.c_int, _R, _U, ctypes.c_char_p, ctypes.c_uint32)
GETATTR = ctypes.PYFUNCTYPE(ctypes.c_int, _R, _U, ctypes.c_uint32)
CREATE = ctypes.PYFUNCTYPE(ctypes.c_int, _R, _U, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)


class _Callbacks(ctypes.Structure):
    _fields_ = [
        ("fallocate", FALLOCATE), ("copy_file_range", COPY_FILE_RANGE), ("lseek", LSEEK), ("release", RELEASE),
        ("lookup", LOOKUP), ("getattr", GETATTR), ("create", CREATE),
    ]  # fmt: skip


_reply_buf = _shim.fuse_reply_buf
_reply_buf.argtypes = [_R, ctypes.c_char_p, ctypes.c_size_t]

reply_err = _shim.fuse_reply_err
"""Reply to `req` with an errno; 0 means success."""
reply_err.argtypes = [_R, _I]

reply_write = _shim.fuse_reply_write
"""Reply to a copy_file_range with the number of bytes copied."""
reply_write.argtypes = [_R, ctypes.c_size_t]

reply_lseek = _shim.fuse_reply_lseek
"""Reply to an lseek with the offset found."""
reply_lseek.argtypes = [_R, _Q]
_shim.shim_set_writer.argtypes = [ctypes.c_uint32, _I]
_shim.shim_process_saved_init.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
_shim.shim_map_table.argtypes = [_I, _I, _Q, *[ctypes.c_uint32] * 4]
_callbacks = _Callbacks()
"""The shim calls them for as long as this object lives."""


class ShimNotLoaded(CkptfsError):
    """The C shim was not loaded before pyfuse3."""


def set_open_flags(flags: int) -> None:
    """Set FOPEN_* flags for the reply to this open, create or opendir. No await may follow in the handler."""
    _open_flags.value = flags


def set_writer(handle: int, fd: int) -> None:
    """Let the shim serve small writes of a handle by `fd`; -1 ends that. Writes to `fd` must not block."""
    _shim.shim_set_writer(handle, fd)


def set_callbacks(
    *,
    fallocate: Callable[[int, int, int, int, int, int], None],
    copy_file_range: Callable[[int, int, int, int, int, int, int, int, int], None],
    lseek: Callable[[int, int, int, int, int], None],
    release: Callable[[int, int, int], None],
    lookup: Callable[[int, int, bytes, int], bool],
    getattr: Callable[[int, int, int], bool],
    create: Callable[[int, int, bytes, int, int, int, int], bool],
) -> None:
    """Set what serves these requests before pyfuse3, or instead of it. Call it before `open_session`.

    They are plain functions, called where a handler would start, so `get_current_request` is valid in them. The first four serve each
    request with exactly one `reply*`, at once or later from a task; pyfuse3's own handler for RELEASE would occupy a task of pyfuse3 while
    it waits for a batch. The others are the fast path: they send exactly one reply at once and return True, or return False and leave the
    request to pyfuse3's handler.
    """
    _callbacks.fallocate = FALLOCATE(_guard_raw_callback(fallocate))
    _callbacks.copy_file_range = COPY_FILE_RANGE(_guard_raw_callback(copy_file_range))
    _callbacks.lseek = LSEEK(_guard_raw_callback(lseek))
    _callbacks.release = RELEASE(_guard_raw_callback(release))
    _callbacks.lookup = LOOKUP(_guard_fast_path_callback(lookup))
    _callbacks.getattr = GETATTR(_guard_fast_path_callback(getattr))
    _callbacks.create = CREATE(_guard_fast_path_callback(create))
    _shim.shim_set_callbacks(ctypes.byref(_callbacks))


def _guard_raw_callback(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a callback: an exception cannot cross C, so it is logged and answered with EIO."""

    def guarded(req: int, *arguments: int) -> None:
        try:
            function(req, *arguments)
        except Exception:
            log.exception("unexpected error in %s", function.__name__)
            reply_err(req, errno.EIO)

    return guarded


def _guard_fast_path_callback(function: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap a callback: an exception leaves the request to the handler, which meets the same error."""

    def guarded(*arguments: object) -> bool:
        try:
            return function(*arguments)
        except Exception:
            return False

    return guarded


def reply(req: int, body: bytes) -> None:
    """Reply with `body`, in the layout of <linux/fuse.h>."""
    _reply_buf(req, body, len(body))


def open_session(operations: pyfuse3.Operations, connection: Connection, *, is_clustered: bool) -> None:
    """Make libfuse and pyfuse3 serve the inherited connection, without a read yet. Raises ShimNotLoaded."""
    os.set_blocking(connection.fd, False)
    pyfuse3.trio = TrioAdapter(is_clustered=is_clustered)  # type: ignore[attr-defined]
    pyfuse3.init(operations, f"/dev/fd/{connection.fd}", set())
    if not _shim.shim_process_saved_init(connection.init_request, len(connection.init_request)):
        raise ShimNotLoaded(
            "the mount's C part was not loaded before libfuse", remedy="rebuild it: python -m ckptfs_daemon.fuse.shim_build"
        )
    _map_table(connection.fd, connection.table_fd)


def _map_table(fuse_fd: int, fd: int) -> None:
    slots = (limits.REQUEST_SMALL_SLOTS, limits.REQUEST_SMALL_BYTES, limits.REQUEST_LARGE_SLOTS, limits.REQUEST_LARGE_BYTES)
    code = _shim.shim_map_table(fuse_fd, fd, request_table.SMALL_OFFSET, *slots)
    if code:
        raise OSError(code, os.strerror(code), "the table of requests")
    if _left.value:
        log.info("%d requests of an earlier process are taken up", _left.value)


async def serve() -> None:
    """Serve requests until the filesystem is unmounted or pyfuse3 is told to end."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_trim_table, name="table of requests")
        await pyfuse3.main(min_tasks=WORKERS_IDLE, max_tasks=WORKERS_MAX)
        nursery.cancel_scope.cancel()


async def _trim_table() -> None:
    while True:
        await trio.sleep(limits.REQUEST_TRIM_INTERVAL_S)
        _shim.shim_trim_table(limits.REQUEST_LARGE_KEPT)
