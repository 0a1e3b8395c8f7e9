"""P1, P2, P8: the first scan of a directory imports it lazily and whole. A scan that is killed starts again."""

import os
import shutil
import stat
from pathlib import Path

import pytest
from pfs_world import ROOT, World

from ckptfs import disk, limits
from ckptfs.catalog import journal, mover_requests, namespace, scans, summary
from ckptfs.flow.scan import Scan
from ckptfs.tiers import pfs_tree


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_root_awaits_its_visit_and_then_has_the_pfs_root_s_attributes(world: World) -> None:
    os.chmod(world.pfs, 0o2750)
    assert world.column("", "imported") == 0
    world.visit("")
    assert world.column("", "imported") == 1
    assert stat.S_IMODE(int(str(world.column("", "mode")))) == 0o2750
    os.chmod(world.pfs, 0o755)
    world.look()
    assert stat.S_IMODE(int(str(world.column("", "mode")))) == 0o2750


def test_all_kinds_with_their_attributes(world: World) -> None:
    (world.pfs / "file").write_bytes(b"x" * 1000)
    os.utime(world.pfs / "file", ns=(1_000_000_001, 2_000_000_002))
    os.chmod(world.pfs / "file", 0o640)
    os.setxattr(world.pfs / "file", "user.colour", b"green")
    (world.pfs / "link").symlink_to("nowhere/at all")
    os.mkfifo(world.pfs / "fifo", 0o600)
    (world.pfs / "directory").mkdir()
    (world.pfs / "directory" / "below").write_bytes(b"1")
    (Path(os.fsdecode(os.path.join(os.fsencode(world.pfs), b"\xff\xfe name")))).write_bytes(b"")
    world.visit("")
    assert world.names() == {"file", "link", "fifo", "directory", os.fsdecode(b"\xff\xfe name")}
    assert (world.column("file", "size"), world.column("file", "mtime_ns"), world.column("file", "mode")) == (1000, 2_000_000_002, 0o100640)
    assert world.column("link", "target") == b"nowhere/at all"
    assert stat.S_ISFIFO(int(str(world.column("fifo", "mode"))))
    assert world.db.rows("SELECT name, value FROM xattr") == [(b"user.colour", b"green")]
    assert (world.published("file", "complete"), world.published("file", "digest"), world.published("file", "generation")) == (1, None, 0)
    assert world.column("directory", "imported") == 0 and world.names("directory") == set()
    world.visit("directory")
    assert world.names("directory") == {"below"} and world.column("directory", "imported") == 1
    world.check()


def test_a_directory_whose_path_write_back_has_just_renamed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: between the look at its path and its opening. Nothing in it is said not to exist."""
    (world.pfs / "old" / "deep").mkdir(parents=True)
    (world.pfs / "old" / "deep" / "leaf").write_bytes(b"leaf")
    world.visit("", "old")
    open_directory, opened = pfs_tree.open_directory, list[tuple[bytes, ...]]()

    def rename_and_open(root_fd: int, names: tuple[bytes, ...]) -> int:
        if not opened:
            (world.pfs / "old").rename(world.pfs / "other")
            for table in ("entry", "pfs_entry"):
                world.db.run(f"UPDATE {table} SET name = ? WHERE name = ?", b"other", b"old")
        opened.append(names)
        return open_directory(root_fd, names)

    monkeypatch.setattr(pfs_tree, "open_directory", rename_and_open)
    world.visit("old/deep")
    assert world.names("other/deep") == {"leaf"} and opened == [(b"old", b"deep"), (b"other", b"deep")]


def test_our_own_names_are_hidden(world: World) -> None:
    (world.pfs / ".ckptfs").mkdir(exist_ok=True)
    (world.pfs / ".ckptfs.12345678.0000").write_bytes(b"unfinished")
    (world.pfs / "deep").mkdir()
    (world.pfs / "deep" / ".ckptfs").write_bytes(b"not ours here")
    world.visit("", "deep")
    assert world.names() == {"deep"} and world.names("deep") == {".ckptfs"}
    assert summary.list_troubles(world.db) == []


@pytest.mark.parametrize("old", [True, False])
def test_what_a_node_that_died_was_about_to_rename(world: World, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    """P5, P6: it goes once it is nobody's any more; of what lives people are told. A node that is at it is left alone."""
    monkeypatch.setattr(limits, "PARKED_KEEP_S", -1.0 if old else 3600.0)
    monkeypatch.setattr(Scan, "_is_gone", lambda _, inode: inode == 0x77)
    for number in (0x77, 0x78):
        (world.pfs / f".ckptfs.parked.{number:x}").write_bytes(b"renamed")
    world.look()
    assert world.names() == set()
    assert (world.pfs / ".ckptfs.parked.77").exists() is not old and (world.pfs / ".ckptfs.parked.78").exists()
    told = [value["path"] for _, value, _ in summary.list_troubles(world.db)]
    assert told == ([".ckptfs.parked.78"] if old else [])


