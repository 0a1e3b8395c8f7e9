"""Whether checkpoints fit on a node before the run (pure), and the tables of `ckptfs df`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptfs.model import Tier
from ckptfs.quantities import format_count, format_size
from ckptfs_client import render
from ckptfs_client.json_answers import DfJson, FitJson

if TYPE_CHECKING:
    from ckptfs.protocol import control_pb2 as pb
    from ckptfs_client.client import Client


@dataclass(frozen=True, slots=True)
class CapacityNeed:
    """What a run needs on each node.

    The ranks of a node write `size_bytes` of each checkpoint. The node keeps `kept_count` complete checkpoints while it writes the next
    one, and holds copies of as much for each of `copy_count` peers.
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
    def factor(self) -> int:
        """How many times the size of a checkpoint the node needs."""
        return (self.kept_count + 1) * (self.copy_count + 1)

    @property
    def text(self) -> str:
        """The sum and its factors."""
        generations = format_count(self.kept_count + 1, "generation")
        copies = f" x {self.copy_count + 1} copies" if self.copy_count else ""
        return f"{format_size(self.own_bytes + self.peer_bytes)} ({format_size(self.size_bytes)} x {generations}{copies})"


def check_fit(need: CapacityNeed, tiers: Sequence["pb.TierCapacity"], peers: Sequence["pb.Member"], *, has_pfs: bool) -> FitJson:
    """Check whether the checkpoints fit in these tiers, taken in order, and their copies on these peers."""
    whole = need.own_bytes + need.peer_bytes
    share = sum(tier.usable_for_peers_bytes for tier in tiers)
    if need.peer_bytes > share:
        peer_words = f"{format_size(need.peer_bytes)} of them for peers, which may use {format_size(share)}"
        what = f"{need.text} are needed on this node, {peer_words}"
        return _build_fit(need, (), f"does not fit: {what}; raise peer_share=, ram= or nvme=, or keep fewer generations (--keep)")
    for number in range(1, len(tiers) + 1):
        taken = tiers[:number]
        if whole <= sum(tier.usable_bytes for tier in taken) and need.peer_bytes <= sum(tier.usable_for_peers_bytes for tier in taken):
            names = " and ".join(tier.name.upper() if tier.name == Tier.RAM else "NVMe" for tier in taken)
            short = [peer for peer in peers if need.copy_count and _count_left(peer) < need.own_bytes]
            if short:
                name, free = short[0].name, format_size(_count_left(short[0]))
                what = f"{name} has {free} left for others, and {format_size(need.own_bytes)} of copies may go to it"
                remedy = f"raise peer_share=, ram= or nvme= on {name}, or keep fewer generations (--keep)"
                return _build_fit(need, (), f"does not fit: {what}; {remedy}")
            return _build_fit(need, taken, f"fits in {names}: {need.text} of {_format_usable(taken)}")
    rest = "; the rest is written to the PFS, at its speed" if has_pfs else ""
    remedy = "raise ram= or nvme=, delete files that are not needed, or keep fewer generations (--keep)"
    return _build_fit(need, (), f"does not fit: {need.text} are needed on this node, which has {_format_usable(tiers)}{rest}; {remedy}")


def _build_fit(need: CapacityNeed, taken: Sequence["pb.TierCapacity"], sentence: str) -> FitJson:
    return {"fits": bool(taken), "where": [tier.name for tier in taken], "sentence": sentence, "factor": need.factor}


def _format_usable(tiers: Sequence["pb.TierCapacity"]) -> str:
    return f"{format_size(sum(tier.usable_bytes for tier in tiers))} usable"


def _count_left(peer: "pb.Member") -> int:
    """Return the free space of a node in its share for others."""
    return max(0, peer.capacity_bytes - peer.held_bytes)


class CapacityReport(NamedTuple):
    """What `ckptfs df` shows of one mount. `fit` is None unless checkpoints were asked about."""

    capacity: "pb.Capacity"
    clique: list["pb.Member"]
    fit: FitJson | None


def ask(client: "Client") -> tuple["pb.Capacity", "pb.Cluster | None"]:
    """Ask one daemon for its space, and for its cluster if it belongs to one."""
    found = client.get_capacity()
    return found, client.get_cluster() if found.clustered else None


def build_report(found: "pb.Capacity", cluster: "pb.Cluster | None", size_bytes: int | None, kept_count: int) -> CapacityReport:
    """Build the report of one mount. `size_bytes`: what a node writes of each checkpoint, if given.

    Its clique are the live nodes that hold copies for this one, or for which it holds copies.
    """
    living = [] if cluster is None else [member for member in cluster.members if member.alive]
    peers = {name for member in living if member.name == found.node for name in member.peers}
    fit = None
    if size_bytes is not None:
        need = CapacityNeed(size_bytes, kept_count, max(0, found.replication_factor - 1))
        tiers = [one for one in found.tiers if one.name != Tier.PFS]
        known = [one for one in living if one.name in peers and one.has_figures]
        fit = check_fit(need, tiers, known, has_pfs=len(tiers) < len(found.tiers))
    return CapacityReport(found, [one for one in living if one.name in peers or found.node in one.peers], fit)


def report_to_json(report: CapacityReport) -> dict[str, Any]:
    """Convert a report to the object of `--json`."""
    more: DfJson = {"clique": [render.message_to_dict(member) for member in report.clique]}
    if report.fit is not None:
        more["checkpoint"] = report.fit
    return {**render.message_to_dict(report.capacity), **more}


def print_report(report: CapacityReport) -> None:
    render.print_renderable(build_tier_table(report.capacity))
    if report.clique:
        print()
        render.print_renderable(build_clique_table(report.clique, report.capacity.node))
    print(f"memory: {render.describe_service_memory(report.capacity.memory)}")
    history = report.capacity.history
    print(f"history: {format_size(history.bytes)} that only .ckptfs/history holds, of at most {format_size(history.bytes_max)}")
    if report.fit is not None:
        print(f"memory per checkpoint: {report.fit['factor']} times its size on each node")
        print(report.fit["sentence"])


def build_tier_table(capacity: "pb.Capacity") -> Any:
    grid = render.build_grid("tier", "total>", "used>", "shared>", "prepared>", "free>", "held for peers>", "share of peers>", "where")
    for tier in capacity.tiers:
        is_known, is_for_peers = tier.total_bytes > 0, capacity.clustered and tier.name != Tier.PFS
        figures = (
            (tier.total_bytes, is_known), (tier.used_bytes, is_known), (tier.shared_bytes, tier.shared_bytes > 0),
            (tier.prepared_bytes, tier.name == Tier.RAM), (tier.free_bytes, is_known), (tier.held_bytes, is_for_peers),
            (tier.share_bytes, is_for_peers),
        )  # fmt: skip
        grid.add_row(tier.name, *(format_size(value) if is_told else "-" for value, is_told in figures), render.escape(tier.path))
    return grid


def build_clique_table(members: Sequence["pb.Member"], node: str) -> Any:
    grid = render.build_grid("node of the clique", "share of peers>", "held for peers>", "left>", "sends copies to")
    for one in members:
        figures = (format_size(one.held_bytes), format_size(_count_left(one))) if one.has_figures else ("unknown", "unknown")
        sends = "this node" if node in one.peers else ""
        grid.add_row(render.escape(one.name), format_size(one.capacity_bytes), *figures, sends)
    return grid
