"""One open: attempts that either commit without a yield point or change nothing.

An attempt loads or inserts the rows (`_load_or_create`), lets `open_decision` choose, acts on files and descriptors (`_act`), and records
handle and reply in the same transaction (`_record`). If it must wait, it raises `MustWait`; `run` waits and starts the next attempt.

Invariants:
- An attempt is one transaction. Files, descriptors and backing ids of an attempt that does not commit are undone.

Crash safety: the mover deletes a file that no row names. A backing id without a handle ends with the connection.
"""

import contextlib
import errno
import logging
import os
import stat
import time
from dataclasses import replace
from typing import Any

import trio

from ckptfs import disk, lifecycle, limits
from ckptfs.catalog import contents, copies, handles, history, inodes, mover_requests
from ckptfs.catalog.contents import FileContent
from ckptfs.errors import Busy, CkptfsError, ContentLost, NoSpace, TimedOut, posix_error
from ckptfs.flow import open_decision
from ckptfs.model import ContentState, CopyState, DataPath, Inode, Tier
from ckptfs.tiers import health
from ckptfs.tiers.prepared import PreparedFile
from ckptfs.tiers.storage import TierStorage
from ckptfs_daemon import ipc
from ckptfs_daemon.fuse import killable
from ckptfs_daemon.mount.context import MountContext
from ckptfs_daemon.mount.open_files.handle_ways import HandleWay, Reason, Way, choose_way
from ckptfs_daemon.mount.open_files.open_file import (
    NONBLOCKING_WRITE,
    FetchWaiter,
    OpenFile,
    has_other_times,
    open_pfs_file,
    set_inode_times,
)
from ckptfs_daemon.mount.open_files.tier_calls import close_logged, run_in_thread, run_unless_cancelled
from ckptfs_daemon.mount.opening import separation, tier_choice
from ckptfs_daemon.mount.opening.open_request import MustWait, OpenRequest, OpenResult
from ckptfs_daemon.mount.opening.tier_choice import SpaceWait

log = logging.getLogger(__name__)
SET_ID_BITS = stat.S_ISUID | stat.S_ISGID


