"""N2 on a real mount: the newest complete member of a series, by `ckptfs latest` and by a name that any program opens. N7, T5, T6."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from another_user import as_user
from daemon_under_test import Area, DaemonUnderTest, environment
from programs import refusal

pytestmark = pytest.mark.fuse


def save(directory: Path, *names: str) -> None:
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).write_bytes(os.urandom(2000))


def newest(mount: Area, *arguments: str | Path) -> str:
    return str(mount.command("latest", *arguments).stdout).removesuffix("\n")


def test_the_newest_that_is_complete(mount: Area) -> None:
    """N2, N7: by number; what somebody still writes is none."""
    run = mount.path / "run"
    for number in (90, 100, 1000):
        save(run / f"step_{number}", "rank0.pt", "rank1.pt")
    (run / "config.json").write_text("{}")
    mount.settle()
    # By its directory, its pattern, a member, and what a shell makes of the pattern.
    for named in ([run], [run / "step_*"], [run / "step_90"], sorted(run.glob("step_*"))):
        assert newest(mount, *named) == str(run / "step_1000")
    with open(run / "step_1000" / "rank1.pt", "ab") as file:
        assert newest(mount, run) == str(run / "step_100")
        file.write(b"more")
    mount.settle()
    found = json.loads(mount.command("latest", run, "--json").stdout)
    assert found == {"number": 1000, "path": str(run / "step_1000"), "level": found["level"], "size": 4004, "files": 2}
    assert found["level"] in ("local", "pfs")


def test_files_are_members_too(mount: Area) -> None:
    """T5."""
    for number in (8, 9, 10):
        (mount.path / f"ckpt_{number}.pt").write_bytes(b"x" * number)
    (mount.path / "ckpt_11.pt.tmp").write_bytes(b"half")
    mount.settle()
    assert newest(mount, mount.path) == newest(mount, mount.path / "ckpt_8.pt") == str(mount.path / "ckpt_10.pt")


def test_two_names_with_a_number(mount: Area) -> None:
    """Of run1/step_1 the number that counts steps; where both do, a person must say."""
    save(mount.path / "run1" / "step_1", "x1", "x2")
    save(mount.path / "run1" / "step_2", "x1", "x2")
    mount.settle()
    for named in ("run1", "run1/step_1"):
        assert newest(mount, mount.path / named) == str(mount.path / "run1" / "step_2")
    save(mount.path / "iter_1" / "step_1", "x")
    result = mount.command("latest", mount.path / "iter_1", check=False)
    assert result.returncode == 2 and f"'{mount.path}/iter_1/step_*' or '{mount.path}/iter_*'" in result.stderr


def test_odd_names(mount: Area) -> None:
    """What is printed are the bytes of the name: programs read it."""
    name = b"caf\xe9 \n 7"
    (mount.path / os.fsdecode(name)).write_bytes(b"1")
    mount.settle()
    command = [sys.executable, "-m", "ckptfs_client", "latest", str(mount.path / os.fsdecode(b"caf\xe9 \n *"))]
    printed = subprocess.run(command, capture_output=True, check=True, timeout=60, env=environment()).stdout
    assert printed == os.fsencode(mount.path) + b"/" + name + b"\n"


def test_shards_without_their_metadata(mount: Area) -> None:
    """T6: what torch.distributed.checkpoint has not finished."""
    run = mount.path / "dcp"
    save(run / "CHECKPOINT_DIR_step1", "__0_0.distcp", "__1_0.distcp", ".metadata")
    save(run / "CHECKPOINT_DIR_step2", "__0_0.distcp", "__1_0.distcp")
    mount.settle()
    assert newest(mount, run / "CHECKPOINT_DIR_step2") == str(run / "CHECKPOINT_DIR_step1")
    (run / "CHECKPOINT_DIR_step2" / ".metadata.tmp").write_bytes(b"m")
    (run / "CHECKPOINT_DIR_step2" / ".metadata.tmp").rename(run / "CHECKPOINT_DIR_step2" / ".metadata")
    mount.settle()
    assert newest(mount, run) == str(run / "CHECKPOINT_DIR_step2")


def test_a_level(mount: Area) -> None:
    """The newest that is at least as safe as asked for."""
    save(mount.path / "step_1", "a")
    mount.command("wait", mount.path, "--level", "pfs", "--timeout", "120s")
    save(mount.path / "step_2", "a")
    with open(mount.path / "step_2" / "b", "wb"):
        assert newest(mount, mount.path / "step_*", "--level", "pfs") == str(mount.path / "step_1")
    mount.command("wait", mount.path, "--level", "pfs", "--timeout", "120s")
    assert newest(mount, mount.path / "step_*", "--level", "clique") == str(mount.path / "step_2"), "pfs is more than clique"
    assert mount.command("latest", mount.path, "--level", "best", check=False).returncode == 2


def test_none(mount: Area) -> None:
    """Exit code 1, and the words say why; 2 where the question is no good. P11."""
    run = mount.path / "run"
    save(run / "step_1")
    result = mount.command("latest", run / "step_*", check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"{run}/step_*: no complete checkpoint at the level local: of step_1, it holds no file; wait until" in result.stderr
    assert "there is no member" in mount.command("latest", run / "other_*", check=False).stderr
    (mount.path / "plain").mkdir()
    assert "no name there has a number" in mount.command("latest", mount.path / "plain", check=False).stderr
    for wrong in ("*/step_1", "step_*_*"):
        result = mount.command("latest", run / wrong, check=False)
        assert result.returncode == 2 and "one * is accepted, in the last part of the path" in result.stderr
    save(run / "other_1", "x")
    save(run / "other_2", "x")
    save(run / "step_2", "x")
    result = mount.command("latest", run, check=False)
    assert result.returncode == 2 and f"say which, in quotes: '{run}/other_*' or '{run}/step_*'" in result.stderr
    assert mount.command("latest", "/", check=False).returncode == 3


# --- the name ---------------------------------------------------------------------------------------------------------


def latest(mount: Area, *parts: str) -> Path:
    return mount.daemon.path.joinpath(".ckptfs", "latest", mount.path.name, *parts)


def test_a_name_that_any_program_opens(mount: Area) -> None:
    """N2, D4: it leads to the newest complete one whenever it is followed."""
    link = latest(mount, "run", "step_*")
    (mount.path / "run").mkdir()
    assert os.path.lexists(link) and not link.exists(), "there is none yet"
    for number in (9, 10):
        save(mount.path / "run" / f"step_{number}", "a", "b")
        mount.settle()
        assert os.readlink(link) == f"../../../../{mount.path.name}/run/step_{number}"
        assert (link / "a").read_bytes() == (mount.path / "run" / f"step_{number}" / "a").read_bytes()
    with open(mount.path / "run" / "step_10" / "b", "ab"):
        assert link.resolve().name == "step_9"
    (mount.path / "ckpt_1.pt").write_bytes(b"one")
    mount.settle()
    assert link.resolve().name == "step_10" and latest(mount, "ckpt_*.pt").read_bytes() == b"one"
    (mount.path / "run").rename(mount.path / "moved")
    assert latest(mount, "moved", "step_*").resolve() == (mount.path / "moved" / "step_10").resolve()
    assert not os.path.lexists(link)


def test_directories_show_series_and_subdirectories(mount: Area) -> None:
    """Directories and series; hidden at the top, and of no concern to the PFS."""
    for number in (1, 2):
        save(mount.path / "run" / f"step_{number}", "rank_0.pt")
    (mount.path / "run" / "notes").write_text("n")
    assert sorted(os.listdir(latest(mount, "run"))) == ["step_*", "step_1", "step_2"]
    assert os.listdir(latest(mount)) == ["run"] and os.listdir(latest(mount, "run", "step_1")) == []
    assert mount.path.name in os.listdir(mount.daemon.path / ".ckptfs" / "latest")
    assert os.listdir(mount.daemon.path / ".ckptfs") == ["latest"] and ".ckptfs" not in os.listdir(mount.daemon.path)
    found = [entry.name for entry in os.scandir(latest(mount, "run")) if entry.is_symlink()]
    assert found == ["step_*"] and latest(mount, "run").is_dir()
    assert not latest(mount, "run", "notes").exists() and not latest(mount, "none").exists()
    assert len({os.lstat(latest(mount, *parts)).st_ino for parts in ((), ("run",), ("run", "step_*"), ("run", "step_1"))}) == 4
    mount.command("wait", mount.path, "--timeout", "120s")
    assert not (mount.daemon.pfs / ".ckptfs" / "latest").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda there: (there / "new").mkdir(),
        lambda there: (there / "new").write_bytes(b"x"),
        lambda there: (there / "new").symlink_to("x"),
        lambda there: os.mknod(there / "new"),
        lambda there: (there / "step_*").unlink(),
        lambda there: (there / "step_1").rmdir(),
        lambda there: (there / "step_1").rename(there / "step_3"),
        lambda there: (there / "step_1").rename(there.parents[3] / "moved"),
        lambda there: (there.parents[3] / there.parent.name / "run" / "step_1" / "a").rename(there / "a"),
        lambda there: os.link(there.parents[3] / there.parent.name / "run" / "step_1" / "a", there / "a"),
        lambda there: shutil.rmtree(there.parents[1]),
        lambda there: there.chmod(0o777),
        lambda there: os.setxattr(there, "user.x", b"1"),
    ],
)
def test_nothing_can_be_changed_there(mount: Area, change: Callable[[Path], object]) -> None:
    """P11."""
    save(mount.path / "run" / "step_1", "a")
    assert refusal(change, latest(mount, "run")) == "EROFS"
    assert os.listdir(mount.path / "run") == ["step_1"] and os.listxattr(latest(mount, "run")) == []


def test_its_own_name_is_not_given_away_and_tools_pass_through(mount: Area, tmp_path: Path) -> None:
    """P11: at the top nothing takes its place; find, du and cp end, and copy what is there: names."""
    save(mount.path / "run" / "step_1", "a")
    mount.settle()
    top, ours = mount.daemon.path, mount.daemon.path / ".ckptfs"
    for change in (lambda: mount.path.rename(ours), lambda: ours.rename(top / "mine"), ours.rmdir, ours.mkdir):
        with pytest.raises(OSError):
            change()
    assert (mount.path / "run" / "step_1" / "a").exists() and os.listdir(ours) == ["latest"] and not (top / "mine").exists()
    for tool in (["find", "-P", latest(mount)], ["du", "-s", latest(mount)], ["cp", "-a", latest(mount), tmp_path / "copy"]):
        subprocess.run([*tool], check=True, capture_output=True, timeout=60)
    assert os.readlink(tmp_path / "copy" / "run" / "step_*").endswith("/run/step_1")


@pytest.mark.others
def test_who_may_not_look_sees_no_more_there(mount: Area) -> None:
    """F6."""
    save(mount.path / "closed" / "step_1", "a")
    save(mount.path / "through" / "step_1", "a")
    mount.settle()
    (mount.path / "closed").chmod(0o700)
    (mount.path / "through").chmod(0o711)
    assert as_user(lambda: os.readlink(latest(mount, "closed", "step_*"))) == "EACCES"
    assert as_user(lambda: os.readlink(latest(mount, "through", "step_*"))) == "EACCES", "whoever may not list it"
    (mount.path / "through").chmod(0o755)
    assert as_user(lambda: os.readlink(latest(mount, "through", "step_*"))) == "ok"


@pytest.mark.crash
def test_the_name_outlives_the_mount_process(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """P8: what was open there can be used again once its name was looked up."""
    daemon = make_daemon()
    save(daemon.path / "run" / "step_1", "a")
    daemon.settle()
    there = os.open(daemon.path / ".ckptfs" / "latest" / "run", os.O_PATH)
    link = daemon.path / ".ckptfs" / "latest" / "run" / "step_*"
    inode = os.lstat(link).st_ino
    daemon.kill("mount")
    assert os.lstat(link).st_ino == inode and (link / "a").exists()
    assert os.readlink("step_*", dir_fd=there) == "../../../run/step_1"
    os.close(there)
