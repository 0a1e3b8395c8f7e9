"""N2: inode numbers of the virtual entries of `latest`, which no catalog has; paths that `ckptfs latest` prints."""

from pathlib import Path

import pytest
import xxhash
from ckptfs_client.sets.newest import Found, NamedSeries
from ckptfs_daemon.mount.handlers.latest_tree import FIRST_INODE, TOP, VirtualEntry, VirtualInodes, is_virtual

from ckptfs import limits
from ckptfs.model import Level
from ckptfs.series.completeness import Completeness
from ckptfs.series.patterns import Series
from ckptfs.series.search import LatestMember, SearchResult

PLACES = [
    TOP,
    VirtualEntry(1),
    VirtualEntry(2),
    VirtualEntry(1, b"a*"),
    VirtualEntry(2, b"a*"),
    VirtualEntry(1, b"b*"),
    VirtualEntry(limits.NODE_NUMBER_MAX << 40 | 5, b"*"),
]


def test_a_number_for_each_place_and_the_same_one_in_the_next_process() -> None:
    numbers, others = VirtualInodes(), VirtualInodes()
    found = [numbers.assign_inode(place) for place in PLACES]
    assert len(set(found)) == len(PLACES) and all(map(is_virtual, found)) and max(found) < 2**63
    assert [numbers.find_entry(number) for number in found] == PLACES
    assert sorted(others.assign_inode(place) for place in reversed(PLACES)) == sorted(found)


def test_no_number_of_the_catalog_is_one() -> None:
    assert not any(map(is_virtual, (1, 2**40, (limits.NODE_NUMBER_MAX << 40) + 2**40 - 1)))


def test_places_that_meet_get_different_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda _: 2**40 - 1)
    numbers = VirtualInodes()
    found = [numbers.assign_inode(place) for place in PLACES]
    assert len(set(found)) == len(PLACES) and [numbers.assign_inode(place) for place in PLACES] == found
    assert all(is_virtual(number) and number < 2**63 for number in found)


def test_only_those_that_were_looked_up_last_are_known() -> None:
    numbers = VirtualInodes(at_most=3)
    first, second, third = (numbers.assign_inode(VirtualEntry(number)) for number in (1, 2, 3))
    assert numbers.assign_inode(VirtualEntry(1)) == first
    numbers.assign_inode(VirtualEntry(4))
    assert (numbers.find_entry(first), numbers.find_entry(second), numbers.find_entry(third)) == (VirtualEntry(1), None, VirtualEntry(3))
    assert numbers.find_entry(FIRST_INODE) is None


@pytest.mark.parametrize(
    ("directory", "name", "path"),
    [
        (".", b"-step_2", "./-step_2"),
        ("-dash", b"step_2", "./-dash/step_2"),
        ("a", b"-step_2", "a/-step_2"),
        ("../b", b"s_\xff", "../b/s_\udcff"),
    ],
)
def test_a_path_that_no_command_takes_for_an_option(directory: str, name: bytes, path: str) -> None:
    """N2: scripts pass it on."""
    member = LatestMember(2, name, name, Completeness(1, 1, Level.LOCAL))
    searched = NamedSeries(Path(directory), Series((name[:-1], b"")))
    assert Found(searched, SearchResult(member, []), b"").build_path(member) == path
