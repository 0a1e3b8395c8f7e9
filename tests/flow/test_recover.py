"""P5, P7, P8: after a crash or a reboot the catalog lists only copies that exist. Lost files are named, never empty."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from local_node import Node, in_process

from ckptfs.catalog import contents, copies, database, namespace, summary
from ckptfs.errors import CatalogDamaged
from ckptfs.flow.recover import Recover
from ckptfs.flow.seal import Seal
from ckptfs.model import ROOT, ContentState, CopyState, Tier
from ckptfs.tiers import storage
from ckptfs.tiers.storage import Tiers


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    recover(made)
    return made


def recover(node: Node) -> None:
    Recover(node.db, node.tiers, node.told).run()


def seal(node: Node) -> None:
    Seal(node.db, node.tiers, node.config, node.told).step()


def lose(node: Node, tier: Tier) -> None:
    """A reboot, or a new device."""
    root = node.tiers[tier].root
    for name in ("contents", "tier-id"):
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    node.tiers.close()
    node.tiers = Tiers.from_config(node.config)


def test_when_nothing_happened_nothing_changes(node: Node) -> None:
    contents = [node.make(b"closed", b"1"), node.make(b"open", b"22", closed=False), node.make(b"nvme", b"3", tier=Tier.NVME)]
    before = [(node.state(content), node.copies(content)) for content in contents]
    recover(node)
    assert [(node.state(content), node.copies(content)) for content in contents] == before
    assert node.told.inodes == []


def test_a_file_that_the_mount_is_making_keeps_its_copy(node: Node) -> None:
    """P5, P8: outside RAM, the mount inserts the row of a copy before its file, and a mover may start in between."""
    with node.db.transaction():
        inode = namespace.create(node.db, ROOT, b"file", 0o100644, uid=0, gid=0, allow_unimported=True).id
        content = contents.insert_reserved_content(node.db, Tier.NVME)
    recover(node)
    os.close(node.tiers[Tier.NVME].create(content))
    with node.db.transaction():
        contents.insert_content(node.db, inode, Tier.NVME, reserved_content=content)
    recover(node)
    assert node.copies(content) == {Tier.NVME: CopyState.GOOD} and node.state(content) is ContentState.OPEN


def end_cleanly(node: Node) -> None:
    """A clean end of the daemon, and the next start."""
    database.record_clean_end(node.db)
    assert database.check_file(node.db.path)
    database.record_start(node.db, ended_cleanly=True)


def test_after_a_clean_end_the_files_of_a_tier_are_not_compared_and_after_a_kill_they_are(node: Node) -> None:
    content, unfinished = node.make_sealed(b"file", b"data"), node.make(b"half", b"h")
    node.db.run("UPDATE copy SET state = 0 WHERE content = ?", unfinished)
    node.tiers[Tier.RAM].remove(content)
    end_cleanly(node)
    recover(node)
    assert node.copies(content) == {Tier.RAM: CopyState.GOOD}, "a million of files cost nothing"
    assert node.copies(unfinished) == {}, "what was cut off is removed always"
    assert not database.check_file(node.db.path), "from now on an end is a crash until it is recorded"
    recover(node)
    assert node.copies(content) == {} and node.state(content) is ContentState.LOST


def test_a_start_that_dies_before_its_recovery_leaves_no_clean_end(node: Node) -> None:
    content = node.make_sealed(b"file", b"data")
    node.tiers[Tier.RAM].remove(content)
    end_cleanly(node)
    database.record_start(node.db, ended_cleanly=database.check_file(node.db.path))
    recover(node)
    assert node.state(content) is ContentState.LOST


def test_a_replaced_tier_is_checked_after_a_clean_end_too(node: Node) -> None:
    content = node.make_sealed(b"file", b"data")
    lose(node, Tier.RAM)
    end_cleanly(node)
    recover(node)
    assert node.state(content) is ContentState.LOST


@pytest.mark.parametrize("is_clean", [True, False])
def test_damage_is_looked_for_after_a_crash_only(is_clean: bool, node: Node) -> None:
    if is_clean:
        database.record_clean_end(node.db)
    node.db.run("PRAGMA wal_checkpoint(TRUNCATE)")
    page = node.db.value("SELECT rootpage FROM sqlite_master WHERE name = 'entry_child'")
    node.db.close()
    with open(node.db.path, "r+b") as file:
        file.seek((page - 1) * database.PAGE_BYTES)
        file.write(b"\xff" * database.PAGE_BYTES)
    if is_clean:
        assert database.check_file(node.db.path)
    else:
        with pytest.raises(CatalogDamaged, match="damaged"):
            database.check_file(node.db.path)


@pytest.mark.parametrize(("value", "is_refused"), [(b"a_long_name", True), (b"one_target", False)])
def test_a_bit_that_flips_after_a_clean_end_is_noticed_at_the_start(
    node: Node, value: bytes, is_refused: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P4: a name that differs from its index refuses the start. Another value is logged, and the tiers are checked."""
    node.make_sealed(b"a_long_name", b"data")
    node.db.run("UPDATE inode SET target = ? WHERE id = (SELECT max(id) FROM inode)", b"one_target")
    path = node.db.path

    def end() -> None:
        database.record_clean_end(node.db)
        node.db.run("PRAGMA wal_checkpoint(TRUNCATE)")
        node.db.close()
        database.record_digest(path)

    end()
    assert database.check_file(path) and not caplog.records
    end()
    whole = path.read_bytes()
    place = whole.index(value)
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
    if is_refused:
        with pytest.raises(CatalogDamaged, match="damaged"):
            database.check_file(path)
        return
    recorded = path.with_name("catalog.db.digest").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(database, "DIGEST_BYTES_MAX", path.stat().st_size - 1)
        assert database.check_file(path), "a large catalog was read"
    path.with_name("catalog.db.digest").write_text(recorded)
    assert not database.check_file(path) and "not as the last daemon left it" in caplog.text


