"""How the mount process reads the members of a series: the catalog, and the beginnings and ends of files.

Bytes come from the copy in RAM or NVMe, else from the PFS, else through the mover from another node. All reads run in worker threads, and
none fetches a large file. What a sealed generation shows never changes, so it is remembered; a file that only the PFS has is opened each
time, because the PFS may be gone. A PFS that does not answer is left alone for a while.
"""

import errno
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar, cast

import trio

from ckptfs import lifecycle, limits
from ckptfs.catalog import copies, mover_requests, namespace, summary
from ckptfs.catalog.copies import FetchState
from ckptfs.catalog.namespace import NotImported
from ckptfs.errors import CkptfsError, posix_error
from ckptfs.model import ContentState, CopyState, Inode, Tier
from ckptfs.series import Listing, MemberFile, file_formats, find_incomplete_reason
from ckptfs.series.file_formats import FileFormat
from ckptfs.series.pickle_scan import ReadRange
from ckptfs.tiers import pfs_tree
from ckptfs_daemon.mount.context import ChangeRunner, MountContext
from ckptfs_daemon.mount.open_file import run_on_pfs

Result = TypeVar("Result")


class MountMemberReader:
    """`series.MemberReader` over inode numbers. Belongs to the trio thread."""

    def __init__(self, context: MountContext, changes: ChangeRunner) -> None:
        self._context, self._changes = context, changes
        self._known: OrderedDict[tuple[int, int, bytes], FileFormat] = OrderedDict()
        self._pfs_silent_until_s = float("-inf")

    # --- the catalog --------------------------------------------------------------------------------------------------

    async def list_directory(self, directory: int) -> dict[bytes, Inode]:
        """Return the entries of a directory of the mount."""
        shared_namespace = self._context.shared_namespace
        if shared_namespace is not None:
            await shared_namespace.refresh_inode(directory)
            await shared_namespace.refresh_directory(directory)
        if not self._context.get_inode(directory).is_imported:
            await self._changes.request_scan(directory, must_succeed=True)
        return {entry.name: inode for entry, inode in namespace.iterate_entries(self._context.db, directory)}

    async def lookup_child(self, directory: int, name: bytes) -> Inode:
        """Return the inode of a name. Raises FileNotFoundError."""
        if self._context.shared_namespace is not None:
            await self._context.shared_namespace.refresh_name(directory, name)
        try:
            return namespace.lookup(self._context.db, directory, name)
        except NotImported:
            await self._changes.request_scan(directory, must_succeed=True)
            return namespace.lookup(self._context.db, directory, name)

    async def list_files(self, entry: int) -> Listing[int]:
        """List a file or directory, up to its first incomplete file."""
        await self._changes.refresh_inode(entry)
        inode = self._context.get_inode(entry)
        inside = await self.list_directory(entry) if inode.is_directory else {b"": inode}
        files: dict[bytes, tuple[MemberFile, int]] = {}
        for name, child in inside.items():
            # A large member must not keep other requests waiting.
            await trio.lowlevel.checkpoint()
            if child.is_file:
                files[name] = await self._load_member_file(child.id), child.id
                if files[name][0].incomplete_reason:
                    break
        return Listing(files, {name: child.id for name, child in inside.items() if child.is_directory})

    async def _load_member_file(self, number: int) -> MemberFile:
        await self._changes.refresh_inode(number)
        if self._context.shared_namespace is not None:
            await self._context.shared_namespace.refresh_copies(number)
        inode, record = self._context.get_inode(number), summary.load_file_record(self._context.db, number)
        reason = find_incomplete_reason(record, inode.size)
        return MemberFile(inode.size, lifecycle.level(record), reason, inode.mtime_ns, inode.ctime_ns)

    async def compute(self, act: Callable[[], Result]) -> Result:
        """Return `act()`, from a thread: other requests go on, however many names there are."""
        return await trio.to_thread.run_sync(act)

    async def wait(self, seconds: float) -> None:
        """Wait; other requests go on."""
        await trio.sleep(seconds)

    def get_now_ns(self) -> int:
        """Return the time by the clock of this node."""
        return time.time_ns()

    # --- bytes --------------------------------------------------------------------------------------------------------

    async def inspect(self, entry: int, name: bytes, file: MemberFile) -> FileFormat:
        """Return what a file shows of itself. Raises OSError if it cannot be read."""
        state = copies.load_fetch_state(self._context.db, entry)
        if state is None:
            raise posix_error(errno.ENOENT)
        if not file.size:
            return file_formats.inspect(name, 0, _read_nothing)
        is_elsewhere = not (state.has_local_copy or state.holders)
        key = (state.content.id, state.content.generation, name) if state.content is not None else (0, 0, b"")
        if key in self._known and not is_elsewhere:
            self._known.move_to_end(key)
            return self._known[key]
        found = await self._inspect(state, name)
        if key[0]:
            self._known[key] = found
            if len(self._known) > limits.INSPECTED_FILES_MAX:
                self._known.popitem(last=False)
        return found

    async def _inspect(self, state: FetchState, name: bytes) -> FileFormat:
        def act(size: int, read: ReadRange) -> FileFormat:
            return file_formats.inspect(name, size, read)

        try:
            return await self._read_here(state, act)
        except OSError:
            if not state.holders or state.has_local_copy:
                raise
        said = await self._ask_mover(mover_requests.INSPECT, state.inode)
        return FileFormat.decode(said.encode())

    async def examine(self, entry: int, file: MemberFile, act: Callable[[int, ReadRange], Result]) -> Result:
        """Return `act(size, read)`. A file that only other nodes have is fetched. Raises OSError if it cannot be read."""
        state = copies.load_fetch_state(self._context.db, entry)
        if state is None:
            raise posix_error(errno.ENOENT)
        try:
            return await self._read_here(state, act)
        except OSError:
            if not state.holders or state.has_local_copy or file.size > limits.FETCH_WHOLE_BYTES:
                raise
        await self._ask_mover(mover_requests.FETCH, entry, mover_requests.FOR_WRITING)
        return await self._read_here(copies.load_fetch_state(self._context.db, entry) or state, act)

    async def _ask_mover(self, kind: str, inode: int, argument: str = "") -> str:
        try:
            return await self._context.mover_client.request(kind, inode, argument, timeout_s=limits.INSPECT_WAIT_S)
        except CkptfsError as failure:
            raise posix_error(failure.errno, str(failure)) from failure

    async def _read_here(self, state: FetchState, act: Callable[[int, ReadRange], Result]) -> Result:
        """Run `act` on the copy in a tier of this node, or on the file of the PFS. Raises OSError if there is none."""
        content, pfs = state.content, self._context.config.pfs
        tiers = [copy.tier for copy in state.copies if copy.state is CopyState.GOOD and copy.tier in self._context.tiers]
        if content is not None and tiers:
            number, storage = content.id, self._context.tiers[min(tiers, key=list(Tier).index)]
            if storage.tier is Tier.PFS:
                return await self._read_on_pfs(lambda: _run_on(storage.open(number), act))
            return await trio.to_thread.run_sync(lambda: _run_on(storage.open(number), act))
        if pfs is not None and state.published is not None and (content is None or content.state is not ContentState.OPEN):
            return await self._read_on_pfs(lambda: _run_on(pfs_tree.open_published(pfs, state), act))
        raise posix_error(errno.ENODATA if state.holders else errno.EIO)

    async def _read_on_pfs(self, act: Callable[[], Result]) -> Result:
        """Run `act` in a thread that may hang as long as the PFS does. Raises OSError, also if the PFS does not answer in time."""
        if trio.current_time() < self._pfs_silent_until_s:
            raise posix_error(errno.ETIMEDOUT)
        found: Any = None
        with trio.move_on_after(limits.INSPECT_WAIT_S) as scope:
            try:
                found = await run_on_pfs(act)
            except CkptfsError as failure:
                raise posix_error(failure.errno, str(failure)) from failure
        if scope.cancelled_caught:
            self._pfs_silent_until_s = trio.current_time() + limits.INSPECT_REST_S
            raise posix_error(errno.ETIMEDOUT)
        return cast(Result, found)


def _run_on(fd: int, act: Callable[[int, ReadRange], Result]) -> Result:
    """Run `act` on a descriptor, and close it."""
    try:
        return act(os.fstat(fd).st_size, lambda offset, length: os.pread(fd, length, offset))
    finally:
        os.close(fd)


def _read_nothing(offset: int, length: int) -> bytes:
    return b""
