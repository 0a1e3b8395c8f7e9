"""The FUSE connection: mounting, taking over mounts that a crash left, answering INIT, and the end.

The connection is a descriptor of /dev/fuse. The mount lives as long as any process holds it; requests that no process answers wait. With
the table of requests in flight, the saved INIT request and the decisions made at the start (`Connection`), any later process can serve it.
Mounting uses mount(2), or fusermount3 for ordinary users.

Invariants:
- Only mounts of type fuse.ckptfs, or of a device that the caller names, are ever unmounted.

Crash safety: a crash between mount(2) and the answer to INIT leaves a dead mount ("transport endpoint is not connected"). The next start
finds it in mountinfo and takes it over.
"""

import contextlib
import errno
import json
import logging
import os
import select
import socket
import subprocess
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ckptfs import libc, limits, procfs
from ckptfs.bounded_waits import run_in_time, wait_ready
from ckptfs.config import Config
from ckptfs.errors import CkptfsError, InvalidArgument, TimedOut
from ckptfs.model import DataPath
from ckptfs_daemon.fuse import kernel, request_table
from ckptfs_daemon.fuse.kernel import Passthrough

FUSERMOUNT_WAIT_S = 20.0
log = logging.getLogger(__name__)
DEVICE = "/dev/fuse"
CONNECTIONS_DIR = Path("/sys/fs/fuse/connections")
INIT_WAIT_S = 10.0
INIT_BYTES_MAX = 65536
STALE_PROBE_WAIT_S = 5.0
BUSY_WAIT_S = 1.0
BUSY_POLL_S = 0.02
KERNEL_TOO_OLD = "this kernel has no FUSE passthrough (Linux 6.9 or later with CONFIG_FUSE_PASSTHROUGH)"
NO_CAPABILITY = "passthrough needs CAP_SYS_ADMIN, which this user does not have"


class CannotMount(CkptfsError):
    """The mount was refused. The message names the cause, the remedy what to do."""


def find_mount_at(point: Path) -> procfs.MountEntry | None:
    """Return the visible mount at `point`, the last one mounted there, or None."""
    found = [mounted for mounted in procfs.list_mount_entries() if mounted.mountpoint == point]
    return found[-1] if found else None


def unmount_at(point: Path, flags: int = 0) -> None:
    """Call umount2(2), or fusermount3 if not permitted. Raises OSError (EINVAL: nothing is mounted there)."""
    try:
        libc.unmount(point, flags | libc.UMOUNT_NOFOLLOW)
    except OSError as failure:
        if failure.errno != errno.EPERM or procfs.has_capability(procfs.CAP_SYS_ADMIN):
            raise
        _unmount_with_fusermount(point, lazy=bool(flags & libc.MNT_DETACH))


