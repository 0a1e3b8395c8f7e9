"""A full tier (P10, F1, T2): a file moves on while it is written, and only when all are full the application hears of it."""

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon_under_test import Area, DaemonUnderTest, eventually, shorten
from loop_disk import mounted
from programs import need, run

pytestmark = [pytest.mark.root, pytest.mark.fuse]

MIB = 1 << 20
Make = Callable[..., DaemonUnderTest]


def _block(number: int) -> bytes:
    return number.to_bytes(4, "little") * (MIB // 4)


def _fill(path: Path, blocks: int) -> None:
    with open(path, "wb", buffering=0) as file:
        for number in range(blocks):
            file.write(_block(number))


def _check(path: Path, blocks: int) -> None:
    assert path.stat().st_size == blocks * MIB
    with open(path, "rb", buffering=0) as file:
        for number in range(blocks):
            assert file.read(MIB) == _block(number), f"block {number} of {path.name}"


@pytest.fixture
def without_pfs(data_path: str, share_daemon: Callable[..., Area]) -> Area:
    return share_daemon(data_path, ram="64M", pfs=None)


def _tiers(daemon: Area | DaemonUnderTest, path: Path) -> list[tuple[str]]:
    query = "SELECT tier FROM copy JOIN inode ON inode.content = copy.content WHERE inode.id = ?"
    return daemon.catalog(query, path.stat().st_ino) if path.exists() else []


def test_a_file_larger_than_ram_ends_in_nvme(without_pfs: Area) -> None:
    daemon = without_pfs
    _fill(daemon.path / "large", 150)
    _check(daemon.path / "large", 150)
    assert _tiers(daemon, daemon.path / "large") == [("nvme",)]
    _fill(daemon.path / "small", 2)
    _check(daemon.path / "small", 2)


def test_ram_that_is_full_and_a_pfs_that_is_not(data_path: str, make_daemon: Make) -> None:
    daemon = make_daemon(data_path, ram="64M")
    for number in range(6):
        _fill(daemon.path / f"file{number}", 30)
    _fill(daemon.path / "large", 120)
    for number in range(6):
        _check(daemon.path / f"file{number}", 30)
    _check(daemon.path / "large", 120)
    daemon.settle()
    _check(daemon.pfs / "large", 120)
    _check(daemon.pfs / "file0", 30)


def test_enospc_when_everything_is_full_and_room_again_after_an_unlink(data_path: str, make_daemon: Make) -> None:
    daemon = make_daemon(data_path, ram="32M", pfs=None, nvme=None)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        _fill(daemon.path / "large", 64)
    os.unlink(daemon.path / "large")
    _fill(daemon.path / "small", 8)
    _check(daemon.path / "small", 8)


def test_room_again_after_an_unlink_on_a_full_pfs(data_path: str, make_daemon: Make) -> None:
    """P10: write-back, which has just failed for want of room, does not wait for its next attempt while a writer waits."""
    daemon = make_daemon(data_path, ram="64M", nvme=None, drain_deadline="1s", start=False)
    daemon.env.update(shorten(RETRY_FIRST_S=500, RETRY_LAST_S=1000))
    daemon.expect_warning("No space left|drained until the deadline")
    run("mount", "-t", "tmpfs", "-o", "size=44M", "none", daemon.pfs)
    daemon.start()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        for number in range(9):
            _fill(daemon.path / f"f{number}", 20)
    eventually(lambda: "No space left" in daemon.log, what="write-back has failed")
    os.unlink(daemon.path / "f0")
    _fill(daemon.path / "small", 18)
    _check(daemon.path / "small", 18)


def _free(place: Path) -> int:
    figures = os.statvfs(place)
    return figures.f_bavail * figures.f_frsize


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_an_allocation_that_no_tier_can_hold_is_refused(data_path: str, make_daemon: Make, tmp_path: Path, kind: str) -> None:
    """P10: the file does not move between two tiers for ever, and does not fill the PFS. One that the PFS can hold goes there."""
    need("fallocate")
    with mounted(kind, tmp_path) as disk:
        daemon = make_daemon(data_path, ram="64M", nvme=None, pfs=disk)
        _fill(daemon.path / "large", 1)
        before = _free(disk)
        run("fallocate", "-l", "1T", daemon.path / "large", code=1, timeout=60)
        assert _free(disk) > before - 16 * MIB
        _check(daemon.path / "large", 1)
        run("fallocate", "-l", "100M", daemon.path / "large")
        assert (daemon.path / "large").stat().st_size == 100 * MIB
        daemon.settle()
        assert daemon.unmount() == 0


@pytest.mark.parametrize(("ram", "nvme", "pfs", "size"), [(64, 30, 40, 20), (40, 70, 30, 7), (64, 50, 0, 12), (32, 0, 90, 9)])
def test_enospc_comes_when_no_tier_can_hold_the_file(data_path: str, make_daemon: Make, ram: int, nvme: int, pfs: int, size: int) -> None:
    """Whatever the shapes: nothing is lost, and no tier has room for the file that was refused."""
    daemon = make_daemon(data_path, ram=f"{ram}M", drain_deadline="1s", start=False)  # The PFS stays full at the end.
    daemon.expect_warning("No space left|full|nvme|write back|drained until the deadline")
    places = {"ram": daemon.state / "ram"}
    for name, room in (("nvme", nvme), ("pfs", pfs)):
        if room:
            places[name] = daemon.root / name
            run("mount", "-t", "tmpfs", "-o", f"size={room}M", "none", places[name])
        else:
            daemon.options[name] = None
    daemon.start()
    written, refused = 0, False
    while not refused:
        assert written * size < ram + nvme + pfs, "more than there is room for"
        try:
            with open(daemon.path / f"f{written}", "wb", buffering=0) as file:
                for number in range(size):
                    file.write(_block(number))
                os.fsync(file.fileno())
            written += 1
        except OSError as failure:
            assert failure.errno == errno.ENOSPC
            refused = True
    path = daemon.path / f"f{written}"
    tiers = _tiers(daemon, path)
    for tier, place in places.items():
        assert _free(place) < (5 if (tier,) in tiers else size + 5) * MIB, f"{tier} has room"
    path.unlink(missing_ok=True)
    for number in range(written):
        _check(daemon.path / f"f{number}", size)


def test_a_budget_below_the_size_of_the_disk_holds_while_a_file_grows(data_path: str, make_daemon: Make) -> None:
    """T2: nvme_size=80M never holds 200 MiB; what does not fit goes to the PFS."""
    daemon = make_daemon(data_path, ram="64M", nvme_size="80M")
    _fill(daemon.path / "small", 40)
    with open(daemon.path / "large", "wb", buffering=0) as file:
        for number in range(200):
            file.write(_block(number))
            if number % 16 == 0:
                used = sum(found.stat().st_blocks * 512 for found in daemon.nvme.rglob("*") if found.is_file())
                assert used <= 81 * MIB
    _check(daemon.path / "large", 200)
    _check(daemon.path / "small", 40)
    daemon.settle()
    assert (daemon.pfs / "large").stat().st_size == 200 * MIB


def test_a_budget_holds_on_a_disk_that_allocates_ahead(data_path: str, make_daemon: Make, tmp_path: Path) -> None:
    """T2: XFS gives a file that grows as many blocks again as it has."""
    with mounted("xfs", tmp_path) as disk:
        daemon = make_daemon(data_path, ram="32M", nvme=disk, nvme_size="80M")
        with open(daemon.path / "large", "wb", buffering=0) as file:
            for number in range(200):
                file.write(_block(number))
                used = sum(found.stat().st_blocks * 512 for found in disk.rglob("*") if found.is_file())
                assert used <= 82 * MIB, number
        _check(daemon.path / "large", 200)
        daemon.settle()
        assert daemon.unmount() == 0


def test_a_budget_holds_for_files_that_outgrow_their_kind(make_daemon: Make) -> None:
    """F1: their expected size fits, and several grow at once. The kernel would ask nobody."""
    daemon = make_daemon("passthrough", ram="64M", nvme_size="80M", pfs=None)
    for name in ("a", "b", "c"):
        _fill(daemon.path / f"{name}-1.ckpt", 9)
    _fill(daemon.path / "filler", 20)

    def grow(name: str) -> None:
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            _fill(daemon.path / f"{name}-2.ckpt", 107)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(grow, "abc"))
    assert 40 * MIB < sum(found.stat().st_blocks * 512 for found in daemon.nvme.rglob("*") if found.is_file()) <= 81 * MIB


