"""P6 on several nodes: each node writes its changes back to one PFS, which ends as the shared tree."""

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from memory_store import MemoryStore
from shared_catalogs import async_tests, run_seeded, settled, stored
from write_back_world import Refusal, intercepted, unreadable
from writers_together import WriterCluster

from ckptfs.catalog import namespace, scans, summary
from ckptfs.coherence import key_state
from ckptfs.coherence.keys import INODE, PFS_NAME, PFS_STATE, SharedKey, encode_fields, encode_key
from ckptfs.errors import CkptfsError
from ckptfs.flow.write_back import coordination, deferred
from ckptfs.model import ROOT
from ckptfs.store.kv import Put
from ckptfs.tiers import pfs_tree


def run(root: Path, seed: int, act: Callable[[WriterCluster], Any], count: int = 2) -> WriterCluster:
    cluster = WriterCluster(root, count, seed)

    async def main() -> None:
        async def body() -> None:
            await act(cluster)
            cluster.disturbance = cluster.killing = cluster.dying = cluster.refusing = 0.0
            cluster.is_pfs_refusing = False
            cluster.return_dead()
            for node in cluster.nodes:
                node.write_back.retry_now()
            for node in cluster.nodes:
                node.store.late = 0.0
            await cluster.settle()

        await cluster.run(body)

    run_seeded(seed, main)
    cluster.etcd.apply_late(all_of_them=True)
    assert not [key for key, value in stored(cluster.etcd).items() if "by" in value], "a live node is at this for ever"
    cluster.exact()
    return cluster


def on_two_nodes(*left: bytes) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A decorator for async tests of a cluster. In the end the PFS shows what is shared: these paths, if any are given."""

    def play(tmp_path: Path, act: Callable[[WriterCluster], Any]) -> None:
        cluster = run(tmp_path, 0, act)
        assert not left or set(cluster.shared()) == {*left}

    return async_tests(play, given=1)


def do_anything(
    root: Path,
    seed: int,
    disturbance: float,
    *,
    cutting: float = 0.0,
    killing: float = 0.0,
    late: float = 0.0,
    hurrying: float = 0.0,
    dying: float = 0.0,
    refusing: float = 0.0,
    scanning: float = 0.0,
    count: int = 0,
) -> None:
    """Two or three nodes do what they like while their write-backs are at any point; some are cut off, or their movers die, or a commit
    fails and is applied later, or some files of a node become urgent, or a node dies and comes back, or the PFS refuses names for a while,
    with these probabilities.
    """

    async def act(cluster: WriterCluster) -> None:
        cluster.disturbing = cluster.act_somewhere
        cluster.disturbance, cluster.cutting, cluster.killing, cluster.hurrying = disturbance, cutting, killing, hurrying
        cluster.dying, cluster.refusing, cluster.replicates = dying, refusing, dying > 0
        cluster.scanning = scanning
        for name in ("d", "e", "d/f"):
            await cluster.nodes[0].mkdir(name)
        for node in cluster.nodes:
            node.store.late = late
        for _ in range(60):
            await cluster.act_somewhere()
        for node in cluster.nodes:
            if not node.store.reachable:
                node.cut(False)

    run(root, seed, act, count=count or 2 + seed % 2)


@on_two_nodes(b"there", b"e", b"e/overwritten", b"e/dressed", b"e/late")
async def test_each_undoes_what_the_other_has_written_back(cluster: WriterCluster) -> None:
    one, two = cluster.nodes
    await one.mkdir("d")
    for name in ("removed", "renamed", "overwritten", "dressed"):
        await one.put(f"d/{name}", name.encode())
    await cluster.settle()
    await two.unlink("d/removed")
    await two.rename("d/renamed", "there")
    await two.put("d/overwritten", b"by two")
    await two.set("d/dressed", mode=0o600)
    await two.rename("d", "e")
    await one.put("e/late", b"late")


@pytest.mark.parametrize("later", [False, True])
@on_two_nodes(b"f", b"f.ckptfs-conflict-n2-1")
async def test_what_an_island_wrote_too_is_there_beside_the_other(cluster: WriterCluster, later: bool) -> None:
    """P1, P6: a file of its own, of which the island's journal has said nothing under that name."""
    one, two = cluster.nodes
    await one.put("f", b"1")
    await cluster.settle()
    await two.stat("f")
    two.cut(True)
    await two.put("f", b"of the island")
    await one.put("f", b"of the main land")
    await two.set("f", mtime_ns=9 if later else 1)
    await cluster.write_back_all(one)
    two.cut(False)


