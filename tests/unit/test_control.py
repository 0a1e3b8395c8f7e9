"""The control servers with the real catalog and tiers, without FUSE: answers, waits, refusals, restarts, strangers. F2, F5, F6, P1, P11."""

import errno
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from ckptfs_client import render
from ckptfs_client.client import Client
from ckptfs_client.errors import CommandFailed, NoMount, NotInTime, UsageError
from ckptfs_client.mounts import Mount
from ckptfs_daemon.control import server
from ckptfs_daemon.control.admin import VERIFICATIONS_MAX
from ckptfs_daemon.mover import lanes
from ckptfs_daemon.rescue import parse_drain_level
from control_served import Served, serving
from daemon_under_test import eventually
from local_node import Node, inject_fault, run_until_idle

from ckptfs import limits, runtime_dir
from ckptfs.catalog import contents, copies, exposure, mover_requests, namespace, summary
from ckptfs.config import Config
from ckptfs.errors import InvalidArgument, TierUnavailable
from ckptfs.flow.write_back import WriteBack
from ckptfs.flow.write_back.deferred import build_unavailable_error
from ckptfs.model import ROOT, ContentState, CopyState, Level, Tier
from ckptfs.protocol import control_pb2 as pb
from ckptfs.protocol import control_pb2_grpc


def later(act: object, delay_s: float = 0.1) -> threading.Timer:
    timer = threading.Timer(delay_s, act)  # type: ignore[arg-type]
    timer.start()
    return timer


def test_only_the_owner_may_give_orders(served: Served) -> None:
    """F6: the sockets' own permissions decide."""
    paths = (served.mount.socket, served.mount.admin_socket, runtime_dir.get_path())
    eventually(lambda: [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o666, 0o600, 0o755], what="modes of the sockets")


def test_what_is_refused_is_counted_and_shown(served: Served) -> None:
    """P11: by reason; a status of a mount without a cluster has no word of one."""
    for _ in range(2):
        with pytest.raises(UsageError):
            next(served.client.wait(ROOT, "nowhere", 5.0))
    with pytest.raises(UsageError):
        served.client.get_cluster()
    answer = served.client.get_status()
    assert [(one.where, one.reason, one.count) for one in answer.refused] == [("control", "failed_precondition", 3)]
    assert render.message_to_dict(answer)["clique"] is None


def test_a_content_that_a_peer_did_not_find_is_not_called_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """F5: the reasons of peers are those of the handbook, the reasons of the control server have words."""
    counts = {"peers": {"node2": "unknown"}, "control": {"": "unknown"}}
    refused = [pb.Refused(where=where, who=who, reason=reason, count=3) for where, found in counts.items() for who, reason in found.items()]
    render.print_renderable(render.build_status(pb.Status(refused=refused)))
    assert "refused     peers: 3 unknown (node2); control: 3 failed" in capsys.readouterr().out


