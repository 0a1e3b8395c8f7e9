"""Attributes through a real mount: modes, owners, times to the nanosecond, extended attributes, what strangers may do (P2, F4)."""

import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from another_user import OTHER_STRANGER, STRANGER, as_user
from programs import refusal

pytestmark = pytest.mark.fuse


CLOCK_REALTIME_COARSE = 5  # Not in the module time.


@pytest.fixture
def here(here: Path) -> Path:
    here.chmod(0o777)
    return here


def mode_of(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def xattr_refusal(*values: Any) -> str:
    return refusal(os.setxattr if len(values) > 2 else os.getxattr, *values)


@pytest.mark.parametrize("kind", ["file", "directory", "symlink"])
def test_times_have_nanoseconds(here: Path, kind: str) -> None:
    path = here / kind
    {"file": path.touch, "directory": path.mkdir, "symlink": lambda: path.symlink_to("x")}[kind]()
    for atime, mtime in ((1_234_567_890_123_456_789, 987_654_321), (0, 4_102_444_800_999_999_999), (-1_000_000_001, 5)):
        os.utime(path, ns=(atime, mtime), follow_symlinks=False)
        found = os.lstat(path)
        assert (found.st_atime_ns, found.st_mtime_ns) == (atime, mtime)


def test_times_stay_when_the_file_is_open_for_writing_and_closed(here: Path) -> None:
    with open(here / "file", "w") as file:
        file.write("data")
        file.flush()
        os.utime(file.fileno(), ns=(111, 222))
        assert os.fstat(file.fileno()).st_mtime_ns == 222
    assert os.stat(here / "file").st_mtime_ns == 222
    (here / "file").read_text()
    assert os.stat(here / "file").st_mtime_ns == 222


def test_writing_changes_mtime_and_ctime(here: Path) -> None:
    (here / "file").write_text("one")
    os.utime(here / "file", ns=(1, 1))
    before = os.stat(here / "file")
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) <= before.st_ctime_ns:
        pass
    with open(here / "file", "a") as file:
        file.write("two")
    after = os.stat(here / "file")
    assert after.st_mtime_ns > 1 and after.st_ctime_ns > before.st_ctime_ns
    assert after.st_size == 6
    os.utime(here / "file", ns=(1, 1))
    os.truncate(here / "file", 2)
    assert os.stat(here / "file").st_mtime_ns > 1


@pytest.mark.others
def test_files_belong_to_who_made_them(here: Path) -> None:
    assert as_user(lambda: (here / "file").write_text("x")) == "ok"
    assert as_user((here / "dir").mkdir) == "ok"
    for name in ("file", "dir"):
        found = os.stat(here / name)
        assert (found.st_uid, found.st_gid) == (STRANGER, STRANGER)


def test_umask_and_modes(here: Path) -> None:
    before = os.umask(0o027)
    try:
        os.close(os.open(here / "file", os.O_CREAT | os.O_WRONLY, 0o6777))
        os.mkdir(here / "dir", 0o1777)
        os.mkfifo(here / "fifo", 0o777)
    finally:
        os.umask(before)
    assert [mode_of(here / name) for name in ("file", "dir", "fifo")] == [0o6750, 0o1750, 0o750]


@pytest.mark.others
def test_permissions_are_those_of_posix(here: Path) -> None:
    (here / "mine").write_text("secret")
    (here / "mine").chmod(0o600)
    (here / "closed").mkdir(mode=0o700)
    (here / "closed" / "inside").touch()
    (here / "readonly").mkdir(mode=0o755)
    assert as_user((here / "mine").read_text) == "EACCES"
    assert as_user((here / "closed" / "inside").stat) == "EACCES"
    assert as_user(lambda: os.listdir(here / "closed")) == "EACCES"
    assert as_user((here / "readonly" / "x").touch) == "EACCES"
    assert as_user(lambda: os.chmod(here / "mine", 0o666)) == "EPERM"
    assert as_user(lambda: os.chown(here / "mine", STRANGER, -1)) == "EPERM"
    assert as_user(lambda: os.utime(here / "mine", ns=(1, 1))) == "EPERM"
    (here / "mine").chmod(0o640)
    os.chown(here / "mine", -1, 4242)
    assert as_user((here / "mine").read_text, groups=(4242,)) == "ok"


@pytest.mark.others
def test_sticky_directories_protect_names(here: Path) -> None:
    (here / "tmp").mkdir()
    (here / "tmp").chmod(0o1777)
    assert as_user((here / "tmp" / "file").touch) == "ok"
    assert as_user(lambda: os.unlink(here / "tmp" / "file"), OTHER_STRANGER) == "EPERM"
    assert as_user(lambda: os.rename(here / "tmp" / "file", here / "tmp" / "x"), OTHER_STRANGER) == "EPERM"
    assert as_user(lambda: os.rename(here / "tmp" / "file", here / "tmp" / "x")) == "ok"


