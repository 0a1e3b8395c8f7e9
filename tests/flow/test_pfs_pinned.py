"""P5, P7: a PFS that nobody may mark is recognised by what it is. What lies below its mountpoint is never taken for it."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_node import inject_fault
from pfs_world import World
from silent_pfs import SilentPfs
from write_back_world import Mount

from ckptfs.catalog import copies, mover_requests, namespace, summary
from ckptfs.errors import TierUnavailable
from ckptfs.flow.scan import Scan
from ckptfs.model import ROOT, Level, Tier
from ckptfs.tiers import pfs_identity, pfs_tree
from ckptfs.tiers.pfs_identity import PfsPin, find_pin_difference

NFS = PfsPin("nfs4", "server:/export", 0, 45, 1001, 0)
EXT4 = PfsPin("ext4", "/dev/loop0", 77, 1792, 2, 5)
XFS = PfsPin("xfs", "/dev/loop0", 1793, 1793, 128, 1_700_000_000_123)
TMPFS = PfsPin("tmpfs", "none", 99, 41, 1, 1_700_000_000_456)


class PinnedMount(Mount):
    """A node whose PFS refuses every mark, with the scan of its PFS."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        shutil.rmtree(self.pfs / ".ckptfs")
        self.restart()

    def restart(self) -> None:
        """A new mover."""
        self.scan = Scan(self.db, self.tiers, self.config, self.told)
        self.scan.prepare()
        self.flow = self.write_back()
        self.flow.prepare()

    def look(self, path: bytes = b"") -> mover_requests.MoverRequest:
        """Compare a directory with the PFS; the answered request."""
        request = mover_requests.insert_request(self.db, mover_requests.SCAN, self.number(path), mover_requests.COMPARE_AGAIN)
        try:
            self.scan.step()
        except TierUnavailable as failure:
            self.refusal = failure
        answered = mover_requests.get(self.db, request)
        assert answered is not None
        return answered

    def level(self, path: bytes) -> Level:
        found = summary.get_listed_file(self.db, self.number(path))
        assert found is not None
        return found.level

    def take_away(self) -> None:
        """The PFS is not mounted any more: its mountpoint is an empty directory."""
        os.rename(self.pfs, self.pfs.with_name("away"))
        self.pfs.mkdir()

    def put_back(self) -> None:
        assert list(self.pfs.iterdir()) == [], "nothing was written below the mountpoint"
        self.pfs.rmdir()
        os.rename(self.pfs.with_name("away"), self.pfs)


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PinnedMount]:
    mount = PinnedMount(tmp_path)
    inject_fault(monkeypatch, "pfs:mark=EPERM@*")
    assert mount.look().state == mover_requests.DONE
    yield mount
    mount.db.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_pfs_that_is_away_loses_and_gets_nothing(mount: PinnedMount, restarts: bool) -> None:
    mount.put(b"step_1", b"1")
    mount.settle(mount.flow)
    assert mount.look().state == mover_requests.DONE
    mount.take_away()
    if restarts:
        mount.restart()
    mount.put(b"step_2", b"2")
    assert (
        mount.look().state == mover_requests.FAILED
        and "accept-pfs" in mount.refusal.remedy
        and str(mount.root / "state") in mount.refusal.remedy
    )
    with pytest.raises(TierUnavailable, match=f"{mount.pfs} is not the directory that this catalog belongs to") as refusal:
        mount.flow.step()
    assert f"mount the filesystem that belongs at {mount.pfs}" in refusal.value.remedy
    with pytest.raises(TierUnavailable, match="not the directory"):
        pfs_tree.open_inode(mount.db, mount.pfs, mount.number(b"step_1"))
    assert set(mount.tree()) == {b"step_1", b"step_2"} and mount.level(b"step_2") is Level.LOCAL
    mount.put_back()
    if restarts:
        mount.restart()
    mount.settle(mount.flow)
    assert mount.look().state == mover_requests.DONE
    assert mount.on_pfs() == mount.tree() and set(mount.tree()) == {b"step_1", b"step_2"} and mount.level(b"step_2") is Level.PFS
    assert not (mount.pfs / ".ckptfs").exists()


