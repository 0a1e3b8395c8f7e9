"""Fixtures of the tests of single steps."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_node import Node
from loop_disk import SHARING, mounted
from write_back_world import Mount, memory

from ckptfs import limits
from ckptfs.flow.write_back import deferred


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    return Mount(tmp_path)


@pytest.fixture
def area() -> Iterator[Path]:
    """A directory in memory, for many trees or catalogs."""
    root = memory()
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="module", params=SHARING)
def sharing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A filesystem whose files can share blocks, of each kind."""
    with mounted(request.param, tmp_path_factory.mktemp("sharing")) as place:
        yield place


@pytest.fixture
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What write-back has deferred stays so until a drain retries it, however slow this machine is."""
    monkeypatch.setattr(deferred, "RETRY_FIRST_S", 1000.0)
    monkeypatch.setattr(deferred, "RETRY_LAST_S", 1000.0)


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
