"""How a daemon is started by a command: its command line, and its one word when it serves or refuses to.

If we die here: the daemon goes on by itself.
"""

import os
import select
import sys
import time
from pathlib import Path

from ckptfs import limits

DAEMON_READY_WAIT_S = limits.READY_WAIT_S + 30.0


def build_daemon_command(name: str, mountpoint: Path, options: str, ready_fd: int) -> list[str]:
    """The command line of a daemon that will say on the descriptor `ready` how it went."""
    # -P: the directory in which the caller stands must not provide Python modules to root.
    line = [sys.executable, "-P", "-m", "ckptfs_daemon", name, str(mountpoint), "--ready-fd", str(ready_fd)]
    return [*line, "-o", options] if options else line


def format_options(options: dict[str, str]) -> str:
    """Options as one -o string."""
    return ",".join(f"{key}={value.replace(',', chr(92) + ',')}" if value else key for key, value in options.items())


def read_ready_line(ready_fd: int) -> str:
    """The first line that the daemon writes; empty when it ends or is late. Closes the descriptor."""
    until = time.monotonic() + DAEMON_READY_WAIT_S
    data = b""
    with os.fdopen(ready_fd, "rb", buffering=0) as pipe:
        while not data.endswith(b"\n") and (left := until - time.monotonic()) > 0:
            if select.select([pipe], [], [], left)[0]:
                piece = pipe.read(4096)
                if not piece:
                    break
                data += piece
    return data.decode(errors="replace").strip()
