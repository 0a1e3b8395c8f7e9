"""P7, P9: files that are changed in place, and that stay open, when the node which writes them dies with its RAM."""

import contextlib
import os
from pathlib import Path

import pytest
from cluster_lab import ClusterUnderTest, level, wait_for
from daemon_under_test import eventually

SLOW_BITS_PER_S = 20_000_000
OLD = os.urandom(3_000_000)
MORE = os.urandom(30_000_000)
LINES = os.urandom(1_234_567)
# What survivors say about a node that died with something that nobody else had.
EXPECTED = (
    "does not answer|has died|is gone|not reach|cannot be reached|lost|took over|no longer|cannot be read|cannot be written back"
    "|reset|refused"
)


def written(lab: ClusterUnderTest, name: str) -> tuple[list[Path], bytes]:
    """A file of the first node that has reached the clique, as each node shows it; what is in it, of a length of its own."""
    lab.expect_warning(EXPECTED)
    paths = [node.path / name for node in lab.nodes]
    data = OLD[len(name) :]
    paths[0].write_bytes(data)
    wait_for(paths[0], "clique")
    # The PFS may have it even sooner; here another node shall.
    eventually(lambda: len(data) in copied(lab), what="a copy on another node")
    return paths, data


def copied(lab: ClusterUnderTest) -> set[int]:
    """The sizes of what others have whole of the first node's contents: what is arriving there has a name of its own."""
    own, *others = (node.state / "ram" / "contents" for node in lab.nodes)
    found: set[int] = set()
    for path in (directory / content.name for content in own.iterdir() for directory in others):
        with contextlib.suppress(FileNotFoundError):
            found.add(path.stat().st_size)
    return found


def shows(path: Path, data: bytes, mtime_ns: int = 0) -> bool:
    """Whether a node shows this, and nothing else of it."""
    try:
        status = path.stat()
        return path.read_bytes() == data and status.st_size == len(data) and mtime_ns in (0, status.st_mtime_ns)
    except OSError:
        return False


@pytest.mark.parametrize("closed", [True, False])
def test_what_was_appended_dies_with_its_writer_and_nothing_else(lab: ClusterUnderTest, closed: bool) -> None:
    """P9: all survivors show what had reached the clique, with its size, and make as many copies of it as before."""
    paths, data = written(lab, f"appended {closed}")
    before = paths[1].stat()
    lab[1].slow(SLOW_BITS_PER_S)
    # Its mount is gone when it is closed.
    with contextlib.suppress(OSError), open(paths[0], "ab") as file:
        file.write(MORE)
        file.flush()
        if closed:
            file.close()
        else:
            assert shows(paths[2], data, before.st_mtime_ns), "others read what was closed last"
        assert level(paths[0]) == "local"
        lab[0].wipe(nvme=True)
    lab[1].mend()
    for path in paths[1:]:
        eventually(lambda path=path: shows(path, data, before.st_mtime_ns), what=f"{path} shows what had reached the clique")  # type: ignore[misc]
        assert path.stat().st_ino == before.st_ino
    eventually(lambda: level(paths[2]) in ("clique", "pfs"), what="as many copies as before")
    lab.mend()
    eventually(lambda: shows(paths[0], data), what="who returns without it shows the same")


def test_a_log_that_stays_open_survives_its_node_up_to_its_last_fsync(lab: ClusterUnderTest) -> None:
    """P9: with fsync=local, too, an open file is copied after an fsync; nobody waits for that."""
    lab.expect_warning(EXPECTED)
    with contextlib.suppress(OSError), open(lab[0].path / "log", "wb") as file:
        file.write(LINES)
        file.flush()
        os.fsync(file.fileno())
        eventually(lambda: len(LINES) in copied(lab), what="a copy of the open file")
        file.write(b"this nobody has")
        lab[0].wipe(nvme=True)
    for node in lab.nodes[1:]:
        eventually(lambda node=node: shows(node.path / "log", LINES), what="what was fsynced is there")  # type: ignore[misc]
    lab.mend()
    eventually(lambda: shows(lab[0].path / "log", LINES), what="on the node that returns, too")


def test_what_a_writer_closed_before_it_stood_still_is_shown_again(lab: ClusterUnderTest) -> None:
    """P5, P9: by all nodes once it goes on, and nobody opens the file on it; until then they show what had reached the clique."""
    paths, data = written(lab, "stood still")
    lab[1].slow(SLOW_BITS_PER_S)
    paths[0].write_bytes(MORE)
    lab[0].stand_still()
    try:
        lab[1].mend()
        eventually(lambda: shows(paths[1], data), what="what had reached the clique")
    finally:
        lab[0].go_on()
    for path in paths[1:]:
        eventually(lambda path=path: shows(path, MORE), what=f"{path} shows what was closed last")  # type: ignore[misc]
