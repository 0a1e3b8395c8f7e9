"""Owns the table of settings, `KEYS`: every name, how its value is read, its default, the words that explain it; and `Config`.

Loading, refusing and the annotated sample file all come from this table. Settings of a cluster change nothing unless `cluster` is given.
If we die here: nothing was changed.

How the value of each setting is read: one parser for each kind, which refuses by naming what is accepted (P11). Pure.

If we die here: nothing was changed.
"""

import ipaddress
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptfs import limits
from ckptfs.errors import ConfigError
from ckptfs.model import Bulk, CliqueLost, DataPath, Level

RAM_BYTES_MIN = 16 * limits.MIB
SIZE_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "P": 1024**5}
DURATION_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str | int) -> int:
    """Bytes of "6G", "512M", "1.5T", "4096". Units are powers of 1024; "GiB" and "GB" mean "G". Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; accepted: a number with K, M, G, T or P, as in 512M or 6G")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


def parse_memory(text: str | int) -> int | None:
    """Bytes of a size, or of a percentage of this machine's memory; None for "auto". Raises ConfigError."""
    word = str(text).strip()
    if word == "auto":
        return None
    if word.endswith("%"):
        share = parse_ratio(word)
        size = int(share * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    else:
        size = parse_size(word)
    if size < RAM_BYTES_MIN:
        raise ConfigError(f"{text!r} is too little for a tier; accepted: at least {RAM_BYTES_MIN // limits.MIB}M, a percentage, or auto")
    return size


def parse_optional_size(text: str | int) -> int | None:
    """Bytes of a size; None for "auto"."""
    if str(text).strip() == "auto":
        return None
    size = parse_size(text)
    if size < RAM_BYTES_MIN:
        raise ConfigError(f"{text!r} is too little for a tier; accepted: at least {RAM_BYTES_MIN // limits.MIB}M, or auto")
    return size


def parse_seconds(text: str | float) -> float:
    """Seconds of "60s", "1.5m", "2h", "90". Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|)", str(text).strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration; accepted: a number with ms, s, m, h or d, as in 60s or 5m")
    return float(match[1]) * DURATION_UNITS[match[2]]


def parse_ratio(text: str | float) -> float:
    """A share above 0 and below or at 1: "80%" or 0.8. Raises ConfigError."""
    word = str(text).strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", word)
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value <= 1:
        raise ConfigError(f"{text!r} is not a share; accepted: 1% to 100%, or a number above 0 and up to 1")
    return value


def parse_level(text: str) -> Level:
    """What fsync waits for. Raises ConfigError."""
    if text not in (Level.LOCAL, Level.CLIQUE, Level.PFS):
        raise ConfigError(f"{text!r} is not a level; accepted: local, clique, pfs")
    return Level(text)


def parse_bool(text: str | bool) -> bool:
    """true or false in the usual spellings; an option without a value means true. Raises ConfigError."""
    word = str(text).lower()
    if word in ("", "true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise ConfigError(f"{text!r} is neither true nor false")


def parse_path(text: str) -> Path:
    """An absolute path. Raises ConfigError."""
    if not text or not os.path.isabs(text) or "\0" in text:
        raise ConfigError(f"{text!r} is not an absolute path")
    return Path(os.path.normpath(text))


def build_choice_parser(accepted: tuple[str, ...]) -> Callable[[str], str]:
    """A parser of these words."""

    def parse(text: str) -> str:
        if text not in accepted:
            raise ConfigError(f"{text!r} is not known; accepted: {', '.join(accepted)}")
        return text

    return parse


def parse_data_path(text: str) -> DataPath:
    """How bytes travel. Raises ConfigError."""
    return DataPath(build_choice_parser(tuple(DataPath))(text))


def parse_bulk(text: str) -> Bulk:
    """How blocks travel between nodes. Raises ConfigError."""
    return Bulk(build_choice_parser(tuple(Bulk))(text))


def parse_clique_lost(text: str) -> CliqueLost:
    """What fsync=clique does without peers. Raises ConfigError."""
    return CliqueLost(build_choice_parser(tuple(CliqueLost))(text))


def parse_label(text: str) -> str:
    """The name of a node, a cluster or a failure domain. Raises ConfigError."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise ConfigError(f"{text!r} is not a name; accepted: 1 to 64 letters, digits, '.', '_' and '-'")
    return text


def build_integer_parser(lowest: int, highest: int) -> Callable[[str], int]:
    """A parser of the whole numbers from `lowest` to `highest`."""

    def parse(text: str) -> int:
        word = text.strip()
        if not re.fullmatch(r"[0-9]{1,10}", word) or not lowest <= int(word) <= highest:
            raise ConfigError(f"{text!r} cannot be used; accepted: a whole number from {lowest} to {highest}")
        return int(word)

    return parse


def parse_address(text: str) -> str:
    """HOST:PORT; an IPv6 address stands in brackets. Raises ConfigError."""
    host, _, port = text.strip().rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    named = re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,253})", host) is not None
    if not (named or (bare != host and _is_ip(bare))) or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} is not an address; accepted: HOST:PORT, as in node7:7420 or [fd00::7]:7420")
    return f"{host}:{int(port)}"


def parse_addresses(text: str) -> tuple[str, ...]:
    """One or more of HOST:PORT, joined by "+" (or by commas in a file). Raises ConfigError."""
    found = tuple(dict.fromkeys(parse_address(word) for word in re.split(r"[+,]", text) if word.strip()))
    if not 0 < len(found) <= limits.ETCD_ENDPOINTS_MAX:
        raise ConfigError(f"{text!r} names {len(found)} servers; accepted: 1 to {limits.ETCD_ENDPOINTS_MAX}, joined by '+'")
    return found


def parse_host(address: str) -> str:
    """The host in HOST:PORT, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT can be reached from this machine only."""
    host = parse_host(address)
    return host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)


def is_wildcard(address: str) -> bool:
    """Whether HOST:PORT means every address of this machine."""
    host = parse_host(address)
    return _is_ip(host) and ipaddress.ip_address(host).is_unspecified


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


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
