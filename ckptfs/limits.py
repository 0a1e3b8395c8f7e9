"""Bounds of the product, grouped by subject.

Units come last in a name. Assertions at the end check at import that the bounds fit one another.
"""

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# --- names and attributes --------------------------------------------------------------------------------------------
NAME_BYTES_MAX = 255
PATH_BYTES_MAX = 4095
LINKS_MAX = 65_000
XATTR_VALUE_BYTES_MAX = 64 * KIB
XATTR_LIST_BYTES_MAX = 64 * KIB
NOTE_BYTES_MAX = 4 * KIB  # of a checkpoint set
# All xattrs of one inode in a cluster: they travel to etcd in one request, and two nodes may add this much concurrently.
XATTR_SHARED_BYTES_MAX = 256 * KIB

# --- contents and digests --------------------------------------------------------------------------------------------
OFFSET_MAX = 2**63 - 1
FILE_BYTES_MAX = 2**50  # A seal digests 1 PiB of holes in half a second, and 8 EiB in an hour.
BLOCK_BYTES = 4 * MIB
# Larger files (16 TiB, mostly holes) keep no block digests: they would take more than 64 MiB.
BLOCK_DIGESTS_MAX = 4 * MIB
# Several threads digest a closed file of at least this size, at most one per processor.
DIGEST_PARALLEL_BYTES_MIN = 64 * MIB
DIGEST_THREADS_MAX = 4
# Dirty bytes of one copy. At least 16 MiB keep a disk of 3 GB/s busy.
UNWRITTEN_BYTES_MAX = 16 * MIB
# A node counts generations of a file at most this far beyond the last known one. A corrupt larger number would never be reached again.
GENERATIONS_AHEAD_MAX = 2**40
GENERATION_MAX = 2**62

# --- FUSE ------------------------------------------------------------------------------------------------------------
WRITE_BYTES_MAX = MIB
READ_AHEAD_KIB = 1024
# Notifications invalidate the kernel's caches of names and attributes, so the timeout is long; it bounds the cost of a lost notification.
CACHE_TIMEOUT_S = 300.0
# A mapping on the passthrough path changes mtime without notice to the kernel's attribute cache.
WRITTEN_ATTRIBUTE_TIMEOUT_S = 0.5
# In a cluster names are never cached. Without this timeout the kernel asks for attributes again right after a lookup.
SHARED_ATTRIBUTE_TIMEOUT_S = 0.001
# Unlinked inodes are deleted in batches, this long after the kernel forgets them; a sweep finds the others.
ORPHANS_GATHER_S = 0.005
ORPHANS_INTERVAL_S = 120.0
STATFS_UNIT_BYTES = 4 * KIB
# Replies kept for requests that a process may take up after the one before. A power of two: the request number is the index.
REPLIES_KEPT = 4096
# Slots of the table of requests in flight. Nearly every request but a write fits into a small slot. A large slot takes any request, with
# room for its headers, and gets its memory when it is first used. If all are taken, the kernel keeps further requests.
REQUEST_SMALL_BYTES = KIB
REQUEST_SMALL_SLOTS = 1024
REQUEST_LARGE_BYTES = WRITE_BYTES_MAX + 4 * KIB
REQUEST_LARGE_SLOTS = 264
# Large slots that keep their memory, and how often the others are looked at.
REQUEST_LARGE_KEPT = 16
REQUEST_TRIM_INTERVAL_S = 60.0
REQUEST_FULL_WAIT_S = 0.01
# RELEASEs wait this long, so that one transaction deletes several handles.
RELEASE_GATHER_S = 0.004
# After a failure of the catalog's disk, they are tried again this often; the next change takes them along, too.
RELEASE_RETRY_S = 5.0
TIER_THREADS_MAX = 24  # of the mount process, that may wait for NVMe, and as many for the PFS
# What has had nothing from the PFS or NVMe for this long counts as hanging: another step or call runs in its place, for so many.
PFS_STALL_S = 2.0
PFS_STALLED_MAX = 64
# statfs, and a request for attributes, wait this long for the PFS; then they get the last known figures, or size and times.
PFS_STATUS_WAIT_S = 1.0
# Threads of the mount process that close files in RAM. A file without a name of at least FREE_BYTES_MIN is closed by them.
FREE_THREADS_MAX = 2
FREE_BYTES_MIN = 16 * MIB
COPY_RANGE_BYTES_MAX = 64 * MIB
# Kinds of names whose typical size the mount process remembers.
EXPECTED_NAMES_MAX = 4096
# An open waits this long for the mover to give up its lease. The kernel waits 45 s (fs.lease-break-time); the mover needs one block.
LEASE_WAIT_S = 50.0
LEASE_POLL_S = 0.002

