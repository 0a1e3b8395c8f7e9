"""M1: a program below a memory limit is never killed for what it writes here, on both data paths, with and without NVMe."""

import contextlib
import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from daemon_under_test import PREPARED_SOON, Area, DaemonUnderTest, eventually
from memory_group import MemoryGroup, memory_group

from ckptfs import limits, procfs
from ckptfs.model import Tier
from ckptfs.tiers.prepared import PreparedFiles
from ckptfs.tiers.storage import TierStorage

pytestmark = [pytest.mark.root, pytest.mark.fuse]
LIMIT_BYTES = 64 * limits.MIB
FILE_BYTES = 256 * limits.MIB
SLACK_BYTES = 24 * limits.MIB

WRITE = """
import os, sys
path, flags, size, piece = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
fd = os.open(path, flags, 0o644)
data = bytes(range(256)) * (piece // 256)
for _ in range(size // piece):
    assert os.write(fd, data) == piece
os.close(fd)
"""
CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC

MAP = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o644)
size = int(sys.argv[2])
os.ftruncate(fd, size)
with mmap.mmap(fd, size) as memory:
    for offset in range(0, size, 1 << 20):
        memory[offset : offset + (1 << 20)] = b"m" * (1 << 20)
os.close(fd)
"""

MAP_TO_READ = """
import mmap, sys
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
    assert memory[0] == ord("a") and not any(memory[offset] for offset in range(4096, len(memory), 4096))
"""

FALLOCATE = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o644)
os.posix_fallocate(fd, 0, int(sys.argv[2]))
for _ in range(int(sys.argv[2]) >> 20):
    os.write(fd, b"f" * (1 << 20))
os.close(fd)
"""


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with memory_group(LIMIT_BYTES) as made:
        yield made


@pytest.fixture(params=["ram", "nvme"])
def node(request: pytest.FixtureRequest, data_path: str, share_daemon: Callable[..., Area]) -> Area:
    """A node without and with NVMe, which prepares no memory."""
    return share_daemon(data_path, pfs=None, prepared="0", **({"nvme": None} if request.param == "ram" else {}))


@pytest.fixture
def ram_node(data_path: str, share_daemon: Callable[..., Area]) -> Area:
    return share_daemon(data_path, pfs=None, prepared="0", nvme=None)


