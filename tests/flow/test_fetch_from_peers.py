"""P4, P7, P9, N3: a file on other nodes is fetched block by block. Each block is verified; if a source fails, another one serves."""

import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
from clique_world import (
    MIB,
    Node,
    bring,
    cluster_of,
    fetch_of,
    fsync_to_peers,
    is_done,
    level,
    make_cluster,
    replicate,
    replicate_of,
    replicated,
    until,
)
from local_node import inject_fault, run_until_idle

from ckptfs import digest, disk, limits
from ckptfs.catalog import contents, copies, mover_requests, remote_contents
from ckptfs.clique import locations
from ckptfs.clique.cluster import ClusterLock
from ckptfs.coherence import pfs_coordination
from ckptfs.errors import Busy
from ckptfs.flow.copy_records import AnnounceCopies
from ckptfs.flow.fetch import Fetch
from ckptfs.flow.fetch.fetch_progress import FetchProgress
from ckptfs.flow.fetch.from_peers import PeerFetcher
from ckptfs.flow.recover import Recover
from ckptfs.flow.verify import verify
from ckptfs.model import ContentState, CopyState, Level, Tier
from ckptfs.tiers.storage import TierStorage

BLOCK = limits.BLOCK_BYTES


def refresh(node: Node, inode: int) -> None:
    """Ask the store and the writer for the state of a file."""
    state = copies.load_fetch_state(node.db, inode)
    assert state is not None
    PeerFetcher(node.db, node.tiers, cluster_of(node)).refresh(state, create_autospec(FetchProgress, instance=True))


def test_any_node_reads_what_another_one_wrote(tmp_path: Path) -> None:
    cluster, one, _, three = make_cluster(tmp_path, 3)
    content = replicated(cluster, b"a", data := os.urandom(2 * BLOCK + 5))
    inode = one.inode(content)
    assert bring(three, inode).result == mover_requests.FETCHED
    assert three.data(content) == data
    (copy,) = copies.list_copies(three.db, content)
    assert copy.state is CopyState.GOOD and copy.verified_ns > 0
    assert level(three, content) is Level.CLIQUE
    AnnounceCopies(three.db, cluster_of(three)).step()
    assert locations.load(three.store, [content])[content].holders == [1, 2, 3]
    assert remote_contents.list_unannounced(three.db, 10) == []


def test_what_is_closed_and_not_sealed_is_sealed_for_the_reader(tmp_path: Path) -> None:
    _, one, two = make_cluster(tmp_path, 2)
    content = one.make(b"a", b"hello")
    one.publish_shared(content)
    held = contents.get_file_content(two.db, one.inode(content))
    assert held is not None and held.state is ContentState.CLOSED and held.is_remote
    assert bring(two, one.inode(content)).result == mover_requests.FETCHED
    assert two.data(content) == b"hello"


@pytest.mark.parametrize("trouble", ["dead", "lies", "cut"])
def test_the_holder_serves_when_the_writer_does_not(tmp_path: Path, trouble: str) -> None:
    cluster, one, _, three = make_cluster(tmp_path, 3)
    content = replicated(cluster, b"a", data := os.urandom(3 * BLOCK))
    if trouble == "dead":
        one.kill()
    elif trouble == "lies":
        three.peers.spoil.add("n1")
    else:
        cluster.cut.add("n1")
    assert bring(three, one.inode(content)).result == mover_requests.FETCHED
    assert three.data(content) == data


def test_a_node_that_lost_its_ram_gets_its_own_files_back(tmp_path: Path) -> None:
    cluster, one, two = make_cluster(tmp_path, 2)
    content = replicated(cluster, b"a", data := os.urandom(BLOCK))
    one.lose_ram()
    Recover(one.db, one.tiers, one.told).run()
    assert one.state(content) is ContentState.SEALED, "it is not lost: a peer has it"
    assert level(one, content) is Level.LOCAL, "one copy is less than was wanted"
    assert bring(one, one.inode(content)).result == mover_requests.FETCHED
    assert one.data(content) == data and level(one, content) is Level.CLIQUE
    assert two.files(Tier.RAM) == {content}


