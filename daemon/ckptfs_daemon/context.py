"""What the mount process's handlers work with: wired once in mount.py, never changed afterwards."""

from dataclasses import dataclass

from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.model import DataPath
from ckptfs.tiers.place import Places
from ckptfs_daemon.asking import Asking
from ckptfs_daemon.bells import Bell
from ckptfs_daemon.open_files import OpenFiles
from ckptfs_daemon.sharing import Sharing
from ckptfs_daemon.standing_in import StandingIn


@dataclass(frozen=True, slots=True)
class Context:
    """The catalog, the tiers, the way to the mover, and what is open."""

    config: Config
    data_path: DataPath
    db: Database
    places: Places
    bell: Bell
    asking: Asking
    open_files: OpenFiles
    sharing: Sharing | None = None
    """None: this node is alone."""
    standing_in: StandingIn | None = None
    """None likewise."""
