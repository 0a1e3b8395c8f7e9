"""H5, P4, P6: on a PFS that can share blocks, what did not change since another file was written back is stored once."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_disk import measure_saved, mounted
from write_back_world import Killed, Mount, intercepted, rest

from ckptfs import limits
from ckptfs.catalog import pfs_state
from ckptfs.flow.write_back import plan
from ckptfs.model import Tier
from ckptfs.tiers import transfer

pytestmark = pytest.mark.root
BLOCK = limits.BLOCK_BYTES
TAIL = 12_345
FIRST = os.urandom(3 * BLOCK + TAIL)
SECOND = FIRST[:BLOCK] + os.urandom(BLOCK) + FIRST[2 * BLOCK :]
SAVED = 2 * BLOCK + TAIL


@pytest.fixture
def mount(tmp_path: Path, sharing: Path) -> Iterator[Mount]:
    yield with_pfs(Mount(tmp_path), sharing / "pfs")
    shutil.rmtree(sharing / "pfs")


def with_pfs(mount: Mount, pfs: Path) -> Mount:
    """Give a mount a PFS on another filesystem than its RAM."""
    pfs.mkdir()
    mount.pfs = pfs
    mount.configure(pfs=pfs)
    _ = mount.tiers[Tier.PFS].uuid
    return mount


def test_only_what_changed_is_written(mount: Mount) -> None:
    """The figure goes when the file that it was shared with is gone."""
    mount.put(b"step_1.pt", FIRST)
    flow = mount.write_back()
    mount.settle_exactly(flow)
    mount.put(b"step_2.pt", SECOND)
    labels: list[str] = []
    with intercepted(labels.append):
        mount.settle_exactly(flow)
    assert labels.count("write_back:write") == BLOCK // transfer.PIECE_BYTES
    assert measure_saved(mount.pfs / "step_1.pt", mount.pfs / "step_2.pt") >= SAVED
    assert pfs_state.count_shared_bytes(mount.db) == SAVED
    mount.unlink(b"step_1.pt")
    mount.settle_exactly(flow)
    assert pfs_state.count_shared_bytes(mount.db) == 0


def test_a_file_that_is_saved_again_shares_with_its_former_state(mount: Mount) -> None:
    """A new mover knows what the last one wrote."""
    mount.put(b"last.pt", FIRST)
    mount.settle()
    mount.put(b"last.pt", SECOND)
    labels: list[str] = []
    with intercepted(labels.append):
        mount.settle_exactly()
    assert labels.count("write_back:write") == BLOCK // transfer.PIECE_BYTES


def test_what_others_changed_on_the_pfs_is_not_taken_over(mount: Mount) -> None:
    """P4: a stranger changes a byte there and sets the times back. What differs is written."""
    mount.put(b"step_1.pt", FIRST)
    mount.settle()
    path = mount.pfs / "step_1.pt"
    status = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(2 * BLOCK)
        file.write(b"changed")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    mount.put(b"step_2.pt", SECOND)
    mount.settle()
    assert (mount.pfs / "step_2.pt").read_bytes() == SECOND
    assert path.read_bytes()[2 * BLOCK :].startswith(b"changed")


def test_a_large_content_is_sealed_first_then(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digests say what it shares. While the PFS has nothing to share, it is copied during its seal as ever."""
    monkeypatch.setattr(plan, "BATCH_BYTES_MAX", BLOCK)
    mount.put(b"step_1.pt", FIRST)
    mount.settle()
    mount.seal_at_once = False
    content = mount.put(b"step_2.pt", SECOND)
    sealing = threading.Thread(target=lambda: mount.seal(content))
    labels: list[str] = []

    def seal_then(label: str) -> None:
        labels.append(label)
        if label == "share:range" and labels.count(label) == 1:
            sealing.start()

    with intercepted(seal_then):
        mount.settle_exactly()
    sealing.join()
    assert labels.count("write_back:write") == BLOCK // transfer.PIECE_BYTES


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_while_it_shares(mount: Mount, after: bool) -> None:
    mount.put(b"step_1.pt", FIRST)
    mount.settle()
    mount.put(b"step_2.pt", SECOND)
    seen: list[str] = []

    def strike(label: str) -> None:
        seen.append(label)
        if seen.count("share:range") >= 2:
            raise Killed

    with pytest.raises(Killed), intercepted(*([lambda label: None, strike] if after else [strike])):
        mount.settle()
    rest(mount.write_back())
    mount.exact()


def test_a_pfs_that_cannot_share_is_asked_once(tmp_path: Path) -> None:
    with mounted("ext4", tmp_path) as place:
        mount = with_pfs(Mount(tmp_path / "mount"), place / "pfs")
        labels: list[str] = []
        flow = mount.write_back()
        with intercepted(labels.append):
            for number in range(4):
                mount.put(b"step_%d.pt" % number, FIRST)
                mount.settle_exactly(flow)
        assert labels.count("share:range") == 1
        assert pfs_state.count_shared_bytes(mount.db) == 0
