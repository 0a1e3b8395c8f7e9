"""Owns the SQLite file: opening, checking, transactions. Everything above it is queries.

WAL with synchronous=NORMAL: a committed change survives the death of every process at once, and a power cut from the last
`persist()` on. One connection per thread. A change is one BEGIN IMMEDIATE transaction: it waits its turn, then happens as a
whole or not at all. The file is never opened by other means in a process that has it open: closing any descriptor of it
would drop SQLite's POSIX locks.
If we die here: SQLite rolls the unfinished change back at the next opening.
"""

import contextlib
import os
import sqlite3
import stat
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from ckptfs import limits
from ckptfs.errors import CatalogDamaged, CatalogTooNew
from ckptfs.model import ROOT

APPLICATION_ID = 0x434B5446  # "CKTF"
SCHEMA_VERSION = 1
PAGE_BYTES = 1024
"""A create touches some 18 pages of as many tables and indices, which all go to the log: small ones halve a commit (31 against 60 us)."""


class _ThreadConnection:
    """A thread's hold on its connection: closed when the thread ends, without waiting for a garbage collection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def __del__(self) -> None:
        self.connection.close()


class ConnectionHooks(Protocol):
    """What is done with each connection of a catalog that is shared with other nodes."""

    @property
    def connection_class(self) -> type[sqlite3.Connection]:
        """The class of the connections."""

    def on_open(self, connection: sqlite3.Connection) -> None:
        """It was opened."""

    def on_begin(self, connection: sqlite3.Connection) -> None:
        """A change begins."""

    def on_commit(self, connection: sqlite3.Connection) -> None:
        """The change was committed."""


class Database:
    """One catalog file. Methods may be called from any thread; a transaction stays in the thread that began it."""

    def __init__(
        self,
        path: Path,
        *,
        journalled: bool,
        defer_checkpoints: bool = False,
        clustered: bool = False,
        hooks: ConnectionHooks | None = None,
    ) -> None:
        """Open `path`, which `create` made. Raises CatalogDamaged or CatalogTooNew, and then has changed nothing.

        `journalled`: whether changes are recorded for a PFS; `patient`: leave it to other processes to bring the log into the
        database, which waits for the disk, as long as they do; `clustered`: what is sealed may want copies on other nodes;
        `shared`: marks what other nodes must learn.
        """
        self.path = path
        self.is_journalled = journalled
        self.is_clustered = clustered
        self._hooks = hooks
        self._log_pages = limits.WAL_PAGES_MAX * (limits.WAL_PATIENCE if defer_checkpoints else 1)
        self._local = threading.local()
        # Worker threads come and go, and their connections with them: nothing here may keep those open.
        self._connections: weakref.WeakSet[_ThreadConnection] = weakref.WeakSet()
        self._lock = threading.Lock()
        check_file(path)

    @property
    def connection(self) -> sqlite3.Connection:
        """This thread's connection."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = _connect(self.path, self._log_pages, self._hooks)
            held = self._local.held = _ThreadConnection(connection)
            with self._lock:
                self._connections.add(held)
        return connection

    @contextlib.contextmanager
    def transaction(self) -> Iterator["Database"]:
        """A transaction that may write. Inside another one of the same thread it simply joins it."""
        connection = self.connection
        if connection.in_transaction:
            yield self
            return
        connection.execute("BEGIN IMMEDIATE")
        if self._hooks is not None:
            self._hooks.on_begin(connection)
        try:
            yield self
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        if self._hooks is not None:
            self._hooks.on_commit(connection)

    @contextlib.contextmanager
    def read_transaction(self) -> Iterator["Database"]:
        """A read transaction: every query inside sees the same state."""
        connection = self.connection
        if connection.in_transaction:
            yield self
            return
        connection.execute("BEGIN")
        try:
            yield self
        finally:
            connection.execute("COMMIT")

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        return self.connection.execute(sql, values).fetchall()

    def row(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        """The first row of a query, or None."""
        found: tuple[Any, ...] | None = self.connection.execute(sql, values).fetchone()
        return found

    def value(self, sql: str, *values: Any) -> Any:
        """The first column of the first row, or None."""
        found = self.connection.execute(sql, values).fetchone()
        return None if found is None else found[0]

    def run(self, sql: str, *values: Any) -> int:
        """Execute a statement that changes rows; how many it changed."""
        return self.connection.execute(sql, values).rowcount

    def run_each(self, sql: str, values: Iterable[Sequence[Any]]) -> None:
        """Execute a statement that changes rows once for each of these."""
        self.connection.executemany(sql, values)

    def insert(self, sql: str, *values: Any) -> int:
        """Execute an INSERT; the new row's id."""
        identity = self.connection.execute(sql, values).lastrowid
        assert identity is not None
        return identity

    def persist(self) -> None:
        """Make everything that is committed survive a power cut: fsync the write-ahead log, then the database."""
        for name in (f"{self.path}-wal",):
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(name, os.O_RDONLY)
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)

    def close(self) -> None:
        """Close every thread's connection. The last process to close checkpoints the log."""
        with self._lock:
            every, self._connections = list(self._connections), weakref.WeakSet()
        for held in every:
            held.connection.close()
        self._local = threading.local()