def test_the_operator_accepts_a_pfs_that_looks_like_another(mount: PinnedMount) -> None:
    """A copy of the PFS: every number is another, and nobody but the operator can know that it is meant."""
    mount.put(b"file", b"data")
    mount.settle(mount.flow)
    shutil.copytree(mount.pfs, mount.pfs.with_name("copy"))
    mount.take_away()
    mount.pfs.rmdir()
    mount.pfs.with_name("copy").rename(mount.pfs)
    mount.put(b"later", b"data")
    with pytest.raises(TierUnavailable, match="not the directory"):
        mount.flow.step()
    accepted = mount.root / "state" / pfs_identity.ACCEPT_PFS
    accepted.touch()
    mount.settle(mount.flow)
    assert set(mount.on_pfs()) == {b"file", b"later"} and not accepted.exists(), "a confirmation counts once"
    assert mount.look().state == mover_requests.DONE and set(mount.tree()) == {b"file", b"later"}


def test_a_pin_becomes_a_mark_when_one_can_be_made(mount: PinnedMount, monkeypatch: pytest.MonkeyPatch) -> None:
    mount.put(b"file", b"data")
    mount.settle(mount.flow)
    pinned = copies.get_tier_uuid(mount.db, Tier.PFS)
    assert pinned is not None and not pfs_identity.is_mark(pinned)
    inject_fault(monkeypatch, "")
    root_fd = pfs_identity.open_adopted_root(mount.db, mount.pfs)
    pfs_identity.replace_pin(mount.db, root_fd)
    os.close(root_fd)
    marked = copies.get_tier_uuid(mount.db, Tier.PFS)
    assert marked == (mount.pfs / ".ckptfs" / "tier-id").read_text().strip()
    mount.put(b"more", b"data")
    mount.settle_exactly(mount.flow)
    mount.take_away()
    mount.put(b"later", b"data")
    with pytest.raises(TierUnavailable, match="tier-id is missing"):
        mount.flow.step()


def test_a_mark_that_was_deleted_is_made_again_when_the_operator_says_so(tmp_path: Path) -> None:
    mount = Mount(tmp_path)
    mount.put(b"file", b"data")
    flow = mount.write_back()
    mount.settle(flow)
    mark = copies.get_tier_uuid(mount.db, Tier.PFS)
    shutil.rmtree(mount.pfs / ".ckptfs")
    mount.put(b"later", b"data")
    with pytest.raises(TierUnavailable, match="tier-id is missing"):
        flow.step()
    (tmp_path / "state" / pfs_identity.ACCEPT_PFS).touch()
    mount.settle_exactly(flow)
    assert (mount.pfs / ".ckptfs" / "tier-id").read_text().strip() == mark == copies.get_tier_uuid(mount.db, Tier.PFS)


def test_a_catalog_without_an_identity_does_not_believe_an_empty_directory(mount: PinnedMount) -> None:
    """As a catalog of 0.2.0 on a PFS that squashes root, which met no pin yet."""
    mount.put(b"file", b"data")
    mount.settle(mount.flow)
    with mount.db.transaction():
        mount.db.run("DELETE FROM tier WHERE name = 'pfs'")
    mount.take_away()
    assert mount.look().state == mover_requests.FAILED and "none of the names that should be there is, such as file" in str(mount.refusal)
    mount.put_back()
    assert mount.look().state == mover_requests.DONE and copies.get_tier_uuid(mount.db, Tier.PFS) is not None


