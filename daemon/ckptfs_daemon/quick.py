"""Owns the answers that need no waiting: most lookups, getattrs and creates, with nothing between the request and the catalog.

pyfuse3 makes a task, a context and a reply object of each request, which costs more than these answers themselves. What cannot be answered
at once is left to pyfuse3's handlers, which begin anew and know everything: a directory that was not imported yet, a tier that may hang or
is full, a request that was sent again, what is in no catalog, an error; with other nodes, all that must be asked of the store or told it.
If we die here: see handler.py; a create is committed before it is answered.
"""

from ckptfs import limits
from ckptfs.catalog import namespace
from ckptfs.model import ROOT, DataPath
from ckptfs_daemon import door, edge, replies
from ckptfs_daemon.creating import Creating
from ckptfs_daemon.handler import Handler
from ckptfs_daemon.latest_names import is_virtual
from ckptfs_daemon.wishes import Opened


class QuickOperations(Handler):
    """What the door asks first."""

    def serve_quick(self) -> None:
        """Take these answers on; before the session is opened."""
        passthrough = self.context.data_path is DataPath.PASSTHROUGH
        self._gather_bytes = replies.GATHER_BYTES if passthrough else replies.BLOCK_BYTES
        alone = self.context.sharing is None
        self._kept_s = limits.ATTRIBUTE_TIMEOUT_S if alone else limits.SHARED_ATTRIBUTE_TIMEOUT_S
        self._written_s = limits.WRITTEN_ATTRIBUTE_TIMEOUT_S if passthrough else self._kept_s
        self._name_s = limits.ENTRY_TIMEOUT_S if alone else 0
        self._nothing_out = replies.NOTHING_OUT if alone else replies.NOTHING_NOW_OUT
        door.on_quick(lookup=self._quick_lookup, getattr=self._quick_getattr, create=self._quick_create)

    def _known_s(self, inode: int) -> float:
        """How long the kernel may believe the attributes of an inode."""
        return self._written_s if self.context.open_files.is_written(inode) else self._kept_s

    def _quick_lookup(self, req: int, parent: int, name: bytes, pid: int) -> bool:
        if is_virtual(parent) or (parent == ROOT and name == namespace.RESERVED_NAME):
            return False
        if self.walks is not None and (self.walks.was_misled(pid) or not self.walks.knows_name(pid, parent, name)):
            return False
        try:
            inode = namespace.lookup(self.context.db, parent, name)
        except FileNotFoundError:
            door.reply(req, self._nothing_out)
            return True
        inode = self.context.open_files.attributes(inode)
        door.reply(req, replies.entry_out(inode, self._gather_bytes, self._known_s(inode.id), self._name_s))
        if self.walks is not None:
            self.walks.reached(pid, inode.id)
        return True

    def _quick_getattr(self, req: int, number: int, pid: int) -> bool:
        if self.walks is not None and not self.walks.knows_inode(pid, number):
            return False
        inode = self.context.open_files.attributes(self.current(number))
        door.reply(req, replies.attr_out(inode, self._gather_bytes, self._known_s(number)))
        return True

    def _quick_create(self, req: int, parent: int, name: bytes, mode: int, uid: int, gid: int) -> bool:
        request = edge.request()
        if self.walks is not None or request.again or is_virtual(parent):
            return False
        creating = Creating(self.context, request, parent, name, mode, (uid, gid))
        opened = creating.at_once()
        if opened is None:
            return False
        entry = replies.entry_out(creating.inode, self._gather_bytes, self._written_s)
        door.reply(req, entry + self._open_out(opened))
        return True

    def _open_out(self, opened: Opened) -> bytes:
        flags = door.FOPEN_DIRECT_IO if opened.direct else 0
        if opened.backing:
            # Where the kernel keeps no pages there is nothing to flush: saves a round trip at each close.
            flags |= door.FOPEN_PASSTHROUGH | door.FOPEN_NOFLUSH
        elif self.context.data_path is DataPath.BUFFERED:
            flags |= door.FOPEN_KEEP_CACHE
        return replies.open_out(opened.fh, flags, opened.backing)
