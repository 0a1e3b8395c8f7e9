"""T5, T6, T7, N3, P9: ranks on several nodes save with torch.distributed.checkpoint again and again while nodes are killed and wiped;
torch.save, safetensors and HDF5 go from node to node.

Not in the suite: CKPTFS_CAMPAIGN_RANKS=rounds runs it, CKPTFS_SEED chooses another course, CKPTFS_CAMPAIGN_PFS=1 adds a PFS.
"""

import contextlib
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_lab import ClusterUnderTest, eventually, level, limited, wait_for

ROUNDS = int(os.environ.get("CKPTFS_CAMPAIGN_RANKS", "0"))
SEED = os.environ.get("CKPTFS_SEED", "1")
WITH_PFS = os.environ.get("CKPTFS_CAMPAIGN_PFS", "0") != "0"
PROGRAM = Path(__file__).parents[1] / "support" / "cluster_ranks.py"
STEPS, ROUND_S, ENDED_S = 12, 400.0, 180.0
PORT = 29600
SAFE = ("clique", "pfs")
pytestmark = pytest.mark.skipif(not ROUNDS, reason="CKPTFS_CAMPAIGN_RANKS=rounds runs it")


@pytest.fixture
def cluster(make_lab: Callable[..., ClusterUnderTest]) -> Iterator[ClusterUnderTest]:
    found = make_lab(nodes=3, factor=2, with_pfs=WITH_PFS)
    found.expect_warning(r"\b(WARNING|ERROR)\b")
    try:
        with limited(found, ROUND_S * max(1, ROUNDS)):
            yield found
    finally:
        found.close()
    assert found.complaints() == []


class Ranks:
    """One run of the job: rank 0 runs on the first of `nodes`. A node may be named twice."""

    def __init__(self, cluster: ClusterUnderTest, nodes: list[int], port: int, *, again: bool) -> None:
        self._cluster, self._nodes = cluster, nodes
        self._logs = [cluster.root / f"ranks-{port}-{rank}.log" for rank in range(len(nodes))]
        meet = f"{cluster[nodes[0]].address}:{port}"
        for rank, node in enumerate(nodes):
            command = [
                "env", "GLOO_SOCKET_IFNAME=eth0", sys.executable, str(PROGRAM), str(cluster[node].path / "run"), "--rank", str(rank),
                "--ranks", str(len(nodes)), "--meet", meet, "--steps", str(STEPS), *(["--resume"] if again else []),
            ]  # fmt: skip
            cluster[node].begin(command, self._logs[rank])

    def said(self) -> str:
        return self._logs[0].read_text() if self._logs[0].exists() else ""

    def all_said(self) -> str:
        return "\n".join(
            f"--- rank {rank} on node {node}\n{log.read_text()[-3000:]}"
            for rank, (node, log) in enumerate(zip(self._nodes, self._logs, strict=True))
            if log.exists()
        )

    def steps(self, word: str) -> list[int]:
        """Which steps it said that of."""
        return [int(step) for step in re.findall(rf"^{word} (\d+)", self.said(), re.MULTILINE)]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        eventually(condition, ENDED_S, f"{what}\n{self.all_said()}")
        assert "WRONG" not in self.all_said(), self.all_said()

    def end(self) -> None:
        """Its processes that are left."""
        for node in set(self._nodes):
            self._cluster[node].end_programs(PROGRAM.name)


def newest_safe(cluster: ClusterUnderTest, node: int) -> int:
    """The newest step whose set has its metadata and lies on enough nodes."""
    root, newest = cluster[node].path / "run", 0
    for found in root.iterdir():
        with contextlib.suppress(OSError):
            files = list(found.iterdir())
            if any(path.name == ".metadata" for path in files) and all(level(path) in SAFE for path in files):
                newest = max(newest, int(found.name.removeprefix("step_")))
    return newest


