"""What `ckptfs ls` and `ckptfs who` find out about files of a mount.

Names and inodes are read through the mount with lstat(2) and readdir(3), and digests with getxattr(2), so the kernel checks the caller's
permissions. In a cluster, lstat also refreshes the name from the other nodes. Levels and copies come from the daemon.

Processes that use files are read from /proc as fuser(1) does. A process is seen if the caller may look at its descriptors: root sees all,
others their own. No other filesystem is touched: mount ids tell which descriptors lead into the mount, and only these are looked at.
Processes in other mount namespaces (containers) are found, too.
"""

import contextlib
import os
import pwd
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptfs import disk, procfs
from ckptfs.procfs import MountEntry
from ckptfs.quantities import format_count, format_size
from ckptfs_client import render
from ckptfs_client.client import Client, open_client
from ckptfs_client.errors import CommandFailed
from ckptfs_client.json_answers import FileUserJson, LsJson, WhoJson
from ckptfs_client.mounts import DIGEST_XATTR, build_path_error, find_inode

COMMAND_CHARS_MAX = 200
READ, WRITE, MAPPED, WORKS_IN = "read", "write", "mapped", "cwd"
_FDINFO = re.compile(r"^flags:\s*(?P<flags>[0-7]+)$.*^mnt_id:\s*(?P<mount>\d+)$", re.MULTILINE | re.DOTALL)
_MAPPING = re.compile(r"^\S+ \S+ \S+ (?P<device>\S+) (?P<inode>\d+) +(?P<path>/.*)$", re.MULTILINE)
_ESCAPE = re.compile(r"\\012")

View = dict[int, MountEntry]
"""The mounts of one namespace through which the filesystem is seen, by their ids."""


def list_rows(path: Path, *, itself: bool) -> list[dict[str, Any]]:
    """Return one row for `path` or for each entry of it, sorted by name. Raises CommandFailed, NoMount."""
    client, inode = open_client(path)
    with client:
        if itself or not path.is_dir() or path.is_symlink():
            return _build_rows(client, [(str(path), path, inode)])
        try:
            with os.scandir(path) as entries:
                found = sorted((entry.name, Path(entry.path), entry.inode()) for entry in entries)
        except OSError as failure:
            raise build_path_error(path, failure) from failure
        return _build_rows(client, found)


def _build_rows(client: Client, found: list[tuple[str, Path, int]]) -> list[dict[str, Any]]:
    records = client.list_records((inode for _, _, inode in found), trees=True)
    answers: list[dict[str, Any]] = []
    for (name, path, _), record in zip(found, records, strict=True):
        if record.known:
            row = render.message_to_dict(record)
            del row["known"]
            answer: LsJson = {"name": name, **row, "digest": _read_digest(path) if record.kind == "file" else ""}
            answers.append({**answer})
    return answers


def _read_digest(path: Path) -> str:
    """Return the digest in hex; empty if it is not known yet, or if the caller may not read the file."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            return os.getxattr(path, DIGEST_XATTR, follow_symlinks=False).decode("ascii", "replace")
    return ""


def build_listing(rows: list[dict[str, Any]]) -> Any:
    """Build the table of `ckptfs ls`."""
    table = render.build_grid("level", "state", "gen>", "size>", "copies", "digest", "name")
    for row in rows:
        copies = " ".join(f"{copy['tier']}:{copy['state']}" for copy in row["copies"])
        waiting = " *" if row["pfs_pending"] else ""
        figures = (str(row["generation"]), format_size(row["size"]))
        table.add_row(row["level"] + waiting, row["state"] or row["kind"], *figures, copies, row["digest"][:16], render.escape(row["name"]))
    return table


# --- users ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """The file or directory to look for.

    `path` is its path in the filesystem, `entry` the mount through which the caller sees it.
    """

    entry: MountEntry
    inode: int
    path: str
    is_directory: bool

    def holds(self, path: str | None, inode: int) -> bool:
        """Return True for the file itself, and for all below a directory."""
        if not self.is_directory:
            return inode == self.inode
        return path is not None and (path == self.path or path.startswith(f"{self.path.rstrip('/')}/"))

    def show(self, path: str | None) -> str:
        """Return the caller's name of a path in the filesystem; empty if it has none."""
        root = self.entry.root.rstrip("/")
        return f"{self.entry.mountpoint}{path.removeprefix(root)}" if path is not None and path.startswith(f"{root}/") else ""


@dataclass(slots=True)
class Uses:
    """How one process uses the target, and which files."""

    how: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)

    def add(self, how: str, file: str) -> None:
        """Add a use. `file`: the caller's name of the file; empty if it has none."""
        self.how.add(how)
        self.files |= {file} if file else set()


def find_users(path: Path) -> WhoJson:
    """Return the processes that use a file, or anything below a directory. Raises NoMount, CommandFailed."""
    mount, inode = find_inode(os.path.realpath(path))
    target = _find_target(path, inode)
    views: dict[tuple[str, int, int], View] = {}
    answer: WhoJson = {"path": str(path), "processes": [], "hidden": 0, "open_handles": None}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        if pid == os.getpid():
            continue
        try:
            uses = _list_uses(pid, target, views)
        except PermissionError:
            answer["hidden"] += bool(_read_command(pid))  # Not the threads of the kernel, which have none.
            continue
        except OSError:
            continue  # It has ended.
        if uses.how:
            answer["processes"].append(_describe(pid, uses))
    if not target.is_directory:
        with Client(mount) as client:
            answer["open_handles"] = client.list_records([inode])[0].open_handles
    return answer


