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
        result: str | None = getattr(self, f"_{fault.kind}")(fault)
        return result or f"done in {time.monotonic() - began_s:.1f} s"

    def resume(self) -> None:
        """Let nodes go on that stand still."""
        for node, how in self._campaign.away.items():
            if how == STOPPED:
                self._cluster[node].go_on()

    # --- nodes that stay away until the round ends --------------------------------------------------------------------

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

    def _kill(self, fault: Fault) -> None:
        self._lose(fault.target, DEAD).kill()
        self._note_dead(fault.target)

    def _kill_supervisor(self, fault: Fault) -> None:
        self._lose(fault.target, DEAD).kill_supervisor()
        # Like a power cut for the applications: they end with their mount.
        self._cluster[fault.target].kill()
        self._note_dead(fault.target)

    def _wipe(self, fault: Fault) -> None:
        self._lose(fault.target, WIPED).wipe(nvme=fault.detail == "nvme")
        self._note_dead(fault.target, wiped=True)

    def _cut(self, fault: Fault) -> None:
        self._lose(fault.target, CUT).cut()

    def _cut_etcd(self, fault: Fault) -> None:
        self._lose(fault.target, CUT).reach_etcd(up=False)

    def _stand_still(self, fault: Fault) -> None:
        self._lose(fault.target, STOPPED).stand_still()
        self._campaign.pause(fault.still_s)

    # --- nodes that come back at once ---------------------------------------------------------------------------------

    def _restart_all(self, fault: Fault) -> None:
        """Restart one node after the other, the next one when all live."""
        campaign = self._campaign
        for number in range(len(self._cluster.nodes)):
            node = self._lose(number, RESTARTED)
            node.end() if fault.detail == "SIGTERM" else node.kill()
            self._note_dead(number)
            node.start()
            wait_until(lambda: self._cluster[0].count_alive() == len(self._cluster.nodes), WAIT_S, lambda: "all nodes live")
            del campaign.away[number]
            campaign.note_change(number)
            campaign.say(f"{node.name} is back")

    def _kill_mount(self, fault: Fault) -> str:
        return self._replace(fault.target, "mount")

    def _kill_mover(self, fault: Fault) -> str:
        return self._replace(fault.target, "mover")

    def _replace(self, number: int, role: str) -> str:
        began_s = time.monotonic()
        if self._campaign.is_alive(number):
            self._cluster[number].replace(role)
        return f"another {role} process after {time.monotonic() - began_s:.1f} s"

    # --- what lies between them ---------------------------------------------------------------------------------------

    def _slow(self, fault: Fault) -> None:
        self._cluster[fault.target].slow(RATE_BITS_PER_S)

    def _kill_member(self, fault: Fault) -> None:
        self._cluster.signal_member(fault.target, signal.SIGKILL)

    def _pause_member(self, fault: Fault) -> None:
        self._cluster.signal_member(fault.target, signal.SIGSTOP)

    def _stop_etcd(self, _: Fault) -> None:
        campaign = self._campaign
        campaign.has_etcd = False
        campaign.note_change(*range(len(self._cluster.nodes)))
        self._cluster.stop_etcd()

    def _refuse_pfs(self, _: Fault) -> str | None:
        self._campaign.has_pfs_refused = True
        return None if self._cluster.laboratory.refuse_pfs(refused=True) else "not possible: this filesystem has no immutable directories"
