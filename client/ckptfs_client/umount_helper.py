"""`/sbin/umount.ckptfs DIR [-flnrv]`: what umount(8) runs. Unmounts, then waits while the daemon brings the rest to the PFS.

The daemon itself has the deadline (`drain_deadline`): this only watches it, and says what was left. Exit codes are umount(8)'s:
0 unmounted, 1 wrong usage, 32 it failed (busy, not mounted).
If we die here: the daemon drains and ends by itself.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptfs import limits
from ckptfs_client.failures import ClientError
from ckptfs_client.mount_helper import FAILED, USAGE
from ckptfs_client.mounts import find, is_running

if TYPE_CHECKING:
    from ckptfs.protocol import control_pb2 as pb
    from ckptfs_client.client import Client


DRAIN_POLL_S = 0.1
STATUS_WAIT_S = 1.0
GRACE_S = limits.STOP_WAIT_S


def umount_main(arguments: Sequence[str] | None = None) -> int:
    """The entry point of umount.ckptfs and umount.fuse.ckptfs; the exit code."""
    about = "Unmounts ckptfs and waits for its write-back; called by umount(8)."
    parser = argparse.ArgumentParser(prog="umount.ckptfs", description=about)
    parser.add_argument("directory")
    parser.add_argument("-f", dest="force", action="store_true", help="also when the daemon hangs")
    parser.add_argument("-l", dest="lazy", action="store_true", help="detach now, also when it is busy, and do not wait")
    for flag in ("-n", "-r", "-v"):
        parser.add_argument(flag, action="store_true", help="without meaning here")
    for flag in ("-N", "-t", "-O"):
        parser.add_argument(flag, help="without meaning here")
    try:
        asked = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    except SystemExit as end:
        return USAGE if end.code else 0
    return _unmount(asked)


def _unmount(asked: argparse.Namespace) -> int:
    try:
        mount = find(Path(asked.directory))
        if mount.mountpoint != Path(os.path.abspath(asked.directory)) and mount.mountpoint != Path(os.path.realpath(asked.directory)):
            raise ClientError(f"{asked.directory} is not a mountpoint", remedy=f"the mount is {mount.mountpoint}")
    except ClientError as failure:
        print(f"umount.ckptfs: {failure}", file=sys.stderr)
        return FAILED
    from ckptfs_client.client import Client

    with Client(mount, answer_s=STATUS_WAIT_S) as client:
        before = None if asked.lazy else _get_status(client)
        flags = [flag for flag, given in (("-f", asked.force), ("-l", asked.lazy)) if given]
        ours = ["umount", "-i", *flags, str(mount.mountpoint)]
        command = ours if os.geteuid() == 0 else ["fusermount3", "-u", *(["-z"] if asked.lazy else []), str(mount.mountpoint)]
        if subprocess.run(command, check=False).returncode != 0:
            return FAILED
        if before is not None:
            _wait_until_drained(client, before)
    return 0


def _get_status(client: "Client") -> "pb.Status | None":
    """The daemon's figures; None when it does not answer."""
    try:
        return client.get_status()
    except ClientError:
        return None


def _wait_until_drained(client: "Client", status: "pb.Status") -> None:
    """Wait until the daemon has ended; it does so by itself, after its drain or its deadline."""
    from ckptfs_client.watching import ProgressBar, describe_write_back

    pid = next((process.pid for process in status.processes if process.role == "supervisor"), 0)
    until = time.monotonic() + status.drain_deadline_s + GRACE_S
    with ProgressBar(f"writing back {status.name}") as bar:
        while pid and is_running(pid):
            # While it drains it answers; when it no longer does, it is about to end.
            status = _get_status(client) or status
            bar.update(status.write_back.dirty_bytes, describe_write_back(status))
            if time.monotonic() > until:
                print(f"umount.ckptfs: the daemon of {status.name} (process {pid}) still works in the background", file=sys.stderr)
                return
            threading.Event().wait(DRAIN_POLL_S)
    if status.write_back.dirty_files and status.write_back.lag_s > status.drain_deadline_s / 2:
        print(
            f"umount.ckptfs: not everything was written back ({describe_write_back(status)}); it goes on at the next mount", file=sys.stderr
        )


if __name__ == "__main__":
    sys.exit(umount_main())
