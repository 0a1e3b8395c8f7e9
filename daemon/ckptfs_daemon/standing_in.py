"""Owns that a node whose mover has died goes on living while the next one begins: the mount keeps the node's lease meanwhile (P8).

The mover rings whenever it has kept the lease. Only when it has been silent for longer than that takes does the mount keep it, and not for
ever: a node without a mover gives nobody its copies.
If we die here: the lease runs out unless a mover takes one before.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from ckptfs import limits
from ckptfs.errors import CkptfsError


class StandbyLease:
    """One for a mount process; belongs to its trio thread."""

    def __init__(self, keep_alive: Callable[[int], Awaitable[float]]) -> None:
        """`keep_alive` is the store's."""
        self._keep_alive = keep_alive
        self._lease = 0
        self._last_renewal_s = 0.0
        self._mover_renewed = trio.Event()

    def record_renewal(self, lease: int) -> None:
        """The mover has just kept this one."""
        self._lease, self._last_renewal_s = lease, trio.current_time()
        self._mover_renewed.set()

    async def run(self) -> None:
        """The task."""
        while True:
            self._mover_renewed = trio.Event()
            with trio.move_on_at(self._last_renewal_s + limits.NODE_SILENT_S if self._lease else float("inf")):
                await self._mover_renewed.wait()
                continue
            while self._lease and not self._mover_renewed.is_set():
                await self._renew(self._lease)
                with trio.move_on_after(limits.NODE_BEAT_S):
                    await self._mover_renewed.wait()

    async def _renew(self, lease: int) -> None:
        left_s = 0.0
        if trio.current_time() < self._last_renewal_s + limits.NODE_STOOD_IN_FOR_S:
            left_s = limits.NODE_LEASE_S
            with suppress(CkptfsError):
                left_s = await self._keep_alive(lease)
        if left_s <= 0 and self._lease == lease:
            self._lease = 0
