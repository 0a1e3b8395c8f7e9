"""What the page and `status --watch` say of the answers of daemons: F2, F5, H8."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ckptfs_client.dashboard import overview, sampling
from ckptfs_client.dashboard.overview import BacklogHistory, MountAnswers, Row
from ckptfs_client.dashboard.sampling import OverviewSampler
from ckptfs_client.errors import NoMount
from ckptfs_client.sets.set_history import ListedSeries
from control_served import Served
from made_overviews import GIB, HOSTILE, make_cluster, make_five_nodes, make_mount, make_series, make_status

from ckptfs.catalog import history, namespace
from ckptfs.catalog.history import SetRecord
from ckptfs.model import ROOT
from ckptfs.protocol import control_pb2 as pb


def build(answers: MountAnswers, *earlier: tuple[float, pb.Status | None]) -> Row:
    """The overview at second 100."""
    found = BacklogHistory()
    for at_s, status in (*earlier, (100.0, answers.status)):
        found.append(at_s, status)
    return overview.build_mount(answers, found, time.time_ns())


def build_newest(level: str, *, pfs: bool, in_cluster: bool) -> Row:
    status = make_status()
    if not pfs:
        status.pfs = ""
    if in_cluster:
        status.clique.SetInParent()
    return build(MountAnswers("run1", "/ckpt", status, make_series({"level": level})))


@pytest.mark.parametrize(
    ("level", "pfs", "in_cluster", "state", "words"),
    [
        ("pfs", True, True, "safe", "is on the PFS"),
        ("clique", True, True, "copied", "is on several nodes, but not on the PFS yet"),
        ("clique", False, True, "safe", "is on several nodes; this mount has no PFS"),
        ("local", True, True, "exposed", "is on one node only, and not on the PFS yet"),
        ("local", True, False, "exposed", "is on one node only, and not on the PFS yet"),
        ("local", False, True, "exposed", "is on one node only."),
        ("local", False, False, "exposed", "this mount has neither a PFS nor other nodes"),
        ("none", True, True, "unverified", "this node knows no verified copy"),
        ("none", True, False, "lost", "no verified copy is left"),
    ],
)
def test_the_verdict_follows_from_the_level(level: str, pfs: bool, in_cluster: bool, state: str, words: str) -> None:
    """P3. Never safe for less than the mount can give."""
    found = build_newest(level, pfs=pfs, in_cluster=in_cluster)
    assert (found["state"], found["title"]) == (state, overview.TITLES[state])
    assert f"run1/step_300 {words}" in found["detail"] or words in found["detail"]
    assert "8 files, 40.0 GiB, completed 1 min ago" in found["detail"]


def test_the_newest_set_of_all_series_decides_and_others_are_named() -> None:
    found = build(
        MountAnswers(
            "run1", "/ckpt", make_status(), make_series({"age_s": 500, "level": "local", "path": "old/a_*"}, {"age_s": 5}, {"age_s": 900})
        )
    )
    assert found["state"] == "safe" and [one["name"] for one in found["series"]] == ["run1/step_*", "old/a_*", "run1/step_*"]
    assert found["notes"] == ["The newest checkpoint of old/a_* is not safe yet."]


def test_a_series_that_not_all_may_list_has_no_name() -> None:
    """F6."""
    reply = make_series({"path": "", "name": ""})
    found = build(MountAnswers("run1", "/ckpt", make_status(), reply))
    assert found["detail"].startswith("a private series: set 30 is on the PFS") and found["series"][0]["name"] == "a private series"


def test_without_sets_and_without_an_answer() -> None:
    status = make_status()
    status.counts.files = 3
    assert build(MountAnswers("run1", "/ckpt", status))["state"] == "absent"
    silent = build(MountAnswers("run1", "/ckpt", failure="the daemon does not answer"))
    assert (silent["state"], silent["health"], silent["detail"]) == ("silent", "down", "The daemon does not answer.")


def test_names_are_one_printable_line() -> None:
    """P11. Bytes that are no text, and control characters, do not reach a terminal or a page."""
    status = make_status(name="a\x1b[2Jb")
    status.troubles.add(where="write back", path="\x1b]0;x\x07", what="line\nline")
    reply = make_series({"path": "r\x1b[2J/s_*", "name": "x"})
    reply.series[0].newest.name = b"s_\xff\n1"
    found = build(MountAnswers(status.name, "/ckpt", status, reply))
    assert "\\xff" in found["detail"] and "\\x1b" in found["series"][0]["name"]

    def texts(value: Any) -> list[str]:
        if isinstance(value, dict | list):
            return [text for one in (value.values() if isinstance(value, dict) else value) for text in texts(one)]
        return [value] if isinstance(value, str) else []

    assert [text for text in texts(found) if not text.isprintable()] == []


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (20 * GIB, 10 * GIB, "falls by 1.0 GiB/s: done in about 10.0 s"),
        (5 * GIB, 10 * GIB, "grows by 512 MiB/s"),
        (10 * GIB, 10 * GIB, "does not move"),
        (10 * GIB, 0, ""),
    ],
)
def test_a_backlog_has_a_trend(before: int, now: int, words: str) -> None:
    """F2: one can see whether the write-back moves."""
    first, last = make_status(), make_status()
    first.write_back.dirty_bytes, last.write_back.dirty_bytes = before, now
    last.write_back.dirty_files = 1 if now else 0
    (found,) = build(MountAnswers("run1", "/ckpt", last), (10.0, make_status()), (90.0, first))["backlogs"]
    assert (found["name"], found["trend"], found["is_behind"]) == ("write-back", words, bool(now))


def test_a_large_file_that_is_being_copied_moves() -> None:
    status = make_status()
    status.write_back.dirty_bytes = status.write_back.current_size_bytes = 10 * GIB
    status.write_back.current_copied_bytes = 4 * GIB
    assert build(MountAnswers("run1", "/ckpt", status))["plot"]["values"] == {"write-back": [6 * GIB]}


def test_the_history_is_bounded_and_has_gaps() -> None:
    found = BacklogHistory()
    for at_s in range(overview.POINTS_MAX + 50):
        found.append(float(at_s), None if at_s == 100 else make_five_nodes(0.5).status)
    plot = overview.build_mount(make_five_nodes(), found, time.time_ns())["plot"]
    assert len(plot["at_s"]) == len(plot["values"]["write-back"]) == overview.POINTS_MAX
    assert [at for at, one in enumerate(plot["values"]["copies on other nodes"]) if one is None] == [50]
    top, label = plot["ticks"][-1]
    assert (top, label) == (32 * GIB, "32.0 GiB") and plot["at_s"][-1] == 0


def test_nodes_of_a_cluster() -> None:
    found = build(make_five_nodes())
    assert [one["state"] for one in found["nodes"]] == ["alive", "alive", "alive", "dead", "alive"]
    assert [one["copies_to"] for one in found["nodes"]] == ["node2", "node3", "node5", "", "node1"]
    assert found["nodes"][1]["behind"] == "3 files (12.0 GiB)" and found["nodes"][3]["behind"] == "unknown"
    assert found["cluster"] == "training: 4 of 5 nodes alive, 2 copies, as node1 sees it"


def test_of_many_nodes_those_in_trouble_are_shown() -> None:
    answers = make_five_nodes()._replace(cluster=make_cluster(dead=[777], behind=[900], nodes=1000))
    found = build(answers)
    assert len(found["nodes"]) == overview.NODES_SHOWN_MAX and found["more_nodes"] == 1000 - overview.NODES_SHOWN_MAX
    assert [one["name"] for one in found["nodes"][:2]] == ["node777", "node900"]


# --- samples ----------------------------------------------------------------------------------------------------------


def test_a_sample_of_a_daemon(served: Served) -> None:
    node = served.node
    file = node.inode(node.make_sealed(b"a.pt", b"x" * 100))
    with node.db.transaction():
        made = namespace.create(node.db, ROOT, b"run1", 0o040755, uid=7, gid=7, allow_unimported=True).id
        series = history.insert_series(node.db, made, b"step_*").directory
        for number in (1, 2):
            one = history.begin_set(node.db, series, SetRecord(number, b"step_%d" % number, (number,), 1, 100, time.time_ns()))
            history.insert_link(node.db, file, one, b"a.pt")
            history.finish_set(node.db, one)
    sampler = OverviewSampler(lambda: [served.mount])
    (found,) = sampler.sample()["mounts"]
    assert (found["state"], found["health"]) == ("exposed", "ok") and "run1/step_2 is on one node only" in found["detail"]
    sets = sampler.list_sets(found["mountpoint"], int(found["series"][0]["id"]))
    assert [(one["name"], one["state"], one["size"]) for one in sets] == [("step_2", "exposed", "100 B"), ("step_1", "exposed", "100 B")]
    for mountpoint, directory in ((found["mountpoint"], ROOT), ("/elsewhere", series)):
        with pytest.raises(KeyError):
            sampler.list_sets(mountpoint, directory)
    assert len(sampler.sample()["mounts"][0]["plot"]["at_s"]) == 2


def test_a_silent_daemon_leaves_a_gap_and_a_gone_mount_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mount, answers = make_mount(), [make_five_nodes(), NoMount("the daemon does not answer"), make_five_nodes()]
    chosen = [mount]
    monkeypatch.setattr(sampling, "ask_all", lambda mounts, *_: [(one, answers.pop(0)) for one in mounts])
    sampler = OverviewSampler(lambda: chosen)
    states = [sampler.sample()["mounts"][0]["state"] for _ in range(2)]
    (found,) = sampler.sample()["mounts"]
    assert [*states, found["state"]] == ["copied", "silent", "copied"]
    assert [one is None for one in found["plot"]["values"]["write-back"]] == [False, True, False]
    chosen.clear()
    assert sampler.sample()["mounts"] == [] and HOSTILE not in str(sampler.sample())


@pytest.mark.parametrize("for_caller", [True, False])
def test_only_the_caller_sees_names_of_private_series(served: Served, monkeypatch: pytest.MonkeyPatch, for_caller: bool) -> None:
    """F6. The terminal is the caller's own, and the page is for all users of the machine."""
    with served.node.db.transaction() as db:
        made = namespace.create(db, ROOT, b"mine", 0o040700, uid=7, gid=7, allow_unimported=True).id
        series = history.insert_series(db, made, b"step_*")
        history.finish_set(db, history.begin_set(db, series.directory, SetRecord(1, b"step_5", (5,), 1, 100, time.time_ns())))
    listed = ListedSeries(served.mount, series.directory, made, "mine/step_*", "step_*", 0, 1, 100, None)
    monkeypatch.setattr(sampling, "_list_named", lambda mount: {series.directory: listed})
    (found,) = OverviewSampler(lambda: [served.mount], for_caller=for_caller).sample()["mounts"]
    assert found["series"][0]["name"] == ("mine/step_*" if for_caller else "a private series")