def _find_target(path: Path, inode: int) -> Target:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as failure:
        raise build_path_error(path, failure) from failure
    with disk.closing(fd):
        entry, text = procfs.find_mount_of(fd), os.readlink(f"/proc/self/fd/{fd}")
        inner = None if entry is None else _get_inner_path(entry, text)
        if entry is None or inner is None:
            raise CommandFailed(f"{path}: its mount cannot be found")
        return Target(entry, inode, inner, os.path.isdir(f"/proc/self/fd/{fd}"))


def _get_inner_path(entry: MountEntry, text: str) -> str | None:
    """Return the path in the filesystem of a path `text` in a mount.

    Returns None if it does not lie in the mount.
    """
    point = str(entry.mountpoint).rstrip("/")
    if text != point and not text.startswith(f"{point}/"):
        return None
    return f"{entry.root.rstrip('/')}{text.removeprefix(point)}" or "/"


def _find_inner_path(view: View, text: str) -> str | None:
    """Return the same for the deepest mount that holds it."""
    deepest = sorted(view.values(), key=lambda entry: len(entry.mountpoint.parts), reverse=True)
    return next((inner for entry in deepest if (inner := _get_inner_path(entry, text)) is not None), None)


def _list_uses(pid: int, target: Target, views: dict[tuple[str, int, int], View]) -> Uses:
    """Return how a process uses the target. Raises PermissionError, and other OSErrors if it ends."""
    uses, place = Uses(), f"/proc/{pid}"
    names = os.listdir(f"{place}/fd")
    root = os.stat(f"{place}/root")  # The link of a root outside this process's own one says "/", too.
    namespace = os.readlink(f"{place}/ns/mnt"), root.st_dev, root.st_ino
    if namespace not in views:
        entries = procfs.list_mount_entries(f"{place}/mountinfo")
        views[namespace] = {entry.id: entry for entry in entries if entry.device == target.entry.device}
    view = views[namespace]
    if view:
        for name in names:
            _look_at_descriptor(f"{place}/fd/{name}", f"{place}/fdinfo/{name}", target, view, uses)
        _look_at_mappings(place, target, view, uses)
        inner = _find_inner_path(view, os.readlink(f"{place}/cwd"))
        if inner is not None and target.holds(inner, os.stat(f"{place}/cwd").st_ino):
            uses.add(WORKS_IN, target.show(inner))
    return uses


def _look_at_descriptor(link: str, info: str, target: Target, view: View, uses: Uses) -> None:
    try:
        found = _FDINFO.search(Path(info).read_text(errors="replace"))
        entry = view.get(int(found["mount"])) if found else None
        if found is None or entry is None:
            return
        inner = _get_inner_path(entry, os.readlink(link))
        if target.holds(inner, os.stat(link).st_ino):
            uses.add(WRITE if int(found["flags"], 8) & os.O_ACCMODE else READ, target.show(inner))
    except FileNotFoundError:
        pass  # It was closed meanwhile.


def _look_at_mappings(place: str, target: Target, view: View, uses: Uses) -> None:
    major, _, minor = target.entry.device.partition(":")
    device = f"{int(major):02x}:{int(minor):02x}"
    text = os.fsdecode(Path(f"{place}/maps").read_bytes())
    for found in _MAPPING.finditer(text):
        if found["device"] == device:
            inner = _find_inner_path(view, _ESCAPE.sub("\n", found["path"]))
            if target.holds(inner, int(found["inode"])):
                uses.add(MAPPED, target.show(inner))


def _describe(pid: int, uses: Uses) -> FileUserJson:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
        user = pwd.getpwuid(uid).pw_name
    except FileNotFoundError:
        user = ""
    except KeyError:
        user = str(uid)
    return {"pid": pid, "user": user, "command": _read_command(pid), "how": sorted(uses.how), "files": sorted(uses.files)}


def _read_command(pid: int) -> str:
    """Return the command line of a process; empty if it is gone or a thread of the kernel."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return os.fsdecode(words.rstrip(b"\0").replace(b"\0", b" "))[:COMMAND_CHARS_MAX]


def format_user(one: FileUserJson) -> str:
    files = one["files"][:1] + ([f"(and {len(one['files']) - 1} more)"] if len(one["files"]) > 1 else [])
    return f"{one['pid']:>8}  {one['user']:10} {', '.join(one['how']):12} {one['command']:30}  {' '.join(files)}"


def list_notes(found: WhoJson) -> list[str]:
    """Return what the caller should know of the answer: that no process was found, and who may be missing."""
    notes = [] if found["processes"] else [f"no process that you may look at uses {found['path']}"]
    if found["open_handles"] and not found["processes"]:
        notes.append(
            f"the daemon counts {format_count(found['open_handles'], 'open handle')} of it, so a process that you do not see has it open"
        )
    if found["hidden"] and os.geteuid() != 0:
        notes.append(
            f"{format_count(found['hidden'], 'process', 'processes')} of others could not be looked at; run it as root to see them"
        )
    return notes
