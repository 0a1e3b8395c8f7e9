"""Every bound of the product, in one place. Units are the last word of a name; the checks at the end hold at import."""

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# --- names and trees -------------------------------------------------------------------------------------------------
NAME_BYTES_MAX = 255
PATH_BYTES_MAX = 4095
SYMLINK_BYTES_MAX = 4095
LINKS_MAX = 65_000
XATTR_VALUE_BYTES_MAX = 64 * KIB
XATTR_LIST_BYTES_MAX = 64 * KIB
# All of one inode's in a cluster, whose store takes them with the inode in one request; two nodes may add as much at once.
XATTR_SHARED_BYTES_MAX = 256 * KIB

# --- content ---------------------------------------------------------------------------------------------------------
BLOCK_BYTES = 4 * MIB
# The blocks' digests of larger files (16 TiB, mostly holes) are not kept: 64 MiB of them.
BLOCK_DIGESTS_MAX = 4 * MIB
# A closed file from this size on is digested by so many threads, one for each processor at most.
DIGEST_TOGETHER_BYTES_MIN = 64 * MIB
DIGEST_THREADS_MAX = 4
FILE_BYTES_MAX = 2**63 - 1
# What a copy may be ahead of the disk. 16 MiB and more keep a disk of 3 GB/s busy.
UNWRITTEN_BYTES_MAX = 16 * MIB

# --- FUSE ------------------------------------------------------------------------------------------------------------
WRITE_BYTES_MAX = MIB
READ_AHEAD_KIB = 1024
# Changes reach the kernel's caches as notifications, so these are long; they bound what a lost notification can cost.
ENTRY_TIMEOUT_S = 300.0
ATTRIBUTE_TIMEOUT_S = 300.0
NEGATIVE_TIMEOUT_S = 300.0
# A mapping on the passthrough path changes a file's time without the kernel's attributes of ours knowing.
WRITTEN_ATTRIBUTE_TIMEOUT_S = 0.5
# What lost its last name is deleted so long after the kernel forgot it (several at once), and looked for so often.
ORPHANS_GATHER_S = 0.005
ORPHANS_INTERVAL_S = 120.0
# statfs waits so long for a PFS that may hang, then says what it said last.
STATFS_WAIT_S = 1.0
STATFS_UNIT_BYTES = 4 * KIB
# Answers kept for requests that the kernel may send again; a power of two, addressed by the request's number.
REPLIES_KEPT = 4096

# --- the catalog -----------------------------------------------------------------------------------------------------
CATALOG_BUSY_S = 60.0
WAL_PAGES_MAX = 8000
# The mount leaves wal_checkpoints to the mover until the log is so many times as long.
WAL_PATIENCE = 8
CHANGE_ROWS_MAX = 512

# --- waiting ---------------------------------------------------------------------------------------------------------
SCAN_WAIT_S = 30.0
SCAN_WAIT_SLOW_S = 1.0
FETCH_STALL_S = 60.0
FSYNC_LEVEL_WAIT_S = 3600.0
# A copy on the PFS that is whole before its content is sealed waits so long for that, and looks so often.
EARLY_SEAL_WAIT_S = 10.0
EARLY_SEAL_POLL_S = 0.005
HINT_GATHER_S = 0.02
HINT_GATHER_MAX_S = 0.5
# A file from this size on does not wait for company on its way: gathering would take longer than its bytes.
LARGE_BYTES_MIN = 4 * MIB
RETRY_FIRST_S = 0.1
RETRY_LAST_S = 30.0
PFS_ACT_WAIT_S = 20.0
REQUEST_KEEP_S = 120.0
REQUEST_POLL_S = 1.0
REQUEST_SWEEP_S = 10.0
DUE_POLL_S = 10.0
FETCHES_MAX = 2
# In a cluster a long one over a slow link must not keep small files waiting, and applications read while they last.
FETCHES_SHARED_MAX = 6
# Blocks that readers wait for, of one file that is being fetched, and that are looked at at once.
AWAITED_BLOCKS_MAX = 64
# A file of a stranger is brought here at its first opening up to this size, or where the room is this many times as large.
FETCH_WHOLE_BYTES = 64 * MIB
FETCH_SPACE_RATIO = 4
FETCH_TRIES_MAX = 8
# Tries of a file follow each other at most so far apart. While a node lives that told of it, it is tried for so long.
FETCH_PAUSE_MAX_S = 1.0
FETCH_PATIENCE_S = 30.0
SYNCED_INTERVAL_S = 60.0
REFRESH_INTERVAL_S = 300.0

