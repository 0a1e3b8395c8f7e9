"""What a mount was asked to be: options of mount(8) over a TOML file over defaults, checked once, frozen from then on.

One table, `KEYS`, names every setting, how its value is read, its default and the words that explain it; loading, refusing and
the annotated sample file all come from it. Unknown keys, bad values and directories that lie inside one another are refused by name (P11).
Nothing here changes anything on disk, so dying here costs nothing.
"""

import errno
import json
import os
import re
import stat
import threading
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ckptfs import limits
from ckptfs.errors import ConfigError
from ckptfs.model import DataPath, Level

RAM_BYTES_MIN = 16 * limits.MIB
UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "P": 1024**5}
SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
LOG_LEVELS = ("debug", "info", "warning", "error")

# What mount(8) passes and the kernel understands: name -> (bits to set, bits to clear), from <linux/mount.h>.
MOUNT_FLAGS: dict[str, tuple[int, int]] = {
    "nosuid": (2, 0), "suid": (0, 2), "nodev": (4, 0), "dev": (0, 4), "noexec": (8, 0), "exec": (0, 8),
    "sync": (16, 0), "async": (0, 16), "dirsync": (128, 0), "noatime": (1024, 0), "atime": (0, 1024),
    "nodiratime": (2048, 0), "diratime": (0, 2048), "relatime": (1 << 21, 0), "norelatime": (0, 1 << 21),
    "strictatime": (1 << 24, 0), "nostrictatime": (0, 1 << 24), "lazytime": (1 << 25, 0), "nolazytime": (0, 1 << 25),
}  # fmt: skip
# What mount(8), fstab and systemd pass for themselves; it means nothing to us.
IGNORED = frozenset((
    "rw", "defaults", "auto", "noauto", "user", "nouser", "users", "nousers", "owner", "noowner", "group", "nogroup", "nofail",
    "_netdev", "comment", "default_permissions",
))  # fmt: skip


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
    mount_flags: int = 0


def parse_size(text: str | int) -> int:
    """Bytes of "6G", "512M", "1.5T", "4096". Units are powers of 1024; "GiB" and "GB" mean "G". Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; accepted: a number with K, M, G, T or P, as in 512M or 6G")
    return int(float(match[1]) * UNITS[match[2].upper()])


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
    return float(match[1]) * SECONDS[match[2]]


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
    if text == Level.CLIQUE:
        raise ConfigError("fsync=clique needs a clique, and this node has none; accepted: local, pfs")
    if text not in (Level.LOCAL, Level.PFS):
        raise ConfigError(f"{text!r} is not a level; accepted: local, pfs")
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


def _one_of(accepted: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in accepted:
            raise ConfigError(f"{text!r} is not known; accepted: {', '.join(accepted)}")
        return text

    return parse


def _data_path(text: str) -> DataPath:
    return DataPath(_one_of(tuple(DataPath))(text))


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: its name in TOML and in -o, the field of Config it fills, how it is read, its default as written, and its words."""

    name: str
    field: str
    parse: Callable[[Any], Any]
    default: str | bool | float | None
    words: str
    example: str = ""


KEYS: tuple[Key, ...] = (
    Key("mountpoint", "mountpoint", parse_path, None,
        "Where the filesystem appears, when the command line or fstab does not say it.", '"/ckpt"'),
    Key("state", "state", parse_path, None,
        "The catalog and the RAM tier's mountpoint. A local directory that survives a reboot; made when it is missing.\n"
        "Without it: /var/lib/ckptfs/NAME, for ordinary users ~/.local/state/ckptfs/NAME.", '"/var/lib/ckptfs/NAME"'),
    Key("ram", "ram_bytes", parse_memory, "auto",
        "The RAM tier: a size, a percentage of the memory, or auto (half of the memory). A given size is never exceeded."),
    Key("nvme", "nvme", parse_path, None,
        "The NVMe tier: a directory on a local disk. Without it there is none.", '"/nvme/ckptfs"'),
    Key("nvme_size", "nvme_bytes", parse_optional_size, "auto",
        "How much of that disk may be used, or auto (what its filesystem has)."),
    Key("pfs", "pfs", parse_path, None,
        "The directory on the parallel filesystem that this mount mirrors. Without it nothing is written back.", '"/lustre/project/ckpt"'),
    Key("fsync", "fsync", parse_level, "local",
        "What fsync(2) waits for: local (survives the death of every ckptfs process) or pfs (is on the PFS)."),
    Key("data_path", "data_path", _data_path, "auto",
        "How bytes travel: passthrough (by the kernel, Linux 6.9 and later), buffered (through the daemon), or auto (the\n"
        "fastest there is)."),
    Key("ram_high", "ram_high", parse_ratio, "80%",
        "Above this share of the RAM tier new files go to NVMe, and what is safe elsewhere leaves the RAM."),
    Key("ram_low", "ram_low", parse_ratio, "60%",
        "Making room ends here."),
    Key("synced_interval", "synced_interval_s", parse_seconds, "60s",
        "A file that stays open and is fsynced is written back at most this often."),
    Key("refresh_interval", "refresh_interval_s", parse_seconds, "5m",
        "How often directories on the PFS are compared again, for what others changed there."),
    Key("drain_deadline", "drain_deadline_s", parse_seconds, "60s",
        "How long unmounting and stopping wait for the write-back. What is not finished goes on at the next mount."),
    Key("log_level", "log_level", _one_of(LOG_LEVELS), "info",
        "What is logged: debug, info, warning or error."),
    Key("allow_other", "allow_other", parse_bool, True,
        "Whether other users may use the mount; permissions are checked in any case. Off for ordinary users unless given,\n"
        "because it needs user_allow_other in /etc/fuse.conf then."),
)  # fmt: skip
BY_NAME = {key.name: key for key in KEYS}


