"""Wires the mount process: the catalog, the tiers, the session and its operations. Read `run` and `_serve` as the table of contents.

Invariant: READY is sent before the first request is read, so a child that died without it has served nobody.
If we die here: the supervisor keeps the connection and starts the next one, which is told that it resumes.
"""

import contextlib
import logging
import queue
import socket

import trio

from ckptfs import limits, server_limits
from ckptfs.catalog.database import Database
from ckptfs.catalog.journal import get_instance_id
from ckptfs.coherence.key_state import DirtyKeyTracker
from ckptfs.config import Config
from ckptfs.model import DataPath
from ckptfs.store import etcd
from ckptfs.tiers import storage
from ckptfs.tiers.storage import Tiers
from ckptfs_daemon import ipc
from ckptfs_daemon.fuse import session
from ckptfs_daemon.fuse.kernel import Passthrough
from ckptfs_daemon.ipc import READY, ChildSetup, WakeChannel
from ckptfs_daemon.mount import open_file
from ckptfs_daemon.mount.cluster_recovery import StandbyLease
from ckptfs_daemon.mount.context import MountContext
from ckptfs_daemon.mount.file_handlers import FileHandlers
from ckptfs_daemon.mount.latest_tree import LatestTree, read_only
from ckptfs_daemon.mount.lookups import LookupPrefetch
from ckptfs_daemon.mount.mover_client import MoverClient
from ckptfs_daemon.mount.open_file_table import OpenFileTable
from ckptfs_daemon.mount.shared_namespace import SharedNamespace
from ckptfs_daemon.mount.shim_handlers import FastPathHandlers

import pyfuse3  # isort: skip

log = logging.getLogger(__name__)


class Operations(FileHandlers, LatestTree, FastPathHandlers, pyfuse3.Operations):  # type: ignore[misc]
    """Every handler of the mount."""

    create = read_only(FileHandlers.create)  # type: ignore[assignment]

    def __init__(self, context: MountContext) -> None:
        super().__init__()
        self.context = context


def run(setup: ChildSetup) -> int:
    """Serve the connection; 0 when it was unmounted."""
    server_limits.raise_descriptor_limit()
    operations = Operations(_wire(setup))
    if operations.context.shared_namespace is not None:
        operations.context.shared_namespace.set_nameless_callback(operations.add_orphans)
        operations.prefetch = LookupPrefetch(operations.context.shared_namespace)
    operations.register_raw_callbacks()
    operations.register_fast_path()
    session.open_session(operations, setup)
    trio.run(_serve, setup, operations)
    session.close_session()
    return 0


def _wire(setup: ChildSetup) -> MountContext:
    config = setup.config
    touching = None if config.cluster is None else DirtyKeyTracker()
    db = Database(
        config.state / "catalog.db",
        journalled=config.pfs is not None,
        defer_checkpoints=True,
        clustered=touching is not None,
        hooks=touching,
    )
    tiers = Tiers.from_config(config, get_instance_id(db))
    storage.adopt_tiers(db, tiers)
    wake_channel = WakeChannel(setup.wake_socket)
    passthrough = Passthrough(setup.fuse_fd) if setup.data_path is DataPath.PASSTHROUGH else None
    open_files = OpenFileTable(db, tiers, passthrough, wake_channel, kernel_owns_times=passthrough is None and touching is None)
    shared_namespace, standby_lease = (None, None) if touching is None else _build_shared_namespace(config, db, open_files, touching)
    return MountContext(
        config=config,
        data_path=setup.data_path,
        db=db,
        tiers=tiers,
        wake_channel=wake_channel,
        mover_client=MoverClient(db, wake_channel),
        open_files=open_files,
        shared_namespace=shared_namespace,
        standby_lease=standby_lease,
    )


def _build_shared_namespace(
    config: Config, db: Database, open_files: OpenFileTable, touching: DirtyKeyTracker
) -> tuple[SharedNamespace, StandbyLease]:
    store = etcd.open_store(config)
    shared_namespace = SharedNamespace(db, store, config.node, open_files.is_open_for_writing, open_files.tiers.link)
    touching.on_dirty = shared_namespace.notify_dirty
    return shared_namespace, StandbyLease(lambda lease: trio.to_thread.run_sync(store.keep_alive, lease, abandon_on_cancel=True))


async def _serve(setup: ChildSetup, operations: Operations) -> None:
    context = operations.context
    async with trio.open_nursery() as nursery:
        # First of all: files that are open on a PFS which hangs take their time to be found again.
        nursery.start_soon(ipc.send_heartbeats, setup.link, name="alive")
        nursery.start_soon(_stop_on_request, setup.link, name="link")
        await context.open_files.start(setup.is_resumed)
        open_file.resume_fetches(context)
        # The process before this one may have died between a commit and its hint.
        context.wake_channel.notify(ipc.WORK)
        if context.shared_namespace is not None:
            nursery.start_soon(context.shared_namespace.run, name="sharing")
            nursery.start_soon(context.shared_namespace.report_loop, name="sharing's figures")
        if context.standby_lease is not None:
            nursery.start_soon(context.standby_lease.run, name="standing in")
        operations.start_tasks(nursery)
        nursery.start_soon(_route_messages, context, name="bell")
        nursery.start_soon(operations.run_orphan_deletion, name="orphans")
        setup.link.send(READY)
        await session.serve()
        # The kernel drops the releases that it had not sent when it was unmounted.
        context.open_files.release_all()
        if context.shared_namespace is not None:
            # Nobody does that after us, and what the others were not told of is not brought to safety either.
            with trio.move_on_after(limits.ETCD_WAIT_S):
                await context.shared_namespace.wait_published()
        nursery.cancel_scope.cancel()


async def _route_messages(context: MountContext) -> None:
    """Route the mover's messages: answers to whoever waits, invalidations to the kernel.

    The kernel may hold a lock that a request which waits for us needs, so invalidations happen in a thread of their own, in order.
    """
    invalidations: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run_invalidations, invalidations)
        try:
            async for message in context.wake_channel.receive_messages():
                if message == ipc.REPLIES:
                    context.mover_client.wake_waiters()
                elif message == ipc.DIRTY_KEYS:
                    if context.shared_namespace is not None:
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
    """Make the kernel forget what the mover changed; what it does not know it need not forget."""
    kind, number, name = ipc.parse_message(message)
    with contextlib.suppress(OSError):
        if kind == ipc.INVALIDATE_INODE:
            pyfuse3.invalidate_inode(pyfuse3.InodeT(number))
        elif kind == ipc.INVALIDATE_ENTRY:
            pyfuse3.invalidate_entry(pyfuse3.InodeT(number), name)


async def _stop_on_request(link: socket.socket) -> None:
    """End at the supervisor's word."""
    await ipc.wait_for_stop(link)
    session.stop()
