"""P3, N4: with fsync=clique the fsync of a directory returns when the other nodes know its names; on an island it fails, or degrades."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from ckptfs_daemon.mount.context import ChangeRunner
from ckptfs_daemon.mount.handlers.file_handlers import FileHandlers

from ckptfs.catalog import database
from ckptfs.catalog.database import Database
from ckptfs.coherence import key_state
from ckptfs.coherence.keys import NAME, SharedKey
from ckptfs.model import CliqueLost

DIRECTORY, OTHER = 7, 8
WAIT_S = 30.0


def fsync(db: Database, clique_lost: CliqueLost, *, back_s: float, island: bool = True) -> int:
    """The errno of an fsync of a directory, 0 for none; etcd answers again after a while."""

    async def published() -> bool:
        return True

    async def main() -> int:
        context: Any = SimpleNamespace(
            db=db,
            config=SimpleNamespace(clique_lost=clique_lost, clique_wait_s=WAIT_S),
            shared_namespace=SimpleNamespace(is_disconnected=island, wait_published=published),
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
def test_the_names_of_a_directory(tmp_path: Path, directory: int, clique_lost: CliqueLost, back_s: float, code: int) -> None:
    database.create(tmp_path / "catalog.db")
    db = Database(tmp_path / "catalog.db", journalled=False)
    key_state.mark_dirty(db, SharedKey(NAME, directory, b"made on the island"))
    assert fsync(db, clique_lost, back_s=back_s) == code
