"""Catalogs of earlier releases are migrated to the present schema, whole or not at all, and keep what they say."""

import multiprocessing
import os
import re
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptfs.catalog import copies, database, migrations, mover_requests, pfs_batch, pfs_hold
from ckptfs.catalog.database import Database
from ckptfs.catalog.pfs_batch import PfsAction
from ckptfs.catalog.pfs_state import Fingerprint, PfsLocation
from ckptfs.errors import CatalogDamaged, CatalogTooNew
from ckptfs.model import PublishedRow, Tier

DATA = Path(__file__).resolve().parents[1] / "data"
DUMPS = {
    "0.2.0": DATA / "catalog-v1.sql", "0.1.0": DATA / "catalog-v1-of-0.1.0.sql",
    "version 2": DATA / "catalog-v2.sql", "version 3": DATA / "catalog-v3.sql",
}  # fmt: skip
DIGEST, BLOCKS = bytes(range(16)), bytes(range(32))
Schema = dict[str, str]


def load(release: str, directory: Path) -> Path:
    path = directory / "catalog.db"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript(DUMPS[release].read_text())
    connection.execute("PRAGMA journal_mode=WAL")
    connection.close()
    return path


def read_schema(path: Path) -> Schema:
    """Everything in sqlite_master by name, without comments, quotes and white space."""
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    connection.close()
    return {name: re.sub(r"--[^\n]*|[\s\"]", "", sql) for name, sql in rows}


def read_rows(path: Path) -> dict[str, list[tuple[object, ...]]]:
    connection = sqlite3.connect(path)
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {table: sorted(connection.execute(f"SELECT * FROM {table}").fetchall(), key=repr) for table in tables}
    connection.close()
    return found


def get_version(path: Path) -> int:
    connection = sqlite3.connect(path)
    version = migrations.get_version(connection)
    connection.close()
    return version


def test_a_new_catalog_is_made_in_one_transaction(tmp_path: Path) -> None:
    """A commit for each table and index would sync the disk hundreds of times. SQLite counts commits at byte 24."""
    database.create(tmp_path / "catalog.db")
    assert int.from_bytes((tmp_path / "catalog.db").read_bytes()[24:28], "big") <= 3


