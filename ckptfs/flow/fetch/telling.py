"""Owns what those who wait for a file hear while it is fetched: that it goes on, and which blocks of it they may read already.

If we die here: the want is still open; what was published of the arrival is removed by the next mover.
"""

import logging
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ckptfs import limits
from ckptfs.catalog import wants
from ckptfs.catalog.database import Database
from ckptfs.model import Content, Notifier, Tier
from ckptfs.tiers.arrival import Arrival
from ckptfs.tiers.place import Places

log = logging.getLogger(__name__)


class Telling:
    """Of one want. Called before or after each block, by any thread: now and then tells the askers that their file is on its way."""

    def __init__(self, db: Database, places: Places, notify: Notifier, want: wants.MoverRequest) -> None:
        self._db = db
        self._places = places
        self._notify = notify
        self._want = want
        self._told_s = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self) -> None:
        if time.monotonic() - self._told_s < limits.WANT_LOOK_S or not self._lock.acquire(blocking=False):
            return
        try:
            self._told_s = time.monotonic()
            wants.record_progress(self._db, self._want.id)
        finally:
            self._lock.release()

    @contextmanager
    def published(self, content: Content, tier: Tier, target_fd: int, lacking: Collection[int]) -> Iterator["Blocks"]:
        """While blocks come into `target_fd`, which lies under the content's name, the application may read those that are there."""
        blocks = Blocks(self, self._notify, self._publish(content, tier, target_fd, lacking))
        try:
            if blocks.arrival is not None:
                wants.mark_readable(self._db, self._want.id)
                self._notify.notify_replies()
            yield blocks
        finally:
            if blocks.arrival is not None:
                blocks.arrival.end()

    def _publish(self, content: Content, tier: Tier, target_fd: int, lacking: Collection[int]) -> Arrival | None:
        # The PFS may hang, and small files are here sooner than anybody could begin to read.
        if tier is Tier.PFS or content.size <= limits.BLOCK_BYTES:
            return None
        try:
            return Arrival.publish(self._places[Tier.RAM].root, content, tier, target_fd, lacking)
        except OSError as failure:
            log.info("content %d is read only when all of it is here: %s", content.id, failure)
            return None


class Blocks:
    """What is told of each block."""

    def __init__(self, telling: Telling, notify: Notifier, arrival: Arrival | None) -> None:
        self.arrival = arrival
        self._telling = telling
        self._notify = notify

    def came(self, number: int) -> None:
        """This block is in the target, and right. Called by several threads."""
        if self.arrival is not None and self.arrival.came(number):
            self._notify.notify_replies()
        self._telling()

    def asked(self) -> list[int]:
        """The blocks that somebody waits for."""
        return [] if self.arrival is None else self.arrival.asked()
