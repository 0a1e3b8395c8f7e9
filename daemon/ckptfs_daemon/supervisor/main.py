"""The start and end of a daemon: configuration, state directory, lock, catalog, RAM tier, connection.

Everything that can be refused is refused before anything is mounted, with one sentence.

Crash safety: each step finds what an earlier start left.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

from ckptfs import disk, limits
from ckptfs.bounded_waits import run_in_time
from ckptfs.catalog import copies, database, identity, journal, namespace, summary
from ckptfs.catalog.database import Database
from ckptfs.clique import certificates
from ckptfs.config import Config, load, parse_options
from ckptfs.errors import CATALOG_FAILURES, InvalidArgument, TimedOut
from ckptfs.event_log import EventKind
from ckptfs.model import Tier
from ckptfs.mount_record import Leftovers
from ckptfs.tiers import pfs_sync
from ckptfs.tiers.pfs_identity import require_pfs_of_catalog
from ckptfs.tiers.storage import Tiers
from ckptfs_daemon import logs
from ckptfs_daemon.event_writer import events
from ckptfs_daemon.fuse import connection, shim_build
from ckptfs_daemon.fuse.connection import Connection
from ckptfs_daemon.ipc import ServeRole
from ckptfs_daemon.supervisor import children, handover, state_directory
from ckptfs_daemon.supervisor.guarded_mountpoint import GuardedMountpoint
from ckptfs_daemon.supervisor.handover import Handed
from ckptfs_daemon.supervisor.state_directory import ReadyPipe
from ckptfs_daemon.supervisor.supervisor import Supervisor
from ckptfs_daemon.supervisor.systemd import Systemd

log = logging.getLogger(__name__)

OOM_SCORE = -900


def run_daemon(name: str, mountpoint: Path | None, options: str, ready_pipe: ReadyPipe, load_roles: Callable[[], ServeRole]) -> int:
    """Serve until unmounted or replaced; return the exit code. Raises CkptfsError or OSError.

    `load_roles` imports the modules that a child needs, and returns what it runs.
    """
    config = load(name, mountpoint, parse_options(options))
    logs.configure("supervisor", config.log_level)
    logs.set_process_name("ckptfsd")
    systemd = Systemd()
    handed = handover.take()
    shim_build.ensure()
    lock_fd = _prepare_state(config, handed)
    events.open(config.state, node=config.node, mount=config.name)
    ended_cleanly = is_left = False
    try:
        serve_role = load_roles()
        guarded = GuardedMountpoint(config, options, systemd.unit)
        fuse_connection, resumed = _resume_or_connect(config, handed, guarded)
        if not resumed:
            systemd.store_descriptors(fuse_connection.fd, fuse_connection.table_fd)
        _lower_oom_score()
        arguments = [name, *([str(mountpoint)] if mountpoint else []), *(["-o", options] if options else [])]
        new_supervisor = functools.partial(
            Supervisor, config, fuse_connection, systemd=systemd, ready_pipe=ready_pipe, arguments=arguments, serve_role=serve_role
        )
        kept = Handed(fuse_connection.fd, fuse_connection.table_fd, lock_fd)
        supervisor = _serve(new_supervisor, kept, arguments, systemd, is_resumed=resumed)
        is_left, ended_cleanly, code = supervisor.is_leaving, supervisor.ended_cleanly, supervisor.exit_code
        if is_left:
            return code
        _delete_forgotten(config)
        leftovers = _load_leftovers(config)
        guarded.end(leftovers, is_on_purpose=code == 0 and not supervisor.was_stopped)
        state_directory.delete_process_files(config, is_forgotten=leftovers.is_nothing)
        return code
    finally:
        if not is_left:
            _release_ram_tier(config, ended_cleanly)
            events.record(EventKind.ENDED, clean=ended_cleanly)
        log.info("ended")
        events.close()
        os.close(lock_fd)


def _serve(
    new_supervisor: Callable[..., Supervisor], kept: Handed, arguments: list[str], systemd: Systemd, *, is_resumed: bool
) -> Supervisor:
    """Run a supervisor to its end. Returns it, unless its successor takes its place here."""
    while True:
        supervisor = new_supervisor(is_resumed=is_resumed)
        supervisor.run()
        if supervisor.successor is None:
            return supervisor
        handover.execute(supervisor.successor, arguments, kept, systemd.environment)
        is_resumed = True


def _prepare_state(config: Config, handed: Handed | None) -> int:
    """Prepare and lock the state directory with catalog and RAM tier; return the descriptor of the lock."""
    if not config.state.exists():
        connection.unmount_stale(config.mountpoint)  # A new name that is refused there leaves no state directory.
    config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = config.state.stat()
    if found.st_uid != os.geteuid():
        raise InvalidArgument(
            f"the state directory {config.state} belongs to another user", remedy="give state=DIRECTORY with one of yours"
        )
    config.state.chmod(0o700)
    if handed is not None and handed.lock_fd >= 0:
        lock_fd = handed.lock_fd
    else:
        lock_fd = state_directory.acquire_lock(config.state, is_read_only=config.is_read_only)
    state_directory.kill_leftovers(config.state)
    database.create(config.state / "catalog.db")
    # If the mount outlived its daemon, so did the kernel, and the catalog is whole.
    ended_cleanly = handed is None and database.check_file(config.state / "catalog.db")
    database.migrate_file(config.state / "catalog.db")
    with _open_catalog(config) as db:
        _require_nothing_to_write_back(config, db)
        # Without its PFS, files that are only there could not be read, and changes would never be written back.
        require_pfs_of_catalog(db, config)
        identity.require_cluster(db, config.cluster, config.state)
    if config.cluster is not None:
        _register(config)
    with _open_catalog(config) as db:
        database.record_start(db, ended_cleanly=ended_cleanly)
    state_directory.prepare_ram_tier(config)
    if handed is None:  # Otherwise applications have files open.
        with _open_catalog(config) as db:
            Tiers.from_config(config, journal.get_instance_id(db)).close()
    return lock_fd


def _open_catalog(config: Config) -> contextlib.closing[Database]:
    return contextlib.closing(Database(config.state / "catalog.db", journalled=False))


def _register(config: Config) -> None:
    """Register this node in its cluster: it needs its number before anything is created."""
    from ckptfs.clique import membership  # Imports gRPC. A start that is refused before does not wait for that.

    def register() -> None:
        if config.cluster is not None and config.keys is not None:
            certificates.load_for(config.keys, config.node, config.cluster)
        with _open_catalog(config) as db:
            membership.ensure_registered(config, db)

    children.run_forked(register)


def _require_nothing_to_write_back(config: Config, db: Database) -> None:
    if config.is_read_only and journal.list_oldest(db, 1):
        raise InvalidArgument(
            f"{config.name} holds changes that are not on the PFS, and a read-only mount would never write them back",
            remedy="mount it once without ro, or give another NAME and state=DIRECTORY",
        )


def _resume_or_connect(config: Config, handed: Handed | None, guarded: GuardedMountpoint) -> tuple[Connection, bool]:
    """Return (the connection to serve, True if it was served before)."""
    if handed is not None:
        with contextlib.suppress(ValueError, KeyError):
            kept = connection.restore(handed.fuse_fd, handed.table_fd)
            if kept.mountpoint == config.mountpoint and kept.is_mounted():
                log.info("%s: resuming the mount that %s kept", config.mountpoint, "systemd" if handed.lock_fd < 0 else "this process")
                return kept, True
        os.close(handed.fuse_fd)
        os.close(handed.table_fd)
    with guarded.set_for_mount(functools.partial(_load_leftovers, config)):
        return connection.connect(config), False


def _lower_oom_score() -> None:
    """Make the OOM killer choose others first: without the supervisor all applications on the mount pause."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))


