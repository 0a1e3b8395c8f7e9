"""P6: write-back puts plain files on the PFS under their ordinary names, whole, verified, in the order of the journal (F2, F3, H1)."""

import logging
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
from local_node import inject_fault, run_until_idle
from write_back_world import Mount, intercepted

from ckptfs.catalog import copies, journal, namespace, pfs_state, summary
from ckptfs.errors import ConfigError, TierUnavailable
from ckptfs.flow.reclaim import Reclaim
from ckptfs.flow.write_back import apply
from ckptfs.model import ROOT, ContentState, CopyState, Level, Tier
from ckptfs.tiers import pfs_tree


def test_everything_there_is_appears_on_the_pfs(mount: Mount) -> None:
    mount.mkdir(b"run", 0o750)
    mount.put(b"run/model.pt", b"weights" * 1000)
    mount.symlink(b"latest", b"run/model.pt")
    mount.mknod(b"fifo", stat.S_IFIFO | 0o600)
    mount.mknod(b"empty", stat.S_IFREG | 0o640)
    mount.put(b"b\xff\n", b"a name of any bytes")
    mount.settle_exactly()
    assert summary.get_level(mount.db, mount.number(b"run/model.pt")) is Level.PFS
    assert mount.told.works > 0


def test_attributes_follow(mount: Mount) -> None:
    mount.put(b"file", b"data")
    mount.chmod(b"file", 0o604)
    mount.setxattr(b"file", b"user.step", b"7")
    mount.settle()
    path = mount.pfs / "file"
    assert stat.S_IMODE(path.stat().st_mode) == 0o604 and os.getxattr(path, "user.step") == b"7"
    assert path.stat().st_mtime_ns == mount.db.value("SELECT mtime_ns FROM inode WHERE id = ?", mount.number(b"file"))
    before = path.stat().st_ino
    mount.chmod(b"file", 0o4755)
    mount.settle()
    assert stat.S_IMODE(path.stat().st_mode) == 0o4755 and path.stat().st_ino == before, "only the attributes changed"
    mount.exact()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has trusted attributes, and only these exist on what is no file or directory")
def test_links_and_special_files_have_their_extended_attributes(mount: Mount) -> None:
    mount.symlink(b"link", b"nowhere")
    mount.mknod(b"fifo", stat.S_IFIFO | 0o600)
    mount.setxattr(b"link", b"trusted.a", b"1")
    mount.settle()
    mount.setxattr(b"fifo", b"trusted.a", b"2")
    mount.settle()
    assert os.getxattr(mount.pfs / "link", "trusted.a", follow_symlinks=False) == b"1"
    assert os.getxattr(mount.pfs / "fifo", "trusted.a", follow_symlinks=False) == b"2"


def test_a_directory_keeps_its_times(mount: Mount) -> None:
    mount.mkdir(b"d")
    mount.put(b"d/file", b"data")
    mount.settle()
    assert (mount.pfs / "d").stat().st_mtime_ns == mount.db.value("SELECT mtime_ns FROM inode WHERE id = ?", mount.number(b"d"))
    mount.put(b"d/temporary", b"data")
    mount.unlink(b"d/temporary")
    mount.settle()
    assert (mount.pfs / "d").stat().st_mtime_ns == mount.db.value("SELECT mtime_ns FROM inode WHERE id = ?", mount.number(b"d"))


def test_a_renamed_directory_is_one_rename_there(mount: Mount) -> None:
    mount.mkdir(b"a")
    for number in range(20):
        mount.put(b"a/%d" % number, b"%d" % number)
    mount.settle()
    numbers = {path.name: path.stat().st_ino for path in (mount.pfs / "a").iterdir()}
    mount.mkdir(b"x")
    mount.rename(b"a", b"x/b")
    mount.settle_exactly()
    assert {path.name: path.stat().st_ino for path in (mount.pfs / "x" / "b").iterdir()} == numbers


