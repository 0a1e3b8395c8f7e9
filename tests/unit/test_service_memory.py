"""M2, M3: what the daemon's memory limit must be is said, and judged."""

import logging

import pytest
from ckptfs_client import render
from ckptfs_client.node import doctor
from ckptfs_daemon.supervisor import state_directory

from ckptfs import limits
from ckptfs.cgroups import UNKNOWN, UNLIMITED, MemoryLimit
from ckptfs.protocol import control_pb2 as pb
from ckptfs.tiers import space

GIB = limits.GIB


def memory(limit: int, known: bool = True) -> pb.ServiceMemory:
    return pb.ServiceMemory(needed_bytes=5 * GIB, limit_known=known, limit_bytes=limit, group="/sys/fs/cgroup/x" if limit else "")


@pytest.mark.parametrize(
    ("found", "verdict", "words"),
    [
        (memory(0), "ok", "the daemon needs 5.0 GiB (the RAM tier and its processes); it has no limit"),
        (memory(6 * GIB), "ok", "its limit is 6.0 GiB (/sys/fs/cgroup/x)"),
        (memory(5 * GIB - 1), "bad", "the kernel kills the daemon"),
        (memory(0, known=False), "note", "cannot be found out"),
    ],
)
def test_doctor_judges_the_limit_of_the_daemon(found: pb.ServiceMemory, verdict: str, words: str) -> None:
    finding = doctor.check_service_memory("run1", found)
    assert finding.verdict == verdict and words in finding.what
    assert (verdict == "ok") == (finding.remedy == "")
    assert words in doctor.check_service_memory("run1", found).what


def test_a_remedy_names_the_sum() -> None:
    assert "raise the limit to 5.0 GiB" in render.describe_service_memory(memory(GIB))


def test_a_ram_tier_of_its_own_choice_fits_below_the_limit() -> None:
    choose = state_directory.choose_initial_ram_size
    assert choose(None, 24 * GIB, UNLIMITED) == choose(None, 24 * GIB, UNKNOWN) == 12 * GIB
    assert choose(None, 24 * GIB, MemoryLimit(8 * GIB)) == 4 * GIB
    assert choose(None, 24 * GIB, MemoryLimit(GIB + GIB // 2)) == GIB // 2
    assert choose(None, 24 * GIB, MemoryLimit(GIB // 2)) == 16 * limits.MIB
    assert choose(6 * GIB, 24 * GIB, MemoryLimit(GIB)) == 6 * GIB


def test_a_ram_tier_grows_only_below_the_limit() -> None:
    def grown(limit: int | None, configured: int | None = None) -> int:
        return space.choose_ram_size(4 * GIB, 4 * GIB, configured=configured, available=20 * GIB, memory=24 * GIB, limit=limit)

    assert grown(None) == 8 * GIB
    assert grown(7 * GIB) == 6 * GIB
    assert grown(4 * GIB) == 4 * GIB
    assert grown(4 * GIB, configured=6 * GIB) == 6 * GIB


def test_a_limit_that_is_too_low_is_logged_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    state_directory.warn_of_low_limit(4 * GIB, MemoryLimit(5 * GIB, "/a"))
    state_directory.warn_of_low_limit(4 * GIB, UNLIMITED)
    state_directory.warn_of_low_limit(4 * GIB, UNKNOWN)
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        state_directory.warn_of_low_limit(4 * GIB, MemoryLimit(5 * GIB - 1, "/a"))
    assert "smaller ram=" in caplog.text and "/a" in caplog.text