def test_a_daemon_of_another_version_is_named_with_a_remedy(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.2.0 knew none of the questions by their names of today, and goes on until its mount ends."""

    def build_former_stub(channel: Any) -> Mock:
        return Mock(GetStatus=channel.unary_unary("/ckptfs.Questions/GetStatus", pb.StatusRequest.SerializeToString))

    monkeypatch.setattr(control_pb2_grpc, "QueriesStub", build_former_stub)
    with pytest.raises(CommandFailed, match=f"{served.mount.name} runs another version of ckptfs") as failure:
        Client(served.mount).get_status()
    assert failure.value.remedy == f"umount {served.mount.mountpoint}, and mount it again"


def test_a_name_with_colons_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    trouble = pb.Trouble(where="files set aside", what="EINVAL: Invalid argument", path="at:100:x/a:b", remedy="give it another name")
    render.print_renderable(render.build_status(pb.Status(troubles=[trouble])))
    assert "at:100:x/a:b: EINVAL" in capsys.readouterr().out


def test_a_name_that_is_no_utf_8_is_shown(served: Served) -> None:
    """P11: the PFS refuses such a name, or the file is lost; a status that fails says nothing of it."""
    db, name = served.node.db, os.fsdecode(b"x\xffy")
    summary.set_trouble(db, "write_back", {"what": f"EILSEQ: the rename to {name} is refused", "path": name, "remedy": "rename it"})
    summary.set_report(db, "write_back", {"path": name, "copied_bytes": 1, "size_bytes": 2})
    content = served.node.make(b"x\xffy", b"bytes")
    with db.transaction():
        contents.set_state(db, content, ContentState.LOST)
    answer = served.client.get_status()
    assert answer.write_back.current_path == "x\\xffy"
    assert {one.where: one.path for one in answer.troubles} == {"write_back": "x\\xffy", "lost": "x\\xffy"}
    with pytest.raises(CommandFailed, match=r"x\\xffy is lost"):
        list(served.client.wait(served.node.inode(content), "local"))


def test_troubles_are_shown_with_path_and_remedy(served: Served) -> None:
    summary.set_trouble(served.node.db, "write_back", {"what": "EACCES: no", "path": "a/b", "remedy": "chmod it"})
    found = served.client.get_status()
    assert found.health == "degraded"
    trouble = found.troubles[0]
    assert (trouble.where, trouble.what, trouble.path, trouble.remedy) == ("write_back", "EACCES: no", "a/b", "chmod it")
    summary.set_trouble(served.node.db, "write_back", None)
    assert not served.client.get_status().troubles


def test_a_full_pfs_is_not_called_normal(served: Served) -> None:
    """F3: as soon as an attempt to write back found no room, whatever the last figures say."""
    full = lanes.describe_failure(build_unavailable_error(OSError(errno.ENOSPC, "No space left on device"), "a/b"))
    summary.set_report(served.node.db, "tier:pfs", {"state": "normal", "total": 100, "free": 50})
    summary.set_trouble(served.node.db, "write back", full)
    status = served.client.get_status()
    assert [tier.health for tier in status.tiers if tier.name == "pfs"] == ["full"] and status.health == "degraded"
    failing = lanes.describe_failure(build_unavailable_error(OSError(errno.EIO, "broken"), "a/b"))
    for value in (failing, None):
        summary.set_trouble(served.node.db, "write back", value)
        status = served.client.get_status()
        assert [tier.health for tier in status.tiers if tier.name == "pfs"] == ["normal"]


def test_a_tier_that_is_gone_is_down(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.node.tiers[Tier.NVME], "get_capacity", Mock(side_effect=TierUnavailable("gone")))
    found = served.client.get_status()
    assert {tier.name: tier.health for tier in found.tiers}["nvme"] == "down" and found.health == "degraded"


def test_a_tier_that_has_just_failed_is_not_called_normal(served: Served) -> None:
    """F3: the monitor probes it a while later."""
    nvme = served.node.tiers[Tier.NVME]
    for act, health, whole in (
        (lambda: nvme.record_failure(OSError(errno.EIO, "broken")), "suspect", "degraded"),
        (nvme.probe, "normal", "ok"),
    ):
        act()
        found = served.client.get_status()
        assert {tier.name: tier.health for tier in found.tiers}["nvme"] == health and found.health == whole


def test_status_and_ls_do_not_touch_the_pfs(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: while the PFS hangs, questions are answered."""
    touched = threading.Event()

    def hang(*_: object) -> None:
        touched.set()
        raise AssertionError("the PFS was touched")

    for name in ("get_capacity", "open", "stat"):
        monkeypatch.setattr(served.node.tiers[Tier.PFS], name, hang)
    inode = served.node.inode(served.node.make(b"a", b"x"))
    assert served.client.get_status().pfs and served.client.list_records([inode])[0].known
    assert not touched.is_set()


def test_progress_of_a_large_file(served: Served) -> None:
    """F2: what write-back reports of the file in hand is shown with the file, and in status."""
    inode = served.node.inode(served.node.make(b"large", b"x" * 1000))
    served.seal()
    value = {"inode": inode, "path": "large", "copied_bytes": 250, "size_bytes": 1000}
    summary.set_report(served.node.db, "write_back", value)
    assert served.client.list_records([inode])[0].progress == 0.25
    assert next(served.client.wait(inode, "pfs")).bytes_left == next(served.client.drain()).bytes_left == 750
    behind = served.client.get_status().write_back
    assert (behind.current_path, behind.current_copied_bytes, behind.current_size_bytes) == ("large", 250, 1000)
    summary.set_report(served.node.db, "write_back", None)
    assert served.client.list_records([inode])[0].progress == 0.0 and not served.client.get_status().write_back.current_path


def test_more_records_than_one_message_holds(served: Served) -> None:
    numbers = list(range(1, 2 * limits.CONTROL_LIST_MAX + 50))
    assert [record.inode for record in served.client.list_records(numbers)] == numbers


def test_waiting_for_local(served: Served) -> None:
    content = served.node.make(b"file", b"x" * 100, closed=False)
    inode = served.node.inode(content)
    with pytest.raises(NotInTime):
        list(served.client.wait(inode, "local", 0.3))
    first = next(served.client.wait(inode, "local", 5.0))
    assert not first.done and first.files_left == 1 and first.blocked_by == "a file is still open for writing"

    with served.node.db.transaction():
        contents.mark_closed(served.node.db, inode, content, 100, 1, 2)
    closed = next(served.client.wait(inode, "local", 5.0))
    assert not closed.done and not closed.blocked_by, "its seal is to come, on which `ckptfs latest` rests"
    timer = later(served.seal)
    *_, last = served.client.wait(inode, "local", 60.0)
    timer.join()
    assert last.done and last.files_left == 0


def test_waiting_for_the_pfs_follows_the_journal(served: Served) -> None:
    """F2: not before everything about the file, its directory's entries included, was told to the PFS."""
    content = served.node.make(b"file", b"x" * 100)
    served.seal()
    messages = served.client.wait(ROOT, "pfs", 60.0)
    assert next(messages).files_left == 1
    served.node.publish(content)
    with pytest.raises(NotInTime):
        list(served.client.wait(ROOT, "pfs", 0.5))
    served.node.db.run("DELETE FROM journal")
    assert list(messages)[-1].done


def test_a_directory_waits_for_what_was_removed_or_renamed_in_it(served: Served) -> None:
    """A directory whose former names are still on the PFS has not the level pfs. Other directories and files do not wait for them."""
    node = served.node
    made = [node.make(name, b"x") for name in (b"gone", b"moved", b"kept")]
    served.seal()
    node.publish(*made)
    with node.db.transaction():
        directory, other = (namespace.create(node.db, ROOT, name, 0o40755, uid=0, gid=0).id for name in (b"directory", b"other"))
    node.db.run("DELETE FROM journal")
    with node.db.transaction():
        namespace.rename(node.db, ROOT, b"moved", directory, b"moved")
        namespace.unlink(node.db, ROOT, b"gone")
    messages = served.client.wait(ROOT, "pfs", 60.0)
    assert next(messages).changes_left == 2
    waiting = served.client.wait(directory, "pfs", 60.0)
    assert not next(waiting).done
    assert all(list(served.client.wait(inode, "pfs", 60.0))[-1].done for inode in (other, node.inode(made[2])))
    node.db.run("DELETE FROM journal WHERE op = 'rename'")
    assert list(waiting)[-1].done and next(served.client.wait(ROOT, "pfs", 5.0)).changes_left == 1
    with node.db.transaction():
        namespace.unlink(node.db, ROOT, b"kept")
    node.db.run("DELETE FROM journal WHERE seq = (SELECT min(seq) FROM journal)")
    assert list(messages)[-1].done, "what is removed later is not waited for"


def test_a_wait_wakes_the_lanes(served: Served) -> None:
    """F2: the process that made the change may have died before its hint, and nobody else may give one for ever."""
    served.node.make(b"file", b"x" * 100)
    next(served.client.wait(ROOT, "pfs", 5.0))
    eventually(lambda: served.lanes.wake_ups > 0, what="the lanes look at the catalog")


def test_a_wait_that_can_never_end_is_refused(served: Served) -> None:
    content = served.node.make(b"lost", b"x")
    inode = served.node.inode(content)
    with served.node.db.transaction():
        contents.set_state(served.node.db, content, ContentState.LOST)
    with pytest.raises(CommandFailed, match="lost is lost: no copy of its content") as failure:
        list(served.client.wait(inode, "local"))
    assert failure.value.remedy == "write it again, or delete it"
    with pytest.raises(UsageError, match="is not a level that can be waited for; accepted: local, clique, pfs"):
        list(served.client.wait(inode, "none"))
    with pytest.raises(UsageError, match="keeps no copies on other nodes"):
        list(served.client.wait(inode, "clique"))
    with pytest.raises(CommandFailed, match="No such file"):
        list(served.client.wait(4711, "local"))
    status = served.client.get_status()
    assert (status.counts.lost, status.health) == (1, "degraded")
    assert [(one.where, one.path, one.what) for one in status.troubles] == [("lost", "lost", "no copy of its content is left")]


def test_waiting_for_a_pfs_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path / "run"))
    node = Node(tmp_path)
    node.configure(pfs=None)
    with serving(node) as served:
        with pytest.raises(UsageError, match="has no PFS") as failure:
            list(served.client.wait(ROOT, "pfs"))
        assert failure.value.exit_code == 2 and "pfs=DIRECTORY" in failure.value.remedy
        with pytest.raises(UsageError, match="has no PFS"):
            served.client.refresh(ROOT)


