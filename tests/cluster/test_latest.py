"""N2, N5, D4 between nodes: all of them find the same newest complete checkpoint, and each says what it has left for the others."""

import contextlib
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster_lab import ClusterUnderTest, NodeUnderTest, eventually, wait_for

SHARD = 300_000
SIZE = 24 << 20


def save(directory: Path, *names: str) -> None:
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).write_bytes(os.urandom(SHARD))


def newest(node: NodeUnderTest, *more: str) -> str:
    """What the command says on a node."""
    return Path(node.command("latest", node.path / "run" / "step_*", *more, check=False).stdout.strip()).name


def linked(node: NodeUnderTest) -> str:
    """Where the name leads that programs open; empty before there is one."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.basename(os.readlink(node.path / ".ckptfs" / "latest" / "run" / "step_*"))
    return ""


def test_all_nodes_find_the_same(lab: ClusterUnderTest) -> None:
    """D4, N2, N6, N7: ranks on different nodes write one checkpoint; while one of them writes nobody takes it."""
    first, second, third = lab.nodes
    save(first.path / "run" / "step_1", "rank_0.pt")
    (second.path / "run" / "step_1" / "rank_1.pt").write_bytes(os.urandom(SHARD))
    # Nothing else tells that the first set has no more ranks, so it would count after 30 s only.
    os.setxattr(first.path / "run" / "step_1", "user.ckptfs.commit", b"1")
    wait_for(first.path / "run", "clique")
    for node in lab.nodes:
        eventually(lambda node=node: linked(node) == "step_1", what=f"{node.name} finds the first")
        assert newest(node) == "step_1"
    save(first.path / "run" / "step_2", "rank_0.pt")
    with open(second.path / "run" / "step_2" / "rank_1.pt", "wb") as file:
        file.write(os.urandom(SHARD))
        assert [linked(node) for node in lab.nodes] == ["step_1"] * 3
        assert newest(first) == "step_1"
    wait_for(third.path / "run", "clique")
    for node in lab.nodes:
        eventually(lambda node=node: newest(node, "--level", "clique") == "step_2", what=f"{node.name} finds the second")
        assert linked(node) == "step_2"
        data = (node.path / ".ckptfs" / "latest" / "run" / "step_*" / "rank_1.pt").read_bytes()
        assert data == (second.path / "run" / "step_2" / "rank_1.pt").read_bytes()


def test_a_file_that_only_other_nodes_have(lab: ClusterUnderTest) -> None:
    """D6, N2: a writer was killed on one node; another node finds that out from a few blocks, and fetches nothing."""
    run = lab[0].path / "killed"
    run.mkdir()
    with zipfile.ZipFile(run / "step_1.pt", "w") as archive:
        archive.writestr("data", os.urandom(SIZE))
    data = (run / "step_1.pt").read_bytes()
    (run / "step_2.pt").write_bytes(data[:-100])
    for node in lab.nodes:
        wait_for(node.path / "killed", "clique")
        wait_for(node.path / "killed", "pfs")
    for node in lab.nodes:  # Two nodes hold it, and each knows of the other copies.
        eventually(
            lambda node=node: len(_list_places(node, node.path / "killed" / "step_2.pt")) == 3, what=f"{node.name} knows the holders"
        )
    holders = {node.name: _list_places(node, node.path / "killed" / "step_2.pt") for node in lab.nodes}
    for node in lab.nodes:
        result = eventually(
            lambda node=node: _find_newest(node, node.path / "killed" / "step_*.pt", "step_1.pt"), what=f"{node.name} finds the first"
        )
        assert "step_2.pt was passed over: it ends before its zip directory" in result
        assert os.path.basename(os.readlink(node.path / ".ckptfs" / "latest" / "killed" / "step_*.pt")) == "step_1.pt"
    assert {node.name: _list_places(node, node.path / "killed" / "step_2.pt") for node in lab.nodes} == holders, "nobody fetched it"


def _find_newest(node: NodeUnderTest, pattern: Path, name: str) -> str:
    """What the command says on standard error when it names `name`; empty otherwise."""
    result = node.command("latest", pattern, check=False)
    return str(result.stderr) if Path(result.stdout.strip()).name == name else ""


def _list_places(node: NodeUnderTest, path: Path) -> list[str]:
    """The tiers of a node that hold a file."""
    (row,) = json.loads(node.command("ls", path, "--json").stdout)
    return sorted(copy["tier"] for copy in row["copies"])


def test_what_the_clique_has_left(lab: ClusterUnderTest) -> None:
    """N5: with two copies a node needs twice the room, and its peers must have it."""
    node = lab[0]
    found = eventually(lambda: _df(node), what="the nodes have told how much they hold")
    assert found["replication_factor"] == 2 and found["node"] == node.name
    ram = found["tiers"][0]
    assert (ram["name"], ram["total_bytes"]) == ("ram", 512 << 20) and ram["share_bytes"] == 256 << 20
    assert "(1.0 MiB x 2 generations x 2 copies)" in node.command("df", node.path, "--checkpoint", "1M").stdout
    result = node.command("df", node.path, "--checkpoint", "90T", check=False)
    assert result.returncode == 1 and "raise peer_share=" in result.stdout


def _df(node: NodeUnderTest) -> dict[str, object] | None:
    found: dict[str, object] = json.loads(node.command("df", node.path, "--json").stdout)
    clique = found["clique"]
    assert isinstance(clique, list)
    return found if clique and all(member["has_figures"] for member in clique) else None


# --- the commands about sets, on nodes that did not write them ---------------------------------------------------------


def save_zip(directory: Path, fill: int) -> bytes:
    """Save a checkpoint whose format shows its end; its bytes."""
    directory.mkdir(parents=True)
    with zipfile.ZipFile(directory / "model.pt", "w") as archive:
        archive.writestr("data", bytes([fill]) * 300_000)
    return (directory / "model.pt").read_bytes()


def listed(node: NodeUnderTest) -> list[dict[str, Any]]:
    """What `ckptfs list --json` prints on a node."""
    found: list[dict[str, Any]] = json.loads(node.command("list", node.path / "sets" / "step_*", "--json").stdout)
    return found


def find_third(node: NodeUnderTest) -> dict[str, Any]:
    """What a node lists of the set step_3; a level of none if there is no such set."""
    return next((one for one in listed(node) if one["number"] and one["set"].startswith("step_3@")), {"level": "none"})


def latest(nodes: Iterable[NodeUnderTest]) -> list[str]:
    """What the first `ckptfs latest` of each node answers."""
    answers = [(node, node.command("latest", node.path / "sets" / "step_*").stdout.removesuffix("\n")) for node in nodes]
    return [str(Path(found).relative_to(node.path)) for node, found in answers]


def test_sets_of_other_nodes(lab: ClusterUnderTest) -> None:
    """D1, D2, D12, H10: each node lists them with their levels, notes them, rolls back and restores."""
    first, second, third = lab.nodes
    saved = {}
    for number in (1, 2):
        saved[number] = save_zip(first.path / "sets" / f"step_{number}", number)
        wait_for(first.path / "sets", "clique")
        names = [f"step_{one}@{one}" for one in range(number, 0, -1)]
        for node in lab.nodes:
            eventually(lambda node=node, names=names: [one["set"] for one in listed(node)] == names, what=f"{node.name} lists {names}")
    for node in lab.nodes:
        eventually(lambda node=node: {one["level"] for one in listed(node)} <= {"clique", "pfs"}, what=f"{node.name} knows the levels")
        assert {one["state"] for one in listed(node)} == {"complete"}
    second.command("annotate", second.path / "sets" / "step_2", "by the second")
    assert json.loads(third.command("show", third.path / "sets" / "step_2", "--json").stdout)["note"] == "by the second"
    assert [one["note"] for one in listed(third)] == ["by the second", ""]
    third.command("rollback", third.path / "sets" / "step_*")
    assert latest(lab.nodes) == ["sets/step_1"] * 3
    second.command("rollback", second.path / "sets" / "step_*", "--undo")
    assert latest(lab.nodes) == ["sets/step_2"] * 3
    shutil.rmtree(second.path / "sets" / "step_2")
    answer = json.loads(third.command("restore", third.path / "sets" / "step_2", "--json").stdout)
    assert answer["files"] == 1
    for node in lab.nodes:
        assert (node.path / "sets" / "step_2" / "model.pt").read_bytes() == saved[2]
    # D6: an open on another node waits until the set is complete.
    link = second.path / ".ckptfs" / "complete" / "sets" / "step_3" / "model.pt"
    with subprocess.Popen(["cat", link], stdout=subprocess.PIPE) as reader:
        saved[3] = save_zip(first.path / "sets" / "step_3", 3)
        assert reader.communicate(timeout=60)[0] == saved[3]
    eventually(lambda: find_third(first)["level"] in ("clique", "pfs"), what="the first lists it")
    found = find_third(third)
    assert found["state"] == "complete" and found["level"] in ("clique", "pfs"), "at the first look"
