"""G7: the parts of `ckptfs lab`: plans as values, and namespaces, wires and processes without any daemon."""

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptfs_client.errors import ClientError, CommandFailed, UsageError
from ckptfs_client.lab import commands, layout, network, nodes
from ckptfs_client.lab.laboratory import Laboratory
from ckptfs_client.lab.layout import Plan
from ckptfs_client.lab.nodes import kill_processes, list_processes, spawn
from daemon_under_test import eventually

PORT = 7000
SERVER = f"""
import socket
server = socket.create_server(("0.0.0.0", {PORT}))
while True:
    server.accept()[0].sendall(b"here")
"""


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = layout.build_plan(tmp_path, 3, 2, tmp_path / "pfs", {"ram": "64M"})
    layout.save(written)
    assert layout.load(tmp_path) == written
    without = layout.build_plan(tmp_path, 1, 1, None, {})
    layout.save(without)
    assert layout.load(tmp_path) == without
    assert "pfs" not in without.node("node1").options()


@pytest.mark.parametrize(("nodes", "factor"), [(0, 1), (65, 1), (3, 4), (3, 0)])
def test_what_cannot_be_is_refused(tmp_path: Path, nodes: int, factor: int) -> None:
    """P11."""
    with pytest.raises(UsageError):
        layout.build_plan(tmp_path, nodes, factor, None, {})


@pytest.mark.parametrize("text", ["", "{}", "[]", json.dumps({"nodes": ["../../etc"]})])
def test_a_plan_that_is_damaged_is_said_so(tmp_path: Path, text: str) -> None:
    """P11."""
    (tmp_path / layout.PLAN_NAME).write_text(text)
    with pytest.raises(CommandFailed, match="lab stop"):
        layout.load(tmp_path)


def test_only_the_next_node_can_be_added(tmp_path: Path) -> None:
    three = layout.build_plan(tmp_path, 3, 2, None, {})
    assert three.add_node("node4").nodes == ("node1", "node2", "node3", "node4")
    for name in ("node9", "node0", "other", "../x"):
        with pytest.raises(UsageError):
            three.add_node(name)
        with pytest.raises(UsageError):
            three.node(name)


@pytest.mark.parametrize(("rate", "bits"), [("100mbit", 100_000_000), ("1gbit", 10**9), ("64k", 64_000), ("1.5 Mbit/s", 1_500_000)])
def test_rates(rate: str, bits: int) -> None:
    assert commands._parse_bits_per_s(rate) == bits


@pytest.mark.parametrize("rate", ["", "fast", "100", "-1mbit", "1kbit", "100mbyte"])
def test_a_rate_that_is_none_is_refused(rate: str) -> None:
    """P11."""
    with pytest.raises(UsageError, match="accepted"):
        commands._parse_bits_per_s(rate)


def test_a_directory_that_is_no_lab_is_left_alone(tmp_path: Path) -> None:
    """P11."""
    if os.geteuid() != 0:
        pytest.skip("NO LAB HERE: a lab needs root")
    (tmp_path / "precious").touch()
    with pytest.raises(ClientError, match="not a lab"):
        Laboratory(tmp_path).start(1, 1)
    with pytest.raises(ClientError, match="is not a lab"):
        Laboratory(tmp_path).stop()
    with pytest.raises(ClientError, match="there is no lab"):
        Laboratory(tmp_path).get_status()
    assert os.listdir(tmp_path) == ["precious"]


@pytest.fixture(scope="module")
def wires(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plan]:
    """Two nodes that are only namespaces, a server on node1."""
    if os.geteuid() != 0:
        pytest.skip("NO LAB HERE: a lab needs root")
    found = layout.build_plan(tmp_path_factory.mktemp("lab"), 2, 1, None, {})
    try:
        network.make_switch(found)
        for node in found.all_nodes():
            network.connect(node)
        spawn(network.get_namespace_path(found, "node1"), [sys.executable, "-c", SERVER], found.directory / "log")
        yield found
    finally:
        for place in (found.directory / "net").iterdir():
            kill_processes(place)
            network.abort_mount(place)


def reached(wires: Plan) -> bool:
    def ask() -> bool:
        try:
            with socket.create_connection((wires.node("node1").address, PORT), timeout=0.5) as connection:
                return connection.recv(4) == b"here"
        except OSError:
            return False

    return network.run_in_namespace(network.get_namespace_path(wires, "node2"), ask)


def test_nodes_reach_one_another_until_one_is_cut(wires: Plan) -> None:
    before = set(os.listdir("/sys/class/net"))
    eventually(lambda: reached(wires), what="node2 reaches node1")
    network.set_link(wires.node("node1"), up=False)
    assert not reached(wires)
    assert network.list_link_states(wires) == {"node1": (False, False), "node2": (True, False)}
    network.set_link(wires.node("node1"), up=True)
    eventually(lambda: reached(wires), what="node2 reaches node1 again")
    assert set(os.listdir("/sys/class/net")) == before, "the machine's own interfaces are not touched"


def test_a_link_can_be_slowed_down_and_let_free(wires: Plan) -> None:
    node = wires.node("node2")
    for rate in (10_000_000, 20_000_000):
        network.set_rate(node, rate)
        assert network.list_link_states(wires)["node2"] == (True, True)
    for _ in range(2):
        network.set_rate(node, None)
        assert network.list_link_states(wires)["node2"] == (True, False)
    eventually(lambda: reached(wires), what="node2 reaches node1")


def test_connecting_again_changes_nothing(wires: Plan) -> None:
    network.make_switch(wires)
    network.connect(wires.node("node1"))
    eventually(lambda: reached(wires), what="node2 reaches node1")


def test_only_what_runs_on_a_node_ends_with_it(wires: Plan) -> None:
    eventually(lambda: reached(wires), what="node2 reaches node1")
    there, other = network.get_namespace_path(wires, "node1"), network.get_namespace_path(wires, "node2")
    pid = spawn(other, ["sleep", "1000"], wires.directory / "log")
    assert list_processes(other) == [pid]
    assert kill_processes(other) == 1
    assert list_processes(other) == []
    assert len(list_processes(there)) == 1
    assert os.getpid() not in list_processes(there)


def test_an_etcd_whose_command_line_cannot_be_read_yet_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel shows it a moment after exec."""
    answers = iter([False, False, True])
    monkeypatch.setattr(nodes, "find_etcd", lambda: "etcd")
    monkeypatch.setattr(nodes, "spawn", lambda *_: 7)
    monkeypatch.setattr(nodes, "list_processes", lambda _: [7])
    monkeypatch.setattr(nodes, "find_etcd_members", lambda _: {})
    monkeypatch.setattr(nodes, "_is_member_healthy", lambda *_: next(answers))
    plan = layout.build_plan(tmp_path, 1, 1, None, {})
    nodes.start_etcd(plan)
    assert list(answers) == []
    monkeypatch.setattr(nodes, "_is_member_healthy", lambda *_: False)
    monkeypatch.setattr(nodes, "list_processes", lambda _: [])
    with pytest.raises(CommandFailed, match="etcd does not answer"):
        nodes.start_etcd(plan)
