"""The health of the tiers and peers of this node (X11), with the reasons in a line for each mount.

The answers come from the daemon, which asks its catalog and touches neither the PFS nor a peer.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptfs.quantities import format_count
from ckptfs_client import render
from ckptfs_client.client import Client, ask_all
from ckptfs_client.errors import ClientError, CommandFailed, NoMount
from ckptfs_client.json_answers import HealthJson
from ckptfs_client.mounts import Mount

if TYPE_CHECKING:
    from ckptfs.protocol import control_pb2 as pb

OK = "ok"


def ask(chosen: Sequence[Mount], timeout_s: float) -> list[HealthJson]:
    """Return the health of each mount. A daemon without an answer after `timeout_s` is down."""
    return [_judge(mount, answer) for mount, answer in ask_all(chosen, Client.get_status, timeout_s)]


def _judge(mount: Mount, answer: "pb.Status | ClientError") -> HealthJson:
    if isinstance(answer, ClientError):
        health, reasons = render.DOWN, [str(answer)]
    else:
        health, reasons = answer.health, _list_reasons(answer)
    return {"name": mount.name, "mountpoint": str(mount.mountpoint), "health": health, "reasons": reasons}


def _list_reasons(status: "pb.Status") -> list[str]:
    """Return why a mount is not sound. A tier whose trouble is named is not named again."""
    reasons = [f"{one.where}: {f'{one.path}: ' if one.path else ''}{one.what}" for one in status.troubles]
    named = {one.where for one in status.troubles}
    reasons += [f"{tier.name}: {tier.health}" for tier in status.tiers if tier.health != "normal" and tier.name not in named]
    if status.counts.lost:
        reasons.append(f"{format_count(status.counts.lost, 'file')} lost")
    if status.HasField("notice"):
        reasons.append(f"this node is about to be taken away: {status.notice.source}: {status.notice.what}")
    return reasons


def format_line(one: HealthJson) -> str:
    """Return the line about a mount: its health, and the first reason."""
    first, *others = one["reasons"] or [""]
    more = f" (and {format_count(len(others), 'more reason')})" if others else ""
    line = f"{one['health']}: {one['name']} on {one['mountpoint']}" + (f": {first}{more}" if first else "")
    return render.escape_unprintable(line)


def get_exit_code(one: HealthJson) -> int:
    """Return the exit code for the health of a mount."""
    if one["health"] == OK:
        return 0
    return NoMount.exit_code if one["health"] == render.DOWN else CommandFailed.exit_code
