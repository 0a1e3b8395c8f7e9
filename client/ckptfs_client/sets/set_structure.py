"""The structure of files and sets, for `ckptfs verify` (H8).

The daemon reads what the format of a file shows of itself (zip, safetensors, HDF5, ...), wherever its bytes are. Whether the files of a set
fit together (`.metadata` of torch.distributed.checkpoint, index files) is judged by the daemon as well. Names and digests are compared with
the manifest.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ckptfs.series.file_formats import FileFormat
from ckptfs_client.errors import ClientError, CommandFailed
from ckptfs_client.json_answers import FormatJson, VerifyJson
from ckptfs_client.mounts import build_path_error, find_inode
from ckptfs_client.node.listing import DIGEST_XATTR
from ckptfs_client.render import follow_verification
from ckptfs_client.sets.set_history import FoundSet, SetHistory, split_number
from ckptfs_client.sets.set_listing import MANIFEST_FILES, list_set_files, load_manifest

FORMAT_XATTR = "user.ckptfs.format"
FLAW_XATTR = "user.ckptfs.flaw"


def verify(path: Path, total: VerifyJson) -> None:
    """Verify a path, a series or a set, and add what was found to `total`. Raises ClientError."""
    with SetHistory.of(path) as history:
        sets = _list_meant_sets(history, path)
        for top in [path] if os.path.lexists(path) or not sets else [found.history for found in sets]:
            _, inode = find_inode(top)
            result = follow_verification(history.client.verify(inode), str(top))
            total["files"] += result["files"]
            total["bytes"] += result["bytes"]
            total["findings"] += result["findings"]
            total["formats"] += list_formats(top)
        total["formats"] += [judge_set(history, found) for found in sets]


def _list_meant_sets(history: SetHistory, path: Path) -> list[FoundSet]:
    """Return the sets that a path stands for; none if it is any other path.

    Raises ClientError if it can only be a set.
    """
    name, number = split_number(path.name)
    try:
        if "*" in name and number is None:
            one = history.find_one_series(path)
            return [FoundSet(one, each) for each in history.list_sets(one)]
        found = history.find_set(path)
    except ClientError:
        if os.path.lexists(path) or not ("*" in name or number is not None):
            return []
        raise
    is_part = os.path.lexists(path) and Path(os.path.abspath(path)) not in (found.history, found.series.place / found.name)
    return [] if is_part else [found]


def list_formats(top: Path) -> Iterator[FormatJson]:
    """Yield what each sealed file at or below a path shows of itself, if its format is known."""
    paths = [str(top)] if not top.is_dir() or top.is_symlink() else [
        os.path.join(directory, name) for directory, _, names in os.walk(top) for name in sorted({*names} - MANIFEST_FILES)
    ]  # fmt: skip
    for path in paths:
        with contextlib.suppress(OSError):  # Not sealed, or no regular file: the digests say so.
            found = FileFormat.decode(os.getxattr(path, FORMAT_XATTR, follow_symlinks=False))
            if found.name or found.flaw:
                yield {"path": path, "format": found.name, "flaw": found.flaw}


def judge_set(history: SetHistory, found: FoundSet) -> FormatJson:
    """Return what is wrong with a set as a whole."""
    try:
        flaw = _find_difference(history, found) or _find_gap(found)
    except CommandFailed as failure:
        flaw = str(failure)
    return {"path": str(found.history), "format": "checkpoint set", "flaw": flaw}


def _find_difference(history: SetHistory, found: FoundSet) -> str:
    """Return how the files differ from the manifest; empty if they do not."""
    present = {one.path: one.status.st_size for one in list_set_files(history, found)}
    for one in load_manifest(found)["files"]:
        path = os.fsencode(one["path"])
        if path not in present:
            return f"{one['path']} is missing, which the manifest names"
        if one["size"] != present[path]:
            return f"{one['path']} has {present[path]} bytes, but the manifest says {one['size']}"
        with contextlib.suppress(OSError):  # Not known now, or the caller may not read the file.
            digest = os.getxattr(found.history / one["path"], DIGEST_XATTR, follow_symlinks=False).decode()
            if one["digest"] not in (None, digest):
                return f"{one['path']} has another digest than the manifest says"
    return ""


def _find_gap(found: FoundSet) -> str:
    """Return what the rules of its kind have against a set."""
    try:
        return os.fsdecode(os.getxattr(found.history, FLAW_XATTR))
    except OSError as failure:
        raise build_path_error(found.history, failure) from failure
