"""The structure of files and sets, for `ckptfs verify` (H8).

The daemon reads what the format of a file shows of itself (zip, safetensors, HDF5, ...), wherever its bytes are. Whether the files of a set
fit together (`.metadata` of torch.distributed.checkpoint, index files) is judged by the rules of `ckptfs.series`, and its names and digests
by its manifest.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ckptfs import series
from ckptfs.model import Level
from ckptfs.series import Listing
from ckptfs.series.file_formats import FileFormat
from ckptfs_client.errors import ClientError, CommandFailed
from ckptfs_client.json_answers import FormatJson, VerifyJson
from ckptfs_client.mounts import find_inode
from ckptfs_client.node.listing import DIGEST_XATTR
from ckptfs_client.progress_bar import follow_verification
from ckptfs_client.sets.newest import FORMAT_XATTR, PathReader, run_reader
from ckptfs_client.sets.set_history import FoundSet, SetHistory, split_number
from ckptfs_client.sets.set_listing import MANIFEST_FILES, list_set_files, load_manifest


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
        flaw = _find_difference(history, found) or _find_gap(history, found)
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


def _find_gap(history: SetHistory, found: FoundSet) -> str:
    """Return what the rules of its kind have against a set."""
    one = series.parse(os.fsencode(found.series.pattern))
    if one is None:
        return ""
    top = os.fsencode(found.history)
    names = [name for name in os.listdir(top) if os.fsdecode(name) not in MANIFEST_FILES]
    members = {name: os.path.join(top, name) for name in names} if found.set.group else {found.set.name: top}
    result = run_reader(series.find_newest(one, members, SetReader(top), Level.NONE))
    return result.rejected[0].find_obstacle(Level.NONE) if result.rejected else ""


class SetReader(PathReader):
    """`PathReader` over one set: the manifest is none of its files."""

    def __init__(self, top: bytes) -> None:
        self._top = top

    async def list_files(self, entry: bytes) -> Listing[bytes]:
        """List a file or directory of the set."""
        files, directories = await super().list_files(entry)
        if entry == self._top:
            files = {name: file for name, file in files.items() if os.fsdecode(name) not in MANIFEST_FILES}
        return Listing(files, directories)
