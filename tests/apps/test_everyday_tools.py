"""git, tar, rsync, sqlite3, cp and Python's own tools, as people use them beside their checkpoints. P2, F4."""

import compileall
import os
import sqlite3
import sys
from pathlib import Path

import pytest
from daemon_under_test import Area
from programs import differences, need, run

pytestmark = pytest.mark.apps
WHO = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
IDENTITY = {**WHO, "GIT_CONFIG_GLOBAL": "/dev/null"}


def some_tree(root: Path) -> Path:
    """A small tree with everything in it that an archive keeps."""
    (root / "deep" / "er").mkdir(parents=True)
    for number in range(20):
        (root / "deep" / f"file{number}").write_bytes(os.urandom(number * 777))
    (root / "deep" / "er" / "empty").touch()
    (root / "link").symlink_to("deep/file3")
    os.link(root / "deep" / "file4", root / "deep" / "er" / "hard")
    os.mkfifo(root / "fifo")
    (root / "deep" / "file5").chmod(0o640)
    os.utime(root / "deep" / "file6", ns=(10**18 + 1, 10**18 + 7))
    with open(root / "sparse", "wb") as file:
        file.truncate(3_000_000)
    return root


def test_git(mount: Area) -> None:
    """P2: init, commit, clone, branch, gc and fsck."""
    need("git")
    origin = mount.path / "origin"
    some_tree(origin)
    (origin / "fifo").unlink()
    run("git", "init", "-q", "-b", "main", cwd=origin, env=IDENTITY)
    run("git", "add", ".", cwd=origin, env=IDENTITY)
    run("git", "commit", "-q", "-m", "one", cwd=origin, env=IDENTITY)
    run("git", "clone", "-q", "--no-hardlinks", "origin", "clone", cwd=mount.path, env=IDENTITY)
    clone = mount.path / "clone"
    run("git", "checkout", "-q", "-b", "other", cwd=clone, env=IDENTITY)
    (clone / "new").write_text("new")
    run("git", "add", "new", cwd=clone, env=IDENTITY)
    run("git", "commit", "-q", "-m", "two", cwd=clone, env=IDENTITY)
    run("git", "gc", "-q", "--prune=now", cwd=clone, env=IDENTITY)
    run("git", "fsck", "--strict", cwd=clone, env=IDENTITY)
    assert run("git", "status", "--porcelain", cwd=clone, env=IDENTITY) == ""
    mount.settle()
    run("git", "fsck", "--strict", cwd=mount.pfs / "clone", env={**IDENTITY, "GIT_OPTIONAL_LOCKS": "0"})


def test_tar_there_and_back(mount: Area, tmp_path: Path) -> None:
    """F4: an archive of a tree in the mount, unpacked there, is the same tree; so is what the PFS shows."""
    source = some_tree(tmp_path / "source")
    run("tar", "-C", source, "--format=posix", "-cf", mount.path / "a.tar", ".")
    (mount.path / "out").mkdir()
    run("tar", "-C", mount.path / "out", "-xpf", mount.path / "a.tar")
    assert differences(source, mount.path / "out") == []
    assert os.stat(mount.path / "out/deep/file4").st_ino == os.stat(mount.path / "out/deep/er/hard").st_ino
    mount.settle()
    assert differences(source, mount.pfs / "out") == []


def test_rsync_and_cp_keep_everything(mount: Area, tmp_path: Path) -> None:
    """F4: rsync -aHAX twice (the second finds nothing to do), and cp -a within the mount."""
    need("rsync")
    source = some_tree(tmp_path / "source")
    os.setxattr(source / "deep" / "file7", "user.note", b"kept")
    run("rsync", "-aHAX", f"{source}/", mount.path / "synced")
    assert run("rsync", "-aHAXi", f"{source}/", mount.path / "synced") == ""
    assert os.getxattr(mount.path / "synced/deep/file7", "user.note") == b"kept"
    run("cp", "-a", mount.path / "synced", mount.path / "copied")
    assert differences(source, mount.path / "copied") == []


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_sqlite(mount: Area, journal: str) -> None:
    """F4: its locks, its journal and (WAL) its shared memory file."""
    path = mount.path / f"{journal}.db"
    one, other = (sqlite3.connect(path, isolation_level=None, timeout=30) for _ in range(2))
    assert one.execute(f"PRAGMA journal_mode={journal}").fetchone()[0] == journal
    one.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, v BLOB)")
    for number in range(50):
        (one if number % 2 else other).execute("INSERT INTO t VALUES (?, randomblob(2000))", (number,))
    one.execute("BEGIN IMMEDIATE")
    busy = sqlite3.connect(path, isolation_level=None, timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        busy.execute("BEGIN IMMEDIATE")
    one.execute("COMMIT")
    assert other.execute("SELECT count(*) FROM t").fetchone()[0] == 50
    assert other.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    for connection in (one, other, busy):
        connection.close()
    mount.settle()
    assert sqlite3.connect(f"file:{mount.pfs / path.name}?immutable=1", uri=True).execute("SELECT count(*) FROM t").fetchone()[0] == 50


def test_a_virtual_environment_lives_in_the_mount(mount: Area) -> None:
    """P2: thousands of small files, symlinks, byte code written by rename, programs that are executed from there."""
    place = mount.path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", place)
    package = place / "package"
    package.mkdir()
    for number in range(30):
        (package / f"m{number}.py").write_text(f"value = {number}\n")
    assert compileall.compile_dir(str(package), quiet=1)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import m7; print(m7.value, m7.__cached__)"
    answer = run(place / "bin" / "python", "-c", code, package)
    assert answer.startswith("7 ") and str(package) in answer
