"""D1, D4, X3 among nodes, in virtual time: three nodes write shards of one set; one set comes of it, which no node's rotation destroys."""

import errno
import itertools
import json
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import trio
from ckptfs_daemon import newest_sets
from ckptfs_daemon.mount.sets.set_maker import SetMaker
from ckptfs_daemon.mount.sets.set_refresh import SetRefresh
from ckptfs_daemon.mount.sets.set_review import SetReview
from simulated_cluster import SETTLE_S, SimulatedCluster, SimulatedNode
from simulated_mount import NODES, SimulatedMount, list_history, simulate, simulated

from ckptfs import limits
from ckptfs.catalog import contents, history, identity, inodes, namespace, pfs_hold, set_members, user_settings
from ckptfs.catalog.set_members import SetTree
from ckptfs.coherence import keys
from ckptfs.config.schema import RetentionRule
from ckptfs.model import Tier
from ckptfs.series import completeness


def shard(node: SimulatedNode) -> str:
    return f"part_{node.number}-of-{NODES}.bin"


async def save(cluster: SimulatedCluster, step: int) -> None:
    """Each node writes its shard."""

    async def write(node: SimulatedNode) -> None:
        await node.ensure_directory(f"step_{step}")
        await node.write(f"step_{step}/{shard(node)}", cluster.dice.randbytes(1000))

    await cluster.each(write)


@simulated(seeds=range(3))
async def test_one_set_of_three_nodes(cluster: SimulatedCluster) -> None:
    """Each shard is in it, and it is made once; then all nodes remove what they wrote."""
    await save(cluster, 1)
    await trio.sleep(SETTLE_S)
    shown = [await list_history(node) for node in cluster.living]
    assert [sorted(one) for one in shown] == [["step_*/step_1@1"]] * NODES
    names = {shard(node) for node in cluster.living}
    assert [set(one["step_*/step_1@1"]) for one in shown] == [names | {"MANIFEST.json", "MANIFEST.xxh128"}] * NODES
    assert all(one == shown[0] for one in shown)
    await save(cluster, 2)
    await trio.sleep(SETTLE_S)
    assert sorted(await list_history(cluster.living[0])) == ["step_*/step_1@1", "step_*/step_2@2"]
    for step in (1, 2):
        for node in cluster.living:
            await node.unlink(f"step_{step}/{shard(node)}")
        await cluster.living[0].rmdir(f"step_{step}")
    await trio.sleep(2 * SETTLE_S)
    for node in cluster.living:
        assert sorted(await list_history(node)) == ["step_*/step_2@2"]


@pytest.mark.parametrize("ahead_h", [2, -2])
@simulated()
async def test_a_set_after_a_rollback_is_the_newest_whatever_the_clocks_say(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch, ahead_h: int
) -> None:
    """D2: the clock of the node on which a user rolls back is wrong by hours."""

    def list_newest(node: SimulatedNode) -> list[bytes]:
        (series,) = history.list_series(node.db)
        return [one.member for one in newest_sets.list_newest_first(node.db, series)]

    for step in (1, 2):
        await save(cluster, step)
        await trio.sleep(SETTLE_S)
    node = cluster.living[0]
    await list_history(node)
    (series,) = history.list_series(node.db)
    wrong_ns = time.time_ns() + ahead_h * 3600 * 10**9
    with node.db.transaction(), monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: wrong_ns)
        user_settings.set_setting(node.db, inodes.get(node.db, series.directory), b"rollback", b"1", 0)
    assert list_newest(node) == [b"step_1", b"step_2"]
    await node.sharing.wait_published()
    await save(cluster, 3)
    await trio.sleep(SETTLE_S)
    for each in cluster.living:
        await list_history(each)
        assert list_newest(each) == [b"step_3", b"step_1", b"step_2"]


@simulated(RetentionRule("epoch_*_iter_*", keep=1))
async def test_a_rule_keeps_the_set_of_the_later_epoch(cluster: SimulatedCluster) -> None:
    """D5: iterations are counted anew in each epoch. The set that is newest for `ckptfs latest` is so for a rule."""
    for name in ("epoch_1_iter_900", "epoch_2_iter_200"):
        for node in cluster.living:
            await node.ensure_directory(name)
            await node.write(f"{name}/{shard(node)}", cluster.dice.randbytes(1000))
        await trio.sleep(SETTLE_S)
    await trio.sleep(2 * SETTLE_S)
    for node in cluster.living:
        assert sorted(await list_history(node)) == ["epoch_*_iter_*/epoch_2_iter_200@2"]
        (one,) = (history.list_sets(node.db, series.directory) for series in history.list_series(node.db))
        assert one[0].record.numbers == (200, 2), "the step first, as 0.2.0 reads it"
    assert cluster.pfs is not None and [name for name in os.listdir(cluster.pfs) if "epoch" in name] == ["epoch_2_iter_200"]


