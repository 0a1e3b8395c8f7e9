"""The time that a request waits for space before it answers ENOSPC (P10).

Space comes while the mover seals, writes back, evicts or removes. It also comes when a program below a memory limit closes its file, which
gives back what was prepared ahead of it. The wait goes on while such work is pending and something changes; the mover learns how much is
wanted, and drops copies that it would keep otherwise.

Crash safety: a demand in the catalog expires by its time.
"""

import trio

from ckptfs import limits
from ckptfs.catalog import summary
from ckptfs_daemon import ipc
from ckptfs_daemon.mount.context import MountContext


class SpaceWait:
    """The wait of one request."""

    def __init__(self, context: MountContext) -> None:
        self._context = context
        self._began_s: float | None = None
        self._changed_s = self._checked_s = 0.0
        self._outlook = summary.SpaceOutlook(False, ())

    async def wait(self, wanted_bytes: int) -> bool:
        """Wait a moment for space. Return False if none is to be expected any more."""
        now_s = trio.current_time()
        if self._began_s is None:
            self._began_s = self._changed_s = now_s
            self._checked_s = float("-inf")
        if now_s - self._checked_s >= limits.NO_SPACE_CHECK_S:
            self._checked_s = now_s
            outlook = summary.load_space_outlook(self._context.db)
            if outlook != self._outlook:
                self._changed_s = now_s
            self._outlook = outlook
            summary.set_space_demand(self._context.db, wanted_bytes)
            self._context.wake_channel.notify(ipc.WORK)
        if self._context.open_files.top_up.is_growing:
            self._changed_s = now_s
        patience_s = limits.NO_SPACE_PENDING_WAIT_S if self._outlook.is_pending else limits.NO_SPACE_WAIT_S
        if now_s - self._changed_s > patience_s or now_s - self._began_s > limits.NO_SPACE_LONGEST_WAIT_S:
            return False
        await trio.sleep(limits.NO_SPACE_POLL_S)
        return True
