"""Owns the moments at which something got on in the mover, for threads that wait for what the catalog shows.

A pulse is a hint: whoever waits looks at the catalog, also when none came for a while. If we die here: nobody waits any more.
"""

import threading


class ProgressSignal:
    """Any thread may beat it or wait."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        """How many there were."""
        return self._count

    def notify(self) -> None:
        """Something got on."""
        with self._condition:
            self._count += 1
            self._condition.notify_all()

    def wait(self, seen_count: int, timeout_s: float) -> None:
        """Until there were more than `beats`, or for `timeout_s`."""
        with self._condition:
            self._condition.wait_for(lambda: self._count > seen_count, timeout_s)