def test_a_directory_that_leaves_the_cache_in_the_middle_of_an_action(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: the action goes on with the descriptor that it has."""
    monkeypatch.setattr(pfs_tree, "CACHED_S", 0.0)
    mount.mkdir(b"d")
    for name in (b"renamed", b"one", b"other", b"linked", b"gone"):
        mount.put(b"d/" + name, name)
    mount.settle()
    mount.rename(b"d/renamed", b"d/new")
    mount.rename(b"d/one", b"d/other", namespace.EXCHANGE)
    mount.link(b"d/linked", b"d/link")
    mount.unlink(b"d/gone")
    mount.chmod(b"d/new", 0o600)
    mount.settle_exactly()
    assert mount.troubles() == []


def test_it_holds_nothing_of_a_pfs_that_is_idle_or_fails(mount: Mount) -> None:
    """P1: the PFS can be unmounted, and mounted again after a failure that needs it."""

    def list_held() -> list[str]:
        held = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return [path for path in held if path.startswith(str(mount.pfs))]

    mount.mkdir(b"d")
    mount.put(b"d/f", b"data")
    flow = mount.write_back()
    run_until_idle(flow)
    assert list_held() == []
    mount.put(b"d/g", b"data")
    with pytest.MonkeyPatch.context() as patch:
        inject_fault(patch, "write_back:put=EIO@*")
        with pytest.raises(TierUnavailable):
            run_until_idle(flow)
        assert list_held() == []
    mount.settle_exactly(flow)


def test_a_pfs_that_is_not_there_is_named_with_a_remedy(mount: Mount) -> None:
    """P11: as after an unmount of a filesystem in which `pfs=` is a directory."""
    mount.put(b"f", b"data")
    flow = mount.write_back()
    run_until_idle(flow)
    mount.put(b"g", b"data")
    mount.pfs.rename(mount.pfs.with_name("elsewhere"))
    with pytest.raises(TierUnavailable, match=r"/pfs to the PFS failed: No such file") as failure:
        run_until_idle(flow)
    assert failure.value.remedy == "mount the PFS, or create its directory"
    mount.pfs.with_name("elsewhere").rename(mount.pfs)
    mount.settle_exactly(flow)


def test_a_directory_removed_and_made_again_is_the_new_one(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    mount.mkdir(b"d")
    mount.settle()
    before = (mount.pfs / "d").stat().st_ino
    mount.rmdir(b"d")
    mount.mkdir(b"d", 0o711)
    mount.settle_exactly()
    assert (mount.pfs / "d").stat().st_ino != before
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_what_is_made_and_removed_again_never_appears(mount: Mount) -> None:
    mount.put(b"lock", b"x")
    mount.put(b"step_1.tmp", b"weights")
    mount.unlink(b"lock")
    mount.rename(b"step_1.tmp", b"step_1")
    mount.settle_exactly()
    assert mount.db.value("SELECT count(*) FROM pfs_file") == 1


def test_the_old_file_stays_until_the_new_one_is_whole(mount: Mount) -> None:
    """P5: a file that is renamed over another one before its seal does not take that away."""
    mount.put(b"state.cpt", b"old")
    mount.settle()
    mount.seal_at_once = False
    content = mount.put(b"step.cpt", b"new")
    mount.rename(b"step.cpt", b"state.cpt")
    mount.put(b"later", b"must not overtake")
    flow = mount.write_back()
    run_until_idle(flow)
    assert flow.next_due_s() is not None
    assert mount.on_pfs() == {b"state.cpt": ("file", b"old", 0o644)}
    mount.seal(content)
    mount.seal(content + 1)
    mount.settle_exactly(flow)


@pytest.mark.parametrize("goes", [False, True])
def test_an_open_file_that_covers_another_one_takes_it_along_if_it_goes(mount: Mount, goes: bool) -> None:
    mount.put(b"final", b"old")
    mount.settle()
    content = mount.put(b"tmp", b"new", closed=False)
    mount.rename(b"tmp", b"final")
    if goes:
        mount.rename(b"final", b"elsewhere")
    mount.settle()
    assert mount.on_pfs() == ({} if goes else {b"final": ("file", b"old", 0o644)})
    mount.close(content, 3)
    mount.settle_exactly()


def test_a_reopened_content_is_left_to_its_next_close(mount: Mount) -> None:
    content = mount.put(b"log", b"one\n")
    mount.append(b"log", b"two\n", closed=False)
    mount.settle()
    assert mount.on_pfs() == {}
    mount.close(content, 8)
    mount.settle_exactly()
    mount.append(b"log", b"three\n")
    mount.settle_exactly()


def test_every_name_of_a_file_shows_its_new_bytes(mount: Mount) -> None:
    mount.put(b"a", b"first")
    mount.link(b"a", b"b")
    mount.mkdir(b"d")
    mount.link(b"b", b"d/c")
    mount.settle_exactly()
    assert len({(mount.pfs / name).stat().st_ino for name in ("a", "b", "d/c")}) == 1, "they are links"
    mount.put(b"b", b"second")
    mount.settle_exactly()
    assert len({(mount.pfs / name).stat().st_ino for name in ("a", "b", "d/c")}) == 1
    mount.unlink(b"a")
    mount.settle_exactly()
    assert summary.get_level(mount.db, mount.number(b"b")) is Level.PFS


def test_a_pfs_without_links_gets_copies(mount: Mount, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    mount.put(b"a", b"bytes")
    mount.settle()
    mount.link(b"a", b"b")
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(95, "no links here")))
    mount.settle()
    assert mount.on_pfs() == mount.tree() and "a copy is made instead" in caplog.text


def test_a_file_that_got_its_times_under_a_name_that_went_is_known_under_the_other(mount: Mount) -> None:
    mount.put(b"a", b"bytes")
    mount.link(b"a", b"b")
    mount.settle()
    mount.utime(b"a", 2**62)
    mount.unlink(b"a")
    mount.settle()
    mount.put(b"c", b"new")
    mount.rename(b"c", b"b")
    mount.settle_exactly()


def test_a_file_replaced_while_its_times_are_set_is_not_an_external_change(mount: Mount) -> None:
    """The times are those of the moment when they are set: they may be later than what the file was made with."""
    mount.put(b"a", b"bytes")
    mount.link(b"a", b"b")
    mount.chmod(b"a", 0o600)
    mount.put(b"c", b"new")
    mount.rename(b"c", b"a")

    def touch(label: str) -> None:
        if label == "write_back:written_down":
            mount.utime(b"b", 2**62)

    with intercepted(touch):
        mount.write_back().step()
    mount.settle_exactly()


def test_exchange(mount: Mount) -> None:
    mount.put(b"file", b"data")
    mount.mkdir(b"d")
    mount.put(b"d/inside", b"more")
    mount.settle()
    mount.rename(b"file", b"d", namespace.EXCHANGE)
    mount.settle_exactly()
    content = mount.put(b"open", b"not yet", closed=False)
    mount.rename(b"open", b"d", namespace.EXCHANGE)
    mount.settle()
    assert mount.on_pfs()[b"open"] == ("file", b"data", 0o644)
    mount.close(content, 7)
    mount.settle_exactly()


def test_a_directory_is_exchanged_with_what_is_not_there_yet(mount: Mount) -> None:
    """What the new file covered went with its name: it is no stranger's, and none is kept beside the directory (P6)."""
    mount.put(b"file", b"old")
    mount.mkdir(b"d")
    mount.settle()
    content = mount.put(b"new", b"not yet", closed=False)
    mount.rename(b"new", b"file")
    mount.rename(b"d", b"file", namespace.EXCHANGE)
    mount.settle()
    assert set(mount.on_pfs()) == {b"file"} and mount.on_pfs()[b"file"][0] == "directory"
    mount.close(content, 7)
    mount.settle_exactly()


def test_exchange_where_the_pfs_cannot(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "exchange", Mock(side_effect=OSError(22, "not here")))
    mount.put(b"a", b"1")
    mount.put(b"b", b"2")
    mount.settle()
    mount.rename(b"a", b"b", namespace.EXCHANGE)
    mount.settle_exactly()


def test_holes_stay_holes(mount: Mount) -> None:
    content = mount.put(b"sparse", b"", closed=False)
    path = mount.path(content)
    with open(path, "r+b") as file:
        file.truncate(64 * 1024 * 1024)
        file.seek(32 * 1024 * 1024)
        file.write(b"island")
    mount.close(content, 64 * 1024 * 1024)
    mount.settle()
    found = (mount.pfs / "sparse").stat()
    assert found.st_size == 64 * 1024 * 1024 and found.st_blocks * 512 < 1024 * 1024
    assert (mount.pfs / "sparse").read_bytes() == path.read_bytes()


def test_an_fsynced_open_file_is_published_as_it_is(mount: Mount) -> None:
    """H1: what mdrun has fsynced survives although the file stays open; its close replaces it."""
    content = mount.put(b"md.log", b"step 1\n", closed=False)
    mount.synced(content)
    mount.settle()
    row = pfs_state.get_published(mount.db, mount.number(b"md.log"))
    assert mount.on_pfs() == {b"md.log": ("file", b"step 1\n", 0o644)} and row is not None and row.is_complete is False
    assert summary.get_level(mount.db, mount.number(b"md.log")) is Level.LOCAL
    mount.close(content, 7)
    mount.settle()
    row = pfs_state.get_published(mount.db, mount.number(b"md.log"))
    assert row is not None and row.is_complete is True
    mount.exact()


def test_a_large_open_file_waits_for_its_turn(mount: Mount) -> None:
    """A copy after each fsync of a file that takes long to copy would leave no time for the others."""
    content = mount.put(b"traj.trr", b"frame 1", closed=False)
    flow = mount.write_back()
    flow._pacing.record_duration(content, 1000.0)
    mount.synced(content)
    mount.settle(flow)
    due_s = flow.next_due_s()
    assert mount.on_pfs() == {} and due_s is not None and due_s > 100
    flow.retry_now()
    assert flow.next_due_s() == 0.0
    mount.settle(flow)
    assert mount.on_pfs() == {b"traj.trr": ("file", b"frame 1", 0o644)} and flow.next_due_s() is None


def test_the_same_bytes_are_not_copied_again(mount: Mount) -> None:
    """Opened for writing and closed again: the next generation, but nothing to write."""
    mount.put(b"file", b"data")
    mount.settle()
    before = (mount.pfs / "file").stat()
    mount.append(b"file", b"")
    mount.settle_exactly()
    assert (mount.pfs / "file").stat().st_ino == before.st_ino
    assert summary.get_level(mount.db, mount.number(b"file")) is Level.PFS
    mount.put(b"file", b"data")
    mount.put(b"file", b"other")
    mount.put(b"file", b"data")
    mount.settle_exactly()
    assert summary.get_level(mount.db, mount.number(b"file")) is Level.PFS


def test_a_pfs_with_room_for_some_takes_these(mount: Mount) -> None:
    for number in range(16):
        mount.put(b"%02d" % number, b"x")
    calls = []

    def full(label: str) -> None:
        if label == "write_back:syncfs":
            calls.append(label)
            if len(calls) < 3:
                raise OSError(28, "no room for all of them")

    flow = mount.write_back()
    with intercepted(full):
        while not mount.on_pfs():
            assert flow.step() is True
    assert len(mount.on_pfs()) == 4
    mount.settle_exactly(flow)


def test_a_mapped_file_does_not_hold_up_the_others_for_ever(mount: Mount) -> None:
    mount.seal_at_once = False
    mapped = mount.put(b"mapped", b"m")
    other = mount.put(b"other", b"o")
    mount.seal(other)
    with mount.db.transaction():
        mount.db.run("UPDATE content SET closed_ns = 1")
        mount.db.run("UPDATE journal SET at_ns = 1")
    flow = mount.write_back()
    run_until_idle(flow)
    assert mount.on_pfs() == {b"mapped": ("file", b"m", 0o644), b"other": ("file", b"o", 0o644)}
    row = pfs_state.get_published(mount.db, mount.number(b"mapped"))
    assert row is not None and row.is_complete is False, "its seal is still to come"
    mount.seal(mapped)
    mount.settle_exactly(flow)


def test_a_bad_copy_is_quarantined_and_another_one_used(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    """P4."""
    content = mount.put(b"file", b"x" * 10_000)
    mount.db.run("INSERT INTO copy (content, tier, state, verified_ns) VALUES (?, 'nvme', 1, 1)", content)
    mount.path(content, Tier.NVME).write_bytes(b"x" * 10_000)
    mount.spoil(content, Tier.RAM)
    mount.settle()
    assert (mount.pfs / "file").read_bytes() == b"x" * 10_000
    assert mount.copies(content) == {Tier.RAM: CopyState.QUARANTINED, Tier.NVME: CopyState.GOOD}
    assert "the copy in ram is quarantined: its digest differs" in caplog.text


def test_a_file_whose_last_copy_is_bad_is_lost_and_never_published(mount: Mount) -> None:
    content = mount.put(b"file", b"x" * 10_000)
    mount.spoil(content, Tier.RAM)
    mount.put(b"next", b"goes on")
    mount.settle()
    assert mount.on_pfs() == {b"next": ("file", b"goes on", 0o644)}
    assert mount.state(content) is ContentState.LOST


def test_a_file_that_is_overwritten_just_before_its_turn_is_not_called_lost(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    """Its content was planned, and then doomed and dropped because its successor is sealed."""
    mount.put(b"first", b"1")
    former = mount.put(b"file", b"former")

    def overwritten(label: str) -> None:
        if label == "write_back:create" and mount.state(former) is ContentState.SEALED:
            mount.put(b"file", b"latter")
            Reclaim(mount.db, mount.tiers, mount.config, mount.told).step()
            assert mount.state(former) is None

    flow = mount.write_back()
    with caplog.at_level(logging.WARNING), intercepted(overwritten):
        mount.settle(flow)
    mount.exact()
    assert caplog.messages == []


@pytest.mark.parametrize("tier", [Tier.NVME, Tier.PFS])
def test_other_tiers_are_sources_too(mount: Mount, tier: Tier) -> None:
    mount.put(b"file", b"data" * 1000, tier=tier)
    mount.settle()
    assert mount.on_pfs()[b"file"][1] == b"data" * 1000


def test_a_catalog_that_gets_a_pfs_writes_everything_back(tmp_path: Path) -> None:
    mount = Mount(tmp_path)
    mount.db.is_journalled = False
    mount.mkdir(b"d")
    mount.put(b"d/f", b"data")
    mount.link(b"d/f", b"g")
    mount.symlink(b"s", b"d")
    mount.db.is_journalled = True
    mount.settle_exactly()


def test_what_lies_only_on_the_pfs_is_not_given_up(mount: Mount) -> None:
    """P11: files were written without a PFS; a read-only mount has met it since."""
    content = mount.put(b"file", b"data")
    mount.settle()
    with mount.db.transaction():
        copies.delete_copy(mount.db, content, Tier.RAM)
        mount.db.run("DELETE FROM meta WHERE key = 'pfs'")
    mount.db.is_journalled = False
    mount.put(b"earlier", b"data")
    mount.db.is_journalled = True
    with pytest.raises(ConfigError, match="only on the PFS"):
        mount.write_back().step()
    assert pfs_state.get_published(mount.db, mount.number(b"file")) is not None


def test_a_catalog_does_not_go_on_without_its_pfs(mount: Mount) -> None:
    """P11: what changes meanwhile would never be told to it."""
    journal.require_no_pfs(mount.db, mount.root)
    mount.write_back().prepare()
    with pytest.raises(ConfigError, match="belong to a PFS") as refusal:
        journal.require_no_pfs(mount.db, mount.root)
    assert "pfs=" in refusal.value.remedy


def test_what_fails_first_does_not_hold_back_what_came_before(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (b"a", b"b", b"c", b"d"):
        mount.put(name, name)
    inject_fault(monkeypatch, "write_back:create=ENOSPC@3")
    flow = mount.write_back()
    while not mount.on_pfs():
        assert flow.step() is True
    assert set(mount.on_pfs()) == {b"a", b"b"}
    inject_fault(monkeypatch, "write_back:create=ENOSPC@*")
    with pytest.raises(TierUnavailable, match="write-back of c to the PFS failed") as failure:
        flow.step()
    assert "room" in failure.value.remedy and failure.value.errno == 28
    inject_fault(monkeypatch, "")
    mount.settle_exactly(flow)


def test_a_long_name_and_a_deep_path(mount: Mount) -> None:
    parent = ROOT
    for _ in range(300):
        with mount.db.transaction():
            parent = namespace.create(mount.db, parent, b"d" * 12, stat.S_IFDIR | 0o755, uid=0, gid=0).id
    mount.put(b"n" * 255, b"long")
    mount.settle(steps=20_000)
    assert (mount.pfs / ("n" * 255)).read_bytes() == b"long"
    fd, depth = os.open(mount.pfs, os.O_RDONLY), 0
    while True:
        try:
            below = os.open("d" * 12, os.O_RDONLY, dir_fd=fd)
        except FileNotFoundError:
            break
        os.close(fd)
        fd, depth = below, depth + 1
    os.close(fd)
    assert depth == 300
    assert mount.db.value("SELECT count(*) FROM pfs_entry WHERE parent = ?", ROOT) == 2


@pytest.mark.parametrize(("digest", "count"), [(b"other", 1), (None, 0)])
def test_a_content_of_the_generation_that_the_pfs_shows_of_another_node_is_missing_there(
    mount: Mount, digest: bytes | None, count: int
) -> None:
    """P3: an island and another node wrote one generation each. What was imported has no digest, and is the same."""
    mount.put(b"f", b"data")
    mount.settle()
    mount.db.change("UPDATE pfs_file SET digest = ?", digest)
    assert journal.insert_missing(mount.db, 10) == count
    assert bool(pfs_state.find_unpublished(mount.db, 0)) == bool(count)
