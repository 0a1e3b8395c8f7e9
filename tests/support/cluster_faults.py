"""The faults of a storm: each takes nodes, wires or etcd away, or brings a node through a restart. The storm's seed draws them.

They stay within what is promised: at most `losses` nodes are away at a time.
"""

import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cluster_lab import living
from daemon_under_test import eventually

from ckptfs import limits

if TYPE_CHECKING:
    from cluster_storm import Storm

RATE_BITS_PER_S = 100_000_000
# Shorter than the lease, a little longer, and long enough for the others to have put all in order without it.
STILL_S = (5.0, limits.NODE_LEASE_S + 1.0, limits.NODE_LEASE_S + 8.0)
USUAL = (
    "kill", "wipe", "wipe", "cut", "cut_etcd", "slow", "stop_etcd", "kill_member", "pause_member", "replace", "stand_still", "restart_all",
)  # fmt: skip


class Faults:
    """`draw` makes one of `kinds`."""

    def __init__(self, storm: "Storm", losses: int, kinds: Sequence[str] = USUAL) -> None:
        self._storm, self._losses = storm, losses
        self._cluster, self._source = storm.cluster, storm.source
        self._acts: list[Callable[[], None]] = [getattr(self, kind) for kind in kinds]

    def draw(self) -> None:
        self._source.choice(self._acts)()

    def _lose(self, how: str, act: Callable[[int], None]) -> int | None:
        """Take a node away; which one."""
        storm = self._storm
        living = [node for node in range(len(self._cluster.nodes)) if node not in storm.away]
        if len(storm.away) >= self._losses:
            return None
        node = self._source.choice(living)
        storm.say(f"{how} node {node}")
        for track in storm.tracks:
            if how != "cut":
                track.killed(node)
        storm.away[node] = how
        storm.changed(node)
        act(node)
        if how in ("killed", "wiped"):
            for track in storm.tracks:
                track.broken_off(node)
        if how == "wiped":
            for track in storm.tracks:
                track.wiped(node)
                if track.writer == node and track.lost:
                    storm.say(f"  {track.path} {track.durable}/{track.latest}")
        storm.say(f"{how} node {node} done")
        return node

    # --- nodes that stay away until all is mended ---------------------------------------------------------------------

    def kill(self) -> None:
        self._lose("killed", lambda node: self._cluster[node].kill())

    def wipe(self) -> None:
        nvme = self._source.random() < 0.5
        self._storm.say(f"next: nvme={nvme}")
        self._lose("wiped", lambda node: self._cluster[node].wipe(nvme=nvme))

    def cut(self) -> None:
        self._lose("cut", lambda node: self._cluster[node].cut())

    def cut_etcd(self) -> None:
        """It reaches the other nodes, and no etcd."""
        self._lose("cut", lambda node: self._cluster[node].reach_etcd(up=False))

    def stand_still(self) -> None:
        """Everything on a node stops, as when its virtual machine is moved; what hangs in its mount goes on when all is mended."""
        seconds = self._source.choice(STILL_S)
        if self._lose("stopped", lambda node: self._cluster[node].stand_still()) is not None:
            self._storm.pause(seconds)

    def resume(self) -> None:
        for node, how in self._storm.away.items():
            if how == "stopped":
                self._storm.say(f"node {node} goes on")
                self._cluster[node].go_on()

    # --- nodes that come back at once ---------------------------------------------------------------------------------

    def restart_all(self) -> None:
        """Each node in turn ends, by SIGTERM or kill -9, and is started again: the next one when everybody lives."""
        storm, orderly = self._storm, self._source.random() < 0.5
        if storm.away or not storm.etcd:
            return
        for node in range(len(self._cluster.nodes)):
            storm.say(f"restart of node {node}, {'in order' if orderly else 'killed'}")
            for track in storm.tracks:
                track.killed(node)
            storm.away[node] = "restarted"
            storm.changed(node)
            self._cluster[node].end() if orderly else self._cluster[node].kill()
            for track in storm.tracks:
                track.broken_off(node)
            self._cluster[node].start()
            eventually(lambda: living(self._cluster[0].path) == len(self._cluster.nodes), what=f"all nodes live\n{storm.story()}")
            del storm.away[node]
            storm.changed(node)
            storm.say(f"node {node} is back")
            storm.pause(self._source.choice([0.0, 2.0]))

    def replace(self) -> None:
        """A mount or mover process dies: nobody notices."""
        storm = self._storm
        node, role = (
            self._source.choice([node for node in range(len(self._cluster.nodes)) if node not in storm.away] or [-1]),
            self._source.choice(["mount", "mover"]),
        )
        if node >= 0:
            storm.say(f"{role} of node {node} dies")
            self._cluster[node].replace(role)

    # --- what lies between them ---------------------------------------------------------------------------------------

    def slow(self) -> None:
        node = self._source.randrange(len(self._cluster.nodes))
        if self._storm.away.get(node) in (None, "cut"):
            self._storm.say(f"slow node {node}")
            self._cluster[node].slow(RATE_BITS_PER_S)

    def kill_member(self) -> None:
        """One member of etcd dies: as long as most of them live, nobody notices."""
        self._take_member("killed", signal.SIGKILL)

    def pause_member(self) -> None:
        """One member of etcd answers nobody, as when it is cut off from the others."""
        self._take_member("stopped", signal.SIGSTOP)

    def _take_member(self, how: str, number: signal.Signals) -> None:
        storm = self._storm
        if storm.etcd and storm.members_away + 1 <= (self._cluster.etcd_members - 1) // 2:
            member = self._source.randrange(self._cluster.etcd_members)
            storm.say(f"member {member} of etcd {how}")
            storm.members_away += 1
            self._cluster.signal_member(member, number)

    def stop_etcd(self) -> None:
        if self._storm.etcd:
            self._storm.say("etcd stops")
            self._storm.etcd = False
            self._storm.changed(*range(len(self._cluster.nodes)))
            self._cluster.stop_etcd()
