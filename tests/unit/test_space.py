"""Where a content goes (P10, T2): pure decisions about room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs import limits
from ckptfs.model import Tier
from ckptfs.tiers import space
from ckptfs.tiers.space import Capacity

MIB = limits.MIB


def test_ram_while_it_is_below_its_watermark_then_nvme_then_the_pfs() -> None:
    nvme, pfs = Capacity(100 * MIB, 50 * MIB), Capacity(10**12, 10**12)
    assert space.choose_tier({Tier.RAM: Capacity(100 * MIB, 21 * MIB), Tier.NVME: nvme, Tier.PFS: pfs}, 0, 0.8) is Tier.RAM
    assert space.choose_tier({Tier.RAM: Capacity(100 * MIB, 20 * MIB), Tier.NVME: nvme, Tier.PFS: pfs}, 0, 0.8) is Tier.NVME
    assert (
        space.choose_tier({Tier.RAM: Capacity(100 * MIB, 20 * MIB), Tier.NVME: Capacity(100 * MIB, 0), Tier.PFS: pfs}, 0, 0.8) is Tier.PFS
    )


def test_what_is_expected_not_to_fit_goes_where_it_fits() -> None:
    rooms = {Tier.RAM: Capacity(100 * MIB, 100 * MIB), Tier.NVME: Capacity(1000 * MIB, 1000 * MIB)}
    assert space.choose_tier(rooms, 79 * MIB, 0.8) is Tier.RAM
    assert space.choose_tier(rooms, 81 * MIB, 0.8) is Tier.NVME
    assert space.choose_tier(rooms, 5000 * MIB, 0.8) is Tier.RAM, "it fits nowhere: where there is any room it may at least begin"


@given(st.dictionaries(st.sampled_from(list(Tier)), st.integers(0, 1000), min_size=1), st.integers(0, 2000))
def test_nothing_is_found_only_when_all_are_full(free: dict[Tier, int], expected: int) -> None:
    tier = space.choose_tier({tier: Capacity(1000, count) for tier, count in free.items()}, expected, 0.8)
    assert (tier is None) == (not any(free.values()))
    assert tier is None or free[tier] > 0


@pytest.mark.parametrize(("taken", "leaves"), [(79, 0), (81, 21), (100, 40)])
def test_above_the_high_watermark_the_tier_is_brought_down_to_the_low_one(taken: int, leaves: int) -> None:
    assert space.get_excess_bytes(Capacity(100, 100 - taken), 0.8, 0.6) == leaves


def test_short_memory_is_not_a_full_tier() -> None:
    assert space.get_excess_bytes(Capacity(100, 0, measured_used=0), 0.8, 0.6) == 0
    assert space.choose_tier({Tier.RAM: Capacity(100, 0, measured_used=0), Tier.NVME: Capacity(100, 100)}, 0, 0.8) is Tier.NVME


def test_writes_are_watched_where_a_surprise_could_fill_the_tier() -> None:
    known, unknown = limits.PASSTHROUGH_SPACE_BYTES_MIN, limits.PASSTHROUGH_SPACE_UNKNOWN_BYTES_MIN
    assert space.needs_buffered_path(Capacity(10**12, known - 1), 0)
    assert not space.needs_buffered_path(Capacity(10**12, known), 0)
    assert space.needs_buffered_path(Capacity(10**12, known), None)
    assert not space.needs_buffered_path(Capacity(10**12, unknown), None)
    assert space.needs_buffered_path(Capacity(10**12, 10**10), 7 * 10**9)


def test_what_writers_are_expected_to_write_is_spoken_for() -> None:
    room = space.subtract_reserved(Capacity(100 * MIB, 90 * MIB), 60 * MIB)
    assert (room.free, room.used) == (30 * MIB, 70 * MIB)
    assert space.choose_tier({Tier.RAM: room, Tier.NVME: Capacity(100 * MIB, 100 * MIB)}, 11 * MIB, 0.8) is Tier.NVME


def test_in_the_last_tier_writes_are_watched_only_when_it_is_nearly_full() -> None:
    """F1: with nowhere to move on to, passing through us buys only the wait for what was deleted."""
    bound = limits.PASSTHROUGH_SPACE_LAST_BYTES_MIN
    assert space.needs_buffered_path_in_last_tier(Capacity(10**12, bound - 1), None)
    assert not space.needs_buffered_path_in_last_tier(Capacity(10**12, bound), None)
    assert space.needs_buffered_path_in_last_tier(Capacity(10**12, bound), bound + 1)
