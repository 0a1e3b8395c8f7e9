"""P6: a living node writes back what a dead node did not, in order and once."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from clique_world import cluster_of, make_cluster, replicated
from local_node import run_until_idle
from shared_catalogs import settled, stored
from writers_together import Writer, WriterCluster, in_cluster

from ckptfs import disk, limits
from ckptfs.catalog import peer_copies
from ckptfs.catalog.pfs_batch import PfsAction
from ckptfs.catalog.pfs_state import Fingerprint, PfsLocation
from ckptfs.coherence.keys import JOURNAL_ROW, SharedKey, encode_key
from ckptfs.flow import take_over
from ckptfs.flow.take_over import TakeOver
from ckptfs.flow.write_back import stage
from ckptfs.store.kv import Delete, Put


@pytest.fixture
def cluster(tmp_path: Path) -> WriterCluster:
    return WriterCluster(tmp_path, 3, 0)


def rows(cluster: WriterCluster, node: Writer) -> int:
    """How many rows the store has of this node's journal."""
    return sum(key.kind == JOURNAL_ROW and key.number == node.number for key in stored(cluster.etcd))


async def left_behind(cluster: WriterCluster) -> None:
    """The last node makes, changes and removes things, writes nothing of it back, and dies."""
    one, two, dead = cluster.nodes
    await one.put("kept", b"1")
    await one.put("gone", b"2")
    await cluster.settle()
    await dead.mkdir("d")
    content = await dead.put("d/f", b"from the dead")
    await dead.rename("kept", "d/kept")
    await dead.unlink("gone")
    await dead.mkdir("d/e")
    await dead.set("d/kept", mode=0o600)
    await settled(cluster.nodes)
    two.hold(dead, content)
    one.hold(dead, content)
    assert rows(cluster, dead) == 7
    dead.die()


def test_nodes_that_are_dead_for_ever_cost_one_request_and_in_the_end_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, one, _, *dead = make_cluster(tmp_path, 6)
    for node in dead:
        node.kill()
    now_s = [1000.0]
    monkeypatch.setattr(take_over.time, "monotonic", lambda: now_s[0])
    flow = TakeOver(one.db, one.told, cluster_of(one))

    def count_requests(seconds: float) -> int:
        before = cluster.etcd.transactions
        now_s[0] += seconds
        run_until_idle(flow)
        return int(cluster.etcd.transactions - before)

    assert count_requests(0) == 1 and count_requests(1) == 0
    assert sum(count_requests(30) for _ in range(120)) < 15, "an hour"
    assert set(peer_copies.list_nodes(one.db)) == {1, 2, 3, 4, 5, 6}
    count_requests(take_over.FORGET_S)
    assert set(peer_copies.list_nodes(one.db)) == {1, 2}


