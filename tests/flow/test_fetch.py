"""P4, P7, P10: a file on the PFS comes here with the digest that is known of it, or not at all."""

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from local_node import inject_fault
from pfs_world import World, bytes_here, corrupt, lose_copies
from write_back_world import intercepted

from ckptfs import digest, disk, limits, step_durations
from ckptfs.catalog import contents, mover_requests
from ckptfs.model import ContentState, Tier
from ckptfs.tiers import transfer
from ckptfs.tiers.storage import TierStorage

MIB = limits.MIB


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    (world.pfs / "d").mkdir()
    (world.pfs / "d" / "file").write_bytes(os.urandom(5 * MIB + 7))
    world.visit("", "d")
    return world


def test_an_imported_file_arrives_sealed_and_its_digest_is_kept(world: World) -> None:
    before = step_durations.get_histograms()[step_durations.FETCH].size_bytes
    answer = world.bring("d/file")
    assert (answer.state, answer.result) == (mover_requests.DONE, mover_requests.FETCHED)
    data = (world.pfs / "d" / "file").read_bytes()
    assert bytes_here(world, "d/file") == (Tier.RAM, data)
    content = contents.get_content(world.db, int(str(world.column("d/file", "content"))))
    assert content is not None and content.state is ContentState.SEALED
    running = digest.RunningDigest()
    running.update(data)
    assert (content.digest, content.block_digests) == running.finish()
    assert world.published("d/file", "digest") == content.digest and content.generation == world.published("d/file", "generation")
    assert world.bring("d/file").result == mover_requests.FETCHED
    assert step_durations.get_histograms()[step_durations.FETCH].size_bytes - before == len(data)
    world.check()


def test_an_evicted_file_comes_back_into_the_same_content(world: World) -> None:
    world.bring("d/file")
    content = world.column("d/file", "content")
    lose_copies(world, "d/file")
    assert world.bring("d/file").result == mover_requests.FETCHED
    assert world.column("d/file", "content") == content
    assert bytes_here(world, "d/file")[1] == (world.pfs / "d" / "file").read_bytes()
    world.check()


