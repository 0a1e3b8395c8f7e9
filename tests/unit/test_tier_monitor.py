"""The monitor of a tier reports errors, silence and a wrong filesystem. A tier that recovers wakes the lanes (P1)."""

import errno
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import trio
from ckptfs_daemon.mover import tier_monitor
from ckptfs_daemon.mover.tier_monitor import TierMonitor
from local_node import Node
from trio.testing import MockClock

from ckptfs.catalog import copies, summary
from ckptfs.errors import CatalogUnavailable, NoSpace
from ckptfs.model import Tier
from ckptfs.tiers import health
from ckptfs.tiers.space import Capacity


class Hanging(Exception):
    """What a test throws in place of a call that does not come back."""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture(autouse=True)
def direct_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    async def call(function: Callable[..., Any], *values: Any, **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        try:
            return function(*values)
        except Hanging:
            await trio.sleep_forever()

    monkeypatch.setattr(tier_monitor.trio.to_thread, "run_sync", call)
    yield


def watch(node: Node, scenario: Callable[[list[int]], Awaitable[None]]) -> list[int]:
    """Run the watch over the PFS while `scenario` plays; how often the lanes were told that it is well again."""
    assert node.config.pfs is not None
    recovered: list[int] = []
    watching = TierMonitor(node.db, node.tiers[Tier.PFS], node.config.pfs, lambda: recovered.append(1))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watching.run)
            await scenario(recovered)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return recovered


def told(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(node.db.value("SELECT value FROM report WHERE key = 'tier:pfs'"))
    return found


def test_a_well_tier_is_said_once_with_its_room(node: Node) -> None:
    async def scenario(_: list[int]) -> None:
        await trio.sleep(1)
        before = node.db.value("SELECT total_changes()")
        await trio.sleep(600)
        assert node.db.value("SELECT total_changes()") <= before + 3, "an idle node writes nothing to its catalog"

    watch(node, scenario)
    assert told(node)["state"] == "normal" and told(node)["total"] > 0


def test_errors_are_said_and_the_end_of_them_wakes_the_lanes(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    real = health.probe
    wrong: list[Exception] = [OSError(errno.ESTALE, "Stale file handle")]

    def probe(root: Path) -> Capacity:
        if wrong:
            raise wrong[0]
        return real(root)

    monkeypatch.setattr(health, "probe", probe)

    async def scenario(recovered: list[int]) -> None:
        await trio.sleep(1)
        assert told(node)["state"] == "suspect"
        await trio.sleep(30)
        assert told(node)["state"] == "down" and "ESTALE" in told(node)["error"] and told(node)["remedy"] and not recovered
        wrong.clear()
        await trio.sleep(30)

    assert watch(node, scenario) == [1]
    assert told(node)["state"] == "normal" and told(node)["error"] == ""


def test_silence_is_said_while_it_lasts(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "probe", Mock(side_effect=Hanging))

    async def scenario(_: list[int]) -> None:
        await trio.sleep(health.SUSPECT_S + 3)
        assert told(node)["state"] == "suspect"
        await trio.sleep(health.DOWN_S)
        assert told(node)["state"] == "down" and "does not answer" in told(node)["error"]

    watch(node, scenario)


def test_the_pfs_is_identified_and_another_one_is_not_taken_for_it(node: Node) -> None:
    """An unmounted PFS looks like an empty directory: nobody may think that all files there were deleted."""
    storage = node.tiers[Tier.PFS]

    async def scenario(_: list[int]) -> None:
        await trio.sleep(1)

    watch(node, scenario)
    assert copies.get_tier_uuid(node.db, Tier.PFS) == storage.uuid and told(node)["state"] == "normal"
    shutil.rmtree(storage.root)
    watch(node, scenario)
    assert node.config.pfs is not None
    assert told(node)["state"] == "down" and "not the directory" in told(node)["error"] and str(node.config.pfs) in told(node)["remedy"]
    assert not storage.root.exists(), "nothing may be made there"


def test_a_full_disk_of_the_catalog_does_not_end_the_mover(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is recorded as soon as there is room."""
    set_report, refused = summary.set_report, list[str]()

    def set_when_there_is_room(db: Any, key: str, value: Any) -> None:
        if not refused:
            refused.append(key)
            raise NoSpace("the disk is full")
        set_report(db, key, value)

    monkeypatch.setattr(summary, "set_report", set_when_there_is_room)
    watch(node, lambda recovered: trio.sleep(600))
    assert refused == ["tier:pfs"]
    assert [key for key, _, _ in summary.list_reports(node.db, "tier:")] == ["tier:pfs"]


def test_a_catalog_that_is_gone_says_nothing_of_the_tier(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor goes on, and with it the mover."""
    failures = [CatalogUnavailable("gone")] * 3

    def identify(_: TierMonitor) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(TierMonitor, "_identify_pfs", identify)
    watch(node, lambda recovered: trio.sleep(600))
    assert not failures and summary.list_obstacles(node.db) == []
