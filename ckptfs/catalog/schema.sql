-- The catalog of one node: which files exist, and where their copies are. Version 1 (PRAGMA user_version).
-- Times are ns since the epoch, sizes are bytes, names are BLOBs (any byte but '/' and NUL).

-- Facts about this catalog itself: 'instance' (uuid, hex), 'connection' (counts FUSE connections; handles belong to one).
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
    content INTEGER,                     -- files: the current content; NULL: never written here (empty, or only on the PFS: see published)
    generation INTEGER NOT NULL DEFAULT 0, -- files: the number of the current generation
    parent INTEGER NOT NULL DEFAULT 0,   -- directories: the directory that holds it; 0 for all others
    complete INTEGER NOT NULL DEFAULT 1, -- directories: 0 while it lies on the PFS and was not imported yet
    visited_ns INTEGER NOT NULL DEFAULT 0, -- directories: when the PFS was last compared with it
    missed TEXT                          -- files that show a former content, since the newer one was on a dead node only: JSON, see catalog/sharing/falling_back.py
);
CREATE INDEX inode_missed ON inode (id) WHERE missed IS NOT NULL;
CREATE INDEX inode_unlinked ON inode (id) WHERE nlink = 0;
CREATE INDEX inode_visited ON inode (visited_ns) WHERE mode & 61440 = 16384; -- directories, the longest unvisited first

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

-- Extended attributes that were set through the mount, or imported: user.*, and whatever root may set.
CREATE TABLE xattr (inode INTEGER NOT NULL, name BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (inode, name)) WITHOUT ROWID;

-- The bytes of one generation of a file. In a tier it is the file contents/<id in 16 hex digits>.
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
CREATE INDEX content_inode ON content (inode);
-- One for each state that somebody waits on, so that a content enters none of them when it is begun.
CREATE INDEX content_closed ON content (id) WHERE state = 1;
CREATE INDEX content_doomed ON content (id) WHERE state = 3;
CREATE INDEX content_lacking ON content (id) WHERE lacking = 1;
CREATE INDEX content_of_peer ON content (id) WHERE peer = 1;
CREATE INDEX content_asked ON content (id) WHERE peer = 0 AND former_ns = 0;
CREATE INDEX content_untold ON content (id) WHERE told > 1;

-- Where a content lies on this node. What the PFS shows under ordinary names is in `published`.
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

CREATE INDEX copy_aside ON copy (aside) WHERE aside IS NOT NULL;

-- Verified copies on other nodes, as far as this one knows: of contents that it sent there, or looked for. Empty without a cluster.
CREATE TABLE peer_copy (
    content INTEGER NOT NULL,            -- the content of which that is a copy
    node INTEGER NOT NULL,               -- the number of the node that has it
    generation INTEGER NOT NULL,         -- which generation it is: that of an earlier one does not count
    digest BLOB NOT NULL,                -- the digest that was found right there
    PRIMARY KEY (content, node)
) WITHOUT ROWID;
CREATE INDEX peer_copy_node ON peer_copy (node);

-- The nodes of the cluster as the mover last saw them, this one too: levels are derived from where copies are.
CREATE TABLE peer (
    number INTEGER PRIMARY KEY,          -- the node's number
    name TEXT NOT NULL,                  -- its name
    domain TEXT NOT NULL,                -- its failure domain
    alive INTEGER NOT NULL,              -- 1: it holds its lease
    here INTEGER NOT NULL DEFAULT 0,     -- 1: this node
    incarnation TEXT NOT NULL DEFAULT '' -- which of its lives that is: what it had may be gone in another one
);

-- Open files as the kernel knows them: they outlive the mount process. Cleared when a new FUSE connection begins.
-- Every create and every open writes here, and there are few rows: an index would cost more than looking through them all.
CREATE TABLE handle (
    id INTEGER PRIMARY KEY AUTOINCREMENT, -- the lower half of FUSE's fh
    inode INTEGER NOT NULL,              -- what is open
    content INTEGER,                     -- the content it reads or writes; NULL: none (an empty file that was never written)
    writer INTEGER NOT NULL,             -- 1: opened for writing
    backing INTEGER NOT NULL DEFAULT 0,   -- the kernel's backing id, 0 on the buffered path
    generation INTEGER NOT NULL DEFAULT 0 -- the file's, when it was opened by the first of those who have it open
);

-- The first answer to every change, kept for requests that the kernel sends again after a crash. A ring: slot = (request/2) % ANSWERS_KEPT.
CREATE TABLE answer (slot INTEGER PRIMARY KEY, request INTEGER NOT NULL, body BLOB NOT NULL);

-- What the PFS must be told, in the order in which it happened (P6). Written in the same transaction as the change. Empty without a PFS.
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
CREATE INDEX journal_inode ON journal (inode);

-- What the PFS shows now under ordinary names: written by write-back and import only.
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
CREATE INDEX pfs_entry_inode ON pfs_entry (inode);

