"""P3: who waits or lists on another node than the writer's sees how far files are, without anybody looking at them meanwhile."""

import json
import stat
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from ckptfs_daemon.control.cluster_status import ClusterFigures
from ckptfs_daemon.control.control_context import ControlContext
from ckptfs_daemon.control.queries import LevelCheck, QueryService
from memory_store import MemoryEtcd, MemoryStore
from shared_catalogs import Node, async_tests, in_virtual_time, running
from shared_sets import keep, read_history

from ckptfs import limits
from ckptfs.catalog import contents, history, peer_copies, summary
from ckptfs.catalog.peer_copies import KnownNode
from ckptfs.clique import locations
from ckptfs.errors import ContentLost
from ckptfs.model import ROOT, ContentState, Inode, Level, Tier
from ckptfs.protocol import control_pb2 as pb
from ckptfs.store.kv import Put

DIGEST = b"d" * 16


def close(node: Node, inode: Inode) -> int:
    with node.db.transaction():
        content = contents.insert_content(node.db, inode.id, Tier.RAM)
        contents.mark_closed(node.db, inode.id, content, 3, 1, 2)
    return content


def seal(node: Node, inode: Inode, number: int) -> None:
    row = contents.get_content(node.db, number)
    assert row is not None
    contents.mark_sealed(node.db, [contents.SealResult(number, inode.id, row.change, Tier.RAM, 3, DIGEST, DIGEST)])


KNOWN = [KnownNode(number, f"n{number}", f"d{number}") for number in (1, 2, 3)]


def play(root: Path, act: Callable[..., Awaitable[None]], count: int = 2) -> None:
    """Run `act` with etcd and so many nodes; each takes three for alive."""

    async def run() -> None:
        etcd = MemoryEtcd()
        nodes = [Node(root / f"n{number}", number, MemoryStore(etcd), journalled=True) for number in range(1, count + 1)]
        for node in nodes:
            peer_copies.set_live_nodes(node.db, node.number, 2, KNOWN)
        await running(nodes, lambda: act(etcd, *nodes))

    in_virtual_time(run)


two_nodes, three_nodes = async_tests(play, given=3), async_tests(partial(play, count=3), given=4)


def put_on_pfs(etcd: MemoryEtcd, inode: int, name: str) -> None:
    """What another node says in etcd once the PFS shows a file."""
    state = {"names": [[ROOT, name]], "seen": [77, stat.S_IFREG, 0, 0], "published": [1, 1, 3, 2, 77, DIGEST.hex()]}
    for key, value in ((f"x/{ROOT:016x}/{name}", {"inode": inode}), (f"f/{inode:016x}", state)):
        MemoryStore(etcd).commit([], [Put(key.encode(), json.dumps(value).encode())])


@pytest.mark.parametrize("wanted", [Level.LOCAL, Level.CLIQUE, Level.PFS])
@pytest.mark.parametrize("gone", [False, True])
@three_nodes
async def test_a_wait_elsewhere_ends(
    etcd: MemoryEtcd, one: Node, two: Node, three: Node, monkeypatch: pytest.MonkeyPatch, wanted: Level, gone: bool
) -> None:
    """G1: also when the writer has gone since; a file that only it had is nowhere then."""
    monkeypatch.setattr(limits, "COPIES_FRESH_S", 0.0)

    figures = ClusterFigures(cast(Any, None), three.db, three.store)
    inode = await one.make("file")
    content = close(one, inode)
    await one.sharing.wait_published()
    await three.stat("file")
    waiting = LevelCheck(three.db, inode.id, wanted, figures.load_file)
    figures.refresh_files([inode.id])
    assert not waiting.check_next({}).done, "it is not sealed"
    seal(one, inode, content)
    await one.sharing.wait_published()
    if wanted is not Level.LOCAL:
        locations.CopyRecords(two.store, two.db, 2).announce([(_sealed(one, content), True)])
    if wanted is Level.PFS:
        put_on_pfs(etcd, inode.id, "file")
    if gone:
        peer_copies.set_live_nodes(three.db, 3, 2, KNOWN[1:])
    figures.refresh_files([inode.id])
    level = {Level.LOCAL: Level.NONE, Level.CLIQUE: Level.LOCAL}.get(wanted, wanted) if gone else wanted
    assert summary.get_level(three.db, inode.id) is level and waiting.check_next({}).done is (level is wanted)
    assert waiting.check_next({}).blocked_by == ("no node that is alive has a copy" if level is Level.NONE else "")