def test_drain_hurries_the_lanes_and_ends_with_the_journal(served: Served) -> None:
    """G1: drain forgets backoffs, and says what holds it up."""
    served.node.make(b"file", b"x" * 100)
    summary.set_trouble(served.node.db, "write_back", {"what": "ENOSPC: full", "path": "", "remedy": "make room"})
    with pytest.raises(NotInTime):
        list(served.client.drain(0.5))
    assert served.lanes.times >= 1
    messages = served.client.drain(60.0)
    first = next(messages)
    assert (first.files_left, first.blocked_by, first.remedy) == (1, "ENOSPC: full", "make room")
    served.seal()
    served.node.db.run("DELETE FROM journal")
    assert list(messages)[-1].done


def test_a_drain_with_a_deadline_says_what_is_safe(served: Served) -> None:
    """G1: the order of urgency holds as long as the drain, and its last message is the report."""
    served.node.make_sealed(b"step_1.pt", b"x" * 100)
    served.node.make_sealed(b"notes", b"x" * 10)
    messages = []
    with pytest.raises(NotInTime):
        for message in served.client.drain(0.3):
            messages.append(message)
            order = exposure.load_order(served.node.db)
            if not message.HasField("safety"):
                assert order is not None and [len(group) for group in order.groups] == [1, 1]
    eventually(lambda: exposure.load_order(served.node.db) is None, what="the order ends with its drain")
    assert [message.HasField("safety") for message in messages] == [False] * (len(messages) - 1) + [True]
    safety = messages[-1].safety
    (one,) = safety.series
    assert (one.series, one.name, one.level, one.safe, one.missing_files) == ("step_*.pt", "step_1.pt", "local", False, 1)
    assert (safety.level, safety.other_files, safety.other_bytes) == ("pfs", 1, 10)


