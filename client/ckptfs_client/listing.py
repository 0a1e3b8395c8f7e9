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
from ckptfs_client.client import Client, open_client
from ckptfs_client.failures import CommandFailed

DIGEST_XATTR = "user.ckptfs.digest"


def list_rows(path: Path, *, itself: bool) -> list[dict[str, Any]]:
    """What is known of `path`, or of the entries of the directory it is, sorted by name. Raises Failed, NoMount."""
    client, inode = open_client(path)
    with client:
        if itself or not path.is_dir() or path.is_symlink():
            return _build_rows(client, [(str(path), path, inode)])
        try:
            with os.scandir(path) as entries:
                found = sorted((entry.name, Path(entry.path), entry.inode()) for entry in entries)
        except OSError as failure:
            raise CommandFailed(f"{path}: {os.strerror(failure.errno or 0)}") from failure
        return _build_rows(client, found)


def _build_rows(client: Client, found: list[tuple[str, Path, int]]) -> list[dict[str, Any]]:
    records = client.list_records(inode for _, _, inode in found)
    answers = []
    for (name, path, _), record in zip(found, records, strict=True):
        if record.known:
            row = show.message_to_dict(record)
            del row["known"]
            answers.append({"name": name, **row, "digest": _read_digest(path) if record.kind == "file" else ""})
    return answers


def _read_digest(path: Path) -> str:
    """The digest in hex, as far as the caller may read the file; empty while it is not known."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            return os.getxattr(path, DIGEST_XATTR, follow_symlinks=False).decode("ascii", "replace")
    return ""
