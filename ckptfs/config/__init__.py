"""The configuration of a mount: options of mount(8) override a TOML file, which overrides defaults.

`load` parses each value by the table `SETTINGS`, then checks that the values fit one another and this machine. It refuses unknown
settings, bad values and directories that contain one another, and names what is accepted (P11).

Invariants:
- A `Config` is frozen once it is loaded.
- Nothing on disk changes.
- A PFS that hangs does not delay the mount: its path is used as given (P1).
"""

import difflib
import errno
import json
import os
import re
import socket
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ckptfs import limits, procfs
from ckptfs.bounded_waits import run_in_time
from ckptfs.config import schema
from ckptfs.config.rule_tables import SERIES_SETTINGS, check_rules, parse_rules, parse_series_rules
from ckptfs.config.schema import RAM_BYTES_MIN, Config, Setting, parse_seconds, parse_size
from ckptfs.errors import ConfigError, TimedOut
from ckptfs.model import UNIX_PREFIX, Level

__all__ = ["RAM_BYTES_MIN", "Config", "is_known_option", "load", "parse_options", "parse_seconds", "parse_size"]

RULES, SERIES = "retention", "series"
"""The keys of the tables of rules, and the fields of Config."""
KEY_FILES = ("ca.pem", "node.pem", "node.key")

# Options of mount(8) that the kernel implements: name -> (bits to set, bits to clear), from <linux/mount.h>.
MOUNT_FLAGS: dict[str, tuple[int, int]] = {
    "nosuid": (2, 0), "suid": (0, 2), "nodev": (4, 0), "dev": (0, 4), "noexec": (8, 0), "exec": (0, 8),
    "sync": (16, 0), "async": (0, 16), "dirsync": (128, 0), "noatime": (1024, 0), "atime": (0, 1024),
    "nodiratime": (2048, 0), "diratime": (0, 2048), "relatime": (1 << 21, 0), "norelatime": (0, 1 << 21),
    "ro": (schema.MS_RDONLY, 0), "rw": (0, schema.MS_RDONLY),
    "strictatime": (1 << 24, 0), "nostrictatime": (0, 1 << 24), "lazytime": (1 << 25, 0), "nolazytime": (0, 1 << 25),
}  # fmt: skip

# Options that mount(8), fstab and systemd use themselves.
IGNORED_OPTIONS = frozenset((
    "defaults", "auto", "noauto", "user", "nouser", "users", "nousers", "owner", "noowner", "group", "nogroup", "nofail",
    "_netdev", "comment", "default_permissions",
))  # fmt: skip
# Options that are refused, and why.
REFUSED_OPTIONS: dict[str, str] = {
    "remount": "the options of a mounted ckptfs, ro and rw included, cannot be changed; unmount it and mount it again"
}


def parse_options(text: str) -> dict[str, str]:
    """Return the options of an `-o a,b=c` string. `\\,` is a comma in a value; a flag has the value ""."""
    options: dict[str, str] = {}
    for item in re.split(r"(?<!\\),", text):
        name, _, value = item.replace("\\,", ",").strip().partition("=")
        if name:
            options[name] = value
        elif value:
            raise ConfigError(f"the option {item!r} has no name")
    return options


def is_known_option(option: str) -> bool:
    """Return True if `load` accepts an option of this name."""
    return (
        option in schema.SETTINGS_BY_NAME
        or option in MOUNT_FLAGS
        or option in IGNORED_OPTIONS
        or option == "config"
        or option.lower().startswith("x-")
    )


