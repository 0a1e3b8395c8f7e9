"""The mount process: its services, its handlers and its tasks.

`run`, `_build_context` and `_serve` are the table of contents.

Invariants:
- READY is sent before the first request is read, so a child that died before READY has served nothing.

Crash safety: the supervisor keeps the connection and starts the next mount process with `is_resumed`.
"""

import contextlib
import functools
import logging
import queue
import socket
from collections.abc import Awaitable, Callable

import trio

from ckptfs import limits, server_limits
from ckptfs.catalog import copies, inodes, pfs_hold, set_members
from ckptfs.catalog.database import Database
from ckptfs.catalog.journal import get_instance_id
from ckptfs.cgroups import MemoryLimits
from ckptfs.coherence.key_state import DirtyKeyTracker
from ckptfs.errors import CATALOG_FAILURES
from ckptfs.model import DataPath, Tier
from ckptfs.series.expiry import build_hold_check
from ckptfs.series.rules import install_rules
from ckptfs.store import etcd
from ckptfs.tiers import storage
from ckptfs.tiers.storage import Tiers
from ckptfs_daemon import ipc
from ckptfs_daemon.fuse import killable, session
from ckptfs_daemon.fuse.connection import restore
from ckptfs_daemon.fuse.kernel import Passthrough
from ckptfs_daemon.ipc import ChildSetup, WakeChannel
from ckptfs_daemon.mount.cluster.cluster_recovery import StandbyLease
from ckptfs_daemon.mount.cluster.lookups import LookupPrefetch
from ckptfs_daemon.mount.cluster.shared_namespace import LocalNamespace, SharedNamespace
from ckptfs_daemon.mount.context import ChangeRunner, MountContext
from ckptfs_daemon.mount.handlers.attribute_handlers import AttributeHandlers
from ckptfs_daemon.mount.handlers.file_handlers import FileHandlers
from ckptfs_daemon.mount.handlers.history_tree import HistoryTree
from ckptfs_daemon.mount.handlers.latest_tree import LatestTree
from ckptfs_daemon.mount.handlers.namespace_handlers import DirectoryHandlers, NamespaceHandlers, OrphanTracker
from ckptfs_daemon.mount.handlers.shim_handlers import ShimHandlers
from ckptfs_daemon.mount.open_files.handle_ways import run_reports
from ckptfs_daemon.mount.open_files.mover_client import MoverClient
from ckptfs_daemon.mount.open_files.open_file import resume_fetches
from ckptfs_daemon.mount.open_files.open_file_table import OpenFileTable
from ckptfs_daemon.mount.operations import Operations, ReadOnlyOperations
from ckptfs_daemon.mount.sets.member_reader import MountMemberReader
from ckptfs_daemon.mount.sets.set_tracker import SetTracker

import pyfuse3  # isort: skip

log = logging.getLogger(__name__)


def run(setup: ChildSetup) -> int:
    """Serve the connection until it is unmounted. Returns 0."""
    server_limits.raise_descriptor_limit()
    install_rules(setup.config.series)
    connection = restore(setup.fuse_fd, setup.table_fd)
    context = _build_context(setup, connection.data_path)
    changes, orphans = ChangeRunner(context), OrphanTracker(context)
    reader = MountMemberReader(context, changes)
    files = FileHandlers(context, changes)
    tracker = SetTracker(context, changes, reader, orphans.add_unlinked)
    files.guard_writer = tracker.guard_writer
    attributes = AttributeHandlers(context, changes, files, reader, tracker.wake)
    names, directories = NamespaceHandlers(context, changes, orphans, tracker), DirectoryHandlers(context, changes)
    history = HistoryTree(context, changes, files, attributes)
    latest = LatestTree(context, reader, history)
    shim = ShimHandlers(context, files, latest)
    context.shared_namespace.on_nameless = orphans.add_unlinked
    shim.register()
    operations = ReadOnlyOperations if context.config.is_read_only else Operations
    handlers = operations(names, directories, attributes, files, orphans, latest, history)
    session.open_session(handlers, connection, is_clustered=context.shared_namespace.is_shared)
    trio.run(_serve, setup, context, shim, orphans, tracker)
    pyfuse3.close(unmount=False)  # The connection lives as long as any process holds its descriptor.
    return 0


def _build_context(setup: ChildSetup, data_path: DataPath) -> MountContext:
    config = setup.config
    dirty_keys = None if config.cluster is None else DirtyKeyTracker()
    is_clustered = dirty_keys is not None
    db = Database(
        config.state / "catalog.db", journalled=config.pfs is not None, defer_checkpoints=True, clustered=is_clustered, hooks=dirty_keys,
        holds_back=build_hold_check(config.retention),
    )  # fmt: skip
    tiers = Tiers.from_config(config, get_instance_id(db), lambda: copies.get_tier_uuid(db, Tier.PFS))
    storage.adopt_tiers(db, tiers)
    with db.transaction():
        pfs_hold.release_misplaced(db)
    wake_channel = WakeChannel(setup.wake_socket)
    passthrough = Passthrough(setup.fuse_fd) if data_path is DataPath.PASSTHROUGH else None
    open_files = OpenFileTable(db, tiers, passthrough, wake_channel, kernel_owns_times=passthrough is None and not is_clustered)
    shared_namespace, prefetch, standby_lease = LocalNamespace(), None, None
    if dirty_keys is not None:
        store = etcd.open_store(config)
        shared_namespace = SharedNamespace(db, store, config.node, is_member=not config.is_read_only)
        dirty_keys.on_dirty = shared_namespace.notify_dirty
        prefetch = LookupPrefetch(shared_namespace)
        standby_lease = StandbyLease(lambda lease: trio.to_thread.run_sync(store.keep_alive, lease, abandon_on_cancel=True))
    return MountContext(
        config=config,
        data_path=data_path,
        db=db,
        tiers=tiers,
        wake_channel=wake_channel,
        mover_client=MoverClient(db, wake_channel),
        open_files=open_files,
        memory_limits=MemoryLimits(),
        shared_namespace=shared_namespace,
        prefetch=prefetch,
        standby_lease=standby_lease,
    )


