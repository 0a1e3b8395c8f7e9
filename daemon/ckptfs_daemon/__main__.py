"""The command `ckptfsd NAME DIR -o OPTIONS`: the supervisor, in the foreground; and `--child ROLE`, which only the supervisor uses.

Errors are one sentence on stderr, and on --ready-fd as `error: SENTENCE`. Exit codes: 0 unmounted and drained, 1 failed, 2 refused.
"""

import argparse
import os
import sys
from pathlib import Path

from ckptfs import __version__
from ckptfs.errors import CkptfsError, InvalidArgument


def main(arguments: list[str] | None = None) -> int:
    """Run as supervisor or child; the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.child is not None:
        from ckptfs_daemon import child

        return child.run_child(options.child, options.link)
    if options.name is None:
        parser.error("a NAME is needed")
    from ckptfs_daemon import start
    from ckptfs_daemon.announce import ReadyPipe

    ready_pipe = ReadyPipe(options.ready_fd)
    try:
        return start.run_daemon(options.name, Path(options.directory) if options.directory else None, ",".join(options.options), ready_pipe)
    except (CkptfsError, OSError) as failure:
        remedy = getattr(failure, "remedy", "")
        sentence = f"{failure}; {remedy}" if remedy else str(failure)
        ready_pipe.write_once(f"error: {sentence}")
        print(f"ckptfsd: {sentence}", file=sys.stderr)
        return 2 if isinstance(failure, InvalidArgument) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ckptfsd", description="Serve a ckptfs mount until it is unmounted.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the mount's name")
    parser.add_argument("directory", nargs="?", metavar="DIR", help="where it is mounted; may stand in the configuration instead")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="KEY=VALUE,...", help="options, as for mount -t ckptfs")
    parser.add_argument("--ready-fd", type=int, metavar="N", help="descriptor to which `ok` or `error: SENTENCE` is written")
    parser.add_argument("--version", action="version", version=f"ckptfsd {__version__}")
    parser.add_argument("--child", choices=("mount", "mover", "spare"), help=argparse.SUPPRESS)
    parser.add_argument("--link", type=int, default=-1, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # Threads that hang (on a PFS) must not keep us.
    os._exit(code)
