"""The settings of a mount with name, parser, default and description; and `Config`, the parsed values.

Loading, refusals, the sample file and the reference all use the table `SETTINGS`. Parsers refuse bad input and name what is
accepted (P11). The settings after `cluster` have no effect without it. Pure.
"""

import contextlib
import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ckptfs import limits
from ckptfs.errors import ConfigError
from ckptfs.model import UNIX_PREFIX, WAITABLE_LEVELS, CliqueLost, DataPath, Level, SeriesRule

PREEMPTION_SOURCES = ("gce", "aws", "azure")
LOG_LEVELS = ("debug", "info", "warning", "error")
RAM_BYTES_MIN = 16 * limits.MIB
SIZE_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "P": 1024**5}
DURATION_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str | int) -> int:
    """Return the bytes of "6G", "512M", "1.5T" or "4096". Raises ConfigError.

    Units are powers of 1024; "GiB" and "GB" mean "G".
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; accepted: a number with K, M, G, T or P, as in 512M or 6G")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


def parse_memory(text: str | int) -> int | None:
    """Return the bytes of a size or of a percentage of memory; None for "auto". Raises ConfigError.

    More than the memory of this machine is refused: the RAM tier would fill it, and the kernel would kill programs.
    """
    word, memory = str(text).strip(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = _check_tier_size(text, int(parse_ratio(word) * memory)) if word.endswith("%") else parse_optional_size(text)
    if size is not None and size > memory:
        memory_text = f"{memory / limits.GIB:.1f}G"
        raise ConfigError(
            f"{text!r} is more than the memory of this machine, {memory_text}; accepted: up to that, 1% to 100%, or auto",
            remedy="leave memory to the jobs, as in 40%, and give nvme=DIRECTORY for the rest",
        )
    return size


def parse_optional_size(text: str | int) -> int | None:
    """Return the bytes of the size of a tier; None for "auto". Raises ConfigError."""
    return None if str(text).strip() == "auto" else _check_tier_size(text, parse_size(text))


def _check_tier_size(text: str | int, size: int) -> int:
    if size < RAM_BYTES_MIN:
        raise ConfigError(f"{text!r} is too little for a tier; accepted: at least {RAM_BYTES_MIN // limits.MIB}M, or auto")
    return size


def parse_size_or_share(text: str | int) -> float:
    """Return the share (a float) of "25%", or the bytes (an int) of "512M" or "0". Raises ConfigError."""
    word = str(text).strip()
    if word.endswith("%") and re.fullmatch(r"0*(\.0*)?\s*%", word) is None:
        return parse_ratio(word)
    return parse_size(word.rstrip("%"))


def parse_seconds(text: str | float) -> float:
    """Return the seconds of "60s", "1.5m", "2h" or "90". Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|)", str(text).strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration; accepted: a number with ms, s, m, h or d, as in 60s or 5m")
    return float(match[1]) * DURATION_UNITS[match[2]]


def parse_optional_seconds(text: str | float) -> float | None:
    """Return the seconds of a duration, or None for "auto". Raises ConfigError."""
    return None if str(text).strip() == "auto" else parse_seconds(text)


def parse_ratio(text: str | float) -> float:
    """Return a share above 0 and at most 1, of "80%" or 0.8. Raises ConfigError."""
    word = str(text).strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", word)
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value <= 1:
        raise ConfigError(f"{text!r} is not a share; accepted: 1% to 100%, or a number above 0 and up to 1")
    return value


