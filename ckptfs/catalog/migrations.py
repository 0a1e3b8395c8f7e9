"""The chain of schema migrations: each step brings a catalog from one version to the next.

`PRAGMA user_version` holds the version of a catalog. `migrate` runs the missing steps in one transaction. Other processes that open the
catalog meanwhile wait for that transaction, and then find the new version. To change the schema, edit schema.sql, and append a step that
makes the same of the last version. A step on main never changes, released or not.

Crash safety: SQLite undoes an unfinished migration, and the next start begins again.
"""

import logging
import re
import sqlite3
from collections.abc import Callable
from functools import partial

log = logging.getLogger(__name__)

_COLUMNS_SINCE_0_1_0 = (
    ("inode", "missed TEXT"),
    ("content", "peer INTEGER NOT NULL DEFAULT 0"),
    ("content", "lacking INTEGER NOT NULL DEFAULT 0"),
    ("content", "told INTEGER NOT NULL DEFAULT 0"),
    ("content", "former_ns INTEGER"),
    ("content", "before_generation INTEGER"),
    ("content", "before_ns INTEGER"),
    ("copy", "generation INTEGER"),
    ("copy", "digest BLOB"),
    ("copy", "aside INTEGER"),
    ("handle", "generation INTEGER NOT NULL DEFAULT 0"),
    ("journal", "origin INTEGER NOT NULL DEFAULT 0"),
)
"""Version 1 grew without a new number: what catalogs of 0.1.0 and of the first builds of 0.2.0 may lack."""

