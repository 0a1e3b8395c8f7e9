"""H5: contents on NVMe store equal blocks once, where the filesystem can. P4, P5: no byte is ever at risk for that."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_node import Node, in_process, inject_fault, run_until_idle
from loop_disk import mounted
from programs import run as run_program

from ckptfs import disk, limits
from ckptfs.catalog import contents, handles
from ckptfs.flow import share_blocks
from ckptfs.flow.reclaim import Reclaim
from ckptfs.flow.seal import Seal
from ckptfs.flow.share_blocks import ShareBlocks
from ckptfs.flow.verify import verify
from ckptfs.model import ContentState, CopyState, Tier
from ckptfs.tiers import reflink

pytestmark = pytest.mark.root
BLOCK = limits.BLOCK_BYTES
TAIL = 12_345
FIRST = os.urandom(4 * BLOCK + TAIL)
SECOND = FIRST[:BLOCK] + os.urandom(BLOCK) + FIRST[2 * BLOCK :]
SAVED = 3 * BLOCK + TAIL
"""What the two have in common."""


class Clock:
    """A clock that the test sets."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(share_blocks, "time", found)
    return found


@pytest.fixture
def node(sharing: Path) -> Iterator[Node]:
    """A node that has everything on a filesystem that shares blocks."""
    yield Node(sharing / "node")
    shutil.rmtree(sharing / "node")


@pytest.fixture(scope="module")
def xfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted("xfs", tmp_path_factory.mktemp("xfs")) as place:
        yield place


@pytest.fixture
def xfs_node(xfs: Path, tmp_path: Path) -> Iterator[Node]:
    """A node of which only the NVMe tier is there."""
    node = Node(tmp_path)
    node.configure(nvme=xfs / "nvme")
    yield node
    shutil.rmtree(xfs / "nvme")


def make_sealed(node: Node, name: bytes, data: bytes) -> int:
    """A file that was written to NVMe, its content."""
    content = node.make(name, data, tier=Tier.NVME)
    run_until_idle(Seal(node.db, node.tiers, node.config, node.told))
    assert node.state(content) is ContentState.SEALED
    return content


def make_pair(node: Node) -> tuple[int, int]:
    return make_sealed(node, b"step_1.pt", FIRST), make_sealed(node, b"step_2.pt", SECOND)


def run(share: ShareBlocks, clock: Clock) -> None:
    """Step until nothing is due soon."""
    for _ in range(1000):
        assert not share.step()
        due_s = share.next_due_s()
        if due_s is None or due_s >= 1:
            return
        clock.now += due_s
    raise AssertionError("it never ends")


def get_used_bytes(place: Path) -> int:
    """What the filesystem stores."""
    run_program("sync", "-f", place)
    found = os.statvfs(place)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def shared(node: Node) -> int:
    return node.tiers[Tier.NVME].get_shared_bytes()


def test_what_two_sets_have_in_common_is_stored_once(node: Node, clock: Clock) -> None:
    """H5: also the last short block. What the figure says is what the filesystem says, after files went, too."""
    first, second = make_pair(node)
    used_before = get_used_bytes(node.root)
    share = ShareBlocks(node.db, node.tiers)
    run(share, clock)
    assert shared(node) >= SAVED
    assert get_used_bytes(node.root) <= used_before - 3 * BLOCK + limits.MIB, "also on btrfs, where a part of an extent holds all of it"
    assert (node.data(first, Tier.NVME), node.data(second, Tier.NVME)) == (FIRST, SECOND)
    assert all(check.ok for content in (first, second) for check in verify(node.db, node.tiers, content))
    assert share.next_due_s() is not None, "deleted files wake nobody, so the figure is looked at again"
    contents.set_state(node.db, first, ContentState.DOOMED)
    run_until_idle(Reclaim(node.db, node.tiers, node.config, node.told))
    clock.now += share_blocks.MEASURE_S
    run(share, clock)
    assert shared(node) == 0
    assert node.data(second, Tier.NVME) == SECOND
    assert share.next_due_s() is None


def test_a_budget_counts_what_is_stored(node: Node, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "USED_AGE_S", 0.0)
    node.configure(nvme_bytes=200 << 20)
    make_pair(node)
    used_before = node.tiers[Tier.NVME].get_capacity().used
    run(ShareBlocks(node.db, node.tiers), clock)
    node.configure()
    assert node.tiers[Tier.NVME].get_capacity().used <= used_before - SAVED


def test_copies_that_come_later_share_as_well(node: Node, clock: Clock) -> None:
    """A content that moves from RAM to NVMe, and one that was there before the mover began."""
    make_sealed(node, b"step_1.pt", FIRST)
    share = ShareBlocks(node.db, node.tiers)
    run(share, clock)
    content = node.make_sealed(b"step_2.pt", SECOND)
    node.copy_to_tier(content, Tier.NVME)
    run(share, clock)
    clock.now += share.next_due_s() or 0
    share.step()
    assert shared(node) >= SAVED, "the figure comes without a hint"