def parse_bool(text: str | bool) -> bool:
    """Return true or false in the usual spellings; an option without a value is true. Raises ConfigError."""
    word = str(text).lower()
    if word in ("", "true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    raise ConfigError(f"{text!r} is neither true nor false")


def parse_path(text: str) -> Path:
    """Return an absolute path. Raises ConfigError."""
    if not text or not os.path.isabs(text) or "\0" in text:
        raise ConfigError(f"{text!r} is not an absolute path")
    return Path(os.path.normpath(text))


def build_choice_parser(accepted: Iterable[str], convert: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """Return a parser that accepts only these words and converts them."""
    words = tuple(accepted)

    def parse(text: str) -> Any:
        if text not in words:
            raise ConfigError(f"{text!r} is not known; accepted: {', '.join(words)}")
        return convert(text)

    return parse


def parse_label(text: str) -> str:
    """Return the name of a node, a cluster or a failure domain. Raises ConfigError."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text):
        raise ConfigError(f"{text!r} is not a name; accepted: 1 to 64 letters, digits, '.', '_' and '-'")
    return text


def build_integer_parser(lowest: int, highest: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `lowest` to `highest`."""

    def parse(text: str) -> int:
        word = text.strip()
        if not re.fullmatch(r"[0-9]{1,10}", word) or not lowest <= int(word) <= highest:
            raise ConfigError(f"{text!r} cannot be used; accepted: a whole number from {lowest} to {highest}")
        return int(word)

    return parse


def parse_address(text: str) -> str:
    """Return HOST:PORT; an IPv6 address stands in brackets. Raises ConfigError."""
    host, _, port = text.strip().rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    named = re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,253})", host) is not None
    if not (named or (bare != host and is_ip(bare))) or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} is not an address; accepted: HOST:PORT, as in node7:7420 or [fd00::7]:7420")
    return f"{host}:{int(port)}"


def parse_addresses(text: str) -> tuple[str, ...]:
    """Return addresses that are joined by '+' (in a file also by commas). Raises ConfigError."""
    found = tuple(dict.fromkeys(parse_address(word) for word in re.split(r"[+,]", text) if word.strip()))
    if not 0 < len(found) <= limits.ETCD_ENDPOINTS_MAX:
        raise ConfigError(f"{text!r} names {len(found)} servers; accepted: 1 to {limits.ETCD_ENDPOINTS_MAX}, joined by '+'")
    return found


def parse_host(address: str) -> str:
    """Return the host of HOST:PORT, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    """Return True if HOST:PORT can be reached from this machine only."""
    host = parse_host(address)
    return host == "localhost" or (is_ip(host) and ipaddress.ip_address(host).is_loopback)


def is_wildcard(address: str) -> bool:
    """Return True if HOST:PORT means every address of this machine."""
    host = parse_host(address)
    return is_ip(host) and ipaddress.ip_address(host).is_unspecified


def is_ip(host: str) -> bool:
    """Return True if a host is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def parse_metrics(text: str) -> str:
    """Return HOST:PORT, or "unix:" and an absolute path. Raises ConfigError."""
    if text.startswith(UNIX_PREFIX):
        path = str(parse_path(text.removeprefix(UNIX_PREFIX)))
        if len(os.fsencode(path)) > limits.SOCKET_PATH_BYTES_MAX:
            raise ConfigError(f"{text!r} is too long for a socket; accepted: a path of up to {limits.SOCKET_PATH_BYTES_MAX} bytes")
        return UNIX_PREFIX + path
    try:
        return parse_address(text)
    except ConfigError as failure:
        raise ConfigError(f"{text!r} is not an address; accepted: HOST:PORT, as in 127.0.0.1:9464, or unix:/PATH") from failure


def parse_preemption(text: str) -> str:
    """Return the source of preemption notices: a cloud, or an absolute path. Raises ConfigError."""
    if text in PREEMPTION_SOURCES or (text.startswith("/") and "\0" not in text):
        return text
    raise ConfigError(f"{text!r} is no source of notices; accepted: {', '.join(PREEMPTION_SOURCES)}, or the absolute path of an executable")


def parse_http_url(text: str) -> str:
    """Return an address like http://HOST:PORT. Raises ConfigError."""
    if re.fullmatch(r"http://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:[0-9]{1,5})?/?", text) is None:
        raise ConfigError(f"{text!r} is not the address of a metadata server; accepted: http://HOST or http://HOST:PORT")
    return text.rstrip("/")


COMMAND_LINE = "command line"
MS_RDONLY = 1
MOUNT_FLAGS_DEFAULT = 2 | 4
"""nosuid and nodev, from <linux/mount.h>: other nodes and the PFS say which files are set-id programs and devices."""


def parse_series_glob(text: str) -> str:
    """Return a glob of paths of series, relative to the mount. Raises ConfigError."""
    names = text.split("/")
    if "\0" in text or any(name in ("", ".", "..") for name in names):
        raise ConfigError(f"{text!r} is not a path of series; accepted: names below the mount with *, ? and **, as in run*/step_*")
    return text


