"""Steps that run all the time never read a whole table that grows with the number of files: a million files cost nothing."""

import re
import sqlite3
from pathlib import Path

import pytest
from local_node import Node, run_until_idle

from ckptfs.catalog import contents, copies, history, namespace, peer_copies, remote_contents, set_members, user_settings
from ckptfs.flow.evict import Evict
from ckptfs.flow.reclaim import Reclaim
from ckptfs.flow.recover import Recover
from ckptfs.flow.scan import Scan
from ckptfs.flow.seal import Seal
from ckptfs.flow.write_back import WriteBack
from ckptfs.model import ROOT, Tier

GROWS_WITH_FILES = {"inode", "entry", "xattr", "content", "copy", "peer_copy", "pfs_entry", "pfs_pending", "pfs_file", "cached_key"}
ALIAS = re.compile(r"\b(?:FROM|JOIN|UPDATE|INTO)\s+(\w+)(?:\s+(?:AS\s+)?(\w+))?", re.IGNORECASE)
SMALL_INDEX = re.compile(r" USING (COVERING )?INDEX (content_|inode_history|xattr_)")
"""Indexes of few rows."""
ENDS_EARLY = re.compile(r"\bORDER BY ((k\.)?id DESC|c\.verified_ns) LIMIT\b")


def list_scans(connection: sqlite3.Connection, sql: str) -> list[str]:
    """The large tables that this statement reads from end to end."""
    names = {alias.lower(): table.lower() for table, alias in ALIAS.findall(sql) if alias} | {table: table for table in GROWS_WITH_FILES}
    plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}")]
    scanned = [match[1] for step in plan if (match := re.match(r"SCAN (\w+)(?! VIRTUAL)", step)) and not SMALL_INDEX.search(step)]
    return [names[name] for name in scanned if names.get(name) in GROWS_WITH_FILES and not ENDS_EARLY.search(sql)]


def run_steps(node: Node) -> None:
    flows = (node.db, node.tiers, node.config, node.told)
    node.make(b"closed", b"1")
    node.make(b"kept", b"2")
    Seal(*flows).step()
    run_until_idle(WriteBack(*flows))
    node.make(b"open", b"3", closed=False)
    for flow in (Evict(*flows), Reclaim(*flows), Scan(*flows)):
        flow.step()
        flow.next_due_s()
    for elsewhere in (True, False):
        for tier in (Tier.RAM, Tier.NVME):
            copies.list_evictable(node.db, tier, elsewhere=elsewhere, at_most=64)
    with node.db.transaction():
        namespace.unlink(node.db, ROOT, b"closed")
    copies.load_check_figures(node.db)
    contents.list_closed(node.db, [Tier.RAM], 0, 64)
    peer_copies.find_rebuildable(node.db, 0)
    peer_copies.count_rebuildable(node.db)
    remote_contents.list_hosted_with(node.db, 2, 0, 64)
    remote_contents.list_only_stale(node.db, 0, 64)
    namespace.list_candidates(node.db, 0)
    set_members.count_history_bytes(node.db)
    user_settings.list_removals(node.db)
    history.list_series(node.db)


def test_no_step_reads_a_whole_table(tmp_path: Path) -> None:
    node = Node(tmp_path)
    Recover(node.db, node.tiers, node.told).run()
    WriteBack(node.db, node.tiers, node.config, node.told).step()  # Meets the PFS for the first time.
    statements: set[str] = set()
    node.db.connection.set_trace_callback(statements.add)
    run_steps(node)
    node.db.connection.set_trace_callback(None)
    assert len(statements) > 50
    plain = [sql for sql in statements if re.match(r"\s*(SELECT|UPDATE|DELETE|INSERT|WITH)\b", sql, re.IGNORECASE)]
    bad = {sql: scans for sql in plain if (scans := list_scans(node.db.connection, sql))}
    assert not bad, "\n".join(f"{scans}: {sql}" for sql, scans in bad.items())


WHOLE_TABLE = ["SELECT * FROM content WHERE size = 3", "SELECT k.id FROM content k WHERE k.state = 2", "UPDATE copy SET state = 2"]


@pytest.mark.parametrize("sql", WHOLE_TABLE)
def test_a_statement_that_does_is_found(sql: str, tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert list_scans(node.db.connection, sql)