# --- reading ---------------------------------------------------------------------------------------------------------


def parse_options(text: str) -> dict[str, str]:
    """The options of one `-o a,b=c` string; a comma in a value is written as \\,. A flag has the value ""."""
    options: dict[str, str] = {}
    for item in re.split(r"(?<!\\),", text):
        name, _, value = item.replace("\\,", ",").strip().partition("=")
        if name:
            options[name] = value
        elif value:
            raise ConfigError(f"the option {item!r} has no name")
    return options


def is_known(option: str) -> bool:
    """Whether `load` accepts an option of this name."""
    return option in BY_NAME or option in MOUNT_FLAGS or option in IGNORED or option == "config" or option.lower().startswith("x-")


def load(name: str, mountpoint: Path | None, options: Mapping[str, str]) -> Config:
    """The configuration of the mount `name`: `options` over the file that `config=` names over the defaults.

    Raises ConfigError, which names what was wrong and what is accepted.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(f"{name!r} cannot name a mount; accepted: up to 64 letters, digits, '.', '_' and '-', a letter or digit first")
    rest = dict(options)
    values = _from_file(parse_path(rest.pop("config"))) if "config" in rest else {}
    flags = 0
    for option, text in rest.items():
        if option in MOUNT_FLAGS and not text:
            to_set, to_clear = MOUNT_FLAGS[option]
            flags = (flags | to_set) & ~to_clear
        elif option in BY_NAME or not is_known(option):
            values.update(_value(option, text, "option"))
    if mountpoint is not None:
        values["mountpoint"] = parse_path(os.path.abspath(mountpoint))
    if "mountpoint" not in values:
        raise ConfigError("no mountpoint was given", remedy="name it on the command line, or as mountpoint in the configuration file")
    values.setdefault("state", default_state(name))
    values.setdefault("allow_other", os.geteuid() == 0)
    return _checked(Config(name=name, mount_flags=flags, **values))


def _from_file(path: Path) -> dict[str, Any]:
    """The values in a TOML file, checked one by one."""
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except OSError as failure:
        raise ConfigError(f"the configuration file {path} cannot be read: {os.strerror(failure.errno or 0)}") from failure
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        raise ConfigError(f"the configuration file {path} is not valid TOML: {failure}") from failure
    values: dict[str, Any] = {}
    for key, value in found.items():
        try:
            values.update(_value(key, value, "key"))
        except ConfigError as failure:
            raise ConfigError(f"{path}: {failure}", remedy=failure.remedy) from failure
    return values


def _value(name: str, text: Any, kind: str) -> dict[str, Any]:
    """{field: value} of one setting."""
    if name in ("ro", "remount"):
        why = {
            "ro": "a read-only mount is not supported, because the write-back of earlier files would stop; mount read-write",
            "remount": "the options of a mounted ckptfs cannot be changed; unmount it and mount it again",
        }
        raise ConfigError(f"{name}: {why[name]}")
    key = BY_NAME.get(name)
    if key is None:
        flags = " ".join(sorted(MOUNT_FLAGS)) if kind == "option" else ""
        also = f", config, and the mount options {flags}" if flags else ""
        raise ConfigError(f"unknown {kind} {name!r}; accepted: {', '.join(BY_NAME)}{also}")
    if isinstance(text, (dict, list)) or (isinstance(text, bool) and key.parse is not parse_bool):
        raise ConfigError(f"{name}: {text!r} is not a value that this key can have")
    try:
        return {key.field: key.parse(text if isinstance(text, bool) else str(text))}
    except ConfigError as failure:
        raise ConfigError(f"{name}: {failure}", remedy=failure.remedy) from failure


def default_state(name: str) -> Path:
    """Where the catalog lies when nothing else was said."""
    if os.geteuid() == 0:
        return Path("/var/lib/ckptfs") / name
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "ckptfs" / name


def _checked(config: Config) -> Config:
    """`config` with its paths resolved, if its values fit one another."""
    if config.ram_low >= config.ram_high:
        raise ConfigError(f"ram_low ({config.ram_low:.0%}) must be below ram_high ({config.ram_high:.0%})")
    if config.fsync is Level.PFS and config.pfs is None:
        raise ConfigError("fsync=pfs needs a PFS", remedy="give pfs=DIRECTORY, or fsync=local")
    if config.nvme_bytes is not None and config.nvme is None:
        raise ConfigError("nvme_size was given without nvme", remedy="give nvme=DIRECTORY")
    # A mountpoint left by a crash answers "not connected"; its parent still does, so only that is resolved.
    mountpoint = Path(os.path.realpath(config.mountpoint.parent)) / config.mountpoint.name
    if not _has_ckptfs(mountpoint):
        _check_directory("the mountpoint", mountpoint)
    resolved: dict[str, Path | None] = {"mountpoint": mountpoint, "state": Path(os.path.realpath(config.state))}
    resolved["nvme"] = _directory("nvme", config.nvme)
    resolved["pfs"] = _directory("pfs", config.pfs)
    _check_apart({key: path for key, path in resolved.items() if path is not None})
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return Config(**(values | resolved))


def _directory(key: str, path: Path | None) -> Path | None:
    """`path` resolved, if it is a directory. One that does not answer in time is taken as it was given: its tier reports the trouble."""
    if path is None:
        return None
    found: list[Path | ConfigError] = []

    def look() -> None:
        try:
            real = Path(os.path.realpath(path))
            _check_directory(key, real)
            found.append(real)
        except ConfigError as failure:
            found.append(failure)

    # A hanging PFS must not keep the mount from coming up (P1), so nobody waits for this thread to the end.
    thread = threading.Thread(target=look, name=f"look at {key}", daemon=True)
    thread.start()
    thread.join(limits.PFS_ACT_WAIT_S)
    if not found:
        return path
    if isinstance(found[0], ConfigError):
        raise found[0]
    return found[0]


def _check_directory(key: str, path: Path) -> None:
    """Refuse what is there and no directory, or is not there at all."""
    try:
        mode = os.stat(path).st_mode
    except OSError as failure:
        if failure.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            return
        raise ConfigError(f"{key} {path}: {os.strerror(failure.errno or 0)}", remedy="make the directory, or name another one") from failure
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"{key} {path} is not a directory", remedy="name a directory")


def _has_ckptfs(mountpoint: Path) -> bool:
    """Whether a ckptfs is mounted there: then it is a directory, and asking it would wait for a daemon that may not run yet."""
    escaped = "".join(f"\\{ord(letter):03o}" if letter in " \t\n\\" else letter for letter in str(mountpoint))
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return any(line.split(" ", 5)[4] == escaped and " - fuse.ckptfs " in line for line in file)


def _check_apart(paths: Mapping[str, Path]) -> None:
    """Refuse directories that lie inside one another where that would make one tier swallow another."""
    for inner, outer in (
        ("state", "mountpoint"), ("nvme", "mountpoint"), ("pfs", "mountpoint"),
        ("mountpoint", "state"), ("nvme", "state"), ("pfs", "state"),
        ("mountpoint", "pfs"), ("state", "pfs"), ("nvme", "pfs"),
        ("mountpoint", "nvme"), ("pfs", "nvme"),
    ):  # fmt: skip
        if inner in paths and outer in paths and paths[inner].is_relative_to(paths[outer]):
            same = "is the same directory as" if paths[inner] == paths[outer] else "lies inside"
            remedy = "choose directories that do not contain one another"
            raise ConfigError(f"{inner} {paths[inner]} {same} {outer} {paths[outer]}", remedy=remedy)


def to_json(config: Config) -> str:
    """For the children of the supervisor; `from_json` reads it back without checking again."""
    return json.dumps({key: str(value) if isinstance(value, Path) else value for key, value in asdict(config).items()})


def from_json(text: str) -> Config:
    """The inverse of `to_json`."""
    values: dict[str, Any] = json.loads(text)
    for key in ("mountpoint", "state", "nvme", "pfs"):
        values[key] = None if values[key] is None else Path(values[key])
    return Config(**(values | {"fsync": Level(values["fsync"]), "data_path": DataPath(values["data_path"])}))


def sample() -> str:
    """The annotated configuration file: every key with its words; those with a default show it, commented out."""
    parts = [
        "# The configuration of one ckptfs mount. For the unit ckptfs@NAME.service: /etc/ckptfs/NAME.toml.\n"
        "# Options given with -o win over this file; what is commented out shows the default.\n"
        "# Sizes: 512M, 6G (powers of 1024). Durations: 500ms, 60s, 5m, 2h. Unknown keys are refused.\n"
    ]
    for key in KEYS:
        words = "".join(f"# {line}\n" for line in key.words.split("\n"))
        value = key.example if key.default is None else json.dumps(key.default)
        parts.append(f"{words}# {key.name} = {value}\n")
    return "\n".join(parts)
