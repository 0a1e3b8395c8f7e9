"""fio with verification, dbench and stress-ng's filesystem stressors. F4, P7.

Left out of stress-ng: those that exercise nothing of a filesystem's (cpu, vm), those that need mounts or devices of their own, and getdent,
which walks through all of /tmp, /proc and /sys instead of the directory it is given. Every stressor in the list passes on tmpfs.
"""

import pytest
from daemon_under_test import Area
from programs import need, run

pytestmark = pytest.mark.apps

FIO = """
[global]
directory={directory}
size={size}m
randseed=7
verify=crc32c
verify_fatal=1
do_verify=1
group_reporting
end_fsync=1
[{name}]
ioengine={engine}
rw={pattern}
bs={block}
direct={direct}
numjobs=2
iodepth=8
"""

OF_BYTES = (
    "aio", "copy-file", "fallocate", "fpunch", "hdd", "io", "iomix", "mmap", "msync", "open", "revio", "seek", "sendfile", "sync-file",
)  # fmt: skip
# How bytes travel plays no part.
OF_NAMES = (
    "access", "chattr", "chdir", "chmod", "chown", "dentry", "dir", "dirdeep", "dup", "fcntl", "filename", "flock", "fstat", "lease",
    "link", "locka", "lockf", "lockofd", "mknod", "rename", "symlink", "touch", "utime", "xattr",
)  # fmt: skip
TOGETHER = 4
# What they write at most; by default it would be a GiB.
SIZES = ("--hdd-bytes", "64m", "--iomix-bytes", "64m", "--fallocate-bytes", "64m")


@pytest.mark.parametrize(
    ("engine", "pattern", "block", "direct"),
    [
        ("psync", "randwrite", "4k", 0),
        ("psync", "write", "1m", 0),
        ("mmap", "randwrite", "4k", 0),
        ("libaio", "randwrite", "64k", 1),
        ("psync", "randrw", "13k", 0),
    ],
)
def test_fio_finds_what_it_wrote(mount: Area, engine: str, pattern: str, block: str, direct: int) -> None:
    """F4, P7: random and sequential, by system calls, mappings and O_DIRECT, two jobs at once."""
    need("fio")
    job = mount.daemon.root / "job.fio"
    job.write_text(FIO.format(directory=mount.path, size=16, name=engine, engine=engine, pattern=pattern, block=block, direct=direct))
    run("fio", "--output-format=terse", job, cwd=mount.daemon.root)


def test_dbench(mount: Area) -> None:
    """F4: two clients of a file server."""
    need("dbench")
    assert "Throughput" in run("dbench", "-D", mount.path, "-t", "3", "2")


@pytest.mark.parametrize(
    ("data_path", "stressors"),
    [
        (path, stressors[first : first + TOGETHER])
        for path, stressors in (("passthrough", OF_BYTES), ("buffered", OF_BYTES), ("passthrough", OF_NAMES))
        for first in range(0, len(stressors), TOGETHER)
    ],
)
def test_stress_ng(mount: Area, stressors: tuple[str, ...]) -> None:
    """F4: a second of each, some of them at once."""
    need("stress-ng")
    words = [word for name in stressors for word in (f"--{name}", "1")]
    # 7: it ended a process of its own within its count of operations, which is of no interest here.
    stress = 'stress-ng "$@" || [ $? = 7 ]'
    assert "] successful run" in run("sh", "-c", stress, "sh", *words, "-t", "1", "--temp-path", mount.path, "--verify", *SIZES)
