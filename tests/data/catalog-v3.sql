-- A catalog of schema version 3, as builds after 0.2.0 make it from one of version 2, with rows in every table.
PRAGMA application_id=1129010246;
PRAGMA user_version=3;
BEGIN TRANSACTION;
CREATE TABLE "cached_key" (
    kind TEXT NOT NULL,
    number INTEGER NOT NULL,
    name BLOB NOT NULL,
    revision INTEGER NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (kind, number, name)
) WITHOUT ROWID;
INSERT INTO "cached_key" VALUES('i',5,X'',9,X'7B226D6F6465223A33333138387D');
CREATE TABLE content (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    inode INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    state INTEGER NOT NULL,
    size INTEGER NOT NULL DEFAULT 0,
    digest BLOB,
    blocks BLOB,
    change INTEGER NOT NULL DEFAULT 0,
    closed_ns INTEGER NOT NULL DEFAULT 0,
    remote INTEGER NOT NULL DEFAULT 0,
    under_replicated INTEGER NOT NULL DEFAULT 0,
    announce_state INTEGER NOT NULL DEFAULT 0,
    superseded_mtime_ns INTEGER);
INSERT INTO "content" VALUES(6,5,2,2,3,X'000102030405060708090A0B0C0D0E0F',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F',4,60,0,1,2,NULL);
INSERT INTO "content" VALUES(8,6,4,4,2,NULL,NULL,5,61,1,0,3,0);
INSERT INTO "content" VALUES(9,6,3,2,2,X'000102030405060708090A0B0C0D0E0F',NULL,6,62,1,0,1,70);
INSERT INTO "content" VALUES(10,5,1,3,0,NULL,NULL,7,63,0,0,0,NULL);
CREATE TABLE copy (
    content INTEGER NOT NULL,
    tier TEXT NOT NULL,
    state INTEGER NOT NULL,
    verified_ns INTEGER NOT NULL DEFAULT 0,
    used_ns INTEGER NOT NULL DEFAULT 0,
    generation INTEGER,
    digest BLOB,
    stashed_for INTEGER,
    PRIMARY KEY (content, tier)
) WITHOUT ROWID;
INSERT INTO "copy" VALUES(6,'nvme',1,80,81,NULL,NULL,NULL);
INSERT INTO "copy" VALUES(8,'ram',3,0,82,3,X'000102030405060708090A0B0C0D0E0F',NULL);
INSERT INTO "copy" VALUES(11,'nvme',3,0,83,2,X'000102030405060708090A0B0C0D0E0F',9);
CREATE TABLE "dirty_key" (
    change INTEGER NOT NULL,
    kind TEXT NOT NULL,
    number INTEGER NOT NULL,
    name BLOB NOT NULL,
    PRIMARY KEY (change, kind, number, name)
) WITHOUT ROWID;
INSERT INTO "dirty_key" VALUES(2,'e',1,X'66');
INSERT INTO "dirty_key" VALUES(1,'i',5,X'');
CREATE TABLE entry (
    cookie INTEGER PRIMARY KEY AUTOINCREMENT,
    parent INTEGER NOT NULL,
    name BLOB NOT NULL,
    child INTEGER NOT NULL
);
INSERT INTO "entry" VALUES(1,1,X'64',2);
INSERT INTO "entry" VALUES(2,1,X'66',5);
INSERT INTO "entry" VALUES(4,2,X'FF',7);
CREATE TABLE handle (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    inode INTEGER NOT NULL,
    content INTEGER,
    writer INTEGER NOT NULL,
    backing INTEGER NOT NULL DEFAULT 0,
    generation INTEGER NOT NULL DEFAULT 0
, shown INTEGER NOT NULL DEFAULT 0);
INSERT INTO "handle" VALUES(1,5,6,1,7,2,0);
INSERT INTO "handle" VALUES(2,6,NULL,0,0,0,0);
CREATE TABLE inode (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    mode INTEGER NOT NULL,
    uid INTEGER NOT NULL,
    gid INTEGER NOT NULL,
    rdev INTEGER NOT NULL DEFAULT 0,
    nlink INTEGER NOT NULL,
    size INTEGER NOT NULL DEFAULT 0,
    atime_ns INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    ctime_ns INTEGER NOT NULL,
    birth_ns INTEGER NOT NULL,
    target BLOB,
    content INTEGER,
    generation INTEGER NOT NULL DEFAULT 0,
    parent INTEGER NOT NULL DEFAULT 0,
    imported INTEGER NOT NULL DEFAULT 1,
    scanned_ns INTEGER NOT NULL DEFAULT 0,
    salvaged TEXT
, closed_ns INTEGER NOT NULL DEFAULT 0, history INTEGER NOT NULL DEFAULT 0);
INSERT INTO "inode" VALUES(1,16877,0,0,0,3,0,10,11,12,13,NULL,NULL,0,0,1,99,NULL,0,0);
INSERT INTO "inode" VALUES(2,16877,1,2,0,2,0,10,11,12,13,NULL,NULL,0,1,0,-1,NULL,0,0);
INSERT INTO "inode" VALUES(5,33188,1,2,0,1,3,20,21,22,23,NULL,6,2,0,1,0,NULL,0,0);
INSERT INTO "inode" VALUES(6,33188,1,2,0,1,2,20,21,22,23,NULL,9,3,0,1,0,'{"content": 8, "generation": 4, "mtime_ns": 30, "node": 1, "shown": 3, "shows": 9}',0,0);
INSERT INTO "inode" VALUES(7,41471,1,2,0,1,1,20,21,22,23,X'66',NULL,0,0,1,0,NULL,0,0);
CREATE TABLE journal (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    op TEXT NOT NULL,
    inode INTEGER NOT NULL,
    parent INTEGER NOT NULL DEFAULT 0,
    name BLOB,
    new_parent INTEGER NOT NULL DEFAULT 0,
    new_name BLOB,
    content INTEGER,
    mode INTEGER NOT NULL DEFAULT 0,
    at_ns INTEGER NOT NULL,
    origin INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "journal" VALUES(1,'make',5,1,X'66',0,NULL,NULL,33188,90,0);
INSERT INTO "journal" VALUES(7,'rename',5,1,X'66',2,X'67',NULL,33188,91,3);
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT INTO "meta" VALUES('cluster','c');
INSERT INTO "meta" VALUES('connection',3);
INSERT INTO "meta" VALUES('factor',3);
INSERT INTO "meta" VALUES('instance','0123456789abcdef0123456789abcdef');
INSERT INTO "meta" VALUES('last content',2199023255552);
INSERT INTO "meta" VALUES('last inode',2199023255552);
INSERT INTO "meta" VALUES('number',2);
INSERT INTO "meta" VALUES('pfs','pfs-uuid');
INSERT INTO "meta" VALUES('starts',4);
CREATE TABLE "mover_request" (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    inode INTEGER NOT NULL,
    argument TEXT NOT NULL DEFAULT '',
    state INTEGER NOT NULL DEFAULT 0,
    error INTEGER NOT NULL DEFAULT 0,
    result TEXT NOT NULL DEFAULT '',
    at_ns INTEGER NOT NULL,
    until_ns INTEGER NOT NULL DEFAULT 0,
    progress_ns INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "mover_request" VALUES(1,'scan',5,'again',0,0,'',100,200,0);
INSERT INTO "mover_request" VALUES(2,'fetch',5,'write',0,0,'',100,200,0);
INSERT INTO "mover_request" VALUES(3,'wait_level',5,'pfs',0,0,'',100,200,0);
INSERT INTO "mover_request" VALUES(4,'replicate_now',5,'',0,0,'',100,200,0);
INSERT INTO "mover_request" VALUES(5,'replicate_later',5,'',0,0,'',100,200,0);
INSERT INTO "mover_request" VALUES(6,'salvage',5,'',0,0,'',100,200,0);
INSERT INTO "mover_request" VALUES(7,'fetch',5,'',1,0,'here',100,200,150);
INSERT INTO "mover_request" VALUES(8,'wait_level',5,'journal:7',2,5,'',100,200,0);
CREATE TABLE peer (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    domain TEXT NOT NULL,
    alive INTEGER NOT NULL,
    is_self INTEGER NOT NULL DEFAULT 0,
    incarnation TEXT NOT NULL DEFAULT ''
);
INSERT INTO "peer" VALUES(1,'one','r1',1,0,'a.1');
INSERT INTO "peer" VALUES(2,'two','r2',1,1,'b.4');
CREATE TABLE peer_copy (
    content INTEGER NOT NULL,
    node INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    digest BLOB NOT NULL,
    PRIMARY KEY (content, node)
) WITHOUT ROWID;
INSERT INTO "peer_copy" VALUES(6,1,2,X'000102030405060708090A0B0C0D0E0F');
CREATE TABLE pfs_batch (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    ready INTEGER NOT NULL,
    body TEXT NOT NULL
);
INSERT INTO "pfs_batch" VALUES(1,1,'{"version": 3, "last_seq": 7, "actions": [{"act": "put", "key": 3, "inode": 5, "location": {"parent": 1, "name": "f", "path": []}, "fingerprint": {"ino": 0, "size": 3, "mtime_ns": 40}, "new_location": null, "replaced_fingerprint": null, "temporary": "ckptfs-tmp"}, {"act": "move", "key": 4, "inode": 2, "location": {"parent": 1, "name": "d", "path": []}, "fingerprint": {"ino": 11, "size": -1, "mtime_ns": -1}, "new_location": {"parent": 1, "name": "\u00e9", "path": ["a"]}, "replaced_fingerprint": {"ino": 12, "size": 5, "mtime_ns": 6}, "temporary": ""}], "expected_entries": [{"location": {"parent": 1, "name": "f", "path": []}, "inode": 5, "fingerprint": {"ino": 0, "size": 3, "mtime_ns": 40}, "key": 0}, {"location": {"parent": 1, "name": "old", "path": []}, "inode": null, "fingerprint": {"ino": 0, "size": -1, "mtime_ns": -1}, "key": 0}], "pending_entries": [{"parent": 1, "name": "p\u00ff", "inode": 5}, {"parent": 1, "name": "q", "inode": null}], "published_rows": [{"inode": 5, "generation": 2, "is_complete": true, "size": 3, "mtime_ns": 40, "pfs_inode": 77, "digest": "\u0000\u0001\u0002\u0003\u0004\u0005\u0006\u0007\b\t\n\u000b\f\r\u000e\u000f", "block_digests": "\u0000\u0001\u0002\u0003\u0004\u0005\u0006\u0007\b\t\n\u000b\f\r\u000e\u000f\u0010\u0011\u0012\u0013\u0014\u0015\u0016\u0017\u0018\u0019\u001a\u001b\u001c\u001d\u001e\u001f", "key": 3}, {"inode": 6, "generation": 1, "is_complete": false, "size": 2, "mtime_ns": 41, "pfs_inode": 78, "digest": null, "block_digests": null, "key": 0}], "requeued": [{"inode": 5, "content": 6}], "merged_directories": [2], "after_seq": 1, "kept_seqs": [4], "lost_inodes": [], "requeued_seqs": [0], "settle_rows": [], "name_changes": [{"location": {"parent": 1, "name": "f", "path": []}, "inode": 5, "fingerprint": {"ino": 0, "size": 3, "mtime_ns": 40}, "key": 3}, {"location": {"parent": 1, "name": "d", "path": []}, "inode": null, "fingerprint": {"ino": 0, "size": -1, "mtime_ns": -1}, "key": 4}, {"location": {"parent": 1, "name": "\u00e9", "path": ["a"]}, "inode": 2, "fingerprint": {"ino": 11, "size": -1, "mtime_ns": -1}, "key": 4}, {"location": {"parent": 1, "name": "old", "path": []}, "inode": null, "fingerprint": {"ino": 0, "size": -1, "mtime_ns": -1}, "key": 0}], "pending_changes": [{"key": 0, "name": [1, "f"], "inode": 5}, {"key": 3, "name": [1, "f"], "inode": null}, {"key": 0, "name": [1, "p\u00ff"], "inode": 5}, {"key": 0, "name": [1, "q"], "inode": null}], "abandoned": [], "abandoned_entries": [], "announced_seq": 0}');
CREATE TABLE pfs_entry (
    parent INTEGER NOT NULL,
    name BLOB NOT NULL,
    inode INTEGER NOT NULL,
    seen_ino INTEGER,
    seen_mode INTEGER,
    seen_uid INTEGER,
    seen_gid INTEGER,
    PRIMARY KEY (parent, name)
) WITHOUT ROWID;
INSERT INTO "pfs_entry" VALUES(1,X'64',2,11,16877,1,2);
INSERT INTO "pfs_entry" VALUES(1,X'66',5,NULL,NULL,NULL,NULL);
CREATE TABLE "pfs_file" (
    inode INTEGER PRIMARY KEY,
    generation INTEGER NOT NULL,
    complete INTEGER NOT NULL,
    size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    pfs_inode INTEGER NOT NULL,
    digest BLOB,
    blocks BLOB,
    checked_ns INTEGER NOT NULL DEFAULT 0
, sharing INTEGER NOT NULL DEFAULT 0);
INSERT INTO "pfs_file" VALUES(5,1,1,3,40,77,X'000102030405060708090A0B0C0D0E0F',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F',50,0);
INSERT INTO "pfs_file" VALUES(6,1,0,2,41,78,NULL,NULL,0,0);
CREATE TABLE pfs_pending (
    parent INTEGER NOT NULL,
    name BLOB NOT NULL,
    inode INTEGER NOT NULL,
    PRIMARY KEY (parent, name)
) WITHOUT ROWID;
INSERT INTO "pfs_pending" VALUES(1,X'70',5);
CREATE TABLE "pfs_stale_times" (directory INTEGER PRIMARY KEY);
INSERT INTO "pfs_stale_times" VALUES(1);
CREATE TABLE "reply_cache" (slot INTEGER PRIMARY KEY, request INTEGER NOT NULL, body BLOB NOT NULL);
INSERT INTO "reply_cache" VALUES(4,8,X'7265706C79');
CREATE TABLE report (key TEXT PRIMARY KEY, value TEXT NOT NULL, at_ns INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO "report" VALUES('trouble:x','{"what": "x"}',5);
CREATE TABLE "scan" (
    directory INTEGER PRIMARY KEY,
    importing INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "scan" VALUES(2,0);
CREATE TABLE "scan_dirty_name" (directory INTEGER NOT NULL, name BLOB NOT NULL, PRIMARY KEY (directory, name)) WITHOUT ROWID;
INSERT INTO "scan_dirty_name" VALUES(1,X'66');
INSERT INTO "scan_dirty_name" VALUES(2,X'6E');
CREATE TABLE tier (name TEXT PRIMARY KEY, uuid TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "tier" VALUES('nvme','u1');
INSERT INTO "tier" VALUES('ram','u2');
CREATE TABLE xattr (inode INTEGER NOT NULL, name BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (inode, name)) WITHOUT ROWID;
INSERT INTO "xattr" VALUES(5,X'757365722E6B',X'7600');
CREATE TABLE set_candidate (inode INTEGER PRIMARY KEY, at_ns INTEGER NOT NULL);
INSERT INTO "set_candidate" VALUES(5,90);
CREATE TABLE pfs_hold (inode INTEGER PRIMARY KEY);
INSERT INTO "pfs_hold" VALUES(5);
CREATE TABLE retired (content INTEGER PRIMARY KEY);
INSERT INTO "retired" VALUES(6);
CREATE INDEX inode_unlinked ON inode (id) WHERE nlink = 0;
CREATE UNIQUE INDEX entry_name ON entry (parent, name);
CREATE INDEX entry_order ON entry (parent);
CREATE INDEX entry_child ON entry (child);
CREATE INDEX content_inode ON content (inode);
CREATE INDEX content_closed ON content (id) WHERE state = 1;
CREATE INDEX content_doomed ON content (id) WHERE state = 3;
CREATE INDEX peer_copy_node ON peer_copy (node);
CREATE INDEX journal_inode ON journal (inode);
CREATE INDEX pfs_entry_inode ON pfs_entry (inode);
CREATE INDEX pfs_pending_inode ON pfs_pending (inode);
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
CREATE INDEX copy_used ON copy (tier, used_ns) WHERE state = 1;
CREATE INDEX copy_bad ON copy (state, tier, used_ns) WHERE state <> 1;
CREATE INDEX content_absent ON content (id) WHERE remote = 0 AND announce_state > 0;
CREATE INDEX copy_verified ON copy (verified_ns) WHERE tier = 'nvme' AND state = 1;
CREATE INDEX pfs_file_sharing ON pfs_file (generation) WHERE sharing = 1;
CREATE INDEX xattr_series ON xattr (inode) WHERE name = x'636b707466732e736572696573';
CREATE INDEX xattr_remove ON xattr (inode) WHERE name = x'636b707466732e72656d6f7665';
CREATE INDEX inode_history ON inode (id) WHERE history > 0;
DELETE FROM sqlite_sequence;
INSERT INTO "sqlite_sequence" VALUES('inode',7);
INSERT INTO "sqlite_sequence" VALUES('entry',4);
INSERT INTO "sqlite_sequence" VALUES('mover_request',8);
INSERT INTO "sqlite_sequence" VALUES('content',10);
INSERT INTO "sqlite_sequence" VALUES('handle',2);
INSERT INTO "sqlite_sequence" VALUES('journal',7);
COMMIT;
