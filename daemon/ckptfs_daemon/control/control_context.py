"""What the two control services share: this node, its figures, and what they may ask of the mover."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.server_limits import RefusedCalls
from ckptfs.tiers.storage import Tiers
from ckptfs_daemon import logs
from ckptfs_daemon.control.cluster_status import ClusterFigures
from ckptfs_daemon.control.status import StatusFigures
from ckptfs_daemon.ipc import ProgressSignal, Successor


def _ignore(*_: object) -> None:
    pass


@dataclass(slots=True)
class ControlContext:
    """This node, and functions of the mover, which any thread but trio's may call."""

    config: Config
    db: Database
    tiers: Tiers
    cluster: ClusterFigures | None = None
    retry_now: Callable[[], None] = _ignore  # Runs all lanes at once.
    wake_lanes: Callable[[], None] = _ignore  # Has all lanes look at the catalog soon.
    request_log_level: Callable[[str], None] = logs.set_level  # Of all processes. May return before it is set.
    refresh_pfs_path: Callable[[int], None] = _ignore  # Reads from the store where a file is on the PFS.
    invalidate_inode: Callable[[int], None] = _ignore  # Has the kernel drop its pages of a file.
    record_missed_drain: Callable[[], None] = _ignore  # For a drain that took as long as an unmount would wait.
    request_upgrade: Callable[[Successor], None] = _ignore  # Ends this process, or raises why the supervisor refuses.
    progress: ProgressSignal = field(default_factory=ProgressSignal)
    refused: RefusedCalls = field(default_factory=RefusedCalls)
    figures: StatusFigures = field(init=False)

    def __post_init__(self) -> None:
        self.figures = StatusFigures(self.config, self.db, self.tiers)
