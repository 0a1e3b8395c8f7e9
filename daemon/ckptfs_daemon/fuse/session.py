"""The door through which the mount process serves the kernel: pyfuse3 and libfuse, led to what neither of them offers.

Loads the C file before pyfuse3, so nothing may import pyfuse3 before this module. `open_session` gives libfuse the connection that the
supervisor opened, feeds it the INIT request that the supervisor has long answered (libfuse's own answer then names a request that the
kernel no longer knows, and is dropped), and asks the kernel to send again what an earlier mount process took and did not answer.
If we die here: the supervisor keeps the connection, and the next process comes in by the same door.

What pyfuse3's loop sees instead of trio: the same, but a worker that finds the next request at once takes it without yielding.

pyfuse3 takes a lock, waits for its descriptor and yields to trio's scheduler for each request; that costs more than most of our
handlers. pyfuse3 has a place for another `trio` module (its asyncio support uses it), and this goes there. Every `TURN_S` the worker
yields whatever comes, so that other tasks are never starved.
If we die here: nothing is kept.
"""

import contextlib
import ctypes
import errno
import logging
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import trio

from ckptfs.errors import CkptfsError
from ckptfs_daemon.fuse import shim_build
from ckptfs_daemon.ipc import ChildSetup

TURN_S = 0.004

LINGER_MS = 1
"""How long the thread stays with the descriptor before it goes back to trio's scheduler: an application that does one thing after the
other sends its next request within some 20 us, and all else that runs here can wait a millisecond."""

SPIN_S = 60e-6
"""How long it looks again and again before it sleeps, while requests come that close: where an idle processor is halted, as in most virtual
machines, waking from a sleep takes as long as a whole request (2,570 creates/s against 1,850)."""


