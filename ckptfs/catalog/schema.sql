-- The catalog of one node: which files exist, and where their copies are. Version 4 (PRAGMA user_version); migrations.py makes it from older ones.
-- Times are ns since the epoch, sizes are bytes, names are BLOBs (any byte but '/' and NUL).

-- Facts about this catalog: 'instance' (uuid, hex), 'connection' (counts FUSE connections; handles belong to one), see identity.py;
-- 'start' (how the last end and the present start went), see database.py; 'island' (since when), 'in_doubt' (up to which change the store may
-- have all), see coherence/key_state.py.
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;

-- Every file, directory, symlink, fifo, socket and device. AUTOINCREMENT: an id is never used twice.
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
CREATE INDEX inode_salvaged ON inode (id) WHERE salvaged IS NOT NULL;
CREATE INDEX inode_history ON inode (id) WHERE history > 0;
CREATE INDEX inode_unlinked ON inode (id) WHERE nlink = 0;
CREATE INDEX inode_scanned ON inode (scanned_ns) WHERE mode & 61440 = 16384; -- directories, the one scanned longest ago first

-- Names. The cookie orders a directory's entries for readdir: it grows, and is never used twice.
CREATE TABLE entry (
    cookie INTEGER PRIMARY KEY AUTOINCREMENT, -- its place in the directory, as readdir's offset
    parent INTEGER NOT NULL,             -- the directory
    name BLOB NOT NULL,                  -- 1 to 255 bytes
    child INTEGER NOT NULL               -- the inode it names
);
CREATE UNIQUE INDEX entry_name ON entry (parent, name);
CREATE INDEX entry_order ON entry (parent); -- and, as every index, the cookie: readdir
CREATE INDEX entry_child ON entry (child);

-- Extended attributes that were set through the mount or imported: user.*, and others that root may set. Those of ckptfs itself, ckptfs.*,
-- are facts about sets and series of the history: nobody else sees them, and they are not on the PFS.
CREATE TABLE xattr (inode INTEGER NOT NULL, name BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (inode, name)) WITHOUT ROWID;
CREATE INDEX xattr_series ON xattr (inode) WHERE name = x'636b707466732e736572696573'; -- ckptfs.series
CREATE INDEX xattr_held ON xattr (inode) WHERE name = x'636b707466732e68656c64'; -- ckptfs.held, see pfs_hold.py
CREATE INDEX xattr_remove ON xattr (inode) WHERE name = x'636b707466732e72656d6f7665'; -- ckptfs.remove

-- What was sealed, or got or lost a name: a checkpoint set may be complete or unprotected. The tracker of sets looks at it.
CREATE TABLE set_candidate (
    inode INTEGER PRIMARY KEY,           -- which one
    at_ns INTEGER NOT NULL               -- when the last change happened
);

-- The bytes of one generation of a file. In a tier it is the file contents-*/<id in 16 hex digits>.
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
CREATE INDEX content_inode ON content (inode);
-- One for each state that a lane waits for, so that a new content enters none of them.
CREATE INDEX content_closed ON content (id) WHERE state = 1;
CREATE INDEX content_doomed ON content (id) WHERE state = 3;
CREATE INDEX content_under_replicated ON content (id) WHERE under_replicated = 1;
CREATE INDEX content_remote ON content (id) WHERE remote = 1;
CREATE INDEX content_awaiting_store_check ON content (id) WHERE remote = 0 AND superseded_mtime_ns = 0;
CREATE INDEX content_unannounced ON content (id) WHERE announce_state > 1;
CREATE INDEX content_absent ON content (id) WHERE remote = 0 AND announce_state > 0;

-- The copies of contents on this node. What the PFS shows under ordinary names is in pfs_file.
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
CREATE INDEX copy_stashed_for ON copy (stashed_for) WHERE stashed_for IS NOT NULL;
CREATE INDEX copy_used ON copy (tier, used_ns) WHERE state = 1; -- eviction takes the least recently used
CREATE INDEX copy_verified ON copy (verified_ns) WHERE tier = 'nvme' AND state = 1; -- sharing blocks takes the last verified
CREATE INDEX copy_bad ON copy (state, tier, used_ns) WHERE state <> 1; -- for queries with the same condition

