"""P1, P5, N1: etcd loses its data, or is set back, while the nodes keep their catalogs: islands until each adopts it."""

import os
import shutil
from pathlib import Path

from cluster_lab import ClusterUnderTest, wait_for
from daemon_under_test import eventually

EXPECTED = "etcd|does not answer|store of the cluster|island|has died|have not adopted"


def written(lab: ClusterUnderTest, name: str) -> dict[str, bytes | int | None]:
    """Files of all nodes below a directory that one of them has renamed; what every node shows."""
    places = [node.path / f"{name}.tmp" for node in lab.nodes]
    places[0].mkdir()
    for number, place in enumerate(places):
        (place / f"{number}").mkdir()
        for size in (0, 10, 300_000, 5_000_000):
            (place / f"{number}" / f"{size}").write_bytes(os.urandom(size))
        os.symlink("target", place / f"link{number}")
    for place in places:
        wait_for(place, "clique")
    places[2].rename(lab[2].path / name)
    trees = [lab.tree(node.path / name) for node in lab.nodes]
    assert trees[0] == trees[1] == trees[2]
    return trees[0]


def adopt(lab: ClusterUnderTest) -> None:
    """What a person does."""
    for node in lab.nodes:
        eventually(lambda node=node: "ckptfs cluster adopt" in node.command("status", "--json", node.path).stdout, what="it says so")  # type: ignore[misc]
        assert node.is_island()
    for node in lab.nodes:
        node.command("cluster", "adopt", node.path)


def is_whole(lab: ClusterUnderTest, name: str, expected: dict[str, bytes | int | None]) -> None:
    """Every node shows exactly that, now and after it has told it all."""
    for node in lab.nodes:
        eventually(lambda node=node: not node.is_island(), what="it has told all")  # type: ignore[misc]
        eventually(lambda node=node: lab.tree(node.path / name) == expected, what="all is there")  # type: ignore[misc]
        eventually(lambda node=node: not (node.path / f"{name}.tmp").exists(), what="it has its last name only")  # type: ignore[misc]
        eventually(lambda node=node: "adopt" not in node.command("status", "--json", node.path).stdout, what="all have adopted")  # type: ignore[misc]


def test_etcd_is_emptied(lab: ClusterUnderTest) -> None:
    lab.expect_warning(EXPECTED)
    expected = written(lab, "emptied")
    lab.stop_etcd()
    (lab[0].path / "emptied" / "meanwhile").write_bytes(b"meanwhile")
    shutil.rmtree(lab.etcd_data)
    lab.start_etcd()
    adopt(lab)
    is_whole(lab, "emptied", {**expected, "meanwhile": b"meanwhile"})
    (lab[1].path / "emptied" / "afterwards").write_bytes(b"afterwards")
    assert (lab[2].path / "emptied" / "afterwards").read_bytes() == b"afterwards"
    wait_for(lab[1].path / "emptied", "clique")


def test_etcd_is_set_back(lab: ClusterUnderTest, tmp_path: Path) -> None:
    lab.expect_warning(EXPECTED)
    (lab[0].path / "old").write_bytes(b"old" * 1000)
    lab.stop_etcd()
    shutil.copytree(lab.etcd_data, tmp_path / "backup")
    lab.start_etcd()
    lab.mend()
    expected = written(lab, "later")
    (lab[1].path / "old").write_bytes(b"newer" * 1000)
    (lab[1].path / "old").rename(lab[1].path / "renamed")
    lab.stop_etcd()
    shutil.rmtree(lab.etcd_data)
    shutil.copytree(tmp_path / "backup", lab.etcd_data)
    lab.start_etcd()
    adopt(lab)
    is_whole(lab, "later", expected)
    for node in lab.nodes:
        eventually(lambda node=node: not (node.path / "old").exists(), what="it has its last name only")  # type: ignore[misc]
        assert (node.path / "renamed").read_bytes() == b"newer" * 1000
