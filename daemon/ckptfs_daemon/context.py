"""What the mount process's handlers work with: wired once in mount.py, never changed afterwards."""

from dataclasses import dataclass

from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.model import DataPath
from ckptfs.tiers.place import Tiers
from ckptfs_daemon.asking import MoverClient
from ckptfs_daemon.bells import WakeChannel
from ckptfs_daemon.open_files import OpenFileTable
from ckptfs_daemon.sharing import SharedNamespace
from ckptfs_daemon.standing_in import StandbyLease


@dataclass(frozen=True, slots=True)
class MountContext:
    """The catalog, the tiers, the way to the mover, and what is open."""

    config: Config
    data_path: DataPath
    db: Database
    tiers: Tiers
    wake_channel: WakeChannel
    mover_client: MoverClient
    open_files: OpenFileTable
    shared_namespace: SharedNamespace | None = None
    """None: this node is alone."""
    standby_lease: StandbyLease | None = None
    """None likewise."""
