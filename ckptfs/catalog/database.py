"""The SQLite file of the catalog: creating, checking, migrating and opening it, and transactions.

The file is in WAL mode with synchronous=NORMAL. Each thread has its own connection. A change is one BEGIN IMMEDIATE transaction: it waits
for the write lock and is then applied as a whole or not at all.

Invariants:
- No code of a process opens the file by other means while the process has it open: closing any descriptor of it drops SQLite's locks.
- Nothing reads or writes rows before the file was checked and migrated to this version of the schema.

Crash safety: a committed change survives the death of every process at once, and a power cut from the next `persist()` on. SQLite undoes
an unfinished change at the next opening.
"""

import contextlib
import fcntl
import logging
import os
import sqlite3
import stat
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import xxhash

from ckptfs import disk, limits
from ckptfs.catalog import migrations
from ckptfs.catalog.migrations import SCHEMA_VERSION
from ckptfs.errors import CatalogDamaged, CatalogTooNew, CatalogUnavailable, CkptfsError, NoSpace
from ckptfs.model import ROOT

log = logging.getLogger(__name__)

APPLICATION_ID = 0x434B5446  # "CKTF"
PAGE_BYTES = 1024
"""A create changes about 18 pages of as many tables and indexes, all of which go to the log: small pages halve a commit (31 not 60 us)."""

ENDED_CLEANLY = "ended"
"""The value of meta's 'start' after a clean end: every process has closed the catalog and the tiers in order."""
LOCK_POLL_S = 0.0002
DIGEST_BYTES_MAX = 64 * limits.MIB
"""A catalog of so many bytes is read and compared in less than a tenth of a second."""
STARTING = "starting"
"""The value until the first mover of the next start has taken it. No row means that the daemon runs, or was killed."""
_REMEDY = "no file was changed; move {} away to start with an empty catalog, or restore it from a backup"


