"""The library that several tests of programs share."""

from typing import Any

import pytest


@pytest.fixture
def torch() -> Any:
    """Imported by the process that runs these tests, not by each that collects them: it takes seconds."""
    return pytest.importorskip("torch", reason="torch is not installed (./bootstrap.sh setup installs it)")
