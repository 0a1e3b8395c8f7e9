"""The checks of `ckptfs doctor`: kernel, FUSE, rights, leases, memory, space, clock, mounts, clusters.

A check is a function that yields findings. A check that cannot be made yields a note; the others go on. The checks of a cluster judge what
the daemon reported, and query nothing.
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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from ckptfs import cgroups, disk, limits, procfs
from ckptfs.quantities import format_count, format_duration, format_size
from ckptfs_client.errors import ClientError
from ckptfs_client.render import describe_service_memory, describe_survival, get_memory_remedy

if TYPE_CHECKING:
    from ckptfs.protocol import control_pb2 as pb

GOOD, NOTE, BAD = "ok", "note", "bad"
KERNEL_PASSTHROUGH = (6, 9)
KERNEL_MIN = (4, 20)
LIBFUSE_MIN = (3, 10)
LIBFUSE_NAMES = ("libfuse3.so.3", "libfuse3.so.4")
MEMORY_BYTES_MIN = limits.GIB
SPACE_BYTES_MIN = limits.GIB
CLOCK_MIN = 1_735_689_600
"""2025-01-01: a clock that shows an earlier time was never set."""
STATE_ROOT = Path("/var/lib/ckptfs")
HALT_POLL = Path("/sys/module/haltpoll/parameters/guest_halt_poll_ns")
HALT_POLL_NS = 200_000
CLOCK_OFFSET_S_MAX = 1.0
EXPIRES_SOON_DAYS = 30
ETCD_QUOTA_BYTES = 2 * limits.GIB
"""What etcd has unless it is told otherwise."""
ETCD_FULL_RATIO = 0.8
ETCD_REVISIONS_MAX = 1_000_000
NAMED_MAX = 5
DAY_S = 86400


class Finding(NamedTuple):
    """The result of a check: GOOD, NOTE (costs speed or safety) or BAD, a sentence, and a remedy."""

    check: Annotated[str, "what was looked at"]
    verdict: Annotated[str, "ok, note (works, with less) or bad"]
    what: Annotated[str, "what was found, as a sentence"]
    remedy: Annotated[str, "how to mend it; empty: there is nothing to mend"] = ""


def examine() -> list[Finding]:
    """Return the findings of all checks."""
    found: list[Finding] = []
    for check in _CHECKS:
        try:
            found.extend(check())
        except OSError as failure:
            found.append(Finding(check.__name__.removeprefix("_check_"), NOTE, f"could not be checked: {failure}"))
    return found


def _check_kernel() -> Iterator[Finding]:
    release = os.uname().release
    match = re.match(r"(\d+)\.(\d+)", release)
    number = (int(match[1]), int(match[2])) if match else (0, 0)
    if number < KERNEL_MIN:
        remedy = "use Linux 4.20 or later; an older number is fine if the distribution's kernel has FUSE 7.28, which mounting tells"
        yield Finding("kernel", NOTE, f"{release} may be too old to survive a kill of the daemon: mounting checks it", remedy)
        return
    yield Finding("kernel", GOOD, "survives a kill: yes (the supervisor keeps the requests in flight)")
    if number < KERNEL_PASSTHROUGH:
        words = f"{release} has no FUSE passthrough: the buffered data path is used"
        yield Finding("kernel", NOTE, words, "for full speed: Linux 6.9 or later")
        return
    setting = _read_passthrough_setting(release)
    if setting == "y":
        yield Finding("kernel", GOOD, f"{release} with FUSE passthrough")
    elif setting is None:
        yield Finding("kernel", GOOD, f"{release}; its configuration cannot be read, `ckptfs status` shows the data path in use")
    else:
        remedy = "for full speed: a kernel with CONFIG_FUSE_PASSTHROUGH=y"
        yield Finding("kernel", NOTE, f"{release} was built without FUSE passthrough: the buffered data path is used", remedy)


def _check_request_timeout() -> Iterator[Finding]:
    """Look whether the kernel ends mounts that are slow to answer, such as while the PFS hangs."""
    timeouts = procfs.get_fuse_timeouts()
    if timeouts.max_s:
        words = f"the kernel ends a mount if a request has no answer for {format_duration(timeouts.max_s)}, as while the PFS hangs"
        yield Finding("fuse timeout", NOTE, words, "sysctl fs.fuse.max_request_timeout=0, then mount again")
    elif timeouts.default_s:
        words = f"fs.fuse.default_request_timeout is {timeouts.default_s} s; ckptfs asks for the longest time instead"
        yield Finding("fuse timeout", GOOD, words)
    else:
        yield Finding("fuse timeout", GOOD, "the kernel waits for slow answers")


def _read_passthrough_setting(release: str) -> str | None:
    """Return CONFIG_FUSE_PASSTHROUGH of the running kernel: "" if it is off, None if it cannot be read."""
    for path in (Path("/proc/config.gz"), Path(f"/boot/config-{release}"), Path(f"/lib/modules/{release}/config")):
        with contextlib.suppress(OSError):
            text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            match = re.search(rb"^CONFIG_FUSE_PASSTHROUGH=(\w+)$", text, re.MULTILINE)
            return match[1].decode() if match else ""
    return None


def _check_device() -> Iterator[Finding]:
    path = Path("/dev/fuse")
    if not path.exists():
        yield Finding("/dev/fuse", BAD, "is missing", "modprobe fuse; in a container: --device /dev/fuse")
    elif not os.access(path, os.R_OK | os.W_OK):
        yield Finding("/dev/fuse", BAD, "cannot be opened by you", "chmod 666 /dev/fuse")
    else:
        yield Finding("/dev/fuse", GOOD, "can be opened")


def _check_libfuse() -> Iterator[Finding]:
    library = None
    for name in LIBFUSE_NAMES:
        with contextlib.suppress(OSError):
            library = library or ctypes.CDLL(name)
    if library is None:
        yield Finding("libfuse", BAD, "is missing", "install libfuse3 (Debian: apt install libfuse3-3)")
        return
    library.fuse_pkgversion.restype = ctypes.c_char_p
    text = library.fuse_pkgversion().decode()
    number = tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    old = number < LIBFUSE_MIN
    yield Finding("libfuse", BAD if old else GOOD, text, "install libfuse 3.10 or later" if old else "")


def _check_permissions() -> Iterator[Finding]:
    if os.geteuid() == 0:
        if procfs.has_capability(procfs.CAP_SYS_ADMIN):
            yield Finding("permissions", GOOD, "root, and may mount")
        else:
            remedy = "run it with CAP_SYS_ADMIN (containers: --cap-add SYS_ADMIN)"
            yield Finding("permissions", BAD, "root without the right to mount", remedy)
        return
    if shutil.which("fusermount3") is None:
        remedy = "install fuse3 (Debian: apt install fuse3), or mount as root"
        yield Finding("permissions", BAD, "an ordinary user, and fusermount3 is missing", remedy)
        return
    yield Finding("permissions", NOTE, "an ordinary user: the buffered data path is used", "for full speed: mount as root")
    with contextlib.suppress(OSError):
        if not re.search(r"^user_allow_other", Path("/etc/fuse.conf").read_text(), re.MULTILINE):
            yield Finding("allow_other", NOTE, "only you can use your mounts", "add user_allow_other to /etc/fuse.conf")


def _check_daemon() -> Iterator[Finding]:
    """Look for the daemon's packages. They are not imported, because that takes long."""
    from importlib.util import find_spec

    for package, remedy in (("ckptfs_daemon", "install ckptfs again"), ("pyfuse3", "install ckptfs again: pyfuse3 is missing")):
        if find_spec(package) is None:
            yield Finding("daemon", BAD, f"the Python package {package} is missing", remedy)
            return
    yield Finding("daemon", GOOD, "its packages are installed")