class StandInClient:
    """A daemon of a cluster. It learns of a series when the history is listed, and of its level when it is asked for sets."""

    def __init__(self, mountpoint: Path) -> None:
        self.mount = make_mount(mountpoint=str(mountpoint))
        self.asked = 0

    def get_status(self) -> pb.Status:
        return pb.Status(name="run1", pfs="/pfs", clique=pb.Clique())

    def get_cluster(self) -> pb.Cluster:
        return make_cluster()

    def list_series(self, *, figures: bool) -> pb.ListSeriesReply:
        self.asked += 1
        reply = make_series({"level": "none"}) if self.asked > 1 else pb.ListSeriesReply(series=[pb.SeriesInfo(rollback=8)])
        reply.shared = True
        return reply

    def list_sets(self, directory: int, at_least: int) -> list[pb.SetInfo]:
        return [make_series({"level": "pfs"}).series[0].newest]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OverviewSampler]:
    client = StandInClient(tmp_path)
    monkeypatch.setattr(sampling, "ask_all", lambda mounts, question, *_: [(one, question(client)) for one in mounts])
    yield OverviewSampler(lambda: [client.mount])


def test_a_node_that_wrote_nothing_shows_the_sets_of_others(
    elsewhere: OverviewSampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D12. It lists the history through the mount, the newest set of each series included, and asks the store."""
    sets = [tmp_path / ".ckptfs/history/run1/step_*" / name for name in ("step_9@11", "step_100@10/part", "step_7@7", "step_8@8")]
    for one in sets:
        one.mkdir(parents=True)
    listed: list[str] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(str(path)) or scan(path))
    (found,) = elsewhere.sample()["mounts"]
    assert found["state"] == "safe"
    assert sorted(os.path.basename(one) for one in listed) == ["history", "part", "run1", "step_*", "step_100@10", "step_8@8"]


def test_a_mount_that_hangs_keeps_one_thread(elsewhere: OverviewSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: the view goes on."""
    begun, end = [], threading.Event()
    monkeypatch.setattr(sampling, "WALK_WAIT_S", 0.01)
    monkeypatch.setattr(sampling, "REST_RATIO", 0)
    monkeypatch.setattr(sampling, "_list_newest", lambda history, rollbacks: begun.append(history) or end.wait(60))
    assert [elsewhere.sample()["mounts"][0]["state"] for _ in range(3)] == ["safe"] * 3 and len(begun) == 1
    end.set()