class Lock:
    """A lock that its last holder may take again at once; whoever waits gets its chance when that one yields."""

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
        # One is enough: it runs when this task yields, and parks again if the lock is taken by then.
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
    """`trio.lowlevel` with an eager `wait_readable`."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._registered_fds: set[int] = set()
        self._yield_at = 0.0
        self._is_busy = False
        """Whether the last request came within SPIN_S: a slower application must not cost a processor."""

    def __getattr__(self, name: str) -> Any:
        return getattr(trio.lowlevel, name)

    async def wait_readable(self, fd: int) -> None:
        """Return when `fd` can be read, without yielding when that is now and this turn is not over."""
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
        """Whether a request came while we waited for it here."""
        spun = now + SPIN_S
        while self._is_busy and now < spun:
            if self._poll.poll(0):
                return True
            now = time.monotonic()
        came = bool(self._poll.poll(LINGER_MS))
        # A wake-up takes about as long as we would have looked.
        self._is_busy = came and time.monotonic() < spun + SPIN_S
        return came


class TrioAdapter:
    """The module `trio`, as far as pyfuse3 uses it."""

    Lock = Lock

    def __init__(self) -> None:
        self.lowlevel = LowlevelAdapter()

    def __getattr__(self, name: str) -> Any:
        return getattr(trio, name)


if "pyfuse3" in sys.modules:
    raise ImportError("pyfuse3 was imported before ckptfs_daemon.fuse.session, which must come first")

# PyDLL: the functions call back into pyfuse3's handlers, which expect to hold the GIL.
_shim = ctypes.PyDLL(str(shim_build.ensure()), mode=ctypes.RTLD_GLOBAL)

import pyfuse3  # noqa: E402  (the shim must be in the process first)

log = logging.getLogger(__name__)
FOPEN_DIRECT_IO = 1 << 0
FOPEN_KEEP_CACHE = 1 << 1
FOPEN_NOFLUSH = 1 << 5
FOPEN_PASSTHROUGH = 1 << 7
NOTIFY_RESEND = 7
WORKERS_IDLE = 8

WORKERS_MAX = 256
"""How many requests may wait for something (the PFS) at once; one more is served all the same when one of them is answered."""
_unique = ctypes.c_uint64.in_dll(_shim, "shim_unique")
_kill_privileges = ctypes.c_uint32.in_dll(_shim, "shim_kill_privileges")
_open_flags = ctypes.c_uint32.in_dll(_shim, "shim_open_flags")
_sessions = ctypes.c_uint32.in_dll(_shim, "shim_sessions")
_I, _U, _Q, _R = ctypes.c_int, ctypes.c_uint64, ctypes.c_int64, ctypes.c_void_p
FALLOCATE = ctypes.PYFUNCTYPE(None, _R, _U, _I, _Q, _Q, _U)
COPY_FILE_RANGE = ctypes.PYFUNCTYPE(None, _R, _U, _Q, _U, _U, _Q, _U, _U, _I)
LSEEK = ctypes.PYFUNCTYPE(None, _R, _U, _Q, _I, _U)
RELEASE = ctypes.PYFUNCTYPE(None, _R, _U, _U)
LOOKUP = ctypes.PYFUNCTYPE(ctypes.c_int, _R, _U, ctypes.c_char_p, ctypes.c_uint32)
GETATTR = ctypes.PYFUNCTYPE(ctypes.c_int, _R, _U, ctypes.c_uint32)
CREATE = ctypes.PYFUNCTYPE(ctypes.c_int, _R, _U, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)


class _RawCallbacks(ctypes.Structure):
    _fields_ = [("fallocate", FALLOCATE), ("copy_file_range", COPY_FILE_RANGE), ("lseek", LSEEK), ("release", RELEASE)]


class _FastPathCallbacks(ctypes.Structure):
    _fields_ = [("lookup", LOOKUP), ("getattr", GETATTR), ("create", CREATE)]


_reply_buf = _shim.fuse_reply_buf
_reply_buf.argtypes = [_R, ctypes.c_char_p, ctypes.c_size_t]
_reply_err = _shim.fuse_reply_err
_reply_err.argtypes = [_R, _I]
_reply_write = _shim.fuse_reply_write
_reply_write.argtypes = [_R, ctypes.c_size_t]
_reply_lseek = _shim.fuse_reply_lseek
_reply_lseek.argtypes = [_R, _Q]
_shim.shim_feed.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
_raw_callbacks = _RawCallbacks()
_fast_path_callbacks = _FastPathCallbacks()


class ShimNotLoaded(CkptfsError):
    """The C file did not come before pyfuse3."""


def get_request_header() -> tuple[int, bool]:
    """(unique with bit 63 for "sent again", whether set-id bits are to be dropped) of the request that is being processed.

    Meaningful only until the handler's first await.
    """
    return _unique.value, bool(_kill_privileges.value)


def set_open_flags(flags: int) -> None:
    """FOPEN_* flags for the reply to this open, create or opendir: the handler's last act before it returns, without an await after it."""
    _open_flags.value = flags


def set_raw_callbacks(
    *,
    fallocate: Callable[[int, int, int, int, int, int], None],
    copy_file_range: Callable[[int, int, int, int, int, int, int, int, int], None],
    lseek: Callable[[int, int, int, int, int], None],
    release: Callable[[int, int, int], None],
) -> None:
    """Set who serves FALLOCATE, COPY_FILE_RANGE, LSEEK and RELEASE; before `open_session`.

    They are plain functions, called where a handler would begin (`current()` is right in them), and answer, at once or later from a
    task, with exactly one `reply_*`:
    fallocate(req, inode, mode, offset, length, fh);
    copy_file_range(req, inode_in, offset_in, fh_in, inode_out, offset_out, fh_out, length, flags); lseek(req, inode, offset, whence, fh);
    release(req, inode, fh): pyfuse3 has a handler for it, but one that waits for company would hold a task of pyfuse3's.
    """
    _raw_callbacks.fallocate = FALLOCATE(_guard_raw_callback(fallocate))
    _raw_callbacks.copy_file_range = COPY_FILE_RANGE(_guard_raw_callback(copy_file_range))
    _raw_callbacks.lseek = LSEEK(_guard_raw_callback(lseek))
    _raw_callbacks.release = RELEASE(_guard_raw_callback(release))
    _shim.shim_set_extra(ctypes.byref(_raw_callbacks))


