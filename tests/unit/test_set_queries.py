"""Questions about series and sets, answered from the catalog: D1, D12, F6."""

import time

import pytest
from ckptfs_client.errors import UsageError
from control_served import Served

from ckptfs import limits
from ckptfs.catalog import history, history_names, inodes, namespace
from ckptfs.catalog.history import Rollback, SetRecord
from ckptfs.model import ROOT


def add_series(served: Served, pattern: bytes, mode: int = 0o755) -> int:
    """Make a directory of the application and a series in it; the series' directory."""
    db = served.node.db
    with db.transaction():
        made = namespace.create(db, ROOT, b"run1", 0o040000 | mode, uid=7, gid=7, allow_unimported=True).id
        return history.insert_series(db, made, pattern).directory


def add_set(served: Served, series: int, number: int, name: bytes, file: int | None = None) -> int:
    """Make a set of one file; its directory."""
    db = served.node.db
    with db.transaction():
        made = history.begin_set(db, series, SetRecord(number, name, (number,), 1, 1234, 5000 + number))
        if file is not None:
            history.insert_link(db, file, made, b"a.pt")
        history.finish_set(db, made)
    return made


def test_series_and_sets(served: Served) -> None:
    db = served.node.db
    file = served.node.inode(served.node.make_sealed(b"a.pt", b"x" * 100))
    series = add_series(served, b"step_*")
    add_set(served, series, 1, b"step_10")
    last = add_set(served, series, 2, b"step_20", file)
    with db.transaction():
        inodes.set_internal_xattr(db, last, history.PIN_XATTR, b"1")
        inodes.set_internal_xattr(db, last, history.NOTE_XATTR, "größer".encode())
        history.set_rollback(db, series, Rollback(1, 17))
    (one,) = served.client.list_series().series
    assert (one.directory, one.path, one.pattern, one.rollback) == (series, b"run1/step_*", b"step_*", 1)
    with db.transaction():
        history.set_rollback(db, series, None)
    newest, first = served.client.list_sets(series)
    (figures,) = served.client.list_series(figures=True).series
    assert (figures.sets, figures.size, figures.newest.number, figures.newest.pinned) == (2, 2468, 2, True)
    assert (figures.newest.name, figures.newest.note, figures.newest.level) == (b"step_20", "größer", "local")
    assert (newest.number, newest.name, newest.size, newest.completed_ns, newest.note) == (2, b"step_20", 1234, 5002, "größer")
    assert (newest.level, newest.in_place, newest.pinned, newest.noted) == ("local", True, True, True)
    assert (first.number, first.level, first.in_place, first.pinned, first.noted) == (1, "none", False, False, False)
    with db.transaction():
        namespace.unlink(db, ROOT, b"a.pt")
    assert not served.client.list_sets(series)[0].in_place
    with pytest.raises(UsageError, match="is not a series of checkpoints"):
        served.client.list_sets(ROOT)


def test_sets_are_in_the_order_of_latest(served: Served) -> None:
    """N2, D2: the numbers in the names decide, and not when a set was completed; a rollback stands above both."""
    db, series = served.node.db, add_series(served, b"epoch=*-step=*.ckpt")
    names = (b"epoch=1-step=20.ckpt", b"epoch=2-step=5.ckpt", b"epoch=1-step=30.ckpt", b"epoch=1-step=20.ckpt", b"epoch=1-step=1\xff.ckpt")
    for number, name in enumerate(names, 1):
        add_set(served, series, number, name)

    def list_numbers() -> list[int]:
        found = [one.number for one in served.client.list_sets(series)]
        assert served.client.list_series(figures=True).series[0].newest.number == found[0]
        return found

    assert list_numbers() == [2, 3, 4, 1, 5]
    with db.transaction():
        history.set_rollback(db, series, Rollback(1, 5003))
    assert list_numbers() == [4, 5, 1, 2, 3], "what was completed since, the target, the rest"


@pytest.mark.parametrize("deletes_first", [True, False])
def test_an_application_that_deletes_the_newest_set_and_saves_an_earlier_step_goes_back(served: Served, deletes_first: bool) -> None:
    """D2. If the set of the earlier step only was completed late, the other one stays the newest."""
    db, series = served.node.db, add_series(served, b"step_*")

    def save(number: int, name: bytes) -> None:
        file = served.node.inode(served.node.make_sealed(name, b"x" * 100))
        with db.transaction():
            inodes.set_attributes(db, file, mtime_ns=time.time_ns())  # That of a tier's file is up to 4 ms old.
        add_set(served, series, number, name, file)

    def delete() -> None:
        with db.transaction():
            namespace.unlink(db, ROOT, b"step_200")

    save(1, b"step_200")
    for act in (delete, lambda: save(2, b"step_100"))[:: 1 if deletes_first else -1]:
        act()
    assert [one.number for one in served.client.list_sets(series)] == ([2, 1] if deletes_first else [1, 2])


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o711])
def test_names_of_a_private_directory_are_not_told(served: Served, mode: int) -> None:
    """F6: any user may ask about any number, and gets figures only."""
    series = add_series(served, b"step_*", mode)
    with served.node.db.transaction():
        inodes.set_internal_xattr(served.node.db, add_set(served, series, 1, b"step_10"), history.NOTE_XATTR, b"secret")
    (one,) = served.client.list_series().series
    assert (one.directory, one.path, one.pattern) == (series, b"", b"")
    (only,) = served.client.list_sets(series)
    assert (only.number, only.name, only.note, only.noted) == (1, b"", "", True)


def test_a_number_of_the_history_is_understood(served: Served) -> None:
    """Programs see what is in the history under other inode numbers."""
    db = served.node.db
    file = served.node.inode(served.node.make_sealed(b"a.pt", b"x" * 100))
    made = add_set(served, add_series(served, b"step_*"), 1, b"step_10", file)
    shown = history_names.find_number(db, made, b"a.pt")
    assert shown is not None and shown != file
    known, directory = served.client.list_records([shown, made | limits.SHOWN_BIT], trees=True)
    assert (known.inode, known.level, known.mode) == (file, "local", 0o100644)
    assert (directory.inode, directory.kind, directory.size) == (made, "directory", 100)
    assert next(served.client.wait(shown, "local", 5.0)).done
    assert list(served.client.verify(made | limits.SHOWN_BIT))[-1].files == 1


def test_more_sets_than_one_message_holds(served: Served) -> None:
    series = add_series(served, b"step_*")
    db = served.node.db
    with db.transaction():
        for number in range(1, 2502):
            add_set(served, series, number, b"step_%d" % number)
    assert [(one.number, one.step) for one in served.client.list_sets(series)] == [(one, str(one)) for one in range(2501, 0, -1)]
    newest = served.client.list_sets(series, 10)
    assert [one.number for one in newest] == list(range(2501, 1501, -1)), "the first message, and no other"
