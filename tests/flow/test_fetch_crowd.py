"""Many nodes fetch one file at once (2.2): all succeed, the first that have it serve the others, and what has come stays."""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from clique_world import LocalCluster, Node, bring, cluster_of, fetch_of, is_done, make_cluster, replicated, until

from ckptfs import limits
from ckptfs.catalog import mover_requests
from ckptfs.clique.peer_api import PeerBusy, PeerFailed
from ckptfs.flow.copy_records import AnnounceCopies
from ckptfs.flow.fetch import Fetch

BLOCK = 64 * limits.KIB
BLOCKS = 4


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(limits, "PEER_READERS_BYTES_MIN", BLOCK)
    monkeypatch.setattr(limits, "FETCH_SHARED_POLL_S_MAX", 0.0)
    monkeypatch.setattr(limits, "PEER_READER_S", 600.0)


class Crowd:
    """A file of node 1 that node 2 holds, and all other nodes, which open it at once.

    Time passes in rounds, in which each node that waits looks once. Whoever finds a place has the file at the end of the round.
    """

    def __init__(self, root: Path, readers: int) -> None:
        self.cluster = LocalCluster(root, 2 + readers)
        self.data = os.urandom(BLOCKS * BLOCK)
        self.content = replicated(self.cluster, b"model.pt", self.data)
        self.served: Counter[str] = Counter()
        inode = self.cluster.nodes[0].inode(self.content)
        self.waiting = {
            node: (fetch_of(node), mover_requests.insert_request(node.db, mover_requests.FETCH, inode)) for node in self.cluster.nodes[2:]
        }
        self._changed = threading.Condition()
        self._looked: set[threading.Thread] = set()
        self._round_ended = True
        for node in self.waiting:
            node.peers.fault = self._serve_block

    def count_rounds(self) -> int:
        rounds = 0
        while self.waiting:
            self.run_round()
            rounds += 1
            assert rounds < 40
        return rounds

    def run_round(self) -> None:
        self._round_ended = False
        threads = [threading.Thread(target=self._look, args=(flow,)) for flow, _ in self.waiting.values()]
        for thread in threads:
            thread.start()
        with self._changed:
            assert self._changed.wait_for(lambda: self._looked.issuperset(threads), 120)
            self._round_ended = True
            self._changed.notify_all()
        for thread in threads:
            thread.join(120)
        self._looked.clear()
        for node, (_, request) in list(self.waiting.items()):
            if is_done(node, request):
                AnnounceCopies(node.db, cluster_of(node)).step()
                del self.waiting[node]

    def _look(self, flow: Fetch) -> None:
        flow.step()
        with self._changed:
            self._looked.add(threading.current_thread())
            self._changed.notify_all()

    def _serve_block(self, act: str, holder: str) -> None:
        if act == "fetch block":
            with self._changed:
                self.served[holder] += 1
                self._looked.add(threading.current_thread())
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._round_ended, 120)


@pytest.mark.parametrize("readers", [5, 17, 40])
def test_a_crowd_has_the_file_after_log_n_rounds(area: Path, readers: int) -> None:
    """Each node that has it sends it to a few others in a round, and those that have it then do so, too."""
    crowd = Crowd(area, readers)
    nodes = list(crowd.waiting)
    rounds, holders = 0, 2
    while holders < 2 + readers:
        rounds, holders = rounds + 1, holders * (1 + limits.PEER_READERS_MAX)
    assert crowd.count_rounds() == rounds
    assert all(node.data(crowd.content) == crowd.data for node in nodes)
    assert crowd.served.total() == readers * BLOCKS, "nothing came twice"
    assert max(crowd.served.values()) <= rounds * limits.PEER_READERS_MAX * BLOCKS


