"""The namespace in the catalog: the errnos of ext4, link counts, times, rename in all its forms (F4), the journal beside (P6)."""

import errno
import stat

import pytest

from ckptfs import limits
from ckptfs.catalog import handles, inodes, namespace
from ckptfs.catalog.database import Database
from ckptfs.catalog.namespace import NotImported
from ckptfs.model import ROOT, Inode

FILE = stat.S_IFREG | 0o644
DIRECTORY = stat.S_IFDIR | 0o755


def make(db: Database, parent: int, name: bytes, mode: int = FILE, **more: object) -> Inode:
    with db.transaction():
        return namespace.create(db, parent, name, mode, uid=1000, gid=1000, **more)  # type: ignore[arg-type]


def code(call: object, *values: object, **named: object) -> int:
    """The errno with which `call` refuses."""
    with pytest.raises(OSError) as refusal:
        call(*values, **named)  # type: ignore[operator]
    assert refusal.value.errno is not None
    return refusal.value.errno


def names(db: Database, directory: int) -> list[bytes]:
    return [entry.name for entry, _ in namespace.iterate_entries(db, directory)]


def test_names_that_ckptfs_uses_on_the_pfs_are_refused(db: Database) -> None:
    file = make(db, ROOT, b"file")
    sub = make(db, ROOT, b"sub", DIRECTORY)
    for parent, name in ((ROOT, b".ckptfs"), (ROOT, b".ckptfs.x"), (sub.id, b".ckptfs.0123.1")):
        assert code(make, db, parent, name) == errno.EPERM
        assert code(make, db, parent, name, DIRECTORY) == errno.EPERM
        assert code(namespace.link, db, file.id, parent, name) == errno.EPERM
        assert code(namespace.rename, db, ROOT, b"file", parent, name) == errno.EPERM
    for name in (b".ckptfs", b".ckptfsrc", b".ckptf"):
        make(db, sub.id, name)


def test_links_are_counted_up_to_the_limit(db: Database) -> None:
    file = make(db, ROOT, b"file")
    with db.transaction():
        assert namespace.link(db, file.id, ROOT, b"other").nlink == 2
        assert namespace.unlink(db, ROOT, b"file").nlink == 1
        assert namespace.unlink(db, ROOT, b"other").nlink == 0
    assert namespace.list_orphans(db) == {file.id}
    assert db.rows("SELECT op FROM journal ORDER BY seq") == [("make",), ("link",), ("unlink",), ("unlink",)]
    full = make(db, ROOT, b"full")
    db.run("UPDATE inode SET nlink=? WHERE id=?", limits.LINKS_MAX, full.id)
    assert code(namespace.link, db, full.id, ROOT, b"more") == errno.EMLINK
    assert code(namespace.link, db, ROOT, ROOT, b"more") == errno.EPERM
    assert code(namespace.link, db, file.id, ROOT, b"more") == errno.ENOENT


def test_reap_deletes_what_nobody_holds_and_nothing_else(db: Database) -> None:
    file = make(db, ROOT, b"file")
    with db.transaction():
        content = db.insert("INSERT INTO content (inode, generation, state) VALUES (?, 1, 2)", file.id)
        inodes.set_xattr(db, file.id, b"user.x", b"1")
        assert namespace.delete_forgotten(db, [file.id]) == {}, "it has a name"
        namespace.unlink(db, ROOT, b"file")
        handle = db.insert("INSERT INTO handle (inode, content, writer) VALUES (?, ?, 0)", file.id, content)
        assert namespace.delete_forgotten(db, [file.id]) == {}, "it is open"
        db.run("DELETE FROM handle WHERE id=?", handle)
        assert namespace.delete_forgotten(db, [file.id]) == {file.id: [content]}
    assert code(inodes.get, db, file.id) == errno.ENOENT
    assert db.value("SELECT state FROM content WHERE id=?", content) == 3
    assert inodes.list_xattrs(db, file.id) == []


