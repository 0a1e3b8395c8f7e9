"""X4 on a real mount: `.ckptfs/history` shows the sets that ckptfs keeps, to every program, and nobody can change them. P2, P7, P8, F4."""

import contextlib
import errno
import mmap
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from another_user import as_user
from daemon_under_test import Area, DaemonUnderTest, eventually
from made_sets import delete_set, make_set
from programs import refusal

pytestmark = pytest.mark.fuse

DATA = os.urandom(300_000)
# Of names, attributes and rights alone: how bytes travel plays no part.
on_one_data_path = pytest.mark.parametrize("data_path", ["buffered"])


def save(area: Area, name: str = "one") -> Path:
    """A directory with what checkpoints have in them, sealed."""
    made: Path = area.path / name
    (made / "sub").mkdir(parents=True)
    (made / "a").write_bytes(DATA)
    (made / ".metadata").write_bytes(b"m")
    (made / "sub" / "b").write_bytes(b"b" * 5000)
    (made / "link").symlink_to("sub/b")
    area.settle()
    return made


def test_every_program_reads_a_set(mount: Area, tmp_path: Path) -> None:
    """Names, bytes, mappings, symlinks, attributes; and `ls`, `find`, `cp`, `tar` of all of it."""
    member = save(mount)
    os.setxattr(member / "a", "user.own", b"value")
    kept = make_set(mount.daemon, member, "one")
    assert "history" in os.listdir(mount.daemon.path / ".ckptfs") and ".ckptfs" not in os.listdir(mount.daemon.path)
    assert sorted(os.listdir(kept)) == [".metadata", "a", "link", "sub"] and os.listdir(kept.parent) == [kept.name]
    assert (kept / "a").read_bytes() == DATA and (kept / "link").read_bytes() == (kept / "sub" / "b").read_bytes() == b"b" * 5000
    with open(kept / "a", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == DATA and os.fstat(file.fileno()).st_size == len(DATA)
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == len(DATA)
    assert os.readlink(kept / "link") == "sub/b" and os.getxattr(kept / "a", "user.own") == b"value"
    assert os.listxattr(kept / "a") == ["user.own"] and os.listxattr(kept) == []
    assert os.getxattr(kept / "a", "user.ckptfs.digest") == os.getxattr(member / "a", "user.ckptfs.digest")
    subprocess.run(["cp", "-a", kept, tmp_path / "copy"], check=True, timeout=60)
    subprocess.run(["diff", "-r", member, tmp_path / "copy"], check=True, timeout=60)
    for tool in (["find", kept, "-ls"], ["tar", "-cf", tmp_path / "t.tar", "-C", kept, "."], ["du", "-s", kept.parent]):
        subprocess.run(tool, check=True, capture_output=True, timeout=60)
    assert "one@1" in mount.command("ls", kept.parent).stdout


@on_one_data_path
def test_what_stat_shows(mount: Area) -> None:
    """Nobody may write; the number is another one than the application's, and stays; the application's link count does not change."""
    member = save(mount)
    (member / "a").chmod(0o666)
    before = (member / "a").stat()
    kept = make_set(mount.daemon, member, "one")
    after, shown = (member / "a").stat(), (kept / "a").stat()
    assert (after.st_nlink, after.st_ctime_ns) == (1, before.st_ctime_ns)
    assert stat.filemode(shown.st_mode) == "-r--r--r--" and shown.st_nlink == 1
    assert (shown.st_size, shown.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    numbers = {os.lstat(path).st_ino for path in (kept, kept / "a", kept / "sub", kept / "sub" / "b", kept / "link", member / "a", member)}
    assert len(numbers) == 7 and all(number < 1 << 63 for number in numbers)
    assert os.lstat(kept / "a").st_ino == shown.st_ino
    assert {entry.name: entry.inode() for entry in os.scandir(kept)}["a"] == shown.st_ino


CHANGES: dict[str, Callable[[Path], object]] = {
    "write": lambda there: (there / "a").write_bytes(b"x"),
    "append": lambda there: os.open(there / "a", os.O_WRONLY | os.O_APPEND),
    "read and write": lambda there: os.open(there / "a", os.O_RDWR),
    "truncate at open": lambda there: os.open(there / "a", os.O_RDONLY | os.O_TRUNC),
    "truncate": lambda there: os.truncate(there / "a", 0),
    "create": lambda there: (there / "new").write_bytes(b"x"),
    "mkdir": lambda there: (there / "new").mkdir(),
    "symlink": lambda there: (there / "new").symlink_to("x"),
    "mknod": lambda there: os.mknod(there / "new"),
    "unlink": lambda there: (there / "a").unlink(),
    "rmdir": lambda there: (there / "sub").rmdir(),
    "rename": lambda there: (there / "a").rename(there / "c"),
    "rename out": lambda there: (there / "a").rename(there.parents[4] / "stolen"),
    "rename in": lambda there: (there.parents[4] / there.parents[1].name / "one" / "a").rename(there / "c"),
    "rename a set": lambda there: there.rename(there.parent / "other"),
    "link": lambda there: os.link(there / "a", there / "c"),
    "link out": lambda there: os.link(there / "a", there.parents[4] / "stolen"),
    "link in": lambda there: os.link(there.parents[4] / there.parents[1].name / "one" / "a", there / "c"),
    "chmod": lambda there: (there / "a").chmod(0o777),
    "chown": lambda there: os.chown(there / "a", 1, 1),
    "utime": lambda there: os.utime(there / "a"),
    "xattr": lambda there: os.setxattr(there / "a", "user.x", b"1"),
    "no xattr": lambda there: os.removexattr(there, "user.x"),
    "of a file": lambda there: os.setxattr(there / "a", "user.ckptfs.pin", b"1"),
}


@on_one_data_path
def test_nothing_can_be_changed(mount: Area) -> None:
    """P11, D1."""
    member = save(mount)
    kept = make_set(mount.daemon, member, "one")
    refused = {name: refusal(change, kept) for name, change in CHANGES.items()}
    assert {name: reason for name, reason in refused.items() if reason != "EROFS"} == {}
    assert sorted(os.listdir(kept)) == [".metadata", "a", "link", "sub"]
    assert (kept / "a").read_bytes() == DATA == (member / "a").read_bytes()


def test_an_open_file_of_a_deleted_set(mount: Area) -> None:
    """P2: as POSIX says, until the last close. Then nothing of it is left."""
    member = save(mount)
    number = (member / "a").stat().st_ino
    kept = make_set(mount.daemon, member, "one")
    with open(kept / "a", "rb") as reader, open(member / "a", "rb") as own:
        subprocess.run(["rm", "-rf", member], check=True, timeout=60)
        os.setxattr(kept, "user.ckptfs.remove", b"now")
        eventually(lambda: not kept.exists(), what="the set is gone")
        assert refusal(lambda path: path.stat(), kept / "a") == "ENOENT"
        assert reader.read() == DATA and os.fstat(reader.fileno()).st_size == len(DATA)
        reader.close()
        assert own.read() == DATA
    eventually(lambda: not mount.catalog("SELECT 1 FROM inode WHERE id = ?", number), 60, what="the inode is gone")


@on_one_data_path
def test_names_of_unfinished_sets_are_hidden(mount: Area) -> None:
    """They are of no concern to programs; other names with a dot are shown."""
    kept = make_set(mount.daemon, save(mount), "one")
    delete_set(mount.daemon, kept, is_whole=False)
    assert os.listdir(kept.parent) == [] and not kept.exists() and not (kept.parent / ".old-1").exists()


@pytest.mark.crash
@pytest.mark.parametrize("data_path", ["passthrough", "buffered"])
def test_an_open_file_outlives_the_mount_process(share_daemon: Callable[..., Area], data_path: str) -> None:
    """P8: beside the application's own open file, and of a set whose files the application has deleted."""
    area = share_daemon(data_path)
    daemon = area.daemon
    shared, alone = save(area), save(area, "two")
    kept = [make_set(daemon, shared, "one"), make_set(daemon, alone, "two")]
    subprocess.run(["rm", "-rf", alone], check=True, timeout=60)
    with contextlib.ExitStack() as stack:
        _read_across_a_kill(daemon, data_path, [shared, *kept], stack)
    eventually(lambda: not daemon.catalog("SELECT 1 FROM handle"), what="all handles are closed")


def _read_across_a_kill(daemon: DaemonUnderTest, data_path: str, places: list[Path], stack: contextlib.ExitStack) -> None:
    readers = [stack.enter_context((there / "a").open("rb", buffering=0)) for there in places]
    backing = {bool(row[0]) for row in daemon.catalog("SELECT backing FROM handle WHERE shown > 0 ORDER BY id")}
    assert backing == ({False, True} if data_path == "passthrough" else {False}), "the kernel reads only what nobody can write"
    assert [one.read(100_000) for one in readers] == [DATA[:100_000]] * 3
    daemon.kill("mount")
    assert [one.read() for one in readers] == [DATA[100_000:]] * 3
    assert [os.fstat(one.fileno()).st_size for one in readers] == [len(DATA)] * 3
    numbers = [os.fstat(one.fileno()).st_ino for one in readers]
    assert numbers == [(there / "a").stat().st_ino for there in places]


def test_from_the_pfs(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """N3: what this node does not have any more is fetched."""
    daemon = make_daemon()
    area = Area(daemon, "run")
    kept = make_set(daemon, save(area), "one")
    daemon.command("wait", area.path, "--level", "pfs", "--timeout", "120s")
    subprocess.run(["rm", "-rf", area.path / "one"], check=True, timeout=60)
    daemon.settle()
    daemon.unmount()
    daemon.wipe_ram()
    daemon.start()
    assert (kept / "a").read_bytes() == DATA and (kept / "sub" / "b").read_bytes() == b"b" * 5000


# --- what users say -----------------------------------------------------------------------------------------------------


@on_one_data_path
def test_pins_notes_and_removals(mount: Area) -> None:
    """H6, H10: attributes of a set's directory; a wrong value is EINVAL and changes nothing (P11)."""
    kept = make_set(mount.daemon, save(mount), "one")
    assert refusal(lambda path: os.getxattr(path, "user.ckptfs.pin"), kept) == "ENODATA"
    assert refusal(lambda path: os.removexattr(path, "user.ckptfs.pin"), kept) == "ENODATA"
    os.setxattr(kept, "user.ckptfs.pin", b"1")
    os.setxattr(kept, "user.ckptfs.note", "die beste 🙂".encode())
    assert os.getxattr(kept, "user.ckptfs.pin") == b"1" and os.getxattr(kept, "user.ckptfs.note").decode() == "die beste 🙂"
    assert os.listxattr(kept) == []
    for name, value in (("pin", b"2"), ("pin", b""), ("note", b"\xff"), ("note", b"a\0b"), ("note", b"x" * 5000), ("remove", b"1")):
        assert refusal(lambda path, name=name, value=value: os.setxattr(path, f"user.ckptfs.{name}", value), kept) == "EINVAL"
    assert refusal(lambda path: os.setxattr(path, "user.ckptfs.other", b"1"), kept) == "EPERM"
    os.removexattr(kept, "user.ckptfs.pin")
    assert refusal(lambda path: os.getxattr(path, "user.ckptfs.pin"), kept) == "ENODATA"
    assert os.getxattr(kept, "user.ckptfs.note").decode() == "die beste 🙂"
    assert refusal(lambda path: os.setxattr(path, "user.ckptfs.pin", b"1"), kept.parent) == "EPERM", "of a set, not of a series"


@on_one_data_path
def test_a_file_names_its_set(mount: Area) -> None:
    """D1: in its place and in the history; what is in no set has no such attribute."""
    member = save(mount)
    assert refusal(lambda path: os.getxattr(path, "user.ckptfs.set"), member / "a") == "ENODATA"
    kept = make_set(mount.daemon, member, "one")
    (member / "later").write_bytes(b"l")
    for path in (member / "a", kept / "a", member / "sub" / "b", kept):
        assert os.getxattr(path, "user.ckptfs.set") == os.fsencode(f"{mount.path.name}/one/one@1")
    assert refusal(lambda path: os.getxattr(path, "user.ckptfs.set"), member / "later") == "ENODATA"
    assert refusal(lambda path: os.setxattr(path, "user.ckptfs.set", b"x"), member / "a") == "EPERM"
    mount.settle()
    again = make_set(mount.daemon, member, "one")
    assert os.getxattr(member / "a", "user.ckptfs.set").endswith(os.fsencode(again.name)), "of two, the later one"


@on_one_data_path
@pytest.mark.others
def test_rights(mount: Area) -> None:
    """F6: only the owner and root; a private directory stays private."""
    member = save(mount)
    os.chown(member, 12345, 12345)
    os.chown(mount.path, 12345, 12345)
    mount.path.chmod(0o777)
    member.chmod(0o777)
    kept = make_set(mount.daemon, member, "one")
    assert as_user(lambda: (kept / "a").read_bytes() and None) == "ok"
    for attribute, value, path in (("pin", b"1", kept), ("rollback", b"1", kept.parent), ("remove", b"now", kept)):
        assert as_user(lambda attribute=attribute, value=value, path=path: os.setxattr(path, f"user.ckptfs.{attribute}", value)) == "EACCES"
    assert as_user(lambda: os.setxattr(member, "user.ckptfs.commit", b"1")) == "EPERM", "the kernel lets everybody write this directory"
    member.chmod(0o700)
    private = make_set(mount.daemon, member, "one")
    assert as_user(lambda: os.listdir(private) and None) == "EACCES"


@on_one_data_path
@pytest.mark.parametrize("which", ["", "member", "member/below"])
def test_what_becomes_private_is_private_in_the_history_too(mount: Area, which: str) -> None:
    """F6: so are sets that were made before, and the directories on the PFS."""
    member = save(mount)
    (member / "below").mkdir()
    (member / "below" / "c").write_bytes(b"c")
    for directory in (mount.path, member, member / "below"):
        directory.chmod(0o755)
    kept = make_set(mount.daemon, member, "one")
    mount.settle()
    assert as_user(lambda: (kept / "below" / "c").read_bytes() and None) == "ok"
    (mount.path / which.replace("member", member.name)).chmod(0o700)
    assert as_user(lambda: (kept / "below" / "c").read_bytes() and None) == "EACCES"
    mount.settle()
    on_pfs = mount.daemon.pfs / ".ckptfs.history" / kept.relative_to(mount.daemon.path / ".ckptfs" / "history")
    assert as_user(lambda: (on_pfs / "below" / "c").read_bytes() and None) == "EACCES"


# --- a file of the history is written ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["write", "truncate at open", "truncate"])
def test_readers_of_the_history_keep_the_bytes(mount: Area, how: str) -> None:
    """T6, P7: those who have it open, have it mapped, or open it later; the application's own readers see what it writes."""
    member = save(mount)
    expected = b"x" * 200_000 + (DATA[200_000:] if how == "write" else b"")
    kept = make_set(mount.daemon, member, "one")
    number = (kept / "a").stat().st_ino
    with (
        open(kept / "a", "rb", buffering=0) as reader,
        open(kept / "a", "rb", buffering=0) as other,
        open(member / "a", "rb", buffering=0) as own,
    ):
        mapped = mmap.mmap(other.fileno(), 0, prot=mmap.PROT_READ)
        assert reader.read(1000) == DATA[:1000] == mapped[:1000] == own.read(1000)
        if how == "truncate":
            os.truncate(member / "a", 3)
        with open(member / "a", "wb" if how == "truncate at open" else "r+b") as writer:
            writer.write(b"x" * 200_000)
        assert reader.read() == DATA[1000:] and mapped[:] == DATA
        assert os.fstat(reader.fileno()).st_size == len(DATA) and os.fstat(reader.fileno()).st_ino == number
        assert own.read(1000) == b"x" * 1000
        assert (kept / "a").read_bytes() == DATA and (kept / "a").stat().st_ino == number
        mapped.close()
    assert (member / "a").read_bytes() == expected
    mount.settle()
    on_pfs = mount.daemon.pfs / ".ckptfs.history" / kept.relative_to(mount.daemon.path / ".ckptfs" / "history")
    assert (kept / "a").read_bytes() == DATA == (on_pfs / "a").read_bytes() and (mount.pfs / "one" / "a").read_bytes() == expected
    os.setxattr(kept, "user.ckptfs.pin", b"1")  # Another set of the series replaces it otherwise.
    again = make_set(mount.daemon, member, "one")
    assert (again / "a").read_bytes() == (member / "a").read_bytes() and (kept / "a").read_bytes() == DATA


@pytest.mark.crash
@pytest.mark.parametrize("data_path", ["passthrough", "buffered"])
def test_readers_of_a_written_file_outlive_the_mount_process(share_daemon: Callable[..., Area], data_path: str) -> None:
    """P8, T6: the row of a handle follows the name in the history."""
    area = share_daemon(data_path)
    daemon, member = area.daemon, save(area)
    kept = make_set(daemon, member, "one")
    with open(kept / "a", "rb", buffering=0) as reader, open(kept / ".metadata", "rb", buffering=0) as truncated:
        with open(member / "a", "r+b") as writer:
            writer.write(b"x" * len(DATA))
        (member / ".metadata").write_bytes(b"other")
        daemon.kill("mount")
        assert reader.read() == DATA and truncated.read() == b"m"
        assert os.fstat(reader.fileno()).st_size == len(DATA)
    daemon.settle()
    assert (kept / "a").read_bytes() == DATA and (member / ".metadata").read_bytes() == b"other"


def overwrite(path: str) -> bool:
    """Write a file, unless it is busy."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError as failure:
        assert failure.errno == errno.EBUSY
        return False
    os.write(fd, b"x" * 1000)
    os.close(fd)
    return True


def test_a_descriptor_from_before(share_daemon: Callable[..., Area]) -> None:
    """P7: it must not change what the kernel itself reads for others. The last resort is an error."""
    area = share_daemon("passthrough")
    member = save(area)
    kept = make_set(area.daemon, member, "one")
    there = os.open(member / "a", os.O_PATH)
    try:
        (member / "a").unlink()
        with open(kept / "a", "rb", buffering=0) as reader:
            assert reader.read(1000) == DATA[:1000]
            assert refusal(lambda: os.open(f"/proc/self/fd/{there}", os.O_RDWR)) == "EBUSY"
            assert reader.read() == DATA[1000:]
        eventually(lambda: overwrite(f"/proc/self/fd/{there}"), what="the file can be written")
        assert (kept / "a").read_bytes() == DATA
    finally:
        os.close(there)
