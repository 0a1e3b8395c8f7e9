"""The commands about series and checkpoint sets. Everything heavy is imported where it is used."""

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from ckptfs.model import Level
from ckptfs.quantities import format_count, format_size
from ckptfs_client import mounts, render
from ckptfs_client.errors import UsageError
from ckptfs_client.json_answers import SetChangeJson, VerifyJson
from ckptfs_client.options import LEVELS, Json, level_option

if TYPE_CHECKING:
    from ckptfs_client.sets.set_history import FoundSet, SetHistory

SET_FORMS = "RUN/step_100, RUN/step_100@NUMBER, 'RUN/step_*@NUMBER', or a path in .ckptfs/history."
SetArgument = Annotated[Path, Argument(metavar="SET", help=SET_FORMS)]
SeriesArgument = Annotated[Path, Argument(metavar="SERIES", help="A pattern such as 'run1/step_*', or the directory that holds it.")]
app = typer.Typer()


def parse_level(level: str) -> Level:
    """Return the level of an option. Raises UsageError."""
    if level not in LEVELS:
        raise UsageError(f"{level!r} is not a level; accepted: {', '.join(LEVELS)}")
    return Level(level)


@app.command("list")
def list_sets(
    where: Annotated[
        Path | None, Argument(metavar="SERIES|DIR", readable=False, help="A pattern such as 'run1/step_*', a directory, or a member.")
    ] = None,
    level: Annotated[str | None, level_option("Only sets that have this level: local, clique, pfs.")] = None,
    everything: Annotated[bool, Option("--all", help="All sets of a series, not only the newest 500. --json lists all, too.")] = False,
    json: Json = False,
) -> None:
    """List series of checkpoints, or the sets of a series.

    Without an argument, or for a directory with several series, each series has one line. With --level, all sets that have this level are
    listed. A set whose files the application has deleted or overwritten is in the history only. The newest checkpoint that is not complete
    is listed with the reason.

    Example: ckptfs list '/ckpt/run1/step_*' --level pfs
    """
    from ckptfs_client.sets import set_listing

    set_listing.print_list(where, None if level is None else parse_level(level), lists_all=everything, is_json=json)


@app.command()
def show(named: SetArgument, json: Json = False) -> None:
    """Show all that is known of a checkpoint set.

    Its files with sizes, levels and digests, the processes that wrote them, its note, and the path of its manifest.

    Example: ckptfs show /ckpt/run1/step_100
    """
    from ckptfs_client.sets import set_listing

    with _open_history(named) as history:
        found = history.find_set(named)
        shown = set_listing.describe_set(history, found)
    render.print_answer(shown, lambda: set_listing.format_set(shown, found.shown), json=json)


@app.command()
def latest(
    series: Annotated[
        list[Path], Argument(metavar="SERIES", help="A pattern such as 'run1/step_*', the directory that holds it, or a file of it.")
    ],
    level: Annotated[str, level_option("The lowest level to accept: local, clique, pfs.")] = "local",
    json: Json = False,
) -> None:
    """Print the path of the newest complete checkpoint.

    A checkpoint is complete if every file is sealed, readable and written to its end, and if no file is missing. Which files it must have
    follows from the marks of its kind, or from the checkpoint before it. Newer checkpoints that were rejected are named on standard error.
    The exit code is 1 if none is complete.

    Example: ckptfs latest '/ckpt/run1/step_*' --level clique
    """
    from ckptfs_client.sets import newest

    newest.print_newest(series, parse_level(level), is_json=json)


@app.command()
def verify(
    paths: Annotated[list[Path], Argument(metavar="PATH", help=f"Files or directories in a mount, series, or sets: {SET_FORMS}")],
    json: Json = False,
) -> None:
    """Read every copy of files, directories or checkpoint sets; check digests and formats.

    The header and the end of files of known formats (zip archives of torch.save, safetensors, HDF5 and others) are compared with their
    sizes. The files of a set are compared with its manifest, and with what such a checkpoint must have. A bad copy is quarantined and
    remade from a good one. The exit code is 1 if something is bad.

    Example: ckptfs verify '/ckpt/run1/step_*@17'
    """
    from ckptfs_client.sets import set_files

    total: VerifyJson = {"files": 0, "bytes": 0, "findings": [], "formats": []}
    for path in paths:
        set_files.verify(path, total)
    bad = [finding for finding in total["findings"] if finding["verdict"] in ("bad", "unreadable")]
    unknown = [finding for finding in total["findings"] if finding["verdict"] == "unknown"]
    flawed = [one for one in total["formats"] if one["flaw"]]
    if json:
        render.print_json(total)
    else:
        if bad or flawed:
            rows = [{"verdict": "bad", "tier": "", "path": one["path"], "what": render.describe_flaw(one)} for one in flawed]
            render.print_renderable(render.build_findings(bad + rows))
        verdict = f"bad: {format_count(len(bad), 'copy', 'copies')}" if bad else "no bad copy"
        words = [f"{format_count(total['files'], 'file')}, {format_size(total['bytes'])} read: {verdict}"]
        if unknown:
            words.append(f"{format_count(len(unknown), 'copy', 'copies')} could not be compared: not sealed yet, or written by others")
        if total["formats"]:
            words.append(f"{len(total['formats']) - len(flawed)} of {len(total['formats'])} known formats and sets are whole")
        print("; ".join(words))
    if bad or flawed:
        raise typer.Exit(1)


