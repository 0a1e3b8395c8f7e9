"""The fixtures of the multi-node tests; a failed report carries the ends of all nodes' logs."""

from collections.abc import Iterator
from typing import Any

import pytest
from cluster_lab import LABS, lab, make_lab, places, shared_lab


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed:
        for cluster in item.stash.get(LABS, []):
            report.sections.append((f"the nodes of {cluster.root}", cluster.tails()))


__all__ = ["lab", "make_lab", "places", "shared_lab"]