def test_ranks_go_on_elsewhere(cluster: ClusterUnderTest) -> None:
    """T7, N3, P9: another number of ranks each time, on the nodes that are left; what is loaded is right bit for bit, and no set that was
    safe is lost.
    """
    source = random.Random(SEED)
    (cluster[0].path / "run").mkdir()
    nodes, safe = [0, 1], 0
    away: int | None = None
    for number in range(ROUNDS):
        ranks = Ranks(cluster, nodes, PORT + number, again=number > 0)
        ranks.wait(lambda ranks=ranks: ranks.steps("resumed"), "the job begins")
        resumed = ranks.steps("resumed")[0]
        seen = {node.name: sorted(os.listdir(node.path / "run")) for node in cluster.nodes if node.pids()}
        assert resumed >= safe, f"{safe} was safe, the job goes on from {resumed}; there are now {seen}\n{ranks.all_said()}"
        wanted = resumed + source.randint(3, 5)
        ranks.wait(lambda ranks=ranks, wanted=wanted: wanted in ranks.steps("saved"), f"step {wanted} is saved")
        if away is not None:
            cluster[away].start()  # One at a time is away.
        victim = source.choice(sorted(set(nodes)))
        threading.Event().wait(source.random() * 0.5)
        safe = max(safe, newest_safe(cluster, next(node for node in range(3) if node != victim)))
        cluster[victim].wipe(nvme=source.random() < 0.7)
        ranks.end()
        story = f"round {number}: ranks on {nodes}, resumed {resumed}, node {victim} wiped, saved {ranks.steps('saved')[-1]}, safe {safe}"
        print(f"{story}\n{ranks.said()}")
        left = [node for node in range(3) if node != victim]
        nodes = [source.choice(left) for _ in range(source.randint(1, 3))]
        away = victim
        if source.random() < 0.5:
            cluster[victim].start()
            nodes[0], away = victim, None
    cluster.mend()
    ranks = Ranks(cluster, nodes, PORT + ROUNDS, again=True)
    ranks.wait(lambda: "ended" in ranks.said(), "the job ends")
    assert ranks.steps("resumed")[0] >= safe, ranks.all_said()
    wait_for(cluster[0].path / "run", "clique")
    trees = [cluster.tree(node.path / "run") for node in cluster.nodes]
    assert trees[0] == trees[1] == trees[2]


def test_formats_from_node_to_node(cluster: ClusterUnderTest) -> None:
    """P2, P7: what one node has closed, or renamed into place, or pointed `latest` to, another one loads at once."""
    torch, h5py = pytest.importorskip("torch"), pytest.importorskip("h5py")
    numpy, safetensors = pytest.importorskip("numpy"), pytest.importorskip("safetensors.numpy")
    places = [node.path / "formats" for node in cluster.nodes]
    places[0].mkdir()
    source = random.Random(SEED)
    for step in range(1, 40 * ROUNDS + 1):
        writer = source.randrange(3)
        here = places[writer]
        data = numpy.random.default_rng(step).standard_normal(source.choice([1000, 300_000]))
        torch.save({"step": step, "data": torch.from_numpy(data)}, here / "model.tmp")
        if (here / "model.pt").exists():
            (here / "model.pt").rename(here / "model_prev.pt")
        (here / "model.tmp").rename(here / "model.pt")
        safetensors.save_file({"data": data, "step": numpy.array([step])}, here / f"step-{step}.safetensors")
        (here / "latest.tmp").symlink_to(f"step-{step}.safetensors")
        (here / "latest.tmp").rename(here / "latest")
        with h5py.File(here / "log.h5", "a") as file:
            file.create_dataset(f"step{step}", data=data)
            file.attrs["step"] = step
        if step > 3:
            (here / f"step-{step - 3}.safetensors").unlink()
        for number, there in enumerate(places):
            what = f"step {step} of node {writer} on node {number}"
            found = torch.load(there / "model.pt")
            assert found["step"] == step and numpy.array_equal(found["data"].numpy(), data), what
            if step > 1:
                assert torch.load(there / "model_prev.pt")["step"] == step - 1, what
            assert os.readlink(there / "latest") == f"step-{step}.safetensors", what
            read = safetensors.load_file(there / "latest")
            assert int(read["step"][0]) == step and numpy.array_equal(read["data"], data), what
            assert not (there / f"step-{step - 3}.safetensors").exists(), what
            with h5py.File(there / "log.h5", "r") as file:
                assert file.attrs["step"] == step and numpy.array_equal(file[f"step{step}"][:], data), what
                assert len(file) == step, what
