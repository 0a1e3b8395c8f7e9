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
from ckptfs_daemon.creating import CreateAttempt
from ckptfs_daemon.handler import ChangeRunner
from ckptfs_daemon.latest_names import is_virtual
from ckptfs_daemon.wishes import OpenResult


class FastPathHandlers(ChangeRunner):
    """What the door asks first."""

    def register_fast_path(self) -> None:
        """Take these answers on; before the session is opened."""
        passthrough = self.context.data_path is DataPath.PASSTHROUGH
        self._blksize = replies.PASSTHROUGH_BLKSIZE if passthrough else replies.BLOCK_BYTES
        alone = self.context.shared_namespace is None
        self._attr_timeout_s = limits.ATTRIBUTE_TIMEOUT_S if alone else limits.SHARED_ATTRIBUTE_TIMEOUT_S
        self._written_attr_timeout_s = limits.WRITTEN_ATTRIBUTE_TIMEOUT_S if passthrough else self._attr_timeout_s
        self._entry_timeout_s = limits.ENTRY_TIMEOUT_S if alone else 0
        self._negative_entry_out = replies.NEGATIVE_ENTRY_OUT if alone else replies.UNCACHED_NEGATIVE_ENTRY_OUT
        door.set_fast_path_callbacks(lookup=self._fast_lookup, getattr=self._fast_getattr, create=self._fast_create)

    def _get_attr_timeout_s(self, inode: int) -> float:
        """How long the kernel may believe the attributes of an inode."""
        return self._written_attr_timeout_s if self.context.open_files.is_open_for_writing(inode) else self._attr_timeout_s

    def _fast_lookup(self, req: int, parent: int, name: bytes, pid: int) -> bool:
        if is_virtual(parent) or (parent == ROOT and name == namespace.RESERVED_NAME):
            return False
        if self.prefetch is not None and (self.prefetch.has_stale_open(pid) or not self.prefetch.consume_fresh_name(pid, parent, name)):
            return False
        try:
            inode = namespace.lookup(self.context.db, parent, name)
        except FileNotFoundError:
            door.reply(req, self._negative_entry_out)
            return True
        inode = self.context.open_files.get_attributes(inode)
        door.reply(req, replies.entry_out(inode, self._blksize, self._get_attr_timeout_s(inode.id), self._entry_timeout_s))
        if self.prefetch is not None:
            self.prefetch.record_reached(pid, inode.id)
        return True

    def _fast_getattr(self, req: int, number: int, pid: int) -> bool:
        if self.prefetch is not None and not self.prefetch.consume_fresh_inode(pid, number):
            return False
        inode = self.context.open_files.get_attributes(self.get_inode(number))
        door.reply(req, replies.attr_out(inode, self._blksize, self._get_attr_timeout_s(number)))
        return True

    def _fast_create(self, req: int, parent: int, name: bytes, mode: int, uid: int, gid: int) -> bool:
        request = edge.get_current_request()
        if self.prefetch is not None or request.is_resent or is_virtual(parent):
            return False
        creating = CreateAttempt(self.context, request, parent, name, mode, (uid, gid))
        opened = creating.try_nonblocking()
        if opened is None:
            return False
        entry = replies.entry_out(creating.inode, self._blksize, self._written_attr_timeout_s)
        door.reply(req, entry + self._pack_open_out(opened))
        return True

    def _pack_open_out(self, opened: OpenResult) -> bytes:
        flags = door.FOPEN_DIRECT_IO if opened.direct else 0
        if opened.backing_id:
            # Where the kernel keeps no pages there is nothing to flush: saves a round trip at each close.
            flags |= door.FOPEN_PASSTHROUGH | door.FOPEN_NOFLUSH
        elif self.context.data_path is DataPath.BUFFERED:
            flags |= door.FOPEN_KEEP_CACHE
        return replies.open_out(opened.fh, flags, opened.backing_id)
