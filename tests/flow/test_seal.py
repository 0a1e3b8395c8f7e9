"""P4, P7, P8: a closed content gets its digest; a content that may still change does not (H1, F3)."""

import errno
import mmap
import os
from pathlib import Path

import pytest
from local_node import MIB, Node, in_process, inject_fault, run_until_idle

from ckptfs import digest, limits
from ckptfs.catalog import copies, summary
from ckptfs.catalog.contents import get_content, set_state
from ckptfs.flow.seal import Seal
from ckptfs.model import ContentState, Tier
from ckptfs.tiers import transfer


@pytest.fixture
def node(tmp_path: Path) -> Node:
    transfer.ignore_lease_signal()
    return Node(tmp_path)


def seal(node: Node) -> Seal:
    return Seal(node.db, node.tiers, node.config, node.told)


def sealed_as(node: Node, content: int, data: bytes) -> bool:
    row = get_content(node.db, content)
    running = digest.RunningDigest()
    running.update(data)
    assert row is not None
    return (row.state, row.size, row.digest, row.block_digests) == (ContentState.SEALED, len(data), *running.finish())


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("size", [0, 1, 4096, 5 * MIB])
def test_a_closed_content_is_sealed_with_its_digest(node: Node, tier: Tier, size: int) -> None:
    data = os.urandom(size)
    content = node.make(b"file", data, tier=tier)
    assert seal(node).step() is False
    assert sealed_as(node, content, data)
    assert copies.list_copies(node.db, content)[0].verified_ns > 0
    assert node.told.works == 1


def test_thousands_are_sealed_in_batches_in_their_order(node: Node) -> None:
    contents = [node.make(b"%d" % number, b"%d" % number) for number in range(150)]
    step = seal(node)
    assert step.step() is True
    states = [node.state(content) for content in contents]
    assert states[:64] == [ContentState.SEALED] * 64 and ContentState.SEALED not in states[64:]
    run_until_idle(step)
    assert all(sealed_as(node, content, b"%d" % number) for number, content in enumerate(contents))


def test_an_open_content_is_left_alone(node: Node) -> None:
    content = node.make(b"md.log", b"step 1", closed=False)
    seal(node).step()
    assert node.state(content) is ContentState.OPEN


