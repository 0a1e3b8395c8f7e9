"""Owns what an attempt at an open ends with when it does not succeed: what it must wait for, and what it takes back.

If we die here: an attempt is one transaction, and was not committed.
"""

import contextlib
from collections.abc import Awaitable, Callable


class MustWait(Exception):
    """The attempt must wait for something first."""

    def __init__(self, wait: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self.wait = wait


class UndoLog:
    """What an attempt that fails must take back, the last first. Most do not fail: an ExitStack is made only for those that do."""

    def __init__(self) -> None:
        self._acts: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def callback(self, act: Callable[..., object], *values: object) -> None:
        self._acts.append((act, values))

    def pop_all(self) -> None:
        """It did not fail."""
        self._acts.clear()

    def __enter__(self) -> "UndoLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._acts:
            with contextlib.ExitStack() as stack:
                for act, values in self._acts:
                    stack.callback(act, *values)
