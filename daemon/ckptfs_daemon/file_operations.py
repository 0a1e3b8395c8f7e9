"""Owns the handlers of an open file's bytes: read and write where they pass through us, fsync, and changes of length.

On the passthrough path read and write come here only for the few files that are served `direct`, or that the kernel could not take over.
RAM is read and written in the trio thread itself, which is faster than another thread; other tiers may block and get one.
If we die here: a write that was not answered is sent again, to the same offset.
"""

import errno
import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

import trio

from ckptfs import disk, limits
from ckptfs.catalog import attributes, contents, journal, namespace, peers, report, wants
from ckptfs.errors import ContentLost, NoSpace, TimedOut, posix_error
from ckptfs.model import CliqueLost, Level, Tier
from ckptfs.tiers import transfer
from ckptfs.tiers.place import Place
from ckptfs_daemon import bells, edge
from ckptfs_daemon.edge import answered
from ckptfs_daemon.extra_operations import ExtraOperations
from ckptfs_daemon.open_file import OpenFile, in_thread, on_pfs, pfs_descriptor
from ckptfs_daemon.open_files import HANDLE_MASK
from ckptfs_daemon.open_operations import OpenOperations
from ckptfs_daemon.opening import SET_ID, Opening
from ckptfs_daemon.wishes import Wish

log = logging.getLogger(__name__)

disk.declare_labels("write:move", "write:fsync")
transfer.labels("write:copy")

T = TypeVar("T")


class FileOperations(OpenOperations, ExtraOperations):
    """Everything about open files."""

    # --- bytes --------------------------------------------------------------------------------------------------------

    @answered
    async def read(self, fh: int, off: int, size: int) -> bytes:
        """Up to `size` bytes."""
        file = self.context.open_files.of(fh)
        if file.arriving is not None:
            await file.arriving.ready(file, off, size)
        await self._present(file)
        if file.arriving is None:
            return await self._on(file, lambda: os.pread(file.fd, size, off))
        with file.in_use():
            return await self._on(file, lambda: os.pread(file.fd, size, off))

    @answered
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        """All of `buf`. Where a tier is full the content moves on to the next one (P10)."""
        request = edge.request()
        file = self.context.open_files.of(fh)
        if request.kill_privileges:
            self._drop_set_id(file.inode)
        await self._roomy(file, lambda fd: _write_all(fd, buf, off))
        return len(buf)

    async def _roomy(self, file: OpenFile, act: Callable[[int], T], *, long: bool = False) -> T:
        """Run `act(fd)` on a descriptor for writing, on the next tier when this one is full; in a thread when it may take `long`.

        Raises NoRoom when all are full.
        """
        full_until_s = trio.current_time() + limits.NO_ROOM_WAIT_S
        while True:
            fd, ours = await file.writable_fd()
            try:
                with file.in_use():
                    return await (in_thread if long else self._on)(file, lambda fd=fd: act(fd))  # type: ignore[misc]
            except OSError as failure:
                if failure.errno != errno.ENOSPC or file.backing:
                    raise
            finally:
                if ours:
                    os.close(fd)
            if not await self._move_on(file):
                if trio.current_time() > full_until_s:
                    raise NoSpace("every tier is full", remedy="remove files, or configure a larger tier")
                self.context.bell.ring(bells.WORK)
                await trio.sleep(limits.NO_ROOM_LOOK_S)

    async def _on(self, file: OpenFile, act: Callable[[], T]) -> T:
        """Run `act` where it cannot hold up everybody else."""
        return act() if file.tier is Tier.RAM else await in_thread(file, act)

    async def _present(self, file: OpenFile) -> None:
        """After a restart the PFS's own file is opened again when somebody reads it."""
        await file.settled()
        if file.fd < 0 and file.content is not None:
            raise ContentLost(f"inode {file.inode}: content {file.content} cannot be found again")
        if file.fd < 0:
            file.fd = await pfs_descriptor(self.context, file.inode)

    def _drop_set_id(self, inode: int) -> None:
        """A stranger to CAP_FSETID writes."""
        db = self.context.db
        if namespace.get(db, inode).mode & SET_ID:
            with db.transaction():
                attributes.set_attributes(db, inode, kill_set_id=True)

    # --- a full tier --------------------------------------------------------------------------------------------------

    async def _move_on(self, file: OpenFile) -> bool:
        """Move an open content to the next tier that has room for it. False when none has."""
        if file.moving is not None:
            await file.settled()
            return True
        assert file.place is not None and file.content is not None
        file.moving = trio.Event()
        try:
            # What a thread still writes must be there before the bytes are copied.
            await file.rest()
            for tier in self.context.places.after(file.place.tier):
                if await self._moved(file, file.place, file.content, self.context.places[tier]):
                    return True
        finally:
            file.moving.set()
            file.moving = None
        return False

    async def _moved(self, file: OpenFile, source: Place, content: int, target: Place) -> bool:
        try:
            run = on_pfs if target.tier is Tier.PFS else trio.to_thread.run_sync
            fd = await run(lambda: _copied(file.fd, target, content))
        except OSError as failure:
            log.info("content %d cannot move from %s to %s: %s", content, source.tier, target.tier, failure)
            return False
        with self.context.db.transaction() as db:
            contents.record_move(db, content, source.tier, target.tier)
        file.replace(fd)
        file.place, file.writable = target, True
        source.remove(content)
        self.context.bell.ring(bells.WORK)
        return True

    # --- durability ---------------------------------------------------------------------------------------------------

    @answered
    async def flush(self, fh: int) -> None:
        """A descriptor is closed: what the kernel kept it has written by now, and other nodes that open the file see it."""
        sharing = self.context.sharing
        file = None if sharing is None else self.context.open_files.by_handle.get(fh & HANDLE_MASK)
        if sharing is None or file is None or not file.handles.get(fh & HANDLE_MASK):
            return
        self._written(file)
        await sharing.published()

    def _written(self, file: OpenFile) -> None:
        """The size and times of an open file, as they are now, go into its inode."""
        if file.content is None or file.fd < 0:
            return
        status = os.fstat(file.fd)
        with self.context.open_files.change() as db:
            if contents.has_name(db, file.inode):
                contents.record_written(db, file.inode, status.st_size, status.st_atime_ns, status.st_mtime_ns)

    @answered
    async def fsync(self, fh: int, datasync: bool) -> None:
        """Return when the file is as durable as the mount promises (P3)."""
        file = self.context.open_files.of(fh)
        await file.settled()
        if file.tier is not None and file.tier is not Tier.RAM:
            await in_thread(file, lambda: self._persist(file))
        self._synced(file)
        if self.context.config.fsync is Level.PFS:
            await self._told(file.inode, journal.get_last_seq(self.context.db, file.inode))
        elif self.context.config.fsync is Level.CLIQUE:
            await self._secured(file.inode)
            return
        if self.context.sharing is not None and file.writers:
            # Nobody waits for it, and what is closed soon has no need of it: the row will be seen.
            wants.insert_request(self.context.db, wants.REPLICATE_LATER, file.inode, wait_s=limits.WANT_KEPT_S)

    async def _secured(self, inode: int) -> None:
        """Wait until enough nodes have what the file holds now. Without them: what the configuration says."""
        config, db = self.context.config, self.context.db
        if report.get_level(db, inode) in (Level.CLIQUE, Level.PFS):
            return
        degrades = config.clique_lost is CliqueLost.LOCAL
        sharing = self.context.sharing
        alone = len(peers.list_live_nodes(db)) < 2 or (sharing is not None and sharing.island)
        try:
            if not (alone and degrades):
                # A want of its own: another one's answer may be of what the file held before.
                await self.context.asking.ask(wants.REPLICATE_NOW, inode, f"{time.time_ns()}", timeout_s=config.clique_wait_s)
                return
        except TimedOut:
            pass
        path = os.fsdecode(report.get_path(db, inode))
        if not degrades:
            why = "etcd was not told of it" if sharing is not None and sharing.island else "too few other nodes took a copy"
            log.error("fsync of %s: %s within %g s; see `ckptfs status --cluster`", path, why, config.clique_wait_s)
            raise posix_error(errno.EIO)
        log.warning("fsync of %s: too few other nodes take a copy; it survives this node's processes only", path)

    def _persist(self, file: OpenFile) -> None:
        """Everything about a file on NVMe survives a power cut: its bytes, the name of its file, and the catalog's rows."""
        assert file.place is not None
        disk.act("write:fsync", os.fdatasync, file.fd)
        if not file.named:
            file.place.persist_names()
            file.named = True
        self.context.db.persist()

    def _synced(self, file: OpenFile) -> None:
        """The PFS shall have what an open file holds now, but not at each fsync."""
        config, now_s = self.context.config, trio.current_time()
        due = config.fsync is Level.PFS or now_s - file.synced_s >= config.synced_interval_s
        if not (due and file.writers and file.content is not None and self.context.db.is_journalled):
            return
        file.synced_s = now_s
        status, files = os.fstat(file.fd), self.context.open_files
        with files.change() as db:
            if contents.has_name(db, file.inode):
                contents.record_fsync(db, file.inode, file.content, status.st_size, status.st_atime_ns, files.written_ns(status))
        self.context.bell.ring(bells.WORK)

    async def _told(self, inode: int, row: int) -> None:
        """Wait until the PFS has been told of everything up to this row of the journal."""
        if row:
            await self.context.asking.ask(wants.WAIT_LEVEL, inode, wants.build_journal_argument(row), timeout_s=limits.FSYNC_LEVEL_WAIT_S)

    @answered
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Directories are rows of the catalog."""
        await trio.to_thread.run_sync(self.context.db.persist)
        if self.context.config.fsync is Level.PFS:
            row, inode = journal.find_last_in_directory(self.context.db, fh)
            await self._told(inode, row)
        elif self.context.config.fsync is Level.CLIQUE:
            await self._named(fh)

    async def _named(self, directory: int) -> None:
        """Wait until the other nodes know the names in a directory. Without them: what the configuration says."""
        config, db, sharing = self.context.config, self.context.db, self.context.sharing
        degrades = config.clique_lost is CliqueLost.LOCAL
        if sharing is None or (await sharing.published() and not sharing.island):
            return
        with trio.move_on_after(0.0 if degrades else config.clique_wait_s):
            while not peers.has_published_names(db, directory):
                await trio.sleep(limits.ISLAND_PROBE_S)
        path = os.fsdecode(report.get_path(db, directory))
        if not degrades and not peers.has_published_names(db, directory):
            log.error("fsync of %s: etcd was not told of what changed there within %g s", path, config.clique_wait_s)
            raise posix_error(errno.EIO)

    # --- length -------------------------------------------------------------------------------------------------------

    async def resize(self, inode: int, size: int, fh: int | None) -> None:
        """Make a file `size` bytes long, open or not."""
        files = self.context.open_files
        shared = files.by_inode.get(inode)
        if shared is None and namespace.get(self.context.db, inode).size == size:
            return  # Only its times change.
        begin_anew = size == 0 and (shared is None or not shared.handles)
        opened = await Opening(self.context, Wish(inode, writer=True, truncate=begin_anew, request=None)).run()
        file = files.by_handle[opened.handle]
        try:
            if not begin_anew:
                await self._roomy(file, lambda fd: os.ftruncate(fd, size))
        finally:
            files.end(opened.handle)
            files.flush()


def _write_all(fd: int, data: bytes, offset: int) -> None:
    """pwrite(2) until every byte is written."""
    count = os.pwrite(fd, data, offset)
    if count < len(data):
        view = memoryview(data)
        while count < len(data):
            count += os.pwrite(fd, view[count:], offset + count)


def _copied(source_fd: int, target: Place, content: int) -> int:
    """A descriptor of a copy in `target`. Undone when it fails."""
    target.remove(content)
    fd = disk.act("write:move", target.create, content)
    try:
        status = os.fstat(source_fd)
        transfer.copy(source_fd, fd, label="write:copy")
        os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
    except BaseException:
        os.close(fd)
        target.remove(content)
        raise
    return fd
