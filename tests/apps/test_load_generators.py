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

STRESSORS = (
    "access", "aio", "chattr", "chdir", "chmod", "chown", "copy-file", "dentry", "dir", "dirdeep", "dup", "fallocate", "fcntl",
    "filename", "flock", "fpunch", "fstat", "hdd", "io", "iomix", "lease", "link", "locka", "lockf", "lockofd", "mknod", "mmap",
    "msync", "open", "rename", "revio", "seek", "sendfile", "symlink", "sync-file", "touch", "utime", "xattr",
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


@pytest.mark.parametrize("first", range(0, len(STRESSORS), TOGETHER))
def test_stress_ng(mount: Area, first: int) -> None:
    """F4: a second of each, some of them at once."""
    need("stress-ng")
    stressors = [word for name in STRESSORS[first : first + TOGETHER] for word in (f"--{name}", "1")]
    run("stress-ng", *stressors, "-t", "1", "--temp-path", mount.path, "--verify", *SIZES)
