"""The helpers of mount(8) and umount(8), and how a daemon is started.

`/sbin/mount.ckptfs NAME DIR [-sfnv] [-o OPTIONS]` starts the daemon and returns when the mount answers. Exit codes: 0 mounted, 1 wrong
usage, 2 system error, 32 the mount failed.

`/sbin/umount.ckptfs DIR [-flnrv]` has the daemon write everything back while the mount serves, unmounts, waits until the daemon has ended,
and prints what is left, where it lies and how to go on. It names an obstacle as soon as it is known. With -f and -l it unmounts at once.
Exit codes: 0 unmounted, 1 wrong usage, 32 failed (busy, not mounted, interrupted).

Crash safety: the daemon goes on without its helper, and drains and ends by itself. A second mount is refused by the daemon's lock.
"""

import argparse
import contextlib
import errno
import fcntl
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ckptfs import __version__, config, disk, libc, limits, mount_record, procfs, runtime_dir
from ckptfs.bounded_waits import wait_ready
from ckptfs.config import Config
from ckptfs.errors import ConfigError
from ckptfs.quantities import format_duration
from ckptfs_client.errors import ClientError
from ckptfs_client.mounts import find, list_mounts

if TYPE_CHECKING:
    from ckptfs.protocol import control_pb2 as pb
    from ckptfs_client.client import Client

DAEMON_READY_WAIT_S = limits.READY_WAIT_S + 30.0
USAGE, SYSTEM, FAILED = 1, 2, 32
MOUNT_EXIT_CODES = {0: "mounted", USAGE: "wrong usage", SYSTEM: "system error", FAILED: "the mount failed"}
UMOUNT_EXIT_CODES = {0: "unmounted", USAGE: "wrong usage", FAILED: "it failed (busy, not mounted, interrupted)"}
LOG = "ckptfsd.log"
LOG_BYTES_MAX = 16 * limits.MIB
LOCK_POLL_S = 0.1
DRAIN_POLL_S = 0.1
STATUS_WAIT_S = 1.0
GRACE_S = limits.STOP_WAIT_S
BLOCKED_S = limits.DRAIN_SILENCE_S
DRAIN_S_MIN = 0.1


def mount_main(arguments: Sequence[str] | None = None) -> int:
    """Run mount.ckptfs or mount.fuse.ckptfs; return the exit code."""
    asked = _parse(build_mount_parser(), arguments)
    asked.name = _undo_expansion(asked.name)
    try:
        options = config.parse_options(",".join(asked.options))
        if asked.sloppy:
            options = {key: value for key, value in options.items() if config.is_known_option(key)}
        configured = config.load(asked.name, Path(asked.directory), options)
    except ConfigError as failure:
        return _print_error(failure.args[0], failure.remedy, USAGE)
    if asked.fake:
        return 0
    try:
        _wait_for_previous_daemon(configured)
        return _start_daemon(configured, options, verbose=asked.verbose)
    except OSError as failure:
        return _print_error(f"the daemon cannot be started: {failure}", "", SYSTEM)


def _undo_expansion(name: str) -> str:
    """Return the name as it was typed: mount(8) makes a path of it if there is such a file here."""
    path = Path(name)
    return path.name if path.is_absolute() and path.parent == Path(os.path.realpath(os.curdir)) and os.path.lexists(path) else name


def build_mount_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line of mount.ckptfs."""
    parser = argparse.ArgumentParser(prog="mount.ckptfs", description="Mount ckptfs; called by mount(8).", exit_on_error=False)
    parser.add_argument("name", help="the name of the mount; its catalog is in /var/lib/ckptfs/NAME")
    parser.add_argument("directory", help="the mountpoint")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="OPTIONS", help="see /etc/ckptfs/ckptfs.toml.sample")
    parser.add_argument("-s", dest="sloppy", action="store_true", help="ignore unknown options")
    parser.add_argument("-f", dest="fake", action="store_true", help="check the options, mount nothing")
    parser.add_argument("-n", dest="no_table", action="store_true", help="ignored")
    parser.add_argument("-v", dest="verbose", action="store_true", help="report the mount")
    parser.add_argument("-t", dest="type", help="ignored")
    parser.add_argument("-V", "--version", action="version", version=f"mount.ckptfs {__version__}")
    return parser


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    try:
        return parser.parse_args(arguments)
    except argparse.ArgumentError as failure:
        sys.exit(_print_error(str(failure), "", USAGE))
    except SystemExit as end:
        sys.exit(USAGE if end.code else 0)


def _wait_for_previous_daemon(configured: Config) -> None:
    """Wait while an unmounted daemon of this state directory drains. The new one refuses a mounted one."""
    until = time.monotonic() + DAEMON_READY_WAIT_S
    while time.monotonic() < until and _is_locked(configured.state / "lock"):
        mountpoints = {str(configured.mountpoint), runtime_dir.load_processes(configured.state).get("mountpoint")}
        if any(str(mount.mountpoint) in mountpoints or mount.name == configured.name for mount in list_mounts()):
            return
        threading.Event().wait(LOCK_POLL_S)


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _start_daemon(configured: Config, options: dict[str, str], *, verbose: bool) -> int:
    """Start the daemon, wait until it is ready, and return the exit code."""
    ready_fd, daemon_fd = os.pipe()
    command = build_daemon_command(configured.name, configured.mountpoint, format_options(options), daemon_fd)
    with disk.closing(daemon_fd), _open_log(configured) as log:
        daemon = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True, pass_fds=[daemon_fd],
        )  # fmt: skip
    answer = read_ready_line(ready_fd)
    if answer == "ok":
        if verbose:
            print(f"mount.ckptfs: {configured.name} mounted on {configured.mountpoint} by process {daemon.pid}")
        return 0
    if answer.startswith("error: "):
        return _print_error(answer.removeprefix("error: "), "", FAILED)
    with contextlib.suppress(ProcessLookupError):
        daemon.terminate()
    what = "ended without a message" if daemon.poll() is not None else f"did not answer within {DAEMON_READY_WAIT_S:.0f} s"
    return _print_error(f"the daemon {what}", f"see {configured.state / LOG}, or the journal", FAILED)


def _is_logging_to_journal() -> bool:
    """Return True if stderr is the journal stream that systemd named."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    found = os.fstat(2)
    return (device, inode) == (str(found.st_dev), str(found.st_ino))


