"""X1: prepared files of the RAM tier, on a real tmpfs: taking, topping up, trimming, and what an application can see of them."""

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptfs import disk, limits
from ckptfs.model import Tier
from ckptfs.tiers import prepared
from ckptfs.tiers.prepared import PreparedFiles
from ckptfs.tiers.storage import TierStorage

MIB = limits.MIB


@pytest.fixture
def storage() -> Iterator[TierStorage]:
    with tempfile.TemporaryDirectory(prefix=f"ckptfs-prepared-{os.getpid()}-", dir="/dev/shm") as root:
        found = TierStorage(Tier.RAM, Path(root))
        yield found
        found.close()


@pytest.fixture
def pool(storage: TierStorage) -> Iterator[PreparedFiles]:
    found = PreparedFiles(storage)
    yield found
    found.close()


def _open(storage: TierStorage, content: int) -> int:
    return storage.open(content, os.O_RDWR)


@contextlib.contextmanager
def _taken(storage: TierStorage, pool: PreparedFiles, size_bytes: int) -> Iterator[int]:
    """The descriptor of a content whose file was prepared with this size."""
    pool.add(size_bytes)
    assert _take(pool, 1)
    with disk.closing(_open(storage, 1)) as fd:
        yield fd


def _take(pool: PreparedFiles, content: int) -> bool:
    """Make some prepared file that of `content`, as an open does. Return False if none is left."""
    return any(pool.take_file(file, content) for file in pool.list_files())


def test_a_taken_file_is_empty_and_has_its_pages(storage: TierStorage, pool: PreparedFiles) -> None:
    """X1: a create finds memory. Pages that nobody wrote read as zeros, and nothing but their number tells of them."""
    pool.add(4 * MIB)
    assert pool.get_bytes() == 4 * MIB
    assert _take(pool, 7)
    assert pool.list_files() == []
    with disk.closing(_open(storage, 7)) as fd:
        status = os.fstat(fd)
        assert status.st_size == 0 and prepared.is_prepared(status)
        assert prepared.get_allocated_bytes(fd) == 4 * MIB
        os.ftruncate(fd, 4 * MIB)
        assert os.pread(fd, 4 * MIB, 0) == bytes(4 * MIB)
        with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
            os.lseek(fd, 0, os.SEEK_DATA)


