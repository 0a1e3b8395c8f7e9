"""Wires the mount process: the catalog, the tiers, the session and its operations. Read `run` and `_serve` as the table of contents.

Invariant: READY is sent before the first request is read, so a child that died without it has served nobody.
If we die here: the supervisor keeps the connection and starts the next one, which is told that it resumes.
"""

import contextlib
import logging
import queue
import socket

import trio

from ckptfs import limits
from ckptfs.catalog.adoption import get_instance_id
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing.touching import DirtyKeyTracker
from ckptfs.config import Config
from ckptfs.model import DataPath
from ckptfs.tiers import adoption
from ckptfs.tiers.place import Places
from ckptfs_daemon import arriving, bells, cluster_store, descriptors, door, lifeline
from ckptfs_daemon.asking import Asking
from ckptfs_daemon.bells import Bell
from ckptfs_daemon.context import Context
from ckptfs_daemon.file_operations import FileOperations
from ckptfs_daemon.inherited import READY, Inherited
from ckptfs_daemon.latest_operations import LatestOperations, unchangeable
from ckptfs_daemon.open_files import OpenFiles
from ckptfs_daemon.passthrough import Passthrough
from ckptfs_daemon.quick import QuickOperations
from ckptfs_daemon.sharing import Sharing
from ckptfs_daemon.standing_in import StandingIn
from ckptfs_daemon.walking import Walks

import pyfuse3  # isort: skip

log = logging.getLogger(__name__)


class Operations(FileOperations, LatestOperations, QuickOperations, pyfuse3.Operations):  # type: ignore[misc]
    """Every handler of the mount."""

    create = unchangeable(FileOperations.create)  # type: ignore[assignment]

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context


def run(inherited: Inherited) -> int:
    """Serve the connection; 0 when it was unmounted."""
    descriptors.raise_descriptor_limit()
    operations = Operations(_wire(inherited))
    if operations.context.sharing is not None:
        operations.context.sharing.serve(operations.lost_names)
        operations.walks = Walks(operations.context.sharing)
    operations.serve_extras()
    operations.serve_quick()
    door.open_session(operations, inherited)
    trio.run(_serve, inherited, operations)
    door.close_session()
    return 0


def _wire(inherited: Inherited) -> Context:
    config = inherited.config
    touching = None if config.cluster is None else DirtyKeyTracker()
    db = Database(
        config.state / "catalog.db", journalled=config.pfs is not None, defer_checkpoints=True, clustered=touching is not None, hooks=touching
    )
    places = Places.adopt(config, get_instance_id(db))
    adoption.adopt(db, places)
    bell = Bell(inherited.bell)
    passthrough = Passthrough(inherited.fuse_fd) if inherited.data_path is DataPath.PASSTHROUGH else None
    open_files = OpenFiles(db, places, passthrough, bell, times_are_kernels=passthrough is None and touching is None)
    sharing, standing_in = (None, None) if touching is None else _share(config, db, open_files, touching)
    return Context(
        config=config,
        data_path=inherited.data_path,
        db=db,
        places=places,
        bell=bell,
        asking=Asking(db, bell),
        open_files=open_files,
        sharing=sharing,
        standing_in=standing_in,
    )


def _share(config: Config, db: Database, open_files: OpenFiles, touching: DirtyKeyTracker) -> tuple[Sharing, StandingIn]:
    store = cluster_store.open_store(config)
    sharing = Sharing(db, store, config.node, open_files.is_written, open_files.places.also)
    touching.on_dirty = sharing.touched
    return sharing, StandingIn(lambda lease: trio.to_thread.run_sync(store.keep_alive, lease, abandon_on_cancel=True))


async def _serve(inherited: Inherited, operations: Operations) -> None:
    context = operations.context
    async with trio.open_nursery() as nursery:
        # First of all: files that are open on a PFS which hangs take their time to be found again.
        nursery.start_soon(lifeline.send_alive, inherited.link, name="alive")
        nursery.start_soon(_obey, inherited.link, name="link")
        await context.open_files.start(inherited.resumed)
        arriving.resume(context)
        # The process before this one may have died between a commit and its hint.
        context.bell.ring(bells.WORK)
        if context.sharing is not None:
            nursery.start_soon(context.sharing.run, name="sharing")
            nursery.start_soon(context.sharing.tend, name="sharing's figures")
        if context.standing_in is not None:
            nursery.start_soon(context.standing_in.run, name="standing in")
        operations.start(nursery)
        nursery.start_soon(_listen, context, name="bell")
        nursery.start_soon(operations.reap_forgotten, name="orphans")
        inherited.link.send(READY)
        await door.serve()
        # The kernel drops the releases that it had not sent when it was unmounted.
        context.open_files.end_all()
        if context.sharing is not None:
            # Nobody does that after us, and what the others were not told of is not brought to safety either.
            with trio.move_on_after(limits.ETCD_WAIT_S):
                await context.sharing.published()
        nursery.cancel_scope.cancel()


async def _listen(context: Context) -> None:
    """Route the mover's messages: answers to whoever waits, invalidations to the kernel.

    The kernel may hold a lock that a request which waits for us needs, so invalidations happen in a thread of their own, in order.
    """
    invalidations: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_invalidate_all, invalidations)
        try:
            async for message in context.bell.messages():
                if message == bells.WANTS:
                    context.asking.answered()
                elif message == bells.TOUCHED:
                    if context.sharing is not None:
                        context.sharing.touched()
                elif message[:1] == bells.LEASE:
                    if context.standing_in is not None:
                        context.standing_in.kept(bells.parse(message)[1])
                else:
                    invalidations.put(message)
        finally:
            invalidations.put(None)


async def _invalidate_all(invalidations: "queue.SimpleQueue[bytes | None]") -> None:
    def work() -> None:
        while (message := invalidations.get()) is not None:
            _invalidate(message)

    await trio.to_thread.run_sync(work, abandon_on_cancel=True)


def _invalidate(message: bytes) -> None:
    """Make the kernel forget what the mover changed; what it does not know it need not forget."""
    kind, number, name = bells.parse(message)
    with contextlib.suppress(OSError):
        if kind == bells.INODE:
            pyfuse3.invalidate_inode(pyfuse3.InodeT(number))
        elif kind == bells.ENTRY:
            pyfuse3.invalidate_entry(pyfuse3.InodeT(number), name)


async def _obey(link: socket.socket) -> None:
    """End at the supervisor's word."""
    await lifeline.told_to_stop(link)
    door.stop()