def parse_positive_seconds(text: str | float) -> float:
    """Return the seconds of a duration above 0. Raises ConfigError."""
    seconds = parse_seconds(text)
    if not seconds:
        raise ConfigError(f"{text!r} is not above 0; accepted: a number with ms, s, m, h or d, as in 60s or 5m")
    return seconds


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """What is kept of the series that `path` matches. None: no bound; for `pfs_*`: every set."""

    path: str
    keep: int | None = None
    keep_every: int | None = None
    keep_local: int | None = None
    keep_pfs: int | None = None
    pfs_every: int | None = None
    pfs_interval_s: float | None = None
    incomplete_after_s: float | None = None

    @property
    def selects_for_pfs(self) -> bool:
        """Whether only some sets go to the PFS."""
        return self.pfs_every is not None or self.pfs_interval_s is not None


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration of one mount: absolute paths without symlinks, sizes in bytes, times in seconds."""

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
    prepared: float = limits.PREPARED_SHARE  # A share of the RAM tier (a float), or bytes (an int).
    huge_pages: bool = True
    synced_interval_s: float = limits.SYNCED_INTERVAL_S
    refresh_interval_s: float = limits.REFRESH_INTERVAL_S
    pfs_verify: bool = True
    drain_deadline_s: float | None = None  # None: it follows from what is dirty and from the speed of the PFS.
    preemption: str | None = None  # A cloud, or the path of a hook. None: nothing is watched.
    preemption_url: str = limits.PREEMPTION_URL
    preemption_deadline_s: float = limits.PREEMPTION_DEADLINE_S
    history_size: float = limits.HISTORY_SHARE  # A share of RAM and NVMe (a float), or bytes (an int).
    retention: tuple[RetentionRule, ...] = ()
    series: tuple[SeriesRule, ...] = ()
    log_level: str = "info"
    metrics: str | None = None  # HOST:PORT or unix:/PATH. None: no metrics.
    allow_other: bool = True
    cluster: str | None = None  # None: this node stands alone, and the fields below have no effect.
    etcd: tuple[str, ...] = ()
    node: str = ""
    rank: int | None = None
    failure_domain: str = ""
    listen: str = limits.PEER_LISTEN
    address: str = ""
    keys: Path | None = None
    insecure: bool = False
    replication_factor: int = limits.REPLICATION_FACTOR
    replication_jump: int = 1
    peer_share: float = limits.PEER_SHARE
    clique_wait_s: float = limits.CLIQUE_WAIT_S
    clique_lost: CliqueLost = CliqueLost.ERROR
    etcd_ca: Path | None = None
    etcd_cert: Path | None = None
    etcd_key: Path | None = None
    etcd_insecure: bool = False
    mount_flags: int = MOUNT_FLAGS_DEFAULT
    origins: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """(field, where its value was given: `COMMAND_LINE`, or the path of the file). Fields that are not named have their defaults."""

    @property
    def is_read_only(self) -> bool:
        """Whether the mount changes nothing: not for applications, on the PFS, or on other nodes."""
        return bool(self.mount_flags & MS_RDONLY)

    @property
    def keeps_copies(self) -> bool:
        """Whether other nodes keep copies of files."""
        return self.cluster is not None and self.replication_factor > 1

    @property
    def highest_level(self) -> Level | None:
        """The highest level that files of the mount can reach. None: the level local."""
        return Level.PFS if self.pfs is not None else Level.CLIQUE if self.keeps_copies else None


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    `field` is the field of Config that it sets. `default` is written as in the file; None means that `example` is shown instead.
    """

    name: str
    field: str
    parse: Callable[[Any], Any]
    default: str | bool | float | None
    description: str
    example: str = ""


