"""The check that the configured PFS is that of the catalog, before anything is mounted.

A catalog knows where its PFS was mounted last. At the same path it may be away for now, so that path is not looked at: the tier is `down`
until the PFS is back. At another path the PFS must be there, and be the same one: otherwise files that lie only on the former one would
fail, and changes that it lacks would never reach it.

Crash safety: reads only.
"""

import os

from ckptfs import limits
from ckptfs.bounded_waits import run_in_time
from ckptfs.catalog import journal, scans
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.errors import ConfigError, TimedOut
from ckptfs.tiers import pfs_identity


def require_pfs_of_catalog(db: Database, config: Config) -> None:
    """Refuse a configuration with another PFS than the catalog's, or with none. Raises ConfigError."""
    former = scans.get_pfs_path(db)
    if config.pfs is None:
        journal.require_no_pfs(db, config.state, former)
        return
    if config.cluster is not None:
        journal.require_recorded(db, config.cluster, config.state)
    if former in ("", os.fsdecode(config.pfs)) or (config.state / pfs_identity.ACCEPT_PFS).exists():
        return
    if difference := _compare_in_time(db, config):
        raise ConfigError(
            f"the files of {config.name} belong to the PFS that was at {former}, and {config.pfs} is not that PFS: {difference}",
            remedy=f"give pfs={former}, or another name for pfs={config.pfs}; if the PFS has moved to {config.pfs}, mount it there first",
        )


def _compare_in_time(db: Database, config: Config) -> str:
    """Return why the configured directory is not the PFS of the catalog, or "". It may hang for ever."""
    pfs = config.pfs
    assert pfs is not None
    try:
        return run_in_time(lambda: pfs_identity.find_difference_from_catalog(db, pfs), limits.PFS_ACT_WAIT_S, "it")
    except TimedOut as failure:
        return str(failure)
    except OSError as failure:
        return os.strerror(failure.errno or 0)
