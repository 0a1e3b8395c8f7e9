"""`ckptfs status --watch` on a terminal and elsewhere: F2, F5."""

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ckptfs_client.dashboard import sampling, status_screen
from ckptfs_client.dashboard.overview import BacklogHistory, build_mount
from ckptfs_client.dashboard.status_screen import build_screen, draw_bars
from daemon_under_test import environment, eventually
from made_overviews import HOSTILE, make_five_nodes, make_mount
from rich.console import Console

SUPPORT = Path(__file__).resolve().parents[1] / "support"
PROGRAM = """
import sys
sys.path.insert(0, {support!r})
from made_overviews import make_five_nodes, make_mount
from ckptfs_client import __main__, mounts
from ckptfs_client.dashboard import sampling, status_screen
mounts.list_mounts = lambda: [make_mount()]
sampling.ask_all = lambda chosen, *_: [(one, make_five_nodes()) for one in chosen]
status_screen.WATCH_EVERY_S = {every_s}
sys.argv = ["ckptfs", "status", "--watch"]
__main__.main()
"""
SCREEN_ON, SCREEN_OFF, CURSOR_OFF, CURSOR_ON = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25l", b"\x1b[?25h"


def _build_environment() -> dict[str, str]:
    """The environment of a terminal. A parallel run of pytest sets LINES and COLUMNS, which would hide the size of the terminal."""
    without_size = {name: value for name, value in environment().items() if name not in ("LINES", "COLUMNS")}
    return {**without_size, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}


class Screen:
    """A terminal with the view on it. `shown` is all that came."""

    def __init__(self, every_s: float) -> None:
        self.own, self.their = pty.openpty()
        self.resize(120, 50)
        self.before = termios.tcgetattr(self.their)
        program = PROGRAM.format(support=str(SUPPORT), every_s=every_s)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=self.their, stdout=self.their, stderr=subprocess.PIPE,
            env=_build_environment(),
        )  # fmt: skip
        os.set_blocking(self.own, False)
        self.shown = b""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.their, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self) -> bytes:
        with contextlib.suppress(OSError):
            while piece := os.read(self.own, 1 << 16):
                self.shown += piece
        return self.shown

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.own)
        os.close(self.their)


@pytest.fixture
def screens() -> Iterator[Callable[[float], Screen]]:
    opened: list[Screen] = []

    def open_screen(every_s: float) -> Screen:
        opened.append(Screen(every_s))
        return opened[-1]

    yield open_screen
    for one in opened:
        one.close()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda screen: os.write(screen.own, b"q"), 0),
        (lambda screen: screen.process.send_signal(signal.SIGINT), 130),
        (lambda screen: screen.process.send_signal(signal.SIGTERM), 143),
        (lambda screen: screen.process.send_signal(signal.SIGHUP), 129),
    ],
    ids=["q", "ctrl-c", "sigterm", "sighup"],
)
def test_the_terminal_is_as_before(screens: Callable[[float], Screen], end: Callable[[Screen], object], code: int) -> None:
    screen = screens(0.1)
    eventually(lambda: screen.read().count(b"Safe if a node fails") >= 2, what="it is drawn again and again")
    assert SCREEN_ON in screen.shown and CURSOR_OFF in screen.shown and b"q ends" in screen.shown
    assert termios.tcgetattr(screen.their) != screen.before, "keys are read without Enter"
    end(screen)
    assert screen.process.wait(30) == code
    shown = screen.read()
    assert shown.rindex(SCREEN_OFF) > shown.rindex(SCREEN_ON) and shown.rindex(CURSOR_ON) > shown.rindex(CURSOR_OFF)
    assert termios.tcgetattr(screen.their) == screen.before


def test_it_follows_the_size_of_the_terminal(screens: Callable[[float], Screen]) -> None:
    """At once, not with the next figures."""
    screen = screens(3600.0)
    eventually(lambda: b"q ends" in screen.read(), what="it is drawn")
    assert b"11.0 GiB" in screen.shown
    screen.shown = b""
    screen.resize(40, 12)
    eventually(lambda: b"Safe if a node fails" in screen.read(), what="it is drawn in the new size")
    _, *frames = screen.shown.decode().split("\x1b[H")  # Before them may come blank lines of the larger screen.
    assert frames and all(len(frame.splitlines()) <= 12 for frame in frames)


def test_elsewhere_it_appends_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`ckptfs status --watch | tee` shows every round, without a control character."""
    rounds = []

    def end_after_two(_: float) -> None:
        rounds.append(capsys.readouterr().out)
        if len(rounds) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(sampling, "ask_all", lambda mounts, *_: [(one, make_five_nodes()) for one in mounts])
    monkeypatch.setattr(time, "sleep", end_after_two)
    with pytest.raises(KeyboardInterrupt):
        status_screen.watch_status([make_mount()], json=False)
    for one in rounds:
        assert one.startswith("--- ") and "run1 on /ckpt: degraded" in one and "node4" in one and HOSTILE in one
        assert "\x1b" not in one and "trouble write back: run3/model.pt: EACCES" in one


def draw(columns: int) -> str:
    history = BacklogHistory()
    for at_s in range(300):
        history.append(float(at_s), make_five_nodes(1 - (at_s % 100) / 100).status)
    console = Console(width=columns, highlight=False)
    with console.capture() as captured:
        console.print(build_screen({"host": "vm", "at": 0.0, "mounts": [build_mount(make_five_nodes(), history, time.time_ns())]}, columns))
    return captured.get()


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_it_fits_into_any_terminal(columns: int) -> None:
    lines = draw(columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines[0]) > 0 and any("Safe if a node" in line for line in lines)


def test_nothing_is_mounted() -> None:
    assert "No ckptfs is mounted on vm" in str(build_screen({"host": "vm", "at": 0.0, "mounts": []}, 80))


def test_bars() -> None:
    """A sample without an answer is a dot, and the smallest amount can be seen."""
    plot = {
        "at_s": [-4.0, -3.0, -2.0, -1.0, 0.0],
        "values": {"a": [0, 1, 1024, None, 512]},
        "ticks": [(0, "0 B"), (1024, "1.0 KiB")],
        "span": "",
    }
    lines = [line.partition("▕")[2] for line in draw_bars(plot, "a", 80)]  # type: ignore[arg-type]
    assert lines == ["  █·", "  █·▄", " ▁█·█"]
    assert draw_bars({**plot, "values": {"a": [0, 0]}}, "a", 80) == []  # type: ignore[arg-type, typeddict-item]