def test_a_drain_to_a_level_ends_when_it_is_reached(served: Served) -> None:
    """G1."""
    node = served.node
    node.make_sealed(b"step_1.pt", b"x" * 100)
    messages = served.client.drain(60.0, "pfs")
    assert not next(messages).done
    run_until_idle(WriteBack(node.db, node.tiers, node.config, node.told))
    *_, last = messages
    assert last.done and [(one.name, one.safe, one.level) for one in last.safety.series] == [("step_1.pt", True, "pfs")]


@pytest.mark.parametrize(("level", "what"), [("nvme", "accepted: clique, pfs"), ("clique", "belongs to no cluster"), ("pfs", "has no PFS")])
def test_a_drain_to_a_level_that_is_out_of_reach_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, what: str) -> None:
    """P11."""
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path / "run"))
    node = Node(tmp_path)
    node.configure(pfs=None)
    with serving(node) as served:
        with pytest.raises(UsageError, match=what):
            list(served.client.drain(5.0, level))
        assert list(served.client.drain(5.0))[-1].done, "without a level there is nothing to do"


def test_a_cluster_that_keeps_one_copy_has_no_level_clique() -> None:
    """P11."""
    alone = Config("test", Path("/mnt"), Path("/state"), cluster="c", replication_factor=1)
    assert alone.highest_level is None and replace(alone, replication_factor=2).highest_level is Level.CLIQUE
    with pytest.raises(InvalidArgument, match="keeps one copy"):
        parse_drain_level(alone, "clique")


