"""What open files do with their bytes, on both data paths (F4): overwrite, append, truncate, O_DIRECT, unlink and rename while open."""

import errno
import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_under_test import Area

pytestmark = [pytest.mark.root, pytest.mark.fuse]

MIB = 1 << 20


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_what_one_writes_another_reads_at_once(mount: Area) -> None:
    path = mount.path / "file"
    with open(path, "wb", buffering=0) as writer, open(path, "rb", buffering=0) as reader:
        for number in range(50):
            writer.write(b"%06d\n" % number)
            assert reader.read() == b"%06d\n" % number
            assert os.fstat(reader.fileno()).st_size == 7 * (number + 1)


def test_appenders_in_several_processes_lose_nothing(mount: Area) -> None:
    path = mount.path / "log"
    program = "import os, sys\nfd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
    program += "for n in range(200): os.write(fd, b'%s %03d\\n' % (sys.argv[2].encode(), n))\n"
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in ("x", "y", "z")]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    lines = path.read_text().splitlines()
    assert sorted(lines) == sorted(f"{name} {number:03d}" for name in "xyz" for number in range(200))


def test_truncate_by_name_and_by_descriptor(mount: Area) -> None:
    path = _write(mount.path / "file", b"x" * 10_000)
    os.truncate(path, 3)
    assert path.read_bytes() == b"xxx"
    os.truncate(path, 6)
    assert path.read_bytes() == b"xxx\0\0\0"
    with open(path, "r+b", buffering=0) as file, open(path, "rb", buffering=0) as reader:
        file.truncate(20_000)
        assert os.fstat(reader.fileno()).st_size == 20_000
        assert reader.read(20_001) == b"xxx" + bytes(19_997)
        file.truncate(1)
        assert os.fstat(reader.fileno()).st_size == 1
        assert os.pread(reader.fileno(), 10, 0) == b"x"
    os.truncate(path, 0)
    assert path.read_bytes() == b""


def test_truncating_a_sealed_file_makes_a_new_generation(mount: Area) -> None:
    path = _write(mount.path / "file", b"x" * 100_000)
    mount.settle()
    os.truncate(path, 50_000)
    assert path.read_bytes() == b"x" * 50_000
    mount.settle()
    assert (mount.pfs / "file").read_bytes() == b"x" * 50_000


def test_opening_with_o_trunc_empties_also_what_others_have_open(mount: Area) -> None:
    path = _write(mount.path / "file", b"old" * 1000)
    with open(path, "rb", buffering=0) as reader:
        assert reader.read(3) == b"old"
        with open(path, "wb", buffering=0) as writer:
            assert os.fstat(reader.fileno()).st_size == 0
            writer.write(b"new")
            assert os.pread(reader.fileno(), 100, 0) == b"new"
    assert path.read_bytes() == b"new"


def test_rewriting_a_sealed_file_in_place(mount: Area) -> None:
    path = _write(mount.path / "file", b"1" * MIB)
    mount.settle()
    with open(path, "r+b") as file:
        file.write(b"2")
    assert path.read_bytes() == b"2" + b"1" * (MIB - 1)
    mount.settle()
    assert (mount.pfs / "file").read_bytes() == b"2" + b"1" * (MIB - 1)


def test_o_direct(mount: Area) -> None:
    path = mount.path / "file"
    buffer = mmap.mmap(-1, 64 * 1024)
    buffer[:] = os.urandom(64 * 1024)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        assert os.pwritev(fd, [buffer], 4096) == 64 * 1024
        back = mmap.mmap(-1, 64 * 1024)
        assert os.preadv(fd, [back], 4096) == 64 * 1024
        assert back[:] == buffer[:]
    finally:
        os.close(fd)
    assert path.read_bytes() == bytes(4096) + buffer[:]


def test_an_unlinked_file_lives_as_long_as_it_is_open(mount: Area) -> None:
    path = _write(mount.path / "file", b"still here")
    fd = os.open(path, os.O_RDWR)
    os.unlink(path)
    assert os.pread(fd, 100, 0) == b"still here"
    assert os.pwrite(fd, b"and written", 10) == 11
    status = os.fstat(fd)
    assert (status.st_nlink, status.st_size) == (0, 21)
    os.ftruncate(fd, 5)
    assert os.pread(fd, 100, 0) == b"still"
    path.write_bytes(b"another")
    assert os.pread(fd, 100, 0) == b"still"
    os.close(fd)
    assert path.read_bytes() == b"another"


def test_renaming_over_an_open_file_leaves_it_to_its_readers(mount: Area) -> None:
    path = _write(mount.path / "file", b"old")
    with open(path, "rb") as reader:
        os.rename(_write(mount.path / "next", b"new"), path)
        assert reader.read() == b"old"
        assert path.read_bytes() == b"new"
        assert os.fstat(reader.fileno()).st_nlink == 0


