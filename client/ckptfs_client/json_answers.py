"""The keys of what `--json` prints beside the messages of control.proto, and their meanings.

The reference (docs/reference.md) lists them from this module, and mypy holds the commands to it.
"""

from typing import Annotated, Any, NotRequired, TypedDict

# A list of messages: the text in front of the meaning names the message.
Messages = list[dict[str, Any]]


class FitJson(TypedDict):
    """`checkpoint` of `ckptfs df --checkpoint`: whether checkpoints of the given size fit."""

    fits: Annotated[bool, "whether they fit"]
    where: Annotated[list[str], "the tiers that they take; empty if they do not fit"]
    sentence: Annotated[str, "the same as a sentence, with the remedy if they do not fit"]
    factor: Annotated[int, "how many times the size of a checkpoint each node needs"]


class DfJson(TypedDict):
    """The keys that `ckptfs df` adds."""

    clique: Annotated[Messages, "Member", "the nodes that hold copies for this node, and those for which it holds copies"]
    checkpoint: NotRequired[Annotated[FitJson, "only with --checkpoint"]]


class HealthJson(TypedDict):
    """The answer of `ckptfs health` about a mount."""

    name: Annotated[str, "the name of the mount"]
    mountpoint: Annotated[str, "where it is mounted"]
    health: Annotated[str, "ok, degraded, or down if the daemon does not answer in time"]
    reasons: Annotated[list[str], "why it is not ok, a sentence each; empty if it is"]


class FileUserJson(TypedDict):
    """A process that uses a file, or something below a directory."""

    pid: Annotated[int, "its process id"]
    user: Annotated[str, "its user"]
    command: Annotated[str, "the beginning of its command line"]
    how: Annotated[list[str], "read, write (a descriptor that can), mapped, cwd (it works in the directory)"]
    files: Annotated[list[str], "what it uses; a deleted file ends with ` (deleted)`"]


class WhoJson(TypedDict):
    """The answer of `ckptfs who`."""

    path: Annotated[str, "the path as it was given"]
    processes: Annotated[list[FileUserJson], "the processes that the caller may look at"]
    hidden: Annotated[int, "how many processes the caller may not look at"]
    open_handles: Annotated[int | None, "how many open handles of the file the daemon counts; null for a directory"]


class WarmJson(TypedDict):
    """A file of `ckptfs warm`."""

    path: Annotated[str, "its path"]
    size: Annotated[int, "its bytes"]
    result: Annotated[str, "here (it was on this node already), fetched, or failed"]
    reason: Annotated[str, "why it failed; empty if it did not"]


class LsJson(TypedDict):
    """The keys that `ckptfs ls` adds."""

    name: Annotated[str, "the path as it was given, or the name in the directory that was given"]
    digest: Annotated[str, "as the attribute user.ckptfs.digest; empty: not known, or the caller may not read the file"]


class RejectedJson(TypedDict):
    """A newer member that `ckptfs latest` did not name."""

    path: Annotated[str, "its path"]
    reason: Annotated[str, "why it is not the answer"]


class LatestJson(TypedDict):
    """What `ckptfs latest` found. If there is none, only `rejected` is there, and the exit code is 1."""

    number: NotRequired[Annotated[int, "the number in the name; if it has several, the one that counts steps; not of `last.ckpt`"]]
    path: NotRequired[Annotated[str, "the path of the checkpoint; for TensorFlow the prefix of its files"]]
    level: NotRequired[Annotated[str, "the lowest level of its files"]]
    size: NotRequired[Annotated[int, "bytes in all of its files"]]
    files: NotRequired[Annotated[int, "how many files it has"]]
    rejected: NotRequired[Annotated[list[RejectedJson], "the newer members, newest first, if there are any"]]


class SeriesJson(TypedDict):
    """A series of `ckptfs list`."""

    series: Annotated[str, "its pattern, with the directory in which the application writes"]
    sets: Annotated[int, "how many sets it has"]
    size: Annotated[int, "bytes of all its sets"]
    newest: Annotated[str, "the newest set; other commands take this name"]
    level: Annotated[str, "the level of the newest set"]
    completed_ns: Annotated[int, "when the newest set was completed, in ns since the epoch"]
    rollback: Annotated[int | None, "the number of the set that a rollback made the latest; null: none"]


