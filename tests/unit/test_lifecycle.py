"""P3, P5: from the record of a file alone: which failures it survives, and when a copy may go."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.lifecycle import CliqueCopies, FileRecord, can_drop, count_required_domains, is_on_pfs, is_same_file, level
from ckptfs.model import Content, ContentState, Copy, CopyState, Level, PublishedRow, Tier

DIGEST = b"d" * 16


def content(state: ContentState = ContentState.SEALED, generation: int = 3) -> Content:
    sealed = state in {ContentState.SEALED, ContentState.LOST}
    return Content(7, 5, generation, state, 10, DIGEST if sealed else None, DIGEST if sealed else None, 1)


def copy(tier: Tier = Tier.RAM, state: CopyState = CopyState.GOOD, verified_ns: int = 1) -> Copy:
    return Copy(7, tier, state, verified_ns)


def published(generation: int = 3, is_complete: bool = True, digest: bytes | None = DIGEST, is_checked: bool = True) -> PublishedRow:
    return PublishedRow(5, generation, is_complete, 10, 0, 1, digest, None, is_checked=is_checked)


SHOWN = published()

records = st.builds(
    FileRecord,
    st.none() | st.builds(content, st.sampled_from(ContentState), st.integers(1, 4)),
    st.lists(st.builds(copy, st.sampled_from(Tier), st.sampled_from(CopyState), st.integers(0, 1)), unique_by=lambda found: found.tier).map(
        tuple
    ),
    st.none() | st.builds(published, st.integers(1, 4), st.booleans(), st.sampled_from([DIGEST, b"e" * 16, None])),
    st.integers(0, 1),
)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (FileRecord(None), Level.LOCAL),
        (FileRecord(None, published=SHOWN), Level.PFS),
        (FileRecord(content(ContentState.OPEN), (copy(verified_ns=0),)), Level.LOCAL),
        (FileRecord(content(ContentState.CLOSED), (copy(verified_ns=0),)), Level.LOCAL),
        (FileRecord(content(), (copy(),)), Level.LOCAL),
        (FileRecord(content(), (copy(Tier.PFS),)), Level.LOCAL),
        (FileRecord(content(), (copy(),), SHOWN), Level.PFS),
        (FileRecord(content(), (), SHOWN), Level.PFS),
        (FileRecord(content(generation=4), (copy(),), SHOWN), Level.LOCAL),
        (FileRecord(content(ContentState.OPEN), (copy(),), SHOWN), Level.LOCAL),
        (FileRecord(content(), (copy(),), published(is_complete=False)), Level.LOCAL),
        (FileRecord(content(), (copy(),), published(digest=b"e" * 16)), Level.LOCAL),
        (FileRecord(content(), (copy(state=CopyState.QUARANTINED),)), Level.NONE),
        (FileRecord(content(), (copy(state=CopyState.FILLING),)), Level.NONE),
        (FileRecord(content(ContentState.LOST)), Level.NONE),
        (FileRecord(content()), Level.NONE),
    ],
)
def test_the_level_follows_from_the_copies(record: FileRecord, expected: Level) -> None:
    assert level(record) is expected


@given(records, st.sampled_from(Tier))
def test_no_drop_ever_lowers_what_a_file_survives(record: FileRecord, tier: Tier) -> None:
    """P5, for every record there can be: after the drop the content is still whole somewhere, and nowhere weaker."""
    if not can_drop(record, tier) or (record.content and record.content.state is ContentState.DOOMED):
        return
    assert record.open_handles == 0
    left = FileRecord(record.content, tuple(found for found in record.copies if found.tier is not tier), record.published)
    assert level(left) is not Level.NONE
    assert level(left) is level(record)
    order = list(Tier)
    assert is_on_pfs(left) or any(
        found.state is CopyState.GOOD and found.verified_ns and order.index(found.tier) > order.index(tier) for found in left.copies
    )


@given(records)
def test_two_drops_one_after_the_other_are_judged_one_by_one(record: FileRecord) -> None:
    """Whatever is dropped in whatever order, a sealed content that had a good copy keeps one."""
    if record.content is None or record.content.state is not ContentState.SEALED or level(record) is Level.NONE:
        return
    for tier in Tier:
        if can_drop(record, tier):
            record = FileRecord(
                record.content, tuple(found for found in record.copies if found.tier is not tier), record.published, record.open_handles
            )
    assert level(record) is not Level.NONE


def test_a_copy_in_ram_is_no_reason_to_drop_the_one_on_nvme() -> None:
    both = FileRecord(content(), (copy(), copy(Tier.NVME)))
    assert can_drop(both, Tier.RAM) and not can_drop(both, Tier.NVME)
    assert not can_drop(FileRecord(content(), (copy(), copy(Tier.NVME, verified_ns=0))), Tier.RAM), "not verified, so it does not count"


def test_a_file_on_the_pfs_that_was_not_read_back_is_no_reason_to_drop_the_last_copy() -> None:
    """P4, P5: unless the site has chosen so."""
    unread = FileRecord(content(), (copy(),), published(is_checked=False))
    assert is_on_pfs(unread) and not can_drop(unread, Tier.RAM) and can_drop(unread, Tier.RAM, pfs_verify=False)
    read = FileRecord(content(), (copy(),), SHOWN)
    assert can_drop(read, Tier.RAM)


def test_a_file_on_the_pfs_is_the_same_when_only_fractions_of_its_time_are_gone() -> None:
    """P7: what a filesystem forgets is no stranger's change; everything else is."""
    known = (10, 1_700_000_000_123_456_789, 42)
    for mtime_ns in (known[1], 1_700_000_000_123_456_700, 1_700_000_000_123_456_000, 1_700_000_000_123_000_000, 1_700_000_000_000_000_000):
        assert is_same_file(known, (10, mtime_ns, 42))
        assert not is_same_file(known, (11, mtime_ns, 42)) and not is_same_file(known, (10, mtime_ns, 43))
    for mtime_ns in (1_700_000_000_123_456_788, 1_700_000_001_000_000_000, 1_699_999_999_000_000_000):
        assert not is_same_file(known, (10, mtime_ns, 42))


