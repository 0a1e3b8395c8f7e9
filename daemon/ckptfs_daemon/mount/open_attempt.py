"""Owns how one open comes about: decided and committed in one go without a yield point, or not at all; what it must wait for, it waits for
outside, and then decides anew.

Invariant: an attempt is one transaction. Files, descriptors and backing ids that an attempt made are undone when it is not committed.
If we die here: a file that no row names is swept by the mover, a backing id that no handle names ends with the connection.

Owns what an attempt at an open ends with when it does not succeed: what it must wait for, and what it takes back.

If we die here: an attempt is one transaction, and was not committed.

What an open asks for, and what came of it: the values that travel between the handlers, the attempts and the kept answers.

Nothing here outlives the process but `Opened.pack`, which the table of answers holds.

Owns how one create comes about: a name, an inode, a content and a handle in one transaction, or none of them.

If we die here: see opening.py.
"""

import contextlib
import errno
import logging
import os
import stat
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from ckptfs import limits
from ckptfs.catalog import contents, copies, handles, inodes, mover_requests, namespace
from ckptfs.catalog.contents import FileContent
from ckptfs.errors import Busy, CkptfsError, ContentLost, NoSpace, TimedOut, posix_error
from ckptfs.flow import open
from ckptfs.model import ContentState, DataPath, Inode, Tier
from ckptfs.tiers import space
from ckptfs.tiers.storage import TierStorage
from ckptfs_daemon import ipc
from ckptfs_daemon.fuse.request import Request
from ckptfs_daemon.mount.open_file import NONBLOCKING_WRITE, FetchWaiter, OpenFile, open_pfs_file, run_on_pfs, set_inode_times

if TYPE_CHECKING:
    from ckptfs_daemon.mount.context import MountContext


