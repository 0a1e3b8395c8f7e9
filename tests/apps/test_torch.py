"""PyTorch through the mount: save and load, saving over a mapped file. T1. Distributed checkpoints are in the guides (test_guides)."""

from typing import Any

import pytest
from daemon_under_test import Area

pytestmark = pytest.mark.apps


def test_what_torch_saves_it_loads(mount: Area, torch: Any) -> None:
    """T1: a synchronous save and load, and the same file on the PFS."""
    state = {"weights": torch.arange(1_000_000, dtype=torch.float32), "step": 7}
    torch.save(state, mount.path / "state.pt")
    read = torch.load(mount.path / "state.pt")
    assert read["step"] == 7 and torch.equal(read["weights"], state["weights"])
    mount.settle()
    assert torch.equal(torch.load(mount.pfs / "state.pt")["weights"], state["weights"])


def test_saving_over_a_mapped_file_leaves_the_mapping_whole(mount: Area, torch: Any) -> None:
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
