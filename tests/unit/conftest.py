"""Fixtures of the unit tests."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from control_served import Served, serving
from local_node import Node
from opener import Opener

from ckptfs.catalog import database
from ckptfs.catalog.database import Database

Run = Callable[..., tuple[int, str, str]]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    trio.run(functools.partial(pyfuncitem.obj, **fixtures))
    return True


@pytest.fixture
def opener(tmp_path: Path) -> Opener:
    """What opens a file as a mount process does."""
    return Opener(tmp_path)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    """The catalog of a node that has a PFS."""
    database.create(tmp_path / "catalog.db")
    opened = Database(tmp_path / "catalog.db", journalled=True)
    yield opened
    opened.close()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """The control servers of a node without FUSE, and a client."""
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path / "run"))
    with serving(Node(tmp_path)) as served:
        yield served


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command in this process: (exit code, stdout, stderr)."""

    from ckptfs_client import __main__ as entry

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ckptfs", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            entry.main()
            raise SystemExit(0)
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call
