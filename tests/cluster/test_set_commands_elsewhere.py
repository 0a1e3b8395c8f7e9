"""The commands about checkpoint sets on nodes that did not write them: D1, D2, D12, H10."""

import json
import shutil
import subprocess
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster_lab import ClusterUnderTest, NodeUnderTest, eventually, wait_for


def save(directory: Path, fill: int) -> bytes:
    """Save a checkpoint whose format shows its end; its bytes."""
    directory.mkdir(parents=True)
    with zipfile.ZipFile(directory / "model.pt", "w") as archive:
        archive.writestr("data", bytes([fill]) * 300_000)
    return (directory / "model.pt").read_bytes()


def listed(node: NodeUnderTest) -> list[dict[str, Any]]:
    """What `ckptfs list --json` prints on a node."""
    found: list[dict[str, Any]] = json.loads(node.command("list", node.path / "run" / "step_*", "--json").stdout)
    return found


def find_third(node: NodeUnderTest) -> dict[str, Any]:
    """What a node lists of the set step_3; a level of none if there is no such set."""
    return next((one for one in listed(node) if one["number"] and one["set"].startswith("step_3@")), {"level": "none"})


def latest(nodes: Iterable[NodeUnderTest]) -> list[str]:
    """What the first `ckptfs latest` of each node answers."""
    answers = [(node, node.command("latest", node.path / "run" / "step_*").stdout.removesuffix("\n")) for node in nodes]
    return [str(Path(found).relative_to(node.path)) for node, found in answers]


def test_sets_of_other_nodes(lab: ClusterUnderTest) -> None:
    """Each node lists them with their levels, notes them, rolls back and restores."""
    first, second, third = lab.nodes
    saved = {}
    for number in (1, 2):
        saved[number] = save(first.path / "run" / f"step_{number}", number)
        wait_for(first.path / "run", "clique")
        names = [f"step_{one}@{one}" for one in range(number, 0, -1)]
        for node in lab.nodes:
            eventually(lambda node=node, names=names: [one["set"] for one in listed(node)] == names, what=f"{node.name} lists {names}")
    for node in lab.nodes:
        eventually(lambda node=node: {one["level"] for one in listed(node)} <= {"clique", "pfs"}, what=f"{node.name} knows the levels")
        assert {one["state"] for one in listed(node)} == {"complete"}
    second.command("annotate", second.path / "run" / "step_2", "by the second")
    assert json.loads(third.command("show", third.path / "run" / "step_2", "--json").stdout)["note"] == "by the second"
    assert [one["note"] for one in listed(third)] == ["by the second", ""]
    third.command("rollback", third.path / "run" / "step_*")
    assert latest(lab.nodes) == ["run/step_1"] * 3
    second.command("rollback", second.path / "run" / "step_*", "--undo")
    assert latest(lab.nodes) == ["run/step_2"] * 3
    shutil.rmtree(second.path / "run" / "step_2")
    answer = json.loads(third.command("restore", third.path / "run" / "step_2", "--json").stdout)
    assert answer["files"] == 1
    for node in lab.nodes:
        assert (node.path / "run" / "step_2" / "model.pt").read_bytes() == saved[2]
    # D6: an open on another node waits until the set is complete.
    link = second.path / ".ckptfs" / "complete" / "run" / "step_3" / "model.pt"
    with subprocess.Popen(["cat", link], stdout=subprocess.PIPE) as reader:
        saved[3] = save(first.path / "run" / "step_3", 3)
        assert reader.communicate(timeout=60)[0] == saved[3]
    eventually(lambda: find_third(first)["level"] in ("clique", "pfs"), what="the first lists it")
    found = find_third(third)
    assert found["state"] == "complete" and found["level"] in ("clique", "pfs"), "at the first look"