class MustWait(Exception):
    """The attempt must wait for something first."""

    def __init__(self, wait: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self.wait = wait


class UndoLog:
    """What an attempt that fails must take back, the last first. Most do not fail: an ExitStack is made only for those that do."""

    def __init__(self) -> None:
        self._acts: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def callback(self, act: Callable[..., object], *values: object) -> None:
        self._acts.append((act, values))

    def pop_all(self) -> None:
        """It did not fail."""
        self._acts.clear()

    def __enter__(self) -> "UndoLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._acts:
            with contextlib.ExitStack() as stack:
                for act, values in self._acts:
                    stack.callback(act, *values)


_OPENED = struct.Struct("<QQI?")


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What somebody asks for. `request` is None for ourselves: such a handle is not recorded. `root`: writes keep set-id bits.
    `hasty`: with O_NONBLOCK, which the kernel hands on to the backing file: it must not meet a lease of the mover's there.
    """

    inode: int
    is_writer: bool
    truncates: bool
    fuse_request: Request | None
    is_root: bool = True
    nonblocking: bool = False


@dataclass(frozen=True, slots=True)
class OpenResult:
    """What came of it. `direct`: reads and writes come to us even on the passthrough path."""

    inode: int
    handle: int
    backing_id: int
    direct: bool

    @property
    def fh(self) -> int:
        """What the kernel gets: the handle, and the backing id in the upper half."""
        return self.handle | self.backing_id << 32

    def pack(self) -> bytes:
        return _OPENED.pack(self.inode, self.handle, self.backing_id, self.direct)

    @classmethod
    def unpack(cls, body: bytes) -> "OpenResult":
        return cls(*_OPENED.unpack(body))


log = logging.getLogger(__name__)
SET_ID_BITS = stat.S_ISUID | stat.S_ISGID


class OpenAttempt:
    """The attempts at one open."""

    def __init__(self, context: "MountContext", open_request: OpenRequest) -> None:
        self._context = context
        self._files = context.open_files
        self._open_request = open_request
        self._made: tuple[int, int] | None = None
        self._pfs_fd = -1
        self._unsealed_content: int | None = None
        self._leases_until_s = 0.0
        self._has_begun_fetch = self._has_searched = False
        self._announce_deadline_s = trio.current_time() + limits.PUBLISHED_WAIT_S

    async def run(self) -> OpenResult:
        """Open. Raises OSError, ContentLost, NoRoom, TimedOut."""
        full_until_s = trio.current_time() + limits.NO_SPACE_WAIT_S
        try:
            while True:
                try:
                    return self._attempt()
                except MustWait as later:
                    await later.wait()
                except NoSpace:
                    if trio.current_time() > full_until_s:
                        raise
                    self._context.wake_channel.notify(ipc.WORK)
                    await trio.sleep(limits.NO_SPACE_POLL_S)
        finally:
            if self._pfs_fd >= 0:
                os.close(self._pfs_fd)
            if self._made is not None:
                os.close(self._made[1])
                # There was room elsewhere in the end.
                with self._context.db.transaction() as db:
                    contents.mark_doomed(db, self._made[0])
            if self._unsealed_content is not None:
                self._reclose_unsealed(self._unsealed_content)

    # --- one attempt --------------------------------------------------------------------------------------------------

    def _attempt(self) -> OpenResult:
        open_request = self._open_request
        file = self._files.by_inode.get(open_request.inode)
        if file is not None and file.ended_handles:
            self._files.commit_releases()
            file = self._files.by_inode.get(open_request.inode)
        if file is not None and file.move_done is not None:
            raise MustWait(file.wait_moved)
        if file is not None and file.fetch_waiter is not None and open_request.is_writer:
            waiter, reading = file.fetch_waiter, file
            raise MustWait(lambda: waiter.wait_complete(reading))
        with UndoLog() as undo:
            with self._files.change():
                held = contents.get_file_content(self._context.db, open_request.inode)
                if held is None:
                    raise posix_error(errno.ENOENT if self._context.shared_namespace is None else errno.ESTALE)
                if not held.inode.is_file:
                    raise posix_error(errno.EINVAL)
                if (
                    held.has_newer_generation
                    and self._context.shared_namespace is not None
                    and trio.current_time() < self._announce_deadline_s
                ):
                    raise MustWait(self._wait_and_refresh)
                if file is None:
                    file = self._open_first(held, undo)
                elif open_request.is_writer:
                    self._require_newest(file, held)
                    self._add_writer(file, held)
                opened = self._record_handle(file, held)
            undo.pop_all()
        self._files.add_handle(file, opened.handle, open_request.is_writer)
        return opened

    def _record_handle(self, file: OpenFile, held: FileContent) -> OpenResult:
        """The rows of a handle, and of the answer."""
        db, open_request, inode = self._context.db, self._open_request, held.inode.id
        if open_request.fuse_request is None:
            return OpenResult(inode, self._files.allocate_internal_handle(), file.backing_id, False)
        if open_request.truncates and open_request.fuse_request.kills_set_id and held.inode.mode & SET_ID_BITS:
            inodes.set_attributes(db, inode, kill_set_id=True)
        handle = handles.insert(
            db, inode, file.content, is_writer=open_request.is_writer, backing_id=file.backing_id, generation=file.generation
        )
        must_drop_set_id = open_request.is_writer and not open_request.is_root and bool(held.inode.mode & SET_ID_BITS)
        opened = OpenResult(inode, handle, file.backing_id, bool(file.backing_id) and (file.direct or must_drop_set_id))
        handles.record_reply(db, open_request.fuse_request.number, opened.pack())
        return opened

    # --- nobody has it open -------------------------------------------------------------------------------------------

    def _open_first(self, held: FileContent, undo: UndoLog) -> OpenFile:
        open_request = self._open_request
        if open_request.is_writer:
            write_target = open.choose_write_target(held, truncate=open_request.truncates, shared=False)
            if write_target is open.WriteTarget.NEW:
                return self.create_content(held, undo)
            if write_target is open.WriteTarget.IN_PLACE:
                return self._open_local(held, undo)
            if write_target is open.WriteTarget.FETCH:
                raise MustWait(self._request_fetch)
        else:
            read_source = open.choose_read_source(held)
            if read_source is open.ReadSource.HERE:
                return self._open_local(held, undo)
            if read_source is open.ReadSource.EMPTY:
                return self._open_empty(held, undo)
            if read_source is open.ReadSource.FETCH:
                return self._open_incoming(held, undo) or self._open_pfs_file(held, undo)
        if self._context.shared_namespace is not None and not self._has_searched:
            raise MustWait(self._search_elsewhere)
        raise self._build_lost_error("no copy of its content is left")

    def create_content(self, held: FileContent, undo: UndoLog, kind: bytes | None = None) -> OpenFile:
        """A new content."""
        expected = max(held.inode.size, self._files.get_expected_bytes(kind) if kind else 0)
        reserved_bytes = self._files.get_reserved_bytes()
        tier = self._context.tiers.choose_tier(expected, reserved_bytes)
        storage = self._context.tiers[tier]
        direct = self._must_be_direct(tier, expected or None, reserved_bytes.get(tier, 0))
        changed_ns = None if kind is not None or self._files.kernel_owns_times else time.time_ns()
        if tier is Tier.PFS:
            content, fd = self._get_pfs_content(storage)
            contents.insert_content(self._context.db, held.inode.id, tier, reserved_content=content, changed_ns=changed_ns)
            undo.callback(setattr, self, "_made", self._made)
            self._made = None
        else:
            content = contents.insert_content(self._context.db, held.inode.id, tier, changed_ns=changed_ns)
            fd = storage.create(content, os.O_RDWR if direct else os.O_RDONLY)
            undo.callback(storage.remove, content)
            undo.callback(os.close, fd)
        mtime_ns = held.inode.mtime_ns if changed_ns is None else changed_ns
        os.utime(fd, ns=(held.inode.atime_ns, mtime_ns))
        file = self._build_open_file(held, content, storage, fd, undo, direct=direct, kind=kind)
        file.expected_bytes = expected
        return file

    def _must_be_direct(self, tier: Tier, expected: int | None, reserved_bytes: int) -> bool:
        """Whether a writer's bytes shall pass through us although the kernel could do it alone: where a tier is nearly full, so that
        they can move on, or wait for the room of what was just deleted.
        """
        if self._context.data_path is not DataPath.PASSTHROUGH:
            return True
        if tier is Tier.PFS:
            return False
        tiers = self._context.tiers
        capacity = space.subtract_reserved(tiers.get_capacity(tier), reserved_bytes)
        return space.needs_watching(capacity, expected) if any(tiers.list_next(tier)) else space.needs_watching_in_last(capacity, expected)

    def _open_empty(self, held: FileContent, undo: UndoLog) -> OpenFile:
        """A file that was made by mknod and never written: it gets a content now, closed at once with this handle."""
        file = self.create_content(held, undo, kind=b"")
        assert file.content is not None
        contents.mark_closed(self._context.db, held.inode.id, file.content, 0, held.inode.atime_ns, held.inode.mtime_ns)
        return file

    def _open_local(self, held: FileContent, undo: UndoLog) -> OpenFile:
        """From the tier that has it."""
        open_request, content, tier = self._open_request, held.content, held.tiers[0]
        assert content is not None
        storage = self._get_storage(tier)
        direct = open_request.is_writer and self._must_be_direct(tier, 0, self._files.get_reserved_bytes().get(tier, 0))
        try:
            fd = self._open_or_wait(storage, content, NONBLOCKING_WRITE if direct else os.O_RDONLY)
        except FileNotFoundError as failure:
            raise MustWait(lambda: self._delete_missing_copy(content, tier)) from failure
        undo.callback(os.close, fd)
        if open_request.is_writer:
            self._mark_content_open(held, content, storage)
        if tier is not Tier.PFS:
            set_inode_times(fd, held.inode)
        return self._build_open_file(held, content, storage, fd, undo, direct=direct)

    def _build_open_file(
        self,
        held: FileContent,
        content: int | None,
        storage: TierStorage | None,
        fd: int,
        undo: UndoLog,
        *,
        direct: bool,
        kind: bytes | None = None,
    ) -> OpenFile:
        file = OpenFile(held.inode.id, content, storage, fd, kind=kind or None, atime_ns=held.inode.atime_ns)
        file.generation = held.inode.generation
        if direct:
            file.is_writable = self._open_request.is_writer
        else:
            file.backing_id = self._files.register_backing(fd, file.tier)
            undo.callback(self._files.unregister_backing, file.backing_id)
        if self._open_request.is_writer and not file.backing_id and not file.is_writable and storage is not None and content is not None:
            # The kernel refused to take this file over: from now on we need to write it ourselves.
            writing = self._open_or_wait(storage, content, NONBLOCKING_WRITE)
            os.dup2(writing, fd, inheritable=False)
            os.close(writing)
            file.is_writable = True
        return file

    # --- somebody has it open -----------------------------------------------------------------------------------------

    def _require_newest(self, file: OpenFile, held: FileContent) -> None:
        """Refuse to write into a former generation that is open here since another node wrote the file again: it would be lost."""
        if file.content is None or (file.content == held.content and not (held.is_remote and held.inode.generation != file.generation)):
            return
        path = os.fsdecode(namespace.get_path(self._context.db, self._open_request.inode))
        raise Busy(f"{path}: a program on this node has a former generation open, and another node has written it since")

    def _add_writer(self, file: OpenFile, held: FileContent) -> None:
        """One more writer on an open inode: same content, same backing id."""
        if file.storage is None:
            self._replace_pfs_file(file, held)
        content, tier = file.content, file.tier
        assert content is not None and tier is not None and file.storage is not None
        if self._open_request.truncates and held.state is not ContentState.OPEN:
            # The catalog must know that the bytes change before they do.
            raise MustWait(lambda: self._mark_unsealed(held, content, tier))
        if not file.backing_id and not file.is_writable:
            file.replace_fd(self._open_or_wait(file.storage, content, NONBLOCKING_WRITE))
            file.is_writable = True
        if self._open_request.truncates:
            self._truncate(file, content)
        self._mark_content_open(held, content, file.storage)

    def _truncate(self, file: OpenFile, content: int) -> None:
        assert file.storage is not None
        fd = file.fd if file.is_writable else self._open_or_wait(file.storage, content, NONBLOCKING_WRITE)
        try:
            os.ftruncate(fd, 0)
        finally:
            if fd != file.fd:
                os.close(fd)

    async def _mark_unsealed(self, held: FileContent, content: int, tier: Tier) -> None:
        with self._context.db.transaction() as db:
            contents.mark_open(db, held.inode.id, content, tier)
        self._unsealed_content = content

    def _reclose_unsealed(self, content: int) -> None:
        """What was unsealed for a writer who did not come to it in the end would stay OPEN for ever. Its size is found at its seal."""
        with self._files.change() as db:
            known = contents.get_content(db, content)
            if known is None or known.state is not ContentState.OPEN:
                return
            held = contents.get_file_content(db, known.inode)
            if held is None or held.content != content:
                contents.mark_doomed(db, content)
            elif self._files.is_open_for_writing(known.inode):
                return
            else:
                row = held.inode
                contents.mark_closed(db, row.id, content, row.size, row.atime_ns, row.mtime_ns)
        self._context.wake_channel.notify(ipc.WORK)

    def _mark_content_open(self, held: FileContent, content: int, storage: TierStorage) -> None:
        if held.state is ContentState.OPEN:
            contents.bump_change(self._context.db, content)
            return
        if self._open_request.nonblocking and storage.tier is not Tier.PFS:
            os.close(self._open_or_wait(storage, content, NONBLOCKING_WRITE))
        contents.mark_open(self._context.db, held.inode.id, content, storage.tier)

    def _replace_pfs_file(self, file: OpenFile, held: FileContent) -> None:
        """Readers have the PFS's own file open and somebody wants to write: from now on their reads come to us as well."""
        if not held.tiers or held.content is None:
            raise MustWait(self._request_fetch)
        storage = self._get_storage(held.tiers[0])
        file.replace_fd(self._open_or_wait(storage, held.content, NONBLOCKING_WRITE))
        file.content, file.storage, file.is_writable, file.direct = held.content, storage, True, True
        handles.set_content(self._context.db, file.inode, held.content)

    def _get_storage(self, tier: Tier) -> TierStorage:
        if tier not in self._context.tiers:
            raise self._build_lost_error(f"its content lies in {tier}, which is not there now: see `ckptfs status`")
        return self._context.tiers[tier]

    def _build_lost_error(self, why: str) -> ContentLost | OSError:
        if not contents.has_name(self._context.db, self._open_request.inode):
            return posix_error(errno.ESTALE)  # Another node has taken its name away since it was looked up: the kernel looks again.
        path = os.fsdecode(namespace.get_path(self._context.db, self._open_request.inode))
        log.error("%s cannot be opened: %s", path, why)
        return ContentLost(f"{path}: {why}")

    # --- what needs waiting -------------------------------------------------------------------------------------------

    def _open_or_wait(self, storage: TierStorage, content: int, flags: int) -> int:
        """A descriptor, at once or Later: the mover may hold a lease, and the PFS may hang."""
        if storage.tier is Tier.PFS:
            if self._pfs_fd < 0:
                raise MustWait(lambda: self._open_on_pfs(storage, content, flags))
            return self._take_pfs_fd()
        try:
            return storage.open(content, flags)
        except BlockingIOError as failure:
            now_s = trio.current_time()
            self._leases_until_s = self._leases_until_s or now_s + limits.LEASE_WAIT_S
            if now_s > self._leases_until_s:
                raise TimedOut("the mover does not give up its lease") from failure
            raise MustWait(lambda: trio.sleep(limits.LEASE_POLL_S)) from failure

    async def _wait_and_refresh(self) -> None:
        await trio.sleep(limits.STORE_PUBLISHED_POLL_S)
        if self._context.shared_namespace is not None:
            await self._context.shared_namespace.refresh_inode(self._open_request.inode)

    async def _delete_missing_copy(self, content: int, tier: Tier) -> None:
        """The catalog knows a copy that is not there: it does not count any more."""
        path = os.fsdecode(namespace.get_path(self._context.db, self._open_request.inode))
        log.error("%s: the file of its content %d is gone from %s", path, content, tier)
        copies.delete_copy(self._context.db, content, tier)

    def _take_pfs_fd(self) -> int:
        fd, self._pfs_fd = self._pfs_fd, -1
        return fd

    async def _open_on_pfs(self, storage: TierStorage, content: int, flags: int) -> None:
        self._pfs_fd = await run_on_pfs(lambda: storage.open(content, flags & ~os.O_NONBLOCK))

    def _get_pfs_content(self, storage: TierStorage) -> tuple[int, int]:
        if self._made is None:
            raise MustWait(lambda: self._create_pfs_content(storage))
        return self._made

    async def _create_pfs_content(self, storage: TierStorage) -> None:
        with self._context.db.transaction() as db:
            content = contents.insert_reserved_content(db, Tier.PFS)
        try:
            self._made = content, await run_on_pfs(lambda: storage.create(content))
        except BaseException as failure:
            with self._context.db.transaction() as db:
                contents.mark_doomed(db, content)
            if isinstance(failure, (OSError, CkptfsError)):
                raise NoSpace(f"RAM and NVMe are full, and the PFS cannot take a file: {failure}") from failure
            raise

    def _open_pfs_file(self, held: FileContent, undo: UndoLog) -> OpenFile:
        """The PFS's own file, when the mover said so; else ask."""
        if self._pfs_fd < 0:
            raise MustWait(self._request_fetch)
        fd = self._take_pfs_fd()
        undo.callback(os.close, fd)
        return self._build_open_file(held, None, None, fd, undo, direct=self._context.data_path is not DataPath.PASSTHROUGH)

    def _open_incoming(self, held: FileContent, undo: UndoLog) -> OpenFile | None:
        """A file whose blocks are on their way here: it is read as they come. None where nothing is published of it."""
        content = None if held.content is None else contents.get_content(self._context.db, held.content)
        if content is None or content.state is not ContentState.SEALED or content.generation != held.inode.generation:
            return None
        waiter = FetchWaiter(self._context, content)
        found = waiter.open_partial()
        if found is None:
            return None
        storage, fd = found
        undo.callback(os.close, fd)
        file = OpenFile(held.inode.id, content.id, storage, fd, atime_ns=held.inode.atime_ns)
        file.generation, file.fetch_waiter = held.inode.generation, waiter
        return file

    async def _request_fetch(self) -> None:
        """Have it brought: a reader needs only its beginning, unless that was tried."""
        argument, begun = (mover_requests.FOR_WRITING, False) if self._open_request.is_writer else ("", not self._has_begun_fetch)
        ask = self._context.mover_client.request
        result = await ask(mover_requests.FETCH, self._open_request.inode, argument, timeout_s=limits.FETCH_STALL_S, accepts_begun=begun)
        self._has_begun_fetch |= result == mover_requests.READABLE
        if result == mover_requests.DIRECT:
            self._pfs_fd = await open_pfs_file(self._context, self._open_request.inode)

    async def _search_elsewhere(self) -> None:
        """This node knows of no copy: another one may have it all the same, or be about to show what the file held before."""
        self._has_searched = True
        try:
            await self._request_fetch()
        except (OSError, TimedOut) as failure:
            if failure.errno not in {errno.EIO, errno.ETIMEDOUT}:
                raise


class CreateAttempt(OpenAttempt):
    """The attempts at one create."""

    def __init__(self, context: "MountContext", request: Request, parent: int, name: bytes, mode: int, owner: tuple[int, int]) -> None:
        super().__init__(context, OpenRequest(0, is_writer=True, truncates=False, fuse_request=request))
        self._parent, self._name, self._mode, self._owner = parent, name, mode, owner
        self._kind = open.get_series_pattern(name)
        self._inode: Inode | None = None
        self.blind = False

    def try_nonblocking(self) -> OpenResult | None:
        """Create if nothing must be waited for; else None, and nothing was changed."""
        try:
            return self._attempt()
        except (MustWait, NoSpace):
            return None

    @property
    def inode(self) -> Inode:
        """What was made."""
        assert self._inode is not None
        return self._inode

    def _attempt(self) -> OpenResult:
        """Raises what `namespace.make` raises, Unvisited too."""
        uid, gid = self._owner
        with UndoLog() as undo:
            with self._files.change() as db:
                inode = namespace.create(db, self._parent, self._name, self._mode, uid=uid, gid=gid, allow_unimported=self.blind)
                held = FileContent(inode, None, None, (), False)
                file = self.create_content(held, undo, self._kind)
                opened = self._record_handle(file, held)
            undo.pop_all()
        self._files.add_handle(file, opened.handle, True)
        self._inode = inode
        return opened
