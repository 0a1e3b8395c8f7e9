"""P7: two changes of one file's attributes become one. The last write decides."""

from typing import Any

import pytest

from ckptfs import limits
from ckptfs.coherence import merge
from ckptfs.coherence.keys import encode_fields

BASE: dict[str, Any] = {
    "content": 7, "generation": 4, "size": 100, "mtime_ns": 10, "ctime_ns": 10, "atime_ns": 10, "mode": 0o100644, "names": [[1, "log"]],
}  # fmt: skip
WRITTEN = {"content": 9, "generation": 5, "size": 219, "mtime_ns": 20, "ctime_ns": 20}


def bytes_of(value: dict[str, Any]) -> list[Any]:
    return [value[name] for name in ("content", "generation", "size")]


@pytest.mark.parametrize(
    "ours", [{"mtime_ns": 99, "ctime_ns": 99}, {"content": 3, "size": 87}, {"mode": 0o100600}], ids=["a time", "what was left", "a mode"]
)
def test_what_another_node_wrote_is_not_hidden_by_what_was_not_written_here(ours: dict[str, Any]) -> None:
    merged = merge.merge_inode(BASE, {**BASE, **ours}, {**BASE, **WRITTEN})
    assert bytes_of(merged) == bytes_of(WRITTEN)
    assert merged["mode"] == ours.get("mode", BASE["mode"]) and merged["mtime_ns"] == max(20, ours.get("mtime_ns", 0))


@pytest.mark.parametrize("theirs", [{}, {"mtime_ns": 99}, WRITTEN], ids=["nothing", "a time", "another generation"])
def test_a_local_write_shows_while_it_is_published(theirs: dict[str, Any]) -> None:
    ours = {**BASE, "content": 8, "generation": 5, "size": 50, "mtime_ns": 30, "ctime_ns": 30}
    assert bytes_of(merge.merge_inode(BASE, ours, {**BASE, **theirs})) == bytes_of(ours)


@pytest.mark.parametrize("ours", [{"mode": 0o100600}, {"size": 50}, {"content": 8}], ids=["a mode", "an fsync", "a new content"])
def test_a_file_that_is_open_for_writing_here_shows_this_node_s_bytes(ours: dict[str, Any]) -> None:
    """Its close tells a size: that of the content which is shown."""
    ours = {**BASE, **ours}
    assert bytes_of(merge.merge_inode(BASE, ours, {**BASE, **WRITTEN}, is_writing=True)) == bytes_of(ours)


@pytest.mark.parametrize(("generation", "later"), [(3, False), (4, False), (5, True)])
def test_a_close_counts_whose_generation_was_told_before(generation: int, later: bool) -> None:
    """The generation of a file begins when it is opened."""
    ours, theirs = {**BASE, "size": 50, "closed_ns": 40}, {**BASE, **WRITTEN, "generation": generation, "closed_ns": 30}
    assert bytes_of(merge.merge_inode(BASE, ours, theirs)) == bytes_of(theirs if later else ours)


def missing(**fields: Any) -> dict[str, Any]:
    """What the others show since they take what this node wrote for lost."""
    missed = {"content": 8, "generation": 5, "mtime_ns": 30, "node": 1, "shows": 7, "shown": 4}
    return {**BASE, "missed": encode_fields(missed).decode(), **fields}


OURS = {**BASE, "content": 8, "generation": 6, "size": 50, "mtime_ns": 30, "ctime_ns": 30, "closed_ns": 30}


@pytest.mark.parametrize("mtime_ns", [1, 99], ids=["touch -d 2001", "a clock that is ahead"])
@pytest.mark.parametrize(
    ("theirs", "later"),
    [
        ({"generation": 6, "closed_ns": 31}, True),
        ({"generation": 6, "closed_ns": 29}, False),
        ({"generation": 7, "closed_ns": 29}, True),
        ({"generation": 5, "closed_ns": 31}, False),
        ({"generation": 6, "closed_ns": 30, "content": 3 << 40}, True),
        ({"generation": 6, "closed_ns": 30}, False),
    ],
    ids=["closed later", "closed earlier", "more generations", "fewer generations", "at once: the higher node", "at once: a lower node"],
)
def test_the_last_writer_wins_whatever_the_mtime_says(theirs: dict[str, Any], later: bool, mtime_ns: int) -> None:
    """Generation, then close time, then node: `cp -p` and tar do not decide."""
    base, theirs = {**BASE, "generation": 4}, {**BASE, "content": 1 << 40, "size": 90, "mtime_ns": mtime_ns, **theirs}
    ours = {**OURS, "content": 2 << 40}
    assert bytes_of(merge.merge_inode(base, ours, theirs)) == bytes_of(theirs if later else ours)
    back = {**BASE, "generation": 4}
    assert bytes_of(merge.merge_inode(back, theirs, ours)) == bytes_of(theirs if later else ours), "both nodes decide alike"


