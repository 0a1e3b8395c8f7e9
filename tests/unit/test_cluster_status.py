"""`ckptfs status --cluster`: the nodes as the shared store has them, and the report when the store does not answer."""

import datetime
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from ckptfs_client import render
from ckptfs_client.errors import UsageError
from ckptfs_client.node import doctor
from ckptfs_client.node.doctor import Finding
from ckptfs_daemon.control import cluster_status
from ckptfs_daemon.control.cluster_status import ClusterFigures, TransportFigures
from ckptfs_daemon.control.control_context import ControlContext
from ckptfs_daemon.control.queries import QueryService
from control_served import serving
from local_node import Node
from memory_store import MemoryStore

from ckptfs.catalog import copies, identity, peer_copies
from ckptfs.catalog.identity import record_last_members
from ckptfs.catalog.peer_copies import KnownNode, PeerCopy
from ckptfs.clique import membership
from ckptfs.clique.certificates import Identity
from ckptfs.clique.peer_api import PeerFailed, PingResult
from ckptfs.flow.replicate.peer_queues import PeerLoad
from ckptfs.model import Tier
from ckptfs.protocol import control_pb2 as pb
from ckptfs.store.kv import Get, Put

NAMES = ("node1", "node2", "node3")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    found = Node(tmp_path)
    found.configure(cluster="c", etcd=("a:1",), node="node1", replication_factor=2)
    identity.set_node_number(found.db, 1)
    return found


@pytest.fixture
def store(node: Node) -> MemoryStore:
    """Two of three nodes live; the second has told its figures."""
    made = MemoryStore()
    nodes = [membership.Node(number, name, f"{name}:1", number - 1, name, 5000) for number, name in enumerate(NAMES, 1)]
    peer_copies.set_live_nodes(node.db, 1, 2, [KnownNode(one.number, one.name, one.domain) for one in nodes])
    puts = [Put(membership.node_key(one.number), membership.encode_node(one)) for one in nodes[:2]]
    made.commit([], [*puts, Put(cluster_status.figures_key(2), cluster_status.encode_figures(node.db))])
    return made


def test_who_lives_and_where_copies_go(node: Node, store: MemoryStore) -> None:
    """N1, N4."""
    found = ClusterFigures(node.config, node.db, store).build_cluster()
    assert (found.name, found.node, found.number, found.island, found.replication_factor) == ("c", "node1", 1, False, 2)
    members = [(one.name, one.alive, list(one.peers), one.has_figures) for one in found.members]
    assert members == [("node1", True, ["node2"], False), ("node2", True, ["node1"], True), ("node3", False, [], False)]
    text = "\n".join(str(part) for part in render.build_cluster(found).renderables[:1])  # type: ignore[attr-defined]
    assert "2 of 3 nodes" in text


def test_too_few_live_nodes_are_a_trouble(node: Node, store: MemoryStore) -> None:
    """X11, F5: the health of a node covers its peers."""

    def ask() -> pb.Status:
        figures = ClusterFigures(node.config, node.db, store)
        return QueryService(ControlContext(node.config, node.db, node.tiers, figures)).GetStatus(pb.StatusRequest(), None)

    assert (ask().health, list(ask().troubles)) == ("ok", [])
    members = [KnownNode(number, name, name) for number, name in enumerate(NAMES, 1)]
    peer_copies.set_live_nodes(node.db, 1, 2, members[:1])
    found = ask()
    assert found.health == "degraded" and [one.where for one in found.troubles] == ["clique"]
    assert "live nodes in 2 failure domains, and there are some in 1" in found.troubles[0].what and found.troubles[0].remedy
    node.configure(replication_factor=1)
    assert ask().health == "ok", "no level clique is wanted"


def test_users_who_ask_in_a_loop_do_not_make_the_store_work(node: Node, store: MemoryStore) -> None:
    """Any user of the machine may ask: for the cluster, with a ping or without, and for the levels of a thousand files at once."""
    content = node.make(b"file", b"x" * 1000)
    node.db.run("UPDATE content SET remote = 1 WHERE id = ?", content)
    inode = node.row(content).inode
    transport = TransportFigures(list, dict, dict, lambda node: PingResult(0.001, 0.0))
    figures = ClusterFigures(node.config, node.db, store, transport)

    def ask() -> int:
        before = store.etcd.transactions
        figures.build_cluster()
        figures.build_probed_cluster()
        figures.refresh_files([inode])
        return store.etcd.transactions - before

    assert ask() > 2
    assert sum(ask() for _ in range(20)) <= 4, "within seconds the answers are used again"


