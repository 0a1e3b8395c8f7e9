"""Whether checkpoints fit on a node before the run (pure), and the tables of `ckptfs df`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptfs_client import render
from ckptfs_client.json_answers import DfJson

if TYPE_CHECKING:
    from ckptfs.protocol import control_pb2 as pb
    from ckptfs_client.client import Client

RAM, PFS = "ram", "pfs"


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
        generations = render.format_count(self.kept_count + 1, "generation")
        copies = f" x {self.copy_count + 1} copies" if self.copy_count else ""
        return f"{render.format_size(self.own_bytes + self.peer_bytes)} ({render.format_size(self.size_bytes)} x {generations}{copies})"


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """The free space of a tier on this node, and the part of it that peers may use."""

    name: str
    usable_bytes: int
    usable_for_peers_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PeerCapacity:
    """A peer and the free space in its share for others."""

    name: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class FitResult:
    """The tiers that the checkpoints take (none: they do not fit), and a sentence with a remedy if needed."""

    tier_names: tuple[str, ...]
    sentence: str


def check_fit(need: CapacityNeed, tiers: Sequence[TierCapacity], peers: Sequence[PeerCapacity], *, has_pfs: bool) -> FitResult:
    """Check whether the checkpoints fit in these tiers, taken in order, and their copies on these peers."""
    whole = need.own_bytes + need.peer_bytes
    share = sum(tier.usable_for_peers_bytes for tier in tiers)
    if need.peer_bytes > share:
        peer_words = f"{render.format_size(need.peer_bytes)} of them for peers, which may use {render.format_size(share)}"
        what = f"{need.text} are needed on this node, {peer_words}"
        return FitResult((), f"does not fit: {what}; raise peer_share=, ram= or nvme=, or keep fewer generations (--keep)")
    for number in range(1, len(tiers) + 1):
        taken = tiers[:number]
        if whole <= sum(tier.usable_bytes for tier in taken) and need.peer_bytes <= sum(tier.usable_for_peers_bytes for tier in taken):
            names = " and ".join(tier.name.upper() if tier.name == RAM else "NVMe" for tier in taken)
            short = [peer for peer in peers if need.copy_count and peer.free_bytes < need.own_bytes]
            if short:
                name, free = short[0].name, render.format_size(short[0].free_bytes)
                what = f"{name} has {free} left for others, and {render.format_size(need.own_bytes)} of copies may go to it"
                return FitResult(
                    (), f"does not fit: {what}; raise peer_share=, ram= or nvme= on {name}, or keep fewer generations (--keep)"
                )
            return FitResult(tuple(tier.name for tier in taken), f"fits in {names}: {need.text} of {_format_usable(taken)}")
    rest = "; the rest is written to the PFS, at its speed" if has_pfs else ""
    remedy = "raise ram= or nvme=, delete files that are not needed, or keep fewer generations (--keep)"
    return FitResult((), f"does not fit: {need.text} are needed on this node, which has {_format_usable(tiers)}{rest}; {remedy}")


def _format_usable(tiers: Sequence[TierCapacity]) -> str:
    return f"{render.format_size(sum(tier.usable_bytes for tier in tiers))} usable"


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """What `ckptfs df` shows of one mount. `verdict` is None unless checkpoints were asked about."""

    capacity: "pb.Capacity"
    clique: list["pb.Member"]
    need: CapacityNeed | None
    verdict: FitResult | None


def ask(client: "Client") -> tuple["pb.Capacity", "pb.Cluster | None"]:
    """Ask one daemon for its space, and for its cluster if it belongs to one."""
    found = client.get_capacity()
    return found, client.get_cluster() if found.clustered else None


def build_report(found: "pb.Capacity", cluster: "pb.Cluster | None", size_bytes: int | None, kept_count: int) -> CapacityReport:
    """Build the report of one mount. `size_bytes`: what a node writes of each checkpoint, if given."""
    verdict = need = None
    if size_bytes is not None:
        need = CapacityNeed(size_bytes, kept_count, max(0, found.replication_factor - 1))
        verdict = check_fit(need, list_tiers(found), list_peers(found, cluster), has_pfs=any(tier.name == PFS for tier in found.tiers))
    return CapacityReport(found, list_clique(found, cluster), need, verdict)


def report_to_json(report: CapacityReport) -> dict[str, Any]:
    """Convert a report to the object of `--json`."""
    more: DfJson = {"clique": [render.message_to_dict(member) for member in report.clique]}
    if report.verdict is not None and report.need is not None:
        names, sentence = list(report.verdict.tier_names), report.verdict.sentence
        more["checkpoint"] = {"fits": bool(names), "where": names, "sentence": sentence, "factor": report.need.factor}
    return {**render.message_to_dict(report.capacity), **more}


def print_report(report: CapacityReport) -> None:
    """Print a report for people."""
    render.print_renderable(build_tier_table(report.capacity))
    if report.clique:
        print()
        render.print_renderable(build_clique_table(report.clique, report.capacity.node))
    print(f"memory: {render.describe_service_memory(report.capacity.memory)}")
    history = report.capacity.history
    size, bound = render.format_size(history.bytes), render.format_size(history.bytes_max)
    print(f"history: {size} that only .ckptfs/history holds, of at most {bound}")
    if report.verdict is not None and report.need is not None:
        print(f"memory per checkpoint: {report.need.factor} times its size on each node")
        print(report.verdict.sentence)


def list_tiers(capacity: "pb.Capacity") -> list[TierCapacity]:
    """Return the tiers of this node in the order in which they are filled."""
    return [TierCapacity(one.name, one.usable_bytes, one.usable_for_peers_bytes) for one in capacity.tiers if one.name != PFS]


def list_clique(capacity: "pb.Capacity", cluster: "pb.Cluster | None") -> list["pb.Member"]:
    """Return the live nodes that hold copies for this one, or for which it holds copies."""
    living, peers = _list_living(capacity, cluster)
    return [member for member in living if member.name in peers or capacity.node in member.peers]


def list_peers(capacity: "pb.Capacity", cluster: "pb.Cluster | None") -> list[PeerCapacity]:
    """Return the live nodes that hold copies for this one and have reported their usage."""
    living, peers = _list_living(capacity, cluster)
    return [PeerCapacity(one.name, max(0, one.capacity_bytes - one.held_bytes)) for one in living if one.name in peers and one.has_figures]


def _list_living(capacity: "pb.Capacity", cluster: "pb.Cluster | None") -> tuple[list["pb.Member"], set[str]]:
    """Return the live nodes, and the names of those that hold copies for this one."""
    living = [] if cluster is None else [member for member in cluster.members if member.alive]
    return living, {name for member in living if member.name == capacity.node for name in member.peers}


def build_tier_table(capacity: "pb.Capacity") -> Any:
    """Build the table of this node's tiers."""
    from rich.markup import escape

    grid = render.build_grid("tier", "total>", "used>", "shared>", "prepared>", "free>", "held for peers>", "share of peers>", "where")
    for tier in capacity.tiers:
        known = tier.total_bytes > 0
        figures = [render.format_size(value) if known else "-" for value in (tier.total_bytes, tier.used_bytes)]
        figures.append(render.format_size(tier.shared_bytes) if tier.shared_bytes else "-")
        figures.append(render.format_size(tier.prepared_bytes) if tier.name == RAM else "-")
        figures.append(render.format_size(tier.free_bytes) if known else "-")
        peers = [
            render.format_size(value) if capacity.clustered and tier.name != PFS else "-" for value in (tier.held_bytes, tier.share_bytes)
        ]
        grid.add_row(tier.name, *figures, *peers, escape(render.escape_unprintable(tier.path)))
    return grid


def build_clique_table(members: Sequence["pb.Member"], node: str) -> Any:
    """Build the table of the nodes of a clique."""
    from rich.markup import escape

    grid = render.build_grid("node of the clique", "share of peers>", "held for peers>", "left>", "sends copies to")
    for member in members:
        held, left = (render.format_size(one) for one in (member.held_bytes, max(0, member.capacity_bytes - member.held_bytes)))
        figures = (held, left) if member.has_figures else ("unknown", "unknown")
        grid.add_row(escape(member.name), render.format_size(member.capacity_bytes), *figures, "this node" if node in member.peers else "")
    return grid
