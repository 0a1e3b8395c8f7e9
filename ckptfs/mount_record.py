"""The record of a mount for the time without a daemon: STATE/mount.json.

It holds how the mount was made, so that an error message and `ckptfs mounts` can name the command that goes on; the guard of the
mountpoint; and, after an end in order, what the daemon left behind. The file is renamed into place.

Crash safety: after a crash `leftovers` is None: no daemon counted. The catalog knows.
"""

import json
import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptfs.mountpoint_guard import Guard, GuardKind
from ckptfs.quantities import format_count, format_size

FILE_NAME = "mount.json"


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The data that lies only on this node; `ram_*`: in RAM only. `obstacle` blocks the write-back."""

    files: int = 0
    size_bytes: int = 0
    changes: int = 0
    ram_files: int = 0
    ram_bytes: int = 0
    obstacle: str = ""
    remedy: str = ""

    @property
    def is_nothing(self) -> bool:
        return not (self.files or self.changes or self.ram_files)


@dataclass(frozen=True, slots=True)
class MountRecord:
    """The way in which a mount was made, by the systemd unit `unit` or none; its guard and leftovers."""

    name: str
    mountpoint: Path
    state: Path
    options: str
    pfs: Path | None
    nvme: Path | None
    instance: str
    unit: str = ""
    guard: Guard | None = None
    leftovers: Leftovers | None = None

    @property
    def mount_command(self) -> str:
        """Return the command that mounts the filesystem again and continues."""
        if self.unit:
            return f"systemctl start {self.unit}"
        options = f" -o {shlex.quote(self.options)}" if self.options else ""
        return f"mount -t ckptfs{options} {shlex.quote(self.name)} {shlex.quote(str(self.mountpoint))}"

    def describe_leftovers(self) -> str:
        """Describe what was left, its place, and what a reboot loses; "" for nothing."""
        left = self.leftovers
        if left is None or left.is_nothing:
            return ""
        words = []
        if self.pfs is not None and (left.files or left.changes or left.obstacle):
            amount = f"{format_count(left.files, 'file')} ({format_size(left.size_bytes)}), {format_count(left.changes, 'other change')}"
            words.append(f"{amount} not on the PFS {self.pfs}" + (f": {left.obstacle}" if left.obstacle else ""))
        if left.ram_files:
            amount = f"{format_count(left.ram_files, 'file')} ({format_size(left.ram_bytes)})"
            words.append(f"{amount} only in RAM, at {self.state / 'ram'}: a reboot loses {'it' if left.ram_files == 1 else 'them'}")
        elif left.files:
            words.append(f"the bytes lie in {self.nvme or self.state}, which survives a reboot")
        return "; ".join(words)


def store(record: MountRecord) -> None:
    """Write the record to its state directory. Raises OSError."""
    path = record.state / FILE_NAME
    temporary = path.with_name(f".{FILE_NAME}.new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w", encoding="utf-8") as file:
        json.dump(asdict(record), file, default=str)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)


def load(state: Path) -> MountRecord | None:
    """Return the record in a state directory, or None if there is none that can be read."""
    try:
        values: dict[str, Any] = json.loads((state / FILE_NAME).read_bytes())
        guard, left = values.pop("guard"), values.pop("leftovers")
        for key in ("mountpoint", "state", "pfs", "nvme"):
            values[key] = None if values[key] is None else Path(values[key])
        guarded = None if guard is None else _build_guard(guard)
        return MountRecord(**values, guard=guarded, leftovers=None if left is None else Leftovers(**left))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _build_guard(values: dict[str, Any]) -> Guard:
    return Guard(Path(values["path"]), values["device"], values["inode"], GuardKind(values["kind"]), values["mode"])
