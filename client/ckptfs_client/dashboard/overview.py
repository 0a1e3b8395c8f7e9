"""What the page of `ckptfs web` and `ckptfs status --watch` show, from the answers of daemons. Pure.

`build_mount` makes all words, so that both views say the same. A series whose name the daemon does not tell is a private one. Names are
printable; a view that writes HTML still has to escape them.
"""

import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptfs.model import Level, Tier
from ckptfs.quantities import format_age, format_count, format_duration, format_size
from ckptfs_client.render import DOWN, escape_unprintable, format_amount, format_trouble_place, get_member_state

if TYPE_CHECKING:
    from ckptfs.protocol import control_pb2 as pb

POINTS_MAX = 450
"""Samples that the plot shows."""
TREND_S = 10.0
TREND_S_MIN = 1.5
MOVES_BYTES_PER_S = 1024
PLOT_TOP_MIN = 1 << 20
SERIES_SHOWN_MAX = 50
NODES_SHOWN_MAX = 128
SETS_SHOWN_MAX = 50
SAFE, COPIED, EXPOSED, UNVERIFIED, LOST, ABSENT, SILENT = "safe", "copied", "exposed", "unverified", "lost", "absent", "silent"
TITLES = {
    SAFE: "Safe", COPIED: "Safe if a node fails", EXPOSED: "Not safe yet", UNVERIFIED: "Not known to be safe", LOST: "Not readable",
    ABSENT: "No complete checkpoint yet", SILENT: "No answer",
}  # fmt: skip
"""State of a checkpoint: its words."""
PRIVATE_SERIES = "a private series"


Row = dict[str, Any]
"""An object of the answer, as the page and the screen read it: texts that are ready to show, and figures that are drawn."""


class MountAnswers(NamedTuple):
    """What the daemon of a mount answered. `failure`: why there is no status."""

    name: str
    mountpoint: str
    status: "pb.Status | None" = None
    series: "pb.ListSeriesReply | None" = None
    cluster: "pb.Cluster | None" = None
    failure: str = ""


# --- over time --------------------------------------------------------------------------------------------------------

WRITE_BACK, COPIES = "write-back", "copies on other nodes"


class BacklogPoint(NamedTuple):
    """What waited at a time. None: not known."""

    at_s: float
    write_back: int | None
    copies: int | None


@dataclass(slots=True)
class BacklogHistory:
    """The last samples of a mount."""

    points: deque[BacklogPoint] = field(default_factory=lambda: deque(maxlen=POINTS_MAX))

    def append(self, at_s: float, status: "pb.Status | None") -> None:
        """Add a sample. `at_s` is the time of a clock that never goes back."""
        if status is None:
            self.points.append(BacklogPoint(at_s, None, None))
            return
        write_back = max(0, status.write_back.dirty_bytes - status.write_back.current_copied_bytes) if status.pfs else None
        copies = status.clique.under_replicated_bytes if status.HasField("clique") else None
        self.points.append(BacklogPoint(at_s, write_back, copies))

    def get_rate(self, name: str) -> float | None:
        """Return by how many bytes in a second a backlog falls. Returns None if that is not known yet."""
        values = self.get_values().get(name, [None])
        if values[-1] is None:
            return None
        last_s = self.points[-1].at_s
        recent = [
            (point.at_s, value)
            for point, value in zip(self.points, values, strict=True)
            if value is not None and point.at_s >= last_s - TREND_S
        ]
        if recent[-1][0] - recent[0][0] < TREND_S_MIN:
            return None
        (first_s, first), (end_s, end) = recent[0], recent[-1]
        return (first - end) / (end_s - first_s)

    def get_values(self) -> dict[str, list[int | None]]:
        """Return the backlogs of the mount by name: those that were ever known."""
        found = {WRITE_BACK: [one.write_back for one in self.points], COPIES: [one.copies for one in self.points]}
        return {name: values for name, values in found.items() if any(one is not None for one in values)}