@pytest.mark.parametrize(
    "theirs", [{**BASE, **WRITTEN, "generation": 6, "closed_ns": 31}, missing(**WRITTEN)], ids=["later", "upon what was left"]
)
def test_a_node_that_returns_does_not_hide_what_was_written_while_it_was_dead(theirs: dict[str, Any]) -> None:
    """P9: it had a generation that it had not told. What the others miss they go on missing: its writer puts it beside."""
    base = {**BASE, "content": 8, "generation": 5, "size": 50, "mtime_ns": 30}
    merged = merge.merge_inode(base, OURS, theirs)
    assert bytes_of(merged) == bytes_of(theirs) and merged.get("missed") == theirs.get("missed")
    assert bytes_of(merge.merge_inode(base, OURS, theirs, is_writing=True)) == bytes_of(OURS), "it is being written here"


@pytest.mark.parametrize(("theirs", "later"), [({"generation": 7}, True), ({"closed_ns": 31}, True), ({"closed_ns": 29}, False)])
def test_of_two_generations_of_one_content_the_later_one_counts(theirs: dict[str, Any], later: bool) -> None:
    """Its size and its bytes are of one of them: its own key goes by the generation, too."""
    base, theirs = {**BASE, "content": 8, "generation": 5}, {**OURS, "size": 90, **theirs}
    merged = merge.merge_inode(base, OURS, theirs)
    assert bytes_of(merged) == bytes_of(theirs if later else OURS)


def test_a_node_that_returns_shows_again_what_the_others_miss() -> None:
    base = {**BASE, "content": 8, "generation": 5, "size": 50, "mtime_ns": 30}
    merged = merge.merge_inode(base, OURS, missing(ctime_ns=99))
    assert bytes_of(merged) == bytes_of(OURS) and "missed" not in merged


def test_a_time_that_another_node_set_stays_when_this_one_records_its_close() -> None:
    """P2: utime after the close of another node counts, also if that node records its close later."""
    merged = merge.merge_inode({**BASE, "closed_ns": 0}, {**BASE, "closed_ns": 30}, {**BASE, "closed_ns": 0, "mtime_ns": 5, "ctime_ns": 40})
    assert (merged["mtime_ns"], merged["closed_ns"], merged["ctime_ns"]) == (5, 30, 40)


def record(content: int) -> dict[str, int]:
    return {"content": content, "generation": content, "mtime_ns": 1, "node": 1, "shows": 7, "shown": 4}


@pytest.mark.parametrize(
    ("base", "ours", "theirs", "merged"),
    [
        ([1], [1], [2, 1], [2, 1]),
        ([2, 1], [2], [3, 2, 1], [3, 2]),
        ([1], [3, 1], [2, 1], [3, 2, 1]),
        ([1], [], [1], []),
        ([], [5], [5], [5]),
    ],
    ids=["missed by others", "ended here", "missed by both", "none is left", "the same"],
)
def test_each_content_that_was_lost_has_a_record(base: list[int], ours: list[int], theirs: list[int], merged: list[int]) -> None:
    """P9: writers that died one after the other each find their own when they return."""
    values = [{**BASE, "missed": merge.encode_missed(map(record, contents))} for contents in (base, ours, theirs)]
    found = merge.merge_inode(values[0], values[1], values[2])
    assert [one["content"] for one in merge.list_missed(found)] == merged
    assert ("missed" in found) == bool(merged)


def test_the_oldest_records_go_if_there_are_too_many() -> None:
    encoded = merge.encode_missed(map(record, range(100)))
    assert [one["content"] for one in merge.list_missed({"missed": encoded})] == [*range(limits.MISSED_STATES_MAX)]