class SetJson(TypedDict):
    """A set of `ckptfs list`, or the newest member of a series that is not complete."""

    series: Annotated[str, "the series, as other commands take it"]
    set: Annotated[str, "NAME@NUMBER; of a member that is not complete only the name"]
    number: Annotated[int | None, "its number in the series, from 1; null: not complete"]
    step: Annotated[int | None, "the number in its name; if it has several, the one that counts steps; null: its name has none"]
    files: Annotated[int, "how many files it has"]
    size: Annotated[int, "bytes in all of its files"]
    level: Annotated[str, "the lowest level of its files"]
    completed_ns: Annotated[int | None, "when it was completed, in ns since the epoch; null: not complete"]
    pinned: Annotated[bool, "whether it is pinned"]
    rollback: Annotated[bool, "whether a rollback made it the latest"]
    note: Annotated[str, "its note; empty: none"]
    state: Annotated[str, "complete (also under its own name), in history only, or incomplete"]
    reason: Annotated[str, "why it is not complete; empty if it is"]
    path: Annotated[str, "where its files can be read: its own place, or its directory in the history"]


class ProducerJson(TypedDict):
    """A process that wrote files of a set. Texts are empty and numbers 0 where they are not known."""

    host: Annotated[str, "its host"]
    pid: Annotated[int, "its process id"]
    command: Annotated[str, "its command line"]
    job: Annotated[str, "the id of its job"]
    rank: Annotated[str, "its rank in the job"]


class SetFileJson(TypedDict):
    """A file of a set."""

    path: Annotated[str, "its path in the set"]
    size: Annotated[int, "its bytes"]
    mtime_ns: Annotated[int, "when it was changed last, in ns since the epoch"]
    level: Annotated[str, "its level now"]
    digest: Annotated[str, "as in the manifest"]


class ShowJson(SetJson):
    """The keys that `ckptfs show` adds."""

    manifest: Annotated[str, "the path of its manifest"]
    history: Annotated[str, "its directory in the history"]
    producers: Annotated[list[ProducerJson], "the processes that wrote its files"]
    members: Annotated[list[SetFileJson], "its files"]


class SetChangeJson(TypedDict):
    """What a command changed of a series or a set."""

    set: Annotated[str, "the set, or the path that was committed"]
    done: Annotated[str, "what was done, as a sentence"]


class RestoreJson(TypedDict):
    """What `ckptfs restore` did."""

    set: Annotated[str, "the set"]
    path: Annotated[str, "where its files are now: a directory, or that of its files"]
    files: Annotated[int, "how many files were copied; 0: they were in their place"]
    bytes: Annotated[int, "how many bytes were copied and compared with their digests"]


class FormatJson(TypedDict):
    """What a file shows of itself."""

    path: Annotated[str, "the file"]
    format: Annotated[str, "its format; empty: not known"]
    flaw: Annotated[str, "what is wrong with it; empty: nothing"]


class VerifyJson(TypedDict):
    """What `ckptfs verify` found."""

    files: Annotated[int, "files that were looked at"]
    bytes: Annotated[int, "bytes that were read"]
    findings: Annotated[Messages, "Finding", "what was found of each copy"]
    formats: Annotated[list[FormatJson], "what each file of a known format shows of itself, and each set as a whole"]


class MountJson(TypedDict):
    """One name of `ckptfs mounts`."""

    name: Annotated[str, "the name of the mount"]
    mountpoint: Annotated[str, "where it is or was mounted; empty: not known"]
    state: Annotated[str, "its state directory; empty: it is mounted"]
    mounted: Annotated[bool, "whether it is mounted"]
    has_data: Annotated[bool, "whether data may lie on this node only"]
    what: Annotated[str, "what it holds, as a sentence"]
    mount_command: Annotated[str, "the command that mounts it again; empty: it is mounted"]


class LogLevelJson(TypedDict):
    """The answer of `ckptfs log-level`."""

    level: Annotated[str, "the level now"]


class UpgradeJson(TypedDict):
    """The answer of `ckptfs upgrade`."""

    name: Annotated[str, "the name of the mount"]
    former: Annotated[str, "the version of the daemon before"]
    version: Annotated[str, "its version now"]
    seconds: Annotated[float, "how long the upgrade took; applications waited for a part of it"]


class VersionJson(TypedDict):
    """The answer of `ckptfs version`."""

    version: Annotated[str, "the version of ckptfs"]


class LabEtcdJson(TypedDict):
    """The etcd of a lab."""

    address: Annotated[str, "HOST:PORT in the lab's network"]
    answers: Annotated[bool, "whether it answers"]


class LabNodeJson(TypedDict):
    """One node of a lab."""

    name: Annotated[str, "node1, node2, ..."]
    address: Annotated[str, "its address in the lab's network"]
    mountpoint: Annotated[str, "where its mount appears"]
    log: Annotated[str, "the log of its daemon"]
    runs: Annotated[bool, "whether its daemon runs"]
    mounted: Annotated[bool, "whether its mount is there"]
    link: Annotated[str, "up or down"]
    slowed: Annotated[bool, "whether its link is limited"]
    processes: Annotated[int, "how many processes run on it"]


