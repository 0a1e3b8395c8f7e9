"""Fixtures of the unit tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.catalog import database
from ckptfs.catalog.database import Database


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    """The catalog of a node that has a PFS."""
    database.create(tmp_path / "catalog.db")
    opened = Database(tmp_path / "catalog.db", journalled=True)
    yield opened
    opened.close()