# --- catalog ---------------------------------------------------------------------------------------------------------
CATALOG_BUSY_S = 60.0
WAL_PAGES_MAX = 8000
# The mount process runs a wal_checkpoint only when the log is this many times longer; the mover does it earlier.
WAL_MOUNT_FACTOR = 8
CHANGE_ROWS_MAX = 512
# An id is the number of its node, followed by a counter of that node; together 63 bits.
ID_COUNTER_BITS = 40
NODE_NUMBER_BITS = 23
# No node has a number of the upper half: all inode numbers below `.ckptfs` have SHOWN_BIT, see `history_names`.
NODE_NUMBER_MAX = (1 << NODE_NUMBER_BITS - 1) - 3
VIRTUAL_NODE = (1 << NODE_NUMBER_BITS) - 1
HISTORY_NAMES_NODE = VIRTUAL_NODE - 1
SHOWN_BIT = 1 << ID_COUNTER_BITS + NODE_NUMBER_BITS - 1
VIRTUAL_NAMES_MAX = 4096

# --- mover: requests and lanes ---------------------------------------------------------------------------------------
REQUEST_KEEP_S = 120.0
REQUEST_POLL_S = 1.0
DUE_POLL_S = 10.0
HINT_GATHER_S = 0.02
HINT_GATHER_MAX_S = 0.5
# A file of at least this size is not batched: its transfer takes longer than the wait.
LARGE_BYTES_MIN = 4 * MIB
RETRY_FIRST_S = 0.1
RETRY_LAST_S = 30.0
SCAN_WAIT_S = 30.0
SCAN_WAIT_SLOW_S = 1.0
CREATING_CALL_WAIT_S = 5.0
FSYNC_LEVEL_WAIT_S = 3600.0

# --- write-back and the PFS ------------------------------------------------------------------------------------------
PFS_ACT_WAIT_S = 20.0
SYNCED_INTERVAL_S = 60.0
REFRESH_INTERVAL_S = 300.0
# drain_deadline=auto: what is dirty at the measured speed of the PFS, DRAIN_MARGIN times over, and a minimum. A drain that moves gets more
# time, one that stands still for DRAIN_STALL_S ends. The speed is assumed until it is measured.
DRAIN_DEADLINE_S_MIN = 60.0
DRAIN_DEADLINE_S_MAX = 6 * 3600.0
DRAIN_MARGIN = 3.0
DRAIN_FILE_S = 0.02
DRAIN_STALL_S = 60.0
PFS_BYTES_PER_S_ASSUMED = 50 * MIB
# Batches below this size say nothing about the speed of the PFS.
PFS_SPEED_BYTES_MIN = 8 * MIB
# While the mount serves, files are closed behind the end of the drain: it begins again this often before the mount is detached.
DRAIN_ROUNDS_MAX = 3
# A drain that missed its deadline with the mount attached is not waited for again after the unmount, but for new files and their seals.
DRAIN_LAST_S = 2.0
DRAIN_RECENT_S = 60.0
# A drain that is blocked for this long names its obstacle.
DRAIN_SILENCE_S = 2.0
# A drain with a deadline looks this often what is urgent. Its order has so many files, and so many rows of the journal are looked at.
URGENT_INTERVAL_S = 1.0
# A drain that has all closed files waits so long for copies of open ones.
SECURE_WAIT_S = 5.0
URGENT_FILES_MAX = 20_000
AHEAD_ROWS_MAX = 100_000
# Preemption notices: how often a metadata server is asked, its time and its bytes for an answer, and how much of that is shown.
PREEMPTION_POLL_S = 2.0
PREEMPTION_ANSWER_S = 2.0
PREEMPTION_ANSWER_BYTES_MAX = 256 * KIB
PREEMPTION_WORDS_MAX = 200
PREEMPTION_DEADLINE_S = 25.0
PREEMPTION_URL = "http://169.254.169.254"
# A PFS copy that is complete before its content is sealed waits this long for the seal.
EARLY_SEAL_WAIT_S = 10.0
EARLY_SEAL_POLL_S = 0.005
# So many files of one batch are synced at the same time.
PFS_FSYNC_THREADS = 8
CHECK_BLOCKS = 64  # A file that is read back from the PFS is compared with the catalog every so many blocks.
# A temporary name on the PFS that is older than this was left by a dead node.
PARKED_KEEP_S = 3600.0
# After a rejoin, a node scans this long, and this often, for files that others could not write back or took for lost.
SKIPPED_SCAN_S = 60.0
SKIPPED_SCAN_INTERVAL_S = 10.0
# An island of this age copies its files to its own directory on the PFS. It looks for new ones, and for its return, this often.
ISLAND_KEEP_AFTER_S = 60.0
ISLAND_LOOK_S = 10.0