def test_a_crowd_goes_on_when_the_first_holders_die(area: Path) -> None:
    """P9: those that had the file before the crowd came. Their readers of the first round serve the others."""
    crowd = Crowd(area, 17)
    nodes = list(crowd.waiting)
    crowd.run_round()
    assert len(crowd.waiting) == 17 - 2 * limits.PEER_READERS_MAX
    for holder in crowd.cluster.nodes[:2]:
        holder.kill()
    assert crowd.count_rounds() == 1
    assert all(node.data(crowd.content) == crowd.data for node in nodes) and crowd.served.total() == 17 * BLOCKS


def test_a_crowd_waits_for_its_turn(area: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is not counted as a try, and the patience with failures does not matter."""
    monkeypatch.setattr(limits, "PEER_READERS_MAX", 1)
    monkeypatch.setattr(limits, "FETCH_PATIENCE_S", 0.0)
    monkeypatch.setattr(limits, "FETCH_TRIES_MAX", 1)
    crowd = Crowd(area, 17)
    nodes = list(crowd.waiting)
    assert crowd.count_rounds() > 2
    assert all(node.data(crowd.content) == crowd.data for node in nodes)


@pytest.fixture
def three(area: Path) -> Iterator[tuple[LocalCluster, Node, int]]:
    """A reader of a file that two nodes hold."""
    cluster, _, _, reader = make_cluster(area, 3)
    yield cluster, reader, replicated(cluster, b"a", os.urandom(BLOCKS * BLOCK))


@pytest.mark.parametrize("failure", [PeerFailed("it broke off"), PeerBusy("too many", 11)], ids=["broken", "busy"])
def test_what_has_come_is_not_fetched_again(three: tuple[LocalCluster, Node, int], failure: PeerFailed) -> None:
    """Both sources fail after two blocks, and once more without any: it goes on from there."""
    cluster, reader, content = three
    served, failing = 0, iter([failure] * 4)

    def fault(act: str, _holder: str) -> None:
        nonlocal served
        if act == "fetch block":
            if served == 2 and (now := next(failing, None)) is not None:
                raise now
            served += 1

    reader.peers.fault = fault
    assert bring(reader, cluster.nodes[0].inode(content)).result == mover_requests.FETCHED
    assert served == BLOCKS and reader.data(content) == cluster.nodes[0].data(content)
    assert next(failing, None) is None


def test_patience_ends_when_nothing_comes(three: tuple[LocalCluster, Node, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FETCH_PATIENCE_S", 0.1)
    monkeypatch.setattr(limits, "FETCH_SHARED_WAIT_S", 0.0)
    monkeypatch.setattr(limits, "FETCH_TRIES_MAX", 1)
    cluster, reader, content = three
    served = 0

    def fault(act: str, _holder: str) -> None:
        nonlocal served
        if act == "fetch block":
            served += 1
            if served > 2:
                raise PeerBusy("too many", 11)

    reader.peers.fault = fault
    answered = bring(reader, cluster.nodes[0].inode(content))
    assert (answered.state, answered.error) == (mover_requests.FAILED, 5)
    assert reader.copies(content) == {}


def test_who_waited_long_enough_goes_ahead(three: tuple[LocalCluster, Node, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow readers have all places: that keeps nobody out for ever."""
    monkeypatch.setattr(limits, "FETCH_SHARED_WAIT_S", 0.2)
    monkeypatch.setattr(limits, "PEER_READERS_MAX", 1)
    cluster, reader, content = three
    for holder in cluster.nodes[:2]:
        holder.table.describe_copy("slow", content, None, can_wait=True)
    flow, inode = fetch_of(reader), cluster.nodes[0].inode(content)
    request = mover_requests.insert_request(reader.db, mover_requests.FETCH, inode)
    assert flow.step() and flow.next_due_s() is not None and reader.copies(content) == {}, "it waits, and has begun nothing"
    until(lambda: (row := mover_requests.get(reader.db, request)) is not None and row.state == mover_requests.DONE, flow.step)
    assert reader.data(content) == cluster.nodes[0].data(content)
