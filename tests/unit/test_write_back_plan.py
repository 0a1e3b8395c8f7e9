"""P6: the plan of write-back for the next rows of the journal, without side effects."""

import stat
from pathlib import Path

import pytest

from ckptfs import limits
from ckptfs.catalog import database
from ckptfs.catalog.database import Database
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_batch import KEYS_PER_ROW, PfsAction
from ckptfs.catalog.pfs_state import Fingerprint, PfsEntry, PfsLocation, PfsView
from ckptfs.flow.write_back.deferred import RefusedKind, choose_kind
from ckptfs.flow.write_back.plan import BATCH_BYTES_MAX, PUTS_MAX, Planner
from ckptfs.flow.write_back.plan_facts import SourceKind
from ckptfs.model import ROOT, Content, ContentState, Inode, PublishedRow

FILE, DIRECTORY = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755


class Facts:
    """A catalog made of dictionaries: every inode is a file with one sealed content of the same number, unless told otherwise."""

    def __init__(self) -> None:
        self.states: dict[int, ContentState] = {}
        self.sizes: dict[int, int] = {}
        self.repeats: set[int] = set()
        self.refused: set[int] = set()
        self.late = False
        self.can_link_history = True
        self.unfit_inodes: set[int] = set()
        self.unstable_contents: set[tuple[int, int]] = set()
        self.last_unsealed = (0, 0)

    def get_inode(self, inode: int) -> Inode | None:
        return Inode(inode, FILE, 0, 0, 0, 1, 0, 0, 0, 0, None, inode, 1, 0, True)

    def get_content(self, content: int) -> Content | None:
        return Content(content, content, 1, self.states.get(content, ContentState.SEALED), self.sizes.get(content, 1), b"d", b"d", 1)

    def get_published(self, inode: int) -> PublishedRow | None:
        return None

    def is_in_history(self, directory: int) -> bool:
        return False

    def is_repeated(self, row: JournalRow) -> bool:
        return row.seq in self.repeats

    def needs_no_copy(self, row: JournalRow, content: Content) -> bool:
        return self.is_repeated(row)

    def is_seal_overdue(self, row: JournalRow, content: Content) -> bool:
        return self.late

    def defer_if_paused(self, inode: int, content: int) -> bool:
        return False

    def is_pfs_full(self) -> bool:
        return False

    def is_only_on_pfs(self, inode: int) -> bool:
        return False

    def has_refused_bytes(self, inode: int) -> bool:
        return inode in self.refused

    def has_refused_names(self, inode: int) -> bool:
        return False

    def has_refused_attributes(self, inode: int) -> bool:
        return False


@pytest.fixture
def facts() -> Facts:
    return Facts()


@pytest.fixture
def planner(tmp_path: Path, facts: Facts) -> Planner:
    database.create(tmp_path / "catalog.db")
    return Planner(PfsView(Database(tmp_path / "catalog.db", journalled=True)), facts, "01234567")


def acts(planner: Planner) -> list[tuple[str, int, bytes]]:
    return [(action.act, action.inode, (action.new_location or action.location).name) for action in planner.batch.actions]


def make(seq: int, inode: int, name: bytes, mode: int = FILE) -> JournalRow:
    return JournalRow(seq, "make", inode, ROOT, name, mode=mode)


def content(seq: int, inode: int) -> JournalRow:
    return JournalRow(seq, "content", inode, content=inode, mode=FILE)


def rename(seq: int, inode: int, name: bytes, new: bytes, mode: int = FILE) -> JournalRow:
    return JournalRow(seq, "rename", inode, ROOT, name, ROOT, new, mode=mode)


def test_a_large_one_goes_before_its_seal_and_alone(planner: Planner, facts: Facts) -> None:
    """P6: what comes after it waits."""
    facts.states[7], facts.sizes[7] = ContentState.CLOSED, BATCH_BYTES_MAX
    assert [planner.plan_row(row) for row in (make(1, 7, b"a"), content(2, 7), content(3, 8))] == [True, True, False]
    assert [put.kind for put in planner.plan.puts.values()] == [SourceKind.EARLY]
    assert planner.batch.last_seq == 2 and not planner.plan.is_waiting


@pytest.mark.parametrize("why", ["small", "in vain before", "set aside", "others could go at once"])
def test_what_does_not_go_before_its_seal(planner: Planner, facts: Facts, why: str) -> None:
    facts.states[7], facts.sizes[7] = ContentState.CLOSED, BATCH_BYTES_MAX - (why == "small")
    facts.last_unsealed = (7, 1) if why == "in vain before" else (7, 0)
    facts.refused = {7} if why == "set aside" else set()
    assert planner.plan_row(make(1, 7, b"a"))
    if why == "others could go at once":
        assert planner.plan_row(make(2, 6, b"d", DIRECTORY))
    assert not planner.plan_row(content(3, 7)) and planner.plan.is_waiting and planner.batch.last_seq < 3