def test_figures_are_those_of_the_catalog(node: Node, store: MemoryStore) -> None:
    """N4: what still waits for its copies."""
    content = node.make(b"file", b"x" * 1000)
    with serving(node) as served:
        served.seal()
    peer_copies.mark_under_replicated(node.db, [content])
    store.commit([], [Put(cluster_status.figures_key(1), cluster_status.encode_figures(node.db))])
    first = ClusterFigures(node.config, node.db, store).build_cluster().members[0]
    assert (first.under_replicated_files, first.under_replicated_bytes, first.held_files) == (1, 1000, 0)
    assert first.lag_s > 0


def test_current_work_is_published_and_shown(node: Node, store: MemoryStore) -> None:
    """N4: what waits for a peer and what is on its way, how fast it goes, what comes back here, and what is repaired for the dead."""
    behind, gone, dead = (node.make(name, b"x" * 1000) for name in (b"behind", b"gone", b"dead"))
    with serving(node) as served:
        served.seal()
    peer_copies.mark_under_replicated(node.db, [behind, dead])
    row = node.row(gone)
    assert row.digest is not None
    peer_copies.insert_peer_copy(node.db, PeerCopy(gone, 2, row.generation, row.digest))
    copies.delete_copy(node.db, gone, Tier.RAM)
    node.db.run("UPDATE content SET remote = 1 WHERE id = ?", dead)
    transport = TransportFigures(
        lambda: [PeerLoad("node2", 3, 3000, 1, 1000)],
        lambda: {
            "node2": {"rtt_s": 0.002, "bytes_per_s": 5e8, "failed": 0.0},
            "node3": {"rtt_s": None, "bytes_per_s": None, "failed": 1.0},
        },
        lambda: {"transfers": 2, "reads": 1, "refused": {"node2": {"malformed": 3}, "unknown": {"stranger": 4, "malformed": 1}}},
        lambda node: PingResult(0.001, 0.0),
    )
    figures = ClusterFigures(node.config, node.db, store, transport)
    found = figures.build_clique()
    assert (found.under_replicated_files, found.copies_present, found.copies_wanted) == (1, 2, 4)
    assert (found.rebuild_files, found.rebuild_bytes, found.repair_files) == (1, 1000, 1)
    assert (found.incoming_transfers, found.outgoing_reads) == (2, 1)
    assert [(one.node, one.waiting_files, one.sending_bytes, one.failed_recently) for one in found.links] == [
        ("node2", 3, 1000, False), ("node3", 0, 0, True),
    ]  # fmt: skip
    status = QueryService(ControlContext(node.config, node.db, node.tiers, figures)).GetStatus(pb.StatusRequest(), None)
    assert [(one.where, one.who, one.reason, one.count) for one in status.refused] == [
        ("peers", "node2", "malformed", 3), ("peers", "unknown", "malformed", 1), ("peers", "unknown", "stranger", 4),
    ]  # fmt: skip
    screen = render.build_console()
    with screen.capture() as captured:
        screen.print(render.build_status(status))
    text = captured.get()
    for words in (
        "1 file (1000 B) behind, 2 of 4 copies", "refill      1 file", "repair      1 file", "peers: 4 malformed (node2, unknown)",
        "clique      1 file is 1 copy short", "peers: 4 stranger (unknown)", "477 MiB/s", "2.0 ms", "failed lately", "as last reported",
    ):  # fmt: skip
        assert words in text, text
    assert render.message_to_dict(status)["clique"]["links"][0]["waiting_bytes"] == 3000
    assert render.message_to_dict(status)["clique"]["short"] == [{"copies": 1, "files": 1}] and not figures.find_missing_domains()
    peer_copies.set_live_nodes(node.db, 1, 3, [KnownNode(number, name, name) for number, name in enumerate(NAMES[:2], 1)])
    assert figures.find_missing_domains() == "the level clique needs live nodes in 3 failure domains, and there are some in 2"
    assert peer_copies.count_short(node.db) == {2: 2}, "what is whole as far as it can be is short all the same"
    store.commit([], [Put(cluster_status.figures_key(1), cluster_status.encode_figures(node.db))])
    member = figures.build_cluster().members[0]
    assert (member.rebuild_files, member.repair_bytes, member.copies_wanted) == (1, 1000, 4)


