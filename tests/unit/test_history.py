"""The history of checkpoint sets in the catalog: hard links that applications do not see (T6), and the numbers that show them (X4)."""

import errno
import itertools
import logging
import stat

import pytest
from ckptfs_daemon.mount.handlers.latest_tree import FIRST_INODE, is_virtual
from programs import refusal
from shared_sets import delete_whole_set

from ckptfs import limits
from ckptfs.catalog import history, history_names, inodes, namespace, pfs_state, summary, user_settings
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import CheckpointSet, Producer, Rollback, SeriesRecord, SetRecord
from ckptfs.errors import Busy
from ckptfs.model import ROOT, ContentState, Inode, Level

FILE, DIRECTORY = stat.S_IFREG | 0o664, stat.S_IFDIR | 0o2770
PRODUCER = Producer("node1", 17, "python train.py", "123", "0")


def make_series(db: Database, path: bytes = b"run1", pattern: bytes = b"step_*") -> SeriesRecord:
    with db.transaction():
        found = namespace.find_child(db, ROOT, path)
        directory = found or namespace.create(db, ROOT, path, DIRECTORY, uid=1000, gid=100)
        return history.insert_series(db, directory.id, pattern)


def write_file(db: Database, parent: int, name: bytes, state: int = 2) -> Inode:
    """A file with one copy in RAM."""
    with db.transaction():
        made = namespace.create(db, parent, name, FILE, uid=1000, gid=100)
        content = db.insert("INSERT INTO content (inode, generation, state, size, digest) VALUES (?, 1, ?, 3, x'01')", made.id, state)
        db.run("INSERT INTO copy (content, tier, state) VALUES (?, 'ram', 1)", content)
        db.run("UPDATE inode SET content = ?, generation = 1, size = 3 WHERE id = ?", content, made.id)
        return inodes.get(db, made.id)


def make_set(db: Database, series: SeriesRecord, number: int, files: list[Inode]) -> int:
    with db.transaction():
        record = SetRecord(number, b"step_%d" % number, (number,), len(files), 3 * len(files), 5, (PRODUCER,))
        directory = history.begin_set(db, series.directory, record)
        for index, file in enumerate(files):
            history.insert_link(db, file.id, directory, b"f%d" % index)
        history.finish_set(db, directory)
        return directory


def test_a_series_mirrors_the_directories_of_the_application(db: Database) -> None:
    with db.transaction():
        above = namespace.create(db, ROOT, b"a", DIRECTORY, uid=1, gid=2)
        below = namespace.create(db, above.id, b"b", stat.S_IFDIR | 0o700, uid=3, gid=4)
        series = history.insert_series(db, below.id, b"step_*")
        assert history.insert_series(db, below.id, b"step_*") == series
    assert series == SeriesRecord(series.directory, below.id, b"a/b/step_*", b"step_*")
    assert history.list_series(db) == [series] == [history.find_series(db, below.id, b"step_*")]
    assert history.find_series(db, below.id, b"other_*") is None
    made = inodes.get(db, series.directory)
    parent = inodes.get(db, made.parent)
    assert [(one.uid, one.gid, stat.S_IMODE(one.mode), one.history) for one in (made, parent)] == [(3, 2, 0o700, 1)] * 2
    assert stat.S_IMODE(inodes.get(db, parent.parent).mode) == 0o750 and inodes.get(db, parent.parent).uid == 1


def test_the_history_is_hidden_in_the_root(db: Database) -> None:
    before = inodes.get(db, ROOT)
    with db.transaction():
        history.insert_series(db, ROOT, b"state*.pt")
    assert inodes.get(db, ROOT) == before
    assert list(namespace.iterate_entries(db, ROOT)) == []
    for refused in (namespace.lookup, namespace.unlink, namespace.rmdir):
        with pytest.raises(FileNotFoundError):
            refused(db, ROOT, history.NAME)
    with pytest.raises(FileNotFoundError):
        namespace.rename(db, ROOT, history.NAME, ROOT, b"mine")
    with pytest.raises(PermissionError):
        namespace.create(db, ROOT, history.NAME, DIRECTORY, uid=0, gid=0)


def test_a_set_has_second_names_that_no_application_sees(db: Database) -> None:
    series = make_series(db)
    file = write_file(db, series.origin, b"step_1")
    directory = make_set(db, series, 1, [file])
    linked = inodes.get(db, file.id)
    assert (linked.nlink, linked.history, linked.shown_nlink, linked.ctime_ns) == (2, 1, 1, file.ctime_ns)
    assert inodes.is_history(db, file.id) and inodes.is_history(db, directory) and not inodes.is_history(db, series.origin)
    with db.transaction():
        namespace.link(db, file.id, series.origin, b"other")
        namespace.unlink(db, series.origin, b"step_1")
        gone = namespace.unlink(db, series.origin, b"other")
    assert (gone.nlink, gone.history, gone.shown_nlink) == (1, 1, 0)
    assert [(path, inode.id) for path, inode in history.list_files(db, directory)] == [(b"f0", file.id)]
    assert namespace.list_orphans(db) == set()


