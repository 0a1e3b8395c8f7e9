"""P6, P9: what the PFS shows after the intent of a dead node, which may or may not have done what it announced."""

import stat
from typing import Any

import pytest

from ckptfs.catalog.pfs_batch import ObservedStat
from ckptfs.coherence.pfs_coordination import choose_outcome

NAME, SHARED = (1, b"a"), [1, "a"]
PUBLISHED = [3, True, 10, 40, 70, "d" * 32]


def found(ino: int, mtime_ns: int = 40) -> ObservedStat:
    return ObservedStat(ino, stat.S_IFREG | 0o600, 1, 2, 10, mtime_ns)


def shown(ino: int, *names: list[Any]) -> dict[str, Any]:
    return {"names": [*names], "published": [1, True, 10, 20, ino, None], "by": 4, "of": "x", "batch": 9}


MAKE = {"next": 7, "ino": 70, "published": PUBLISHED}
REPLACE = {"inode": 5, **MAKE}
REMOVE = {"inode": 5}
PASS = {"inode": 5, "passes": [[7, 70, PUBLISHED], [0, 0, None]], "next": 8, "ino": 80}
PASS_AND_REMOVE = {"passes": [[7, 70, PUBLISHED]]}


@pytest.mark.parametrize(
    ("intent", "ino", "shows", "names"),
    [
        (MAKE, 70, 7, {7: [SHARED]}),
        (MAKE, None, 0, {7: []}),
        (MAKE, 99, 0, {7: []}),
        (REPLACE, 70, 7, {5: [[2, "other"]], 7: [SHARED]}),
        (REPLACE, 50, 5, {5: [SHARED, [2, "other"]], 7: []}),
        (REPLACE, None, 5, {5: [SHARED, [2, "other"]], 7: []}),
        (REMOVE, None, 0, {5: [[2, "other"]]}),
        (REMOVE, 50, 5, {5: [SHARED, [2, "other"]]}),
        (REMOVE, 99, 5, {5: [SHARED, [2, "other"]]}),
        (PASS, 50, 5, {5: [SHARED, [2, "other"]], 7: [], 8: []}),
        (PASS, 70, 7, {5: [[2, "other"]], 7: [SHARED], 8: []}),
        (PASS, None, 0, {5: [[2, "other"]], 7: [], 8: []}),
        (PASS, 80, 8, {5: [[2, "other"]], 7: [], 8: [SHARED]}),
        (PASS_AND_REMOVE, 70, 7, {7: [SHARED]}),
        (PASS_AND_REMOVE, None, 0, {7: []}),
    ],
)
def test_the_name_shows_what_the_pfs_shows(intent: dict[str, Any], ino: int | None, shows: int, names: dict[int, list[Any]]) -> None:
    known = {5: shown(50, SHARED, [2, "other"]), 7: {"names": []}, 8: {"names": []}}
    states = {inode: known[inode] for inode in names}
    now, outcome = choose_outcome(NAME, intent, states, None if ino is None else found(ino))
    assert now == shows and {inode: state["names"] for inode, state in outcome.items()} == names
    assert all(not state.keys() & {"by", "of", "batch"} for state in outcome.values()), "the intent itself is gone"
    assert known[5]["names"] == [SHARED, [2, "other"]], "what was read stays as it is"
    if shows == 7:
        assert outcome[7]["published"] == PUBLISHED and outcome[7]["seen"] == [70, stat.S_IFREG | 0o600, 1, 2]


def test_attributes_that_the_dead_node_has_set_are_seen() -> None:
    """The name shows the same file before and after: only its times tell."""
    intent = {"inode": 5, "next": 5, "ino": 50}
    shows, outcome = choose_outcome(NAME, intent, {5: shown(50, SHARED)}, found(50, mtime_ns=99))
    assert shows == 5 and outcome[5]["published"][3] == 99 and outcome[5]["seen"][0] == 50


def test_the_intent_of_an_inode_ends_with_the_last_of_its_names() -> None:
    """Until then, a survivor finds each name under which the dead node may have left the file."""
    state = shown(50, SHARED) | {"changing": [SHARED, [1, "parked"]]}
    _, between = choose_outcome(NAME, {"inode": 5}, {5: state}, None)
    assert between[5] == state | {"names": [], "changing": [[1, "parked"]]}
    _, after = choose_outcome((1, b"parked"), {"passes": [[5, 50, state["published"]]]}, between, found(50))
    assert after[5]["names"] == [[1, "parked"]] and not after[5].keys() & {"by", "of", "batch", "changing"}


@pytest.mark.parametrize(("mtime_ns", "shows"), [(40, 7), (20, 5), (99, 5)])
def test_without_lasting_numbers_size_and_time_tell(mtime_ns: int, shows: int) -> None:
    """D10: the former file, the new one, or what others wrote."""
    published = [*PUBLISHED[:4], 0, PUBLISHED[5]]
    intent = {"inode": 5, "next": 7, "ino": 0, "published": published}
    now, outcome = choose_outcome(NAME, intent, {5: shown(0, SHARED), 7: {"names": []}}, found(0, mtime_ns))
    assert now == shows and outcome[shows]["names"] == [SHARED]