def _check_leases() -> Iterator[Finding]:
    """Try a read lease: the mover holds one while it seals a file."""
    directory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(dir=directory) as file, disk.closing(os.open(file.name, os.O_RDONLY)) as fd:
        file.file.close()
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            yield Finding("leases", GOOD, "work on tmpfs")
        except OSError as failure:
            remedy = "sysctl fs.leases-enable=1"
            yield Finding("leases", NOTE, f"do not work ({failure.strerror}): files are sealed by comparing times instead", remedy)


def _check_memory() -> Iterator[Finding]:
    total, available = procfs.get_memory()
    words = f"{total / limits.GIB:.1f} GiB, {available / limits.GIB:.1f} GiB available"
    little = available < MEMORY_BYTES_MIN
    yield Finding("memory", NOTE if little else GOOD, words, "the RAM tier will be small: give nvme=DIRECTORY too" if little else "")
    limit = cgroups.find_own_limit()
    if limit.is_known and limit.limit_bytes is not None:
        words = f"a daemon started here has a memory limit of {format_size(limit.limit_bytes)} ({limit.group})"
        remedy = f"give a ram= at least {format_size(limits.SERVICE_BYTES)} below it, or start ckptfsd outside this control group"
        yield Finding("memory", NOTE, words, remedy)


