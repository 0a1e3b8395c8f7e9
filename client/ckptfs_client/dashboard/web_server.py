"""The page of `ckptfs web`: read-only, for browsers.

It shows what a daemon tells every user of the machine, so any user may read it through loopback. A sampler thread keeps the figures; a
browser gets the last ones, so many browsers cost the daemons no more than one.

Invariants:
- Names come as JSON, and the page inserts them as text. The policy of the page forbids scripts and styles from elsewhere and in line.
- A request must name this server as its host. Otherwise the page of another site could read the figures through a name that leads here.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from ckptfs.config import schema
from ckptfs.http_server import HttpReply, HttpRequest, HttpServer, refuse
from ckptfs_client import mounts
from ckptfs_client.dashboard.sampling import OverviewSampler
from ckptfs_client.errors import ClientError, CommandFailed, UsageError
from ckptfs_client.options import parse_option

SAMPLE_EVERY_S = 2.0
PAGE = Path(__file__).with_name("page")
FILES = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript")}
JSON = "application/json"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}  # fmt: skip


class OverviewSite:
    """The answers of the server: the page, `/figures.json`, and `/sets.json?mount=...&series=...`."""

    def __init__(self, sampler: OverviewSampler, listening: str) -> None:
        """`listening`: HOST:PORT as it was given."""
        self._sampler = sampler
        self._hosts = {"localhost", schema.parse_host(listening).lower(), socket.gethostname().lower()}
        self._files = {path: (PAGE.joinpath(name).read_bytes(), kind) for path, (name, kind) in FILES.items()}
        self._figures = b""

    def sample(self) -> None:
        """Take the figures that are served from now on."""
        self._figures = json.dumps(self._sampler.sample()).encode()

    def answer(self, request: HttpRequest) -> HttpReply:
        if not self._is_own_host(request.host):
            return refuse(HTTPStatus.MISDIRECTED_REQUEST, **HEADERS)
        if request.path in self._files:
            body, kind = self._files[request.path]
            return HttpReply(body, f"{kind}; charset=utf-8", headers=HEADERS)
        if request.path == "/figures.json":
            return HttpReply(self._figures, JSON, headers=HEADERS)
        if request.path == "/sets.json":
            return self._answer_sets(request.query)
        return refuse(HTTPStatus.NOT_FOUND, **HEADERS)

    def _is_own_host(self, header: str) -> bool:
        """Return True if the Host header names this server. An IP address cannot be made to lead elsewhere."""
        try:
            host = (urlsplit(f"//{header}").hostname or "").lower()
        except ValueError:
            return False
        return host in self._hosts or schema.is_ip(host)

    def _answer_sets(self, query: str) -> HttpReply:
        """Answer the newest sets of a series that the figures name."""
        asked = parse_qs(query)
        try:
            sets = self._sampler.list_sets(asked["mount"][0], int(asked["series"][0]))
        except (KeyError, ValueError):
            return refuse(HTTPStatus.NOT_FOUND, **HEADERS)
        except ClientError:
            return refuse(HTTPStatus.SERVICE_UNAVAILABLE, **HEADERS)
        return HttpReply(json.dumps(sets).encode(), JSON, headers=HEADERS)


def check_listen(text: str, *, is_exposed: bool) -> str:
    """Return the address HOST:PORT to serve. Raises UsageError."""
    address = parse_option(schema.parse_address, text)
    if not is_exposed and not schema.is_loopback(address):
        raise UsageError(
            f"{address} can be reached from other machines, and whoever reaches it can read the names of series and files",
            remedy="--beyond-loopback allows it; or forward the port: ssh -L 9465:127.0.0.1:9465 NODE",
        )
    return address


def serve(address: str, announce: Callable[[str], None]) -> None:
    """Serve the page until interrupted. `announce` gets its URL. Raises CommandFailed."""
    site = OverviewSite(OverviewSampler(mounts.list_mounts), address)
    site.sample()
    try:
        server = HttpServer(address, site.answer)
    except (OSError, ValueError) as failure:
        code = failure.errno if isinstance(failure, OSError) else None
        what = os.strerror(code) if code is not None and code > 0 else str(failure)
        raise CommandFailed(f"{address} cannot be served: {what}", remedy="--listen HOST:PORT chooses another address") from failure
    thread = threading.Thread(target=server.serve, name="web", daemon=True)
    thread.start()
    announce(f"http://{address}/")
    try:
        while thread.is_alive():
            begun_s = time.monotonic()
            site.sample()
            thread.join(max(0.1, SAMPLE_EVERY_S - (time.monotonic() - begun_s)))
    finally:
        server.close()
        thread.join()
