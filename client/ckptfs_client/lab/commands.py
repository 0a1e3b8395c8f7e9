"""The commands `ckptfs lab ...` around `Laboratory`. Everything heavy is imported where it is used."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from ckptfs_client import render
from ckptfs_client.errors import UsageError
from ckptfs_client.options import Json, parse_option

if TYPE_CHECKING:
    from ckptfs_client.json_answers import LabJson
    from ckptfs_client.lab.laboratory import Laboratory

app = typer.Typer(
    no_args_is_help=True, help="Run a cluster on this machine, in network namespaces. Example: sudo ckptfs lab start --nodes 3"
)

LabDirectory = Annotated[Path | None, Option("--dir", envvar="CKPTFS_LAB", help="The lab's directory.  [default: /var/lib/ckptfs/lab]")]
NodeName = Annotated[str, Argument(metavar="NODE", help="node1, node2, ...")]


@app.command()
def start(
    what: Annotated[str | None, Argument(metavar="[etcd]", help="Start only etcd, after `stop etcd`.")] = None,
    nodes: Annotated[int, Option(help="The number of nodes.")] = 3,
    factor: Annotated[int, Option(help="The number of nodes that hold each file (replication_factor).")] = 2,
    pfs: Annotated[Path | None, Option(help="The directory that serves as the PFS.  [default: one in the lab]")] = None,
    no_pfs: Annotated[bool, Option("--no-pfs", help="No PFS: only copies on other nodes survive a node.")] = False,
    options: Annotated[list[str] | None, Option("-o", metavar="KEY=VALUE,...", help="More mount options for every node.")] = None,
    directory: LabDirectory = None,
    json: Json = False,
) -> None:
    """Create a lab and start all of it.

    Example: ckptfs lab start --nodes 5 --factor 3
    """
    from ckptfs import config

    lab = _open_laboratory(directory)
    if what is not None:
        _require_etcd(what)
        lab.start_etcd()
        return
    more = parse_option(config.parse_options, ",".join(options or []))
    if no_pfs and pfs is not None:
        raise UsageError("--pfs and --no-pfs exclude each other")
    lab.start(nodes, factor, None if no_pfs else pfs or lab.directory / "pfs", more)
    _print_status(lab, json=json)


@app.command()
def stop(
    what: Annotated[str | None, Argument(metavar="[etcd]", help="Kill only etcd; `start etcd` starts it again.")] = None,
    directory: LabDirectory = None,
) -> None:
    """Stop the lab and delete everything in it.

    Nothing is drained. The PFS is deleted too, unless --pfs named a directory elsewhere.

    Example: ckptfs lab stop
    """
    lab = _open_laboratory(directory)
    if what is not None:
        _require_etcd(what)
        lab.stop_etcd()
    elif not lab.stop():
        print(f"there is no lab in {lab.directory}", file=sys.stderr)


@app.command()
def status(directory: LabDirectory = None, json: Json = False) -> None:
    """Show the nodes with their daemons, links and mounts.

    Example: ckptfs lab status --json
    """
    _print_status(_open_laboratory(directory), json=json)


@app.command()
def kill(node: NodeName, directory: LabDirectory = None) -> None:
    """Kill (-9) every process of a node, those of `exec` too.

    Example: ckptfs lab kill node2
    """
    _open_laboratory(directory).kill(node)


@app.command()
def wipe(
    node: NodeName,
    nvme: Annotated[bool, Option("--nvme", help="Delete its NVMe tier and its catalog too: it returns as a new machine.")] = False,
    directory: LabDirectory = None,
) -> None:
    """Kill a node and delete its RAM tier.

    Example: ckptfs lab wipe node2 --nvme
    """
    _open_laboratory(directory).wipe(node, nvme=nvme)


@app.command("start-node")
def start_node(node: NodeName, directory: LabDirectory = None) -> None:
    """Start a killed node again, or add a node.

    The name after that of the last node adds one: node4 to a lab of three.

    Example: ckptfs lab start-node node4
    """
    _open_laboratory(directory).start_node(node)


@app.command("restart-node")
def restart_node(node: NodeName, directory: LabDirectory = None) -> None:
    """Unmount a node cleanly and mount it again.

    Example: ckptfs lab restart-node node1
    """
    _open_laboratory(directory).restart_node(node)


@app.command()
def cut(node: NodeName, directory: LabDirectory = None) -> None:
    """Cut a node off from the other nodes and from etcd.

    Example: ckptfs lab cut node3
    """
    _open_laboratory(directory).cut(node)


@app.command()
def slow(
    node: NodeName,
    rate: Annotated[str, Option(help="Such as 100mbit or 1gbit.")],
    directory: LabDirectory = None,
) -> None:
    """Limit the bandwidth of a node in both directions.

    Example: ckptfs lab slow node2 --rate 100mbit
    """
    _open_laboratory(directory).slow(node, _parse_bits_per_s(rate))


@app.command("heal")
def heal(
    node: Annotated[str | None, Argument(metavar="[NODE]", help="Heal only this node.")] = None, directory: LabDirectory = None
) -> None:
    """Undo kill, cut and slow for a node, or for all of them.

    Without NODE, etcd is started too.

    Example: ckptfs lab heal node3
    """
    _open_laboratory(directory).heal(*([node] if node else []))


@app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def execute(
    node: NodeName,
    command: Annotated[list[str], Argument(metavar="-- COMMAND...", help="A program and its arguments.")],
    directory: LabDirectory = None,
) -> None:
    """Run a program in the network of a node.

    CKPTFS_MOUNT is the path of the node's mount. Example: ckptfs lab exec node1 -- bash
    """
    _open_laboratory(directory).execute(node, command[command[0] == "--" :])


def _open_laboratory(directory: Path | None) -> "Laboratory":
    from ckptfs_client.lab import layout
    from ckptfs_client.lab.laboratory import Laboratory

    return Laboratory(directory or layout.DIRECTORY, say=lambda words: print(words, file=sys.stderr, flush=True))


def _require_etcd(what: str) -> None:
    if what != "etcd":
        raise UsageError(f"{what!r} is not accepted; accepted: etcd", remedy="`kill` and `start-node` take the name of a node")


def _parse_bits_per_s(rate: str) -> int:
    """Return bits per second for "100mbit"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])(?:bit|bit/s|bps)?", rate.strip().lower())
    bits = int(float(match[1]) * {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}[match[2]]) if match else 0
    if bits < 8_000:
        raise UsageError(f"{rate!r} is not a rate; accepted: 8kbit and more, such as 500kbit, 100mbit, 1gbit")
    return bits


def _print_status(lab: "Laboratory", *, json: bool) -> None:
    found = lab.get_status()
    render.print_answer(found, lambda: _build_status_table(found), json=json)


def _build_status_table(found: "LabJson") -> Any:
    from rich.console import Group

    etcd = "answers" if found["etcd"]["answers"] else "down"
    where = f"PFS {found['pfs']}" if found["pfs"] else "no PFS"
    head = (
        f"lab in {found['directory']}: cluster {found['cluster']}, {found['factor']} copies, {where}\n"
        f"etcd at {found['etcd']['address']}: {etcd}\n"
    )
    table = render.build_grid("node", "daemon", "link", "address", "mount")
    for node in found["nodes"]:
        daemon = "runs" if node["runs"] else "dead"
        link = node["link"] + (", slowed" if node["slowed"] else "")
        table.add_row(node["name"], daemon, link, node["address"], node["mountpoint"])
    return Group(head, table)
