"""How the value of each setting is read: one parser for each kind, which refuses by naming what is accepted (P11). Pure.

If we die here: nothing was changed.
"""

import ipaddress
import os
import re
from collections.abc import Callable
from pathlib import Path

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


# --- the cluster -----------------------------------------------------------------------------------------------------


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