def pattern(size: int) -> bytes:
    return bytes(range(256)) * (size // 256)


@pytest.mark.parametrize("piece", [4096, 4 * limits.MIB])
def test_a_write_of_four_times_the_limit_is_survived(node: Area, group: MemoryGroup, piece: int) -> None:
    size = FILE_BYTES if piece > 4096 else FILE_BYTES // 2
    group.run(WRITE, node.path / "big", str(CREATE), str(size), str(piece))
    with open(node.path / "big", "rb") as file:
        assert file.read(limits.MIB) == pattern(limits.MIB)
        assert os.fstat(file.fileno()).st_size == size


def test_many_small_files_are_survived(node: Area, group: MemoryGroup) -> None:
    """Each would fit, all together do not: in RAM they stay charged after their close."""
    code = """
import sys
for number in range(300):
    with open(f"{sys.argv[1]}/{number}", "wb", 0) as file:
        for _ in range(4):
            file.write(bytes(65536))
"""
    group.run(code, node.path)
    assert len(os.listdir(node.path)) == 300


def test_what_was_written_is_not_charged_to_the_program_for_long(ram_node: Area, group: MemoryGroup) -> None:
    """A job that has room when it saves is not killed when it grows afterwards."""
    group.run(WRITE, ram_node.path / "a", str(CREATE), str(LIMIT_BYTES // 2), str(limits.MIB))
    group.run("held = bytearray(b'x') * int(__import__('sys').argv[1])", str(LIMIT_BYTES - SLACK_BYTES))


def test_a_limit_of_an_ancestor_counts(ram_node: Area, group: MemoryGroup) -> None:
    group.make_child(None).run(WRITE, ram_node.path / "a", str(CREATE), str(FILE_BYTES), str(limits.MIB))


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_APPEND, os.O_RDWR], ids=["append", "r+"])
def test_a_file_in_ram_that_somebody_else_wrote_can_be_written_on(ram_node: Area, group: MemoryGroup, flags: int) -> None:
    path = ram_node.path / "log"
    path.write_bytes(b"begun")
    ram_node.settle()
    group.run(WRITE, path, str(flags), str(FILE_BYTES), str(limits.MIB))
    assert path.stat().st_size == FILE_BYTES + (5 if flags & os.O_APPEND else 0)


@pytest.mark.parametrize("mode", ["rb", "r+b"])
def test_a_file_that_an_unlimited_program_has_open_can_be_written(ram_node: Area, group: MemoryGroup, mode: str) -> None:
    """The open handle keeps its way; the program below the limit gets another one beside it."""
    path = ram_node.path / "shared"
    path.write_bytes(b"a" * 4096)
    with open(path, mode) as held:
        group.run(WRITE, path, str(os.O_WRONLY), str(FILE_BYTES), str(limits.MIB))
        assert held.read(256) == pattern(256)
    assert path.read_bytes()[-256:] == pattern(256)


def test_an_unlimited_program_can_write_beside_a_limited_one(ram_node: Area, group: MemoryGroup) -> None:
    path = ram_node.path / "shared"
    with group.holding(path, os.O_WRONLY | os.O_CREAT) as write_mib:
        with open(path, "r+b") as other:
            other.seek(FILE_BYTES)
            other.write(b"end")
        write_mib(96)
    data = path.read_bytes()
    assert data[: 96 * limits.MIB] == b"w" * (96 * limits.MIB) and data.endswith(b"end")


def test_a_mapping_is_survived(node: Area, group: MemoryGroup) -> None:
    group.run(MAP, node.path / "mapped", str(FILE_BYTES))
    assert (node.path / "mapped").read_bytes() == b"m" * FILE_BYTES


def test_a_mapping_of_holes_is_survived_by_a_reader(node: Area, group: MemoryGroup) -> None:
    """A tmpfs adds a page wherever a mapping is touched, be it only to read."""
    path = node.path / "sparse"
    with open(path, "wb") as file:
        file.write(b"a")
        file.truncate(FILE_BYTES)
    group.run(MAP_TO_READ, path)
    node.settle()
    group.run(MAP_TO_READ, path)


def test_fallocate_is_survived(node: Area, group: MemoryGroup) -> None:
    group.run(FALLOCATE, node.path / "allocated", str(FILE_BYTES))
    assert (node.path / "allocated").read_bytes() == b"f" * FILE_BYTES


def test_a_limited_program_survives_a_death_of_the_mount_process(ram_node: Area, group: MemoryGroup) -> None:
    """M1, P8: its open file goes on by the same way."""
    path = ram_node.path / "long"
    with group.holding(path, CREATE) as write_mib:
        ram_node.kill("mount")
        for _ in range(4):
            write_mib(32)
    assert path.stat().st_size == 128 * limits.MIB


def test_writers_of_both_kinds_at_once(node: Area, group: MemoryGroup) -> None:
    """The way is chosen for each writer, not for the mount."""
    arguments = str(CREATE), str(FILE_BYTES // 2), str(limits.MIB)
    with ThreadPoolExecutor(2) as threads:
        limited = [threads.submit(group.run, WRITE, node.path / f"limited-{number}", *arguments) for number in range(2)]
        (node.path / "free").write_bytes(bytes(FILE_BYTES))
    for one in limited:
        one.result()
    assert (node.path / "limited-0").read_bytes() == (node.path / "limited-1").read_bytes()


# --- small writes, which the shim serves ------------------------------------------------------------------------------

SAME_PLACE = """
import os, sys
place = sys.argv[1]
first = os.open(f"{place}/first", os.O_WRONLY | os.O_CREAT)
os.write(first, b"1" * 4096)
for _ in range(4095):
    os.close(os.open(f"{place}/between", os.O_WRONLY | os.O_CREAT))
second = os.open(f"{place}/second", os.O_WRONLY | os.O_CREAT)
for _ in range(8):
    os.write(first, b"1" * 4096)
    os.write(second, b"2" * 4096)
os.close(second)
os.write(first, b"1" * 4096)
"""


@pytest.mark.parametrize("data_path", ["passthrough"])
def test_handles_with_one_place_in_the_shim_keep_their_bytes_apart(ram_node: Area, group: MemoryGroup) -> None:
    """P2, P7: the shim has 4096 places for writers, and handles are numbered in turn. On both data paths it serves this program."""
    group.run(SAME_PLACE, ram_node.path)
    assert (ram_node.path / "first").read_bytes() == b"1" * 4096 * 10
    assert (ram_node.path / "second").read_bytes() == b"2" * 4096 * 8


def test_writes_of_each_size_arrive(ram_node: Area, group: MemoryGroup) -> None:
    """P2: those up to 128 KiB are served by the shim."""
    code = "import sys\nwith open(sys.argv[1], 'wb', 0) as file:\n    for n in range(9):\n        file.write(bytes([n]) * int(sys.argv[2]))"
    for size in (1, 4096, 128 * 1024, 128 * 1024 + 1):
        group.run(code, ram_node.path / "a", str(size))
        assert (ram_node.path / "a").read_bytes() == b"".join(bytes([n]) * size for n in range(9))


# --- what is said (M2) ------------------------------------------------------------------------------------------------


def ways(node: Area) -> list[tuple[str, str, str, int]]:
    """(way, tier, reason, count) of the open handles, as `ckptfs status` reports them."""
    status: Any = json.loads(node.command("status", "--json", node.path).stdout)
    return [(row["way"], row["tier"], row["reason"], row["count"]) for row in status["handles"]]


def test_status_counts_handles_by_way_and_says_why(node: Area, data_path: str, group: MemoryGroup) -> None:
    """M2. No program with a limit writes to an NVMe that is a tmpfs by passthrough: that is memory, too."""
    nvme = node.options["nvme"]
    has_disk = nvme is not None and procfs.get_filesystem_type(Path(nvme)) not in procfs.MEMORY_FILESYSTEMS
    limited = "the program is below a memory limit"
    slow = "the mount uses the buffered data path"
    if data_path == "buffered":
        expected = [("buffered", "ram", slow, 3)]
    elif has_disk:
        expected = [("passthrough", "nvme", limited, 1), ("passthrough", "ram", "", 2)]
    else:
        expected = [("buffered", "ram", limited, 1), ("passthrough", "ram", "", 2)]
    with group.holding(node.path / "limited", CREATE), open(node.path / "free", "wb"), open(node.path / "free", "rb"):
        eventually(lambda: sorted(ways(node)) == expected, what=f"{expected}, not {ways(node)}")
        text = node.command("status", node.path).stdout
        assert all(f"{count} {way}, {tier}{f': {reason}' if reason else ''}" in text for way, tier, reason, count in expected)
    eventually(lambda: ways(node) == [], what="no handle is open")


@pytest.mark.alone
@pytest.mark.parametrize("data_path", ["passthrough"])
def test_df_and_status_say_what_the_service_needs(ram_node: Area) -> None:
    """M2: ram=3G and the processes."""
    for command in ("df", "status"):
        found: Any = json.loads(ram_node.command(command, "--json", ram_node.path).stdout)
        assert found["memory"]["needed_bytes"] == 4 * limits.GIB
        assert "the daemon needs 4.0 GiB (the RAM tier and its processes)" in ram_node.command(command, ram_node.path).stdout
    text = ram_node.command("df", "--checkpoint", "1M", "--keep", "2", ram_node.path).stdout
    assert "memory per checkpoint: 3 times its size on each node" in text
    fit: Any = json.loads(ram_node.command("df", "--checkpoint", "1M", "--json", ram_node.path).stdout)
    assert fit["checkpoint"]["factor"] == 2


def test_doctor_calls_a_limit_on_the_service_below_ram_bad(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """M2: that limit kills the daemon."""
    node = make_daemon(pfs=None, nvme=None)
    with memory_group(2 * limits.GIB) as small:
        for role in ("mount", "mover"):
            (small.directory / "cgroup.procs").write_text(str(node.pid(role)))
        result = node.command("doctor", "--json", check=False)
        found = [row for row in json.loads(result.stdout) if row["check"] == node.name[:15] and "kills" in row["what"]]
        assert result.returncode == 1 and len(found) == 1, result.stdout
        assert found[0]["verdict"] == "bad" and "4.0 GiB" in found[0]["remedy"] and str(small.directory) in found[0]["what"]
        node.unmount()


# --- prepared memory (X1) ---------------------------------------------------------------------------------------------

PREPARED_BYTES = 256 * limits.MIB


@pytest.fixture
def prepared_node(make_daemon: Callable[..., DaemonUnderTest]) -> DaemonUnderTest:
    """A node that expects files of 256 MiB, and has prepared two of them."""
    node = make_daemon("passthrough", pfs=None, nvme=None, ram="5G", prepared="1G")  # No room for a spare file.
    (node.path / "ckpt-1").write_bytes(bytes(PREPARED_BYTES))
    prepare_two(node)
    return node


def prepare_two(node: DaemonUnderTest) -> None:
    """Prepare what the daemon has not prepared yet, without a touch, which is faster."""
    node.settle()
    with contextlib.closing(TierStorage(Tier.RAM, node.state / "ram")) as ram, contextlib.closing(PreparedFiles(ram)) as pool:
        while pool.get_bytes() < 2 * PREPARED_BYTES:
            pool.add(PREPARED_BYTES)


def test_a_limited_program_writes_into_prepared_memory_and_does_not_pay(prepared_node: DaemonUnderTest, group: MemoryGroup) -> None:
    """M1, X1: by passthrough; the pages are charged to the service.

    On a busy machine, an open may not find the time to enlarge what is prepared, and its file takes the buffered way: another one is tried.
    """
    expected = [("prepared", "ram", "the program is below a memory limit", 1)]
    numbers = itertools.count(2)

    def write_one() -> bool:
        """Return True if the file took the prepared way. No file is charged to the program."""
        path = prepared_node.path / f"ckpt-{next(numbers)}"
        with group.holding(path, CREATE) as write_mib:
            eventually(lambda: len(ways(prepared_node)) == 1, what="only this file is open")
            is_prepared, before = ways(prepared_node) == expected, group.used_bytes
            write_mib(PREPARED_BYTES // limits.MIB)
            assert group.used_bytes - before < 8 * limits.MIB
        assert path.read_bytes() == b"w" * PREPARED_BYTES
        path.unlink()
        prepare_two(prepared_node)
        return is_prepared

    eventually(write_one, what=f"a handle is {expected}")


def test_the_first_file_of_a_limited_program_takes_a_spare_one(make_daemon: Callable[..., DaemonUnderTest], group: MemoryGroup) -> None:
    """M1: nobody knows its size; it goes by passthrough all the same, and the program does not pay."""
    node = make_daemon("passthrough", pfs=None, nvme=None, ram="4G")
    pool = PreparedFiles(TierStorage(Tier.RAM, node.state / "ram"))

    def add_spare() -> bool:
        """Without a touch, this is faster than the daemon, whose mover may remove unfinished files when it begins to prepare."""
        with contextlib.suppress(FileNotFoundError):
            return bool(pool.add(limits.TOP_UP_AHEAD_BYTES))
        return False

    eventually(add_spare, what="a spare file is prepared")
    pool.close()
    path = node.path / "first"
    with group.holding(path, CREATE) as write_mib:
        expected = [("prepared", "ram", "the program is below a memory limit", 1)]
        eventually(lambda: ways(node) == expected, what=f"{expected}, not {ways(node)}")
        write_mib(1024)
        assert group.used_bytes < 32 * limits.MIB
    node.settle()
    status = path.stat()
    assert status.st_blocks * 512 == status.st_size == 1024 * limits.MIB


ONE_WRITE = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o644)
size = int(sys.argv[2])
assert os.write(fd, mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) == size
os.ftruncate(fd, 0)
os.lseek(fd, 0, os.SEEK_SET)
for _ in range(size >> 20):
    os.write(fd, bytes(1 << 20))
os.close(fd)
"""


@pytest.mark.parametrize("data_path, tier", [("passthrough", "nvme"), ("passthrough", "pfs"), ("buffered", "nvme")])
def test_a_tier_that_lies_in_memory_is_not_filled_by_a_limited_program(
    data_path: str, tier: str, make_daemon: Callable[..., DaemonUnderTest], group: MemoryGroup
) -> None:
    """M1: the prepared file cannot be taken in RAM, and pages of the next tier, on a tmpfs, would be the program's for good."""
    others = {"pfs": None} if tier == "nvme" else {"nvme": None}
    node = make_daemon(data_path, ram="4G", env={"CKPTFS_FAULT": "prepare:take=ENOSPC@*", **PREPARED_SOON}, start=False, **others)
    place = node.root / tier
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0700,size=3G", "ckptfs-test", place], check=True)
    node.start()
    with contextlib.closing(TierStorage(Tier.RAM, node.state / "ram")) as ram, contextlib.closing(PreparedFiles(ram)) as pool:
        if data_path == "passthrough":
            eventually(lambda: [file.size_bytes for file in pool.list_files()] == [limits.TOP_UP_AHEAD_BYTES], what="a spare file")
    group.run(MAP, node.path / "mapped", str(FILE_BYTES))
    assert (node.path / "mapped").read_bytes() == b"m" * FILE_BYTES


def test_one_write_of_four_times_what_is_prepared_is_survived(prepared_node: DaemonUnderTest, group: MemoryGroup) -> None:
    """M1: nobody can add pages during one write(2), and a truncation frees those ahead. The buffer is never touched, hence not charged."""
    path = prepared_node.path / "ckpt-2"
    group.run(ONE_WRITE, path, str(4 * PREPARED_BYTES))
    assert path.stat().st_size == 4 * PREPARED_BYTES


def test_a_file_that_outgrows_its_prepared_memory_is_survived(prepared_node: DaemonUnderTest, group: MemoryGroup) -> None:
    """M1: eight times what was expected, at full speed, with 64 MiB allowed."""
    group.run(WRITE, prepared_node.path / "ckpt-2", str(CREATE), str(8 * PREPARED_BYTES), str(4 * limits.MIB))
    assert (prepared_node.path / "ckpt-2").stat().st_size == 8 * PREPARED_BYTES
    prepared_node.settle()
    status = (prepared_node.path / "ckpt-2").stat()
    assert status.st_blocks * 512 == status.st_size, "what was prepared ahead is trimmed"


def test_an_outgrown_file_goes_on_after_a_death_of_the_mount_process(prepared_node: DaemonUnderTest, group: MemoryGroup) -> None:
    """M1, P8."""
    path = prepared_node.path / "ckpt-2"
    with group.holding(path, CREATE) as write_mib:
        prepared_node.kill("mount")
        for _ in range(4):
            write_mib(PREPARED_BYTES // limits.MIB)
    assert path.stat().st_size == 4 * PREPARED_BYTES
    prepared_node.settle()


def test_a_second_limited_program_shares_prepared_memory(prepared_node: DaemonUnderTest, group: MemoryGroup) -> None:
    path = prepared_node.path / "ckpt-2"
    with group.holding(path, CREATE):
        group.run(WRITE, path, str(os.O_WRONLY), str(2 * PREPARED_BYTES), str(limits.MIB))
    assert path.stat().st_size == 2 * PREPARED_BYTES


def test_a_jump_beyond_what_is_prepared_is_survived(prepared_node: DaemonUnderTest, group: MemoryGroup) -> None:
    """The pages before it are added as well."""
    code = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
half = int(sys.argv[2])
os.ftruncate(fd, 2 * half)
for start in (half, 0):
    os.lseek(fd, start, os.SEEK_SET)
    for _ in range(half >> 20):
        os.write(fd, b"j" * (1 << 20))
os.close(fd)
"""
    group.run(code, prepared_node.path / "ckpt-2", str(2 * PREPARED_BYTES))
    assert (prepared_node.path / "ckpt-2").stat().st_size == 4 * PREPARED_BYTES
