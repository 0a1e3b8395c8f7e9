"""Opens without a mount: an open file table, and attempts at opens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from ckptfs_daemon.fuse.request import Request
from ckptfs_daemon.mount.cluster.shared_namespace import LocalNamespace
from ckptfs_daemon.mount.open_files.open_file_table import OpenFileTable
from ckptfs_daemon.mount.opening.open_attempt import OpenAttempt
from ckptfs_daemon.mount.opening.open_request import OpenRequest
from local_node import Node

from ckptfs.catalog import namespace, peer_copies
from ckptfs.flow.seal import Seal
from ckptfs.model import ROOT, DataPath


class Opener:
    """What an open needs of a mount process, without a mount."""

    def __init__(self, root: Path) -> None:
        node = Node(root)
        node.make(b"file", b"sealed")
        self.use(node)
        self.seal()

    def use(self, node: Node) -> None:
        """Open files of `node`, first of all its file `file`."""
        self.node = node
        channel = cast(Any, SimpleNamespace(notify=lambda message: None))
        self.files = OpenFileTable(self.node.db, self.node.tiers, None, channel)
        shared: dict[str, Any] = {"db": self.node.db, "tiers": self.node.tiers, "open_files": self.files, "wake_channel": channel}
        shared["mover_client"] = SimpleNamespace(wake_mover=lambda lanes: None)
        self.context = cast(Any, SimpleNamespace(**shared, data_path=DataPath.BUFFERED, shared_namespace=LocalNamespace()))
        self.inode = namespace.lookup(node.db, ROOT, b"file").id
        self.content = node.shown(self.inode) or 0

    def seal(self) -> None:
        Seal(self.node.db, self.node.tiers, self.node.config, self.node.told).step()

    def share(self) -> None:
        """Another node has verified the content."""
        row = self.node.row(self.content)
        assert row.digest is not None
        peer_copies.insert_peer_copy(self.node.db, peer_copies.PeerCopy(row.id, 2, row.generation, row.digest))

    async def open(self, number: int, *, writer: bool, truncates: bool | None = None) -> int:
        request = Request(number, False, False)
        wanted = OpenRequest(self.inode, writer, writer if truncates is None else truncates, request)
        return (await OpenAttempt(self.context, wanted).run()).handle
