"""A headless Chromium, driven by its own protocol over two pipes: no driver and no library."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ANSWER_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """The program. Ubuntu's chromium is a snap, which cannot be used like this."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return None if found is None or "/snap/" in os.path.realpath(found) or _is_snap_wrapper(found) else found


def _is_snap_wrapper(path: str) -> bool:
    with open(path, "rb") as file:
        return b"/snap/bin" in file.read(4096)


class Browser:
    """One tab. `complaints` are the errors that pages have logged, refusals of their policy included."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session: dict[str, Any] = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    _session: dict[str, Any] = {}

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method; its result."""
        self._number += 1
        os.write(self._out, json.dumps({"id": self._number, "method": method, "params": parameters, **self._session}).encode() + b"\0")
        end_s = time.monotonic() + ANSWER_S
        while True:
            message = self._receive(end_s)
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _receive(self, end_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            poll = select.poll()
            poll.register(self._in, select.POLLIN)
            assert poll.poll(max(0.0, end_s - time.monotonic()) * 1000), "the browser does not answer"
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser has ended"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown" or (method == "Log.entryAdded" and parameters["entry"]["level"] == "error"):
            self.complaints.append(json.dumps(parameters))

    def show(self, url: str, *, scheme: str = "light", width: int = 1200, height: int = 900) -> None:
        """Open a page, and wait until it has drawn its figures."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700)
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        self.call("Page.navigate", url=url)
        self.wait_for("document.body && document.body.dataset.ready === 'yes'")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true. The browser itself looks at it."""
        poll = f"new Promise(done => {{ const look = () => ({condition}) ? done(true) : setTimeout(look, 20); look(); }})"
        end_s = time.monotonic() + ANSWER_S
        while True:
            found = self.call("Runtime.evaluate", expression=poll, awaitPromise=True, timeout=ANSWER_S * 1000)
            if found["result"].get("value") is True:
                return
            assert time.monotonic() < end_s, f"never true: {condition}"

    def evaluate(self, expression: str) -> Any:
        """The value of an expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def text(self, selector: str = "main") -> str:
        """The visible text of an element."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def photograph(self, path: Path) -> None:
        """Write a picture of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browsing(directory: Path) -> Iterator[Browser]:
    """A browser with a profile of its own. Skips the test without one."""
    program = find_browser()
    if program is None:
        pytest.skip("NO BROWSER HERE, the page is not looked at: install the Debian package chromium")
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe", "--no-first-run"]
    log = (directory / "browser.log").open("wb")
    process = subprocess.Popen(
        # The browser reads from descriptor 3 and writes to 4.
        ["bash", "-c", f'exec "$@" 3<&{their_in} 4>&{their_out}', "-", program, *options, f"--user-data-dir={directory / 'profile'}"],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(their_in, their_out), env={**os.environ, "HOME": str(directory)},
    )  # fmt: skip
    for one in (their_in, their_out):
        os.close(one)
    try:
        browser = Browser(our_out, our_in)
        yield browser
        browser._session = {}
        browser.call("Browser.close")
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        for one in (our_out, our_in):
            os.close(one)
        log.close()
