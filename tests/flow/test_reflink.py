"""H5, P4: files of one filesystem share their blocks where it can, and never change through one another."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_node import Node, inject_fault
from loop_disk import NOT_SHARING, measure_saved, mounted

from ckptfs import disk, limits
from ckptfs.model import Tier
from ckptfs.tiers import local_copies, reflink, transfer
from ckptfs.tiers.reflink import Sharing

pytestmark = pytest.mark.root
BLOCK = limits.BLOCK_BYTES
TAIL = 12_345


@pytest.fixture(scope="module", params=NOT_SHARING)
def not_sharing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted(request.param, tmp_path_factory.mktemp("not_sharing")) as place:
        yield place


def write(path: Path, data: bytes) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    disk.write_all("share:write", fd, data, 0)
    os.fsync(fd)
    return fd


def test_equal_ranges_are_stored_once(sharing: Path) -> None:
    """The last block may be short. Descriptors for reading are enough, so no lease is broken."""
    data = os.urandom(BLOCK + TAIL)
    for name in ("one", "two"):
        os.close(write(sharing / name, data))
    one, two = sharing / "one", sharing / "two"
    assert measure_saved(one, two) == 0
    with disk.closing(os.open(one, os.O_RDONLY)) as source, disk.closing(os.open(two, os.O_RDONLY)) as target:
        assert reflink.deduplicate(source, 0, target, 0, BLOCK) is Sharing.SHARED
        assert reflink.deduplicate(source, BLOCK, target, BLOCK, TAIL) is Sharing.SHARED
        assert reflink.list_extents(source, 0, BLOCK) == reflink.list_extents(target, 0, BLOCK)
    assert measure_saved(one, two) >= BLOCK + TAIL
    assert one.read_bytes() == two.read_bytes() == data
    with open(two, "r+b") as file:
        file.write(b"changed")
    assert one.read_bytes() == data
    one.unlink()
    assert measure_saved(two) == 0, "what one file alone has is not shared any more"
    assert two.read_bytes() == b"changed" + data[7:]


def test_the_kernel_compares(sharing: Path) -> None:
    data = os.urandom(BLOCK)
    rotten = data[:-1] + bytes([data[-1] ^ 1])
    source, target = write(sharing / "good", data), write(sharing / "rotten", rotten)
    assert reflink.deduplicate(source, 0, target, 0, BLOCK) is Sharing.DIFFERENT
    assert os.pread(target, BLOCK, 0) == rotten
    assert measure_saved(sharing / "good", sharing / "rotten") == 0
    os.close(source)
    os.close(target)


def test_a_range_of_another_file_becomes_part_of_this_one(sharing: Path) -> None:
    data = os.urandom(2 * BLOCK + TAIL)
    source, target = write(sharing / "source", data), write(sharing / "target", b"")
    os.ftruncate(target, len(data))
    reflink.clone_range(source, BLOCK, target, 0, BLOCK)
    reflink.clone_range(source, 2 * BLOCK, target, 2 * BLOCK, TAIL)
    assert (sharing / "target").read_bytes() == data[BLOCK : 2 * BLOCK] + bytes(BLOCK) + data[2 * BLOCK :]
    with pytest.raises(OSError) as refused:
        reflink.clone_range(source, 2 * BLOCK, target, 0, TAIL)
    assert refused.value.errno in reflink.CANNOT_CLONE, "a short block in the middle of a file"
    os.close(source)
    os.close(target)


def test_others_say_that_they_cannot(not_sharing: Path) -> None:
    """H5: ext4, and tmpfs, where the RAM tier is. So the RAM tier cannot store an unchanged block once."""
    data = os.urandom(BLOCK)
    source, target = write(not_sharing / "source", data), write(not_sharing / "target", data)
    assert reflink.deduplicate(source, 0, target, 0, BLOCK) is Sharing.IMPOSSIBLE
    assert not reflink.clone(source, target)
    with pytest.raises(OSError) as refused:
        reflink.clone_range(source, 0, target, 0, BLOCK)
    assert refused.value.errno in reflink.CANNOT_SHARE
    with disk.closing(os.open(not_sharing, os.O_RDONLY)) as directory:
        assert not reflink.is_possible_in(directory)
    assert (not_sharing / "target").read_bytes() == data
    os.close(source)
    os.close(target)


def test_it_is_found_out(sharing: Path) -> None:
    with disk.closing(os.open(sharing, os.O_RDONLY)) as directory:
        assert reflink.is_possible_in(directory)
    assert not list(sharing.glob("tmp*"))


def check_copy(node: Node, place: Path) -> int:
    """Copy a sealed content with a hole; its new file has the same bytes and times, and a life of its own."""
    node.configure(nvme=place / f"nvme-{node.root.name}")
    storage = node.tiers[Tier.NVME]
    data = os.urandom(2 * BLOCK) + bytes(2 * BLOCK) + os.urandom(TAIL)
    content = node.make(b"file", data[: 2 * BLOCK], tier=Tier.NVME)
    path, other = node.path(content, Tier.NVME), node.path(content + 1, Tier.NVME)
    with open(path, "r+b") as file:
        file.seek(4 * BLOCK)
        file.write(data[4 * BLOCK :])
        os.fsync(file.fileno())
    os.utime(path, ns=(5, 7))
    assert storage.get_shared_bytes_of(content) == 0
    with disk.closing(storage.open(content)) as fd:
        sealed = transfer.read(fd, label="seal")
        os.close(local_copies.copy_open(fd, storage, content + 1, sealed[:2]))
    assert other.read_bytes() == data
    status = os.stat(other)
    assert (status.st_mtime_ns, status.st_mode & 0o777) == (7, 0o600)
    assert status.st_blocks * 512 < len(data) - BLOCK, "the hole stays one"
    assert (storage.get_shared_bytes_of(content) >= 2 * BLOCK + TAIL) == storage.can_share_blocks, "to write over these needs room"
    saved = measure_saved(path, other)
    with open(path, "r+b") as file:
        file.write(b"changed")
    assert other.read_bytes() == data
    return saved


def test_a_sealed_content_is_copied_by_sharing(node: Node, sharing: Path) -> None:
    """T6: as the history keeps what a program overwrites."""
    assert check_copy(node, sharing) >= 2 * BLOCK + TAIL


def test_a_sealed_content_is_copied_where_nothing_is_shared(node: Node, not_sharing: Path) -> None:
    """Also in RAM, where a tmpfs does not tell where a file is."""
    if not_sharing.name.endswith("tmpfs"):
        with pytest.raises(OSError) as refused:
            check_copy(node, not_sharing)
        assert refused.value.errno == errno.EOPNOTSUPP, "from the measuring"
    else:
        assert check_copy(node, not_sharing) == 0


def test_a_clone_that_fails_leaves_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    content = node.make(b"file", b"bytes", tier=Tier.NVME)
    inject_fault(monkeypatch, "share:clone=EIO")
    with disk.closing(node.tiers[Tier.NVME].open(content)) as fd, pytest.raises(OSError):
        local_copies.copy_open(fd, node.tiers[Tier.NVME], content + 1, (5, b"digest"))
    assert node.files(Tier.NVME) == {content}
