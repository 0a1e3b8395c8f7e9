"""The HTTP endpoint for Prometheus: GET /metrics on a TCP address or a unix socket (`metrics=`).

It never disturbs the mover. It serves few connections, each for a bounded time, and one request each. One thread makes the text, which is
used again while it is fresh. A failure is logged or answered with 503, and ends nothing.

Crash safety: a socket file may be left; the next mover replaces it.
"""

import contextlib
import errno
import functools
import logging
import os
import socket
import stat
from collections.abc import Callable
from http import HTTPStatus

import trio

from ckptfs import limits
from ckptfs.config import METRICS_UNIX_PREFIX
from ckptfs.errors import CkptfsError
from ckptfs.protocol import control_pb2 as pb
from ckptfs_daemon.control.metrics import CONTENT_TYPE, encode_metrics
from ckptfs_daemon.control.status import CachedFigure

log = logging.getLogger(__name__)

SOCKET_MODE = 0o666
BACKLOG = 16
PIECE_BYTES = 4096


class RefusedRequest(Exception):
    """A request that is answered with `status`."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class MetricsEndpoint:
    """Serves one address. All methods belong to the trio thread."""

    def __init__(self, address: str, build_status: Callable[[], pb.Status]) -> None:
        """`address`: HOST:PORT or unix:/PATH. `build_status` is called in a worker thread."""
        self._address = address
        self._text = CachedFigure(lambda: encode_metrics(build_status()), limits.METRICS_FRESH_S)
        self._threads = trio.CapacityLimiter(1)
        self._connections = 0

    async def serve(self) -> None:
        """Serve until cancelled. An address that cannot be had is tried again."""
        reported = ""
        while True:
            try:
                listeners = await _listen(self._address)
            except (OSError, ValueError) as failure:
                if str(failure) != reported:
                    reported = str(failure)
                    log.warning("metrics at %s: cannot be served: %s; Prometheus gets no answer; trying again", self._address, reported)
                await trio.sleep(limits.RETRY_LAST_S)
                continue
            log.info("metrics at %s: served", self._address)
            await trio.serve_listeners(self._handle_connection, listeners)

    async def _handle_connection(self, stream: trio.SocketStream) -> None:
        """Answer one request in bounded time. Connections beyond the bound are closed at once."""
        if self._connections >= limits.METRICS_CONNECTIONS_MAX:
            return
        self._connections += 1
        try:
            with trio.move_on_after(limits.METRICS_ANSWER_S):
                await stream.send_all(await self._build_reply(stream))
                await stream.send_eof()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as failure:
            log.debug("metrics: a connection broke: %s", failure)
        finally:
            self._connections -= 1

    async def _build_reply(self, stream: trio.SocketStream) -> bytes:
        """Read the request, and return the whole reply."""
        try:
            with trio.fail_after(limits.METRICS_REQUEST_S):
                check_request(await _read_head(stream))
            body = await trio.to_thread.run_sync(self._text.get, abandon_on_cancel=True, limiter=self._threads)
            return encode_reply(HTTPStatus.OK, body, CONTENT_TYPE)
        except trio.TooSlowError:
            status = HTTPStatus.REQUEST_TIMEOUT
        except RefusedRequest as refusal:
            status = refusal.status
        except (CkptfsError, OSError) as failure:
            log.debug("metrics: no figures: %s", failure)
            status = HTTPStatus.SERVICE_UNAVAILABLE
        except trio.BrokenResourceError:
            raise
        except Exception:
            log.exception("metrics: the figures cannot be built; Prometheus gets no answer")
            status = HTTPStatus.INTERNAL_SERVER_ERROR
        return encode_reply(status, f"{status.phrase}\n".encode())


async def _read_head(stream: trio.SocketStream) -> bytes:
    """Return a request up to the end of its headers, or as much as came."""
    head = b""
    while b"\r\n\r\n" not in head:
        if len(head) > limits.METRICS_REQUEST_BYTES_MAX:
            raise RefusedRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        piece = await stream.receive_some(PIECE_BYTES)
        if not piece:
            break
        head += piece
    return head


def check_request(head: bytes) -> None:
    """Raise RefusedRequest unless a request asks for the metrics."""
    line, end, _ = head.partition(b"\r\n")
    words = line.split(b" ")
    if not end or len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        raise RefusedRequest(HTTPStatus.BAD_REQUEST)
    if words[0] != b"GET":
        raise RefusedRequest(HTTPStatus.METHOD_NOT_ALLOWED)
    if words[1].partition(b"?")[0] != b"/metrics":
        raise RefusedRequest(HTTPStatus.NOT_FOUND)


def encode_reply(status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8") -> bytes:
    """Return a reply with its headers. The connection ends with it."""
    headers = {"Content-Type": content_type, "Content-Length": len(body), "Connection": "close"}
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = "GET"
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _listen(address: str) -> list[trio.SocketListener]:
    """Open the sockets of an address. Raises OSError, or ValueError for a host that cannot be a name."""
    if address.startswith(METRICS_UNIX_PREFIX):
        bind = functools.partial(_bind_unix, address.removeprefix(METRICS_UNIX_PREFIX))
        return [trio.SocketListener(trio.socket.from_stdlib_socket(await trio.to_thread.run_sync(bind, abandon_on_cancel=True)))]
    host, _, port = address.rpartition(":")
    return await trio.open_tcp_listeners(int(port), host=host.strip("[]"), backlog=BACKLOG)


def _bind_unix(path: str) -> socket.socket:
    """Return a listening socket. Replace a socket file that no process serves."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "there is another file of this name")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(limits.METRICS_REQUEST_S)
            if probe.connect_ex(path) != errno.ECONNREFUSED:
                raise OSError(errno.EADDRINUSE, "another process serves this socket")
        os.unlink(path)
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(path)
        os.chmod(path, SOCKET_MODE)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening
