"""Owns how one open comes about: decided and committed in one go without a yield point, or not at all; what it must wait for, it waits for
outside, and then decides anew.

Invariant: an attempt is one transaction. Files, descriptors and backing ids that an attempt made are undone when it is not committed.
If we die here: a file that no row names is swept by the mover, a backing id that no handle names ends with the connection.
"""

import errno
import logging
import os
import stat
import time
from typing import TYPE_CHECKING

import trio

from ckptfs import limits
from ckptfs.catalog import answers, attributes, contents, handles, report, settling, wants
from ckptfs.catalog.contents import FileContent
from ckptfs.errors import Busy, CkptfsError, ContentLost, NoSpace, TimedOut, posix_error
from ckptfs.flow import read, write
from ckptfs.model import ContentState, DataPath, Tier
from ckptfs.tiers import space
from ckptfs.tiers.place import Place
from ckptfs_daemon import bells
from ckptfs_daemon.arriving import Arriving
from ckptfs_daemon.attempts import Later, Undo
from ckptfs_daemon.open_file import WRITE_NOW, OpenFile, on_pfs, pfs_descriptor, same_times
from ckptfs_daemon.wishes import Opened, Wish

if TYPE_CHECKING:
    from ckptfs_daemon.context import Context

log = logging.getLogger(__name__)

SET_ID = stat.S_ISUID | stat.S_ISGID


class Opening:
    """The attempts at one open."""

    def __init__(self, context: "Context", wish: Wish) -> None:
        self._context = context
        self._files = context.open_files
        self._wish = wish
        self._made: tuple[int, int] | None = None
        self._own = -1
        self._unsealed: int | None = None
        self._leases_until_s = 0.0
        self._begun = self._sought = False
        self._told_until_s = trio.current_time() + limits.TOLD_WAIT_S

    async def run(self) -> Opened:
        """Open. Raises OSError, ContentLost, NoRoom, TimedOut."""
        full_until_s = trio.current_time() + limits.NO_ROOM_WAIT_S
        try:
            while True:
                try:
                    return self._attempt()
                except Later as later:
                    await later.wait()
                except NoSpace:
                    if trio.current_time() > full_until_s:
                        raise
                    self._context.bell.ring(bells.WORK)
                    await trio.sleep(limits.NO_ROOM_LOOK_S)
        finally:
            if self._own >= 0:
                os.close(self._own)
            if self._made is not None:
                os.close(self._made[1])
                # There was room elsewhere in the end.
                with self._context.db.transaction() as db:
                    contents.mark_doomed(db, self._made[0])
            if self._unsealed is not None:
                self._close_again(self._unsealed)

    # --- one attempt --------------------------------------------------------------------------------------------------

    def _attempt(self) -> Opened:
        wish = self._wish
        file = self._files.by_inode.get(wish.inode)
        if file is not None and file.ended:
            self._files.flush()
            file = self._files.by_inode.get(wish.inode)
        if file is not None and file.moving is not None:
            raise Later(file.settled)
        if file is not None and file.arriving is not None and wish.writer:
            arriving, reading = file.arriving, file
            raise Later(lambda: arriving.whole(reading))
        with Undo() as undo:
            with self._files.change():
                held = contents.get_file_content(self._context.db, wish.inode)
                if held is None:
                    raise posix_error(errno.ENOENT if self._context.sharing is None else errno.ESTALE)
                if not held.inode.is_file:
                    raise posix_error(errno.EINVAL)
                if held.has_newer_generation and self._context.sharing is not None and trio.current_time() < self._told_until_s:
                    raise Later(self._look_again)
                if file is None:
                    file = self._first(held, undo)
                elif wish.writer:
                    self._demand_newest(file, held)
                    self._join(file, held)
                opened = self._record(file, held)
            undo.pop_all()
        self._files.add(file, opened.handle, wish.writer)
        return opened

    def _record(self, file: OpenFile, held: FileContent) -> Opened:
        """The rows of a handle, and of the answer."""
        db, wish, inode = self._context.db, self._wish, held.inode.id
        if wish.request is None:
            return Opened(inode, self._files.internal_handle(), file.backing, False)
        if wish.truncate and wish.request.kill_privileges and held.inode.mode & SET_ID:
            attributes.set_attributes(db, inode, kill_set_id=True)
        handle = handles.insert(db, inode, file.content, is_writer=wish.writer, backing_id=file.backing, generation=file.generation)
        stranger = wish.writer and not wish.root and bool(held.inode.mode & SET_ID)
        opened = Opened(inode, handle, file.backing, bool(file.backing) and (file.direct or stranger))
        answers.record_reply(db, wish.request.number, opened.pack())
        return opened

    # --- nobody has it open -------------------------------------------------------------------------------------------

    def _first(self, held: FileContent, undo: Undo) -> OpenFile:
        wish = self._wish
        if wish.writer:
            way = write.way(held, truncate=wish.truncate, shared=False)
            if way is write.Way.NEW:
                return self.begin(held, undo)
            if way is write.Way.IN_PLACE:
                return self._here(held, undo)
            if way is write.Way.FETCH:
                raise Later(self._fetch)
        else:
            way_to_read = read.way(held)
            if way_to_read is read.Way.HERE:
                return self._here(held, undo)
            if way_to_read is read.Way.EMPTY:
                return self._empty(held, undo)
            if way_to_read is read.Way.FETCH:
                return self._coming(held, undo) or self._pfs_file(held, undo)
        if self._context.sharing is not None and not self._sought:
            raise Later(self._seek)
        raise self._lost("no copy of its content is left")

    def begin(self, held: FileContent, undo: Undo, kind: bytes | None = None) -> OpenFile:
        """A new content."""
        expected = max(held.inode.size, self._files.expected_bytes(kind) if kind else 0)
        promised = self._files.promised()
        tier = self._context.places.choose(expected, promised)
        place = self._context.places[tier]
        served = self._served(tier, expected or None, promised.get(tier, 0))
        changed_ns = None if kind is not None or self._files.times_are_kernels else time.time_ns()
        if tier is Tier.PFS:
            content, fd = self._made_on_pfs(place)
            contents.insert_content(self._context.db, held.inode.id, tier, reserved_content=content, changed_ns=changed_ns)
            undo.callback(setattr, self, "_made", self._made)
            self._made = None
        else:
            content = contents.insert_content(self._context.db, held.inode.id, tier, changed_ns=changed_ns)
            fd = place.create(content, os.O_RDWR if served else os.O_RDONLY)
            undo.callback(place.remove, content)
            undo.callback(os.close, fd)
        mtime_ns = held.inode.mtime_ns if changed_ns is None else changed_ns
        os.utime(fd, ns=(held.inode.atime_ns, mtime_ns))
        file = self._file(held, content, place, fd, undo, served=served, kind=kind)
        file.expected = expected
        return file

    def _served(self, tier: Tier, expected: int | None, promised: int) -> bool:
        """Whether a writer's bytes shall pass through us although the kernel could do it alone: where a tier is nearly full, so that
        they can move on, or wait for the room of what was just deleted.
        """
        if self._context.data_path is not DataPath.PASSTHROUGH:
            return True
        if tier is Tier.PFS:
            return False
        places = self._context.places
        room = space.without(places.room(tier), promised)
        return space.watched(room, expected) if any(places.after(tier)) else space.last(room, expected)

    def _empty(self, held: FileContent, undo: Undo) -> OpenFile:
        """A file that was made by mknod and never written: it gets a content now, closed at once with this handle."""
        file = self.begin(held, undo, kind=b"")
        assert file.content is not None
        contents.mark_closed(self._context.db, held.inode.id, file.content, 0, held.inode.atime_ns, held.inode.mtime_ns)
        return file

    def _here(self, held: FileContent, undo: Undo) -> OpenFile:
        """From the tier that has it."""
        wish, content, tier = self._wish, held.content, held.tiers[0]
        assert content is not None
        place = self._place(tier)
        served = wish.writer and self._served(tier, 0, self._files.promised().get(tier, 0))
        try:
            fd = self._taken(place, content, WRITE_NOW if served else os.O_RDONLY)
        except FileNotFoundError as failure:
            raise Later(lambda: self._miss(content, tier)) from failure
        undo.callback(os.close, fd)
        if wish.writer:
            self._reopen(held, content, place)
        if tier is not Tier.PFS:
            same_times(fd, held.inode)
        return self._file(held, content, place, fd, undo, served=served)

    def _file(
        self, held: FileContent, content: int | None, place: Place | None, fd: int, undo: Undo, *, served: bool, kind: bytes | None = None
    ) -> OpenFile:
        file = OpenFile(held.inode.id, content, place, fd, kind=kind or None, atime_ns=held.inode.atime_ns)
        file.generation = held.inode.generation
        if served:
            file.writable = self._wish.writer
        else:
            file.backing = self._files.register(fd, file.tier)
            undo.callback(self._files.unregister, file.backing)
        if self._wish.writer and not file.backing and not file.writable and place is not None and content is not None:
            # The kernel refused to take this file over: from now on we need to write it ourselves.
            writing = self._taken(place, content, WRITE_NOW)
            os.dup2(writing, fd, inheritable=False)
            os.close(writing)
            file.writable = True
        return file

    # --- somebody has it open -----------------------------------------------------------------------------------------

    def _demand_newest(self, file: OpenFile, held: FileContent) -> None:
        """Refuse to write into a former generation that is open here since another node wrote the file again: it would be lost."""
        if file.content is None or (file.content == held.content and not (held.is_remote and held.inode.generation != file.generation)):
            return
        path = os.fsdecode(report.get_path(self._context.db, self._wish.inode))
        raise Busy(f"{path}: a program on this node has a former generation open, and another node has written it since")

    def _join(self, file: OpenFile, held: FileContent) -> None:
        """One more writer on an open inode: same content, same backing id."""
        if file.place is None:
            self._leave_pfs_file(file, held)
        content, tier = file.content, file.tier
        assert content is not None and tier is not None and file.place is not None
        if self._wish.truncate and held.state is not ContentState.OPEN:
            # The catalog must know that the bytes change before they do.
            raise Later(lambda: self._unseal(held, content, tier))
        if not file.backing and not file.writable:
            file.replace(self._taken(file.place, content, WRITE_NOW))
            file.writable = True
        if self._wish.truncate:
            self._cut(file, content)
        self._reopen(held, content, file.place)

    def _cut(self, file: OpenFile, content: int) -> None:
        assert file.place is not None
        fd = file.fd if file.writable else self._taken(file.place, content, WRITE_NOW)
        try:
            os.ftruncate(fd, 0)
        finally:
            if fd != file.fd:
                os.close(fd)

    async def _unseal(self, held: FileContent, content: int, tier: Tier) -> None:
        with self._context.db.transaction() as db:
            contents.mark_open(db, held.inode.id, content, tier)
        self._unsealed = content

    def _close_again(self, content: int) -> None:
        """What was unsealed for a writer who did not come to it in the end would stay OPEN for ever. Its size is found at its seal."""
        with self._files.change() as db:
            known = settling.get_content(db, content)
            if known is None or known.state is not ContentState.OPEN:
                return
            held = contents.get_file_content(db, known.inode)
            if held is None or held.content != content:
                contents.mark_doomed(db, content)
            elif self._files.is_written(known.inode):
                return
            else:
                row = held.inode
                contents.mark_closed(db, row.id, content, row.size, row.atime_ns, row.mtime_ns)
        self._context.bell.ring(bells.WORK)

    def _reopen(self, held: FileContent, content: int, place: Place) -> None:
        if held.state is ContentState.OPEN:
            contents.bump_change(self._context.db, content)
            return
        if self._wish.hasty and place.tier is not Tier.PFS:
            os.close(self._taken(place, content, WRITE_NOW))
        contents.mark_open(self._context.db, held.inode.id, content, place.tier)

    def _leave_pfs_file(self, file: OpenFile, held: FileContent) -> None:
        """Readers have the PFS's own file open and somebody wants to write: from now on their reads come to us as well."""
        if not held.tiers or held.content is None:
            raise Later(self._fetch)
        place = self._place(held.tiers[0])
        file.replace(self._taken(place, held.content, WRITE_NOW))
        file.content, file.place, file.writable, file.direct = held.content, place, True, True
        handles.set_content(self._context.db, file.inode, held.content)

    def _place(self, tier: Tier) -> Place:
        if tier not in self._context.places:
            raise self._lost(f"its content lies in {tier}, which is not there now: see `ckptfs status`")
        return self._context.places[tier]

    def _lost(self, why: str) -> ContentLost | OSError:
        if not contents.has_name(self._context.db, self._wish.inode):
            return posix_error(errno.ESTALE)  # Another node has taken its name away since it was looked up: the kernel looks again.
        path = os.fsdecode(report.get_path(self._context.db, self._wish.inode))
        log.error("%s cannot be opened: %s", path, why)
        return ContentLost(f"{path}: {why}")

    # --- what needs waiting -------------------------------------------------------------------------------------------

    def _taken(self, place: Place, content: int, flags: int) -> int:
        """A descriptor, at once or Later: the mover may hold a lease, and the PFS may hang."""
        if place.tier is Tier.PFS:
            if self._own < 0:
                raise Later(lambda: self._open_on_pfs(place, content, flags))
            return self._use_own()
        try:
            return place.open(content, flags)
        except BlockingIOError as failure:
            now_s = trio.current_time()
            self._leases_until_s = self._leases_until_s or now_s + limits.LEASE_WAIT_S
            if now_s > self._leases_until_s:
                raise TimedOut("the mover does not give up its lease") from failure
            raise Later(lambda: trio.sleep(limits.LEASE_POLL_S)) from failure

    async def _look_again(self) -> None:
        await trio.sleep(limits.TOLD_LOOK_S)
        if self._context.sharing is not None:
            await self._context.sharing.fresh_inode(self._wish.inode)

    async def _miss(self, content: int, tier: Tier) -> None:
        """The catalog knows a copy that is not there: it does not count any more."""
        path = os.fsdecode(report.get_path(self._context.db, self._wish.inode))
        log.error("%s: the file of its content %d is gone from %s", path, content, tier)
        settling.delete_copy(self._context.db, content, tier)

    def _use_own(self) -> int:
        fd, self._own = self._own, -1
        return fd

    async def _open_on_pfs(self, place: Place, content: int, flags: int) -> None:
        self._own = await on_pfs(lambda: place.open(content, flags & ~os.O_NONBLOCK))

    def _made_on_pfs(self, place: Place) -> tuple[int, int]:
        if self._made is None:
            raise Later(lambda: self._make_on_pfs(place))
        return self._made

    async def _make_on_pfs(self, place: Place) -> None:
        with self._context.db.transaction() as db:
            content = contents.insert_reserved_content(db, Tier.PFS)
        try:
            self._made = content, await on_pfs(lambda: place.create(content))
        except BaseException as failure:
            with self._context.db.transaction() as db:
                contents.mark_doomed(db, content)
            if isinstance(failure, (OSError, CkptfsError)):
                raise NoSpace(f"RAM and NVMe are full, and the PFS cannot take a file: {failure}") from failure
            raise

    def _pfs_file(self, held: FileContent, undo: Undo) -> OpenFile:
        """The PFS's own file, when the mover said so; else ask."""
        if self._own < 0:
            raise Later(self._fetch)
        fd = self._use_own()
        undo.callback(os.close, fd)
        return self._file(held, None, None, fd, undo, served=self._context.data_path is not DataPath.PASSTHROUGH)

    def _coming(self, held: FileContent, undo: Undo) -> OpenFile | None:
        """A file whose blocks are on their way here: it is read as they come. None where nothing is published of it."""
        content = None if held.content is None else settling.get_content(self._context.db, held.content)
        if content is None or content.state is not ContentState.SEALED or content.generation != held.inode.generation:
            return None
        arriving = Arriving(self._context, content)
        found = arriving.begin()
        if found is None:
            return None
        place, fd = found
        undo.callback(os.close, fd)
        file = OpenFile(held.inode.id, content.id, place, fd, atime_ns=held.inode.atime_ns)
        file.generation, file.arriving = held.inode.generation, arriving
        return file

    async def _fetch(self) -> None:
        """Have it brought: a reader needs only its beginning, unless that was tried."""
        argument, begun = (wants.FOR_WRITING, False) if self._wish.writer else ("", not self._begun)
        ask = self._context.asking.ask
        result = await ask(wants.FETCH, self._wish.inode, argument, timeout_s=limits.FETCH_STALL_S, begun=begun)
        self._begun |= result == wants.READABLE
        if result == wants.DIRECT:
            self._own = await pfs_descriptor(self._context, self._wish.inode)

    async def _seek(self) -> None:
        """This node knows of no copy: another one may have it all the same, or be about to show what the file held before."""
        self._sought = True
        try:
            await self._fetch()
        except (OSError, TimedOut) as failure:
            if failure.errno not in {errno.EIO, errno.ETIMEDOUT}:
                raise
