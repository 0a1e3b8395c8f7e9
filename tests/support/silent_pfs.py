"""A filesystem that passes everything through to a directory, and stops answering when told: a PFS whose servers are gone.

`SilentPfs` starts it as a process of its own. `hang()` leaves every request unread, `swallow()` reads requests and never answers them:
their callers cannot even be killed then. `resume()` answers everything. `hang_reads(NAME)` hangs the reads of one file.

Run as a program: SOURCE MOUNTPOINT READY_FD HIGHEST_BIT, which is added to the inode numbers: some filesystems make them of hashes.
If we die here: `umount -l` of the mountpoint ends the process.
"""

import contextlib
import ctypes
import errno
import functools
import os
import signal
import stat
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

MNT_DETACH, MNT_FORCE = 2, 1


class SilentPfs:
    """The process and its mount."""

    def __init__(self, root: Path, highest_bit: int = 0) -> None:
        self.source, self.path, self.hanging = root / "behind", root / "pfs-mount", root / "behind-hanging"
        for directory in (self.source, self.path):
            directory.mkdir(exist_ok=True)
        ready, child_end = os.pipe()
        command = [sys.executable, __file__, str(self.source), str(self.path), str(child_end), str(highest_bit)]
        self.process = subprocess.Popen(command, pass_fds=[child_end], start_new_session=True)
        os.close(child_end)
        with os.fdopen(ready, "rb") as pipe:
            assert pipe.read(2) == b"ok", "the filesystem of the test does not start"

    def hang(self) -> None:
        """Read no request from now on."""
        self.process.send_signal(signal.SIGSTOP)

    def swallow(self) -> None:
        """Read every request from now on, and answer none."""
        self.process.send_signal(signal.SIGUSR1)

    def hang_reads(self, name: str, *, end: bool = False) -> None:
        """Answer no read of this file from now on, or answer them again."""
        self.hanging.mkdir(exist_ok=True)
        (self.hanging / name).unlink() if end else (self.hanging / name).touch()

    def resume(self) -> None:
        """Answer what has come and what will come."""
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGUSR2)

    def close(self) -> None:
        self.resume()
        ctypes.CDLL(None).umount2(os.fsencode(self.path), MNT_FORCE | MNT_DETACH)
        self.process.kill()
        self.process.wait(60)


