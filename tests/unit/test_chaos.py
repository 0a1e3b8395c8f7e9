"""G7: the schedule of `ckptfs chaos`, what its readers may see, and its command line."""

import errno
import itertools
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ckptfs_client.chaos import chaos_command
from ckptfs_client.chaos.applications import RECORD_BYTES, LogRecords, Track, WrongContent, build_version, identify_version
from ckptfs_client.chaos.campaign import DIRECTORY, READS_MAX, Campaign, FaultMaker, identify
from ckptfs_client.chaos.schedule import FAULTS, LOSSES, MEMBERS, Fault, Setup, iterate_rounds
from ckptfs_client.cli import app
from typer.testing import CliRunner

ROUNDS = 200


def play(seed: int, setup: Setup) -> list[list[Fault]]:
    return list(itertools.islice(iterate_rounds(seed, setup), ROUNDS))


def test_a_seed_gives_the_same_schedule() -> None:
    setup = Setup(5, 2, 3)
    assert play(1, setup) == play(1, setup) != play(2, setup)


@pytest.mark.parametrize("setup", [Setup(3, 1, 3), Setup(5, 2, 5), Setup(2, 0, 1, with_pfs=False)])
def test_faults_stay_within_what_is_promised(setup: Setup) -> None:
    """P9: at most R-1 nodes are away; most members of etcd live as long as etcd is not stopped as a whole."""
    rounds = play(1, setup)
    for faults in rounds:
        lost = [fault.target for fault in faults if fault.kind in LOSSES]
        assert len(set(lost)) == len(lost) <= setup.losses
        assert sum(fault.kind in MEMBERS for fault in faults) <= (setup.etcd_members - 1) // 2
        assert all(fault.target < setup.nodes for fault in faults if fault.kind not in MEMBERS)
    drawn = {fault.kind for faults in rounds for fault in faults}
    left_out = {
        *(LOSSES if not setup.losses else ()),
        *(MEMBERS if setup.etcd_members < 3 else ()),
        *(() if setup.with_pfs else ["refuse_pfs"]),
    }
    assert drawn == set(FAULTS) - left_out


def test_every_kind_can_be_made() -> None:
    for kind in FAULTS:
        assert FaultMaker(MagicMock()).make(Fault(kind, 0))
    with pytest.raises(ValueError, match="earthquake"):
        FaultMaker(MagicMock()).make(Fault("earthquake"))


