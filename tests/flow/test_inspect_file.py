"""What a file on other nodes shows of itself, without fetching it: N2, D4, D6."""

import errno
import io
import os
import zipfile
from pathlib import Path

import pytest
from clique_world import Node, cluster_of, make_cluster, replicated

from ckptfs import limits
from ckptfs.catalog import copies, mover_requests
from ckptfs.clique import locations
from ckptfs.flow.inspect_file import InspectFile
from ckptfs.series.file_formats import FileFormat

BLOCK = limits.BLOCK_BYTES


def archive(size: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as found:
        found.writestr("data", os.urandom(size))
    return file.getvalue()


def ask(node: Node, content: int, inode: int) -> mover_requests.MoverRequest:
    """Have a node inspect a file as its mount would."""
    locations.refresh(node.db, node.store, [content], node.number)
    request = mover_requests.insert_request(node.db, mover_requests.INSPECT, inode)
    step = InspectFile(node.db, node.told, cluster_of(node))
    assert step.step() and not step.step() and step.next_due_s() is None
    found = mover_requests.get(node.db, request)
    assert found is not None
    return found


@pytest.mark.parametrize("cut", [0, 1, BLOCK, 2 * BLOCK])
def test_only_blocks_of_its_beginning_and_end_travel(cut: int, tmp_path: Path) -> None:
    """N2, D6: a file of a killed writer is found out from any node, and nothing of it is kept."""
    cluster, one, _, three = make_cluster(tmp_path, 3)
    data = archive(10 * BLOCK)
    content = replicated(cluster, b"step_1.pt", data[: len(data) - cut])
    moved: list[int] = []
    fetch = three.peers.fetch
    three.peers.fetch = lambda sources, manifest, blocks, *more: (moved.extend(blocks), fetch(sources, manifest, blocks, *more))[1]
    found = FileFormat.decode(ask(three, content, one.inode(content)).result.encode())
    assert found.name == "zip" and found.is_whole == (cut == 0)
    assert 1 < len(moved) <= 3 and len(set(moved)) == len(moved)
    assert copies.list_copies(three.db, content) == () and list(three.tiers[next(iter(three.tiers))].contents()) == []


def test_a_node_that_fails_is_left_for_another_one(tmp_path: Path) -> None:
    """P9: as long as one live node has the file; then the answer is an error, not a guess."""
    cluster, one, two, three = make_cluster(tmp_path, 3)
    content = replicated(cluster, b"step_1.pt", archive(2 * BLOCK))
    inode = one.inode(content)
    one.kill()
    assert ask(three, content, inode).result == "zip"
    two.kill()
    answer = ask(three, content, inode)
    assert answer.state == mover_requests.FAILED and answer.error == errno.EHOSTUNREACH


def test_what_is_not_sealed_or_not_there_is_not_inspected(tmp_path: Path) -> None:
    """N7."""
    _, one, two = make_cluster(tmp_path, 2)
    content = one.make(b"step_1.pt", b"x")
    one.publish_shared(content)
    assert ask(two, content, one.inode(content)).state == mover_requests.FAILED
    assert ask(two, content, 12345).state == mover_requests.FAILED


def test_a_pickle_of_many_blocks_is_of_no_known_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of blocks that travel is bounded."""
    monkeypatch.setattr(limits, "INSPECTED_BLOCKS_MAX", 1)
    cluster, one, _, three = make_cluster(tmp_path, 3)
    content = replicated(cluster, b"step_1.pt", archive(3 * BLOCK))
    assert ask(three, content, one.inode(content)).result == "unknown"
