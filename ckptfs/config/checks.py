"""Whether the values of a configuration fit one another and this machine: each refusal says what to give instead (P11).

Looks at directories and changes nothing. A PFS that hangs is taken as it was given, so that the mount comes up (P1).
If we die here: nothing was changed.
"""

import errno
import os
import socket
import stat
import threading
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from ckptfs import limits
from ckptfs.config.table import CLUSTER_SETTINGS, Config
from ckptfs.config.values import is_loopback, is_wildcard, parse_label
from ckptfs.errors import ConfigError
from ckptfs.model import Level

KEY_FILES = ("ca.pem", "node.pem", "node.key")


def resolve_config(config: Config) -> Config:
    """`config` with its paths resolved and its cluster's names filled in, if its values fit one another. Raises ConfigError."""
    if config.ram_low >= config.ram_high:
        raise ConfigError(f"ram_low ({config.ram_low:.0%}) must be below ram_high ({config.ram_high:.0%})")
    if config.fsync is Level.PFS and config.pfs is None:
        raise ConfigError("fsync=pfs needs a PFS", remedy="give pfs=DIRECTORY, or fsync=local")
    if config.nvme_bytes is not None and config.nvme is None:
        raise ConfigError("nvme_size was given without nvme", remedy="give nvme=DIRECTORY")
    config = _resolve_cluster(config) if config.cluster is not None else _check_standalone(config)
    # A mountpoint left by a crash answers "not connected"; its parent still does, so only that is resolved.
    mountpoint = Path(os.path.realpath(config.mountpoint.parent)) / config.mountpoint.name
    if not _is_mounted(mountpoint):
        _check_directory("the mountpoint", mountpoint)
    resolved: dict[str, Path | None] = {"mountpoint": mountpoint, "state": Path(os.path.realpath(config.state))}
    resolved["nvme"] = _resolve_directory("nvme", config.nvme)
    resolved["pfs"] = _resolve_directory("pfs", config.pfs)
    _check_disjoint({key: path for key, path in resolved.items() if path is not None})
    return replace(config, **resolved)  # type: ignore[arg-type]


# --- the cluster -----------------------------------------------------------------------------------------------------


def _check_standalone(config: Config) -> Config:
    """A node without a cluster has no use for a cluster's settings: whoever gave one believes something that is not so."""
    unset = {field.name: field.default for field in fields(Config)}
    given = [key.name for key in CLUSTER_SETTINGS if getattr(config, key.field) != unset[key.field]]
    if given:
        raise ConfigError(f"{given[0]} was given without cluster", remedy=f"give cluster=NAME, or leave out {', '.join(given)}")
    if config.fsync is Level.CLIQUE:
        raise ConfigError("fsync=clique needs a clique, and this node has none", remedy="give cluster=NAME, or fsync=local or fsync=pfs")
    return config


def _resolve_cluster(config: Config) -> Config:
    if not config.etcd:
        raise ConfigError(
            "cluster was given without etcd, through which its nodes find one another", remedy="give etcd=HOST:PORT+HOST:PORT"
        )
    if config.fsync is Level.CLIQUE and config.replication_factor < 2:
        raise ConfigError("fsync=clique needs a replication_factor of at least 2", remedy="give replication_factor=2, or fsync=local")
    node = config.node or _hostname()
    address = config.address or (f"{_hostname()}:{config.listen.rpartition(':')[2]}" if is_wildcard(config.listen) else config.listen)
    named = replace(config, node=node, failure_domain=config.failure_domain or node, address=address)
    if is_wildcard(address):
        raise ConfigError(f"address {address} names no node", remedy="give address=HOST:PORT as other nodes reach this one")
    _check_security(named)
    _check_etcd_keys(config)
    return named


def _hostname() -> str:
    try:
        return parse_label(socket.gethostname())
    except ConfigError as failure:
        raise ConfigError(
            f"the name of this machine cannot name a node: {failure}", remedy="give node=NAME and address=HOST:PORT"
        ) from failure


def _check_security(config: Config) -> None:
    """Nodes trust one another by certificates; without them only processes of this machine may be peers."""
    if config.insecure and config.keys is not None:
        raise ConfigError("keys and insecure exclude one another", remedy="leave out insecure")
    if config.keys is not None:
        remedy = f"give the directory that `ckptfs keys issue` made for node {config.node}, with {', '.join(KEY_FILES)} in it"
        _check_files("keys", *(config.keys / name for name in KEY_FILES), remedy=remedy)
    elif not config.insecure:
        remedy = "make them with `ckptfs keys init` and `ckptfs keys issue` and give keys=DIRECTORY; insecure is for trying on one machine"
        raise ConfigError("cluster was given without keys, by which nodes recognise one another", remedy=remedy)
    elif not (is_loopback(config.listen) and is_loopback(config.address)):
        open_to_all = next(address for address in (config.listen, config.address) if not is_loopback(address))
        remedy = "give listen=127.0.0.1:7420, or keys=DIRECTORY instead of insecure"
        raise ConfigError(f"insecure is accepted on loopback addresses only, and {open_to_all} is none", remedy=remedy)


def _check_etcd_keys(config: Config) -> None:
    if (config.etcd_cert is None) != (config.etcd_key is None):
        raise ConfigError("etcd_cert and etcd_key need one another", remedy="give both, or neither")
    if config.etcd_cert is not None and config.etcd_ca is None:
        raise ConfigError("etcd_cert was given without etcd_ca", remedy="give etcd_ca=FILE, the certificate of etcd's authority")
    for key, path in (("etcd_ca", config.etcd_ca), ("etcd_cert", config.etcd_cert), ("etcd_key", config.etcd_key)):
        if path is not None:
            _check_files(key, path)


def _check_files(key: str, *paths: Path, remedy: str = "") -> None:
    """Refuse what is not there or cannot be read."""
    for path in paths:
        try:
            with open(path, "rb"):
                pass
        except OSError as failure:
            raise ConfigError(
                f"{key}: {path} cannot be read: {os.strerror(failure.errno or 0)}", remedy=remedy or f"name readable files with {key}="
            ) from failure


# --- directories -----------------------------------------------------------------------------------------------------


def _resolve_directory(key: str, path: Path | None) -> Path | None:
    """`path` resolved, if it is a directory. One that does not answer in time is taken as it was given: its tier reports the trouble."""
    if path is None:
        return None
    found: list[Path | ConfigError] = []

    def resolve() -> None:
        try:
            real = Path(os.path.realpath(path))
            _check_directory(key, real)
            found.append(real)
        except ConfigError as failure:
            found.append(failure)

    # A hanging PFS must not keep the mount from coming up (P1), so nobody waits for this thread to the end.
    thread = threading.Thread(target=resolve, name=f"look at {key}", daemon=True)
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


def _is_mounted(mountpoint: Path) -> bool:
    """Whether a ckptfs is mounted there: then it is a directory, and asking it would wait for a daemon that may not run yet."""
    escaped = "".join(f"\\{ord(letter):03o}" if letter in " \t\n\\" else letter for letter in str(mountpoint))
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return any(line.split(" ", 5)[4] == escaped and " - fuse.ckptfs " in line for line in file)


def _check_disjoint(paths: Mapping[str, Path]) -> None:
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