class _ThreadConnection:
    """The connection of one thread, which is closed when the thread ends."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self._lock_fd = -1

    def acquire(self, path: Path) -> None:
        """Wait for the lock that each change of the catalog `path` takes, at most as long as SQLite waits.

        SQLite's own wait sleeps for up to 100 ms at a time, while most changes take less than 4 ms.
        """
        if self._lock_fd < 0:
            with contextlib.suppress(OSError):  # Without it, SQLite's own wait remains.
                self._lock_fd = os.open(path.with_name(f"{path.name}-lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        waited_s = 0.0
        while self._lock_fd >= 0 and waited_s < limits.CATALOG_BUSY_S:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(LOCK_POLL_S)
                waited_s += LOCK_POLL_S

    def release(self) -> None:
        if self._lock_fd >= 0:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def __del__(self) -> None:
        self.connection.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)


class ConnectionHooks(Protocol):
    """Calls that a catalog of a cluster makes for each of its connections."""

    @property
    def connection_class(self) -> type[sqlite3.Connection]:
        """Return the class of the connections to create."""

    def on_open(self, connection: sqlite3.Connection) -> None:
        """Act on a new connection."""

    def on_begin(self, connection: sqlite3.Connection) -> None:
        """Act on the begin of a change."""

    def on_commit(self, connection: sqlite3.Connection) -> None:
        """Act on the commit of a change."""


class Database:
    """One catalog file, for any thread; a transaction stays in its thread."""

    def __init__(
        self,
        path: Path,
        *,
        journalled: bool,
        defer_checkpoints: bool = False,
        clustered: bool = False,
        hooks: ConnectionHooks | None = None,
        holds_back: Callable[[bytes, bytes], bool] | None = None,
    ) -> None:
        """Open `path`, which `create` made. Raises CatalogDamaged or CatalogTooNew without changing anything.

        `journalled`: changes are recorded for a PFS. `defer_checkpoints`: leave it to other processes to copy the log into the database,
        which waits for the disk, as long as they do so. `clustered`: sealed contents may need copies on other nodes. `hooks`: mark the
        keys that this node shares with others. `holds_back(directory, name)`: retention rules hold back from the PFS what is made there;
        None if no rule does.
        """
        self.path = path
        self.is_journalled = journalled
        self.is_clustered = clustered
        self.holds_back = holds_back
        self._hooks = hooks
        self._log_pages = limits.WAL_PAGES_MAX * (limits.WAL_MOUNT_FACTOR if defer_checkpoints else 1)
        self._local = threading.local()
        # Worker threads come and go. A strong reference would keep their connections open.
        self._connections: weakref.WeakSet[_ThreadConnection] = weakref.WeakSet()
        self._lock = threading.Lock()
        migrate_file(path)

    @property
    def connection(self) -> sqlite3.Connection:
        """Return this thread's connection."""
        try:
            connection: sqlite3.Connection = self._local.connection
        except AttributeError:
            connection = self._open_connection()
        return connection

    def _open_connection(self) -> sqlite3.Connection:
        try:
            connection = self._local.connection = _connect(self.path, self._log_pages, self._hooks)
        except sqlite3.OperationalError as failure:
            _require_present(self.path)
            raise self._translate(failure) or failure from failure
        held = self._local.held = _ThreadConnection(connection)
        with self._lock:
            self._connections.add(held)
        return connection

    @contextlib.contextmanager
    def transaction(self) -> Iterator["Database"]:
        """Run a block as a transaction that may write. Inside another one of the same thread it joins that."""
        connection = self.connection
        if connection.in_transaction:
            yield self
            return
        held: _ThreadConnection = self._local.held
        held.acquire(self.path)
        try:
            connection.execute("BEGIN IMMEDIATE")
            if self._hooks is not None:
                self._hooks.on_begin(connection)
            yield self
            connection.execute("COMMIT")
        except BaseException as failure:
            # A change that stays open would take in every later one. SQLite ends it by itself after some errors.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if isinstance(failure, sqlite3.OperationalError) and (error := self._translate(failure)) is not None:
                raise error from failure
            raise
        finally:
            held.release()
        if self._hooks is not None:
            self._hooks.on_commit(connection)

    def _translate(self, failure: sqlite3.OperationalError) -> CkptfsError | None:
        """Return the error for a disk failure behind an error of SQLite; None if the disk is not its cause."""
        code = failure.sqlite_errorcode & 0xFF
        directory = self.path.parent
        with contextlib.suppress(OSError):
            if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and os.statvfs(directory).f_bavail == 0):
                return NoSpace(f"the disk of {directory} is full: the catalog cannot be written", remedy="make room on it")
        if code in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}:
            return CatalogUnavailable(
                f"the catalog {self.path} cannot be written: {failure}", remedy="check the disk of the state directory"
            )
        return None

    @contextlib.contextmanager
    def read_transaction(self) -> Iterator["Database"]:
        """Run a block as a read transaction: all its queries see the same state."""
        connection = self.connection
        if connection.in_transaction:
            yield self
            return
        connection.execute("BEGIN")
        try:
            yield self
        finally:
            connection.execute("COMMIT")

    def rows(self, sql: str, *values: Any) -> list[Any]:
        """Return all rows of a query, as tuples."""
        return self.connection.execute(sql, values).fetchall()

    def column(self, sql: str, *values: Any) -> list[Any]:
        """Return the first column of all rows of a query."""
        return [row[0] for row in self.rows(sql, *values)]

    def row(self, sql: str, *values: Any) -> tuple[Any, ...] | None:
        """Return the first row of a query. Returns None if there is none."""
        found: tuple[Any, ...] | None = self.connection.execute(sql, values).fetchone()
        return found

    def value(self, sql: str, *values: Any) -> Any:
        """Return the first column of the first row. Returns None if there is no row."""
        found = self.connection.execute(sql, values).fetchone()
        return None if found is None else found[0]

    def get_meta(self, key: str) -> Any:
        """Return the value of a key in the table `meta`. Returns None if there is none."""
        return self.value("SELECT value FROM meta WHERE key = ?", key)

    def set_meta(self, key: str, value: str | int | None) -> None:
        """Set the value of a key in the table `meta`; None deletes it."""
        if value is None:
            self.run("DELETE FROM meta WHERE key = ?", key)
        else:
            self.run("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", key, value)

    def run(self, sql: str, *values: Any) -> int:
        """Execute a statement that changes rows. Return how many it changed."""
        connection = self.connection
        try:
            return connection.execute(sql, values).rowcount
        except sqlite3.OperationalError as failure:
            error = None if connection.in_transaction else self._translate(failure)
            if error is None:
                raise
            raise error from failure

    def change(self, sql: str, *values: Any) -> int:
        """Execute a statement as `run` does, in a transaction of its own or in the caller's."""
        with self.transaction():
            return self.run(sql, *values)

    def run_each(self, sql: str, values: Iterable[Sequence[Any]]) -> None:
        """Execute a statement that changes rows once for each tuple of values."""
        self.connection.executemany(sql, values)

    def insert(self, sql: str, *values: Any) -> int:
        """Execute an INSERT. Return the id of the new row."""
        identity = self.connection.execute(sql, values).lastrowid
        assert identity is not None
        return identity

    def persist(self) -> None:
        """Make all committed changes survive a power cut: fsync the write-ahead log."""
        with contextlib.suppress(FileNotFoundError), disk.closing(os.open(f"{self.path}-wal", os.O_RDONLY)) as fd:
            os.fdatasync(fd)

    def close(self) -> None:
        """Close the connections of all threads. The last process that closes copies the log into the database."""
        with self._lock:
            connections, self._connections = list(self._connections), weakref.WeakSet()
        for held in connections:
            held.connection.close()
        self._local = threading.local()


