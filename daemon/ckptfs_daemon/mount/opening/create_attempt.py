"""One create: the attempts of an open, each of which inserts the inode and its name as well.

Crash safety: see `open_attempt`.
"""

from ckptfs.catalog import namespace
from ckptfs.catalog.contents import FileContent
from ckptfs.errors import NoSpace
from ckptfs.model import Inode
from ckptfs_daemon.fuse.request import Request
from ckptfs_daemon.mount.context import MountContext
from ckptfs_daemon.mount.open_files.open_file import OpenFile
from ckptfs_daemon.mount.opening.open_attempt import OpenAttempt
from ckptfs_daemon.mount.opening.open_request import MustWait, OpenRequest, OpenResult


class CreateAttempt(OpenAttempt):
    """The attempts at one create: name, inode, content and handle in one transaction, or none of them."""

    def __init__(
        self, context: MountContext, request: Request, parent: int, name: bytes, mode: int, owner: tuple[int, int], pid: int
    ) -> None:
        super().__init__(context, OpenRequest(0, is_writer=True, truncates=False, fuse_request=request, pid=pid))
        self._parent, self._name, self._mode, self._owner = parent, name, mode, owner
        self._inode: Inode | None = None
        self.allow_unimported = False

    def try_nonblocking(self) -> OpenResult | None:
        """Create without waiting. Returns None, and changes nothing, if something must be waited for."""
        try:
            return self._attempt()
        except (MustWait, NoSpace):
            return None

    @property
    def inode(self) -> Inode:
        """Return the new inode, after success."""
        assert self._inode is not None
        return self._inode

    def _load_or_create(self) -> FileContent:
        """Insert the inode and its name. Raises what `namespace.create` raises, NotImported too."""
        uid, gid = self._owner
        self._inode = namespace.create(
            self._db, self._parent, self._name, self._mode, uid=uid, gid=gid, allow_unimported=self.allow_unimported
        )
        return FileContent(self._inode, None, None, (), False)

    def _act(self, file: OpenFile | None, held: FileContent) -> OpenFile:
        expected_bytes = self._files.expected_sizes.get(self._parent, self._name)
        created = self._create_content(held, expected_bytes, is_new_file=True)
        created.created_as = (self._parent, self._name)
        return created