_VERSION_2 = """
CREATE TABLE IF NOT EXISTS peer_copy (content INTEGER NOT NULL, node INTEGER NOT NULL, generation INTEGER NOT NULL, digest BLOB NOT NULL,
    PRIMARY KEY (content, node)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS peer_copy_node ON peer_copy (node);
CREATE TABLE IF NOT EXISTS peer (number INTEGER PRIMARY KEY, name TEXT NOT NULL, domain TEXT NOT NULL, alive INTEGER NOT NULL,
    here INTEGER NOT NULL DEFAULT 0, incarnation TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS touched_key (change INTEGER NOT NULL, kind TEXT NOT NULL, number INTEGER NOT NULL, name BLOB NOT NULL,
    PRIMARY KEY (change, kind, number, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS seen_key (kind TEXT NOT NULL, number INTEGER NOT NULL, name BLOB NOT NULL, revision INTEGER NOT NULL,
    value BLOB NOT NULL, PRIMARY KEY (kind, number, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lost_key (kind TEXT NOT NULL, number INTEGER NOT NULL, name BLOB NOT NULL, turn INTEGER NOT NULL,
    revision INTEGER NOT NULL, change INTEGER NOT NULL, value BLOB NOT NULL, PRIMARY KEY (kind, number, name)) WITHOUT ROWID;
DROP TRIGGER pfs_entry_appeared;
DROP TRIGGER pfs_entry_moved;
DROP TRIGGER pfs_entry_vanished;
DROP TRIGGER published_appeared;
DROP TRIGGER published_changed;
DROP INDEX IF EXISTS handle_inode;
DROP INDEX IF EXISTS handle_content;
DROP INDEX IF EXISTS inode_missed;
DROP INDEX inode_visited;
DROP INDEX IF EXISTS content_lacking;
DROP INDEX IF EXISTS content_of_peer;
DROP INDEX IF EXISTS content_asked;
DROP INDEX IF EXISTS content_untold;
DROP INDEX IF EXISTS copy_aside;
DROP INDEX published_pfs_inode;
DROP INDEX want_open;
DROP INDEX IF EXISTS touched_key_key;
ALTER TABLE want RENAME TO mover_request;
ALTER TABLE answer RENAME TO reply_cache;
ALTER TABLE published RENAME TO pfs_file;
ALTER TABLE visiting RENAME TO scan;
ALTER TABLE touched RENAME TO scan_dirty_name;
ALTER TABLE touched_key RENAME TO dirty_key;
ALTER TABLE seen_key RENAME TO cached_key;
ALTER TABLE lost_key RENAME TO resend_key;
ALTER TABLE pfs_times RENAME TO pfs_stale_times;
ALTER TABLE inode RENAME COLUMN missed TO salvaged;
ALTER TABLE inode RENAME COLUMN complete TO imported;
ALTER TABLE inode RENAME COLUMN visited_ns TO scanned_ns;
ALTER TABLE content RENAME COLUMN peer TO remote;
ALTER TABLE content RENAME COLUMN lacking TO under_replicated;
ALTER TABLE content RENAME COLUMN told TO announce_state;
ALTER TABLE content RENAME COLUMN former_ns TO superseded_mtime_ns;
ALTER TABLE content RENAME COLUMN before_generation TO replicated_generation;
ALTER TABLE content RENAME COLUMN before_ns TO replicated_mtime_ns;
ALTER TABLE copy RENAME COLUMN aside TO stashed_for;
ALTER TABLE peer RENAME COLUMN here TO is_self;
UPDATE mover_request SET kind = CASE kind WHEN 'visit' THEN 'scan' WHEN 'settle' THEN 'wait_level' WHEN 'secure' THEN 'replicate_now'
    WHEN 'copy' THEN 'replicate_later' WHEN 'left' THEN 'salvage' ELSE kind END;
CREATE INDEX inode_salvaged ON inode (id) WHERE salvaged IS NOT NULL;
CREATE INDEX inode_scanned ON inode (scanned_ns) WHERE mode & 61440 = 16384;
CREATE INDEX content_under_replicated ON content (id) WHERE under_replicated = 1;
CREATE INDEX content_remote ON content (id) WHERE remote = 1;
CREATE INDEX content_awaiting_store_check ON content (id) WHERE remote = 0 AND superseded_mtime_ns = 0;
CREATE INDEX content_unannounced ON content (id) WHERE announce_state > 1;
CREATE INDEX copy_stashed_for ON copy (stashed_for) WHERE stashed_for IS NOT NULL;
CREATE INDEX pfs_file_pfs_inode ON pfs_file (pfs_inode);
CREATE INDEX mover_request_open ON mover_request (kind, inode) WHERE state = 0;
CREATE INDEX dirty_key_key ON dirty_key (kind, number, name);
CREATE TRIGGER pfs_entry_inserted AFTER INSERT ON pfs_entry WHEN EXISTS (SELECT 1 FROM scan WHERE directory = NEW.parent AND importing = 0)
BEGIN INSERT OR IGNORE INTO scan_dirty_name VALUES (NEW.parent, NEW.name); END;
CREATE TRIGGER pfs_entry_updated AFTER UPDATE ON pfs_entry
WHEN EXISTS (SELECT 1 FROM scan WHERE directory IN (NEW.parent, OLD.parent) AND importing = 0)
BEGIN INSERT OR IGNORE INTO scan_dirty_name VALUES (NEW.parent, NEW.name), (OLD.parent, OLD.name); END;
CREATE TRIGGER pfs_entry_deleted AFTER DELETE ON pfs_entry WHEN EXISTS (SELECT 1 FROM scan WHERE directory = OLD.parent AND importing = 0)
BEGIN INSERT OR IGNORE INTO scan_dirty_name VALUES (OLD.parent, OLD.name); END;
CREATE TRIGGER pfs_file_inserted AFTER INSERT ON pfs_file WHEN EXISTS (SELECT 1 FROM scan WHERE importing = 0)
BEGIN INSERT OR IGNORE INTO scan_dirty_name SELECT parent, name FROM pfs_entry WHERE inode = NEW.inode; END;
CREATE TRIGGER pfs_file_updated AFTER UPDATE ON pfs_file WHEN EXISTS (SELECT 1 FROM scan WHERE importing = 0)
BEGIN INSERT OR IGNORE INTO scan_dirty_name SELECT parent, name FROM pfs_entry WHERE inode = NEW.inode; END;
"""

