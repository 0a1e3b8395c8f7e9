"""What `ckptfs ls` gathers: names and inodes through the mount, what is known of each from the daemon, digests through the mount again.

Everything that tells something about a file passes the kernel's permission checks first: names by reading the directory, digests by
reading an attribute of the file.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

from ckptfs_client import show
from ckptfs_client.client import Client, at
from ckptfs_client.failures import Failed

DIGEST = "user.ckptfs.digest"


def rows(path: Path, *, itself: bool) -> list[dict[str, Any]]:
    """What is known of `path`, or of the entries of the directory it is, sorted by name. Raises Failed, NoMount."""
    client, inode = at(path)
    with client:
        if itself or not path.is_dir() or path.is_symlink():
            return _known(client, [(str(path), path, inode)])
        try:
            with os.scandir(path) as entries:
                found = sorted((entry.name, Path(entry.path), entry.inode()) for entry in entries)
        except OSError as failure:
            raise Failed(f"{path}: {os.strerror(failure.errno or 0)}") from failure
        return _known(client, found)


def _known(client: Client, found: list[tuple[str, Path, int]]) -> list[dict[str, Any]]:
    records = client.records(inode for _, _, inode in found)
    answers = []
    for (name, path, _), record in zip(found, records, strict=True):
        if record.known:
            row = show.plain(record)
            del row["known"]
            answers.append({"name": name, **row, "digest": _digest(path) if record.kind == "file" else ""})
    return answers


def _digest(path: Path) -> str:
    """The digest in hex, as far as the caller may read the file; empty while it is not known."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            return os.getxattr(path, DIGEST, follow_symlinks=False).decode("ascii", "replace")
    return ""
