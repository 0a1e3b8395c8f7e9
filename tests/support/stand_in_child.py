"""A child for the supervisor's tests: serves nothing, and dies as the file SCRIPT says (one word per life and role).

`serve`: ready, then until stopped; `upgrade`: the same, but asks for an upgrade and writes down its refusal; `die`: ready, then exit 3;
`fail`: exit 4 before ready; `unmounted`: ready, then exit 0 at once. `linger` is as `serve`, and `ending` as `unmounted`, but they end only
when the file `leave` is there.
"""

import os
import threading
from pathlib import Path

from ckptfs_daemon.ipc import ChildSetup


def serve(script: Path, setup: ChildSetup) -> int:
    role, link = setup.role, setup.link
    number = len(list(script.parent.glob(f"{role}.life.*")))
    (script.parent / f"{role}.life.{number}").write_text(f"{os.getpid()} {_count_others(setup)} {setup.is_resumed}")
    words = [line.split()[1] for line in script.read_text().splitlines() if line.startswith(f"{role} ")]
    word = words[number] if number < len(words) else "serve"
    if word == "fail":
        return 4
    link.send(b"ready")
    if word == "die":
        return 3
    if word == "unmounted":
        return 0
    if word == "upgrade":
        link.send(b'upgrade ["/python", "/place"]')
    while word != "ending" and (message := link.recv(1024)) and message != b"stop":
        if message == b"upgrade the daemon starts, is about to end, or hands over already":
            link.send(b'upgrade ["/python", "/place"]')
        elif message.startswith(b"upgrade "):
            (script.parent / "refusal").write_bytes(message)
    if word in {"linger", "ending"}:
        (script.parent / "leaving").touch()
        while not (script.parent / "leave").exists():
            threading.Event().wait(0.01)
    return 0


def _count_others(setup: ChildSetup) -> int:
    """How many descriptors it has beside those of its role and the standard ones."""
    with os.scandir("/proc/self/fd") as found:
        names = [int(entry.name) for entry in found]
    given = setup.list_descriptors()
    assert all(os.fstat(fd) for fd in given)
    return len([fd for fd in names if fd not in (0, 1, 2, *given)]) - 1  # The scan has one of its own.
