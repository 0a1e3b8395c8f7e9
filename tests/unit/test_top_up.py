"""M1: pages are allocated ahead of a program that must not reach a fresh one."""

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptfs_daemon.mount.open_files import top_up
from ckptfs_daemon.mount.open_files.top_up import GrowingFile, TopUpThread
from daemon_under_test import eventually
from hypothesis import given
from hypothesis import strategies as st
from memory_group import memory_group

from ckptfs import limits
from ckptfs.tiers import prepared, space
from ckptfs.tiers.space import Capacity

MIB = limits.MIB
AHEAD, STEP = limits.TOP_UP_AHEAD_BYTES, limits.TOP_UP_STEP_BYTES


def filled(file: GrowingFile, size: int) -> list[tuple[int, int]]:
    """What is allocated until a file of this size has enough."""
    found = []
    while (wanted := top_up.choose_range(file, size)) is not None:
        top_up.record_range(file, *wanted)
        found.append(wanted)
    return found


def test_pages_stay_ahead_of_a_file_that_grows() -> None:
    file = GrowingFile(-1, 2 * AHEAD)
    assert filled(file, AHEAD) == []
    assert filled(file, AHEAD + 1) == [(2 * AHEAD, STEP)]
    assert filled(file, AHEAD + STEP) == []
    assert filled(file, 2 * AHEAD) == [(2 * AHEAD + STEP, AHEAD - STEP)], "in one call: the next write may be as long"


def test_a_jump_gets_pages_ahead_first_and_its_gap_afterwards() -> None:
    file = GrowingFile(-1, AHEAD)
    size = AHEAD + 3 * STEP + 4096
    found = filled(file, size)
    assert found == [(size, AHEAD), (AHEAD, STEP), (AHEAD + STEP, STEP), (AHEAD + 2 * STEP, STEP), (AHEAD + 3 * STEP, 4096)]


@given(st.integers(0, 4 * AHEAD), st.lists(st.integers(0, 4 * AHEAD), max_size=12))
def test_everything_below_the_size_and_ahead_of_it_is_prepared_once(prepared_bytes: int, sizes: list[int]) -> None:
    file = GrowingFile(-1, prepared_bytes)
    ranges = [(0, prepared_bytes)] if prepared_bytes else []
    for size in sizes:
        ranges += filled(file, size)
        covered = 0
        for offset, length in sorted(ranges):
            assert offset == covered, "a gap, or twice"
            covered += length
        assert covered >= size + AHEAD


@pytest.fixture
def growing() -> Iterator[tuple[Path, int]]:
    """An empty file on a tmpfs, and a descriptor of it."""
    path = Path("/dev/shm") / f"ckptfs-test-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    yield path, fd
    path.unlink()
    os.close(fd)


def test_the_thread_ends_with_its_last_file_and_closes_it(growing: tuple[Path, int]) -> None:
    own = os.dup(growing[1])
    thread = TopUpThread(lambda fd, offset, length: None)
    thread.add(7, own, AHEAD)
    thread.add(7, os.dup(own), AHEAD)
    thread.remove(7)
    thread.remove(7)

    def is_closed() -> bool:
        try:
            os.fstat(own)
        except OSError as failure:
            return failure.errno == errno.EBADF
        return False

    eventually(is_closed, what="the descriptor is closed")
    eventually(lambda: thread._thread is None, what="the thread has ended")


def _allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_what_a_truncation_frees_is_allocated_again_before_it_is_answered(
    growing: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TOP_UP_AHEAD_BYTES", 64 * MIB)
    fd, thread = growing[1], TopUpThread()
    thread.add(7, os.dup(fd), 0)
    try:
        eventually(lambda: _allocated_bytes(fd) == 64 * MIB, what="the file has pages ahead")
        os.ftruncate(fd, 8 * MIB)
        os.ftruncate(fd, 4096)
        thread.restore(7)
        assert _allocated_bytes(fd) >= 64 * MIB
        thread.restore(8)
    finally:
        thread.remove(7)


def test_the_last_room_of_a_tier_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program pays for no more than the reserve."""
    free = 100 * MIB + limits.TOP_UP_RESERVE_BYTES
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(space, "read_capacity", lambda _: Capacity(free, free - sum(length for _, length in asked)))
    thread = TopUpThread(lambda fd, offset, length: asked.append((offset, length)))
    (tmp_path / "a").touch()
    thread.add(7, os.open(tmp_path / "a", os.O_RDWR), 0)
    try:
        eventually(lambda: asked, what="a step")
    finally:
        thread.remove(7)
    assert asked == [(0, 100 * MIB)]


def test_a_full_tier_is_logged_once(growing: tuple[Path, int], caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []

    def fail(fd: int, offset: int, length: int) -> None:
        tries.append(offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    thread = TopUpThread(fail)
    with caplog.at_level(logging.INFO):
        thread.add(7, os.dup(growing[1]), 0)
        eventually(lambda: len(tries) > 3, what="it goes on trying")
        thread.remove(7)
    assert [record.levelname for record in caplog.records] == ["INFO"] and "it pays for the little that is left" in caplog.text


@pytest.mark.root
def test_a_program_that_writes_far_more_than_was_prepared_is_not_killed(growing: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """At full speed, without the mount: it finds 256 MiB prepared, may use 64 MiB of its own, and writes 1.5 GiB."""
    monkeypatch.setattr(limits, "TOP_UP_AHEAD_BYTES", 256 * MIB)
    path, fd = growing
    prepared.top_up(fd, 0, 256 * MIB)
    thread = TopUpThread()
    code = "import sys\nwith open(sys.argv[1], 'r+b', 0) as file:\n    for _ in range(384):\n        file.write(b'x' * (4 << 20))"
    with memory_group(64 * MIB) as group:
        thread.add(7, os.dup(fd), 256 * MIB)
        try:
            group.run(code, path)
        finally:
            thread.remove(7)
        assert group.used_bytes < 32 * MIB
    assert os.fstat(fd).st_size == 1536 * MIB