SETTINGS: tuple[Setting, ...] = (
    Setting("mountpoint", "mountpoint", parse_path, None,
        "The mountpoint, unless the command line or fstab names it.", '"/ckpt"'),
    Setting("state", "state", parse_path, None,
        "The directory of the catalog and of the RAM tier's mountpoint. It must be local and survive a reboot; it is created if missing.\n"
        "Default: /var/lib/ckptfs/NAME; for ordinary users ~/.local/state/ckptfs/NAME.", '"/var/lib/ckptfs/NAME"'),
    Setting("ram", "ram_bytes", parse_memory, "auto",
        "Size of the RAM tier: a size, a percentage of the memory, or auto (half of the memory). A given size is never exceeded."),
    Setting("nvme", "nvme", parse_path, None,
        "Directory of the NVMe tier, on a local disk. Default: no NVMe tier.", '"/nvme/ckptfs"'),
    Setting("nvme_size", "nvme_bytes", parse_optional_size, "auto",
        "Size of the NVMe tier, or auto (the size of its filesystem). A size below that of the filesystem is a hard bound: writers to\n"
        "NVMe pass through the daemon, which is slower than passthrough. A filesystem of its own for the tier gives both."),
    Setting("pfs", "pfs", parse_path, None,
        "The directory on the parallel filesystem that this mount mirrors. Default: nothing is written back.", '"/lustre/project/ckpt"'),
    Setting("fsync", "fsync", build_choice_parser(WAITABLE_LEVELS, Level), "local",
        "What fsync(2) waits for: local (the file survives the death of every ckptfs process), clique (it survives the loss of this\n"
        "node; needs a cluster) or pfs (it is on the PFS)."),
    Setting("data_path", "data_path", build_choice_parser(DataPath, DataPath), "auto",
        "How data moves between applications and tiers: passthrough (by the kernel, Linux 6.9 and later), buffered (through the\n"
        "daemon), or auto (the fastest that works)."),
    Setting("ram_high", "ram_high", parse_ratio, "80%",
        "High watermark of the RAM tier. Above it new files go to NVMe, and files that are safe elsewhere are evicted from RAM."),
    Setting("ram_low", "ram_low", parse_ratio, "60%",
        "Low watermark of the RAM tier. Eviction stops there."),
    Setting("prepared", "prepared", parse_size_or_share, "50%",
        "How much of the RAM tier may be prepared for the next checkpoint while it is free: a size, a percentage of the tier, or 0 for\n"
        "none. Prepared memory is given back as soon as anything else needs it."),
    Setting("huge_pages", "huge_pages", parse_bool, True,
        "Whether the RAM tier uses huge pages (tmpfs with huge=within_size), if the kernel has them. On a virtual machine that gives\n"
        "free memory back to its host, only prepared memory has them. Not for ordinary users, whose tier is a directory in /dev/shm."),
    Setting("synced_interval", "synced_interval_s", parse_seconds, "60s",
        "Shortest interval between write-backs of a file that stays open and is fsynced."),
    Setting("refresh_interval", "refresh_interval_s", parse_seconds, "5m",
        "How often directories on the PFS are scanned for external changes."),
    Setting("pfs_verify", "pfs_verify", parse_bool, True,
        "Whether each file is read back from the PFS and compared before its last copy leaves RAM or NVMe. It is read when the\n"
        "write-back is idle, or when a tier fills up. With false, the last copy may go as soon as the PFS has reported success for\n"
        "every write, fsync and rename: bytes that the PFS then loses or changes are found when they are read, and are lost."),
    Setting("drain_deadline", "drain_deadline_s", parse_optional_seconds, "auto",
        "How long unmount and stop wait for the write-back; the mount serves meanwhile. auto: as long as the write-back moves, at most\n"
        "6 h; if nothing moves for 60 s, they go on. What is left stays on this node, and the next mount continues."),
    Setting("preemption", "preemption", parse_preemption, None,
        "The source of notices that this node is about to be taken away: gce, aws or azure (their metadata servers), or the absolute\n"
        "path of an executable that exits with 0 at a notice. The daemon then drains, the most urgent checkpoints first.\n"
        "Default: none.", '"gce"'),
    Setting("preemption_url", "preemption_url", parse_http_url, limits.PREEMPTION_URL,
        "Where the metadata server is."),
    Setting("preemption_deadline", "preemption_deadline_s", parse_seconds, "25s",
        "How long the drain after such a notice may take."),
    Setting("history_size", "history_size", parse_size_or_share, "50%",
        "How many bytes may be kept in .ckptfs/history that the application has deleted or replaced: a size, or a percentage of RAM and\n"
        "NVMe. Beyond it the oldest sets go first. What is pinned, and the newest set of each series, stays."),
    Setting("log_level", "log_level", build_choice_parser(LOG_LEVELS), "info",
        "Log level: debug, info, warning or error."),
    Setting("metrics", "metrics", parse_metrics, None,
        "Where Prometheus reads the figures of `ckptfs status`: HOST:PORT, or unix:/PATH for a socket. Whoever reaches the address can\n"
        "read them; they contain no paths. 127.0.0.1:PORT can be reached from this machine only. Default: nowhere.", '"127.0.0.1:9464"'),
    Setting("allow_other", "allow_other", parse_bool, True,
        "Whether other users may use the mount. Permissions are checked in any case. Default for ordinary users: false, because\n"
        "true needs user_allow_other in /etc/fuse.conf."),
    Setting("cluster", "cluster", parse_label, None,
        "Name of the cluster. Its nodes share one tree and hold copies for one another. Without it the node stands alone, and the\n"
        "settings below must not be given.", '"training"'),
    Setting("etcd", "etcd", parse_addresses, None,
        "The etcd servers of the cluster, joined by '+'.", '"etcd1:2379+etcd2:2379+etcd3:2379"'),
    Setting("node", "node", parse_label, None,
        "Name of this node, unique in the cluster. Default: the host name.", '"node7"'),
    Setting("rank", "rank", build_integer_parser(0, limits.RANK_MAX), None,
        "Position of this node in the order that cliques are formed from. Default: the order in which nodes first joined.", "7"),
    Setting("failure_domain", "failure_domain", parse_label, None,
        "What fails together with this node: a rack, a switch. Copies go to other failure domains if there are any. Default: each\n"
        "node fails alone.", '"rack3"'),
    Setting("listen", "listen", parse_address, limits.PEER_LISTEN,
        "Address on which this node accepts connections of its peers."),
    Setting("address", "address", parse_address, None,
        "Address under which peers reach this node. Default: the host name and the port of listen.", '"node7:7420"'),
    Setting("keys", "keys", parse_path, None,
        "Directory with ca.pem, node.pem and node.key, by which nodes authenticate one another (`ckptfs keys` creates them).",
        '"/etc/ckptfs/keys"'),
    Setting("insecure", "insecure", parse_bool, False,
        "Run without keys. Accepted on loopback addresses only, to try a cluster on one machine."),
    Setting("replication_factor", "replication_factor", build_integer_parser(1, limits.REPLICATION_FACTOR_MAX), limits.REPLICATION_FACTOR,
        "Number of nodes that hold each file, including this one. 1: no copies on peers."),
    Setting("replication_jump", "replication_jump", build_integer_parser(1, limits.REPLICATION_JUMP_MAX), 1,
        "Distance between the ranks of the nodes of a clique."),
    Setting("peer_share", "peer_share", parse_ratio, "50%",
        "Share of RAM and NVMe that may hold copies for peers."),
    Setting("clique_wait", "clique_wait_s", parse_seconds, "30s",
        "How long fsync=clique waits for peers."),
    Setting("clique_lost", "clique_lost", build_choice_parser(CliqueLost, CliqueLost), "error",
        "Result of fsync=clique if too few failure domains are left: error (EIO) or local (success, as with fsync=local)."),
    Setting("etcd_ca", "etcd_ca", parse_path, None,
        "CA certificate for etcd with TLS.", '"/etc/ckptfs/etcd/ca.pem"'),
    Setting("etcd_cert", "etcd_cert", parse_path, None,
        "Client certificate, if etcd demands one.", '"/etc/ckptfs/etcd/client.pem"'),
    Setting("etcd_key", "etcd_key", parse_path, None,
        "Private key of the client certificate.", '"/etc/ckptfs/etcd/client.key"'),
    Setting("etcd_insecure", "etcd_insecure", parse_bool, False,
        "Connect to etcd without TLS. Whoever is on the network can then change every file's name, owner and mode."),
)  # fmt: skip
SETTINGS_BY_NAME = {setting.name: setting for setting in SETTINGS}
CLUSTER_SETTINGS = SETTINGS[SETTINGS.index(SETTINGS_BY_NAME["cluster"]) + 1 :]

