"""P2: a kill in the middle of rename(2), link(2) and the like on the buffered path must not make the next close(2) of the file fail."""

import errno
import queue

import trio
from ckptfs_daemon.mount import context
from ckptfs_daemon.mount.context import UnsentTimes
from shared_catalogs import in_virtual_time


def test_only_files_whose_times_do_not_come_are_forgotten() -> None:
    in_virtual_time(_play)


async def _play() -> None:
    files, forgotten = UnsentTimes(), queue.SimpleQueue[tuple[int, bytes]]()
    names = {5: [(1, b"killed")], 6: [(1, b"well")]}

    def forget(parent: int, name: bytes) -> None:
        forgotten.put((parent, name))
        raise OSError(errno.ENOENT, "the kernel does not know it")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(files.run, names.__getitem__, forget)
        files.add(5)
        files.add(6)
        files.remove(6)
        await trio.sleep(context.TIMES_WAIT_S / 2)
        assert forgotten.empty(), "the kernel may be about to send them"
        assert await trio.to_thread.run_sync(forgotten.get) == (1, b"killed")
        files.add(5)
        files.add(5)
        names[5] = [(2, b"elsewhere"), (1, b"linked")]
        assert [await trio.to_thread.run_sync(forgotten.get) for _ in names[5]] == names[5]
        assert forgotten.empty()
        nursery.cancel_scope.cancel()