@pytest.mark.parametrize("error", ["EIO", "ESTALE"])
def test_a_pfs_that_fails_at_the_first_contact_is_not_pinned(tmp_path: Path, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = PinnedMount(tmp_path)
    inject_fault(monkeypatch, f"pfs:mark={error}@*")
    assert mount.look().state == mover_requests.FAILED
    with mount.db.transaction():
        namespace.create(mount.db, ROOT, b"d", stat.S_IFDIR | 0o755, uid=0, gid=0, allow_unimported=True)
    with pytest.raises((OSError, TierUnavailable)):
        for _ in range(3):
            mount.flow.step()
    assert copies.get_tier_uuid(mount.db, Tier.PFS) is None and mount.on_pfs() == {}


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that other users reach; that of pytest is shut for them."""
    with tempfile.TemporaryDirectory(prefix="ckptfs-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: acting as somebody else needs root")
@pytest.mark.others
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_the_owner_of_the_directory_makes_the_mark(reachable: Path, mode: int) -> None:
    """Root without its capabilities over files stands for a PFS that does not take root for root. P5, P7."""
    pfs = reachable / "pfs"
    pfs.mkdir()
    os.chown(pfs, 4711, 4711)
    pfs.chmod(mode)
    squashed = "-dac_override,-dac_read_search,-chown,-fowner"
    code = (
        "import os\n"
        "from ckptfs.catalog import copies\nfrom ckptfs.model import Tier\nfrom ckptfs.tiers import pfs_identity\n"
        "try: os.mkdir(w.pfs / 'mine'); sys.exit(3)\nexcept PermissionError: pass\n"
        "assert w.look().state == 1, w.failure\n"
        "known = copies.get_tier_uuid(w.db, Tier.PFS)\n"
        "assert pfs_identity.is_mark(known), known\n"
        "assert w.look().state == 1 and w.names() == set(), w.failure\n"
        "os.rename(w.pfs, w.root / 'away'); w.pfs.mkdir()\n"
        "assert w.look().state == 2 and 'tier-id is missing' in str(w.failure), w.failure\n"
        "assert os.listdir(w.pfs) == []\n"
    )
    assert World(reachable).in_a_process(code, ("setpriv", f"--bounding-set={squashed}", f"--inh-caps={squashed}")) == 0
    mark = reachable / "away" / ".ckptfs" / "tier-id"
    assert mark.stat().st_uid == 4711 and len(mark.read_text().strip()) == 32


@pytest.mark.parametrize(
    ("pinned", "found", "same"),
    [
        (NFS, PfsPin("nfs4", "server:/export", 0, 52, 1001, 0), True),  # mounted again
        (NFS, PfsPin("ext4", "/dev/vda1", 77, 45, 1001, 5), False),  # the mountpoint
        (NFS, PfsPin("nfs4", "server:/other", 0, 45, 1001, 0), False),
        (NFS, PfsPin("nfs4", "server:/export", 0, 45, 2, 0), False),  # the server has not mounted it
        (EXT4, PfsPin("ext4", "/dev/loop3", 77, 1795, 2, 5), True),
        (EXT4, PfsPin("ext4", "/dev/loop0", 78, 1792, 2, 5), False),  # made in the same second
        (EXT4, PfsPin("ext4", "/dev/loop0", 77, 1792, 2, 6), False),  # removed and made again
        (XFS, PfsPin("xfs", "/dev/loop3", 1796, 1796, 128, 1_700_000_000_123), True),
        (XFS, PfsPin("xfs", "/dev/loop0", 1793, 1793, 128, 1_700_000_000_124), False),
        (TMPFS, PfsPin("tmpfs", "none", 98, 41, 1, 1_700_000_000_789), False),
        (PfsPin("tmpfs", "none", 0, 41, 1, 0), PfsPin("tmpfs", "none", 0, 42, 1, 0), False),  # an old kernel
        (PfsPin("tmpfs", "none", 0, 41, 1, 0), PfsPin("tmpfs", "none", 0, 41, 1, 0), True),
        (PfsPin("beegfs", "beegfs_nodev", 0, 41, 1, 0), PfsPin("beegfs", "beegfs_nodev", 0, 60, 1, 0), True),
    ],
)
def test_what_tells_a_pfs_from_another(pinned: PfsPin, found: PfsPin, same: bool) -> None:
    assert (find_pin_difference(pinned, found) == "") is same


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_pfs_that_is_mounted_again_under_a_running_mount(tmp_path: Path) -> None:
    """P1: what the tree held open of the dead filesystem answers ENOTCONN, and says nothing of the new one."""
    mount, first = Mount(tmp_path), SilentPfs(tmp_path)
    tree = pfs_tree.PfsTree(first.path)
    try:
        (first.source / "d").mkdir()
        tree.reopen_root(mount.db)
        tree.get_directory((b"d",))
    finally:
        first.close()
    second = SilentPfs(tmp_path)
    try:
        tree.reopen_root(mount.db)
        assert os.fstat(tree.get_directory((b"d",))).st_ino == (second.source / "d").stat().st_ino
    finally:
        second.close()
