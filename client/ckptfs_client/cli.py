"""The command `ckptfs`: its subcommands, their options and their output.

Everything heavy (gRPC, rich, cryptography) is imported where it is used, so that `ckptfs --help` and `ckptfs version` are instant.
A drain goes on in the daemon if the command is interrupted.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer import Argument, Option

from ckptfs import __version__
from ckptfs.errors import CkptfsError
from ckptfs_client import mounts, render
from ckptfs_client.analysis import analysis_commands
from ckptfs_client.chaos import chaos_command
from ckptfs_client.errors import EPILOG, CommandFailed, NoMount, PipeClosed, UsageError
from ckptfs_client.json_answers import LogLevelJson, VersionJson
from ckptfs_client.lab import commands
from ckptfs_client.node import node_commands
from ckptfs_client.options import (
    LEVELS,
    AnyDirectory,
    Directory,
    Json,
    JsonLines,
    Paths,
    Timeout,
    connect,
    level_option,
    parse_option,
    parse_seconds,
    time_option,
)  # fmt: skip
from ckptfs_client.sets import set_commands

KeysDirectory = Annotated[Path, Argument(metavar="DIR", help="The CA's directory. Keep ca.key secret: it can sign any node.")]
KeysNode = Annotated[str, Argument(metavar="NODE", help="The node's name: its node= option, or else its host name.")]

app = typer.Typer(
    name="ckptfs", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Inspect and control ckptfs mounts: what is stored where, and how safe it is. Example: ckptfs status /ckpt",
)  # fmt: skip
keys_app = typer.Typer(
    no_args_is_help=True, help="Issue and revoke the certificates of a cluster's nodes. Example: ckptfs keys init /etc/ckptfs/ca"
)
cluster_app = typer.Typer(no_args_is_help=True, help="Repair what the nodes of a cluster share. Example: ckptfs cluster adopt /ckpt")
app.add_typer(set_commands.app)
app.add_typer(node_commands.app)
app.add_typer(analysis_commands.app)
app.add_typer(commands.app, name="lab")
app.add_typer(chaos_command.app)
app.add_typer(keys_app, name="keys")
app.add_typer(cluster_app, name="cluster")


def main() -> None:
    """Run the command. Raises ClientError, PipeClosed."""
    command = build_command()
    command.invoke = functools.partial(_invoke, command.invoke)
    command(prog_name="ckptfs")


def _invoke(invoke: Callable[[Any], Any], context: Any) -> Any:
    """Run a command. Click would end it with the exit code 1 if its output cannot be written."""
    try:
        return invoke(context)
    except BrokenPipeError as failure:
        raise PipeClosed from failure


def build_command() -> Any:
    """Build the command. Each help shows placeholders (LEVEL), no types of Python, and the exit codes."""
    command = typer.main.get_command(app)
    for one in _walk(command):
        one.epilog = EPILOG
        for parameter in one.params:
            placeholder = None if parameter.param_type_name == "argument" else parameter.metavar or (parameter.name or "").upper()
            parameter.display_type_rich = functools.partial(_get_placeholder, placeholder)
    return command


def _walk(command: Any) -> Iterator[Any]:
    yield command
    for below in getattr(command, "commands", {}).values():
        yield from _walk(below)


def _get_placeholder(placeholder: str | None, ctx: Any) -> str | None:
    return placeholder


def _print_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def _take_common_options(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version of ckptfs and exit.")
    ] = False,
) -> None:
    """Inspect and control ckptfs mounts: what is stored where, and how safe it is."""


# --- one mount --------------------------------------------------------------------------------------------------------


@app.command()
def status(
    directory: AnyDirectory = None,
    json: Json = False,
    watch: Annotated[bool, Option("--watch", "-w", help="Show every second whether the newest checkpoints are safe; q ends it.")] = False,
    cluster: Annotated[bool, Option("--cluster", help="Show the cluster: its nodes, their peers and what lags.")] = False,
) -> None:
    """Show tiers, write-back, troubles and processes of mounts.

    If there are several mounts, each has one line; DIR shows all figures of one. The exit code is 3 if a mount does not answer. With
    --json: one object for one mount, a list for several.

    Example: ckptfs status /ckpt --watch
    """
    from ckptfs_client.client import list_statuses

    if cluster:
        if watch:
            raise UsageError("--cluster and --watch exclude each other")
        with connect(directory) as client:
            answer = client.get_cluster()
        render.print_answer(render.message_to_dict(answer), lambda: render.build_cluster(answer), json=json)
        return
    chosen = mounts.choose_all(directory)
    if watch:
        from ckptfs_client.dashboard.status_screen import watch_status

        watch_status(chosen, json=json)
        return
    answers = list_statuses(chosen)
    if json:
        plain = [render.message_to_dict(answer) for answer in answers]
        render.print_json(plain[0] if directory is not None or len(plain) == 1 else plain)
    else:
        render.print_renderable(render.build_status(answers[0]) if len(answers) == 1 else render.build_overview(answers))
    if any(one.health == render.DOWN for one in answers):
        raise typer.Exit(NoMount.exit_code)


@app.command()
def df(
    directory: AnyDirectory = None,
    checkpoint: Annotated[str | None, Option(metavar="SIZE", help="Check whether checkpoints fit if each rank writes SIZE.")] = None,
    keep: Annotated[int, Option(min=0, help="Complete checkpoints to keep while the next one is written.")] = 1,
    ranks_per_node: Annotated[int, Option(min=1, help="Ranks on each node; each of them writes SIZE.")] = 1,
    json: Json = False,
) -> None:
    """Show the space of each tier; check whether a run fits.

    With --checkpoint, the exit code is 1 if the checkpoints do not fit. With --json: one object for one mount, a list for several.

    Example: ckptfs df /ckpt --checkpoint 40G --keep 2 --ranks-per-node 8
    """
    from ckptfs import config
    from ckptfs_client.analysis import capacity
    from ckptfs_client.client import ask_answering

    size = None if checkpoint is None else parse_option(config.parse_size, checkpoint)
    asked = mounts.choose_all(directory)
    answers, has_silent = ask_answering(asked, capacity.ask)
    reports = [(mount, capacity.build_report(*answer, size and size * ranks_per_node, keep)) for mount, answer in answers]
    if json and reports:
        plain = [capacity.report_to_json(report) for _, report in reports]
        render.print_json(plain[0] if len(asked) == 1 else plain)
    elif not json:
        for number, (mount, report) in enumerate(reports):
            if len(asked) > 1:
                print("\n" * bool(number) + f"{mount.name} on {mount.mountpoint}")
            capacity.print_report(report)
    if has_silent:
        raise typer.Exit(NoMount.exit_code)
    if any(report.fit is not None and not report.fit["fits"] for _, report in reports):
        raise typer.Exit(1)


@app.command()
def drain(
    directory: Directory = None,
    deadline: Annotated[
        str | None, time_option("End after this time, such as 25s. The most urgent checkpoints come first until then.")
    ] = None,
    level: Annotated[str | None, level_option("Drain to this level, clique or pfs; default: the highest.", LEVELS[1:])] = None,
    json: JsonLines = False,
) -> None:
    """Bring every closed file up to its highest level now.

    With --deadline or --level, the newest checkpoint of each series comes first; of these, the one with the fewest bytes missing. The
    command does not wait for open files, but copies of them are made on other nodes. At the end it says which checkpoints are safe. The
    exit code is 4 if some closed files have not reached the level; the daemon goes on with them.

    Example: ckptfs drain /ckpt --deadline 25s --level clique
    """
    if level is not None and level not in LEVELS[1:]:
        raise UsageError(f"{level[:20]!r} is not a level to drain to; accepted: {', '.join(LEVELS[1:])}")
    with connect(directory) as client:
        point = client.mount.mountpoint
        done = f"{point} is drained: every closed file has " + (f"the level {level}" if level else "its highest level")
        render.follow_progress(client.drain(parse_seconds(deadline), level or ""), f"draining {point}", done, json=json)


def _get_log_levels() -> tuple[str, ...]:
    from ckptfs.config.schema import LOG_LEVELS

    return LOG_LEVELS


@app.command("log-level")
def log_level(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="[DIR] [debug|info|warning|error]",
            autocompletion=lambda: list(_get_log_levels()),
            help="A path in the mount, and the new level.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show or set the log level of a mount.

    The level applies to all processes of the daemon at once. A new daemon starts with log_level= of its configuration.

    Example: ckptfs log-level /ckpt debug
    """
    given, levels = list(words or []), _get_log_levels()
    level = given.pop() if given and given[-1] in levels else ""
    if len(given) > 1 or (given and "/" not in given[0] and not os.path.lexists(given[0])):
        raise UsageError(f"{given[-1]!r} is not a log level; accepted: {', '.join(levels)}")
    with connect(Path(given[0]) if given else None) as client:
        found = client.get_or_set_log_level(level)
    answer: LogLevelJson = {"level": found}
    render.print_answer(answer, lambda: found, json=json)


