"""N2, N5, D4 between nodes: all of them find the same newest complete checkpoint, and each says what it has left for the others."""

import contextlib
import json
import os
import zipfile
from pathlib import Path

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