@on_two_nodes()
async def test_the_store_is_asked_nothing_while_a_seal_is_awaited_and_then_once_for_all_keys(
    cluster: WriterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what write-back asks counts: the mount publishes the seal, and asks whether the store is there, at any time."""
    one, transact, asked = cluster.nodes[0], cluster.etcd.transact, list[object]()

    def count(*question: Any) -> Any:
        asked.extend(question[:1] if getattr(cluster.stepping, "node", None) is one else ())
        return transact(*question)

    monkeypatch.setattr(cluster.etcd, "transact", count)
    await one.mkdir("d")
    await one.mkdir("d/e")
    await one.mkdir("d/e/f")
    await cluster.settle()
    content = await one.put("d/e/f/g", b"1")
    one.db.run("UPDATE content SET state = 1, closed_ns = ? WHERE id = ?", time.time_ns(), content)
    await cluster.write_back_all(one)
    await settled(cluster.nodes)
    asked.clear()
    for _ in range(5):
        await cluster.step(one)
    assert asked == []
    assert not (cluster.pfs / "d/e/f/g").exists()
    one.db.run("UPDATE content SET state = 2 WHERE id = ?", content)
    await cluster.step(one)
    assert (cluster.pfs / "d/e/f/g").read_bytes() == b"1"
    assert 2 <= len(asked) <= 3, "one read, the intents, and that the PFS shows them"


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_anything_ends_as_what_is_shared(tmp_path: Path, seed: int) -> None:
    """P6."""
    do_anything(tmp_path, seed, 0.06)


@pytest.mark.parametrize("seed", range(4))
def test_with_urgent_files_it_ends_as_what_is_shared_too(tmp_path: Path, seed: int) -> None:
    """G1, P6: what goes ahead of its turn leaves nothing behind that the older changes do not bring in order."""
    do_anything(tmp_path, seed, 0.06, killing=0.01, hurrying=0.2)


@pytest.mark.parametrize("seed", [165, 228])
def test_seeds_that_ended_otherwise_once_end_as_what_is_shared(tmp_path: Path, seed: int) -> None:
    """P6: a name that was pending for a file that is gone hid what another node moved there; a removed directory hid a later name."""
    do_anything(tmp_path, seed, 0.05)


@pytest.mark.parametrize("seed", [2, 10, 77, 100])
def test_scans_beside_it_find_no_external_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """P5, P6: whatever is written back between two reads of the store by a scan, or by write-back itself."""
    found: list[object] = []
    for name in ("_delete_name", "_import_new", "_record_external_write"):
        monkeypatch.setattr(scans, name, lambda *given: found.append(given))
    do_anything(tmp_path, seed, 0.06, scanning=0.2)
    assert not found


@on_two_nodes(b"d", b"d/f")
async def test_a_mover_without_a_mount_leaves_nothing_to_publish_of_what_the_pfs_shows(cluster: WriterCluster) -> None:
    """P3: else it would wait for a mount as soon as another node changes the same."""
    one, _ = cluster.nodes
    await one.mkdir("d")
    await one.put("d/f", b"1")
    await settled(cluster.nodes)
    one.touching.on_dirty = lambda: None
    await cluster.write_back_all(one)
    assert (cluster.pfs / "d/f").exists()
    assert not {PFS_NAME, PFS_STATE} & {key.kind for _, key in key_state.list_dirty(one.db, 100)}
    one.sharing.notify_dirty()


@pytest.mark.parametrize("seed", [0, 1, 98])
def test_with_islands_it_ends_as_what_is_shared_too(tmp_path: Path, seed: int) -> None:
    """P1, P6: what an island has put beside others' files, and what it had to take back, are on the PFS as well."""
    do_anything(tmp_path, seed, 0.06, cutting=0.08)


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_with_late_commits_it_ends_as_what_is_shared_too(tmp_path: Path, seed: int) -> None:
    """P6: an announcement that comes late holds nothing up, and what is complete is known to be."""
    do_anything(tmp_path, seed, 0.06, late=0.1)


@on_two_nodes()
async def test_what_is_announced_is_not_taken_back_by_an_older_mark(cluster: WriterCluster) -> None:
    """P6: what the last batch left to be told must not look like news about the name that the next one is at."""
    one, _ = cluster.nodes
    name = SharedKey(PFS_NAME, ROOT, b"f")

    async def tell_again() -> None:
        with one.db.transaction():
            key_state.mark_dirty(one.db, name)
        await one.sharing.wait_published()
        assert stored(cluster.etcd)[name]["by"] == one.number

    await one.put("f", b"1")
    await cluster.step_through(one, "write_back:intent_announced", tell_again)


@on_two_nodes(b"d", b"d/f")
async def test_a_file_that_left_a_removed_directory_before_it_appeared_is_there(cluster: WriterCluster) -> None:
    """P6: its rows lead through a directory that the other node has made and removed, there as well."""
    one, two = cluster.nodes
    await one.mkdir("d")
    await two.mkdir("e")
    await cluster.settle()
    await one.put("e/f", b"1")
    await one.rename("e/f", "d/f")
    await two.rmdir("e")
    await cluster.write_back_all(two)


@on_two_nodes(b"steps")
async def test_a_directory_that_was_removed_before_it_appeared_leaves_nothing(cluster: WriterCluster) -> None:
    """P6: its rows lead through a name that it had for a moment, and its catalog has forgotten it by now."""
    one, two = cluster.nodes
    await one.mkdir("steps")
    await cluster.settle()
    await one.mkdir("steps/1.tmp")
    await one.rename("steps/1.tmp", "steps/1")
    await two.rmdir("steps/1")
    await cluster.write_back_all(two)
    with contextlib.suppress(FileNotFoundError):
        await one.stat("steps/1")
    assert one.db.run("DELETE FROM inode WHERE nlink = 0")
    await cluster.write_back_all(one)


@on_two_nodes(b"p", b"p/x")
async def test_a_directory_is_not_moved_into_itself(cluster: WriterCluster) -> None:
    """P6: a row of this node leads through a place that another node has moved below it since."""
    one, two = cluster.nodes
    await one.mkdir("p")
    await one.mkdir("x")
    await cluster.settle()
    await two.rename("p", "x/p")
    await two.rename("x/p", "p")
    await one.rename("x", "p/x")
    await cluster.write_back_all(one)
    await cluster.write_back_all(two)
    assert all(node.write_back._deferred.next_due_s() is None for node in cluster.nodes)


@on_two_nodes(b"q", b"q/p", b"q/p/x")
async def test_a_directory_leaves_another_one_that_moves_into_it(cluster: WriterCluster) -> None:
    """P6: the row that takes it out is that of another node, which has not come to it."""
    one, two = cluster.nodes
    for path in ("x", "x/q", "x/q/p"):
        await one.mkdir(path)
    await cluster.settle()
    await two.rename("x/q", "q")
    await one.rename("x", "q/p/x")
    await cluster.write_back_all(one)
    assert (cluster.pfs / "q" / "p" / "x").is_dir() and one.write_back._deferred.next_due_s() is None


@on_two_nodes(b"d", b"d/f")
async def test_an_exchange_with_what_lies_inside_by_now_is_not_made(cluster: WriterCluster) -> None:
    """P6: the other node has shown later changes of the same directories first."""
    one, two = cluster.nodes
    await one.mkdir("d")
    await one.mkdir("e")
    await cluster.settle()
    await two.mkdir("e/f")
    await two.exchange("e/f", "d")
    await two.rmdir("d")
    await two.rename("e/f", "d")
    await one.mkdir("d/f")
    await cluster.write_back_all(one)
    await two.exchange("e", "d/f")
    await one.rmdir("e")
    await cluster.write_back_all(one)
    await cluster.write_back_all(two)


@on_two_nodes(b"d", b"f")
async def test_a_directory_that_is_emptied_removed_and_made_again_is_there(cluster: WriterCluster) -> None:
    """P6: all in one batch, which is then in a directory that was another one before."""
    one, _ = cluster.nodes
    await one.mkdir("d")
    await one.put("d/f", b"1")
    await cluster.settle()
    await one.rename("d/f", "f")
    await one.rmdir("d")
    await one.mkdir("d")


@on_two_nodes(b"d", b"d/f", b"d/f/a")
async def test_a_removed_directory_that_made_way_for_another_one_goes(cluster: WriterCluster) -> None:
    """P6: its file is in the other one now, so it gave its name away before it could be removed."""
    one, two = cluster.nodes
    await one.mkdir("d")
    await one.mkdir("d/f")
    await one.put("d/f/a", b"1")
    await cluster.settle()
    await two.rename("d/f/a", "a")
    await two.rmdir("d/f")
    await one.mkdir("d/f")
    await one.rename("a", "d/f/a")
    await cluster.write_back_all(one)


@on_two_nodes(b"d", b"d/b", b"b")
async def test_a_name_that_an_exchange_gave_away_goes(cluster: WriterCluster) -> None:
    """P6: the other node has shown the file under its new name already, with newer bytes, and its old name leads nowhere by now."""
    one, two = cluster.nodes
    await one.mkdir("d")
    await one.put("a", b"1")
    await one.put("b", b"2")
    await cluster.settle()
    await two.exchange("a", "b")
    await one.rename("a", "d/b")
    await one.put("b", b"3")
    for node in (one, two):
        await cluster.write_back_all(node)


@pytest.mark.parametrize("deep", [False, True])
def test_a_directory_that_another_node_is_just_moving_is_not_gone(tmp_path: Path, deep: bool) -> None:
    """P6: between the move on the PFS and the word of it nobody finds it under either name; what is in it was nobody else's doing."""

    async def act(cluster: WriterCluster) -> None:
        one, two = cluster.nodes
        await one.mkdir("d")
        inside = "d/e" if deep else "d"
        if deep:
            await one.mkdir("d/e")
        await one.put(f"{inside}/f", b"1")
        await cluster.settle()
        await two.rename("d", "there")
        inside = inside.replace("d", "there", 1)
        await one.put(f"{inside}/f", b"of one")
        await one.put(f"{inside}/late", b"late")

        async def write_back_meanwhile() -> None:
            for _ in range(6):
                await cluster.step(one)

        await cluster.step_through(two, "write_back:directory", write_back_meanwhile)

    cluster = run(tmp_path, 0, act)
    assert not [name for name in cluster.shared() if b"conflict" in name]
    assert len(cluster.shared()) == 3 + deep


def test_a_directory_has_the_times_there_that_the_last_change_gave_it(tmp_path: Path) -> None:
    """P6: whichever node writes back last."""
    shared: list[int] = []

    async def act(cluster: WriterCluster) -> None:
        one, two = cluster.nodes
        await one.mkdir("d")
        await cluster.settle()
        await one.put("d/a", b"1")
        await two.put("d/b", b"2")
        shared.append((await two.stat("d")).mtime_ns)
        for node in (two, one):
            await cluster.write_back_all(node)

    cluster = run(tmp_path, 0, act)
    assert [(cluster.pfs / "d").stat().st_mtime_ns] == shared


@pytest.mark.parametrize("label", ["write_back:intent_announced", "write_back:intent_settled", "write_back:written_down"])
@on_two_nodes()
async def test_a_mover_that_dies_finds_out_how_far_its_batch_came(cluster: WriterCluster, label: str) -> None:
    """P8: killed when the others know of the batch, and when it is settled there but not here."""
    one, two = cluster.nodes
    await one.mkdir("d")
    await one.put("d/f", b"1")
    await one.put("d/g", b"2")
    await cluster.kill_mover_at(one, label)
    await two.rename("d/f", "f")
    await two.unlink("d/g")
    await two.rename("d", "e")
    await cluster.step(two)


@pytest.mark.parametrize("seed", range(6))
def test_movers_die_at_any_operation(tmp_path: Path, seed: int) -> None:
    """P8 on several nodes at once."""
    do_anything(tmp_path, seed, 0.04, killing=0.02)


@pytest.mark.parametrize("seed", range(8))
def test_nodes_die_while_the_pfs_refuses_names(tmp_path: Path, seed: int) -> None:
    """P6, P9: the PFS has what is shared in the end, with the size, times and number of each file that the store tells of it."""
    do_anything(tmp_path, seed, 0.06, dying=0.04, refusing=0.08, count=3)


@pytest.mark.parametrize("label", ["write_back:truncate", "write_back:written_down"])
@on_two_nodes()
async def test_what_a_mover_was_making_goes_from_a_directory_that_was_moved(cluster: WriterCluster, label: str) -> None:
    """P6, P8: its temporary files are hidden, and a directory with one cannot be removed."""
    one, two = cluster.nodes
    await one.mkdir("d")
    await cluster.settle()
    await two.put("d/f", b"2")
    await cluster.kill_mover_at(two, label)
    await one.rename("d", "e")
    await cluster.write_back_all(one)
    await two.unlink("e/f")
    await two.rmdir("e")


@pytest.mark.parametrize("label", ["write_back:truncate", "write_back:written_down"])
@on_two_nodes()
async def test_what_is_planned_again_leaves_nothing_in_a_directory_that_was_moved(
    cluster: WriterCluster, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    """P6: while a node makes a file, another one moves the directory on the PFS, and deletes the file."""
    monkeypatch.setattr(pfs_tree, "CACHED_S", 0.0)
    one, two = cluster.nodes
    await one.mkdir("d")
    await cluster.settle()
    await two.put("d/f", b"2")

    async def move_meanwhile() -> None:
        await one.rename("d", "e")
        await cluster.write_back_all(one)
        await one.unlink("e/f")

    await cluster.step_through(two, label, move_meanwhile)


def test_an_interrupted_batch_is_not_finished_in_another_directory_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P6: another node moves the directory and makes a new one, just before the batch is finished there."""
    monkeypatch.setattr(pfs_tree, "CACHED_S", 0.0)

    async def act(cluster: WriterCluster) -> None:
        one, two = cluster.nodes
        await one.mkdir("d")
        await cluster.settle()
        await two.put("d/f", b"2")
        await cluster.kill_mover_at(two, "write_back:intent_announced")

        async def replace_meanwhile() -> None:
            await one.rename("d", "e")
            await one.mkdir("d")
            await cluster.write_back_all(one)

        await cluster.step_through(two, "pfs:walk", replace_meanwhile)

    run(tmp_path, 0, act)
    assert "gone from the PFS" not in caplog.text


@on_two_nodes()
async def test_what_the_pfs_refuses_one_node_delays_nobody(cluster: WriterCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1, P6: a directory, a rename and a removal; other files of both nodes go on, and no intent stays in the store."""
    monkeypatch.setattr(deferred, "RETRY_FIRST_S", 1000.0)
    rename, rmdir, is_refusing = os.rename, os.rmdir, [True]

    def refuse(call: Callable[..., None]) -> Callable[..., None]:
        def refusing(*values: Any, **named: Any) -> None:
            if is_refusing[0] and any(value in (b"bad", b"worse", b"gone") for value in values):
                raise OSError(errno.EACCES, "refused")
            call(*values, **named)

        return refusing

    one, two = cluster.nodes
    await one.mkdir("gone")
    await one.put("old", b"1")
    await cluster.settle()
    monkeypatch.setattr(os, "rename", refuse(rename))
    monkeypatch.setattr(os, "rmdir", refuse(rmdir))
    await one.put("before", b"1")
    await one.mkdir("bad")
    await one.put("bad/below", b"1")
    await one.rename("old", "worse")
    await one.rmdir("gone")
    await one.put("after", b"1")
    await two.put("bad/by two", b"2")
    await two.put("elsewhere", b"2")
    for _ in range(60):
        for node in cluster.nodes:
            await cluster.step(node)
    assert {path.name for path in cluster.pfs.iterdir()} >= {"before", "old", "gone", "after", "elsewhere"}
    assert not (cluster.pfs / "bad").exists() and not (cluster.pfs / "worse").exists()
    assert [key for key, value in stored(cluster.etcd).items() if "by" in value] == []
    is_refusing[0] = False
    for node in cluster.nodes:
        node.write_back.retry_now()


@on_two_nodes(b"new")
async def test_a_move_of_which_the_pfs_refuses_the_second_half_is_no_external_change(
    cluster: WriterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P6: the file has its new name, and may not lose the old one. What comes under the new name later replaces it, and nothing else."""
    monkeypatch.setattr(deferred, "RETRY_FIRST_S", 1000.0)
    rename, is_refusing = os.rename, [True]

    def refuse(*values: Any, **named: Any) -> None:
        if is_refusing[0] and values[0] == b"old":
            raise OSError(errno.EACCES, "refused")
        rename(*values, **named)

    one, two = cluster.nodes
    await one.put("old", b"one")
    await one.put("new", b"0")
    await cluster.settle()
    monkeypatch.setattr(os, "rename", refuse)
    await one.rename("old", "new")
    await cluster.write_back_all(one)
    assert {path.name: path.read_bytes() for path in cluster.pfs.iterdir() if path.is_file()} == {"old": b"one", "new": b"one"}
    await two.put("newer", b"from two")
    await two.rename("newer", "new")
    for _ in range(20):
        for node in cluster.nodes:
            await cluster.step(node)
    is_refusing[0] = False


@on_two_nodes(b"bad", b"bad/f", b"good")
async def test_no_node_counts_what_a_directory_that_cannot_be_synced_shows(cluster: WriterCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3."""
    monkeypatch.setattr(deferred, "RETRY_FIRST_S", 1000.0)
    fsync, is_failing = os.fsync, [True]

    def fail(fd: int) -> None:
        if is_failing[0] and os.readlink(f"/proc/self/fd/{fd}").endswith("/bad"):
            raise OSError(errno.EIO, "failed")
        fsync(fd)

    one, two = cluster.nodes
    await one.mkdir("bad")
    await cluster.settle()
    monkeypatch.setattr(os, "fsync", fail)
    await one.put("bad/f", b"1")
    await one.put("good", b"1")
    await cluster.write_back_all(one)
    await two.put("good", b"2")
    await cluster.write_back_all(two)
    assert (cluster.pfs / "bad" / "f").read_bytes() == b"1" and (cluster.pfs / "good").read_bytes() == b"2"
    published = [value["published"] for key, value in stored(cluster.etcd).items() if key.kind == PFS_STATE and "published" in value]
    assert sorted(bool(is_complete) for _, is_complete, *_ in published) == [False, True]
    is_failing[0] = False
    for node in cluster.nodes:
        node.write_back.retry_now()


def test_what_a_dead_node_replaced_itself_never_follows_what_a_survivor_wrote(tmp_path: Path) -> None:
    """P6: a survivor takes over its rows, which are older than what the PFS shows of the survivor under the same name."""
    shown: list[int] = []

    def look(cluster: WriterCluster) -> None:
        path = cluster.pfs / "run"
        if path.exists() and shown[-1:] != [found := int(path.read_bytes())]:
            shown.append(found)

    async def act(cluster: WriterCluster) -> None:
        cluster.replicates = True
        survivor, dead = cluster.nodes
        survivor.hold(dead, await dead.put("step1", b"1"))
        await cluster.settle()
        await dead.rename("step1", "run")
        await dead.rename("run", "previous")
        await settled(cluster.nodes)
        dead.die()
        with intercepted(lambda _: None, lambda _: look(cluster)):
            for number in (3, 4):
                await survivor.put(f"step{number}", b"%d" % number)
                await survivor.rename(f"step{number}", "run")
                while number == 3 and await cluster.step(survivor):
                    pass
                await cluster.take_over(survivor)
            await cluster.settle()

    run(tmp_path, 0, act)
    assert shown == [3, 4]


def test_what_a_dead_node_had_done_of_a_batch_is_no_external_change(tmp_path: Path) -> None:
    """P6, P9: its batch changes names more than once, and the node dies before each of the changes in turn."""
    for point in itertools.count():
        reached: list[str] = []

        async def act(cluster: WriterCluster, point: int = point, reached: list[str] = reached) -> None:
            def look(label: str) -> None:
                if label in {"write_back:put", "write_back:link", "write_back:move", "write_back:unlink"}:
                    reached.append(label)
                    cluster.dying_at = {label} if len(reached) == point + 1 else cluster.dying_at

            cluster.replicates = True
            one, two = cluster.nodes
            await one.put("run", b"0")
            await cluster.settle()
            for number in (1, 2):
                two.hold(one, await one.put("new", b"%d" % number))
                with contextlib.suppress(FileNotFoundError):
                    await one.rename("run", "previous")
                await one.rename("new", "run")
            with intercepted(look):
                await cluster.step(one)
            await cluster.settle()

        (tmp_path / str(point)).mkdir()
        cluster = run(tmp_path / str(point), 0, act)
        assert set(cluster.shared()) == {b"run", b"previous"}
        if len(reached) <= point:
            return


def test_a_file_that_a_dead_node_was_exchanging_in_a_ring_gets_its_name_from_a_survivor(tmp_path: Path) -> None:
    """P5, P9: the node dies before each change in turn; nobody else has the bytes, and one of the files has a temporary name meanwhile."""
    for point in itertools.count():
        reached: list[str] = []

        async def act(cluster: WriterCluster, point: int = point, reached: list[str] = reached) -> None:
            def look(label: str) -> None:
                if label in {"write_back:link", "write_back:put", "write_back:unlink"}:
                    reached.append(label)
                    cluster.dying_at = {label} if len(reached) == point + 1 else cluster.dying_at

            one, two = cluster.nodes
            for name in ("a", "b"):
                await one.put(name, name.encode())
            await cluster.settle()
            await one.rename("a", "c")
            for old, new in (("b", "a"), ("c", "b")):
                await two.rename(old, new)
            with intercepted(look):
                await cluster.step(one)
            await cluster.settle()
            assert {path.name: path.read_bytes() for path in cluster.pfs.iterdir() if path.is_file()} == {"a": b"b", "b": b"a"}

        (tmp_path / str(point)).mkdir()
        run(tmp_path / str(point), 0, act)
        if len(reached) <= point:
            assert point > 3
            return


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
@on_two_nodes(b"d", b"d/x", b"e", b"e/y")
async def test_what_a_dead_node_was_changing_in_a_directory_that_cannot_be_read_waits_alone(
    cluster: WriterCluster, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """P1, P9: nobody can find out how far it came; the survivor writes back everything else, and that as soon as it can."""
    monkeypatch.setattr(deferred, "RETRY_FIRST_S", 1000.0)

    one, two = cluster.nodes
    for name in ("d", "e"):
        await one.mkdir(name)
    await one.put("d/x", b"0")
    await cluster.settle()
    await one.put("d/x", b"1")
    cluster.dying_at = {"write_back:put"}
    await cluster.write_back_all(one)
    await two.put("d/x", b"2")
    await two.put("new", b"3")
    await two.rename("new", "d/x")
    await two.put("e/y", b"4")
    cluster.refusing = 0.1  # An error of the PFS is tried again.
    with monkeypatch.context() as patch:
        Refusal(patch, "open", lambda name: name == b"d", code)
        for _ in range(20):
            await cluster.step(two)
        assert (cluster.pfs / "e" / "y").read_bytes() == b"4"
        assert [value["path"] for _, value, _ in summary.list_troubles(two.db, summary.DEFERRED_TROUBLE)] == ["d/x"]
    assert (cluster.pfs / "d" / "x").read_bytes() == b"0"


@on_two_nodes(b"d", b"d/f", b"other")
async def test_what_a_dead_node_had_renamed_counts_when_a_survivor_has_synced_it(
    cluster: WriterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3, P9: the node dies before the fsync of the directory. A power cut of the PFS may still undo the rename."""
    monkeypatch.setattr(deferred, "RETRY_FIRST_S", 1000.0)
    fsync, calls, is_failing = os.fsync, [], True

    def fail(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/d"):
            calls.append(fd)
            if is_failing:
                raise OSError(errno.EIO, "failed")
        fsync(fd)

    async def is_complete(cluster: WriterCluster) -> bool:
        state = stored(cluster.etcd).get(SharedKey(PFS_STATE, (await cluster.nodes[1].stat("d/f")).id), {})
        return bool(state.get("published", [0, False])[1])

    one, two = cluster.nodes
    await one.mkdir("d")
    await cluster.settle()
    two.hold(one, await one.put("d/f", b"1"))
    await settled(cluster.nodes)
    cluster.dying_at = {"write_back:directory"}
    await cluster.step(one)
    assert not one.alive and (cluster.pfs / "d" / "f").read_bytes() == b"1"
    monkeypatch.setattr(os, "fsync", fail)
    cluster.refusing = 0.1  # An error of the PFS is tried again.
    await two.put("other", b"2")
    await cluster.take_over(two)
    for _ in range(8):
        await settled(cluster.nodes)
        await cluster.step(two)
    assert calls and not await is_complete(cluster) and (cluster.pfs / "other").exists()
    assert [value["path"] for _, value, _ in summary.list_troubles(two.db, summary.DEFERRED_TROUBLE)] == ["d/f"]
    calls.clear()
    is_failing = False
    two.write_back.retry_now()
    await settled(cluster.nodes)
    await cluster.write_back_all(two)
    assert calls and await is_complete(cluster)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_what_a_mover_was_changing_in_a_directory_that_cannot_be_read_waits_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """P1, P8: killed at any operation of a batch; everything else of both nodes is written back before the directory can be read."""
    monkeypatch.setattr(deferred, "RETRY_FIRST_S", 1000.0)
    labels = ["none"]

    async def act(cluster: WriterCluster) -> None:
        one, two = cluster.nodes
        for name in ("d", "e"):
            await one.mkdir(name)
        for name in ("run", "best"):
            await one.put(f"d/{name}", b"old")
        await cluster.settle()
        await one.put("d/run", b"new")
        await one.put("d/fresh", b"fresh")
        await one.rename("d/best", "d/former")
        await one.put("e/x", b"1")
        await settled(cluster.nodes)
        cluster.deadly = {labels[-1]}
        with intercepted(seen.append):
            while cluster.deadly and await cluster.step(one):
                pass
        cluster.deadly, cluster.refusing = set(), 0.1  # An error of the PFS is tried again.
        await one.put("e/y", b"2")
        await two.put("e/z", b"3")
        await settled(cluster.nodes)
        with unreadable(b"d", "stat", code):
            for _ in range(30):
                for node in cluster.nodes:
                    await cluster.step(node)
                if (names := {path.name for path in (cluster.pfs / "e").iterdir()}) == {"x", "y", "z"}:
                    break
            assert names == {"x", "y", "z"}, labels[-1]

    while labels:
        seen: list[str] = []
        (root := tmp_path / labels[-1].replace(":", " ")).mkdir()
        assert set(run(root, 0, act).shared()) == {b"d", b"d/run", b"d/fresh", b"d/former", b"e", b"e/x", b"e/y", b"e/z"}
        labels = sorted({*seen}) if labels == ["none"] else labels[:-1]


@pytest.mark.parametrize("seed", [34, 125, 128, 146])
def test_files_that_are_replaced_all_the_time_never_become_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """P6, P9: applications that keep a file, the one before and the best one, each in a directory of its own, move to a survivor."""
    monkeypatch.setattr(deferred, "RETRY_FIRST_S", 0.0)
    shown: dict[Path, int] = {}

    async def act(cluster: WriterCluster) -> None:
        dice, busy = cluster.dice, set[str]()
        places, serials = {f"g{i}": i % len(cluster.nodes) for i in range(3)}, dict.fromkeys(("g0", "g1", "g2"), 0)
        for group, place in places.items():
            await cluster.nodes[place].mkdir(group)

        def look(_: str) -> None:
            for path in [cluster.pfs / group / name for group in places for name in ("run.cpt", "run_prev.cpt", "model", "best")]:
                number = int(path.read_bytes() or b"0") if path.exists() else shown.get(path, 0)
                assert number >= shown.get(path, 0), (path, number, shown[path], cluster.log)
                shown[path] = number

        async def save(node: Any, group: str, number: int, kind: str) -> None:
            name = {"run": f"step{number}", "model": "model", "best": "best.tmp"}[kind]
            await node.put(f"{group}/{name}", b"%d" % number, number)
            if kind == "run":
                with contextlib.suppress(FileNotFoundError):
                    await node.rename(f"{group}/run.cpt", f"{group}/run_prev.cpt")
            if kind != "model":
                await node.rename(f"{group}/{name}", f"{group}/{'run.cpt' if kind == 'run' else 'best'}")

        async def act_once() -> None:
            if cluster.refusing and dice.random() < cluster.refusing:
                cluster.is_pfs_refusing = not cluster.is_pfs_refusing
            elif cluster.dying and dice.random() < 0.05:
                cluster.return_dead()
            elif dice.random() < 0.3:
                await cluster.step(dice.choice(cluster.nodes))
            elif (group := dice.choice(list(places))) not in busy:
                busy.add(group)
                if not cluster.nodes[places[group]].alive:
                    places[group] = dice.choice([place for place, node in enumerate(cluster.nodes) if node.alive])
                serials[group] += 1
                kind = dice.choice(["run", "run", "model", "best"])
                with contextlib.suppress(OSError, CkptfsError):
                    await save(cluster.nodes[places[group]], group, serials[group], kind)
                busy.discard(group)

        cluster.disturbing = act_once
        cluster.disturbance = dice.choice([0.0, 0.1, 0.3])
        cluster.killing = dice.choice([0.0, 0.0, 0.05])
        cluster.dying = dice.choice([0.0, 0.0, 0.01])
        cluster.replicates = cluster.dying > 0
        cluster.refusing = dice.choice([0.0, 0.05, 0.2])
        with intercepted(look):
            for _ in range(60):
                await act_once()

    run(tmp_path, seed, act, count=2 + seed % 2)


@on_two_nodes(b"new")
async def test_a_move_whose_last_temporary_name_stays_for_now_is_done(cluster: WriterCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: the mover dies before it removes the file that has lost its name, and then the PFS refuses that for a while."""
    monkeypatch.setattr(deferred, "RETRY_FIRST_S", 1000.0)
    one, two = cluster.nodes
    await one.put("old", b"one")
    await one.put("new", b"0")
    await cluster.settle()
    await one.rename("old", "new")
    labels: list[str] = []

    def look(label: str) -> None:
        labels.append(label)
        cluster.deadly = {label} if labels.count("write_back:unlink") == 2 else set()

    with intercepted(look):
        await cluster.step(one)
    assert labels[-1] == "write_back:unlink" and not (cluster.pfs / "old").exists()
    cluster.refusing, cluster.is_pfs_refusing = 1.0, True
    for _ in range(3):
        await cluster.step(one)
    cluster.is_pfs_refusing = False
    await two.put("newer", b"from two")
    await two.rename("newer", "new")


@on_two_nodes(b"a")
async def test_a_deleted_file_that_an_exchange_was_to_move_goes(cluster: WriterCluster) -> None:
    """P6: the other node has a file under one of the names by now. The rows of the deleted file name it where it never came."""
    one, two = cluster.nodes
    await one.put("a", b"1")
    await one.link("a", "b")
    await one.put("c", b"2")
    await cluster.settle()
    await one.exchange("b", "c")
    await one.unlink("c")
    await one.unlink("b")
    await two.put("b", b"3")
    await cluster.write_back_all(two)
    await two.unlink("b")


@pytest.mark.parametrize(("linker", "saver", "remover"), [(0, 0, 1), (1, 0, 0), (1, 1, 0)])
@on_two_nodes(b"newer")
async def test_the_last_checkpoint_stays_until_a_newer_one_is_there(cluster: WriterCluster, linker: int, saver: int, remover: int) -> None:
    """P6: the old one had a second name that another node has made or removed. Both names lead nowhere now."""

    def look(cluster: WriterCluster) -> None:
        names = {path.name for path in cluster.pfs.iterdir()}
        assert names & {"old", "newer"}, names

    nodes = cluster.nodes
    await nodes[0].put("old", b"1")
    await cluster.settle()
    await nodes[linker].link("old", "best")
    while linker == saver == 0 and await cluster.step(nodes[0]):
        pass
    await nodes[saver].put("newer", b"2")
    await nodes[saver].unlink("old")
    await nodes[remover].unlink("best")
    with intercepted(lambda _: None, lambda _: look(cluster)):
        for node in reversed(nodes):
            await cluster.write_back_all(node)


def test_an_exchange_is_shown_although_both_names_are_gone_by_now(tmp_path: Path) -> None:
    """P6: without it the PFS would show the old checkpoint alone, under the name that the newer one has had."""
    shown: set[bytes] = set()

    def look(cluster: WriterCluster) -> None:
        if (run_file := cluster.pfs / "run").exists():
            shown.add(run_file.read_bytes())

    async def act(cluster: WriterCluster) -> None:
        one, _ = cluster.nodes
        await one.put("run", b"1")
        await one.put("step", b"2")
        await cluster.settle()
        await one.exchange("step", "run")
        await one.unlink("step")
        await one.unlink("run")
        with intercepted(lambda _: None, lambda _: look(cluster)):
            await cluster.write_back_all(one)

    run(tmp_path, 0, act)
    assert shown == {b"1", b"2"}


@on_two_nodes(b"f", b"g")
async def test_a_name_that_an_exchange_gives_is_not_taken_by_it(cluster: WriterCluster) -> None:
    """P6: a refused link left a row of that name; the later row of the same file and name is an exchange. Another node moved it on."""
    one, two = cluster.nodes
    await one.put("f", b"1")
    await two.put("a", b"2")
    with pytest.raises(FileExistsError):
        await one.link("f", "a")
    await one.exchange("f", "a")
    await two.rename("a", "g")
    await two.put("g", b"3")
    await cluster.write_back_all(two)


@on_two_nodes(b"step")
async def test_a_file_of_which_another_node_is_removing_a_name_is_not_replaced_meanwhile(cluster: WriterCluster) -> None:
    """P6: each would tell the store what the PFS shows of the file, and the last one would be believed."""
    one, two = cluster.nodes
    await one.put("step", b"1")
    await one.link("step", "best")
    await cluster.settle()
    await one.put("newer", b"2")
    await cluster.write_back_all(one)
    await one.rename("newer", "step")
    await two.unlink("best")

    async def write_back_meanwhile() -> None:
        for _ in range(3):
            await cluster.step(one)

    await cluster.step_through(two, "write_back:directory", write_back_meanwhile)


@on_two_nodes(b"f", b"e")
async def test_a_file_that_has_left_a_removed_directory_again_is_no_external_change(cluster: WriterCluster) -> None:
    """P6: its rows lead through a directory that the other node has removed, also on the PFS."""
    one, two = cluster.nodes
    await one.put("f", b"1")
    await one.mkdir("e")
    await one.mkdir("e/d")
    await cluster.settle()
    await one.rename("f", "e/d/f")
    await one.rename("e/d/f", "f")
    await one.put("f", b"2")
    await two.rmdir("e/d")
    await cluster.write_back_all(two)


@pytest.mark.parametrize("is_file", [False, True])
@on_two_nodes(b"e")
async def test_what_takes_the_name_of_the_directory_that_it_was_in_gets_it(cluster: WriterCluster, is_file: bool) -> None:
    """P6: it cannot move there before the directory is gone, and the directory cannot go before it has moved."""
    one, two = cluster.nodes
    await one.mkdir("e")
    await (one.put("d", b"1") if is_file else one.mkdir("d"))
    await (two.put("e/f", b"2") if is_file else two.mkdir("e/f"))
    await cluster.settle()
    await two.rename("e/f", "d")
    if is_file:
        await two.rmdir("e")
    await two.rename("d", "e")


@on_two_nodes(b"old", b"new")
async def test_a_name_that_another_node_gave_back_stays_when_its_rename_comes_late(cluster: WriterCluster) -> None:
    """P6: the link was no work, for the PFS still showed the file under its old name."""
    one, two = cluster.nodes
    await two.put("old", b"1")
    await cluster.settle()
    await two.rename("old", "new")
    await one.link("new", "old")
    await cluster.write_back_all(one)


@on_two_nodes(b"f", b"g")
async def test_a_pending_name_that_leads_elsewhere_by_now_hides_no_bytes(cluster: WriterCluster) -> None:
    """P6: a row that was planned while its node returned from an island left it. Later rows are about the same file, not that name."""
    one, _ = cluster.nodes
    for name in ("f", "g"):
        await one.put(name, name.encode())
    await cluster.settle()
    other = (await one.stat("g")).id
    one.db.change("INSERT INTO pfs_pending (parent, name, inode) VALUES (?, ?, ?)", ROOT, b"f", other)
    await one.put("f", b"newer")
    await one.set("g", mode=0o600)


@on_two_nodes(b"d", b"d/f", b"e")
async def test_a_directory_that_another_node_is_just_exchanging_is_waited_for(cluster: WriterCluster) -> None:
    """P6: the mover of the other node has died after the exchange. That is no failure of the PFS."""
    one, two = cluster.nodes
    await one.mkdir("d")
    await one.mkdir("e")
    await one.put("e/f", b"1")
    await cluster.settle()
    await one.exchange("d", "e")
    await cluster.kill_mover_at(one, "write_back:directory")
    await two.put("d/f", b"2")
    for _ in range(4):
        await cluster.step(two)
    assert (cluster.pfs / "d/f").read_bytes() == b"1"


@on_two_nodes(b"kept", b"moved")
async def test_a_name_goes_that_was_replaced_by_a_file_that_another_node_moved_on(cluster: WriterCluster) -> None:
    """P6: the file that had the name has another one still. No row is about it."""
    one, two = cluster.nodes
    await one.put("kept", b"1")
    await one.link("kept", "f")
    await one.put("newer", b"2")
    await cluster.settle()
    await one.rename("newer", "f")
    await two.rename("f", "moved")
    await cluster.write_back_all(two)


@on_two_nodes(b"kept", b"moved")
async def test_a_name_goes_that_an_exchange_took_from_a_file_with_another_name(cluster: WriterCluster) -> None:
    """P6: no row that gave the name away can do it, and the last row of the file is not about it."""
    one, _ = cluster.nodes
    await one.put("f", b"1")
    await cluster.settle()
    await one.link("f", "kept")
    await one.put("new", b"2")
    await one.exchange("new", "f")
    await one.rename("f", "moved")
    await one.unlink("new")
    await one.put("kept", b"1 again")
    await one.put("moved", b"2 again")


@on_two_nodes(b"a", b"a/in", b"a/written", b"b", b"b/f")
async def test_directories_change_places_although_one_is_to_hold_another(cluster: WriterCluster) -> None:
    """P6: `a` makes room for a new directory, and what makes room for `a` goes into that one. No node waits for another."""
    one, two = cluster.nodes
    for name in ("a", "b"):
        await one.mkdir(name)
    await one.put("a/f", b"1")
    await cluster.settle()
    await one.mkdir("new")
    await one.rename("b", "new/in")
    await one.rename("a", "b")
    await one.rename("new", "a")
    await two.put("a/written", b"2")
    await cluster.write_back_all(two)
    assert (cluster.pfs / "a" / "written").read_bytes() == b"2"


@on_two_nodes(b"d", b"d/f", b"d/new", b"other")
async def test_a_directory_that_another_program_has_replaced_holds_up_nothing_else(
    cluster: WriterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1: nothing is written into the other directory. What belongs into it is named, with what to do."""
    monkeypatch.setattr(deferred, "RETRY_FIRST_S", 1000.0)
    one, two = cluster.nodes
    await one.mkdir("d")
    await one.put("d/f", b"1")
    await cluster.settle()
    await one.put("d/f", b"2")
    await two.put("d/new", b"3")
    await one.put("other", b"4")
    cluster.refusing = 1e-9  # Errors of the PFS are tried again, as the lane does.
    os.rename(cluster.pfs / "d", cluster.pfs / "d.old")
    (cluster.pfs / "d").mkdir()
    for _ in range(12):
        for node in cluster.nodes:
            await cluster.step(node)
    assert (cluster.pfs / "other").read_bytes() == b"4" and list((cluster.pfs / "d").iterdir()) == []
    for node, path in ((one, "d/f"), (two, "d/new")):
        [(_, trouble, _)] = summary.list_troubles(node.db)
        assert trouble["path"] == path and trouble["remedy"].startswith("put the directory back")
    (cluster.pfs / "d").rmdir()
    os.rename(cluster.pfs / "d.old", cluster.pfs / "d")


@on_two_nodes(b"f")
async def test_a_pending_name_of_a_deleted_file_guards_nothing(cluster: WriterCluster) -> None:
    """P6: another node has moved on what was to appear under that name. The bytes that replace the deleted file are written back."""
    one, two = cluster.nodes
    await one.put("f", b"1")
    await cluster.settle()
    gone = (await one.stat("f")).id
    one.db.change("INSERT INTO pfs_pending (parent, name, inode) VALUES (?, ?, ?)", ROOT, b"former", gone)
    await one.put("newer", b"2")
    await two.rename("newer", "f")


@on_two_nodes(b"file", b"other")
async def test_a_name_in_a_directory_that_is_nowhere_delays_nobody(cluster: WriterCluster) -> None:
    """P11: the store says so of a file, and its value has the fields and types of one."""
    one, two = cluster.nodes
    await one.put("file", b"f")
    await cluster.settle()
    inode = SharedKey(INODE, (await one.stat("file")).id)
    nowhere = [9 << 40, "x"]

    def put_names(names: list[object]) -> None:
        value = encode_fields({**stored(cluster.etcd)[inode], "names": names})
        MemoryStore(cluster.etcd).commit([], [Put(encode_key(inode), value)])

    put_names([[ROOT, "file"], nowhere])
    await one.rename("file", "between")
    await two.rename("between", "file")
    await two.put("other", b"o")
    await cluster.settle()
    assert nowhere in stored(cluster.etcd)[inode]["names"]
    put_names([[ROOT, "file"]])


@pytest.mark.parametrize("is_removed", [False, True])
@on_two_nodes()
async def test_a_name_that_another_node_showed_or_removed_is_not_pending(cluster: WriterCluster, is_removed: bool) -> None:
    """No row may wait for ever for what another node has done."""
    one, two = cluster.nodes
    await one.put("f", b"1")
    await two.rename("f", "g")
    await cluster.write_back_all(two)
    inode = (await one.stat("g")).id
    assert two.db.rows("SELECT name, inode FROM pfs_pending") == [(b"g", inode)]
    if is_removed:
        await one.unlink("g")
    await cluster.settle()
    await two.sharing.refresh_inode(inode)
    with two.db.transaction():
        namespace.delete_forgotten(two.db, [inode])
    assert two.db.rows("SELECT * FROM pfs_pending") == []


@on_two_nodes(b"d", b"d/f", b"d/new")
async def test_a_directory_that_is_made_again_has_what_another_node_wrote_in_it(cluster: WriterCluster) -> None:
    """P3, P9: this node holds a copy, and has looked at the file, but not at its name on the PFS."""
    one, two = cluster.nodes
    await one.mkdir("d")
    content = await one.put("d/f", b"1")
    await cluster.write_back_all(one)
    await two.sharing.refresh_inode((await two.stat("d/f")).id)
    two.hold(one, content)
    (cluster.pfs / "d").rename(cluster.pfs.parent / "moved")
    await two.put("d/new", b"2")
    await cluster.write_back_all(two)


@on_two_nodes(b"d", b"d/f", b"d/g")
async def test_a_long_wait_for_other_nodes_is_a_trouble(cluster: WriterCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: the other node has announced a batch that it does not finish. The trouble ends with the wait."""
    one, two = cluster.nodes

    def list_troubles() -> list[tuple[str, str]]:
        return [(where, value["path"]) for where, value, _ in summary.list_troubles(two.db)]

    await one.mkdir("d")
    await cluster.settle()
    await one.put("d/f", b"1")
    await cluster.kill_mover_at(one, "write_back:intent_announced")
    await two.rename("d/f", "d/g")
    await two.put("d/f", b"2")
    await cluster.write_back_all(two)
    assert not list_troubles()
    monkeypatch.setattr(coordination, "LONG_WAIT_S", 0.0)
    await cluster.step(two)
    assert list_troubles() == [(coordination.WAIT_TROUBLE, "d/g")]
    await cluster.write_back_all(one)
    await cluster.write_back_all(two)
    assert not list_troubles()
