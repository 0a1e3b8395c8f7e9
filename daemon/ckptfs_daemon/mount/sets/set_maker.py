"""Making and removing the sets of the history: hard links, a manifest, one rename (D1, X3, H10).

A set gets its links below a hidden name, in changes that are short enough for the requests between them. Each file is compared with what
was judged before it gets its link; from then on no writer changes it. A set of which a file has changed meanwhile is given up.

After the loss of the catalog, the PFS shows directories and files of the history, but not what is known of them. A directory `NAME@NUMBER`
whose manifest is there, with all files of it in their sizes, is a set again: with its number, step, producers and times. Anything else
stays as it is, and is no set.

Crash safety: a hidden set that a mount process leaves is removed by the next one. The candidate of the set is still there. After a loss,
the sets of a series come back in one transaction, and the rest at the next start.
"""

import contextlib
import functools
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import trio

from ckptfs import disk, limits
from ckptfs.catalog import contents, history, identity, inodes, namespace, peer_copies, set_members
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import CheckpointSet, Producer, SetRecord
from ckptfs.catalog.set_members import MANIFEST_NAMES, SetFile, SetTree
from ckptfs.errors import Busy, CkptfsError, NoSpace
from ckptfs.model import ROOT, Inode, Level, Tier
from ckptfs.series import manifest
from ckptfs.series.file_groups import DMTCP_SCRIPT
from ckptfs.series.manifest import ManifestFile
from ckptfs.series.patterns import Member, Series
from ckptfs.series.set_kinds import MemberFile
from ckptfs.tiers.storage import TierStorage
from ckptfs_daemon import ipc
from ckptfs_daemon.mount.context import ChangeRunner, MountContext, reserve_content
from ckptfs_daemon.mount.sets.member_reader import MountMemberReader
from ckptfs_daemon.mount.sets.set_refresh import SetRefresh

log = logging.getLogger(__name__)
disk.declare_labels("manifest:write")
_FILE_MODE = stat.S_IFREG | 0o444
_SET_NAME = re.compile(rb"[^.].*@[0-9]+", re.DOTALL)
_TWIN = re.compile(rb"~[0-9]+$")
"""Ends the name of a series if another directory with the same path had one of the same pattern before."""


@dataclass(frozen=True)
class FoundMember:
    """A member of a series in a directory of the application.

    `siblings`: what is in the directory, by name. `source`: the directory that is the member; None for a file or several.
    """

    directory: int
    series: Series
    member: Member
    siblings: dict[bytes, int]
    source: int | None
    is_newest: bool

    @property
    def key(self) -> tuple[int, bytes]:
        """Return the key that all candidates of this member share."""
        return self.directory, self.member.name

    @property
    def inodes(self) -> list[int]:
        return [self.siblings[name] for name in self.member.files if name in self.siblings]

    def load_tree(self, db: Database) -> SetTree | None:
        """Return what belongs to the member if all files are sealed.

        DMTCP is restarted by a symlink to the newest script: without it there is no set yet.
        """
        members = [(name, self.siblings[name]) for name in self.member.files if name in self.siblings]
        if self.member.name == DMTCP_SCRIPT:
            named = namespace.find_child(db, self.directory, DMTCP_SCRIPT)
            if named is None:
                return None
            members.append((DMTCP_SCRIPT, named.id))
        return set_members.load_set_tree(db, members if self.source is None else [(b"", self.source)])


