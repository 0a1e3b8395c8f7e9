"""Owns the table `journal`: what the PFS must be told, in order (P6). Appended in the transaction of the change it records.

Ops: 'make' (a directory, symlink, fifo, socket or device under parent/name; a regular file too, which appears on the PFS with its
first content), 'link' (another name), 'unlink', 'rmdir', 'rename' (parent/name to new_parent/new_name, whatever was there is
replaced), 'exchange', 'attributes' (mode, owner, times, xattrs of an inode, as they are when it is applied), 'content' (a content was
closed), 'synced' (an open file was fsynced).
"""

import time

from ckptfs.catalog.database import Database


def append(
    db: Database, op: str, inode: int, *, parent: int = 0, name: bytes | None = None,
    new_parent: int = 0, new_name: bytes | None = None, content: int | None = None,
) -> None:
    """Record a change for the PFS. Call it inside the change's own transaction; without a PFS it does nothing."""
    if not db.journalled:
        return
    db.run(
        "INSERT INTO journal (op, inode, parent, name, new_parent, new_name, content, at_ns) VALUES (?,?,?,?,?,?,?,?)",
        op, inode, parent, name, new_parent, new_name, content, time.time_ns(),
    )