def _serve(source: str, mountpoint: str, ready: int, highest_bit: int) -> None:
    import pyfuse3
    import trio

    gate = trio.Event()
    gate.set()

    def gated(handler: Any) -> Any:
        @functools.wraps(handler)
        async def wrapped(*arguments: Any, **named: Any) -> Any:
            await gate.wait()
            try:
                return await handler(*arguments, **named)
            except OSError as failure:
                raise pyfuse3.FUSEError(failure.errno or errno.EIO) from failure

        return wrapped

    class Through(pyfuse3.Operations):
        enable_writeback_cache = False

        def __init__(self) -> None:
            super().__init__()
            self.paths: dict[int, set[bytes]] = defaultdict(set)
            self.paths[pyfuse3.ROOT_INODE].add(os.fsencode(source))

        def _path(self, inode: int, name: bytes = b"") -> bytes:
            for path in self.paths.get(inode, ()):
                if os.path.lexists(path):
                    return os.path.join(path, name) if name else path
            raise OSError(errno.ESTALE, "stale")

        def _entry(self, path: bytes | int) -> Any:
            found = os.stat(path, follow_symlinks=False) if isinstance(path, bytes) else os.fstat(path)
            entry = pyfuse3.EntryAttributes()
            for field in (
                "st_ino", "st_mode", "st_nlink", "st_uid", "st_gid", "st_rdev", "st_size", "st_atime_ns", "st_mtime_ns", "st_ctime_ns",
                "st_blksize", "st_blocks",
            ):  # fmt: skip
                setattr(entry, field, getattr(found, field))
            entry.generation, entry.entry_timeout, entry.attr_timeout = 0, 0, 0
            entry.st_ino |= highest_bit
            if path == os.fsencode(source):
                entry.st_ino = pyfuse3.ROOT_INODE
            if isinstance(path, bytes):
                self.paths[entry.st_ino].add(path)
            return entry

        @gated
        async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> Any:
            return self._entry(self._path(parent, name))

        @gated
        async def getattr(self, inode: int, ctx: Any = None) -> Any:
            return self._entry(self._path(inode))

        @gated
        async def setattr(self, inode: int, attr: Any, fields: Any, fh: int | None, ctx: Any) -> Any:
            path = self._path(inode)
            if fields.update_size:
                os.truncate(path, attr.st_size)
            if fields.update_mode:
                os.chmod(path, stat.S_IMODE(attr.st_mode))
            if fields.update_uid or fields.update_gid:
                os.lchown(path, attr.st_uid if fields.update_uid else -1, attr.st_gid if fields.update_gid else -1)
            if fields.update_atime or fields.update_mtime:
                now = os.lstat(path)
                times = (
                    attr.st_atime_ns if fields.update_atime else now.st_atime_ns,
                    attr.st_mtime_ns if fields.update_mtime else now.st_mtime_ns,
                )
                os.utime(path, ns=times, follow_symlinks=False)
            return self._entry(path)

        @gated
        async def mkdir(self, parent: int, name: bytes, mode: int, ctx: Any) -> Any:
            os.mkdir(self._path(parent, name), stat.S_IMODE(mode))
            return self._entry(self._path(parent, name))

        @gated
        async def rmdir(self, parent: int, name: bytes, ctx: Any) -> None:
            os.rmdir(self._path(parent, name))

        @gated
        async def unlink(self, parent: int, name: bytes, ctx: Any) -> None:
            os.unlink(self._path(parent, name))

        @gated
        async def symlink(self, parent: int, name: bytes, target: bytes, ctx: Any) -> Any:
            os.symlink(target, self._path(parent, name))
            return self._entry(self._path(parent, name))

        @gated
        async def readlink(self, inode: int, ctx: Any) -> bytes:
            return os.readlink(self._path(inode))

        @gated
        async def link(self, inode: int, parent: int, name: bytes, ctx: Any) -> Any:
            os.link(self._path(inode), self._path(parent, name), follow_symlinks=False)
            return self._entry(self._path(parent, name))

        @gated
        async def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, ctx: Any) -> None:
            old, new = self._path(parent, name), self._path(new_parent, new_name)
            os.rename(old, new)
            for paths in self.paths.values():
                for path in [path for path in paths if path == old or path.startswith(old + b"/")]:
                    paths.discard(path)
                    paths.add(new + path[len(old) :])

        @gated
        async def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: Any) -> Any:
            path = self._path(parent, name)
            fd = os.open(path, flags & ~os.O_NOFOLLOW | os.O_CREAT, stat.S_IMODE(mode))
            return pyfuse3.FileInfo(fh=fd), self._entry(path)

        @gated
        async def open(self, inode: int, flags: int, ctx: Any) -> Any:
            return pyfuse3.FileInfo(fh=os.open(self._path(inode), flags & ~os.O_CREAT))

        @gated
        async def read(self, fh: int, offset: int, length: int) -> bytes:
            name = os.path.basename(os.readlink(f"/proc/self/fd/{fh}"))
            while os.path.exists(os.path.join(source + "-hanging", name)):
                await trio.sleep(0.05)
            return os.pread(fh, length, offset)

        @gated
        async def write(self, fh: int, offset: int, data: bytes) -> int:
            return os.pwrite(fh, data, offset)

        @gated
        async def flush(self, fh: int) -> None:
            """Answered when everything else is."""

        @gated
        async def release(self, fh: int) -> None:
            os.close(fh)

        @gated
        async def fsync(self, fh: int, datasync: bool) -> None:
            os.fsync(fh)

        @gated
        async def fsyncdir(self, fh: int, datasync: bool) -> None:
            """The directory behind is a local one."""

        @gated
        async def opendir(self, inode: int, ctx: Any) -> int:
            return inode

        @gated
        async def readdir(self, inode: int, start: int, token: Any) -> None:
            path = self._path(inode)
            names = sorted(os.fsencode(name) for name in os.listdir(os.fsdecode(path)))
            for number, name in enumerate(names[start:], start + 1):
                with contextlib.suppress(FileNotFoundError):
                    if not pyfuse3.readdir_reply(token, name, self._entry(os.path.join(path, name)), number):
                        return

        @gated
        async def statfs(self, ctx: Any) -> Any:
            found, figures = os.statvfs(source), pyfuse3.StatvfsData()
            for field in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_namemax"):
                setattr(figures, field, getattr(found, field))
            return figures

        @gated
        async def getxattr(self, inode: int, name: bytes, ctx: Any) -> bytes:
            return os.getxattr(self._path(inode), name, follow_symlinks=False)

        @gated
        async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: Any) -> None:
            os.setxattr(self._path(inode), name, value, follow_symlinks=False)

        @gated
        async def listxattr(self, inode: int, ctx: Any) -> Any:
            return [os.fsencode(name) for name in os.listxattr(self._path(inode), follow_symlinks=False)]

    async def main() -> None:
        async def listen() -> None:
            nonlocal gate
            with trio.open_signal_receiver(signal.SIGUSR1, signal.SIGUSR2) as signals:
                os.write(ready, b"ok")
                os.close(ready)
                async for number in signals:
                    if number == signal.SIGUSR1:
                        gate = trio.Event()
                    else:
                        gate.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            await pyfuse3.main(max_tasks=1000)
            nursery.cancel_scope.cancel()

    options = {*pyfuse3.default_options, "fsname=hanging", "allow_other"}
    pyfuse3.init(Through(), mountpoint, options)
    try:
        trio.run(main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