def _guard_raw_callback(function: Callable[..., None]) -> Callable[..., None]:
    """An exception from `function` cannot cross C: it is logged and answered with EIO."""

    def guarded(req: int, *arguments: int) -> None:
        try:
            function(req, *arguments)
        except Exception:
            log.exception("unexpected error in %s", getattr(function, "__name__", function))
            reply_err(req, errno.EIO)

    return guarded


def set_fast_path_callbacks(
    *,
    lookup: Callable[[int, int, bytes, int], bool],
    getattr: Callable[[int, int, int], bool],
    create: Callable[[int, int, bytes, int, int, int], bool],
) -> None:
    """Set who is asked first to serve LOOKUP, GETATTR and CREATE; before `open_session`. Not called, pyfuse3's handlers serve them all.

    They are called like those of `on_extra`, and answer at once, with exactly one `reply`, or say False and let pyfuse3's handler begin:
    lookup(req, parent, name, pid); getattr(req, inode, pid); create(req, parent, name, mode, uid, gid).
    """
    _fast_path_callbacks.lookup = LOOKUP(_guard_fast_path_callback(lookup))
    _fast_path_callbacks.getattr = GETATTR(_guard_fast_path_callback(getattr))
    _fast_path_callbacks.create = CREATE(_guard_fast_path_callback(create))
    _shim.shim_set_quick(ctypes.byref(_fast_path_callbacks))


def _guard_fast_path_callback(function: Callable[..., bool]) -> Callable[..., bool]:
    """An exception from `function` cannot cross C either: the handler will meet it again, and knows what to do with it."""

    def answering(*arguments: object) -> bool:
        try:
            return function(*arguments)
        except Exception:
            return False

    return answering


def reply(req: int, body: bytes) -> None:
    """Answer with `body`, laid out as <linux/fuse.h> has it."""
    _reply_buf(req, body, len(body))


def reply_err(req: int, code: int) -> None:
    """Answer with errno `code`; 0 for success."""
    _reply_err(req, code)


def reply_write(req: int, count: int) -> None:
    """Answer a copy_file_range: how many bytes were copied."""
    _reply_write(req, count)


def reply_lseek(req: int, offset: int) -> None:
    """Answer an lseek: the offset found."""
    _reply_lseek(req, offset)


def open_session(operations: pyfuse3.Operations, setup: ChildSetup) -> None:
    """Make libfuse and pyfuse3 serve the inherited connection. Nothing is read from the kernel yet. Raises DoorBlocked."""
    os.set_blocking(setup.fuse_fd, False)
    if setup.config.cluster is None:
        # In a cluster handlers wait for the store, and what ends their waiting is another task.
        pyfuse3.trio = TrioAdapter()  # type: ignore[attr-defined]
    pyfuse3.init(operations, f"/dev/fd/{setup.fuse_fd}", set())
    if _sessions.value == 0:
        raise ShimNotLoaded("the mount's C part does not stand before libfuse", remedy="rebuild it: python -m ckptfs_daemon.shim_build")
    _shim.shim_feed(setup.init_request, len(setup.init_request))
    if setup.is_resumed and setup.can_resend:
        request_resend(setup.fuse_fd)


def request_resend(fuse_fd: int) -> None:
    """Make the kernel send again every request that was taken and not answered. A connection that has ended says so at the next read."""
    with contextlib.suppress(OSError):
        os.write(fuse_fd, struct.pack("=IiQ", 16, NOTIFY_RESEND, 0))


async def serve() -> None:
    """Answer requests until the filesystem is unmounted, or until `stop`."""
    await pyfuse3.main(min_tasks=WORKERS_IDLE, max_tasks=WORKERS_MAX)


def stop() -> None:
    """End `serve`; from the thread that runs it."""
    pyfuse3.terminate()


def close_session() -> None:
    """Free the session; the kernel's connection lives on as long as anybody holds its descriptor."""
    pyfuse3.close(unmount=False)