# --- the cluster -----------------------------------------------------------------------------------------------------
ETCD_ENDPOINTS_MAX = 16
# A number is the upper bits of the ids that its node makes, which are positive in 64 bits with 40 left for counting.
NODE_NUMBER_MAX = 2**23 - 2
# The last one is no node's: ids of what is shown and in no catalog begin with it. So many of them are known at a time.
VIRTUAL_NODE = 2**23 - 1
VIRTUAL_NAMES_MAX = 4096
NODE_LEASE_S = 10
# A node keeps its lease this often; one try may fail, and the store may take its time, before it runs out.
NODE_LEASE_RENEW_S = 3.0
# When its mover has not done so for so long its mount does, up to so long: under load a mover takes its time to begin.
NODE_SILENT_S = 4.5
STANDBY_LEASE_S = 30.0
# After an outage of the store, records that are missing count this long: everybody needs a beat to notice that it is back.
NODE_RETURN_S = 15.0
# A start waits so long for the lease of a daemon with the same name, which may be dead.
NAME_WAIT_S = 15.0
# Joins and deaths that come within this time change the World once.
VIEW_GATHER_S = 0.1
# How often a node tells the figures of `ckptfs status --cluster`, if they have changed.
FIGURES_INTERVAL_S = 5.0
# Of more nodes that come or go at once only the first are named in the log.
NODES_NAMED_MAX = 20
PEER_LISTEN = "0.0.0.0:7420"
PEER_SHARE = 0.5
RANK_MAX = 2**31 - 1
REPLICATION_FACTOR = 2
REPLICATION_FACTOR_MAX = 16
REPLICATION_JUMP_MAX = 1_000_000
CLIQUE_WAIT_S = 30.0
# A file gets no further in a lifetime than this from what is known of it; one that is said to have would never be whole again.
GENERATIONS_AHEAD_MAX = 2**40
GENERATION_MAX = 2**62
# What arrives from peers at once, and how long a part waits for the rest before it goes.
RECEPTIONS_MAX = 64
RECEPTION_KEEP_S = 300.0
# Contents that wait to be sent to one peer, and how many are sent to it at once.
PEER_QUEUE_MAX = 512
PEER_SENDS_MAX = 3
# fsyncs that wait for other nodes and are served at once.
FSYNC_REPLICATIONS_MAX = 2
# Files that stay open: so many are looked at, so often while there are any, and else. One that was fsynced is copied to other nodes after
# so long if it is still open, one that was changed after so long; GROMACS writes its checkpoints, and fsyncs its logs, every 15 minutes.
OPEN_FILES_MAX = 1024
OPEN_FILES_POLL_S = 2.0
OPEN_IDLE_S = 5.0
OPEN_REPLICATE_FSYNCED_S = 2.0
OPEN_REPLICATE_S = 60.0
# Files that were lost here and are fetched from other nodes although nobody waits for them, at once.
REFETCHES_MAX = 1
# Of so many files that are being written, from this size on, so many blocks are read at a look, and looked at so often.
EARLY_FILES_MAX = 8
EARLY_BYTES_MIN = 16 * MIB
EARLY_BLOCKS_MAX = 8
EARLY_POLL_S = 0.05
EARLY_IDLE_S = 0.5
# Contents that peers no longer want held and that were not looked at yet.
UNCONFIRMED_MAX = 10_000
# Their writer may just be hearing that they are deleted: while it has them they are looked at again, so late and so often at most.
UNCONFIRMED_RECHECK_S = 2.0
UNCONFIRMED_TRIES = 5
# What lies here is compared with the store so often; what came less than so long ago is left alone.
RECONCILE_INTERVAL_S = 1800.0
# Files whose content may be lost with a node that died are looked at again so often, while that is not decided.
SALVAGE_POLL_S = 2.0
# A node that has a former generation waits so long for one that may have a newer one.
SALVAGE_RIVALS_S = 10.0
# Whoever wants to read such a file waits so much longer for what they decide.
SALVAGE_MARGIN_S = 3.0
RECONCILE_AGE_S = 60.0
# A node that returns looks so long, and so often, for what the others could not write back or took for lost.
LEFT_OUT_S = 60.0
LEFT_OUT_LOOK_S = 10.0
# A copy that is one too many, or of an older generation, is kept so long for whoever reads it again, or its next generation.
SURPLUS_KEEP_S = 600.0
# What waits on the PFS until its own name is free was left by a node that died when it does so for so long.
PARKED_KEEP_S = 3600.0
# What dead nodes said in the store of contents that nobody has is looked through so long after a start, and so often.
DROP_RECORDS_FIRST_S = 900.0
DROP_RECORDS_INTERVAL_S = 21_600.0
# A content of which a dead node never told anybody is kept so long.
UNPUBLISHED_KEEP_S = 86_400.0
# So many of the contents that came last, with so many blocks altogether (256 GiB), are looked through for blocks of the next one.
BLOCK_SOURCES_MAX = 256
BLOCK_SOURCES_BLOCKS_MAX = 64 * KIB
# A peer waits so long for a content that is closed here to be sealed.
SEAL_REQUEST_MAX_S = 30.0
SEAL_ASKED_S = 10.0
# From this size on one node at a time reads a content from the PFS; the others take it from there.
FETCH_SHARED_BYTES_MIN = MIB
# They wait so long for it, and a second more for each so many bytes, and look so often; a dead one's claim ends with its lease.
FETCH_SHARED_WAIT_S = 30.0
FETCH_SHARED_BYTES_PER_S = 20 * MIB
FETCH_SHARED_POLL_S = 0.1

