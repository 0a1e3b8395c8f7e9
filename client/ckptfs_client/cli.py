"""The command `ckptfs`: asks the daemons that serve the mounts of this machine, and shows their answers.

Everything heavy (gRPC, rich) is imported where it is used, so that `ckptfs version` and shell completion are instant.
If we die here: nothing but a question was under way; drains and waits go on without us where they are the daemon's own work.

`ckptfs keys init|issue|revoke`: the keys by which the nodes of a cluster recognise one another.

If we die here: what was written is whole; the next run names what is there.
"""

import contextlib
import os
import sys
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from ckptfs.config.schema import LOG_LEVELS
from ckptfs.model import Level
from ckptfs_client.errors import EXIT_CODES, INTERRUPTED, PIPE_CLOSED, ClientError, CommandFailed, UsageError
from ckptfs_client.json_answers import CheckJson, DfJson, LatestJson, LogLevelJson, VerifyJson, VersionJson
from ckptfs_client.lab import commands

keys_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Makes a cluster's own CA, and a certificate for each of its nodes."
)
KeysDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="Where the CA lies. Keep ca.key safe: whoever has it can make nodes.")]


@keys_app.command()
def init(
    directory: KeysDirectory, cluster: Annotated[str, typer.Option(help="The cluster's name, as in cluster=NAME.")] = "ckptfs"
) -> None:
    """Make the CA of a cluster: DIR/ca.pem and DIR/ca.key."""
    from ckptfs.clique import certificates as keys
    from ckptfs.errors import CkptfsError

    try:
        keys.init(directory, cluster)
    except (CkptfsError, OSError) as failure:
        raise _build_failure(failure) from failure
    print(f"{directory}/{keys.CA_CERTIFICATE} is the CA of cluster {cluster}; ckptfs keys issue {directory} NODE makes the keys of a node")


@keys_app.command()
def issue(
    directory: KeysDirectory,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node's name, as in node=NAME; without that, its host name.")],
    address: Annotated[list[str] | None, typer.Option(help="A host name or IP address to name in the certificate too.")] = None,
) -> None:
    """Make DIR/NODE with ca.pem, node.pem and node.key: copy it to the node and give keys=DIRECTORY there."""
    from ckptfs.clique import certificates as keys
    from ckptfs.errors import CkptfsError

    try:
        target = keys.issue(directory, node, address or [])
    except (CkptfsError, OSError) as failure:
        raise _build_failure(failure) from failure
    print(f"{target} holds the keys of node {node}; copy it there and mount with keys=DIRECTORY")


@keys_app.command()
def revoke(
    directory: KeysDirectory, node: Annotated[str, typer.Argument(metavar="NODE", help="The node whose keys are lost, or known to others.")]
) -> None:
    """Make all keys of a node worthless that were issued so far; issue new ones if it shall go on."""
    from ckptfs.clique import certificates as keys
    from ckptfs.errors import CkptfsError

    try:
        lists = keys.revoke(directory, node)
    except (CkptfsError, OSError) as failure:
        raise _build_failure(failure) from failure
    if not any(directory.glob(f".{node}.revoked-*")):
        print(f"no keys of a node {node} lie in {directory}: see that the name is right")
    print(f"the keys of node {node} are revoked; copy {lists[0]} into the directory keys= of every node: they read it while they run")


def _build_failure(failure: Exception) -> CommandFailed:
    return CommandFailed(str(failure), remedy=getattr(failure, "remedy", ""))


EPILOG = "Exit codes: " + "; ".join(f"{code} {words}" for code, words in EXIT_CODES.items()) + "."

