from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UpgradeRequest(_message.Message):
    __slots__ = ("python", "places")
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    python: str
    places: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, python: _Optional[str] = ..., places: _Optional[_Iterable[str]] = ...) -> None: ...

class UpgradeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Status(_message.Message):
    __slots__ = ("name", "mountpoint", "state", "version", "health", "data_path", "data_path_reason", "fsync", "pfs", "drain_deadline_s", "tiers", "write_back", "counts", "processes", "troubles", "refused", "clique", "handles", "memory", "survives_kill", "survives_supervisor_kill", "notice", "request_timeout_s", "history", "scrub")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MOUNTPOINT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    DATA_PATH_FIELD_NUMBER: _ClassVar[int]
    DATA_PATH_REASON_FIELD_NUMBER: _ClassVar[int]
    FSYNC_FIELD_NUMBER: _ClassVar[int]
    PFS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    WRITE_BACK_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    CLIQUE_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    SURVIVES_KILL_FIELD_NUMBER: _ClassVar[int]
    SURVIVES_SUPERVISOR_KILL_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    name: str
    mountpoint: str
    state: str
    version: str
    health: str
    data_path: str
    data_path_reason: str
    fsync: str
    pfs: str
    drain_deadline_s: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    write_back: WriteBack
    counts: Counts
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    troubles: _containers.RepeatedCompositeFieldContainer[Trouble]
    refused: _containers.RepeatedCompositeFieldContainer[Refused]
    clique: Clique
    handles: _containers.RepeatedCompositeFieldContainer[HandleCount]
    memory: ServiceMemory
    survives_kill: bool
    survives_supervisor_kill: bool
    notice: Notice
    request_timeout_s: int
    history: History
    scrub: Scrub
    def __init__(self, name: _Optional[str] = ..., mountpoint: _Optional[str] = ..., state: _Optional[str] = ..., version: _Optional[str] = ..., health: _Optional[str] = ..., data_path: _Optional[str] = ..., data_path_reason: _Optional[str] = ..., fsync: _Optional[str] = ..., pfs: _Optional[str] = ..., drain_deadline_s: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., write_back: _Optional[_Union[WriteBack, _Mapping]] = ..., counts: _Optional[_Union[Counts, _Mapping]] = ..., processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ..., troubles: _Optional[_Iterable[_Union[Trouble, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[Refused, _Mapping]]] = ..., clique: _Optional[_Union[Clique, _Mapping]] = ..., handles: _Optional[_Iterable[_Union[HandleCount, _Mapping]]] = ..., memory: _Optional[_Union[ServiceMemory, _Mapping]] = ..., survives_kill: _Optional[bool] = ..., survives_supervisor_kill: _Optional[bool] = ..., notice: _Optional[_Union[Notice, _Mapping]] = ..., request_timeout_s: _Optional[int] = ..., history: _Optional[_Union[History, _Mapping]] = ..., scrub: _Optional[_Union[Scrub, _Mapping]] = ...) -> None: ...

class Scrub(_message.Message):
    __slots__ = ("copies", "oldest_age_s", "bad_found", "quarantined")
    COPIES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_AGE_S_FIELD_NUMBER: _ClassVar[int]
    BAD_FOUND_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    copies: int
    oldest_age_s: float
    bad_found: int
    quarantined: int
    def __init__(self, copies: _Optional[int] = ..., oldest_age_s: _Optional[float] = ..., bad_found: _Optional[int] = ..., quarantined: _Optional[int] = ...) -> None: ...

class History(_message.Message):
    __slots__ = ("series", "sets", "bytes", "bytes_max", "held_files", "held_bytes", "rules")
    SERIES_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    HELD_FILES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    series: int
    sets: int
    bytes: int
    bytes_max: int
    held_files: int
    held_bytes: int
    rules: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, series: _Optional[int] = ..., sets: _Optional[int] = ..., bytes: _Optional[int] = ..., bytes_max: _Optional[int] = ..., held_files: _Optional[int] = ..., held_bytes: _Optional[int] = ..., rules: _Optional[_Iterable[str]] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("source", "what", "age_s", "deadline_s", "drain")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    source: str
    what: str
    age_s: float
    deadline_s: float
    drain: str
    def __init__(self, source: _Optional[str] = ..., what: _Optional[str] = ..., age_s: _Optional[float] = ..., deadline_s: _Optional[float] = ..., drain: _Optional[str] = ...) -> None: ...

class HandleCount(_message.Message):
    __slots__ = ("way", "tier", "reason", "count")
    WAY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    way: str
    tier: str
    reason: str
    count: int
    def __init__(self, way: _Optional[str] = ..., tier: _Optional[str] = ..., reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class ServiceMemory(_message.Message):
    __slots__ = ("needed_bytes", "limit_known", "limit_bytes", "group")
    NEEDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_KNOWN_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    needed_bytes: int
    limit_known: bool
    limit_bytes: int
    group: str
    def __init__(self, needed_bytes: _Optional[int] = ..., limit_known: _Optional[bool] = ..., limit_bytes: _Optional[int] = ..., group: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("where", "who", "reason", "count")
    WHERE_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    where: str
    who: str
    reason: str
    count: int
    def __init__(self, where: _Optional[str] = ..., who: _Optional[str] = ..., reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class Clique(_message.Message):
    __slots__ = ("under_replicated_files", "under_replicated_bytes", "lag_s", "copies_wanted", "copies_present", "rebuild_files", "rebuild_bytes", "repair_files", "repair_bytes", "incoming_transfers", "outgoing_reads", "links", "short")
    UNDER_REPLICATED_FILES_FIELD_NUMBER: _ClassVar[int]
    UNDER_REPLICATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAG_S_FIELD_NUMBER: _ClassVar[int]
    COPIES_WANTED_FIELD_NUMBER: _ClassVar[int]
    COPIES_PRESENT_FIELD_NUMBER: _ClassVar[int]
    REBUILD_FILES_FIELD_NUMBER: _ClassVar[int]
    REBUILD_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FILES_FIELD_NUMBER: _ClassVar[int]
    REPAIR_BYTES_FIELD_NUMBER: _ClassVar[int]
    INCOMING_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    OUTGOING_READS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    SHORT_FIELD_NUMBER: _ClassVar[int]
    under_replicated_files: int
    under_replicated_bytes: int
    lag_s: float
    copies_wanted: int
    copies_present: int
    rebuild_files: int
    rebuild_bytes: int
    repair_files: int
    repair_bytes: int
    incoming_transfers: int
    outgoing_reads: int
    links: _containers.RepeatedCompositeFieldContainer[Link]
    short: _containers.RepeatedCompositeFieldContainer[Short]
    def __init__(self, under_replicated_files: _Optional[int] = ..., under_replicated_bytes: _Optional[int] = ..., lag_s: _Optional[float] = ..., copies_wanted: _Optional[int] = ..., copies_present: _Optional[int] = ..., rebuild_files: _Optional[int] = ..., rebuild_bytes: _Optional[int] = ..., repair_files: _Optional[int] = ..., repair_bytes: _Optional[int] = ..., incoming_transfers: _Optional[int] = ..., outgoing_reads: _Optional[int] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ..., short: _Optional[_Iterable[_Union[Short, _Mapping]]] = ...) -> None: ...

class Short(_message.Message):
    __slots__ = ("copies", "files")
    COPIES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    copies: int
    files: int
    def __init__(self, copies: _Optional[int] = ..., files: _Optional[int] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("node", "waiting_files", "waiting_bytes", "sending_files", "sending_bytes", "rtt_s", "bytes_per_s", "failed_recently")
    NODE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FILES_FIELD_NUMBER: _ClassVar[int]
    WAITING_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENDING_FILES_FIELD_NUMBER: _ClassVar[int]
    SENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    FAILED_RECENTLY_FIELD_NUMBER: _ClassVar[int]
    node: str
    waiting_files: int
    waiting_bytes: int
    sending_files: int
    sending_bytes: int
    rtt_s: float
    bytes_per_s: float
    failed_recently: bool
    def __init__(self, node: _Optional[str] = ..., waiting_files: _Optional[int] = ..., waiting_bytes: _Optional[int] = ..., sending_files: _Optional[int] = ..., sending_bytes: _Optional[int] = ..., rtt_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ..., failed_recently: _Optional[bool] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("name", "path", "budget_bytes", "used_bytes", "free_bytes", "contents", "health", "prepared_bytes", "shared_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    PREPARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    budget_bytes: int
    used_bytes: int
    free_bytes: int
    contents: int
    health: str
    prepared_bytes: int
    shared_bytes: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., budget_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., contents: _Optional[int] = ..., health: _Optional[str] = ..., prepared_bytes: _Optional[int] = ..., shared_bytes: _Optional[int] = ...) -> None: ...

class WriteBack(_message.Message):
    __slots__ = ("dirty_bytes", "dirty_files", "changes", "lag_s", "unsealed_files", "current_path", "current_copied_bytes", "current_size_bytes")
    DIRTY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIRTY_FILES_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    LAG_S_FIELD_NUMBER: _ClassVar[int]
    UNSEALED_FILES_FIELD_NUMBER: _ClassVar[int]
    CURRENT_PATH_FIELD_NUMBER: _ClassVar[int]
    CURRENT_COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CURRENT_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    dirty_bytes: int
    dirty_files: int
    changes: int
    lag_s: float
    unsealed_files: int
    current_path: str
    current_copied_bytes: int
    current_size_bytes: int
    def __init__(self, dirty_bytes: _Optional[int] = ..., dirty_files: _Optional[int] = ..., changes: _Optional[int] = ..., lag_s: _Optional[float] = ..., unsealed_files: _Optional[int] = ..., current_path: _Optional[str] = ..., current_copied_bytes: _Optional[int] = ..., current_size_bytes: _Optional[int] = ...) -> None: ...

class Counts(_message.Message):
    __slots__ = ("files", "directories", "by_level", "bytes_by_level", "open_handles", "writers", "lost")
    class ByLevelEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class BytesByLevelEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    FILES_FIELD_NUMBER: _ClassVar[int]
    DIRECTORIES_FIELD_NUMBER: _ClassVar[int]
    BY_LEVEL_FIELD_NUMBER: _ClassVar[int]
    BYTES_BY_LEVEL_FIELD_NUMBER: _ClassVar[int]
    OPEN_HANDLES_FIELD_NUMBER: _ClassVar[int]
    WRITERS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    files: int
    directories: int
    by_level: _containers.ScalarMap[str, int]
    bytes_by_level: _containers.ScalarMap[str, int]
    open_handles: int
    writers: int
    lost: int
    def __init__(self, files: _Optional[int] = ..., directories: _Optional[int] = ..., by_level: _Optional[_Mapping[str, int]] = ..., bytes_by_level: _Optional[_Mapping[str, int]] = ..., open_handles: _Optional[int] = ..., writers: _Optional[int] = ..., lost: _Optional[int] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("role", "pid", "rss_bytes", "restarts", "uptime_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    role: str
    pid: int
    rss_bytes: int
    restarts: int
    uptime_s: float
    def __init__(self, role: _Optional[str] = ..., pid: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., restarts: _Optional[int] = ..., uptime_s: _Optional[float] = ...) -> None: ...

class Trouble(_message.Message):
    __slots__ = ("where", "what", "path", "remedy", "age_s")
    WHERE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    where: str
    what: str
    path: str
    remedy: str
    age_s: float
    def __init__(self, where: _Optional[str] = ..., what: _Optional[str] = ..., path: _Optional[str] = ..., remedy: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("inodes", "trees")
    INODES_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    inodes: _containers.RepeatedScalarFieldContainer[int]
    trees: bool
    def __init__(self, inodes: _Optional[_Iterable[int]] = ..., trees: _Optional[bool] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[Record]
    def __init__(self, records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("inode", "known", "kind", "size", "level", "state", "generation", "copies", "progress", "pfs_pending", "incomplete_reason", "mode", "open_handles")
    INODE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PFS_PENDING_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_REASON_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    OPEN_HANDLES_FIELD_NUMBER: _ClassVar[int]
    inode: int
    known: bool
    kind: str
    size: int
    level: str
    state: str
    generation: int
    copies: _containers.RepeatedCompositeFieldContainer[CopyInfo]
    progress: float
    pfs_pending: bool
    incomplete_reason: str
    mode: int
    open_handles: int
    def __init__(self, inode: _Optional[int] = ..., known: _Optional[bool] = ..., kind: _Optional[str] = ..., size: _Optional[int] = ..., level: _Optional[str] = ..., state: _Optional[str] = ..., generation: _Optional[int] = ..., copies: _Optional[_Iterable[_Union[CopyInfo, _Mapping]]] = ..., progress: _Optional[float] = ..., pfs_pending: _Optional[bool] = ..., incomplete_reason: _Optional[str] = ..., mode: _Optional[int] = ..., open_handles: _Optional[int] = ...) -> None: ...

class CopyInfo(_message.Message):
    __slots__ = ("tier", "state", "verified_age_s")
    TIER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_AGE_S_FIELD_NUMBER: _ClassVar[int]
    tier: str
    state: str
    verified_age_s: float
    def __init__(self, tier: _Optional[str] = ..., state: _Optional[str] = ..., verified_age_s: _Optional[float] = ...) -> None: ...

class WaitRequest(_message.Message):
    __slots__ = ("inode", "level")
    INODE_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    inode: int
    level: str
    def __init__(self, inode: _Optional[int] = ..., level: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_s", "level")
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    level: str
    def __init__(self, deadline_s: _Optional[float] = ..., level: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("done", "files_left", "bytes_left", "changes_left", "blocked_by", "remedy", "safety")
    DONE_FIELD_NUMBER: _ClassVar[int]
    FILES_LEFT_FIELD_NUMBER: _ClassVar[int]
    BYTES_LEFT_FIELD_NUMBER: _ClassVar[int]
    CHANGES_LEFT_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_BY_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    SAFETY_FIELD_NUMBER: _ClassVar[int]
    done: bool
    files_left: int
    bytes_left: int
    changes_left: int
    blocked_by: str
    remedy: str
    safety: Safety
    def __init__(self, done: _Optional[bool] = ..., files_left: _Optional[int] = ..., bytes_left: _Optional[int] = ..., changes_left: _Optional[int] = ..., blocked_by: _Optional[str] = ..., remedy: _Optional[str] = ..., safety: _Optional[_Union[Safety, _Mapping]] = ...) -> None: ...

class Safety(_message.Message):
    __slots__ = ("level", "series", "other_files", "other_bytes", "open_files", "secured_files")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    SERIES_FIELD_NUMBER: _ClassVar[int]
    OTHER_FILES_FIELD_NUMBER: _ClassVar[int]
    OTHER_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    SECURED_FILES_FIELD_NUMBER: _ClassVar[int]
    level: str
    series: _containers.RepeatedCompositeFieldContainer[SeriesSafety]
    other_files: int
    other_bytes: int
    open_files: int
    secured_files: int
    def __init__(self, level: _Optional[str] = ..., series: _Optional[_Iterable[_Union[SeriesSafety, _Mapping]]] = ..., other_files: _Optional[int] = ..., other_bytes: _Optional[int] = ..., open_files: _Optional[int] = ..., secured_files: _Optional[int] = ...) -> None: ...

class SeriesSafety(_message.Message):
    __slots__ = ("series", "name", "level", "safe", "files", "bytes", "missing_files", "missing_bytes", "open_files", "safe_name", "safe_level", "names_pending", "held")
    SERIES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    SAFE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MISSING_FILES_FIELD_NUMBER: _ClassVar[int]
    MISSING_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    SAFE_NAME_FIELD_NUMBER: _ClassVar[int]
    SAFE_LEVEL_FIELD_NUMBER: _ClassVar[int]
    NAMES_PENDING_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    series: str
    name: str
    level: str
    safe: bool
    files: int
    bytes: int
    missing_files: int
    missing_bytes: int
    open_files: int
    safe_name: str
    safe_level: str
    names_pending: bool
    held: bool
    def __init__(self, series: _Optional[str] = ..., name: _Optional[str] = ..., level: _Optional[str] = ..., safe: _Optional[bool] = ..., files: _Optional[int] = ..., bytes: _Optional[int] = ..., missing_files: _Optional[int] = ..., missing_bytes: _Optional[int] = ..., open_files: _Optional[int] = ..., safe_name: _Optional[str] = ..., safe_level: _Optional[str] = ..., names_pending: _Optional[bool] = ..., held: _Optional[bool] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("inode",)
    INODE_FIELD_NUMBER: _ClassVar[int]
    inode: int
    def __init__(self, inode: _Optional[int] = ...) -> None: ...

class VerifyProgress(_message.Message):
    __slots__ = ("done", "files", "files_total", "bytes", "findings")
    DONE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FILES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    done: bool
    files: int
    files_total: int
    bytes: int
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    def __init__(self, done: _Optional[bool] = ..., files: _Optional[int] = ..., files_total: _Optional[int] = ..., bytes: _Optional[int] = ..., findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("inode", "path", "tier", "verdict", "what")
    INODE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    inode: int
    path: str
    tier: str
    verdict: str
    what: str
    def __init__(self, inode: _Optional[int] = ..., path: _Optional[str] = ..., tier: _Optional[str] = ..., verdict: _Optional[str] = ..., what: _Optional[str] = ...) -> None: ...

class RefreshRequest(_message.Message):
    __slots__ = ("inode", "recursive")
    INODE_FIELD_NUMBER: _ClassVar[int]
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    inode: int
    recursive: bool
    def __init__(self, inode: _Optional[int] = ..., recursive: _Optional[bool] = ...) -> None: ...

class RefreshReply(_message.Message):
    __slots__ = ("directories",)
    DIRECTORIES_FIELD_NUMBER: _ClassVar[int]
    directories: int
    def __init__(self, directories: _Optional[int] = ...) -> None: ...

class ClusterRequest(_message.Message):
    __slots__ = ("probe",)
    PROBE_FIELD_NUMBER: _ClassVar[int]
    probe: bool
    def __init__(self, probe: _Optional[bool] = ...) -> None: ...

class Cluster(_message.Message):
    __slots__ = ("name", "node", "number", "etcd", "island", "replication_factor", "members", "keys", "keys_expire_s", "etcd_trouble", "etcd_health")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ETCD_FIELD_NUMBER: _ClassVar[int]
    ISLAND_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FACTOR_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEYS_EXPIRE_S_FIELD_NUMBER: _ClassVar[int]
    ETCD_TROUBLE_FIELD_NUMBER: _ClassVar[int]
    ETCD_HEALTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    node: str
    number: int
    etcd: str
    island: bool
    replication_factor: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    keys: str
    keys_expire_s: float
    etcd_trouble: str
    etcd_health: EtcdHealth
    def __init__(self, name: _Optional[str] = ..., node: _Optional[str] = ..., number: _Optional[int] = ..., etcd: _Optional[str] = ..., island: _Optional[bool] = ..., replication_factor: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., keys: _Optional[str] = ..., keys_expire_s: _Optional[float] = ..., etcd_trouble: _Optional[str] = ..., etcd_health: _Optional[_Union[EtcdHealth, _Mapping]] = ...) -> None: ...

class EtcdHealth(_message.Message):
    __slots__ = ("size_bytes", "quota_bytes", "alarms", "revision", "compacted", "tls", "open", "remote")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALARMS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    COMPACTED_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    quota_bytes: int
    alarms: _containers.RepeatedScalarFieldContainer[str]
    revision: int
    compacted: bool
    tls: bool
    open: bool
    remote: bool
    def __init__(self, size_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., alarms: _Optional[_Iterable[str]] = ..., revision: _Optional[int] = ..., compacted: _Optional[bool] = ..., tls: _Optional[bool] = ..., open: _Optional[bool] = ..., remote: _Optional[bool] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("name", "number", "alive", "address", "rank", "domain", "capacity_bytes", "peers", "has_figures", "under_replicated_files", "under_replicated_bytes", "lag_s", "held_files", "held_bytes", "copies_wanted", "copies_present", "rebuild_files", "rebuild_bytes", "repair_files", "repair_bytes", "probed", "probe_error", "rtt_s", "clock_offset_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    HAS_FIGURES_FIELD_NUMBER: _ClassVar[int]
    UNDER_REPLICATED_FILES_FIELD_NUMBER: _ClassVar[int]
    UNDER_REPLICATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAG_S_FIELD_NUMBER: _ClassVar[int]
    HELD_FILES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIES_WANTED_FIELD_NUMBER: _ClassVar[int]
    COPIES_PRESENT_FIELD_NUMBER: _ClassVar[int]
    REBUILD_FILES_FIELD_NUMBER: _ClassVar[int]
    REBUILD_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FILES_FIELD_NUMBER: _ClassVar[int]
    REPAIR_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    PROBE_ERROR_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: int
    alive: bool
    address: str
    rank: int
    domain: str
    capacity_bytes: int
    peers: _containers.RepeatedScalarFieldContainer[str]
    has_figures: bool
    under_replicated_files: int
    under_replicated_bytes: int
    lag_s: float
    held_files: int
    held_bytes: int
    copies_wanted: int
    copies_present: int
    rebuild_files: int
    rebuild_bytes: int
    repair_files: int
    repair_bytes: int
    probed: bool
    probe_error: str
    rtt_s: float
    clock_offset_s: float
    def __init__(self, name: _Optional[str] = ..., number: _Optional[int] = ..., alive: _Optional[bool] = ..., address: _Optional[str] = ..., rank: _Optional[int] = ..., domain: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., peers: _Optional[_Iterable[str]] = ..., has_figures: _Optional[bool] = ..., under_replicated_files: _Optional[int] = ..., under_replicated_bytes: _Optional[int] = ..., lag_s: _Optional[float] = ..., held_files: _Optional[int] = ..., held_bytes: _Optional[int] = ..., copies_wanted: _Optional[int] = ..., copies_present: _Optional[int] = ..., rebuild_files: _Optional[int] = ..., rebuild_bytes: _Optional[int] = ..., repair_files: _Optional[int] = ..., repair_bytes: _Optional[int] = ..., probed: _Optional[bool] = ..., probe_error: _Optional[str] = ..., rtt_s: _Optional[float] = ..., clock_offset_s: _Optional[float] = ...) -> None: ...

class CapacityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Capacity(_message.Message):
    __slots__ = ("tiers", "clustered", "replication_factor", "node", "memory", "history")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    CLUSTERED_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FACTOR_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierCapacity]
    clustered: bool
    replication_factor: int
    node: str
    memory: ServiceMemory
    history: History
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierCapacity, _Mapping]]] = ..., clustered: _Optional[bool] = ..., replication_factor: _Optional[int] = ..., node: _Optional[str] = ..., memory: _Optional[_Union[ServiceMemory, _Mapping]] = ..., history: _Optional[_Union[History, _Mapping]] = ...) -> None: ...

class TierCapacity(_message.Message):
    __slots__ = ("name", "path", "total_bytes", "used_bytes", "free_bytes", "held_bytes", "share_bytes", "usable_bytes", "usable_for_peers_bytes", "prepared_bytes", "shared_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    USABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    USABLE_FOR_PEERS_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREPARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    held_bytes: int
    share_bytes: int
    usable_bytes: int
    usable_for_peers_bytes: int
    prepared_bytes: int
    shared_bytes: int
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., total_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., share_bytes: _Optional[int] = ..., usable_bytes: _Optional[int] = ..., usable_for_peers_bytes: _Optional[int] = ..., prepared_bytes: _Optional[int] = ..., shared_bytes: _Optional[int] = ...) -> None: ...

class AdoptRequest(_message.Message):
    __slots__ = ("last",)
    LAST_FIELD_NUMBER: _ClassVar[int]
    last: bool
    def __init__(self, last: _Optional[bool] = ...) -> None: ...

class LogLevelRequest(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: str
    def __init__(self, level: _Optional[str] = ...) -> None: ...

class LogLevelReply(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: str
    def __init__(self, level: _Optional[str] = ...) -> None: ...

class ListSeriesRequest(_message.Message):
    __slots__ = ("figures",)
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    figures: bool
    def __init__(self, figures: _Optional[bool] = ...) -> None: ...

class ListSeriesReply(_message.Message):
    __slots__ = ("series", "shared")
    SERIES_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    series: _containers.RepeatedCompositeFieldContainer[SeriesInfo]
    shared: bool
    def __init__(self, series: _Optional[_Iterable[_Union[SeriesInfo, _Mapping]]] = ..., shared: _Optional[bool] = ...) -> None: ...

class SeriesInfo(_message.Message):
    __slots__ = ("directory", "origin", "path", "pattern", "rollback", "sets", "size", "newest")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    directory: int
    origin: int
    path: bytes
    pattern: bytes
    rollback: int
    sets: int
    size: int
    newest: SetInfo
    def __init__(self, directory: _Optional[int] = ..., origin: _Optional[int] = ..., path: _Optional[bytes] = ..., pattern: _Optional[bytes] = ..., rollback: _Optional[int] = ..., sets: _Optional[int] = ..., size: _Optional[int] = ..., newest: _Optional[_Union[SetInfo, _Mapping]] = ...) -> None: ...

class ListSetsRequest(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: int
    def __init__(self, directory: _Optional[int] = ...) -> None: ...

class SetList(_message.Message):
    __slots__ = ("done", "sets")
    DONE_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    done: bool
    sets: _containers.RepeatedCompositeFieldContainer[SetInfo]
    def __init__(self, done: _Optional[bool] = ..., sets: _Optional[_Iterable[_Union[SetInfo, _Mapping]]] = ...) -> None: ...

class SetInfo(_message.Message):
    __slots__ = ("number", "directory", "name", "files", "size", "completed_ns", "level", "in_place", "pinned", "noted", "note", "group", "step")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_NS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    NOTED_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    number: int
    directory: int
    name: bytes
    files: int
    size: int
    completed_ns: int
    level: str
    in_place: bool
    pinned: bool
    noted: bool
    note: str
    group: bool
    step: str
    def __init__(self, number: _Optional[int] = ..., directory: _Optional[int] = ..., name: _Optional[bytes] = ..., files: _Optional[int] = ..., size: _Optional[int] = ..., completed_ns: _Optional[int] = ..., level: _Optional[str] = ..., in_place: _Optional[bool] = ..., pinned: _Optional[bool] = ..., noted: _Optional[bool] = ..., note: _Optional[str] = ..., group: _Optional[bool] = ..., step: _Optional[str] = ...) -> None: ...

class ConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConfigReply(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedCompositeFieldContainer[ConfigSetting]
    def __init__(self, settings: _Optional[_Iterable[_Union[ConfigSetting, _Mapping]]] = ...) -> None: ...

class ConfigSetting(_message.Message):
    __slots__ = ("name", "value", "origin")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    origin: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., origin: _Optional[str] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("file", "offset", "since_ns")
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    file: int
    offset: int
    since_ns: int
    def __init__(self, file: _Optional[int] = ..., offset: _Optional[int] = ..., since_ns: _Optional[int] = ...) -> None: ...

class EventList(_message.Message):
    __slots__ = ("events", "file", "offset")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedScalarFieldContainer[str]
    file: int
    offset: int
    def __init__(self, events: _Optional[_Iterable[str]] = ..., file: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...
