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
from ckptfs.tiers.arrival import FetchMap
from ckptfs.tiers.place import TierStorage
from ckptfs_daemon.bells import URGENT_REQUEST
from ckptfs_daemon.open_file import OpenFile, run_on_pfs, set_inode_times

if TYPE_CHECKING:
    from ckptfs_daemon.context import MountContext

log = logging.getLogger(__name__)


class FetchWaiter:
    """What an open file that is still being fetched waits for. Belongs to the mount's trio thread."""

    def __init__(self, context: "MountContext", content: Content) -> None:
        self.content = content
        self._context = context
        self._fetch_map: FetchMap | None = None
        self._request_id = 0
        self._is_failure_logged = False

    @property
    def size(self) -> int:
        """Of the whole file, in bytes."""
        return self.content.size

    def open_partial(self) -> tuple[TierStorage, int] | None:
        """(place, descriptor) of what is being filled now; None when nothing is published of exactly this content."""
        found = self._find_partial()
        if found is None:
            return None
        self._fetch_map = found[0]
        return found[1:]

    def _find_partial(self) -> tuple[FetchMap, TierStorage, int] | None:
        tiers = self._context.tiers
        fetch_map = FetchMap.find(tiers[Tier.RAM].root, self.content.id)
        if (
            fetch_map is None
            or (fetch_map.digest, fetch_map.size) != (self.content.digest, self.content.size)
            or fetch_map.tier not in tiers
        ):
            return None
        storage = tiers[fetch_map.tier]
        try:
            fd = storage.open(self.content.id)
        except FileNotFoundError:
            return None
        if not fetch_map.is_for(fd):
            os.close(fd)
            return None
        return fetch_map, storage, fd

    async def wait_range(self, file: OpenFile, offset: int, size: int) -> None:
        """Wait until these bytes are behind the file's descriptor. Raises ContentLost when they cannot be had."""
        try:
            await self._wait_blocks(file, self._get_block_range(offset, size))
        except (OSError, CkptfsError) as failure:
            path = os.fsdecode(report.get_path(self._context.db, file.inode))
            if not self._is_failure_logged:
                log.error("%s cannot be read on: what is left of it does not arrive: %s", path, failure)
                self._is_failure_logged = True
            raise ContentLost(f"{path}: what is left of it does not arrive") from failure

    async def wait_complete(self, file: OpenFile) -> None:
        """Wait until all of it is here, and the file is as any other."""
        until_s = trio.current_time() + limits.FETCH_STALL_S
        await self.wait_range(file, 0, self.size)
        while file.fetch_waiter is self:
            await self._refresh_source(file)
            if trio.current_time() > until_s:
                raise TimedOut("a file that has arrived is not counted")
            if file.fetch_waiter is self:
                await self._context.mover_client.wait_reply(limits.WANT_LOOK_S)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _get_block_range(self, offset: int, size: int) -> range:
        end = min(offset + size, self.size)
        return range(offset // limits.BLOCK_BYTES, -(-end // limits.BLOCK_BYTES)) if offset < end else range(0)

    async def _wait_blocks(self, file: OpenFile, numbers: range) -> None:
        progress, until_s = (-1, 0), 0.0
        while file.fetch_waiter is self:
            fetch_map = self._fetch_map
            if self._has_blocks(numbers) and fetch_map is not None and not fetch_map.is_closed:
                return
            if fetch_map is None or not fetch_map.is_published:
                try:
                    await self._refresh_source(file)
                except (OSError, CkptfsError):
                    if not self._has_blocks(numbers):
                        raise
            if self._fetch_map is not None:
                # Asked before looked at: what comes in between was either seen or is rung for.
                self._fetch_map.request_blocks(numbers)
                if self._fetch_map.has_blocks(numbers):
                    return
            if (now := self._get_progress()) != progress:
                progress, until_s = now, trio.current_time() + limits.FETCH_STALL_S
            if trio.current_time() > until_s:
                raise TimedOut(f"nothing of it came for {limits.FETCH_STALL_S:g} s")
            if file.fetch_waiter is self:
                await self._context.mover_client.wait_reply(limits.WANT_LOOK_S)

    def _has_blocks(self, numbers: range) -> bool:
        return self._fetch_map is not None and self._fetch_map.has_blocks(numbers)

    def _get_progress(self) -> tuple[int, int]:
        row = wants.get(self._context.db, self._request_id) if self._request_id else None
        return 0 if self._fetch_map is None else self._fetch_map.present_count, row.progress_ns if row else 0

    async def _refresh_source(self, file: OpenFile) -> None:
        """Nothing more comes into what we read: it is whole, or it begins anew, or somebody must be asked."""
        db = self._context.db
        known = settling.get_content(db, self.content.id)
        if known is None or known.state is not ContentState.SEALED or known.digest != self.content.digest:
            raise ContentLost("it was written again meanwhile")
        tiers = [
            copy.tier for copy in settling.list_copies(db, known.id) if copy.state is CopyState.GOOD and copy.tier in self._context.tiers
        ]
        if tiers:
            await self._switch_to_copy(file, self._context.tiers[tiers[0]])
        elif (found := self._find_partial()) is not None:
            fetch_map, storage, fd = found
            await self._switch_descriptor(file, storage, fd)
            self._fetch_map = fetch_map
        else:
            self._request_fetch()

    async def _switch_to_copy(self, file: OpenFile, storage: TierStorage) -> None:
        try:
            fd = storage.open(self.content.id) if storage.tier is not Tier.PFS else await run_on_pfs(lambda: storage.open(self.content.id))
        except FileNotFoundError:
            return  # It went again; the next look finds that.
        row = namespace.get(self._context.db, file.inode)
        if storage.tier is not Tier.PFS:
            set_inode_times(fd, row)
        await self._switch_descriptor(file, storage, fd)
        file.atime_ns = row.atime_ns
        if file.fetch_waiter is self:
            file.fetch_waiter = None

    async def _switch_descriptor(self, file: OpenFile, storage: TierStorage, fd: int) -> None:
        """Read by this descriptor from now on. A thread may be reading by the one before, of blocks that are not behind this one yet."""
        await file.wait_idle()
        file.replace_fd(fd)
        file.storage = storage

    def _request_fetch(self) -> None:
        """Have the mover bring it, here and not elsewhere. Raises OSError when it said that it cannot."""
        db = self._context.db
        row = wants.get(db, self._request_id) if self._request_id else None
        if row is not None and row.state == wants.FAILED:
            self._request_id = 0
            raise OSError(row.error or errno.EIO, os.strerror(row.error or errno.EIO))
        if row is None or row.state == wants.DONE or not wants.is_open(db, self._request_id):
            self._request_id = wants.insert_request(db, wants.FETCH, self.content.inode, wants.FOR_WRITING, wait_s=limits.FETCH_STALL_S)
        self._context.wake_channel.notify(URGENT_REQUEST + wants.FETCH.encode())


def resume_fetches(context: "MountContext") -> None:
    """After a restart: what was being fetched when it was opened is waited for again, and a file that became another one is not read."""
    for file in context.open_files.by_inode.values():
        if file.content is None or file.backing_id or file.writer_count:
            continue
        content = settling.get_content(context.db, file.content)
        if content is None or not content.is_remote or content.generation == file.generation:
            if file.fd < 0 and content is not None and content.state is ContentState.SEALED:
                file.fetch_waiter = FetchWaiter(context, content)
        elif content.generation > file.generation and file.fd >= 0:
            log.error("the open file with content %d was written again on another node, and cannot be read on", file.content)
            file.close()
