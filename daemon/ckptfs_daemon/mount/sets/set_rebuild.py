"""The return of the sets after the catalog was lost (H10).

Their records come from the manifests that lie beside their files on the PFS.

The PFS shows directories and files of the history, but not what is known of them. A directory `NAME@NUMBER` whose manifest is there, with
all files of it in their sizes, is a set again: with its number, step, producers and times. Anything else stays as it is, and is no set.

Crash safety: the sets of a series come back in one transaction. What is left is found at the next start.
"""

import json
import logging
import os
import re
from typing import Any

import trio

from ckptfs.catalog import history, inodes
from ckptfs.catalog.history import Producer, SetRecord
from ckptfs.catalog.set_members import MANIFEST_NAMES
from ckptfs.model import ROOT, Inode, Level
from ckptfs.series import MemberFile
from ckptfs.series.pickle_scan import ReadRange
from ckptfs_daemon.mount.context import ChangeRunner, MountContext
from ckptfs_daemon.mount.sets.member_reader import MountMemberReader

log = logging.getLogger(__name__)
_SET_NAME = re.compile(rb"[^.].*@[0-9]+", re.DOTALL)
_TWIN = re.compile(rb"~[0-9]+$")
"""Ends the name of a series if another directory with the same path had one of the same pattern before."""


class SetRebuild:
    """Rebuilds the records of sets, once at the start. Belongs to the trio thread."""

    def __init__(self, context: MountContext, changes: ChangeRunner, reader: MountMemberReader) -> None:
        self._context, self._changes, self._reader = context, changes, reader

    async def run(self) -> None:
        """Rebuild what is missing. Raises OSError, CkptfsError if the PFS does not answer.

        In a cluster the other nodes and etcd know the records.
        """
        db = self._context.db
        if self._context.config.pfs is None or self._context.shared_namespace.is_shared:
            return
        if not await trio.to_thread.run_sync(history.has_unrecorded, db):
            return
        await self._reader.list_directory(ROOT)
        root = history.find_root(db)
        todo = [] if root is None else [root]
        while todo:
            directory = todo.pop()
            below = {name: one for name, one in (await self._reader.list_directory(directory)).items() if one.is_directory}
            sets = {name: one for name, one in below.items() if _SET_NAME.fullmatch(name)}
            todo += [one.id for name, one in below.items() if name not in sets]
            missing = {name: one for name, one in sets.items() if history.get_set(db, one.id) is None}
            if missing:
                await self._rebuild_series(directory, missing)

    async def _rebuild_series(self, directory: int, missing: dict[bytes, Inode]) -> None:
        """Record the sets in a directory of the history."""
        records: dict[int, SetRecord] = {}
        for name, inode in missing.items():
            try:
                records[inode.id] = await self._load_record(inode, name)
            except (ValueError, KeyError, TypeError, FileNotFoundError) as reason:
                log.warning("%s: is no set: its manifest does not fit: %s", os.fsdecode(name), reason)
        path = inodes.get_path(self._context.db, directory).removeprefix(history.NAME + b"/")
        origin = await self._find_origin(path.rpartition(b"/")[0])
        pattern = _TWIN.sub(b"", path.rpartition(b"/")[2])
        # What the application still has of a set protects it, so it has to be known first.
        places = {} if not origin else await self._reader.list_directory(origin)
        for record in records.values():
            if record.name in places and places[record.name].is_directory:
                await self._reader.list_tree(places[record.name].id)
        if records:
            await self._changes.run_change(lambda db, _: history.restore_series(db, directory, origin, pattern, records))
            log.info("%s: %d sets are known again by their manifests", os.fsdecode(path), len(records))

    async def _find_origin(self, path: bytes) -> int:
        """Return the directory of the application; 0 if it is gone."""
        inode = ROOT
        for name in filter(None, path.split(b"/")):
            try:
                inode = (await self._reader.lookup_child(inode, name)).id
            except (FileNotFoundError, NotADirectoryError):
                return 0
        return inode

    async def _load_record(self, directory: Inode, name: bytes) -> SetRecord:
        """Return the record of a set.

        Raises ValueError, KeyError, TypeError or FileNotFoundError if its manifest does not fit.
        """
        inside = await self._reader.list_directory(directory.id)
        if MANIFEST_NAMES[0] not in inside:
            raise FileNotFoundError("it has none")
        inode = inside[MANIFEST_NAMES[0]]
        found = json.loads(await self._reader.examine(inode.id, MemberFile(inode.size, Level.PFS), _read_all))
        sizes = {os.fsencode(one["path"]): one["size"] for one in found["files"]}
        below = await self._reader.list_tree(directory.id)
        there = {path: one.size for path, one in below.items() if one.is_file and path not in MANIFEST_NAMES}
        if found["set"] != os.fsdecode(name) or sizes != there:
            raise ValueError("it names other files")
        return _build_record(found, name)


def _build_record(found: dict[str, Any], name: bytes) -> SetRecord:
    member, _, number = name.rpartition(b"@")
    producers = tuple(Producer(**one) for one in found["producers"])
    numbers, files, size = tuple(map(int, found["numbers"])), len(found["files"]), int(found["size"])
    return SetRecord(int(number), member, numbers, files, size, int(found["completed_ns"]), producers, is_group=bool(found["is_group"]))


def _read_all(size: int, read: ReadRange) -> bytes:
    return read(0, size)
