"""D6 on a real mount: `.ckptfs/complete/PATH` leads to the set of that name; an open through it waits until there is one."""

import os
import signal
import subprocess
from pathlib import Path

import numpy
import pytest
from daemon_under_test import Area, eventually
from made_sets import make_set
from programs import refusal

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(60)]
ONLY_DATA_PATH = "buffered"  # Each machine has it, and how bytes travel plays no part.


def save(directory: Path, *names: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).write_bytes(os.urandom(2000))


def begin(path: Path) -> "subprocess.Popen[bytes]":
    """Start a reader, and wait until the mount has its request in hand."""
    reader = subprocess.Popen(["cat", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    state = Path(f"/proc/{reader.pid}/wchan")
    eventually(lambda: "request_wait_answer" in state.read_text(), what="the reader waits for the mount")
    return reader


def get_link(mount: Area, *parts: str) -> Path:
    return mount.daemon.path.joinpath(".ckptfs", "complete", mount.path.name, *parts)


def test_an_open_waits_until_the_set_is_complete(mount: Area) -> None:
    """D6: before the first file, between two files, and when the mount process dies meanwhile."""
    for number in (1, 2):
        save(mount.path / "run" / f"step_{number}", "rank0.pt", "rank1.pt")
    early = begin(get_link(mount, "run", "step_3", "rank1.pt"))
    save(mount.path / "run" / "step_3", "rank0.pt")
    mount.settle()
    late = begin(get_link(mount, "run", "step_3", "rank0.pt"))
    mount.daemon.kill("mount")
    for reader in (early, late):
        assert reader.poll() is None, "half a set"
    save(mount.path / "run" / "step_3", "rank1.pt")
    for reader, name in ((early, "rank1.pt"), (late, "rank0.pt")):
        data, complaint = reader.communicate(timeout=60)
        assert (data, complaint) == ((mount.path / "run" / "step_3" / name).read_bytes(), b"")


def test_a_signal_ends_the_wait(mount: Area) -> None:
    save(mount.path / "step_1", "a")
    for number in (signal.SIGTERM, signal.SIGKILL):
        reader = begin(get_link(mount, "step_2"))
        reader.send_signal(number)
        assert reader.wait(timeout=30) == -number


def test_a_file_that_is_saved_again_stays_until_the_new_one_is_complete(mount: Area) -> None:
    """T6: the link leads to the former set."""
    file, link = mount.path / "step_1.npy", get_link(mount, "step_1.npy")
    numpy.save(file, [1])
    assert numpy.load(link) == [1]
    with open(file, "wb") as writer:
        writer.write(b"half of it")
        writer.flush()
        assert numpy.load(link) == [1]
        writer.truncate(0)
        writer.seek(0)
        numpy.save(writer, [2])
    assert numpy.load(link) in ([1], [2])
    eventually(lambda: numpy.load(link) == [2], what="the new set")


def test_what_it_shows(mount: Area) -> None:
    """Directories and complete members are listed; a list waits for nothing. Names that count no checkpoints are not there."""
    run = mount.path / "exp1" / "run"
    save(run / "step_1", "a")
    (run / "config.json").write_text("{}")
    (run / "loss").mkdir()
    (mount.path / "exp1" / "epoch=1-step=20.ckpt").write_bytes(b"x" * 100)
    assert (get_link(mount, "exp1", "epoch=1-step=20.ckpt")).read_bytes() == b"x" * 100
    os.stat(get_link(mount, "exp1", "run", "step_1"))
    save(run / "step_2", "b")
    shown = set(os.listdir(get_link(mount, "exp1", "run")))
    assert {"loss", "step_1"} <= shown and "config.json" not in shown
    assert set(os.listdir(get_link(mount, "exp1"))) == {"run", "epoch=1-step=20.ckpt"}
    subprocess.run(["ls", "-lR", get_link(mount)], check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert refusal(lambda: get_link(mount, "exp1", "run", "config.json").read_bytes()) == "ENOENT"
    assert refusal(lambda: get_link(mount, "exp1", "run", "step_9.pt.tmp").read_bytes()) == "ENOENT"
    assert refusal(lambda: get_link(mount, "exp1", "notes").symlink_to("x")) == "EROFS"
    assert refusal(lambda: os.readlink(get_link(mount, "exp1"))) == "EINVAL"


def test_a_file_of_a_group(mount: Area) -> None:
    """A checkpoint of TensorFlow: each of its files leads to that file in the set."""
    for name in ("ckpt-5.index", "ckpt-5.data-00000-of-00001"):
        (mount.path / name).write_bytes(name.encode())
    mount.settle()
    make_set(mount.daemon, mount.path / "ckpt-5.index", "ckpt-*", numbers=(5,), name="ckpt-5", more=["ckpt-5.data-00000-of-00001"])
    assert get_link(mount, "ckpt-5.index").read_bytes() == b"ckpt-5.index"
    assert sorted(os.listdir(get_link(mount, "ckpt-5"))) == ["ckpt-5.data-00000-of-00001", "ckpt-5.index"]


def test_a_file_of_each_rank(mount: Area) -> None:
    """The files of all ranks are one set, which has the name of the first."""
    for step in (1, 2):
        for rank in (0, 1):
            numpy.save(mount.path / f"step{step}_rank{rank}.npy", [step, rank])
    assert [list(numpy.load(get_link(mount, f"step2_rank{rank}.npy"))) for rank in (0, 1)] == [[2, 0], [2, 1]]


def test_a_set_that_the_application_has_deleted(mount: Area) -> None:
    """X3: it is found by its name as well."""
    save(mount.path / "step_1", "a")
    data = (mount.path / "step_1" / "a").read_bytes()
    os.stat(get_link(mount, "step_1"))
    (mount.path / "step_1" / "a").unlink()
    (mount.path / "step_1").rmdir()
    assert (get_link(mount, "step_1") / "a").read_bytes() == data
