"""P5, P7, F4: a scan takes over external changes unless the local state is newer. Write-back is no external change."""

import os
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from local_node import run_until_idle
from pfs_world import ROOT, World

from ckptfs import limits
from ckptfs.catalog import contents, copies, handles, history, mover_requests, namespace, scans
from ckptfs.catalog.history import SetRecord
from ckptfs.flow.scan import Scan
from ckptfs.flow.write_back import WriteBack
from ckptfs.model import Tier
from ckptfs.tiers import pfs_tree


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    (world.pfs / "file").write_bytes(b"first")
    (world.pfs / "d" / "deep").mkdir(parents=True)
    (world.pfs / "d" / "deep" / "x").write_bytes(b"x")
    (world.pfs / "d" / "y").write_bytes(b"y")
    world.visit("", "d", "d/deep")
    return world


def rewrite(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.utime(path, ns=(time.time_ns(), time.time_ns()))


def write_here(world: World, path: str) -> int:
    """As the mount does: a writer truncates and writes a file; the content, still open."""
    with world.db.transaction():
        content = contents.insert_content(world.db, world.inode(path), Tier.RAM)
        handles.insert(world.db, world.inode(path), content, is_writer=True, backing_id=0)
    os.close(world.tiers[Tier.RAM].create(content))
    return content


def test_nothing_changed_changes_nothing(world: World) -> None:
    before = world.db.rows("SELECT id, mode, size, mtime_ns, ctime_ns, nlink, generation FROM inode")
    assert world.look(tree=True).state == mover_requests.DONE
    assert world.db.rows("SELECT id, mode, size, mtime_ns, ctime_ns, nlink, generation FROM inode") == before
    assert world.told.entries == [] and [inode for inode in world.told.inodes if inode != ROOT] == []
    world.check()


def test_new_changed_vanished_and_other_attributes(world: World) -> None:
    assert world.bring("file").result == mover_requests.FETCHED
    first = world.column("file", "content")
    rewrite(world.pfs / "file", b"second, longer")
    (world.pfs / "new").write_bytes(b"n")
    os.chmod(world.pfs / "d" / "y", 0o600)
    (world.pfs / "d" / "deep" / "x").unlink()
    world.look(tree=True)
    assert world.names() == {"file", "new", "d"} and world.names("d/deep") == set()
    assert (world.column("file", "content"), world.column("file", "size"), world.column("file", "generation")) == (None, 14, 1)
    assert world.published("file", "digest") is None and world.published("file", "generation") == 1
    assert world.db.value("SELECT state FROM content WHERE id = ?", first) == 3
    assert stat.S_IMODE(int(str(world.column("d/y", "mode")))) == 0o600
    assert world.inode("file") in world.told.inodes and (world.inode("d/deep"), b"x") in world.told.entries
    world.check()


def test_the_catalog_changes_while_the_pfs_hangs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: no transaction waits for the PFS, not even when the scan looks at the directory that it has listed."""
    (world.pfs / "new").write_bytes(b"n")
    monkeypatch.setattr(limits, "CATALOG_BUSY_S", 0.5)
    look, changes = pfs_tree.stat_descriptor, list[int]()

    def change() -> None:
        with world.db.transaction():
            changes.append(world.db.run("UPDATE inode SET uid = uid WHERE id = ?", ROOT))

    def hanging(fd: int) -> object:
        with ThreadPoolExecutor(1) as application:
            application.submit(change).result(60)
        return look(fd)

    monkeypatch.setattr(pfs_tree, "stat_descriptor", hanging)
    assert world.look().state == mover_requests.DONE and "new" in world.names()
    assert len(changes) == 2, "it looks at the root before, and at what it has listed afterwards"


def test_directories_wait_for_the_lane_as_long_as_it_gets_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: the look at a very large directory takes longer than a caller waits for another one."""
    monkeypatch.setattr(limits, "REQUEST_POLL_S", 0.0)
    first, waits = (
        mover_requests.insert_request(world.db, mover_requests.SCAN, inode, mover_requests.COMPARE_AGAIN)
        for inode in (ROOT, world.inode("d"))
    )
    assert world.scan.step()
    rows = [mover_requests.get(world.db, request) for request in (first, waits)]
    assert [row is not None and (row.state, row.progress_ns > 0) for row in rows] == [
        (mover_requests.DONE, True),
        (mover_requests.OPEN, True),
    ]


def test_a_tree_that_vanished(world: World) -> None:
    (world.pfs / "d" / "deep" / "x").unlink()
    (world.pfs / "d" / "deep").rmdir()
    (world.pfs / "d" / "y").unlink()
    (world.pfs / "d").rmdir()
    world.look()
    assert world.names() == {"file"} and world.column("", "nlink") == 2
    assert world.db.rows("SELECT name FROM pfs_entry") == [(b"file",)]
    world.check()


def test_a_renamed_directory_is_a_new_one(world: World) -> None:
    (world.pfs / "d").rename(world.pfs / "e")
    world.look()
    assert world.names() == {"file", "e"} and world.column("e", "imported") == 0
    world.visit("e")
    assert world.names("e") == {"deep", "y"}
    world.check()


def test_a_directory_that_is_gone_is_found_by_its_own_visit(world: World) -> None:
    (world.pfs / "d" / "fresh").mkdir()
    world.look("d")
    (world.pfs / "d" / "fresh").rmdir()
    answer = world.look("d/fresh", again=False)
    assert (answer.state, answer.error) == (mover_requests.FAILED, 2)
    assert world.names("d") == {"deep", "y"}
    world.check()


@pytest.mark.parametrize("swap", ["file for directory", "directory for file", "symlink for file"])
def test_something_else_under_the_same_name(world: World, swap: str) -> None:
    if swap == "directory for file":
        (world.pfs / "file").unlink()
        (world.pfs / "file").mkdir()
        (world.pfs / "file" / "in").write_bytes(b"")
        world.look()
        world.visit("file")
        assert world.names("file") == {"in"}
    elif swap == "symlink for file":
        (world.pfs / "file").unlink()
        (world.pfs / "file").symlink_to("d")
        world.look()
        assert world.column("file", "target") == b"d"
    else:
        os.rename(world.pfs / "d", world.root / "away")
        (world.pfs / "d").write_bytes(b"now a file")
        world.look()
        assert world.column("d", "size") == 10
    world.check()


def test_a_symlink_with_another_target(world: World) -> None:
    (world.pfs / "link").symlink_to("a")
    world.look()
    (world.pfs / "other").symlink_to("b")
    (world.pfs / "other").rename(world.pfs / "link")
    world.look()
    assert world.column("link", "target") == b"b"
    world.check()


@pytest.mark.parametrize("how", ["changed", "vanished"])
def test_what_is_newer_here_stays(world: World, how: str) -> None:
    content = write_here(world, "file")
    if how == "changed":
        rewrite(world.pfs / "file", b"a stranger's")
    else:
        (world.pfs / "file").unlink()
    world.look()
    assert "file" in world.names() and world.column("file", "content") == content
    assert world.db.value("SELECT state FROM content WHERE id = ?", content) == 0


def test_an_open_file_waits(world: World) -> None:
    with world.db.transaction():
        handle = handles.insert(world.db, world.inode("file"), None, is_writer=False, backing_id=0)
    rewrite(world.pfs / "file", b"a stranger's")
    world.look()
    assert world.column("file", "size") == 5
    with world.db.transaction():
        handles.delete(world.db, handle)
    world.look()
    assert world.column("file", "size") == 12


def test_a_vanished_directory_with_something_newer_in_it_stays(world: World) -> None:
    with world.db.transaction():
        namespace.create(world.db, world.inode("d/deep"), b"ours", stat.S_IFREG | 0o644, uid=0, gid=0)
    world.db.run("DELETE FROM journal")
    os.rename(world.pfs / "d", world.root / "away")
    world.look()
    assert world.names() == {"file", "d"} and world.names("d") == {"deep"} and world.names("d/deep") == {"ours"}
    world.check()


def test_write_back_while_the_directory_is_listed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing is older than the transaction that uses it: what write-back did in between is not a stranger's work."""
    real = pfs_tree.list_entries

    def late(fd: int, *, is_root: bool, on_external: Callable[[bytes], None]) -> object:
        seen = list(real(fd, is_root=is_root, on_external=on_external))
        (world.pfs / "published").write_bytes(b"by write-back")
        (world.pfs / "file").write_bytes(b"by write-back too")
        found = pfs_tree.stat_entry(fd, b"published")
        with world.db.transaction():
            one = namespace.create(world.db, ROOT, b"published", stat.S_IFREG | 0o644, uid=0, gid=0).id
            world.db.run("DELETE FROM journal")
            world.db.run("INSERT INTO pfs_entry (parent, name, inode) VALUES (1, ?, ?)", b"published", one)
            world.db.run(
                "INSERT INTO pfs_file (inode, generation, complete, size, mtime_ns, pfs_inode) VALUES (?,1,1,?,?,?)",
                one,
                found.size,
                found.mtime_ns,
                found.ino,
            )
            changed = pfs_tree.stat_entry(fd, b"file")
            sql, inode = "UPDATE pfs_file SET size = ?, mtime_ns = ?, digest = x'00' WHERE inode = ?", world.inode("file")
            world.db.run(sql, changed.size, changed.mtime_ns, inode)
            world.db.run("DELETE FROM pfs_entry WHERE name = ?", b"link")
            world.db.run("DELETE FROM entry WHERE name = ?", b"link")
        return iter(seen)

    (world.pfs / "link").symlink_to("a")
    world.look()
    monkeypatch.setattr(pfs_tree, "list_entries", late)
    world.look()
    assert world.names() == {"file", "d", "published"}, "published is kept although the listing lacks it; link is not imported again"
    assert world.published("file", "digest") == b"\0", "what write-back said of the file was not overwritten"


def test_a_directory_that_write_back_is_moving(world: World) -> None:
    """On the PFS two directories were exchanged, which the catalog does not say yet: neither may be taken for the other."""
    (world.pfs / "e").mkdir()
    (world.pfs / "e" / "only in e").write_bytes(b"")
    world.look()
    world.db.run(
        "INSERT INTO journal (op, inode, parent, name, new_parent, new_name, at_ns) VALUES ('exchange', 9, 1, ?, 1, ?, 0)", b"d", b"e"
    )
    for old, new in (("d", "t"), ("e", "d"), ("t", "e")):
        (world.pfs / old).rename(world.pfs / new)
    answer = world.look("e", again=False)
    assert (answer.state, answer.error) == (mover_requests.FAILED, 16)
    assert world.names("e") == set() and world.column("e", "imported") == 0
    world.check()


def test_a_pfs_that_keeps_no_fractions_of_seconds(world: World) -> None:
    """It may show the whole time at first and a part of it later: nobody has changed the file."""
    world.bring("file")
    content, second = world.column("file", "content"), 1_700_000_000
    world.db.run("UPDATE pfs_file SET mtime_ns = ? WHERE inode = ?", second * 10**9 + 123_456_789, world.inode("file"))
    os.utime(world.pfs / "file", ns=(0, second * 10**9))
    world.look()
    assert world.column("file", "content") == content
    os.utime(world.pfs / "file", ns=(0, (second + 1) * 10**9))
    world.look()
    assert world.column("file", "content") is None


def test_refresh_comes_by_the_timer(world: World) -> None:
    world.scan.step()
    due = world.scan.next_due_s()
    assert due is not None and due > 0
    (world.pfs / "new").write_bytes(b"")
    world.scan.step()
    assert "new" not in world.names()
    world.db.run("UPDATE inode SET scanned_ns = 1, birth_ns = 1 WHERE id = 1")
    world.scan._next_refresh_s = 0.0
    world.scan.step()
    assert "new" in world.names()


def test_directories_of_ours_are_compared_once_they_are_on_the_pfs(world: World) -> None:
    with world.db.transaction():
        mine = namespace.create(world.db, ROOT, b"mine", stat.S_IFDIR | 0o755, uid=0, gid=0).id
    world.db.run("DELETE FROM journal")
    assert scans.find_due_directory(world.db, time.time_ns()) != mine
    (world.pfs / "mine").mkdir()
    world.db.run("INSERT INTO pfs_entry (parent, name, inode) VALUES (1, ?, ?)", b"mine", mine)
    assert scans.find_due_directory(world.db, time.time_ns()) == mine
    assert scans.find_due_directory(world.db, time.time_ns() - 10**12) is None, "just made: not its turn yet"
    world.db.change("UPDATE inode SET scanned_ns = ? WHERE id = ?", time.time_ns() + 10**13, mine)
    world.db.change("UPDATE inode SET birth_ns = 0")
    assert scans.find_due_directory(world.db, time.time_ns() - 10**12) == mine, "the clock was ahead"


@pytest.mark.crash
@pytest.mark.parametrize("when", ["kill", "kill-after"])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("label", ["scan:vanish"])
def test_killed_while_a_tree_is_removed(world: World, label: str, when: str, number: int) -> None:
    os.rename(world.pfs / "d", world.root / "away")
    assert world.killed_at(f"{label}={when}@{number}", lambda there: there.look())
    after = world.reborn()
    after.look()
    assert after.names() == {"file"}
    after.check()


def test_evicted_files_are_dropped_like_others(world: World) -> None:
    world.bring("file")
    world.db.run("DELETE FROM copy")
    rewrite(world.pfs / "file", b"changed after it was evicted")
    world.look()
    found = copies.load_fetch_state(world.db, world.inode("file"))
    assert found is not None and found.content is None


@pytest.mark.parametrize("in_place", [True, False])
def test_the_history_keeps_the_bytes_of_a_file_that_is_changed_externally(world: World, in_place: bool) -> None:
    """T6: in the mount the file is another one afterwards; on the PFS the set has its bytes again."""
    world.bring("file")
    file, content = world.inode("file"), world.column("file", "content")
    with world.db.transaction() as db:
        series = history.insert_series(db, ROOT, b"file*").directory
        directory = history.begin_set(db, series, SetRecord(1, b"file", (1,), 1, 5, 5, is_group=True))
        history.insert_link(db, file, directory, b"file")
        history.finish_set(db, directory)
    write_back = WriteBack(world.db, world.tiers, world.config, world.told)
    run_until_idle(write_back)
    kept = world.pfs / ".ckptfs.history" / "file*" / "file@1"
    assert (kept / "file").stat().st_ino == (world.pfs / "file").stat().st_ino
    if not in_place:
        (world.pfs / "other").write_bytes(b"")
        os.rename(world.pfs / "other", world.pfs / "file")
    rewrite(world.pfs / "file", b"changed")
    world.look()
    assert world.inode("file") != file and world.column("file", "size") == 7
    ((_, found),) = history.list_files(world.db, directory)
    assert (found.id, found.content, found.nlink, found.history) == (file, content, 1, 1)
    mover_requests.insert_request(world.db, mover_requests.SCAN, directory, mover_requests.COMPARE_AGAIN)
    run_until_idle(Scan(world.db, world.tiers, world.config, world.told))
    run_until_idle(write_back)
    assert (kept / "file").read_bytes() == b"first" and (world.pfs / "file").read_bytes() == b"changed"


def test_a_directory_that_hangs_holds_up_no_other_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: neither requests nor refreshes; and no other step looks into it meanwhile."""
    scan, begun, go_on, opened = Scan(world.db, world.tiers, world.config, world.told), threading.Event(), threading.Event(), list[bytes]()
    open_directory = pfs_tree.open_directory

    def hang(root_fd: int, names: tuple[bytes, ...]) -> int:
        opened.append(b"/".join(names))
        if names == (b"d",):
            begun.set()
            assert go_on.wait(60)
        return open_directory(root_fd, names)

    monkeypatch.setattr(pfs_tree, "open_directory", hang)
    monkeypatch.setattr(limits, "PFS_STALL_S", 0.01)
    hanging = mover_requests.insert_request(world.db, mover_requests.SCAN, world.inode("d"), mover_requests.COMPARE_AGAIN)
    assert scan.list_stalled() == []
    with ThreadPoolExecutor(1) as lane:
        first = lane.submit(scan.step)
        assert begun.wait(60)
        while not scan.list_stalled():
            pass
        again = mover_requests.insert_request(world.db, mover_requests.SCAN, world.inode("d"))
        other = mover_requests.insert_request(world.db, mover_requests.SCAN, world.inode("d/deep"), mover_requests.COMPARE_AGAIN)
        world.db.run("UPDATE inode SET scanned_ns = 1, birth_ns = 1")
        run_until_idle(scan)
        assert not mover_requests.is_open(world.db, other) and mover_requests.is_open(world.db, hanging)
        assert opened.count(b"d") == 1 and b"" in opened
        go_on.set()
        assert first.result(60)
    run_until_idle(scan)
    assert not mover_requests.is_open(world.db, hanging) and not mover_requests.is_open(world.db, again) and not scan._in_hand
