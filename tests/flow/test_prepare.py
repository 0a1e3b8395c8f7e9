"""X1: what is prepared, how much, and when it is given back."""

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from daemon_under_test import eventually
from local_node import Node, run_until_idle

from ckptfs import disk, limits, procfs
from ckptfs.catalog import contents
from ckptfs.flow import evict, prepare
from ckptfs.flow.host.incoming import PeerQuota
from ckptfs.flow.prepare import Prepare, PreparedChanges, choose_changes
from ckptfs.model import DataPath, Tier
from ckptfs.tiers.prepared import ExpectedSize, PreparedFile
from ckptfs.tiers.space import Capacity
from ckptfs.tiers.storage import Tiers, TierStorage

MIB = limits.MIB


def _expect(*sizes: int) -> list[ExpectedSize]:
    return [ExpectedSize(bytes([number]), size * MIB, 0) for number, size in enumerate(sizes)]


def test_one_file_for_each_place_newest_first_within_the_bound() -> None:
    assert choose_changes([], _expect(100, 60, 20), 130 * MIB) == PreparedChanges((), (100 * MIB, 20 * MIB))
    assert choose_changes([], _expect(100), 99 * MIB) == PreparedChanges((), ())


def test_small_files_are_not_prepared_and_sizes_are_whole_steps() -> None:
    assert choose_changes([], _expect(7), 10**12) == PreparedChanges((), ())
    found = choose_changes([], [ExpectedSize(b"", 9 * MIB + 1, 0)], 10**12)
    assert found.missing == (10 * MIB,)


def test_what_serves_stays_and_the_rest_goes() -> None:
    files = [PreparedFile(110 * MIB, "a"), PreparedFile(300 * MIB, "b"), PreparedFile(20 * MIB, "c")]
    assert choose_changes(files, _expect(100, 200), 10**12) == PreparedChanges((files[2], files[1]), (200 * MIB,))
    assert choose_changes(files, [], 0).surplus == (files[2], files[0], files[1])


def test_one_file_serves_one_place() -> None:
    files = [PreparedFile(16 * MIB, "a")]
    assert choose_changes(files, _expect(16, 16), 10**12) == PreparedChanges((), (16 * MIB,))


def test_spare_files_come_first() -> None:
    """M1: for programs with a memory limit whose sizes are unknown."""
    spare = limits.TOP_UP_AHEAD_BYTES
    assert [prepare.count_spares(gib * 1024 * MIB) for gib in (0, 7, 8, 17, 64)] == [(0, 1), (0, 1), (1, 0), (2, 0), (4, 0)]
    assert choose_changes([], _expect(100), 10**12, (2, 0)) == PreparedChanges((), (spare, spare, 100 * MIB))
    assert choose_changes([PreparedFile(spare, "a")], [], 10**12, (2, 0)) == PreparedChanges((), (spare,))
    assert choose_changes([PreparedFile(spare, "a")], _expect(120), 2 * spare, (1, 0)).missing == (120 * MIB,)
    assert choose_changes([], _expect(100), spare + 50 * MIB, (2, 0)).missing == (spare,), "they share the bound"


def test_in_a_small_tier_the_spare_file_comes_last() -> None:
    """M1, X1: a tier of 4 GiB or more has room for one, until a series needs the room."""
    spare, half = limits.TOP_UP_AHEAD_BYTES, 2048 * MIB
    assert choose_changes([], [], half, (0, 1)) == PreparedChanges((), (spare,))
    assert choose_changes([], [], half - 1, (0, 1)) == PreparedChanges((), ())
    assert choose_changes([], _expect(100), half + 100 * MIB, (0, 1)).missing == (100 * MIB, spare)
    idle = PreparedFile(spare, "a")
    assert choose_changes([idle], _expect(100), half, (0, 1)) == PreparedChanges((idle,), (100 * MIB,))


def test_the_bound_is_a_share_or_bytes() -> None:
    assert prepare.get_bytes_max(0.5, 100) == 50
    assert prepare.get_bytes_max(7, 100) == 7
    assert prepare.get_bytes_max(0, 100) == 0


