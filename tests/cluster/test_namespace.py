"""One tree on all nodes: close-to-open, O_EXCL, renames, attributes, each change made on one node and looked at on the others."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster_lab import ClusterUnderTest

SIZE = 3_000_000
# Of names alone: how bytes are read and written plays no part.
on_one_data_path = pytest.mark.parametrize("shared_lab", ["auto"], indirect=True)


@pytest.fixture(scope="module", params=["auto", "buffered"])
def shared_lab(make_lab: Callable[..., ClusterUnderTest], request: pytest.FixtureRequest) -> ClusterUnderTest:
    """Three nodes, two copies; once with the best data path that the kernel has, and once without."""
    return make_lab(data_path=request.param)


@contextlib.contextmanager
def refused(code: int) -> Iterator[None]:
    """The block fails with this errno."""
    with pytest.raises(OSError) as failure:
        yield
    assert failure.value.errno == code


def test_what_one_node_closes_the_others_read(places: list[Path]) -> None:
    """Close-to-open (T7): each node writes the next generation, and every other one sees it at once, whole."""
    for generation, writer in enumerate(places * 2):
        written = os.urandom(SIZE + generation)
        (writer / "file").write_bytes(written)
        for reader in places:
            assert (reader / "file").stat().st_size == len(written)
            assert (reader / "file").read_bytes() == written


def test_a_file_written_in_turns_has_its_size_and_time_everywhere(places: list[Path]) -> None:
    """D14, P7: nodes that know a file already are shown what others made of it: longer, shorter, in place."""
    expected = b""
    for turn in range(3 * len(places)):
        writer = places[turn % len(places)] / "file"
        if turn % 3 == 0:
            expected = bytes([turn]) * (5000 - 100 * turn)
            writer.write_bytes(expected)
        elif turn % 3 == 1:
            expected += b"more" * turn
            with open(writer, "ab") as file:
                file.write(b"more" * turn)
        else:
            expected = expected[: 1000 + turn]
            os.truncate(writer, len(expected))
        found = [(place / "file").stat() for place in places]
        assert [one.st_size for one in found] == [len(expected)] * len(places)
        assert len({one.st_mtime_ns for one in found}) == 1
        assert [(place / "file").read_bytes() == expected for place in places] == [True] * len(places)


@on_one_data_path
def test_of_those_who_create_exclusively_one_wins(places: list[Path]) -> None:
    def create(place: Path, number: int) -> bool:
        try:
            os.close(os.open(place / f"lock{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(len(places)) as threads:
        for number in range(20):
            won = list(threads.map(lambda place, number=number: create(place, number), places))  # type: ignore[misc]
            assert won.count(True) == 1, f"lock{number}: {won}"


@on_one_data_path
def test_of_those_who_create_all_open_the_same_file(places: list[Path]) -> None:
    """Also if the name comes and goes meanwhile: the kernel asks to create what another node has just created."""

    def open_or_create(place: Path, number: int) -> int:
        fd = os.open(place / f"log{number}", os.O_CREAT | os.O_RDONLY)
        try:
            return os.fstat(fd).st_ino
        finally:
            os.close(fd)

    with ThreadPoolExecutor(len(places)) as threads:
        for number in range(20):
            assert len(set(threads.map(lambda place, number=number: open_or_create(place, number), places))) == 1  # type: ignore[misc]
        coming = threads.submit(lambda: [open_or_create(places[0], 0) for _ in range(100)])
        while not coming.done():
            (places[1] / "log0").unlink(missing_ok=True)
            open_or_create(places[2], 0)
        assert len(coming.result()) == 100


@on_one_data_path
def test_many_files_in_one_directory_from_all_nodes(places: list[Path]) -> None:
    def fill(number: int) -> None:
        for count in range(30):
            (places[number] / f"{number}-{count}").write_bytes(b"%d" % count)

    with ThreadPoolExecutor(len(places)) as threads:
        list(threads.map(fill, range(len(places))))
    expected = sorted(f"{number}-{count}" for number in range(len(places)) for count in range(30))
    for place in places:
        assert sorted(os.listdir(place)) == expected
        assert all((place / name).read_bytes() == name.partition("-")[2].encode() for name in expected)
    inodes = [(places[0] / name).stat().st_ino for name in expected]
    assert len(set(inodes)) == len(inodes)


@on_one_data_path
def test_a_directory_is_renamed_with_what_others_put_into_it(places: list[Path]) -> None:
    (places[0] / "old" / "below").mkdir(parents=True)
    for number, place in enumerate(places):
        (place / "old" / "below" / f"of{number}").write_bytes(b"%d" % number)
    (places[1] / "old").rename(places[1] / "new")
    for place in places:
        assert os.listdir(place) == ["new"]
        assert {path.name: path.read_bytes() for path in (place / "new" / "below").iterdir()} == {
            f"of{number}": b"%d" % number for number in range(len(places))
        }
        with refused(errno.ENOENT):
            (place / "old").stat()
    with refused(errno.EINVAL):
        (places[2] / "new").rename(places[2] / "new" / "below" / "itself")


def test_a_temporary_file_is_renamed_over_the_former_one(places: list[Path]) -> None:
    """The way in which checkpoints are written: no reader ever sees anything else than the one or the other."""
    for generation in range(6):
        writer, reader = places[generation % 2], places[2]
        (writer / "ckpt.tmp").write_bytes(b"%d" % generation * SIZE)
        (writer / "ckpt.tmp").rename(writer / "ckpt")
        assert (reader / "ckpt").read_bytes() == b"%d" % generation * SIZE
        assert os.listdir(reader) == ["ckpt"]


@on_one_data_path
def test_deleting(places: list[Path]) -> None:
    (places[0] / "directory").mkdir()
    (places[1] / "directory" / "file").write_bytes(b"x")
    with refused(errno.ENOTEMPTY):
        (places[2] / "directory").rmdir()
    (places[2] / "directory" / "file").unlink()
    with refused(errno.ENOENT):
        (places[1] / "directory" / "file").read_bytes()
    (places[0] / "directory").rmdir()
    assert [os.listdir(place) for place in places] == [[], [], []]


@on_one_data_path
def test_attributes_and_links(places: list[Path]) -> None:
    (places[0] / "file").write_bytes(b"x")
    (places[1] / "file").chmod(0o640)
    os.utime(places[2] / "file", ns=(10**18, 2 * 10**18))
    os.setxattr(places[0] / "file", "user.note", b"kept")
    os.link(places[1] / "file", places[1] / "again")
    (places[2] / "pointer").symlink_to("file")
    for place in places:
        found = (place / "file").stat()
        assert (found.st_mode & 0o777, found.st_mtime_ns, found.st_nlink) == (0o640, 2 * 10**18, 2)
        assert os.getxattr(place / "again", "user.note") == b"kept"
        assert os.readlink(place / "pointer") == "file"


@on_one_data_path
def test_a_directory_has_one_link_however_it_is_looked_up(places: list[Path]) -> None:
    """The number of subdirectories is not known, and programs such as find(1) must not take a wrong one for it."""
    (places[0] / "above" / "directory" / "below").mkdir(parents=True)
    # The names of a path that was walked before are read together, and answered without pyfuse3.
    assert [{os.stat(place / "above" / "directory").st_nlink for _ in range(10)} for place in places] == [{1}] * 3


def test_a_file_that_is_open_survives_its_deletion_elsewhere(places: list[Path]) -> None:
    """P2, P7: whoever has it open goes on reading what he opened."""
    (places[0] / "file").write_bytes(b"former" * 1000)
    with open(places[0] / "file", "rb") as reader:
        (places[1] / "file").unlink()
        (places[1] / "file").write_bytes(b"newer")
        assert reader.read() == b"former" * 1000
    assert [(place / "file").read_bytes() for place in places] == [b"newer"] * 3


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_a_file_that_is_open_here_and_written_elsewhere(places: list[Path], mode: str) -> None:
    """P7: who has it open keeps his generation; nobody can write into that one, and nothing of the newer one is lost."""
    (places[0] / mode).write_bytes(b"former" * 1000)
    with open(places[0] / mode, "rb") as reader:
        with open(places[1] / mode, mode) as writer:
            writer.write(b"newer")
        expected = (places[1] / mode).read_bytes()
        with refused(errno.EBUSY):
            open(places[0] / mode, "ab").close()
        assert reader.read() == b"former" * 1000
    assert [(place / mode).read_bytes() for place in places] == [expected] * 3
    with open(places[0] / mode, "ab") as writer:
        writer.write(b"last")
    assert [(place / mode).read_bytes() for place in places] == [expected + b"last"] * 3