app = typer.Typer(
    name="ckptfs", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, epilog=EPILOG,
    help="Looks after ckptfs mounts: what is where, and how safe it is.",
)  # fmt: skip
app.add_typer(commands.app, name="lab")
app.add_typer(keys_app, name="keys")
LEVELS = [Level.LOCAL.value, Level.CLIQUE.value, Level.PFS.value]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print the progress as JSON, a line for each change.")]
Directory = Annotated[Path | None, typer.Argument(metavar="DIR", help="A path in the mount; may be left out when there is only one mount.")]
Paths = Annotated[list[Path], typer.Argument(metavar="PATH", help="Files or directories in a mount.")]


def main() -> None:
    """The entry point: errors become one sentence on stderr and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app()
    except ClientError as failure:
        print(f"ckptfs: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(PIPE_CLOSED)


def _parse_seconds(text: str | None) -> float | None:
    """The value of a --timeout or --deadline."""
    from ckptfs import config
    from ckptfs.errors import ConfigError

    try:
        return None if text is None else config.parse_seconds(text)
    except ConfigError as failure:
        raise UsageError(str(failure)) from failure


@app.command(epilog=EPILOG)
def status(
    directory: Directory = None,
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again every second until interrupted.")] = False,
    cluster: Annotated[bool, typer.Option("--cluster", help="The nodes of the cluster: who lives, where copies go, what lags.")] = False,
) -> None:
    """Tiers and budgets, what the PFS lacks, the data path, troubles, and the processes of each mount.

    JSON is one object for one mount, a list for several.
    """
    from ckptfs_client import mounts
    from ckptfs_client.progress_bar import list_statuses, watch_status

    if cluster:
        if watch:
            raise UsageError("--cluster and --watch exclude each other")
        _print_cluster(directory, json=json)
        return
    chosen = [mounts.choose(directory)] if directory is not None else mounts.list_mounts() or [mounts.choose(None)]
    if watch:
        watch_status(chosen, json=json)
        return
    from ckptfs_client import render as show

    answers = list_statuses(chosen)
    if json:
        plain = [show.message_to_dict(answer) for answer in answers]
        show.print_json(plain[0] if directory is not None or len(plain) == 1 else plain)
        return
    for answer in answers:
        show.print_renderable(show.status(answer))


def _print_cluster(directory: Path | None, *, json: bool) -> None:
    """Show the nodes of the cluster to which a mount belongs."""
    from ckptfs_client import mounts
    from ckptfs_client import render as show
    from ckptfs_client.client import Client

    with Client(mounts.choose(directory)) as client:
        answer = client.get_cluster()
    if json:
        show.print_json(show.message_to_dict(answer))
    else:
        show.print_renderable(show.cluster(answer))


@app.command(epilog=EPILOG)
def df(
    directory: Directory = None,
    checkpoint: Annotated[str | None, typer.Option(metavar="SIZE", help="Say whether checkpoints of this size per node fit.")] = None,
    keep: Annotated[int, typer.Option(min=0, help="How many whole ones are kept beside the one that is being written.")] = 1,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="SIZE is what each of so many ranks on a node writes.")] = 1,
    json: Json = False,
) -> None:
    """What each tier has, and what is held for peers; with --checkpoint whether a run fits, exit code 1 when it does not."""
    from ckptfs_client import capacity as room
    from ckptfs_client import mounts
    from ckptfs_client import render as show
    from ckptfs_client.client import Client

    size = None if checkpoint is None else _parse_bytes(checkpoint)
    with Client(mounts.choose(directory)) as client:
        found = client.get_capacity()
        cluster = client.get_cluster() if found.clustered else None
    clique = room.list_clique(found, cluster)
    verdict = None
    if size is not None:
        need = room.CapacityNeed(size * ranks_per_node, keep, max(0, found.replication_factor - 1))
        has_pfs = any(tier.name == room.PFS for tier in found.tiers)
        verdict = room.check_fit(need, room.list_tiers(found), room.list_peers(found, cluster), has_pfs=has_pfs)
    if json:
        more: DfJson = {"clique": [show.message_to_dict(member) for member in clique]}
        if verdict is not None:
            more["checkpoint"] = {"fits": bool(verdict.tier_names), "where": list(verdict.tier_names), "sentence": verdict.sentence}
        show.print_json({**show.message_to_dict(found), **more})
    else:
        show.print_renderable(room.build_tier_table(found))
        if clique:
            print()
            show.print_renderable(room.build_clique_table(clique, found.node))
        if verdict is not None:
            print(verdict.sentence)
    if verdict is not None and not verdict.tier_names:
        raise typer.Exit(1)


def _parse_bytes(text: str) -> int:
    """The value of --checkpoint."""
    from ckptfs import config
    from ckptfs.errors import ConfigError

    try:
        return config.parse_size(text)
    except ConfigError as failure:
        raise UsageError(str(failure)) from failure


@app.command("ls", epilog=EPILOG)
def list_files(
    paths: Paths,
    json: Json = False,
    itself: Annotated[bool, typer.Option("-d", help="A directory itself, not its entries.")] = False,
) -> None:
    """Files with their level, generation, digest and copies; `*` marks those that the PFS has not been told everything about."""
    from ckptfs_client import render as show
    from ckptfs_client.listing import list_rows

    found = [row for path in paths for row in list_rows(path, itself=itself)]
    if json:
        show.print_json(found)
    elif found:
        show.print_renderable(show.listing(found))


@app.command(epilog=EPILOG)
def latest(
    series: Annotated[list[Path], typer.Argument(metavar="SERIES", help="Such as 'run1/step_*', its directory, or a member.")],
    level: Annotated[str, typer.Option(help="At least as safe as that: local, clique, pfs.", autocompletion=lambda: LEVELS)] = "local",
    json: Json = False,
) -> None:
    """The path of the newest complete checkpoint of a series; exit code 1 when there is none.

    Complete: every file is sealed and can be read, and what torch.distributed.checkpoint writes has its .metadata.
    """
    from ckptfs_client.listing import find_newest

    if level not in LEVELS:
        raise UsageError(f"{level!r} is not a level; accepted: {', '.join(LEVELS)}")
    path, found = find_newest(series, Level(level))
    if json:
        from ckptfs_client import render

        verdict = found.verdict
        answer: LatestJson = {
            "number": found.number, "path": str(path), "level": verdict.level.value, "size": verdict.size, "files": verdict.files,
        }  # fmt: skip
        render.print_json(answer)
    else:
        # A program reads this: the bytes of the name, whatever they are.
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(path) + b"\n")


@app.command(epilog=EPILOG)
def wait(
    paths: Paths,
    level: Annotated[str, typer.Option(help="local: every ckptfs process may die; clique: this node may; pfs: it is on the PFS.")] = "pfs",
    timeout: Annotated[str | None, typer.Option(help="Give up (exit code 4) after this time, such as 30s or 5m.")] = None,
    json: JsonLines = False,
) -> None:
    """Wait until files, or directories with all below, have a level."""
    import time

    from ckptfs_client.client import open_client
    from ckptfs_client.progress_bar import follow_progress

    limit = _parse_seconds(timeout)
    end = None if limit is None else time.monotonic() + limit
    for path in paths:
        client, inode = open_client(path)
        with client:
            left = None if end is None else max(0.001, end - time.monotonic())
            follow_progress(client.wait(inode, level, left), f"{path} to {level}", json=json)


@app.command(epilog=EPILOG)
def drain(
    directory: Directory = None,
    deadline: Annotated[str | None, typer.Option(help="Stop waiting (exit code 4) after this time, such as 25s; the rest goes on.")] = None,
    json: JsonLines = False,
) -> None:
    """Bring everything that is closed up to its highest level now."""
    from ckptfs_client import mounts
    from ckptfs_client.client import Client
    from ckptfs_client.progress_bar import follow_progress

    with Client(mounts.choose(directory)) as client:
        follow_progress(client.drain(_parse_seconds(deadline)), f"draining {client.mount.mountpoint}", json=json)


@app.command(epilog=EPILOG)
def verify(paths: Paths, json: Json = False) -> None:
    """Read every copy of files, or of all below directories, and compare digests; exit code 1 when one is bad."""
    from ckptfs_client import render as show
    from ckptfs_client.client import open_client
    from ckptfs_client.progress_bar import follow_verification

    total: VerifyJson = {"files": 0, "bytes": 0, "findings": []}
    for path in paths:
        client, inode = open_client(path)
        with client:
            result = follow_verification(client.verify(inode), str(path))
        total["files"] += result["files"]
        total["bytes"] += result["bytes"]
        total["findings"] += result["findings"]
    bad = [finding for finding in total["findings"] if finding["verdict"] in ("bad", "unreadable")]
    unknown = [finding for finding in total["findings"] if finding["verdict"] == "unknown"]
    if json:
        show.print_json(total)
    else:
        if bad:
            show.print_renderable(show.findings(bad))
        verdict = f"bad: {show.format_count(len(bad), 'copy', 'copies')}" if bad else "no bad copy"
        without = f"; {len(unknown)} could not be compared: not sealed yet, or written by others" if unknown else ""
        print(f"{show.format_count(total['files'], 'file')}, {show.format_size(total['bytes'])} read: {verdict}{without}")
    if bad:
        raise typer.Exit(1)


@app.command(epilog=EPILOG)
def refresh(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A directory in a mount, or a file, whose directory is meant.")],
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="With all directories below.")] = False,
    timeout: Annotated[str | None, typer.Option(help="Give up waiting (exit code 4) after this time.")] = None,
) -> None:
    """Compare a directory with the PFS again, for what others changed there."""
    from ckptfs_client.client import open_client

    client, inode = open_client(path if path.is_dir() else path.parent)
    with client:
        client.refresh(inode, recursive=recursive, timeout_s=_parse_seconds(timeout))


@app.command("log-level", epilog=EPILOG)
def log_level(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[DIR] [debug|info|warning|error]", autocompletion=lambda: list(LOG_LEVELS))
    ] = None,
    json: Json = False,
) -> None:
    """Show, or set, what the processes of a mount log at least; a new daemon begins with its configuration's log_level."""
    from ckptfs_client import mounts
    from ckptfs_client.client import Client

    given = list(words or [])
    level = given.pop() if given and given[-1] in LOG_LEVELS else ""
    if len(given) > 1 or (given and "/" not in given[0] and not os.path.lexists(given[0])):
        raise UsageError(f"{given[-1]!r} is not a log level; accepted: {', '.join(LOG_LEVELS)}")
    with Client(mounts.choose(Path(given[0]) if given else None)) as client:
        found = client.get_or_set_log_level(level)
    answer: LogLevelJson = {"level": found}
    print(dumps(answer) if json else found)


@app.command(epilog=EPILOG)
def doctor(json: Json = False) -> None:
    """What is wrong with this machine for ckptfs, and how to mend it; exit code 1 when something must be."""
    from ckptfs_client import doctor as checks
    from ckptfs_client import doctor as findings

    found = checks.examine()
    if json:
        from ckptfs_client import render as show

        answer: list[CheckJson] = [{"check": one.name, "verdict": one.verdict, "what": one.what, "remedy": one.remedy} for one in found]
        show.print_json(answer)
    else:
        for one in found:
            print(f"{one.verdict:8}{one.name:16}{one.what}" + (f"\n{'':24}-> {one.remedy}" if one.remedy else ""))
    if any(one.verdict == findings.BAD for one in found):
        raise typer.Exit(1)


@app.command(epilog=EPILOG)
def version(json: Json = False) -> None:
    """The version of ckptfs."""
    from ckptfs import __version__

    answer: VersionJson = {"version": __version__}
    print(dumps(answer) if json else f"ckptfs {__version__}")