# --- a shared catalog -------------------------------------------------------------------------------------------------
# Ids are a node's number and so many bits of a counter of its own; together 63 bits.
ID_COUNTER_BITS = 40
NODE_NUMBER_BITS = 23
# Reads of the store under way at once; what is asked meanwhile goes together with the next one.
SHARED_READS_MAX = 4
# What was read for a path that a thread walks along counts for that walk, so long; of so many names; of so many walks and directories.
LOOKUP_FRESH_S = 0.002
# A step of it follows the answer to the one before within that; what another node does takes longer, and so does hearing of it.
LOOKUP_STEP_S = 0.0003
LOOKUP_NAMES_MAX = 16
LOOKUPS_MAX = 10_000
# Files that replace each other under a name faster than each is fetched: so many are tried until one is here.
STALE_OPEN_LOOKUPS_MAX = 16
# What nobody waits for is told so much later, so that it goes together with what somebody does.
SHARED_GATHER_S = 0.02
# The kernel asks for attributes once more right after a lookup unless they are good for that long; names are never good for longer.
SHARED_ATTRIBUTE_TIMEOUT_S = 0.001
# An open waits so long for the content of what another node has closed a moment ago, and asks for it so often.
PUBLISHED_WAIT_S = 1.0
STORE_PUBLISHED_POLL_S = 0.01
# How often a change is tried again because another node was faster.
SHARED_TRIES_MAX = 50
# A store that did not answer is asked again so often.
ISLAND_PROBE_S = 0.5
ISLAND_PROBE_WAIT_S = 1.0
# A node that asks the store nothing looks so often whether it is still the same one.
STORE_POLL_S = 5.0
# So long nobody acts on what a store says of the PFS after it has lost data: every node has noticed it by then, and begun to tell.
STORE_PUBLISH_S = 20.0
# After the store has lost data, what it does not say need not be true for so long; people are told of it for so long.
STORE_LOST_REST_S = 600.0
STORE_LOST_SHOWN_S = 3600.0
# How many keys of other nodes a catalog remembers before it forgets those that it needs least, how many at once, and how often it looks.
CACHED_KEYS_MAX = 400_000
CACHED_KEYS_DROPPED = 2000
FORGET_INTERVAL_S = 5.0
SHARED_REPORT_S = 0.05
# Names that were deleted a moment ago: an answer that is older must not bring them back.
RECENT_KEYS_MAX = 10_000

# --- processes -------------------------------------------------------------------------------------------------------
RESTART_FIRST_S = 0.05
RESTART_LAST_S = 5.0
RESTARTS_MAX = 200
# Deaths in a row of a child that never got to work.
FAILURES_MAX = 20
RESTARTS_WINDOW_S = 600.0
WATCHDOG_S = 60.0
READY_WAIT_S = 60.0
DRAIN_DEADLINE_S = 60.0
STOP_WAIT_S = 30.0

# --- control ---------------------------------------------------------------------------------------------------------
CONTROL_MESSAGE_BYTES_MAX = MIB
CONTROL_CALLS_MAX = 64
CONTROL_WAITS_MAX = 256
CONTROL_LIST_MAX = 1000
# A call's message comes within that; a connection without calls ends after that, and may be made again.
CONTROL_MESSAGE_S = 5.0
CONTROL_IDLE_S = 10.0
CONTROL_CONNECTIONS_MAX = 1024