@pytest.mark.others
def test_setgid_directories_hand_their_group_down(here: Path) -> None:
    (here / "group").mkdir()
    os.chown(here / "group", 0, 4242)
    (here / "group").chmod(0o2777)
    assert as_user((here / "group" / "sub").mkdir) == "ok"
    assert as_user((here / "group" / "sub" / "file").touch) == "ok"
    sub, file = os.stat(here / "group" / "sub"), os.stat(here / "group" / "sub" / "file")
    assert (sub.st_gid, file.st_gid) == (4242, 4242)
    assert sub.st_mode & stat.S_ISGID and not file.st_mode & stat.S_ISGID


@pytest.mark.others
def test_set_id_bits_fall_when_the_owner_changes_or_another_user_writes(here: Path) -> None:
    def fresh(mode: int) -> Path:
        path = here / "program"
        path.unlink(missing_ok=True)
        path.write_text("x")
        os.chown(path, STRANGER, STRANGER)
        path.chmod(mode)
        assert mode_of(path) == mode
        return path

    for owner in (0, -1):
        os.chown(fresh(0o6755), owner, owner)
        assert mode_of(here / "program") == 0o755
    fresh(0o6755)
    assert as_user(lambda: os.chown(here / "program", -1, STRANGER)) == "ok"
    assert mode_of(here / "program") == 0o755
    fresh(0o6777)
    assert as_user(lambda: append(here / "program"), OTHER_STRANGER) == "ok"
    assert mode_of(here / "program") == 0o777
    fresh(0o6777)
    assert as_user(lambda: os.truncate(here / "program", 0), OTHER_STRANGER) == "ok"
    assert mode_of(here / "program") == 0o777
    fresh(0o6777)
    append(here / "program")
    assert mode_of(here / "program") == 0o6777, "root may"


def append(path: Path) -> None:
    with open(path, "a") as file:
        file.write("more")


# --- extended attributes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 255, 4096, 65536])
def test_xattr_values_of_any_size(here: Path, size: int) -> None:
    value = os.urandom(size)
    (here / "file").touch()
    (here / "dir").mkdir()
    for name in ("file", "dir"):
        os.setxattr(here / name, "user.value", value)
        assert os.getxattr(here / name, "user.value") == value
        assert os.listxattr(here / name) == ["user.value"]
        os.removexattr(here / name, "user.value")
        assert os.listxattr(here / name) == []


def test_xattr_flags_and_errnos(here: Path) -> None:
    path = here / "file"
    path.touch()
    assert xattr_refusal(path, "user.a") == "ENODATA"
    assert xattr_refusal(path, "user.a", b"1", os.XATTR_REPLACE) == "ENODATA"
    os.setxattr(path, "user.a", b"1", os.XATTR_CREATE)
    assert xattr_refusal(path, "user.a", b"2", os.XATTR_CREATE) == "EEXIST"
    os.setxattr(path, "user.a", b"2", os.XATTR_REPLACE)
    assert os.getxattr(path, "user.a") == b"2"
    assert xattr_refusal(path, "user.a", b"x" * 65537) == "E2BIG"
    assert xattr_refusal(path, "user." + "n" * 251, b"") == "ERANGE"
    os.setxattr(path, "user." + "n" * 250, b"")
    assert xattr_refusal(path, "user.", b"") == "EINVAL"
    assert xattr_refusal(path, "user.") == "EINVAL"
    assert xattr_refusal(path, "system.posix_acl_access", b"\x02\0\0\0") == "ENOTSUP"
    assert xattr_refusal(path, "system.posix_acl_access") == "ENOTSUP"
    assert xattr_refusal(path, "security.capability") == "ENODATA"
    os.symlink("file", here / "link")
    with pytest.raises(PermissionError):
        os.setxattr(here / "link", "user.a", b"1", follow_symlinks=False)


@pytest.mark.others
def test_trusted_xattrs_are_roots(here: Path) -> None:
    path = here / "file"
    path.touch()
    path.chmod(0o666)
    os.setxattr(path, "trusted.x", b"1")
    os.setxattr(path, "user.x", b"1")
    assert sorted(os.listxattr(path)) == ["trusted.x", "user.x"]

    def look() -> None:
        assert os.listxattr(path) == ["user.x"]

    assert as_user(look) == "ok"
    assert as_user(lambda: os.setxattr(path, "trusted.x", b"2")) == "EPERM"


def test_xattrs_show_the_state_of_a_file_and_cannot_be_set(here: Path) -> None:
    path = here / "file"
    path.write_text("x")
    assert os.getxattr(path, "user.ckptfs.level") in {b"none", b"local", b"pfs"}
    assert os.getxattr(path, "user.ckptfs.copies") != b""
    assert os.listxattr(path) == []
    assert xattr_refusal(path, "user.ckptfs.level", b"pfs") == "EPERM"
    with pytest.raises(PermissionError):
        os.removexattr(path, "user.ckptfs.level")
    assert xattr_refusal(path, "user.ckptfs.nonsense") == "ENODATA"