async def _serve(setup: ChildSetup, context: MountContext, shim: ShimHandlers, orphans: OrphanTracker, tracker: SetTracker) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ipc.send_heartbeats, setup.link, name="heartbeats")
        nursery.start_soon(_stop_on_request, setup.link, name="link")
        nursery.start_soon(context.open_files.slow_calls.run, name="slow calls")
        await trio.lowlevel.checkpoint()
        await context.open_files.start(setup.is_resumed)
        with context.db.transaction():
            set_members.delete_own_claims(context.db)
        resume_fetches(context.open_files.by_inode.values(), context.db, context.tiers, context.mover_client)
        # The previous process may have died between a commit and its wake-up.
        context.wake_channel.notify(ipc.WORK)
        nursery.start_soon(outlast, context.shared_namespace.run, name="shared namespace")
        nursery.start_soon(outlast, context.shared_namespace.follow_store, name="store of the cluster")
        if context.standby_lease is not None:
            nursery.start_soon(context.standby_lease.run, name="standby lease")
        shim.start_tasks(nursery)
        nursery.start_soon(killable.end_waits, name="waits of killed callers")
        nursery.start_soon(_route_messages, context, tracker, name="messages")
        nursery.start_soon(outlast, orphans.run_deletion, name="orphans")
        if context.open_files.kernel_owns_times:
            list_names = functools.partial(inodes.list_names, context.db)
            forget = functools.partial(context.unsent_times.run, list_names, pyfuse3.invalidate_entry)
            nursery.start_soon(outlast, forget, name="unsent times")
        if not context.config.is_read_only:
            nursery.start_soon(tracker.run, name="checkpoint sets")
        reports = functools.partial(run_reports, context.db, context.open_files.list_ways)
        nursery.start_soon(outlast, reports, name="report of handles")
        ipc.announce_ready(setup.link)
        await session.serve()
        # At unmount the kernel drops the releases that it has not sent yet.
        await context.open_files.release_all()
        # No later process publishes the changes of this one, and unpublished files get no copies.
        with trio.move_on_after(limits.ETCD_WAIT_S):
            await context.shared_namespace.wait_published()
        nursery.cancel_scope.cancel()


async def outlast(task: Callable[[], Awaitable[None]]) -> None:
    """Run a task, and run it again if it ends because the disk of the catalog is full or fails."""
    while True:
        try:
            return await task()
        except CATALOG_FAILURES as failure:
            log.warning("%s; trying again", failure)
            await trio.sleep(limits.RETRY_LAST_S)


async def _route_messages(context: MountContext, tracker: SetTracker) -> None:
    """Route the mover's messages: replies to the waiting handlers, invalidations to the kernel.

    Invalidations run in order in their own thread: the kernel may hold a lock that a request needs which waits for this process.
    """
    invalidations: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run_invalidations, invalidations)
        try:
            async for message in context.wake_channel.receive_messages():
                if message == ipc.REPLIES:
                    context.mover_client.wake_waiters()
                elif message == ipc.SEALED:
                    tracker.wake()
                elif message == ipc.DIRTY_KEYS:
                    context.shared_namespace.notify_dirty()
                elif message[:1] == ipc.LEASE_RENEWED:
                    if context.standby_lease is not None:
                        context.standby_lease.record_renewal(ipc.parse_message(message)[1])
                else:
                    invalidations.put(message)
        finally:
            invalidations.put(None)


async def _run_invalidations(invalidations: "queue.SimpleQueue[bytes | None]") -> None:
    def work() -> None:
        while (message := invalidations.get()) is not None:
            _invalidate(message)

    await trio.to_thread.run_sync(work, abandon_on_cancel=True)


def _invalidate(message: bytes) -> None:
    """Invalidate what the mover changed in the kernel's caches, if it is there."""
    kind, number, name = ipc.parse_message(message)
    with contextlib.suppress(OSError):
        if kind == ipc.INVALIDATE_INODE:
            pyfuse3.invalidate_inode(pyfuse3.InodeT(number))
        elif kind == ipc.INVALIDATE_ENTRY:
            pyfuse3.invalidate_entry(pyfuse3.InodeT(number), name)


async def _stop_on_request(link: socket.socket) -> None:
    await ipc.wait_for_stop(link)
    pyfuse3.terminate()