def test_a_mapping_that_outlives_its_handle_delays_the_seal_and_nothing_else(node: Node) -> None:
    mapped, other = node.make(b"mapped", b"a" * 4096), node.make(b"other", b"b")
    with open(node.path(mapped), "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 4096)
    step = seal(node)
    step.step()
    assert node.state(mapped) is ContentState.CLOSED and node.state(other) is ContentState.SEALED
    due_s = step.next_due_s()
    assert due_s is not None and due_s > 0
    mapping[:4] = b"late"
    mapping.close()
    step._retries.clear()
    step.step()
    assert sealed_as(node, mapped, b"late" + b"a" * 4092)
    assert step.next_due_s() is None


def test_an_open_for_writing_during_the_seal_wins(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    content = node.make(b"file", b"first")
    whole = transfer.read

    def read_slowly(*values: object, **named: object) -> object:
        result = whole(*values, **named)  # type: ignore[arg-type]
        node.reopen(content, Tier.RAM)
        return result

    monkeypatch.setattr(transfer, "read", read_slowly)
    seal(node).step()
    assert node.state(content) is ContentState.OPEN
    assert get_content(node.db, content).digest is None  # type: ignore[union-attr]


def test_a_writer_who_breaks_the_lease_stops_the_reading(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    content = node.make(b"file", os.urandom(9 * MIB))
    pieces: list[int] = []
    before = digest.RunningDigest.update

    def update(self: digest.RunningDigest, data: bytes) -> None:
        pieces.append(len(data))
        if len(pieces) == 1:
            with pytest.raises(BlockingIOError):
                node.tiers[Tier.RAM].open(content, os.O_RDWR | os.O_NONBLOCK)
        before(self, data)

    monkeypatch.setattr(digest.RunningDigest, "update", update)
    seal(node).step()
    assert node.state(content) is ContentState.CLOSED
    assert sum(pieces) <= 4 * MIB, "the lease was kept after somebody wanted it"


def test_where_there_are_no_leases_the_times_are_compared(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    calm, busy = node.make(b"calm", b"calm"), node.make(b"busy", b"busy")
    monkeypatch.setattr(transfer.fcntl, "fcntl", lambda *_: (_ for _ in ()).throw(OSError(errno.EINVAL, "no leases")))
    whole = transfer.read

    def read(fd: int, **named: object) -> object:
        result = whole(fd, **named)  # type: ignore[arg-type]
        if os.readlink(f"/proc/self/fd/{fd}").endswith(f"{busy:016x}"):
            with open(node.path(busy), "ab") as file:
                file.write(b"!")
        return result

    monkeypatch.setattr(transfer, "read", read)
    seal(node).step()
    assert node.state(calm) is ContentState.SEALED and node.state(busy) is ContentState.CLOSED


@pytest.mark.parametrize("tier", [Tier.RAM, Tier.PFS])
def test_a_pfs_that_refuses_every_lease_does_not_keep_its_files_unsealed(node: Node, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS does without a delegation. A tmpfs refuses only while somebody may write."""
    content = node.make(b"file", b"data", tier=tier)
    monkeypatch.setattr(transfer.fcntl, "fcntl", lambda *_: (_ for _ in ()).throw(OSError(errno.EAGAIN, "refused")))
    step = seal(node)
    for _ in range(20):
        step.step()
        for wait in step._retries.values():
            wait.until_s = 0.0
    assert node.state(content) is (ContentState.SEALED if tier is Tier.PFS else ContentState.CLOSED)


def test_a_file_that_is_gone_is_lost_and_named(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    content = node.make(b"gone", b"data")
    node.tiers[Tier.RAM].remove(content)
    seal(node).step()
    assert node.state(content) is ContentState.LOST
    assert "gone: lost" in caplog.text


def test_a_file_that_cannot_be_read_is_tried_again_and_delays_no_other(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = node.make(b"first", b"1"), node.make(b"second", b"2")
    inject_fault(monkeypatch, "seal:read=EIO")
    step = seal(node)
    step.step()
    assert node.state(first) is ContentState.CLOSED and node.state(second) is ContentState.SEALED
    step._retries[first].until_s = 0.0
    step.step()
    assert sealed_as(node, first, b"1")


def test_a_file_that_is_too_large_to_seal_delays_no_other(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILE_BYTES_MAX", MIB)
    vast, other = node.make(b"vast", bytes(MIB + 1)), node.make(b"other", bytes(MIB))
    seal(node).step()
    assert node.state(vast) is ContentState.CLOSED and node.state(other) is ContentState.SEALED


def test_figures_of_files_whose_sizes_have_no_sum(node: Node) -> None:
    for name in (b"vast", b"vast too"):
        content = node.make(name, b"")
        node.db.connection.execute("UPDATE content SET size = ? WHERE id = ?", (limits.OFFSET_MAX, content))
        node.db.connection.execute("UPDATE inode SET size = ? WHERE id = ?", (limits.OFFSET_MAX, node.inode(content)))
    assert summary.load_write_back_figures(node.db).dirty_bytes >= limits.OFFSET_MAX
    assert sum(summary.load_counts(node.db).bytes_by_level.values()) >= limits.OFFSET_MAX


def test_the_step_after_one_that_failed_sees_everything(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """P8: no other hint may come for what failed."""
    content = node.make(b"file", b"1")
    inject_fault(monkeypatch, "seal:commit=EIO")
    step = seal(node)
    with pytest.raises(OSError, match="injected"):
        step.step()
    step.step()
    assert sealed_as(node, content, b"1")


def test_the_former_generation_goes_once_its_successor_is_sealed(node: Node) -> None:
    """P5: write new, verify, then expire old."""
    old = node.make(b"file", b"old")
    seal(node).step()
    new = node.write(node.inode(old), b"new", closed=False)
    seal(node).step()
    assert node.state(old) is ContentState.SEALED, "the successor is not whole yet"
    with node.db.transaction():
        set_state(node.db, new, ContentState.CLOSED)
    seal(node).step()
    assert node.state(new) is ContentState.SEALED and node.state(old) is ContentState.DOOMED


def test_lanes_for_other_tiers_do_not_touch_the_pfs(node: Node) -> None:
    content = node.make(b"file", b"data", tier=Tier.PFS)
    Seal(node.db, node.tiers, node.config, node.told, (Tier.RAM, Tier.NVME)).step()
    assert node.state(content) is ContentState.CLOSED


LABELS = ["seal:read", "seal:fdatasync", "seal:directory", "seal:commit", "seal:persist", "tier:open"]


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("action", ["kill", "kill-after", "EIO"])
def test_dying_or_failing_anywhere_and_starting_again_seals_the_same(tmp_path: Path, label: str, action: str) -> None:
    """P8: whatever happens at any act, the next mover seals exactly what was written."""
    node = Node(tmp_path)
    data = [os.urandom(3000), os.urandom(3000)]
    contents = [node.make(b"%d" % number, data[number], tier=Tier.NVME) for number in range(2)]
    script = """
from ckptfs.flow.seal import Seal
try:
    Seal(node.db, node.tiers, node.config, node.told).step()
except OSError:
    pass
"""
    code = in_process(tmp_path, script, fault=f"{label}={action}")
    assert code == (-9 if action.startswith("kill") else 0)
    for number, content in enumerate(contents):
        assert node.state(content) in {ContentState.CLOSED, ContentState.SEALED}
        assert node.data(content, Tier.NVME) == data[number]
    transfer.ignore_lease_signal()
    seal(node).step()
    assert all(sealed_as(node, content, data[number]) for number, content in enumerate(contents))