_VERSION_3 = """
ALTER TABLE inode ADD COLUMN closed_ns INTEGER NOT NULL DEFAULT 0;
ALTER TABLE inode ADD COLUMN history INTEGER NOT NULL DEFAULT 0;
ALTER TABLE content DROP COLUMN replicated_generation;
ALTER TABLE content DROP COLUMN replicated_mtime_ns;
CREATE INDEX copy_used ON copy (tier, used_ns) WHERE state = 1;
CREATE INDEX copy_bad ON copy (state, tier, used_ns) WHERE state <> 1;
CREATE INDEX content_absent ON content (id) WHERE remote = 0 AND announce_state > 0;
CREATE INDEX copy_verified ON copy (verified_ns) WHERE tier = 'nvme' AND state = 1;
ALTER TABLE pfs_file ADD COLUMN sharing INTEGER NOT NULL DEFAULT 0;
CREATE INDEX pfs_file_sharing ON pfs_file (generation) WHERE sharing = 1;
DROP TABLE resend_key;
CREATE INDEX xattr_series ON xattr (inode) WHERE name = x'636b707466732e736572696573';
CREATE INDEX xattr_remove ON xattr (inode) WHERE name = x'636b707466732e72656d6f7665';
CREATE TABLE set_candidate (inode INTEGER PRIMARY KEY, at_ns INTEGER NOT NULL);
CREATE INDEX inode_history ON inode (id) WHERE history > 0;
CREATE TABLE pfs_hold (inode INTEGER PRIMARY KEY);
CREATE TABLE retired (content INTEGER PRIMARY KEY);
ALTER TABLE handle ADD COLUMN shown INTEGER NOT NULL DEFAULT 0;
"""

_VERSION_4 = """
INSERT OR IGNORE INTO xattr SELECT inode, x'636b707466732e68656c64', x'31' FROM pfs_hold;
DROP TABLE pfs_hold;
CREATE INDEX xattr_held ON xattr (inode) WHERE name = x'636b707466732e68656c64';
"""


def _migrate_to_2(connection: sqlite3.Connection) -> None:
    for table, column in _COLUMNS_SINCE_0_1_0:
        known = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        if column.split()[0] not in known:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
    _run_script(connection, _VERSION_2)


def _run_script(connection: sqlite3.Connection, script: str) -> None:
    """Run statements in the open transaction, which `executescript` would commit."""
    statement = ""
    for line in script.strip().splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""


_STEPS: tuple[Callable[[sqlite3.Connection], None], ...] = (
    _migrate_to_2,
    partial(_run_script, script=_VERSION_3),
    partial(_run_script, script=_VERSION_4),
)
"""The step at index N leads from version N + 1 to N + 2."""
SCHEMA_VERSION = 1 + len(_STEPS)


def get_version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a catalog of a known version to `SCHEMA_VERSION`. The connection has no transaction."""
    if get_version(connection) >= SCHEMA_VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = get_version(connection)
        if version < SCHEMA_VERSION:  # Otherwise another process has migrated the catalog while this one waited for the lock.
            log.info("the catalog: migrating from schema version %d to %d", version, SCHEMA_VERSION)
            _delete_comments(connection)
            for step in _STEPS[version - 1 :]:
                step(connection)
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _delete_comments(connection: sqlite3.Connection) -> None:
    """Delete the comments of the stored schema: `DROP COLUMN` of the last column cuts at a comma in one."""
    connection.execute("PRAGMA writable_schema=ON")
    for name, sql in connection.execute("SELECT name, sql FROM sqlite_master WHERE sql LIKE '%--%'").fetchall():
        connection.execute("UPDATE sqlite_master SET sql = ? WHERE name = ?", (re.sub("--[^\n]*", "", sql), name))
    connection.execute("PRAGMA writable_schema=RESET")
