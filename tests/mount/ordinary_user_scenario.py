"""What test_ordinary_user.py runs as an ordinary user: mounts, works, kills, mounts again, unmounts; says in JSON what it found."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0


def main() -> int:
    """The scenario in the directory given as argument."""
    home = Path(sys.argv[1])
    mount, state = home / "mnt", home / "state"
    found: dict[str, Any] = {"read": []}
    daemon = start(home)
    line = next(line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {mount} " in line)
    found["options"] = line.split()[5]
    (mount / "d").mkdir()
    with open(mount / "d" / "a", "wb", buffering=0) as file:
        file.write(b"one ")
        killed = processes(state)["mount"]["pid"]
        os.kill(killed, signal.SIGKILL)
        file.write(b"two")
    (mount / "d" / "a").rename(mount / "b")
    found["read"].append((mount / "b").read_text())
    found["owner"] = (mount / "b").stat().st_uid
    found |= {"data_path": processes(state)["data_path"], "reason": processes(state)["data_path_reason"]}
    os.kill(processes(state)["mount"]["pid"], signal.SIGKILL)
    found["read"].append((mount / "b").read_text())
    daemon.kill()
    daemon.wait(DEADLINE_S)
    daemon = start(home)
    found["read"].append((mount / "b").read_text())
    found["ram"] = os.readlink(state / "ram")
    subprocess.run(["fusermount3", "-u", str(mount)], check=True, timeout=DEADLINE_S)
    found["exit_code"] = daemon.wait(DEADLINE_S)
    found["on_pfs"] = (home / "pfs" / "b").read_text()
    print(json.dumps(found))
    return 0


def start(home: Path) -> "subprocess.Popen[bytes]":
    """The daemon, once it serves."""
    read_end, write_end = os.pipe()
    options = f"state={home / 'state'},pfs={home / 'pfs'},ram=256M"
    command = [sys.executable, "-m", "ckptfs_daemon", "user", str(home / "mnt"), "-o", options, "--ready-fd", str(write_end)]
    daemon = subprocess.Popen(command, pass_fds=[write_end])
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.readline()
    if answer != b"ok\n":
        raise SystemExit(answer.decode())
    return daemon


def processes(state: Path) -> dict[str, Any]:
    """What runs, once a mount process does."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found: dict[str, Any] = json.loads((state / "processes.json").read_bytes())
        if found["mount"]["pid"] or time.monotonic() > deadline:
            return found


if __name__ == "__main__":
    sys.exit(main())
