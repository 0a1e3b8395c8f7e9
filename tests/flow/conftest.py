"""Fixtures of the tests of single steps."""

from pathlib import Path

import pytest
from local_node import Node
from write_back_world import Mount

from ckptfs import limits


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    return Mount(tmp_path)


@pytest.fixture
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconcile, reclaim and salvage wait for nothing, except salvage for nodes that may have a newer copy."""
    for name in ("RECONCILE_AGE_S", "SURPLUS_KEEP_S", "READ_GRACE_S"):
        monkeypatch.setattr(limits, name, -1.0)
    monkeypatch.setattr(limits, "SALVAGE_POLL_S", 0.0)


@pytest.fixture
def no_rivals(no_delays: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Salvage does not wait for nodes that may have a newer copy either."""
    monkeypatch.setattr(limits, "SALVAGE_RIVALS_S", -1.0)