def test_a_budget_is_the_end_without_a_pfs(data_path: str, make_daemon: Make) -> None:
    daemon = make_daemon(data_path, ram="64M", nvme_size="80M", pfs=None)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)), open(daemon.path / "large", "wb", buffering=0) as file:
        for number in range(320):
            file.write(_block(number))
            os.fsync(file.fileno())
    assert 70 * MIB < (daemon.path / "large").stat().st_size <= 81 * MIB


def test_mappings_and_random_writes_survive_the_move(without_pfs: Area) -> None:
    path = without_pfs.path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    reading = os.open(path, os.O_RDONLY)
    for number in range(100):
        os.pwrite(fd, _block(number), (number * 37 % 100) * MIB)
    for number in range(100):
        assert os.pread(reading, MIB, (number * 37 % 100) * MIB) == _block(number)
    os.close(fd)
    os.close(reading)
    assert _tiers(without_pfs, path) == [("nvme",)]


def test_a_file_that_several_threads_write_in_small_pieces_moves_on(without_pfs: Area) -> None:
    """P10: the shim serves such writes, and none of them goes to the tier that the file has left."""
    path, piece, share = without_pfs.path / "large", 64 * 1024, 40 * MIB

    def write(number: int) -> None:
        with open(path, "r+b", buffering=0) as file:
            for offset in range(0, share, piece):
                file.seek(number * share + offset)
                file.write(bytes([number + 1]) * piece)

    path.touch()
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(write, number) for number in range(4)]:
            done.result()
    data = path.read_bytes()
    assert [data[number * share : (number + 1) * share] == bytes([number + 1]) * share for number in range(4)] == [True] * 4
    assert _tiers(without_pfs, path) == [("nvme",)]