def test_one_that_waits_too_long_is_published_as_it_is_and_comes_again(planner: Planner, facts: Facts) -> None:
    facts.states[7], facts.late = ContentState.CLOSED, True
    assert planner.plan_row(make(1, 7, b"a")) and planner.plan_row(content(2, 7))
    assert [put.kind for put in planner.plan.puts.values()] == [SourceKind.STABLE] and planner.batch.requeued == [(7, 7)]


def test_one_that_changes_all_the_time_only_comes_again(planner: Planner, facts: Facts) -> None:
    facts.states[7], facts.late, facts.unstable_contents = ContentState.CLOSED, True, {(7, 1)}
    assert planner.plan_row(make(1, 7, b"a")) and planner.plan_row(content(2, 7))
    assert acts(planner) == [] and planner.batch.requeued == [(7, 7)]


@pytest.mark.parametrize("state", [ContentState.OPEN, ContentState.DOOMED, ContentState.LOST])
def test_what_cannot_be_published_is_passed_over(planner: Planner, facts: Facts, state: ContentState) -> None:
    facts.states[7] = state
    assert planner.plan_row(make(1, 7, b"a")) and planner.plan_row(content(2, 7)) and acts(planner) == []


def test_a_later_close_of_the_same_content_counts(planner: Planner, facts: Facts) -> None:
    facts.repeats = {2}
    for row in (make(1, 7, b"a"), content(2, 7), make(3, 8, b"b"), content(4, 8), content(5, 7)):
        assert planner.plan_row(row)
    assert acts(planner) == [("put", 8, b"b"), ("put", 7, b"a")]


def test_a_moved_directory_is_a_batch_of_its_own(planner: Planner) -> None:
    planner.view.set_entry(ROOT, b"d", PfsEntry(5, Fingerprint(50)))
    assert planner.plan_row(make(1, 7, b"a")) and planner.plan_row(content(2, 7))
    assert not planner.plan_row(rename(3, 5, b"d", b"e", DIRECTORY))
    assert planner.batch.last_seq == 2


def test_batches_are_bounded(planner: Planner, facts: Facts) -> None:
    taken = 0
    while planner.plan_row(make(2 * taken + 1, 10 + taken, b"%d" % taken)) and planner.plan_row(content(2 * taken + 2, 10 + taken)):
        taken += 1
    assert taken == PUTS_MAX


def test_a_large_file_waits_for_the_small_ones_before_it_and_goes_alone(planner: Planner, facts: Facts) -> None:
    facts.sizes[8] = limits.GIB
    for row in (make(1, 7, b"small"), content(2, 7), make(3, 8, b"large")):
        assert planner.plan_row(row)
    assert not planner.plan_row(content(4, 8))


@pytest.mark.parametrize(
    ("act", "row", "kind"),
    [
        ("put", content(3, 7), RefusedKind.BYTES),
        ("put", JournalRow(3, "synced", 7, content=7), RefusedKind.BYTES),
        ("put", content(3, 8), RefusedKind.NAMES),
        ("put", make(3, 7, b"d", DIRECTORY), RefusedKind.NAMES),
        ("put", None, RefusedKind.NAMES),
        ("link", content(3, 7), RefusedKind.NAMES),
        ("move", rename(3, 7, b"a", b"b"), RefusedKind.NAMES),
        ("attributes", content(3, 7), RefusedKind.ATTRIBUTES),
    ],
)
def test_what_of_a_file_the_pfs_refuses(act: str, row: JournalRow | None, kind: RefusedKind) -> None:
    """P1: only what was refused waits; a name that cannot be made does not hold back bytes, nor the other way round."""
    action = PfsAction(act, 3 * KEYS_PER_ROW + 1, 7, PfsLocation(ROOT, b"a", ()), Fingerprint())
    assert choose_kind(action, row) is kind


def test_a_row_that_begins_the_next_batch_leaves_nothing_in_this_one(planner: Planner, facts: Facts) -> None:
    """P6: one of its names cannot appear yet, which a later row is to settle; that comes with the row itself."""
    planner.view.set_pending(99, b"elsewhere", 8)
    facts.sizes[8] = BATCH_BYTES_MAX
    for row in (make(1, 7, b"a"), content(2, 7), make(3, 8, b"b")):
        assert planner.plan_row(row)
    assert not planner.plan_row(content(4, 8)) and planner.batch.settle_rows == []
