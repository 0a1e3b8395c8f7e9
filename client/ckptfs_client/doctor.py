"""What `ckptfs doctor` looks at: kernel, FUSE, permissions, leases, memory, space, clock, and the mounts themselves. Changes nothing.

Each check is a function that gives findings; a check that cannot be made says so instead of failing the others.
"""

import contextlib
import ctypes
import fcntl
import gzip
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ckptfs import limits
from ckptfs_client.findings import BAD, GOOD, NOTE, Finding

KERNEL_PASSTHROUGH = (6, 9)
LIBFUSE_MIN = (3, 10)
MEMORY_BYTES_MIN = limits.GIB
SPACE_BYTES_MIN = limits.GIB
CLOCK_MIN = 1_735_689_600  # 2025-01-01: a clock before our own time was never set.
STATE_ROOT = Path("/var/lib/ckptfs")
HALT_POLL = Path("/sys/module/haltpoll/parameters/guest_halt_poll_ns")
HALT_POLL_NS = 200_000


def examine() -> list[Finding]:
    """Every check's findings."""
    found: list[Finding] = []
    for check in (_kernel, _device, _libfuse, _permissions, _daemon, _leases, _memory, _space, _clock, _halting, _mounts):
        try:
            found.extend(check())
        except OSError as failure:
            found.append(Finding(check.__name__.strip("_"), NOTE, f"could not be looked at: {failure}"))
    return found


def _kernel() -> Iterator[Finding]:
    release = os.uname().release
    match = re.match(r"(\d+)\.(\d+)", release)
    number = (int(match[1]), int(match[2])) if match else (0, 0)
    if number < KERNEL_PASSTHROUGH:
        words = f"{release} has no FUSE passthrough: the buffered data path is used"
        yield Finding("kernel", NOTE, words, "for full speed: Linux 6.9 or later")
        return
    setting = _kernel_setting("CONFIG_FUSE_PASSTHROUGH", release)
    if setting == "y":
        yield Finding("kernel", GOOD, f"{release} with FUSE passthrough")
    elif setting is None:
        yield Finding("kernel", GOOD, f"{release}; its configuration cannot be read, `ckptfs status` shows the data path in use")
    else:
        remedy = "for full speed: a kernel with CONFIG_FUSE_PASSTHROUGH=y"
        yield Finding("kernel", NOTE, f"{release} was built without FUSE passthrough: the buffered data path is used", remedy)


def _kernel_setting(name: str, release: str) -> str | None:
    """The value of a build setting of the running kernel: "" when it is off, None when nobody says."""
    for path in (Path("/proc/config.gz"), Path(f"/boot/config-{release}"), Path(f"/lib/modules/{release}/config")):
        with contextlib.suppress(OSError):
            text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            match = re.search(rf"^{name}=(\w+)$".encode(), text, re.MULTILINE)
            return match[1].decode() if match else ""
    return None


def _device() -> Iterator[Finding]:
    path = Path("/dev/fuse")
    if not path.exists():
        yield Finding("/dev/fuse", BAD, "is missing", "modprobe fuse; in a container: --device /dev/fuse")
    elif not os.access(path, os.R_OK | os.W_OK):
        yield Finding("/dev/fuse", BAD, "cannot be opened by you", "chmod 666 /dev/fuse")
    else:
        yield Finding("/dev/fuse", GOOD, "can be opened")


def _libfuse() -> Iterator[Finding]:
    try:
        library = ctypes.CDLL("libfuse3.so.3")
    except OSError:
        try:
            library = ctypes.CDLL("libfuse3.so.4")
        except OSError:
            yield Finding("libfuse", BAD, "is missing", "install libfuse3 (Debian: apt install libfuse3-3)")
            return
    library.fuse_pkgversion.restype = ctypes.c_char_p
    text = library.fuse_pkgversion().decode()
    number = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    old = number < LIBFUSE_MIN
    yield Finding("libfuse", BAD if old else GOOD, text, "install libfuse 3.10 or later" if old else "")


def _permissions() -> Iterator[Finding]:
    if os.geteuid() == 0:
        status = Path("/proc/self/status").read_text()
        match = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
        admin = match is not None and int(match[1], 16) >> 21 & 1
        remedy = "" if admin else "run it with CAP_SYS_ADMIN (containers: --cap-add SYS_ADMIN)"
        yield Finding("permissions", GOOD if admin else BAD, "root, and may mount" if admin else "root without the right to mount", remedy)
        return
    if shutil.which("fusermount3") is None:
        remedy = "install fuse3 (Debian: apt install fuse3), or mount as root"
        yield Finding("permissions", BAD, "an ordinary user, and fusermount3 is missing", remedy)
        return
    yield Finding("permissions", NOTE, "an ordinary user: the buffered data path is used", "for full speed: mount as root")
    with contextlib.suppress(OSError):
        if not re.search(r"^user_allow_other", Path("/etc/fuse.conf").read_text(), re.MULTILINE):
            yield Finding("allow_other", NOTE, "only you can use your mounts", "add user_allow_other to /etc/fuse.conf")


