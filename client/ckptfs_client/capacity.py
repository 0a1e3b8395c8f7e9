"""Pure: whether a checkpoint fits on a node before the run, and the tables of `ckptfs df`.

If we die here: nothing was changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptfs_client import render

if TYPE_CHECKING:
    from ckptfs.protocol import control_pb2 as pb

RAM, PFS = "ram", "pfs"


@dataclass(frozen=True, slots=True)
class CapacityNeed:
    """What a run asks of each node: `size` bytes of each checkpoint that its ranks write, `kept` whole ones beside the one that is being
    written, and copies of as much from `copies` other nodes.
    """

    size_bytes: int
    kept_count: int
    copy_count: int

    @property
    def own_bytes(self) -> int:
        return self.size_bytes * (self.kept_count + 1)

    @property
    def peer_bytes(self) -> int:
        return self.own_bytes * self.copy_count

    @property
    def text(self) -> str:
        """How the sum comes about."""
        copies = f" x {self.copy_count + 1} copies" if self.copy_count else ""
        return f"{render.format_size(self.own_bytes + self.peer_bytes)} ({render.format_size(self.size_bytes)} x {render.format_count(self.kept_count + 1, 'generation')}{copies})"


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """What a tier of this node can take, and how much of that for peers."""

    name: str
    usable_bytes: int
    usable_for_peers_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PeerCapacity:
    """Another node, and what it has left for others."""

    name: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class FitResult:
    """`where`: the tiers that it takes, none where it does not fit; one sentence, with the remedy where there must be one."""

    tier_names: tuple[str, ...]
    sentence: str


def check_fit(need: CapacityNeed, tiers: Sequence[TierCapacity], peers: Sequence[PeerCapacity], *, has_pfs: bool) -> FitResult:
    """Whether the checkpoint fits in these tiers, the first of which is taken first, and its copies on these peers."""
    whole = need.own_bytes + need.peer_bytes
    share = sum(tier.usable_for_peers_bytes for tier in tiers)
    if need.peer_bytes > share:
        what = f"{need.text} are needed on this node, {render.format_size(need.peer_bytes)} of them for peers, who may take {render.format_size(share)} here"
        return FitResult((), f"does not fit: {what}; raise peer_share=, ram= or nvme=, or keep fewer generations (--keep)")
    for number in range(1, len(tiers) + 1):
        taken = tiers[:number]
        if whole <= sum(tier.usable_bytes for tier in taken) and need.peer_bytes <= sum(tier.usable_for_peers_bytes for tier in taken):
            names = " and ".join(tier.name.upper() if tier.name == RAM else "NVMe" for tier in taken)
            short = [peer for peer in peers if need.copy_count and peer.free_bytes < need.own_bytes]
            if short:
                what = f"{short[0].name} has {render.format_size(short[0].free_bytes)} left for others, and {render.format_size(need.own_bytes)} of copies may go there"
                return FitResult((), f"does not fit: {what}; raise peer_share=, ram= or nvme= there, or keep fewer generations (--keep)")
            return FitResult(tuple(tier.name for tier in taken), f"fits in {names}: {need.text} of {_format_usable(taken)}")
    rest = "; what does not fit is written to the PFS, at its speed" if has_pfs else ""
    remedy = "give ram= or nvme= more, delete what is not needed, or keep fewer generations (--keep)"
    return FitResult((), f"does not fit: {need.text} are needed on this node, which has {_format_usable(tiers)}{rest}; {remedy}")


def _format_usable(tiers: Sequence[TierCapacity]) -> str:
    return f"{render.format_size(sum(tier.usable_bytes for tier in tiers))} that can be used"


def list_tiers(capacity: "pb.Capacity") -> list[TierCapacity]:
    """The tiers of this node, in the order in which they are taken."""
    return [TierCapacity(one.name, one.usable_bytes, one.usable_for_peers_bytes) for one in capacity.tiers if one.name != PFS]


def list_clique(capacity: "pb.Capacity", cluster: "pb.Cluster | None") -> list["pb.Member"]:
    """The nodes that live and hold copies for this one, or it for them."""
    living, peers = _list_living(capacity, cluster)
    return [member for member in living if member.name in peers or capacity.node in member.peers]


def list_peers(capacity: "pb.Capacity", cluster: "pb.Cluster | None") -> list[PeerCapacity]:
    """Those that hold copies for this node, as far as they have told how much they hold."""
    living, peers = _list_living(capacity, cluster)
    return [PeerCapacity(one.name, max(0, one.capacity_bytes - one.held_bytes)) for one in living if one.name in peers and one.has_figures]


def _list_living(capacity: "pb.Capacity", cluster: "pb.Cluster | None") -> tuple[list["pb.Member"], set[str]]:
    """(the nodes that live, the names of those that hold copies for this one)."""
    living = [] if cluster is None else [member for member in cluster.members if member.alive]
    return living, {name for member in living if member.name == capacity.node for name in member.peers}


def build_tier_table(capacity: "pb.Capacity") -> Any:
    """The tiers of this node."""
    from rich.markup import escape

    grid = render.grid("tier", "total>", "used>", "free>", "held for peers>", "share of peers>", "where")
    for tier in capacity.tiers:
        known = tier.total_bytes > 0
        figures = [render.format_size(value) if known else "-" for value in (tier.total_bytes, tier.used_bytes, tier.free_bytes)]
        peers = [
            render.format_size(value) if capacity.clustered and tier.name != PFS else "-" for value in (tier.held_bytes, tier.share_bytes)
        ]
        grid.add_row(tier.name, *figures, *peers, escape(render.escape_unprintable(tier.path)))
    return grid


def build_clique_table(members: Sequence["pb.Member"], node: str) -> Any:
    """The nodes of its clique."""
    from rich.markup import escape

    grid = render.grid("node of the clique", "share of peers>", "held for peers>", "left>", "copies go to")
    for member in members:
        held, left = (render.format_size(one) for one in (member.held_bytes, max(0, member.capacity_bytes - member.held_bytes)))
        figures = (held, left) if member.has_figures else ("unknown", "unknown")
        grid.add_row(escape(member.name), render.format_size(member.capacity_bytes), *figures, "here" if node in member.peers else "")
    return grid