@contextlib.contextmanager
def _open_log(configured: Config) -> Iterator[IO[Any]]:
    """Open the daemon's log: the journal if this helper logs there, else a file in the state directory."""
    if _is_logging_to_journal():
        yield sys.stderr
        return
    configured.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = configured.state / LOG
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES_MAX:
            os.replace(path, path.with_suffix(".log.1"))
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "ab") as log:
        yield log


def _print_error(what: str, remedy: str, code: int, program: str = "mount.ckptfs") -> int:
    """Print an error, and return the exit code."""
    print(f"{program}: {what}" + (f"; {remedy}" if remedy else ""), file=sys.stderr)
    return code


# --- the daemon (the lab starts its daemons with these, too) ----------------------------------------------------------


def build_daemon_command(name: str, mountpoint: Path, options: str, ready_fd: int) -> list[str]:
    """Return the command line of a daemon that reports on the descriptor whether it is ready."""
    # -P: the working directory of the caller must not provide Python modules to root.
    line = [sys.executable, "-P", "-m", "ckptfs_daemon", name, str(mountpoint), "--ready-fd", str(ready_fd)]
    return [*line, "-o", options] if options else line


def format_options(options: dict[str, str]) -> str:
    """Join options into one -o string."""
    return ",".join(f"{key}={value.replace(',', chr(92) + ',')}" if value else key for key, value in options.items())


def read_ready_line(ready_fd: int) -> str:
    """Return the first line of the daemon; empty if it ends or is late. Closes the descriptor."""
    until = time.monotonic() + DAEMON_READY_WAIT_S
    data = b""
    with os.fdopen(ready_fd, "rb", buffering=0) as pipe:
        while not data.endswith(b"\n") and (left_s := until - time.monotonic()) > 0:
            if wait_ready(ready_fd, select.POLLIN, left_s):
                piece = pipe.read(4096)
                if not piece:
                    break
                data += piece
    return data.decode(errors="replace").strip()


# --- umount -----------------------------------------------------------------------------------------------------------


def umount_main(arguments: Sequence[str] | None = None) -> int:
    """Run umount.ckptfs or umount.fuse.ckptfs; return the exit code."""
    asked = _parse(build_umount_parser(), arguments)
    try:
        mount = find(Path(asked.directory))
        if mount.mountpoint != Path(os.path.abspath(asked.directory)) and mount.mountpoint != Path(os.path.realpath(asked.directory)):
            raise ClientError(f"{asked.directory} is not a mountpoint", remedy=f"the mount is {mount.mountpoint}")
    except ClientError as failure:
        return _print_error(str(failure), "", FAILED, "umount.ckptfs")
    from ckptfs_client.client import Client

    others = [str(one.mountpoint) for one in list_mounts() if one.device == mount.device and one.mountpoint != mount.mountpoint]
    with Client(mount, answer_s=STATUS_WAIT_S) as client:
        before = None if asked.lazy or others else _get_status(client)
        if before is not None and not asked.force:
            if _is_busy(mount.mountpoint):
                what = f"{mount.mountpoint} is busy: a process has a file open there or works in it"
                return _print_error(what, f"`ckptfs who {before.mountpoint}` names it", FAILED, "umount.ckptfs")
            try:
                _drain_attached(client, before)
            except KeyboardInterrupt:
                what = f"interrupted; {mount.mountpoint} is still mounted"
                return _print_error(what, "the write-back goes on", FAILED, "umount.ckptfs")
        flags = [flag for flag, given in (("-f", asked.force), ("-l", asked.lazy)) if given]
        ours = ["umount", "-i", *flags, str(mount.mountpoint)]
        command = ours if os.geteuid() == 0 else ["fusermount3", "-u", *(["-z"] if asked.lazy else []), str(mount.mountpoint)]
        if subprocess.run(command, check=False).returncode != 0:
            return FAILED
        if others:
            print(f"umount.ckptfs: {mount.name} goes on: it is also mounted at {', '.join(others)}", file=sys.stderr)
        elif before is not None:
            _wait_until_drained(client, before)
        elif mount.has_ended and (state := mount.load_registered("state")):
            _print_leftovers(Path(state))
        elif not asked.lazy:
            print(f"umount.ckptfs: the daemon of {mount.name} does not answer: it may still write back; its log says more", file=sys.stderr)
    return 0


