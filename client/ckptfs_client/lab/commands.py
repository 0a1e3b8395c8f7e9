"""`ckptfs lab ...`: words and tables around `Laboratory`. Everything heavy is imported where it is used.

If we die here: see `laboratory`.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptfs_client.errors import EXIT_CODES, UsageError

if TYPE_CHECKING:
    from ckptfs_client.json_answers import LabJson
    from ckptfs_client.lab.laboratory import Laboratory

EPILOG = "Exit codes: " + "; ".join(f"{code} {words}" for code, words in EXIT_CODES.items()) + "."
app = typer.Typer(
    no_args_is_help=True, epilog=EPILOG,
    help="A cluster on this one machine, for trying, teaching and testing: in network namespaces an etcd, and a daemon for each node.",
)  # fmt: skip

LabDirectory = Annotated[
    Path | None, typer.Option("--dir", envvar="CKPTFS_LAB", help="The lab's directory.  [default: /var/lib/ckptfs/lab]")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NodeName = Annotated[str, typer.Argument(metavar="NODE", help="node1, node2, ...")]


@app.command(epilog=EPILOG)
def start(
    what: Annotated[str | None, typer.Argument(metavar="[etcd]", help="Only etcd, after `stop etcd`.")] = None,
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 3,
    factor: Annotated[int, typer.Option(help="On how many nodes a content shall be (replication_factor).")] = 2,
    pfs: Annotated[Path | None, typer.Option(help="A directory to be the PFS; without it, one in the lab.")] = None,
    no_pfs: Annotated[bool, typer.Option("--no-pfs", help="No PFS at all: what survives is on other nodes.")] = False,
    options: Annotated[list[str] | None, typer.Option("-o", metavar="KEY=VALUE,...", help="More options for every daemon.")] = None,
    directory: LabDirectory = None,
    json: Json = False,
) -> None:
    """Make a lab and start all of it."""
    from ckptfs import config
    from ckptfs.errors import ConfigError

    lab = _open_laboratory(directory)
    if what is not None:
        _require_etcd(what)
        lab.start_etcd()
        return
    try:
        more = config.parse_options(",".join(options or []))
    except ConfigError as failure:
        raise UsageError(str(failure)) from failure
    if no_pfs and pfs is not None:
        raise UsageError("--pfs and --no-pfs exclude each other")
    lab.start(nodes, factor, None if no_pfs else pfs or lab.directory / "pfs", more)
    _print_status(lab, json=json)


@app.command(epilog=EPILOG)
def stop(
    what: Annotated[str | None, typer.Argument(metavar="[etcd]", help="Only etcd: kill it; `start etcd` starts it again.")] = None,
    directory: LabDirectory = None,
) -> None:
    """End and delete the lab with all that is in it, its PFS too unless --pfs named one elsewhere. Nothing is drained."""
    lab = _open_laboratory(directory)
    if what is not None:
        _require_etcd(what)
        lab.stop_etcd()
    elif not lab.stop():
        print(f"there is no lab in {lab.directory}", file=sys.stderr)


@app.command(epilog=EPILOG)
def status(directory: LabDirectory = None, json: Json = False) -> None:
    """What runs, what is mounted, and how the wires are."""
    _print_status(_open_laboratory(directory), json=json)


@app.command(epilog=EPILOG)
def kill(node: NodeName, directory: LabDirectory = None) -> None:
    """kill -9 of everything that runs on a node, programs started with `exec` too."""
    _open_laboratory(directory).kill(node)


@app.command(epilog=EPILOG)
def wipe(
    node: NodeName,
    nvme: Annotated[bool, typer.Option("--nvme", help="Its NVMe tier and its catalog too: it starts again as a new machine.")] = False,
    directory: LabDirectory = None,
) -> None:
    """Kill a node; what lay in its RAM is lost."""
    _open_laboratory(directory).wipe(node, nvme=nvme)


@app.command("start-node", epilog=EPILOG)
def start_node(node: NodeName, directory: LabDirectory = None) -> None:
    """Start a node again that was killed; the name after the last one's adds a node."""
    _open_laboratory(directory).start_node(node)


@app.command("restart-node", epilog=EPILOG)
def restart_node(node: NodeName, directory: LabDirectory = None) -> None:
    """Unmount a node in order and mount it again."""
    _open_laboratory(directory).restart_node(node)


@app.command(epilog=EPILOG)
def cut(node: NodeName, directory: LabDirectory = None) -> None:
    """Take a node's link down: it reaches no other node, nor etcd."""
    _open_laboratory(directory).cut(node)


@app.command(epilog=EPILOG)
def slow(
    node: NodeName,
    rate: Annotated[str, typer.Option(help="Such as 100mbit or 1gbit.")],
    directory: LabDirectory = None,
) -> None:
    """Limit what a node sends and gets."""
    _open_laboratory(directory).slow(node, _parse_bits_per_s(rate))


@app.command("heal", epilog=EPILOG)
def heal(
    node: Annotated[str | None, typer.Argument(metavar="[NODE]", help="Only this node.")] = None, directory: LabDirectory = None
) -> None:
    """Bring a node back: link up, no limit, daemon running. Without NODE all of them, and etcd."""
    _open_laboratory(directory).heal(*([node] if node else []))


@app.command("exec", epilog=EPILOG, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def execute(
    node: NodeName,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="A program and its arguments.")],
    directory: LabDirectory = None,
) -> None:
    """Run a program on a node: in its network, with CKPTFS_MOUNT naming its mount."""
    _open_laboratory(directory).execute(node, command[command[0] == "--" :])


def _open_laboratory(directory: Path | None) -> "Laboratory":
    from ckptfs_client.lab import layout as plan
    from ckptfs_client.lab.laboratory import Laboratory

    return Laboratory(directory or plan.DIRECTORY, say=lambda words: print(words, file=sys.stderr, flush=True))


def _require_etcd(what: str) -> None:
    if what != "etcd":
        raise UsageError(f"{what!r} cannot be named here; accepted: etcd", remedy="`kill` and `start-node` take the name of a node")


def _parse_bits_per_s(rate: str) -> int:
    """Bits per second of "100mbit"."""
    import re

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])(?:bit|bit/s|bps)?", rate.strip().lower())
    bits = int(float(match[1]) * {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}[match[2]]) if match else 0
    if bits < 8_000:
        raise UsageError(f"{rate!r} is not a rate; accepted: 8kbit and more, such as 500kbit, 100mbit, 1gbit")
    return bits


def _print_status(lab: "Laboratory", *, json: bool) -> None:
    from ckptfs_client import render as show

    found = lab.get_status()
    if json:
        show.print_json(found)
    else:
        show.print_renderable(_build_status_table(found))


def _build_status_table(found: "LabJson") -> Any:
    from rich.console import Group

    from ckptfs_client import render as show

    etcd = "answers" if found["etcd"]["answers"] else "down"
    where = f"PFS {found['pfs']}" if found["pfs"] else "no PFS"
    head = (
        f"lab in {found['directory']}: cluster {found['cluster']}, {found['factor']} copies, {where}\n"
        f"etcd at {found['etcd']['address']}: {etcd}\n"
    )
    table = show.grid("node", "daemon", "link", "address", "mount")
    for node in found["nodes"]:
        daemon = "runs" if node["runs"] else "dead"
        link = node["link"] + (", slowed" if node["slowed"] else "")
        table.add_row(node["name"], daemon, link, node["address"], node["mountpoint"])
    return Group(head, table)