RULE_SETTINGS: tuple[Setting, ...] = (
    Setting("path", "path", parse_series_glob, None,
        "The series that the rule is for, by their paths below the mount, as `ckptfs list` shows them. * and ? stand for characters of\n"
        "one name, ** for any directories. The first rule that matches a series counts.", '"run*/step_*"'),
    Setting("keep", "keep", build_integer_parser(1, limits.RETENTION_SETS_MAX), None,
        "How many sets are kept, the newest ones. Older ones expire: they are deleted from the history and from the directories of the\n"
        "application, on this node, its peers and the PFS. Default: no set expires.", "10"),
    Setting("keep_every", "keep_every", build_integer_parser(1, limits.RETENTION_SETS_MAX), None,
        "Every Kth set of the series is kept for good, by the number behind @ in its name.", "100"),
    Setting("keep_local", "keep_local", build_integer_parser(1, limits.RETENTION_SETS_MAX), None,
        "How many sets stay in RAM and NVMe, the newest ones. Older ones leave them once they are on the PFS. Default: they leave them\n"
        "when the room is needed.", "2"),
    Setting("pfs_every", "pfs_every", build_integer_parser(1, limits.RETENTION_SETS_MAX), None,
        "Only every Nth set goes to the PFS, by its number. The others stay in RAM and NVMe until they expire.", "10"),
    Setting("pfs_interval", "pfs_interval_s", parse_positive_seconds, None,
        "Only one set in this time goes to the PFS.", '"30m"'),
    Setting("keep_pfs", "keep_pfs", build_integer_parser(1, limits.RETENTION_SETS_MAX), None,
        "How many sets stay on the PFS, the newest ones. An older one expires once as many newer ones were verified there.", "5"),
    Setting("incomplete_after", "incomplete_after_s", parse_positive_seconds, None,
        "When an incomplete checkpoint is deleted: if nothing of it has changed for this time, no process has it open, and the series\n"
        "has a newer complete set. Default: never.", '"1d"'),
)  # fmt: skip
"""The keys of a table `[[retention]]`."""