@pytest.mark.parametrize("release", DUMPS)
def test_a_migrated_catalog_has_the_schema_of_a_new_one(release: str, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    database.create(tmp_path / "new" / "catalog.db")
    path = load(release, tmp_path)
    database.migrate_file(path)
    assert read_schema(path) == read_schema(tmp_path / "new" / "catalog.db")
    assert get_version(path) == get_version(tmp_path / "new" / "catalog.db") == database.SCHEMA_VERSION


@pytest.mark.parametrize("release", DUMPS)
def test_rows_keep_their_meaning(release: str, tmp_path: Path) -> None:
    path = load(release, tmp_path)
    before = read_rows(path)
    database.migrate_file(path)
    after = read_rows(path)
    if "pfs_hold" in before:
        after["xattr"].remove((5, b"ckptfs.held", b"1"))
    renamed = {
        "want": "mover_request", "answer": "reply_cache", "published": "pfs_file", "visiting": "scan", "touched": "scan_dirty_name",
        "touched_key": "dirty_key", "seen_key": "cached_key", "pfs_times": "pfs_stale_times",
    }  # fmt: skip
    for table, rows in before.items():
        if table not in ("want", "sqlite_sequence", "lost_key", "resend_key", "pfs_hold"):
            now = after[renamed.get(table, table)]
            width = min(len(rows[0]), len(now[0])) if rows else 0  # Columns were added at the end, and dropped there.
            assert [row[:width] for row in now] == [row[:width] for row in rows], table
    assert {(renamed.get(str(name), name), last) for name, last in before["sqlite_sequence"]} == set(after["sqlite_sequence"])
    kinds = {"visit": "scan", "settle": "wait_level", "secure": "replicate_now", "copy": "replicate_later", "left": "salvage"}
    requests = before.get("want") or before["mover_request"]
    wanted = [(row[0], kinds.get(str(row[1]), row[1]), *row[2:]) for row in requests]
    assert after["mover_request"] == wanted and {row[1] for row in wanted} == {*kinds.values(), mover_requests.FETCH}
    assert {row[1] for row in wanted} <= {*mover_requests.LANE_BY_KIND, "wait_level"}  # The last one expires: no lane answers it any more.


def test_what_was_held_back_from_the_pfs_stays_held(tmp_path: Path) -> None:
    """D7: version 3 had a table of it; now all nodes know it as an attribute."""
    db = Database(load("version 3", tmp_path), journalled=True)
    assert pfs_hold.is_held(db, 5) and not pfs_hold.is_held(db, 6)
    db.close()


@pytest.mark.parametrize("release", DUMPS)
def test_a_trial_migrates_a_copy(release: str, tmp_path: Path) -> None:
    """X2: another version tries a catalog that is in use."""
    path = load(release, tmp_path)
    before = read_schema(path), read_rows(path)
    with database.load_migrated_copy(path) as db:
        assert db.value("PRAGMA user_version") == database.SCHEMA_VERSION and db.value("SELECT count(*) FROM mover_request") > 0
    assert (read_schema(path), read_rows(path)) == before
    assert not list(tmp_path.glob("*.trial*"))


def test_columns_have_their_values_under_the_new_names(tmp_path: Path) -> None:
    db = Database(load("0.2.0", tmp_path), journalled=True)
    columns = "remote, under_replicated, announce_state, superseded_mtime_ns"
    assert db.row(f"SELECT {columns} FROM content WHERE id = 9") == (1, 0, 1, 70)
    assert db.row("SELECT under_replicated, announce_state FROM content WHERE id = 6") == (1, 2)
    assert db.row("SELECT imported, scanned_ns FROM inode WHERE id = 2") == (0, -1)
    assert '"content": 8' in db.value("SELECT salvaged FROM inode WHERE id = 6")
    assert db.rows("SELECT name, is_self FROM peer ORDER BY number") == [("one", 0), ("two", 1)]
    assert copies.list_stashed(db, Tier.NVME) == [11] and copies.list_stashed_contents(db) == {9}
    with db.transaction():  # The triggers have followed the tables.
        db.run("INSERT INTO pfs_entry (parent, name, inode) VALUES (2, 'late', 5)")
    assert db.rows("SELECT name FROM scan_dirty_name WHERE directory = 2 ORDER BY name") == [("late",), (b"n",)]
    db.close()


@pytest.mark.parametrize("release", ["0.2.0", "0.1.0", "version 2"])
def test_a_pending_batch_is_read_across_the_upgrade(release: str, tmp_path: Path) -> None:
    db = Database(load(release, tmp_path), journalled=True)
    found = pfs_batch.find_batch(db)
    assert found is not None
    ready, batch = found
    moved = PfsLocation(1, "\u00e9".encode("latin-1"), (b"a",))
    assert ready and (batch.last_seq, batch.after_seq, batch.kept_seqs, batch.merged_directories) == (7, 1, [4], [2])
    assert batch.actions == [
        PfsAction("put", 3, 5, PfsLocation(1, b"f", ()), Fingerprint(0, 3, 40), temporary=b"ckptfs-tmp"),
        PfsAction("move", 4, 2, PfsLocation(1, b"d", ()), Fingerprint(11), moved, Fingerprint(12, 5, 6)),
    ]
    shows = {(1, b"f"): 5, (1, b"d"): None, moved.pfs_name: 2, (1, b"old"): None}
    assert {one.location.pfs_name: one.inode for one in batch.expected_entries} == shows
    assert batch.pending_entries == {(1, b"f"): None, (1, b"p\xff"): 5, (1, b"q"): None} and batch.requeued == [(5, 6)]
    assert batch.published_rows == [
        PublishedRow(5, 2, True, 3, 40, 77, DIGEST, BLOCKS, key=3),
        PublishedRow(6, 1, False, 2, 41, 78, None, None),
    ]
    with db.transaction():
        pfs_batch.set_batch(db, batch, ready=False)
    assert pfs_batch.find_batch(db) == (False, batch), "by field names"
    db.close()


@pytest.mark.parametrize("version", [3, 9])
def test_a_pending_batch_of_no_release_is_refused(version: int, tmp_path: Path) -> None:
    db = Database(load("version 3", tmp_path), journalled=True)
    db.run("UPDATE pfs_batch SET body = json_set(body, '$.version', ?)", version)
    with pytest.raises(CatalogTooNew, match=f"version {version}, this ckptfs knows 5 and that of 0.2.0"):
        pfs_batch.find_batch(db)
    db.close()


class Killer(sqlite3.Connection):
    """Kills its process at one statement of the migration."""

    countdown = 0

    def execute(self, sql: str, *values: object) -> sqlite3.Cursor:  # type: ignore[override]
        if Killer.countdown == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        Killer.countdown -= 1
        return super().execute(sql, *values)  # type: ignore[arg-type]


def migrate_until(path: Path, statements: int) -> None:
    connection = sqlite3.connect(path, isolation_level=None, factory=Killer)
    Killer.countdown = statements
    migrations.migrate(connection)


@pytest.mark.parametrize("statements", [3, 4, 20, 45, 60, 80, 500])
def test_a_kill_leaves_one_version_or_the_other(statements: int, tmp_path: Path) -> None:
    path = load("0.2.0", tmp_path)
    schema, rows = read_schema(path), read_rows(path)
    victim = multiprocessing.get_context("fork").Process(target=migrate_until, args=(path, statements))
    victim.start()
    victim.join()
    assert victim.exitcode or get_version(path) == database.SCHEMA_VERSION
    if get_version(path) == 1:
        assert (read_schema(path), read_rows(path)) == (schema, rows)
    Database(path, journalled=True).close()
    assert get_version(path) == database.SCHEMA_VERSION


def test_two_processes_open_it_at_the_same_time_and_it_can_be_opened_again(tmp_path: Path) -> None:
    path = load("0.2.0", tmp_path)
    with ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda _: Database(path, journalled=True), range(4)))
    opened.append(Database(path, journalled=True))
    assert [db.value("SELECT count(*) FROM mover_request") for db in opened] == [8] * 5
    for db in opened:
        db.close()


