"""A tier is NORMAL, SUSPECT or DOWN; being full is no illness, and silence is one (P1)."""

import errno
import os
from pathlib import Path

import pytest

from ckptfs import disk
from ckptfs.tiers import health
from ckptfs.tiers.health import Health, HealthState

WELL = Health()
BROKEN = OSError(errno.EIO, "Input/output error")


def test_errors_lead_down_and_one_success_leads_back() -> None:
    once = health.after_failure(WELL, 10.0, BROKEN)
    assert (once.state, once.since_s, once.failures) == (HealthState.SUSPECT, 10.0, 1)
    twice = health.after_failure(once, 11.0, BROKEN)
    assert (twice.state, twice.since_s) == (HealthState.SUSPECT, 10.0)
    down = health.after_failure(twice, 12.0, BROKEN)
    assert (down.state, down.since_s, down.error) == (HealthState.DOWN, 12.0, "EIO: Input/output error")
    assert "kernel log" in down.remedy
    assert health.after_success(down, 20.0) == Health(since_s=20.0)


def test_a_well_tier_stays_what_it_is() -> None:
    assert health.after_success(WELL, 99.0) is WELL


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_is_not_ill(code: int) -> None:
    assert health.after_failure(WELL, 1.0, OSError(code, "full")).state is HealthState.NORMAL


def test_no_room_may_mean_no_inodes() -> None:
    """A PFS without inodes shows free space: the remedy says where to look."""
    assert "inodes" in health.remedy(errno.ENOSPC) and "df -i" in health.pfs_remedy(errno.ENOSPC)


def test_silence_is_suspect_and_then_down() -> None:
    assert health.after_silence(WELL, 1.0, health.SUSPECT_S - 1) is WELL
    suspect = health.after_silence(WELL, 5.0, health.SUSPECT_S)
    assert suspect.state is HealthState.SUSPECT and "does not answer" in suspect.error
    down = health.after_silence(suspect, 30.0, health.DOWN_S)
    assert down.state is HealthState.DOWN
    assert health.after_silence(down, 31.0, health.SUSPECT_S).state is HealthState.DOWN, "a new probe that is late does not make it better"


def test_the_wrong_filesystem_is_down_at_once() -> None:
    assert health.after_wrong_tier(WELL, 1.0, "not ours", "mount ours").state is HealthState.DOWN


def test_an_ill_tier_is_looked_at_more_often() -> None:
    assert health.probe_after_s(health.after_failure(WELL, 0.0, BROKEN)) < health.probe_after_s(WELL)


def test_the_probe_asks_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = health.probe(tmp_path)
    assert capacity.total == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize and 0 < capacity.free <= capacity.total
    with pytest.raises(FileNotFoundError):
        health.probe(tmp_path / "gone")
    monkeypatch.setattr(disk, "_fault", "health:probe=ESTALE@*")
    with pytest.raises(OSError, match="injected"):
        health.probe(tmp_path)
