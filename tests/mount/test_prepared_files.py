"""X1: files of a series that take prepared memory, as an application sees them, on both data paths."""

import json
import mmap
import os
from collections.abc import Callable

import pytest
from daemon_under_test import PREPARED_SOON, DaemonUnderTest, eventually
from random_io import RandomIO

pytestmark = [pytest.mark.root, pytest.mark.fuse]

MIB = 1 << 20
SIZE = 16 * MIB
Make = Callable[..., DaemonUnderTest]


@pytest.fixture
def daemon(data_path: str, make_daemon: Make) -> DaemonUnderTest:
    return make_daemon(data_path, ram="3G", env=PREPARED_SOON)


def pool(daemon: DaemonUnderTest) -> list[str]:
    directory = daemon.root / "state" / "ram" / "prepared"
    names = os.listdir(directory) if directory.exists() else []  # The mover makes it when it begins.
    return sorted(name for name in names if "-" in name and not name.startswith("new-"))


def write_member(daemon: DaemonUnderTest, name: str, size: int = SIZE) -> None:
    (daemon.path / name).parent.mkdir(exist_ok=True, parents=True)
    (daemon.path / name).write_bytes(os.urandom(MIB) * (size // MIB))


def await_pool(daemon: DaemonUnderTest, count: int = 1) -> list[str]:
    eventually(lambda: len(pool(daemon)) == count, what=f"{count} files are prepared")
    return pool(daemon)


def create_taking(daemon: DaemonUnderTest, name: str, flags: int = 0) -> int:
    """Create a file and return its descriptor. It must have taken the only prepared file."""
    (before,) = await_pool(daemon)
    fd = os.open(daemon.path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o644)
    assert before not in pool(daemon), f"{name} took no prepared file"
    return fd


def test_the_second_file_of_a_series_takes_prepared_memory(daemon: DaemonUnderTest) -> None:
    write_member(daemon, "step_1.pt")
    fd = create_taking(daemon, "step_2.pt")
    assert os.fstat(fd).st_size == 0 and os.fstat(fd).st_blocks == 0
    data = os.urandom(SIZE + 5)
    assert os.write(fd, data) == len(data)
    assert os.fstat(fd).st_blocks * 512 <= SIZE + 2 * MIB
    os.close(fd)
    assert (daemon.path / "step_2.pt").read_bytes() == data
    daemon.settle()
    assert (daemon.pfs / "step_2.pt").read_bytes() == data


def shows_prepared(daemon: DaemonUnderTest, command: str) -> bool:
    (ram,) = (tier for tier in json.loads(daemon.command(command, daemon.path, "--json").stdout)["tiers"] if tier["name"] == "ram")
    return bool(ram["prepared_bytes"] == SIZE <= ram["used_bytes"])


def test_status_df_and_statfs_show_it(make_daemon: Make) -> None:
    """X1, N5: it is part of what is used, and can be used."""
    daemon = make_daemon("auto", ram="3G", env=PREPARED_SOON)
    write_member(daemon, "step_1.pt")
    await_pool(daemon)
    for command in ("status", "df"):
        eventually(lambda command=command: shows_prepared(daemon, command), what=f"{command} shows it")
    assert "prepared" in daemon.command("df", daemon.path).stdout


@pytest.mark.parametrize("data_path", ["passthrough"])
def test_each_rank_gets_its_own_size(daemon: DaemonUnderTest) -> None:
    """T5: the place in the set counts. The second set finds a file for each of its own."""
    for rank in range(3):
        write_member(daemon, f"step_1/rank{rank}.pt", (8 + 4 * rank) * MIB)
    assert [int(name.split("-")[0], 16) // MIB for name in await_pool(daemon, 3)] == sorted([8, 12, 16], key=lambda size: f"{size * MIB:x}")
    (daemon.path / "step_2").mkdir()
    descriptors = []
    for rank in range(3):
        before = pool(daemon)
        descriptors.append(os.open(daemon.path / f"step_2/rank{rank}.pt", os.O_WRONLY | os.O_CREAT))
        (taken,) = set(before) - set(pool(daemon))
        assert int(taken.split("-")[0], 16) == (8 + 4 * rank) * MIB
    for fd in descriptors:
        os.close(fd)


def test_a_smaller_file_gives_the_rest_back(daemon: DaemonUnderTest) -> None:
    """X1: neither stat nor the tier shows what was prepared and not written, once the file is sealed."""
    write_member(daemon, "step_1.pt", 96 * MIB)
    fd = create_taking(daemon, "step_2.pt")
    os.write(fd, b"x" * 5000)
    os.close(fd)
    assert os.stat(daemon.path / "step_2.pt").st_blocks == 16
    daemon.settle()
    ((content,),) = daemon.catalog("SELECT content FROM inode WHERE size = 5000")
    backing = os.stat(daemon.root / "state" / "ram" / "contents" / f"{content:016x}")
    assert backing.st_blocks * 512 <= 2 * MIB and backing.st_mode & 0o777 == 0o600


def test_holes_are_holes(daemon: DaemonUnderTest) -> None:
    """P2: SEEK_HOLE, SEEK_DATA, du and the copy on the PFS show what was written."""
    write_member(daemon, "step_1.pt")
    fd = create_taking(daemon, "step_2.pt")
    os.pwrite(fd, b"begin", 0)
    os.pwrite(fd, b"end", 12 * MIB)
    assert os.lseek(fd, 0, os.SEEK_DATA) == 0
    assert os.lseek(fd, 0, os.SEEK_HOLE) <= 2 * MIB
    assert os.lseek(fd, 4 * MIB, os.SEEK_DATA) == 12 * MIB
    assert os.fstat(fd).st_blocks * 512 <= 4 * MIB
    assert os.pread(fd, 12 * MIB, 0) == b"begin" + bytes(12 * MIB - 5)
    os.close(fd)
    daemon.settle()
    status = os.stat(daemon.path / "step_2.pt")
    assert status.st_size == 12 * MIB + 3 and status.st_blocks * 512 <= 4 * MIB
    assert (daemon.pfs / "step_2.pt").stat().st_blocks * 512 <= 4 * MIB
    assert (daemon.pfs / "step_2.pt").read_bytes() == (daemon.path / "step_2.pt").read_bytes()


def test_a_file_made_longer_reads_zeros(daemon: DaemonUnderTest) -> None:
    """P7: nobody reads what was in the pages before."""
    write_member(daemon, "step_1.pt")
    (daemon.path / "step_1.pt").unlink()
    fd = create_taking(daemon, "step_2.pt")
    os.ftruncate(fd, SIZE)
    assert os.pread(fd, SIZE, 0) == bytes(SIZE)
    os.ftruncate(fd, 100)
    os.pwrite(fd, b"x", 200)
    os.ftruncate(fd, SIZE)
    assert os.pread(fd, SIZE, 0) == bytes(200) + b"x" + bytes(SIZE - 201)
    os.close(fd)


def test_fallocate_keeps_its_promise(daemon: DaemonUnderTest) -> None:
    """P2: what an application has allocated stays allocated at the seal."""
    write_member(daemon, "step_1.pt")
    fd = create_taking(daemon, "step_2.pt")
    os.posix_fallocate(fd, 0, 8 * MIB)
    assert os.fstat(fd).st_blocks * 512 >= 8 * MIB and os.pread(fd, 8 * MIB, 0) == bytes(8 * MIB)
    os.close(fd)
    daemon.settle()
    assert 8 * MIB <= os.stat(daemon.path / "step_2.pt").st_blocks * 512 < SIZE


def test_a_mapping_that_outlives_its_file_keeps_its_bytes(daemon: DaemonUnderTest) -> None:
    """P7: a trim never takes pages that a mapping still writes."""
    write_member(daemon, "step_1.pt")
    fd = create_taking(daemon, "step_2.pt")
    os.ftruncate(fd, SIZE)
    with mmap.mmap(fd, SIZE) as mapping:
        os.close(fd)
        for offset in range(0, SIZE, MIB):
            mapping[offset : offset + 4] = b"late"
    expected = (b"late" + bytes(MIB - 4)) * 16
    assert (daemon.path / "step_2.pt").read_bytes() == expected
    daemon.settle()
    assert (daemon.path / "step_2.pt").read_bytes() == (daemon.pfs / "step_2.pt").read_bytes() == expected


def test_direct_io_and_truncation_at_open(daemon: DaemonUnderTest) -> None:
    write_member(daemon, "step_1.pt")
    fd = create_taking(daemon, "step_2.pt", os.O_DIRECT)
    with mmap.mmap(-1, MIB) as buffer:
        buffer[:] = b"d" * MIB
        assert os.writev(fd, [buffer]) == MIB
    os.close(fd)
    with open(daemon.path / "step_2.pt", "wb") as file:
        file.write(b"anew")
    assert (daemon.path / "step_2.pt").read_bytes() == b"anew"
    daemon.settle()
    assert (daemon.pfs / "step_2.pt").read_bytes() == b"anew"


@pytest.mark.parametrize(("data_path", "seed"), [("passthrough", 11), ("buffered", 12)])
def test_random_acts_on_a_prepared_file(daemon: DaemonUnderTest, seed: int) -> None:
    """P2: 600 random reads, writes, truncations, holes and mappings, against a model."""
    write_member(daemon, "step_1.pt")
    os.close(create_taking(daemon, "step_2.pt"))
    write_member(daemon, "step_3.pt")
    (before,) = await_pool(daemon)
    acts = RandomIO(daemon.path / "step_4.pt", seed)
    assert before not in pool(daemon)
    for number in range(600):
        acts.step()
        if number % 50 == 49:
            acts.check()
    acts.close()
    daemon.settle()
    assert (daemon.path / "step_4.pt").read_bytes() == (daemon.pfs / "step_4.pt").read_bytes() == acts.model


def test_with_prepared_0_nothing_is_taken(make_daemon: Make) -> None:
    daemon = make_daemon("auto", ram="3G", prepared="0")
    write_member(daemon, "step_1.pt")
    write_member(daemon, "step_2.pt")
    daemon.settle()
    assert pool(daemon) == []


def test_room_that_is_needed_is_given_back(data_path: str, make_daemon: Make) -> None:
    """X1, T2: prepared memory sends no file to a slower tier."""
    daemon = make_daemon(data_path, ram="160M", pfs=None, nvme=None, env=PREPARED_SOON)
    write_member(daemon, "step_1.pt", 32 * MIB)
    await_pool(daemon)
    write_member(daemon, "other", 80 * MIB)
    assert {tier for (tier,) in daemon.catalog("SELECT tier FROM copy")} == {"ram"}
    assert (daemon.path / "other").stat().st_size == 80 * MIB


@pytest.mark.crash
@pytest.mark.parametrize(("data_path", "role"), [("passthrough", "mount"), ("buffered", "mount"), ("passthrough", "mover")])
def test_the_death_of_a_process_loses_nothing(daemon: DaemonUnderTest, role: str) -> None:
    """P8: what was prepared is found again, and so are the sizes."""
    write_member(daemon, "step_1.pt")
    before = await_pool(daemon)
    fd = create_taking(daemon, "step_2.pt")
    data = os.urandom(SIZE)
    os.write(fd, data[:MIB])
    daemon.kill(role)
    os.write(fd, data[MIB:])
    os.close(fd)
    assert (daemon.path / "step_2.pt").read_bytes() == data
    assert before != await_pool(daemon)
    os.close(create_taking(daemon, "step_3.pt"))
    daemon.settle()
    assert (daemon.pfs / "step_2.pt").read_bytes() == data