def test_a_parked_file_that_cannot_be_removed_is_reported_and_retried(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PARKED_KEEP_S", -1.0)
    monkeypatch.setattr(Scan, "_is_gone", lambda *_: True)
    left = world.pfs / ".ckptfs.parked.77"
    left.write_bytes(b"renamed")
    monkeypatch.setattr(disk, "_fault", "scan:parked=EIO@*")
    world.look()
    assert left.exists() and [value["path"] for _, value, _ in summary.list_troubles(world.db)] == [left.name]
    monkeypatch.setattr(disk, "_fault", "")
    world.look()
    assert not left.exists() and summary.list_troubles(world.db) == []


@pytest.mark.parametrize("what", ["a name like ours", "in the work area", "in its place"])
def test_a_hidden_external_file_is_reported(world: World, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """P11: once, for as long as it is there."""
    area = world.pfs / ".ckptfs"
    foreign = {"a name like ours": world.pfs / ".ckptfs.backup", "in the work area": area / "notes", "in its place": area}[what]
    if what == "in the work area":
        area.mkdir(exist_ok=True)
        for name in ("tier-id", "contents-12345678"):
            (area / name).write_bytes(b"")
    elif what == "in its place" and area.exists():
        shutil.rmtree(area)
    foreign.write_bytes(b"somebody's")
    for _ in range(2):
        world.look()
    ((_, told, _),) = summary.list_troubles(world.db)
    assert told["path"] == str(foreign.relative_to(world.pfs)) and world.names() == set()
    assert [record.levelname for record in caplog.records if "hidden" in record.message] == ["WARNING"]
    foreign.unlink()
    world.look()
    assert summary.list_troubles(world.db) == []


def test_hard_links_become_one_inode(world: World) -> None:
    (world.pfs / "a").write_bytes(b"same")
    os.link(world.pfs / "a", world.pfs / "b")
    (world.pfs / "d").mkdir()
    os.link(world.pfs / "a", world.pfs / "d" / "c")
    world.visit("", "d")
    assert world.inode("a") == world.inode("b") == world.inode("d/c")
    assert world.column("a", "nlink") == 3
    world.check()


def test_many_names_come_in_bounded_transactions(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 3000
    for number in range(count):
        os.close(os.open(world.pfs / f"f{number}", os.O_CREAT))
    rows: list[int] = []
    from ckptfs.flow import scan as compare

    apply = scans.import_transaction

    def counted(db: object) -> object:
        rows.append(0)
        return apply(world.db)

    monkeypatch.setattr(scans, "import_transaction", counted)
    world.visit("")
    assert len(world.names()) == count
    assert compare.IMPORT_BATCH * 4 <= limits.CHANGE_ROWS_MAX and len(rows) >= count / compare.IMPORT_BATCH


def test_a_first_scan_invalidates_nothing_and_a_later_one_each_new_name(world: World) -> None:
    (world.pfs / "old").write_bytes(b"")
    world.visit("")
    assert world.told.entries == []
    (world.pfs / "new").write_bytes(b"")
    world.look()
    assert world.told.entries == [(ROOT, b"new")] and ROOT in world.told.inodes


def test_what_was_made_blindly_stays_and_directories_are_joined(world: World) -> None:
    (world.pfs / "both").mkdir()
    (world.pfs / "both" / "theirs").write_bytes(b"1")
    (world.pfs / "file").write_bytes(b"theirs")
    with world.db.transaction():
        ours = namespace.create(world.db, ROOT, b"both", stat.S_IFDIR | 0o755, uid=0, gid=0, allow_unimported=True).id
        namespace.create(world.db, ours, b"mine", stat.S_IFREG | 0o644, uid=0, gid=0)
        mine = namespace.create(world.db, ROOT, b"file", stat.S_IFREG | 0o644, uid=0, gid=0, allow_unimported=True).id
    world.db.run("DELETE FROM journal")
    world.visit("")
    assert world.inode("both") == ours and world.inode("file") == mine
    assert world.column("both", "imported") == 0
    world.visit("both")
    assert world.names("both") == {"mine", "theirs"}
    assert (ours, b"theirs") in world.told.entries, "the kernel may know the name as absent"
    world.check()


def test_a_pending_name_is_left_alone(world: World) -> None:
    (world.pfs / "gone").write_bytes(b"1")
    world.visit("")
    with world.db.transaction():
        namespace.unlink(world.db, ROOT, b"gone")
    world.look()
    assert world.names() == set(), "it is on the PFS still, but we have removed it"
    world.db.run("DELETE FROM journal")
    with world.db.transaction():
        journal.append(world.db, "rename", 77, parent=5, name=b"x", new_parent=ROOT, new_name=b"new")
    (world.pfs / "new").write_bytes(b"1")
    world.look()
    assert "new" not in world.names()


def test_a_pfs_that_is_not_mounted_is_not_an_empty_one(world: World) -> None:
    (world.pfs / "kept").write_bytes(b"1")
    world.visit("")
    world.pfs.rename(world.root / "elsewhere")
    assert world.look().state == mover_requests.FAILED
    world.pfs.mkdir()
    answer = world.look()
    assert answer.state == mover_requests.FAILED and "tier-id" in str(world.failure)
    assert world.names() == {"kept"}
    world.pfs.rmdir()
    (world.root / "elsewhere").rename(world.pfs)
    assert world.look().state == mover_requests.DONE
    world.check()


@pytest.mark.parametrize("label", ["scan:root", "scan:walk", "scan:list", "scan:stat", "scan:readlink", "scan:xattrs"])
def test_an_error_of_the_pfs_is_answered_and_leaves_the_directory_unvisited(
    world: World, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _furnish(world)
    world.visit("")
    monkeypatch.setattr(disk, "_fault", f"{label}=EIO@*")
    answer = world.look("d", again=False)
    assert (answer.state, answer.error) == (mover_requests.FAILED, 5)
    monkeypatch.setattr(disk, "_fault", "")
    assert world.column("d", "imported") == 0
    assert world.look("d", again=False).state == mover_requests.DONE
    assert world.names("d") == {"file", "link", "below"}
    world.check()


@pytest.mark.crash
@pytest.mark.parametrize("label", ["scan:begin", "scan:list", "scan:stat", "scan:xattrs", "scan:import", "scan:end"])
@pytest.mark.parametrize("when", ["kill", "kill-after"])
def test_killed_anywhere_it_starts_over(world: World, label: str, when: str) -> None:
    _furnish(world)
    world.visit("")
    assert world.killed_at(f"{label}={when}", lambda there: there.look("d", again=False))
    after = world.reborn()
    assert after.column("d", "imported") == (1 if (label, when) == ("scan:end", "kill-after") else 0)
    assert after.look("d", again=False).state == mover_requests.DONE
    assert after.names("d") == {"file", "link", "below"}
    after.check()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.others
def test_where_root_is_squashed_it_is_done_as_the_owner(world: World) -> None:
    """Root without its capabilities over files stands for a PFS that does not take root for root."""
    closed = world.pfs / "closed"
    (closed / "below").mkdir(parents=True)
    (closed / "file").write_bytes(b"secret")
    (closed / "link").symlink_to("file")
    os.setxattr(closed / "file", "user.colour", b"green")
    for path, mode in ((closed / "file", 0o600), (closed / "below", 0o700), (closed, 0o700)):
        os.chown(path, 1234, 2345)
        os.chmod(path, mode)
    squashed = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search")
    code = (
        "import os\ntry: os.listdir(w.pfs / 'closed'); sys.exit(3)\nexcept PermissionError: pass\n"
        "for path in ('', 'closed', 'closed/below'): assert w.look(path, again=False).state == 1, (path, w.failure)\n"
        "assert w.names('closed') == {'file', 'link', 'below'}\n"
        "assert w.bring('closed/file').result == 'here'\nw.check()"
    )
    assert world.in_a_process(code, wrapper=squashed) == 0
    after = world.reborn()
    assert after.column("closed/link", "target") == b"file" and after.column("closed/file", "uid") == 1234
    assert after.db.rows("SELECT value FROM xattr") == [(b"green",)]


def _furnish(world: World) -> None:
    (world.pfs / "d" / "below").mkdir(parents=True)
    (world.pfs / "d" / "file").write_bytes(b"1")
    (world.pfs / "d" / "link").symlink_to("file")
