"""D1, D4, X3 among nodes, in virtual time: three nodes write shards of one set; one set comes of it, which no node's rotation destroys."""

import random
from collections.abc import Awaitable, Callable

import pytest
import simulated_cluster
import trio
from ckptfs_daemon.mount.sets.set_maker import SetMaker
from simulated_cluster import SETTLE_S, SimulatedCluster, SimulatedNode, track_sets
from simulated_store import SimulatedEtcd

from ckptfs import limits
from ckptfs.catalog import history, identity
from ckptfs.catalog.set_members import SetTree

NODES = 3


async def list_history(node: SimulatedNode) -> dict[str, dict[str, int]]:
    """Return the names and inodes of each set in the history, as another node sees them; hidden sets too."""
    await node.sharing.refresh_name(1, history.NAME)
    found: dict[str, dict[str, int]] = {}
    root = history.find_root(node.db)
    todo = [("", root)] if root is not None else []
    while todo:
        path, directory = todo.pop()
        await node.sharing.refresh_inode(directory)
        await node.sharing.refresh_directory(directory)
        rows = node.db.rows(
            "SELECT e.name, e.child, i.mode & 61440 = 16384 FROM entry e JOIN inode i ON i.id = e.child WHERE e.parent = ?", directory
        )
        for name, child, is_directory in rows:
            inside = f"{path}/{bytes(name).decode()}"
            if history.get_set(node.db, child) is not None:
                await node.sharing.refresh_directory(child)
                files = node.db.rows("SELECT name, child FROM entry WHERE parent = ?", child)
                found[inside.strip("/")] = {bytes(name).decode(): inode for name, inode in files}
            elif is_directory:
                todo.append((inside, child))
    return found


def simulate(act: Callable[[SimulatedCluster, random.Random], Awaitable[None]], seed: int) -> None:
    """Run a cluster of nodes that track sets."""

    async def run(cluster: SimulatedCluster, dice: random.Random) -> simulated_cluster.Costs:
        cluster.etcd = SimulatedEtcd(cluster.time)
        async with trio.open_nursery() as nursery:
            for number in range(1, NODES + 1):
                track_sets(await cluster.add(nursery, number), nursery)
            await trio.sleep(SETTLE_S)
            await act(cluster, dice)
            nursery.cancel_scope.cancel()
        return simulated_cluster.Costs(NODES)

    simulated_cluster.run_simulated(NODES, run, seed=seed, with_pfs=False)


def shard(node: SimulatedNode) -> str:
    return f"part_{node.number}-of-{NODES}.bin"


async def save(cluster: SimulatedCluster, step: int, dice: random.Random) -> None:
    """Each node writes its shard."""

    async def write(node: SimulatedNode) -> None:
        await node.ensure_directory(f"step_{step}")
        await node.write(f"step_{step}/{shard(node)}", dice.randbytes(1000))

    await cluster.each(write, dice)


@pytest.mark.parametrize("seed", range(3))
def test_one_set_of_three_nodes(seed: int) -> None:
    """Each shard is in it, and it is made once; then all nodes remove what they wrote."""

    async def act(cluster: SimulatedCluster, dice: random.Random) -> None:
        await save(cluster, 1, dice)
        await trio.sleep(SETTLE_S)
        shown = [await list_history(node) for node in cluster.living]
        assert [sorted(one) for one in shown] == [["step_*/step_1@1"]] * NODES
        names = {shard(node) for node in cluster.living}
        assert [set(one["step_*/step_1@1"]) for one in shown] == [names | {"MANIFEST.json", "MANIFEST.xxh128"}] * NODES
        assert all(one == shown[0] for one in shown)
        await save(cluster, 2, dice)
        await trio.sleep(SETTLE_S)
        assert sorted(await list_history(cluster.living[0])) == ["step_*/step_1@1", "step_*/step_2@2"]
        for step in (1, 2):
            for node in cluster.living:
                await node.unlink(f"step_{step}/{shard(node)}")
            await cluster.living[0].rmdir(f"step_{step}")
        await trio.sleep(2 * SETTLE_S)
        for node in cluster.living:
            assert sorted(await list_history(node)) == ["step_*/step_2@2"]

    simulate(act, seed)


async def hang(maker: SetMaker, directory: int, tree: SetTree) -> None:
    """Link one file of the set, and then nothing more."""
    path, file = next(iter(tree.files.items()))
    with maker._context.db.transaction() as db:
        history.insert_link(db, file.inode, directory, path)
    await trio.sleep_forever()


def test_a_node_that_dies_while_it_makes_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node removes what it left, and makes the set."""

    async def act(cluster: SimulatedCluster, dice: random.Random) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(SetMaker, "_fill", hang)
            await save(cluster, 1, dice)
            await trio.sleep(SETTLE_S)
        (unfinished,) = await list_history(cluster.nodes[1])
        assert unfinished == "step_*/.new-1"
        makers = [node for node in cluster.living if node.db.value("SELECT count(*) FROM set_candidate")]
        maker = identity.get_origin_node(next(iter(history.list_unfinished(makers[0].db, (await series_of(makers[0])).directory))))
        cluster.nodes[maker].kill()
        await trio.sleep(limits.NODE_LEASE_S + 2 * SETTLE_S)
        for node in cluster.living:
            assert [path.partition("@")[0] for path in await list_history(node)] == ["step_*/step_1"]

    simulate(act, 1)


async def series_of(node: SimulatedNode) -> history.SeriesRecord:
    """Return the one series of the history."""
    await list_history(node)
    (found,) = history.list_series(node.db)
    return found
