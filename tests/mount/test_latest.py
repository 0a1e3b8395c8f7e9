"""N2 on a real mount: the newest complete member of a series, by `ckptfs latest` and by a name that any program opens. N7, T5, T6."""

import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from another_user import OTHER_STRANGER, as_user
from daemon_under_test import Area, DaemonUnderTest, environment, eventually
from made_sets import make_set
from programs import refusal

from ckptfs.model import Level
from ckptfs.series.search import LatestAnswer

pytestmark = pytest.mark.fuse
ONLY_DATA_PATH = "buffered"  # Each machine has it, and how bytes travel plays no part.


def save(directory: Path, *names: str) -> None:
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).write_bytes(os.urandom(2000))


def newest(mount: Area, *arguments: str | Path) -> str:
    return str(mount.command("latest", *arguments).stdout).removesuffix("\n")


def wait_for_set(mount: Area, directory: str, series: str, member: str) -> Path:
    """Return the newest set of a member in the history, as soon as there is one."""
    where = mount.daemon.path / ".ckptfs" / "history" / mount.path.name / directory / series
    found: list[Path] = eventually(lambda: sorted(where.glob(f"{member}@*")), what=f"a set of {member}")
    return found[-1]


def test_the_newest_that_is_complete(mount: Area) -> None:
    """N2, N7: by number; what somebody still writes is none."""
    run = mount.path / "run"
    for number in (90, 100, 1000):
        save(run / f"step_{number}", "rank0.pt", "rank1.pt")
    (run / "config.json").write_text("{}")
    mount.settle()
    # By its directory, its pattern, and what a shell makes of the pattern.
    for named in ([run], [run / "step_*"], sorted(run.glob("step_*"))):
        assert newest(mount, *named) == str(run / "step_1000")
    kept = wait_for_set(mount, "run", "step_*", "step_1000")
    with open(run / "step_1000" / "rank1.pt", "ab") as file:
        assert newest(mount, run) == str(kept), "as it was before"
        assert f"{run}/step_1000 was passed over: rank1.pt is not sealed yet" in mount.command("latest", run).stderr
        file.write(b"more")
        result = mount.command("latest", run, "--json")
        assert json.loads(result.stdout)["rejected"] == [{"path": str(run / "step_1000"), "reason": "rank1.pt is not sealed yet"}]
    mount.settle()
    found = json.loads(mount.command("latest", run, "--json").stdout)
    assert found == {"number": 1000, "path": str(run / "step_1000"), "level": found["level"], "size": 4004, "files": 2}
    assert found["level"] in ("local", "pfs")


def test_a_directory_is_searched_inside(mount: Area) -> None:
    """N2: never beside it, whatever its own name is: exp2 is another experiment."""
    for name in ("exp1/step_1", "exp1/step_2", "iter_1/step_1", "exp2", "step_7", "rep1", "rep2"):
        save(mount.path / name, "model", "optimizer")
    save(mount.path / "step_8", "core-1.img", "core-2.img")
    mount.settle()
    assert newest(mount, mount.path / "exp1") == str(mount.path / "exp1" / "step_2")
    assert newest(mount, mount.path / "iter_1") == str(mount.path / "iter_1" / "step_1")
    for name in ("exp2", "rep1", "exp1/step_1", "step_7", "step_8"):
        result = mount.command("latest", mount.path / name, check=False)
        assert (result.returncode, result.stdout) == (1, "") and "there is no series in it" in result.stderr
    assert f"ckptfs latest '{mount.path}/exp1/step_*'" in mount.command("latest", mount.path / "exp1" / "step_1", check=False).stderr
    (mount.path / "elsewhere").symlink_to("/usr")
    result = mount.command("latest", mount.path / "elsewhere", check=False)
    assert result.returncode == 3 and "does not lie in a ckptfs mount" in result.stderr
    result = mount.command("latest", mount.path / "rep*", check=False)
    assert result.stdout == f"{mount.path}/rep2\n", "who writes the pattern means it"
    (mount.path / "lr=* [2]").mkdir()
    (mount.path / "lr=* [2]" / "step_1.pt").write_bytes(b"x")
    mount.settle()
    for named in ("lr=* [2]", "lr=* [2]/step_*.pt"):
        assert newest(mount, mount.path / named) == str(mount.path / "lr=* [2]" / "step_1.pt"), "a * in the name of a directory"


