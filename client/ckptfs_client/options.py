"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from ckptfs.model import Level

LEVELS = [Level.LOCAL.value, Level.CLIQUE.value, Level.PFS.value]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Paths = Annotated[list[Path], typer.Argument(metavar="PATH", help="Files or directories in a mount.")]
