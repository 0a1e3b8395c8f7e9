-- A catalog of schema version 3, as builds after 0.2.0 make it from one of version 2, with rows in every table.
PRAGMA application_id=1129010246;
PRAGMA user_version=3;
BEGIN TRANSACTION;
CREATE TABLE cached_key (
    kind TEXT NOT NULL,                  -- as in dirty_key
    number INTEGER NOT NULL,             -- likewise
    name BLOB NOT NULL,                  -- likewise
    revision INTEGER NOT NULL,           -- the store's revision that changed it last
    value BLOB NOT NULL,                 -- its value then
    PRIMARY KEY (kind, number, name)
) WITHOUT ROWID;
INSERT INTO "cached_key" VALUES('i',5,X'',9,X'7B226D6F6465223A33333138387D');
CREATE TABLE content (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- also the name of its file in a tier
    inode INTEGER NOT NULL,              -- the file whose bytes these are
    generation INTEGER NOT NULL,         -- grows each time the content is opened for writing after a seal
    state INTEGER NOT NULL,              -- model.ContentState: 0 open, 1 closed, 2 sealed, 3 doomed, 4 lost
    size INTEGER NOT NULL DEFAULT 0,     -- exact once sealed
    digest BLOB,                         -- sealed: xxh3-128 over the blocks' digests
    blocks BLOB,                         -- sealed: xxh3-128 of every 4 MiB block, 16 bytes each
    change INTEGER NOT NULL DEFAULT 0,   -- grows with every open for writing and last close: the mover compares it before it records a result
    closed_ns INTEGER NOT NULL DEFAULT 0, -- when its last writer closed it
    remote INTEGER NOT NULL DEFAULT 0,   -- 1: another node wrote this generation, and the row is the newest state that this node learned
    under_replicated INTEGER NOT NULL DEFAULT 0, -- 1: sealed, and more nodes may have to hold a copy of it
    announce_state INTEGER NOT NULL DEFAULT 0, -- remote: the store has the copy of this node: 0 no, 1 yes, 2 to be announced, 3 to be withdrawn;
                                         --   own: the same of the loss of its copy, see remote_contents.py
    superseded_mtime_ns INTEGER          -- the file holds a newer content, and only this one is on other nodes: the file's mtime with it
);
INSERT INTO "content" VALUES(6,5,2,2,3,X'000102030405060708090A0B0C0D0E0F',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F',4,60,0,1,2,NULL);
INSERT INTO "content" VALUES(8,6,4,4,2,NULL,NULL,5,61,1,0,3,0);
INSERT INTO "content" VALUES(9,6,3,2,2,X'000102030405060708090A0B0C0D0E0F',NULL,6,62,1,0,1,70);
INSERT INTO "content" VALUES(10,5,1,3,0,NULL,NULL,7,63,0,0,0,NULL);
CREATE TABLE copy (
    content INTEGER NOT NULL,            -- the content of which this is a copy
    tier TEXT NOT NULL,                  -- 'ram', 'nvme', or 'pfs' (a content that was written straight to the PFS's work area)
    state INTEGER NOT NULL,              -- model.CopyState: 0 filling, 1 good, 2 quarantined, 3 stale
    verified_ns INTEGER NOT NULL DEFAULT 0, -- when its digest was last found right
    used_ns INTEGER NOT NULL DEFAULT 0,  -- when it was last opened; eviction takes the oldest
    generation INTEGER,                  -- stale: which generation this is
    digest BLOB,                         -- stale: its digest
    stashed_for INTEGER,                 -- stale: its content while a newer generation is fetched in its place; `content` is another id then
    PRIMARY KEY (content, tier)
) WITHOUT ROWID;
INSERT INTO "copy" VALUES(6,'nvme',1,80,81,NULL,NULL,NULL);
INSERT INTO "copy" VALUES(8,'ram',3,0,82,3,X'000102030405060708090A0B0C0D0E0F',NULL);
INSERT INTO "copy" VALUES(11,'nvme',3,0,83,2,X'000102030405060708090A0B0C0D0E0F',9);
CREATE TABLE dirty_key (
    change INTEGER NOT NULL,             -- the changes of this node in their order; numbers are reused once all are committed
    kind TEXT NOT NULL,                  -- see coherence/keys.py
    number INTEGER NOT NULL,             -- the id in the key
    name BLOB NOT NULL,                  -- the name in the key, empty where its kind has none
    PRIMARY KEY (change, kind, number, name)
) WITHOUT ROWID;
INSERT INTO "dirty_key" VALUES(2,'e',1,X'66');
INSERT INTO "dirty_key" VALUES(1,'i',5,X'');
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
    backing INTEGER NOT NULL DEFAULT 0,  -- the kernel's backing id, 0 on the buffered path
    generation INTEGER NOT NULL DEFAULT 0, -- the file's, when the first of its present handles was opened
    shown INTEGER NOT NULL DEFAULT 0     -- the number under which the history shows it to the kernel; 0: outside of the history
);
INSERT INTO "handle" VALUES(1,5,6,1,7,2,0);
INSERT INTO "handle" VALUES(2,6,NULL,0,0,0,0);
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
    content INTEGER,                     -- files: the current content; NULL: never written here (empty, or only on the PFS: see pfs_file)
    generation INTEGER NOT NULL DEFAULT 0, -- files: the number of the current generation
    parent INTEGER NOT NULL DEFAULT 0,   -- directories: the directory that holds it; 0 for all others
    imported INTEGER NOT NULL DEFAULT 1, -- directories: 0 while it is on the PFS and its names are not in the catalog yet
    scanned_ns INTEGER NOT NULL DEFAULT 0, -- directories: when the PFS was last compared with it
    salvaged TEXT,                       -- files that show a previous content because a dead node alone had the newer: coherence/salvage_records.py
    closed_ns INTEGER NOT NULL DEFAULT 0, -- files: when a writer closed or synced it last, on whatever node; no application can set it
    history INTEGER NOT NULL DEFAULT 0   -- files: how many of the names are in the history of sets; directories: 1 in the history; see history.py
);
INSERT INTO "inode" VALUES(1,16877,0,0,0,3,0,10,11,12,13,NULL,NULL,0,0,1,99,NULL,0,0);
INSERT INTO "inode" VALUES(2,16877,1,2,0,2,0,10,11,12,13,NULL,NULL,0,1,0,-1,NULL,0,0);
INSERT INTO "inode" VALUES(5,33188,1,2,0,1,3,20,21,22,23,NULL,6,2,0,1,0,NULL,0,0);
INSERT INTO "inode" VALUES(6,33188,1,2,0,1,2,20,21,22,23,NULL,9,3,0,1,0,'{"content": 8, "generation": 4, "mtime_ns": 30, "node": 1, "shown": 3, "shows": 9}',0,0);
INSERT INTO "inode" VALUES(7,41471,1,2,0,1,1,20,21,22,23,X'66',NULL,0,0,1,0,NULL,0,0);
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
    origin INTEGER NOT NULL DEFAULT 0    -- the number of the dead node from which this row was taken over; 0: this node
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
CREATE TABLE mover_request (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of the requests
    kind TEXT NOT NULL,                  -- 'scan', 'fetch', 'wait_level', 'replicate_now', 'replicate_later' or 'salvage'
    inode INTEGER NOT NULL,              -- the directory or file it is about
    argument TEXT NOT NULL DEFAULT '',   -- wait_level: the level; fetch: for reading or writing
    state INTEGER NOT NULL DEFAULT 0,    -- 0 open, 1 done, 2 failed
    error INTEGER NOT NULL DEFAULT 0,    -- errno when failed
    result TEXT NOT NULL DEFAULT '',     -- when done: the reply of the lane ('fetch': 'here' or 'direct')
    at_ns INTEGER NOT NULL,              -- when the request was made, then when it was answered
    until_ns INTEGER NOT NULL DEFAULT 0, -- until when a caller waits for the reply
    progress_ns INTEGER NOT NULL DEFAULT 0 -- when the lane last made progress: callers then wait longer
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
    number INTEGER PRIMARY KEY,          -- the node's number
    name TEXT NOT NULL,                  -- its name
    domain TEXT NOT NULL,                -- its failure domain
    alive INTEGER NOT NULL,              -- 1: it holds its lease
    is_self INTEGER NOT NULL DEFAULT 0,  -- 1: this node
    incarnation TEXT NOT NULL DEFAULT '' -- "<catalog>.<start>": another one's copies may be gone
);
INSERT INTO "peer" VALUES(1,'one','r1',1,0,'a.1');
INSERT INTO "peer" VALUES(2,'two','r2',1,1,'b.4');
CREATE TABLE peer_copy (
    content INTEGER NOT NULL,            -- the content of which that is a copy
    node INTEGER NOT NULL,               -- the number of the node that has it
    generation INTEGER NOT NULL,         -- which generation it is: that of an earlier one does not count
    digest BLOB NOT NULL,                -- the digest that was verified on that node
    PRIMARY KEY (content, node)
) WITHOUT ROWID;
INSERT INTO "peer_copy" VALUES(6,1,2,X'000102030405060708090A0B0C0D0E0F');
CREATE TABLE pfs_batch (
    id INTEGER PRIMARY KEY CHECK (id = 1), -- there is one at most
    ready INTEGER NOT NULL,              -- 0: temporary files are being made (a crash undoes it); 1: it is being applied (a crash finishes it)
    body TEXT NOT NULL                   -- JSON, see catalog/pfs_batch.py
);
INSERT INTO "pfs_batch" VALUES(1,1,'{"version": 3, "last_seq": 7, "actions": [{"act": "put", "key": 3, "inode": 5, "location": {"parent": 1, "name": "f", "path": []}, "fingerprint": {"ino": 0, "size": 3, "mtime_ns": 40}, "new_location": null, "replaced_fingerprint": null, "temporary": "ckptfs-tmp"}, {"act": "move", "key": 4, "inode": 2, "location": {"parent": 1, "name": "d", "path": []}, "fingerprint": {"ino": 11, "size": -1, "mtime_ns": -1}, "new_location": {"parent": 1, "name": "\u00e9", "path": ["a"]}, "replaced_fingerprint": {"ino": 12, "size": 5, "mtime_ns": 6}, "temporary": ""}], "expected_entries": [{"location": {"parent": 1, "name": "f", "path": []}, "inode": 5, "fingerprint": {"ino": 0, "size": 3, "mtime_ns": 40}, "key": 0}, {"location": {"parent": 1, "name": "old", "path": []}, "inode": null, "fingerprint": {"ino": 0, "size": -1, "mtime_ns": -1}, "key": 0}], "pending_entries": [{"parent": 1, "name": "p\u00ff", "inode": 5}, {"parent": 1, "name": "q", "inode": null}], "published_rows": [{"inode": 5, "generation": 2, "is_complete": true, "size": 3, "mtime_ns": 40, "pfs_inode": 77, "digest": "\u0000\u0001\u0002\u0003\u0004\u0005\u0006\u0007\b\t\n\u000b\f\r\u000e\u000f", "block_digests": "\u0000\u0001\u0002\u0003\u0004\u0005\u0006\u0007\b\t\n\u000b\f\r\u000e\u000f\u0010\u0011\u0012\u0013\u0014\u0015\u0016\u0017\u0018\u0019\u001a\u001b\u001c\u001d\u001e\u001f", "key": 3}, {"inode": 6, "generation": 1, "is_complete": false, "size": 2, "mtime_ns": 41, "pfs_inode": 78, "digest": null, "block_digests": null, "key": 0}], "requeued": [{"inode": 5, "content": 6}], "merged_directories": [2], "after_seq": 1, "kept_seqs": [4], "lost_inodes": [], "requeued_seqs": [0], "settle_rows": [], "name_changes": [{"location": {"parent": 1, "name": "f", "path": []}, "inode": 5, "fingerprint": {"ino": 0, "size": 3, "mtime_ns": 40}, "key": 3}, {"location": {"parent": 1, "name": "d", "path": []}, "inode": null, "fingerprint": {"ino": 0, "size": -1, "mtime_ns": -1}, "key": 4}, {"location": {"parent": 1, "name": "\u00e9", "path": ["a"]}, "inode": 2, "fingerprint": {"ino": 11, "size": -1, "mtime_ns": -1}, "key": 4}, {"location": {"parent": 1, "name": "old", "path": []}, "inode": null, "fingerprint": {"ino": 0, "size": -1, "mtime_ns": -1}, "key": 0}], "pending_changes": [{"key": 0, "name": [1, "f"], "inode": 5}, {"key": 3, "name": [1, "f"], "inode": null}, {"key": 0, "name": [1, "p\u00ff"], "inode": 5}, {"key": 0, "name": [1, "q"], "inode": null}], "abandoned": [], "abandoned_entries": [], "announced_seq": 0}');
CREATE TABLE pfs_entry (
    parent INTEGER NOT NULL,             -- the directory, an inode of ours
    name BLOB NOT NULL,                  -- the name in it
    inode INTEGER NOT NULL,              -- what it names
    seen_ino INTEGER,                    -- st_ino, st_mode, st_uid and st_gid as of the last scan, to recognise an external change;
    seen_mode INTEGER,                   --   NULL: not scanned since write-back changed it
    seen_uid INTEGER,                    --   likewise
    seen_gid INTEGER,                    --   likewise
    PRIMARY KEY (parent, name)
) WITHOUT ROWID;
INSERT INTO "pfs_entry" VALUES(1,X'64',2,11,16877,1,2);
INSERT INTO "pfs_entry" VALUES(1,X'66',5,NULL,NULL,NULL,NULL);
CREATE TABLE pfs_file (
    inode INTEGER PRIMARY KEY,           -- the file
    generation INTEGER NOT NULL,         -- which generation of the inode this is
    complete INTEGER NOT NULL,           -- 1: exactly that sealed generation; 0: an fsynced state of a file that was still open
    size INTEGER NOT NULL,               -- of the file on the PFS
    mtime_ns INTEGER NOT NULL,           -- of the file on the PFS
    pfs_inode INTEGER NOT NULL,          -- st_ino on the PFS
    digest BLOB,                         -- xxh3-128 over the blocks' digests; NULL: imported and never read
    blocks BLOB,                         -- its blocks' digests, joined; NULL like digest
    checked_ns INTEGER NOT NULL DEFAULT 0, -- when the file on the PFS was last read and found to have this digest
    sharing INTEGER NOT NULL DEFAULT 0   -- 1: write-back let it share blocks with another file on the PFS
);
INSERT INTO "pfs_file" VALUES(5,1,1,3,40,77,X'000102030405060708090A0B0C0D0E0F',X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F',50,0);
INSERT INTO "pfs_file" VALUES(6,1,0,2,41,78,NULL,NULL,0,0);
CREATE TABLE pfs_pending (
    parent INTEGER NOT NULL,             -- the directory, an inode of ours
    name BLOB NOT NULL,                  -- the name in it
    inode INTEGER NOT NULL,              -- what will appear; 0: nothing, and what the PFS shows there will go
    PRIMARY KEY (parent, name)
) WITHOUT ROWID;
INSERT INTO "pfs_pending" VALUES(1,X'70',5);
CREATE TABLE pfs_stale_times (directory INTEGER PRIMARY KEY);
INSERT INTO "pfs_stale_times" VALUES(1);
CREATE TABLE reply_cache (slot INTEGER PRIMARY KEY, request INTEGER NOT NULL, body BLOB NOT NULL);
INSERT INTO "reply_cache" VALUES(4,8,X'7265706C79');
CREATE TABLE report (key TEXT PRIMARY KEY, value TEXT NOT NULL, at_ns INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO "report" VALUES('trouble:x','{"what": "x"}',5);
CREATE TABLE scan (
    directory INTEGER PRIMARY KEY,       -- which one
    importing INTEGER NOT NULL DEFAULT 0 -- 1 inside the scan's own transactions, whose changes do not count
);
INSERT INTO "scan" VALUES(2,0);
CREATE TABLE scan_dirty_name (directory INTEGER NOT NULL, name BLOB NOT NULL, PRIMARY KEY (directory, name)) WITHOUT ROWID;
INSERT INTO "scan_dirty_name" VALUES(1,X'66');
INSERT INTO "scan_dirty_name" VALUES(2,X'6E');
CREATE TABLE tier (name TEXT PRIMARY KEY, uuid TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "tier" VALUES('nvme','u1');
INSERT INTO "tier" VALUES('ram','u2');
CREATE TABLE xattr (inode INTEGER NOT NULL, name BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (inode, name)) WITHOUT ROWID;
INSERT INTO "xattr" VALUES(5,X'757365722E6B',X'7600');
CREATE TABLE set_candidate (
    inode INTEGER PRIMARY KEY,           -- which one
    at_ns INTEGER NOT NULL               -- when the last change happened
);
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