# --- fetch -----------------------------------------------------------------------------------------------------------
# In a cluster more fetches run at once: a long one must not delay small files.
FETCHES_MAX = 2
FETCHES_SHARED_MAX = 8
FETCHES_PFS_MAX = 6
FETCH_STALL_S = 60.0
# Awaited blocks of one file that the mover handles in one pass.
AWAITED_BLOCKS_MAX = 64
# The first open of an external file fetches it whole up to this size, or if the free space is this many times larger.
FETCH_WHOLE_BYTES = 64 * MIB
FETCH_SPACE_RATIO = 4
FETCH_TRIES_MAX = 8
# Longest pause between tries. While a node that announced the content is alive, tries go on for FETCH_PATIENCE_S.
FETCH_PAUSE_MAX_S = 1.0
FETCH_PATIENCE_S = 30.0
# A fetch from nodes that is slower after FETCH_PATIENCE_S goes to the PFS if the PFS has the file and the rest would take as long again.
FETCH_SLOW_BYTES_PER_S = 2 * MIB
# One node at a time reads a content of at least this size from the PFS; the others fetch it from that node.
FETCH_SHARED_BYTES_MIN = MIB
# They wait this long, plus one second for each FETCH_SHARED_BYTES_PER_S, also for a place at the holders. The lock of a dead node ends with
# its lease. A node looks again after a quarter of the time it has waited, within these bounds and with jitter.
FETCH_SHARED_WAIT_S = 30.0
FETCH_SHARED_BYTES_PER_S = 20 * MIB
FETCH_SHARED_POLL_S = 0.1
FETCH_SHARED_POLL_S_MAX = 2.0
# Lost files that are fetched from other nodes in the background at once.
REFETCHES_MAX = 1

# --- memory limits of applications --------------------------------------------------------------------------------------
CGROUP_AGE_S = 1.0  # The limits of a control group are read at most this often.
CGROUPS_KNOWN_MAX = 1024
CGROUP_BYTES_MAX = 64 * KIB
# The mount process reports the ways of open handles at most this often.
HANDLES_REPORT_S = 0.5
# What the processes of a mount need beside the RAM tier, with the kernel's memory for their files.
SERVICE_BYTES = GIB

# Prepared memory ahead of a program with a limit: what one write(2) writes at most. With less prepared, such a program gets no passthrough.
TOP_UP_AHEAD_BYTES = 2 * GIB
TOP_UP_STEP_BYTES = 32 * MIB
TOP_UP_RESERVE_BYTES = MIB
# A smaller prepared file is enlarged to that at open, if this takes at most so much processor time. It takes 6 ms with huge pages.
TOP_UP_OPEN_CPU_S = 0.02
# Spare files of that size: one for so much of the RAM tier (or one if `prepared=` leaves room), at most so many, and a new one so often.
SPARE_TIER_BYTES = 8 * GIB
SPARE_FILES_MAX = 4
SPARE_INTERVAL_S = 1.0
TOP_UP_POLL_S = 0.002
TOP_UP_IDLE_S = 1.0  # After this time without growth, files are looked at less often.
TOP_UP_IDLE_POLL_S = 0.01

# --- space -----------------------------------------------------------------------------------------------------------
RAM_HIGH_WATERMARK = 0.80
RAM_LOW_WATERMARK = 0.60
NVME_HIGH_WATERMARK = 0.95
# The largest of so many recent contents is the size of the next one.
RECENT_CONTENTS = 32
RAM_HEADROOM_BYTES_MIN = 64 * MIB
MEMORY_RESERVE_RATIO = 0.10
# With less free space than this, writes pass through the mount process, which moves a file on when its tier is full.
PASSTHROUGH_SPACE_BYTES_MIN = 512 * MIB
# The same for a file whose size cannot be expected, and for the last tier.
PASSTHROUGH_SPACE_UNKNOWN_BYTES_MIN = 1792 * MIB
PASSTHROUGH_SPACE_LAST_BYTES_MIN = 64 * MIB
# Ages up to which a measured capacity, and the measured use of a tier, are used.
CAPACITY_AGE_S = 0.02
USED_AGE_S = 1.0
# Where nothing but the daemon keeps the budget, files on NVMe grow by extents of this size, if the filesystem lets us choose.
EXTENT_BYTES = MIB
# A tier whose calls fail gets no new file for this long; then one is tried.
TIER_RETRY_S = 3.0
# Wait before ENOSPC: the space of files that were just unlinked is freed meanwhile. It is longer while the mover has work that frees space,
# counted from the last change, and bounded as a whole. The outlook is loaded, and the demand renewed, every NO_SPACE_CHECK_S.
NO_SPACE_WAIT_S = 1.0
NO_SPACE_PENDING_WAIT_S = 5.0
NO_SPACE_LONGEST_WAIT_S = 60.0
NO_SPACE_CHECK_S = 0.25
NO_SPACE_DEMAND_S = 2.0
# An open content that leaves a full tier needs this much more room than it has bytes.
MOVE_ROOM_BYTES_MIN = 4 * MIB
NO_SPACE_POLL_S = 0.025