def test_rename_keeps_every_name_that_stays_at_its_place_in_readdir(db: Database) -> None:
    for name in (b"a", b"b", b"c"):
        make(db, ROOT, name)
    with db.transaction():
        replaced = namespace.rename(db, ROOT, b"c", ROOT, b"a")
        assert replaced is not None and replaced.nlink == 0
        assert names(db, ROOT) == [b"a", b"b"], "the replaced name keeps its cookie"
        namespace.rename(db, ROOT, b"a", ROOT, b"z")
        assert names(db, ROOT) == [b"z", b"b"], "a name that changes takes its cookie along"


def test_what_an_unvisited_directory_holds_is_not_guessed(db: Database) -> None:
    there = make(db, ROOT, b"there", DIRECTORY)
    known = make(db, there.id, b"known")
    make(db, ROOT, b"file")
    db.run("UPDATE inode SET imported=0 WHERE id=?", there.id)
    assert namespace.lookup(db, there.id, b"known").id == known.id, "what is known needs no visit"
    for call in (
        lambda: namespace.lookup(db, there.id, b"new"),
        lambda: make(db, there.id, b"new"),
        lambda: namespace.link(db, known.id, there.id, b"new"),
        lambda: namespace.unlink(db, there.id, b"new"),
        lambda: namespace.rename(db, ROOT, b"file", there.id, b"new"),
        lambda: namespace.rename(db, there.id, b"new", ROOT, b"x"),
    ):
        with pytest.raises(NotImported) as missing:
            call()
        assert missing.value.directory == there.id
    with db.transaction():
        namespace.unlink(db, there.id, b"known")
    with pytest.raises(NotImported):
        namespace.rmdir(db, ROOT, b"there")


def test_creating_blindly_goes_on_without_the_pfs(db: Database) -> None:
    there = make(db, ROOT, b"there", DIRECTORY)
    db.run("UPDATE inode SET imported=0 WHERE id=?", there.id)
    file = make(db, there.id, b"new", allow_unimported=True)
    with db.transaction():
        namespace.link(db, file.id, there.id, b"link", allow_unimported=True)
        namespace.rename(db, there.id, b"new", there.id, b"newer", allow_unimported=True)
    assert names(db, there.id) == [b"newer", b"link"]


def test_xattrs_obey_their_limits(db: Database) -> None:
    file = make(db, ROOT, b"file").id
    with db.transaction():
        inodes.set_xattr(db, file, b"user.a", b"\0" * 65536)
        assert code(inodes.set_xattr, db, file, b"user.a", b"\0" * 65537) == errno.E2BIG
        assert code(inodes.set_xattr, db, file, b"u" * 256, b"") == errno.ERANGE
        for number in range(limits.XATTR_LIST_BYTES_MAX // 256 - 1):
            inodes.set_xattr(db, file, b"user.%0250d" % number, b"")
        assert code(inodes.set_xattr, db, file, b"user.%0250d" % 9999, b"") == errno.ENOSPC
        assert inodes.get_xattr(db, file, b"user.a") == b"\0" * 65536
        inodes.remove_xattr(db, file, b"user.a")
        assert code(inodes.remove_xattr, db, file, b"user.a") == errno.ENODATA
        assert code(inodes.get_xattr, db, file, b"user.a") == errno.ENODATA


def test_an_answer_is_kept_until_the_ring_comes_round(db: Database) -> None:
    with db.transaction():
        handles.record_reply(db, 4, b"four")
        assert (handles.get_reply(db, 4), handles.get_reply(db, 6)) == (b"four", None)
        handles.record_reply(db, 4 + 2 * limits.REPLIES_KEPT, b"later")
        assert handles.get_reply(db, 4) is None
        handles.delete_replies(db)
        assert handles.get_reply(db, 4 + 2 * limits.REPLIES_KEPT) is None


def test_an_answer_goes_with_its_change(db: Database) -> None:
    with pytest.raises(FileExistsError), db.transaction():
        handles.record_reply(db, 8, b"")
        namespace.create(db, ROOT, b"x", FILE, uid=0, gid=0)
        namespace.create(db, ROOT, b"x", FILE, uid=0, gid=0)
    assert handles.get_reply(db, 8) is None
    assert names(db, ROOT) == []
