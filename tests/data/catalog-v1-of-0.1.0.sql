-- A catalog of schema version 1, as 0.1.0 made it, with rows in every table.
PRAGMA application_id=1129010246;
PRAGMA user_version=1;
BEGIN TRANSACTION;
CREATE TABLE answer (slot INTEGER PRIMARY KEY, request INTEGER NOT NULL, body BLOB NOT NULL);
INSERT INTO "answer" VALUES(4,8,X'7265706C79');
CREATE TABLE content (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    inode INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    state INTEGER NOT NULL,
    size INTEGER NOT NULL DEFAULT 0,
    digest BLOB,
    blocks BLOB,
    change INTEGER NOT NULL DEFAULT 0,
    closed_ns INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "content" VALUES(6,5,2,2,3,X'000102030405060708090A0B0C0D0E0F',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F',4,60);
INSERT INTO "content" VALUES(10,5,1,3,0,NULL,NULL,7,63);
CREATE TABLE copy (
    content INTEGER NOT NULL,
    tier TEXT NOT NULL,
    state INTEGER NOT NULL,
    verified_ns INTEGER NOT NULL DEFAULT 0,
    used_ns INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (content, tier)
) WITHOUT ROWID;
INSERT INTO "copy" VALUES(6,'nvme',1,80,81);
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
    backing INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "handle" VALUES(1,5,6,1,7);
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
    complete INTEGER NOT NULL DEFAULT 1,
    visited_ns INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "inode" VALUES(1,16877,0,0,0,3,0,10,11,12,13,NULL,NULL,0,0,1,99);
INSERT INTO "inode" VALUES(2,16877,1,2,0,2,0,10,11,12,13,NULL,NULL,0,1,0,-1);
INSERT INTO "inode" VALUES(5,33188,1,2,0,1,3,20,21,22,23,NULL,6,2,0,1,0);
INSERT INTO "inode" VALUES(7,41471,1,2,0,1,1,20,21,22,23,X'66',NULL,0,0,1,0);
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
    at_ns INTEGER NOT NULL
);
INSERT INTO "journal" VALUES(1,'make',5,1,X'66',0,NULL,NULL,33188,90);
INSERT INTO "journal" VALUES(7,'rename',5,1,X'66',2,X'67',NULL,33188,91);
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT INTO "meta" VALUES('connection',3);
INSERT INTO "meta" VALUES('instance','0123456789abcdef0123456789abcdef');
INSERT INTO "meta" VALUES('pfs','pfs-uuid');
INSERT INTO "meta" VALUES('starts',4);
CREATE TABLE pfs_batch (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    ready INTEGER NOT NULL,
    body TEXT NOT NULL
);
INSERT INTO "pfs_batch" VALUES(1,1,'[7, [["put", 3, 5, [1, "f", []], [0, 3, 40], null, null, "ckptfs-tmp"], ["move", 4, 2, [1, "d", []], [11, -1, -1], [1, "\u00e9", ["a"]], [12, 5, 6], ""]], [[[1, "f", []], 5, [0, 3, 40]], [[1, "old", []], null, [0, -1, -1]]], [[1, "p\u00ff", 5], [1, "q", null]], [[5, 2, true, 3, 40, 77, "\u0000\u0001\u0002\u0003\u0004\u0005\u0006\u0007\b\t\n\u000b\f\r\u000e\u000f", "\u0000\u0001\u0002\u0003\u0004\u0005\u0006\u0007\b\t\n\u000b\f\r\u000e\u000f\u0010\u0011\u0012\u0013\u0014\u0015\u0016\u0017\u0018\u0019\u001a\u001b\u001c\u001d\u001e\u001f"], [6, 1, false, 2, 41, 78, null, null]], [[5, 6]], [2], 1, [4]]');
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
CREATE TABLE pfs_pending (
    parent INTEGER NOT NULL,
    name BLOB NOT NULL,
    inode INTEGER NOT NULL,
    PRIMARY KEY (parent, name)
) WITHOUT ROWID;
INSERT INTO "pfs_pending" VALUES(1,X'70',5);
CREATE TABLE pfs_times (directory INTEGER PRIMARY KEY);
INSERT INTO "pfs_times" VALUES(1);
CREATE TABLE published (
    inode INTEGER PRIMARY KEY,
    generation INTEGER NOT NULL,
    complete INTEGER NOT NULL,
    size INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    pfs_inode INTEGER NOT NULL,
    digest BLOB,
    blocks BLOB,
    checked_ns INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "published" VALUES(5,1,1,3,40,77,X'000102030405060708090A0B0C0D0E0F',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F',50);
INSERT INTO "published" VALUES(6,1,0,2,41,78,NULL,NULL,0);
CREATE TABLE report (key TEXT PRIMARY KEY, value TEXT NOT NULL, at_ns INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO "report" VALUES('trouble:x','{"what": "x"}',5);
CREATE TABLE tier (name TEXT PRIMARY KEY, uuid TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "tier" VALUES('nvme','u1');
INSERT INTO "tier" VALUES('ram','u2');
CREATE TABLE touched (directory INTEGER NOT NULL, name BLOB NOT NULL, PRIMARY KEY (directory, name)) WITHOUT ROWID;
INSERT INTO "touched" VALUES(1,X'66');
INSERT INTO "touched" VALUES(2,X'6E');
CREATE TABLE visiting (
    directory INTEGER PRIMARY KEY,
    importing INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "visiting" VALUES(2,0);
CREATE TABLE want (
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
INSERT INTO "want" VALUES(1,'visit',5,'again',0,0,'',100,200,0);
INSERT INTO "want" VALUES(2,'fetch',5,'write',0,0,'',100,200,0);
INSERT INTO "want" VALUES(3,'settle',5,'pfs',0,0,'',100,200,0);
INSERT INTO "want" VALUES(4,'secure',5,'',0,0,'',100,200,0);
INSERT INTO "want" VALUES(5,'copy',5,'',0,0,'',100,200,0);
INSERT INTO "want" VALUES(6,'left',5,'',0,0,'',100,200,0);
INSERT INTO "want" VALUES(7,'fetch',5,'',1,0,'here',100,200,150);
INSERT INTO "want" VALUES(8,'settle',5,'journal:7',2,5,'',100,200,0);
CREATE TABLE xattr (inode INTEGER NOT NULL, name BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (inode, name)) WITHOUT ROWID;
INSERT INTO "xattr" VALUES(5,X'757365722E6B',X'7600');
CREATE INDEX inode_unlinked ON inode (id) WHERE nlink = 0;
CREATE INDEX inode_visited ON inode (visited_ns) WHERE mode & 61440 = 16384;
CREATE UNIQUE INDEX entry_name ON entry (parent, name);
CREATE INDEX entry_order ON entry (parent);
CREATE INDEX entry_child ON entry (child);
CREATE INDEX content_inode ON content (inode);
CREATE INDEX content_closed ON content (id) WHERE state = 1;
CREATE INDEX content_doomed ON content (id) WHERE state = 3;
CREATE INDEX handle_inode ON handle (inode);
CREATE INDEX handle_content ON handle (content);
CREATE INDEX journal_inode ON journal (inode);
CREATE INDEX pfs_entry_inode ON pfs_entry (inode);
CREATE INDEX pfs_pending_inode ON pfs_pending (inode);
CREATE TRIGGER pfs_entry_appeared AFTER INSERT ON pfs_entry WHEN EXISTS (SELECT 1 FROM visiting WHERE directory = NEW.parent AND importing = 0)
BEGIN INSERT OR IGNORE INTO touched VALUES (NEW.parent, NEW.name); END;
CREATE TRIGGER pfs_entry_moved AFTER UPDATE ON pfs_entry
WHEN EXISTS (SELECT 1 FROM visiting WHERE directory IN (NEW.parent, OLD.parent) AND importing = 0)
BEGIN INSERT OR IGNORE INTO touched VALUES (NEW.parent, NEW.name), (OLD.parent, OLD.name); END;
CREATE TRIGGER pfs_entry_vanished AFTER DELETE ON pfs_entry WHEN EXISTS (SELECT 1 FROM visiting WHERE directory = OLD.parent AND importing = 0)
BEGIN INSERT OR IGNORE INTO touched VALUES (OLD.parent, OLD.name); END;
CREATE TRIGGER published_appeared AFTER INSERT ON published WHEN EXISTS (SELECT 1 FROM visiting WHERE importing = 0)
BEGIN INSERT OR IGNORE INTO touched SELECT parent, name FROM pfs_entry WHERE inode = NEW.inode; END;
CREATE TRIGGER published_changed AFTER UPDATE ON published WHEN EXISTS (SELECT 1 FROM visiting WHERE importing = 0)
BEGIN INSERT OR IGNORE INTO touched SELECT parent, name FROM pfs_entry WHERE inode = NEW.inode; END;
CREATE INDEX published_pfs_inode ON published (pfs_inode);
CREATE INDEX want_open ON want (kind, inode) WHERE state = 0;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('inode',7);
INSERT INTO "sqlite_sequence" VALUES('entry',4);
INSERT INTO "sqlite_sequence" VALUES('want',8);
INSERT INTO "sqlite_sequence" VALUES('content',10);
INSERT INTO "sqlite_sequence" VALUES('handle',1);
INSERT INTO "sqlite_sequence" VALUES('journal',7);
COMMIT;
