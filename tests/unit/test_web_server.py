"""The server of `ckptfs web`: read-only, to its own pages only, and on loopback unless told otherwise. F5, F6, P11."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest
from ckptfs_client.dashboard import sampling, web_server
from ckptfs_client.dashboard.sampling import OverviewSampler
from ckptfs_client.dashboard.web_server import OverviewSite, check_listen
from ckptfs_client.errors import UsageError
from daemon_under_test import environment
from etcd_server import free_ports
from made_overviews import HOSTILE, make_five_nodes, make_mount

from ckptfs.http_server import HttpServer


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The page of a node of five is served at this port."""
    monkeypatch.setattr(sampling, "ask_all", lambda mounts, *_: [(one, make_five_nodes()) for one in mounts])
    address = f"127.0.0.1:{free_ports(1)[0]}"
    site = OverviewSite(OverviewSampler(lambda: [make_mount()]), address)
    site.sample()
    server = HttpServer(address, site.answer)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server.port
    server.close()
    thread.join()


def ask(port: int, path: str, host: str | None = None, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    reply = connection.getresponse()
    found = reply.status, dict(reply.getheaders()), reply.read()
    connection.close()
    return found


def test_page_and_figures(port: int) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/page.js", "text/javascript"),
        ("/page.css", "text/css"),
        ("/figures.json", "application/json"),
    ):
        code, headers, body = ask(port, path)
        assert code == 200 and headers["Content-Type"].startswith(kind) and body
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
        assert not [name for name in headers if name.lower().startswith("access-control")]
    found = json.loads(ask(port, "/figures.json")[2])["mounts"][0]
    assert found["state"] == "copied" and found["series"][2]["name"] == f"{HOSTILE}/epoch_*"
    assert b"//" not in ask(port, "/")[2], "nothing is loaded from elsewhere"


@pytest.mark.parametrize(
    ("path", "code"),
    [("/x", 404), ("/../web_server.py", 404), ("/page/page.js", 404), ("/sets.json", 404), ("/sets.json?mount=/ckpt&series=x", 404),
     ("/sets.json?mount=/etc&series=1", 404), ("/sets.json?mount=/ckpt&series=12345", 404)],
)  # fmt: skip
def test_only_what_the_page_needs_is_there(port: int, path: str, code: int) -> None:
    assert ask(port, path)[0] == code


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_nothing_can_be_changed(port: int, method: str) -> None:
    code, headers, _ = ask(port, "/figures.json", method=method)
    assert code == 405 and headers["Allow"] == "GET"


@pytest.mark.parametrize(
    ("host", "code"),
    [("127.0.0.1:{}", 200), ("localhost:{}", 200), ("LOCALHOST", 200), ("[::1]:{}", 200), ("10.0.0.7", 200), ("attacker.example:{}", 421),
     ("localhost.attacker.example", 421), ("127.0.0.1.attacker.example", 421), ("", 421), ("[", 421), ("x@localhost:y", 200)],
)  # fmt: skip
def test_a_name_that_leads_here_reads_nothing(port: int, host: str, code: int) -> None:
    """DNS rebinding: the page of another site may reach this server by a name of that site. Its own name is in the Host header."""
    found, _, body = ask(port, "/figures.json", host.format(port))
    assert found == code and (b"step_300" in body) == (code == 200)


@pytest.mark.parametrize("address", ["127.0.0.1:9465", "localhost:9465", "[::1]:9465"])
def test_loopback_is_served(address: str) -> None:
    assert check_listen(address, is_exposed=False) == address


@pytest.mark.parametrize("address", ["0.0.0.0:9465", "[::]:9465", "node7:9465", "10.0.0.7:9465"])
def test_other_addresses_need_a_word(address: str) -> None:
    """P11."""
    with pytest.raises(UsageError, match=r"other machines.*--beyond-loopback"):
        check_listen(address, is_exposed=False)
    assert check_listen(address, is_exposed=True) == address


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(UsageError, match="is not an address; accepted: HOST:PORT"):
        check_listen("here", is_exposed=True)


def test_the_command_serves_until_it_is_interrupted() -> None:
    """The figures go on while it serves; a taken address is refused with a remedy."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "ckptfs_client", "web", "--listen", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"http://127.0.0.1:{port}/ shows the mounts of this machine; Ctrl-C ends it\n"
            assert ask(port, "/")[0] == 200 and json.loads(ask(port, "/figures.json")[2])["host"]
            second = subprocess.run(command, check=False, capture_output=True, text=True, env=environment(), timeout=60)
            assert second.returncode == 1 and "Address already in use; --listen HOST:PORT chooses another address" in second.stderr
        finally:
            os.kill(process.pid, signal.SIGINT)
    assert process.returncode == 130


def test_the_files_of_the_page_are_in_the_package() -> None:
    assert {one.name for one in web_server.PAGE.iterdir()} == {name for name, _ in web_server.FILES.values()}
