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
    """This node, and functions of the mover, which any thread but trio's may call.

    `cluster`: None outside a cluster. `retry_now` runs all lanes at once, `wake_lanes` has them look at the catalog soon.
    `request_log_level` sets the level of all processes, and may return before it is set. `refresh_pfs_path` reads from the store where a
    file is on the PFS. `invalidate_inode` has the kernel drop its pages of a file. `record_missed_drain` is called if a drain took as long
    as an unmount would wait. `request_upgrade` ends this process if the supervisor hands over to the successor, or raises its refusal.
    """

    config: Config
    db: Database
    tiers: Tiers
    cluster: ClusterFigures | None = None
    retry_now: Callable[[], None] = _ignore
    wake_lanes: Callable[[], None] = _ignore
    request_log_level: Callable[[str], None] = logs.set_level
    refresh_pfs_path: Callable[[int], None] = _ignore
    invalidate_inode: Callable[[int], None] = _ignore
    record_missed_drain: Callable[[], None] = _ignore
    request_upgrade: Callable[[Successor], None] = _ignore
    progress: ProgressSignal = field(default_factory=ProgressSignal)
    refused: RefusedCalls = field(default_factory=RefusedCalls)
    figures: StatusFigures = field(init=False)

    def __post_init__(self) -> None:
        self.figures = StatusFigures(self.config, self.db, self.tiers)
