"""Progress of a fetch: heartbeat of the request, turns of other nodes, and published blocks.

If we die here: the request is still open. The next mover removes the published fetch map.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from ckptfs import limits
from ckptfs.bounded_waits import list_stalled
from ckptfs.catalog import mover_requests
from ckptfs.catalog.database import Database
from ckptfs.errors import Busy
from ckptfs.model import Content, Notifier, Tier
from ckptfs.tiers.fetch_map import FetchMap
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)


class OthersFirst(Busy):
    """Other nodes fetch the file just now: look again soon. This does not count as a try."""


def choose_pause_s(waited_s: float) -> float:
    """Return the seconds until another look, with jitter: readers of one file must not come all at once."""
    return random.uniform(0.5, 1.5) * min(max(waited_s / 4, limits.FETCH_SHARED_POLL_S), limits.FETCH_SHARED_POLL_S_MAX)


class FetchProgress:
    """The progress of one request, by block; extends the wait of the applications. Any thread."""

    def __init__(
        self,
        db: Database,
        tiers: Tiers,
        notify: Notifier,
        request: mover_requests.MoverRequest,
        since_s: float,
        list_in_hand: Callable[[], Collection[int]],
    ) -> None:
        """`since_s`: when the request was first tried. `list_in_hand`: the inodes that all lanes have."""
        self.sources = ""  # From where the present attempt fetches, for messages.
        self.is_at_pfs = False  # Whether the step has a place at the PFS.
        self.is_pfs_next = False  # Whether the PFS can give the file if the nodes do not, or too slowly.
        self.filling: tuple[int, Tier] | None = None
        """The FILLING copy (content, tier) of a read of the PFS, unless another step has taken it. Changes in transactions."""
        self.since_s = since_s
        self._db = db
        self._tiers = tiers
        self._notify = notify
        self.request = request
        self.is_copy_required = request.argument == mover_requests.NEEDS_COPY  # Whether the PFS's own file will not do.
        self._list_in_hand = list_in_hand
        self._reported_s = self.moved_s = time.monotonic()
        self._fetch_map: FetchMap | None = None
        self._lock = threading.Lock()

    def extend_wait(self) -> None:
        """Tell the waiting applications that the fetch goes on, at most once per REQUEST_POLL_S.

        Those whose files wait for a lane are told, too.
        """
        self.moved_s = time.monotonic()
        if self.moved_s - self._reported_s < limits.REQUEST_POLL_S or not self._lock.acquire(blocking=False):
            return
        try:
            self._reported_s = time.monotonic()
            others = [inode for inode in self._list_in_hand() if inode != self.request.inode]
            mover_requests.record_lane_progress(self._db, mover_requests.FETCH, in_hand=others)
        finally:
            self._lock.release()

    def go_to_pfs(self) -> None:
        self.is_at_pfs = True
        self.moved_s = time.monotonic()

    def has_stalled(self) -> bool:
        """Return whether nothing has come for PFS_STALL_S."""
        return bool(list_stalled({self.request.inode: self.moved_s}))

    def give_up_copy(self) -> None:
        """Leave the FILLING copy to another step, in whose transaction this is called; readers turn to it."""
        self.filling = None
        if self._fetch_map is not None:
            self._fetch_map.close()

    def can_wait(self, size: int) -> bool:
        """Return whether other nodes may fetch a file of this size first, for a while."""
        return time.monotonic() - self.since_s < limits.FETCH_SHARED_WAIT_S + size / limits.FETCH_SHARED_BYTES_PER_S

    @contextmanager
    def publish_map(self, content: Content, tier: Tier, target_fd: int, missing_blocks: Collection[int]) -> Iterator["BlockProgress"]:
        """Let applications read the blocks of `target_fd`, a file under the content's name, as they arrive."""
        self._fetch_map = self._publish(content, tier, target_fd, missing_blocks)
        blocks = BlockProgress(self, self._notify, self._fetch_map)
        try:
            if blocks.fetch_map is not None:
                mover_requests.mark_readable(self._db, self.request.id)
                self._notify.notify_replies()
            yield blocks
        finally:
            if blocks.fetch_map is not None:
                blocks.fetch_map.close()

    def _publish(self, content: Content, tier: Tier, target_fd: int, missing_blocks: Collection[int]) -> FetchMap | None:
        # The PFS may hang. Small files arrive before an application could begin to read.
        if tier is Tier.PFS or content.size <= limits.BLOCK_BYTES:
            return None
        try:
            return FetchMap.publish(self._tiers[Tier.RAM].root, content, tier, target_fd, missing_blocks)
        except OSError as failure:
            log.info("content %d: not readable before it is complete: %s", content.id, failure)
            return None


class BlockProgress:
    def __init__(self, progress: FetchProgress, notify: Notifier, fetch_map: FetchMap | None) -> None:
        self.fetch_map = fetch_map
        self.progress = progress
        self._notify = notify

    def mark_present(self, number: int) -> None:
        """Note that a verified block is in the target. Called by several threads."""
        if self.fetch_map is not None and self.fetch_map.mark_present(number):
            self._notify.notify_replies()
        self.progress.extend_wait()

    def list_awaited(self) -> list[int]:
        """Return the blocks that applications wait for."""
        return [] if self.fetch_map is None else self.fetch_map.list_awaited()