def test_a_deleted_socket_comes_back(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SOCKET_CHECK_S", 0.05)
    served.stop()
    served.start()
    served.mount.socket.unlink()
    eventually(served.mount.socket.exists, what="a new socket")
    assert Client(served.mount).get_status().name == "test"


def test_refresh_requests_a_scan_and_reports_its_end(served: Served) -> None:
    def answer(error: int) -> None:
        want = eventually(lambda: mover_requests.list_open(served.node.db, mover_requests.SCAN))[0]
        assert (want.inode, want.argument) == (ROOT, mover_requests.COMPARE_AGAIN if error else mover_requests.TREE)
        if error:
            mover_requests.mark_failed(served.node.db, want.id, error)
        else:
            mover_requests.mark_done(served.node.db, want.id)

    thread = threading.Thread(target=answer, args=(0,))
    thread.start()
    served.client.refresh(ROOT, recursive=True)
    thread.join()
    thread = threading.Thread(target=answer, args=(5,))
    thread.start()
    with pytest.raises(CommandFailed, match="Input/output error"):
        served.client.refresh(ROOT)
    thread.join()
    with pytest.raises(NotInTime):
        served.client.refresh(ROOT, timeout_s=0.3)


def test_verify_mends_from_what_lies_elsewhere(served: Served) -> None:
    """P4, D3: no good copy is left here, but the PFS shows the file. What is fetched is looked at again before that is said."""
    node, data = served.node, b"d" * 100
    content = node.make(b"file", data)
    served.seal()
    node.publish(content)
    node.spoil(content, Tier.RAM)
    fetched = threading.Event()

    def fetch() -> None:
        """The lane, as far as it matters here."""
        (want,) = eventually(lambda: mover_requests.list_open(node.db, mover_requests.FETCH), what="the file is wanted")
        assert node.copies(content) == {Tier.RAM: CopyState.QUARANTINED}
        node.spoil(content, Tier.RAM)
        copies.set_copy_state(node.db, content, Tier.RAM, CopyState.GOOD)
        fetched.set()
        mover_requests.mark_done(node.db, want.id, "n2, n3")

    thread = threading.Thread(target=fetch)
    thread.start()
    (found, *_) = [finding for progress in served.client.verify(node.inode(content)) for finding in progress.findings]
    thread.join()
    assert fetched.is_set() and served.lanes.times
    assert found.verdict == "bad" and "repaired from n2, n3" in found.what
    assert node.data(content) == data


def test_verifications_that_hang_leave_room_for_other_orders(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: a drain, say, while the PFS hangs. Their callers may have gone long ago."""
    content, refusals = served.node.make_sealed(b"file", b"data"), server.ADMIN_CALLS_MAX - VERIFICATIONS_MAX
    inject_fault(monkeypatch, "verify:read=hang@*")

    def verify() -> list[pb.VerifyProgress]:
        return list(Client(served.mount, answer_s=60.0).verify(served.node.inode(content)))

    def ask_log_level() -> str:
        with suppress(CommandFailed):  # The server may count a refused call a moment longer.
            return served.client.get_or_set_log_level()
        return ""

    with ThreadPoolExecutor(server.ADMIN_CALLS_MAX) as callers:
        try:
            called = [callers.submit(verify) for _ in range(server.ADMIN_CALLS_MAX)]
            eventually(lambda: sum(one.done() for one in called) == refusals, what="the others are refused")
            eventually(ask_log_level, what="the daemon tells its log level")
        finally:
            inject_fault(monkeypatch, "")
        refused = [failure for one in called if (failure := one.exception(60)) is not None]
    assert len(refused) == refusals and "4 verifications are under way" in str(refused[0])
    assert verify()[-1].done


def test_too_many_questions_at_once_are_refused(served: Served) -> None:
    too_many = pb.ListRequest(inodes=range(1, limits.CONTROL_LIST_MAX + 2))
    with pytest.raises(UsageError, match="accepted: up to"):
        served.client._call(served.client._build_query_stub().List, too_many)


def test_nobody_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path))
    client = Client(Mount("gone", Path("/mnt"), os.geteuid(), 0), answer_s=0.3)
    begun = time.monotonic()
    with pytest.raises(NoMount, match="does not answer") as failure:
        client.get_status()
    with pytest.raises(NoMount):
        list(client.wait(1, "local"))
    assert failure.value.exit_code == 3 and time.monotonic() - begun < 60


def test_what_verify_finds_begins_with_the_format_if_it_is_known() -> None:
    assert render.describe_flaw({"path": "a.pt", "format": "", "flaw": "is empty"}) == "is empty"
    assert render.describe_flaw({"path": "a.pt", "format": "zip", "flaw": "ends early"}) == "zip: ends early"


# --- strangers, whose clients speak gRPC and nothing of the product -----------------------------------------------------


Status = grpc.StatusCode
BEYOND = [2**63, 2**64 - 1]


@pytest.fixture
def hurried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Servers that wait for nobody for long."""
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path / "run"))
    for bound in ("CONTROL_MESSAGE_S", "CONTROL_IDLE_S"):
        monkeypatch.setattr(limits, bound, 0.5)
    monkeypatch.setattr(server, "SOCKET_CHECK_S", 0.05)
    with serving(Node(tmp_path)) as served:
        yield served


