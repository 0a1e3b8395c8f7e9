"""N2 on a real mount: the newest complete member of a series, by `ckptfs latest`. N7, T5, T6."""

import json
import os
from pathlib import Path

import pytest
from daemon_under_test import Area

pytestmark = pytest.mark.fuse


def save(directory: Path, *names: str) -> None:
    """A checkpoint in a directory."""
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).write_bytes(os.urandom(2000))


def sealed(mount: Area) -> None:
    mount.command("wait", mount.path, "--level", "local", "--timeout", "120s")


def newest(mount: Area, *arguments: str | Path) -> str:
    return str(mount.command("latest", *arguments).stdout).removesuffix("\n")


def test_the_newest_that_is_complete(mount: Area) -> None:
    """N2, N7: by number; what somebody still writes is none."""
    run = mount.path / "run"
    for number in (90, 100, 1000):
        save(run / f"step_{number}", "rank0.pt", "rank1.pt")
    (run / "config.json").write_text("{}")
    sealed(mount)
    # By its directory, its pattern, a member, and what a shell makes of the pattern.
    for named in ([run], [run / "step_*"], [run / "step_90"], sorted(run.glob("step_*"))):
        assert newest(mount, *named) == str(run / "step_1000")
    with open(run / "step_1000" / "rank1.pt", "ab") as file:
        assert newest(mount, run) == str(run / "step_100")
        file.write(b"more")
    sealed(mount)
    found = json.loads(mount.command("latest", run, "--json").stdout)
    assert found == {"number": 1000, "path": str(run / "step_1000"), "level": found["level"], "size": 4004, "files": 2}
    assert found["level"] in ("local", "pfs")


def test_files_are_members_too(mount: Area) -> None:
    """T5."""
    for number in (8, 9, 10):
        (mount.path / f"ckpt_{number}.pt").write_bytes(b"x" * number)
    (mount.path / "ckpt_11.pt.tmp").write_bytes(b"half")
    sealed(mount)
    assert newest(mount, mount.path) == newest(mount, mount.path / "ckpt_8.pt") == str(mount.path / "ckpt_10.pt")


def test_two_names_with_a_number(mount: Area) -> None:
    """Of run1/step_1 the number that counts steps; where both do, a person must say."""
    save(mount.path / "run1" / "step_1", "x1", "x2")
    save(mount.path / "run1" / "step_2", "x1", "x2")
    sealed(mount)
    for named in ("run1", "run1/step_1"):
        assert newest(mount, mount.path / named) == str(mount.path / "run1" / "step_2")
    save(mount.path / "iter_1" / "step_1", "x")
    result = mount.command("latest", mount.path / "iter_1", check=False)
    assert result.returncode == 2 and f"'{mount.path}/iter_1/step_*' or '{mount.path}/iter_*'" in result.stderr


def test_shards_without_their_metadata(mount: Area) -> None:
    """T6: what torch.distributed.checkpoint has not finished."""
    run = mount.path / "dcp"
    save(run / "CHECKPOINT_DIR_step1", "__0_0.distcp", "__1_0.distcp", ".metadata")
    save(run / "CHECKPOINT_DIR_step2", "__0_0.distcp", "__1_0.distcp")
    sealed(mount)
    assert newest(mount, run / "CHECKPOINT_DIR_step2") == str(run / "CHECKPOINT_DIR_step1")
    (run / "CHECKPOINT_DIR_step2" / ".metadata.tmp").write_bytes(b"m")
    (run / "CHECKPOINT_DIR_step2" / ".metadata.tmp").rename(run / "CHECKPOINT_DIR_step2" / ".metadata")
    sealed(mount)
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
