"""The system calls and the setuid helper by which things are mounted and unmounted, and the kernel's list of what is.

Invariant: only mounts of our own type, or of the device we were told, are ever unmounted here.
If we die here: what is mounted stays mounted; the next start finds it in the kernel's list.
"""

import ctypes
import os
import re
import select
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ckptfs.errors import CkptfsError

FSTYPE = "fuse.ckptfs"
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 2, 4, 8, 32
MNT_FORCE, MNT_DETACH, UMOUNT_NOFOLLOW = 1, 2, 8
FUSERMOUNT_WAIT_S = 20.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]


class CannotMount(CkptfsError):
    """The mount was refused; says by whom and what can be done."""


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of /proc/self/mountinfo."""

    point: Path
    device: str
    fstype: str
    source: str
    options: str


def list_mounts() -> list[MountEntry]:
    """What is mounted in our namespace, in the order of mounting."""
    found = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        left, _, right = line.partition(b" - ")
        fields, tail = left.split(b" "), right.split(b" ")
        found.append(
            MountEntry(
                Path(_unescape(fields[4])), fields[2].decode(), tail[0].decode(), _unescape(tail[1]), tail[2].decode(errors="replace")
            )
        )
    return found


def find_mount_at(point: Path) -> MountEntry | None:
    """What is visible at `point`: the last thing mounted there, or None."""
    here = [mounted for mounted in list_mounts() if mounted.point == point]
    return here[-1] if here else None


def _unescape(field: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field))


def mount_at(source: str, point: Path, fstype: str, flags: int, data: str) -> None:
    """mount(2). Raises OSError."""
    if _libc.mount(os.fsencode(source), os.fsencode(point), fstype.encode(), flags, data.encode()):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(point))


def unmount_at(point: Path, flags: int = 0) -> None:
    """umount2(2); by fusermount3 for who may not. Raises OSError (EBUSY, EINVAL when nothing is mounted there)."""
    if _libc.umount2(os.fsencode(point), flags | UMOUNT_NOFOLLOW):
        code = ctypes.get_errno()
        if code == 1 and not can_mount():
            _unmount_with_fusermount(point, lazy=bool(flags & MNT_DETACH))
            return
        raise OSError(code, os.strerror(code), str(point))


def can_mount() -> bool:
    """Whether this process has CAP_SYS_ADMIN."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(match and int(match[1], 16) >> 21 & 1)


def mount_with_fusermount(name: str, point: Path, options: list[str]) -> int:
    """Mount through fusermount3, as ordinary users must; the descriptor of the new connection. Raises CannotMount."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        wanted = ",".join([f"fsname={name}", "subtype=ckptfs", *options])
        command = ["fusermount3", "-o", wanted, "--", str(point)]
        done = _run_fusermount(command, theirs)
        if done.returncode != 0:
            words = done.stderr.decode(errors="replace").strip() or "it gave no reason"
            remedy = f"{point} must be yours and writable, and /dev/fuse open to everybody (chmod 666 /dev/fuse)"
            raise CannotMount(f"an ordinary user cannot mount {point} here: {words}", remedy=remedy)
        if not select.select([ours], [], [], FUSERMOUNT_WAIT_S)[0]:
            raise CannotMount("fusermount3 did not hand over the connection")
        _body, descriptors, _flags, _address = socket.recv_fds(ours, 16, 1)
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
        raise CannotMount("an ordinary user can only mount through fusermount3, which is not here", remedy="apt install fuse3") from failure
    except subprocess.TimeoutExpired as failure:
        raise CannotMount(f"{command[0]} did not answer within {FUSERMOUNT_WAIT_S:g} s") from failure


def _unmount_with_fusermount(point: Path, *, lazy: bool) -> None:
    done = _run_fusermount(["fusermount3", "-u", *(["-z"] if lazy else []), "--", str(point)], None)
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip()
        raise OSError(16 if "busy" in words.lower() else 22, words, str(point))
