"""P2: a kill in the middle of rename(2) on the buffered path must not make the next close(2) of the file fail."""

import errno
import queue

import trio
from ckptfs_daemon.mount import context
from ckptfs_daemon.mount.context import RenamedFiles
from shared_catalogs import in_virtual_time


def test_only_files_whose_times_do_not_come_are_forgotten() -> None:
    in_virtual_time(_play)


async def _play() -> None:
    files, forgotten = RenamedFiles(), queue.SimpleQueue[tuple[int, bytes]]()

    def forget(parent: int, name: bytes) -> None:
        forgotten.put((parent, name))
        raise OSError(errno.ENOENT, "the kernel does not know it")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(files.run, forget)
        files.add(5, 1, b"killed")
        files.add(6, 1, b"well")
        files.remove(6)
        await trio.sleep(context.TIMES_WAIT_S / 2)
        assert forgotten.empty(), "the kernel may be about to send them"
        assert await trio.to_thread.run_sync(forgotten.get) == (1, b"killed")
        files.add(5, 2, b"again")
        files.add(5, 2, b"elsewhere")
        assert await trio.to_thread.run_sync(forgotten.get) == (2, b"elsewhere")
        assert forgotten.empty()
        nursery.cancel_scope.cancel()