-- Names of files that the PFS does not show yet, as far as the journal was applied: they appear under them with their first content.
-- What `pfs_entry` has under such a name is older and stays until then.
CREATE TABLE pfs_pending (
    parent INTEGER NOT NULL,             -- the directory, an inode of ours
    name BLOB NOT NULL,                  -- the name in it
    inode INTEGER NOT NULL,              -- what will appear
    PRIMARY KEY (parent, name)
) WITHOUT ROWID;
CREATE INDEX pfs_pending_inode ON pfs_pending (inode);

-- The one batch of changes that write-back has in hand: written before the PFS is touched, finished or taken back after a crash.
CREATE TABLE pfs_batch (
    id INTEGER PRIMARY KEY CHECK (id = 1), -- there is one at most
    ready INTEGER NOT NULL,              -- 0: temporary files are being made, to be taken back; 1: what it says is being done, to be finished
    body TEXT NOT NULL                   -- JSON, see catalog/pfs_batch.py
);

-- Directories whose names write-back has changed since it last set their times on the PFS.
CREATE TABLE pfs_times (directory INTEGER PRIMARY KEY);

-- Directories whose listing on the PFS is being compared, and the names in them that write-back changed meanwhile: a listing is
-- older than the transactions that use it, and must not be believed about these names.
CREATE TABLE visiting (
    directory INTEGER PRIMARY KEY,       -- which one
    importing INTEGER NOT NULL DEFAULT 0 -- 1 inside the visit's own transactions, whose changes do not count
);
-- The names of that kind.
CREATE TABLE touched (directory INTEGER NOT NULL, name BLOB NOT NULL, PRIMARY KEY (directory, name)) WITHOUT ROWID;
CREATE TRIGGER pfs_entry_appeared AFTER INSERT ON pfs_entry WHEN EXISTS (SELECT 1 FROM visiting WHERE directory = NEW.parent AND importing = 0)
BEGIN INSERT OR IGNORE INTO touched VALUES (NEW.parent, NEW.name); END;
CREATE TRIGGER pfs_entry_moved AFTER UPDATE ON pfs_entry
WHEN EXISTS (SELECT 1 FROM visiting WHERE directory IN (NEW.parent, OLD.parent) AND importing = 0)
BEGIN INSERT OR IGNORE INTO touched VALUES (NEW.parent, NEW.name), (OLD.parent, OLD.name); END;
CREATE TRIGGER pfs_entry_vanished AFTER DELETE ON pfs_entry WHEN EXISTS (SELECT 1 FROM visiting WHERE directory = OLD.parent AND importing = 0)
BEGIN INSERT OR IGNORE INTO touched VALUES (OLD.parent, OLD.name); END;

-- The content that the PFS shows for a file; how a stranger's change is recognised.
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
CREATE TRIGGER published_appeared AFTER INSERT ON published WHEN EXISTS (SELECT 1 FROM visiting WHERE importing = 0)
BEGIN INSERT OR IGNORE INTO touched SELECT parent, name FROM pfs_entry WHERE inode = NEW.inode; END;
CREATE TRIGGER published_changed AFTER UPDATE ON published WHEN EXISTS (SELECT 1 FROM visiting WHERE importing = 0)
BEGIN INSERT OR IGNORE INTO touched SELECT parent, name FROM pfs_entry WHERE inode = NEW.inode; END;
CREATE INDEX published_pfs_inode ON published (pfs_inode); -- names of one file on the PFS become names of one inode

-- What the mount asks of the mover and waits for. A hint wakes the mover; the row is the request.
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
CREATE INDEX want_open ON want (kind, inode) WHERE state = 0;

-- The tiers of this node, by the uuid in their own root: another uuid there means that what was in it is lost.
CREATE TABLE tier (name TEXT PRIMARY KEY, uuid TEXT NOT NULL) WITHOUT ROWID;

-- What the processes report for `ckptfs status`: JSON by key.
CREATE TABLE report (key TEXT PRIMARY KEY, value TEXT NOT NULL, at_ns INTEGER NOT NULL) WITHOUT ROWID;

-- In a cluster: shared keys that were changed here and not told to the store yet, by the number of the change. Empty without one.
CREATE TABLE touched_key (
    change INTEGER NOT NULL,             -- the changes of this node in their order; numbers are used again once all were told
    kind TEXT NOT NULL,                  -- see catalog/sharing/kinds.py
    number INTEGER NOT NULL,             -- the id in the key
    name BLOB NOT NULL,                  -- the name in the key, empty where its kind has none
    PRIMARY KEY (change, kind, number, name)
) WITHOUT ROWID;
CREATE INDEX touched_key_key ON touched_key (kind, number, name);

-- In a cluster: what the store said last of a shared key that there are rows for. No row: there was no such key.
CREATE TABLE seen_key (
    kind TEXT NOT NULL,                  -- as in touched_key
    number INTEGER NOT NULL,             -- likewise
    name BLOB NOT NULL,                  -- likewise
    revision INTEGER NOT NULL,           -- the store's revision that changed it last
    value BLOB NOT NULL,                 -- its value then
    PRIMARY KEY (kind, number, name)
) WITHOUT ROWID;

-- In a cluster: what a store that has lost its data had said of a shared key, until that is told to it again. Empty otherwise.
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