# --- files ------------------------------------------------------------------------------------------------------------


@app.command("ls")
def list_files(
    paths: Paths,
    json: Json = False,
    itself: Annotated[bool, Option("-d", help="List a directory itself, not its entries.")] = False,
) -> None:
    """List files with level, generation, digest and copies.

    A `*` marks a file with changes that are not on the PFS yet. A directory is shown with the lowest level of the files below it, and with
    the sum of their sizes.

    Example: ckptfs ls /ckpt/run1/step_100
    """
    from ckptfs_client.node.files import build_listing, list_rows

    found = [row for path in paths for row in list_rows(path, itself=itself)]
    if found or json:
        render.print_answer(found, lambda: build_listing(found), json=json)


@app.command()
def wait(
    paths: Paths,
    level: Annotated[str, level_option("local: safe if ckptfs dies; clique: safe if this node dies; pfs: on the PFS.")] = "pfs",
    timeout: Timeout = None,
    json: JsonLines = False,
) -> None:
    """Wait until files or whole directories reach a level.

    A directory has the level pfs if all files below it have it, and the names that this node has removed or renamed there are gone from
    the PFS. A removal that the PFS refuses is not waited for; `ckptfs status` names it.

    Example: ckptfs wait /ckpt/run1/step_100 --level clique --timeout 5m
    """
    from ckptfs_client.client import open_client

    limit = parse_seconds(timeout)
    end = None if limit is None else time.monotonic() + limit
    if level not in LEVELS:
        raise UsageError(f"{level[:20]!r} is not a level that can be waited for; accepted: {', '.join(LEVELS)}")
    for path in paths:
        client, inode = open_client(path)
        with client:
            left = None if end is None else max(0.001, end - time.monotonic())
            render.follow_progress(client.wait(inode, level, left), f"{path} to {level}", f"{path} has the level {level}", json=json)