def mount_with_fusermount(name: str, point: Path, options: list[str]) -> int:
    """Mount through fusermount3. Returns the descriptor of the new connection. Raises CannotMount."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        wanted = ",".join([f"fsname={name}", "subtype=ckptfs", *options])
        command = ["fusermount3", "-o", wanted, "--", str(point)]
        done = _run_fusermount(command, theirs)
        if done.returncode != 0:
            words = done.stderr.decode(errors="replace").strip() or "it gave no reason"
            remedy = f"{point} must be yours and writable, and /dev/fuse open to everybody (chmod 666 /dev/fuse)"
            raise CannotMount(f"an ordinary user cannot mount {point}: {words}", remedy=remedy)
        descriptors = socket.recv_fds(ours, 16, 1)[1] if wait_ready(ours, select.POLLIN, FUSERMOUNT_WAIT_S) else []
        if not descriptors:
            raise CannotMount("fusermount3 did not hand over the connection")
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]


def _run_fusermount(command: list[str], channel: socket.socket | None) -> subprocess.CompletedProcess[bytes]:
    environment = dict(os.environ, LC_ALL="C")
    pass_fds: tuple[int, ...] = ()
    if channel is not None:
        environment["_FUSE_COMMFD"] = str(channel.fileno())
        pass_fds = (channel.fileno(),)
    try:
        return subprocess.run(command, env=environment, pass_fds=pass_fds, capture_output=True, timeout=FUSERMOUNT_WAIT_S, check=False)
    except FileNotFoundError as failure:
        raise CannotMount("an ordinary user can only mount through fusermount3, which is missing", remedy="apt install fuse3") from failure
    except subprocess.TimeoutExpired as failure:
        raise CannotMount(f"{command[0]} did not answer within {FUSERMOUNT_WAIT_S:g} s") from failure


def _unmount_with_fusermount(point: Path, *, lazy: bool) -> None:
    done = _run_fusermount(["fusermount3", "-u", *(["-z"] if lazy else []), "--", str(point)], None)
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip()
        raise OSError(errno.EBUSY if "busy" in words.lower() else errno.EINVAL, words, str(point))


@dataclass(frozen=True, slots=True)
class Connection:
    """A mounted filesystem; the process that holds `fd` and `table_fd` (see `request_table`) can serve it."""

    fd: int
    init_request: bytes
    data_path: DataPath
    data_path_reason: str
    mountpoint: Path
    device: str
    request_timeout_s: int = 0  # The kernel ends the connection if a request has no answer for so long; 0: never.

    table_fd: int = -1

    @property
    def connection_id(self) -> int:
        """The name below /sys/fs/fuse/connections."""
        return int(self.device.split(":")[1])

    def serialize(self) -> bytes:
        """Return everything but the descriptors, for a supervisor that takes over."""
        values = {
            "init_request": b64encode(self.init_request).decode(),
            "data_path": self.data_path.value,
            "data_path_reason": self.data_path_reason,
            "mountpoint": os.fsencode(self.mountpoint).hex(),
            "device": self.device,
            "request_timeout_s": self.request_timeout_s,
        }
        return json.dumps(values).encode()

    def close(self) -> None:
        os.close(self.fd)
        if self.table_fd >= 0:
            os.close(self.table_fd)

    def is_mounted(self) -> bool:
        return any(mounted.mountpoint == self.mountpoint and mounted.device == self.device for mounted in procfs.list_mount_entries())

    def has_ended(self) -> bool:
        """Return True if the kernel has ended the connection: no application waits for an answer any more."""
        poll = select.poll()
        poll.register(self.fd, 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))


def restore(fd: int, table_fd: int) -> Connection:
    """Return the connection that was saved in its table. Raises ValueError or KeyError if none was."""
    values = json.loads(request_table.read_saved(table_fd))
    return Connection(
        fd=fd,
        init_request=b64decode(values["init_request"]),
        data_path=DataPath(values["data_path"]),
        data_path_reason=values["data_path_reason"],
        mountpoint=Path(os.fsdecode(bytes.fromhex(values["mountpoint"]))),
        device=values["device"],
        request_timeout_s=values["request_timeout_s"],
        table_fd=table_fd,
    )


def connect(config: Config) -> Connection:
    """Mount `config.mountpoint` and answer INIT, or raise InvalidArgument or CannotMount without a mount."""
    unmount_stale(config.mountpoint)
    made = _connect(config)
    return replace(made, table_fd=request_table.create(made.serialize()))


def _connect(config: Config) -> Connection:
    reason = "asked for by data_path=buffered"
    if config.data_path is not DataPath.BUFFERED:
        outcome = _connect_with_passthrough(config)
        if isinstance(outcome, Connection):
            return outcome
        reason = outcome
        if config.data_path is DataPath.PASSTHROUGH:
            raise InvalidArgument(f"data_path=passthrough is not possible: {reason}", remedy="use data_path=auto or data_path=buffered")
    return _mount_and_answer_init(config, DataPath.BUFFERED, reason)


def _connect_with_passthrough(config: Config) -> Connection | str:
    """Return the connection, or the reason why passthrough is not possible."""
    if not procfs.has_capability(procfs.CAP_SYS_ADMIN):
        return NO_CAPABILITY
    connection = _mount_and_answer_init(config, DataPath.PASSTHROUGH, "the kernel reads and writes the tiers' files itself")
    if connection.data_path is not DataPath.PASSTHROUGH:
        return _unmount_and_close(connection, KERNEL_TOO_OLD)
    probe = os.memfd_create("ckptfs-probe")
    passthrough = Passthrough(connection.fd)
    try:
        passthrough.release(passthrough.register(probe))
    except OSError as failure:
        return _unmount_and_close(
            connection, NO_CAPABILITY if failure.errno == errno.EPERM else f"the kernel refuses it: {failure.strerror}"
        )
    finally:
        os.close(probe)
    return connection


def _unmount_and_close(connection: Connection, reason: str) -> str:
    unmount_at(connection.mountpoint, libc.MNT_DETACH)
    connection.close()
    return reason


def _mount_and_answer_init(config: Config, data_path: DataPath, reason: str) -> Connection:
    fd = _mount_fuse_unprivileged(config) if not procfs.has_capability(procfs.CAP_SYS_ADMIN) else _mount_fuse(config)
    try:
        request = _read_init(fd)
        init = kernel.parse_init(request)
        init = replace(init, flags=init.flags & ~kernel.parse_hidden_features(os.environ.get("CKPTFS_KERNEL_WITHOUT", "")))
        timeouts = procfs.get_fuse_timeouts()
        flags = kernel.choose_init_flags(init, data_path, is_single_node=not config.cluster, has_default_timeout=timeouts.default_s > 0)
        os.write(fd, kernel.build_init_reply(init, flags))
        mounted = find_mount_at(config.mountpoint)
        if mounted is None or mounted.fstype != procfs.CKPTFS_TYPE:
            raise CannotMount(f"{config.mountpoint} was mounted, but is no longer in the list of mounts")
    except BaseException:
        with contextlib.suppress(OSError):
            unmount_at(config.mountpoint, libc.MNT_DETACH)
        os.close(fd)
        raise
    if data_path is DataPath.PASSTHROUGH and not flags & kernel.Feature.PASSTHROUGH:
        data_path = DataPath.BUFFERED
    _raise_read_ahead(mounted.device)
    timeout_s = kernel.get_request_timeout_s(flags, timeouts)
    return Connection(fd, request, data_path, reason, config.mountpoint, mounted.device, timeout_s)


def _mount_fuse(config: Config) -> int:
    fd = _open_device()
    options = [f"fd={fd}", "rootmode=40000", "user_id=0", "group_id=0", "default_permissions"]
    options += ["allow_other"] if config.allow_other else []
    try:
        libc.mount(config.name, config.mountpoint, procfs.CKPTFS_TYPE, config.mount_flags, ",".join(options))
    except OSError as failure:
        os.close(fd)
        raise CannotMount(f"{config.mountpoint} cannot be mounted: {failure.strerror}") from failure
    return fd


def _open_device() -> int:
    try:
        return os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as failure:
        raise CannotMount(f"{DEVICE} cannot be opened: {failure.strerror}", remedy="load the module: modprobe fuse") from failure


def _mount_fuse_unprivileged(config: Config) -> int:
    options = ["default_permissions"] + (["ro"] if config.is_read_only else [])
    if config.allow_other:
        try:
            return mount_with_fusermount(config.name, config.mountpoint, [*options, "allow_other"])
        except CannotMount as failure:
            if "allow_other" not in str(failure):
                raise
            log.info("%s: only this user can use the mount: /etc/fuse.conf does not have user_allow_other", config.mountpoint)
    return mount_with_fusermount(config.name, config.mountpoint, options)


def _read_init(fd: int) -> bytes:
    if not wait_ready(fd, select.POLLIN, INIT_WAIT_S):
        raise CannotMount(f"the kernel sent no INIT within {INIT_WAIT_S:g} s")
    return os.read(fd, INIT_BYTES_MAX)


def _raise_read_ahead(device: str) -> None:
    """Raise the read-ahead above the default of 128 KiB, if permitted."""
    with contextlib.suppress(OSError):
        Path(f"/sys/class/bdi/{device}/read_ahead_kb").write_text(str(limits.READ_AHEAD_KIB))


def unmount_stale(point: Path) -> None:
    """Unmount what dead daemons left at `point`. Raises InvalidArgument if a live ckptfs is mounted there."""
    while (mounted := find_mount_at(point)) is not None:
        if mounted.fstype != procfs.CKPTFS_TYPE:
            return
        if not _is_dead_mount(point):
            remedy = f"umount {point} first, or choose another directory"
            raise InvalidArgument(f"{point} already has a ckptfs mounted ({mounted.source})", remedy=remedy)
        log.info("%s: unmounting it: a dead daemon (%s) left it mounted", point, mounted.source)
        unmount_at(point, libc.MNT_DETACH)


def _is_dead_mount(point: Path) -> bool:
    """Return True if the mount at `point` is not connected. A live one may hang, and is refused then."""
    try:
        run_in_time(lambda: os.statvfs(point), STALE_PROBE_WAIT_S, f"statvfs {point}")
    except (OSError, TimedOut) as failure:
        return failure.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def unmount_idle(point: Path, is_mounted: Callable[[], bool], busy_wait_s: float) -> None:
    """Unmount; try again for `busy_wait_s` while it is in use. Raises OSError (EBUSY: it still is)."""
    until_s = time.monotonic() + busy_wait_s
    while is_mounted():
        try:
            unmount_at(point)
            return
        except OSError as failure:
            if failure.errno != errno.EBUSY or time.monotonic() >= until_s:
                raise
        time.sleep(BUSY_POLL_S)


def unmount(connection: Connection) -> None:
    """Unmount. A mount in use is detached: it disappears, and open files work until they are closed.

    A call such as the statfs of `df` ends soon: BUSY_WAIT_S are left to it.
    """
    try:
        unmount_idle(connection.mountpoint, connection.is_mounted, BUSY_WAIT_S)
    except OSError as failure:
        if failure.errno != errno.EBUSY:
            raise
        log.warning("%s: is in use; it is detached now and ends when the last open file is closed", connection.mountpoint)
        unmount_at(connection.mountpoint, libc.MNT_DETACH)


def abort(connection: Connection) -> None:
    """End the connection. Every open request fails in its application."""
    if CONNECTIONS_DIR.is_dir() and not os.listdir(CONNECTIONS_DIR):
        # Containers often lack this mount of the kernel's control files.
        with contextlib.suppress(OSError):
            libc.mount("fusectl", CONNECTIONS_DIR, "fusectl", libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC)
    try:
        (CONNECTIONS_DIR / str(connection.connection_id) / "abort").write_text("1")
    except OSError:
        with contextlib.suppress(OSError):
            unmount_at(connection.mountpoint, libc.MNT_FORCE | libc.MNT_DETACH)