# --- prepared memory -------------------------------------------------------------------------------------------------
# Smaller files are created as fast without a prepared file.
PREPARED_BYTES_MIN = 8 * MIB
# Prepared sizes are multiples of this: the size of a huge page.
PREPARED_STEP_BYTES = 2 * MIB
# A file is not taken for a content that would leave more than this share of it unused.
PREPARED_SURPLUS_RATIO = 2
# Files that wait in the pool. Every create of a large file lists them.
PREPARED_FILES_MAX = 256
# Places whose sizes are remembered, and for how long after the last file: a series may write once in hours.
PREPARED_PLACES_MAX = 256
PREPARED_AGE_S = 6 * 3600.0
# Share of the RAM tier that may be prepared.
PREPARED_SHARE = 0.50
# A prepared file serves a size that it exceeds by at most this share.
PREPARED_TOLERANCE = 0.125
# Prepared memory goes while processes wait for memory more than this share of the time (PSI, percent), until it is below the second one.
PREPARED_PRESSURE_HIGH = 10.0
PREPARED_PRESSURE_LOW = 1.0
PREPARED_POLL_S = 1.0
# Preparing one file pauses this long altogether while files are being written.
PREPARED_PATIENCE_S = 5.0
PREPARED_PAUSE_S = 0.02
# At close, the mount process removes at most this much of prepared memory that was not written. More is left to the seal.
PREPARED_TRIM_BYTES_MAX = 32 * MIB
# A prepared file with more holes than this shows its allocated pages in stat until it is sealed.
PREPARED_EXTENTS_MAX = 256

# --- retention -------------------------------------------------------------------------------------------------------
# Share of RAM and NVMe for bytes that only the history holds.
HISTORY_SHARE = 0.50
RETENTION_RULES_MAX = 256
SERIES_RULES_MAX = 64
RETENTION_SETS_MAX = 1_000_000
# Names of an expired set that are deleted in one change.
EXPIRED_NAMES_MAX = 256

# --- processes -------------------------------------------------------------------------------------------------------
RESTART_FIRST_S = 0.05
RESTART_LAST_S = 5.0
RESTARTS_MAX = 200
RESTARTS_WINDOW_S = 600.0
# Failures in a row after which a role that has been ready is given up.
FAILURES_MAX = 20
WATCHDOG_S = 60.0
READY_WAIT_S = 60.0
STOP_WAIT_S = 30.0
UPGRADE_WAIT_S = 75.0  # For the trial of another version, and for its answer.
# systemd is asked for this much more time at every turn of the supervisor while it ends.
STOP_EXTENSION_S = 20.0

# --- control ---------------------------------------------------------------------------------------------------------
CONTROL_MESSAGE_BYTES_MAX = MIB
CONTROL_CALLS_MAX = 64
CONTROL_WAITS_MAX = 256
CONTROL_LIST_MAX = 1000
# The message of a call must arrive within this time; an idle connection is closed after CONTROL_IDLE_S.
CONTROL_MESSAGE_S = 5.0
CONTROL_IDLE_S = 10.0
CONTROL_CONNECTIONS_MAX = 1024
# `doctor` and `status --cluster`: nodes probed, and concurrent probes.
PROBED_MAX = 64
PROBES_AT_ONCE = 16
# Published figures: how soon after a change they are published, and how often while they go on changing.
FIGURES_INTERVAL_S = 5.0
FIGURES_INTERVAL_S_MAX = 60.0
# Answers of the store to questions that any user of the machine may ask are used again for so long.
CLUSTER_FIGURES_FRESH_S = 2.0
COPIES_FRESH_S = 1.0

