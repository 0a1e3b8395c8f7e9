"""A PFS that stops answering: a small read-only FUSE filesystem in a process of its own, with run/step_1 in it.

It hangs between `hang()` and `answer()`, and every system call on it then waits in the kernel. Nobody may write to it.
If we die here: the process ends with its mount when its standard input closes.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from daemon_under_test import environment

FILES = {1: (b"", {b"run": 2}), 2: (b"", {b"step_1": 3}), 3: (b"the newest checkpoint", {})}
"""Inode -> (bytes, names in it)."""


class HangingPfs:
    """The filesystem, mounted at `root`."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, str(Path(__file__)), str(root)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True)
        assert self._process.stdout is not None and self._process.stdout.readline() == "mounted\n"

    def hang(self) -> None:
        """From now on nothing is answered."""
        self._tell("hang")

    def answer(self) -> None:
        """Answer again, also what was asked meanwhile."""
        self._tell("answer")

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == f"{word}\n"

    def close(self) -> None:
        """Unmount; calls that hang fail."""
        self._process.kill()
        self._process.wait()


@contextmanager
def mounted_at(root: Path) -> Iterator[HangingPfs]:
    """Mount it at `root` for a block."""
    pfs = HangingPfs(root)
    try:
        yield pfs
    finally:
        pfs.close()
        subprocess.run(["umount", "-l", root], check=False, capture_output=True)


def _serve(root: str) -> None:
    import errno
    import stat

    import pyfuse3
    import trio

    class Tree(pyfuse3.Operations):  # type: ignore[misc]
        answers = trio.Event()

        def _attributes(self, inode: int) -> pyfuse3.EntryAttributes:
            data, names = FILES[inode]
            entry = pyfuse3.EntryAttributes()
            entry.st_ino, entry.st_size, entry.st_nlink = inode, len(data), 1
            entry.st_mode = stat.S_IFDIR | 0o755 if names else stat.S_IFREG | 0o644
            return entry

        async def lookup(self, parent: int, name: bytes, ctx: object) -> pyfuse3.EntryAttributes:
            await self.answers.wait()
            if name not in FILES[parent][1]:
                raise pyfuse3.FUSEError(errno.ENOENT)
            return self._attributes(FILES[parent][1][name])

        async def getattr(self, inode: int, ctx: object) -> pyfuse3.EntryAttributes:
            await self.answers.wait()
            return self._attributes(inode)

        async def opendir(self, inode: int, ctx: object) -> int:
            await self.answers.wait()
            return inode

        async def readdir(self, fh: int, start: int, token: object) -> None:
            await self.answers.wait()
            for number, (name, inode) in list(enumerate(FILES[fh][1].items(), 1))[start:]:
                if not pyfuse3.readdir_reply(token, name, self._attributes(inode), number):
                    return

        async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
            await self.answers.wait()
            return pyfuse3.FileInfo(fh=inode)

        async def read(self, fh: int, offset: int, size: int) -> bytes:
            await self.answers.wait()
            return FILES[fh][0][offset : offset + size]

        async def mkdir(self, *_: object) -> None:
            await self.answers.wait()
            raise pyfuse3.FUSEError(errno.EPERM)

        async def statfs(self, ctx: object) -> pyfuse3.StatvfsData:
            await self.answers.wait()
            return pyfuse3.StatvfsData()

    tree = Tree()
    tree.answers.set()
    pyfuse3.init(tree, root, {*pyfuse3.default_options, "fsname=hanging-pfs", "allow_other"})

    async def obey() -> None:
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            if line == "hang\n":
                tree.answers = trio.Event()
            else:
                tree.answers.set()
            print(line, end="", flush=True)
        os._exit(0)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pyfuse3.main)
            nursery.start_soon(obey)
            print("mounted", flush=True)

    trio.run(main)


if __name__ == "__main__":
    _serve(sys.argv[1])