def record_clean_end(db: Database) -> None:
    """Record that every process has ended in order, so that the next start need not check everything."""
    db.set_meta("start", ENDED_CLEANLY)
    db.persist()


def record_start(db: Database, *, ended_cleanly: bool) -> None:
    """Record that a daemon starts: if it is killed, the next start finds no clean end."""
    if ended_cleanly:
        db.run("UPDATE meta SET value = ? WHERE key = 'start'", STARTING)
    else:
        db.set_meta("start", None)
    db.persist()


def delete_clean_start(db: Database) -> bool:
    """Return True to the first mover after a clean end, and False to every later one."""
    is_clean = db.run("DELETE FROM meta WHERE key = 'start' AND value = ?", STARTING) > 0
    if is_clean:
        db.persist()
    return is_clean


def _require_present(path: Path) -> None:
    """Raise CatalogUnavailable if the catalog is not at its path any more.

    Connections that are open go on.
    """
    if not path.exists():
        problem = f"the catalog {path} is gone: it or its directory was moved or removed while ckptfs runs"
        raise CatalogUnavailable(problem, remedy="move it back; if it is lost, unmount, and mount under another name")


def create(path: Path) -> None:
    """Create a catalog with only the root directory, whole or not at all, unless it exists."""
    if path.exists():
        return
    temporary = path.with_name(path.name + ".new")
    _delete_with_logs(temporary)
    with contextlib.closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
        # In one transaction: a commit for each statement would sync the disk 260 times, instead of eight.
        connection.executescript("BEGIN;" + resources.files(__package__).joinpath("schema.sql").read_text())
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("INSERT INTO meta VALUES ('instance', ?), ('connection', 0)", (uuid.uuid4().hex,))
        now = time.time_ns()
        connection.execute(
            "INSERT INTO inode (id, mode, uid, gid, nlink, atime_ns, mtime_ns, ctime_ns, birth_ns) VALUES (?,?,?,?,2,?,?,?,?)",
            (ROOT, stat.S_IFDIR | 0o755, os.geteuid(), os.getegid(), now, now, now, now),
        )
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode=WAL")
    os.chmod(temporary, 0o600)
    os.rename(temporary, path)