HEALTHY = {"size_bytes": 1000, "revision": 5, "compacted": True, "tls": True, "remote": True}


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({}, None, ""),
        ({"open": True, "remote": False, "tls": False}, None, ""),
        ({"alarms": ["NOSPACE"]}, doctor.BAD, "raised NOSPACE"),
        ({"size_bytes": 1_900_000_000}, doctor.NOTE, "of a quota of 2.0 GiB"),
        ({"size_bytes": 1_900_000_000, "quota_bytes": 8_000_000_000}, None, ""),
        ({"compacted": False, "revision": 2_000_000}, doctor.NOTE, "keeps all 2000000 revisions"),
        ({"compacted": False}, None, ""),
        ({"tls": False}, doctor.NOTE, "without TLS"),
        ({"open": True}, doctor.BAD, "accepts clients without a certificate"),
    ],
)
def test_doctor_judges_how_etcd_is_run(changes: dict[str, Any], verdict: str | None, words: str) -> None:
    cluster = pb.Cluster(name="c", node="n", etcd="e:1", etcd_health=pb.EtcdHealth(**(HEALTHY | changes)))
    found = [one for one in doctor.check_cluster("m", cluster) if one.what.startswith("etcd") and "answers" not in one.what]
    assert [one.verdict for one in found] == ([] if verdict is None else [verdict])
    assert all(words in one.what and one.remedy for one in found)


def examined(
    node: Node, store: MemoryStore, ping: Callable[[membership.Node], PingResult], identity: Identity | None = None
) -> list[Finding]:
    """What doctor says of the cluster."""
    transport = TransportFigures(list, dict, dict, ping)
    return list(doctor.check_cluster("m", ClusterFigures(node.config, node.db, store, transport, identity).build_probed_cluster()))


def test_doctor_is_content_with_a_cluster_that_is_well(node: Node, store: MemoryStore) -> None:
    """F5."""
    found = examined(node, store, lambda _: PingResult(0.002, 0.1))
    assert [one.verdict for one in found] == [doctor.GOOD, doctor.GOOD]
    assert "1 other node answers, the slowest within 2.0 ms" in found[1].what


def test_doctor_names_whom_it_cannot_reach_and_whose_clock_is_off(node: Node, store: MemoryStore) -> None:
    """F5, N5."""

    def silent(_: membership.Node) -> PingResult:
        raise PeerFailed("node2 does not answer: unavailable")

    (reach,) = [one for one in examined(node, store, silent) if one.verdict == doctor.BAD]
    assert "node2 at node2:1: node2 does not answer" in reach.what and "open" in reach.remedy

    def revoked(_: membership.Node) -> PingResult:
        raise PeerFailed("node2 refuses: these keys were revoked")

    assert "issue new ones" in next(one.remedy for one in examined(node, store, revoked) if one.verdict == doctor.BAD)
    (clock,) = [one for one in examined(node, store, lambda _: PingResult(0.001, -90.0)) if one.verdict == doctor.NOTE]
    assert "node2 by 1 min behind" in clock.what


def test_doctor_doubts_domains_ranks_and_numbers(node: Node, store: MemoryStore) -> None:
    """N1."""
    well = lambda _: PingResult(0.001, 0.0)  # noqa: E731
    for number in (1, 2):
        one = membership.Node(number, f"node{number}", f"node{number}:1", 7, "rack", 5000)
        store.commit([], [Put(membership.node_key(number), membership.encode_node(one))])
    words = [one.what for one in examined(node, store, well) if one.verdict == doctor.NOTE]
    assert len(words) == 2 and "all 2 nodes are in the failure domain rack" in words[0] and "share the rank 7" in words[1]
    node.configure(replication_factor=3)
    words = [one.what for one in examined(node, store, well) if one.verdict == doctor.NOTE]
    assert "2 nodes alive, and 3 copies are wanted" in words[0]