def test_a_directory_of_experiments_is_no_series(mount: Area) -> None:
    """N2: `llama-13b` is no newer checkpoint than `llama-7b`, at whatever depth their steps lie."""
    for name in ("size/llama-7b/step_900", "size/llama-13b/step_100", "rate/lr1/checkpoints/step_1", "rate/lr2/checkpoints/step_1"):
        save(mount.path / name, "model", "optimizer")
    (mount.path / "steps" / "100").mkdir(parents=True)
    (mount.path / "steps" / "100" / "ckpt-100.pt").write_bytes(b"x")
    mount.settle()
    for name, inside in (("size", "llama-7b/step_*"), ("rate", "lr2/checkpoints/step_*")):
        said = mount.command("latest", mount.path / name, check=False)
        assert (said.returncode, said.stdout) == (1, "") and f"'{mount.path}/{name}/{inside}'" in said.stderr
    assert newest(mount, mount.path / "steps") == str(mount.path / "steps" / "100"), "it repeats its number"


def test_the_pattern_that_was_meant(mount: Area) -> None:
    """P11: `step_*` where `step_*.pt` lies there."""
    (mount.path / "step_100.pt").write_bytes(b"x")
    (mount.path / "epoch=1-step=200.ckpt").write_bytes(b"x")
    (mount.path / "below").mkdir()
    (mount.path / "below" / "1-20").write_bytes(b"x")
    mount.settle()
    for wrong, meant in (("step_*", "step_*.pt"), ("epoch=*.ckpt", "epoch=*-step=*.ckpt"), ("below/*", "below/*-*")):
        result = mount.command("latest", mount.path / wrong, check=False)
        assert result.returncode == 1 and f"there is no member; did you mean '{mount.path}/{meant}'?" in result.stderr
        assert newest(mount, mount.path / meant)
    (mount.path / "above" / "below").mkdir(parents=True)
    (mount.path / "above" / "below" / "1-20").write_bytes(b"x")
    assert f"say which: '{mount.path}/above/below/*-*'" in mount.command("latest", mount.path / "above", check=False).stderr


def test_the_sets_of_a_directory_that_was_emptied_or_deleted(mount: Area) -> None:
    """X3: an application that deletes all it has is told where its last set is."""
    run = mount.path / "run"
    save(run / "step_100", "a", "b")
    mount.settle()
    kept = mount.daemon.path / ".ckptfs" / "history" / mount.path.name / "run" / "step_*"
    eventually(lambda: kept.is_dir() and os.listdir(kept) == ["step_100@1"], what="the set is made")
    shutil.rmtree(run / "step_100")
    assert newest(mount, run) == str(kept / "step_100@1")
    run.rmdir()
    for gone in (run, run / "step_*"):
        said = mount.command("latest", gone, check=False)
        assert said.returncode == 1 and f"the history has its sets: ckptfs list '{gone}'" in said.stderr
        assert "step_100@1" in mount.command("list", gone).stdout


def test_odd_names(mount: Area) -> None:
    """What is printed are the bytes of the name: programs read it."""
    name = b"caf\xe9 \n 7"
    (mount.path / os.fsdecode(name)).write_bytes(b"1")
    mount.settle()
    command = [sys.executable, "-m", "ckptfs_client", "latest", str(mount.path / os.fsdecode(b"caf\xe9 \n *"))]
    printed = subprocess.run(command, capture_output=True, check=True, timeout=60, env=environment()).stdout
    assert printed == os.fsencode(mount.path) + b"/" + name + b"\n"


KILLED = """
import os, sys, zipfile
with zipfile.ZipFile(sys.argv[1], "w") as archive:
    archive.writestr("data", bytes(300_000))
    os.kill(os.getpid(), 9)
"""


def write_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", bytes(300_000))