def test_a_reader_may_see_no_mixture_and_nothing_older_than_what_all_have_seen() -> None:
    """P7, P9: the model itself finds what the campaign is for."""
    track = Track("a", "a")
    for number in (1, 2):
        track.begin(number, writer=0)
        track.finish(number, seen_by_all=True)
        track.mark_safe(number)
    old, new = build_version("a", 1), build_version("a", 2)
    assert identify_version("a", new) == 2
    with pytest.raises(WrongContent):
        identify_version("a", new[:-1] + b"?")
    with pytest.raises(WrongContent):
        identify_version("a", new[: len(new) // 2] + old[len(new) // 2 :])
    assert track.may_show(2, track.floor, strict=True)
    assert not track.may_show(1, track.floor, strict=True)
    assert not track.may_show(None, track.floor, strict=True)
    track.begin(3, writer=0)
    track.mark_wiped(0)
    assert (track.lost, track.floor, track.durable) == (True, 2, 2)


def test_only_versions_that_went_with_a_node_may_be_names_without_bytes() -> None:
    """An older directory of a series may be lost although a newer one was saved since."""
    steps = Track("steps", "step")
    for number in (1, 2):
        steps.begin(number, writer=0)
        steps.finish(number, seen_by_all=True)
        if number == 1:
            steps.mark_safe(number)
    steps.mark_wiped(0)
    steps.begin(3, writer=1)
    steps.finish(3, seen_by_all=True)
    assert [steps.may_be_without_bytes(Path(f"steps/step_{number}/rank0")) for number in (1, 2, 3)] == [False, True, False]


def test_a_log_has_records_of_its_writers_only() -> None:
    log = LogRecords("log")
    data = log.append(3)
    log.resume(2)
    assert log.count(data) == 3 and log.count(data[: 2 * RECORD_BYTES] + log.append(1)) == 3
    with pytest.raises(WrongContent):
        log.count(random.Random(1).randbytes(RECORD_BYTES))


def test_a_file_that_is_written_in_place_is_read_again() -> None:
    """Reads of such a file may fail during its fetch; see docs/posix.md. Reads of others never fail, nor do all of one file."""
    records = LogRecords("log")
    log, failure = Track("log", "log", records), OSError(errno.EIO, "the rest does not arrive")
    path = MagicMock()
    path.read_bytes.side_effect = [failure, records.append(2)]
    assert identify(log, path) == 2
    path.read_bytes.side_effect = [failure] * READS_MAX
    with pytest.raises(OSError, match="does not arrive"):
        identify(log, path)
    path.read_bytes.side_effect = [failure, build_version("best", 1)]
    with pytest.raises(OSError, match="does not arrive"):
        identify(Track("best", "best"), path)


def play_check(root: Path, track: Track, *, had_islands: bool) -> tuple[int | None, list[str]]:
    """Let a campaign check a track on its only node. Return the version that it found, and its complaints."""
    campaign = Campaign.__new__(Campaign)
    campaign.cluster = MagicMock(nodes=[SimpleNamespace(path=root)])
    campaign.complaints, campaign._story, campaign._began_s, campaign._epoch = [], [], 0.0, 0
    campaign.away, campaign.has_etcd, campaign.had_islands = {}, True, had_islands
    return campaign.check(0, track), campaign.complaints


@pytest.mark.parametrize("had_islands", [True, False])
def test_of_two_files_that_islands_closed_one_may_lie_beside(tmp_path: Path, had_islands: bool) -> None:
    """The later generation has the name, and that may be the file of a node that died before the other one wrote."""
    track = Track("a", "a", latest=2, closed=2, floor=2, durable=2)
    (tmp_path / DIRECTORY).mkdir()
    (tmp_path / DIRECTORY / "a").write_bytes(build_version("a", 1))
    assert len(play_check(tmp_path, track, had_islands=had_islands)[1]) == 1
    (tmp_path / DIRECTORY / "a.ckptfs-conflict-node1-1").write_bytes(build_version("a", 2))
    found, complaints = play_check(tmp_path, track, had_islands=had_islands)
    assert (found, len(complaints), track.floor) == ((1, 0, 1) if had_islands else (1, 1, 2))


def test_what_its_writer_had_overwritten_in_part_when_it_died_counts(tmp_path: Path) -> None:
    track = Track("a", "a", latest=2, closed=1, floor=1, durable=1, broken=2)
    (tmp_path / DIRECTORY).mkdir()
    (tmp_path / DIRECTORY / "a").write_bytes(b"")
    assert play_check(tmp_path, track, had_islands=False) == (2, [])


def test_an_unknown_fault_is_refused() -> None:
    """P11."""
    result = CliRunner().invoke(app, ["chaos", "--faults", "earthquake"])
    assert result.exit_code != 0
    assert "accepted: kill, wipe" in str(result.exception)


def test_an_interrupted_campaign_deletes_its_lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM end it as any other end does; with --keep the lab stays."""
    done: list[str] = []

    class Interrupted:
        over = threading.Event()

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def run(self, _: Any) -> None:
            raise KeyboardInterrupt

    lab: Any = SimpleNamespace(directory=tmp_path, start=lambda *_: done.append("start"), stop=lambda: done.append("stop"))
    monkeypatch.setattr("ckptfs_client.chaos.campaign.Campaign", Interrupted)
    monkeypatch.setattr("ckptfs_client.lab.laboratory.LiveCluster", lambda _: None)
    for keep in (False, True):
        with pytest.raises(KeyboardInterrupt):
            chaos_command._run(lab, 1, Setup(3, 1), 1.0, keep=keep, json=True)
    assert done == ["start", "stop", "start"]
    assert Interrupted.over.is_set(), "its threads end"
