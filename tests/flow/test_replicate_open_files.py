"""P9: files that stay open, as logs do, are copied to other nodes after an fsync and on a timer, whatever fsync waits for."""

from pathlib import Path

import pytest
from clique_world import LocalCluster, Node, cluster_of, make_cluster, until
from salvage_world import appended, change, decide, hear, held, make_replicated, publish, replicated, shown, tidy

from ckptfs import limits
from ckptfs.catalog import mover_requests
from ckptfs.flow.copy_records import AnnounceCopies
from ckptfs.flow.replicate.open_files import PeriodicReplication
from ckptfs.model import CopyState, Tier

NEVER = 1e9
DATA = b"line\n" * 1000


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    """An fsync counts at once, a change never; nothing else waits for its time."""
    values = {"OPEN_REPLICATE_FSYNCED_S": 0.0, "OPEN_REPLICATE_S": NEVER, "SALVAGE_POLL_S": 0.0, "SALVAGE_RIVALS_S": -1.0}
    for name, value in values.items():
        monkeypatch.setattr(limits, name, value)


def log_of(node: Node) -> int:
    """A file that is being written, and stays open."""
    content = node.make(b"log", DATA, closed=False)
    node.hold(content, writer=True)
    publish(node)
    return content


def write(node: Node, content: int, data: bytes) -> None:
    with open(node.path(content), "ab") as file:
        file.write(data)


def fsync(node: Node, content: int) -> int:
    return mover_requests.insert_request(node.db, mover_requests.REPLICATE_LATER, node.inode(content))


def regularly(node: Node) -> PeriodicReplication:
    return PeriodicReplication(node.db, node.tiers, cluster_of(node))


def test_what_was_fsynced_is_copied(tmp_path: Path) -> None:
    """Only that; and only when it has changed."""
    one, two = LocalCluster(tmp_path, 2).nodes
    content = log_of(one)
    flow = regularly(one)
    flow.step()
    assert one.peers.sent == []
    want = fsync(one, content)
    flow.step()
    assert two.data(content) == DATA and two.copies(content) == {Tier.RAM: CopyState.GOOD}
    assert not mover_requests.is_open(one.db, want)
    want = fsync(one, content)
    flow.step()
    assert len(one.peers.sent) == 1 and not mover_requests.is_open(one.db, want)
    write(one, content, DATA)
    flow.step()
    assert two.data(content) == DATA, "a change without an fsync waits for the timer"
    fsync(one, content)
    until(lambda: two.data(content) == 2 * DATA, flow.step)


def test_what_changes_is_copied_on_a_timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OPEN_REPLICATE_S", 0.0)
    one, two = LocalCluster(tmp_path, 2).nodes
    content = log_of(one)
    flow = regularly(one)
    flow.step()
    assert two.data(content) == DATA
    for _ in range(3):
        flow.step()
    assert len(one.peers.sent) == 1, "what did not change stays"
    write(one, content, DATA)
    until(lambda: two.data(content) == 2 * DATA, flow.step)


def test_what_was_only_opened_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OPEN_REPLICATE_S", 0.0)
    _, content, one, _ = make_replicated(tmp_path, 2)
    sent = len(one.peers.sent)
    content = one.reopen(content, Tier.RAM)
    one.hold(content, writer=True)
    flow = regularly(one)
    flow.step()
    assert len(one.peers.sent) == sent
    write(one, content, b"more")
    until(lambda: len(one.peers.sent) == sent + 1, flow.step)


def test_an_fsync_that_nobody_could_take_is_made_good(tmp_path: Path) -> None:
    cluster, one, two = make_cluster(tmp_path, 2)
    content = log_of(one)
    flow = regularly(one)
    cluster.cut = {"n2"}
    fsync(one, content)
    flow.step()
    assert mover_requests.list_open(one.db, mover_requests.REPLICATE_LATER) != []
    cluster.cut = set()
    until(lambda: content in two.files(Tier.RAM), flow.step)
    assert mover_requests.list_open(one.db, mover_requests.REPLICATE_LATER) == []


def test_what_was_closed_meanwhile_is_left_to_its_seal(tmp_path: Path) -> None:
    one, _ = LocalCluster(tmp_path, 2).nodes
    content = one.make(b"file", DATA)
    want = fsync(one, content)
    regularly(one).step()
    assert one.peers.sent == [] and not mover_requests.is_open(one.db, want)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("closed", [False, True])
def test_the_last_copy_counts_when_the_writer_dies(tmp_path: Path, again: bool, closed: bool) -> None:
    """P7, P9: of a log that was never closed or sealed, and of one that was opened again; the same on all nodes."""
    cluster, one, two, three = make_cluster(tmp_path, 3)
    content_before = 0
    if again:
        content_before = replicated(cluster)
        content = change(one, content_before, appended, stop="open")
        one.hold(content, writer=True)
    else:
        content = log_of(one)
    inode, data = one.inode(content), one.data(content)
    fsync(one, content)
    flow = regularly(one)
    until(lambda: content in two.files(Tier.RAM) and two.data(content) == data, flow.step)
    publish(one)
    AnnounceCopies(two.db, cluster_of(two)).step()
    mtime_ns = one.path(content).stat().st_mtime_ns
    write(one, content, b"this nobody has")
    if closed:
        one.close_content(content, len(data) + len(b"this nobody has"))
        publish(one)
        hear(two, content)
        assert two.copies(content) == {Tier.RAM: CopyState.STALE}
    one.kill()
    decide(three, two)
    assert shown(cluster, inode)[2:] == (len(data), 2 if closed else mtime_ns)
    assert held(two, inode) == data
    tidy(two)
    kept = {content_before} if again else set()
    assert two.files(Tier.RAM) == {shown(cluster, inode)[0]} | kept, "the previous content stays until the last copy has copies"