def check_file(path: Path) -> bool:
    """Check a catalog for damage, unless the daemon before ended cleanly. Return True if it did.

    The time of a check grows with the catalog: 8 s for 5 million files. After a clean end a small catalog is compared with its digest, and
    one that differs is searched in full. Raises CatalogDamaged or CatalogTooNew.
    """
    is_altered = _is_altered(path)
    with _open_known(path) as connection:
        is_clean = connection.execute("SELECT 1 FROM meta WHERE key = 'start' AND value = ?", (ENDED_CLEANLY,)).fetchone() is not None
        if not is_clean or is_altered:
            answer = connection.execute(f"PRAGMA {'integrity_check' if is_clean else 'quick_check'}(1)").fetchone()[0]
            if answer != "ok":
                raise CatalogDamaged(f"the catalog {path} is damaged: {answer}", remedy=_REMEDY.format(path))
        if is_clean and is_altered:
            how = "a disk error, or a backup that was put back; its structure is whole, but some values may be wrong"
            log.error("the catalog %s is not as the last daemon left it: %s", path, how)
    _build_digest_path(path).unlink(missing_ok=True)
    return is_clean and not is_altered


def record_digest(path: Path) -> None:
    """Record the digest of a closed catalog beside it, for the next start; not of a large one."""
    logged = Path(f"{path}-wal")
    with contextlib.suppress(OSError):  # Without it the next start believes the catalog.
        if path.stat().st_size <= DIGEST_BYTES_MAX and not (logged.exists() and logged.stat().st_size):
            _build_digest_path(path).write_text(xxhash.xxh3_128_hexdigest(path.read_bytes()))


def _is_altered(path: Path) -> bool:
    """Return True if a catalog is not what was closed.

    SQLite must not have it open in this process: closing a file drops its locks.
    """
    try:
        recorded = _build_digest_path(path).read_text()
        return path.stat().st_size <= DIGEST_BYTES_MAX and recorded != xxhash.xxh3_128_hexdigest(path.read_bytes())
    except (OSError, ValueError):
        return False


def _build_digest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.digest")


def migrate_file(path: Path) -> None:
    """Migrate a catalog of an older version. Raises CatalogDamaged or CatalogTooNew without a change."""
    with _open_known(path) as connection:
        version = migrations.get_version(connection)
        try:
            migrations.migrate(connection)
        except sqlite3.OperationalError as failure:
            problem = f"the catalog {path} cannot be migrated from version {version} to {SCHEMA_VERSION}: {failure}"
            raise CatalogDamaged(problem, remedy="nothing was changed; remove the cause, and start again") from failure


@contextlib.contextmanager
def load_migrated_copy(path: Path) -> Iterator[Database]:
    """Open the catalog at `path` for reading, or a migrated copy if it has an older version.

    Raises as `migrate_file` does. It shows whether this ckptfs could use a catalog that another one is using.
    """
    copied = path.with_name(f"{path.name}.trial")
    try:
        with _open_known(path) as connection:
            is_current = migrations.get_version(connection) == SCHEMA_VERSION
            if not is_current:
                _delete_with_logs(copied)
                with contextlib.closing(sqlite3.connect(copied)) as target:
                    connection.backup(target)
        with contextlib.closing(Database(path if is_current else copied, journalled=False)) as db:
            yield db
    finally:
        _delete_with_logs(copied)


def _delete_with_logs(path: Path) -> None:
    for one in (path, *(Path(f"{path}-{log}") for log in ("wal", "shm", "journal"))):
        one.unlink(missing_ok=True)


@contextlib.contextmanager
def _open_known(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a catalog whose version this ckptfs knows. Errors of SQLite become CatalogDamaged."""
    remedy = _REMEDY.format(path)
    try:
        connection = sqlite3.connect(f"file:{path}?mode=rw", uri=True, isolation_level=None, timeout=limits.CATALOG_BUSY_S)
    except sqlite3.Error as failure:
        _require_present(path)
        raise CatalogDamaged(f"the catalog {path} cannot be opened: {failure}", remedy=remedy) from failure
    try:
        if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise CatalogDamaged(f"{path} is not a ckptfs catalog", remedy=remedy)
        version = migrations.get_version(connection)
        if version > SCHEMA_VERSION:
            raise CatalogTooNew(
                f"the catalog {path} has version {version}, this ckptfs knows up to {SCHEMA_VERSION}",
                remedy="install the newer ckptfs again; nothing was changed",
            )
        if version < 1:
            raise CatalogDamaged(f"the catalog {path} has version {version}, this ckptfs knows 1 to {SCHEMA_VERSION}", remedy=remedy)
        yield connection
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