@pytest.mark.parametrize(("version", "error"), [(database.SCHEMA_VERSION + 1, CatalogTooNew), (99, CatalogTooNew), (0, CatalogDamaged)])
def test_an_unknown_version_is_refused_untouched(version: int, error: type[Exception], tmp_path: Path) -> None:
    path = load("0.2.0", tmp_path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version={version}")
    connection.close()
    content = path.read_bytes()
    with pytest.raises(error, match=rf"has version {version}, this ckptfs knows .*{database.SCHEMA_VERSION}"):
        Database(path, journalled=True)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("obstacle", "cause"),
    [("DROP INDEX want_open", "no such index: want_open"), ("CREATE TABLE retired (content)", "table retired already exists")],
)
def test_a_migration_that_fails_changes_nothing_and_names_the_cause(obstacle: str, cause: str, tmp_path: Path) -> None:
    """The first step fails, or a later one: the release that made the catalog can still open it."""
    path = load("0.2.0", tmp_path)
    connection = sqlite3.connect(path)
    connection.execute(obstacle)
    connection.commit()
    connection.close()
    schema = read_schema(path)
    with pytest.raises(CatalogDamaged, match=rf"cannot be migrated from version 1 to \d: {cause}"):
        Database(path, journalled=True)
    assert read_schema(path) == schema and get_version(path) == 1
