"""X4: the numbers under which the history is shown, and what its names tell. P11: what users say of it."""

import errno
import logging
import stat

import pytest
from ckptfs_daemon.mount.handlers.latest_tree import FIRST_INODE, is_virtual
from programs import refusal
from shared_sets import delete_whole_set

from ckptfs import limits
from ckptfs.catalog import history, history_names, inodes, namespace, user_settings
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import SetRecord
from ckptfs.model import ROOT

NAMES = [b"step_1", b"a@b@7", b'"is_group":true', "größe".encode(), b"\xff\n"]


def make_sets(db: Database) -> tuple[int, dict[bytes, int]]:
    """A series with a set for each name, of which every second is a group, with one file; {name: file}."""
    found = {}
    with db.transaction():
        run = namespace.create(db, ROOT, b"run", stat.S_IFDIR | 0o755, uid=7, gid=7).id
        series = history.insert_series(db, run, b"*").directory
        for number, name in enumerate(NAMES, 1):
            made = history.begin_set(db, series, SetRecord(number, name, (number,), 1, 0, number, is_group=number % 2 == 0))
            found[name] = namespace.create(db, run, name, stat.S_IFREG | 0o644, uid=7, gid=7).id
            history.insert_link(db, found[name], made, b"file")
            history.finish_set(db, made)
    return series, found


def test_every_number_leads_back_and_none_is_taken(db: Database) -> None:
    """No inode of a node, of the history or of `latest` has the number of another."""
    series, files = make_sets(db)
    first, last = 1, limits.NODE_NUMBER_MAX << limits.ID_COUNTER_BITS | (1 << limits.ID_COUNTER_BITS) - 1
    assert not any(map(history_names.is_shown, (first, last, FIRST_INODE, (1 << 63) - 1)))
    assert not is_virtual(last | limits.SHOWN_BIT) and history_names.is_shown(last | limits.SHOWN_BIT)
    shown: dict[int, int] = {}
    todo = [series]
    while todo:
        directory = todo.pop()
        for entry, inode in namespace.iterate_entries(db, directory):
            number = history_names.find_number(db, directory, entry.name)
            assert number is not None and number < FIRST_INODE and history_names.is_shown(number)
            assert number == history_names.get_shown_number(inode, entry.cookie)
            shown[number] = history_names.get_known_number(db, number)
            todo += [inode.id] if inode.is_directory else []
    assert len(shown) == 2 * len(NAMES) and {*files.values()} <= {*shown.values()}
    assert max(number for number in shown if inodes.get(db, shown[number]).is_directory) < min(
        number for number in shown if inodes.get(db, shown[number]).is_file
    )


def test_a_number_follows_its_name_to_the_kept_bytes(db: Database) -> None:
    """T6: the application writes the file, and gets the inode; the name in the history has the other one, and its number stays."""
    _, files = make_sets(db)
    inode = files[b"step_1"]
    directory = history_names.find_set(db, inode)
    assert directory is not None
    number = history_names.find_number(db, directory, b"file")
    assert number is not None and history_names.get_known_number(db, number) == inode
    with db.transaction():
        kept = history.separate(db, inode)
    assert history_names.find_number(db, directory, b"file") == number and history_names.get_known_number(db, number) == kept
    assert history_names.find_set(db, inode) is None and history_names.find_set(db, kept) == directory
    with db.transaction():
        delete_whole_set(db, directory)
    assert history_names.find_shown(db, number) is None and history_names.get_known_number(db, number) == number


def test_a_file_keeps_its_name_if_one_of_its_names_was_not_counted(db: Database) -> None:
    """P5: an island knows a name in the history that it has not counted yet. A program writes the file."""
    _, files = make_sets(db)
    inode = files[b"step_1"]
    with db.transaction():
        db.run("UPDATE inode SET nlink = 1, history = 0 WHERE id = ?", inode)
        history.separate(db, inode)
    row = inodes.get(db, inode)
    assert (row.nlink, row.history) == (1, 0)


def test_names_of_sets_tell_all_that_a_search_needs(db: Database) -> None:
    """N2: names with any bytes, and records whose texts look like a field."""
    series, _ = make_sets(db)
    found = sorted(history_names.list_set_names(db, series), key=lambda one: one.number)
    assert [(one.member, one.number, one.is_group) for one in found] == [
        (name, number, number % 2 == 0) for number, name in enumerate(NAMES, 1)
    ]
    assert [history_names.find_set_path(db, inodes.get(db, one.directory)) for one in found] == [
        b"run/*/%s@%d" % (name, number) for number, name in enumerate(NAMES, 1)
    ]


def test_a_value_that_is_none_is_refused_and_said(db: Database, caplog: pytest.LogCaptureFixture) -> None:
    """P11: with what is accepted, at debug; only the owner and root may set it."""
    series, _ = make_sets(db)
    one = inodes.get(db, series)
    with caplog.at_level(logging.DEBUG):
        assert refusal(user_settings.set_setting, db, one, b"rollback", b"9", 7) == "EINVAL"
    assert "run/*: user.ckptfs.rollback is refused: b'9' is no value of it (accepted: the number of a set of this series)" in caplog.text
    assert refusal(user_settings.set_setting, db, one, b"rollback", b"1", 8) == "EPERM"
    assert refusal(user_settings.set_setting, db, one, b"rollback", None, 7) == errno.errorcode[errno.ENODATA]
    with db.transaction():
        user_settings.set_setting(db, one, b"rollback", b"1", 7)
    assert user_settings.get_setting(db, one, b"rollback") == b"1"
