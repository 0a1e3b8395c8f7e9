"""N8: the level of the log, asked for over the control socket."""

import logging
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