def refused(path: Path, method: str, message: bytes) -> Status:
    """The status of a call of which the first message of the answer is looked at."""
    with grpc.insecure_channel(f"unix:{path}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        with pytest.raises(grpc.RpcError) as failure:
            next(channel.unary_stream(f"/ckptfs.control.{method}", bytes, bytes)(message, timeout=60))
        return failure.value.code()


def counted(hurried: Served) -> dict[str, int]:
    return {one.reason: one.count for one in hurried.client.get_status().refused}


def test_what_is_no_message_and_no_method_is_refused_and_counted(hurried: Served, caplog: pytest.LogCaptureFixture) -> None:
    questions = ["GetStatus", "GetCluster", "GetCapacity", "GetConfig", "List", "Wait"]
    for method in questions:
        assert refused(hurried.mount.socket, f"Queries/{method}", b"\xff" * 100) is Status.INVALID_ARGUMENT
    for method in ("Drain", "Verify", "Refresh", "LogLevel"):
        assert refused(hurried.mount.admin_socket, f"Admin/{method}", b"\xff" * 100) is Status.INVALID_ARGUMENT
        assert refused(hurried.mount.socket, f"Admin/{method}", b"") is Status.UNIMPLEMENTED
    assert refused(hurried.mount.socket, "Queries/../GetStatus", b"") is Status.UNIMPLEMENTED
    assert counted(hurried) == {"invalid_argument": 10, "unimplemented": 5}
    assert caplog.records == []


def test_numbers_that_no_inode_has_are_unknown(hurried: Served, caplog: pytest.LogCaptureFixture) -> None:
    for number in (0, *BEYOND):
        wait = pb.WaitRequest(inode=number, level="local").SerializeToString()
        assert refused(hurried.mount.socket, "Queries/Wait", wait) is Status.NOT_FOUND
        for method, order in (("Verify", pb.VerifyRequest(inode=number)), ("Refresh", pb.RefreshRequest(inode=number))):
            assert refused(hurried.mount.admin_socket, f"Admin/{method}", order.SerializeToString()) is Status.NOT_FOUND
    assert [record.known for record in hurried.client.list_records([0, *BEYOND])] == [False] * 3
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_long_words_are_not_sent_back(hurried: Served) -> None:
    wait = pb.WaitRequest(inode=1, level="x" * (1 << 19)).SerializeToString()
    assert refused(hurried.mount.socket, "Queries/Wait", wait) is Status.FAILED_PRECONDITION


def test_calls_whose_message_never_comes_end(hurried: Served, caplog: pytest.LogCaptureFixture) -> None:
    """As many as there is room for: others are answered again soon."""
    over = threading.Event()

    def silent() -> Iterator[bytes]:
        over.wait(60)
        yield from ()

    most = limits.CONTROL_CALLS_MAX + limits.CONTROL_WAITS_MAX
    with grpc.insecure_channel(f"unix:{hurried.mount.socket}") as channel:
        call = channel.stream_unary("/ckptfs.control.Queries/GetStatus", bytes, bytes)
        calls = [call.future(silent()) for _ in range(most + 8)]
        eventually(lambda: all(one.done() for one in calls), what="all are ended")
        codes = [one.code() for one in calls]
        over.set()
    assert set(codes) <= {Status.CANCELLED, Status.RESOURCE_EXHAUSTED}
    eventually(lambda: counted(hurried) == {"deadline_exceeded": codes.count(Status.CANCELLED)}, what="they are counted")
    assert caplog.records == []


def test_idle_connections_end(hurried: Served) -> None:
    """Also those that never said anything, and there are no more than `limits.CONTROL_CONNECTIONS_MAX`."""
    hurried.client.get_status()
    before = len(os.listdir("/proc/self/fd"))
    silent = [socket.socket(socket.AF_UNIX) for _ in range(64)]
    for one in silent:
        one.connect(str(hurried.mount.socket))
        one.settimeout(60)
    for one in silent:
        with suppress(ConnectionError):
            while one.recv(1 << 10):
                pass
        one.close()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, what="all are closed")
    assert hurried.client.get_status().name == "test"
