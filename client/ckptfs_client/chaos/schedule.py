"""The schedule of a campaign: which fault comes when, and for how long.

Pure: the same seed gives the same schedule.

Invariants:
- At most `losses` nodes are away at a time.
- As long as etcd as a whole is not stopped, most of its members live.
- A round ends with the repair of everything. So rounds do not depend on one another.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfs import limits

FAULTS = {
    "kill": "kill -9 of all processes of a node",
    "wipe": "a node dies and loses its RAM, and in half of the cases its NVMe and its catalog",
    "cut": "a node reaches no other node and no etcd",
    "cut_etcd": "a node reaches the other nodes and no etcd",
    "stand_still": "all processes of a node stop",
    "kill_supervisor": "kill -9 of the supervisor of a node",
    "kill_mount": "kill -9 of the mount process of a node; no call fails",
    "kill_mover": "kill -9 of the mover of a node; no call fails",
    "restart_all": "each node in turn ends, by SIGTERM or kill -9, and starts again",
    "slow": "the link of a node carries 100 Mbit/s",
    "stop_etcd": "kill -9 of all members of etcd",
    "kill_member": "kill -9 of one member of etcd",
    "pause_member": "one member of etcd stops",
    "refuse_pfs": "the PFS refuses new names",
}
USUAL = (*FAULTS, "wipe")
"""A wipe is what copies are for: it comes twice as often."""
LOSSES = ("kill", "wipe", "cut", "cut_etcd", "stand_still", "kill_supervisor")
MEMBERS = ("kill_member", "pause_member")
FAULTS_MAX = 3
PAUSES_S = (0.5, 3.0, 8.0, 15.0)
STILL_S = (5.0, limits.NODE_LEASE_S + 1.0, limits.NODE_LEASE_S + 8.0)
"""Shorter than the lease, a little longer, and long enough for the others to go on without the node."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `target` is the node, or the member of etcd; -1 if it is all of them."""

    kind: str
    target: int = -1
    detail: str = ""
    still_s: float = 0.0
    pause_s: float = 0.0

    def __str__(self) -> str:
        where = "" if self.target < 0 else f" {'member' if self.kind in MEMBERS else 'node'}{self.target + 1}"
        return self.kind + where + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True)
class Setup:
    """What a campaign runs on.

    `losses` nodes may be away at a time; `pause_max_s` bounds the pause after a fault.
    """

    nodes: int
    losses: int
    etcd_members: int = 1
    with_pfs: bool = True
    pause_max_s: float = max(PAUSES_S)
    faults: Sequence[str] = USUAL


def iterate_rounds(seed: int, setup: Setup) -> Iterator[list[Fault]]:
    """Yield the faults of one round after the other, without an end."""
    source = random.Random(seed)
    while True:
        yield _Round(source, setup).faults


class _Round:
    """The faults of one round, drawn one after the other."""

    def __init__(self, source: random.Random, setup: Setup) -> None:
        self._source, self._setup = source, setup
        self._away: set[int] = set()
        self._etcd, self._pfs, self._members_away = True, True, 0
        self.faults: list[Fault] = []
        possible = [kind for kind in setup.faults if self._is_possible(kind)]
        for _ in range(source.randint(1, FAULTS_MAX) if possible else 0):
            fitting = [kind for kind in possible if self._fits(kind)]
            if fitting:
                self.faults.append(self._draw(source.choice(fitting)))

    def _is_possible(self, kind: str) -> bool:
        """Return True if this setup can have such a fault at all."""
        if kind in LOSSES:
            return self._setup.losses > 0
        return self._setup.with_pfs if kind == "refuse_pfs" else kind not in MEMBERS or self._setup.etcd_members > 2

    def _fits(self, kind: str) -> bool:
        """Return True if the promises hold with this fault beside those before it."""
        if kind in LOSSES:
            return len(self._away) < self._setup.losses
        if kind in MEMBERS:
            return self._etcd and self._members_away + 1 <= (self._setup.etcd_members - 1) // 2
        if kind == "restart_all":
            # At SIGTERM, a node waits for its write-back.
            return self._etcd and self._pfs and not self._away
        return self._etcd if kind == "stop_etcd" else True

    def _draw(self, kind: str) -> Fault:
        source = self._source
        more: dict[str, Any] = {"pause_s": min(self._setup.pause_max_s, source.choice(PAUSES_S))}
        if kind in MEMBERS:
            self._members_away += 1
            more["target"] = source.randrange(self._setup.etcd_members)
        elif kind not in ("stop_etcd", "restart_all", "refuse_pfs"):
            more["target"] = source.choice([node for node in range(self._setup.nodes) if node not in self._away])
        if kind in LOSSES:
            self._away.add(more["target"])
        if kind == "wipe" and source.random() < 0.5:
            more["detail"] = "nvme"
        elif kind == "restart_all":
            more["detail"] = source.choice(["SIGTERM", "SIGKILL"])
        elif kind == "stand_still":
            more["still_s"] = source.choice(STILL_S)
        self._etcd = self._etcd and kind != "stop_etcd"
        self._pfs = self._pfs and kind != "refuse_pfs"
        return Fault(kind, **more)
