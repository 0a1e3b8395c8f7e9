"""The faults of a campaign: each takes nodes, links, etcd or the PFS away, or has a node restart.

Each tells the tracks before it acts, so that readers know what they may see.
"""

import signal
import time
from typing import TYPE_CHECKING

from ckptfs_client.chaos.schedule import Fault
from ckptfs_client.lab.live_cluster import WAIT_S, LiveNode, wait_until

if TYPE_CHECKING:
    from ckptfs_client.chaos.campaign import Campaign

RATE_BITS_PER_S = 100_000_000
CUT, DEAD, WIPED, STOPPED, RESTARTED = "cut", "dead", "wiped", "stopped", "restarted"


class FaultMaker:
    """Makes the faults of a schedule."""

    def __init__(self, campaign: "Campaign") -> None:
        self._campaign, self._cluster = campaign, campaign.cluster

    def make(self, fault: Fault) -> str:
        """Make a fault; return what came of it."""
        began_s = time.monotonic()
        return self._act(fault, fault.target) or f"done in {time.monotonic() - began_s:.1f} s"

    def _act(self, fault: Fault, number: int) -> str:
        """Make a fault. Returns what there is to say of it. `number`: of its node, or of its member of etcd."""
        match fault.kind:
            # Nodes that stay away until the round ends.
            case "kill":
                self._lose(number, DEAD).kill()
                self._note_dead(number)
            case "kill_supervisor":
                self._lose(number, DEAD).kill_supervisor()
                # Like a power cut for the applications: they end with their mount.
                self._cluster[number].kill()
                self._note_dead(number)
            case "wipe":
                self._lose(number, WIPED).wipe(nvme=fault.detail == "nvme")
                self._note_dead(number, wiped=True)
            case "cut":
                self._lose(number, CUT).cut()
            case "cut_etcd":
                self._lose(number, CUT).reach_etcd(up=False)
            case "stand_still":
                self._lose(number, STOPPED).stand_still()
                self._campaign.pause(fault.still_s)
            # Nodes that come back at once.
            case "restart_all":
                self._restart_all(with_end=fault.detail == "SIGTERM")
            case "kill_mount" | "kill_mover":
                return self._replace(number, fault.kind.removeprefix("kill_"))
            # What lies between them.
            case "slow":
                self._cluster[number].slow(RATE_BITS_PER_S)
            case "kill_member" | "pause_member":
                self._cluster.signal_member(number, signal.SIGKILL if fault.kind == "kill_member" else signal.SIGSTOP)
            case "stop_etcd":
                self._campaign.has_etcd = False
                self._campaign.note_change(*range(len(self._cluster.nodes)))
                self._cluster.stop_etcd()
            case "refuse_pfs":
                self._campaign.has_pfs_refused = True
                is_done = self._cluster.laboratory.refuse_pfs(refused=True)
                return "" if is_done else "not possible: this filesystem has no immutable directories"
            case _:
                raise ValueError(f"{fault.kind} is no fault")
        return ""

    def resume(self) -> None:
        """Let nodes go on that stand still."""
        for node, how in self._campaign.away.items():
            if how == STOPPED:
                self._cluster[node].go_on()

    def _lose(self, number: int, how: str) -> LiveNode:
        """Note that a node is about to go; return it."""
        campaign = self._campaign
        for track in campaign.tracks:
            if how != CUT:
                track.mark_away(number)
        campaign.away[number] = how
        campaign.note_change(number)
        return self._cluster[number]

    def _note_dead(self, number: int, *, wiped: bool = False) -> None:
        for track in self._campaign.tracks:
            track.mark_broken_off(number)
            if wiped:
                track.mark_wiped(number)

    def _restart_all(self, *, with_end: bool) -> None:
        """Restart one node after the other, the next one when all live."""
        campaign = self._campaign
        for number in range(len(self._cluster.nodes)):
            node = self._lose(number, RESTARTED)
            node.end() if with_end else node.kill()
            self._note_dead(number)
            node.start()
            wait_until(lambda: self._cluster[0].count_alive() == len(self._cluster.nodes), WAIT_S, lambda: "all nodes live")
            del campaign.away[number]
            campaign.note_change(number)
            campaign.say(f"{node.name} is back")

    def _replace(self, number: int, role: str) -> str:
        began_s = time.monotonic()
        if self._campaign.is_alive(number):
            self._cluster[number].replace(role)
        return f"another {role} process after {time.monotonic() - began_s:.1f} s"
