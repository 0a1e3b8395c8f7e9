"""P6 on real nodes: one tree on one PFS, written by all of them, imported once, finished by survivors."""

import contextlib
import ctypes
import os
import select
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_lab import TEST_S, ClusterUnderTest, level, wait_for
from daemon_under_test import eventually

SIZE = 3_000_000
IN_CLOSE_NOWRITE = 0x10


def agreed(lab: ClusterUnderTest, places: list[Path]) -> dict[str, bytes | int | None]:
    """What all nodes and the PFS show."""
    lab.settle()
    expected = lab.tree(places[0])
    assert [lab.tree(place) == expected for place in places] == [True] * len(places)
    there = lab.pfs / places[0].name
    eventually(lambda: lab.tree(there) == expected, what="the PFS shows what the nodes show")
    return expected


def test_the_pfs_shows_the_same_tree(lab: ClusterUnderTest, places: list[Path]) -> None:
    """P6: directories, renames, deletes and overwrites, each by another node than the one that wrote."""
    for number, place in enumerate(places):
        (place / f"directory{number}").mkdir()
        (place / f"directory{number}" / "file").write_bytes(os.urandom(SIZE))
    (places[1] / "directory0").rename(places[1] / "renamed")
    (places[2] / "directory1" / "file").unlink()
    (places[0] / "directory2" / "file").write_bytes(b"by another node")
    (places[1] / "directory2" / "file").chmod(0o600)
    expected = agreed(lab, places)
    assert set(expected) == {"renamed", "renamed/file", "directory1", "directory2", "directory2/file"}
    assert (lab.pfs / places[0].name / "directory2" / "file").stat().st_mode & 0o777 == 0o600


def test_every_node_knows_what_the_pfs_shows(lab: ClusterUnderTest, places: list[Path]) -> None:
    """The level `pfs` is seen on a node that did not write the file."""
    (places[0] / "file").write_bytes(os.urandom(SIZE))
    wait_for(places[0] / "file", "pfs")
    for place in places:
        assert os.getxattr(place / "file", "user.ckptfs.level") == b"pfs"


def test_any_node_verifies_what_another_one_has_moved(lab: ClusterUnderTest, places: list[Path]) -> None:
    """What lies above the file was renamed since this node learned where the PFS shows it."""
    (places[0] / "step.tmp").mkdir()
    (places[0] / "step.tmp" / "rank0").write_bytes(os.urandom(1000))
    wait_for(places[0] / "step.tmp" / "rank0", "pfs")
    assert len((places[1] / "step.tmp" / "rank0").read_bytes()) == 1000
    lab[1].command("verify", places[1] / "step.tmp")
    (places[0] / "step.tmp").rename(places[0] / "step")
    lab.settle()
    eventually((lab.pfs / places[0].name / "step" / "rank0").exists, what="the PFS shows the new name")
    assert os.listdir(places[1] / "step") == ["rank0"]
    assert "0 files" not in lab[1].command("verify", places[1] / "step").stdout


def test_external_files_are_imported_once(lab: ClusterUnderTest, places: list[Path]) -> None:
    """P1: all nodes look at once into a directory that was on the PFS before, and agree about inodes."""
    agreed(lab, places)
    below = lab.pfs / places[0].name / "strangers"
    below.mkdir()
    for number in range(30):
        (below / f"file{number}").write_bytes(b"%d" % number)
    for node, place in zip(lab.nodes, places, strict=True):
        node.command("refresh", place)
    numbers = [{entry.name: entry.inode() for entry in os.scandir(place / "strangers")} for place in places]
    assert len(numbers[0]) == 30
    assert numbers == [numbers[0]] * len(places)
    assert (places[2] / "strangers" / "file7").read_bytes() == b"7"


