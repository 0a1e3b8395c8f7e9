"""P1, P10: a tier that dies while it is in use gets no new files, is let go, and is used again when it returns."""

import contextlib
import errno
import logging
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from local_node import Node, inject_fault

from ckptfs import limits
from ckptfs.errors import NoSpace
from ckptfs.model import Tier
from ckptfs.tiers import local_copies, storage
from ckptfs.tiers.growth import GrowthTable
from ckptfs.tiers.storage import Tiers

ERRNOS = ["EIO", "EROFS", "ESTALE", "ENODEV", "ESHUTDOWN"]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(tmp_path)
    storage.adopt_tiers(made.db, made.tiers)
    monkeypatch.setattr(Tiers, "get_capacity", lambda tiers, tier, prepared_file=None: tiers[tier].get_capacity())
    return made


def let_time_pass(node: Node) -> None:
    node.tiers[Tier.NVME]._failed_s = -1e9


@pytest.mark.parametrize("code", ERRNOS)
def test_new_files_go_elsewhere_until_it_works(node: Node, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """For each error of a disk. A while later one file tries it, and the next error counts anew."""
    nvme = node.tiers[Tier.NVME]
    assert node.tiers.choose_tier(excluded={Tier.RAM}) is Tier.NVME
    for _ in range(2):
        inject_fault(monkeypatch, f"tier:create={code}@*")
        with pytest.raises(OSError, match="injected"):
            nvme.create(7)
        assert not nvme.is_usable and nvme.failure.startswith(code)
        assert node.tiers.choose_tier(excluded={Tier.RAM}) is Tier.PFS
        let_time_pass(node)
        assert node.tiers.choose_tier(excluded={Tier.RAM}) is Tier.NVME
    inject_fault(monkeypatch, "")
    os.close(nvme.create(7))
    assert nvme.is_usable and not nvme.failure


@pytest.mark.parametrize("answer", ["", "ENOSPC", "EIO"])
def test_one_that_does_not_answer_gets_no_file_until_a_call_is_answered(node: Node, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """However long that takes. A file that would only wait for it does not try."""
    nvme = node.tiers[Tier.NVME]
    nvme.record_silence()
    monkeypatch.setattr(limits, "TIER_RETRY_S", -1.0)
    assert nvme.is_silent and not nvme.is_usable and nvme.failure.startswith("ETIMEDOUT")
    assert node.tiers.choose_tier(excluded={Tier.RAM}) is Tier.PFS
    inject_fault(monkeypatch, f"tier:create={answer}" if answer else "")
    with pytest.raises(OSError, match="injected") if answer else contextlib.nullcontext():
        os.close(nvme.create(7))
    assert nvme.is_usable and not nvme.is_silent
    assert bool(nvme.failure) == bool(answer)


def test_errors_of_one_file_say_nothing_of_the_tier(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    nvme = node.tiers[Tier.NVME]
    with pytest.raises(FileNotFoundError):
        nvme.open(12345)
    for code in ("ENOSPC", "EDQUOT", "EMFILE"):
        inject_fault(monkeypatch, f"tier:create={code}")
        with pytest.raises(OSError, match="injected"):
            nvme.create(7)
        assert nvme.is_usable


def test_a_root_that_is_gone_is_let_go_and_taken_again(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """An empty mountpoint and another device at its place are never taken for it."""
    content = node.make(b"file", b"bytes", tier=Tier.NVME)
    nvme, away = node.tiers[Tier.NVME], node.root / "away"
    assert nvme.directory >= 0
    nvme.root.rename(away)
    nvme.record_failure(OSError(errno.EIO, "gone"))
    assert "away" not in os.readlink(f"/proc/self/fd/{nvme._directory}"), "the dead filesystem can be unmounted"
    for make in (lambda: None, nvme.root.mkdir, (nvme.root / "contents").mkdir):
        make()
        let_time_pass(node)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            nvme.open(content)
        assert nvme.get_capacity().total == 0 and not list(nvme.root.glob("*/*")), "nothing is made below a mountpoint"
    (nvme.root / "tier-id").write_text("other\n")
    let_time_pass(node)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        nvme.open(content)
    shutil.rmtree(nvme.root)
    away.rename(nvme.root)
    let_time_pass(node)
    assert node.data(content, Tier.NVME) == b"bytes"
    os.close(nvme.create(99))
    assert not nvme.failure
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "one death is one line"


def test_a_dead_disk_at_the_start_stops_nothing(node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """P8: the processes come up without it, and no copy is forgotten. A disk that was never used is refused (P11)."""
    content = node.make(b"file", b"bytes", tier=Tier.NVME)
    read_uuid = storage.TierStorage._read_uuid

    def dead(place: storage.TierStorage) -> str:
        if place.tier is Tier.NVME:
            raise OSError(errno.EIO, "Input/output error")
        return read_uuid(place)

    monkeypatch.setattr(storage.TierStorage, "_read_uuid", dead)
    tiers = Tiers.from_config(node.config)
    storage.adopt_tiers(node.db, tiers)
    assert "cannot be read until it works" in caplog.text
    assert set(node.copies(content)) == {Tier.NVME} and tiers.choose_tier() is Tier.RAM
    node.db.run("DELETE FROM tier WHERE name = 'nvme'")
    with pytest.raises(OSError, match="Input/output error"):
        storage.adopt_tiers(node.db, Tiers.from_config(node.config))


def test_a_disk_that_failed_must_take_a_file_before_it_works(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only disk answers every question of a probe."""
    nvme = node.tiers[Tier.NVME]
    nvme.probe()
    nvme.record_failure(OSError(errno.EROFS, "read-only"))
    inject_fault(monkeypatch, "health:write=EROFS")
    with pytest.raises(OSError, match="injected"):
        nvme.probe()
    assert nvme.failure
    nvme.probe()
    assert not nvme.failure and nvme.is_usable


def test_a_copy_reserves_its_space_where_nothing_else_keeps_the_budget(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: the mount sees at once what the mover is about to copy. A filesystem that cannot reserve is written all the same."""
    mover, nvme = (storage.TierStorage(Tier.NVME, node.config.nvme or node.root, budget_bytes=8 << 20) for _ in range(2))
    assert mover.get_capacity().total == 8 << 20
    os.close(mover.create(7))
    with open(node.path(7, Tier.NVME), "wb") as file:
        mover.reserve(file.fileno(), 6 << 20)
        assert os.fstat(file.fileno()).st_size == 0 and nvme.get_capacity().free <= 2 << 20
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)), nvme.growing(3 << 20):
            pass
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            mover.reserve(file.fileno(), 3 << 20)
        inject_fault(monkeypatch, "tier:reserve=EOPNOTSUPP")
        mover.reserve(file.fileno(), 1 << 20)


def test_the_copy_of_a_file_with_holes_takes_no_more_than_the_file(node: Node) -> None:
    """T2: a file that is written from its end has its bytes there, and so has the room of its copy."""
    nvme = storage.TierStorage(Tier.NVME, node.config.nvme or node.root, budget_bytes=8 << 20)
    assert nvme.get_capacity().total == 8 << 20
    content = node.make(b"backwards", b"", closed=False)
    with open(node.path(content), "r+b") as file:
        for offset in (8 << 20, 4 << 20):
            os.pwrite(file.fileno(), os.urandom(2 << 20), offset)
        os.close(local_copies.copy_open(file.fileno(), nvme, content))
    assert os.stat(node.path(content, Tier.NVME)).st_blocks * 512 <= 4 << 20


def test_two_processes_keep_one_budget(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """T2: neither has measured again since the other one wrote."""
    mover, mount = (storage.TierStorage(Tier.NVME, node.config.nvme or node.root, budget_bytes=8 << 20) for _ in range(2))
    os.close(mover.create(7))
    monkeypatch.setattr(storage.time, "monotonic", lambda: 100.0)
    assert mount.get_capacity().free == mover.get_capacity().free == 8 << 20
    with open(node.path(7, Tier.NVME), "wb") as file:
        with mount.growing(1 << 20):
            mover.reserve(file.fileno(), 4 << 20)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)), mount.growing(4 << 20):
            pass
        with mount.growing(2 << 20), pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            mover.reserve(file.fileno(), 2 << 20)
        assert os.fstat(file.fileno()).st_blocks * 512 == 4 << 20
    monkeypatch.setattr(storage.time, "monotonic", lambda: 200.0)
    assert mount.get_capacity().free == mover.get_capacity().free == 4 << 20, "what was given up is free again"


def test_a_disk_that_cannot_be_measured_leaves_no_growth_behind(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    nvme = storage.TierStorage(Tier.NVME, node.config.nvme or node.root, budget_bytes=8 << 20)
    assert nvme.get_capacity().free == 8 << 20
    with monkeypatch.context() as fault:
        fault.setattr(nvme, "_measure_used", Mock(side_effect=OSError(errno.EIO, "it fails")))
        with pytest.raises(OSError, match="it fails"), nvme.growing(6 << 20):
            pass
    with nvme.growing(6 << 20):
        pass


def test_a_process_that_died_leaves_no_growth_behind(tmp_path: Path) -> None:
    first, other, heir = (GrowthTable(tmp_path / "growth") for _ in range(3))
    other.announce(1)
    first.announce(5)
    assert other.read_totals() == (6, 0)
    first.close()  # As the kernel does.
    heir.announce(2)
    assert other.read_totals() == (8, 5)
    other.count_written(1)
    heir.count_written(2)
    assert heir.read_totals() == other.read_totals() == (8, 8)


def test_a_budget_holds_on_a_busy_machine(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: a measurement that has waited for a processor is repeated as soon as any other."""
    mover, mount = (storage.TierStorage(Tier.NVME, node.config.nvme or node.root, budget_bytes=8 << 20) for _ in range(2))
    now_s, stat = [100.0], mount.stat

    def stat_slowly(content: int) -> os.stat_result | None:
        now_s[0] += 1.0
        return stat(content)

    monkeypatch.setattr(storage.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(mount, "stat", stat_slowly)
    os.close(mover.create(7))
    assert mount.get_capacity().free == mover.get_capacity().free == 8 << 20
    now_s[0] += 1.0
    with open(node.path(7, Tier.NVME), "wb") as file:
        mover.reserve(file.fileno(), 6 << 20)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)), mount.growing(3 << 20):
            pass


def test_every_tier_that_fails_is_as_full(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    inject_fault(monkeypatch, "tier:create=EIO@*")
    with pytest.raises(OSError, match="injected"):
        node.tiers[Tier.NVME].create(7)
    with pytest.raises(NoSpace):
        node.tiers.choose_tier(excluded={Tier.RAM, Tier.PFS})
    assert limits.TIER_RETRY_S > 0
