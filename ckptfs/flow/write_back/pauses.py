"""Takes: how long the copies of open files took, and which of them are fsynced again.
Leaves: turns: a large file that stays open and is fsynced all the time does not keep the PFS busy with nothing else.
If we die here: turns are forgotten; the next fsync or the close of the file begins anew.
"""

import time

PAUSE_S_MIN = 0.25


class CopyPacing:
    """When each open content may be copied again, by the clock of this process."""

    def __init__(self, ratio: float) -> None:
        """A copy that took t seconds is followed by a pause of `ratio` times t."""
        self._ratio = ratio
        self._until_s: dict[int, float] = {}
        self.deferred: dict[int, int] = {}

    def record_duration(self, content: int, seconds: float) -> None:
        """An open content was copied."""
        if seconds * self._ratio > PAUSE_S_MIN:
            now = time.monotonic()
            self._until_s = {number: until_s for number, until_s in self._until_s.items() if until_s > now}
            self._until_s[content] = time.monotonic() + seconds * self._ratio

    def defer_if_early(self, inode: int, content: int) -> bool:
        """Whether this content's turn is still to come; it is remembered then."""
        if time.monotonic() >= self._until_s.get(content, 0.0):
            self._until_s.pop(content, None)
            return False
        self.deferred[content] = inode
        return True

    def take_due(self) -> list[tuple[int, int]]:
        """(inode, content) of those whose turn has come."""
        now = time.monotonic()
        due = [content for content in self.deferred if now >= self._until_s.get(content, 0.0)]
        return [(self.deferred.pop(content), content) for content in due]

    def next_due_s(self) -> float:
        """Until the first one's turn."""
        return max(0.0, min(self._until_s.get(content, 0.0) for content in self.deferred) - time.monotonic())

    def retry_now(self) -> None:
        """It is everybody's turn now."""
        self._until_s.clear()
