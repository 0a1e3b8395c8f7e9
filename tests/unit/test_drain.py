"""How long a drain may take (P3): the deadline follows from what is left and from the speed of the PFS."""

import logging
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from ckptfs_daemon import ipc
from ckptfs_daemon.drain import Drain, Pending, advance_clock, get_deadline_s, start_clock
from local_node import Node

from ckptfs import limits
from ckptfs.catalog import identity, journal, summary
from ckptfs.catalog.database import Database
from ckptfs.coherence import key_state, pfs_coordination
from ckptfs.flow.seal import Seal
from ckptfs.limits import GIB, MIB


def test_the_deadline_follows_from_what_is_dirty_and_how_fast_the_pfs_is() -> None:
    slow, fast = (get_deadline_s(None, Pending(1, 100 * GIB), speed) for speed in (100 * MIB, 1000 * MIB))
    assert slow == pytest.approx(limits.DRAIN_DEADLINE_S_MIN + limits.DRAIN_MARGIN * (1024 + limits.DRAIN_FILE_S))
    assert limits.DRAIN_DEADLINE_S_MIN < fast < slow
    assert get_deadline_s(None, Pending(), 0.0) == limits.DRAIN_DEADLINE_S_MIN
    assert get_deadline_s(None, Pending(1, 10**18), 0.0) == limits.DRAIN_DEADLINE_S_MAX


def test_a_configured_deadline_is_kept_whatever_moves() -> None:
    clock = start_clock(5.0, Pending(2, 100), 0.0, 1000.0)
    assert clock.get_left_s(1000.0) == 5.0
    assert advance_clock(clock, Pending(1, 50), 0.0, 1004.0).get_left_s(1004.0) == 1.0


def test_a_standstill_ends_the_drain_and_progress_prolongs_it() -> None:
    clock = start_clock(None, Pending(2, 100 * GIB), 100 * MIB, 0.0)
    assert clock.get_left_s(0.0) == limits.DRAIN_STALL_S
    same = advance_clock(clock, Pending(2, 100 * GIB), 100 * MIB, 59.0)
    assert same.get_left_s(59.0) == pytest.approx(limits.DRAIN_STALL_S - 59)
    moved = advance_clock(clock, Pending(2, 99 * GIB), 100 * MIB, 59.0)
    assert moved.get_left_s(59.0) == limits.DRAIN_STALL_S
    late = clock
    for turn in range(1, 2 * int(limits.DRAIN_DEADLINE_S_MAX / 50)):
        late = advance_clock(late, Pending(2, 100 * GIB - turn), 100 * MIB, 50.0 * turn)
    assert late.until_s == limits.DRAIN_DEADLINE_S_MAX, "however slowly it moves, it ends"


def test_the_speed_of_the_pfs_is_remembered(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert summary.get_pfs_speed(node.db) == 0
    summary.record_pfs_speed(node.db, 1000, 0.001)
    assert summary.get_pfs_speed(node.db) == 0, "small files say nothing"
    summary.record_pfs_speed(node.db, 100 * MIB, 2.0)
    assert summary.get_pfs_speed(node.db) == 50 * MIB
    summary.delete_reports(node.db)
    assert summary.get_pfs_speed(node.db) == 50 * MIB


def test_a_report_survives_its_way() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ipc.report_drain(ours, 12.34, "1 file (2 GiB) left; blocked: " + "x" * 5000)
        seconds, text = ipc.parse_drain_report(theirs.recv(1 << 16))
        assert seconds == 12.3 and text.startswith("1 file (2 GiB) left; blocked: x") and len(text) < ipc.LINK_MESSAGE_BYTES_MAX


def test_what_blocks_it_names_its_subject(tmp_path: Path) -> None:
    """F2: the file or the tier, unless the problem names it itself."""
    node = Node(tmp_path)
    assert summary.find_obstacle(node.db) == ("", "")
    summary.set_trouble(node.db, "write back", {"what": "cannot write /p/f: EIO", "path": "/p/f", "remedy": "look"})
    assert summary.find_obstacle(node.db) == ("cannot write /p/f: EIO", "look")
    summary.set_report(node.db, "tier:pfs", {"error": "EIO: Input/output error", "remedy": "mount it again"})
    assert summary.find_obstacle(node.db) == ("pfs: EIO: Input/output error; cannot write /p/f: EIO", "mount it again; look")
    for lane in ("a", "b"):
        summary.set_trouble(node.db, lane, {"what": "EIO", "path": lane, "remedy": "look"})
    several = "pfs: EIO: Input/output error; a: EIO; b: EIO; and 1 more"
    assert summary.find_obstacle(node.db) == (several, "mount it again; look"), "three, and each remedy once"


def test_without_a_mount_nothing_waits_for_rows_that_only_a_mount_commits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = Node(tmp_path)
    with node.db.transaction():
        identity.set_node_number(node.db, 7)
    node.make_sealed(b"f", b"1")
    instance, end = journal.get_instance_id(node.db), summary.get_journal_end(node.db)
    assert journal.get_committed_end(node.db) == end
    for row in journal.list_oldest(node.db, 10, 0):
        key_state.mark_dirty(node.db, pfs_coordination.build_row_key(node.db, instance, row))
    assert journal.get_committed_end(node.db) == 0
    waits: list[float] = []
    drain = Drain(node.db, replace(node.config, drain_deadline_s=0.3), lambda: None)
    with caplog.at_level(logging.WARNING):
        trio.run(drain.drain_rest, lambda seconds, text: waits.append(seconds))
    assert not waits
    assert "etcd lacks some of the changes: the PFS lacks 2 changes" in caplog.text


def test_applications_that_go_on_saving_do_not_prolong_it(tmp_path: Path) -> None:
    """P3: a drain waits for what was closed before it began, also for the seal."""
    node = Node(tmp_path)
    node.config, node.db = replace(node.config, pfs=None), Database(tmp_path / "state" / "catalog.db", journalled=False)
    seal, saved = Seal(node.db, node.tiers, node.config, node.told), [node.make(b"before", b"1")]

    def seal_and_save() -> None:
        seal.step()
        saved.append(node.make(b"later%d" % len(saved), b"2"))

    drain = Drain(node.db, node.config, seal_and_save)
    assert trio.run(drain.drain_noticed, 5.0)
    assert summary.count_unsealed(node.db) == 1
