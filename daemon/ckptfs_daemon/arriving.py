"""Owns how an application reads a file while its blocks still arrive: each read waits for its own blocks, and has them brought first.

The mover publishes how far the content has come (`ckptfs.tiers.arrival`); the bell says when a block came that somebody waits for. Reads
come to us as long as an inode is open that was opened so, since the kernel would not let it change to passthrough meanwhile.
Invariant: only bytes of the very generation that was opened are read, of blocks that were found right, or the read fails (P7). What is
published may end with its mover at any time: then the file is asked for once more, and what came before stays readable meanwhile.
If we die here: the handles are rows, and `resume` makes this of them again.
"""

import errno
import logging
import os
from typing import TYPE_CHECKING

import trio

from ckptfs import limits
from ckptfs.catalog import namespace, report, settling, wants
from ckptfs.errors import CkptfsError, ContentLost, TimedOut
from ckptfs.model import Content, ContentState, CopyState, Tier
from ckptfs.tiers.arrival import Arrival
from ckptfs.tiers.place import Place
from ckptfs_daemon.bells import URGENT
from ckptfs_daemon.open_file import OpenFile, on_pfs, same_times

if TYPE_CHECKING:
    from ckptfs_daemon.context import Context

log = logging.getLogger(__name__)


class Arriving:
    """What an open file that is still being fetched waits for. Belongs to the mount's trio thread."""

    def __init__(self, context: "Context", content: Content) -> None:
        self.content = content
        self._context = context
        self._arrival: Arrival | None = None
        self._want = 0
        self._said = False

    @property
    def size(self) -> int:
        """Of the whole file, in bytes."""
        return self.content.size

    def begin(self) -> tuple[Place, int] | None:
        """(place, descriptor) of what is being filled now; None when nothing is published of exactly this content."""
        found = self._published()
        if found is None:
            return None
        self._arrival = found[0]
        return found[1:]

    def _published(self) -> tuple[Arrival, Place, int] | None:
        places = self._context.places
        arrival = Arrival.find(places[Tier.RAM].root, self.content.id)
        if arrival is None or (arrival.digest, arrival.size) != (self.content.digest, self.content.size) or arrival.tier not in places:
            return None
        place = places[arrival.tier]
        try:
            fd = place.open(self.content.id)
        except FileNotFoundError:
            return None
        if not arrival.is_of(fd):
            os.close(fd)
            return None
        return arrival, place, fd

    async def ready(self, file: OpenFile, offset: int, size: int) -> None:
        """Wait until these bytes are behind the file's descriptor. Raises ContentLost when they cannot be had."""
        try:
            await self._ready(file, self._blocks(offset, size))
        except (OSError, CkptfsError) as failure:
            path = os.fsdecode(report.get_path(self._context.db, file.inode))
            if not self._said:
                log.error("%s cannot be read on: what is left of it does not arrive: %s", path, failure)
                self._said = True
            raise ContentLost(f"{path}: what is left of it does not arrive") from failure

    async def whole(self, file: OpenFile) -> None:
        """Wait until all of it is here, and the file is as any other."""
        until_s = trio.current_time() + limits.FETCH_STALL_S
        await self.ready(file, 0, self.size)
        while file.arriving is self:
            await self._turn(file)
            if trio.current_time() > until_s:
                raise TimedOut("a file that has arrived is not counted")
            if file.arriving is self:
                await self._context.asking.pause(limits.WANT_LOOK_S)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _blocks(self, offset: int, size: int) -> range:
        end = min(offset + size, self.size)
        return range(offset // limits.BLOCK_BYTES, -(-end // limits.BLOCK_BYTES)) if offset < end else range(0)

    async def _ready(self, file: OpenFile, numbers: range) -> None:
        progress, until_s = (-1, 0), 0.0
        while file.arriving is self:
            arrival = self._arrival
            if self._has(numbers) and arrival is not None and not arrival.over:
                return
            if arrival is None or not arrival.published:
                try:
                    await self._turn(file)
                except (OSError, CkptfsError):
                    if not self._has(numbers):
                        raise
            if self._arrival is not None:
                # Asked before looked at: what comes in between was either seen or is rung for.
                self._arrival.ask(numbers)
                if self._arrival.has(numbers):
                    return
            if (now := self._progress()) != progress:
                progress, until_s = now, trio.current_time() + limits.FETCH_STALL_S
            if trio.current_time() > until_s:
                raise TimedOut(f"nothing of it came for {limits.FETCH_STALL_S:g} s")
            if file.arriving is self:
                await self._context.asking.pause(limits.WANT_LOOK_S)

    def _has(self, numbers: range) -> bool:
        return self._arrival is not None and self._arrival.has(numbers)

    def _progress(self) -> tuple[int, int]:
        row = wants.get(self._context.db, self._want) if self._want else None
        return 0 if self._arrival is None else self._arrival.count, row.progress_ns if row else 0

    async def _turn(self, file: OpenFile) -> None:
        """Nothing more comes into what we read: it is whole, or it begins anew, or somebody must be asked."""
        db = self._context.db
        known = settling.get_content(db, self.content.id)
        if known is None or known.state is not ContentState.SEALED or known.digest != self.content.digest:
            raise ContentLost("it was written again meanwhile")
        tiers = [copy.tier for copy in settling.list_copies(db, known.id) if copy.state is CopyState.GOOD and copy.tier in self._context.places]
        if tiers:
            await self._arrived(file, self._context.places[tiers[0]])
        elif (found := self._published()) is not None:
            arrival, place, fd = found
            await self._take(file, place, fd)
            self._arrival = arrival
        else:
            self._ask()

    async def _arrived(self, file: OpenFile, place: Place) -> None:
        try:
            fd = place.open(self.content.id) if place.tier is not Tier.PFS else await on_pfs(lambda: place.open(self.content.id))
        except FileNotFoundError:
            return  # It went again; the next look finds that.
        row = namespace.get(self._context.db, file.inode)
        if place.tier is not Tier.PFS:
            same_times(fd, row)
        await self._take(file, place, fd)
        file.atime_ns = row.atime_ns
        if file.arriving is self:
            file.arriving = None

    async def _take(self, file: OpenFile, place: Place, fd: int) -> None:
        """Read by this descriptor from now on. A thread may be reading by the one before, of blocks that are not behind this one yet."""
        await file.rest()
        file.replace(fd)
        file.place = place

    def _ask(self) -> None:
        """Have the mover bring it, here and not elsewhere. Raises OSError when it said that it cannot."""
        db = self._context.db
        row = wants.get(db, self._want) if self._want else None
        if row is not None and row.state == wants.FAILED:
            self._want = 0
            raise OSError(row.error or errno.EIO, os.strerror(row.error or errno.EIO))
        if row is None or row.state == wants.DONE or not wants.is_open(db, self._want):
            self._want = wants.insert_request(db, wants.FETCH, self.content.inode, wants.FOR_WRITING, wait_s=limits.FETCH_STALL_S)
        self._context.bell.ring(URGENT + wants.FETCH.encode())


def resume(context: "Context") -> None:
    """After a restart: what was being fetched when it was opened is waited for again, and a file that became another one is not read."""
    for file in context.open_files.by_inode.values():
        if file.content is None or file.backing or file.writers:
            continue
        content = settling.get_content(context.db, file.content)
        if content is None or not content.is_remote or content.generation == file.generation:
            if file.fd < 0 and content is not None and content.state is ContentState.SEALED:
                file.arriving = Arriving(context, content)
        elif content.generation > file.generation and file.fd >= 0:
            log.error("the open file with content %d was written again on another node, and cannot be read on", file.content)
            file.close()
