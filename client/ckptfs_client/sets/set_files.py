"""What `ckptfs restore` and `ckptfs verify` do with the files of a set (D12, H8).

Restore reads the files through the mount and writes them into a temporary directory beside their place. Each is compared with its digest in
the manifest. Renames then give them their names. So a set is restored as a whole, and what fails leaves nothing. Owners (for root), modes,
times and extended attributes of users are kept. What lies at that place is replaced only if the set has it, too, or by --force.

For verify, the daemon reads what the format of a file shows of itself (zip, safetensors, HDF5, ...), wherever its bytes are. Whether the
files of a set fit together (`.metadata` of torch.distributed.checkpoint, index files) is judged by the daemon as well. Names and digests
are compared with the manifest.

Crash safety: a temporary directory `.NAME.ckptfs-restore-*` is left, which no program takes for a checkpoint.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ckptfs import limits
from ckptfs.digest import RunningDigest
from ckptfs.quantities import format_count, format_size
from ckptfs.series import set_kinds
from ckptfs.series.file_formats import FileFormat
from ckptfs_client.errors import ClientError, CommandFailed, UsageError
from ckptfs_client.json_answers import FormatJson, RestoreJson, VerifyJson
from ckptfs_client.mounts import DIGEST_XATTR, build_path_error, find_inode
from ckptfs_client.render import ProgressBar, message_to_dict
from ckptfs_client.sets.set_changes import is_same_file
from ckptfs_client.sets.set_history import FoundSet, SetHistory, split_number
from ckptfs_client.sets.set_listing import MANIFEST_FILES, FileOfSet, get_digests, list_set_files, load_manifest

PIECE_BYTES = limits.BLOCK_BYTES
NEW, REPLACED = "new", "replaced"
"""The directories in the temporary one: what is copied, and what it replaces."""
FORMAT_XATTR = "user.ckptfs.format"
FLAW_XATTR = "user.ckptfs.flaw"


class Restore(NamedTuple):
    """A set and the directory into which it goes."""

    history: SetHistory
    found: FoundSet
    directory: Path

    @property
    def target(self) -> Path:
        """The directory that gets the files."""
        return self.directory if self.found.set.group else self.directory / self.found.name

    def run(self, *, force: bool) -> RestoreJson:
        """Restore the set. Raises CommandFailed, UsageError."""
        files = list_set_files(self.history, self.found)
        if not files:
            raise CommandFailed(f"{self.found.shown}: the set has no file now", remedy=f"ckptfs list '{self.found.series.shown}'")
        if all(map(self._is_own, files)):
            return {"set": self.found.shown, "path": str(self.shown_path), "files": 0, "bytes": 0}
        if not force:
            self._require_nothing_lost(files)
        try:
            with self._made_directory(), self._temporary_directory() as made:
                size = self._copy(files, made / NEW)
                self._publish(made / NEW, made / REPLACED)
        except OSError as failure:
            raise build_path_error(failure.filename or self.target, failure) from failure
        return {"set": self.found.shown, "path": str(self.shown_path), "files": len(files), "bytes": size}

    @property
    def shown_path(self) -> Path:
        """What a program is given to read the set."""
        return self.directory / self.found.name

    # --- what is there ------------------------------------------------------------------------------------------------

    def _is_own(self, file: FileOfSet) -> bool:
        """Return True if the file is in its place already."""
        return is_same_file(self.found, file, os.path.join(os.fsencode(self.target), file.path))

    def _require_nothing_lost(self, files: list[FileOfSet]) -> None:
        """Raise CommandFailed if something lies at the place that the set does not have."""
        known = {file.path: file for file in files}
        for path in self._list_present(files):
            if path not in known or not self._is_own(known[path]):
                remedy = f"--force replaces it, or name another directory: ckptfs restore '{self.found.shown}' DIR"
                place = self.target / os.fsdecode(path)
                raise CommandFailed(f"{place} is not a file of {self.found.shown}, and would be lost", remedy=remedy)

    def _list_present(self, files: list[FileOfSet]) -> Iterator[bytes]:
        """Yield the paths, below the place, of files that a restore would replace."""
        top = os.fsencode(self.target)
        if self.found.set.group:
            yield from (file.path for file in files if os.path.lexists(os.path.join(top, file.path)))
        elif os.path.lexists(top) and not (os.path.isdir(top) and not os.path.islink(top)):
            yield b""
        else:
            for directory, _, names in os.walk(top):
                yield from (os.path.relpath(os.path.join(directory, name), top) for name in names)

    # --- copying ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _made_directory(self) -> Iterator[None]:
        """Make the directory and those above it, with the attributes that the history remembers."""
        missing = [one for one in (self.directory, *self.directory.parents) if not one.exists()]
        for one in reversed(missing):
            one.mkdir()
            mount = self.history.mount
            if one.is_relative_to(mount.mountpoint):
                with contextlib.suppress(FileNotFoundError):
                    _copy_attributes(mount.history / one.relative_to(mount.mountpoint), one)
        if not self.directory.is_dir():
            raise UsageError(f"{self.directory} is not a directory")
        try:
            yield
        except BaseException:
            for one in missing:
                with contextlib.suppress(OSError):
                    one.rmdir()
            raise

    @contextlib.contextmanager
    def _temporary_directory(self) -> Iterator[Path]:
        made = Path(tempfile.mkdtemp(prefix=f".{self.found.name[:128]}.ckptfs-restore-", dir=self.directory))
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _copy(self, files: list[FileOfSet], new: Path) -> int:
        """Copy all files and their directories. Returns bytes. Raises CommandFailed if a digest differs."""
        digests = get_digests(load_manifest(self.found))
        if missing := digests.keys() - {file.path for file in files}:
            raise CommandFailed(f"{self.found.history / os.fsdecode(min(missing))} is missing, which the manifest names")
        total, copied = sum(file.status.st_size for file in files if not file.is_symlink), 0
        with ProgressBar(f"restoring {self.found.shown}") as bar:
            for file in files:
                source, copy = (top / os.fsdecode(file.path) for top in (self.found.history, new))
                copy.parent.mkdir(parents=True, exist_ok=True)
                if file.is_symlink:
                    copy.symlink_to(os.readlink(source))
                    _copy_attributes(source, copy)
                    continue
                digest = RunningDigest()
                for count in self._copy_file(source, copy, digest):
                    copied += count
                    bar.update(total - copied, f"{format_size(copied)} of {format_size(total)}")
                if digest.finish()[0].hex() != (digests.get(file.path) or _read_digest(source)):
                    raise CommandFailed(f"{source} differs from its digest", remedy=f"ckptfs verify '{self.found.shown}'")
                _copy_attributes(source, copy)
                copy.chmod(stat.S_IMODE(file.record.mode))
        for directory, _, _ in os.walk(new, topdown=False):
            _copy_attributes(self.found.history / os.path.relpath(directory, new), Path(directory))
        return copied

    def _copy_file(self, source: Path, copy: Path, digest: RunningDigest) -> Iterator[int]:
        """Copy a file, and add it to a digest. Yields the bytes of each piece."""
        with open(source, "rb", buffering=0) as reader, open(copy, "xb") as writer:
            while piece := reader.read(PIECE_BYTES):
                digest.update(piece)
                writer.write(piece)
                yield len(piece)
            writer.flush()
            if os.fstat(writer.fileno()).st_dev != self.history.mount.device:
                os.fsync(writer.fileno())

    def _publish(self, new: Path, replaced: Path) -> None:
        """Give the copies their names. The file that tells that a set is complete comes last."""
        if self.found.set.group:
            lasts = [kind.last for kind in set_kinds.KINDS]
            for name in sorted(os.listdir(new), key=lambda name: (any(one.fullmatch(os.fsencode(name)) for one in lasts), name)):
                os.replace(new / name, self.target / name)
            return
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.target, replaced)
        try:
            os.rename(new, self.target)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.rename(replaced, self.target)
            raise


def _read_digest(source: Path) -> str:
    """Return the digest that the daemon knows of a file. Raises CommandFailed."""
    try:
        return os.getxattr(source, DIGEST_XATTR).decode()
    except OSError as failure:
        raise CommandFailed(f"{source}: its digest is not known, so a copy cannot be verified") from failure


def _copy_attributes(source: Path, copy: Path) -> None:
    """Copy owner (root only), mode, times and extended attributes of users."""
    if os.geteuid() == 0:
        status = os.lstat(source)
        os.chown(copy, status.st_uid, status.st_gid, follow_symlinks=False)
    shutil.copystat(source, copy, follow_symlinks=False)


# --- verify -----------------------------------------------------------------------------------------------------------


def verify(path: Path, total: VerifyJson) -> None:
    """Verify a path, a series or a set, and add what was found to `total`. Raises ClientError."""
    with SetHistory.of(path) as history:
        sets = _list_meant_sets(history, path)
        for top in [path] if os.path.lexists(path) or not sets else [found.history for found in sets]:
            _verify_copies(history, top, total)
            total["formats"] += list_formats(top)
        total["formats"] += [judge_set(history, found) for found in sets]


def _verify_copies(history: SetHistory, top: Path, total: VerifyJson) -> None:
    """Have the daemon read every copy of the files at or below a path, and follow it."""
    _, inode = find_inode(top)
    last = None
    with ProgressBar(f"verifying {top}") as bar:
        for last in history.client.verify(inode):
            total["findings"] += map(message_to_dict, last.findings)
            words = f"{last.files} of {format_count(last.files_total, 'file')}, {format_size(last.bytes)}"
            bar.update(max(0, last.files_total - last.files), words)
    if last is not None:
        total["files"] += last.files
        total["bytes"] += last.bytes


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
