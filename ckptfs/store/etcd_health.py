"""The state of etcd for `ckptfs doctor`: size, quota, alarms, compaction and authentication.

Crash safety: nothing is changed.
"""

from contextlib import closing
from dataclasses import dataclass

from ckptfs import limits
from ckptfs.config.schema import Config, is_loopback
from ckptfs.errors import CkptfsError, Compacted
from ckptfs.store.etcd import EtcdStore, open_store
from ckptfs.store.kv import Get


@dataclass(frozen=True, slots=True)
class EtcdHealth:
    """The answers of etcd. `quota_bytes` 0: not known. `is_open`: needs no certificate."""

    size_bytes: int
    quota_bytes: int
    alarms: tuple[str, ...]
    revision: int
    is_compacted: bool
    has_tls: bool
    is_open: bool
    is_remote: bool


def examine(config: Config) -> EtcdHealth:
    """Ask etcd. Raises StoreUnreachable."""
    with closing(open_store(config)) as store:
        revision, is_compacted = _find_compaction(store)
        status = store.get_member_status(timeout_s=limits.STORE_PROBE_WAIT_S)
        try:
            alarms = store.list_alarms(timeout_s=limits.STORE_PROBE_WAIT_S)
        except CkptfsError:
            alarms = []
    return EtcdHealth(
        status.size_bytes, status.quota_bytes, tuple(alarms), revision, is_compacted, config.etcd_ca is not None, _is_open(config),
        any(not is_loopback(address) for address in config.etcd),
    )  # fmt: skip


def _find_compaction(store: EtcdStore) -> tuple[int, bool]:
    """Return (the revision of etcd, whether the first one has been forgotten)."""
    revision = store.read([Get(b"epoch")], timeout_s=limits.STORE_PROBE_WAIT_S).revision
    try:
        store.read([Get(b"epoch", revision=1)], timeout_s=limits.STORE_PROBE_WAIT_S)
    except Compacted:
        return revision, True
    return revision, False


def _is_open(config: Config) -> bool:
    """Return True if etcd answers a client without a certificate."""
    assert config.cluster is not None
    with closing(EtcdStore(config.etcd, config.cluster, ca=config.etcd_ca)) as anonymous:
        try:
            anonymous.read([Get(b"epoch")], timeout_s=limits.STORE_PROBE_WAIT_S)
        except CkptfsError:
            return False
    return True
