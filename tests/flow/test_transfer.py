"""P4, F3, F4: bytes travel whole, with their digest, and holes stay holes."""

import ctypes
import mmap
import os
import threading
from pathlib import Path

import pytest

from ckptfs import digest, disk, limits, procfs
from ckptfs.errors import Busy
from ckptfs.tiers import transfer

transfer.declare_labels("test:copy")

MIB = limits.MIB


def plain(data: bytes) -> transfer.ContentDigests:
    """What the digest of `data` must be, by the simplest means."""
    pieces = [data[at : at + limits.BLOCK_BYTES] for at in range(0, len(data), limits.BLOCK_BYTES)]
    blocks = b"".join(map(digest.hash_block, pieces))
    return len(data), digest.hash_content(blocks, len(data)), blocks


def pair(directory: Path, data: bytes) -> tuple[int, int]:
    source = os.open(directory / "source", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    disk.write_all("test:copy:write", source, data, 0)
    return source, os.open(directory / "target", os.O_RDWR | os.O_CREAT | os.O_TRUNC)


@pytest.mark.parametrize("size", [0, 1, 4096, 3 * MIB + 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 5])
def test_copy_gives_the_bytes_and_their_digest(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    source, target = pair(tmp_path, data)
    assert transfer.copy(source, target, label="test:copy") == plain(data)
    assert (tmp_path / "target").read_bytes() == data
    assert transfer.read(target, label="test:copy") == plain(data)


@pytest.mark.parametrize("directory", [Path("/dev/shm"), None])
def test_holes_stay_holes(tmp_path: Path, directory: Path | None, request: pytest.FixtureRequest) -> None:
    place = directory or tmp_path
    names = [place / f"ckptfs-transfer-{os.getpid()}-{number}" for number in range(2)]
    request.addfinalizer(lambda: [name.unlink(missing_ok=True) for name in names])
    source, target = (os.open(name, os.O_RDWR | os.O_CREAT) for name in names)
    os.pwrite(source, b"front", 0)
    os.pwrite(source, b"middle", 21 * MIB + 17)
    os.ftruncate(source, 40 * MIB + 3)
    result = transfer.copy(source, target, label="test:copy")
    assert result == plain(names[0].read_bytes())
    assert names[1].read_bytes() == names[0].read_bytes()
    assert os.fstat(target).st_blocks * 512 < 2 * MIB


def test_a_terabyte_of_nothing_is_read_at_once(tmp_path: Path) -> None:
    source = os.open(tmp_path / "source", os.O_RDWR | os.O_CREAT)
    os.ftruncate(source, 2**40)
    asked = []
    size, _, blocks = transfer.read(source, label="test:copy", before_block=lambda: asked.append(1))
    assert size == 2**40 and blocks == digest.ZERO_BLOCK * 2**18
    assert len(asked) > 100, "a hole must be left between its blocks too"


def test_before_block_sees_each_block_and_may_stop(tmp_path: Path) -> None:
    source, target = pair(tmp_path, os.urandom(9 * MIB))
    seen: list[int] = []

    def second() -> None:
        seen.append(1)
        if len(seen) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        transfer.copy(source, target, label="test:copy", before_block=second)
    assert os.fstat(target).st_size <= 4 * MIB


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DIGEST_PARALLEL_BYTES_MIN", 8 * MIB)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("size", [0, 8 * MIB - 1, 8 * MIB, 21 * MIB + 5])
def test_several_threads_find_the_same_digest(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    source, _ = pair(tmp_path, data)
    asked: list[int] = []
    assert transfer.read_parallel(source, label="test:copy", before_block=lambda: asked.append(threading.get_ident())) == plain(data)
    assert len(asked) == -(-size // limits.BLOCK_BYTES)
    assert (threading.get_ident() in asked) == (0 < size < 8 * MIB)


@pytest.mark.usefixtures("many_threads")
def test_several_threads_stop_where_one_may_not_go_on(tmp_path: Path) -> None:
    source, _ = pair(tmp_path, bytes(1) * (80 * MIB))
    asked: list[int] = []

    def before_block() -> None:
        asked.append(1)
        raise Busy("test")

    with pytest.raises(Busy):
        transfer.read_parallel(source, label="test:copy", before_block=before_block)
    assert len(asked) <= 3


@pytest.mark.usefixtures("many_threads")
def test_several_threads_at_a_file_that_shrinks(tmp_path: Path) -> None:
    data = os.urandom(20 * MIB)
    source, _ = pair(tmp_path, data)
    lock = threading.Lock()

    def shrink() -> None:
        with lock:  # Nobody reads before it is done.
            os.ftruncate(source, 9 * MIB)

    result = transfer.read_parallel(source, label="test:copy", before_block=shrink)
    assert result == plain(data[: 9 * MIB])


def test_a_source_that_shrinks_is_reported_with_the_size_that_was_read(tmp_path: Path) -> None:
    source, target = pair(tmp_path, os.urandom(6 * MIB))

    def shrink() -> None:
        os.ftruncate(source, 5 * MIB)

    size, _, _ = transfer.copy(source, target, label="test:copy", before_block=shrink)
    assert size == 5 * MIB == os.fstat(target).st_size


@pytest.mark.parametrize("fault", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("act", ["read", "write", "truncate"])
def test_errors_of_the_disk_are_raised(tmp_path: Path, act: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = pair(tmp_path, b"data")
    monkeypatch.setattr(disk, "_fault", f"test:copy:{act}={fault}@*")
    with pytest.raises(OSError, match="injected"):
        transfer.copy(source, target, label="test:copy")


def test_a_large_copy_leaves_no_more_than_a_window_in_memory(tmp_path: Path) -> None:
    """What the disk has is given back while the copy goes on; and every byte is right."""
    data = os.urandom(limits.UNWRITTEN_BYTES_MAX + 24 * MIB)
    source, target = pair(tmp_path, data)
    assert transfer.copy(source, target, label="test:copy") == plain(data)
    kept = in_memory(target, len(data))
    assert (tmp_path / "target").read_bytes() == data
    if procfs.get_filesystem_type(tmp_path) in procfs.MEMORY_FILESYSTEMS or in_memory(target, len(data)) < len(data):
        pytest.skip("this filesystem keeps nothing in memory that could be counted, or all")
    assert kept <= limits.UNWRITTEN_BYTES_MAX + 2 * limits.BLOCK_BYTES


def in_memory(fd: int, size: int) -> int:
    """How many bytes of a file are in the page cache, as mincore(2) says."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0))
    pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    try:
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.parametrize("fault", ["ENOSPC", "EIO"])
def test_a_disk_that_fails_behind_the_copy_is_heard(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: the kernel tells of a failed write once, and not again at fsync."""
    source, target = pair(tmp_path, os.urandom(limits.UNWRITTEN_BYTES_MAX + 8 * MIB))
    monkeypatch.setattr(disk, "_fault", f"behind:wait={fault}@*")
    with pytest.raises(OSError, match="injected"):
        transfer.copy(source, target, label="test:copy")
