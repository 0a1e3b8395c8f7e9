"""Owns what those who wait for a file hear while it is fetched: that it goes on, and which blocks of it they may read already.

If we die here: the want is still open; what was published of the arrival is removed by the next mover.
"""

import logging
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ckptfs import limits
from ckptfs.catalog import mover_requests
from ckptfs.catalog.database import Database
from ckptfs.model import Content, Notifier, Tier
from ckptfs.tiers.fetch_map import FetchMap
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)


class FetchProgress:
    """Of one want. Called before or after each block, by any thread: now and then tells the askers that their file is on its way."""

    def __init__(self, db: Database, tiers: Tiers, notify: Notifier, request: mover_requests.MoverRequest) -> None:
        self._db = db
        self._tiers = tiers
        self._notify = notify
        self._request = request
        self._reported_s = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self) -> None:
        if time.monotonic() - self._reported_s < limits.REQUEST_POLL_S or not self._lock.acquire(blocking=False):
            return
        try:
            self._reported_s = time.monotonic()
            mover_requests.record_progress(self._db, self._request.id)
        finally:
            self._lock.release()

    @contextmanager
    def publish_map(self, content: Content, tier: Tier, target_fd: int, missing_blocks: Collection[int]) -> Iterator["BlockProgress"]:
        """While blocks come into `target_fd`, which lies under the content's name, the application may read those that are there."""
        blocks = BlockProgress(self, self._notify, self._publish(content, tier, target_fd, missing_blocks))
        try:
            if blocks.fetch_map is not None:
                mover_requests.mark_readable(self._db, self._request.id)
                self._notify.notify_replies()
            yield blocks
        finally:
            if blocks.fetch_map is not None:
                blocks.fetch_map.close()

    def _publish(self, content: Content, tier: Tier, target_fd: int, missing_blocks: Collection[int]) -> FetchMap | None:
        # The PFS may hang, and small files are here sooner than anybody could begin to read.
        if tier is Tier.PFS or content.size <= limits.BLOCK_BYTES:
            return None
        try:
            return FetchMap.publish(self._tiers[Tier.RAM].root, content, tier, target_fd, missing_blocks)
        except OSError as failure:
            log.info("content %d is read only when all of it is here: %s", content.id, failure)
            return None


class BlockProgress:
    """What is told of each block."""

    def __init__(self, progress: FetchProgress, notify: Notifier, fetch_map: FetchMap | None) -> None:
        self.fetch_map = fetch_map
        self._progress = progress
        self._notify = notify

    def mark_present(self, number: int) -> None:
        """This block is in the target, and right. Called by several threads."""
        if self.fetch_map is not None and self.fetch_map.mark_present(number):
            self._notify.notify_replies()
        self._progress()

    def list_awaited(self) -> list[int]:
        """The blocks that somebody waits for."""
        return [] if self.fetch_map is None else self.fetch_map.list_awaited()
