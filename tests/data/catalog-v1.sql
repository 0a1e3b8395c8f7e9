-- A catalog of schema version 1, as 0.2.0 makes it, comments included, with rows in every table.
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
    closed_ns INTEGER NOT NULL DEFAULT 0, -- when its last writer closed it
    peer INTEGER NOT NULL DEFAULT 0,     -- 1: another node wrote this generation, and the row is what was last heard of it
    lacking INTEGER NOT NULL DEFAULT 0,  -- 1: sealed, and more nodes may have to hold a copy of it
    told INTEGER NOT NULL DEFAULT 0,     -- a peer's: the cluster's store has been told of the copy here: 0 no, 1 yes, 2 has to be, 3 has to be taken back;
                                         --   this node's own: of its loss here: see catalog/telling.py
    former_ns INTEGER,                   -- other nodes had it, and the file holds a newer one that they have not: the file's mtime with this one
    before_generation INTEGER,           -- written in place: the last generation of it that other nodes had, as far as its writer knew
    before_ns INTEGER                    -- the file's mtime with that one
);
INSERT INTO "content" VALUES(6,5,2,2,3,X'000102030405060708090A0B0C0D0E0F',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F',4,60,0,1,2,NULL,NULL,NULL);
INSERT INTO "content" VALUES(8,6,4,4,2,NULL,NULL,5,61,1,0,3,0,NULL,NULL);
INSERT INTO "content" VALUES(9,6,3,2,2,X'000102030405060708090A0B0C0D0E0F',NULL,6,62,1,0,1,70,1,65);
INSERT INTO "content" VALUES(10,5,1,3,0,NULL,NULL,7,63,0,0,0,NULL,NULL,NULL);
CREATE TABLE copy (
    content INTEGER NOT NULL,            -- the content of which this is a copy
    tier TEXT NOT NULL,                  -- 'ram', 'nvme', or 'pfs' (a content that was written straight to the PFS's work area)
    state INTEGER NOT NULL,              -- model.CopyState: 0 filling, 1 good, 2 quarantined, 3 older
    verified_ns INTEGER NOT NULL DEFAULT 0, -- when its digest was last found right
    used_ns INTEGER NOT NULL DEFAULT 0,  -- when it was last opened; eviction takes the oldest
    generation INTEGER,                  -- OLDER: which generation this is
    digest BLOB,                         -- OLDER: its digest
    aside INTEGER,                       -- OLDER: of which content it is, while that is fetched in its place; `content` is an id of its own then
    PRIMARY KEY (content, tier)
) WITHOUT ROWID;
INSERT INTO "copy" VALUES(6,'nvme',1,80,81,NULL,NULL,NULL);
INSERT INTO "copy" VALUES(8,'ram',3,0,82,3,X'000102030405060708090A0B0C0D0E0F',NULL);
INSERT INTO "copy" VALUES(11,'nvme',3,0,83,2,X'000102030405060708090A0B0C0D0E0F',9);
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
    backing INTEGER NOT NULL DEFAULT 0,   -- the kernel's backing id, 0 on the buffered path
    generation INTEGER NOT NULL DEFAULT 0 -- the file's, when it was opened by the first of those who have it open
);
INSERT INTO "handle" VALUES(1,5,6,1,7,2);
INSERT INTO "handle" VALUES(2,6,NULL,0,0,0);
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
    visited_ns INTEGER NOT NULL DEFAULT 0, -- directories: when the PFS was last compared with it
    missed TEXT                          -- files that show a former content, since the newer one was on a dead node only: JSON, see catalog/sharing/falling_back.py
);
INSERT INTO "inode" VALUES(1,16877,0,0,0,3,0,10,11,12,13,NULL,NULL,0,0,1,99,NULL);
INSERT INTO "inode" VALUES(2,16877,1,2,0,2,0,10,11,12,13,NULL,NULL,0,1,0,-1,NULL);
INSERT INTO "inode" VALUES(5,33188,1,2,0,1,3,20,21,22,23,NULL,6,2,0,1,0,NULL);
INSERT INTO "inode" VALUES(6,33188,1,2,0,1,2,20,21,22,23,NULL,9,3,0,1,0,'{"content": 8, "generation": 4, "mtime_ns": 30, "node": 1, "shown": 3, "shows": 9}');
INSERT INTO "inode" VALUES(7,41471,1,2,0,1,1,20,21,22,23,X'66',NULL,0,0,1,0,NULL);
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
    at_ns INTEGER NOT NULL,              -- when it happened; the lag is counted from it
    origin INTEGER NOT NULL DEFAULT 0    -- the number of the dead node from which this row was taken over; 0: it happened here
);
INSERT INTO "journal" VALUES(1,'make',5,1,X'66',0,NULL,NULL,33188,90,0);
INSERT INTO "journal" VALUES(7,'rename',5,1,X'66',2,X'67',NULL,33188,91,3);
CREATE TABLE lost_key (
    kind TEXT NOT NULL,                  -- as in touched_key
    number INTEGER NOT NULL,             -- likewise
    name BLOB NOT NULL,                  -- likewise
    turn INTEGER NOT NULL,               -- how often the cluster's store had been lost before
    revision INTEGER NOT NULL,           -- as in seen_key
    change INTEGER NOT NULL,             -- its mark in touched_key; another mark of the key means that it was changed here since
    value BLOB NOT NULL,                 -- as in seen_key
    PRIMARY KEY (kind, number, name)
) WITHOUT ROWID;
INSERT INTO "lost_key" VALUES('e',1,X'66',1,8,2,X'7B226368696C64223A357D');
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
CREATE TABLE peer (
    number INTEGER PRIMARY KEY,          -- the node's number
    name TEXT NOT NULL,                  -- its name
    domain TEXT NOT NULL,                -- its failure domain
    alive INTEGER NOT NULL,              -- 1: it holds its lease
    here INTEGER NOT NULL DEFAULT 0,     -- 1: this node
    incarnation TEXT NOT NULL DEFAULT '' -- which of its lives that is: what it had may be gone in another one
);
INSERT INTO "peer" VALUES(1,'one','r1',1,0,'a.1');
INSERT INTO "peer" VALUES(2,'two','r2',1,1,'b.4');
CREATE TABLE peer_copy (
    content INTEGER NOT NULL,            -- the content of which that is a copy
    node INTEGER NOT NULL,               -- the number of the node that has it
    generation INTEGER NOT NULL,         -- which generation it is: that of an earlier one does not count
    digest BLOB NOT NULL,                -- the digest that was found right there
    PRIMARY KEY (content, node)
) WITHOUT ROWID;
INSERT INTO "peer_copy" VALUES(6,1,2,X'000102030405060708090A0B0C0D0E0F');
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
CREATE TABLE seen_key (
    kind TEXT NOT NULL,                  -- as in touched_key
    number INTEGER NOT NULL,             -- likewise
    name BLOB NOT NULL,                  -- likewise
    revision INTEGER NOT NULL,           -- the store's revision that changed it last
    value BLOB NOT NULL,                 -- its value then
    PRIMARY KEY (kind, number, name)
) WITHOUT ROWID;
INSERT INTO "seen_key" VALUES('i',5,X'',9,X'7B226D6F6465223A33333138387D');
CREATE TABLE tier (name TEXT PRIMARY KEY, uuid TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "tier" VALUES('nvme','u1');
INSERT INTO "tier" VALUES('ram','u2');
CREATE TABLE touched (directory INTEGER NOT NULL, name BLOB NOT NULL, PRIMARY KEY (directory, name)) WITHOUT ROWID;
INSERT INTO "touched" VALUES(1,X'66');
INSERT INTO "touched" VALUES(2,X'6E');
CREATE TABLE touched_key (
    change INTEGER NOT NULL,             -- the changes of this node in their order; numbers are used again once all were told
    kind TEXT NOT NULL,                  -- see catalog/sharing/kinds.py
    number INTEGER NOT NULL,             -- the id in the key
    name BLOB NOT NULL,                  -- the name in the key, empty where its kind has none
    PRIMARY KEY (change, kind, number, name)
) WITHOUT ROWID;
INSERT INTO "touched_key" VALUES(2,'e',1,X'66');
INSERT INTO "touched_key" VALUES(1,'i',5,X'');
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
CREATE INDEX inode_missed ON inode (id) WHERE missed IS NOT NULL;
CREATE INDEX inode_unlinked ON inode (id) WHERE nlink = 0;
CREATE INDEX inode_visited ON inode (visited_ns) WHERE mode & 61440 = 16384;
CREATE UNIQUE INDEX entry_name ON entry (parent, name);
CREATE INDEX entry_order ON entry (parent);
CREATE INDEX entry_child ON entry (child);
CREATE INDEX content_inode ON content (inode);
CREATE INDEX content_closed ON content (id) WHERE state = 1;
CREATE INDEX content_doomed ON content (id) WHERE state = 3;
CREATE INDEX content_lacking ON content (id) WHERE lacking = 1;
CREATE INDEX content_of_peer ON content (id) WHERE peer = 1;
CREATE INDEX content_asked ON content (id) WHERE peer = 0 AND former_ns = 0;
CREATE INDEX content_untold ON content (id) WHERE told > 1;
CREATE INDEX copy_aside ON copy (aside) WHERE aside IS NOT NULL;
CREATE INDEX peer_copy_node ON peer_copy (node);
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
CREATE INDEX touched_key_key ON touched_key (kind, number, name);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('inode',7);
INSERT INTO "sqlite_sequence" VALUES('entry',4);
INSERT INTO "sqlite_sequence" VALUES('want',8);
INSERT INTO "sqlite_sequence" VALUES('content',10);
INSERT INTO "sqlite_sequence" VALUES('handle',2);
INSERT INTO "sqlite_sequence" VALUES('journal',7);
COMMIT;