# --- HTTP: metrics, and the page of `ckptfs web` ---------------------------------------------------------------------
# Connections at once, the time in which something of a request has to come, and the time for a connection as a whole.
HTTP_CONNECTIONS_MAX = 8
HTTP_REQUEST_S = 5.0
HTTP_ANSWER_S = 30.0
# The text of the metrics is used again for this time.
METRICS_FRESH_S = 1.0
# sun_path has 108 bytes and ends with a zero.
SOCKET_PATH_BYTES_MAX = 107

# --- cluster membership ----------------------------------------------------------------------------------------------
NODE_LEASE_S = 10
# Interval of renewals: one may fail and the store may be slow before the lease expires.
NODE_LEASE_RENEW_S = 3.0
# If the mover has not renewed for this long, the mount process does, for up to STANDBY_LEASE_S: a mover starts slowly under load.
STANDBY_AFTER_S = 4.5
STANDBY_LEASE_S = 30.0
# After an outage of the store missing records count this long: every node needs one renewal to notice that the store is back.
NODE_RETURN_S = 15.0
# A start waits this long for the lease of a daemon with the same name, which may be dead.
NAME_WAIT_S = 15.0
# Joins and deaths within this time become one change of the cluster view.
VIEW_GATHER_S = 0.1
# Nodes named in one log line.
NODES_NAMED_MAX = 20
RANK_MAX = 2**31 - 1
# The list of revoked keys is checked for changes at most this often.
REVOKED_POLL_S = 1.0

# --- replication -----------------------------------------------------------------------------------------------------
REPLICATION_FACTOR = 2
REPLICATION_FACTOR_MAX = 16
REPLICATION_JUMP_MAX = 1_000_000
CLIQUE_WAIT_S = 30.0
PEER_SHARE = 0.5
# Contents queued for one peer, and concurrent sends to it.
PEER_QUEUE_MAX = 512
PEER_SENDS_MAX = 3
# fsyncs that replicate concurrently.
FSYNC_REPLICATIONS_MAX = 2
# Open files that are replicated: number, and poll intervals with and without such files.
OPEN_FILES_MAX = 1024
OPEN_FILES_POLL_S = 2.0
OPEN_IDLE_S = 5.0
# A file that stays open is replicated this long after an fsync or a write. GROMACS checkpoints, and fsyncs its logs, every 15 minutes.
OPEN_REPLICATE_FSYNCED_S = 2.0
OPEN_REPLICATE_S = 60.0
# Early replication of files that are being written: files, their smallest size, blocks read per pass, poll intervals.
EARLY_FILES_MAX = 8
EARLY_BYTES_MIN = 16 * MIB
EARLY_BLOCKS_MAX = 8
EARLY_POLL_S = 0.05
EARLY_IDLE_S = 0.5
# Incoming copies, and how long a partial one waits for the rest.
RECEPTIONS_MAX = 64
RECEPTION_KEEP_S = 300.0
# Recent contents, and their blocks (256 GiB), that are searched for blocks of an incoming one.
BLOCK_SOURCES_MAX = 256
BLOCK_SOURCES_BLOCKS_MAX = 64 * KIB
# Blocks (512 GiB) that are known as ones that others may share; smaller contents are not worth it.
SHARED_BLOCKS_MAX = 128 * KIB
SHARED_BYTES_MIN = 256 * KIB
# A peer waits at most this long for a closed content to be sealed; SEAL_REQUEST_S is the wait that this node asks for.
SEAL_REQUEST_MAX_S = 30.0
SEAL_REQUEST_S = 10.0

# Deleted contents stay this long for nodes that looked up their files before, if there is room; their number; how often that is checked.
READ_GRACE_S = 10.0
READ_GRACE_CONTENTS_MAX = 1000
READ_GRACE_POLL_S = 1.0