def build_umount_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line of umount.ckptfs."""
    about = "Unmount ckptfs and wait for its write-back; called by umount(8)."
    parser = argparse.ArgumentParser(prog="umount.ckptfs", description=about)
    parser.add_argument("directory", help="the mountpoint")
    parser.add_argument("-f", dest="force", action="store_true", help="unmount even if the daemon hangs")
    parser.add_argument("-l", dest="lazy", action="store_true", help="detach now even if busy, and do not wait")
    for flag in ("-n", "-r", "-v"):
        parser.add_argument(flag, action="store_true", help="ignored")
    for flag in ("-N", "-t", "-O"):
        parser.add_argument(flag, help="ignored")
    parser.add_argument("-V", "--version", action="version", version=f"umount.ckptfs {__version__}")
    return parser


def _is_busy(mountpoint: Path) -> bool:
    """Return True if the kernel would refuse to unmount. Unknown counts as not busy.

    MNT_EXPIRE unmounts at the second call without a use in between, so the mount is used before.
    """
    try:
        os.close(os.open(mountpoint, os.O_PATH))
        libc.unmount(mountpoint, libc.MNT_EXPIRE | libc.UMOUNT_NOFOLLOW)
    except OSError as failure:
        return failure.errno == errno.EBUSY
    return False


def _get_status(client: "Client") -> "pb.Status | None":
    try:
        return client.get_status()
    except ClientError:
        return None


def _drain_attached(client: "Client", status: "pb.Status") -> None:
    """Have the daemon write back while the mount serves, until its own deadline. Prints what blocks it."""
    from ckptfs_client.render import ProgressBar, describe_progress

    named, began_s = "", time.monotonic()
    with ProgressBar(f"writing back {status.name}") as bar, contextlib.suppress(ClientError):
        for progress in client.drain(max(status.drain_deadline_s, DRAIN_S_MIN)):
            bar.update(progress.bytes_left, describe_progress(progress))
            is_stuck = progress.blocked_by and time.monotonic() - began_s > BLOCKED_S
            if is_stuck and progress.blocked_by != named:
                named = progress.blocked_by
                remedy = f"; {progress.remedy}" if progress.remedy else ""
                wait = f"waiting up to {format_duration(status.drain_deadline_s)}, with the mount attached; Ctrl-C leaves it mounted"
                print(f"umount.ckptfs: {describe_progress(progress)}{remedy}; {wait}", file=sys.stderr)


def _wait_until_drained(client: "Client", status: "pb.Status") -> None:
    """Wait until the daemon has ended, after its drain or its deadline, and print what is left."""
    from ckptfs.protocol import control_pb2 as pb
    from ckptfs_client.render import ProgressBar, describe_progress

    pid = next((process.pid for process in status.processes if process.role == "supervisor"), 0)
    until = time.monotonic() + status.drain_deadline_s + GRACE_S
    with ProgressBar(f"writing back {status.name}") as bar:
        while pid and procfs.is_running(pid):
            # A draining daemon answers; one that does not answer is about to end.
            status = _get_status(client) or status
            left = status.write_back
            words = describe_progress(pb.Progress(files_left=left.dirty_files, bytes_left=left.dirty_bytes, changes_left=left.changes))
            bar.update(left.dirty_bytes, words)
            if time.monotonic() > until:
                print(f"umount.ckptfs: the daemon of {status.name} (process {pid}) is still draining in the background", file=sys.stderr)
                return
            threading.Event().wait(DRAIN_POLL_S)
    _print_leftovers(Path(status.state))


def _print_leftovers(state: Path) -> None:
    """Print what a daemon that has ended may have left, and how to go on."""
    from ckptfs_client.node.unmounted import UnmountedName

    record = mount_record.load(state)
    if record is not None and (left := UnmountedName(record.name, state, record)).has_data:
        is_counted = record.pfs is not None and record.leftovers is not None
        kept = "not everything was written back" if is_counted else "unmounted, and its files are kept"
        remedy = f"to go on: {record.mount_command}; to give it up: ckptfs mounts --delete {record.name}"
        print(f"umount.ckptfs: {kept} ({left.describe()}); {remedy}", file=sys.stderr)