-- Verified copies on other nodes, as far as this one knows: of contents that it sent or looked for. Empty without a cluster.
CREATE TABLE peer_copy (
    content INTEGER NOT NULL,            -- the content of which that is a copy
    node INTEGER NOT NULL,               -- the number of the node that has it
    generation INTEGER NOT NULL,         -- which generation it is: that of an earlier one does not count
    digest BLOB NOT NULL,                -- the digest that was verified on that node
    PRIMARY KEY (content, node)
) WITHOUT ROWID;
CREATE INDEX peer_copy_node ON peer_copy (node);

-- The nodes of the cluster as the mover last saw them, this one too: levels are derived from where copies are.
CREATE TABLE peer (
    number INTEGER PRIMARY KEY,          -- the node's number
    name TEXT NOT NULL,                  -- its name
    domain TEXT NOT NULL,                -- its failure domain
    alive INTEGER NOT NULL,              -- 1: it holds its lease
    is_self INTEGER NOT NULL DEFAULT 0,  -- 1: this node
    incarnation TEXT NOT NULL DEFAULT '' -- "<catalog>.<start>": another one's copies may be gone
);

-- Open files as the kernel knows them: they outlive the mount process. Cleared when a new FUSE connection begins.
-- Every create and every open writes here, and there are few rows: an index would cost more than a scan of the table.
CREATE TABLE handle (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- the lower half of FUSE's fh
    inode INTEGER NOT NULL,              -- what is open
    content INTEGER,                     -- the content it reads or writes; NULL: none (an empty file that was never written)
    writer INTEGER NOT NULL,             -- 1: opened for writing
    backing INTEGER NOT NULL DEFAULT 0,  -- the kernel's backing id, 0 on the buffered path
    generation INTEGER NOT NULL DEFAULT 0, -- the file's, when the first of its present handles was opened
    shown INTEGER NOT NULL DEFAULT 0     -- the number under which the history shows it to the kernel; 0: outside of the history
);

-- The first reply to every change, kept for requests that the kernel sends again after a crash. A ring: slot = (request/2) % REPLIES_KEPT.
CREATE TABLE reply_cache (slot INTEGER PRIMARY KEY, request INTEGER NOT NULL, body BLOB NOT NULL);

-- Changes that the PFS does not have yet, in their order (P6). Written in the same transaction as the change. Empty without a PFS.
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
CREATE INDEX journal_inode ON journal (inode);

-- What the PFS shows now under ordinary names: written by write-back and import only.
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
CREATE INDEX pfs_entry_inode ON pfs_entry (inode);

-- Names that the PFS does not show as the journal wants them, as far as it was applied: a file appears with its first content, and what
-- the PFS refuses waits. A row of pfs_entry under such a name is older and stays until then.
CREATE TABLE pfs_pending (
    parent INTEGER NOT NULL,             -- the directory, an inode of ours
    name BLOB NOT NULL,                  -- the name in it
    inode INTEGER NOT NULL,              -- what will appear; 0: nothing, and what the PFS shows there will go
    PRIMARY KEY (parent, name)
) WITHOUT ROWID;
CREATE INDEX pfs_pending_inode ON pfs_pending (inode);

-- The batch of changes that write-back is applying: written before the PFS is changed; after a crash it is finished or undone.
CREATE TABLE pfs_batch (
    id INTEGER PRIMARY KEY CHECK (id = 1), -- there is one at most
    ready INTEGER NOT NULL,              -- 0: temporary files are being made (a crash undoes it); 1: it is being applied (a crash finishes it)
    body TEXT NOT NULL                   -- JSON, see catalog/pfs_batch.py
);

-- Directories whose names write-back has changed since it last set their times on the PFS.
CREATE TABLE pfs_stale_times (directory INTEGER PRIMARY KEY);

-- Directories whose listing on the PFS is being compared, and the names in them that write-back changed meanwhile: the listing is
-- older than the transactions that use it, and is not used for these names.
CREATE TABLE scan (
    directory INTEGER PRIMARY KEY,       -- which one
    importing INTEGER NOT NULL DEFAULT 0 -- 1 inside the scan's own transactions, whose changes do not count
);
-- The names of that kind.
CREATE TABLE scan_dirty_name (directory INTEGER NOT NULL, name BLOB NOT NULL, PRIMARY KEY (directory, name)) WITHOUT ROWID;
CREATE TRIGGER pfs_entry_inserted AFTER INSERT ON pfs_entry WHEN EXISTS (SELECT 1 FROM scan WHERE directory = NEW.parent AND importing = 0)
BEGIN INSERT OR IGNORE INTO scan_dirty_name VALUES (NEW.parent, NEW.name); END;
CREATE TRIGGER pfs_entry_updated AFTER UPDATE ON pfs_entry
WHEN EXISTS (SELECT 1 FROM scan WHERE directory IN (NEW.parent, OLD.parent) AND importing = 0)
BEGIN INSERT OR IGNORE INTO scan_dirty_name VALUES (NEW.parent, NEW.name), (OLD.parent, OLD.name); END;
CREATE TRIGGER pfs_entry_deleted AFTER DELETE ON pfs_entry WHEN EXISTS (SELECT 1 FROM scan WHERE directory = OLD.parent AND importing = 0)
BEGIN INSERT OR IGNORE INTO scan_dirty_name VALUES (OLD.parent, OLD.name); END;

