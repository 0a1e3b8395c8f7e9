"""P3, P7: fsync=clique returns when other nodes have the content. Complete blocks of an open file are sent early (X7)."""

import os
from pathlib import Path
from typing import Any

import pytest
from clique_world import MIB, LocalCluster, Node, cluster_of, fsync_to_peers, is_done, level, replicate, replicate_of, request_fsync, until
from local_node import inject_fault

from ckptfs import limits
from ckptfs.catalog import contents, mover_requests, peer_copies, summary
from ckptfs.coherence import key_state
from ckptfs.coherence.keys import CONTENT, NAME, SharedKey
from ckptfs.flow.replicate.early import EarlyReplication
from ckptfs.flow.replicate.open_files import FsyncReplication
from ckptfs.model import CopyState, Level, Tier
from ckptfs.tiers import transfer

BLOCK = limits.BLOCK_BYTES


@pytest.fixture
def two(tmp_path: Path) -> LocalCluster:
    return LocalCluster(tmp_path, 2)


def close(node: Node, content: int) -> None:
    with node.db.transaction():
        size = node.path(content).stat().st_size
        contents.mark_closed(node.db, node.inode(content), content, size, 1, 2)
        node.db.run("DELETE FROM handle")
    node.seal()
    node.publish_shared(content)


def test_an_open_file_is_on_the_peer_as_it_is_when_it_was_fsynced(two: LocalCluster) -> None:
    one, other = two.nodes
    content = one.make(b"log", data := os.urandom(BLOCK + 5), closed=False)
    fsync_to_peers(one, content)
    assert other.copies(content) == {Tier.RAM: CopyState.GOOD} and other.data(content) == data
    with open(one.path(content), "ab") as file:
        file.write(more := os.urandom(100))
    fsync_to_peers(one, content)
    assert other.data(content) == data + more
    assert [moved for _, _, moved in one.peers.sent] == [BLOCK + 5, 105], "only blocks that changed travel"
    close(one, content)
    replicate(one, content)
    assert one.peers.sent[-1][2] == 0 and other.data(content) == data + more
    row = contents.get_content(other.db, content)
    mine = contents.get_content(one.db, content)
    assert row is not None and mine is not None and row.generation == mine.generation


def test_an_fsync_waits_for_as_many_nodes_as_copies_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P9: while one of three nodes is down, the others get its bytes once, and the fsync goes on to wait."""
    monkeypatch.setattr(limits, "RETRY_FIRST_S", 0.0)
    one, two, three = LocalCluster(tmp_path, 3, factor=3).nodes
    three.kill()
    content = one.make(b"log", os.urandom(100), closed=False)
    flow, want = FsyncReplication(one.db, one.tiers, one.told, cluster_of(one)), request_fsync(one, content)
    for _ in range(5):
        flow.step()
    assert [name for name, _, _ in one.peers.sent] == ["n2"] and not is_done(one, want)
    three.revive()
    until(lambda: is_done(one, want), flow.step)
    assert two.data(content) == three.data(content) == one.data(content)


def test_a_file_that_is_written_meanwhile_is_read_again(two: LocalCluster) -> None:
    one, other = two.nodes
    content = one.make(b"log", os.urandom(2 * BLOCK), closed=False)
    left = [2]

    def change(act: str, name: str) -> None:
        if act == "send" and left[0]:
            left[0] -= 1
            with open(one.path(content), "r+b") as file:
                file.write(os.urandom(10))

    one.peers.fault = change
    fsync_to_peers(one, content)
    assert other.data(content) == one.data(content) and left == [0]


def test_a_state_that_was_read_later_has_the_higher_number(two: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: when the writer dies the highest number wins; what was fsynced must be in it."""
    one, other = two.nodes
    content = one.make(b"log", os.urandom(100), closed=False)
    read, asked = transfer.read, []

    def reading(fd: int, **more: Any) -> tuple[int, bytes, bytes]:
        found = read(fd, **more)
        if more["label"] == "host:open":
            # While a reader's question is being answered somebody writes, and fsyncs.
            with open(one.path(content), "ab") as file:
                file.write(b"fsynced")
            fsync_to_peers(one, content)
            asked.append(True)
        return found

    monkeypatch.setattr(transfer, "read", reading)
    copy = one.host.seal_and_open(content, 1.0)
    assert copy is not None and asked
    os.close(copy.fd)
    assert other.row(content).generation > copy.generation and other.data(content).endswith(b"fsynced")


def test_too_few_nodes_leave_the_want_open(two: LocalCluster) -> None:
    one, other = two.nodes
    content = one.make(b"log", b"hello", closed=False)
    other.kill()
    flow = FsyncReplication(one.db, one.tiers, one.told, cluster_of(one))
    want = request_fsync(one, content)
    flow.step()
    assert mover_requests.is_open(one.db, want) and flow.next_due_s() is not None
    other.revive()
    until(lambda: is_done(one, want), flow.step)
    assert other.data(content) == b"hello"


