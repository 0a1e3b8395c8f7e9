"""The statuses of several mounts, and the health of their tiers and peers in a line for each (X11).

The answers come from the daemon, which asks its catalog and touches neither the PFS nor a peer.
"""

import sys
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


def list_statuses(chosen: Sequence[Mount]) -> list["pb.Status"]:
    """Return the status of each mount; errors go to stderr. Raises NoMount if none answers."""
    found = ask_all(chosen, lambda client: client.get_status())
    failures = [answer for _, answer in found if isinstance(answer, ClientError)]
    if len(failures) == len(found):
        raise failures[0] if len(found) == 1 else NoMount("; ".join(map(str, failures)))
    for failure in failures:
        print(f"ckptfs: {failure}", file=sys.stderr)
    return [_build_silent_status(mount, answer) if isinstance(answer, ClientError) else answer for mount, answer in found]


def is_silent(status: "pb.Status") -> bool:
    """Return True if the status stands for a daemon that did not answer."""
    return status.health == render.DOWN


def _build_silent_status(mount: Mount, failure: ClientError) -> "pb.Status":
    from ckptfs.protocol import control_pb2 as pb

    trouble = pb.Trouble(where="daemon", what=str(failure.args[0]), remedy=failure.remedy)
    return pb.Status(name=mount.name, mountpoint=str(mount.mountpoint), health=render.DOWN, troubles=[trouble])


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