-- The bytes that the PFS shows for a file; an external change is recognised by size, mtime and st_ino.
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
CREATE INDEX pfs_file_sharing ON pfs_file (generation) WHERE sharing = 1; -- whether a figure has to be counted again
CREATE TRIGGER pfs_file_inserted AFTER INSERT ON pfs_file WHEN EXISTS (SELECT 1 FROM scan WHERE importing = 0)
BEGIN INSERT OR IGNORE INTO scan_dirty_name SELECT parent, name FROM pfs_entry WHERE inode = NEW.inode; END;
CREATE TRIGGER pfs_file_updated AFTER UPDATE ON pfs_file WHEN EXISTS (SELECT 1 FROM scan WHERE importing = 0)
BEGIN INSERT OR IGNORE INTO scan_dirty_name SELECT parent, name FROM pfs_entry WHERE inode = NEW.inode; END;
CREATE INDEX pfs_file_pfs_inode ON pfs_file (pfs_inode); -- names of one file on the PFS become names of one inode

-- Contents that retention rules keep on the PFS only: the evict step drops their copies on this node.
CREATE TABLE retired (content INTEGER PRIMARY KEY);

-- Requests of the mount and of commands to the mover. A wake-up of the mover is a hint; the row is the request.
CREATE TABLE mover_request (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- the order of the requests
    kind TEXT NOT NULL,                  -- 'scan', 'fetch', 'replicate_now', 'replicate_later', 'inspect' or 'salvage': see mover_requests.py
    inode INTEGER NOT NULL,              -- the directory or file it is about
    argument TEXT NOT NULL DEFAULT '',   -- see mover_requests.py
    state INTEGER NOT NULL DEFAULT 0,    -- 0 open, 1 done, 2 failed
    error INTEGER NOT NULL DEFAULT 0,    -- errno when failed
    result TEXT NOT NULL DEFAULT '',     -- the reply of the lane; 'begun' while blocks of an open fetch can be read
    at_ns INTEGER NOT NULL,              -- when the request was made, then when it was answered
    until_ns INTEGER NOT NULL DEFAULT 0, -- until when a caller waits for the reply
    progress_ns INTEGER NOT NULL DEFAULT 0 -- when the lane last made progress: callers then wait longer
);
CREATE INDEX mover_request_open ON mover_request (kind, inode) WHERE state = 0;

-- The tiers of this node, by the uuid in their own root: if the root has another uuid, the former copies in the tier are lost.
CREATE TABLE tier (name TEXT PRIMARY KEY, uuid TEXT NOT NULL) WITHOUT ROWID;

-- Reports of the processes for `ckptfs status`: JSON by key.
CREATE TABLE report (key TEXT PRIMARY KEY, value TEXT NOT NULL, at_ns INTEGER NOT NULL) WITHOUT ROWID;

-- In a cluster: shared keys that this node changed and has not committed to the store yet, by the number of the change.
CREATE TABLE dirty_key (
    change INTEGER NOT NULL,             -- the changes of this node in their order; numbers are reused once all are committed
    kind TEXT NOT NULL,                  -- see coherence/keys.py
    number INTEGER NOT NULL,             -- the id in the key
    name BLOB NOT NULL,                  -- the name in the key, empty where its kind has none
    PRIMARY KEY (change, kind, number, name)
) WITHOUT ROWID;
CREATE INDEX dirty_key_key ON dirty_key (kind, number, name);

-- In a cluster: the last known state in the store of each shared key that there are rows for. No row: the store has no such key.
CREATE TABLE cached_key (
    kind TEXT NOT NULL,                  -- as in dirty_key
    number INTEGER NOT NULL,             -- likewise
    name BLOB NOT NULL,                  -- likewise
    revision INTEGER NOT NULL,           -- the store's revision that changed it last
    value BLOB NOT NULL,                 -- its value then
    PRIMARY KEY (kind, number, name)
) WITHOUT ROWID;