def _build_plot(history: BacklogHistory) -> Row:
    values = history.get_values()
    most = max((one for each in values.values() for one in each if one is not None), default=0)
    top = PLOT_TOP_MIN
    while top < most:
        top *= 2
    times = [one.at_s for one in history.points]
    span_s = times[-1] - times[0] if times else 0.0
    return {
        "at_s": [round(one - times[-1], 2) for one in times], "values": values, "span": format_duration(span_s),
        "ticks": [(one, format_size(one)) for one in (0, top // 2, top)],
    }  # fmt: skip


def describe_trend(behind_bytes: int, rate: float | None) -> str:
    """Return how a backlog moves, in words. Empty if nothing is behind, or if it is not known."""
    if not behind_bytes or rate is None:
        return ""
    if rate >= MOVES_BYTES_PER_S:
        return f"falls by {format_size(rate)}/s: done in about {format_duration(behind_bytes / rate)}"
    return f"grows by {format_size(-rate)}/s" if rate <= -MOVES_BYTES_PER_S else "does not move"


def _build_backlogs(status: "pb.Status", history: BacklogHistory) -> list[Row]:
    found = []
    if status.pfs:
        figures = status.write_back
        words = [format_amount(figures.dirty_files, figures.dirty_bytes), figures.changes and format_count(figures.changes, "other change")]
        found.append(_build_backlog(WRITE_BACK, words, figures.lag_s, figures.dirty_bytes, history.get_rate(WRITE_BACK)))
    if status.HasField("clique"):
        clique = status.clique
        words = [format_amount(clique.under_replicated_files, clique.under_replicated_bytes)]
        found.append(_build_backlog(COPIES, words, clique.lag_s, clique.under_replicated_bytes, history.get_rate(COPIES)))
    return found


def _build_backlog(name: str, words: Iterable[str | int], lag_s: float, size_bytes: int, rate: float | None) -> Row:
    behind = ", ".join(str(one) for one in words if one)
    return {
        "name": name, "behind": behind or "nothing", "lag": format_duration(lag_s) if behind and lag_s else "",
        "trend": describe_trend(size_bytes, rate), "is_behind": bool(behind),
    }  # fmt: skip


# --- checkpoints ------------------------------------------------------------------------------------------------------


def judge_level(level: str, status: "pb.Status") -> str:
    """Return the state of a checkpoint with this level."""
    if level == Level.PFS or (level == Level.CLIQUE and not status.pfs):
        return SAFE
    # What other nodes wrote has the level none until this node has learned where its copies are.
    lowest = UNVERIFIED if status.HasField("clique") else LOST
    return {Level.CLIQUE.value: COPIED, Level.LOCAL.value: EXPOSED}.get(level, lowest)


def _describe_level(level: str, status: "pb.Status") -> str:
    """Return where a checkpoint is, as the end of a sentence."""
    if level == Level.PFS:
        return "is on the PFS"
    if level == Level.CLIQUE:
        return "is on several nodes" + (", but not on the PFS yet" if status.pfs else "; this mount has no PFS")
    if level == Level.LOCAL:
        if status.pfs:
            return "is on one node only, and not on the PFS yet"
        return "is on one node only" + ("" if status.HasField("clique") else "; this mount has neither a PFS nor other nodes")
    return "has a file of which " + ("this node knows no verified copy" if status.HasField("clique") else "no verified copy is left")


def _get_set_name(one: "pb.SetInfo") -> str:
    return escape_unprintable(os.fsdecode(one.name)) if one.name else f"set {one.number}"


def _get_directory(one: "pb.SeriesInfo") -> str:
    """Return the directory of a series with a slash at its end; empty for the top, and if it is private."""
    directory = escape_unprintable(os.path.dirname(os.fsdecode(one.path)))
    return f"{directory}/" if directory else ""


def _build_series(one: "pb.SeriesInfo", status: "pb.Status", now_ns: int) -> Row:
    newest, state = one.newest, judge_level(one.newest.level, status)
    name = _get_directory(one) + escape_unprintable(os.fsdecode(one.pattern)) if one.path else PRIVATE_SERIES
    return {
        "id": str(one.directory), "name": name, "newest": _get_set_name(newest), "step": newest.step, "state": state,
        "title": TITLES[state], "level": newest.level, "size": format_size(newest.size),
        "age": format_age(now_ns, newest.completed_ns), "sets": one.sets,
        "rollback": f"rolled back to set {one.rollback}" if one.rollback else "",
    }  # fmt: skip


def build_sets(found: Iterable["pb.SetInfo"], rollback: int, status: "pb.Status", now_ns: int) -> list[Row]:
    """Return the rows of the newest sets of a series."""
    rows = []
    for one in list(found)[:SETS_SHOWN_MAX]:
        kept = {"pinned": one.pinned, "rolled back to": one.number == rollback, "in history only": not one.in_place}
        rows.append(
            {
                "name": _get_set_name(one), "step": one.step, "state": judge_level(one.level, status), "level": one.level,
                "files": one.files, "size": format_size(one.size), "age": format_age(now_ns, one.completed_ns),
                "kept": ", ".join(word for word, holds in kept.items() if holds),
            }
        )  # fmt: skip
    return rows


# --- the mount --------------------------------------------------------------------------------------------------------


def build_mount(answers: MountAnswers, history: BacklogHistory, now_ns: int) -> Row:
    """Return what both views show of a mount. The last point of `history` is of the same time."""
    status = answers.status
    failure = f"{answers.failure[:1].upper()}{answers.failure[1:]}."
    found: Row = {
        "name": escape_unprintable(answers.name), "mountpoint": escape_unprintable(answers.mountpoint), "health": DOWN, "facts": "",
        "state": SILENT, "title": TITLES[SILENT], "detail": failure, "notes": [], "backlogs": [],
        "plot": _build_plot(history), "tiers": [], "series": [], "more_series": 0, "cluster": "", "nodes": [], "more_nodes": 0,
        "troubles": [],
    }  # fmt: skip
    if status is None:
        return found
    listed = [] if answers.series is None else [one for one in answers.series.series if one.HasField("newest")]
    listed.sort(key=lambda one: one.newest.completed_ns, reverse=True)
    series = [_build_series(one, status, now_ns) for one in listed]
    found["health"], found["facts"] = status.health, _describe_facts(status)
    found["state"], found["detail"] = _judge_newest(listed, status, now_ns)
    found["title"] = TITLES[found["state"]]
    found["notes"] = _list_notes(status, series)
    found["backlogs"] = _build_backlogs(status, history)
    found["tiers"] = [_build_tier(one) for one in status.tiers]
    found["series"], found["more_series"] = series[:SERIES_SHOWN_MAX], max(0, len(series) - SERIES_SHOWN_MAX)
    found["troubles"] = [_build_trouble(one) for one in status.troubles]
    if answers.cluster is not None:
        nodes = [_build_node(answers.cluster, one) for one in answers.cluster.members]
        found["cluster"] = _describe_cluster(answers.cluster, nodes)
        if len(nodes) > NODES_SHOWN_MAX:
            nodes.sort(key=lambda one: (one["state"] == "alive", one["behind"] == "nothing"))
        found["nodes"], found["more_nodes"] = nodes[:NODES_SHOWN_MAX], max(0, len(nodes) - NODES_SHOWN_MAX)
    return found


def _judge_newest(listed: Sequence["pb.SeriesInfo"], status: "pb.Status", now_ns: int) -> tuple[str, str]:
    """Return state and sentence of the newest complete set."""
    if not listed:
        files = format_count(status.counts.files, "file")
        return ABSENT, f"Of {files} that this node knows, none form one."
    newest = listed[0].newest
    place = _get_directory(listed[0]) if newest.name else f"{PRIVATE_SERIES}: "
    words = f"{place}{_get_set_name(newest)} {_describe_level(newest.level, status)}."
    facts = (format_count(newest.files, "file"), format_size(newest.size), f"completed {format_age(now_ns, newest.completed_ns)} ago")
    return judge_level(newest.level, status), f"{words} {', '.join(facts)}."


def _list_notes(status: "pb.Status", series: Sequence[Row]) -> list[str]:
    """Return what else a person should know now, a sentence each."""
    notes = []
    if status.HasField("notice"):
        notes.append(f"This node is about to be taken away: {escape_unprintable(status.notice.what)}.")
    if status.counts.lost:
        notes.append(f"No copy is left of {format_count(status.counts.lost, 'file')}.")
    others = [one["name"] for one in series[1:] if one["state"] not in (SAFE, COPIED)]
    if others:
        more = f" and {format_count(len(others) - 1, 'other series', 'other series')}" if len(others) > 1 else ""
        notes.append(f"The newest checkpoint of {others[0]}{more} is not safe yet.")
    if status.counts.writers:
        are = "is" if status.counts.writers == 1 else "are"
        notes.append(f"{format_count(status.counts.writers, 'file')} {are} being written now.")
    return notes


def _describe_facts(status: "pb.Status") -> str:
    words = [f"ckptfs {status.version}", status.data_path, f"fsync returns at the level {status.fsync}"]
    return escape_unprintable(", ".join(filter(None, words)))


def _build_tier(tier: "pb.TierStatus") -> Row:
    """Return the row of a tier. Other users fill the PFS, too; so only its free bytes say something."""
    is_known = tier.budget_bytes > 0
    used = tier.budget_bytes - tier.free_bytes if tier.name == Tier.PFS else tier.used_bytes
    return {
        "name": tier.name, "health": tier.health, "used": format_size(used) if is_known and tier.name != Tier.PFS else "",
        "free": format_size(tier.free_bytes) if is_known else "", "size": format_size(tier.budget_bytes) if is_known else "",
        "share": min(1.0, max(0.0, used / tier.budget_bytes)) if is_known else None,
    }  # fmt: skip


def _build_trouble(trouble: "pb.Trouble") -> Row:
    age = format_duration(trouble.age_s) if trouble.age_s else ""
    what, remedy = escape_unprintable(trouble.what), escape_unprintable(trouble.remedy)
    return {"where": escape_unprintable(format_trouble_place(trouble)), "what": what, "remedy": remedy, "age": age}


def _build_node(cluster: "pb.Cluster", member: "pb.Member") -> Row:
    behind = format_amount(member.under_replicated_files, member.under_replicated_bytes)
    return {
        "name": escape_unprintable(member.name), "state": get_member_state(cluster, member), "domain": escape_unprintable(member.domain),
        "copies_to": escape_unprintable(", ".join(member.peers)) or ("no node" if member.alive else ""),
        "behind": (behind or "nothing") if member.has_figures else "unknown",
        "lag": format_duration(member.lag_s) if member.has_figures and behind else "",
        "holds": f"{format_count(member.held_files, 'file')} ({format_size(member.held_bytes)})" if member.has_figures else "unknown",
    }  # fmt: skip


def _describe_cluster(cluster: "pb.Cluster", nodes: Sequence[Row]) -> str:
    alive = sum(one["state"] == "alive" for one in nodes)
    words = f"{escape_unprintable(cluster.name)}: {alive} of {format_count(len(nodes), 'node')} alive, {cluster.replication_factor} copies"
    island = "; this node is an island: etcd does not answer it, or lacks its newest changes" if cluster.island else ""
    return f"{words}, as {escape_unprintable(cluster.node)} sees it{island}"
