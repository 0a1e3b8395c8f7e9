"""A small HTTP server: GET only, few connections, each with one request and a bounded time.

The standard library parses. It serves the metrics of the daemon and the page of `ckptfs web`. A few threads answer, so what they keep for a
thread (a connection to the catalog) is made a few times only. A failure is answered with 500 and logged, and ends nothing.

Crash safety: a socket file may be left; the next server replaces it.
"""

import contextlib
import errno
import logging
import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from ckptfs import limits
from ckptfs.model import UNIX_PREFIX

log = logging.getLogger(__name__)

SOCKET_MODE = 0o666
BACKLOG = 16
CHECK_S = 1.0
ACCEPT_PAUSE_S = 0.1
PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request. `path` and `query` are as they came; `host` is the header, empty without one."""

    path: str
    query: str
    host: str


@dataclass(frozen=True, slots=True)
class HttpReply:
    body: bytes
    content_type: str = PLAIN
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


Answer = Callable[[HttpRequest], HttpReply]


def refuse(status: HTTPStatus, **headers: str) -> HttpReply:
    return HttpReply(f"{status.phrase}\n".encode(), status=status, headers=headers)


class HttpServer:
    """Serves one address: HOST:PORT or unix:/PATH. `close` may be called by any thread."""

    def __init__(self, address: str, answer: Answer) -> None:
        """`answer` runs in several threads. Raises OSError, or ValueError if the host is no name."""
        self.answer = answer
        self._listening = _listen(address)
        self._wake, self._waker = socket.socketpair()
        self._threads = ThreadPoolExecutor(limits.HTTP_CONNECTIONS_MAX, thread_name_prefix="http")
        self._lock = threading.Lock()
        self._ends_s: dict[socket.socket, float] = {}

    @property
    def port(self) -> int:
        """The port of a TCP address."""
        return int(self._listening[0].getsockname()[1])

    def serve(self) -> None:
        """Serve until closed."""
        with contextlib.ExitStack() as stack:
            for one in (*self._listening, self._wake, self._waker):
                stack.enter_context(one)
            selector = stack.enter_context(selectors.DefaultSelector())
            stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
            stack.callback(self._end_connections, float("inf"))
            for one in (*self._listening, self._wake):
                one.setblocking(False)
                selector.register(one, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select(CHECK_S)]
                if self._wake in ready:
                    return
                for found in ready:
                    self._accept(found)
                self._end_connections(time.monotonic())

    def close(self) -> None:
        """End `serve` soon."""
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def _accept(self, listening: Any) -> None:
        """Take a connection. One beyond the bound is closed at once."""
        try:
            connection, _ = listening.accept()
        except BlockingIOError:
            return
        except OSError as failure:
            log.debug("http: no connection can be taken: %s", failure)
            time.sleep(ACCEPT_PAUSE_S)
            return
        with self._lock:
            is_one_more = len(self._ends_s) < limits.HTTP_CONNECTIONS_MAX
            if is_one_more:
                self._ends_s[connection] = time.monotonic() + limits.HTTP_ANSWER_S
        if is_one_more:
            self._threads.submit(self._handle_connection, connection)
        else:
            connection.close()

    def _handle_connection(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(limits.HTTP_REQUEST_S)
            _Handler(connection, None, self)  # type: ignore[arg-type]
        except OSError as failure:
            log.debug("http: a connection broke: %s", failure)
        finally:
            with self._lock:
                del self._ends_s[connection]
            connection.close()

    def _end_connections(self, now_s: float) -> None:
        """End connections that take too long. Their threads find them broken."""
        with self._lock:
            for connection, end_s in self._ends_s.items():
                if now_s > end_s:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One connection with one request."""

    server: HttpServer  # type: ignore[assignment]

    def parse_request(self) -> bool:
        """Parse the request. Return False if it was refused."""
        if not super().parse_request():
            return False
        if self.command != "GET":
            self._send(refuse(HTTPStatus.METHOD_NOT_ALLOWED, Allow="GET"))
        elif self.request_version == "HTTP/0.9":
            self.send_error(HTTPStatus.BAD_REQUEST)
        else:
            return True
        return False

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        try:
            reply = self.server.answer(HttpRequest(path, query, self.headers.get("Host", "")))
        except Exception:
            log.exception("http: %s cannot be answered; the caller gets an error", path)
            reply = refuse(HTTPStatus.INTERNAL_SERVER_ERROR)
        self._send(reply)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request, without its words in the reply."""
        self._send(refuse(HTTPStatus(code)))

    def _send(self, reply: HttpReply) -> None:
        self.close_connection = True
        self.request_version = "HTTP/1.1"
        self.send_response_only(reply.status)
        headers = {"Content-Type": reply.content_type, "Content-Length": str(len(reply.body)), "Connection": "close"}
        for name, value in {**headers, **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply.body)

    def log_message(self, format: str, *arguments: object) -> None:
        log.debug("http: " + format, *arguments)


def _listen(address: str) -> list[socket.socket]:
    """Open the sockets of an address: all that its host means. Raises OSError, ValueError."""
    if address.startswith(UNIX_PREFIX):
        return [_bind_unix(address.removeprefix(UNIX_PREFIX))]
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    places = dict.fromkeys((one[0], one[4]) for one in found)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_server(where, family=family, backlog=BACKLOG)) for family, where in places]
        stack.pop_all()  # They stay open.
    return opened


def _bind_unix(path: str) -> socket.socket:
    """Return a listening socket. Replace a socket file that no process serves."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "there is another file of this name")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(limits.HTTP_REQUEST_S)
            if probe.connect_ex(path) != errno.ECONNREFUSED:
                raise OSError(errno.EADDRINUSE, "another process serves this socket")
        os.unlink(path)
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(path)
        os.chmod(path, SOCKET_MODE)
        listening.listen(BACKLOG)
        stack.pop_all()  # It stays open.
    return listening