def test_a_node_that_hosts_contents_of_a_dead_one_begins_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P9: the others have less to do, and do not ask the store all at once."""
    monkeypatch.setattr("ckptfs.clique.cluster.random.uniform", lambda _, at_most_s: at_most_s)
    cluster, one, *others = make_cluster(tmp_path, 3)
    flows = [TakeOver(node.db, node.told, cluster_of(node)) for node in others]
    replicated(cluster, b"a", b"hello")
    for flow in flows:
        run_until_idle(flow)
    one.kill()
    before = cluster.etcd.transactions
    asked = [flow.step() or cluster.etcd.transactions - before for flow in flows]
    assert asked == [1, 1], "the first one asks, the other one does not"


@in_cluster
async def test_survivors_write_back_what_a_dead_node_had_to(cluster: WriterCluster) -> None:
    await left_behind(cluster)
    await cluster.settle()
    assert set(cluster.shared()) == {b"d", b"d/f", b"d/kept", b"d/e"}
    cluster.exact()


@pytest.mark.parametrize("is_former_catalog", [False, True], ids=["a dead node", "a former catalog of the node itself"])
@in_cluster
async def test_unreadable_rows_hide_no_others(cluster: WriterCluster, is_former_catalog: bool) -> None:
    await left_behind(cluster)
    one, _, dead = cluster.nodes
    nodes = [dead.number, one.number] if is_former_catalog else [dead.number]
    unreadable = [SharedKey(JOURNAL_ROW, node, b"!%d" % number) for node in nodes for number in range(3 * take_over.ROWS_TOGETHER)]
    for key in unreadable:
        one.store.commit([], [Put(encode_key(key), b"{}")])
    await cluster.settle()
    assert set(cluster.shared()) == {b"d", b"d/f", b"d/kept", b"d/e"}
    for key in unreadable:
        one.store.commit([], [Delete(encode_key(key))])
    cluster.exact()


@in_cluster
async def test_a_node_that_comes_back_finds_its_rows_taken(cluster: WriterCluster) -> None:
    """Its own journal still holds them: none is done again, not even after others went on."""
    await left_behind(cluster)
    await cluster.settle()
    one, _, dead = cluster.nodes
    await one.rename("d", "elsewhere")
    await one.unlink("elsewhere/f")
    dead.live()
    dead.revive()
    await cluster.settle()
    assert dead.db.rows("SELECT * FROM journal") == []
    cluster.exact()


@in_cluster
async def test_one_of_several_takes_each_row(cluster: WriterCluster) -> None:
    await left_behind(cluster)
    one, two, dead = cluster.nodes
    for _ in range(3):
        await cluster.take_over(one)
        await cluster.take_over(two)
    assert rows(cluster, dead) == 0
    origins = [node.db.value("SELECT count(*) FROM journal WHERE origin = ?", dead.number) for node in (one, two)]
    assert sorted(origins) == [0, 7]


@in_cluster
async def test_who_dies_while_taking_over_leaves_it_to_the_next(cluster: WriterCluster) -> None:
    """Killed when the rows are in its journal and still in the dead node's: both are written back, which changes nothing more."""
    await left_behind(cluster)
    cluster.deadly = {"take_over:appended"}
    await cluster.take_over(cluster.nodes[0])
    assert not cluster.deadly
    await cluster.settle()
    cluster.exact()


async def left_out(cluster: WriterCluster) -> int:
    """The last node dies with a file of which nobody else has the bytes, and the others do the rest of what it had to; its content."""
    dead = cluster.nodes[-1]
    content = await dead.put("lost", b"nobody has it")
    await dead.mkdir("d")
    await settled(cluster.nodes)
    dead.die()
    for _ in range(200):
        for node in cluster.nodes[:-1]:
            await cluster.take_over(node)
            await settled(cluster.nodes)
            await cluster.step(node)
            node.db.run("UPDATE mover_request SET state = 2, error = 5 WHERE kind = 'fetch'")
        if (cluster.pfs / "d").is_dir():
            break
    assert (cluster.pfs / "d").is_dir() and not (cluster.pfs / "lost").exists(), "a content without holders is skipped"
    return content


@in_cluster
async def test_what_was_left_out_is_written_back_by_its_writer_when_that_returns(cluster: WriterCluster) -> None:
    """P3, P9: it was killed, not wiped; the others have taken its rows, and could do nothing with this one."""
    await left_out(cluster)
    dead = cluster.nodes[-1]
    dead.live()
    dead.revive()
    await cluster.settle()
    assert (cluster.pfs / "lost").read_bytes() == b"nobody has it"
    cluster.exact()


