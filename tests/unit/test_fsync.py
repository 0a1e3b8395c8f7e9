"""P3, N4: with fsync=pfs, fsync returns when the PFS has everything and the catalog says so after a power cut, and not before. With
fsync=clique, the fsync of a directory returns when the other nodes know its names; on an island it fails, or degrades.
"""

import errno
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from ckptfs_daemon.mount.context import ChangeRunner
from ckptfs_daemon.mount.handlers.file_handlers import FileHandlers
from ckptfs_daemon.mount.open_files.mover_client import MoverClient

from ckptfs import limits
from ckptfs.catalog import journal
from ckptfs.catalog.database import Database
from ckptfs.coherence import key_state
from ckptfs.coherence.keys import NAME, SharedKey
from ckptfs.errors import TimedOut
from ckptfs.model import CliqueLost

FILE = 7


class Fsync:
    """An fsync of a file with a change that the PFS lacks."""

    def __init__(self, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        self.db = db
        self.messages: list[bytes] = []
        self.persisted: list[bool] = []
        """Whether the PFS had everything, at each sync of the catalog."""
        self.mover_client = MoverClient(db, SimpleNamespace(notify=self.messages.append))  # type: ignore[arg-type]
        context: Any = SimpleNamespace(db=db, mover_client=self.mover_client)
        self._handlers = FileHandlers(context, ChangeRunner(context))
        with db.transaction():
            journal.append(db, "synced", FILE)
        monkeypatch.setattr(db, "persist", lambda: self.persisted.append(journal.get_last_seq(db, FILE) == 0))

    async def run(self) -> None:
        await self._handlers._wait_journal_applied(FILE, journal.get_last_seq(self.db, FILE))


async def test_fsync_returns_when_the_pfs_has_everything(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = Fsync(db, monkeypatch)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fsync.run)
            await trio.testing.wait_all_tasks_blocked()
            fsync.mover_client.wake_waiters()
            await trio.testing.wait_all_tasks_blocked()
            assert len(fsync.messages) > 1 and not fsync.persisted, "the mover works at once; another reply changes nothing"
            with db.transaction():
                db.run("UPDATE journal SET seq = seq + 1")  # A later change is not waited for.
            fsync.mover_client.wake_waiters()
    assert fsync.persisted == [False], "the later change is still missing"


def test_fsync_fails_if_the_pfs_never_has_it(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = Fsync(db, monkeypatch)
    with pytest.raises(TimedOut):
        trio.run(fsync.run, clock=trio.testing.MockClock(autojump_threshold=0))
    assert len(fsync.messages) >= limits.FSYNC_LEVEL_WAIT_S / limits.REQUEST_POLL_S and not fsync.persisted


async def test_what_the_pfs_has_is_on_disk_before_the_answer(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = Fsync(db, monkeypatch)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fsync.run)
            await trio.testing.wait_all_tasks_blocked()
            db.run("DELETE FROM journal")
            fsync.mover_client.wake_waiters()
    assert fsync.persisted == [True]


# --- directories -----------------------------------------------------------------------------------------------------


DIRECTORY, OTHER = 7, 8
WAIT_S = 30.0


def fsync(db: Database, clique_lost: CliqueLost, *, back_s: float) -> int:
    """The errno of an fsync of a directory, 0 for none; etcd answers again after a while."""

    async def published() -> bool:
        return True

    async def main() -> int:
        context: Any = SimpleNamespace(
            db=db,
            config=SimpleNamespace(clique_lost=clique_lost, clique_wait_s=WAIT_S),
            shared_namespace=SimpleNamespace(is_disconnected=True, wait_published=published),
        )

        async def return_later() -> None:
            await trio.sleep(back_s)
            key_state.mark_clean(db, key_state.list_dirty_names(db), key_state.get_last_change(db))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(return_later)
            try:
                await FileHandlers(context, ChangeRunner(context))._wait_names_published(DIRECTORY)
            except Exception as failure:
                return int(getattr(failure, "errno", None) or -1)
            finally:
                nursery.cancel_scope.cancel()
        return 0

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize(
    ("directory", "clique_lost", "back_s", "code"),
    [
        (DIRECTORY, CliqueLost.ERROR, WAIT_S / 2, 0),
        (DIRECTORY, CliqueLost.ERROR, WAIT_S * 2, errno.EIO),
        (DIRECTORY, CliqueLost.LOCAL, WAIT_S * 2, 0),
        (OTHER, CliqueLost.ERROR, WAIT_S * 2, 0),
    ],
    ids=["etcd comes back", "it does not", "and that is all right", "nothing changed there"],
)
def test_the_names_of_a_directory(db: Database, directory: int, clique_lost: CliqueLost, back_s: float, code: int) -> None:
    key_state.mark_dirty(db, SharedKey(NAME, directory, b"made on the island"))
    assert fsync(db, clique_lost, back_s=back_s) == code
