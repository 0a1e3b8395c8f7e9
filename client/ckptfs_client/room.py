"""Pure: whether a checkpoint fits on a node before the run, and the tables of `ckptfs df`.

If we die here: nothing was changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptfs_client import show

if TYPE_CHECKING:
    from ckptfs.protocol import control_pb2 as pb

RAM, PFS = "ram", "pfs"


@dataclass(frozen=True, slots=True)
class Need:
    """What a run asks of each node: `size` bytes of each checkpoint that its ranks write, `kept` whole ones beside the one that is being
    written, and copies of as much from `copies` other nodes.
    """

    size: int
    kept: int
    copies: int

    @property
    def own(self) -> int:
        return self.size * (self.kept + 1)

    @property
    def for_peers(self) -> int:
        return self.own * self.copies

    @property
    def words(self) -> str:
        """How the sum comes about."""
        copies = f" x {self.copies + 1} copies" if self.copies else ""
        return f"{show.size(self.own + self.for_peers)} ({show.size(self.size)} x {show.counted(self.kept + 1, 'generation')}{copies})"


@dataclass(frozen=True, slots=True)
class Tier:
    """What a tier of this node can take, and how much of that for peers."""

    name: str
    usable: int
    usable_for_peers: int = 0


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node, and what it has left for others."""

    name: str
    left: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """`where`: the tiers that it takes, none where it does not fit; one sentence, with the remedy where there must be one."""

    where: tuple[str, ...]
    sentence: str


def judged(need: Need, tiers: Sequence[Tier], peers: Sequence[Peer], *, pfs: bool) -> Verdict:
    """Whether the checkpoint fits in these tiers, the first of which is taken first, and its copies on these peers."""
    whole = need.own + need.for_peers
    share = sum(tier.usable_for_peers for tier in tiers)
    if need.for_peers > share:
        what = f"{need.words} are needed on this node, {show.size(need.for_peers)} of them for peers, who may take {show.size(share)} here"
        return Verdict((), f"does not fit: {what}; raise peer_share=, ram= or nvme=, or keep fewer generations (--keep)")
    for number in range(1, len(tiers) + 1):
        taken = tiers[:number]
        if whole <= sum(tier.usable for tier in taken) and need.for_peers <= sum(tier.usable_for_peers for tier in taken):
            names = " and ".join(tier.name.upper() if tier.name == RAM else "NVMe" for tier in taken)
            short = [peer for peer in peers if need.copies and peer.left < need.own]
            if short:
                what = f"{short[0].name} has {show.size(short[0].left)} left for others, and {show.size(need.own)} of copies may go there"
                return Verdict((), f"does not fit: {what}; raise peer_share=, ram= or nvme= there, or keep fewer generations (--keep)")
            return Verdict(tuple(tier.name for tier in taken), f"fits in {names}: {need.words} of {_usable(taken)}")
    rest = "; what does not fit is written to the PFS, at its speed" if pfs else ""
    remedy = "give ram= or nvme= more, delete what is not needed, or keep fewer generations (--keep)"
    return Verdict((), f"does not fit: {need.words} are needed on this node, which has {_usable(tiers)}{rest}; {remedy}")


def _usable(tiers: Sequence[Tier]) -> str:
    return f"{show.size(sum(tier.usable for tier in tiers))} that can be used"


def tiers_of(room: "pb.Room") -> list[Tier]:
    """The tiers of this node, in the order in which they are taken."""
    return [Tier(one.name, one.usable_bytes, one.usable_for_peers_bytes) for one in room.tiers if one.name != PFS]


def clique_of(room: "pb.Room", cluster: "pb.Cluster | None") -> list["pb.Member"]:
    """The nodes that live and hold copies for this one, or it for them."""
    living, peers = _around(room, cluster)
    return [member for member in living if member.name in peers or room.node in member.peers]


def peers_of(room: "pb.Room", cluster: "pb.Cluster | None") -> list[Peer]:
    """Those that hold copies for this node, as far as they have told how much they hold."""
    living, peers = _around(room, cluster)
    return [Peer(one.name, max(0, one.capacity_bytes - one.held_bytes)) for one in living if one.name in peers and one.told]


def _around(room: "pb.Room", cluster: "pb.Cluster | None") -> tuple[list["pb.Member"], set[str]]:
    """(the nodes that live, the names of those that hold copies for this one)."""
    living = [] if cluster is None else [member for member in cluster.members if member.alive]
    return living, {name for member in living if member.name == room.node for name in member.peers}


def table(room: "pb.Room") -> Any:
    """The tiers of this node."""
    from rich.markup import escape

    grid = show.grid("tier", "total>", "used>", "free>", "held for peers>", "share of peers>", "where")
    for tier in room.tiers:
        known = tier.total_bytes > 0
        figures = [show.size(value) if known else "-" for value in (tier.total_bytes, tier.used_bytes, tier.free_bytes)]
        peers = [show.size(value) if room.clustered and tier.name != PFS else "-" for value in (tier.held_bytes, tier.share_bytes)]
        grid.add_row(tier.name, *figures, *peers, escape(show.printable(tier.path)))
    return grid


def clique_table(members: Sequence["pb.Member"], node: str) -> Any:
    """The nodes of its clique."""
    from rich.markup import escape

    grid = show.grid("node of the clique", "share of peers>", "held for peers>", "left>", "copies go to")
    for member in members:
        held, left = (show.size(one) for one in (member.held_bytes, max(0, member.capacity_bytes - member.held_bytes)))
        figures = (held, left) if member.told else ("unknown", "unknown")
        grid.add_row(escape(member.name), show.size(member.capacity_bytes), *figures, "here" if node in member.peers else "")
    return grid
