"""P9, D16, N1: copies on other nodes, and what is left when nodes die, with all that they had."""

import concurrent.futures
import errno
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ckptfs_client.lab import nodes
from ckptfs_client.lab.layout import LabNode
from cluster_lab import ClusterUnderTest, level, limited, wait_for
from daemon_under_test import eventually

SIZE = 9_000_000


def fill(place: Path, count: int = 4) -> dict[str, bytes]:
    place.mkdir()
    written = {f"file{number}": os.urandom(1 + number * SIZE // count) for number in range(count)}
    for name, data in written.items():
        (place / name).write_bytes(data)
    return written


def shown(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir()}


@pytest.fixture(scope="module")
def memory(make_lab: Callable[..., ClusterUnderTest]) -> ClusterUnderTest:
    """Three nodes, two copies, no PFS: what survives is on other nodes."""
    return make_lab(with_pfs=False)


def test_a_closed_file_reaches_the_clique_by_itself(memory: ClusterUnderTest) -> None:
    """P3: without any fsync or command."""
    written = fill(memory[0].path / "alone")
    for name in written:
        eventually(lambda name=name: level(memory[0].path / "alone" / name) == "clique", what=f"{name} reaches clique")
    # Every node gives the same answer.
    for node in memory.nodes:
        wait_for(node.path / "alone", "clique")


def test_a_node_that_dies_with_all_it_had_takes_nothing_along(memory: ClusterUnderTest) -> None:
    """D16, P9, G5: from another node's memory alone. The node then returns as a new machine."""
    memory.expect_warning("does not answer|has died|is gone|not reach|cannot be reached|lost|took over|no longer")
    with limited(memory):
        *survivors, victim = memory.nodes
        home = victim.path / "home"
        written = fill(home)
        wait_for(home, "clique")
        victim.wipe(nvme=True)
        for node in survivors:
            assert shown(node.path / "home") == written
        # The number of copies comes back on the survivors, so the next node may die.
        wait_for(survivors[0].path / "home", "clique")
        victim.start()
        assert shown(home) == written
        wait_for(victim.path, "clique")


def test_a_file_that_is_written_again_is_never_served_old(memory: ClusterUnderTest) -> None:
    """P7: a node that was away while the file was written again returns with its former copy."""
    memory.expect_warning("does not answer|has died|is gone|not reach|cannot be reached|lost|took over|no longer")
    with limited(memory):
        path = [node.path / "again" for node in memory.nodes]
        path[0].write_bytes(b"old" * SIZE)
        for node in (0, 1, 2):
            assert path[node].read_bytes() == b"old" * SIZE
        wait_for(path[0], "clique")
        memory[1].kill()
        path[0].write_bytes(b"new" * SIZE)
        wait_for(path[0], "clique")
        memory[1].start()
        assert path[1].read_bytes() == b"new" * SIZE
        memory[0].wipe(nvme=True)
        assert path[1].read_bytes() == b"new" * SIZE
        assert path[2].read_bytes() == b"new" * SIZE
        memory[0].start()


def test_a_file_that_others_replace_all_the_time_can_be_opened(memory: ClusterUnderTest) -> None:
    """P7, P8: its writer's mover is killed and stands still, so that the file is replaced while a reader waits for its bytes."""
    writer, reader = memory[0], memory[1]
    ended = threading.Event()
    directory = writer.path / "replaced"
    directory.mkdir()
    (directory / "file").write_bytes(b"0")

    def replace() -> None:
        for number in itertools.count(1):
            (directory / "new").write_bytes(b"%d" % number)
            (directory / "new").rename(directory / "file")
            if ended.is_set():
                return

    def stand_still() -> None:
        writer.replace("mover")
        while not ended.is_set():
            pid = writer.pid("mover")
            os.kill(pid, signal.SIGSTOP)
            ended.wait(0.1)
            os.kill(pid, signal.SIGCONT)
            ended.wait(0.05)

    with limited(memory), concurrent.futures.ThreadPoolExecutor() as threads:
        others = [threads.submit(replace), threads.submit(stand_still)]
        try:
            read: list[int] = []
            while len(set(read)) < 8 or len(read) < 25:
                read.append(int((reader.path / "replaced" / "file").read_bytes()))
        finally:
            ended.set()
        for other in others:
            other.result()
    assert read == sorted(read)


def test_a_newer_content_that_dies_with_its_node_does_not_take_the_former_one_along(memory: ClusterUnderTest) -> None:
    """P5, P9: the newer one was closed, and could not travel; the former one had reached the clique."""
    memory.expect_warning("does not answer|has died|is gone|not reach|cannot be reached|lost|took over|no longer|cannot be read")
    with limited(memory):
        home = memory[0].path / "newer"
        home.mkdir()
        (home / "file").write_bytes(former := os.urandom(SIZE))
        changed_ns = (home / "file").stat().st_mtime_ns
        wait_for(home, "clique")
        memory[0].slow(4_000_000)
        (home / "file").write_bytes(os.urandom(8 * SIZE))
        # What it did as an island, because its link is so slow, nobody else ever knew.
        eventually(lambda: not memory[0].is_island(), what="the others know of the newer content")
        assert level(home / "file") == "local"
        memory[0].wipe(nvme=True)
        survivors = [memory[1].path / "newer" / "file", memory[2].path / "newer" / "file"]
        for path in survivors:
            eventually(lambda path=path: path.stat().st_size == SIZE, what="the survivors show the former content")
            assert path.read_bytes() == former and path.stat().st_mtime_ns == changed_ns

        def told() -> bool:
            words = "".join(node.log + node.command("status", node.path, check=False).stdout for node in memory.nodes[1:])
            return "newer/file shows its former content" in words and "the file shows its former content" in words

        eventually(told, what="the log and status say so")
        wait_for(survivors[0], "clique")
        memory[0].mend()
        memory[0].start()
        assert (home / "file").read_bytes() == former
        wait_for(memory[0].path, "clique")


def test_a_file_that_went_with_its_only_node_counts_as_lost(memory: ClusterUnderTest) -> None:
    """F2: on another node, once the name of the dead one belongs to a new machine. Before, it may return with the file."""
    memory.expect_warning("does not answer|has died|is gone|not reach|cannot be reached|lost|took over|no longer|cannot be read")
    with limited(memory):
        memory[0].slow(4_000_000)
        (memory[0].path / "only").write_bytes(os.urandom(8 * SIZE))
        eventually(lambda: not memory[0].is_island(), what="the others know of it")
        seen = memory[1].path / "only"
        assert level(memory[0].path / "only") == "local" and seen.stat().st_size == 8 * SIZE
        memory[0].wipe(nvme=True)

        def load_status() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(memory[1].command("status", memory[1].path, "--json", check=False).stdout)
            return found

        def count_lost() -> int:
            return int(load_status()["counts"]["lost"])

        eventually(lambda: memory[1].count_alive() == 2, what="the node counts as dead")
        assert count_lost() == 0
        memory[0].mend()
        eventually(lambda: count_lost() == 1, what="it counts as lost")
        status = load_status()
        assert ("lost", "only") in [(one["where"], one["path"]) for one in status["troubles"]] and status["health"] == "degraded"
        eventually(lambda: level(seen) == "none", what="a list says the same")
        seen.unlink()
        eventually(lambda: count_lost() == 0, what="it was removed")


def test_a_node_with_a_read_only_mount_counts_for_nothing(memory: ClusterUnderTest) -> None:
    """P9, N3: it reads what others wrote, holds no copies for them, and is missed by none."""
    lab = memory
    lab.expect_warning("node2|node3|clique|copies|nodes|peer")
    file, data = lab[0].path / "a", bytes(range(256)) * 30_000
    plan = lab.laboratory.load_plan()
    node = LabNode(replace(plan, options={**plan.options, "ro": ""}), "node3")
    read_only = node.mountpoint / "a"
    with limited(lab):
        eventually(lambda: lab[0].count_alive() == lab[1].count_alive() == 3, what="all are members")
        lab[2].end()
        eventually(lambda: lab[0].count_alive() == lab[1].count_alive() == 2, what="the others know that it has ended")
        nodes.wait_until_ready(node, nodes.launch(node))
        for one in (data, data[::-1]):
            file.write_bytes(one)
            wait_for(file, "clique")
            eventually(lambda one=one: read_only.read_bytes() == one, what="it reads the newest generation")
        with pytest.raises(OSError) as failure:
            read_only.write_bytes(b"x")
        assert failure.value.errno == errno.EROFS
        assert lab[0].count_alive() == lab[1].count_alive() == 2
        lab[1].wipe(nvme=True)
        eventually(lambda: level(file) == "local", what="what a read-only node has is no copy")
        assert read_only.read_bytes() == data[::-1]
        nodes.unmount(node)
        lab.mend()
        wait_for(file, "clique")
        assert (lab[2].path / "a").read_bytes() == data[::-1]
