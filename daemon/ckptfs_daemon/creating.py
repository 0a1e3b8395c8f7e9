"""Owns how one create comes about: a name, an inode, a content and a handle in one transaction, or none of them.

If we die here: see opening.py.
"""

from typing import TYPE_CHECKING

from ckptfs.catalog import namespace
from ckptfs.catalog.contents import FileContent
from ckptfs.errors import NoSpace
from ckptfs.flow import write
from ckptfs.model import Inode
from ckptfs_daemon.attempts import MustWait, UndoLog
from ckptfs_daemon.edge import Request
from ckptfs_daemon.opening import OpenAttempt
from ckptfs_daemon.wishes import OpenRequest, OpenResult

if TYPE_CHECKING:
    from ckptfs_daemon.context import MountContext


class CreateAttempt(OpenAttempt):
    """The attempts at one create."""

    def __init__(self, context: "MountContext", request: Request, parent: int, name: bytes, mode: int, owner: tuple[int, int]) -> None:
        super().__init__(context, OpenRequest(0, is_writer=True, truncates=False, fuse_request=request))
        self._parent, self._name, self._mode, self._owner = parent, name, mode, owner
        self._kind = write.get_series_pattern(name)
        self._inode: Inode | None = None
        self.blind = False

    def try_nonblocking(self) -> OpenResult | None:
        """Create if nothing must be waited for; else None, and nothing was changed."""
        try:
            return self._attempt()
        except (MustWait, NoSpace):
            return None

    @property
    def inode(self) -> Inode:
        """What was made."""
        assert self._inode is not None
        return self._inode

    def _attempt(self) -> OpenResult:
        """Raises what `namespace.make` raises, Unvisited too."""
        uid, gid = self._owner
        with UndoLog() as undo:
            with self._files.change() as db:
                inode = namespace.create(db, self._parent, self._name, self._mode, uid=uid, gid=gid, allow_unimported=self.blind)
                held = FileContent(inode, None, None, (), False)
                file = self.create_content(held, undo, self._kind)
                opened = self._record_handle(file, held)
            undo.pop_all()
        self._files.add_handle(file, opened.handle, True)
        self._inode = inode
        return opened