# --- repair, reconcile, salvage --------------------------------------------------------------------------------------
# Hosted contents are compared with the store this often, once they are older than RECONCILE_AGE_S.
RECONCILE_INTERVAL_S = 1800.0
RECONCILE_AGE_S = 60.0
# After so many batches a sweep pauses before each one: a node with a million contents asks etcd less than once in a second.
SWEEP_BATCHES = 20
SWEEP_PAUSE_S = 5.0
# One sweep in so many asks the nodes that announced a copy of a content, at most this many nodes in a batch.
AUDIT_SWEEPS = 8
AUDIT_NODES_MAX = 16
# What many nodes begin at the same event is spread over time: so much for each node beyond the first ones.
SPREAD_NODE_S = 0.1
SPREAD_FREE_NODES = 10
SPREAD_S_MAX = 600.0
# The same for work that restores lost copies, or finishes the write-back of a dead node.
SPREAD_URGENT_S_MAX = 10.0
# Contents that peers released and that are not checked yet.
UNCONFIRMED_MAX = 10_000
# While the writer still has such a content it is checked again: it may be about to learn of the deletion.
UNCONFIRMED_RECHECK_S = 2.0
UNCONFIRMED_TRIES = 5
# A surplus or stale copy is kept this long: it may be read again, or serve blocks of the next generation.
SURPLUS_KEEP_S = 600.0
# A content that a dead node never announced is kept this long.
UNPUBLISHED_KEEP_S = 86_400.0
# Records that dead nodes left in the store are searched for unused ones, first this long after a start.
DROP_RECORDS_FIRST_S = 900.0
DROP_RECORDS_INTERVAL_S = 21_600.0
# Files whose newest generation may be lost with a dead node are checked this often.
SALVAGE_POLL_S = 2.0
# A node with a previous generation waits this long for a node that may have a newer one.
SALVAGE_RIVALS_S = 10.0
# Readers of such a file wait this much longer for the decision.
SALVAGE_MARGIN_S = 3.0
MISSED_STATES_MAX = 8  # Contents of one file that nodes took for lost, and that their writers may bring back.

# --- shared namespace ------------------------------------------------------------------------------------------------
# Concurrent reads of the store; later questions join the next one.
SHARED_READS_MAX = 4
# Prefetched rows of a path are used this long, by the walk that caused them: names per walk, and walks and directories remembered.
LOOKUP_FRESH_S = 0.002
LOOKUP_NAMES_MAX = 16
LOOKUPS_MAX = 10_000
# A lookup within this time of the last reply belongs to the same walk. A change by another node takes longer to be noticed.
LOOKUP_STEP_S = 0.0003
# Changes that no caller waits for are delayed this long, so that they share a transaction with one that a caller waits for.
SHARED_GATHER_S = 0.02
SHARED_REPORT_S = 0.05
# Tries of a change that other nodes overtake.
SHARED_TRIES_MAX = 50
# An open waits this long for the content of a file that another node has just closed.
PUBLISHED_WAIT_S = 1.0
STORE_PUBLISHED_POLL_S = 0.01
# A disconnected node probes the store this often, and less often in a long outage; an idle node checks its epoch every STORE_POLL_S.
STORE_PROBE_S = 0.5
STORE_PROBE_S_MAX = 5.0
STORE_PROBE_WAIT_S = 1.0
# A disconnected node waits this long for the store before it refuses to rename or replace what others wrote last.
DISCONNECTED_WAIT_S = 5.0
STORE_POLL_S = 5.0
# Keys of other nodes in the catalog, keys evicted per pass, and the interval of passes.
CACHED_KEYS_MAX = 400_000
CACHED_KEYS_DROPPED = 2000
FORGET_INTERVAL_S = 5.0
# A directory on the PFS with so many names is named in the log: 100,000 names take some 100 MB of etcd's quota, with their history.
SHARED_NAMES_MAX = 100_000
# Recently deleted names: an older reply must not restore them.
RECENT_KEYS_MAX = 10_000

# --- etcd ------------------------------------------------------------------------------------------------------------
ETCD_ENDPOINTS_MAX = 16
# A call that takes longer disconnects the node.
ETCD_WAIT_S = 3.0
# Time for one endpoint before the next one is tried, and the pause after a round of failures; longest pause if etcd has too many requests.
ETCD_TRY_S = 1.0
ETCD_PAUSE_S = 0.05
ETCD_PAUSE_S_MAX = 1.0
# A deadline noticed this late means that the process itself was suspended: the call is repeated once.
ETCD_LATE_S = 0.5
# Operations in one transaction by etcd's default; one of ours checks the epoch of the store.
ETCD_TRANSACTION_MAX = 128
ETCD_OPERATIONS_MAX = ETCD_TRANSACTION_MAX - 2
# etcd's default is 1.5 MiB including overhead. The reads of a failed transaction come in one response, which may be larger.
ETCD_REQUEST_BYTES_MAX = 1_400 * KIB
ETCD_RESPONSE_BYTES_MAX = 16 * MIB
# This many items with names of 255 bytes are about 1 MB.
ETCD_PAGE_ITEMS = 2000
# etcd disconnects a client that probes an idle connection more often than every 5 s.
ETCD_PROBE_S = 6.0
ETCD_PROBE_WAIT_S = 2.0

# --- latest ----------------------------------------------------------------------------------------------------------
# What sealed files show of themselves is remembered for as many.
INSPECTED_FILES_MAX = 65_536
# Blocks of one file that travel between nodes to inspect it: its beginning, its end, and what lies in between of a pickle.
INSPECTED_BLOCKS_MAX = 16
# A tier, or the mover, answers within INSPECT_WAIT_S, or the file counts as unreadable; then the tier is left alone for INSPECT_REST_S.
INSPECT_WAIT_S = 5.0
INSPECT_REST_S = 10.0