@in_cluster
async def test_what_was_left_out_is_written_back_when_it_is_sealed_only_after_the_return(
    cluster: WriterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SKIPPED_SCAN_INTERVAL_S", 0.0)
    content = await left_out(cluster)
    dead = cluster.nodes[-1]
    dead.live()
    dead.revive()
    dead.db.run("UPDATE content SET state = 1 WHERE id = ?", content)
    for _ in range(3):
        await cluster.step(dead)
    assert not (cluster.pfs / "lost").exists()
    dead.db.run("UPDATE content SET state = 2 WHERE id = ?", content)
    await cluster.step(dead)
    await cluster.settle()
    assert (cluster.pfs / "lost").read_bytes() == b"nobody has it"
    cluster.exact()


@pytest.mark.parametrize("label", ["write_back:intent_announced", "write_back:put"])
@in_cluster
async def test_who_dies_before_a_newer_state_appears_has_not_written_it_back(cluster: WriterCluster, label: str) -> None:
    """P6, P9: under the same name, of the same file; and what is there is nobody's who is to be kept beside it."""
    one, two, dead = cluster.nodes
    await one.put("f", b"1")
    await cluster.settle()
    content = await dead.put("f", b"newer")
    await settled(cluster.nodes)
    await cluster.kill_mover_at(dead, label)
    two.hold(dead, content)
    one.hold(dead, content)
    dead.die()
    assert (cluster.pfs / "f").read_bytes() == b"1"
    await cluster.settle()
    assert (cluster.pfs / "f").read_bytes() == b"newer"
    await one.put("f", b"newest")
    dead.live()
    dead.revive()
    await cluster.settle()
    cluster.exact()


@pytest.mark.parametrize("label", ["write_back:intent_announced", "write_back:written_down", "write_back:put"])
@in_cluster
async def test_who_stood_still_for_long_touches_nothing_any_more(cluster: WriterCluster, label: str) -> None:
    """P6, P9: stopped in the middle of a batch until its lease had run out, while others finished it and went on."""
    one, two, still = cluster.nodes
    await one.put("f", b"1")
    await still.put("h", b"1")
    await cluster.settle()
    contents = [await still.put("f", b"2"), await still.put("h", b"2")]

    async def others_go_on() -> None:
        still.die()
        for content in contents:
            two.hold(still, content)
            one.hold(still, content)
        await cluster.settle()
        await one.put("f", b"3")
        await two.unlink("h")
        await cluster.settle()
        assert (cluster.pfs / "f").read_bytes() == b"3"

    await cluster.step_through(still, label, others_go_on)
    assert (cluster.pfs / "f").read_bytes() == b"3" and not (cluster.pfs / "h").exists()
    still.live()
    await cluster.settle()
    cluster.exact()
    assert set(cluster.shared()) == {b"f"}


LINK, MOVE, EXCHANGE = "os.link", "ckptfs.flow.write_back.apply.rename_to_free_name", "ckptfs.flow.write_back.apply.exchange"


@pytest.mark.parametrize(
    ("label", "act", "lacking"),
    [
        ("write_back:link", "rename and unlink", {}),
        ("write_back:move", "rename and unlink", {}),
        ("write_back:unlink", "rename and unlink", {}),
        ("write_back:swap", "exchange", {}),
        ("write_back:move", "rename", {LINK: errno.EPERM}),
        ("write_back:unlink", "rename", {LINK: errno.EPERM}),
        ("write_back:unlink", "rename", {LINK: errno.EXDEV, MOVE: errno.EXDEV}),
        ("write_back:move", "exchange", {EXCHANGE: errno.EINVAL}),
    ],
)
@in_cluster
async def test_a_call_that_lands_late_harms_nothing_newer(
    cluster: WriterCluster, label: str, act: str, lacking: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P6, P9: it hangs in the kernel until the lease has run out, while others finish the batch and go on; then it happens after all.

    On a PFS without links, too: the rename over an older file, and the removal of what it replaces or leaves.
    """
    one, _, still = cluster.nodes
    for name in "abg":
        await one.put(name, b"old " + name.encode())
    await cluster.settle()
    for call, code in lacking.items():
        monkeypatch.setattr(call, Mock(side_effect=OSError(code, os.strerror(code))))
    await (still.exchange("a", "b") if act == "exchange" else still.rename("a", "b"))
    if act == "rename and unlink":
        await still.unlink("g")
    await settled(cluster.nodes)

    async def others_go_on() -> None:
        still.die()
        await cluster.settle()
        for name in "abg":
            await one.put(name, b"new " + name.encode(), mtime_ns=6)
        await cluster.settle()

    await cluster.step_through(still, label, others_go_on)
    assert [(cluster.pfs / name).read_bytes() for name in "abg"] == [b"new a", b"new b", b"new g"]
    still.live()
    await cluster.settle()
    cluster.exact()


@pytest.mark.parametrize(("mtime_ns", "is_kept"), [(1, False), (2, True)])
def test_a_file_that_has_the_number_of_a_removed_one_gets_its_name_back(tmp_path: Path, mtime_ns: int, is_kept: bool) -> None:
    """P6: a late rename took it away. Filesystems use the st_ino of removed files again."""
    name, temporary = tmp_path / "f", tmp_path / "t"
    name.write_bytes(b"1")
    os.utime(name, ns=(1, 1))
    found = name.stat()
    os.utime(name.rename(temporary), ns=(1, mtime_ns))
    action = PfsAction("unlink", 1, 1, PfsLocation(1, b"f", ()), Fingerprint(found.st_ino), temporary=b"t")
    with disk.closing(os.open(tmp_path, os.O_RDONLY)) as directory:
        stage.drop_taken(directory, action, found)
    assert (name.exists(), temporary.exists()) == (is_kept, False)


@in_cluster
async def test_a_directory_that_is_moved_late_replaces_no_empty_one(cluster: WriterCluster) -> None:
    """P6, P9: others have moved it, emptied it, and made another one under the old name. What the PFS loses, all lose."""
    one, _, still = cluster.nodes
    await one.mkdir("d")
    await one.put("d/x", b"x")
    await cluster.settle()
    await still.rename("d", "e")
    await settled(cluster.nodes)

    async def others_go_on() -> None:
        still.die()
        await cluster.settle()
        await one.unlink("e/x")
        await one.mkdir("d")
        await one.put("d/y", b"y")
        await cluster.settle()

    await cluster.step_through(still, "write_back:move", others_go_on)
    assert {path.name for path in cluster.pfs.iterdir() if not path.name.startswith(".")} == {"d", "e"}
    still.live()
    await cluster.settle()
    cluster.exact()


@pytest.mark.parametrize("label", ["write_back:intent_announced", "write_back:look", "write_back:intent_settled"])
@in_cluster
async def test_a_file_with_new_times_is_not_taken_for_another_programs(cluster: WriterCluster, label: str) -> None:
    """P6: the node dies when the PFS has the times of a file that was written again with the same bytes, and the others do not know it."""
    one, _, dead = cluster.nodes
    await dead.put("f", b"1", 5)
    await cluster.settle()
    content = await dead.put("f", b"1", 7)
    one.hold(dead, content)
    cluster.dying_at = {label}
    for _ in range(20):
        await cluster.step(dead)
    assert not dead.alive
    await cluster.settle()
    assert (cluster.pfs / "f").stat().st_mtime_ns == 7
    cluster.exact()


@in_cluster
async def test_a_file_that_a_dead_node_moved_is_known_to_be_on_the_pfs(cluster: WriterCluster) -> None:
    """P3, P9: the node dies when the PFS has files under new names, and the others do not know it. Names are resolved in any order."""
    dead = cluster.nodes[-1]
    for name in "abcdefgh":
        await dead.put(name, b"1")
    await cluster.settle()
    for name in "abcdefgh":
        await dead.rename(name, f"new {name}")
    cluster.dying_at = {"write_back:look"}
    for _ in range(20):
        await cluster.step(dead)
    assert not dead.alive and len([*cluster.pfs.glob("new *")]) == 8
    await cluster.settle()
    cluster.exact()


@pytest.mark.parametrize("label", ["write_back:truncate", "write_back:written_down"])
@in_cluster
async def test_a_directory_goes_in_which_a_dead_node_was_making_a_file(cluster: WriterCluster, label: str) -> None:
    """P6, P9: nobody removes the temporary file but who removes the directory, also if the node never comes back."""
    one, _, dead = cluster.nodes
    await one.mkdir("d")
    await cluster.settle()
    content = await dead.put("d/f", b"1")
    one.hold(dead, content)
    cluster.dying_at = {label}
    for _ in range(20):
        await cluster.step(dead)
    assert not dead.alive
    await one.unlink("d/f")
    await one.rmdir("d")
    await cluster.settle()
    cluster.exact()