# --- etcd ------------------------------------------------------------------------------------------------------------
# A call that waits longer finds the node an island.
ETCD_WAIT_S = 3.0
# One endpoint gets so long before the next is tried.
ETCD_TRY_S = 1.0
# Who finds out so much later that its time is over has stood still itself, and asks once more.
ETCD_LATE_S = 0.5
# Between tries when no endpoint can serve.
ETCD_PAUSE_S = 0.05
# etcd's own bounds for one transaction, as it is when nobody configures it (1.5 MiB with everything around it).
ETCD_TRANSACTION_MAX = 128
# What a caller may ask for at once; one more looks whether the store is still the same.
ETCD_OPERATIONS_MAX = ETCD_TRANSACTION_MAX - 1
ETCD_REQUEST_BYTES_MAX = 1_400 * KIB
# What a failed commit reads instead comes in one answer, and may be larger than what was to be put.
ETCD_ANSWER_BYTES_MAX = 16 * MIB
# Of names with 255 bytes so many are a megabyte.
ETCD_PAGE_ITEMS = 2000
# etcd cuts a client off that probes an idle connection more often than every 5 s.
ETCD_PROBE_S = 6.0
ETCD_PROBE_WAIT_S = 2.0

# What doctor asks of the other nodes: of so many, so many at once, and again after so long.
PROBED_MAX = 64
PROBES_AT_ONCE = 16
PROBE_KEPT_S = 2.0

# --- peers -----------------------------------------------------------------------------------------------------------
# The blocks' digests of a content that travels: 4 TiB. Larger ones stay on their node and the PFS.
PEER_BLOCKS_MAX = MIB
PEER_MESSAGE_BYTES_MAX = 16 * PEER_BLOCKS_MAX + 2 * MIB
# Bulk travels in pieces of this length; smaller contents travel inside the offer.
PEER_PIECE_BYTES = MIB
PEER_WHOLE_BYTES_MAX = 256 * KIB
# So many small contents, of so many bytes altogether, travel in one message.
PEER_MANY_MAX = 64
PEER_MANY_BYTES_MAX = 2 * MIB
PEER_FORGET_MAX = 4096
PEER_RUN_BLOCKS_MAX = 64
# What is asked of a source at once takes about so long at its measured speed: then it is free for what somebody waits for.
PEER_RUN_S = 0.5
# A block that a reader waits for and that a source owes for so long is asked of another one as well.
PEER_HEDGE_S = 0.5
PEER_SEAL_WAIT_S_MAX = 60.0
# A server's threads: most calls are short, Send, Read and SealSoon are not and have shares of their own.
PEER_WORKERS = 56
PEER_CALLS_MAX = 64
# Calls of one peer whose message is still on its way.
PEER_AWAITED_OF_ONE_MAX = 16
# gRPC connections to this node, those included that have not said yet who they are.
PEER_CHANNELS_MAX = 4096
PEER_STREAMS_MAX = 16
PEER_STREAMS_OF_ONE_MAX = 8
PEER_SEALS_MAX = 8
PEER_CONNECTIONS_MAX = 64
PEER_CONNECTIONS_OF_ONE_MAX = 16
PEER_TOKENS_OF_ONE_MAX = 16
PEER_TRANSFERS_MAX = 256
# Less than what may arrive at once (RECEPTIONS_MAX): who offers much and sends nothing keeps nobody else out.
PEER_TRANSFERS_OF_ONE_MAX = 24
PEER_OPEN_COPIES_MAX = 256
PEER_OPEN_COPIES_OF_ONE_MAX = 64
# Peers of whom refused calls are counted one by one; the others are counted together.
PEER_COUNTED_MAX = 64
# A token opens its connection within this time, a connection says its token, or ends its TLS handshake, within it.
PEER_TOKEN_S = 10.0
# A transfer, a loan or a connection that nobody uses ends; the sweep looks so often.
PEER_IDLE_S = 60.0
PEER_SWEEP_S = 2.0
# Nothing at all arrives for so long, or less than a piece for so long: the stream is broken off.
PEER_STALL_S = 15.0
PEER_PIECE_S = 120.0
# Where there are other sources they take over after this time already.
PEER_PATIENCE_S = 2.0
PEER_CALL_S = 10.0
PEER_CONNECT_S = 2.0
# Preparing a file, and checking it at the end, may take the disk so long.
PEER_DISK_S = 120.0
PEER_TRIES_MAX = 4
PEER_SOURCES_MAX = 3
PEER_LINKS_MAX = 128
# Streams that this node has with one peer at once, in each direction.
PEER_LINK_STREAMS_MAX = 4
# After a failure a peer ranks behind the others for this long; a bulk port that cannot be reached is tried again after it.
PEER_SUSPECT_S = 30.0
PEER_KEEP_ALIVE_S = 10.0
# The list of revoked keys is looked at again at most so often.
REVOKED_POLL_S = 1.0
PEER_KEEP_ALIVE_WAIT_S = 5.0
PEER_SPEED_SAMPLE_BYTES_MIN = MIB
# zstd is tried on links that are known to be slower than this: about half of what it makes of one core.
PEER_COMPRESS_BYTES_PER_S = 200 * MIB

