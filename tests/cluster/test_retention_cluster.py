"""D5, D7, D8, P5 between nodes: sets of many writers expire as the rule says, for all nodes, and no node that is cut off lets any go."""

import contextlib
import os
import sqlite3
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_lab import ClusterUnderTest, NodeUnderTest, eventually, wait_for

RULES = """
[[retention]]
path = "run/step_*"
keep_local = 1
keep_pfs = 2

[[retention]]
path = "every/step_*"
keep = 10
pfs_every = 2
"""


@pytest.fixture
def ruled(make_lab: Callable[..., ClusterUnderTest], tmp_path: Path) -> ClusterUnderTest:
    (tmp_path / "rules.toml").write_text(RULES)
    made = make_lab(config=str(tmp_path / "rules.toml"))
    made.mend()
    return made


def save(cluster: ClusterUnderTest, step: int, series: str = "run") -> None:
    (cluster[0].path / series / f"step_{step}").mkdir(parents=True)
    for node, name in zip(cluster.nodes, ("model", "optimizer", "scheduler"), strict=True):
        with zipfile.ZipFile(node.path / series / f"step_{step}" / f"{name}.pt", "w") as archive:
            archive.writestr("data", os.urandom(5000))


def list_steps(directory: Path) -> set[str]:
    with contextlib.suppress(FileNotFoundError):
        return set(os.listdir(directory))
    return set()


def list_own_copies(node: NodeUnderTest) -> set[str]:
    """Steps of which this node still has a file that it wrote in RAM or NVMe."""
    query = (
        "SELECT CAST(d.name AS TEXT) FROM copy c JOIN content k ON k.id = c.content AND k.remote = 0 JOIN entry e ON e.child = k.inode"
        " JOIN entry d ON d.child = e.parent WHERE CAST(e.name AS TEXT) LIKE '%.pt' AND c.tier <> 'pfs'"
    )
    with contextlib.closing(sqlite3.connect(f"file:{node.state}/catalog.db?mode=rw", uri=True, timeout=60)) as connection:
        return {row[0].partition("@")[0] for row in connection.execute(query).fetchall()}


def test_sets_of_many_writers_expire(ruled: ClusterUnderTest) -> None:
    """D13, too: each node keeps the file that it wrote."""
    for step in range(1, 6):
        save(ruled, step)
        kept = {f"step_{one}" for one in (step - 1, step) if one}
        for node in ruled.nodes:
            eventually(lambda node=node, kept=kept: list_steps(node.path / "run") == kept, what=f"{node.name} shows {kept}")
        eventually(lambda kept=kept: list_steps(ruled.pfs / "run") == kept, what=f"the PFS has {kept}")
    eventually(lambda: not any("step_4" in list_own_copies(node) for node in ruled.nodes), what="only the newest set is in RAM")
    assert all("step_5" in list_own_copies(node) for node in ruled.nodes)
    wait_for(ruled[1].path / "run", "pfs")
    history = ruled.pfs / ".ckptfs.history" / "run" / "step_*"
    # A set that goes is hidden first, and then emptied.
    eventually(lambda: {name.partition("@")[0] for name in os.listdir(history)} == {"step_4", "step_5"}, what="the PFS has two sets")
    assert len(os.listdir(ruled[2].path / "run" / "step_4")) == 3


def save_one_set(cluster: ClusterUnderTest, step: int) -> None:
    """Save a set, and wait for it: sets have their numbers in the order in which they are complete."""
    save(cluster, step, "every")
    made = cluster[1].path / ".ckptfs" / "history" / "every" / "step_*" / f"step_{step}@{step}"
    eventually(made.exists, what=f"{made} is there")


def test_every_second_set_goes_to_the_pfs_from_all_nodes(ruled: ClusterUnderTest) -> None:
    """Also what a node wrote that died before its set was there."""
    save_one_set(ruled, 1)
    save(ruled, 2, "every")
    files = {"model.pt", "optimizer.pt", "scheduler.pt"}
    chosen = ruled.pfs / "every" / "step_2"
    eventually(lambda: list_steps(chosen) == files, what="the PFS has the second set")
    wait_for(ruled[1].path / "every" / "step_2", "pfs")
    save_one_set(ruled, 3)
    save(ruled, 4, "every")
    wait_for(ruled[2].path / "every" / "step_4" / "scheduler.pt", "clique")
    ruled[2].kill()
    eventually(lambda: list_steps(ruled.pfs / "every" / "step_4") == files, what="the PFS has all of the fourth set", timeout=120)
    assert list_steps(ruled.pfs / "every") == {"step_2", "step_4"}
