"""The command `ckptfsd NAME DIR -o OPTIONS`: the supervisor, and what its children run.

Errors are one sentence on stderr, and on --ready-fd as `error: SENTENCE`. Exit codes: 0 unmounted and drained, 1 failed, 2 refused.
With `--trial` it says whether it could replace its parent.

Crash safety: the supervisor sees the end of a child's link and starts another one.
"""

import argparse
import functools
import gc
import logging
import os
import signal
import sys
from pathlib import Path

from ckptfs import __version__
from ckptfs.errors import CkptfsError, InvalidArgument
from ckptfs_daemon import logs
from ckptfs_daemon.event_writer import events
from ckptfs_daemon.ipc import ChildSetup, ServeRole

log = logging.getLogger(__name__)

FAILED, REFUSED = 1, 2
DAEMON_EXIT_CODES = {0: "unmounted and drained", FAILED: "failed", REFUSED: "refused"}


def main(arguments: list[str] | None = None) -> int:
    """Run the supervisor. Returns the exit code."""
    parser = build_daemon_parser()
    options = parser.parse_args(arguments)
    silence_grpc()
    if options.name is None:
        parser.error("a NAME is needed")
    directory, mount_options = Path(options.directory) if options.directory else None, ",".join(options.options)
    if options.trial is not None:
        return run_trial(options.name, directory, mount_options, options.trial)
    from ckptfs_daemon.supervisor import main as start
    from ckptfs_daemon.supervisor.state_directory import ReadyPipe

    ready_pipe = ReadyPipe(options.ready_fd)
    try:
        return start.run_daemon(options.name, directory, mount_options, ready_pipe, load_roles)
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
    parser.add_argument("--trial", type=int, help=argparse.SUPPRESS)
    return parser


def run_trial(name: str, mountpoint: Path | None, options: str, table_fd: int) -> int:
    """Say whether this version can take over the mount of its parent process. Returns the exit code."""
    try:
        from ckptfs import config
        from ckptfs_daemon.supervisor import handover

        load_roles()
        handover.require_takeover(config.load(name, mountpoint, config.parse_options(options)), table_fd)
    except Exception as failure:  # A start would fail at it, too.
        print(f"version {__version__}: {failure or type(failure).__name__}", file=sys.stderr)
        return REFUSED
    return 0


def silence_grpc() -> None:
    """Have gRPC write nothing itself, such as a line for each failed TLS handshake.

    To be called before gRPC is imported. The environment of the user wins.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def load_roles() -> ServeRole:
    """Import the modules of all roles. Returns what a child runs."""
    gc.disable()  # What modules make stays: to look through it for garbage takes a fifth of a start.
    try:
        from ckptfs_daemon.mount import main as mount
        from ckptfs_daemon.mover import main as mover
    finally:
        gc.freeze()
        gc.enable()
    return functools.partial(run_role, {"mount": mount.run, "mover": mover.run})


def run_role(roles: dict[str, ServeRole], setup: ChildSetup) -> int:
    """Serve in the role that the supervisor gives. Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logs.configure(setup.role, setup.config.log_level)
    logs.set_process_name(f"ckptfs-{setup.role}")
    events.open(setup.config.state, node=setup.config.node, mount=setup.config.name)
    try:
        return roles[setup.role](setup)
    except CkptfsError as failure:
        log.error("%s; %s", failure, failure.remedy)
        return 1
    except Exception:
        log.exception("the %s process ends", setup.role)
        return 1
    finally:
        events.close()


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # Threads that hang (on a PFS) must not keep the process.
    os._exit(code)
