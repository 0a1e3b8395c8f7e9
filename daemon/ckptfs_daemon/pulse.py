"""Owns the moments at which something got on in the mover, for threads that wait for what the catalog shows.

A pulse is a hint: whoever waits looks at the catalog, also when none came for a while. If we die here: nobody waits any more.
"""

import threading


class Pulse:
    """Any thread may beat it or wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._beats = 0

    @property
    def beats(self) -> int:
        """How many there were."""
        return self._beats

    def beat(self) -> None:
        """Something got on."""
        with self._changed:
            self._beats += 1
            self._changed.notify_all()

    def wait(self, beats: int, timeout_s: float) -> None:
        """Until there were more than `beats`, or for `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._beats > beats, timeout_s)