def test_a_writer_that_was_killed_in_the_middle(mount: Area) -> None:
    """D6, N7: the kernel closes its file, so it is sealed as it is; the file itself shows that it ends early."""
    for number in (1, 2):
        write_archive(mount.path / f"step_{number}.pt")
    subprocess.run([sys.executable, "-c", KILLED, mount.path / "step_3.pt"], check=False, timeout=60)
    mount.settle()
    assert (mount.path / "step_3.pt").stat().st_size > 100
    result = mount.command("latest", mount.path / "step_*.pt")
    assert result.stdout == f"{mount.path}/step_2.pt\n"
    assert "step_3.pt was passed over: it ends before its zip directory" in result.stderr
    assert latest(mount, "step_*.pt").resolve() == mount.path / "step_2.pt"
    assert os.getxattr(mount.path / "step_2.pt", "user.ckptfs.format") == b"zip"
    assert os.getxattr(mount.path / "step_3.pt", "user.ckptfs.format").startswith(b"zip: ends before")
    with open(mount.path / "step_3.pt", "ab"), pytest.raises(OSError):
        os.getxattr(mount.path / "step_3.pt", "user.ckptfs.format")


def test_each_of_several_that_ended_early_is_explained(mount: Area) -> None:
    """D6: the error names the newest one; the lines before it say why the others are not named either."""
    for number in (1, 2, 3):
        subprocess.run([sys.executable, "-c", KILLED, mount.path / f"epoch_{number}.pt"], check=False, timeout=60)
    mount.settle()
    result = mount.command("latest", mount.path / "epoch_*.pt", check=False)
    assert result.returncode == 1 and result.stdout == ""
    notes, error = result.stderr.splitlines()[:2], result.stderr.splitlines()[2]
    assert [note.split(" was passed over: ")[0] for note in notes] == [f"ckptfs: {mount.path}/epoch_{number}.pt" for number in (2, 1)]
    assert all("it ends before its zip directory" in note for note in notes), result.stderr
    assert "no complete checkpoint" in error and "of epoch_3.pt, it ends before its zip directory" in error


def test_members_of_tensorflow_and_gromacs(mount: Area) -> None:
    """H1, H4: the prefix for TensorFlow; `state_prev.cpt` while `state.cpt` is away or cut."""
    for number in (1, 2):
        for name in ("index", "data-00000-of-00001"):
            (mount.path / f"ckpt-{number}.{name}").write_bytes(b"x" * 92 + bytes.fromhex("57fb808b247547db"))
    whole = b"\x00\x02\x9f\x29" + bytes(1000) + b"\x00\x02\x9f\x2b"
    (mount.path / "rep1").mkdir()
    for name in ("state.cpt", "state_prev.cpt"):
        (mount.path / "rep1" / name).write_bytes(whole)
    mount.settle()
    assert newest(mount, mount.path) == newest(mount, mount.path / "ckpt-*.index") == str(mount.path / "ckpt-2")
    assert sorted(os.listdir(latest(mount))) == ["ckpt-*.data-00000-of-00001", "ckpt-*.index", "rep1"]
    assert latest(mount, "ckpt-*.index").resolve().name == "ckpt-2.index"
    assert newest(mount, mount.path / "rep1") == str(mount.path / "rep1" / "state.cpt")
    assert os.listdir(latest(mount, "rep1")) == ["state.cpt"] and latest(mount, "rep1", "state.cpt").resolve().name == "state.cpt"
    kept = wait_for_set(mount, "rep1", "state.cpt", "state.cpt")
    (mount.path / "rep1" / "state.cpt").write_bytes(whole[:500])
    mount.settle()
    assert newest(mount, mount.path / "rep1") == str(kept / "state.cpt"), "as it was before it was cut"
    os.setxattr(kept, "user.ckptfs.remove", b"now")
    eventually(lambda: not kept.exists(), what="its set is gone")
    assert newest(mount, mount.path / "rep1") == str(mount.path / "rep1" / "state_prev.cpt")
    (mount.path / "rep1" / "state.cpt").unlink()
    assert latest(mount, "rep1", "state.cpt").resolve().name == "state_prev.cpt"
    assert newest(mount, mount.path / "rep1" / "state.cpt") == str(mount.path / "rep1" / "state_prev.cpt")
    assert newest(mount, mount.path / "ckpt-1") == str(mount.path / "ckpt-2"), "no file has this name either"


