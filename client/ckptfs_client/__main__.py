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
from ckptfs_client.errors import INTERRUPTED, PIPE_CLOSED, ClientError, PipeClosed
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
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        act()
    except ClientError as failure:
        _end(failure)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (BrokenPipeError, PipeClosed):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(PIPE_CLOSED)
    except OSError as failure:
        if failure.filename is None:
            raise
        from ckptfs_client.mounts import build_path_error

        _end(build_path_error(os.fsdecode(failure.filename), failure))


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
