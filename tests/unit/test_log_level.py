"""N8: the level of the log, asked for over the control socket."""

import io
import logging
import sys
import threading
from collections.abc import Iterator

import pytest
from ckptfs_client.errors import NotInTime, UsageError
from ckptfs_daemon import logs
from ckptfs_daemon.control import admin
from control_served import Served


@pytest.fixture(autouse=True)
def same_level() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


def test_shown_and_set(served: Served) -> None:
    for level in ("debug", "error", "warning", "info"):
        assert served.client.get_or_set_log_level(level) == level == logs.get_level()
        assert served.client.get_or_set_log_level() == level
    assert not logging.getLogger("any").isEnabledFor(logging.DEBUG)


def test_what_is_no_level(served: Served) -> None:
    """P11."""
    logs.set_level("info")
    with pytest.raises(UsageError, match="'loud' is not a log level; accepted: debug, info, warning, error"):
        served.client.get_or_set_log_level("loud")
    assert logs.get_level() == "info"


def test_a_supervisor_that_does_not_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    logs.set_level("info")
    monkeypatch.setattr(admin, "LOG_LEVEL_WAIT_S", 0.05)
    monkeypatch.setattr(logs, "get_level", lambda: "info")
    with pytest.raises(NotInTime, match="not changed in time") as failure:
        served.client.get_or_set_log_level("debug")
    assert failure.value.remedy == "see `ckptfs status`: its processes may be restarting"


def test_the_traceback_of_a_thread_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may end in the middle: then half a traceback would say neither which thread ended nor why."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    logs.configure("mover", "info")
    thread = threading.Thread(target=lambda: 1 // 0, name="worker")
    thread.start()
    thread.join()
    (line,) = written.getvalue().splitlines()
    assert "thread worker: ended unexpectedly | Traceback" in line and line.endswith(
        "ZeroDivisionError: integer division or modulo by zero"
    )