def test_a_lost_ram_leaves_what_is_elsewhere_and_names_the_rest(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    names = (b"on_nvme", b"on_pfs", b"sealed", b"closed", b"work_area")
    contents = {name: node.make(name, name, tier=Tier.PFS if name == b"work_area" else Tier.RAM) for name in names[:3] + names[4:]}
    seal(node)
    contents[b"closed"] = node.make(b"closed", b"closed")
    node.copy_to_tier(contents[b"on_nvme"], Tier.NVME)
    node.publish(contents[b"on_pfs"])
    lose(node, Tier.RAM)
    recover(node)
    states = {name: node.state(content) for name, content in contents.items()}
    assert states == {
        b"on_nvme": ContentState.SEALED, b"on_pfs": ContentState.SEALED, b"work_area": ContentState.SEALED,
        b"sealed": ContentState.LOST, b"closed": ContentState.LOST,
    }  # fmt: skip
    assert node.copies(contents[b"on_nvme"]) == {Tier.NVME: CopyState.GOOD}
    assert node.copies(contents[b"on_pfs"]) == {}
    lost = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert sorted(message.split(":")[0] for message in lost) == ["closed", "sealed"]
    assert set(node.told.inodes) == {node.inode(contents[b"sealed"]), node.inode(contents[b"closed"])}


def test_an_open_file_falls_back_to_its_former_generation(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    old = node.make_sealed(b"run.cpt", b"old")
    node.copy_to_tier(old, Tier.NVME)
    inode = node.inode(old)
    new = node.write(inode, b"half of the n", closed=False)
    lose(node, Tier.RAM)
    recover(node)
    assert node.shown(inode) == old and node.state(old) is ContentState.SEALED
    assert node.state(new) is ContentState.DOOMED
    assert node.db.value("SELECT size FROM inode WHERE id = ?", inode) == 3
    assert "run.cpt: still open when its tier was lost; showing its previous generation" in caplog.text


def test_an_open_file_falls_back_to_what_the_pfs_shows(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    content = node.make_sealed(b"md.log", b"step 1")
    node.publish(content)
    node.reopen(content, Tier.RAM)
    lose(node, Tier.RAM)
    recover(node)
    inode = node.inode(content)
    assert node.shown(inode) is None and node.db.value("SELECT size FROM inode WHERE id = ?", inode) == 6
    assert node.state(content) is ContentState.DOOMED
    assert "md.log: still open" in caplog.text


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_file_that_was_not_sealed_yet_shows_what_it_had_fsynced(node: Node, is_closed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """P3: fsync=pfs has promised it. The former generation that still lies on NVMe is older."""
    old = node.make_sealed(b"md.log", b"old")
    node.copy_to_tier(old, Tier.NVME)
    inode = node.inode(old)
    new = node.write(inode, b"step 1" if is_closed else b"step 1, step 2", closed=is_closed)
    node.publish(old)
    generation = node.db.value("SELECT generation FROM content WHERE id = ?", new)
    node.db.run("UPDATE pfs_file SET generation = ?, complete = 0, size = 6 WHERE inode = ?", generation, inode)
    lose(node, Tier.RAM)
    recover(node)
    assert node.shown(inode) is None and node.db.value("SELECT size FROM inode WHERE id = ?", inode) == 6
    assert node.db.value("SELECT complete FROM pfs_file WHERE inode = ?", inode) == 1
    assert node.state(new) is ContentState.DOOMED and node.state(old) is ContentState.DOOMED
    assert f"md.log: {'not sealed yet' if is_closed else 'still open'} when its tier was lost; showing what is on the PFS" in caplog.text


def test_an_open_file_with_nothing_to_fall_back_to_is_lost_and_not_empty(node: Node) -> None:
    content = node.make(b"new", b"data", closed=False)
    lose(node, Tier.RAM)
    recover(node)
    assert node.state(content) is ContentState.LOST and node.shown(node.inode(content)) == content


def test_a_closed_generation_that_is_lost_is_not_replaced_by_an_older_one(node: Node) -> None:
    old = node.make_sealed(b"file", b"old")
    node.copy_to_tier(old, Tier.NVME)
    new = node.write(node.inode(old), b"new")
    lose(node, Tier.RAM)
    recover(node)
    assert node.state(new) is ContentState.LOST and node.shown(node.inode(old)) == new


def test_contents_that_no_file_shows_are_dropped_in_silence(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    old = node.make(b"file", b"old")
    new = node.write(node.inode(old), b"new", tier=Tier.NVME)
    lose(node, Tier.RAM)
    recover(node)
    assert node.state(old) is ContentState.DOOMED and node.state(new) is ContentState.CLOSED
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_what_is_written_into_a_new_ram_before_the_mover_recovers_stays(node: Node) -> None:
    """The mount adopts the tiers too, so the mover cannot take its new contents for old ones."""
    old = node.make(b"old", b"old")
    lose(node, Tier.RAM)
    storage.adopt_tiers(node.db, node.tiers)
    new = node.make(b"new", b"new")
    recover(node)
    assert node.copies(new) == {Tier.RAM: CopyState.GOOD} and node.state(new) is ContentState.CLOSED
    assert node.state(old) is ContentState.LOST


def test_the_first_adoption_forgets_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    content = node.make(b"file", b"data")
    recover(node)
    assert node.copies(content) == {Tier.RAM: CopyState.GOOD}


def test_unfinished_copies_go(node: Node) -> None:
    content = node.make_sealed(b"file", b"data")
    assert copies.insert_filling_copy(node.db, node.row(content), Tier.NVME)
    node.tiers[Tier.NVME].create(content)
    recover(node)
    assert node.copies(content) == {Tier.RAM: CopyState.GOOD} and node.files(Tier.NVME) == set()


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("data", [b"", b"dat", b"data+"])
def test_a_file_of_the_wrong_size_does_not_count(node: Node, sealed: bool, data: bytes) -> None:
    """What a power cut leaves of a file on NVMe that was not synced."""
    content = node.make(b"file", b"data", tier=Tier.NVME)
    if sealed:
        seal(node)
    node.path(content, Tier.NVME).write_bytes(data)
    recover(node)
    assert node.copies(content) == {Tier.NVME: CopyState.QUARANTINED}
    assert node.state(content) is ContentState.LOST


def test_a_tier_that_is_no_longer_configured_keeps_its_rows(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    content = node.make(b"file", b"data", tier=Tier.NVME)
    nvme = node.config.nvme
    node.configure(nvme=None)
    recover(node)
    assert "nvme: 1 contents cannot be reached" in caplog.text
    node.configure(nvme=nvme)
    recover(node)
    assert node.copies(content) == {Tier.NVME: CopyState.GOOD} and node.state(content) is ContentState.CLOSED


def unmount(node: Node) -> Callable[[], None]:
    """NVMe's device is not mounted: its mountpoint is an empty directory. Gives the act that mounts it again."""
    nvme, away = node.root / "nvme", node.root / "device"
    nvme.rename(away)
    nvme.mkdir()
    node.tiers = Tiers.from_config(node.config)

    def mount() -> None:
        shutil.rmtree(nvme)
        away.rename(nvme)
        node.tiers = Tiers.from_config(node.config)

    return mount


def test_an_nvme_that_is_not_mounted_is_left_out_and_comes_back(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    content = node.make(b"file", b"data", tier=Tier.NVME)
    seal(node)
    mount = unmount(node)
    recover(node)
    assert Tier.NVME not in node.tiers and "runs without it" in caplog.text
    assert node.state(content) is ContentState.SEALED, "it is not lost, only not there"
    assert summary.list_troubles(node.db, "nvme")
    mount()
    recover(node)
    assert node.data(content, Tier.NVME) == b"data" and node.copies(content) == {Tier.NVME: CopyState.GOOD}


def test_an_nvme_that_was_given_up_is_replaced(node: Node) -> None:
    content = node.make(b"file", b"data", tier=Tier.NVME)
    unmount(node)
    (node.root / "nvme" / storage.GIVEN_UP).touch()
    recover(node)
    assert node.state(content) is ContentState.LOST and Tier.NVME in node.tiers
    assert copies.get_tier_uuid(node.db, Tier.NVME) == node.tiers[Tier.NVME].uuid


def test_another_nvme_is_taken_at_once_when_nothing_lies_only_on_the_former(node: Node) -> None:
    content = node.make_sealed(b"file", b"data")
    node.copy_to_tier(content, Tier.NVME)
    node.publish(content)
    unmount(node)
    recover(node)
    assert Tier.NVME in node.tiers and node.copies(content) == {Tier.RAM: CopyState.GOOD}


def test_a_tier_that_fails_now_is_believed(node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    on_nvme, gone = node.make(b"nvme", b"1", tier=Tier.NVME), node.make(b"gone", b"2")
    node.tiers[Tier.RAM].remove(gone)
    monkeypatch.setattr(node.tiers[Tier.NVME], "contents", Mock(side_effect=OSError(5, "Input/output error")))
    recover(node)
    assert node.copies(on_nvme) == {Tier.NVME: CopyState.GOOD} and node.state(on_nvme) is ContentState.CLOSED
    assert node.state(gone) is ContentState.LOST
    assert "not checked: " in caplog.text


@pytest.mark.crash
@pytest.mark.parametrize("label", ["recover:adopt", "recover:filling", "recover:missing", "recover:fate", "tier:remove"])
@pytest.mark.parametrize("action", ["kill", "kill-after"])
def test_dying_in_recovery_and_recovering_again_ends_the_same(tmp_path: Path, label: str, action: str) -> None:
    node = Node(tmp_path)
    recover(node)
    kept = node.make(b"kept", b"kept", tier=Tier.NVME)
    published, lost, gone = node.make(b"published", b"p"), node.make(b"lost", b"l"), node.make(b"gone", b"g", tier=Tier.NVME)
    seal(node)
    node.publish(published)
    assert copies.insert_filling_copy(node.db, node.row(published), Tier.NVME)
    os.close(node.tiers[Tier.NVME].create(published))
    node.tiers[Tier.NVME].remove(gone)
    lose(node, Tier.RAM)
    script = """
from ckptfs.flow.recover import Recover
Recover(node.db, node.tiers, node.told).run()
"""
    assert in_process(tmp_path, script, fault=f"{label}={action}") == -9
    recover(node)
    assert node.copies(kept) == {Tier.NVME: CopyState.GOOD} and node.copies(published) == {}
    states = [node.state(content) for content in (kept, published, lost, gone)]
    assert states == [ContentState.SEALED, ContentState.SEALED, ContentState.LOST, ContentState.LOST]
