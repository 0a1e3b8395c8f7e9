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

    number: NotRequired[Annotated[int, "the number in the name; if it has several, the one that counts steps"]]
    path: NotRequired[Annotated[str, "the path of the checkpoint; for TensorFlow the prefix of its files"]]
    level: NotRequired[Annotated[str, "the lowest level of its files"]]
    size: NotRequired[Annotated[int, "bytes in all of its files"]]
    files: NotRequired[Annotated[int, "how many files it has"]]
    rejected: NotRequired[Annotated[list[RejectedJson], "the newer members, newest first, if there are any"]]


class VerifyJson(TypedDict):
    """What `ckptfs verify` found."""

    files: Annotated[int, "files that were looked at"]
    bytes: Annotated[int, "bytes that were read"]
    findings: Annotated[Messages, "Finding", "what was found of each copy"]


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


class CheckJson(TypedDict):
    """One result of `ckptfs doctor`."""

    check: Annotated[str, "what was looked at"]
    verdict: Annotated[str, "ok, note (works, with less) or bad"]
    what: Annotated[str, "what was found, as a sentence"]
    remedy: Annotated[str, "how to mend it; empty: there is nothing to mend"]


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