def load(name: str, mountpoint: Path | None, options: Mapping[str, str]) -> Config:
    """Load the configuration of the mount `name`: `options` over the file of `config=` over defaults.

    Raises ConfigError, which names what is wrong and what is accepted.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(f"{name!r} cannot name a mount; accepted: up to 64 letters, digits, '.', '_' and '-', a letter or digit first")
    rest = dict(options)
    in_file = _load_file(schema.parse_path(rest["config"])) if "config" in rest else {}
    given: dict[str, Any] = {}
    flags = schema.MOUNT_FLAGS_DEFAULT
    for option, text in rest.items():
        if option in MOUNT_FLAGS and not text:
            to_set, to_clear = MOUNT_FLAGS[option]
            flags = (flags | to_set) & ~to_clear
        elif option in schema.SETTINGS_BY_NAME or not is_known_option(option):
            given.update(_parse_setting(option, text, "option"))
    if mountpoint is not None:
        given["mountpoint"] = schema.parse_path(os.path.abspath(mountpoint))
    values = in_file | given
    origins = dict.fromkeys(in_file, rest.get("config", "")) | dict.fromkeys(given, schema.COMMAND_LINE)
    if "mountpoint" not in values:
        raise ConfigError("no mountpoint was given", remedy="give it on the command line, or as mountpoint in the configuration file")
    values.setdefault("state", get_default_state(name))
    values.setdefault("allow_other", os.geteuid() == 0)
    return resolve_config(Config(name=name, mount_flags=flags, origins=tuple(origins.items()), **values))


def _load_file(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except OSError as failure:
        raise ConfigError(f"the configuration file {path} cannot be read: {os.strerror(failure.errno or 0)}") from failure
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        raise ConfigError(f"the configuration file {path} is not valid TOML: {failure}") from failure
    values: dict[str, Any] = {}
    for key, value in found.items():
        with schema.named(str(path)):
            values.update(_TABLES[key](value) if key in _TABLES else _parse_setting(key, value, "key"))
    return values


def _parse_setting(name: str, text: Any, kind: str) -> dict[str, Any]:
    """Return {field: value} of one setting; `kind` is "option" or "key"."""
    if name in REFUSED_OPTIONS:
        raise ConfigError(f"{name}: {REFUSED_OPTIONS[name]}")
    key = schema.SETTINGS_BY_NAME.get(name)
    if key is None:
        flags = " ".join(sorted(MOUNT_FLAGS)) if kind == "option" else ""
        also = f", config, and the mount options {flags}" if flags else ""
        remedy = "several addresses are joined by '+', as in etcd=e1:2379+e2:2379" if re.fullmatch(r"[\w.\[\]:-]+:\d+", name) else ""
        near = difflib.get_close_matches(name, [*schema.SETTINGS_BY_NAME, *(MOUNT_FLAGS if kind == "option" else ())], n=1)
        meant = f", did you mean {near[0]}?" if near and not remedy else ""
        raise ConfigError(f"unknown {kind} {name!r}{meant}; accepted: {', '.join(schema.SETTINGS_BY_NAME)}{also}", remedy=remedy)
    return _parse_value(key, text)


def _parse_value(key: Setting, text: Any) -> dict[str, Any]:
    """Return {field: value} of one setting."""
    if key.parse is schema.parse_addresses and isinstance(text, list) and all(isinstance(word, str) for word in text):
        text = "+".join(text)
    if isinstance(text, (dict, list)) or (isinstance(text, bool) and key.parse is not schema.parse_bool):
        raise ConfigError(f"{key.name}: {text!r} is not a value of this setting")
    with schema.named(key.name):
        return {key.field: key.parse(text if isinstance(text, bool) else str(text))}


_TABLES: dict[str, Callable[[Any], dict[str, Any]]] = {
    RULES: lambda tables: {RULES: parse_rules(tables, _parse_value)},
    SERIES: lambda tables: {SERIES: parse_series_rules(tables)},
}


def get_default_state(name: str) -> Path:
    """Return the state directory of a mount that names none."""
    if os.geteuid() == 0:
        return Path("/var/lib/ckptfs") / name
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "ckptfs" / name


def build_sample() -> str:
    """Return the sample file: every setting with its description and, commented out, its default."""
    parts = [
        "# The configuration of one ckptfs mount. For the unit ckptfs@NAME.service: /etc/ckptfs/NAME.toml.\n"
        "# Options of -o override this file. Commented-out values are the defaults.\n"
        "# Sizes: 512M, 6G (powers of 1024). Durations: 500ms, 60s, 5m, 2h. Unknown keys are refused.\n"
    ]
    for key in schema.SETTINGS:
        words = "".join(f"# {line}\n" for line in key.description.split("\n"))
        value = key.example if key.default is None else json.dumps(key.default)
        parts.append(f"{words}# {key.name} = {value}\n")
    retention = "what is kept of which series of checkpoints. Each rule is a table of its own; without one nothing expires."
    series = "names that are checkpoints and that ckptfs does not know as such, and when one is complete."
    parts.append(_build_sample_rule(RULES, retention, schema.RULE_SETTINGS))
    parts.append(_build_sample_rule(SERIES, series, SERIES_SETTINGS))
    return "\n".join(parts)


def _build_sample_rule(table: str, words: str, settings: Iterable[Setting]) -> str:
    """Return the sample of a rule: every key with its description and an example."""
    lines = [f"# {table.capitalize()}: {words}", f"# [[{table}]]"]
    for key in settings:
        lines += [*(f"#   {line}" for line in key.description.split("\n")), f"# {key.name} = {key.example}"]
    return "\n".join(lines) + "\n"


def resolve_config(config: Config) -> Config:
    """Return `config` with resolved paths and the defaults of a cluster.

    Raises ConfigError if the values do not fit one another or this machine.
    """
    if config.ram_low >= config.ram_high:
        raise ConfigError(f"ram_low ({config.ram_low:.0%}) must be below ram_high ({config.ram_high:.0%})")
    if config.fsync is Level.PFS and config.pfs is None:
        raise ConfigError("fsync=pfs needs a PFS", remedy="give pfs=DIRECTORY, or fsync=local")
    if config.nvme_bytes is not None and config.nvme is None:
        raise ConfigError("nvme_size was given without nvme", remedy="give nvme=DIRECTORY")
    check_rules(config)
    config = _resolve_cluster(config) if config.cluster is not None else _check_standalone(config)
    # After a crash the mountpoint itself fails with ENOTCONN, so only its parent is resolved.
    mountpoint = Path(os.path.realpath(config.mountpoint.parent)) / config.mountpoint.name
    if not _is_mounted(mountpoint):
        _check_directory("the mountpoint", mountpoint)
    resolved: dict[str, Path | None] = {"mountpoint": mountpoint, "state": Path(os.path.realpath(config.state))}
    if config.state.exists():
        _check_directory("state", config.state)
    resolved["nvme"] = _resolve_directory("nvme", config.nvme)
    resolved["pfs"] = _resolve_directory("pfs", config.pfs)
    paths = {key: path for key, path in resolved.items() if path is not None}
    if config.metrics is not None and config.metrics.startswith(UNIX_PREFIX):
        paths["metrics"] = Path(config.metrics.removeprefix(UNIX_PREFIX))
    _check_disjoint(paths)
    return replace(config, **resolved)  # type: ignore[arg-type]


def _check_standalone(config: Config) -> Config:
    """Refuse settings of a cluster without `cluster`, which have no effect; a file may say defaults."""
    unset = {field.name: field.default for field in fields(Config)}
    given_as_option = {field for field, origin in config.origins if origin == schema.COMMAND_LINE}
    given = [key.name for key in schema.CLUSTER_SETTINGS if key.field in given_as_option or getattr(config, key.field) != unset[key.field]]
    if given:
        raise ConfigError(f"{given[0]} was given without cluster", remedy=f"give cluster=NAME, or leave out {', '.join(given)}")
    if config.fsync is Level.CLIQUE:
        raise ConfigError(
            "fsync=clique needs a clique, but this node is in no cluster", remedy="give cluster=NAME, or fsync=local or fsync=pfs"
        )
    return config


def _resolve_cluster(config: Config) -> Config:
    if not config.etcd:
        raise ConfigError(
            "cluster was given without etcd, which its nodes need to find one another", remedy="give etcd=HOST:PORT+HOST:PORT"
        )
    if config.fsync is Level.CLIQUE and config.replication_factor < 2:
        raise ConfigError("fsync=clique needs a replication_factor of at least 2", remedy="give replication_factor=2, or fsync=local")
    node = config.node or _hostname()
    address = config.address or config.listen
    if not config.address and schema.is_wildcard(config.listen):
        address = f"{_hostname()}:{config.listen.rpartition(':')[2]}"
    resolved = replace(config, node=node, failure_domain=config.failure_domain or node, address=address)
    if schema.is_wildcard(address):
        raise ConfigError(f"address {address} names no node", remedy="give address=HOST:PORT as other nodes reach this one")
    _check_security(resolved)
    _check_etcd_keys(config)
    return resolved


def _hostname() -> str:
    try:
        return schema.parse_label(socket.gethostname())
    except ConfigError as failure:
        raise ConfigError(
            f"the name of this machine cannot name a node: {failure}", remedy="give node=NAME and address=HOST:PORT"
        ) from failure


def _check_security(config: Config) -> None:
    """Demand certificates, by which nodes authenticate one another, except on loopback addresses."""
    if config.insecure and config.keys is not None:
        raise ConfigError("keys and insecure exclude one another", remedy="leave out insecure")
    if config.keys is not None:
        remedy = f"give the directory that `ckptfs keys issue` made for node {config.node}, with {', '.join(KEY_FILES)} in it"
        _check_files("keys", *(config.keys / name for name in KEY_FILES), remedy=remedy)
    elif not config.insecure:
        remedy = "make them with `ckptfs keys init` and `ckptfs keys issue` and give keys=DIRECTORY; insecure is for tests on one machine"
        raise ConfigError("cluster was given without keys, by which nodes authenticate one another", remedy=remedy)
    elif not (schema.is_loopback(config.listen) and schema.is_loopback(config.address)):
        open_to_all = next(address for address in (config.listen, config.address) if not schema.is_loopback(address))
        remedy = "give listen=127.0.0.1:7420, or keys=DIRECTORY instead of insecure"
        raise ConfigError(f"insecure is accepted on loopback addresses only, but {open_to_all} is not one", remedy=remedy)


def _check_etcd_keys(config: Config) -> None:
    if (config.etcd_cert is None) != (config.etcd_key is None):
        raise ConfigError("etcd_cert and etcd_key need one another", remedy="give both, or neither")
    if config.etcd_cert is not None and config.etcd_ca is None:
        raise ConfigError("etcd_cert was given without etcd_ca", remedy="give etcd_ca=FILE, the certificate of etcd's authority")
    if config.etcd_insecure and config.etcd_ca is not None:
        raise ConfigError("etcd_ca and etcd_insecure exclude one another", remedy="leave out etcd_insecure")
    remote = [address for address in config.etcd if not schema.is_loopback(address)]
    if remote and config.etcd_ca is None and not config.etcd_insecure:
        raise ConfigError(
            f"etcd at {remote[0]} would be used without TLS, so that anybody on the network can change the cluster's files",
            remedy="give etcd_ca=FILE, and etcd_cert= and etcd_key= if etcd demands them; etcd_insecure is for networks that you trust",
        )
    for key, path in (("etcd_ca", config.etcd_ca), ("etcd_cert", config.etcd_cert), ("etcd_key", config.etcd_key)):
        if path is not None:
            _check_files(key, path)
    if config.etcd_key is not None and os.stat(config.etcd_key).st_mode & 0o077:
        raise ConfigError(f"etcd_key: {config.etcd_key} is open to others", remedy=f"chmod 600 {config.etcd_key}")


def _check_files(key: str, *paths: Path, remedy: str = "") -> None:
    for path in paths:
        try:
            with open(path, "rb"):
                pass
        except OSError as failure:
            raise ConfigError(
                f"{key}: {path} cannot be read: {os.strerror(failure.errno or 0)}", remedy=remedy or f"give readable files with {key}="
            ) from failure


def _resolve_directory(key: str, path: Path | None) -> Path | None:
    """Return the resolved path of a directory.

    A path that does not answer in time is returned as given: the health of its tier reports the trouble.
    """
    if path is None:
        return None

    def resolve() -> Path:
        real = Path(os.path.realpath(path))
        _check_directory(key, real)
        return real

    try:
        return run_in_time(resolve, limits.PFS_ACT_WAIT_S, f"resolve {key}")
    except TimedOut:
        return path  # A PFS that hangs must not delay the mount (P1).


def _check_directory(key: str, path: Path) -> None:
    try:
        mode = os.stat(path).st_mode
    except OSError as failure:
        if failure.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            return
        raise ConfigError(
            f"{key} {path}: {os.strerror(failure.errno or 0)}", remedy="create the directory, or give another one"
        ) from failure
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"{key} {path} is not a directory", remedy="give a directory")


def _is_mounted(mountpoint: Path) -> bool:
    """Return True if a ckptfs is mounted there. Then stat could wait for a daemon that does not run yet."""
    return any(entry.mountpoint == mountpoint and entry.fstype == procfs.CKPTFS_TYPE for entry in procfs.list_mount_entries())


def _check_disjoint(paths: Mapping[str, Path]) -> None:
    """Refuse directories that contain one another, if one tier would then contain another."""
    for inner, outer in (
        ("state", "mountpoint"), ("nvme", "mountpoint"), ("pfs", "mountpoint"),
        ("mountpoint", "state"), ("nvme", "state"), ("pfs", "state"),
        ("mountpoint", "pfs"), ("state", "pfs"), ("nvme", "pfs"),
        ("mountpoint", "nvme"), ("pfs", "nvme"), ("metrics", "mountpoint"), ("metrics", "pfs"),
    ):  # fmt: skip
        if inner in paths and outer in paths and paths[inner].is_relative_to(paths[outer]):
            same = "is the same directory as" if paths[inner] == paths[outer] else "lies inside"
            remedy = "choose directories that do not contain one another"
            raise ConfigError(f"{inner} {paths[inner]} {same} {outer} {paths[outer]}", remedy=remedy)