def test_a_hint_during_the_pause_is_not_lost(node: Node, clock: Clock) -> None:
    make_sealed(node, b"step_1.pt", FIRST)
    share = ShareBlocks(node.db, node.tiers)
    run(share, clock)
    share._resume_s = clock.now + 0.5
    make_sealed(node, b"step_2.pt", SECOND)
    run(share, clock)
    assert share._shared_blocks == 4


def test_a_new_mover_reads_nothing_that_is_shared_already(node: Node, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pair(node)
    run(ShareBlocks(node.db, node.tiers), clock)
    monkeypatch.setattr(reflink, "deduplicate", None)
    run(ShareBlocks(node.db, node.tiers), clock)
    assert shared(node) >= SAVED


@pytest.mark.parametrize("open_one", [0, 1])
def test_open_files_are_left_alone(xfs_node: Node, clock: Clock, open_one: int) -> None:
    """The kernel would lock the file of a reader. It is looked at again when it is closed."""
    node = xfs_node
    handle = node.hold(make_pair(node)[open_one])
    share = ShareBlocks(node.db, node.tiers)
    run(share, clock)
    assert shared(node) == 0
    handles.delete(node.db, handle)
    clock.now += share_blocks.OPEN_RETRY_S
    run(share, clock)
    assert shared(node) >= SAVED


def test_seals_go_first_for_a_while(xfs_node: Node, clock: Clock) -> None:
    """A file that stays mapped for writing cannot be sealed, perhaps for days."""
    node = xfs_node
    make_pair(node)
    node.make(b"unsealed", b"bytes")
    share = ShareBlocks(node.db, node.tiers)
    began_s = clock.now
    while clock.now < began_s + share_blocks.YIELD_S:
        assert not share.step()
        assert share._shared_blocks == 0
        due_s = share.next_due_s()
        assert due_s is not None and due_s > 0
        clock.now += due_s
    for _ in range(100):
        share.step()
        clock.now += share.next_due_s() or 1
    assert share._shared_blocks == 4


def test_a_writer_that_comes_during_the_comparison_wins(xfs_node: Node, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: the file is opened and changed after it was chosen. Both files keep what was written to them, and neither copy is blamed."""
    node = xfs_node
    first, second = make_pair(node)
    deduplicate: Callable[..., reflink.Sharing] = reflink.deduplicate
    results = []

    def change_before(source: int, there: int, target: int, start: int, length: int) -> reflink.Sharing:
        if start == 2 * BLOCK:
            node.reopen(second, Tier.NVME)
            with open(node.path(second, Tier.NVME), "r+b") as file:
                file.seek(start)
                file.write(b"changed")
        results.append(deduplicate(source, there, target, start, length))
        return results[-1]

    monkeypatch.setattr(reflink, "deduplicate", change_before)
    run(ShareBlocks(node.db, node.tiers), clock)
    assert reflink.Sharing.DIFFERENT in results
    assert node.data(first, Tier.NVME) == FIRST
    assert node.data(second, Tier.NVME) == SECOND[: 2 * BLOCK] + b"changed" + SECOND[2 * BLOCK + 7 :]
    assert node.copies(first) == node.copies(second) == {Tier.NVME: CopyState.GOOD}
    with open(node.path(second, Tier.NVME), "r+b") as file:
        file.write(b"once more, into a block that is shared by now")
    assert node.data(first, Tier.NVME) == FIRST


@pytest.mark.parametrize("bad", [0, 1])
def test_a_copy_that_went_bad_is_found_and_repaired(xfs_node: Node, clock: Clock, bad: int) -> None:
    """P4: digests agree, bytes do not. Only the bad copy is quarantined, and its repair leaves the other file alone."""
    node = xfs_node
    pair = node.make_sealed(b"step_1.pt", FIRST), node.make_sealed(b"step_2.pt", SECOND)
    for content in pair:
        node.copy_to_tier(content, Tier.NVME)
    damage(node, pair[bad], 3 * BLOCK)
    run(ShareBlocks(node.db, node.tiers), clock)
    assert node.copies(pair[bad])[Tier.NVME] is CopyState.QUARANTINED
    assert node.copies(pair[1 - bad])[Tier.NVME] is CopyState.GOOD
    assert shared(node) >= SAVED - BLOCK
    assert [check.repaired for check in verify(node.db, node.tiers, pair[bad])] == [False, True]
    assert [node.data(content, Tier.NVME) for content in pair] == [FIRST, SECOND]


def test_a_bad_place_that_two_share_is_found_in_both(xfs_node: Node, clock: Clock) -> None:
    """P4: the device changes a byte in a place that two contents share. Each is repaired from its own good copy, into a new place."""
    node = xfs_node
    pair = node.make_sealed(b"step_1.pt", FIRST), node.make_sealed(b"step_2.pt", SECOND)
    for content in pair:
        node.copy_to_tier(content, Tier.NVME)
    share = ShareBlocks(node.db, node.tiers)
    run(share, clock)
    assert shared(node) >= SAVED
    damage(node, pair[0], 3 * BLOCK)
    for content in pair:
        checks = {check.tier: check for check in verify(node.db, node.tiers, content)}
        assert checks[Tier.RAM].ok and not checks[Tier.NVME].ok and checks[Tier.NVME].repaired
    for content, data in zip(pair, (FIRST, SECOND), strict=True):
        assert node.data(content, Tier.NVME) == data
    clock.now += share_blocks.MEASURE_S
    run(share, clock)
    assert shared(node) >= SAVED, "the repaired ones share again"


def test_nobody_shares_with_what_went_bad_unnoticed(xfs_node: Node, clock: Clock) -> None:
    """P5: good pages in memory hide what the device has. The good blocks of the new content stay."""
    node = xfs_node
    pair = make_pair(node)
    assert node.data(pair[0], Tier.NVME) == FIRST
    damage(node, pair[0], 3 * BLOCK, drops_pages=False)
    assert node.data(pair[0], Tier.NVME) == FIRST, "from memory"
    run(ShareBlocks(node.db, node.tiers), clock)
    drop_pages(node.path(pair[1], Tier.NVME))
    assert node.data(pair[1], Tier.NVME) == SECOND
    assert node.copies(pair[0])[Tier.NVME] is CopyState.QUARANTINED


@pytest.mark.parametrize("fault", ["share:compare=kill@2", "share:compare=kill-after@2", "share:write=kill"])
def test_a_kill_in_between_loses_nothing(node: Node, clock: Clock, fault: str) -> None:
    if fault.startswith("share:write") and "btrfs" not in str(node.root):
        return  # Nothing moves out elsewhere.
    first, second = make_pair(node)
    script = "from ckptfs.flow.share_blocks import ShareBlocks\nshare = ShareBlocks(node.db, node.tiers)\nwhile True: share.step()"
    assert in_process(node.root, script, fault=fault) == -9
    assert (node.data(first, Tier.NVME), node.data(second, Tier.NVME)) == (FIRST, SECOND)
    run(ShareBlocks(node.db, node.tiers), clock)
    assert shared(node) >= SAVED
    assert (node.data(first, Tier.NVME), node.data(second, Tier.NVME)) == (FIRST, SECOND)


@pytest.mark.parametrize("label", ["share:range", "share:compare", "share:read", "tier:shared"])
def test_an_error_delays_it(xfs_node: Node, clock: Clock, monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    """An older content went bad, so that the bytes of a block are looked at. The content in hand is left as it is, and others follow."""
    node = xfs_node
    older = make_sealed(node, b"step_0.pt", FIRST)
    damage(node, older, 3 * BLOCK)
    first, second, third = *make_pair(node), make_sealed(node, b"step_3.pt", FIRST)
    share = ShareBlocks(node.db, node.tiers)
    inject_fault(monkeypatch, f"{label}=EIO")
    for _ in range(30):
        share.step()
        clock.now += limits.TIER_RETRY_S
    assert [node.data(content, Tier.NVME) for content in (first, second, third)] == [FIRST, SECOND, FIRST]
    assert shared(node) >= SAVED


def test_a_tier_that_fails_is_waited_for(xfs_node: Node, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    node = xfs_node
    make_pair(node)
    storage = node.tiers[Tier.NVME]
    storage.record_failure(OSError(errno.EIO, "injected"))
    share = ShareBlocks(node.db, node.tiers)
    caplog.clear()
    for _ in range(5):
        share.step()
        assert share.next_due_s() == limits.TIER_RETRY_S
        clock.now += limits.TIER_RETRY_S
    assert share._shared_blocks == 0 and not caplog.records
    storage.record_success()
    run(share, clock)
    assert shared(node) >= SAVED


def test_a_filesystem_that_cannot_share_is_left_alone(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted("ext4", tmp_path) as place:
        node = Node(place / "node")
        make_pair(node)
        monkeypatch.setattr(reflink, "deduplicate", None)
        share = ShareBlocks(node.db, node.tiers)
        run(share, clock)
        assert (shared(node), share.next_due_s()) == (0, None)


def damage(node: Node, content: int, offset: int, *, drops_pages: bool = True) -> None:
    """Change a byte on the device, behind the back of the filesystem, which keeps what it has in memory if it may."""
    path = node.path(content, Tier.NVME)
    run_program("sync", "-f", path)
    with disk.closing(os.open(path, os.O_RDONLY)) as fd:
        place = reflink.list_extents(fd, offset, 4096)[0].physical
    mount = next(parent for parent in path.parents if parent.is_mount())
    image = mount.with_name(mount.name.replace("disk-", "image-"))
    with open(image, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    if drops_pages:
        drop_pages(path)


def drop_pages(path: Path) -> None:
    with disk.closing(os.open(path, os.O_RDONLY)) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