def _check_space() -> Iterator[Finding]:
    root = STATE_ROOT
    while not root.is_dir():
        root = root.parent
    figures = os.statvfs(root)
    free = figures.f_bavail * figures.f_frsize
    little = free < SPACE_BYTES_MIN
    words = f"{free / limits.GIB:.1f} GiB free below {root} for catalogs"
    yield Finding("space", NOTE if little else GOOD, words, "free space there, or give state=DIRECTORY on another disk" if little else "")


def _check_clock() -> Iterator[Finding]:
    if time.time() < CLOCK_MIN:
        yield Finding("clock", BAD, time.strftime("says %Y-%m-%d, which is long ago"), "set the clock (timedatectl set-ntp true)")
    else:
        yield Finding("clock", GOOD, time.strftime("says %Y-%m-%d %H:%M:%S"))


def _check_halting() -> Iterator[Finding]:
    """Look at the halt polling of a virtual machine.

    Without polling, each FUSE request wakes a halted processor: measured 1,850 creates a second, and 3,420 with polling.
    """
    with contextlib.suppress(OSError, ValueError):
        if int(HALT_POLL.read_text()) == 0:
            words = "idle processors of this virtual machine are halted at once, which nearly doubles the time of a create"
            yield Finding("idle processors", GOOD, words, f"advice: echo {HALT_POLL_NS} > {HALT_POLL}")


def _check_mounts() -> Iterator[Finding]:
    from ckptfs_client.client import Client, ask_all
    from ckptfs_client.mounts import list_mounts

    def ask(client: Client) -> tuple["pb.Status", "pb.Cluster | None"]:
        answer = client.get_status()
        return answer, client.get_cluster(probe=True) if answer.HasField("clique") else None

    for mount, asked in ask_all(list_mounts(), ask):
        name = mount.name
        if isinstance(asked, ClientError):
            is_served = mount.socket.exists() and not mount.has_ended
            what = str(asked.args[0]) if is_served else f"{mount.mountpoint}: no daemon serves it"
            again = f"mount {mount.name} again with the same options, which takes over the mountpoint, or umount -l {mount.mountpoint}"
            log = "ckptfsd.log in its state directory, or the journal, says why"
            yield Finding(name, BAD, what, log if is_served else f"{again}; {log}")
            continue
        answer, cluster = asked
        verdict = GOOD if answer.health == "ok" else NOTE
        yield Finding(name, verdict, f"{mount.mountpoint}: {answer.health}, data path {answer.data_path} ({answer.data_path_reason})")
        yield Finding(name, NOTE if answer.request_timeout_s else GOOD, describe_survival(answer))
        yield check_service_memory(name, answer.memory)
        for trouble in answer.troubles:
            yield Finding(name, NOTE, f"{trouble.path or trouble.where}: {trouble.what}", trouble.remedy)
        if cluster is not None:
            yield from check_cluster(name, cluster)