@app.command()
def refresh(
    path: Annotated[Path, Argument(metavar="DIR", help="A directory in a mount; for a file, its directory.")],
    recursive: Annotated[bool, Option("--recursive", "-r", help="Include all directories below.")] = False,
    timeout: Timeout = None,
) -> None:
    """Pick up changes that other programs made on the PFS.

    Example: ckptfs refresh /ckpt/data --recursive
    """
    from ckptfs_client.client import open_client

    client, inode = open_client(path if path.is_dir() else path.parent)
    with client:
        try:
            client.refresh(inode, recursive=recursive, timeout_s=parse_seconds(timeout))
        except CommandFailed as failure:
            remedy = failure.remedy or "`ckptfs status` says what is wrong with the PFS"
            raise CommandFailed(f"{path}: it could not be compared with the PFS: {failure.args[0]}", remedy=remedy) from None
    mounts.find_inode(path)  # It may be a name that only the PFS had, or a wrong one.
    print(f"{path} is compared with the PFS: the mount shows what is there now")


# --- this machine -----------------------------------------------------------------------------------------------------


@app.command()
def doctor(json: Json = False) -> None:
    """Check this machine and its mounts, and suggest remedies.

    The exit code is 1 if something is bad.

    Example: ckptfs doctor --json
    """
    from ckptfs_client.node import doctor as checks

    found = checks.examine()
    if json:
        render.print_json([one._asdict() for one in found])
    else:
        width = max(len(one.check) for one in found) + 2
        for one in found:
            print(f"{one.verdict:8}{one.check:{width}}{one.what}" + (f"\n{'':{8 + width}}-> {one.remedy}" if one.remedy else ""))
    if any(one.verdict == checks.BAD for one in found):
        raise typer.Exit(1)


@app.command("mounts")
def list_names(
    delete: Annotated[str | None, Option(metavar="NAME", help="Delete what an unmounted name holds on this node.")] = None,
    yes: Annotated[bool, Option("--yes", help="With --delete: delete it even if data are lost.")] = False,
    json: Json = False,
) -> None:
    """List all names, also unmounted ones that still hold data.

    Each unmounted name is shown with what it holds, and how to mount or delete it. Deleting never touches the PFS.

    Example: ckptfs mounts --delete run1
    """
    from ckptfs_client.node import unmounted

    if delete is not None:
        gone = unmounted.delete(delete, yes=yes)
        print(f"{gone.name} is deleted: its catalog, its RAM tier and its files on NVMe; the PFS is as it was")
        return
    found = unmounted.describe_all()
    if json:
        render.print_json(found)
        return
    names = [one["name"] for one in found]
    for one in found:
        if one["mounted"]:
            print(f"{one['name']}: mounted at {one['mountpoint']}")
        else:
            print(f"{one['name']}: not mounted; {one['what']}")
            which = one["state"] if names.count(one["name"]) > 1 else one["name"]
            print(f"    mount it:  {one['mount_command']}\n    delete it: ckptfs mounts --delete {which}")
    if not found:
        print("no ckptfs is mounted on this machine, and no unmounted one is known; mount -t ckptfs NAME DIR mounts one")


