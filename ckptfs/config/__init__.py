"""What a mount was asked to be: options of mount(8) over a TOML file over defaults, checked once, frozen from then on.

One table, `KEYS`, names every setting, how its value is read, its default and the words that explain it; loading, refusing and
the annotated sample file all come from it. Unknown keys, bad values and directories that lie inside one another are refused by name (P11).
Nothing here changes anything on disk, so dying here costs nothing.
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ckptfs.config.checks import resolve_config
from ckptfs.config.table import SETTINGS, SETTINGS_BY_NAME, Config
from ckptfs.config.values import is_loopback, parse_addresses, parse_bool, parse_host, parse_path, parse_seconds, parse_size
from ckptfs.errors import ConfigError
from ckptfs.model import Bulk, CliqueLost, DataPath, Level

__all__ = [
    "SETTINGS",
    "Config",
    "build_sample",
    "from_json",
    "is_known_option",
    "is_loopback",
    "load",
    "parse_host",
    "parse_options",
    "parse_seconds",
    "parse_size",
    "to_json",
]  # fmt: skip

# What mount(8) passes and the kernel understands: name -> (bits to set, bits to clear), from <linux/mount.h>.
MOUNT_FLAGS: dict[str, tuple[int, int]] = {
    "nosuid": (2, 0), "suid": (0, 2), "nodev": (4, 0), "dev": (0, 4), "noexec": (8, 0), "exec": (0, 8),
    "sync": (16, 0), "async": (0, 16), "dirsync": (128, 0), "noatime": (1024, 0), "atime": (0, 1024),
    "nodiratime": (2048, 0), "diratime": (0, 2048), "relatime": (1 << 21, 0), "norelatime": (0, 1 << 21),
    "strictatime": (1 << 24, 0), "nostrictatime": (0, 1 << 24), "lazytime": (1 << 25, 0), "nolazytime": (0, 1 << 25),
}  # fmt: skip
# What mount(8), fstab and systemd pass for themselves; it means nothing to us.
IGNORED_OPTIONS = frozenset((
    "rw", "defaults", "auto", "noauto", "user", "nouser", "users", "nousers", "owner", "noowner", "group", "nogroup", "nofail",
    "_netdev", "comment", "default_permissions",
))  # fmt: skip

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


def is_known_option(option: str) -> bool:
    """Whether `load` accepts an option of this name."""
    return (
        option in SETTINGS_BY_NAME
        or option in MOUNT_FLAGS
        or option in IGNORED_OPTIONS
        or option == "config"
        or option.lower().startswith("x-")
    )


def load(name: str, mountpoint: Path | None, options: Mapping[str, str]) -> Config:
    """The configuration of the mount `name`: `options` over the file that `config=` names over the defaults.

    Raises ConfigError, which names what was wrong and what is accepted.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(f"{name!r} cannot name a mount; accepted: up to 64 letters, digits, '.', '_' and '-', a letter or digit first")
    rest = dict(options)
    values = _load_file(parse_path(rest.pop("config"))) if "config" in rest else {}
    flags = 0
    for option, text in rest.items():
        if option in MOUNT_FLAGS and not text:
            to_set, to_clear = MOUNT_FLAGS[option]
            flags = (flags | to_set) & ~to_clear
        elif option in SETTINGS_BY_NAME or not is_known_option(option):
            values.update(_parse_setting(option, text, "option"))
    if mountpoint is not None:
        values["mountpoint"] = parse_path(os.path.abspath(mountpoint))
    if "mountpoint" not in values:
        raise ConfigError("no mountpoint was given", remedy="name it on the command line, or as mountpoint in the configuration file")
    values.setdefault("state", get_default_state(name))
    values.setdefault("allow_other", os.geteuid() == 0)
    return resolve_config(Config(name=name, mount_flags=flags, **values))


def _load_file(path: Path) -> dict[str, Any]:
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
            values.update(_parse_setting(key, value, "key"))
        except ConfigError as failure:
            raise ConfigError(f"{path}: {failure}", remedy=failure.remedy) from failure
    return values


def _parse_setting(name: str, text: Any, kind: str) -> dict[str, Any]:
    """{field: value} of one setting."""
    if name in ("ro", "remount"):
        why = {
            "ro": "a read-only mount is not supported, because the write-back of earlier files would stop; mount read-write",
            "remount": "the options of a mounted ckptfs cannot be changed; unmount it and mount it again",
        }
        raise ConfigError(f"{name}: {why[name]}")
    key = SETTINGS_BY_NAME.get(name)
    if key is None:
        flags = " ".join(sorted(MOUNT_FLAGS)) if kind == "option" else ""
        also = f", config, and the mount options {flags}" if flags else ""
        remedy = "several addresses are joined by '+', as in etcd=e1:2379+e2:2379" if re.fullmatch(r"[\w.\[\]:-]+:\d+", name) else ""
        raise ConfigError(f"unknown {kind} {name!r}; accepted: {', '.join(SETTINGS_BY_NAME)}{also}", remedy=remedy)
    if key.parse is parse_addresses and isinstance(text, list) and all(isinstance(word, str) for word in text):
        text = "+".join(text)
    if isinstance(text, (dict, list)) or (isinstance(text, bool) and key.parse is not parse_bool):
        raise ConfigError(f"{name}: {text!r} is not a value that this key can have")
    try:
        return {key.field: key.parse(text if isinstance(text, bool) else str(text))}
    except ConfigError as failure:
        raise ConfigError(f"{name}: {failure}", remedy=failure.remedy) from failure


def get_default_state(name: str) -> Path:
    """Where the catalog lies when nothing else was said."""
    if os.geteuid() == 0:
        return Path("/var/lib/ckptfs") / name
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "ckptfs" / name


def to_json(config: Config) -> str:
    """For the children of the supervisor; `from_json` reads it back without checking again."""
    return json.dumps({key: str(value) if isinstance(value, Path) else value for key, value in asdict(config).items()})


def from_json(text: str) -> Config:
    """The inverse of `to_json`."""
    values: dict[str, Any] = json.loads(text)
    for key in SETTINGS:
        if key.parse is parse_path and values[key.field] is not None:
            values[key.field] = Path(values[key.field])
    words = {"fsync": Level(values["fsync"]), "data_path": DataPath(values["data_path"]), "clique_lost": CliqueLost(values["clique_lost"]),
             "bulk": Bulk(values["bulk"])}  # fmt: skip
    return Config(**(values | words | {"etcd": tuple(values["etcd"])}))


def build_sample() -> str:
    """The annotated configuration file: every key with its words; those with a default show it, commented out."""
    parts = [
        "# The configuration of one ckptfs mount. For the unit ckptfs@NAME.service: /etc/ckptfs/NAME.toml.\n"
        "# Options given with -o win over this file; what is commented out shows the default.\n"
        "# Sizes: 512M, 6G (powers of 1024). Durations: 500ms, 60s, 5m, 2h. Unknown keys are refused.\n"
    ]
    for key in SETTINGS:
        words = "".join(f"# {line}\n" for line in key.description.split("\n"))
        value = key.example if key.default is None else json.dumps(key.default)
        parts.append(f"{words}# {key.name} = {value}\n")
    return "\n".join(parts)
