"""A dict that forgets: of more entries than it may have, the oldest one goes."""

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedTable(dict[Key, Value]):
    """A dict of at most `at_most` entries, for one thread.

    Only `table[key] = value` makes an entry the newest one and keeps the bound.
    """

    def __init__(self, at_most: int) -> None:
        super().__init__()
        self._at_most = at_most

    def __setitem__(self, key: Key, value: Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._at_most:
            del self[next(iter(self))]