@pytest.mark.parametrize("touches", [False, True])
def test_prepared_pages_hold_no_bytes_of_another_file(storage: TierStorage, pool: PreparedFiles, touches: bool) -> None:
    """X1, P7: pages that an expired file gave back read as zeros around whatever is written."""
    with disk.closing(storage.create(1)) as fd:
        os.pwrite(fd, b"secret! " * (MIB // 2), 0)
    storage.remove(1)
    pool.add(4 * MIB, touches=touches)
    _take(pool, 2)
    with disk.closing(_open(storage, 2)) as fd:
        os.pwrite(fd, b"x", 2 * MIB + 5)
        os.pwrite(fd, b"y", 4 * MIB - 1)
        expected = bytearray(4 * MIB)
        expected[2 * MIB + 5], expected[-1] = ord("x"), ord("y")
        assert os.pread(fd, 4 * MIB, 0) == bytes(expected)


def test_the_smallest_file_that_fits_is_found(pool: PreparedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PREPARED_BYTES_MIN", 2 * MIB)
    files = {size: pool.add(size * MIB) for size in (8, 2, 4)}
    assert pool.find(9 * MIB) is None
    assert pool.find(MIB) is None, "so small a file gains nothing"
    assert pool.find(3 * MIB) == files[4]
    assert pool.take_file(files[4], 1)
    assert pool.find(3 * MIB) is None, "too large: most of it would be wasted"
    assert pool.find(4 * MIB) == files[8]


def test_a_limited_writer_gets_a_file_that_can_be_topped_up(pool: PreparedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """M1: also for a size that nobody knows."""
    monkeypatch.setattr(limits, "PREPARED_BYTES_MIN", 2 * MIB)
    monkeypatch.setattr(limits, "TOP_UP_AHEAD_BYTES", 8 * MIB)
    files = {size: pool.add(size * MIB) for size in (4, 8, 20)}
    assert pool.find(0) is None and pool.find(0, is_limited=True) == files[8]
    assert pool.find(3 * MIB, is_limited=True) == files[8]
    assert pool.find(12 * MIB, is_limited=True) == files[20]
    assert pool.find(MIB, is_limited=True) is None, "it passes through the daemon"
    assert pool.take_file(files[8], 1)
    assert pool.find(0, is_limited=True) == files[20], "better than none"
    assert pool.take_file(files[20], 2)
    assert pool.find(0, is_limited=True) is None
    assert pool.find(3 * MIB, is_limited=True) == files[4]


def test_a_file_is_enlarged_at_once_or_not_at_all(pool: PreparedFiles) -> None:
    """M1: what is in the way of a create costs it a moment at most."""
    file = pool.add(4 * MIB)
    assert pool.enlarge(file, 64 * MIB, -1.0) == file
    assert pool.list_files() == [file]
    larger = pool.enlarge(file, 64 * MIB, 60.0)
    assert pool.list_files() == [larger] and larger.size_bytes == 64 * MIB
    assert pool.enlarge(file, 64 * MIB, 60.0) == file, "another process has taken it"


def test_a_file_is_taken_once(storage: TierStorage, pool: PreparedFiles) -> None:
    """X1: of several processes one gets a file, and the others get the next or none."""
    for _ in range(8):
        pool.add(MIB)

    def take(first: int) -> int:
        with contextlib.closing(PreparedFiles(storage)) as own:
            return [_take(own, content) for content in range(first, first + 8)].count(True)

    with ThreadPoolExecutor(3) as threads:
        assert sum(threads.map(take, (100, 200, 300))) == 8
    assert len(list(storage.contents())) == 8


def test_a_listed_file_may_be_gone(storage: TierStorage, pool: PreparedFiles) -> None:
    file = pool.add(MIB)
    assert pool.remove(file)
    assert not pool.remove(file)
    assert not pool.take_file(file, 1)
    assert not storage.exists(1)


def test_taking_replaces_a_leftover(storage: TierStorage, pool: PreparedFiles) -> None:
    with disk.closing(storage.create(5)) as fd:
        os.pwrite(fd, b"of a process that died", 0)
    pool.add(MIB)
    assert _take(pool, 5)
    found = storage.stat(5)
    assert found is not None and found.st_size == 0


@pytest.mark.parametrize("label", ["prepare:create", "prepare:touch", "prepare:allocate", "prepare:publish"])
def test_what_fails_leaves_nothing(storage: TierStorage, pool: PreparedFiles, monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    monkeypatch.setattr(disk, "_fault", f"{label}=ENOSPC@*")
    with pytest.raises(OSError, match="injected"):
        pool.add(MIB, touches=True)
    monkeypatch.setattr(disk, "_fault", "")
    assert pool.list_files() == []
    assert list((storage.root / "prepared").iterdir()) == []


@pytest.mark.parametrize("label", ["prepare:take", "prepare:remove", "prepare:trim"])
def test_what_fails_changes_nothing(storage: TierStorage, pool: PreparedFiles, monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    acts: dict[str, Callable[[int], object]] = {
        "prepare:take": lambda fd: _take(pool, 1),
        "prepare:remove": lambda fd: pool.give_back(MIB),
        "prepare:trim": lambda fd: prepared.trim(fd, holes=False),
    }
    file = pool.add(MIB)
    with disk.closing(os.open(storage.root / "prepared" / file.name, os.O_RDWR)) as fd:
        monkeypatch.setattr(disk, "_fault", f"{label}=EIO@*")
        with pytest.raises(OSError, match="injected"):
            acts[label](fd)
        monkeypatch.setattr(disk, "_fault", "")
        assert pool.list_files() == [file]
        assert prepared.get_allocated_bytes(fd) == MIB and prepared.is_prepared(os.fstat(fd))


def test_what_a_dead_mover_had_begun_is_removed_and_the_rest_is_found_again(storage: TierStorage, pool: PreparedFiles) -> None:
    """X1, P8: the directory is the truth."""
    file = pool.add(MIB)
    (storage.root / "prepared" / "new-0123").write_bytes(b"")
    again = PreparedFiles(storage)
    again.remove_unfinished()
    assert again.list_files() == [file]
    assert [path.name for path in (storage.root / "prepared").iterdir()] == [file.name]
    again.close()


def test_giving_back_takes_the_largest_first(pool: PreparedFiles) -> None:
    files = {size: pool.add(size * MIB) for size in (1, 2, 8)}
    assert pool.give_back(3 * MIB) == 8 * MIB
    assert sorted(pool.list_files()) == [files[1], files[2]]
    assert pool.give_back(100 * MIB) == 3 * MIB
    assert pool.list_files() == []


# --- a file that was taken --------------------------------------------------------------------------------------------


def test_topping_up_keeps_size_and_bytes(storage: TierStorage) -> None:
    with disk.closing(storage.create(1)) as fd:
        os.pwrite(fd, b"abc", 0)
        prepared.top_up(fd, 0, 2 * MIB)
        prepared.top_up(fd, MIB, 3 * MIB)
        assert os.fstat(fd).st_size == 3
        assert prepared.get_allocated_bytes(fd) == 4 * MIB
        assert os.pread(fd, 10, 0) == b"abc"


def test_trimming_leaves_what_was_written(storage: TierStorage, pool: PreparedFiles) -> None:
    """X1: after the seal a file takes what it holds; holes are holes again."""
    with _taken(storage, pool, 8 * MIB) as fd:
        os.pwrite(fd, b"begin" * 1000, 0)
        os.pwrite(fd, b"end", 2 * MIB)
        before = os.pread(fd, 8 * MIB, 0)
        prepared.trim(fd, holes=True)
        assert os.pread(fd, 8 * MIB, 0) == before
        assert not prepared.is_prepared(os.fstat(fd))
        assert prepared.get_allocated_bytes(fd) == 3 * 4096
        assert os.lseek(fd, 0, os.SEEK_HOLE) in (5000, 8192)


def test_without_a_lease_only_the_end_is_trimmed(storage: TierStorage, pool: PreparedFiles) -> None:
    """X1, P7: a page below the end may be written through a mapping meanwhile."""
    with _taken(storage, pool, 8 * MIB) as fd:
        os.pwrite(fd, b"end", 2 * MIB)
        prepared.trim(fd, holes=False)
        assert prepared.get_allocated_bytes(fd) == 2 * MIB + 4096
        assert prepared.is_prepared(os.fstat(fd)), "its holes are still to be punched"
        prepared.trim(fd, holes=True)
        assert prepared.get_allocated_bytes(fd) == 4096


@pytest.mark.parametrize("size_bytes", [0, MIB])
def test_a_file_without_holes_needs_no_lease(storage: TierStorage, pool: PreparedFiles, size_bytes: int) -> None:
    with _taken(storage, pool, 8 * MIB) as fd:
        os.pwrite(fd, b"x" * size_bytes, 0)
        prepared.trim(fd, holes=False)
        assert prepared.get_allocated_bytes(fd) == size_bytes and not prepared.is_prepared(os.fstat(fd))


def test_what_an_application_allocated_stays(storage: TierStorage, pool: PreparedFiles) -> None:
    """P2: fallocate(2) promises that later writes find room."""
    with _taken(storage, pool, 4 * MIB) as fd:
        prepared.mark_allocated_by_application(fd)
        os.posix_fallocate(fd, 0, 2 * MIB)
        prepared.trim(fd, holes=True)
        assert prepared.get_allocated_bytes(fd) == 2 * MIB
        assert not prepared.is_prepared(os.fstat(fd))


def test_an_ordinary_file_is_not_touched(storage: TierStorage) -> None:
    with disk.closing(storage.create(1)) as fd:
        os.posix_fallocate(fd, 0, MIB)
        prepared.mark_allocated_by_application(fd)
        prepared.trim(fd, holes=True)
        assert prepared.get_allocated_bytes(fd) == MIB
        assert os.fstat(fd).st_mode & 0o777 == 0o600


def test_stat_shows_what_was_written(storage: TierStorage, pool: PreparedFiles) -> None:
    """P2: du of an application shows no prepared pages."""
    with _taken(storage, pool, 4 * MIB) as fd:
        assert prepared.get_data_bytes(fd, os.fstat(fd)) == 0
        os.pwrite(fd, b"x" * MIB, 0)
        assert prepared.get_data_bytes(fd, os.fstat(fd)) == MIB
        os.pwrite(fd, b"x", 3 * MIB)
        assert prepared.get_data_bytes(fd, os.fstat(fd)) == MIB + 4096
        os.ftruncate(fd, 8 * MIB)
        assert prepared.get_data_bytes(fd, os.fstat(fd)) == MIB + 4096
        prepared.mark_allocated_by_application(fd)
        assert prepared.get_data_bytes(fd, os.fstat(fd)) == 4 * MIB


def test_a_lease_is_refused_while_a_mapping_can_write(storage: TierStorage, pool: PreparedFiles) -> None:
    """The fact on which `holes` rests: a write lease means that this descriptor is the only one."""
    with _taken(storage, pool, MIB) as fd:
        with disk.closing(_open(storage, 1)), pytest.raises(BlockingIOError):
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)


# --- expected sizes ---------------------------------------------------------------------------------------------------


def test_the_last_size_of_a_place_is_remembered(storage: TierStorage, pool: PreparedFiles) -> None:
    """X1: sizes outlive the processes, and take no memory."""
    pool.record_size(b"a" * 16, 5 * MIB)
    pool.record_size(b"b" * 16, 6 * MIB)
    pool.record_size(b"a" * 16, 7 * MIB)
    again = PreparedFiles(storage)
    assert {one.place: one.size_bytes for one in again.prune_expected()} == {b"a" * 16: 7 * MIB, b"b" * 16: 6 * MIB}
    again.close()


def test_old_and_surplus_places_are_forgotten(storage: TierStorage, pool: PreparedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        pool.record_size(bytes([number]), MIB)
        os.utime(storage.root / "expected" / f"{number:02x}", ns=(0, (10 + number) * 10**18))
    monkeypatch.setattr(limits, "PREPARED_PLACES_MAX", 2)
    assert [one.place for one in pool.prune_expected()] == [b"\x02", b"\x01"]
    os.utime(storage.root / "expected" / "01", ns=(0, 0))
    assert [one.place for one in pool.prune_expected()] == [b"\x02"]
    assert [path.name for path in (storage.root / "expected").iterdir()] == ["02"]
