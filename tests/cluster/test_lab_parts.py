"""G7: the parts of `ckptfs lab`: plans and rates as values, and what it refuses."""

import json
import os
from pathlib import Path

import pytest
from ckptfs_client.errors import ClientError, CommandFailed, UsageError
from ckptfs_client.lab import commands, layout, nodes
from ckptfs_client.lab.laboratory import Laboratory


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
