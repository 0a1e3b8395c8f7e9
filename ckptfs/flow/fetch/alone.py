"""Owns that one reading of the PFS serves many nodes (G4): who reads a file there claims it first, the others wait and take it from there.

A claim ends with the lease of its node, so nobody waits for the dead; whom a slow one keeps waiting for too long reads for itself. Without
the store nobody can say, and each does for itself.
If we die here: the claim runs out, and what was read and not told of is found by nobody but this node.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckptfs import limits
from ckptfs.catalog import fetching, holding, peers, settling
from ckptfs.catalog.database import Database
from ckptfs.catalog.fetching import Fetchable
from ckptfs.catalog.sharing import truth
from ckptfs.clique import holders
from ckptfs.clique.surroundings import Surroundings
from ckptfs.errors import Busy, CkptfsError, StoreRefused, Unreachable
from ckptfs.model import Content, CopyState


class Elsewhere(Busy):
    """Another node reads it, or has read it: look again soon."""


class Alone:
    """Which of the nodes reads what. Several threads may ask at once."""

    def __init__(self, db: Database, around: Surroundings) -> None:
        self._db = db
        self._around = around
        self._since: dict[int, float] = {}
        self._lock = threading.Lock()
        self._pause = threading.Event()

    @contextmanager
    def reading(self, found: Fetchable) -> Iterator[None]:
        """While this node reads a file on the PFS. Raises Elsewhere when it had better wait for another one."""
        assert found.on_pfs is not None
        claims, claim = self._around.claims, None
        if claims is None or found.on_pfs.size < limits.FETCH_SHARED_BYTES_MIN:
            yield
            return
        try:
            with suppress(Unreachable, StoreRefused):
                claim = claims.take(_claim_of(found))
                if claim is None and self._patient(found):
                    raise Elsewhere("another node reads it from the PFS just now")
                if claim is not None and self._has_come(found):
                    raise Elsewhere("another node has read it from the PFS")
            self._forget(found)
            yield
            self._tell(found)
        finally:
            if claim is not None:
                with suppress(CkptfsError):
                    claims.release(claim)

    def _patient(self, found: Fetchable) -> bool:
        """Whether to go on waiting for the other one."""
        assert found.on_pfs is not None
        with self._lock:
            since = self._since.setdefault(found.inode, time.monotonic())
        return time.monotonic() - since < limits.FETCH_SHARED_WAIT_S + found.on_pfs.size / limits.FETCH_SHARED_BYTES_PER_S

    def _forget(self, found: Fetchable) -> None:
        with self._lock:
            self._since.pop(found.inode, None)

    def _has_come(self, found: Fetchable) -> bool:
        """Whether somebody has it of whom was nothing known when we set out for the PFS."""
        if found.content is None:
            truth.look_up(self._db, self._around.store, found.inode)
            return fetching.content_of(self._db, found.inode) is not None
        before = set(peers.elsewhere(self._db, found.content))
        holders.refresh(self._db, self._around.store, [found.content.id], self._around.number)
        now = settling.content(self._db, found.content.id) or found.content
        return bool(self._around.others([node for node in peers.elsewhere(self._db, now) if node not in before]))

    def _tell(self, found: Fetchable) -> None:
        """The others shall know of the copy before they may read the PFS themselves."""
        number = fetching.content_of(self._db, found.inode)
        content = None if number is None else settling.content(self._db, number)
        if content is None or not self._is_here(content):
            return
        if found.content is None:
            self._told_by_the_mount(found.inode)
            return
        with suppress(Unreachable, StoreRefused):
            holders.tell(self._around.store, self._around.number, [(content, True)])

    def _is_here(self, content: Content) -> bool:
        return any(copy.state is CopyState.GOOD for copy in settling.copies(self._db, content.id))

    def _told_by_the_mount(self, inode: int) -> None:
        """A file that had no content before: that it has one now is told like every change of a file, in a moment."""
        end_s = time.monotonic() + limits.TOLD_WAIT_S
        while not holding.was_shared(self._db, inode) and time.monotonic() < end_s:
            self._pause.wait(limits.TOLD_LOOK_S)


def _claim_of(found: Fetchable) -> str:
    return f"fetch/file/{found.inode:016x}" if found.content is None else f"fetch/{found.content.id:016x}"