def clique(*domains: str, demand: int = 2) -> CliqueCopies:
    return CliqueCopies("here", demand, tuple((f"node {number}", domain) for number, domain in enumerate(domains)))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (FileRecord(content(), (copy(),), clique=clique("r2")), Level.CLIQUE),
        (FileRecord(content(), (copy(),), clique=clique("here")), Level.LOCAL),
        (FileRecord(content(), (copy(verified_ns=0),), clique=clique("r2")), Level.LOCAL),
        (FileRecord(content(), (copy(Tier.PFS),), clique=clique("r2")), Level.LOCAL),
        (FileRecord(content(), (copy(state=CopyState.STALE),), clique=clique("r2")), Level.LOCAL),
        (FileRecord(content(), (), clique=clique("r2")), Level.LOCAL),
        (FileRecord(content(), (), clique=clique("r2", "r2")), Level.LOCAL),
        (FileRecord(content(), (), clique=clique("r2", "r3")), Level.CLIQUE),
        (FileRecord(content(), (copy(),), clique=clique("r2", demand=3)), Level.LOCAL),
        (FileRecord(content(), (copy(),), clique=clique("r2", "r3", demand=3)), Level.CLIQUE),
        (FileRecord(content(), (copy(),), SHOWN, clique=clique("r2")), Level.PFS),
        (FileRecord(content(ContentState.CLOSED), (copy(),), clique=clique("r2")), Level.LOCAL),
        (FileRecord(content(ContentState.OPEN), (copy(),), clique=clique("r2", "r3")), Level.LOCAL),
        (FileRecord(content(ContentState.DOOMED), (copy(),), clique=clique("r2", "r3")), Level.NONE),
        (FileRecord(content(), (), clique=clique()), Level.NONE),
        (FileRecord(replace(content(), is_remote=True), (), clique=clique("r2")), Level.LOCAL),
        (FileRecord(None, clique=clique()), Level.CLIQUE),
    ],
)
def test_the_clique_s_level_counts_failure_domains(record: FileRecord, expected: Level) -> None:
    """P9: whole files on as many of them as were asked for, this node's own included."""
    assert level(record) is expected


@given(st.integers(1, 16), st.integers(0, 10_000))
def test_one_domain_is_never_enough(factor: int, alive: int) -> None:
    assert 2 <= count_required_domains(factor, alive) <= max(2, factor)
