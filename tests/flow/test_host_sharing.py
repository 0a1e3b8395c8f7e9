"""H5, P4: blocks of an incoming copy that this node has on NVMe already are stored once there, and are verified where they lie."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from clique_world import MIB, LocalCluster, bring, offer_of
from loop_disk import measure_saved
from write_back_world import intercepted

from ckptfs import disk, limits
from ckptfs.model import CopyState, Tier

pytestmark = pytest.mark.root
BLOCK = limits.BLOCK_BYTES
FROZEN = os.urandom(3 * BLOCK)
TAIL = os.urandom(77)


@pytest.fixture
def two(sharing: Path) -> Iterator[LocalCluster]:
    """The second node has no room in RAM, and has got step_10 already."""
    cluster = LocalCluster(sharing / "cluster", 2, nvme=True)
    other = cluster.nodes[1]
    other.squeeze(Tier.RAM, MIB)
    other.renew_host()
    yield cluster
    shutil.rmtree(sharing / "cluster")


def send(cluster: LocalCluster, name: bytes, data: bytes) -> tuple[int, int]:
    """(content, bytes that moved)."""
    one, other = cluster.nodes
    content = one.written(name, data)
    with disk.closing(one.tiers[Tier.RAM].open(content)) as fd:
        return content, one.peers.send(other.member, offer_of(one, content), fd).bytes_moved


def test_blocks_that_are_here_are_neither_sent_nor_written(two: LocalCluster) -> None:
    first, _ = send(two, b"step_10", FROZEN + os.urandom(BLOCK) + TAIL)
    labels: list[str] = []
    data = FROZEN + os.urandom(BLOCK) + TAIL
    with intercepted(labels.append):
        second, moved = send(two, b"step_20", data)
    assert moved == BLOCK and "host:write" not in labels
    other = two.nodes[1]
    assert other.data(second, Tier.NVME) == data
    assert other.copies(second) == {Tier.NVME: CopyState.GOOD}
    assert measure_saved(*(other.path(content, Tier.NVME) for content in (first, second))) >= len(FROZEN) + len(TAIL)


def test_a_block_that_went_bad_here_is_sent(two: LocalCluster) -> None:
    """It was put in place and read back there; what the peer sends then takes a place of its own."""
    data = FROZEN + TAIL
    first, _ = send(two, b"step_10", data)
    other = two.nodes[1]
    path = other.path(first, Tier.NVME)
    with open(path, "r+b") as file:
        file.seek(BLOCK + 5)
        file.write(bytes([data[BLOCK + 5] ^ 1]))
    rotten = path.read_bytes()
    second, moved = send(two, b"step_20", data)
    assert moved == BLOCK
    assert other.data(second, Tier.NVME) == data
    assert path.read_bytes() == rotten, "nothing was written through into the other file"


def test_a_fetch_clones_what_the_former_state_has(two: LocalCluster) -> None:
    """The former state goes when the new one is whole, and takes nothing with it."""
    content, _ = send(two, b"file", FROZEN + TAIL)
    one, other = two.nodes
    content = one.rewrite(content, lambda data: data.__setitem__(BLOCK, data[BLOCK] ^ 1))
    assert other.copies(content) == {Tier.NVME: CopyState.STALE}
    labels: list[str] = []
    with intercepted(labels.append):
        bring(other, one.inode(content))
    assert labels.count("share:range") == 3 and "fetch:peer:previous:write" not in labels
    assert other.data(content, Tier.NVME) == one.data(content)
    assert other.copies(content) == {Tier.NVME: CopyState.GOOD}
