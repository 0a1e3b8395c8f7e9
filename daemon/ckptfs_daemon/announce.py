"""Where the supervisor says what runs: STATE/processes.json, the registry file of the mount, and whoever waits on --ready-fd.

Files are renamed into place: a reader sees the former state or the new one.
If we die here: the files are stale; the pids in them are believed only together with their start times.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptfs import rendezvous
from ckptfs.config import Config


def publish_processes(config: Config, processes: Mapping[str, Any]) -> None:
    """Publish `processes` beside the catalog and in the registry."""
    _replace_json_file(config.state / "processes.json", processes)
    _replace_json_file(
        rendezvous.create() / f"{config.name}.json",
        {
            "name": config.name,
            "mountpoint": str(config.mountpoint),
            "state": str(config.state),
            "socket": str(rendezvous.socket_path(config.name)),
            "pid": os.getpid(),
        },
    )


def delete_process_files(config: Config) -> None:
    """Nothing runs any more."""
    for path in (config.state / "processes.json", rendezvous.registry_path(config.name)):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _replace_json_file(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.chmod(temporary, 0o644)
    os.rename(temporary, path)


class ReadyPipe:
    """The descriptor given as --ready-fd: one line, once."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_inheritable(fd, False)

    def write_once(self, line: str) -> None:
        """Write `line` if nothing was written before; nobody may be listening."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            os.write(self._fd, (" ".join(line.split()) + "\n").encode())
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = None