class LabJson(TypedDict):
    """A lab: what runs, what is mounted, and how the links are."""

    directory: Annotated[str, "the lab's directory"]
    cluster: Annotated[str, "the cluster's name"]
    factor: Annotated[int, "replication_factor"]
    pfs: Annotated[str, "the directory that is the PFS; empty: none"]
    etcd: Annotated[LabEtcdJson, "its etcd"]
    nodes: Annotated[list[LabNodeJson], "its nodes, in order"]


class EventProcessJson(TypedDict, total=False):
    """A process in an event. What is not known is left out."""

    host: Annotated[str, "its host"]
    pid: Annotated[int, "its number there"]
    command: Annotated[str, "its command line, up to 160 characters"]
    job: Annotated[str, "the id of its job"]
    rank: Annotated[str, "its rank"]
    started: Annotated[str, "when it started, in UTC"]


class EventJson(TypedDict, total=False):
    """One event, as in the log. What is not known, or has no meaning for its kind, is left out."""

    time: Annotated[str, "when it happened, in UTC"]
    kind: Annotated[str, "what happened: see the table of kinds in operations.md"]
    node: Annotated[str, "the node"]
    mount: Annotated[str, "the name of the mount"]
    series: Annotated[str, "the series, below the mount"]
    directory: Annotated[int, "the inode of the series in the history"]
    origin: Annotated[int, "the inode of the directory of the application"]
    set: Annotated[str, "the set, with its number if it has one"]
    number: Annotated[int, "its number in the series"]
    step: Annotated[int, "the number in its name; if it has several, the one that counts steps"]
    files: Annotated[int, "how many files it has"]
    size: Annotated[int, "bytes of the set"]
    began: Annotated[str, "complete: when its first file was opened"]
    duration_s: Annotated[float, "complete: until its last file was closed. drained: how long the drain took"]
    after_s: Annotated[float, "seconds since the set was complete"]
    level: Annotated[str, "level: which one"]
    reason: Annotated[str, "expired: why"]
    former: Annotated[str, "unchanged: the set with the same bytes"]
    processes: Annotated[int, "how many processes wrote the set"]
    producers: Annotated[list[EventProcessJson], "the first of them"]
    reader: Annotated[EventProcessJson, "load, restored: the process that reads"]
    process: Annotated[str, "restarted: mount or mover"]
    pid: Annotated[int, "restarted: of the one that died"]
    exit_code: Annotated[int, "restarted: its exit code; -9: it was killed"]
    mountpoint: Annotated[str, "mounted: where"]
    version: Annotated[str, "mounted: the version of the daemon"]
    clean: Annotated[bool, "ended: whether nothing was cut off"]
    tier: Annotated[str, "tier-down, tier-up, repaired: which one"]
    state: Annotated[str, "tier-down, tier-up: suspect, full, down or normal"]
    where: Annotated[str, "trouble, trouble-over: which work"]
    what: Annotated[str, "what is wrong"]
    path: Annotated[str, "with which file or directory"]
    remedy: Annotated[str, "what helps"]
    source: Annotated[str, "notice, repaired: where it comes from"]
    deadline_s: Annotated[float, "notice: how long the drain may take"]
    cause: Annotated[str, "drained: command, notice, end (of the mount) or unmounted (after it)"]
    done: Annotated[bool, "drained: whether all has its level"]
    files_left: Annotated[int, "drained: files that the PFS lacks"]
    bytes_left: Annotated[int, "drained: their bytes"]
    cut: Annotated[bool, "true: the event was too long, and texts are missing"]


class RunJson(TypedDict):
    """One run of a series."""

    began: Annotated[str, "its first sign: a process starts, a set is read or written"]
    ended: Annotated[str, "its last sign"]
    jobs: Annotated[list[str], "the ids of its jobs"]
    resumed: Annotated[int, "the step from which it went on; 0: the beginning"]
    reached: Annotated[int, "the highest step of which it left a sign"]
    lost_steps: Annotated[int, "steps that later runs repeated"]
    saves: Annotated[int, "complete sets that it wrote"]
    incomplete: Annotated[int, "sets that it began and left"]
    failed: Annotated[bool, "whether its end counts as a failure"]


class GoodputJson(TypedDict):
    """The answer of `ckptfs goodput`."""

    series: Annotated[str, "the series"]
    began: Annotated[str, "when the time begins"]
    ended: Annotated[str, "when it ends: the last sign of the last run"]
    is_cut: Annotated[bool, "whether the log does not go back to the first set"]
    runs: Annotated[list[RunJson], "its runs, in order of time"]
    jobs: Annotated[int, "how many jobs"]
    restarts: Annotated[int, "runs after the first one"]
    failures: Annotated[int, "ends of runs that count as failures"]
    loads: Annotated[int, "how often a process began to read a set of another one"]
    saves: Annotated[int, "complete sets that were written"]
    incomplete: Annotated[int, "sets that were begun and not completed"]
    steps: Annotated[int, "steps that were done and not lost"]
    lost_steps: Annotated[int, "steps that were repeated"]
    total_s: Annotated[float, "seconds from the first to the last sign"]
    effective_s: Annotated[float, "seconds of work that counts"]
    saving_s: Annotated[float, "seconds in which files of sets were open for writing"]
    lost_s: Annotated[float, "seconds of work that was repeated"]
    down_s: Annotated[float, "seconds between runs, with work that left no sign"]
    starting_s: Annotated[float, "seconds of runs before they worked"]
    effective: Annotated[float, "the effective share of the time"]
    mtbf_s: Annotated[float | None, "seconds that runs took for each failure; null: none failed"]