def test_of_a_bad_copy_only_the_bad_blocks_come(tmp_path: Path) -> None:
    """P4, D3: it was quarantined; what is good in it need not travel."""
    cluster, one, _ = make_cluster(tmp_path, 2)
    content = replicated(cluster, b"a", data := os.urandom(4 * BLOCK))
    one.spoil(content, Tier.RAM)
    (found,) = verify(one.db, one.tiers, content)
    assert not found.ok and one.copies(content) == {Tier.RAM: CopyState.QUARANTINED}
    assert one.state(content) is ContentState.SEALED and level(one, content) is Level.LOCAL
    came: list[int] = []
    fetch = one.peers.fetch

    def counted(sources: object, record: object, wanted: list[int], *rest: object, **named: object) -> int:
        came.extend(wanted)
        return fetch(sources, record, wanted, *rest, **named)  # type: ignore[arg-type]

    one.peers.fetch = counted  # type: ignore[method-assign,assignment]
    assert bring(one, one.inode(content)).result == mover_requests.FETCHED
    assert one.data(content) == data and level(one, content) is Level.CLIQUE
    assert len(came) == 1


def test_nobody_left_is_an_error_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SALVAGE_RIVALS_S", "SALVAGE_POLL_S", "SALVAGE_MARGIN_S"):
        monkeypatch.setattr(limits, name, 0.0)
    cluster, one, two, three = make_cluster(tmp_path, 3)
    content = replicated(cluster, b"a", b"hello")
    one.kill()
    two.kill()
    answer = bring(three, one.inode(content))
    assert (answer.state, answer.error) == (mover_requests.FAILED, 5)
    assert three.copies(content) == {} and three.files(Tier.RAM) == set()
    assert three.state(content) is ContentState.SEALED
    two.revive()
    assert bring(three, one.inode(content)).result == mover_requests.FETCHED


def test_an_island_goes_by_what_it_knows(tmp_path: Path) -> None:
    """P1: without the store the peers that are known to have it serve."""
    cluster, one, two = make_cluster(tmp_path, 2)
    content = replicated(cluster, b"a", b"hello")
    one.lose_ram()
    one.store.reachable = False
    assert bring(one, one.inode(content)).result == mover_requests.FETCHED
    assert one.data(content) == b"hello" and two.data(content) == b"hello"


def test_writing_on_another_node_makes_the_file_its_own(tmp_path: Path) -> None:
    """What the others have is the previous content then: it never changes, and is not served as the new one."""
    cluster, one, two, three = make_cluster(tmp_path, 3)
    content = replicated(cluster, b"a", data := os.urandom(4 * BLOCK))
    inode = one.inode(content)
    assert bring(three, inode, mover_requests.NEEDS_COPY).result == mover_requests.FETCHED
    newer = three.rewrite(content, lambda data: data.__setitem__(0, data[0] ^ 1))
    row = three.row(newer)
    assert newer != content and not row.is_remote and row.generation == 2
    assert one.data(content) == two.data(content) == data and three.copies(content) == {}
    assert level(three, newer) is Level.LOCAL
    assert bring(one, inode).result == mover_requests.FETCHED
    assert one.data(newer) == three.data(newer)
    fetched = [act for act, _ in one.peers.asked if act == "fetch"]
    assert len(fetched) == 1
    replicate(three, newer)


