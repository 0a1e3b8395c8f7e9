"""A tier is NORMAL, SUSPECT or DOWN; being full is no illness, and silence is one (P1)."""

import errno
import os
from pathlib import Path

import pytest

from ckptfs import disk
from ckptfs.tiers import health
from ckptfs.tiers.health import Health, State

WELL = Health()
BROKEN = OSError(errno.EIO, "Input/output error")


def test_errors_lead_down_and_one_success_leads_back() -> None:
    once = health.failed(WELL, 10.0, BROKEN)
    assert (once.state, once.since_s, once.failures) == (State.SUSPECT, 10.0, 1)
    twice = health.failed(once, 11.0, BROKEN)
    assert (twice.state, twice.since_s) == (State.SUSPECT, 10.0)
    down = health.failed(twice, 12.0, BROKEN)
    assert (down.state, down.since_s, down.error) == (State.DOWN, 12.0, "EIO: Input/output error")
    assert "kernel log" in down.remedy
    assert health.succeeded(down, 20.0) == Health(since_s=20.0)


def test_a_well_tier_stays_what_it_is() -> None:
    assert health.succeeded(WELL, 99.0) is WELL


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_is_not_ill(code: int) -> None:
    assert health.failed(WELL, 1.0, OSError(code, "full")).state is State.NORMAL


def test_silence_is_suspect_and_then_down() -> None:
    assert health.silent(WELL, 1.0, health.SUSPECT_S - 1) is WELL
    suspect = health.silent(WELL, 5.0, health.SUSPECT_S)
    assert suspect.state is State.SUSPECT and "does not answer" in suspect.error
    down = health.silent(suspect, 30.0, health.DOWN_S)
    assert down.state is State.DOWN
    assert health.silent(down, 31.0, health.SUSPECT_S).state is State.DOWN, "a new probe that is late does not make it better"


def test_the_wrong_filesystem_is_down_at_once() -> None:
    assert health.another(WELL, 1.0, "not ours", "mount ours").state is State.DOWN


def test_an_ill_tier_is_looked_at_more_often() -> None:
    assert health.probe_after_s(health.failed(WELL, 0.0, BROKEN)) < health.probe_after_s(WELL)


def test_the_probe_asks_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total, free = health.probe(tmp_path)
    assert total == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize and 0 < free <= total
    with pytest.raises(FileNotFoundError):
        health.probe(tmp_path / "gone")
    monkeypatch.setattr(disk, "_fault", "health:probe=ESTALE@*")
    with pytest.raises(OSError, match="injected"):
        health.probe(tmp_path)