# --- space -----------------------------------------------------------------------------------------------------------
RAM_HIGH_WATERMARK = 0.80
RAM_LOW_WATERMARK = 0.60
RAM_HEADROOM_BYTES_MIN = 64 * MIB
MEMORY_RESERVE_RATIO = 0.10
# With less free than this, writes into a tier pass through the mount process, which can move a file on when the tier is full.
UNWATCHED_SPACE_BYTES_MIN = 512 * MIB
# The same for a file of whose kind none was seen yet.
UNWATCHED_SPACE_UNKNOWN_BYTES_MIN = 1792 * MIB
# The same for a tier after which there is none.
UNWATCHED_SPACE_LAST_BYTES_MIN = 64 * MIB
# How long a figure about a tier's room may be believed.
CAPACITY_AGE_S = 0.02
USED_AGE_S = 1.0
# Releases wait this long for company, so that one transaction takes many.
RELEASE_GATHER_S = 0.004
LEASE_POLL_S = 0.002
# The kernel waits 45 s (fs.lease-break-time) for the mover to give up a lease; it does within one block.
LEASE_WAIT_S = 50.0
EXPECTED_NAMES_MAX = 4096
# Before ENOSPC is answered: what was unlinked just now is on its way out.
NO_SPACE_WAIT_S = 1.0
NO_SPACE_POLL_S = 0.025
# Threads of the mount process that may wait for the PFS at once.
PFS_THREADS_MAX = 24
COPY_RANGE_BYTES_MAX = 64 * MIB

assert REPLIES_KEPT & (REPLIES_KEPT - 1) == 0
assert 0 < RAM_LOW_WATERMARK < RAM_HIGH_WATERMARK < 1
assert HINT_GATHER_S <= HINT_GATHER_MAX_S < SCAN_WAIT_S and EARLY_SEAL_POLL_S < EARLY_SEAL_WAIT_S
assert RETRY_FIRST_S < RETRY_LAST_S and RESTART_FIRST_S < RESTART_LAST_S
assert REQUEST_POLL_S < SCAN_WAIT_S < REQUEST_KEEP_S
assert PFS_ACT_WAIT_S < WATCHDOG_S
assert 2 * XATTR_SHARED_BYTES_MAX * 4 // 3 < ETCD_REQUEST_BYTES_MAX - 128 * KIB
assert 2 * STORE_POLL_S <= STORE_PUBLISH_S < STORE_LOST_REST_S <= STORE_LOST_SHOWN_S
assert ETCD_PAUSE_S < ETCD_TRY_S < ETCD_WAIT_S and ETCD_REQUEST_BYTES_MAX < ETCD_ANSWER_BYTES_MAX
assert 2 * PEER_STREAMS_OF_ONE_MAX + PEER_SEALS_MAX + PEER_AWAITED_OF_ONE_MAX < PEER_WORKERS <= PEER_CALLS_MAX
assert PEER_STALL_S < PEER_IDLE_S and 2 * PEER_TRANSFERS_OF_ONE_MAX < RECEPTIONS_MAX <= PEER_TRANSFERS_MAX
assert BLOCK_BYTES % PEER_PIECE_BYTES == 0 and PEER_WHOLE_BYTES_MAX <= BLOCK_BYTES
assert PEER_WHOLE_BYTES_MAX <= PEER_MANY_BYTES_MAX and 2 * PEER_MANY_BYTES_MAX < PEER_MESSAGE_BYTES_MAX
assert 2 * NODE_LEASE_RENEW_S + ETCD_WAIT_S < NODE_LEASE_S < min(NODE_RETURN_S, NAME_WAIT_S)
assert NODE_LEASE_RENEW_S < NODE_SILENT_S < NODE_LEASE_S - ETCD_WAIT_S < STANDBY_LEASE_S
assert NODE_LEASE_S + PEER_STALL_S < FETCH_PATIENCE_S
assert FETCH_PATIENCE_S + SALVAGE_RIVALS_S + SALVAGE_POLL_S + SALVAGE_MARGIN_S < FETCH_STALL_S
assert 2 * PEER_LINK_STREAMS_MAX <= PEER_STREAMS_OF_ONE_MAX < PEER_CONNECTIONS_OF_ONE_MAX