@pytest.mark.parametrize("label", sorted(label for label in disk.LABELS if label.startswith("fetch:peer:")))
@pytest.mark.parametrize("tier", [Tier.RAM, Tier.NVME])
def test_a_failure_anywhere_leaves_no_trace(tmp_path: Path, label: str, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, one, _, three = make_cluster(tmp_path, 3, nvme=True)
    content = replicated(cluster, b"a", os.urandom(BLOCK + 3))
    if tier is Tier.NVME:
        three.squeeze(Tier.RAM, MIB)
    bring(three, one.inode(content))
    content = one.rewrite(content, lambda data: data.__setitem__(0, data[0] ^ 1))
    inject_fault(monkeypatch, f"{label}=EIO")
    bring(three, one.inode(content))
    inject_fault(monkeypatch, "")
    assert three.db.rows("SELECT * FROM copy WHERE state = 0") == []
    assert bring(three, one.inode(content)).result == mover_requests.FETCHED
    assert three.data(content, tier) == one.data(content)


def test_room_that_others_took_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: the tier that was chosen is full when the blocks come. The next try takes another one."""
    cluster, one, _, three = make_cluster(tmp_path, 3, nvme=True)
    content = replicated(cluster, b"a", data := os.urandom(BLOCK + 3))
    refused: list[TierStorage] = []

    def refuse_once(storage: TierStorage, *_: object) -> None:
        refused.append(storage)
        if len(refused) == 1:
            raise OSError(errno.ENOSPC, "the other process took it")

    monkeypatch.setattr(TierStorage, "reserve_blocks", refuse_once)
    assert bring(three, one.inode(content)).result == mover_requests.FETCHED
    assert len(refused) == 2
    assert three.data(content) == data


def test_a_file_that_is_still_written_is_read_as_it_is_now(tmp_path: Path) -> None:
    _, one, two = make_cluster(tmp_path, 2)
    content = one.make(b"log", data := os.urandom(BLOCK + 9), closed=False)
    one.publish_shared(content)
    inode = one.inode(content)
    assert bring(two, inode).result == mover_requests.FETCHED
    assert two.data(content) == data
    with open(one.path(content), "ab") as file:
        file.write(b"more")
    one.close_content(content, len(data) + 4)
    one.seal()
    one.publish_shared(content)
    assert two.copies(content) == {Tier.RAM: CopyState.STALE}
    assert bring(two, inode).result == mover_requests.FETCHED
    assert two.data(content) == data + b"more"


def test_what_was_closed_is_read_although_the_file_is_open_again(tmp_path: Path) -> None:
    """P7: this node has an older state, and never heard of what was closed in between."""
    cluster, one, two = make_cluster(tmp_path, 2)
    content = one.written(b"log", data := os.urandom(BLOCK + 9))
    inode = one.inode(content)
    assert bring(two, inode).result == mover_requests.FETCHED
    one.reopen(content, Tier.RAM)
    one.publish_shared(content)
    assert two.copies(content) == {Tier.RAM: CopyState.GOOD}, "what is closed is what everybody reads while it is written"
    with open(one.path(content), "ab") as file:
        file.write(b"more")
    with one.db.transaction():
        contents.mark_closed(one.db, inode, content, len(data) + 4, 1, 2)
        contents.mark_open(one.db, inode, content, Tier.RAM)
    one.publish_shared(content)
    assert two.copies(content) == {Tier.RAM: CopyState.STALE}
    cluster.cut.add("n1")
    with pytest.raises(Busy):
        refresh(two, inode)
    cluster.cut.clear()
    assert bring(two, inode).result == mover_requests.FETCHED
    assert two.data(content) == data + b"more"


def test_what_is_changed_in_place_is_read_as_it_was_closed(tmp_path: Path) -> None:
    """P7: its writer is half way through the next content, of which nobody knows yet."""
    cluster, one, _, three = make_cluster(tmp_path, 3)
    content = replicated(cluster, b"file", data := os.urandom(BLOCK + 9))
    newer = one.reopen(content, Tier.RAM)
    one.path(newer).write_bytes(b"half")
    assert one.inode(newer) == one.inode(content) and one.copies(content) == {}
    assert bring(three, one.inode(content)).result == mover_requests.FETCHED
    assert three.data(content) == data


def test_what_was_fsynced_survives_one_death_after_the_other(tmp_path: Path) -> None:
    """P3, P9: who holds the last state of a file that was open when its writer died sees to it that there are two copies again."""
    _, one, two, three, four = make_cluster(tmp_path, 4)
    content = one.make(b"log", data := os.urandom(BLOCK + 9), closed=False)
    fsync_to_peers(one, content)
    AnnounceCopies(two.db, cluster_of(two)).step()
    one.publish_shared(content)
    one.kill()
    run_until_idle(two.repair)
    flow = replicate_of(two)
    until(lambda: three.copies(content), flow.step)
    AnnounceCopies(three.db, cluster_of(three)).step()
    two.kill()
    for node in (three, four):
        assert bring(node, one.inode(content)).result == mover_requests.FETCHED
        assert node.data(content) == data


class OneClaim:
    """Claims of all nodes of a test."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}

    def of(self, number: int) -> "Claimer":
        return Claimer(self, number)


class Claimer:
    """One node's."""

    node_lease = SimpleNamespace(lease_id=1)

    def __init__(self, every: OneClaim, number: int) -> None:
        self._every, self._number = every, number

    def try_acquire(self, name: str) -> ClusterLock | None:
        mine = self._every.taken.setdefault(name, self._number) == self._number
        return ClusterLock(name, 1) if mine else None

    def release(self, lock: ClusterLock) -> None:
        del self._every.taken[lock.name]


def test_one_reading_of_the_pfs_serves_many_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G4: who comes second waits, and takes it from the first; a first one that is too slow is not waited for."""
    monkeypatch.setattr(limits, "FETCH_SHARED_BYTES_MIN", 1)
    now, late_s = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now() + late_s[0])
    cluster, _, two, three = make_cluster(tmp_path, 3)
    content = cluster.nodes[0].written(b"a", data := os.urandom(1000))
    cluster.nodes[0].lose_ram()
    claims, inode = OneClaim(), cluster.nodes[0].inode(content)
    read: list[int] = []

    def fetching(node: Node) -> Fetch:
        flow = Fetch(node.db, node.tiers, node.config, node.told, replace(cluster_of(node), locks=claims.of(node.number)))

        def from_pfs(*_: object, **__: object) -> str:
            read.append(node.number)
            known = node.row(content)
            assert copies.insert_filling_copy(node.db, known, Tier.RAM)
            with os.fdopen(node.tiers[Tier.RAM].create(content), "wb") as file:
                file.write(data)
            assert remote_contents.record_fetched_copy(node.db, known, Tier.RAM, digest.hash_block(data))
            return mover_requests.FETCHED

        monkeypatch.setattr(flow._pfs, "_fetch_locked", from_pfs)
        monkeypatch.setattr(pfs_coordination, "load_inodes", lambda *_: None)
        return flow

    for node in (two, three):
        node.publish(content)
    claims.taken[f"fetch/{content:016x}"] = 2
    waiting = fetching(three)
    want = mover_requests.insert_request(three.db, mover_requests.FETCH, inode)
    waiting.step()
    assert read == [] and waiting.next_due_s() is not None
    late_s[0] += 0.7 * limits.FETCH_SHARED_WAIT_S
    waiting.step()
    assert read == []
    assert bring(two, inode, flow=fetching(two)).result == mover_requests.FETCHED
    until(lambda: is_done(three, want), waiting.step)
    assert read == [2] and three.data(content) == data and claims.taken == {}
    three.lose_ram()
    two.kill()
    claims.taken[f"fetch/{content:016x}"] = 2
    mover_requests.insert_request(three.db, mover_requests.FETCH, inode)
    waiting.step()
    late_s[0] += 0.7 * limits.FETCH_SHARED_WAIT_S
    waiting.step()
    assert read == [2], "it waits anew, although it waited for this file before"
    late_s[0] += 0.7 * limits.FETCH_SHARED_WAIT_S
    assert bring(three, inode, flow=waiting).result == mover_requests.FETCHED
    assert read == [2, 3]


@pytest.mark.parametrize("pfs", ["has it", "lacks it", "hangs with it"])
def test_nodes_that_send_slowly_are_left_for_the_pfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pfs: str) -> None:
    """A megabyte per second is less than any PFS gives: a large checkpoint would take hours."""
    monkeypatch.setattr(limits, "FETCH_PATIENCE_S", 10.0)
    now, late_s = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now() + late_s[0])
    cluster, one, _, three = make_cluster(tmp_path, 3)
    content = replicated(cluster, b"a", data := os.urandom(7 * BLOCK))
    inode, flow = one.inode(content), fetch_of(three)
    if pfs != "lacks it":
        three.publish(content)
    if pfs == "hangs with it":
        flow._steps_at_pfs[inode] = create_autospec(FetchProgress, instance=True, moved_s=0.0, filling=None)

    def slow(act: str, _: str) -> None:
        late_s[0] += 4.0 * (act == "fetch block")

    def from_pfs(_state: object, _tier: object, progress: FetchProgress) -> str:
        return f"{mover_requests.FETCHED} from {progress.sources}"

    three.peers.fault = slow
    monkeypatch.setattr(flow._pfs, "fetch", from_pfs)
    result = bring(three, inode, flow=flow).result
    if pfs == "has it":
        assert result == f"{mover_requests.FETCHED} from the PFS" and 10.0 < late_s[0] < 20.0
    else:
        assert result == mover_requests.FETCHED and three.data(content) == data and late_s[0] == 28.0