def test_what_only_the_history_has_does_not_count_as_files_of_applications(db: Database) -> None:
    """But a lost one is a loss."""
    series = make_series(db)
    files = [write_file(db, series.origin, b"step_%d" % number, state) for number, state in ((1, 2), (2, 2), (3, ContentState.LOST))]
    before = summary.load_counts(db)
    make_set(db, series, 1, files)
    assert summary.load_counts(db) == before and (before.files, before.lost) == (3, 1)
    with db.transaction():
        for number in (2, 3):
            namespace.unlink(db, series.origin, b"step_%d" % number)
    after = summary.load_counts(db)
    assert (after.files, after.by_level, after.lost, after.directories) == (1, {Level.LOCAL: 1}, 1, before.directories)


def test_a_file_that_is_being_written_belongs_to_no_set(db: Database) -> None:
    series = make_series(db)
    file = write_file(db, series.origin, b"step_1", state=0)
    with pytest.raises(Busy):
        history.insert_link(db, file.id, series.directory, b"f")


def test_a_set_appears_with_all_its_files_and_its_record(db: Database) -> None:
    series = make_series(db)
    file = write_file(db, series.origin, b"step_1")
    record = SetRecord(1, b"step_1", (1, 2), 1, 3, 99, (PRODUCER,), is_group=True)
    with db.transaction():
        directory = history.begin_set(db, series.directory, record, like=inodes.get(db, series.origin))
        inside = history.insert_directory(db, directory, b"sub", inodes.get(db, series.origin))
        history.insert_link(db, file.id, inside, b"f")
        target = namespace.create(db, series.origin, b"s", stat.S_IFLNK | 0o777, uid=7, gid=8, target=b"f")
        history.insert_symlink(db, inside, b"l", target)
    assert history.list_sets(db, series.directory) == [] and history.list_unfinished(db, series.directory) == [directory]
    with pytest.raises(FileExistsError):
        history.begin_set(db, series.directory, record)
    with db.transaction():
        history.finish_set(db, directory)
    assert history.list_sets(db, series.directory) == [CheckpointSet(directory, record)] == [history.get_set(db, directory)]
    assert inodes.get_path(db, directory) == b".ckptfs.history/run1/step_*/step_1@1"
    assert sorted(path for path, _ in history.list_files(db, directory)) == [b"sub/f", b"sub/l"]
    assert history.get_next_number(db, series.directory) == 2


def test_sets_are_listed_the_newest_first(db: Database) -> None:
    series = make_series(db)
    made = [make_set(db, series, number, [write_file(db, series.origin, b"f%d" % number)]) for number in (9, 10, 11)]
    with db.transaction():
        inodes.set_internal_xattr(db, made[0], history.PIN_XATTR, b"1")
        inodes.set_internal_xattr(db, made[1], history.NOTE_XATTR, b"gut")
        history.set_rollback(db, series.directory, Rollback(10, 5))
    found = history.list_sets(db, series.directory)
    assert [(one.record.number, one.is_pinned, one.note) for one in found] == [(11, False, ""), (10, False, "gut"), (9, True, "")]
    rolled = history.get_series(db, series.directory)
    assert rolled is not None and rolled.rollback == Rollback(10, 5)
    with db.transaction():
        inodes.set_internal_xattr(db, made[0], history.PIN_XATTR, None)
        inodes.set_internal_xattr(db, made[1], history.NOTE_XATTR, None)
        history.set_rollback(db, series.directory, None)
    assert history.list_series(db) == [series] and not any(one.is_pinned or one.note for one in history.list_sets(db, series.directory))


def test_facts_about_sets_are_nobody_elses_attributes(db: Database) -> None:
    series = make_series(db)
    directory = make_set(db, series, 1, [write_file(db, series.origin, b"f")])
    with db.transaction():
        inodes.set_xattr(db, directory, b"user.x", b"1")
    assert inodes.list_xattrs(db, directory) == [b"user.x"]
    found = pfs_state.find_attributes(db, directory)
    assert found is not None and found[1] == {b"user.x": b"1"}


def test_a_record_with_very_many_producers_is_cut_and_readable(db: Database) -> None:
    series = make_series(db)
    record = SetRecord(1, b"n" * 255, (1,), 0, 0, 5, tuple(Producer(f"node{n}", n, "python " * 20) for n in range(2000)))
    with db.transaction():
        directory = history.begin_set(db, series.directory, record)
        history.finish_set(db, directory)
    found = history.get_set(db, directory)
    assert found is not None and 100 < len(found.record.producers) < 2000 and len(found.name) == 255