def test_mknod_makes_an_empty_file_that_can_be_read_and_written(mount: Area) -> None:
    path = mount.path / "file"
    os.mknod(path, 0o100644)
    assert path.read_bytes() == b""
    assert path.stat().st_size == 0
    os.mknod(mount.path / "never opened", 0o100600)
    mount.settle()
    assert (mount.pfs / "never opened").read_bytes() == b""
    path.write_bytes(b"now")
    assert path.read_bytes() == b"now"


def test_truncating_to_the_same_length_begins_no_generation(mount: Area) -> None:
    path = _write(mount.path / "file", b"x" * 1000)
    mount.settle()
    os.truncate(path, 1000)
    assert path.read_bytes() == b"x" * 1000
    inode = path.stat().st_ino
    assert mount.catalog("SELECT generation FROM inode WHERE id = ?", inode) == [(1,)]


def test_fsync_fdatasync_and_fsync_of_directories(mount: Area) -> None:
    with open(mount.path / "file", "wb", buffering=0) as file:
        file.write(b"x" * 10_000)
        os.fsync(file.fileno())
        file.write(b"y" * 10_000)
        os.fdatasync(file.fileno())
    fd = os.open(mount.path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    assert (mount.path / "file").stat().st_size == 20_000


def test_times_follow_writes_and_utimens_even_while_open(mount: Area) -> None:
    path = mount.path / "file"
    with open(path, "wb", buffering=0) as file:
        file.write(b"x")
        os.utime(path, ns=(1_000_000_007, 2_000_000_009))
        assert path.stat().st_mtime_ns == 2_000_000_009
    status = path.stat()
    assert (status.st_atime_ns, status.st_mtime_ns) == (1_000_000_007, 2_000_000_009)
    with open(path, "ab") as file:
        file.write(b"y")
    assert path.stat().st_mtime_ns > 2_000_000_009
    assert path.stat().st_ctime_ns >= path.stat().st_mtime_ns - 50_000_000


def test_times_are_the_same_here_and_on_the_pfs(mount: Area) -> None:
    """P6: also of changes that come so close that the kernel gives them one time."""
    for number in range(60):
        fd = os.open(mount.path / f"file{number}", os.O_RDWR | os.O_CREAT)
        for act in (
            lambda fd: os.pwrite(fd, b"x" * 5000, 0),
            lambda fd: os.posix_fallocate(fd, 0, 20_000),
            lambda fd: os.ftruncate(fd, 7000),
        ):
            act(fd)
        os.close(fd)
        if number % 3 == 0:
            os.truncate(mount.path / f"file{number}", 7000)
        if number % 3 == 1:
            (mount.path / f"file{number}").write_bytes(b"anew")
    mount.settle()
    here = {path.name: path.stat().st_mtime_ns for path in mount.path.iterdir()}
    assert len(here) == 60 and {path.name: path.stat().st_mtime_ns for path in mount.pfs.iterdir()} == here


def test_many_files_with_many_handles_each(mount: Area) -> None:
    files = [open(mount.path / f"file{number % 20}", "a+b", buffering=0) for number in range(200)]  # noqa: SIM115
    for number, file in enumerate(files):
        file.write(b"%d " % number)
    for file in files:
        file.close()
    for number in range(20):
        assert (mount.path / f"file{number}").read_bytes() == b"".join(b"%d " % n for n in range(number, 200, 20))


def test_o_nonblock_never_meets_the_movers_lease(mount: Area) -> None:
    path = mount.path / "file"
    for number in range(30):
        path.write_bytes(b"x" * 200_000)  # Closed just now: the mover is about to seal it.
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, b"%02d" % number)
        os.close(fd)
        assert path.read_bytes()[:3] == b"%02dx" % number


def test_programs_run_from_the_mount(mount: Area) -> None:
    program = mount.path / "true"
    program.write_bytes(Path("/bin/true").read_bytes())
    program.chmod(0o755)
    script = mount.path / "script"
    script.write_text("#!/bin/sh\necho ran\n")
    script.chmod(0o755)
    assert subprocess.run([program], check=False, timeout=60).returncode == 0
    assert subprocess.run([script], capture_output=True, text=True, check=True, timeout=60).stdout == "ran\n"
    with open(program, "r+b") as file, pytest.raises(OSError, match=os.strerror(errno.ETXTBSY)):
        subprocess.run([program], check=False, timeout=60)
        file.close()


def test_thousands_of_files_open_at_once(mount: Area) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2000
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted + 500), max(hard, wanted + 500)))
    fds = []
    try:
        for number in range(wanted):
            fds.append(os.open(mount.path / f"file{number}", os.O_RDWR | os.O_CREAT))
        os.write(fds[-1], b"last")
        assert (mount.path / f"file{wanted - 1}").read_bytes() == b"last"
    finally:
        for fd in fds:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