# --- checkpoint sets -------------------------------------------------------------------------------------------------

# Hints are gathered for SET_GATHER_S before the tracker looks; without any it looks every SET_POLL_S.
SET_GATHER_S = 0.05
SET_POLL_S = 1.0
# Candidates of one batch, and files of one set: a directory with more is no set.
SET_CANDIDATES_MAX = 512
SET_FILES_MAX = 100_000
# A change that makes or removes a set ends after SET_CHANGE_S or SET_NAMES_PER_CHANGE names: requests of applications come in between.
SET_CHANGE_S = 0.004
SET_NAMES_PER_CHANGE = 32
# The newest member of a series, if it is incomplete, is looked at again after SET_RETRY_S, then less and less often.
SET_RETRY_S = 1.0
SET_RETRY_MAX_S = 60.0
# How often a series is asked what it keeps while an older set waits until a newer one is as safe.
SET_REVIEW_S = 2.0
# After a search the tracker pauses SET_SEARCH_PAUSE times as long, up to SET_POLL_S. So does, without bound, a directory that was read.
SET_SEARCH_PAUSE = 10
# A set that a program got as the newest stays for SET_NAMED_S, if RAM and NVMe have room for two more: it is about to be read.
SET_NAMED_S = 30.0
# An open through `.ckptfs/complete` looks this often whether its set is complete. So many may wait at once; others get EAGAIN.
SET_WAIT_POLL_S = 0.5
SET_WAITERS_MAX = 256
# The removal of a name of a checkpoint waits at most SET_LOOK_WAIT_S until the tracker has looked at what was sealed before.
SET_LOOK_WAIT_S = 3.0
# In a cluster, nodes look at what changed within SET_SPREAD_S for each of them, so that not all judge the same set.
SET_SPREAD_S = 0.1

# --- peers: messages -------------------------------------------------------------------------------------------------
PEER_LISTEN = "0.0.0.0:7420"
# Block digests of one message: 4 TiB of content. Larger contents stay on their node and the PFS.
PEER_BLOCKS_MAX = MIB
PEER_MESSAGE_BYTES_MAX = 16 * PEER_BLOCKS_MAX + 2 * MIB
# Blocks travel in pieces of this size; smaller contents travel inside the offer.
PEER_PIECE_BYTES = MIB
PEER_INLINE_BYTES_MAX = 256 * KIB
# Small contents in one message.
PEER_BATCH_MAX = 64
PEER_BATCH_BYTES_MAX = 2 * MIB
PEER_FORGET_MAX = 4096
PEER_RUN_BLOCKS_MAX = 64

# --- peers: server ---------------------------------------------------------------------------------------------------
# Threads. Most calls are short; Send, Read and SealSoon are not and have quotas.
PEER_WORKERS = 56
PEER_CALLS_MAX = 64
PEER_STREAMS_MAX = 16
PEER_STREAMS_PER_PEER_MAX = 8
PEER_SEALS_MAX = 8
PEER_SEAL_WAIT_S_MAX = 60.0
# Calls of one peer whose message has not arrived completely.
PEER_AWAITED_PER_PEER_MAX = 16
# gRPC connections, including unauthenticated ones.
PEER_CHANNELS_MAX = 4096
PEER_HANDSHAKE_S = 5.0
PEER_TRANSFERS_MAX = 256
# Fewer than RECEPTIONS_MAX: a peer that offers much and sends nothing must not lock out the others.
PEER_TRANSFERS_PER_PEER_MAX = 24
PEER_IDLE_COPIES_MAX = 256
# So many nodes at a time fetch a content of at least this size from one holder. The others wait, and take it from the first that have it:
# n nodes need about log n rounds. A place without a read ends after PEER_READER_S.
PEER_READERS_MAX = 3
PEER_READERS_BYTES_MIN = 16 * MIB
PEER_READER_S = 5.0
# Peers with a rejection counter of their own; the others share one.
PEER_COUNTERS_MAX = 64
# An unused transfer, idle copy or connection ends after PEER_IDLE_S.
PEER_IDLE_S = 60.0
PEER_SWEEP_S = 2.0