def test_doctor_sees_etcd_away_and_certificates_that_end(node: Node, store: MemoryStore) -> None:
    """P1, F6."""
    store.reachable = False
    found = examined(node, store, lambda _: PingResult(0.001, 0.0))
    assert found[0].verdict == doctor.BAD and "etcd" in found[0].what
    cases = (400, doctor.GOOD, "good for 400 days"), (20, doctor.NOTE, "expires in 20 days"), (-1, doctor.BAD, "expired")
    for days, verdict, words in cases:
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days, seconds=-60)
        identity = Identity("node1", "c", b"", b"", b"", expires)
        last = examined(node, store, lambda _: PingResult(0.001, 0.0), identity)[-1]
        assert last.verdict == verdict and words in last.what, last


def test_an_island_says_what_it_knew_last(node: Node, store: MemoryStore) -> None:
    """P1."""
    store.reachable = False
    found = ClusterFigures(node.config, node.db, store).build_cluster()
    assert found.island
    assert [(one.name, one.alive) for one in found.members] == [(name, True) for name in NAMES]
    assert "1 of 3 nodes" in str(render.build_cluster(found).renderables[0])  # type: ignore[attr-defined]
    last = [membership.Node(number, name, f"{name}:1", number + 3, name, 5000) for number, name in enumerate(NAMES, 1)]
    record_last_members(node.db, [membership.encode_node(one) for one in last])
    found = ClusterFigures(node.config, node.db, store).build_cluster()
    assert [(one.name, one.address, one.rank) for one in found.members] == [(one.name, one.address, one.rank) for one in last]


@pytest.mark.parametrize("garbage", [b"", b"[]", b'{"oldest_ns": "x"}', b"\xff"])
def test_broken_records_are_passed_over(node: Node, store: MemoryStore, garbage: bytes) -> None:
    """P11."""
    store.commit([], [Put(cluster_status.figures_key(2), garbage), Put(membership.node_key(7), garbage)])
    found = ClusterFigures(node.config, node.db, store).build_cluster()
    assert [(one.name, one.has_figures) for one in found.members if one.alive] == [("node1", False), ("node2", False)]


def test_a_mount_without_a_cluster_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P11."""
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path / "run"))
    with serving(Node(tmp_path)) as served, pytest.raises(UsageError, match="belongs to no cluster"):
        served.client.get_cluster()


def test_figures_are_published_when_they_or_the_lease_change(node: Node, store: MemoryStore) -> None:
    key = cluster_status.figures_key(1)
    told = cluster_status._publish_if_changed(node.db, store, key, 0, None)
    assert told is None and not store.read([Get(key)]).results[0]
    lease = store.grant(10)
    told = cluster_status._publish_if_changed(node.db, store, key, lease, told)
    revision = store.read([Get(key)]).results[0][0].mod_revision
    told = cluster_status._publish_if_changed(node.db, store, key, lease, told)
    assert store.read([Get(key)]).results[0][0].mod_revision == revision
    cluster_status._publish_if_changed(node.db, store, key, store.grant(10), told)
    assert store.read([Get(key)]).results[0][0].mod_revision > revision


def test_figures_that_go_on_changing_are_published_less_often(node: Node, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """N1: nobody may be looking. What does not change any more is published soon."""
    changes = itertools.chain((b"%d" % number for number in range(25)), itertools.repeat(b"last"))
    monkeypatch.setattr(cluster_status, "encode_figures", lambda _: next(changes))
    lease = store.grant(10_000)

    async def run_inline(act: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return act(*arguments)

    async def publish() -> list[int]:
        asked = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster_status.publish_figures, node.db, store, 1, lambda: lease)
            for _ in range(6):
                before = store.etcd.revision
                await trio.sleep(300)
                asked.append(store.etcd.revision - before)
            nursery.cancel_scope.cancel()
        return asked

    monkeypatch.setattr(trio.to_thread, "run_sync", run_inline)
    asked = trio.run(publish, clock=trio.testing.MockClock(autojump_threshold=0))
    assert max(asked) < 12 and asked[-1] == 0
    assert store.read([Get(cluster_status.figures_key(1))]).results[0][0].value == b"last"