class OpenAttempt:
    """The attempts at one open and their common state: a file or descriptor, and deadlines."""

    def __init__(self, context: MountContext, open_request: OpenRequest) -> None:
        self._context = context
        self._db = context.db
        self._files = context.open_files
        self._open_request = open_request
        self._undo: list[tuple[Any, ...]] = []
        """Calls that undo the attempt that runs, last first: (function, its arguments)."""
        self._new_file: tuple[TierStorage, int, int, int] | None = None
        """(tier, flags, content, descriptor) of a new file outside RAM that no attempt has taken yet."""
        self._pfs_fd = -1
        self._pfs_facts: tier_choice.PfsFacts | None = None
        """What was read beside the descriptor that was opened on the PFS last."""
        self._refusing_tiers: set[Tier] = set()  # Tiers that could not make the file.
        self._dated: tuple[int, int, int] | None = None
        """(content, atime, mtime) of a file on NVMe that has got the times of its inode, if that was possible."""
        self._truncated: OpenFile | None = None
        self._unsealed_content: int | None = None
        self._limit_reason = tier_choice.find_limit_reason(context, open_request) if open_request.is_writer else Reason.NONE
        self._leases_until_s = 0.0
        self._has_begun_fetch = self._has_searched = self.separates = False
        self._announce_deadline_s = trio.current_time() + limits.PUBLISHED_WAIT_S
        self._separation_tries = iter(range(limits.SHARED_TRIES_MAX))

    async def run(self) -> OpenResult:
        """Open. Raises OSError, ContentLost, NoSpace, TimedOut."""
        space_wait = SpaceWait(self._context)
        try:
            while True:
                try:
                    return self._attempt()
                except MustWait as must:
                    wait = must.wait
                except NoSpace:
                    self._refusing_tiers.clear()
                    if not await space_wait.wait(limits.MOVE_ROOM_BYTES_MIN):
                        raise
                    continue
                await wait()
        finally:
            self._discard_unused()

    def _attempt(self) -> OpenResult:
        file = self._find_open_file()
        self._undo.clear()
        try:
            with self._files.change():
                held = self._load_or_create()
                file = self._act(file, held)
                opened = self._record(file, held)
        except BaseException:
            for function, *arguments in reversed(self._undo):
                with contextlib.suppress(OSError):  # The reclaim flow removes a file that is left.
                    function(*arguments)
            raise
        if self.separates:
            self._files.follow_history(opened.inode)
        is_writer = self._open_request.is_writer
        pid = self._open_request.pid if is_writer or held.inode.history else 0
        self._files.add_handle(file, opened.handle, is_writer, self._find_way(file, opened.direct), pid)
        return opened

    # --- load ---------------------------------------------------------------------------------------------------------

    def _find_open_file(self) -> OpenFile | None:
        """Return the inode's open file if it has one that a handle can join now."""
        file = self._files.by_inode.get(self._open_request.number)
        if file is not None and file.ended_handles:
            self._files.commit_releases()
            file = self._files.by_inode.get(self._open_request.number)
        if file is not None and file.move_done is not None:
            raise MustWait(file.wait_moved)
        if file is not None and file.fetch_waiter is not None and self._open_request.is_writer:
            waiter, reading = file.fetch_waiter, file
            raise MustWait(lambda: waiter.wait_complete(reading))
        return file

    def _load_or_create(self) -> FileContent:
        in_cluster = self._context.shared_namespace.is_shared
        held = contents.get_file_content(self._db, self._open_request.inode)
        if held is None:
            raise posix_error(errno.ESTALE if in_cluster else errno.ENOENT)
        if not held.inode.is_file:
            raise posix_error(errno.EINVAL)
        if held.has_newer_generation and in_cluster and trio.current_time() < self._announce_deadline_s:
            raise MustWait(self._wait_and_refresh)
        is_island = self._context.shared_namespace.is_disconnected
        if is_island and self._open_request.is_writer and held.state is ContentState.SEALED and held.tiers[:1] != (Tier.PFS,):
            # Others may make a set of it, which keeps this content. On a PFS without links, a crash could take the only name of its file.
            held = replace(held, is_on_other_nodes=True)
        # An island may have read a name in the history, and not yet the inode that counts it.
        is_kept = held.inode.history or (is_island and history.list_names(self._db, held.inode.id))
        self.separates = bool(is_kept) and self._open_request.is_writer
        if self.separates:
            return separation.separate_for_writer(
                self._context, held, truncates=self._open_request.truncates, request_fetch=self._request_fetch, tries=self._separation_tries
            )
        return held

    # --- act ----------------------------------------------------------------------------------------------------------

    def _act(self, file: OpenFile | None, held: FileContent) -> OpenFile:
        if file is None:
            return self._open_first(held)
        if self._open_request.is_writer:
            self._require_newest(file, held)
            self._add_writer(file, held)
        return file

    def _open_first(self, held: FileContent) -> OpenFile:
        """Open an inode that has no open file."""
        if self._open_request.is_writer:
            choice = open_decision.choose_write_target(held, truncate=self._open_request.truncates)
            if choice is open_decision.WriteTarget.NEW:
                return self._create_content(held, held.inode.size)
            if choice is open_decision.WriteTarget.IN_PLACE:
                return self._open_local(held)
            if choice is open_decision.WriteTarget.FETCH:
                raise MustWait(self._request_fetch)
        else:
            source = open_decision.choose_read_source(held)
            if source is open_decision.ReadSource.HERE:
                return self._open_local(held)
            if source is open_decision.ReadSource.EMPTY:
                return self._open_empty(held)
            if source is open_decision.ReadSource.FETCH:
                return self._open_incoming(held) or self._open_pfs_file(held)
        if self._context.shared_namespace.is_shared and not self._has_searched:
            raise MustWait(self._search_other_nodes)
        raise self._build_lost_error("no copy of its content is left")

    def _create_content(self, held: FileContent, expected_bytes: int, *, is_new_file: bool = False) -> OpenFile:
        """Start a content of about `expected_bytes` (0: unknown), in a prepared file that suits it if any."""
        placement = tier_choice.choose_placement(self._context, expected_bytes, self._limit_reason, self._refusing_tiers, self._pfs_facts)
        tier, reason, prepared_file = placement
        storage = self._context.tiers[tier]
        changed_ns = None if is_new_file or self._files.kernel_owns_times else time.time_ns()
        times = held.inode.atime_ns, held.inode.mtime_ns if changed_ns is None else changed_ns
        flags = os.O_RDWR if reason or tier is Tier.PFS else os.O_RDONLY
        if tier is Tier.RAM:
            content = contents.insert_content(self._db, held.inode.id, tier, changed_ns=changed_ns)
            fd = self._create_in_ram(storage, content, flags, times, prepared_file)
        else:
            content, fd = self._take_new_file(storage, flags, times)
            contents.insert_content(self._db, held.inode.id, tier, reserved_content=content, changed_ns=changed_ns)
        file = self._register_open_file(held, content, storage, fd, reason=reason)
        file.expected_bytes = expected_bytes
        file.prepared_bytes = prepared_file.size_bytes if prepared_file is not None else 0
        return file

    def _create_in_ram(
        self, storage: TierStorage, content: int, flags: int, times: tuple[int, int], prepared_file: PreparedFile | None
    ) -> int:
        """Create a file in RAM. If that fails, the next attempt chooses another tier (P10)."""
        try:
            self._undo.append((storage.remove, content))
            fd = self._create_file(storage, content, flags, prepared_file)
            self._undo.append((os.close, fd))
            os.utime(fd, ns=times)
        except OSError as failure:
            if failure.errno not in health.FULL_ERRNOS and not health.is_tier_failure(failure):
                raise
            self._refusing_tiers.add(storage.tier)
            raise MustWait(trio.lowlevel.checkpoint) from failure
        return fd

    def _create_file(self, storage: TierStorage, content: int, flags: int, prepared_file: PreparedFile | None) -> int:
        """Return the descriptor of an empty file for `content`: prepared, unless another process took it."""
        if prepared_file is not None:
            if self._context.tiers.prepared.take_file(prepared_file, content):
                return storage.open(content, flags)
            if self._limit_reason:
                raise MustWait(trio.lowlevel.checkpoint)  # Without it, the way is another one.
        return storage.create(content, flags)

    def _open_empty(self, held: FileContent) -> OpenFile:
        """Open a file that mknod made and nothing has written: give it a content that is closed at once."""
        file = self._create_content(held, 0, is_new_file=True)
        assert file.content is not None
        contents.mark_closed(self._db, held.inode.id, file.content, 0, held.inode.atime_ns, held.inode.mtime_ns)
        return file

    def _open_local(self, held: FileContent) -> OpenFile:
        """Open the copy in the first tier that has one."""
        is_writer, content, tier = self._open_request.is_writer, held.content, held.tiers[0]
        assert content is not None
        storage = self._get_storage(tier)
        if is_writer and held.is_on_other_nodes:
            raise MustWait(lambda: self._begin_successor(held.inode.id, content, storage))
        reason = Reason.NONE
        if is_writer and tier is not Tier.PFS:
            needed = storage.get_shared_bytes_of(content) if tier is Tier.NVME else 0
            reason = tier_choice.find_buffered_reason(self._context, storage, needed, self._limit_reason)
        try:
            fd = self._open_or_wait(storage, content, NONBLOCKING_WRITE if reason or (is_writer and tier is Tier.PFS) else os.O_RDONLY)
        except FileNotFoundError as failure:
            raise MustWait(lambda: self._delete_missing_copy(content, tier)) from failure
        self._undo.append((self._files.slow_calls.close, fd, tier))
        if is_writer:
            self._mark_content_open(held, content, storage)
        else:
            reason = tier_choice.find_hole_reason(self._context, self._open_request, storage, fd)
        if tier is Tier.RAM:
            set_inode_times(fd, held.inode)
        elif tier is Tier.NVME and has_other_times(fd, held.inode):
            if self._dated != (content, held.inode.atime_ns, held.inode.mtime_ns):
                seen_ns = os.fstat(fd).st_mtime_ns
                raise MustWait(lambda: self._set_times_on_nvme(storage, content, held.inode, seen_ns))
        elif tier is Tier.PFS and is_writer:
            reason = tier_choice.find_buffered_reason(self._context, storage, 0, self._limit_reason, self._pfs_facts)
        return self._register_open_file(held, content, storage, fd, reason=reason)

    def _open_incoming(self, held: FileContent) -> OpenFile | None:
        """Open a file whose blocks are being fetched. Returns None if no fetch of it is published."""
        content = None if held.content is None else contents.get_content(self._db, held.content)
        if content is None or content.state is not ContentState.SEALED or content.generation != held.inode.generation:
            return None
        waiter = FetchWaiter(self._db, self._context.tiers, self._context.mover_client, content)
        found = waiter.open_partial()
        if found is None:
            return None
        storage, fd = found
        self._undo.append((os.close, fd))
        generation = held.inode.generation
        return OpenFile(
            held.inode.id, content.id, storage, fd, self._open_request.shown, atime_ns=held.inode.atime_ns, generation=generation,
            fetch_waiter=waiter, buffered_reason=Reason.FETCHED,
        )  # fmt: skip

    def _open_pfs_file(self, held: FileContent) -> OpenFile:
        """Open the PFS's own file if the mover allowed it; otherwise request a fetch."""
        if self._pfs_fd < 0:
            raise MustWait(self._request_fetch)
        fd = self._take_pfs_fd()
        self._undo.append((self._files.slow_calls.close, fd, None))
        reason = Reason.NONE if self._context.data_path is DataPath.PASSTHROUGH else Reason.DATA_PATH
        return self._register_open_file(held, None, None, fd, reason=reason)

    def _register_open_file(
        self, held: FileContent, content: int | None, storage: TierStorage | None, fd: int, *, reason: Reason
    ) -> OpenFile:
        """Return the open file. Register it with the kernel for passthrough unless `reason` is against it."""
        row = held.inode
        file = OpenFile(row.id, content, storage, fd, self._open_request.shown, atime_ns=row.atime_ns, generation=row.generation)
        file.buffered_reason = reason = reason or self._files.find_history_reason(file.shown, row)
        if file.tier is Tier.PFS and self._pfs_facts is not None:
            file.last_status = self._pfs_facts.status
        if reason:
            file.is_writable = self._open_request.is_writer
        else:
            file.backing_id = self._files.register_backing(fd, file.tier)
            self._undo.append((self._files.unregister_backing, file.backing_id))
            if not file.backing_id:
                is_refused = self._context.data_path is DataPath.PASSTHROUGH
                file.buffered_reason = Reason.REFUSED if is_refused else Reason.DATA_PATH
        if self._open_request.is_writer and not file.backing_id and not file.is_writable and storage is not None and content is not None:
            # The kernel refused to take this file over: from now on this process must write it.
            self._swap_fd(file, self._open_or_wait(storage, content, NONBLOCKING_WRITE))
            file.is_writable = True
        return file

    # --- act on a file that is open -----------------------------------------------------------------------------------

    def _require_newest(self, file: OpenFile, held: FileContent) -> None:
        """Raise Busy if another node wrote the file since it was opened: a write to the old state gets lost."""
        if file.content is None or (file.content == held.content and not (held.is_remote and held.inode.generation != file.generation)):
            return
        raise Busy(f"{self._get_path()}: a program on this node has the previous generation open, and another node has written it since")

    def _add_writer(self, file: OpenFile, held: FileContent) -> None:
        """Let one more writer share the content and the backing id of an open file."""
        if file.storage is None:
            self._replace_pfs_file(file, held)
        content, storage = file.content, file.storage
        assert content is not None and storage is not None
        if held.is_on_other_nodes:
            raise MustWait(lambda: self._begin_successor(held.inode.id, content, storage))
        if self._open_request.truncates and held.state is not ContentState.OPEN:
            # The catalog must know that the bytes change before they do.
            raise MustWait(lambda: self._mark_unsealed(held, content, storage.tier))
        if not file.is_writable and (not file.backing_id or self._must_avoid_backing_file(file)):
            self._swap_fd(file, self._open_or_wait(storage, content, NONBLOCKING_WRITE))
            file.is_writable = True
        if self._open_request.truncates and self._truncated is not file:
            raise MustWait(lambda: self._truncate(file, storage, content))
        self._mark_content_open(held, content, storage)

    def _replace_pfs_file(self, file: OpenFile, held: FileContent) -> None:
        """Replace the PFS's own file, open for readers, by a writable copy. Reads are buffered from now on."""
        if not held.tiers or held.content is None:
            raise MustWait(self._request_fetch)
        storage = self._get_storage(held.tiers[0])
        self._swap_fd(file, self._open_or_wait(storage, held.content, NONBLOCKING_WRITE))
        file.content, file.storage, file.is_writable, file.direct = held.content, storage, True, True
        handles.set_content(self._db, file.inode, held.content)

    def _swap_fd(self, file: OpenFile, fd: int) -> None:
        """Use another descriptor from now on. The previous one, perhaps on the PFS, is closed when unused."""
        tier = file.tier
        self._files.slow_calls.close(file.swap_fd(fd), tier, after=file.wait_idle)

    async def _truncate(self, file: OpenFile, storage: TierStorage, content: int) -> None:
        """Truncate an open file before the next attempt, in a thread: this frees its pages, or may hang."""
        await file.wait_moved()
        if file.storage is not storage or self._files.by_inode.get(file.inode) is not file:
            return  # It moved or was closed meanwhile: the next attempt sees that.
        with file.in_use():
            await run_in_thread(file.tier, lambda: _truncate_content(storage, content))
            await run_in_thread(file.tier, lambda: self._files.top_up.restore(file.inode))
        self._truncated = file

    def _mark_content_open(self, held: FileContent, content: int, storage: TierStorage) -> None:
        if held.state is ContentState.OPEN:
            contents.bump_change(self._db, content)
            return
        if self._open_request.nonblocking and storage.tier is not Tier.PFS:
            os.close(self._open_or_wait(storage, content, NONBLOCKING_WRITE))
        contents.mark_open(self._db, held.inode.id, content, storage.tier)

    # --- record -------------------------------------------------------------------------------------------------------

    def _record(self, file: OpenFile, held: FileContent) -> OpenResult:
        """Insert the rows of the handle and of the reply."""
        open_request, inode = self._open_request, held.inode.id
        if open_request.fuse_request is None:
            return OpenResult(inode, self._files.allocate_internal_handle(), file.backing_id, False)
        has_set_id = bool(held.inode.mode & SET_ID_BITS)
        if open_request.truncates and open_request.fuse_request.kills_set_id and has_set_id:
            inodes.set_attributes(self._db, inode, kill_set_id=True)
        is_writer = open_request.is_writer
        handle = handles.insert(
            self._db, inode, file.content, is_writer=is_writer, backing_id=file.backing_id, generation=file.generation, shown=file.shown
        )
        must_drop_set_id = is_writer and not open_request.is_root and has_set_id
        is_direct = file.direct or must_drop_set_id or self._must_avoid_backing_file(file)
        opened = OpenResult(inode, handle, file.backing_id, is_direct if file.backing_id else self._is_uncached(file))
        handles.record_reply(self._db, open_request.fuse_request.number, opened.pack())
        return opened

    def _must_avoid_backing_file(self, file: OpenFile) -> bool:
        """Return True if this writer must not use the backing file of others, whose pages it would pay for."""
        is_memory = file.storage is not None and file.storage.is_memory
        is_kept_ahead = not file.ways or any(way.way is Way.PREPARED and way.reason for way in file.ways.values())
        return is_memory and bool(self._limit_reason) and (file.prepared_bytes < limits.TOP_UP_AHEAD_BYTES or not is_kept_ahead)

    def _is_uncached(self, file: OpenFile) -> bool:
        """Return True if the kernel should not keep pages that this writer sends."""
        # On the passthrough path the kernel would not gather such pages.
        return self._open_request.is_writer and not file.backing_id and self._context.data_path is DataPath.PASSTHROUGH

    def _find_way(self, file: OpenFile, direct: bool) -> HandleWay:
        reason = self._limit_reason or Reason.SHARED if direct else None
        is_prepared = self._open_request.is_writer and file.prepared_bytes > 0
        return choose_way(file.tier, self._limit_reason, reason if file.backing_id else file.buffered_reason, is_prepared=is_prepared)

    def _discard_unused(self) -> None:
        """Give back what was waited for and then not needed."""
        if self._pfs_fd >= 0:
            self._files.slow_calls.close(self._pfs_fd, Tier.PFS)
        self._discard_new_file()
        if self._unsealed_content is not None:
            self._reclose(self._unsealed_content)

    def _discard_new_file(self) -> None:
        if self._new_file is not None:
            storage, _, content, fd = self._new_file
            self._new_file = None
            self._files.slow_calls.close(fd, storage.tier)
            contents.set_state(self._db, content, ContentState.DOOMED)

    def _reclose(self, content: int) -> None:
        """Close a content that was unsealed for a writer that failed to open it. Its seal finds its size."""
        with self._files.change() as db:
            known = contents.get_content(db, content)
            if known is None or known.state is not ContentState.OPEN:
                return
            held = contents.get_file_content(db, known.inode)
            if held is None or held.content != content:
                contents.set_state(db, content, ContentState.DOOMED)
            elif self._files.is_open_for_writing(known.inode):
                return
            else:
                row = held.inode
                contents.mark_closed(db, row.id, content, row.size, row.atime_ns, row.mtime_ns)
        self._context.wake_channel.notify(ipc.WORK)

    # --- wait ---------------------------------------------------------------------------------------------------------

    def _open_or_wait(self, storage: TierStorage, content: int, flags: int) -> int:
        """Return a descriptor. Raises MustWait if the mover has a lease, and before each open on the PFS."""
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
            raise MustWait(lambda: killable.sleep(limits.LEASE_POLL_S)) from failure
        except OSError as failure:
            if not health.is_tier_failure(failure):
                raise
            error = failure
            raise MustWait(lambda: self._give_up_copy(content, storage, error)) from failure

    async def _give_up_copy(self, content: int, storage: TierStorage, failure: OSError) -> None:
        """Quarantine a copy on a failing tier. Raises ContentLost if readers cannot get the content elsewhere."""
        tier = storage.tier
        if not lifecycle.is_readable_elsewhere(contents.get_file_record(self._db, content), tier):
            raise self._build_lost_error(f"its only copy is in {tier}, which fails ({health.describe(failure)})") from failure
        log.warning("%s: its copy in %s is given up: %s; another one is read", self._get_path(), tier, health.describe(failure))
        copies.set_copy_state(self._db, content, tier, CopyState.QUARANTINED)

    async def _open_on_pfs(self, storage: TierStorage, content: int, flags: int) -> None:
        def open_file() -> tuple[int, tier_choice.PfsFacts]:
            fd = storage.open(content, flags & ~os.O_NONBLOCK)
            return fd, tier_choice.read_pfs_facts(fd)

        self._pfs_fd, self._pfs_facts = await run_unless_cancelled(Tier.PFS, open_file, lambda found: close_logged(found[0], Tier.PFS))

    def _take_pfs_fd(self) -> int:
        fd, self._pfs_fd = self._pfs_fd, -1
        return fd

    def _take_new_file(self, storage: TierStorage, flags: int, times: tuple[int, int]) -> tuple[int, int]:
        """Return (content, descriptor) of a new file outside RAM. Raises MustWait if there is none yet."""
        if self._new_file is None or self._new_file[:2] != (storage, flags):
            raise MustWait(lambda: self._create_in_thread(storage, flags, times))
        taken, self._new_file = self._new_file, None
        self._undo.append((setattr, self, "_new_file", taken))
        return taken[2:]

    async def _create_in_thread(self, storage: TierStorage, flags: int, times: tuple[int, int]) -> None:
        """Create a file outside RAM for the next attempt. If that fails, it chooses another tier (P10)."""
        self._discard_new_file()
        with self._db.transaction() as db:
            content = contents.insert_reserved_content(db, storage.tier)
        try:
            fd, self._pfs_facts = await tier_choice.create_file(storage, content, flags, times)
            self._new_file = storage, flags, content, fd
        except BaseException as failure:
            contents.set_state(self._db, content, ContentState.DOOMED)
            if not isinstance(failure, (OSError, CkptfsError)):
                raise
            log.debug("%s cannot take a file: %s", storage.tier, failure)
            self._refusing_tiers.add(storage.tier)

    async def _set_times_on_nvme(self, storage: TierStorage, content: int, row: Inode, seen_ns: int) -> None:
        """Set the times of a file before the next attempt.

        If its mtime is not `seen_ns` any more, another program writes it: leave them.
        """

        def set_times() -> None:
            with disk.closing(storage.open(content)) as fd:
                if os.fstat(fd).st_mtime_ns == seen_ns:
                    set_inode_times(fd, row)

        await run_in_thread(storage.tier, set_times)
        self._dated = content, row.atime_ns, row.mtime_ns

    async def _mark_unsealed(self, held: FileContent, content: int, tier: Tier) -> None:
        with self._db.transaction() as db:
            contents.mark_open(db, held.inode.id, content, tier)
        self._unsealed_content = content

    async def _begin_successor(self, inode: int, content: int, storage: TierStorage) -> None:
        try:
            self._unsealed_content = await separation.begin_successor(self._context, inode, content, storage)
        except FileNotFoundError:
            await self._delete_missing_copy(content, storage.tier)

    async def _wait_and_refresh(self) -> None:
        await trio.sleep(limits.STORE_PUBLISHED_POLL_S)
        await self._context.shared_namespace.refresh_inode(self._open_request.inode)

    async def _delete_missing_copy(self, content: int, tier: Tier) -> None:
        """Delete the row of a copy whose file does not exist. There is none if a successor has taken the file."""
        if copies.delete_copy(self._db, content, tier):
            log.error("%s: the file of content %d is missing in %s; this copy no longer counts", self._get_path(), content, tier)

    async def _request_fetch(self) -> None:
        """Request a fetch. A reader waits for the beginning of the file, at its second request for all of it."""
        is_writer, inode = self._open_request.is_writer, self._open_request.inode
        argument, accepts_begun = mover_requests.NEEDS_COPY if is_writer else "", not is_writer and not self._has_begun_fetch
        result = await self._context.mover_client.request(
            mover_requests.FETCH, inode, argument, timeout_s=limits.FETCH_STALL_S, accepts_begun=accepts_begun
        )
        self._has_begun_fetch |= result == mover_requests.READABLE
        if result == mover_requests.DIRECT:
            # Without a descriptor, it was replaced since the mover looked: the next attempt asks again.
            self._pfs_fd = await open_pfs_file(self._db, self._context.config.pfs, inode)

    async def _search_other_nodes(self) -> None:
        """Ask other nodes for a copy: one may have it, or may be about to restore the previous generation."""
        self._has_searched = True
        try:
            await self._request_fetch()
        except (OSError, TimedOut) as failure:
            if failure.errno not in {errno.EIO, errno.ETIMEDOUT}:
                raise

    # --- failures -----------------------------------------------------------------------------------------------------

    def _get_storage(self, tier: Tier) -> TierStorage:
        if tier not in self._context.tiers:
            raise self._build_lost_error(f"its content is in {tier}, which is not available (see `ckptfs status`)")
        return self._context.tiers[tier]

    def _build_lost_error(self, cause: str) -> ContentLost | OSError:
        if not contents.has_name(self._db, self._open_request.inode):
            return posix_error(errno.ESTALE)  # Another node removed its name since the lookup: the kernel looks it up again.
        path = self._get_path()
        log.error("%s: cannot be opened: %s", path, cause)
        return ContentLost(f"{path}: {cause}")

    def _get_path(self) -> str:
        return inodes.get_shown_path(self._db, self._open_request.inode)


def _truncate_content(storage: TierStorage, content: int) -> None:
    with disk.closing(storage.open(content, os.O_RDWR)) as fd:
        os.ftruncate(fd, 0)