@pytest.mark.parametrize("wanted", [Level.LOCAL, Level.CLIQUE, Level.PFS])
@pytest.mark.parametrize("place", ["nowhere", "node", "pfs"])
@two_nodes
async def test_a_wait_elsewhere_for_a_file_that_its_writer_has_lost_ends_at_once(
    etcd: MemoryEtcd, one: Node, two: Node, monkeypatch: pytest.MonkeyPatch, wanted: Level, place: str
) -> None:
    """D12: unless another node or the PFS has it. A list says the same."""
    monkeypatch.setattr(limits, "COPIES_FRESH_S", 0.0)

    figures = ClusterFigures(cast(Any, None), two.db, two.store)
    inode = await one.make("file")
    content = close(one, inode)
    seal(one, inode, content)
    if place == "node":
        locations.CopyRecords(MemoryStore(etcd), two.db, 3).announce([(_sealed(one, content), True)])
    elif place == "pfs":
        put_on_pfs(etcd, inode.id, "file")
    await one.sharing.wait_published()
    await two.stat("file")
    waiting = LevelCheck(two.db, inode.id, wanted, figures.load_file)
    contents.set_state(one.db, content, ContentState.LOST)
    await one.sharing.wait_published()
    figures.refresh_files([inode.id])
    found = figures.load_file(inode.id)
    assert found is not None and found.record.content is not None
    assert (found.record.content.state is ContentState.LOST) is (place != "node")
    if place == "nowhere":
        with pytest.raises(ContentLost, match="file is lost"):
            waiting.check_next({})
    else:
        waiting.check_next({})


@pytest.mark.parametrize("wanted", [Level.LOCAL, Level.CLIQUE, Level.PFS])
@two_nodes
async def test_a_wait_for_a_directory_covers_files_that_this_node_never_saw(etcd: MemoryEtcd, one: Node, two: Node, wanted: Level) -> None:
    """G1, T3: rank 0 waits for a checkpoint of which other ranks wrote a part; nobody has listed it on this node."""
    top = await one.mkdir("step")
    await one.mkdir("step/part")
    await two.stat("step")
    unsealed, sealed = await one.make("step/part/unsealed"), await one.make("step/part/sealed")
    close(one, unsealed)
    content = close(one, sealed)
    seal(one, sealed, content)
    await one.sharing.wait_published()
    locations.CopyRecords(MemoryStore(etcd), two.db, 3).announce([(_sealed(one, content), True)])
    there = await one.make("step/part/there")
    put_on_pfs(etcd, there.id, "there")
    assert ClusterFigures(cast(Any, None), two.db, two.store).load_below(top.id) >= {unsealed.id, sealed.id, there.id}
    assert summary.get_level(two.db, there.id) is Level.PFS, "without another look at each file"
    assert _waiting(two, top, wanted).files_left == (2 if wanted is Level.PFS else 1)


@two_nodes
async def test_a_wait_for_a_directory_does_not_wait_for_what_another_node_removed(etcd: MemoryEtcd, one: Node, two: Node) -> None:
    """G1: a rotation on another node, of files whose names this node has listed; a new file here that etcd does not know yet counts."""
    top = await one.mkdir("run")
    close(one, await one.make("run/old"))
    await one.sharing.wait_published()
    await two.stat("run/old")
    await one.unlink("run/old")
    assert _waiting(two, top, Level.PFS).done
    two.cut(True)
    close(two, await two.make("run/new"))
    two.cut(False)
    assert _waiting(two, top, Level.PFS).files_left == 1


@two_nodes
async def test_a_list_elsewhere_knows_what_is_on_the_pfs(etcd: MemoryEtcd, one: Node, two: Node) -> None:
    """D12: levels of sets that another node wrote, which this node has listed and never opened."""
    figures = ClusterFigures(cast(Any, None), two.db, two.store)
    queries = QueryService(ControlContext(cast(Any, None), two.db, cast(Any, None), figures))
    inode = await one.make("f1")
    seal(one, inode, close(one, inode))
    await keep(one, "f1")
    await one.sharing.wait_published()
    await read_history(two)
    put_on_pfs(etcd, inode.id, "f1")
    (series,) = history.list_series(two.db)
    replies = queries.ListSets(pb.ListSetsRequest(directory=series.directory), cast(Any, None))
    assert [found.level for reply in replies for found in reply.sets] == ["pfs"]


def _waiting(node: Node, top: Inode, wanted: Level) -> pb.Progress:
    """What a wait on that node says first."""
    config = cast(Any, SimpleNamespace(pfs=Path("pfs"), keeps_copies=True))
    figures = ClusterFigures(config, node.db, node.store)
    queries = QueryService(ControlContext(config, node.db, cast(Any, None), figures))
    context = Mock(is_active=lambda: True)
    return cast(pb.Progress, next(iter(queries.Wait(pb.WaitRequest(inode=top.id, level=wanted.value), context))))


def _sealed(node: Node, number: int) -> Any:
    row = contents.get_content(node.db, number)
    assert row is not None and row.digest == DIGEST
    return row