def test_room_is_left_for_other_creates() -> None:
    """P10: a create of unknown size finds passthrough, and the watermark is not reached."""
    assert prepare.has_room(Capacity(100, 60), 39, 0.8, 20)
    assert not prepare.has_room(Capacity(100, 60), 41, 0.8, 20)
    assert not prepare.has_room(Capacity(100, 60), 40, 0.8, 0), "it would reach the watermark"


# --- the step ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node whose RAM tier is a tmpfs."""
    found = Node(tmp_path)
    with tempfile.TemporaryDirectory(prefix=f"ckptfs-prepare-{os.getpid()}-", dir="/dev/shm") as root:
        ram = TierStorage(Tier.RAM, Path(root), budget_bytes=1024 * MIB)
        found.tiers = Tiers(dict(found.tiers) | {Tier.RAM: ram}, found.config.ram_high)
        yield found
        found.tiers.close()


def _pool(node: Node) -> list[int]:
    return sorted(file.size_bytes // MIB for file in node.tiers.prepared.list_files())


@pytest.fixture
def flow(node: Node, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    monkeypatch.setattr(limits, "PASSTHROUGH_SPACE_UNKNOWN_BYTES_MIN", 64 * MIB)
    monkeypatch.setattr(procfs, "get_memory_pressure", lambda: 0.0)
    monkeypatch.setattr(limits, "USED_AGE_S", -1.0)
    monkeypatch.setattr(limits, "CAPACITY_AGE_S", -1.0)
    return Prepare(node.db, node.tiers, node.config, node.told)


def test_it_prepares_what_was_closed_and_no_more(node: Node, flow: Prepare) -> None:
    node.tiers.prepared.record_size(b"a", 16 * MIB)
    node.tiers.prepared.record_size(b"b", 32 * MIB)
    run_until_idle(flow)
    assert _pool(node) == [16, 32]
    assert flow.next_due_s() is not None, "the pressure on memory is looked at"
    node.tiers.prepared.record_size(b"a", 0)
    run_until_idle(flow)
    assert _pool(node) == [32]
    flow.stop()
    assert _pool(node) == []


def test_without_sizes_it_sleeps(node: Node, flow: Prepare) -> None:
    run_until_idle(flow)
    assert flow.next_due_s() is None


def test_spare_files_are_made_one_after_the_other(node: Node, flow: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    """M1: not all at once, because many small files may take one each."""
    monkeypatch.setattr(limits, "SPARE_TIER_BYTES", 512 * MIB)
    monkeypatch.setattr(limits, "TOP_UP_AHEAD_BYTES", 16 * MIB)
    monkeypatch.setattr(limits, "SPARE_INTERVAL_S", 1000.0)
    run_until_idle(flow)
    assert _pool(node) == [16] and flow.next_due_s() is not None
    monkeypatch.setattr(limits, "SPARE_INTERVAL_S", 0.0)
    flow = Prepare(node.db, node.tiers, node.config, node.told)
    run_until_idle(flow)
    assert _pool(node) == [16, 16]
    buffered = Prepare(node.db, node.tiers, replace(node.config, data_path=DataPath.BUFFERED), node.told)
    run_until_idle(buffered)
    assert _pool(node) == [], "there the daemon writes"


@pytest.mark.parametrize("patience_s", [60.0, 0.0])
def test_writers_go_first_but_not_for_ever(node: Node, flow: Prepare, monkeypatch: pytest.MonkeyPatch, patience_s: float) -> None:
    """X1: a writer is not delayed by what is prepared, and a file that stays open does not hold it up."""
    looks = []

    def count_writers(_: object) -> int:
        looks.append(_pool(node))
        return 1 if not patience_s or len(looks) < 3 else 0

    monkeypatch.setattr(contents, "count_writers", count_writers)
    monkeypatch.setattr(limits, "PREPARED_PATIENCE_S", patience_s)
    node.tiers.prepared.record_size(b"a", 16 * MIB)
    run_until_idle(flow)
    assert _pool(node) == [16]
    assert looks == [[]] * (3 if patience_s else 1)
    flow.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority")
def test_the_end_waits_for_no_thread_of_the_lowest_priority(node: Node, flow: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: on a busy machine it does not run for many seconds, and nobody could mount again."""
    normal, begun = os.getpriority(os.PRIO_PROCESS, 0), threading.Event()

    def count_writers(_: object) -> int:
        begun.set()
        eventually(lambda: os.getpriority(os.PRIO_PROCESS, 0) == normal, 20, "it has the priority of others")
        return 0

    monkeypatch.setattr(contents, "count_writers", count_writers)
    node.tiers.prepared.record_size(b"a", 16 * MIB)
    with ThreadPoolExecutor(1) as threads:
        step = threads.submit(flow.step)
        assert begun.wait(60)
        flow.stop()
        assert not step.result()


def test_a_writer_that_is_faster_is_no_trouble(node: Node, flow: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: a tier that fills up meanwhile is not reported; any other failure is."""
    node.tiers.prepared.record_size(b"a", 16 * MIB)
    monkeypatch.setattr(disk, "_fault", "prepare:allocate=ENOSPC@*")
    run_until_idle(flow)
    assert _pool(node) == [] and flow.next_due_s() is not None
    monkeypatch.setattr(disk, "_fault", "prepare:allocate=EIO@*")
    with pytest.raises(OSError, match="injected"):
        flow.step()
    flow.stop()


def test_pressure_takes_all_of_it_until_it_is_over(node: Node, flow: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: prepared memory goes first when the machine is short of memory."""
    node.tiers.prepared.record_size(b"a", 16 * MIB)
    run_until_idle(flow)
    for pressure, expected in ((9.0, [16]), (10.0, []), (5.0, []), (0.5, [16])):
        monkeypatch.setattr(procfs, "get_memory_pressure", lambda pressure=pressure: pressure)
        run_until_idle(flow)
        assert _pool(node) == expected, pressure
    flow.stop()


def test_a_full_tier_is_not_filled(node: Node, flow: Prepare) -> None:
    ram = node.tiers[Tier.RAM]
    ram._budget_bytes = 100 * MIB
    with disk.closing(ram.create(999)) as fd:
        os.posix_fallocate(fd, 0, 45 * MIB)
    node.tiers.prepared.record_size(b"a", 40 * MIB)
    run_until_idle(flow)
    assert _pool(node) == [], "it would reach the watermark"
    assert flow.next_due_s() is not None, "there may be room later"
    flow.stop()


def _measure_anew(node: Node) -> None:
    """What a tier holds is measured once a second; let that second pass."""
    node.tiers[Tier.RAM]._measured_used = (float("-inf"), 0, 0)


def test_eviction_gives_prepared_memory_back_before_it_drops_a_copy(node: Node, flow: Prepare) -> None:
    """X1: nothing that an application wrote leaves RAM for nothing."""
    content = node.make(b"file", b"x" * MIB)
    node.tiers.prepared.record_size(b"a", 64 * MIB)
    run_until_idle(flow)
    assert _pool(node) == [64]
    node.tiers[Tier.RAM]._budget_bytes = 70 * MIB
    _measure_anew(node)
    run_until_idle(evict.Evict(node.db, node.tiers, node.config, node.told))
    assert _pool(node) == []
    assert content in node.files(Tier.RAM)
    flow.stop()


def test_prepared_memory_makes_way_for_copies_of_peers(node: Node, flow: Prepare) -> None:
    """X1, N3: it counts as free for them, and is given back when one comes."""
    node.tiers[Tier.RAM]._budget_bytes = 200 * MIB
    node.tiers.prepared.record_size(b"a", 64 * MIB)
    run_until_idle(flow)
    assert _pool(node) == [64]
    quota = PeerQuota(node.db, node.tiers, 1.0)
    assert quota.get_free_bytes_in(Tier.RAM) == 160 * MIB
    assert quota.choose_tier(90 * MIB) is Tier.RAM
    assert _pool(node) == [64], "there was room beside it"
    _measure_anew(node)
    assert quota.choose_tier(120 * MIB) is Tier.RAM
    assert _pool(node) == []
    flow.stop()


def test_pressure_is_read_from_the_kernel(tmp_path: Path) -> None:
    table = tmp_path / "memory"
    assert procfs.get_memory_pressure(table) == 0.0, "a kernel without PSI"
    table.write_text("some avg10=12.50 avg60=3.00 avg300=1.00 total=1\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=1\n")
    assert procfs.get_memory_pressure(table) == 12.5