def _delete_forgotten(config: Config) -> None:
    """Delete the files without a name. At an unmount the kernel does not say that it forgets them."""
    with contextlib.suppress(*CATALOG_FAILURES), _open_catalog(config) as db, db.transaction():
        namespace.delete_forgotten(db, namespace.list_orphans(db))


def _load_leftovers(config: Config) -> Leftovers:
    with _open_catalog(config) as db:
        found = summary.load_write_back_figures(db)
        ram_files, ram_bytes = summary.count_only_in_ram(db)
        obstacle, remedy = summary.find_obstacle(db)
        return Leftovers(found.dirty_files, found.dirty_bytes, found.changes, ram_files, ram_bytes, obstacle, remedy)


def _release_ram_tier(config: Config, ended_cleanly: bool) -> None:
    """Unmount the RAM tier if it holds no only copy. Record a clean end."""
    with _open_catalog(config) as db:
        only_copies = copies.count_only_copies(db, Tier.RAM)
        if only_copies:
            log.info("%s: the RAM tier stays mounted: it holds the only copies of %d files", config.state / "ram", only_copies)
        elif state_directory.release_ram_tier(config):
            copies.delete_tier(db, Tier.RAM)
        if is_clean := ended_cleanly and _sync_nvme(config):
            database.record_clean_end(db)
    if is_clean:
        database.record_digest(config.state / "catalog.db")


def _sync_nvme(config: Config) -> bool:
    """Make the files on NVMe durable: a clean start does not check them. False: it fails or hangs."""

    def sync() -> None:
        with disk.closing(os.open(str(config.nvme), os.O_RDONLY | os.O_DIRECTORY)) as fd:
            pfs_sync.sync_filesystem(fd)

    try:
        if config.nvme is not None:
            run_in_time(sync, limits.STOP_WAIT_S, "syncfs(2)")
    except (OSError, TimedOut) as failure:
        log.warning("nvme: cannot be synced at the end: %s; the next start checks it", failure)
        return False
    return True