_CHECKS = (
    _check_kernel, _check_request_timeout, _check_device, _check_libfuse, _check_permissions, _check_daemon, _check_leases,
    _check_memory, _check_space, _check_clock, _check_halting, _check_mounts,
)  # fmt: skip


def check_service_memory(name: str, memory: "pb.ServiceMemory") -> Finding:
    """Return the finding on the memory limit of a mount's daemon (M2). Pure."""
    words = describe_service_memory(memory).partition(": the kernel kills")[0]
    if not memory.limit_known:
        return Finding(name, NOTE, words, "see that the limits of its container and of those around it are above that")
    if memory.limit_bytes and memory.limit_bytes < memory.needed_bytes:
        return Finding(name, BAD, f"{words}: the kernel kills the daemon when the RAM tier fills", get_memory_remedy(memory))
    return Finding(name, GOOD, words)


# --- cluster ----------------------------------------------------------------------------------------------------------


def check_cluster(name: str, cluster: "pb.Cluster") -> Iterator[Finding]:
    """Yield the findings of a mount's cluster under `name`. Pure."""
    yield _check_etcd(name, cluster)
    if cluster.HasField("etcd_health"):
        yield from _check_etcd_health(name, cluster.etcd_health)
    living = [member for member in cluster.members if member.alive]
    yield _check_nodes(name, cluster, living)
    yield from _check_node_clocks(name, living)
    yield from _check_failure_domains(name, cluster, living)
    yield from _check_ranks(name, living)
    yield from _check_certificate(name, cluster)


def _check_etcd(name: str, cluster: "pb.Cluster") -> Finding:
    if cluster.etcd_trouble:
        remedy = "see that etcd runs at that address and that no firewall blocks it; nothing is lost meanwhile"
        return Finding(name, BAD, f"etcd at {cluster.etcd}: {cluster.etcd_trouble}", remedy)
    if cluster.island:
        return Finding(name, NOTE, "etcd answers; some changes of this node are not published yet", "wait a moment")
    return Finding(name, GOOD, f"etcd at {cluster.etcd} answers")


def _check_etcd_health(name: str, health: "pb.EtcdHealth") -> Iterator[Finding]:
    """Yield findings for etcd's operator: alarms, quota, revisions, TLS, authentication of clients."""
    if health.alarms:
        remedy = "free space (compact, then etcdctl defrag), then `etcdctl alarm disarm`"
        yield Finding(name, BAD, f"etcd has raised {', '.join(health.alarms)}: it may accept no changes", remedy)
    quota = health.quota_bytes or ETCD_QUOTA_BYTES
    if health.size_bytes > ETCD_FULL_RATIO * quota:
        words = f"etcd has {format_size(health.size_bytes)} of a quota of {format_size(quota)}"
        yield Finding(name, NOTE, words, "compact it and run `etcdctl defrag`, or raise --quota-backend-bytes")
    if not health.compacted and health.revision > ETCD_REVISIONS_MAX:
        remedy = "start etcd with --auto-compaction-mode=periodic --auto-compaction-retention=1h"
        yield Finding(name, NOTE, f"etcd keeps all {health.revision} revisions since its start, which fills its quota in time", remedy)
    if health.remote and not health.tls:
        words = "etcd is used without TLS (etcd_insecure): anybody on the network can change the files"
        yield Finding(name, NOTE, words, "give etcd_ca=FILE")
    elif health.remote and health.open:
        remedy = "start etcd with --client-cert-auth, and give etcd_cert= and etcd_key="
        yield Finding(name, BAD, "etcd accepts clients without a certificate: whoever reaches it can change the files", remedy)