def _daemon() -> Iterator[Finding]:
    """Whether the daemon's packages are here; they are not imported, because that takes long."""
    from importlib.util import find_spec

    for package, remedy in (("ckptfs_daemon", "install ckptfs again"), ("pyfuse3", "install ckptfs again: pyfuse3 is missing")):
        if find_spec(package) is None:
            yield Finding("daemon", BAD, f"the Python package {package} is missing", remedy)
            return
    yield Finding("daemon", GOOD, "its packages are installed")


def _leases() -> Iterator[Finding]:
    """The mover seals files under read leases, where there are any."""
    directory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        fd = os.open(file.name, os.O_RDONLY)
        file.file.close()
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            yield Finding("leases", GOOD, "work on tmpfs")
        except OSError as failure:
            remedy = "sysctl fs.leases-enable=1"
            yield Finding("leases", NOTE, f"do not work ({failure.strerror}): files are sealed by comparing times instead", remedy)
        finally:
            os.close(fd)


def _memory() -> Iterator[Finding]:
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, available = int(fields["MemTotal"]) * 1024, int(fields["MemAvailable"]) * 1024
    words = f"{total / limits.GIB:.1f} GiB, {available / limits.GIB:.1f} GiB available"
    little = available < MEMORY_BYTES_MIN
    yield Finding("memory", NOTE if little else GOOD, words, "the RAM tier will be small: give nvme=DIRECTORY too" if little else "")
    with contextlib.suppress(OSError, ValueError, IndexError):
        group = Path("/proc/self/cgroup").read_text().splitlines()[-1].split("::")[1]
        limit = int(Path(f"/sys/fs/cgroup{group}/memory.max").read_text())
        if limit < total // 2:
            remedy = "give ram=SIZE below it, or start ckptfsd outside this control group"
            yield Finding("memory", NOTE, f"this control group may use {limit / limits.GIB:.1f} GiB only", remedy)


def _space() -> Iterator[Finding]:
    root = STATE_ROOT
    while not root.is_dir():
        root = root.parent
    figures = os.statvfs(root)
    free = figures.f_bavail * figures.f_frsize
    little = free < SPACE_BYTES_MIN
    words = f"{free / limits.GIB:.1f} GiB free below {root} for catalogs"
    yield Finding("space", NOTE if little else GOOD, words, "make room there, or give state=DIRECTORY on another disk" if little else "")


def _clock() -> Iterator[Finding]:
    if time.time() < CLOCK_MIN:
        yield Finding("clock", BAD, time.strftime("says %Y-%m-%d, which is long ago"), "set the clock (timedatectl set-ntp true)")
    else:
        yield Finding("clock", GOOD, time.strftime("says %Y-%m-%d %H:%M:%S"))


def _halting() -> Iterator[Finding]:
    """A guest whose idle processors are halted at once wakes one for each request of FUSE: 1,850 creates a second were measured, and 3,420
    with polling.
    """
    with contextlib.suppress(OSError, ValueError):
        if int(HALT_POLL.read_text()) == 0:
            words = "idle processors of this virtual machine are halted at once, which nearly doubles the time of a create"
            yield Finding("idle processors", GOOD, words, f"advice: echo {HALT_POLL_NS} > {HALT_POLL}")


def _mounts() -> Iterator[Finding]:
    from ckptfs_client import doctor_cluster
    from ckptfs_client.client import Client
    from ckptfs_client.failures import ClientError
    from ckptfs_client.mounts import list_mounts

    for mount in list_mounts():
        name = mount.name[:15]
        if not mount.socket.exists():
            remedy = f"umount -l {mount.mountpoint}, then mount it again; the log in its state directory says why the daemon ended"
            yield Finding(name, BAD, f"{mount.mountpoint}: no daemon serves it", remedy)
            continue
        try:
            with Client(mount, answer_s=5.0) as client:
                answer = client.get_status()
                cluster = client.get_cluster(probe=True) if answer.HasField("clique") else None
        except ClientError as failure:
            yield Finding(name, BAD, str(failure.args[0]), "look into its log: ckptfsd.log in its state directory, or the journal")
            continue
        verdict = GOOD if answer.health == "ok" else NOTE
        yield Finding(name, verdict, f"{mount.mountpoint}: {answer.health}, data path {answer.data_path} ({answer.data_path_reason})")
        for trouble in answer.troubles:
            yield Finding(name, NOTE, f"{trouble.path or trouble.where}: {trouble.what}", trouble.remedy)
        if cluster is not None:
            yield from doctor_cluster.check_cluster(name, cluster)
