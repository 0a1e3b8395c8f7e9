"""Sets in the history of a mounted daemon, made by a test instead of the tracker."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from daemon_under_test import DaemonUnderTest

from ckptfs.catalog import history, history_names, namespace
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import SetRecord
from ckptfs.coherence.key_state import DirtyKeyTracker


@contextlib.contextmanager
def open_catalog(daemon: DaemonUnderTest) -> Iterator[Database]:
    """Open the catalog of a daemon beside it, as its mover does, and wake that mover at the end."""
    hooks = DirtyKeyTracker() if "cluster" in daemon.options else None
    path, has_pfs = daemon.state / "catalog.db", daemon.options.get("pfs") is not None
    with contextlib.closing(Database(path, journalled=has_pfs, clustered=hooks is not None, hooks=hooks)) as db:
        yield db
    os.utime(daemon.path)


def make_set(
    daemon: DaemonUnderTest, member: Path, pattern: str, *, numbers: tuple[int, ...] = (0,), name: str = "", more: Sequence[str] = ()
) -> Path:
    """Keep a directory, or a file and `more` beside it, in the history. Returns the directory of the set. `daemon` must have settled."""
    inode, directory, name = member.stat().st_ino, member.parent.stat().st_ino, name or member.name
    files = {path.name: path.stat().st_ino for path in (member, *map(member.with_name, more))} if member.is_file() else {}
    with open_catalog(daemon) as db:
        with db.transaction():
            series = history.insert_series(db, directory, os.fsencode(pattern))
            number, count = history.get_next_number(db, series.directory), len(namespace.list_files_below(db, inode))
            record = SetRecord(number, os.fsencode(name), numbers, count, 0, time.time_ns(), is_group=bool(files))
            made = history.begin_set(db, series.directory, record, None if files else namespace.get(db, inode))
            for file, linked in files.items():
                history.insert_link(db, linked, made, os.fsencode(file))
            if not files:
                _link_below(db, inode, made)
            history.finish_set(db, made)
        return daemon.path / ".ckptfs" / "history" / os.fsdecode(series.path) / f"{name}@{number}"


def _link_below(db: Database, directory: int, target: int) -> None:
    for entry, inode in list(namespace.iterate_entries(db, directory)):
        if inode.is_directory:
            _link_below(db, inode.id, history.insert_directory(db, target, entry.name, inode))
        elif inode.target is not None:
            history.insert_symlink(db, target, entry.name, inode)
        else:
            history.insert_link(db, inode.id, target, entry.name)


def delete_set(daemon: DaemonUnderTest, directory: Path, *, is_whole: bool = True) -> None:
    """Delete a set from the history, or begin to."""
    number = history_names.get_directory_number(directory.stat().st_ino)
    with open_catalog(daemon) as db, db.transaction():
        while not history.delete_set(db, number, 10_000) and is_whole:
            pass
