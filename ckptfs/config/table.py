"""Owns the table of settings, `KEYS`: every name, how its value is read, its default, the words that explain it; and `Config`.

Loading, refusing and the annotated sample file all come from this table. Settings of a cluster change nothing unless `cluster` is given.
If we die here: nothing was changed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptfs import limits
from ckptfs.config.values import (
    build_choice_parser,
    build_integer_parser,
    parse_address,
    parse_addresses,
    parse_bool,
    parse_bulk,
    parse_clique_lost,
    parse_data_path,
    parse_label,
    parse_level,
    parse_memory,
    parse_optional_size,
    parse_path,
    parse_ratio,
    parse_seconds,
)  # fmt: skip
from ckptfs.model import Bulk, CliqueLost, DataPath, Level

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Config:
    """One mount, as it runs. Paths are absolute and without symlinks; sizes in bytes, times in seconds."""

    name: str
    mountpoint: Path
    state: Path
    ram_bytes: int | None = None
    nvme: Path | None = None
    nvme_bytes: int | None = None
    pfs: Path | None = None
    fsync: Level = Level.LOCAL
    data_path: DataPath = DataPath.AUTO
    ram_high: float = limits.RAM_HIGH_WATERMARK
    ram_low: float = limits.RAM_LOW_WATERMARK
    synced_interval_s: float = limits.SYNCED_INTERVAL_S
    refresh_interval_s: float = limits.REFRESH_INTERVAL_S
    drain_deadline_s: float = limits.DRAIN_DEADLINE_S
    log_level: str = "info"
    allow_other: bool = True
    cluster: str | None = None
    """None: this node is alone, and nothing below matters."""
    etcd: tuple[str, ...] = ()
    node: str = ""
    rank: int | None = None
    failure_domain: str = ""
    listen: str = limits.PEER_LISTEN
    address: str = ""
    keys: Path | None = None
    insecure: bool = False
    bulk: Bulk = Bulk.SOCKET
    replication_factor: int = limits.REPLICATION_FACTOR
    replication_jump: int = 1
    peer_share: float = limits.PEER_SHARE
    clique_wait_s: float = limits.CLIQUE_WAIT_S
    clique_lost: CliqueLost = CliqueLost.ERROR
    etcd_ca: Path | None = None
    etcd_cert: Path | None = None
    etcd_key: Path | None = None
    mount_flags: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its name in TOML and in -o, the field of Config it fills, how it is read, its default as written, and its words."""

    name: str
    field: str
    parse: Callable[[Any], Any]
    default: str | bool | float | None
    description: str
    example: str = ""