def test_the_level_of_a_set_is_that_of_its_weakest_file(db: Database) -> None:
    series = make_series(db)
    weak, strong, lost = (write_file(db, series.origin, name) for name in (b"weak", b"strong", b"lost"))
    with db.transaction():
        db.run(
            "INSERT INTO pfs_file (inode, generation, complete, size, mtime_ns, pfs_inode, digest) VALUES (?, 1, 1, 3, 1, 77, x'01')",
            strong.id,
        )
        db.run("DELETE FROM copy WHERE content = ?", lost.content)
    sets = [make_set(db, series, number, files) for number, files in enumerate(([strong], [strong, weak], [weak, lost], []), 1)]
    expected = {sets[0]: Level.PFS, sets[1]: Level.LOCAL, sets[2]: Level.NONE}
    assert summary.list_lowest_levels(db, sets) == expected


@pytest.mark.parametrize("at_most", [1, 2, 100])
def test_a_set_goes_in_batches_and_nobody_sees_a_part(db: Database, at_most: int) -> None:
    series = make_series(db)
    kept = write_file(db, series.origin, b"kept")
    with db.transaction():
        directory = history.begin_set(db, series.directory, SetRecord(1, b"step_1", (1,), 4, 12, 5))
        inside = history.insert_directory(db, directory, b"d", inodes.get(db, series.origin))
        for parent, name in itertools.product((directory, inside), (b"a", b"z")):
            history.insert_link(db, kept.id, parent, name)
        history.finish_set(db, directory)
    calls = 1
    while True:
        with db.transaction():
            if history.delete_set(db, directory, at_most):
                break
        calls += 1
        assert history.list_sets(db, series.directory) == [] and history.list_unfinished(db, series.directory) == [directory]
    assert calls == 3 + 2 * -(-2 // at_most)
    assert history.list_unfinished(db, series.directory) == [] and history.get_set(db, directory) is None
    assert inodes.get(db, kept.id) == kept and history.get_next_number(db, series.directory) == 2


def test_a_set_that_another_node_has_removed_is_gone(db: Database) -> None:
    """Its removal and its end may be decided before that is known: neither is a failure of this node."""
    series = make_series(db)
    made = make_set(db, series, 1, [write_file(db, ROOT, b"step_1")])
    with db.transaction():
        begun = history.begin_set(db, series.directory, SetRecord(2, b"step_2", (2,), 0, 0, 5))
        for one in (made, begun):
            delete_whole_set(db, one)
            assert history.delete_set(db, one, 100)
        with pytest.raises(FileNotFoundError):
            history.finish_set(db, begun)


def test_a_directory_that_is_made_anew_goes_on_with_its_history(db: Database) -> None:
    series = make_series(db)
    make_set(db, series, 1, [])
    with db.transaction():
        namespace.rmdir(db, ROOT, b"run1")
    again = make_series(db)
    assert again.directory == series.directory and again.origin != series.origin
    assert history.get_next_number(db, again.directory) == 2 and len(history.list_sets(db, again.directory)) == 1


def test_a_directory_that_was_renamed_keeps_its_history_beside_a_new_one(db: Database) -> None:
    series = make_series(db)
    with db.transaction():
        namespace.rename(db, ROOT, b"run1", ROOT, b"run2")
    other = make_series(db)
    assert history.find_series(db, series.origin, b"step_*") == series
    assert other.directory != series.directory and other.path == b"run1/step_*~2"


def test_sets_are_listed_by_a_few_statements_that_read_no_whole_table(db: Database) -> None:
    """As many statements for 20 sets as for one."""
    series = make_series(db)
    files = [write_file(db, series.origin, b"f%d" % number) for number in range(3)]
    counts = []
    for numbers in ((1,), range(2, 21)):
        for number in numbers:
            make_set(db, series, number, files)
        statements: list[str] = []
        db.connection.set_trace_callback(statements.append)
        directories = [one.directory for one in history.list_sets(db, series.directory)]
        assert len(directories) == len(summary.list_lowest_levels(db, directories))
        history.find_series(db, series.origin, b"step_*")
        db.connection.set_trace_callback(None)
        counts.append(len(statements))
        plans = [row[3] for sql in statements if "SELECT" in sql for row in db.connection.execute(f"EXPLAIN QUERY PLAN {sql}")]
        assert {step.split()[1] for step in plans if step.startswith("SCAN")} <= {"tree", "json_each", "x", "peer"}
        assert any("x USING INDEX xattr_series" in step for step in plans)
    assert counts[0] == counts[1]


# --- numbers and names that are shown --------------------------------------------------------------------------------


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
        for wrong in (b"9", b"one", b"", b"-1", b"1 ", b"01"):
            assert refusal(user_settings.set_setting, db, one, b"rollback", wrong, 7) == "EINVAL"
    assert "run/*: user.ckptfs.rollback is refused: b'9' is no value of it (accepted: the number of a set of this series)" in caplog.text
    assert refusal(user_settings.set_setting, db, one, b"rollback", b"1", 8) == "EPERM"
    assert refusal(user_settings.set_setting, db, one, b"rollback", None, 7) == errno.errorcode[errno.ENODATA]
    with db.transaction():
        user_settings.set_setting(db, one, b"rollback", b"1", 7)
    assert user_settings.get_setting(db, one, b"rollback") == b"1"
