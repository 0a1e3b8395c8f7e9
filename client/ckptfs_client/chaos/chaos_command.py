"""The command `ckptfs chaos`: a lab of its own, a campaign on it, and a verdict.

Everything heavy is imported where it is used.

Crash safety: the lab is deleted at the end, also after Ctrl-C and SIGTERM; after kill -9 `ckptfs lab stop --dir DIR` deletes it.
"""

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from ckptfs_client import render
from ckptfs_client.errors import ClientError, UsageError
from ckptfs_client.options import Json

if TYPE_CHECKING:
    from ckptfs_client.chaos.campaign import Campaign
    from ckptfs_client.chaos.schedule import Setup
    from ckptfs_client.json_answers import ChaosJson, FaultResultJson
    from ckptfs_client.lab.laboratory import Laboratory

app = typer.Typer()
ETCD_MEMBERS = 3
RAM = "512M"


@app.command()
def chaos(
    seed: Annotated[int, Option(metavar="N", help="The same seed gives the same faults in the same order.")] = 1,
    nodes: Annotated[int, Option(min=2, metavar="N", help="The number of nodes.")] = 3,
    factor: Annotated[int, Option(min=1, metavar="R", help="The number of nodes that hold each file; R-1 are away at most.")] = 2,
    minutes: Annotated[float, Option(min=0.0, metavar="M", help="Start rounds of faults for this long; at least one.")] = 2.0,
    faults: Annotated[str | None, Option(metavar="KIND,...", help="Only these kinds of faults, such as kill_mount,wipe.")] = None,
    no_pfs: Annotated[bool, Option("--no-pfs", help="No PFS: only copies on other nodes survive a node.")] = False,
    directory: Annotated[Path | None, Option("--dir", help="The lab's directory.  [default: /var/lib/ckptfs/chaos]")] = None,
    keep: Annotated[bool, Option("--keep", help="Leave the lab as it is at the end.")] = False,
    json: Json = False,
) -> None:
    """Start a lab, let applications save and load there, inject faults, and check the promises.

    A round injects a few faults and then repairs everything. All nodes are read meanwhile: no call may fail where only a process of
    ckptfs was killed, what reached the clique is there on every living node, `latest` always loads, and after a repair every file has its
    copies. The seed determines the faults, but not what applications do in between. The exit code is 1 if a promise is broken.

    Needs root. Example: ckptfs chaos --seed 7 --minutes 10
    """
    from ckptfs_client.chaos.schedule import FAULTS, USUAL, Setup
    from ckptfs_client.lab import layout
    from ckptfs_client.lab.laboratory import Laboratory

    kinds = [kind for kind in (faults or "").split(",") if kind] or USUAL
    if unknown := [kind for kind in kinds if kind not in FAULTS]:
        raise UsageError(f"{unknown[0][:40]!r} is not a kind of fault; accepted: {', '.join(FAULTS)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    place = directory or layout.DIRECTORY.with_name("chaos")
    lab = Laboratory(place, say=lambda words: None if json else print(f"  {words}", file=sys.stderr, flush=True))
    setup = Setup(nodes, factor - 1, ETCD_MEMBERS, not no_pfs, faults=kinds)
    answer = _run(lab, seed, setup, minutes, keep=keep, json=json)
    if json:
        render.print_json(answer)
    else:
        _print_verdict(answer)
    if not answer["kept"]:
        raise typer.Exit(1)


def _run(lab: "Laboratory", seed: int, setup: "Setup", minutes: float, *, keep: bool, json: bool) -> "ChaosJson":
    """Run a campaign in a new lab, and delete the lab."""
    from ckptfs_client.chaos.campaign import Campaign
    from ckptfs_client.lab.laboratory import LiveCluster

    lab.start(setup.nodes, setup.losses + 1, lab.directory / "pfs" if setup.with_pfs else None, {"ram": RAM}, setup.etcd_members)
    try:
        campaign = Campaign(LiveCluster(lab), seed, setup, report=(lambda _: None) if json else _print_result)
        try:
            until = time.monotonic() + 60.0 * minutes
            campaign.run(lambda rounds: rounds > 0 and time.monotonic() > until)
            campaign.finish()
        except (ClientError, OSError) as failure:
            campaign.complain(str(failure))
        finally:
            campaign.over.set()
        return _build_answer(campaign, seed)
    finally:
        if not keep:
            lab.stop()


def _build_answer(campaign: "Campaign", seed: int) -> "ChaosJson":
    return {
        "seed": seed, "nodes": campaign.setup.nodes, "factor": campaign.setup.losses + 1, "kept": not campaign.complaints,
        "faults": campaign.results, "turns": campaign.turns, "reads": campaign.reads, "loads": campaign.loads,
        "complaints": campaign.complaints,
    }  # fmt: skip


def _print_result(result: "FaultResultJson") -> None:
    print(f"{result['at_s']:7.1f} s  round {result['round']}  {result['fault']}: {result['result']}", flush=True)


def _print_verdict(answer: "ChaosJson") -> None:
    for complaint in answer["complaints"]:
        print(f"broken: {complaint}")
    count = sum(result["fault"] != "repair" for result in answer["faults"])
    work = f"{count} faults, {answer['turns']} steps of applications, {answer['reads']} reads, {answer['loads']} loads of latest"
    verdict = "every promise is kept" if answer["kept"] else f"{len(answer['complaints'])} complaints"
    print(f"seed {answer['seed']}, {answer['nodes']} nodes, {answer['factor']} copies: {work}: {verdict}")
