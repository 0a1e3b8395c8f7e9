"""A child for the supervisor's tests: takes its role, serves nothing, and dies as the file SCRIPT says (one word per life and role).

`serve`: ready, then until stopped; `upgrade`: the same, but asks for an upgrade and writes down its refusal; `die`: ready, then exit 3;
`fail`: exit 4 before ready; `unmounted`: ready, then exit 0 at once. `linger` is as `serve`, and `ending` as `unmounted`, but they end only
when the file `leave` is there.
"""

import os
import socket
import sys
import threading
from pathlib import Path


def main() -> int:
    script, role_asked, link_fd = Path(sys.argv[1]), sys.argv[2], int(sys.argv[sys.argv.index("--link") + 1])
    link = socket.socket(fileno=link_fd)
    body, descriptors, _flags, _address = socket.recv_fds(link, 1 << 17, 3)
    if not body:
        return 0
    role = "mount" if b'"role": "mount"' in body else "mover"
    number = len(list(script.parent.glob(f"{role}.life.*")))
    resumed = b'"resumed": true' in body
    (script.parent / f"{role}.life.{number}").write_text(f"{os.getpid()} {role_asked} {len(descriptors)} {resumed}")
    (script.parent / f"{role}.body.{number}").write_bytes(body)
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


if __name__ == "__main__":
    sys.exit(main())
