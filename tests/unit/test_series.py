"""Series and their newest complete member: N2, N7, T5, T6. Pure, so every case is tried."""

import itertools

import pytest

from ckptfs import series
from ckptfs.lifecycle import CliqueCopies, FileRecord, PublishedState
from ckptfs.model import Content, ContentState, Copy, CopyState, Level, Tier
from ckptfs.series import MemberFile, Series

DIGEST = b"d"


def member(name: bytes, *siblings: bytes) -> bytes | None:
    found = series.find_series(name, [name, *siblings])
    return None if found is None else found.name


@pytest.mark.parametrize(
    ("names", "name"),
    [
        ([b"CHECKPOINT_DIR_step5", b"CHECKPOINT_DIR_step10"], b"CHECKPOINT_DIR_step*"),
        ([b"step_100", b"step_200", b"config.json"], b"step_*"),
        ([b"ckpt_100.pt", b"ckpt_200.pt", b"ckpt_200.pt.tmp"], b"ckpt_*.pt"),
        ([b"run-000100.restart", b"run-000200.restart"], b"run-*.restart"),
        ([b"llama3-8b_step100", b"llama3-8b_step200"], b"llama3-8b_step*"),
        ([b"100", b"200"], b"*"),
        ([b"step_100", b"notes", b"tokenizer"], b"step_*"),
        ([b"step_100", b"step_200", b"tokenizer_v2.json"], b"step_*"),
    ],
)
def test_the_series_of_a_directory(names: list[bytes], name: bytes) -> None:
    """T5: the number that differs, wherever it stands."""
    assert [one.name for one in series.list_series(names)] == [name]
    assert all(member(one, *names) == name for one in names if series.parse(name).parse_number(one) is not None)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], []),
        ([b"a", b"b"], []),
        ([b"__0_0.distcp", b"__1_0.distcp", b"model-00001-of-00002.safetensors", b"Rank_0.pt", b"Rank_1.pt", b"shard3"], []),
        ([b"a1", b"a2", b"b1", b"b2"], [b"a*", b"b*"]),
        ([b"a1", b"b1"], [b"a*", b"b*"]),
        ([b"x1y1", b"x1y2", b"x2y1"], [b"x*y1", b"x1y*"]),
    ],
)
def test_none_or_several(names: list[bytes], found: list[bytes]) -> None:
    assert [one.name for one in series.list_series(names)] == found


def test_a_name_alone() -> None:
    """Of several numbers that nothing tells apart the last one counts steps."""
    assert member(b"llama3-8b_step100") == b"llama3-8b_step*"
    assert member(b"llama3-8b_step100", b"llama4-8b_step100") == b"llama*-8b_step100"
    assert member(b"model") is None


@pytest.mark.parametrize(
    ("text", "parts"), [(b"step_*", (b"step_", b"")), (b"*", (b"", b"")), (b"a*.pt", (b"a", b".pt")), (b"step", None), (b"a*b*", None)]
)
def test_a_name_with_the_number_left_out(text: bytes, parts: tuple[bytes, bytes] | None) -> None:
    assert series.parse(text) == (None if parts is None else Series(*parts))


def test_numbers() -> None:
    one = Series(b"a1", b"1b")
    names = {b"a121b": 2, b"a11b": None, b"a1b": None, b"a1x1b": None, b"a1-51b": None, "a1\N{ARABIC-INDIC DIGIT TWO}1b".encode(): None}
    assert {name: one.parse_number(name) for name in names} == names


@pytest.mark.parametrize(
    ("before", "counts"),
    [
        (b"step_", True),
        (b"CHECKPOINT_DIR_step", True),
        (b"Epoch=", True),
        (b"ckpt-", True),
        (b"run", False),
        (b"", False),
        (b"steps of run", False),
    ],
)
def test_which_numbers_count_steps(before: bytes, counts: bool) -> None:
    assert Series(before, b"").is_step_count == counts


