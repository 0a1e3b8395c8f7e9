"""PyTorch through the mount: plain save and load, distributed checkpoints of two ranks, saving over a mapped file. T1, T4, T6, T7."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_under_test import Area
from programs import PROGRAM_S, differences

torch = pytest.importorskip("torch", reason="torch is not installed (./bootstrap.sh setup installs it)")
pytestmark = pytest.mark.apps

RANK = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

rank, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


def state(fill):
    return {"shared": torch.full((1000,), fill), f"of{rank}": torch.full((300_000,), fill + rank), "step": int(fill)}


dcp.save(state(1.0), checkpoint_id=f"{directory}/sync")
waiting = [dcp.async_save(state(2.0), checkpoint_id=f"{directory}/async"), ]
for future in waiting:
    future.result()
for name, fill in (("sync", 1.0), ("async", 2.0)):
    read = state(0.0)
    dcp.load(read, checkpoint_id=f"{directory}/{name}")
    assert torch.equal(read["shared"], torch.full((1000,), fill)), read
    assert torch.equal(read[f"of{rank}"], torch.full((300_000,), fill + rank)), read
    assert read["step"] == int(fill)
dist.destroy_process_group()
"""


def test_what_torch_saves_it_loads(mount: Area) -> None:
    """T1: a synchronous save and load, and the same file on the PFS."""
    state = {"weights": torch.arange(1_000_000, dtype=torch.float32), "step": 7}
    torch.save(state, mount.path / "state.pt")
    read = torch.load(mount.path / "state.pt")
    assert read["step"] == 7 and torch.equal(read["weights"], state["weights"])
    mount.settle()
    assert torch.equal(torch.load(mount.pfs / "state.pt")["weights"], state["weights"])


def test_saving_over_a_mapped_file_leaves_the_mapping_whole(mount: Area) -> None:
    """torch.load(mmap=True) maps the file; a rename over it must leave the old bytes to those who have it mapped."""
    path = mount.path / "state.pt"
    torch.save({"weights": torch.zeros(500_000)}, path)
    mapped = torch.load(path, mmap=True)["weights"]
    torch.save({"weights": torch.ones(500_000)}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
    assert torch.count_nonzero(mapped) == 0
    assert torch.count_nonzero(torch.load(path, mmap=True)["weights"]) == 500_000
    mount.settle()
    assert torch.count_nonzero(mapped) == 0


def test_a_distributed_checkpoint_of_two_ranks(mount: Area) -> None:
    """T4, T6, T7: dcp.save and async_save by two processes, read back by both, and whole on the PFS."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port), str(mount.path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in (0, 1)
    ]
    outputs = [rank.communicate(timeout=PROGRAM_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    names = {path.name for path in Path(mount.path, "sync").iterdir()}
    assert ".metadata" in names and any(name.startswith("__1_") for name in names)
    mount.settle()
    assert differences(mount.path, mount.pfs) == []
