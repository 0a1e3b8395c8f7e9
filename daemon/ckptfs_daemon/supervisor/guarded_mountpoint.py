"""The mountpoint of one daemon, its guard, and the record of both in the state directory.

The guard is set before the mount and stays when the daemon is stopped or dies. It is taken away when an administrator unmounts and nothing
is left to write back.

Crash safety: the record names the guard before it is set; the next start takes over what it finds.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from ckptfs import mount_record, mountpoint_guard
from ckptfs.catalog import journal
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.mount_record import Leftovers, MountRecord
from ckptfs.mountpoint_guard import Guard, GuardKind
from ckptfs_daemon.fuse import connection

log = logging.getLogger(__name__)


class GuardedMountpoint:
    """The record of the mount, and the guard of its directory."""

    def __init__(self, config: Config, options: str, unit: str) -> None:
        """Read what the last daemon of this state directory recorded."""
        self._before = before = mount_record.load(config.state)
        self._config = config
        self._guard = None if before is None else before.guard
        self._record = MountRecord(
            config.name, config.mountpoint, config.state, options, config.pfs, config.nvme, _get_instance(config), unit, self._guard
        )

    @contextlib.contextmanager
    def set_for_mount(self, count_leftovers: Callable[[], Leftovers]) -> Iterator[None]:
        """Set the guard around the mount in the block. Raises as `connect` does.

        If that fails, a new guard is removed, and the record is as before. Without one before, it says what `count_leftovers` returns.
        """
        point = self._config.mountpoint
        connection.unmount_stale(point)
        former = self._guard
        if former is not None and (former.path != point or former.kind is not GuardKind.IMMUTABLE):
            self._clear()
        try:
            guard, fd = self._open_guard()
        except OSError as failure:
            log.info("%s: has no guard: %s", point, failure.strerror)
            self._store(None)
            yield
            return
        self._store(guard)
        try:
            if guard.kind is GuardKind.IMMUTABLE:
                mountpoint_guard.set_on(guard, fd)
            yield
            mountpoint_guard.set_on(guard, fd)
        except BaseException:
            if former is None:
                self._clear()
            before = self._before or replace(self._record, leftovers=count_leftovers())
            mount_record.store(replace(before, guard=self._guard))
            raise
        finally:
            os.close(fd)

    def _open_guard(self) -> tuple[Guard, int]:
        """Return the guard of the mountpoint, or the former one, and a descriptor of it. Raises OSError."""
        guard = mountpoint_guard.choose(self._config.mountpoint)
        fd = mountpoint_guard.open_directory(guard)
        former = self._guard
        if former is not None and (former.path, former.device, former.inode) == (guard.path, guard.device, guard.inode):
            guard = former
        return guard, fd

    def end(self, leftovers: Leftovers, *, is_on_purpose: bool) -> None:
        """Record what the ended daemon leaves, and say so. If that is nothing, take the guard away."""
        point = self._config.mountpoint
        record = replace(self._record, leftovers=leftovers)
        if sentence := record.describe_leftovers():
            log.info("%s: %s; to go on: %s", self._config.name, sentence, record.mount_command)
        if is_on_purpose and leftovers.is_nothing:
            self._clear()
        try:
            mount_record.store(replace(record, guard=self._guard))
            if self._guard is not None:
                mountpoint_guard.cover(self._guard)
        except OSError as failure:
            log.warning("%s: its directory accepts writes while ckptfs is away: %s", point, failure)

    def _store(self, guard: Guard | None) -> None:
        self._guard = guard
        self._record = replace(self._record, guard=guard)
        mount_record.store(self._record)

    def _clear(self) -> None:
        guard, self._guard = self._guard, None
        if guard is None or (guard.kind is not GuardKind.COVER and connection.find_mount_at(guard.path) is not None):
            return
        try:
            mountpoint_guard.clear(guard)
        except OSError as failure:
            log.warning("%s: its guard cannot be removed: %s; chattr -i %s", guard.path, failure.strerror, guard.path)


def _get_instance(config: Config) -> str:
    with contextlib.closing(Database(config.state / "catalog.db", journalled=False)) as db:
        return journal.get_instance_id(db)