SETTINGS: tuple[Setting, ...] = (
    Setting("mountpoint", "mountpoint", parse_path, None,
        "Where the filesystem appears, when the command line or fstab does not say it.", '"/ckpt"'),
    Setting("state", "state", parse_path, None,
        "The catalog and the RAM tier's mountpoint. A local directory that survives a reboot; made when it is missing.\n"
        "Without it: /var/lib/ckptfs/NAME, for ordinary users ~/.local/state/ckptfs/NAME.", '"/var/lib/ckptfs/NAME"'),
    Setting("ram", "ram_bytes", parse_memory, "auto",
        "The RAM tier: a size, a percentage of the memory, or auto (half of the memory). A given size is never exceeded."),
    Setting("nvme", "nvme", parse_path, None,
        "The NVMe tier: a directory on a local disk. Without it there is none.", '"/nvme/ckptfs"'),
    Setting("nvme_size", "nvme_bytes", parse_optional_size, "auto",
        "How much of that disk may be used, or auto (what its filesystem has)."),
    Setting("pfs", "pfs", parse_path, None,
        "The directory on the parallel filesystem that this mount mirrors. Without it nothing is written back.", '"/lustre/project/ckpt"'),
    Setting("fsync", "fsync", parse_level, "local",
        "What fsync(2) waits for: local (survives the death of every ckptfs process), clique (survives the loss of this node;\n"
        "needs a cluster) or pfs (is on the PFS)."),
    Setting("data_path", "data_path", parse_data_path, "auto",
        "How bytes travel: passthrough (by the kernel, Linux 6.9 and later), buffered (through the daemon), or auto (the\n"
        "fastest there is)."),
    Setting("ram_high", "ram_high", parse_ratio, "80%",
        "Above this share of the RAM tier new files go to NVMe, and what is safe elsewhere leaves the RAM."),
    Setting("ram_low", "ram_low", parse_ratio, "60%",
        "Making room ends here."),
    Setting("synced_interval", "synced_interval_s", parse_seconds, "60s",
        "A file that stays open and is fsynced is written back at most this often."),
    Setting("refresh_interval", "refresh_interval_s", parse_seconds, "5m",
        "How often directories on the PFS are compared again, for what others changed there."),
    Setting("drain_deadline", "drain_deadline_s", parse_seconds, "60s",
        "How long unmounting and stopping wait for the write-back. What is not finished goes on at the next mount."),
    Setting("log_level", "log_level", build_choice_parser(LOG_LEVELS), "info",
        "What is logged: debug, info, warning or error."),
    Setting("allow_other", "allow_other", parse_bool, True,
        "Whether other users may use the mount; permissions are checked in any case. Off for ordinary users unless given,\n"
        "because it needs user_allow_other in /etc/fuse.conf then."),
    Setting("cluster", "cluster", parse_label, None,
        "The cluster that this node belongs to: its nodes share one tree, and keep copies for one another. Without it the node\n"
        "is alone, and none of the keys below may be given.", '"training"'),
    Setting("etcd", "etcd", parse_addresses, None,
        "The etcd servers through which the nodes of the cluster find one another, joined by '+'.", '"etcd1:2379+etcd2:2379+etcd3:2379"'),
    Setting("node", "node", parse_label, None,
        "This node's name in the cluster, without it the name of the machine. No two nodes have the same one.", '"node7"'),
    Setting("rank", "rank", build_integer_parser(0, limits.RANK_MAX), None,
        "The node's place in the order from which cliques are made, without it the order of first joining.", "7"),
    Setting("failure_domain", "failure_domain", parse_label, None,
        "What fails together with this node: a rack, a switch. Copies go to other failure domains where there are any. Without\n"
        "it each node fails alone.", '"rack3"'),
    Setting("listen", "listen", parse_address, limits.PEER_LISTEN,
        "Where this node listens for its peers."),
    Setting("address", "address", parse_address, None,
        "Where the others reach it, without it the name of the machine and the port of listen.", '"node7:7420"'),
    Setting("keys", "keys", parse_path, None,
        "The directory with ca.pem, node.pem and node.key, by which nodes recognise one another (`ckptfs keys` makes them).",
        '"/etc/ckptfs/keys"'),
    Setting("insecure", "insecure", parse_bool, False,
        "No keys at all: accepted on loopback addresses only, for trying a cluster on one machine."),
    Setting("bulk", "bulk", parse_bulk, "socket",
        "How blocks travel between nodes: socket (connections of their own, sealed with keys from gRPC, to the port after that\n"
        "of listen) or grpc (everything through one port, at about half the speed). A port that cannot be reached means grpc."),
    Setting("replication_factor", "replication_factor", build_integer_parser(1, limits.REPLICATION_FACTOR_MAX), limits.REPLICATION_FACTOR,
        "How many nodes hold each file, this one included. 1: no copies on peers."),
    Setting("replication_jump", "replication_jump", build_integer_parser(1, limits.REPLICATION_JUMP_MAX), 1,
        "How far apart in the order of ranks the nodes of a clique are."),
    Setting("peer_share", "peer_share", parse_ratio, "50%",
        "The share of RAM and NVMe that may hold copies for peers."),
    Setting("clique_wait", "clique_wait_s", parse_seconds, "30s",
        "How long fsync=clique waits for peers."),
    Setting("clique_lost", "clique_lost", parse_clique_lost, "error",
        "What fsync=clique does when no peer is left: error (EIO) or local (succeed as fsync=local does)."),
    Setting("etcd_ca", "etcd_ca", parse_path, None,
        "For etcd with TLS: the certificate of its authority.", '"/etc/ckptfs/etcd/ca.pem"'),
    Setting("etcd_cert", "etcd_cert", parse_path, None,
        "And, where etcd asks for them: the client's certificate", '"/etc/ckptfs/etcd/client.pem"'),
    Setting("etcd_key", "etcd_key", parse_path, None,
        "and its key.", '"/etc/ckptfs/etcd/client.key"'),
)  # fmt: skip
SETTINGS_BY_NAME = {key.name: key for key in SETTINGS}
CLUSTER_SETTINGS = SETTINGS[SETTINGS.index(SETTINGS_BY_NAME["cluster"]) + 1 :]
