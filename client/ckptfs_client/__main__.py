"""The entry of the command `ckptfs`: how it ends, and a short way for what scripts call most.

`latest` and `list` with paths, `--level` and `--json` do not need typer, whose import takes longer than the rest. Everything else, wrong
usage included, goes through `cli`.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from ckptfs.model import WAITABLE_LEVELS, Level
from ckptfs_client.errors import INTERRUPTED, PIPE_CLOSED, ClientError, CommandFailed, PipeClosed
from ckptfs_client.render import escape_unprintable


def main() -> None:
    """Run the command that the arguments name."""
    run(_run_command)


def _run_command() -> None:
    act = find_short_way(sys.argv[1:])
    if act is None:
        from ckptfs_client import cli

        act = cli.main
    act()


def run(act: Callable[[], object]) -> None:
    """Run a command. An error becomes one sentence on stderr and an exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # The caller has closed it, and wants no output.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        with contextlib.suppress(AttributeError):
            getattr(sys, name).reconfigure(errors="backslashreplace")
    try:
        try:
            act()
        finally:
            sys.stdout.flush()
    except ClientError as failure:
        _end(failure)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (BrokenPipeError, PipeClosed):
        _drop_output()
        sys.exit(PIPE_CLOSED)
    except OSError as failure:
        _end(_translate_error(failure))


def _translate_error(failure: OSError) -> ClientError:
    """Return the error for a path, or for the output. Raises any other failure again."""
    from ckptfs_client.mounts import build_path_error

    if failure.filename is not None:
        return build_path_error(os.fsdecode(failure.filename), failure)
    try:
        print(flush=True)  # Of an unbuffered output, `flush` alone forgets the fault.
    except OSError as fault:
        _drop_output()
        return CommandFailed(f"the output cannot be written: {fault.strerror}")
    raise failure


def _drop_output() -> None:
    """Discard what is still buffered, which the interpreter writes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _end(failure: ClientError) -> NoReturn:
    print(f"ckptfs: {escape_unprintable(str(failure))}", file=sys.stderr)
    sys.exit(failure.exit_code)


def find_short_way(arguments: Sequence[str]) -> Callable[[], object] | None:
    """Return the act of a command that needs no typer. Returns None for any other."""
    words, level = list(arguments[1:]), None
    if "--level" in words[:-1]:
        position = words.index("--level")
        level = words[position + 1]
        del words[position : position + 2]
    options = [word for word in words if word.startswith("-")]
    if options not in ([], ["--json"]) or level not in (None, *WAITABLE_LEVELS):
        return None
    paths = [Path(word) for word in words if word not in options]
    if arguments[:1] == ["latest"] and paths:
        from ckptfs_client.sets import newest

        return functools.partial(newest.print_newest, paths, Level(level or "local"), is_json=bool(options))
    if arguments[:1] == ["list"] and len(paths) < 2:
        from ckptfs_client.sets import set_listing

        wanted = None if level is None else Level(level)
        return functools.partial(set_listing.print_list, paths[0] if paths else None, wanted, is_json=bool(options))
    return None


if __name__ == "__main__":
    main()