@simulated(RetentionRule("epoch_*_iter_*", incomplete_after_s=1.0))
async def test_what_is_incomplete_in_the_later_epoch_is_not_reaped(cluster: SimulatedCluster) -> None:
    """H6: it may still be completed; what is incomplete in the epoch before is deleted."""
    node = cluster.living[0]
    for name in ("epoch_1_iter_800", "epoch_2_iter_200"):
        await node.mkdir(name)
        await node.write(f"{name}/{shard(node)}", cluster.dice.randbytes(1000))
    for each in cluster.living:
        await each.ensure_directory("epoch_1_iter_900")
        await each.write(f"epoch_1_iter_900/{shard(each)}", cluster.dice.randbytes(1000))
    await trio.sleep(10 * SETTLE_S)
    assert cluster.pfs is not None
    assert sorted(name for name in os.listdir(cluster.pfs) if "epoch" in name) == ["epoch_1_iter_900", "epoch_2_iter_200"]


async def hang(maker: SetMaker, directory: int, tree: SetTree) -> None:
    """Link one file of the set, and then nothing more."""
    path, file = next(iter(tree.files.items()))
    with maker._context.db.transaction() as db:
        history.insert_link(db, file.inode, directory, path)
    await trio.sleep_forever()


@simulated()
async def test_a_node_that_dies_while_it_makes_a_set(cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node removes what it left, and makes the set."""
    with monkeypatch.context() as patch:
        patch.setattr(SetMaker, "_fill", hang)
        await save(cluster, 1)
        await trio.sleep(SETTLE_S)
    (unfinished,) = await list_history(cluster.nodes[1])
    assert unfinished == "step_*/.new-1"
    makers = [node for node in cluster.living if node.db.value("SELECT count(*) FROM set_candidate")]
    maker = identity.get_origin_node(next(iter(history.list_unfinished(makers[0].db, (await series_of(makers[0])).directory))))
    cluster.nodes[maker].kill()
    await trio.sleep(limits.NODE_LEASE_S + 2 * SETTLE_S)
    for node in cluster.living:
        assert [path.partition("@")[0] for path in await list_history(node)] == ["step_*/step_1"]


async def series_of(node: SimulatedNode) -> history.SeriesRecord:
    """Return the one series of the history."""
    await list_history(node)
    (found,) = history.list_series(node.db)
    return found


async def wait_sealed(node: SimulatedNode, content: int) -> None:
    with trio.fail_after(SETTLE_S):
        while not node.db.value("SELECT state = 2 AND under_replicated = 0 FROM content WHERE id = ?", content):
            await trio.sleep(0.01)


@simulated(seeds=range(2))
async def test_another_node_removes_what_was_just_sealed(cluster: SimulatedCluster) -> None:
    """X3: it makes the set first, whether the node that wrote it has seen it or not."""
    writer, other = cluster.nodes[1], cluster.nodes[2]
    await save(cluster, 1)
    await trio.sleep(SETTLE_S)
    writer.tracking.cancel()
    await writer.ensure_directory("step_2")
    contents = [await writer.write(f"step_2/{shard(node)}", cluster.dice.randbytes(1000)) for node in cluster.living]
    for content in contents:
        await wait_sealed(writer, content)
    began_s = trio.current_time()
    await other.remove_tree("step_2")
    assert trio.current_time() - began_s < limits.SET_LOOK_WAIT_S + 1
    await trio.sleep(SETTLE_S)
    kept = (await list_history(cluster.nodes[3]))["step_*/step_2@2"]
    assert kept.keys() >= {shard(node) for node in cluster.living}


def find_torn(node: SimulatedNode, others: list[SimulatedNode], sets: dict[str, dict[str, int]]) -> list[str]:
    """Return the files of sets whose bytes are not those of the manifest."""
    found = []
    for path, files in sets.items():
        made = [(one, one.db.value(OWN_CONTENT, files["MANIFEST.json"])) for one in others]
        ((maker, content),) = [(one, content) for one, content in made if content is not None]
        with os.fdopen(maker.tiers[Tier.RAM].open(content)) as file:
            told = {one["path"]: one["digest"] for one in json.load(file)["files"]}
        for name, digest in told.items():
            now = [bytes(row[0]).hex() for one in others for row in one.db.rows(OWN_DIGEST, files[name])]
            found += [f"{path}/{name}: {now} instead of {digest}"] if now != [digest] else []
    return found


OWN_CONTENT = "SELECT k.id FROM inode i JOIN content k ON k.id = i.content AND k.remote = 0 WHERE i.id = ?"
OWN_DIGEST = "SELECT k.digest FROM inode i JOIN content k ON k.id = i.content AND k.remote = 0 AND k.digest IS NOT NULL WHERE i.id = ?"


async def save_while(
    cluster: SimulatedCluster, moment: str, act: Callable[[SimulatedNode], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Save two steps. While a node is at that moment of making the second set, another one acts."""
    former, done = getattr(SetMaker, moment), trio.Event()

    async def run(node: SimulatedNode) -> None:
        await act(node)
        done.set()

    async def make_meanwhile(maker: SetMaker, *given: object) -> object:
        if not acting:
            acting.append(cluster.nodes[2 if identity.get_node_number(maker._context.db) == 1 else 1])
            nursery.start_soon(run, acting[0])
            await trio.sleep(1.0)
        return await former(maker, *given)

    acting: list[SimulatedNode] = []
    await save(cluster, 1)
    await trio.sleep(SETTLE_S)
    async with trio.open_nursery() as nursery:
        with monkeypatch.context() as patch:
            patch.setattr(SetMaker, moment, make_meanwhile)
            await save(cluster, 2)
            await done.wait()
            await trio.sleep(2 * SETTLE_S)


@pytest.mark.parametrize("moment", ["_begin", "_fill", "_finish"])
@simulated()
async def test_a_removal_while_another_node_makes_the_set(cluster: SimulatedCluster, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """X3: it waits until that set is there."""
    await save_while(cluster, moment, lambda node: node.remove_tree("step_2"), monkeypatch)
    kept = (await list_history(cluster.nodes[3]))["step_*/step_2@2"]
    assert kept.keys() >= {shard(node) for node in cluster.living}


@pytest.mark.parametrize("moment", ["_fill", "_confirm", "_finish"])
@simulated()
async def test_an_overwrite_while_another_node_makes_the_set(
    cluster: SimulatedCluster, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T6, P7: each set has the bytes of its manifest, whenever a program opens a file of it, and however long it writes."""
    await save_while(
        cluster, moment, lambda node: node.mount.overwrite(f"step_2/{shard(node)}", cluster.dice.randbytes(1000), 5.0), monkeypatch
    )
    for node in cluster.living:
        sets = await list_history(node)
        assert find_torn(node, cluster.living, sets) == []
        assert {path.partition("@")[0] for path in sets} == {"step_*/step_1", "step_*/step_2"}


EVERY_SECOND = RetentionRule("step_*", keep=10, pfs_every=2)


def list_pfs(cluster: SimulatedCluster, run: str = ".") -> dict[str, set[str]]:
    """Return the names in each directory of a set on the PFS, in the application's place and in the history."""
    assert cluster.pfs is not None
    found = [*cluster.pfs.glob(f"{run}/step_*"), *cluster.pfs.glob(f".ckptfs.history/{run}/step_*/*")]
    return {str(path.relative_to(cluster.pfs)): {one.name for one in path.iterdir()} for path in found}


def expect_on_pfs(writers: set[str], *steps: int) -> dict[str, set[str]]:
    manifest = {"MANIFEST.json", "MANIFEST.xxh128"}
    places = {f"step_{step}": writers for step in steps}
    return places | {f".ckptfs.history/step_*/step_{step}@{step}": writers | manifest for step in steps}


@simulated(EVERY_SECOND, seeds=range(2))
async def test_every_second_set_of_three_nodes_goes_to_the_pfs(cluster: SimulatedCluster) -> None:
    """D7: each node writes back its part of the sets that are chosen, and no more."""
    for step in range(1, 5):
        await save(cluster, step)
        await trio.sleep(SETTLE_S)
    assert list_pfs(cluster) == expect_on_pfs({shard(node) for node in cluster.living}, 2, 4)
    for node in cluster.living:
        rows = node.db.rows("SELECT origin FROM journal")
        assert rows == [] and pfs_hold.count_held(node.db)[0] >= 2, "steps 1 and 3 are held"


@simulated(EVERY_SECOND, seeds=range(2))
async def test_the_second_set_of_two_saves_in_a_row_goes_to_the_pfs(cluster: SimulatedCluster) -> None:
    """D7: a node may hear of the chosen set before it knows the files of it, its own ones included."""
    await save(cluster, 1)
    await save(cluster, 2)
    await trio.sleep(SETTLE_S)
    (second,) = (path for path in await list_history(cluster.living[0]) if path.endswith("@2"))
    step = int(second.rpartition("_")[2].partition("@")[0])
    writers, manifest = {shard(node) for node in cluster.living}, {"MANIFEST.json", "MANIFEST.xxh128"}
    assert list_pfs(cluster) == {f"step_{step}": writers, f".ckptfs.history/{second}": writers | manifest}


IN_TIME_S = 3.0
"""From a save to its last byte on the PFS, if nothing waits for a timer that grows."""


@pytest.mark.parametrize("pause_s", [0.0, 2.0])
@simulated(replace(EVERY_SECOND, path="run*/step_*"))
async def test_a_set_that_is_complete_after_a_later_one_goes_to_the_pfs(
    cluster: SimulatedCluster, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D7: each node writes its part back soon, whichever node makes which set. `pause_s`: the others have looked at theirs before."""
    maker = 1

    def choose_delay_s(refresh: SetRefresh) -> float:
        return limits.SET_SPREAD_S * (identity.get_node_number(refresh._context.db) != maker)

    async def save_as(cluster: SimulatedCluster, directory: str) -> None:
        for node in sorted(cluster.living, key=lambda node: node.number == maker):
            await trio.sleep(pause_s * (node.number == maker))
            await node.ensure_directory(directory)
            await node.write(f"{directory}/{shard(node)}", cluster.dice.randbytes(1000))
        await trio.sleep(completeness.QUIET_S + IN_TIME_S)  # No step is there before it.

    monkeypatch.setattr(SetRefresh, "choose_delay_s", choose_delay_s)
    writers, manifest = {shard(node) for node in cluster.living}, {"MANIFEST.json", "MANIFEST.xxh128"}
    for makers in itertools.product(cluster.nodes, cluster.nodes):
        run = "run{}{}".format(*makers)
        await cluster.living[0].mkdir(run)
        for step, made_by in zip((2, 1), makers, strict=True):
            maker = made_by
            await save_as(cluster, f"{run}/step_{step}")
        shown = list_pfs(cluster, run)
        assert {path for path in await list_history(cluster.living[0]) if run in path} == {f"{run}/step_*/{one}" for one in ORDER}
        assert shown == {f"{run}/step_1": writers, f".ckptfs.history/{run}/step_*/step_1@2": writers | manifest}, makers


ORDER = ("step_1@2", "step_2@1")


@simulated(EVERY_SECOND)
async def test_a_mount_process_that_starts_after_a_set_was_chosen(cluster: SimulatedCluster) -> None:
    """D7: it releases what the one before wrote of it. Nothing else tells it of the series."""
    late = cluster.nodes[3]
    late.tracking.cancel()
    for step in (1, 2):
        await save(cluster, step)
        await trio.sleep(IN_TIME_S)
    with late.db.transaction():
        late.db.run("DELETE FROM set_candidate")
    writers = {shard(node) for node in cluster.living}
    assert list_pfs(cluster)["step_2"] == writers - {shard(late)}
    async with trio.open_nursery() as nursery:
        late.tracking = trio.CancelScope()
        SimulatedMount(late, nursery)
        await trio.sleep(IN_TIME_S)
        nursery.cancel_scope.cancel()
    assert list_pfs(cluster) == expect_on_pfs(writers, 2)


@pytest.mark.parametrize(("old", "new"), [("step_1/model.bin", "best.bin"), ("step_1", "best")])
@pytest.mark.parametrize("other", [1, 2])
@simulated(EVERY_SECOND)
async def test_what_is_renamed_out_of_a_held_place_while_it_is_open(cluster: SimulatedCluster, other: int, old: str, new: str) -> None:
    """D7: the PFS shows it under its new name with all bytes, whichever node renames it."""
    assert cluster.pfs is not None
    writer, bytes_ = cluster.nodes[1], cluster.dice.randbytes(1000)
    await writer.mkdir("step_1")
    inode = (await writer.make("step_1/model.bin")).id
    with writer.db.transaction():
        content = contents.insert_content(writer.db, inode, Tier.RAM)
        with os.fdopen(writer.tiers[Tier.RAM].create(content), "wb") as file:
            file.write(bytes_)
    await writer.sharing.wait_published()
    await cluster.nodes[other].rename(old, new)
    await trio.sleep(IN_TIME_S)
    with writer.db.transaction():
        now_ns = cluster.time.now_ns()
        contents.mark_closed(writer.db, inode, content, len(bytes_), now_ns, now_ns)
    writer.mover.wake_lanes()
    await trio.sleep(SETTLE_S)
    assert (cluster.pfs / "step_1/model.bin".replace(old, new)).read_bytes() == bytes_


@pytest.mark.parametrize("does_return", [False, True])
@simulated()
async def test_a_claim_ends_with_its_node(cluster: SimulatedCluster, does_return: bool) -> None:
    """D1, P9: a node dies between its claim of a file and its open. The set is made when it is gone, or when its mount is back."""
    writers, victim = [cluster.nodes[1], cluster.nodes[2]], cluster.nodes[3]
    for step in (2, 1):
        for node in writers:
            await node.ensure_directory(f"step_{step}")
            file = f"step_{step}/rank{node.number}.bin"
            await node.write(file, cluster.dice.randbytes(1000))
            if step == 1 and node is writers[0]:
                claimed = (await victim.stat(file)).id
                with victim.db.transaction():
                    set_members.insert_claim(victim.db, claimed)
                await victim.sharing.wait_published()
        await trio.sleep(SETTLE_S)
    assert sorted(await list_history(writers[0])) == ["step_*/step_2@1"]
    victim.kill() if not does_return else victim.tracking.cancel()
    async with trio.open_nursery() as nursery:
        if does_return:
            victim.tracking = trio.CancelScope()
            SimulatedMount(victim, nursery)
        await trio.sleep(limits.NODE_LEASE_S + SETTLE_S)
        nursery.cancel_scope.cancel()
    assert sorted(await list_history(writers[0])) == ["step_*/step_1@2", "step_*/step_2@1"]


@simulated()
async def test_a_file_that_leaves_its_set_to_be_written_gets_into_no_other_set_meanwhile(cluster: SimulatedCluster) -> None:
    """T6, P7: the other nodes know its former bytes until the close. Then the other set would show the new ones."""
    other, writer, bytes_ = cluster.nodes[1], cluster.nodes[2], cluster.dice.randbytes(1000)
    await other.write("step_1.bin", bytes_)
    await trio.sleep(SETTLE_S)
    before = await list_history(other)
    inode = (await writer.stat("step_1.bin")).id
    async with writer.mount.tracker.guard_writer(inode):
        await writer.sharing.refresh_change(keys.list_unread_history(writer.db, inode))
        with writer.db.transaction() as db:
            copied = contents.insert_reserved_content(db, Tier.RAM)
            with os.fdopen(writer.tiers[Tier.RAM].create(copied), "wb") as file:
                file.write(bytes_)
            history.separate(db, inode, copied)
    with other.db.transaction():
        namespace.insert_candidates(other.db, [inode])
    other.on_sealed()
    await trio.sleep(SETTLE_S)
    after = await list_history(other)
    assert [*after] == [*before] == ["step_*.bin/step_1.bin@1"]
    assert before["step_*.bin/step_1.bin@1"]["step_1.bin"] == inode != after["step_*.bin/step_1.bin@1"]["step_1.bin"]


@simulated(seeds=range(2))
async def test_nodes_that_seal_the_last_files_at_once_make_the_set(cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: also of a member that is not the newest, and if the store is slow to have what they sealed."""
    monkeypatch.setattr(limits, "SHARED_GATHER_S", 1.0)
    monkeypatch.setattr(SetRefresh, "choose_delay_s", lambda _: 0.0)
    await save(cluster, 2)
    await trio.sleep(SETTLE_S)
    await save(cluster, 1)
    await trio.sleep(SETTLE_S)
    assert sorted(await list_history(cluster.living[0])) == ["step_*/step_1@2", "step_*/step_2@1"]


@simulated(EVERY_SECOND)
async def test_reviews_that_fail_for_a_while_are_made_again(cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """D7: a set is chosen, and written back, when no new candidate asks for a review any more."""
    review, is_broken = SetReview.review, False

    async def review_or_fail(reviews: SetReview, series: int) -> None:
        if is_broken:
            raise OSError(errno.EIO, "injected")
        await review(reviews, series)

    monkeypatch.setattr(SetReview, "review", review_or_fail)
    for step in (1, 2):
        is_broken = step == 2
        await save(cluster, step)
        await trio.sleep(2 * IN_TIME_S)
    is_broken = False
    await trio.sleep(limits.RETRY_LAST_S)
    assert list_pfs(cluster) == expect_on_pfs({shard(node) for node in cluster.living}, 2)


@pytest.mark.parametrize("writers", [(1, 2, 3), (3,)])
@simulated(EVERY_SECOND)
async def test_what_a_dead_node_held_back_comes_to_the_pfs(cluster: SimulatedCluster, writers: tuple[int, ...]) -> None:
    """D7, P9: it dies when its part is on its peers, before it has seen the set. Nothing else tells of the set if it wrote all of it."""

    async def save(step: int) -> list[int]:
        await victim.ensure_directory(f"step_{step}")
        return [await cluster.nodes[one].write(f"step_{step}/rank{one}.bin", cluster.dice.randbytes(1000)) for one in writers]

    victim = cluster.nodes[3]
    await save(1)
    await trio.sleep(SETTLE_S)
    victim.tracking.cancel()
    *_, content = await save(2)
    await wait_sealed(victim, content)
    victim.kill()
    await trio.sleep(limits.NODE_LEASE_S + 3 * SETTLE_S)
    assert list_pfs(cluster) == expect_on_pfs({f"rank{one}.bin" for one in writers}, 2)


@simulated()
async def test_what_another_node_made_a_set_of_is_not_looked_at_again(cluster: SimulatedCluster) -> None:
    """A node waits for the shards of others. One of these makes the set."""
    await cluster.living[0].mkdir("step_1")
    for node in cluster.living:
        await node.write(f"step_1/{shard(node)}", cluster.dice.randbytes(1000))
        await trio.sleep(2.5)
    await trio.sleep(SETTLE_S)
    assert [node.db.rows("SELECT * FROM set_candidate") for node in cluster.living] == [[]] * NODES


LATER_S = 5.0


def let_first_node_make_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others look later, when each set is there. They read no more of the history than they must."""

    def choose_delay_s(refresh: SetRefresh) -> float:
        return 0.0 if identity.get_node_number(refresh._context.db) == 1 else LATER_S

    monkeypatch.setattr(SetRefresh, "choose_delay_s", choose_delay_s)


@pytest.mark.parametrize("waits_s", [None, 1e6])
def test_older_sets_leave_ram_on_nodes_that_make_no_sets(waits_s: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """D5: also while a rule waits for days until it may reap what is incomplete. `evict` drops what is retired."""
    let_first_node_make_sets(monkeypatch)

    async def act(cluster: SimulatedCluster, dice: random.Random) -> None:
        node = cluster.living[0]
        await node.mkdir("step_1")
        await node.write(f"step_1/{shard(node)}", dice.randbytes(1000))
        for step in range(2, 5):
            await save(cluster, step)
            await trio.sleep(LATER_S / 2)
            for node in cluster.living if waits_s else ():
                await list_history(node)  # A reader of the history knows the new set before.
            await trio.sleep(SETTLE_S)
        for node in cluster.living:
            own = "SELECT k.id FROM content k JOIN entry e ON e.child = k.inode WHERE k.remote = 0 AND e.parent = ? AND e.name = ?"
            older = [node.db.value(own, (await node.stat(f"step_{step}")).id, shard(node).encode()) for step in (2, 3)]
            retired = {content for content in node.db.column("SELECT content FROM retired") if content in older}
            assert retired == {*older}, f"node {node.number}"

    simulate(act, 1, RetentionRule("step_*", keep_local=1, incomplete_after_s=waits_s))


@simulated(RetentionRule("step_*", keep=3))
async def test_nodes_that_make_no_sets_leave_those_that_a_rule_keeps(cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """D5: they have never read the names that lead to the series, and look at it because they wrote parts of its sets."""
    let_first_node_make_sets(monkeypatch)
    for step in range(1, 4):
        await save(cluster, step)
        await trio.sleep(SETTLE_S)
    for step in (1, 2):
        await cluster.living[-1].remove_tree(f"step_{step}")
        await trio.sleep(SETTLE_S)
    assert sorted(await list_history(cluster.living[0])) == [f"step_*/step_{step}@{step}" for step in (1, 2, 3)]
