"""The command `ckptfsd NAME DIR -o OPTIONS`: the supervisor, or with `--child ROLE` a child of it.

Errors are one sentence on stderr, and on --ready-fd as `error: SENTENCE`. Exit codes: 0 unmounted and drained, 1 failed, 2 refused.
A child imports its modules, waits for its assignment, and runs its role. With `--trial` it says whether it could replace its parent.

Crash safety: the supervisor sees the end of a child's link and starts another one.
"""

import argparse
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from ckptfs import __version__
from ckptfs.errors import CkptfsError, InvalidArgument
from ckptfs_daemon import ipc, logs
from ckptfs_daemon.event_writer import events

log = logging.getLogger(__name__)

FAILED, REFUSED = 1, 2
DAEMON_EXIT_CODES = {0: "unmounted and drained", FAILED: "failed", REFUSED: "refused"}


def main(arguments: list[str] | None = None) -> int:
    """Run as supervisor or as child. Returns the exit code."""
    parser = build_daemon_parser()
    options = parser.parse_args(arguments)
    if options.child is not None:
        return run_child(options.child, options.link)
    if options.name is None:
        parser.error("a NAME is needed")
    directory, mount_options = Path(options.directory) if options.directory else None, ",".join(options.options)
    if options.trial is not None:
        return run_trial(options.name, directory, mount_options, options.trial)
    from ckptfs_daemon.supervisor import main as start
    from ckptfs_daemon.supervisor.state_directory import ReadyPipe

    ready_pipe = ReadyPipe(options.ready_fd)
    try:
        return start.run_daemon(options.name, directory, mount_options, ready_pipe)
    except (CkptfsError, OSError) as failure:
        remedy = getattr(failure, "remedy", "")
        sentence = f"{failure}; {remedy}" if remedy else str(failure)
        ready_pipe.write_once(f"error: {sentence}")
        print(f"ckptfsd: {sentence}", file=sys.stderr)
        return REFUSED if isinstance(failure, InvalidArgument) else FAILED


def build_daemon_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ckptfsd", description="Serve a ckptfs mount until it is unmounted.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the mount's name")
    parser.add_argument("directory", nargs="?", metavar="DIR", help="the mountpoint; may be in the configuration instead")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="KEY=VALUE,...", help="options, as for mount -t ckptfs")
    parser.add_argument("--ready-fd", type=int, metavar="N", help="the descriptor to write `ok` or `error: SENTENCE` to")
    parser.add_argument("--version", action="version", version=f"ckptfsd {__version__}")
    parser.add_argument("--child", choices=("mount", "mover", "spare"), help=argparse.SUPPRESS)
    parser.add_argument("--trial", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--link", type=int, default=-1, help=argparse.SUPPRESS)
    return parser


def run_trial(name: str, mountpoint: Path | None, options: str, table_fd: int) -> int:
    """Say whether this version can take over the mount of its parent process. Returns the exit code."""
    try:
        from ckptfs import config
        from ckptfs_daemon.supervisor import handover

        for role in ("mover", "mount"):
            _import_role(role)
        handover.require_takeover(config.load(name, mountpoint, config.parse_options(options)), table_fd)
    except Exception as failure:  # A start would fail at it, too.
        print(f"version {__version__}: {failure or type(failure).__name__}", file=sys.stderr)
        return REFUSED
    return 0


def run_child(role: str, link_fd: int) -> int:
    """Serve in the role that the supervisor assigns. Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logs.configure(role, "info")
    logs.set_process_name(f"ckptfs-{role}")
    link = socket.socket(fileno=link_fd)
    os.set_inheritable(link_fd, False)
    try:
        _import_role(role)
        setup = ipc.receive_assignment(link)
        if setup is None:
            return 0
        logs.configure(setup.role, setup.config.log_level)
        logs.set_process_name(f"ckptfs-{setup.role}")
        events.open(setup.config.state, node=setup.config.node, mount=setup.config.name)
        return _import_role(setup.role)(setup)
    except CkptfsError as failure:
        log.error("%s; %s", failure, failure.remedy)
        return 1
    except Exception:
        log.exception("the %s process ends", role)
        return 1
    finally:
        events.close()


def _import_role(role: str) -> Callable[[ipc.ChildSetup], int]:
    """Import the modules of a role, before its assignment comes. Returns the function that serves in it."""
    gc.disable()  # What modules make stays: to look through it for garbage takes a fifth of a start.
    try:
        return _find_runner(role)
    finally:
        gc.freeze()
        gc.enable()


def _find_runner(role: str) -> Callable[[ipc.ChildSetup], int]:
    if role == "mover":
        from ckptfs_daemon.mover import main as mover

        return mover.run
    from ckptfs_daemon.mount import main as mount

    return mount.run


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # Threads that hang (on a PFS) must not keep the process.
    os._exit(code)
