"""The search for the members of series of which an inode is a part.

They are among its siblings, and in the directories above. A series counts if its numbers count checkpoints, or for a member that is a
directory of a known kind: others are data sets, experiments or users. A file or directory outside any series that a user committed as
complete is a series of its own.
"""

import time
from collections import defaultdict
from typing import NamedTuple

from ckptfs import limits, series
from ckptfs.catalog import set_members
from ckptfs.catalog.database import Database
from ckptfs.model import ROOT, Level
from ckptfs.series import Series, patterns, set_kinds
from ckptfs.series.patterns import Member
from ckptfs.series.set_kinds import DirectoryFacts
from ckptfs_daemon.mount.sets.set_maker import FoundMember


class _DirectoryNames(NamedTuple):
    """The entries of a directory.

    `siblings`: inodes by name. `members`: the members that each name belongs to, with whether a member is the newest.
    """

    siblings: dict[bytes, int]
    directories: set[bytes]
    members: dict[bytes, list[tuple[Series, Member, bool]]]


class MemberSearch:
    """The search for the members of which some inodes are a part.

    Runs in a worker thread; each directory is read once.
    """

    def __init__(self, db: Database, paused: frozenset[int]) -> None:
        """`paused`: directories that must not be read now."""
        self._db, self._paused = db, paused
        self._directories: dict[int, _DirectoryNames] = {}
        self.pauses_s: dict[int, float] = {}
        """For how long not to read each directory again: a multiple of the time that it took to read."""

    def find(self, inode: int) -> list[FoundMember] | None:
        """Return the members, the innermost first. Returns None if a directory on the way is paused."""
        found: list[FoundMember] = []
        todo = set_members.list_places(self._db, inode)
        while todo:
            directory, name = todo.pop(0)
            if directory in self._paused:
                return None
            found += self._match(directory, name)
            if directory != ROOT:
                todo += set_members.list_places(self._db, directory)
        return found or self._find_committed(inode)

    def _match(self, directory: int, name: bytes) -> list[FoundMember]:
        siblings, directories, members = self._load(directory)
        found = []
        for one, member, is_newest in members.get(name, ()):
            source = siblings[name] if name in directories and member.files == (name,) else None
            if one.is_step_count or (source is not None and self._has_kind(source)):
                found.append(FoundMember(directory, one, member, siblings, source, is_newest))
        return found

    def _load(self, directory: int) -> _DirectoryNames:
        """Return what is in a directory. Reading it takes as long as there are names."""
        if directory not in self._directories:
            began_s = time.monotonic()
            names = set_members.list_possible_members(self._db, directory)
            members: dict[bytes, list[tuple[Series, Member, bool]]] = defaultdict(list)
            for one in series.list_series(names):
                for number, member in enumerate(patterns.list_members(one, names)):
                    for file in member.files:
                        members[file].append((one, member, number == 0))
            siblings = {name: inode for name, (inode, _) in names.items()}
            directories = {name for name, (_, is_directory) in names.items() if is_directory}
            self._directories[directory] = _DirectoryNames(siblings, directories, members)
            self.pauses_s[directory] = (time.monotonic() - began_s) * limits.SET_SEARCH_PAUSE
        return self._directories[directory]

    def _has_kind(self, directory: int) -> bool:
        names = set_members.list_possible_members(self._db, directory)
        files = {name: set_kinds.MemberFile(0, Level.NONE) for name, (_, is_directory) in names.items() if not is_directory}
        return bool(set_kinds.list_kinds(DirectoryFacts(files, frozenset(names.keys() - files.keys()))))

    def _find_committed(self, inode: int) -> list[FoundMember]:
        """Return a file or directory outside any series that a user committed as complete.

        It is a series of its own.
        """
        if not set_members.is_committed(self._db, [inode]):
            return []
        found = []
        for directory, name in set_members.list_places(self._db, inode):
            is_directory = set_members.list_possible_members(self._db, directory)[name][1]
            member = Member((0,), name, name, (name,))
            found.append(FoundMember(directory, Series((name,)), member, {name: inode}, inode if is_directory else None, True))
        return found