class SetMaker:
    """Makes and removes sets, one at a time. Belongs to the trio thread."""

    def __init__(
        self,
        context: MountContext,
        changes: ChangeRunner,
        reader: MountMemberReader,
        refresh: SetRefresh,
        on_unlinked: Callable[[Iterable[int]], None],
    ) -> None:
        """`on_unlinked` is called with inodes that have no name any more."""
        self._context, self._changes, self._reader, self._refresh = context, changes, reader, refresh
        self._on_unlinked = on_unlinked

    async def make(self, found: FoundMember, tree: SetTree) -> tuple[int, CheckpointSet | None]:
        """Make the set of a complete member. Return its series, and None if there is such a set already.

        Raises Busy if another node makes a set of the series, or a file has changed meanwhile.
        """
        db, files = self._context.db, [file.inode for file in tree.files.values()]
        series = await self._open_series(found)
        if self._context.shared_namespace.is_shared:
            sets = await trio.to_thread.run_sync(history.list_sets, db, series)
            for former in [one for one in sets if one.record.name == found.member.name][:1]:
                await self._refresh.refresh_set(former.directory)
        if await trio.to_thread.run_sync(set_members.has_set_of, db, series, files):
            return series, None
        if await self.remove_leftovers(series):
            raise Busy("another node makes a set of this series")
        made = await self._begin(found, tree, series)
        try:
            await self._fill(made.directory, tree)
            await self._confirm(tree)
            await self._write_manifest(made, tree)
            await self._finish(found, series, made)
        except (OSError, CkptfsError):
            with contextlib.suppress(OSError, CkptfsError):
                await self.remove(made.directory)
            raise
        return series, made

    async def remove(self, directory: int) -> None:
        await self._refresh.refresh_set(directory)
        while not await self._changes.run_change(lambda db, _: history.delete_set(db, directory, limits.SET_NAMES_PER_CHANGE)):
            await trio.lowlevel.checkpoint()
            await self._context.shared_namespace.wait_published()
        self._on_unlinked(namespace.list_orphans(self._context.db))

    # --- the series ---------------------------------------------------------------------------------------------------

    async def _open_series(self, found: FoundMember) -> int:
        """Return the directory of the series in the history; make it if there is none."""
        db, shared_namespace = self._context.db, self._context.shared_namespace
        for _ in range(limits.SHARED_TRIES_MAX):
            await self._refresh.refresh_place(found.directory, found.series.name)
            record = history.find_series(db, found.directory, found.series.name)
            if record is not None:
                return record.directory
            await self._changes.run_change(lambda db, _: history.insert_series(db, found.directory, found.series.name))
            await shared_namespace.wait_published()
        raise Busy("other nodes change the history of the series")

    async def remove_leftovers(self, series: int) -> bool:
        """Remove unfinished sets of this node, and of nodes that are gone.

        Return True if another node is making one. Must not be called while this node makes one.
        """
        db, is_made_elsewhere = self._context.db, False
        own, live = (0, identity.get_node_number(db)), peer_copies.list_live_nodes(db)
        for directory in history.list_unfinished(db, series):
            maker = identity.get_origin_node(directory)
            if maker in own or maker not in live:
                await self.remove(directory)
            else:
                is_made_elsewhere = True
        return is_made_elsewhere

    # --- one set ------------------------------------------------------------------------------------------------------

    async def _begin(self, found: FoundMember, tree: SetTree, series: int) -> CheckpointSet:
        db, member = self._context.db, found.member
        number = history.get_next_number(db, series)
        producers = tuple(Producer(**json.loads(text)) for text in _list_producers(tree))
        size = sum(file.size for file in tree.files.values())
        known = history.get_series(db, series)
        # A set of a later number was completed after the rollback, although the clock of that node may be ahead of this one.
        completed_ns = max(time.time_ns(), known.rollback.at_ns + 1 if known is not None and known.rollback is not None else 0)
        record = SetRecord(
            number, member.name, member.numbers, len(tree.files), size, completed_ns, producers, is_group=found.source is None
        )

        def act(db: Database, _: bool) -> CheckpointSet:
            if history.get_next_number(db, series) != number:
                raise Busy("another node has made a set of this series")
            like = inodes.get(db, found.directory if found.source is None else found.source)
            return CheckpointSet(history.begin_set(db, series, record, like), record)

        names = [(series, history.build_hidden_name(record))]
        return await self._context.shared_namespace.commit_shared(lambda: self._changes.run_change(act), names)

    async def _fill(self, directory: int, tree: SetTree) -> None:
        """Make the directories, symlinks and links of a set, each change for a short time.

        Raises Busy if a file has changed.
        """
        made = {b"": directory}
        todo: list[tuple[bytes, Inode | SetFile]] = [*tree.directories.items(), *tree.symlinks.items(), *tree.files.items()]

        def act(db: Database, _: bool) -> int:
            until_s = time.monotonic() + limits.SET_CHANGE_S
            for count, (path, source) in enumerate(todo[done:], 1):
                _insert(db, made, path, source)
                if time.monotonic() > until_s:
                    return done + count
            return len(todo)

        done = 0
        while done < len(todo):
            done = await self._changes.run_change(act)
            await trio.lowlevel.checkpoint()

    async def _confirm(self, tree: SetTree) -> None:
        """Wait until other nodes know the links. Raises Busy if one of them wrote a file before that."""
        shared_namespace = self._context.shared_namespace
        if not shared_namespace.is_shared:
            return
        await shared_namespace.wait_published()
        files = list(tree.files.values())
        for start in range(0, len(files), limits.ETCD_OPERATIONS_MAX):
            part = files[start : start + limits.ETCD_OPERATIONS_MAX]
            async with trio.open_nursery() as nursery:
                for file in part:
                    nursery.start_soon(shared_namespace.refresh_inode, file.inode)
            if any(set_members.find_set_file(self._context.db, file.inode) != file for file in part):
                raise Busy("another node has changed a file of the set")

    async def _finish(self, found: FoundMember, series: int, made: CheckpointSet) -> None:
        def act(db: Database, _: bool) -> None:
            history.finish_set(db, made.directory)
            set_members.delete_commit(db, found.inodes)

        names = [(series, history.build_hidden_name(made.record)), (series, made.name)]
        await self._context.shared_namespace.commit_shared(lambda: self._changes.run_change(act), names)

    # --- the manifest -------------------------------------------------------------------------------------------------

    async def _write_manifest(self, made: CheckpointSet, tree: SetTree) -> None:
        """Write the manifest into the set, unless its own files have these names, or there is no room."""
        if any(name in tree.files for name in MANIFEST_NAMES):
            return
        path = inodes.get_path(self._context.db, inodes.get(self._context.db, made.directory).parent)
        build = functools.partial(_build_manifest, made, path.removeprefix(history.NAME + b"/"), tree)
        for name, data in zip(MANIFEST_NAMES, await trio.to_thread.run_sync(build), strict=True):
            try:
                await self._write_file(made.directory, name, data)
            except (OSError, NoSpace) as failure:
                log.warning("%s: has no manifest: it cannot be written: %s", os.fsdecode(path + b"/" + made.name), failure)
                return

    async def _write_file(self, directory: int, name: bytes, data: bytes) -> None:
        """Make a closed file: bytes in a tier of this node, then rows. What follows is as for any file."""
        context = self._context
        tier = context.tiers.choose_tier(len(data), context.open_files.get_reserved_bytes(), excluded={Tier.PFS})
        storage = context.tiers[tier]
        with reserve_content(context.db, tier) as content:
            await trio.to_thread.run_sync(_write_content, storage, content, data)
            await self._changes.run_change(lambda db, _: _insert_file(db, directory, name, content, tier, len(data)))
        context.wake_channel.notify(ipc.WORK)

    # --- after the loss of the catalog ---------------------------------------------------------------------------------

    async def rebuild(self) -> None:
        """Rebuild the records that are missing. Raises OSError, CkptfsError if the PFS does not answer.

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
        found = json.loads(await self._reader.examine(inode.id, MemberFile(inode.size, Level.PFS), lambda size, read: read(0, size)))
        sizes = {os.fsencode(one["path"]): one["size"] for one in found["files"]}
        below = await self._reader.list_tree(directory.id)
        there = {path: one.size for path, one in below.items() if one.is_file and path not in MANIFEST_NAMES}
        if found["set"] != os.fsdecode(name) or sizes != there:
            raise ValueError("it names other files")
        return _build_record(found, name)


def _insert(db: Database, made: dict[bytes, int], path: bytes, source: Inode | SetFile) -> None:
    """Insert one path of a set.

    `made`: the directories of the set that are there, by path. Raises Busy if the file has changed.
    """
    above, _, name = path.rpartition(b"/")
    if isinstance(source, SetFile):
        if set_members.find_set_file(db, source.inode) != source:
            raise Busy("a file of the set has changed")
        history.insert_link(db, source.inode, made[above], name)
    elif source.is_directory:
        made[path] = history.insert_directory(db, made[above], name, source)
    else:
        history.insert_symlink(db, made[above], name, source)


def _list_producers(tree: SetTree) -> list[str]:
    return sorted({file.producer for file in tree.files.values()} - {""})


def _build_manifest(made: CheckpointSet, series: bytes, tree: SetTree) -> tuple[bytes, bytes]:
    """Return the contents of both files."""
    record, producers = made.record, _list_producers(tree)
    numbers = {text: number for number, text in enumerate(producers)}
    files = {path: ManifestFile(file.size, file.mtime_ns, file.digest, numbers.get(file.producer)) for path, file in tree.files.items()}
    set_fields: dict[str, Any] = {
        "series": os.fsdecode(series), "set": os.fsdecode(made.name), "number": record.number, "numbers": list(record.numbers),
        "completed_ns": record.completed_ns, "size": record.size, "is_group": record.is_group,
    }  # fmt: skip
    return manifest.build_manifest(set_fields, [json.loads(text) for text in producers], files), manifest.build_checksums(files)


def _build_record(found: dict[str, Any], name: bytes) -> SetRecord:
    member, _, number = name.rpartition(b"@")
    producers = tuple(Producer(**one) for one in found["producers"])
    numbers, files, size = tuple(map(int, found["numbers"])), len(found["files"]), int(found["size"])
    return SetRecord(int(number), member, numbers, files, size, int(found["completed_ns"]), producers, is_group=bool(found["is_group"]))


def _write_content(storage: TierStorage, content: int, data: bytes) -> None:
    with disk.closing(storage.create(content)) as fd:
        disk.write_all("manifest:write", fd, data, 0)


def _insert_file(db: Database, directory: int, name: bytes, content: int, tier: Tier, size: int) -> None:
    like, now_ns = inodes.get(db, directory), time.time_ns()
    mode = _FILE_MODE & (like.mode | ~0o777)
    made = namespace.create(db, directory, name, mode, uid=like.uid, gid=like.gid)
    contents.insert_content(db, made.id, tier, reserved_content=content)
    contents.mark_closed(db, made.id, content, size, now_ns, now_ns)
