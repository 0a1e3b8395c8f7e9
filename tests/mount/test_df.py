"""N5 on a real mount: `ckptfs df`."""

import json

import pytest
from daemon_under_test import Area

pytestmark = pytest.mark.fuse
ONLY_DATA_PATH = "buffered"  # Each machine has it, and how bytes travel plays no part.


def test_before_a_run(mount: Area) -> None:
    """What there is, and whether a checkpoint fits; exit code 1 when it does not."""
    found = json.loads(mount.command("df", mount.path, "--json").stdout)
    tiers = {tier["name"]: tier for tier in found["tiers"]}
    assert set(tiers) == {"ram", "nvme", "pfs"} and found["replication_factor"] == 1 and found["clique"] == []
    assert tiers["ram"]["total_bytes"] == 3 << 30 and 0 < tiers["nvme"]["free_bytes"] <= tiers["nvme"]["total_bytes"]
    words = mount.command("df", mount.path, "--checkpoint", "1M", "--ranks-per-node", "8").stdout
    assert "3.0 GiB" in words and "fits in RAM: 16.0 MiB (8.0 MiB x 2 generations) of " in words
    result = mount.command("df", mount.path, "--checkpoint", "500T", "--keep", "3", check=False)
    assert result.returncode == 1 and "does not fit: 2.0 PiB (500 TiB x 4 generations) are needed on this node" in result.stdout
    answer = mount.command("df", mount.path, "--checkpoint", "500T", "--json", check=False)
    assert answer.returncode == 1 and json.loads(answer.stdout)["checkpoint"]["fits"] is False
