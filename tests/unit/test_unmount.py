"""P3: the unmount of a mount that somebody uses for a moment, or for longer."""

import errno
import itertools
import os
from pathlib import Path

import pytest
from ckptfs_daemon.fuse import connection
from ckptfs_daemon.fuse.connection import Connection

from ckptfs import libc
from ckptfs.model import DataPath

SERVED = Connection(-1, b"", DataPath.BUFFERED, "a test", Path("/none"), "0:9")


@pytest.fixture
def busy_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the kernel still says EBUSY; the last number: the flags of the call that succeeded."""
    left = [3]
    clock = itertools.count(step=0.1)

    def unmount_at(_point: Path, flags: int = 0) -> None:
        if left[0] and not flags:
            left[0] -= 1
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        left.append(flags)

    monkeypatch.setattr(connection, "unmount_at", unmount_at)
    monkeypatch.setattr(Connection, "is_mounted", lambda _: len(left) == 1)
    monkeypatch.setattr(connection.time, "sleep", lambda _: None)
    monkeypatch.setattr(connection.time, "monotonic", lambda: next(clock))
    return left


def test_who_looks_at_a_mount_for_a_moment_does_not_detach_it(busy_calls: list[int], caplog: pytest.LogCaptureFixture) -> None:
    connection.unmount(SERVED)
    assert busy_calls == [0, 0] and not caplog.records


def test_a_mount_that_stays_in_use_is_detached(busy_calls: list[int], caplog: pytest.LogCaptureFixture) -> None:
    busy_calls[0] = 1000
    connection.unmount(SERVED)
    assert busy_calls[1:] == [libc.MNT_DETACH] and "is in use; it is detached now" in caplog.text
