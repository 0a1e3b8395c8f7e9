"""X6, N3, P4, P8 on real nodes: a file is read while its blocks still arrive, from wherever they can be had."""

import contextlib
import mmap
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_lab import ClusterUnderTest, NodeUnderTest, limited, wait_for
from daemon_under_test import eventually

from ckptfs import limits
from ckptfs.tiers.fetch_map import FetchMap

BLOCK = limits.BLOCK_BYTES
BLOCKS = 24
SLOW_BITS_PER_S = 80_000_000
KILL_S = 15.0
READ_CALLS = ("0 ", "63 ")
"""How /proc/PID/syscall begins for a thread that waits in read(2), on x86-64 and others."""


@pytest.fixture(scope="module")
def far(make_lab: Callable[..., ClusterUnderTest]) -> ClusterUnderTest:
    """Two nodes that hold nothing for one another, without a PFS: what is not here comes over the wire."""
    return make_lab(2, 1, with_pfs=False)


def written(lab: ClusterUnderTest, name: str, blocks: int = BLOCKS) -> bytes:
    """A file that node1 alone has, behind a slow link."""
    data = os.urandom(blocks * BLOCK + 17)
    (lab[0].path / name).write_bytes(data)
    wait_for(lab[0].path / name, "local")
    lab[0].slow(SLOW_BITS_PER_S)
    return data


def arrived(node: NodeUnderTest) -> int | None:
    """How many blocks of the one file that is on its way are there; None when none is."""
    for path in (node.state / "ram" / "arriving").glob("????????????????"):
        arrival = FetchMap.find(node.state / "ram", int(path.name, 16))
        if arrival is not None:
            return arrival.present_count
    return None


def test_the_first_bytes_are_read_long_before_the_last_ones_came(far: ClusterUnderTest) -> None:
    with limited(far):
        data = written(far, "sequential")
        with open(far[1].path / "sequential", "rb", buffering=0) as file:
            assert file.read(1000) == data[:1000]
            count = arrived(far[1])
            assert count is not None and 1 <= count < BLOCKS // 2, "the reader waited for more than it wanted"
            assert os.fstat(file.fileno()).st_size == len(data)
            assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == len(data), "what has not come looks like a hole"
            file.seek(0)
            assert file.readall() == data
        assert (far[1].path / "sequential").read_bytes() == data


def test_long_files_on_their_way_keep_no_small_one_waiting(far: ClusterUnderTest) -> None:
    with limited(far), contextlib.ExitStack() as opened:
        written(far, "long0", blocks=8)
        far[0].mend()
        (far[0].path / "small").write_bytes(b"small")
        for number in range(1, 4):
            shutil.copyfile(far[0].path / "long0", far[0].path / f"long{number}")
        wait_for(far[0].path, "local")
        far[0].slow(SLOW_BITS_PER_S)
        for number in range(4):
            file = opened.enter_context(open(far[1].path / f"long{number}", "rb", buffering=0))
            assert len(file.read(100)) == 100
        assert (far[1].path / "small").read_bytes() == b"small"
        assert arrived(far[1]) is not None
        far[0].mend()


