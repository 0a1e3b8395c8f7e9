"""The commands about checkpoint sets on a real mount, with a series of `torch.save` that the job rotates. D1, D2, D12, H8, H10, N2, X3."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from another_user import run_as_user
from ckptfs_client.sets import newest, set_changes, set_listing
from daemon_under_test import REPOSITORY, Area, DaemonUnderTest, environment, eventually
from programs import refusal

pytestmark = pytest.mark.fuse
ONLY_DATA_PATH = "buffered"  # Each machine has it, and how bytes travel plays no part.
LOADED = (newest, set_changes, set_listing)
"""What commands load when they run."""
PAGE = REPOSITORY / "docs" / "checkpoint-sets.md"
XXH128SUM = f"""#!{sys.executable}
import sys, xxhash
print(xxhash.xxh3_128_hexdigest(open(sys.argv[1], "rb").read() if sys.argv[1:] else sys.stdin.buffer.read()), " stdin")
"""


def save(directory: Path, fill: float) -> dict[str, bytes]:
    """Save a model and an optimizer, as a training script does; their bytes by name."""
    torch = pytest.importorskip("torch", reason="torch is not installed (./bootstrap.sh setup installs it)")
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("model.pt", "optimizer.pt"):
        torch.save({"weights": torch.full((50_000,), fill), "name": name}, directory / name)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def listed(mount: Area, *words: str | Path) -> list[dict[str, Any]]:
    """What `ckptfs list --json` prints."""
    found: list[dict[str, Any]] = json.loads(mount.command("list", *words, "--json").stdout)
    return found


def wait_for(mount: Area, series: Path, *sets: str) -> None:
    """Wait until these are the complete sets of a series, the newest first."""
    history = mount.daemon.path / ".ckptfs" / "history" / series.relative_to(mount.daemon.path)
    eventually(lambda: history.exists() and set(os.listdir(history)) == set(sets), what=f"{series} has {sets}")
    assert [one["set"] for one in listed(mount, series) if one["number"]] == list(sets)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith("MANIFEST")}


def latest(mount: Area, series: Path) -> str:
    return str(mount.command("latest", series).stdout).removesuffix("\n")


def test_a_rotated_series_comes_back(mount: Area, tmp_path: Path) -> None:
    """D12, X3: the job deletes its last set with rm -r; the history has it, and restore gives the same bytes."""
    series = mount.path / "step_*"
    saved = {}
    for number in (100, 200):
        saved[number] = save(mount.path / f"step_{number}", number)
        wait_for(mount, series, *(f"step_{one}@{one // 100}" for one in range(number, 0, -100)))
    for number in (100, 200):
        shutil.rmtree(mount.path / f"step_{number}")
    newest = f"{series}@2"
    row = eventually(lambda: next(one for one in listed(mount, series) if one["state"] == "in history only"), what="it is deleted")
    assert row["set"] == "step_200@2" and (row["step"], row["files"]) == (200, 2) and contents(Path(row["path"])) == saved[200]
    out = tmp_path / "out"
    assert "2 files" in mount.command("restore", newest, out).stdout and contents(out / "step_200") == saved[200]
    answer = json.loads(mount.command("restore", mount.path / "step_200", "--json").stdout)
    assert answer["files"] == 2 and answer["path"] == str(mount.path / "step_200") and contents(mount.path / "step_200") == saved[200]
    assert (mount.path / "step_200" / "model.pt").stat().st_mode & 0o777 == 0o644 & ~_umask() | 0o600
    assert "nothing was copied" in mount.command("restore", eventually_newest(mount, series)).stdout
    assert latest(mount, series) == str(mount.path / "step_200")


def eventually_newest(mount: Area, series: Path) -> str:
    """The newest set, as soon as it is in its place."""
    return str(eventually(lambda: next((f"{series}@{one['number']}" for one in listed(mount, series) if one["state"] == "complete"), "")))


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_an_overwritten_set_stays(mount: Area) -> None:
    """D1, T6: saving an id again makes a new set, and restore never replaces it without --force."""
    series = mount.path / "step_*"
    old = save(mount.path / "step_1", 1)
    wait_for(mount, series, "step_1@1")
    mount.command("pin", f"{series}@1")
    new = save(mount.path / "step_1", 2)
    wait_for(mount, series, "step_1@2", "step_1@1")
    result = mount.command("restore", f"{series}@1", check=False)
    assert result.returncode == 1 and "would be lost; --force replaces it" in result.stderr and contents(mount.path / "step_1") == new
    mount.command("restore", f"{series}@1", "--force")
    assert contents(mount.path / "step_1") == old


def test_rollback(mount: Area) -> None:
    """D2: an older set is the latest; the next one that is completed is the latest again."""
    series = mount.path / "step_*"
    for number in (1, 2, 3):
        save(mount.path / f"step_{number}", number)
        wait_for(mount, series, *(f"step_{one}@{one}" for one in range(number, 0, -1)))
    assert "step_2@2 is the latest" in mount.command("rollback", series).stdout
    assert latest(mount, series) == str(mount.path / "step_2")
    assert [one["set"] for one in listed(mount, series) if one["rollback"]] == ["step_2@2"] and (mount.path / "step_3").is_dir()
    mount.command("rollback", series, "step_1")
    assert latest(mount, series) == str(mount.path / "step_1")
    assert "is the latest again" in mount.command("rollback", series, "--undo").stdout and latest(mount, series) == str(
        mount.path / "step_3"
    )
    assert "was not rolled back" in mount.command("rollback", series, "--undo").stdout
    mount.command("rollback", series, "1")
    save(mount.path / "step_4", 4)
    eventually(lambda: latest(mount, series) == str(mount.path / "step_4"), what="a newer set ends the rollback")
    for words, code in ((["step_9"], 1), (["--undo", "step_1"], 2)):
        assert mount.command("rollback", series, *words, check=False).returncode == code


def test_all_commands_agree_which_set_is_the_newest(mount: Area) -> None:
    """N2, D2, D6: sets of an early step are completed last, and one is rolled back to."""
    series, place = mount.path / "step_*", mount.path / "step_100"
    for number, step in enumerate((200, 100, 100), 1):
        save(mount.path / f"step_{step}", number)
        eventually(lambda last=number: any(one["number"] == last for one in listed(mount, series)), what="it is a set")
        mount.command("pin", f"{series}@{number}")

    def list_answers() -> tuple[list[int], str, str]:
        shown = json.loads(mount.command("show", place, "--json").stdout)["set"]
        complete = os.readlink(mount.daemon.path / ".ckptfs" / "complete" / place.relative_to(mount.daemon.path))
        return [one["number"] for one in listed(mount, series)], shown, os.path.basename(complete)

    assert latest(mount, series) == str(mount.path / "step_200")
    assert list_answers() == ([1, 3, 2], "step_100@3", "step_100@3")
    mount.command("rollback", series)
    assert latest(mount, series) == str(place) and list_answers()[0] == [3, 1, 2]
    mount.command("rollback", series)
    assert latest(mount, series).endswith("/step_100@2")
    assert list_answers() == ([2, 1, 3], "step_100@2", "step_100@2")


def test_pins_and_notes(mount: Area) -> None:
    """H10: they are shown, and only the owner sets them."""
    series, one = mount.path / "step_*", mount.path / "step_1"
    save(one, 1)
    wait_for(mount, series, "step_1@1")
    mount.command("pin", one)
    mount.command("annotate", one, "vor der Lernrate, größer")
    assert [(row["pinned"], row["note"]) for row in listed(mount, series)] == [(True, "vor der Lernrate, größer")]
    shown = json.loads(mount.command("show", one, "--json").stdout)
    assert shown["note"] == "vor der Lernrate, größer" and [file["path"] for file in shown["members"]] == ["model.pt", "optimizer.pt"]
    for file in shown["members"]:
        assert file["digest"] == os.getxattr(one / file["path"], "user.ckptfs.digest").decode()
    assert shown["producers"][0]["pid"] == os.getpid() and Path(shown["manifest"]).is_file()
    assert f"pid {os.getpid()}" in mount.command("show", one).stdout
    for words in (["unpin", one], ["annotate", one, ""]):
        mount.command(*words)
    assert "was not pinned" in mount.command("unpin", one).stdout
    assert [(row["pinned"], row["note"]) for row in listed(mount, series)] == [(False, "")]


@pytest.mark.others
def test_what_other_users_may(mount: Area) -> None:
    """F6: they list what they may read, and change nothing; of a private series they see no name."""
    one = mount.path / "step_1"
    save(one, 1)
    private = mount.path / "private"
    private.mkdir(mode=0o700)
    save(private / "step_5", 5)
    wait_for(mount, mount.path / "step_*", "step_1@1")
    wait_for(mount, private / "step_*", "step_5@1")
    mount.command("annotate", private / "step_5", "secret")

    every, own = run_as_user("list", mount.daemon.path), run_as_user("list", f"{mount.path}/step_*")
    listing, show, pin = run_as_user("list", private), run_as_user("show", f"{private}/step_5@1"), run_as_user("pin", one)
    assert every.returncode == own.returncode == 0 and "step_1@1" in own.stdout and "step_1@1" in every.stdout
    assert (listing.returncode, show.returncode, pin.returncode) == (1, 1, 5), (listing, show, pin)
    told = "".join(done.stdout for done in (every, own, listing, show))
    assert "step_5" not in told.replace(f"{private}/step_5", "") and "secret" not in told
    assert [row["note"] for row in listed(mount, private / "step_*")] == ["secret"]


def test_verify(mount: Area) -> None:
    """H8: digests, formats, the manifest and the rules of the kind, of a set and of a whole series."""
    series = mount.path / "step_*"
    save(mount.path / "step_1", 1)
    wait_for(mount, series, "step_1@1")
    for words in (f"{series}@1", series, mount.path / "step_1"):
        result = mount.command("verify", words, "--json")
        found = json.loads(result.stdout)
        assert [(Path(one["path"]).name, one["format"], one["flaw"]) for one in found["formats"]] == [
            ("model.pt", "zip", ""), ("optimizer.pt", "zip", ""), ("step_1@1", "checkpoint set", ""),
        ]  # fmt: skip
        assert found["files"] >= 2 and {one["verdict"] for one in found["findings"]} == {"good"}
    whole = (mount.path / "step_1" / "model.pt").read_bytes()
    (mount.path / "cut.pt").write_bytes(whole[:-100])
    mount.settle()
    result = mount.command("verify", mount.path / "cut.pt", check=False)
    assert result.returncode == 1 and "zip: ends before its zip directory" in result.stdout
    assert mount.command("verify", f"{series}@7", check=False).returncode == 1


def test_rm(mount: Area) -> None:
    """X3: the shield keeps the last verified set, until --now, which deletes a pinned one, too."""
    series = mount.path / "step_*"
    for number in (1, 2):
        save(mount.path / f"step_{number}", number)
        wait_for(mount, series, *(f"step_{one}@{one}" for one in range(number, 0, -1)))
    mount.settle()
    assert "2 files removed" in mount.command("rm", mount.path / "step_1").stdout and not (mount.path / "step_1").exists()
    wait_for(mount, series, "step_2@2")
    (mount.path / "step_2" / "half.tmp").write_text("mine")
    result = mount.command("rm", f"{series}@2")
    assert "because no newer set is as safe (--now deletes it)" in result.stdout
    assert os.listdir(mount.path / "step_2") == ["half.tmp"], "what the set does not have stays"
    assert [(one["set"], one["state"]) for one in listed(mount, series) if one["number"]] == [("step_2@2", "in history only")]
    mount.command("pin", f"{series}@2")
    assert "the set goes from the history" in mount.command("rm", f"{series}@2", "--now").stdout
    history = Path(str(series).replace(str(mount.daemon.path), f"{mount.daemon.path}/.ckptfs/history"))
    eventually(lambda: not history.exists() or os.listdir(history) == [], what="the set is gone")


def test_commit(mount: Area) -> None:
    """D15: a member that only its writer knows to be complete; and what cannot be committed."""
    directory = mount.path / "step_1"
    directory.mkdir()
    for name in ("rank0.bin", "rank1.bin"):
        (directory / name).write_bytes(os.urandom(2000))
    mount.settle()
    assert listed(mount, mount.path / "step_*")[0]["state"] == "incomplete", "ranks might still come"
    assert refusal(lambda: os.setxattr(directory, "user.ckptfs.commit", b"2")) == "EINVAL"
    assert "is committed" in mount.command("commit", directory).stdout
    wait_for(mount, mount.path / "step_*", "step_1@1")
    assert mount.command("commit", mount.path / "none", check=False).returncode == 1
    assert mount.command("commit", "/", check=False).returncode == 3


def test_what_cannot_be_committed(mount: Area) -> None:
    """P11: the mount itself, and what is complete already."""
    for path in (mount.daemon.path, mount.daemon.path / ".ckptfs", mount.daemon.path / ".ckptfs" / "history"):
        result = mount.command("commit", path, check=False)
        assert result.returncode == 2 and "cannot become a set; accepted: a file or directory" in result.stderr


def test_latest_of_what_was_committed_outside_any_series(mount: Area) -> None:
    """X9: a file and a directory."""
    (mount.path / "best").mkdir()
    (mount.path / "best" / "weights").write_bytes(b"weights")
    (mount.path / "final.bin").write_bytes(b"weights")
    mount.settle()
    for name in ("best", "final.bin"):
        path = mount.path / name
        assert mount.command("latest", path, check=False).returncode == 1, "nobody has called it complete"
        mount.command("commit", path)
        wait_for(mount, path, f"{name}@1")
        assert mount.command("latest", path).stdout == f"{path}\n"


def test_advice_measures_a_save(mount: Area, tmp_path: Path) -> None:
    """H9, X9: from the making of the directory to the last change of a file, although somebody has read the files since."""
    series, directory, probe = mount.path / "step_*", mount.path / "step_2", tmp_path / "probe"
    save(mount.path / "step_1", 1)
    wait_for(mount, series, "step_1@1")
    began_s = time.time()
    directory.mkdir()
    made_s = time.time()
    # The kernel's clock for files lags behind.
    eventually(lambda: probe.write_bytes(b"x") and probe.stat().st_mtime > made_s + 0.2, what="0.2 s are over")
    save(directory, 2)
    ended_s = time.time()
    wait_for(mount, series, "step_2@2", "step_1@1")
    advice = json.loads(mount.command("advise", series, "--mtbf", "12h", "--json").stdout)
    assert advice["cost_sets"] == 1 and 0.2 < advice["cost_s"] < ended_s - began_s
    assert advice["sets"] == 2 and advice["period_s"] > advice["cost_s"]


def test_what_is_not_complete_is_listed(mount: Area) -> None:
    """D1, P11: the newest member that is no set, with the reason."""
    series = mount.path / "step_*"
    save(mount.path / "step_1", 1)
    wait_for(mount, series, "step_1@1")
    with open(mount.path / "step_2", "wb") as file:
        file.write(b"x")
        newest, complete = listed(mount, series)
        assert (newest["set"], newest["number"], newest["state"]) == ("step_2", None, "incomplete") and "sealed" in newest["reason"]
        assert complete["state"] == "complete" and re.search(r"incomplete: .*not sealed", mount.command("list", series).stdout)
    assert mount.command("list", mount.path / "none", check=False).returncode == 1


def test_the_page_says_what_works(make_daemon: Callable[..., DaemonUnderTest], tmp_path: Path) -> None:
    """The commands of docs/checkpoint-sets.md in their order, and its check of a manifest on the PFS with standard tools."""
    daemon = make_daemon()
    mount = Area(daemon, "run1")
    for number in (100, 200):
        save(mount.path / f"step_{number}", number)
        wait_for(mount, mount.path / "step_*", *(f"step_{one}@{one // 100}" for one in range(number, 0, -100)))
    program = tmp_path / "bin" / "ckptfs"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckptfs_client "$@"\n')
    if shutil.which("xxh128sum") is None:
        (program.parent / "xxh128sum").write_text(XXH128SUM)
        (program.parent / "xxh128sum").chmod(0o755)
    program.chmod(0o755)
    variables = environment(PATH=f"{program.parent}:{os.environ['PATH']}")
    text = PAGE.read_text()
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        script = block.replace("/tmp/", f"{tmp_path}/").replace("/ckpt/", f"{daemon.path}/")
        script = script.replace("ckptfs list\n", f"ckptfs list {daemon.path}\n")  # There may be other mounts.
        done = subprocess.run(["bash", "-euxc", script], env=variables, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
    save(mount.path / "step_300", 300)
    (mount.path / "step_300" / "large.pt").write_bytes(os.urandom(9 << 20))
    newest = Path(eventually_newest(mount, mount.path / "step_*")).name
    daemon.settle()
    on_pfs = daemon.pfs / ".ckptfs.history" / "run1" / "step_*" / f"step_300@{newest.partition('@')[2]}"
    eventually((on_pfs / "MANIFEST.xxh128").exists, what="the manifest is on the PFS")
    (check,) = re.findall(r"^```text\n(digest.*?)^```", text, re.MULTILINE | re.DOTALL)

    def run() -> str:
        command = ["bash", "-c", check]
        return subprocess.run(command, cwd=on_pfs, env=variables, capture_output=True, text=True, timeout=60, check=True).stdout

    assert len((on_pfs / "MANIFEST.xxh128").read_text().splitlines()) == len(os.listdir(on_pfs)) - 2 and run() == ""
    manifest = on_pfs / "MANIFEST.xxh128"
    text = manifest.read_text()
    manifest.unlink()
    manifest.write_text(text.replace(text[:32], xxhash.xxh3_128_hexdigest(b"other")))
    assert run().endswith(" differs\n")
