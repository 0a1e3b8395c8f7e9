"""Options and arguments that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from typer import Argument, Option

from ckptfs.model import WAITABLE_LEVELS
from ckptfs_client import mounts
from ckptfs_client.errors import UsageError

if TYPE_CHECKING:
    from ckptfs_client.client import Client

T = TypeVar("T")

LEVELS = [level.value for level in WAITABLE_LEVELS]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
JsonLines = Annotated[bool, Option("--json", help="Print the progress as JSON, one line per change.")]
Timeout = Annotated[str | None, Option(metavar="TIME", help="Give up (exit code 4) after this time, such as 30s or 5m.")]
Paths = Annotated[list[Path], Argument(metavar="PATH", help="Files or directories in a mount.")]
AnyDirectory = Annotated[Path | None, Argument(metavar="DIR", parser=Path, help="A path in the mount. Without it: all mounts.")]
Directory = Annotated[
    Path | None, Argument(metavar="DIR", parser=Path, help="A path in the mount. Optional if only one ckptfs is mounted.")
]
"""Without the parser, typer asks the mount about the path, and the command hangs with it."""


def time_option(text: str) -> Any:
    """Return an option that takes a duration."""
    return Option(metavar="TIME", help=text)


def level_option(text: str, levels: list[str] = LEVELS) -> Any:
    """Return an option that takes a level, and completes it."""
    return Option(metavar="LEVEL", help=text, autocompletion=lambda: levels)


def parse_option(parse: Callable[[str], T], text: str) -> T:
    """Return the value of an option. Raises UsageError."""
    from ckptfs.errors import ConfigError

    try:
        return parse(text)
    except ConfigError as failure:
        raise UsageError(str(failure)) from failure


def parse_seconds(text: str | None) -> float | None:
    """Return the seconds of an option such as 5m. Raises UsageError."""
    from ckptfs import config

    return None if text is None else parse_option(config.parse_seconds, text)


def connect(directory: Path | None) -> "Client":
    """Return a client of the mount of a directory, or of the only one. Raises NoMount, UsageError."""
    from ckptfs_client.client import Client

    return Client(mounts.choose(directory))