def test_the_tail_is_fetched_first_for_its_reader(far: ClusterUnderTest) -> None:
    with limited(far):
        eventually(lambda: arrived(far[1]) is None, what="the files of the test before have come")
        data = written(far, "tail")
        with open(far[1].path / "tail", "rb", buffering=0) as file:
            file.seek(-100, os.SEEK_END)
            assert file.read() == data[-100:]
            count = arrived(far[1])
            assert count is not None and count < BLOCKS, "in the file's order it is the last to come"
            for number in (BLOCKS // 2, 3, BLOCKS - 2):
                file.seek(number * BLOCK + 5)
                assert file.read(10) == data[number * BLOCK + 5 : number * BLOCK + 15]
            assert arrived(far[1]) is not None
        far[0].mend()
        assert (far[1].path / "tail").read_bytes() == data


def test_a_file_on_its_way_is_renamed_and_deleted_under_its_reader(far: ClusterUnderTest) -> None:
    """P2: who has it open reads on."""
    with limited(far):
        data = written(far, "deleted")
        with open(far[1].path / "deleted", "rb", buffering=0) as file:
            assert file.read(1000) == data[:1000]
            (far[1].path / "deleted").rename(far[1].path / "renamed")
            file.seek(-100, os.SEEK_END)
            assert file.read() == data[-100:]
            (far[1].path / "renamed").unlink()
            assert arrived(far[1]) is not None
            far[0].mend()
            file.seek(0)
            assert file.readall() == data


def test_a_file_on_its_way_is_mapped_copied_and_opened_for_writing(far: ClusterUnderTest, tmp_path: Path) -> None:
    with limited(far):
        data = written(far, "mapped")
        there = far[1].path / "mapped"
        with open(there, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[-50:] == data[-50:] and mapped[:50] == data[:50]
            assert arrived(far[1]) is not None, "a mapping waited for all of it"
            shutil.copyfile(there, tmp_path / "copy")
            assert (tmp_path / "copy").read_bytes() == data
            with open(there, "r+b") as writer:
                writer.seek(BLOCK)
                writer.write(b"changed here")
            assert mapped[BLOCK : BLOCK + 12] == b"changed here"
        expected = data[:BLOCK] + b"changed here" + data[BLOCK + 12 :]
        far[0].mend()
        assert there.read_bytes() == expected
        assert (far[0].path / "mapped").read_bytes() == expected


@pytest.mark.parametrize("role", ["mount", "mover"])
def test_a_reader_does_not_notice_that_a_process_dies(far: ClusterUnderTest, role: str) -> None:
    """P8: kill -9 in the middle of a file that is read as it comes."""
    far.expect_warning(r"\b(mount|mover)\b.*(killed|died|ended|signal)")
    with limited(far):
        data = written(far, role)
        with open(far[1].path / role, "rb", buffering=0) as file:
            assert file.read(1000) == data[:1000]
            assert arrived(far[1]) is not None
            far[1].replace(role)
            far[0].mend()
            file.seek(0)
            assert file.readall() == data


def test_a_reader_is_killed_while_it_waits_for_a_block(far: ClusterUnderTest) -> None:
    """P8: with O_DIRECT the kernel tells the mount of no signal. Other readers go on."""
    with limited(far):
        data = written(far, "direct")
        with open(far[1].path / "direct", "rb", buffering=0) as file:
            assert file.read(1000) == data[:1000]
            far[0].slow(SLOW_BITS_PER_S // 100)
            last = ["iflag=direct", "bs=4096", f"skip={len(data) // 4096}"]
            reader = subprocess.Popen(["dd", f"if={far[1].path / 'direct'}", "of=/dev/null", *last], stderr=subprocess.DEVNULL)
            eventually(lambda: Path(f"/proc/{reader.pid}/syscall").read_text().startswith(READ_CALLS), what="it reads")
            reader.kill()
            assert reader.wait(KILL_S) == -signal.SIGKILL
            far[0].mend()
            file.seek(0)
            assert file.readall() == data


def test_when_all_sources_are_gone_the_reader_gets_an_error_and_no_wrong_bytes(far: ClusterUnderTest) -> None:
    far.expect_warning("does not answer|has died|is gone|not reach|cannot be reached|cannot be read|cannot be fetched|lost|no longer")
    with limited(far):
        data = written(far, "gone")
        with open(far[1].path / "gone", "rb", buffering=0) as file:
            assert file.read(1000) == data[:1000]
            far[0].kill()
            with pytest.raises(OSError, match="Input/output error"):
                file.seek(-100, os.SEEK_END)
                file.read()
            file.seek(0)
            assert file.read(1000) == data[:1000]
        assert "gone: cannot be read to its end" in far[1].log
        far[0].mend()
        far[0].start()
        eventually(lambda: (far[1].path / "gone").read_bytes() == data, what="the file is there again with its node")


@pytest.fixture(scope="module")
def near(make_lab: Callable[..., ClusterUnderTest]) -> ClusterUnderTest:
    return make_lab(3, 2, with_pfs=False)


def copies(node: NodeUnderTest, size: int) -> list[Path]:
    """The files of a node's contents that have this size."""
    return [path for path in (node.state / "ram").glob("contents*/*") if path.stat().st_size == size]


@pytest.mark.parametrize("trouble", ["stalls", "lies"])
def test_a_reader_does_not_notice_that_a_source_is_no_good(near: ClusterUnderTest, trouble: str) -> None:
    """X6, P4: one of two sources stops sending in the middle, with its connections open, or has other bytes than it says."""
    near.expect_warning("does not answer|has died|is gone|not reach|cannot be reached|lost|no longer|stopped|digest|quarantin")
    with limited(near):
        data = os.urandom((BLOCKS + len(trouble)) * BLOCK)
        (near[0].path / trouble).write_bytes(data)
        wait_for(near[0].path / trouble, "clique")
        holder, reader = sorted(near.nodes[1:], key=lambda node: not copies(node, len(data)))
        bad = near[0]
        for node in (bad, holder):
            node.slow(4 * SLOW_BITS_PER_S)
        if trouble == "lies":
            with open(copies(bad, len(data))[0], "r+b") as file:
                for number in range(BLOCKS):
                    file.seek(number * BLOCK + 1)
                    file.write(b"another byte")
        with open(reader.path / trouble, "rb", buffering=0) as file:
            assert file.read(1000) == data[:1000]
            with standing_still(bad if trouble == "stalls" else None):
                file.seek(0)
                assert file.readall() == data
        near.mend()


@contextlib.contextmanager
def standing_still(node: NodeUnderTest | None) -> Iterator[None]:
    """The node's mover does nothing any more, and its connections stay as they are."""
    if node is None:
        yield
        return
    mover = node.pid("mover")
    os.kill(mover, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(mover, signal.SIGCONT)