@contextlib.contextmanager
def named(where: str) -> Iterator[None]:
    """Put `where` in front of the message of a ConfigError of the block."""
    try:
        yield
    except ConfigError as failure:
        raise ConfigError(f"{where}: {failure}", remedy=failure.remedy) from failure


# --- effective settings (`ckptfs config`) -----------------------------------------------------------------------------

DEFAULT = "default"
DURATIONS = (parse_seconds, parse_optional_seconds, parse_positive_seconds)
SIZES = (parse_memory, parse_optional_size, parse_size_or_share)


def list_effective(config: Config) -> list[tuple[str, str, str]]:
    """Return (name, value, origin) of all settings that have an effect, and of the rules.

    They come in the order of the sample file, the rules last. The parser of a setting accepts its value again; it is empty if it is not
    set. Secrets lie in files, so only their paths are settings.
    The origin is `DEFAULT`, `COMMAND_LINE`, or the path of the file.
    """
    origins = dict(config.origins)

    def build(name: str, field: str, value: str) -> tuple[str, str, str]:
        return name, value, origins.get(field, DEFAULT)

    settings = [key for key in SETTINGS if config.cluster is not None or key not in CLUSTER_SETTINGS]
    found = [build(key.name, key.field, format_value(key, getattr(config, key.field))) for key in settings]
    for rule in config.retention:
        words = [f"{key.name}={format_value(key, value)}" for key in RULE_SETTINGS if (value := getattr(rule, key.field)) is not None]
        found.append(build("retention", "retention", " ".join(words)))
    return found + [build("series", "series", _format_series_rule(rule)) for rule in config.series]


def _format_series_rule(rule: SeriesRule) -> str:
    complete = rule.last or (str(rule.files) if rule.files else f"{rule.quiet_s:.15g}s")
    return f"pattern={rule.pattern}" + (f" complete={complete}" if rule.says_complete else "")


def format_value(key: Setting, value: Any) -> str:
    """Return the value of a setting as it can be given; empty if it is not set."""
    if value is None:
        return "auto" if key.default == "auto" else ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "+".join(value)
    if key.parse in DURATIONS:
        return f"{value:.15g}s"
    if isinstance(value, float) and key.parse in (parse_ratio, parse_size_or_share):
        return f"{100 * value:.12g}%"
    if key.parse in SIZES:
        return _format_exact_size(value)
    return str(value.value if isinstance(value, Enum) else value)


def _format_exact_size(count: int) -> str:
    """Return bytes in the largest unit that divides them."""
    unit = next(one for one, factor in reversed(SIZE_UNITS.items()) if count % factor == 0)
    return f"{count // SIZE_UNITS[unit]}{unit}" if count else "0"
