"""P10: how long a request waits before it answers ENOSPC, in virtual time."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from ckptfs_daemon.mount.context import MountContext
from ckptfs_daemon.mount.open_files.top_up import TopUpThread
from ckptfs_daemon.mount.opening.tier_choice import SpaceWait
from daemon_under_test import eventually
from trio.testing import MockClock

from ckptfs import limits
from ckptfs.catalog import summary
from ckptfs.model import Tier


def waited_s(
    monkeypatch: pytest.MonkeyPatch, is_growing: Callable[[float], bool], is_silent: Callable[[float], bool] = lambda _: False
) -> float:
    """How long a request waits while nothing is pending in the catalog."""
    monkeypatch.setattr(summary, "load_space_outlook", lambda _: summary.SpaceOutlook(False, ()))
    monkeypatch.setattr(summary, "set_space_demand", lambda *_: None)

    class Growing:
        @property
        def is_growing(self) -> bool:
            return is_growing(trio.current_time())

    class Disk:
        @property
        def is_silent(self) -> bool:
            return is_silent(trio.current_time())

    files, channel = SimpleNamespace(top_up=Growing()), SimpleNamespace(notify=lambda _: None)
    context = SimpleNamespace(db=None, wake_channel=channel, open_files=files, tiers={Tier.NVME: Disk()})

    async def ask() -> float:
        wait, began_s = SpaceWait(cast(MountContext, context)), trio.current_time()
        while await wait.wait(1):
            pass
        return trio.current_time() - began_s

    return trio.run(ask, clock=MockClock(autojump_threshold=0))


def test_enospc_waits_for_a_limited_writer_that_holds_memory_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """P10, M1: its file ends soon, and gives 2 GiB back. One that stands still, or never ends, is not waited for."""
    moment_s, longest_s = limits.NO_SPACE_WAIT_S, limits.NO_SPACE_LONGEST_WAIT_S
    assert waited_s(monkeypatch, lambda _: False) == pytest.approx(moment_s, abs=0.1)
    assert waited_s(monkeypatch, lambda now_s: now_s < 20.0) == pytest.approx(20.0 + moment_s, abs=0.1)
    assert waited_s(monkeypatch, lambda _: True) == pytest.approx(longest_s, abs=0.1)


def test_enospc_waits_for_an_nvme_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: it may have room. A stall of some seconds is usual on a busy disk, and one of minutes on a sick one."""
    silence_s = 2 * limits.NO_SPACE_LONGEST_WAIT_S
    waited = waited_s(monkeypatch, lambda _: False, lambda now_s: now_s < silence_s)
    assert waited == pytest.approx(silence_s + limits.NO_SPACE_WAIT_S, abs=0.1)


def test_only_a_file_that_changes_is_growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TOP_UP_IDLE_S", 0.2)
    thread = TopUpThread(lambda fd, offset, length: None)
    assert not thread.is_growing
    thread.add(7, os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT), 0)
    try:
        eventually(lambda: not thread.is_growing, what="it stands still")
        sizes = itertools.count(1)
        eventually(lambda: os.truncate(tmp_path / "a", next(sizes)) or thread.is_growing, what="it grows")
    finally:
        thread.remove(7)
    assert not thread.is_growing