def _check_nodes(name: str, cluster: "pb.Cluster", living: list["pb.Member"]) -> Finding:
    silent = [member for member in living if member.probe_error]
    if silent:
        words = "; ".join(f"{member.name} at {member.address}: {member.probe_error}" for member in silent[:NAMED_MAX])
        remedy = "give address= on that node so that this one reaches it, and open the port of listen="
        if any("keys" in member.probe_error for member in silent):
            remedy = "give each node its own keys; if they were revoked, issue new ones and restart the node"
        return Finding(name, BAD, f"{format_count(len(silent), 'node')} of {len(living)} cannot be reached: {words}", remedy)
    if len(living) < cluster.replication_factor:
        remedy = "start more nodes, or give a smaller replication_factor"
        return Finding(name, NOTE, f"{format_count(len(living), 'node')} alive, and {cluster.replication_factor} copies are wanted", remedy)
    asked = [member.rtt_s for member in living if member.probed]
    slowest = f", the slowest within {1000 * max(asked):.1f} ms" if asked else ""
    return Finding(name, GOOD, f"{format_count(len(asked), 'other node')} answer{'s' if len(asked) == 1 else ''}{slowest}")


def _check_node_clocks(name: str, living: list["pb.Member"]) -> Iterator[Finding]:
    off = [member for member in living if member.probed and not member.probe_error and abs(member.clock_offset_s) > CLOCK_OFFSET_S_MAX]
    if off:
        words = ", ".join(
            f"{one.name} by {format_duration(abs(one.clock_offset_s))} {'ahead' if one.clock_offset_s > 0 else 'behind'}"
            for one in off[:NAMED_MAX]
        )
        remedy = "let NTP set them (timedatectl set-ntp true): of two files closed under one name the later one wins"
        yield Finding(name, NOTE, f"clocks differ from this node's: {words}", remedy)


def _check_failure_domains(name: str, cluster: "pb.Cluster", living: list["pb.Member"]) -> Iterator[Finding]:
    domains = {member.domain for member in living}
    if len(living) > 1 and len(domains) == 1:
        words = f"all {len(living)} nodes are in the failure domain {living[0].domain}: no file gets the level clique"
        yield Finding(name, NOTE, words, "set failure_domain= by what fails together (rack, switch), or leave it out")
    elif len(living) >= cluster.replication_factor > len(domains):
        words = f"{cluster.replication_factor} copies are wanted, and there are {len(domains)} failure domains"
        remedy = "give more domains, or a smaller replication_factor: some copies share a domain, and the level clique needs fewer of them"
        yield Finding(name, NOTE, words, remedy)


def _check_ranks(name: str, living: list["pb.Member"]) -> Iterator[Finding]:
    twice = sorted(rank for rank, count in Counter(member.rank for member in living).items() if count > 1)
    if twice:
        ranks = ", ".join(map(str, twice[:NAMED_MAX]))
        words = f"nodes share the rank{'s' if len(twice) > 1 else ''} {ranks}: their peers then depend on the order in which they joined"
        yield Finding(name, NOTE, words, "give each node its own rank, such as rank=$SLURM_NODEID")


def _check_certificate(name: str, cluster: "pb.Cluster") -> Iterator[Finding]:
    if not cluster.keys:
        return
    days = cluster.keys_expire_s / DAY_S
    if days < EXPIRES_SOON_DAYS:
        words = f"the certificate in {cluster.keys} {f'expires in {days:.0f} days' if days > 0 else 'has expired'}"
        remedy = f"ckptfs keys issue DIR {cluster.node} in a fresh directory, copy it there, and start ckptfs again"
        yield Finding(name, NOTE if days > 0 else BAD, words, remedy)
    else:
        yield Finding(name, GOOD, f"the certificate in {cluster.keys} is good for {days:.0f} days")
