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
from ckptfs.errors import ContentLost, posix_error
from ckptfs.lifecycle import is_on_pfs
from ckptfs.model import ContentState, Level
from ckptfs.protocol import control_pb2 as pb

CHECKED_MAX = 4096
INCOMPLETE_MAX = 64


class LevelCheck:
    """A file, or a directory with all below, on its way to `wanted`. Raises ENOENT when there is no such inode."""

    def __init__(self, db: Database, inode: int, wanted: Level) -> None:
        if report.get_listed_file(db, inode) is None:
            raise posix_error(errno.ENOENT)
        self._db = db
        self._wanted = wanted
        self._end = report.get_journal_end(db)
        self._remaining = deque(sorted(report.list_inodes_below(db, inode)))
        self._bytes: dict[int, int] = {}
        self._non_files: set[int] = set()
        self._has_writers = False

    @property
    def remaining_sample(self) -> list[int]:
        """Some of those that lack it still."""
        return [inode for inode, _ in zip(self._remaining, range(INCOMPLETE_MAX), strict=False)]

    def check_next(self, copied: Mapping[int, int]) -> pb.Progress:
        """Look at the next ones; what is left, less the bytes already `copied` of files that are on their way.

        Raises ContentLost when one will never have the level.
        """
        self._has_writers = False
        incomplete_count = 0
        for _ in range(min(len(self._remaining), CHECKED_MAX)):
            inode = self._remaining.popleft()
            if self._check_inode(inode):
                self._bytes.pop(inode, None)
                self._non_files.discard(inode)
                continue
            self._remaining.append(inode)
            incomplete_count += 1
            if incomplete_count == INCOMPLETE_MAX:
                break
        # What was not looked at yet counts as files, whose sizes are not known yet.
        files, size = (
            len(self._remaining) - len(self._non_files),
            sum(max(0, size - copied.get(inode, 0)) for inode, size in self._bytes.items()),
        )
        progress = pb.Progress(done=not self._remaining, files_left=files, bytes_left=size, changes_left=len(self._non_files))
        if self._has_writers:
            progress.obstacle, progress.remedy = "a file is still open for writing", "close it"
        return progress

    def _check_inode(self, inode: int) -> bool:
        """Whether `inode` is where it should be."""
        found = report.get_listed_file(self._db, inode)
        if found is None:
            return True
        if not stat.S_ISREG(found.mode):
            self._non_files.add(inode)
            return self._wanted is not Level.PFS or not journal.has_pending(self._db, inode, self._end)
        content = found.record.content
        if content is not None and content.state is ContentState.LOST and not is_on_pfs(found.record):
            path = report.get_path(self._db, inode).decode(errors="backslashreplace")
            raise ContentLost(f"{path} is lost: no place holds its content any more", remedy="write it again, or delete it")
        self._bytes[inode] = found.size
        if content is not None and content.state in {ContentState.OPEN, ContentState.CLOSED}:
            # Closed and not sealed it would survive our processes, but is nothing yet that a checkpoint can rest on.
            self._has_writers |= content.state is ContentState.OPEN
            return False
        if self._wanted is not Level.PFS:
            order = list(Level)
            return order.index(found.level) >= order.index(self._wanted)
        return found.level is Level.PFS and not journal.has_pending(self._db, inode, self._end)