@app.command()
def restore(
    named: SetArgument,
    directory: Annotated[
        Path | None, Argument(metavar="DIR", help="The directory to restore it into, under its own name; also outside the mount.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Replace what is in its place, even if the set does not have it.")] = False,
    json: Json = False,
) -> None:
    """Bring a checkpoint set back to its place, or copy it to another directory.

    The set appears as a whole or not at all, and every file is compared with its digest. Files that the set does not have are never
    replaced without --force.

    Example: ckptfs restore '/ckpt/run1/step_*@17' /scratch
    """
    from ckptfs_client.sets.set_files import Restore

    with _open_history(named) as history:
        found = history.find_set(named)
        answer = Restore(history, found, Path(os.path.abspath(directory)) if directory is not None else found.series.place).run(force=force)
    amount = f"{format_count(answer['files'], 'file')}, {format_size(answer['bytes'])}"
    text = f"{answer['set']} is restored to {answer['path']}: {amount}, all digests are right"
    if not answer["files"]:
        text = f"{answer['set']} is in its place already: {answer['path']}; nothing was copied"
    render.print_answer(answer, lambda: render.escape_unprintable(text), json=json)


@app.command()
def rollback(
    series: SeriesArgument,
    to: Annotated[
        str | None, Argument(metavar="SET", help="Its name, its number, or both: step_100@17. Default: the one before the latest.")
    ] = None,
    undo: Annotated[bool, Option("--undo", help="End a rollback: the newest set is the latest again.")] = False,
    json: Json = False,
) -> None:
    """Make an older complete set the latest of its series.

    No data moves, and nothing newer is deleted. The next set that is completed is the latest again.

    Example: ckptfs rollback '/ckpt/run1/step_*' step_90
    """
    from ckptfs_client.sets import set_changes

    if undo and to is not None:
        raise UsageError("--undo takes no SET")
    with _open_history(series) as history:
        one = history.find_one_series(series)
        if undo:
            _print_change(one.shown, set_changes.undo_rollback(one), json=json)
        else:
            target = set_changes.choose_rollback(history, one, to)
            _print_change(target.shown, set_changes.roll_back(target), json=json)


@app.command()
def pin(named: SetArgument, json: Json = False) -> None:
    """Pin a checkpoint set: no rule deletes it.

    Example: ckptfs pin /ckpt/run1/step_100
    """
    _change_set(named, json, lambda changes, found, _: changes.set_pin(found, pinned=True))


@app.command()
def unpin(named: SetArgument, json: Json = False) -> None:
    """Let rules delete a checkpoint set again.

    Example: ckptfs unpin '/ckpt/run1/step_*@17'
    """
    _change_set(named, json, lambda changes, found, _: changes.set_pin(found, pinned=False))


@app.command()
def annotate(
    named: SetArgument,
    text: Annotated[str, Argument(metavar="TEXT", help="The note; an empty one deletes it.")],
    json: Json = False,
) -> None:
    """Give a checkpoint set a note.

    Example: ckptfs annotate /ckpt/run1/step_100 'before the new learning rate'
    """
    _change_set(named, json, lambda changes, found, _: changes.annotate(found, text))


@app.command()
def commit(
    path: Annotated[Path, Argument(metavar="PATH", help="A file or directory of a series.")],
    json: Json = False,
) -> None:
    """Declare a checkpoint complete if ckptfs cannot tell.

    Example: ckptfs commit /ckpt/run1/step_100
    """
    from ckptfs_client.sets import set_changes

    mounts.find_inode(path)
    _print_change(str(path), set_changes.commit(path), json=json)


@app.command()
def rm(
    named: SetArgument,
    now: Annotated[bool, Option("--now", help="Delete it from the history, too, even if it is the last verified one.")] = False,
    json: Json = False,
) -> None:
    """Remove a checkpoint set.

    Names of the application that still lead to files of the set are deleted. Without --now, the history keeps the set as long as it is
    pinned, no newer set is as safe, or a rule says so.

    Example: ckptfs rm /ckpt/run1/step_100
    """
    _change_set(named, json, lambda changes, found, history: changes.remove(history, found, now=now))


def _open_history(path: Path) -> "SetHistory":
    from ckptfs_client.sets.set_history import SetHistory

    return SetHistory.of(path)


def _change_set(named: Path, json: bool, change: Callable[[ModuleType, "FoundSet", "SetHistory"], str]) -> None:
    """Find a set, change it by the module `set_changes`, and print what was done."""
    from ckptfs_client.sets import set_changes

    with _open_history(named) as history:
        found = history.find_set(named)
        _print_change(found.shown, change(set_changes, found, history), json=json)


def _print_change(name: str, done: str, *, json: bool) -> None:
    answer: SetChangeJson = {"set": name, "done": done}
    render.print_answer(answer, lambda: render.escape_unprintable(done), json=json)
