"""One wait for a level: which inodes lack it still.

It looks at a bounded number of them at a time, fewer while they lack it, so that waiting for a large tree stays cheap.

What was changed after the wait began is not waited for: the journal's last row at the beginning is its end.
If we die here: the client sees the connection end, and asks again.
"""

import errno
import stat
from collections import deque
from collections.abc import Mapping

from ckptfs.catalog import journal, report
from ckptfs.catalog.database import Database
from ckptfs.errors import ContentLost, refused
from ckptfs.lifecycle import published_whole
from ckptfs.model import ContentState, Level
from ckptfs.protocol import control_pb2 as pb

LOOKED_AT_MAX = 4096
LACKING_MAX = 64


class Waiting:
    """A file, or a directory with all below, on its way to `wanted`. Raises ENOENT when there is no such inode."""

    def __init__(self, db: Database, inode: int, wanted: Level) -> None:
        if report.listed(db, inode) is None:
            raise refused(errno.ENOENT)
        self._db = db
        self._wanted = wanted
        self._end = report.journal_end(db)
        self._left = deque(sorted(report.inodes_below(db, inode)))
        self._bytes: dict[int, int] = {}
        self._others: set[int] = set()
        self._writers = False

    @property
    def left(self) -> list[int]:
        """Some of those that lack it still."""
        return [inode for inode, _ in zip(self._left, range(LACKING_MAX), strict=False)]

    def look(self, copied: Mapping[int, int]) -> pb.Progress:
        """Look at the next ones; what is left, less the bytes already `copied` of files that are on their way.

        Raises ContentLost when one will never have the level.
        """
        self._writers = False
        lacking = 0
        for _ in range(min(len(self._left), LOOKED_AT_MAX)):
            inode = self._left.popleft()
            if self._has(inode):
                self._bytes.pop(inode, None)
                self._others.discard(inode)
                continue
            self._left.append(inode)
            lacking += 1
            if lacking == LACKING_MAX:
                break
        # What was not looked at yet counts as files, whose sizes are not known yet.
        files, size = len(self._left) - len(self._others), sum(max(0, size - copied.get(inode, 0)) for inode, size in self._bytes.items())
        progress = pb.Progress(done=not self._left, files_left=files, bytes_left=size, changes_left=len(self._others))
        if self._writers:
            progress.obstacle, progress.remedy = "a file is still open for writing", "close it"
        return progress

    def _has(self, inode: int) -> bool:
        """Whether `inode` is where it should be."""
        found = report.listed(self._db, inode)
        if found is None:
            return True
        if not stat.S_ISREG(found.mode):
            self._others.add(inode)
            return self._wanted is not Level.PFS or not journal.waiting(self._db, inode, self._end)
        content = found.record.content
        if content is not None and content.state is ContentState.LOST and not published_whole(found.record):
            path = report.path_of(self._db, inode).decode(errors="backslashreplace")
            raise ContentLost(f"{path} is lost: no place holds its content any more", remedy="write it again, or delete it")
        self._bytes[inode] = found.size
        if content is not None and content.state in {ContentState.OPEN, ContentState.CLOSED}:
            # Closed and not sealed it would survive our processes, but is nothing yet that a checkpoint can rest on.
            self._writers |= content.state is ContentState.OPEN
            return False
        if self._wanted is not Level.PFS:
            order = list(Level)
            return order.index(found.level) >= order.index(self._wanted)
        return found.level is Level.PFS and not journal.waiting(self._db, inode, self._end)
