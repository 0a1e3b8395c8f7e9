"""The inspect step: what a file whose bytes are only on other nodes shows of itself.

Takes: inspect requests for files that `.ckptfs/latest` judges and that have no copy on this node.
Leaves: the answer, as `FileFormat.encode`. Nothing is kept of the bytes: a few blocks are read into a file in memory.
If we die here: nothing was changed; the request is still open and is taken again.

Only blocks with the beginning and the end of the file travel, verified like those of a fetch.
"""

import errno
import logging
import os

from ckptfs import digest, disk, limits
from ckptfs.catalog import copies, mover_requests
from ckptfs.catalog.copies import FetchState
from ckptfs.catalog.database import Database
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.membership import Node
from ckptfs.clique.peer_api import ContentManifest, PeerFailed
from ckptfs.errors import CkptfsError
from ckptfs.model import Content, ContentState, Notifier
from ckptfs.series import file_formats
from ckptfs.series.file_formats import FileFormat
from ckptfs.series.pickle_scan import TooLong

log = logging.getLogger(__name__)


class InspectFile:
    """Answers inspect requests, each from the first live node that has the content."""

    def __init__(self, db: Database, notify: Notifier, cluster: Cluster) -> None:
        self._db = db
        self._notify = notify
        self._cluster = cluster

    def step(self) -> bool:
        """Answer one request. Return True if there may be more at once."""
        requests = mover_requests.list_open(self._db, mover_requests.INSPECT, at_most=1)
        for request in requests:
            state = copies.load_fetch_state(self._db, request.inode)
            try:
                found = self._inspect(state)
            except (OSError, CkptfsError) as failure:
                log.debug("inode %d: cannot be inspected: %s", request.inode, failure)
                mover_requests.mark_failed(self._db, request.id, failure.errno or errno.EIO)
            else:
                mover_requests.mark_done(self._db, request.id, found.encode().decode())
            self._notify.notify_replies()
        return bool(requests)

    def next_due_s(self) -> float | None:
        """Return None: only a request starts a step."""
        return None

    def _inspect(self, state: FetchState | None) -> FileFormat:
        """Return what the file shows. Raises PeerFailed if no live node has it."""
        content = None if state is None else state.content
        if state is None or content is None or content.state is not ContentState.SEALED:
            raise PeerFailed("the file is not sealed")
        problem = PeerFailed("no live node has a copy")
        nodes = self._cluster.list_live(list(state.holders))
        for node in nodes:
            try:
                manifest = self._cluster.peers.get_manifest(node, content.id, content.digest)
                return self._inspect_blocks(state.path, content, manifest, nodes)
            except PeerFailed as failure:
                problem = failure
        raise problem

    def _inspect_blocks(self, path: str, content: Content, manifest: ContentManifest, nodes: list[Node]) -> FileFormat:
        present: set[int] = set()
        with disk.closing(os.memfd_create("ckptfs-inspect", os.MFD_CLOEXEC)) as fd:
            os.ftruncate(fd, manifest.size)

            def read(offset: int, length: int) -> bytes:
                wanted = digest.get_block_range(offset, length, manifest.size)
                if missing := [number for number in wanted if number not in present]:
                    if len(present) + len(missing) > limits.INSPECTED_BLOCKS_MAX:
                        raise TooLong
                    self._cluster.peers.fetch(nodes, manifest, missing, fd)
                    present.update(missing)
                return os.pread(fd, max(0, min(length, manifest.size - offset)), offset)

            return file_formats.inspect(os.path.basename(os.fsencode(path)), content.size, read)