def test_rules_of_the_configuration(make_daemon: Callable[..., DaemonUnderTest], tmp_path: Path) -> None:
    """T5, D6: the command, the name in the mount and the history follow them."""
    rules = tmp_path / "rules.toml"
    rules.write_text('[[series]]\npattern = "trial*"\ncomplete = "DONE"\n[[series]]\npattern = "state.bin"\n')
    daemon = make_daemon(config=rules)
    for number in (1, 2):
        save(daemon.path / f"trial{number}", "a")
    (daemon.path / "state.bin").write_bytes(b"x")
    (daemon.path / "trial1" / "DONE").touch()
    daemon.settle()
    latest = daemon.path / ".ckptfs" / "latest"
    assert daemon.command("latest", daemon.path / "trial*").stdout == f"{daemon.path}/trial1\n"
    assert daemon.command("latest", daemon.path / "state.bin").stdout == f"{daemon.path}/state.bin\n"
    assert {"state.bin", "trial*"} <= set(os.listdir(latest))
    assert (latest / "trial*").resolve().name == "trial1" and (latest / "state.bin").resolve().name == "state.bin"
    history = daemon.path / ".ckptfs" / "history"
    eventually((history / "trial*" / "trial1@1").exists, what="the set is in the history")
    (daemon.path / "trial2" / "DONE").touch()
    eventually((history / "trial*" / "trial2@2").exists, what="the second, once it has its mark")
    assert daemon.command("latest", daemon.path / "trial*").stdout == f"{daemon.path}/trial2\n"