def create(path: Path) -> None:
    """Make an empty catalog with its root directory at `path`, if there is none. Atomic: a crash leaves none or a whole one."""
    if path.exists():
        return
    temporary = path.with_name(path.name + ".new")
    for leftover in (temporary, Path(f"{temporary}-wal"), Path(f"{temporary}-shm"), Path(f"{temporary}-journal")):
        leftover.unlink(missing_ok=True)
    connection = sqlite3.connect(temporary, isolation_level=None)
    try:
        connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
        connection.executescript(resources.files(__package__).joinpath("schema.sql").read_text())
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("INSERT INTO meta VALUES ('instance', ?), ('connection', 0)", (uuid.uuid4().hex,))
        now = time.time_ns()
        connection.execute(
            "INSERT INTO inode (id, mode, uid, gid, nlink, atime_ns, mtime_ns, ctime_ns, birth_ns) VALUES (?,?,?,?,2,?,?,?,?)",
            (ROOT, stat.S_IFDIR | 0o755, os.geteuid(), os.getegid(), now, now, now, now),
        )
        connection.execute("PRAGMA journal_mode=WAL")
    finally:
        connection.close()
    os.chmod(temporary, 0o600)
    os.rename(temporary, path)


def check_file(path: Path) -> None:
    """Refuse a file that is not a whole catalog of a version we know. Raises CatalogDamaged or CatalogTooNew."""
    remedy = f"nothing was changed; move {path} away to start with an empty catalog, or restore it from a backup"
    try:
        connection = sqlite3.connect(f"file:{path}?mode=rw", uri=True, isolation_level=None, timeout=limits.CATALOG_BUSY_S)
    except sqlite3.Error as failure:
        raise CatalogDamaged(f"the catalog {path} cannot be opened: {failure}", remedy=remedy) from failure
    try:
        if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise CatalogDamaged(f"{path} is not a ckptfs catalog", remedy=remedy)
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise CatalogTooNew(
                f"the catalog {path} has version {version}, this ckptfs knows up to {SCHEMA_VERSION}",
                remedy="install the newer ckptfs again; nothing was changed",
            )
        answer = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if answer != "ok":
            raise CatalogDamaged(f"the catalog {path} is damaged: {answer}", remedy=remedy)
    except sqlite3.DatabaseError as failure:
        raise CatalogDamaged(f"the catalog {path} is damaged: {failure}", remedy=remedy) from failure
    finally:
        connection.close()


def _connect(path: Path, log_pages: int, hooks: ConnectionHooks | None) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{path}?mode=rw",
        uri=True,
        isolation_level=None,
        timeout=limits.CATALOG_BUSY_S,
        cached_statements=512,
        check_same_thread=False,
        factory=sqlite3.Connection if hooks is None else hooks.connection_class,
    )
    checkpoint = f"wal_autocheckpoint={log_pages}"
    for pragma in ("synchronous=NORMAL", "cache_size=-16384", "temp_store=MEMORY", "mmap_size=268435456", checkpoint):
        connection.execute(f"PRAGMA {pragma}")
    if hooks is not None:
        hooks.on_open(connection)
    return connection
