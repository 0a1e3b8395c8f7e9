-- A catalog of schema version 1, as 0.1.0 made it, with rows in every table.
PRAGMA application_id=1129010246;
PRAGMA user_version=1;
BEGIN TRANSACTION;
CREATE TABLE answer (slot INTEGER PRIMARY KEY, request INTEGER NOT NULL, body BLOB NOT NULL);
INSERT INTO "answer" VALUES(4,8,X'7265706C79');
CREATE TABLE content (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- also the name of its file in a tier
    inode INTEGER NOT NULL,              -- the file whose bytes these are
    generation INTEGER NOT NULL,         -- grows each time the content is opened for writing after a seal
    state INTEGER NOT NULL,              -- model.ContentState: 0 open, 1 closed, 2 sealed, 3 doomed, 4 lost
    size INTEGER NOT NULL DEFAULT 0,     -- exact once sealed
    digest BLOB,                         -- sealed: xxh3-128 over the blocks' digests
    blocks BLOB,                         -- sealed: xxh3-128 of every 4 MiB block, 16 bytes each
    change INTEGER NOT NULL DEFAULT 0,   -- bumped by every open for writing and every last close: the mover compares it before it believes what it read
    closed_ns INTEGER NOT NULL DEFAULT 0 -- when its last writer closed it
);
INSERT INTO "content" VALUES(6,5,2,2,3,X'000102030405060708090A0B0C0D0E0F',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F',4,60);
INSERT INTO "content" VALUES(10,5,1,3,0,NULL,NULL,7,63);
CREATE TABLE copy (
    content INTEGER NOT NULL,            -- the content of which this is a copy
    tier TEXT NOT NULL,                  -- 'ram', 'nvme', or 'pfs' (a content that was written straight to the PFS's work area)
    state INTEGER NOT NULL,              -- model.CopyState: 0 filling, 1 good, 2 quarantined
    verified_ns INTEGER NOT NULL DEFAULT 0, -- when its digest was last found right
    used_ns INTEGER NOT NULL DEFAULT 0,  -- when it was last opened; eviction takes the oldest
    PRIMARY KEY (content, tier)
) WITHOUT ROWID;
INSERT INTO "copy" VALUES(6,'nvme',1,80,81);
CREATE TABLE entry (
    cookie INTEGER PRIMARY KEY AUTOINCREMENT, -- its place in the directory, as readdir's offset
    parent INTEGER NOT NULL,             -- the directory
    name BLOB NOT NULL,                  -- 1 to 255 bytes
    child INTEGER NOT NULL               -- the inode it names
);
INSERT INTO "entry" VALUES(1,1,X'64',2);
INSERT INTO "entry" VALUES(2,1,X'66',5);
INSERT INTO "entry" VALUES(4,2,X'FF',7);
CREATE TABLE handle (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- the lower half of FUSE's fh
    inode INTEGER NOT NULL,              -- what is open
    content INTEGER,                     -- the content it reads or writes; NULL: none (an empty file that was never written)
    writer INTEGER NOT NULL,             -- 1: opened for writing
    backing INTEGER NOT NULL DEFAULT 0    -- the kernel's backing id, 0 on the buffered path
);
INSERT INTO "handle" VALUES(1,5,6,1,7);
CREATE TABLE inode (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- the inode number, as the kernel and applications see it
    mode INTEGER NOT NULL,               -- type and permission bits, as st_mode
    uid INTEGER NOT NULL,                -- the owner
    gid INTEGER NOT NULL,                -- the owning group
    rdev INTEGER NOT NULL DEFAULT 0,     -- devices: major and minor, as st_rdev; 0 for all others
    nlink INTEGER NOT NULL,              -- 0: unlinked, kept while the kernel still knows it
    size INTEGER NOT NULL DEFAULT 0,     -- as of the last release, truncate or import; an open file asks its backing file
    atime_ns INTEGER NOT NULL,           -- last read
    mtime_ns INTEGER NOT NULL,           -- last change of the bytes, or of a directory's entries
    ctime_ns INTEGER NOT NULL,           -- last change of anything
    birth_ns INTEGER NOT NULL,           -- when it was made or imported
    target BLOB,                         -- symlinks: what they point to
    content INTEGER,                     -- files: the current content; NULL: never written here (empty, or only on the PFS: see published)
    generation INTEGER NOT NULL DEFAULT 0, -- files: the number of the current generation
    parent INTEGER NOT NULL DEFAULT 0,   -- directories: the directory that holds it; 0 for all others
    complete INTEGER NOT NULL DEFAULT 1, -- directories: 0 while it lies on the PFS and was not imported yet
    visited_ns INTEGER NOT NULL DEFAULT 0 -- directories: when the PFS was last compared with it
);
INSERT INTO "inode" VALUES(1,16877,0,0,0,3,0,10,11,12,13,NULL,NULL,0,0,1,99);
INSERT INTO "inode" VALUES(2,16877,1,2,0,2,0,10,11,12,13,NULL,NULL,0,1,0,-1);
INSERT INTO "inode" VALUES(5,33188,1,2,0,1,3,20,21,22,23,NULL,6,2,0,1,0);
INSERT INTO "inode" VALUES(7,41471,1,2,0,1,1,20,21,22,23,X'66',NULL,0,0,1,0);
CREATE TABLE journal (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of the changes
    op TEXT NOT NULL,                    -- see catalog/journal.py
    inode INTEGER NOT NULL,              -- what was changed
    parent INTEGER NOT NULL DEFAULT 0,   -- directory of `name`
    name BLOB,                           -- the entry that was made, removed or renamed
    new_parent INTEGER NOT NULL DEFAULT 0, -- rename: directory of `new_name`
    new_name BLOB,                       -- rename: the new name
    content INTEGER,                     -- op 'content': which content; op 'synced': which content was fsynced while open
    mode INTEGER NOT NULL DEFAULT 0,     -- the inode's st_mode then: its row may be gone when this is applied
    at_ns INTEGER NOT NULL               -- when it happened; the lag is counted from it
);
INSERT INTO "journal" VALUES(1,'make',5,1,X'66',0,NULL,NULL,33188,90);
INSERT INTO "journal" VALUES(7,'rename',5,1,X'66',2,X'67',NULL,33188,91);
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT INTO "meta" VALUES('connection',3);
INSERT INTO "meta" VALUES('instance','0123456789abcdef0123456789abcdef');
INSERT INTO "meta" VALUES('pfs','pfs-uuid');
INSERT INTO "meta" VALUES('starts',4);
CREATE TABLE pfs_batch (
    id INTEGER PRIMARY KEY CHECK (id = 1), -- there is one at most
    ready INTEGER NOT NULL,              -- 0: temporary files are being made, to be taken back; 1: what it says is being done, to be finished
    body TEXT NOT NULL                   -- JSON, see catalog/pfs_batch.py
);
INSERT INTO "pfs_batch" VALUES(1,1,'[7, [["put", 3, 5, [1, "f", []], [0, 3, 40], null, null, "ckptfs-tmp"], ["move", 4, 2, [1, "d", []], [11, -1, -1], [1, "\u00e9", ["a"]], [12, 5, 6], ""]], [[[1, "f", []], 5, [0, 3, 40]], [[1, "old", []], null, [0, -1, -1]]], [[1, "p\u00ff", 5], [1, "q", null]], [[5, 2, true, 3, 40, 77, "\u0000\u0001\u0002\u0003\u0004\u0005\u0006\u0007\b\t\n\u000b\f\r\u000e\u000f", "\u0000\u0001\u0002\u0003\u0004\u0005\u0006\u0007\b\t\n\u000b\f\r\u000e\u000f\u0010\u0011\u0012\u0013\u0014\u0015\u0016\u0017\u0018\u0019\u001a\u001b\u001c\u001d\u001e\u001f"], [6, 1, false, 2, 41, 78, null, null]], [[5, 6]], [2], 1, [4]]');
CREATE TABLE pfs_entry (
    parent INTEGER NOT NULL,             -- the directory, an inode of ours
    name BLOB NOT NULL,                  -- the name in it
    inode INTEGER NOT NULL,              -- what it names
    seen_ino INTEGER,                    -- st_ino, st_mode, st_uid and st_gid as a visit last saw them, to recognise a stranger's change;
    seen_mode INTEGER,                   --   NULL: not seen since write-back touched it
    seen_uid INTEGER,                    --   likewise
    seen_gid INTEGER,                    --   likewise
    PRIMARY KEY (parent, name)
) WITHOUT ROWID;
INSERT INTO "pfs_entry" VALUES(1,X'64',2,11,16877,1,2);
INSERT INTO "pfs_entry" VALUES(1,X'66',5,NULL,NULL,NULL,NULL);
CREATE TABLE pfs_pending (
    parent INTEGER NOT NULL,             -- the directory, an inode of ours
    name BLOB NOT NULL,                  -- the name in it
    inode INTEGER NOT NULL,              -- what will appear
    PRIMARY KEY (parent, name)
) WITHOUT ROWID;
INSERT INTO "pfs_pending" VALUES(1,X'70',5);
CREATE TABLE pfs_times (directory INTEGER PRIMARY KEY);
INSERT INTO "pfs_times" VALUES(1);
CREATE TABLE published (
    inode INTEGER PRIMARY KEY,           -- the file
    generation INTEGER NOT NULL,         -- which generation of the inode this is
    complete INTEGER NOT NULL,           -- 1: exactly that sealed generation; 0: an fsynced state of a file that was still open
    size INTEGER NOT NULL,               -- of the file on the PFS
    mtime_ns INTEGER NOT NULL,           -- of the file on the PFS
    pfs_inode INTEGER NOT NULL,          -- st_ino on the PFS
    digest BLOB,                         -- xxh3-128 over the blocks' digests; NULL: imported and never read
    blocks BLOB,                         -- its blocks' digests, joined; NULL like digest
    checked_ns INTEGER NOT NULL DEFAULT 0 -- when the file on the PFS was last read there and found to have this digest
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
    directory INTEGER PRIMARY KEY,       -- which one
    importing INTEGER NOT NULL DEFAULT 0 -- 1 inside the visit's own transactions, whose changes do not count
);
INSERT INTO "visiting" VALUES(2,0);
CREATE TABLE want (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of the requests
    kind TEXT NOT NULL,                  -- 'visit' a directory, 'fetch' a file's content into a tier, 'settle' a file up to a level
    inode INTEGER NOT NULL,              -- the directory or file it is about
    argument TEXT NOT NULL DEFAULT '',   -- settle: the level; fetch: how
    state INTEGER NOT NULL DEFAULT 0,    -- 0 wanted, 1 done, 2 failed
    error INTEGER NOT NULL DEFAULT 0,    -- errno when failed
    result TEXT NOT NULL DEFAULT '',     -- when done: what the answerer has to say ('fetch': 'here' or 'direct')
    at_ns INTEGER NOT NULL,              -- when it was asked, then when it was answered
    until_ns INTEGER NOT NULL DEFAULT 0, -- until when somebody waits for the answer
    progress_ns INTEGER NOT NULL DEFAULT 0 -- when the answerer last got on with it: askers then wait longer
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
