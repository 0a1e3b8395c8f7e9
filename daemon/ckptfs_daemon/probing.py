"""Owns the watch over the tiers that may fall ill: probes NVMe and PFS now and then, and says in the catalog how they are.

A probe that hangs is waited for, in a thread of its own, while its silence is counted. When a tier is well again the lanes are
told to forget their backoffs. The first time the PFS answers, the uuid in its work area becomes the catalog's; a PFS that shows another one
later is not the same filesystem, and is ill until the right one is mounted.
If we die here: the next mover begins with NORMAL and probes at once.
"""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from ckptfs import limits
from ckptfs.catalog import settling
from ckptfs.catalog.database import Database
from ckptfs.errors import TierUnavailable
from ckptfs.model import Tier
from ckptfs.tiers import health
from ckptfs.tiers.health import Health, State
from ckptfs.tiers.place import Place

log = logging.getLogger(__name__)

SILENCE_COUNTED_S = 2.0
CHANGE_RATIO = 0.01


class Watch:
    """The watch over one tier."""

    def __init__(self, db: Database, place: Place, root: Path, recovered: Callable[[], None]) -> None:
        """`root` is what is asked; `recovered` is called in the trio thread when the tier is well again."""
        self._db = db
        self._place = place
        self._root = root
        self._recovered = recovered
        self._health = Health()
        self._told: dict[str, Any] = {}
        self._room = (0, 0)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._probe()
            await trio.sleep(health.probe_after_s(self._health))

    async def _probe(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._count_silence, name=f"silence of {self._place.tier}")
            try:
                self._room = await trio.to_thread.run_sync(self._ask, abandon_on_cancel=True)
                verdict = health.succeeded(self._health, trio.current_time())
            except OSError as failure:
                verdict = health.failed(self._health, trio.current_time(), failure)
            except TierUnavailable as failure:
                verdict = health.another(self._health, trio.current_time(), str(failure), failure.remedy)
            nursery.cancel_scope.cancel()
        await self._become(verdict)

    async def _count_silence(self) -> None:
        begun_s = trio.current_time()
        while True:
            await trio.sleep(SILENCE_COUNTED_S)
            now_s = trio.current_time()
            await self._become(health.silent(self._health, now_s, now_s - begun_s))

    async def _become(self, verdict: Health) -> None:
        """Take the verdict as what is known, and say so where it is news."""
        before, self._health = self._health, verdict
        if verdict.state is not before.state:
            self._log(before, verdict)
            if verdict.state is State.NORMAL:
                self._recovered()
        value = {
            "state": verdict.state.value,
            "error": verdict.error,
            "remedy": verdict.remedy,
            "total": self._room[0],
            "free": self._room[1],
        }
        if self._news(value):
            self._told = value
            await trio.to_thread.run_sync(settling.report, self._db, f"tier:{self._place.tier}", value)

    def _log(self, before: Health, now: Health) -> None:
        if now.state is State.NORMAL:
            log.info("%s is well again", self._root)
        else:
            log.warning("%s is %s: %s%s", self._root, now.state, now.error, f" ({now.remedy})" if now.remedy else "")

    def _news(self, value: dict[str, Any]) -> bool:
        """Whether people would see a difference: figures that moved a little are none, so that an idle node writes nothing."""
        if not self._told or any(value[key] != self._told[key] for key in ("state", "error", "remedy", "total")):
            return True
        return bool(abs(value["free"] - self._told["free"]) > CHANGE_RATIO * max(value["total"], limits.MIB))

    def _ask(self) -> tuple[int, int]:
        """In a thread, which may hang for as long as the tier does."""
        room = health.probe(self._root)
        if self._place.tier is Tier.PFS:
            identify(self._db, self._place)
        return room


def identify(db: Database, place: Place) -> None:
    """Compare the PFS with the one that the catalog belongs to, or make it that one. Raises TierUnavailable for another one.

    Where we may not make a work area (root is squashed and the directory is not the owner's) the PFS goes unidentified.
    """
    expected = settling.tier_uuid(db, place.tier)
    if expected is None:
        with contextlib.suppress(OSError, TierUnavailable):
            settling.adopt(db, place.tier, place.uuid)
        return
    try:
        found = (place.root / "tier-id").read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        found = ""
    if found != expected:
        raise TierUnavailable(
            f"{place.root.parent} is not the directory that this catalog belongs to",
            remedy=f"mount the filesystem that belongs at {place.root.parent}",
        )