def test_one_reading_of_the_pfs_serves_all_nodes(lab: ClusterUnderTest, places: list[Path]) -> None:
    """G4: all nodes open at once what only the PFS has; one of them reads it there, the others take it from the one that has it."""
    agreed(lab, places)
    below = lab.pfs / places[0].name / "stage"
    below.mkdir()
    (below / "file").write_bytes(data := os.urandom(24 * SIZE))
    for node, place in zip(lab.nodes, places, strict=True):
        node.command("refresh", place)
        assert os.listdir(place / "stage") == ["file"]
    readings = Watched(below / "file")
    read: dict[Path, bytes] = {}

    def reader(place: Path) -> threading.Thread:
        thread = threading.Thread(target=lambda: read.update({place: (place / "stage" / "file").read_bytes()}), daemon=True)
        thread.start()
        return thread

    for thread in [reader(place) for place in places]:
        thread.join(TEST_S)
    assert [read[place] == data for place in places] == [True] * len(places)
    assert readings.bytes_read() == len(data)


class Watched:
    """Counts who reads a file, by what the kernel tells of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._libc.inotify_add_watch(self._fd, os.fsencode(path), IN_CLOSE_NOWRITE) >= 0

    def bytes_read(self) -> int:
        """The size of the file for each time that it was opened and closed for reading."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        events = os.read(self._fd, 65536) if poll.poll(0) else b""
        os.close(self._fd)
        masks = [struct.unpack_from("iI", events, at)[1] for at in range(0, len(events), 16)]
        return sum(mask & IN_CLOSE_NOWRITE != 0 for mask in masks) * self._path.stat().st_size


@contextlib.contextmanager
def unchangeable(directory: Path) -> Iterator[None]:
    """Nobody can make anything in a directory."""
    if subprocess.run(["chattr", "+i", directory], check=False, capture_output=True).returncode:
        pytest.skip("files cannot be made immutable here")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", directory], check=True)


def test_survivors_finish_what_a_dead_node_had_to_write_back(lab: ClusterUnderTest, places: list[Path]) -> None:
    """A node dies with its journal full: its directories, names and replicated files come to the PFS all the same, and once."""
    (places[0] / "kept").write_bytes(os.urandom(SIZE))
    agreed(lab, places)
    there = lab.pfs / places[0].name
    lab.expect_warning("write-back|write back|written back|does not answer|cannot be reached")
    with unchangeable(there):
        (places[2] / "new").mkdir()
        (places[2] / "new" / "file").write_bytes(os.urandom(SIZE))
        (places[2] / "kept").rename(places[2] / "new" / "moved")
        eventually(lambda: "clique" in level(places[2] / "new" / "file"), what="a copy elsewhere")
        lab[2].kill()
    expected = lab.tree(places[0])
    assert set(expected) == {"new", "new/file", "new/moved"}
    eventually(lambda: lab.tree(there) == expected, what="the PFS shows what the dead node had still to write")
    lab.mend()
    assert agreed(lab, places) == expected


def test_a_wiped_node_shows_the_shared_tree(lab: ClusterUnderTest, places: list[Path]) -> None:
    """Wiped, with a new catalog under its old name: names from the store, bytes from the others and the PFS; nothing is harmed."""
    (places[1] / "d").mkdir()
    (places[1] / "d" / "file").write_bytes(os.urandom(SIZE))
    (places[2] / "mine").write_bytes(os.urandom(SIZE))
    expected = agreed(lab, places)
    lab[2].wipe(nvme=True)
    lab[2].start()
    assert agreed(lab, places) == expected
    (places[2] / "d" / "later").write_bytes(b"later")
    (places[2] / "mine").unlink()
    assert set(agreed(lab, places)) == {"d", "d/file", "d/later"}


def test_a_cluster_that_was_stopped_begins_where_it_was(lab: ClusterUnderTest, places: list[Path]) -> None:
    """All nodes are stopped and started with their state kept."""
    (places[0] / "d").mkdir()
    (places[1] / "d" / "file").write_bytes(os.urandom(SIZE))
    expected = agreed(lab, places)
    for node in lab.nodes:
        node.restart()
    assert agreed(lab, places) == expected
    (places[2] / "d" / "file").rename(places[2] / "moved")
    assert set(agreed(lab, places)) == {"d", "moved"}
