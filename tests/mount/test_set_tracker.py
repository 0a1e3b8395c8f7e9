"""D1, X3, T6, H10 on a real mount: complete sets are kept in the history, whatever the application does with its own names."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from daemon_under_test import Area, DaemonUnderTest, eventually, shorten
from set_history import list_names, list_sets, load_manifest, wait_for_sets, write_archive

pytestmark = pytest.mark.fuse
ONLY_DATA_PATH = "buffered"  # Each machine has it, and how bytes travel plays no part.


@pytest.fixture
def patient(make_daemon: Callable[..., DaemonUnderTest]) -> Area:
    """Where sets are waited for, and kept for those who were told of them, however long a busy machine takes."""
    return Area(make_daemon(ONLY_DATA_PATH, env=shorten(SET_LOOK_WAIT_S=600, SET_NAMED_S=600)), "patient")


def test_a_file_that_is_complete_becomes_a_set(mount: Area) -> None:
    """D1: numbered, with a manifest; the application sees nothing of it."""
    write_archive(mount.path / "step_100.pt")
    (mount.path / "notes.txt").write_text("no set")
    sets = wait_for_sets(mount, "step_*.pt/step_100.pt@1")
    names = list_names(mount, sets["step_*.pt/step_100.pt@1"])
    assert sorted(names) == ["MANIFEST.json", "MANIFEST.xxh128", "step_100.pt"]
    status = (mount.path / "step_100.pt").stat()
    assert names["step_100.pt"] == status.st_ino and status.st_nlink == 1
    write_archive(mount.path / "step_200.pt")
    wait_for_sets(mount, "step_*.pt/step_100.pt@1", "step_*.pt/step_200.pt@2")


def test_a_rotation_that_keeps_one(mount: Area) -> None:
    """X3: old before new, and new before old. The history has the newest; what it had before goes."""
    for number in range(1, 5):
        write_archive(mount.path / f"step_{number}.pt", os.urandom(5000))
        wait_for_sets(mount, f"step_*.pt/step_{number}.pt@{number}")
        if number % 2:
            (mount.path / f"step_{number}.pt").unlink()
        else:
            write_archive(mount.path / "step_9.pt.tmp")
            (mount.path / "step_9.pt.tmp").unlink()
            (mount.path / f"step_{number}.pt").unlink()
    wait_for_sets(mount, "step_*.pt/step_4.pt@4")
    assert os.listdir(mount.path) == []


@pytest.mark.parametrize("removes", ["unlink", "replace", "overwrite"])
def test_what_is_removed_as_soon_as_it_is_sealed_was_a_set(patient: Area, removes: str) -> None:
    """X3: the removal waits until the tracker has looked; that of another file does not."""
    run = patient.path / "run"
    run.mkdir()
    place, other = run / "step_1.pt", patient.path / "other"
    write_archive(place)
    other.write_bytes(b"x")
    eventually(lambda: patient.catalog("SELECT 1 FROM content WHERE inode = ? AND state = 2", place.stat().st_ino), what="it is sealed")
    if removes == "unlink":
        place.unlink()
    elif removes == "replace":
        other.rename(place)
    else:
        place.write_bytes(b"new")
    assert "run/step_*.pt/step_1.pt@1" in list_sets(patient)


def test_a_set_that_a_program_was_told_can_be_read_for_a_while(patient: Area) -> None:
    """N2: also if the next one is complete before the program reads it."""
    write_archive(patient.path / "step_1.pt", b"first")
    write_archive(patient.path / "step_2.pt", b"second")
    wait_for_sets(patient, *(f"step_*.pt/step_{number}.pt@{number}" for number in (1, 2)))
    (patient.path / "step_1.pt").unlink()
    (patient.path / "step_2.pt").unlink()
    wait_for_sets(patient, "step_*.pt/step_2.pt@2")
    told = patient.command("latest", patient.path / "step_*.pt").stdout.strip()
    patient.settle()
    write_archive(patient.path / "step_3.pt")
    wait_for_sets(patient, "step_*.pt/step_2.pt@2", "step_*.pt/step_3.pt@3")
    patient.settle()
    write_archive(patient.path / "step_4.pt")
    wait_for_sets(patient, *(f"step_*.pt/step_{number}.pt@{number}" for number in (2, 3, 4)))
    with zipfile.ZipFile(told) as archive:
        assert archive.read("data") == b"second"


def test_rm_rf_of_everything(mount: Area) -> None:
    """X3: the last set stays in the history, on the PFS too, with all that belongs to it."""
    data = {name: os.urandom(3000) for name in ("model.bin", "optimizer.bin", "scheduler.bin")}
    run = mount.path / "run"
    (run / "step_1" / "inner").mkdir(parents=True)
    for name, content in data.items():
        (run / "step_1" / "inner" / name).write_bytes(content)
    (run / "step_1" / "link").symlink_to("inner/model.bin")
    wait_for_sets(mount, "run/step_*/step_1@1")
    shutil.rmtree(run)
    mount.settle()
    assert list(wait_for_sets(mount, "run/step_*/step_1@1")) == ["run/step_*/step_1@1"]
    kept = mount.daemon.pfs / ".ckptfs.history" / mount.path.name / "run" / "step_*" / "step_1@1"
    assert {name: (kept / "inner" / name).read_bytes() for name in data} == data
    assert os.readlink(kept / "link") == "inner/model.bin"


def test_a_set_of_an_early_step_does_not_replace_the_newest_one(mount: Area) -> None:
    """X3, D2: not if it is completed late; but it does if the application deleted the newest one and went back."""
    write_archive(mount.path / "step_200.pt")
    wait_for_sets(mount, "step_*.pt/step_200.pt@1")
    write_archive(mount.path / "step_100.pt")
    wait_for_sets(mount, "step_*.pt/step_200.pt@1", "step_*.pt/step_100.pt@2")
    for step in (100, 200):
        (mount.path / f"step_{step}.pt").unlink()
    wait_for_sets(mount, "step_*.pt/step_200.pt@1")
    write_archive(mount.path / "step_110.pt")
    wait_for_sets(mount, "step_*.pt/step_110.pt@3")


PRODUCER = """
import sys
with open(sys.argv[1], "wb") as file:
    file.write(b"x" * 10_000_000)
    file.flush()
    input()