class AdviceRowJson(TypedDict):
    """What one interval between checkpoints costs the job."""

    name: Annotated[str, "now (as measured), Young 1974 or Daly 2006"]
    interval_s: Annotated[float, "seconds of work from the end of a checkpoint to the beginning of the next one"]
    saving: Annotated[float, "time for checkpoints, as a share of the work"]
    lost_s: Annotated[float, "seconds that a failure undoes, on average"]
    overhead: Annotated[float | None, "checkpoints, lost work and restarts, as a share of the work; null: the job hardly gets on"]


class AdviceJson(TypedDict):
    """The answer of `ckptfs advise`."""

    series: Annotated[str, "the series; empty: none was given"]
    sets: Annotated[int, "how many complete sets it has"]
    size: Annotated[int, "bytes of the newest one"]
    cost_s: Annotated[float, "seconds that a checkpoint takes: as given, or the median of what was measured"]
    cost_sets: Annotated[int, "of how many sets it was measured; 0: it was given"]
    period_s: Annotated[float | None, "seconds from one complete set to the next, the median; null: not known"]
    mtbf_s: Annotated[float, "seconds between failures of the job, on average"]
    mtbf_failures: Annotated[int, "of how many failures in the event log that was computed; 0: it was given"]
    restart_s: Annotated[float, "seconds from a failure until the job works again"]
    intervals: Annotated[list[AdviceRowJson], "the intervals; the last one is the advice"]
    sentence: Annotated[str, "the advice as a sentence"]


class SimulateJson(TypedDict):
    """The answer of `ckptfs simulate`."""

    nodes: Annotated[int, "how many nodes"]
    copies: Annotated[int, "how many nodes hold each file"]
    jump: Annotated[int, "the jump that the placement uses; 0: it spreads the failure domains evenly"]
    domains: Annotated[int, "how many failure domains"]
    node_mtbf_s: Annotated[float, "seconds between failures of one node, on average"]
    domain_mtbf_s: Annotated[float | None, "the same of one failure domain as a whole; null: it does not fail"]
    repair_s: Annotated[float, "seconds until the copies of a node that failed are remade"]
    write_back_s: Annotated[float, "seconds until the set is on the PFS"]
    trials: Annotated[int, "how many failures were followed"]
    seed: Annotated[int, "the seed"]
    probability: Annotated[float | None, "the probability that the set is lost; null: no trial met a loss"]
    low: Annotated[float | None, "the lower bound of its 95 % confidence interval"]
    high: Annotated[float | None, "the upper bound"]
    closed_form: Annotated[float | None, "the same by a formula, for independent failures; null: domains fail as a whole"]
    failures_per_day: Annotated[float, "nodes that fail in a day, on average, with their domains or alone"]
    recovery_bytes: Annotated[float, "bytes of copies to remake after a node failed, on average"]
    recovery_bytes_per_day: Annotated[float, "the same in a day"]
    memory_bytes: Annotated[int, "the most that a node holds for its own checkpoints and those of its peers"]
    memory_bytes_after: Annotated[int, "the same after a failure domain, or a node, was lost and its copies are remade"]
    sentence: Annotated[str, "the answer as a sentence"]


class FaultResultJson(TypedDict):
    """One fault of a campaign, or the repair at the end of a round."""

    at_s: Annotated[float, "seconds since the campaign began"]
    round: Annotated[int, "the round, from 1"]
    fault: Annotated[str, "its kind, node and detail; repair: the end of the round"]
    result: Annotated[str, "what came of it, as a sentence"]


class ChaosJson(TypedDict):
    """The answer of `ckptfs chaos`."""

    seed: Annotated[int, "the seed"]
    nodes: Annotated[int, "how many nodes"]
    factor: Annotated[int, "how many nodes hold each file"]
    kept: Annotated[bool, "whether every promise was kept"]
    faults: Annotated[list[FaultResultJson], "the schedule as it was played"]
    turns: Annotated[int, "how many steps the applications did"]
    reads: Annotated[int, "how many files were read and compared meanwhile"]
    loads: Annotated[int, "how often the set that .ckptfs/latest shows was loaded"]
    complaints: Annotated[list[str], "each promise that was broken, as a sentence"]