# --- peers: client ---------------------------------------------------------------------------------------------------
PEER_CALL_S = 10.0
PEER_CONNECT_S = 2.0
# Disk time of a peer: it prepares a file, and verifies it at the end.
PEER_DISK_S = 120.0
PEER_TRIES_MAX = 4
PEER_SOURCES_MAX = 3
PEER_LINKS_MAX = 128
# Concurrent streams to one peer, in each direction.
PEER_LINK_STREAMS_MAX = 4
# A stream is cut if no byte arrives for PEER_STALL_S, or no whole piece for PEER_PIECE_S.
PEER_STALL_S = 15.0
PEER_PIECE_S = 120.0
# If there are other sources, they take over after this time.
PEER_PATIENCE_S = 2.0
# A run of blocks takes about this long at the measured speed of the source; then it is free for urgent blocks.
PEER_RUN_S = 0.5
# After this time an urgent block is requested from a second source as well.
PEER_HEDGE_S = 0.5
# After a failure a peer ranks behind the others for this long.
PEER_SUSPECT_S = 30.0
PEER_KEEP_ALIVE_S = 10.0
PEER_KEEP_ALIVE_WAIT_S = 5.0
PEER_SPEED_SAMPLE_BYTES_MIN = MIB
# Links slower than this use zstd: about half of what zstd compresses on one core.
PEER_COMPRESS_BYTES_PER_S = 200 * MIB

# --- checks ----------------------------------------------------------------------------------------------------------
assert REPLIES_KEPT & (REPLIES_KEPT - 1) == 0 and ID_COUNTER_BITS + NODE_NUMBER_BITS == 63
assert 0 < RAM_LOW_WATERMARK < RAM_HIGH_WATERMARK < 1
assert HINT_GATHER_S <= HINT_GATHER_MAX_S < SCAN_WAIT_S and EARLY_SEAL_POLL_S < EARLY_SEAL_WAIT_S
assert METRICS_FRESH_S < HTTP_REQUEST_S < HTTP_ANSWER_S and REQUEST_POLL_S < SCAN_WAIT_S < REQUEST_KEEP_S
assert RETRY_FIRST_S < RETRY_LAST_S and RESTART_FIRST_S < RESTART_LAST_S and NO_SPACE_CHECK_S < NO_SPACE_DEMAND_S
assert PFS_ACT_WAIT_S < WATCHDOG_S and DRAIN_LAST_S < DRAIN_STALL_S <= DRAIN_DEADLINE_S_MIN < DRAIN_DEADLINE_S_MAX
assert NO_SPACE_POLL_S < NO_SPACE_CHECK_S < NO_SPACE_WAIT_S < NO_SPACE_PENDING_WAIT_S < NO_SPACE_LONGEST_WAIT_S
assert 2 * XATTR_SHARED_BYTES_MAX * 4 // 3 < ETCD_REQUEST_BYTES_MAX - 128 * KIB
assert ETCD_PAUSE_S < ETCD_TRY_S < ETCD_WAIT_S and ETCD_REQUEST_BYTES_MAX < ETCD_RESPONSE_BYTES_MAX
assert 2 * PEER_STREAMS_PER_PEER_MAX + PEER_SEALS_MAX + PEER_AWAITED_PER_PEER_MAX < PEER_WORKERS <= PEER_CALLS_MAX
assert PEER_READER_S < PEER_STALL_S < PEER_IDLE_S and 2 * PEER_TRANSFERS_PER_PEER_MAX < RECEPTIONS_MAX <= PEER_TRANSFERS_MAX
assert BLOCK_BYTES % PEER_PIECE_BYTES == 0 and PEER_INLINE_BYTES_MAX <= BLOCK_BYTES
assert PEER_INLINE_BYTES_MAX <= PEER_BATCH_BYTES_MAX and 2 * PEER_BATCH_BYTES_MAX < PEER_MESSAGE_BYTES_MAX
assert 2 * NODE_LEASE_RENEW_S + ETCD_WAIT_S < NODE_LEASE_S < min(NODE_RETURN_S, NAME_WAIT_S)
assert NODE_LEASE_RENEW_S < STANDBY_AFTER_S < NODE_LEASE_S - ETCD_WAIT_S < STANDBY_LEASE_S
assert NODE_LEASE_S + PEER_STALL_S < FETCH_PATIENCE_S and FETCH_SHARED_POLL_S < FETCH_SHARED_POLL_S_MAX < PEER_READER_S
assert FETCH_PATIENCE_S + SALVAGE_RIVALS_S + SALVAGE_POLL_S + SALVAGE_MARGIN_S < FETCH_STALL_S and FETCHES_PFS_MAX < FETCHES_SHARED_MAX
assert 2 * PEER_LINK_STREAMS_MAX <= PEER_STREAMS_PER_PEER_MAX