"""


def test_the_manifest(mount: Area) -> None:
    """H10: sizes, digests that standard tools compute, and the process that wrote: a plain file on the PFS."""
    (mount.path / "step_7").mkdir()
    environment = {**os.environ, "SLURM_JOB_ID": "4711", "RANK": "3"}
    command = [sys.executable, "-c", PRODUCER, str(mount.path / "step_7" / "model.bin")]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as writer:
        eventually(lambda: (mount.path / "step_7" / "model.bin").exists() and (mount.path / "step_7" / "model.bin").stat().st_size > 0)
        writer.communicate(b"\n", timeout=60)
    (mount.path / "step_7" / "a\nb").write_bytes(b"two lines")
    wait_for_sets(mount, "step_*/step_7@1")
    mount.settle()
    kept = mount.daemon.pfs / ".ckptfs.history" / mount.path.name / "step_*" / "step_7@1"
    manifest = load_manifest(kept)
    assert (manifest["series"], manifest["set"], manifest["number"]) == (f"{mount.path.name}/step_*", "step_7@1", 1)
    files = {file["path"]: file for file in manifest["files"]}
    assert files["model.bin"]["size"] == 10_000_000 and files.keys() == {"model.bin", "a\nb"}
    written_by = manifest["producers"][files["model.bin"]["producer"]]
    assert (written_by["pid"], written_by["job"], written_by["rank"]) == (writer.pid, "4711", "3")
    assert sys.executable in written_by["command"]
    lines = dict(reversed(line.split("  ", 1)) for line in (kept / "MANIFEST.xxh128").read_text().splitlines())
    assert lines.keys() == {"model.bin", "a\\nb"}
    assert lines["model.bin"] == files["model.bin"]["digest"] == digest_by_hand((kept / "model.bin").read_bytes())


def digest_by_hand(data: bytes) -> str:
    """As the manifest says."""
    blocks = [data[start : start + 4194304] for start in range(0, len(data), 4194304)]
    joined = b"".join(xxhash.xxh3_128_digest(block) for block in blocks)
    return xxhash.xxh3_128_hexdigest(joined + len(data).to_bytes(8, "little"))


def test_a_set_that_is_restarted_by_a_symlink(mount: Area) -> None:
    """H2, X3: DMTCP names the script of the newest checkpoint by a symlink; a set without it could not be restarted."""
    image, script, name = "ckpt_sh_e7-40000-2e.dmtcp", "dmtcp_restart_script_e7-40000-2d.sh", "dmtcp_restart_script.sh"
    (mount.path / image).write_bytes(b"image")
    (mount.path / script).write_text(f'given_ckpt_files=" {mount.path}/{image}"\n')
    mount.settle()
    (mount.path / name).symlink_to(script)
    made = next(iter(wait_for_sets(mount, f"{name}/{name}@1")))
    (mount.path / image).write_bytes(b"the next checkpoint is not complete")
    mount.settle()
    newest = Path(mount.command("latest", mount.path).stdout.strip())
    assert made in str(newest) and image in newest.read_text(), "the script"
    assert newest.with_name(image).read_bytes() == b"image"
    (mount.path / "elsewhere").mkdir()
    mount.command("restore", mount.path / name, mount.path / "elsewhere")
    assert (mount.path / "elsewhere" / name).readlink() == Path(script)


def test_a_set_without_room_for_its_manifest(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """X3: the set is there all the same."""
    daemon = make_daemon(env={"CKPTFS_FAULT": "manifest:write=ENOSPC"})
    daemon.expect_warning("has no manifest")
    write_archive(daemon.path / "step_1.pt")
    write_archive(daemon.path / "step_2.pt")
    sets = wait_for_sets(daemon, "step_*.pt/step_1.pt@1", "step_*.pt/step_2.pt@2")
    assert [sorted(list_names(daemon, one)) for one in sets.values()] == [["step_1.pt"], ["MANIFEST.json", "MANIFEST.xxh128", "step_2.pt"]]


def test_what_is_no_set(mount: Area) -> None:
    """D14: data sets, side products, and what its writer has not finished."""
    for name in ("img_1.jpg", "img_2.jpg", "user1", "log_1.txt"):
        (mount.path / name).write_bytes(b"x" * 100)
    write_archive(mount.path / "step_5.pt.tmp")
    with open(mount.path / "step_6.pt", "wb") as file:
        file.write(b"PK\x03\x04 cut")
    write_archive(mount.path / "step_4.pt")
    wait_for_sets(mount, "step_*.pt/step_4.pt@1")
    candidates = "SELECT count(*) FROM set_candidate c JOIN entry e ON e.child = c.inode AND e.parent = ?"
    directory = mount.path.stat().st_ino
    # The newest of the series may still become complete.
    eventually(lambda: mount.catalog(candidates, directory) == [(1,)], what="one candidate is left")
    assert list(list_sets(mount)) == ["step_*.pt/step_4.pt@1"]
    os.replace(mount.path / "step_5.pt.tmp", mount.path / "step_3.pt")
    wait_for_sets(mount, "step_*.pt/step_4.pt@1", "step_*.pt/step_3.pt@2")
    write_archive(mount.path / "step_6.pt")
    wait_for_sets(mount, "step_*.pt/step_4.pt@1", "step_*.pt/step_3.pt@2", "step_*.pt/step_6.pt@3")


def test_a_set_of_a_renamed_directory(mount: Area) -> None:
    """D6: a directory gets its name when it is whole. Renaming a set makes no second one."""
    (mount.path / "step_8.tmp-0").mkdir()
    (mount.path / "step_8.tmp-0" / "model.bin").write_bytes(b"m" * 1000)
    mount.settle()
    assert list_sets(mount, hidden=True) == {}
    (mount.path / "step_8.tmp-0").rename(mount.path / "step_8")
    wait_for_sets(mount, "step_*/step_8@1")
    (mount.path / "step_8").rename(mount.path / "step_9")
    directory = mount.path.stat().st_ino
    eventually(lambda: not mount.catalog("SELECT 1 FROM set_candidate c JOIN inode i ON i.id = c.inode WHERE i.parent = ?", directory))
    assert list(list_sets(mount, hidden=True)) == ["step_*/step_8@1"]