def test_a_file_that_was_closed_meanwhile_waits_for_its_level(two: LocalCluster) -> None:
    one, _ = two.nodes
    content = one.written(b"a", b"hello")
    replicate = replicate_of(one)
    secure = FsyncReplication(one.db, one.tiers, one.told, cluster_of(one))
    want = request_fsync(one, content)
    secure.step()
    assert mover_requests.is_open(one.db, want)
    until(lambda: level(one, content) is Level.CLIQUE, replicate.step)
    until(lambda: is_done(one, want), secure.step)


@pytest.mark.parametrize("label", ["replicate:open:read", "replicate:open:counted", "early:read"])
def test_a_failure_is_tried_again(two: LocalCluster, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = two.nodes
    content = one.make(b"log", os.urandom(20 * MIB), closed=False)
    one.hold(content, writer=True)
    inject_fault(monkeypatch, f"{label}=EIO")
    ahead = EarlyReplication(one.db, one.tiers, cluster_of(one))
    ahead.step()
    ahead.step()
    if label != "early:read":
        want = request_fsync(one, content)
        secure = FsyncReplication(one.db, one.tiers, one.told, cluster_of(one))
        with pytest.raises(OSError):
            secure.step()
        until(lambda: is_done(one, want), secure.step)
    close(one, content)
    replicate(one, content)
    assert other.data(content) == one.data(content)


def test_complete_blocks_go_ahead_and_the_seal_sends_the_rest(two: LocalCluster) -> None:
    one, other = two.nodes
    first = os.urandom(8 * BLOCK + 3)
    content = one.make(b"big", first, closed=False)
    one.hold(content, writer=True)
    flow = EarlyReplication(one.db, one.tiers, cluster_of(one))
    flow.step()
    assert one.peers.sent == [], "nothing is known to be complete at the first look"
    flow.step()
    assert one.peers.sent == [("n2", content, 8 * BLOCK)] and flow.next_due_s() == limits.EARLY_POLL_S
    flow.step()
    assert len(one.peers.sent) == 1
    with open(one.path(content), "r+b") as file:
        file.seek(2 * BLOCK)
        file.write(b"changed")
        file.seek(0, os.SEEK_END)
        file.write(os.urandom(2 * BLOCK))
    assert other.copies(content) == {}, "what came ahead counts for nothing"
    close(one, content)
    flow.step()
    assert flow.next_due_s() == limits.EARLY_IDLE_S
    replicate = replicate_of(one)
    until(lambda: level(one, content) is Level.CLIQUE, replicate.step)
    assert one.peers.sent[-1][2] == 3 * BLOCK + 3
    assert other.data(content) == one.data(content)


def test_small_files_do_not_go_ahead(two: LocalCluster) -> None:
    one, _ = two.nodes
    content = one.make(b"small", os.urandom(2 * BLOCK), closed=False)
    one.hold(content, writer=True)
    flow = EarlyReplication(one.db, one.tiers, cluster_of(one))
    for _ in range(3):
        flow.step()
    assert one.peers.sent == []


def test_what_an_island_made_has_not_reached_the_clique(two: LocalCluster) -> None:
    """P3, P9: its bytes may lie on other nodes; as long as these do not know its name they are lost with the one that does."""
    one, _ = two.nodes
    closed, content = one.written(b"closed", b"hello"), one.make(b"log", b"hello", closed=False)
    replicate(one, closed)
    with one.db.transaction():
        for number in (closed, content):
            parent, name = one.db.row("SELECT parent, name FROM entry WHERE child = ?", one.inode(number)) or (0, b"")
            key_state.mark_dirty(one.db, SharedKey(NAME, parent, name))
    assert level(one, closed) is Level.LOCAL and summary.load_counts(one.db).by_level[Level.LOCAL] == 2
    flow = FsyncReplication(one.db, one.tiers, one.told, cluster_of(one))
    want = request_fsync(one, content)
    flow.step()
    assert mover_requests.is_open(one.db, want)
    with one.db.transaction():
        key_state.mark_clean(one.db, key_state.list_dirty_names(one.db), key_state.get_last_change(one.db))
    flow.retry_now()
    until(lambda: is_done(one, want), flow.step)
    assert level(one, closed) is Level.CLIQUE


def test_a_content_of_which_nobody_knows_has_not_reached_the_clique(two: LocalCluster) -> None:
    """P3: a file that an island opened anew; which generation of a known content it is, others learn from who has a copy."""
    one, _ = two.nodes
    content = one.make(b"log", b"hello", closed=False)
    row = one.row(content)
    assert peer_copies.is_published(one.db, row)
    key_state.mark_dirty(one.db, SharedKey(CONTENT, content))
    assert not peer_copies.is_published(one.db, row)
    one.db.run("INSERT INTO cached_key (kind, number, name, revision, value) VALUES ('c', ?, x'', 1, x'')", content)
    assert peer_copies.is_published(one.db, row)