def test_newest_first() -> None:
    names = [b"s9", b"s10", b"s0010", b"s1", b"other", b"s2.tmp"]
    for order in itertools.permutations(names):
        assert Series(b"s", b"").sort_newest_first(order) == [b"s10", b"s0010", b"s9", b"s1"]


def record(state: ContentState | None, copy: CopyState | None, published: bool, elsewhere: bool) -> FileRecord:
    shown = PublishedState(3, True, DIGEST) if published else None
    clique = CliqueCopies("a", 2, (("other", "b"),) if elsewhere else ())
    if state is None:
        return FileRecord(None, (), shown, 0, clique)
    copies = () if copy is None else (Copy(1, Tier.RAM, copy, 1, 1),)
    return FileRecord(Content(1, 1, 3, state, 10, DIGEST, None, 1), copies, shown, 0, clique)


STATES = [None, *ContentState]
COPIES = [None, *CopyState]


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("state", STATES)
def test_what_a_checkpoint_can_rest_on(state: ContentState | None, copy: CopyState | None, elsewhere: bool, published: bool) -> None:
    """N7: what is not sealed never; what is sealed only while a living copy can be read."""
    found = series.find_incomplete_reason(record(state, copy, published, elsewhere), 10)
    if state is None:
        assert (found == "") == published
    elif state in (ContentState.OPEN, ContentState.CLOSED):
        assert found == "is not sealed yet"
    elif state is ContentState.SEALED:
        assert (found == "") == (published or elsewhere or copy is CopyState.GOOD)
    else:
        assert (found == "") == (published and state is ContentState.LOST)


def test_an_empty_file_needs_no_copy() -> None:
    assert series.find_incomplete_reason(FileRecord(None), 0) == ""
    assert series.find_incomplete_reason(FileRecord(None), 1) == "has no copy that could be read"


GOOD = MemberFile(10, Level.LOCAL)


@pytest.mark.parametrize(
    ("files", "lacks"),
    [
        ({}, "it holds no file"),
        ({b"": GOOD}, ""),
        ({b"": MemberFile(1, Level.LOCAL, "is not sealed yet")}, "it is not sealed yet"),
        ({b"a": GOOD, b"b/c": MemberFile(1, Level.LOCAL, "is not sealed yet")}, "b/c is not sealed yet"),
        ({b"b": MemberFile(1, Level.NONE, "has no copy that could be read")}, "b has no copy that could be read"),
        ({b"__0_0.distcp": GOOD, b"__1_0.distcp": GOOD}, ".metadata is not there yet"),
        ({b"__0_0.distcp": GOOD, b".metadata": GOOD}, ""),
        ({b"__0_0.distcp": GOOD, b".metadata": MemberFile(1, Level.LOCAL, "is not sealed yet")}, ".metadata is not sealed yet"),
        ({b"__0_0.distcp": GOOD, b".metadata.tmp": GOOD}, ".metadata is not there yet"),
        ({b"optim/__0_0.distcp": GOOD, b".metadata": GOOD}, "optim/.metadata is not there yet"),
        ({b"optim/__0_0.distcp": GOOD, b"optim/.metadata": GOOD, b"x.pt": GOOD}, ""),
        ({b"my__0_0.distcp": GOOD, b"__0_0.distcp.bak": GOOD}, ""),
    ],
)
def test_complete_or_not(files: dict[bytes, MemberFile], lacks: str) -> None:
    """N7, T6."""
    found = series.judge_completeness(files)
    assert found.incomplete_reason == lacks and found.files == len(files)
    assert found.has_level(Level.NONE) == (lacks == "")


@pytest.mark.parametrize("levels", list(itertools.product(list(Level)[1:], repeat=2)))
def test_a_member_is_as_safe_as_its_weakest_file(levels: tuple[Level, Level]) -> None:
    order = list(Level)
    found = series.judge_completeness({str(number).encode(): MemberFile(5, level) for number, level in enumerate(levels)})
    weakest = min(order.index(level) for level in levels)
    assert (order.index(found.level), found.size) == (weakest, 10)
    assert [found.has_level(wanted) for wanted in order] == [weakest >= number for number in range(len(order))]
