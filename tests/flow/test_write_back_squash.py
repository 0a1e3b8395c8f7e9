"""Sites squash root on the PFS: write-back then acts as the owner of the file."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from daemon_under_test import environment
from shared_catalogs import run_seeded
from write_back_world import Mount, intercepted
from writers_together import WriterCluster

from ckptfs.catalog import inodes
from ckptfs.tiers import pfs_ownership

USER = 4711

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: acting as somebody else needs root")]


def uid_for_files() -> int:
    with open("/proc/thread-self/status", encoding="ascii") as file:
        return int(next(line for line in file if line.startswith("Uid:")).split()[4])


class Squash:
    """Refuses every change that root makes below `write_back:` and `pfs:`, as an NFS server with root_squash does."""

    def __init__(self) -> None:
        self.refused = 0

    def __call__(self, label: str) -> None:
        changing = label.startswith(("write_back:", "pfs:")) and not label.endswith((":begun", ":written_down", ":finish", ":look"))
        reading = label in {"write_back:source", "write_back:read", "write_back:write", "write_back:truncate", "write_back:syncfs",
                            "write_back:fsync", "write_back:directory", "write_back:attributes", "write_back:times", "pfs:walk",
                            }  # fmt: skip
        if changing and not reading and uid_for_files() == 0:
            self.refused += 1
            raise PermissionError(13, "root is nobody here")


def test_a_thread_acts_as_somebody_and_is_itself_again(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    groups = os.getgroups()
    directory = os.open(tmp_path, os.O_RDONLY)
    (tmp_path / "closed").mkdir(0o755)
    with pfs_ownership.as_owner(USER, USER):
        assert not pfs_ownership.is_root()
        os.close(os.open("theirs", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=directory))
        with pytest.raises(PermissionError):
            os.mkdir("closed/inside", dir_fd=directory)
        with pfs_ownership.as_process_user():
            os.mkdir("closed/ours", dir_fd=directory)
    os.close(directory)
    found = (tmp_path / "theirs").stat()
    assert (found.st_uid, found.st_gid) == (USER, USER) and pfs_ownership.is_root() and os.getgroups() == groups


@pytest.mark.others
def test_write_back_acts_as_the_owner(tmp_path: Path) -> None:
    mount = Mount(tmp_path)
    mount.settle()
    os.chown(mount.pfs, USER, USER)
    for path in (b"run", b"run/logs"):
        mount.mkdir(path)
    mount.put(b"run/a", b"1")
    mount.put(b"run/logs/b", b"2")
    mount.symlink(b"run/latest", b"a")
    with mount.db.transaction():
        for number in [row[0] for row in mount.db.rows("SELECT id FROM inode")]:
            inodes.set_attributes(mount.db, number, uid=USER, gid=USER)
    squash = Squash()
    with intercepted(squash):
        mount.settle()
        mount.rename(b"run/a", b"run/c")
        mount.link(b"run/c", b"run/d")
        mount.put(b"run/c", b"3")
        mount.unlink(b"run/logs/b")
        mount.rmdir(b"run/logs")
        mount.settle()
        mount.exact()
        mount.chmod(b"run/c", 0o600)
        mount.chmod(b"run", 0o711)
        mount.setxattr(b"run/c", b"user.kept", b"1")
        mount.utime(b"run/c", 5 * 10**9)
        mount.settle()
    mount.exact()
    assert os.getxattr(mount.pfs / "run" / "c", "user.kept") == b"1"
    assert squash.refused > 10 and (mount.pfs / "run" / "c").stat().st_uid == USER
    assert pfs_ownership.is_root()


@pytest.fixture
def closed_to_root(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Root cannot search what a user has closed, as on a PFS that squashes it: the refused calls."""
    refused: list[str] = []

    def guard(name: str) -> None:
        call = getattr(os, name)

        def guarded(*values: Any, **named: Any) -> Any:
            for fd in (named.get(key) for key in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
                found = None if fd is None else os.fstat(fd)
                if found is not None and found.st_uid == USER and not found.st_mode & 0o077 and uid_for_files() == 0:
                    refused.append(name)
                    raise PermissionError(13, "root is nobody here")
            return call(*values, **named)

        monkeypatch.setattr(os, name, guarded)

    for name in ("link", "mkdir", "mknod", "open", "readlink", "rename", "rmdir", "stat", "symlink", "unlink"):
        guard(name)
    return refused


@pytest.mark.others
def test_links_and_renames_in_a_directory_that_root_may_not_search(tmp_path: Path, closed_to_root: list[str]) -> None:
    """P6: a cluster gives a file its new name by a link."""

    cluster = WriterCluster(tmp_path, 2, 0)

    async def act() -> None:
        one, two = cluster.nodes
        os.chown(cluster.pfs, USER, USER)
        await one.mkdir("run")
        for name in ("run/a", "run/b.tmp"):
            await one.put(name, name.encode())
        for name in ("run", "run/a", "run/b.tmp"):
            await one.set(name, uid=USER, gid=USER, mode=0o700)
        await cluster.settle()
        assert (cluster.pfs / "run").stat().st_uid == USER
        closed_to_root.clear()
        await two.rename("run/b.tmp", "run/b")
        await one.link("run/a", "run/c")
        await cluster.settle()
        assert sorted(os.listdir(cluster.pfs / "run")) == ["a", "b", "c"] and closed_to_root

    run_seeded(0, lambda: cluster.run(act))
    cluster.exact()


@pytest.mark.parametrize("refused", ["setfsuid", "setfsgid"])
def test_nobody_acts_as_somebody_whom_the_kernel_refuses(tmp_path: Path, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """setfsuid(2) fails without a word, as for a user that the namespace does not know: root must not write in his place."""

    class Kernel:
        """The C library, of which one call changes nothing."""

        def __getattr__(self, name: str) -> Any:
            if name == refused:
                return lambda number: 0
            return getattr(libc, name)

    libc = pfs_ownership._libc
    groups = os.getgroups()
    monkeypatch.setattr(pfs_ownership, "_libc", Kernel())
    with pytest.raises(PermissionError, match=f"{refused.removeprefix('setfs')} {USER}"), pfs_ownership.as_owner(USER, USER):
        (tmp_path / "written").write_text("by root")
    monkeypatch.undo()
    assert not (tmp_path / "written").exists()
    assert pfs_ownership.is_root() and os.getgroups() == groups and uid_for_files() == 0
    (tmp_path / "mine").touch()
    assert ((tmp_path / "mine").stat().st_uid, (tmp_path / "mine").stat().st_gid) == (0, 0)


def test_a_user_that_a_namespace_does_not_know_is_refused() -> None:
    """In a user namespace with root alone, the real calls refuse."""
    code = (
        "from ckptfs.tiers import pfs_ownership\n"
        "try:\n    with pfs_ownership.as_owner(4711, 4711): print('acted')\n"
        "except PermissionError as refusal: print(refusal.strerror)\n"
        "assert pfs_ownership.is_root()\n"
    )
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), check=False)
    if "unshare failed" in result.stderr:
        pytest.skip(f"NOT TESTED HERE: {result.stderr}")
    assert result.returncode == 0 and result.stdout.startswith(("cannot act with", "setgroups")), result.stdout + result.stderr