@pytest.mark.parametrize("evicted", [True, False])
@pytest.mark.parametrize("argument", ["", mover_requests.NEEDS_COPY])
def test_a_byte_that_changed_under_the_same_size_and_mtime_is_found(
    world: World, evicted: bool, argument: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.bring("d/file")
    lose_copies(world, "d/file")
    if not evicted:
        world.db.run("UPDATE inode SET content = NULL WHERE id = ?", world.inode("d/file"))
        world.db.run("DELETE FROM content")
    corrupt(world.pfs / "d" / "file")
    answer = world.bring("d/file", argument)
    assert (answer.state, answer.error) == (mover_requests.FAILED, 5)
    assert "d/file cannot be read" in caplog.text
    assert world.db.rows("SELECT * FROM copy") == [] and list(world.tiers[Tier.RAM].contents()) == []
    world.check()


def test_without_room_the_pfs_s_own_file_is_read_after_it_was_checked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.bring("d/file")
    lose_copies(world, "d/file")
    monkeypatch.setattr(world.tiers, "choose_tier", lambda *_, **__: Tier.PFS)
    world.db.run("UPDATE pfs_file SET checked_ns = 0")
    assert world.bring("d/file").result == mover_requests.DIRECT
    assert int(str(world.published("d/file", "checked_ns"))) > 0
    world.db.run("UPDATE pfs_file SET checked_ns = 0")
    corrupt(world.pfs / "d" / "file")
    assert world.bring("d/file").error == 5


def test_without_room_a_writer_gets_its_copy_in_the_pfs_s_work_area(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.tiers, "choose_tier", lambda *_, **__: Tier.PFS)
    assert world.bring("d/file", mover_requests.NEEDS_COPY).result == mover_requests.FETCHED
    assert bytes_here(world, "d/file") == (Tier.PFS, (world.pfs / "d" / "file").read_bytes())


def test_a_large_imported_file_is_read_in_place_when_space_is_short(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FETCH_WHOLE_BYTES", MIB)
    asked: list[int] = []
    monkeypatch.setattr(world.tiers, "choose_tier", lambda expected_bytes=0: asked.append(expected_bytes) or Tier.PFS)
    assert world.bring("d/file").result == mover_requests.DIRECT
    assert asked == [limits.FETCH_SPACE_RATIO * (5 * MIB + 7)]


def test_a_file_that_is_too_large_for_a_mount_costs_no_lane(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """P11: reading 7 EiB of holes took an hour, and nobody could kill who waited for it."""
    monkeypatch.setattr(limits, "FILE_BYTES_MAX", 5 * MIB)
    assert world.bring("d/file").error == errno.EFBIG


def test_a_file_that_changed_on_the_pfs_is_fetched_instead(world: World) -> None:
    world.bring("d/file")
    lose_copies(world, "d/file")
    (world.pfs / "d" / "file").write_bytes(b"newer")
    assert world.bring("d/file").result == mover_requests.FETCHED
    assert bytes_here(world, "d/file")[1] == b"newer" and world.column("d/file", "size") == 5
    world.check()


def test_a_file_that_was_removed_on_the_pfs_is_stale(world: World) -> None:
    (world.pfs / "d" / "file").unlink()
    inode = world.inode("d/file")
    answer = world.run(world.fetch, mover_requests.insert_request(world.db, mover_requests.FETCH, inode))
    assert (answer.state, answer.error) == (mover_requests.FAILED, 116)
    assert world.names("d") == set()
    world.check()


def test_a_file_that_is_rewritten_while_it_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = transfer.copy
    times = 0

    def disturbed(source: int, target: int, **named: object) -> object:
        nonlocal times
        result = real(source, target, **named)  # type: ignore[arg-type]
        times += 1
        if times == 1:
            (world.pfs / "d" / "file").write_bytes(b"newer")
        return result

    monkeypatch.setattr(transfer, "copy", disturbed)
    assert world.bring("d/file").result == mover_requests.FETCHED
    assert bytes_here(world, "d/file")[1] == b"newer"
    world.check()


def test_a_file_that_is_written_here_while_it_is_fetched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    inode = world.inode("d/file")
    real = transfer.copy

    def disturbed(source: int, target: int, **named: object) -> object:
        result = real(source, target, **named)  # type: ignore[arg-type]
        if world.column("d/file", "content") is None:
            mine = world.db.insert("INSERT INTO content (inode, generation, state) VALUES (?, 1, 0)", inode)
            world.db.run("INSERT INTO copy (content, tier, state) VALUES (?, 'ram', 1)", mine)
            world.db.run("UPDATE inode SET content = ?, generation = 1 WHERE id = ?", mine, inode)
        return result

    monkeypatch.setattr(transfer, "copy", disturbed)
    assert world.bring("d/file").result == mover_requests.FETCHED
    assert world.db.value("SELECT state FROM content WHERE id = ?", world.column("d/file", "content")) == 0
    assert list(world.tiers[Tier.RAM].contents()) == []


def test_an_empty_file_that_was_never_anywhere(world: World) -> None:
    world.db.run("DELETE FROM pfs_file")
    assert world.bring("d/file").result == mover_requests.FETCHED
    assert world.column("d/file", "content") is None


def test_a_sealed_generation_that_the_pfs_does_not_show_is_not_replaced_by_an_older_one(world: World) -> None:
    world.bring("d/file")
    lose_copies(world, "d/file")
    world.db.run("UPDATE content SET generation = generation + 1")
    assert world.bring("d/file").error == 5


def test_owner_and_holes(world: World) -> None:
    with open(world.pfs / "d" / "sparse", "wb") as file:
        file.truncate(64 * MIB)
        file.seek(32 * MIB)
        file.write(b"island")
    os.chmod(world.pfs / "d" / "sparse", stat.S_IRUSR)
    world.look("d")
    assert world.bring("d/sparse").result == mover_requests.FETCHED
    content = int(str(world.column("d/sparse", "content")))
    found = world.tiers[Tier.RAM].stat(content)
    assert found is not None and found.st_size == 64 * MIB and found.st_blocks * 512 < 8 * MIB


def test_several_at_once_and_askers_share(world: World) -> None:
    for number in range(6):
        (world.pfs / "d" / f"f{number}").write_bytes(os.urandom(MIB))
    world.look("d")
    asked = [mover_requests.insert_request(world.db, mover_requests.FETCH, world.inode(f"d/f{number}")) for number in range(6)]
    assert asked == [mover_requests.insert_request(world.db, mover_requests.FETCH, world.inode(f"d/f{number}")) for number in range(6)]

    def work() -> None:
        while world.fetch.step():
            pass

    with ThreadPoolExecutor(limits.FETCHES_MAX) as threads:
        for done in [threads.submit(work) for _ in range(limits.FETCHES_MAX)]:
            done.result(60)
    for number in range(6):
        assert bytes_here(world, f"d/f{number}")[1] == (world.pfs / "d" / f"f{number}").read_bytes()
    world.check()


def test_files_wait_for_a_lane_as_long_as_one_gets_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: a restart reads more and larger files than there are lanes. Those that come last do not fail for it."""
    monkeypatch.setattr(limits, "REQUEST_POLL_S", 0.0)
    for name in ("waits", "hangs"):
        (world.pfs / "d" / name).write_bytes(b"w")
    world.look("d")
    world.fetch._active_inodes.add(world.inode("d/hangs"))
    first, waits, hangs = (
        mover_requests.insert_request(world.db, mover_requests.FETCH, world.inode(f"d/{name}")) for name in ("file", "waits", "hangs")
    )
    assert world.fetch.step()
    rows = [mover_requests.get(world.db, request) for request in (first, waits, hangs)]
    assert [row is not None and row.state for row in rows] == [mover_requests.DONE, mover_requests.OPEN, mover_requests.OPEN]
    assert [row is not None and row.progress_ns > 0 for row in rows] == [True, True, False], "a lane speaks for itself and for who waits"


LABELS = [
    "tier:create", "pfs:open", "fetch:reserved", "fetch:read", "fetch:write", "fetch:truncate", "fetch:arrived", "fetch:answered",
]  # fmt: skip


@pytest.mark.parametrize("label", [label for label in LABELS if label not in ("tier:create", "fetch:answered")])
def test_an_error_is_answered_and_leaves_nothing(world: World, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_fault", f"{label}=EIO@*")
    assert world.bring("d/file").state == mover_requests.FAILED
    monkeypatch.setattr(disk, "_fault", "")
    assert list(world.tiers[Tier.RAM].contents()) == []
    world.check()
    assert world.bring("d/file").result == mover_requests.FETCHED


def test_a_file_is_read_on_the_pfs_if_ram_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_fault", "tier:create=EIO@*")
    assert world.bring("d/file").result == mover_requests.DIRECT
    assert list(world.tiers[Tier.RAM].contents()) == []
    world.check()


@pytest.mark.parametrize(("label", "code"), [("tier:create", "ENOSPC"), ("fetch:write", "ENOSPC"), ("fetch:write", "EDQUOT")])
@pytest.mark.parametrize("argument", ["", mover_requests.NEEDS_COPY])
def test_room_that_others_took_meanwhile(world: World, label: str, code: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: a reader gets the PFS's own file, a writer a copy there; only where that is full as well does it fail."""
    world.bring("d/file")
    lose_copies(world, "d/file")
    monkeypatch.setattr(disk, "_fault", f"{label}={code}@{1 + disk._calls[label]}")
    assert world.bring("d/file", argument).result == (mover_requests.FETCHED if argument else mover_requests.DIRECT)
    assert list(world.tiers[Tier.RAM].contents()) == []
    if argument:
        assert bytes_here(world, "d/file") == (Tier.PFS, (world.pfs / "d" / "file").read_bytes())
        lose_copies(world, "d/file")
        monkeypatch.setattr(disk, "_fault", f"{label}={code}@*")
        assert world.bring("d/file", argument).error == errno.ENOSPC
    world.check()


@pytest.mark.parametrize("evicted", [True, False])
def test_a_copy_takes_its_room_before_its_bytes_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evicted: bool) -> None:
    """T2: what a program writes meanwhile is told at once that NVMe has no room for both."""
    (tmp_path / "nvme").mkdir()
    world = World(tmp_path, nvme=tmp_path / "nvme")
    (world.pfs / "file").write_bytes(os.urandom(5 * MIB))
    world.visit("")
    if evicted:
        world.bring("file")
        lose_copies(world, "file")
    mover, mount = (TierStorage(Tier.NVME, tmp_path / "nvme", budget_bytes=8 * MIB) for _ in range(2))
    monkeypatch.setattr(world.tiers, "_tiers", {**world.tiers, Tier.NVME: mover})
    monkeypatch.setattr(world.tiers, "choose_tier", lambda expected_bytes=0: Tier.NVME)
    assert mount.get_capacity().free == mover.get_capacity().free == 8 * MIB
    asked = granted = 0

    def write(label: str) -> None:
        nonlocal asked, granted
        if label == "fetch:write":
            asked += 1
            with suppress(OSError), mount.growing(4 * MIB):
                granted += 1

    with intercepted(write):
        assert world.bring("file").result == mover_requests.FETCHED
    assert asked and not granted and bytes_here(world, "file")[0] is Tier.NVME


@pytest.mark.crash
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("when", ["kill", "kill-after"])
@pytest.mark.parametrize("evicted", [True, False])
def test_killed_anywhere_the_next_one_brings_it(world: World, label: str, when: str, evicted: bool) -> None:
    if evicted:
        world.bring("d/file")
        lose_copies(world, "d/file")
    assert world.killed_at(f"{label}={when}", lambda there: there.bring("d/file"))
    after = world.reborn()
    after.check()
    assert after.bring("d/file").result == mover_requests.FETCHED
    assert bytes_here(after, "d/file")[1] == (after.pfs / "d" / "file").read_bytes()
    assert list(after.tiers[Tier.RAM].contents()) == [after.column("d/file", "content")]


@pytest.mark.parametrize("label", ["fetch:fsync", "fetch:directory", "fetch:check:read"])
def test_an_error_of_the_disk_below_nvme(tmp_path: Path, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvme").mkdir()
    world = World(tmp_path, nvme=tmp_path / "nvme")
    (world.pfs / "file").write_bytes(b"data" * 1000)
    world.visit("")
    monkeypatch.setattr(world.tiers, "choose_tier", lambda expected_bytes=0: Tier.NVME)
    monkeypatch.setattr(disk, "_fault", f"{label}=EIO")
    monkeypatch.setattr(disk, "_calls", disk.Counter())
    assert world.bring("file").state == mover_requests.FAILED
    monkeypatch.setattr(disk, "_fault", "")
    world.check()
    assert world.bring("file").result == mover_requests.FETCHED
    assert bytes_here(world, "file") == (Tier.NVME, b"data" * 1000)


def test_a_tier_that_fails_costs_a_reader_another_try_and_no_error(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: NVMe dies, and nobody has noticed when the file is fetched into it."""
    nvme = TierStorage(Tier.NVME, tmp_path / "nvme")
    monkeypatch.setattr(world.tiers, "_tiers", {**world.tiers, Tier.NVME: nvme})
    monkeypatch.setattr(world.tiers, "choose_tier", lambda expected_bytes=0: Tier.NVME if nvme.is_usable else Tier.RAM)
    inject_fault(monkeypatch, "tier:create=EIO@1")
    request = world.bring("d/file")
    assert (request.state, request.result) == (mover_requests.DONE, mover_requests.FETCHED)
    assert not nvme.is_usable and bytes_here(world, "d/file")[0] is Tier.RAM
    world.check()