def test_what_only_a_lost_pfs_has(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """D3, N2: a file whose only copy is on a PFS that is gone cannot be read, so it is no checkpoint now."""
    daemon = make_daemon(start=False)
    # The manifest of a set may be on its way to the PFS, or a scan of it may be due.
    daemon.expect_warning("(to the PFS failed|cannot be opened): No such file or directory.*; retrying")
    write_archive(daemon.pfs / "step_2.pt")
    daemon.start()
    write_archive(daemon.path / "step_1.pt")
    daemon.settle()
    assert daemon.command("latest", daemon.path / "step_*.pt").stdout == f"{daemon.path}/step_2.pt\n"
    away = daemon.pfs.with_name("away")
    daemon.pfs.rename(away)
    result = daemon.command("latest", daemon.path / "step_*.pt")
    assert result.stdout == f"{daemon.path}/step_1.pt\n" and "step_2.pt was passed over: it cannot be read" in result.stderr
    assert (daemon.path / ".ckptfs" / "latest" / "step_*.pt").resolve().name == "step_1.pt"
    away.rename(daemon.pfs)
    assert daemon.command("latest", daemon.path / "step_*.pt").stdout == f"{daemon.path}/step_2.pt\n"


def test_a_set_that_only_a_lost_pfs_has(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """D3, N2: nor is a set of the history the newest as long as its files cannot be read."""
    daemon = make_daemon()
    daemon.expect_warning("(to the PFS failed|cannot be opened): No such file or directory.*; retrying")
    for number in (1, 2):
        save(daemon.path / f"step_{number}", "a.pt", "b.pt")
    daemon.settle()
    history = daemon.path / ".ckptfs" / "history" / "step_*"
    eventually(lambda: len([*history.glob("step_*@*")]) == 2, what="both sets")
    daemon.settle()
    daemon.unmount()
    daemon.start()
    latest = f"{daemon.path}/step_2\n"
    assert daemon.command("latest", daemon.path / "step_*").stdout == latest
    away = daemon.pfs.with_name("away")
    daemon.pfs.rename(away)
    result = daemon.command("latest", daemon.path / "step_*", check=False)
    assert (result.returncode, result.stdout) == (1, "") and "cannot be read" in result.stderr
    save(daemon.path / "step_0", "a.pt", "b.pt")
    eventually(lambda: daemon.command("latest", daemon.path / "step_*", check=False).stdout == f"{daemon.path}/step_0\n", what="step_0")
    away.rename(daemon.pfs)
    assert daemon.command("latest", daemon.path / "step_*").stdout == latest


def test_very_many_that_are_not_complete(mount: Area) -> None:
    """N2: one answer of the mount does not tell all. Symlinks are members, but hold no file."""
    run, count = mount.path / "run", 300
    save(run / "step_1", "rank0.pt", "rank1.pt")
    save(run / "step_2", "rank0.pt", "rank1.pt")
    for number in range(3, count):
        (run / f"step_{number}").symlink_to("step_1")
    mount.settle()
    for named in (run, run / "step_*"):
        found = json.loads(mount.command("latest", named, "--json").stdout)
        assert found["path"] == str(run / "step_2") and len(found["rejected"]) == count - 3


def test_none(mount: Area, tmp_path: Path) -> None:
    """Exit code 1, and the words say why; 2 where the question is no good. P11."""
    run = mount.path / "run"
    save(run / "step_1")
    result = mount.command("latest", run / "step_*", check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert f"{run}/step_*: no complete checkpoint at the level local: of step_1, it holds no file; wait until" in result.stderr
    assert "there is no member" in mount.command("latest", run / "other_*", check=False).stderr
    (mount.path / "plain").mkdir()
    assert "no name there has a number" in mount.command("latest", mount.path / "plain", check=False).stderr
    for wrong in ("*/step_1", "step_**"):
        result = mount.command("latest", run / wrong, check=False)
        assert result.returncode == 2 and "one * is accepted, in the last part of the path" in result.stderr
    save(run / "other_1", "x")
    save(run / "other_2", "x")
    save(run / "step_2", "x")
    result = mount.command("latest", run, check=False)
    assert result.returncode == 2 and f"say which, in quotes: '{run}/other_*' or '{run}/step_*'" in result.stderr
    assert mount.command("latest", run, "--level", "best", check=False).returncode == 2
    assert mount.command("latest", "/", check=False).returncode == 3
    (mount.path / "elsewhere").symlink_to(tmp_path)
    save(tmp_path / "step_1", "x")
    assert mount.command("latest", mount.path / "elsewhere" / "step_*", check=False).returncode == 3


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
    kept = wait_for_set(mount, "run", "step_*", "step_10")
    with open(mount.path / "run" / "step_10" / "b", "ab"):
        assert link.resolve() == kept
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
    assert {*os.listdir(mount.daemon.path / ".ckptfs")} - {"history"} == {"complete", "latest"}
    assert ".ckptfs" not in os.listdir(mount.daemon.path)
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


def test_a_set_of_a_name_without_a_number_is_no_series_there(mount: Area) -> None:
    """D15: what is listed as a symlink is one. Its directory is listed as such, as long as there is one."""
    save(mount.path / "one", "a")
    os.setxattr(mount.path / "one", "user.ckptfs.commit", b"1")
    kept = mount.daemon.path / ".ckptfs" / "history" / mount.path.name / "one"
    eventually(lambda: os.path.lexists(kept) and os.listdir(kept), what="it is a set")
    assert [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in os.scandir(latest(mount))] == [("one", True)]
    assert stat.S_ISDIR(os.lstat(latest(mount, "one")).st_mode)
    shutil.rmtree(mount.path / "one")
    assert os.listdir(latest(mount)) == [] and not os.path.lexists(latest(mount, "one"))


def test_its_own_name_is_not_given_away_and_tools_pass_through(mount: Area, tmp_path: Path) -> None:
    """P11: at the top nothing takes its place; find, du and cp end, and copy what is there: names."""
    save(mount.path / "run" / "step_1", "a")
    mount.settle()
    top, ours = mount.daemon.path, mount.daemon.path / ".ckptfs"
    for change in (lambda: mount.path.rename(ours), lambda: ours.rename(top / "mine"), ours.rmdir, ours.mkdir):
        with pytest.raises(OSError):
            change()
    assert (mount.path / "run" / "step_1" / "a").exists() and "latest" in os.listdir(ours) and not (top / "mine").exists()
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
    for name in ("latest.local.0.", "latest.local.0.step_*"):
        assert as_user(lambda name=name: os.getxattr(mount.path / "through", f"user.ckptfs.{name}")) == "EACCES"
    (mount.path / "through").chmod(0o755)
    assert as_user(lambda: os.readlink(latest(mount, "through", "step_*"))) == "ok"


@pytest.mark.others
def test_what_the_caller_may_not_read_is_no_answer(mount: Area) -> None:
    """F6: the mount searches with the rights of the caller, and tells nothing of what that may not read."""
    run = mount.path / "run"
    for number in (1, 2, 3):
        save(run / f"step_{number}", "secret")
    mount.settle()
    (run / "step_3").chmod(0o700)
    (run / "step_2" / "secret").chmod(0o640)
    os.chown(run / "step_2" / "secret", -1, OTHER_STRANGER)

    def require(*expected: tuple[bytes, str]) -> None:
        found, rejected, _ = LatestAnswer.decode(os.getxattr(run, "user.ckptfs.latest.local.0.step_*")).result
        assert {one.name: one.find_obstacle(Level.LOCAL) for one in (*rejected, found) if one is not None} == dict(expected)

    directory = (b"step_3", "it cannot be read: Permission denied")
    file = (b"step_2", "secret cannot be read: Permission denied")
    assert as_user(lambda: require(directory, file, (b"step_1", ""))) == "ok"
    assert as_user(lambda: require(directory, (b"step_2", "")), groups=(OTHER_STRANGER,)) == "ok"
    assert newest(mount, run) == str(run / "step_3")


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


# --- sets in the history ------------------------------------------------------------------------------------------------


def resolve(mount: Area, *parts: str) -> str:
    """Where the name leads to, below the mount."""
    return str(latest(mount, *parts).resolve().relative_to(mount.daemon.path))


def test_a_set_that_is_overwritten_stays_the_latest(mount: Area) -> None:
    """T6, D6: readers of `latest` never see a mixture: of the old bytes and the new ones they get the old until the new ones are whole."""
    run = mount.path / "run"
    save(run / "step_100", "rank0.pt", "rank1.pt")
    mount.settle()
    old = [(run / "step_100" / name).read_bytes() for name in ("rank0.pt", "rank1.pt")]
    make_set(mount.daemon, run / "step_100", "step_*", numbers=(100,))
    assert resolve(mount, "run", "step_*") == f"{mount.path.name}/run/step_100" and newest(mount, run) == str(run / "step_100")
    with open(run / "step_100" / "rank0.pt", "wb") as file:
        for _ in range(3):
            file.write(os.urandom(1000))
            file.flush()
            assert resolve(mount, "run", "step_*").startswith(f".ckptfs/history/{mount.path.name}/run/step_*/step_100@")
            assert [(latest(mount, "run", "step_*") / name).read_bytes() for name in ("rank0.pt", "rank1.pt")] == old
        shown = Path(newest(mount, run))
        assert [(shown / name).read_bytes() for name in ("rank0.pt", "rank1.pt")] == old
        assert f"{run}/step_100 was passed over: rank0.pt is not sealed yet" in mount.command("latest", run).stderr
    shutil.rmtree(run / "step_100")
    assert [(latest(mount, "run", "step_*") / name).read_bytes() for name in ("rank0.pt", "rank1.pt")] == old
    assert os.listdir(latest(mount, "run")) == ["step_*"], "the series is shown while the history has a set of it"
    found = json.loads(mount.command("latest", run / "step_*", "--json").stdout)
    assert (found["number"], found["files"], found["size"]) == (100, 2, 4000) and "/.ckptfs/history/" in found["path"]


def test_files_and_groups_of_the_history(mount: Area) -> None:
    """H4, X3: the symlink of each file leads to that file; the command prints what a program is given."""
    write_archive(mount.path / "model_7.pt")
    for name in ("index", "data-00000-of-00001"):
        (mount.path / f"ckpt-2.{name}").write_bytes(name.encode())
    mount.settle()
    make_set(mount.daemon, mount.path / "model_7.pt", "model_*.pt", numbers=(7,))
    make_set(mount.daemon, mount.path / "ckpt-2.index", "ckpt-*", name="ckpt-2", more=["ckpt-2.data-00000-of-00001"], numbers=(2,))
    assert resolve(mount, "model_*.pt") == f"{mount.path.name}/model_7.pt" and resolve(mount, "ckpt-*.index").endswith("/ckpt-2.index")
    for path in list(mount.path.iterdir()):
        path.unlink()
    assert sorted(os.listdir(latest(mount))) == ["ckpt-*.data-00000-of-00001", "ckpt-*.index", "model_*.pt"]
    assert latest(mount, "ckpt-*.index").read_bytes() == b"index" and zipfile.is_zipfile(latest(mount, "model_*.pt"))
    assert latest(mount, "ckpt-*.data-00000-of-00001").read_bytes() == b"data-00000-of-00001"
    prefix = newest(mount, mount.path / "ckpt-*")
    assert Path(prefix + ".index").read_bytes() == b"index" and zipfile.is_zipfile(newest(mount, mount.path / "model_*.pt"))