@app.command()
def version(json: Json = False) -> None:
    """Print the version of ckptfs.

    Example: ckptfs version --json
    """
    answer: VersionJson = {"version": __version__}
    render.print_answer(answer, lambda: f"ckptfs {__version__}", json=json)


@app.command("help")
def show_help(
    context: typer.Context, words: Annotated[list[str] | None, Argument(metavar="[COMMAND]", help="The command to explain.")] = None
) -> None:
    """Explain ckptfs or one of its commands.

    Example: ckptfs help wait
    """
    whole: Any = context.find_root().command
    whole.main([*(words or []), "--help"], prog_name="ckptfs")


# --- cluster ----------------------------------------------------------------------------------------------------------


@cluster_app.command()
def adopt(
    directory: Directory = None,
    last: Annotated[bool, Option("--last", help="No other node will adopt: those that have not are gone for good.")] = False,
    json: JsonLines = False,
) -> None:
    """Adopt an etcd that lost its data as that of the cluster.

    The node puts all that it knows of the shared tree into etcd. Run it on one node after the other, first on the one that wrote last.
    Until all nodes have adopted it, or one ran with --last, nothing is written back to the PFS.

    Example: ckptfs cluster adopt /ckpt
    """
    with connect(directory) as client:
        point = client.mount.mountpoint
        done = f"{point}: etcd knows all that this node knows; go on with the next node"
        render.follow_progress(client.adopt(is_last=last), f"adopting the store of {point}", done, json=json)


# --- keys -------------------------------------------------------------------------------------------------------------


@keys_app.command()
def init(directory: KeysDirectory, cluster: Annotated[str, Option(help="The cluster's name, as in cluster=NAME.")] = "ckptfs") -> None:
    """Create the CA of a cluster: DIR/ca.pem and DIR/ca.key.

    Example: ckptfs keys init /etc/ckptfs/ca --cluster training
    """
    with _certificates() as certificates:
        certificates.init(directory, cluster)
    authority = f"{directory}/{certificates.CA_CERTIFICATE}"
    print(f"{authority} is the CA of cluster {cluster}; ckptfs keys issue {directory} NODE makes the keys of a node")


@keys_app.command()
def issue(
    directory: KeysDirectory,
    node: KeysNode,
    address: Annotated[list[str] | None, Option(help="A host name or IP address to name in the certificate too.")] = None,
) -> None:
    """Create the keys of a node in DIR/NODE.

    Copy ca.pem, node.pem and node.key from there to the node, and mount with keys=DIRECTORY.

    Example: ckptfs keys issue /etc/ckptfs/ca node7 --address 10.0.0.7
    """
    with _certificates() as certificates:
        target = certificates.issue(directory, node, address or [])
    print(f"{target} holds the keys of node {node}; copy it to the node and mount with keys=DIRECTORY")


@keys_app.command()
def revoke(directory: KeysDirectory, node: KeysNode) -> None:
    """Revoke all keys that were issued to a node.

    Use it if the keys are lost or stolen. To let the node go on, issue new keys for it.

    Example: ckptfs keys revoke /etc/ckptfs/ca node7
    """
    with _certificates() as certificates:
        lists = certificates.revoke(directory, node)
    if not any(directory.glob(f".{node}.revoked-*")):
        print(f"there are no keys of a node {node} in {directory}: check the name")
    print(f"the keys of node {node} are revoked; copy {lists[0]} into the directory keys= of every node: running daemons read it")


@contextlib.contextmanager
def _certificates() -> Iterator[ModuleType]:
    """Yield the module that makes keys. Its errors become those of a command."""
    from ckptfs.clique import certificates

    try:
        yield certificates
    except (CkptfsError, OSError) as failure:
        raise CommandFailed(str(failure), remedy=getattr(failure, "remedy", "")) from failure
