"""D10, P6: a PFS whose files may get other inode numbers at any time, as sshfs, rclone and s3fs give them."""

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from local_node import run_until_idle
from write_back_world import Mount

from ckptfs import disk, procfs
from ckptfs.catalog import copies, mover_requests, namespace
from ckptfs.flow.scan import Scan
from ckptfs.model import ROOT
from ckptfs.tiers import pfs_identity
from ckptfs.tiers.pfs_tree import open_published


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mount:
    made = Mount(tmp_path)
    monkeypatch.setattr(pfs_identity, "_has_lasting_inode_numbers", lambda fd: False)
    monkeypatch.setattr(disk, "_renumbering_device", 0)
    return made


def renumber(directory: Path) -> None:
    """Give all that is in a directory new inode numbers, and change nothing else."""
    for path in directory.iterdir():
        aside, status = path.with_name("aside"), path.lstat()
        if path.is_symlink():
            aside.symlink_to(path.readlink())
        elif path.is_dir():
            renumber(path)
            aside.mkdir()
            for one in path.iterdir():
                one.rename(aside / one.name)
            path.rmdir()
            aside.chmod(status.st_mode & 0o7777)
        else:
            shutil.copy2(path, aside)
        if not aside.is_symlink():
            os.utime(aside, ns=(status.st_atime_ns, status.st_mtime_ns))
        aside.rename(path)
        assert path.lstat().st_ino != status.st_ino


def scan(mount: Mount) -> None:
    """Compare all directories with the PFS."""
    for number in (ROOT, *(namespace.list_inodes_below(mount.db, ROOT))):
        if mount.db.value("SELECT mode & 61440 FROM inode WHERE id = ?", number) == 0o40000:
            mover_requests.insert_request(mount.db, mover_requests.SCAN, number, mover_requests.COMPARE_AGAIN)
    run_until_idle(Scan(mount.db, mount.tiers, mount.config, mount.told))


@pytest.mark.parametrize("seed", range(12))
def test_other_numbers_change_nothing(mount: Mount, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """A directory that was renamed is not there twice, and nothing counts as changed by others."""
    dice = random.Random(seed)
    mount.mkdir(b"d0")
    for number in range(6):
        mount.put(b"f%d" % number, dice.randbytes(100 + number))
    mount.symlink(b"link", b"f0")
    for _ in range(12):
        mount.settle()
        renumber(mount.pfs)
        before = mount.tree()
        scan(mount)
        assert mount.tree() == before
        names = [name for name in before if before[name][0] == "file"]
        directories = [name for name in before if before[name][0] == "directory"]
        for _ in range(3):
            name, other = dice.choice(names), dice.choice(directories) + b"/" + dice.choice((b"x", b"y", b"z"))
            kind = dice.randrange(6)
            if mount.tree().keys() & {name, other} != {name} or os.path.dirname(other) not in mount.tree():
                continue
            if kind == 0:
                mount.put(name, dice.randbytes(50))
            elif kind == 1:
                mount.rename(name, other)
            elif kind == 2:
                mount.unlink(name)
                mount.put(name, dice.randbytes(60))
            elif kind == 3:
                mount.put(b"tmp", dice.randbytes(70))
                mount.rename(b"tmp", name)
            elif kind == 4:
                mount.chmod(name, dice.choice((0o600, 0o640)))
            else:
                mount.rename(dice.choice(directories).split(b"/")[0], b"d%d" % dice.randrange(1000))
    mount.settle()
    assert mount.on_pfs() == mount.tree()
    assert "externally" not in caplog.text and "gone from" not in caplog.text


def test_what_others_changed_is_still_seen(mount: Mount) -> None:
    """By size and time. What is in the way of a move is kept."""
    for name in (b"read", b"written", b"moved"):
        mount.put(name, b"ours")
    mount.settle()
    (mount.pfs / "read").write_bytes(b"by others")
    (mount.pfs / "written").write_bytes(b"by others")
    (mount.pfs / "new").write_bytes(b"in the way")
    mount.put(b"written", b"again")
    mount.rename(b"moved", b"new")
    mount.settle()
    scan(mount)
    conflicts = {path.name: path.read_bytes() for path in mount.pfs.glob("*conflict*")}
    assert conflicts == {"written.ckptfs-conflict-1": b"by others", "new.ckptfs-conflict-1": b"in the way"}
    assert (mount.pfs / "written").read_bytes() == b"again" and (mount.pfs / "new").read_bytes() == b"ours"
    state = copies.load_fetch_state(mount.db, mount.number(b"read"))
    assert state is not None
    with open(open_published(mount.pfs, state), "rb") as file:
        assert file.read() == b"by others"


@pytest.mark.parametrize(("fstype", "lasting"), [("fuse.sshfs", False), ("fuse", False), ("exfat", False), ("xfs", True), ("nfs4", True)])
def test_which_filesystems_may_number_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fstype: str, lasting: bool) -> None:
    mounted = procfs.list_mount_entries()[0]
    monkeypatch.setattr(procfs, "find_mount_of", lambda fd: replace(mounted, fstype=fstype))
    monkeypatch.setattr(disk, "_renumbering_device", 0)
    os.close(pfs_identity.open_checked(tmp_path, lambda fd: None))
    found = tmp_path.stat()
    assert disk.get_lasting_ino(found) == (found.st_ino if lasting else 0)
