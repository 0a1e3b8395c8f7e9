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
from ckptfs.catalog.fetching import FetchState
from ckptfs.catalog.sharing import truth
from ckptfs.clique import holders
from ckptfs.clique.surroundings import Cluster
from ckptfs.errors import Busy, CkptfsError, StoreRefused, StoreUnreachable
from ckptfs.model import Content, CopyState


class Elsewhere(Busy):
    """Another node reads it, or has read it: look again soon."""


class Alone:
    """Which of the nodes reads what. Several threads may ask at once."""

    def __init__(self, db: Database, around: Cluster) -> None:
        self._db = db
        self._around = around
        self._since: dict[int, float] = {}
        self._lock = threading.Lock()
        self._pause = threading.Event()

    @contextmanager
    def reading(self, found: FetchState) -> Iterator[None]:
        """While this node reads a file on the PFS. Raises Elsewhere when it had better wait for another one."""
        assert found.published is not None
        claims, claim = self._around.claims, None
        if claims is None or found.published.size < limits.FETCH_SHARED_BYTES_MIN:
            yield
            return
        try:
            with suppress(StoreUnreachable, StoreRefused):
                claim = claims.try_acquire(_claim_of(found))
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

    def _patient(self, found: FetchState) -> bool:
        """Whether to go on waiting for the other one."""
        assert found.published is not None
        with self._lock:
            since = self._since.setdefault(found.inode, time.monotonic())
        return time.monotonic() - since < limits.FETCH_SHARED_WAIT_S + found.published.size / limits.FETCH_SHARED_BYTES_PER_S

    def _forget(self, found: FetchState) -> None:
        with self._lock:
            self._since.pop(found.inode, None)

    def _has_come(self, found: FetchState) -> bool:
        """Whether somebody has it of whom was nothing known when we set out for the PFS."""
        if found.content is None:
            truth.load_inodes(self._db, self._around.store, found.inode)
            return fetching.get_content_id(self._db, found.inode) is not None
        before = set(peers.list_holders(self._db, found.content))
        holders.refresh(self._db, self._around.store, [found.content.id], self._around.node_number)
        now = settling.get_content(self._db, found.content.id) or found.content
        return bool(self._around.list_live([node for node in peers.list_holders(self._db, now) if node not in before]))

    def _tell(self, found: FetchState) -> None:
        """The others shall know of the copy before they may read the PFS themselves."""
        number = fetching.get_content_id(self._db, found.inode)
        content = None if number is None else settling.get_content(self._db, number)
        if content is None or not self._is_here(content):
            return
        if found.content is None:
            self._told_by_the_mount(found.inode)
            return
        with suppress(StoreUnreachable, StoreRefused):
            holders.announce(self._around.store, self._around.node_number, [(content, True)])

    def _is_here(self, content: Content) -> bool:
        return any(copy.state is CopyState.GOOD for copy in settling.list_copies(self._db, content.id))

    def _told_by_the_mount(self, inode: int) -> None:
        """A file that had no content before: that it has one now is told like every change of a file, in a moment."""
        end_s = time.monotonic() + limits.TOLD_WAIT_S
        while not holding.was_in_store(self._db, inode) and time.monotonic() < end_s:
            self._pause.wait(limits.TOLD_LOOK_S)


def _claim_of(found: FetchState) -> str:
    return f"fetch/file/{found.inode:016x}" if found.content is None else f"fetch/{found.content.id:016x}"
