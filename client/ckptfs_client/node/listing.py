"""What `ckptfs ls` finds out about files, and its table.

Names and inodes are read through the mount with lstat(2) and readdir(3), and digests with getxattr(2), so the kernel checks the caller's
permissions. In a cluster, lstat also refreshes the name from the other nodes. Levels and copies come from the daemon.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

from ckptfs.quantities import format_size
from ckptfs_client import render
from ckptfs_client.client import Client, build_path_error, open_client
from ckptfs_client.json_answers import LsJson

DIGEST_XATTR = "user.ckptfs.digest"


def list_rows(path: Path, *, itself: bool) -> list[dict[str, Any]]:
    """Return one row for `path` or for each entry of it, sorted by name. Raises CommandFailed, NoMount."""
    client, inode = open_client(path)
    with client:
        if itself or not path.is_dir() or path.is_symlink():
            return _build_rows(client, [(str(path), path, inode)])
        try:
            with os.scandir(path) as entries:
                found = sorted((entry.name, Path(entry.path), entry.inode()) for entry in entries)
        except OSError as failure:
            raise build_path_error(path, failure) from failure
        return _build_rows(client, found)


def _build_rows(client: Client, found: list[tuple[str, Path, int]]) -> list[dict[str, Any]]:
    records = client.list_records((inode for _, _, inode in found), trees=True)
    answers: list[dict[str, Any]] = []
    for (name, path, _), record in zip(found, records, strict=True):
        if record.known:
            row = render.message_to_dict(record)
            del row["known"]
            answer: LsJson = {"name": name, **row, "digest": _read_digest(path) if record.kind == "file" else ""}
            answers.append({**answer})
    return answers


def _read_digest(path: Path) -> str:
    """Return the digest in hex; empty if it is not known yet, or if the caller may not read the file."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            return os.getxattr(path, DIGEST_XATTR, follow_symlinks=False).decode("ascii", "replace")
    return ""


def build_listing(rows: list[dict[str, Any]]) -> Any:
    """Build the table of `ckptfs ls`."""
    table = render.build_grid("level", "state", "gen>", "size>", "copies", "digest", "name")
    for row in rows:
        copies = " ".join(f"{copy['tier']}:{copy['state']}" for copy in row["copies"])
        waiting = " *" if row["pfs_pending"] else ""
        figures = (str(row["generation"]), format_size(row["size"]))
        table.add_row(row["level"] + waiting, row["state"] or row["kind"], *figures, copies, row["digest"][:16], render.escape(row["name"]))
    return table
