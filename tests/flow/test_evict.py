"""P5, P10, F1: room is made without removing the last copy on which a promise rests."""

import logging
import os
import time
from pathlib import Path

import pytest
from local_node import MIB, Node, in_process
from loop_disk import tmpfs_at

from ckptfs import disk
from ckptfs.catalog import copies, namespace, retention_state, summary
from ckptfs.flow.evict import TROUBLE, Evict
from ckptfs.flow.seal import Seal
from ckptfs.model import ROOT, ContentState, CopyState, Tier
from ckptfs.tiers import space
from ckptfs.tiers.space import Capacity

SIZE = 100_000


def filled(node: Node, count: int = 10, *, tier: Tier = Tier.RAM, room: int = 10, published: bool = False) -> list[int]:
    """`count` sealed contents, the first one used least recently, in a tier with room for `room`."""
    contents = [node.make(b"%d" % number, os.urandom(SIZE), tier=tier) for number in range(count)]
    Seal(node.db, node.tiers, node.config, node.told).step()
    for number, content in enumerate(contents):
        node.db.run("UPDATE copy SET used_ns = ? WHERE content = ?", number, content)
    node.squeeze(tier, room * SIZE)
    node.publish(*(contents if published else ()))
    return contents


def evict(node: Node) -> Evict:
    return Evict(node.db, node.tiers, node.config, node.told)


def settle(step: Evict) -> None:
    for _ in range(100):
        if not step.step():
            return
    raise AssertionError("evict never comes to rest")


def test_room_is_made_for_the_next_one_while_that_costs_nothing(node: Node) -> None:
    """Below the high watermark a file that is whole elsewhere leaves, so that the next checkpoint finds room in RAM, not on NVMe."""
    contents = filled(node, 8)
    evict(node).step()
    assert node.files(Tier.RAM) == set(contents) and node.files(Tier.NVME) == set(), "nothing is moved for it"
    node.publish(*contents)
    settle(evict(node))
    assert node.files(Tier.RAM) == set(contents[2:])


def test_what_becomes_safe_while_evict_rests_leaves_without_another_hint(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last hint may come while evict rests after having found nothing to do."""
    contents = filled(node, 8)
    step = evict(node)
    assert not step.step() and step.next_due_s() is None
    node.publish(*contents)
    assert not step.step()
    due_s = step.next_due_s()
    assert due_s is not None
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + due_s)
    settle(step)
    assert node.files(Tier.RAM) == set(contents[2:]) and step.next_due_s() is None


@pytest.mark.parametrize(
    ("used", "expected", "leaves"),
    [(50, 20, 0), (59, 20, 0), (60, 20, 1), (61, 20, 2), (79, 1, 19), (50, 70, 41), (50, 79, 50), (50, 80, 0), (50, 500, 0), (0, 79, 0)],
)
def test_how_much_should_leave(used: int, expected: int, leaves: int) -> None:
    assert space.get_excess_bytes_for(Capacity(100, 100 - used, used), expected, 0.8, 0.6) == leaves


def test_below_the_watermark_nothing_goes(node: Node) -> None:
    contents = filled(node, 6, published=True)
    assert evict(node).step() is False
    assert node.files(Tier.RAM) == set(contents)


def test_published_contents_leave_in_lru_order_down_to_the_low_watermark(node: Node) -> None:
    contents = filled(node, published=True)
    settle(evict(node))
    assert node.files(Tier.RAM) == set(contents[4:])
    assert all(node.copies(content) == {} for content in contents[:4])
    assert all(node.state(content) is ContentState.SEALED for content in contents)
    assert node.files(Tier.NVME) == set()


def test_an_unpublished_content_moves_to_nvme_verified(node: Node) -> None:
    contents = filled(node)
    before = [node.data(content) for content in contents]
    settle(evict(node))
    assert node.files(Tier.NVME) == set(contents[:4]) and node.files(Tier.RAM) == set(contents[4:])
    for content, data in zip(contents[:4], before, strict=False):
        (copy,) = copies.list_copies(node.db, content)
        assert copy.tier is Tier.NVME and copy.state is CopyState.GOOD and copy.verified_ns > 0
        assert node.data(content, Tier.NVME) == data


def test_what_a_disconnected_node_deleted_leaves_before_anything_else(node: Node) -> None:
    """P1, P10: it is kept for other nodes that may have named it, but never at the price of a new file."""
    contents = filled(node)
    for number in (8, 9):
        with node.db.transaction():
            inode = namespace.unlink(node.db, ROOT, b"%d" % number).id
            node.db.run("INSERT INTO cached_key (kind, number, name, revision, value) VALUES ('i', ?, x'', 1, x'7b7d')", inode)
            assert not namespace.delete_forgotten(node.db, [inode])
    node.hold(contents[9])
    assert evict(node).step()
    assert [content for content in contents if node.state(content) is ContentState.DOOMED] == [contents[8]], "the other one is open"
    assert node.files(Tier.NVME) == set(), "nothing is moved for it"


def test_an_open_file_stays(node: Node) -> None:
    contents = filled(node)
    node.hold(contents[0])
    node.publish(contents[0])
    settle(evict(node))
    assert contents[0] in node.files(Tier.RAM) and contents[1] not in node.files(Tier.RAM)


@pytest.mark.parametrize("lacks", ["digest", "generation", "complete"])
def test_a_publication_that_is_not_this_very_content_does_not_count(node: Node, lacks: str) -> None:
    node.configure(nvme=None)
    contents = filled(node, published=True)
    value = {"digest": None, "generation": 0, "complete": 0}[lacks]
    node.db.run(f"UPDATE pfs_file SET {lacks} = ?", value)
    settle(evict(node))
    assert node.files(Tier.RAM) == set(contents), "the last copy of something was dropped"


def test_an_open_just_before_eviction_wins(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = filled(node, published=True)
    chosen = copies.list_evictable

    def spare(*values: object, **named: object) -> object:
        found = chosen(*values, **named)  # type: ignore[arg-type]
        node.hold(contents[0])
        return found

    monkeypatch.setattr(copies, "list_evictable", spare)
    evict(node).step()
    assert contents[0] in node.files(Tier.RAM)


def test_a_content_fetched_during_its_eviction_keeps_its_new_file(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: between evict's commit and the removal of the files somebody brings one of the contents back under the same name."""
    contents = filled(node, published=True)
    act = disk.act

    def interrupted(label: str, *values: object, **named: object) -> object:
        if label == "evict:forgotten":
            assert copies.insert_filling_copy(node.db, node.row(contents[0]), Tier.RAM)
            with os.fdopen(node.tiers[Tier.RAM].create(contents[0]), "wb") as file:
                file.write(b"new")
        return act(label, *values, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(disk, "act", interrupted)
    evict(node).step()
    assert node.data(contents[0]) == b"new"
    assert contents[1] not in node.files(Tier.RAM), "the others went"


def test_a_content_that_is_being_copied_is_not_copied_twice(node: Node) -> None:
    """P5: two who fill one file would take each other's away, after one of them said that it is whole."""
    contents = filled(node)
    row = node.row(contents[0])
    assert copies.insert_filling_copy(node.db, row, Tier.NVME)
    assert not copies.insert_filling_copy(node.db, row, Tier.NVME)
    settle(evict(node))
    assert contents[0] in node.files(Tier.RAM) and contents[0] not in node.files(Tier.NVME)
    copies.set_copy_state(node.db, contents[0], Tier.NVME, CopyState.GOOD)
    assert node.copies(contents[0])[Tier.NVME] is CopyState.FILLING, "whoever checked an older file of this name says nothing of this one"


def test_a_file_that_is_deleted_while_it_is_moved_is_no_trouble(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    contents = filled(node)
    fill = copies.insert_filling_copy

    def deleted(*values: object) -> bool:
        announced = fill(*values)  # type: ignore[arg-type]
        node.db.run("UPDATE content SET state = 3, change = change + 1 WHERE id = ?", contents[0])
        node.tiers[Tier.RAM].remove(contents[0])
        monkeypatch.setattr(copies, "insert_filling_copy", fill)
        return announced

    monkeypatch.setattr(copies, "insert_filling_copy", deleted)
    with caplog.at_level(logging.WARNING):
        settle(evict(node))
    assert caplog.messages == []


def test_without_nvme_and_pfs_nothing_leaves_and_one_line_is_logged(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    node.configure(nvme=None)
    contents = filled(node)
    step = evict(node)
    assert not step.step() and not step.step()
    assert node.files(Tier.RAM) == set(contents)
    assert caplog.text.count("no copy may leave it now") == 1
    assert step.next_due_s() is not None, "it must look again"


def test_a_bad_copy_in_ram_is_not_carried_on(node: Node) -> None:
    """P4: what does not have its digest is quarantined, kept, and never copied as if it were good."""
    contents = filled(node)
    node.spoil(contents[0], Tier.RAM)
    step = evict(node)
    step.step()
    assert node.copies(contents[0]) == {Tier.RAM: CopyState.QUARANTINED}
    assert contents[0] not in node.files(Tier.NVME) and contents[0] in node.files(Tier.RAM)
    assert node.state(contents[0]) is ContentState.LOST
    step.retry_now()
    settle(step)
    assert node.files(Tier.NVME) == set(contents[1:5])


@pytest.mark.parametrize("fault", ["ENOSPC", "EIO", "EROFS"])
def test_trouble_with_nvme_is_reported_and_does_not_stop_dropping(node: Node, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = filled(node)
    step = evict(node)
    monkeypatch.setattr(disk, "_fault", f"duplicate:write={fault}@*")
    assert step.step() is False
    assert fault in str(summary.list_troubles(node.db, TROUBLE))
    assert node.copies(contents[0]) == {Tier.RAM: CopyState.GOOD} and node.files(Tier.NVME) == set()
    node.publish(*contents)
    step.retry_now()
    settle(step)
    assert node.files(Tier.RAM) == set(contents[4:])
    assert not summary.list_troubles(node.db, TROUBLE)


def test_a_full_nvme_lets_go_what_is_on_the_pfs_only(node: Node) -> None:
    contents = filled(node, tier=Tier.NVME)
    node.publish(*contents[:5])
    with node.db.transaction():  # A copy in RAM is no reason to drop the one that survives a power cut.
        node.db.run("INSERT INTO copy (content, tier, state, verified_ns) VALUES (?, 'ram', 1, 1)", contents[9])
        node.db.run("UPDATE copy SET used_ns = -1 WHERE content = ?", contents[9])
    settle(evict(node))
    assert node.files(Tier.NVME) == set(contents[1:])


def test_short_memory_evicts_published_contents_from_ram(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = filled(node, 5)
    node.publish(*contents[:2])
    roomy = node.tiers[Tier.RAM].get_capacity()
    monkeypatch.setattr(node.tiers[Tier.RAM], "get_capacity", lambda: Capacity(roomy.total, 0, roomy.used))
    evict(node).step()
    assert node.files(Tier.RAM) == set(contents[1:]), "as much as gives some headroom, and no more"
    assert node.files(Tier.NVME) == set()


def test_nobody_looks_while_nobody_writes(node: Node) -> None:
    content = node.make(b"file", b"data", closed=False)
    step = evict(node)
    step.step()
    assert step.next_due_s() is None
    handle = node.hold(content, writer=True)
    waits = [step.next_due_s() for _ in range(8)]
    assert waits[0] == 0.25 and waits[-1] == 5.0, "the looks must become rare while nothing changes"
    node.db.run("DELETE FROM handle WHERE id = ?", handle)
    assert step.next_due_s() is None


@pytest.mark.parametrize(
    ("total", "used", "hard", "expected"),
    [
        (4096, 1000, None, 4096),  # room enough
        (4096, 4090, None, 8192),  # doubled at most
        (4096, 4090, 5000, 5000),  # up to what was configured
        (4096, 4090, 4096, 4096),  # which is a hard bound
        (4096, 4090, 4100, 4096),  # no step for next to nothing
        (16384, 16380, None, 16380 + 8192 - 3200),  # up to what leaves the reserve to others
    ],
)
def test_how_far_the_ram_tier_is_raised(total: int, used: int, hard: int | None, expected: int) -> None:
    bound = None if hard is None else hard * MIB
    assert space.choose_ram_size(total * MIB, used * MIB, configured=bound, available=8192 * MIB, memory=32000 * MIB) == expected * MIB


LABELS = [
    "duplicate:announced", "duplicate:read", "duplicate:write", "duplicate:truncate", "duplicate:fsync", "duplicate:directory",
    "duplicate:check:read", "duplicate:counted", "duplicate:persist", "evict:forgotten", "tier:create", "tier:open", "tier:remove",
]  # fmt: skip


@pytest.mark.crash
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("action", ["kill", "kill-after", "EIO"])
def test_dying_or_failing_anywhere_loses_nothing(tmp_path: Path, label: str, action: str) -> None:
    """P5, P8: at every moment each content has a good copy whose bytes are right."""
    node = Node(tmp_path)
    contents = filled(node, 4, room=4)
    before = [node.data(content) for content in contents]
    script = """
from ckptfs.flow.evict import Evict
from ckptfs.flow.recover import Recover
node.squeeze(Tier.RAM, 4 * 100_000)
Recover(node.db, node.tiers, node.told).run()
step = Evict(node.db, node.tiers, node.config, node.told)
for _ in range(10):
    try:
        if not step.step():
            break
    except OSError:
        pass
"""
    in_process(tmp_path, script, fault=f"{label}={action}")
    for content, data in zip(contents, before, strict=True):
        good = [tier for tier, state in node.copies(content).items() if state is CopyState.GOOD]
        assert good, "a content has no good copy any more"
        assert all(node.data(content, tier) == data for tier in good)
    assert in_process(tmp_path, script) == 0
    assert {len(node.copies(content)) for content in contents} == {1}
    assert node.files(Tier.NVME) == {content for content in contents if node.copies(content) == {Tier.NVME: CopyState.GOOD}}
    assert len(node.files(Tier.NVME)) == 2


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_tmpfs_is_really_enlarged_and_keeps_what_is_in_it(tmp_path: Path) -> None:
    with tmpfs_at(tmp_path, "size=64M,nodev,nosuid"):
        (tmp_path / "file").write_bytes(b"x" * MIB)
        space.resize_ram(tmp_path, 192 * MIB)
        capacity = space.read_capacity(tmp_path)
        assert (capacity.total, capacity.used) == (192 * MIB, MIB)
        assert os.statvfs(tmp_path).f_flag & os.ST_NODEV


def test_an_enlargement_that_is_refused_is_an_error_with_words(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot be enlarged"):
        space.resize_ram(tmp_path, 192 * MIB)


# --- retention rules (D5) ---------------------------------------------------------------------------------------------


def retire(node: Node, leaving: list[int], staying: list[int]) -> None:
    inodes = [[node.inode(content) for content in contents] for contents in (leaving, staying)]
    retention_state.record_retired(node.db, *inodes)


@pytest.mark.parametrize("tier", [Tier.RAM, Tier.NVME])
def test_what_rules_keep_on_the_pfs_only_leaves_though_there_is_room(node: Node, tier: Tier) -> None:
    """P5: not before it is there."""
    contents = filled(node, 6, tier=tier, room=100)
    retire(node, contents[:4], contents[3:])
    settle(evict(node))
    assert node.files(tier) == set(contents), "nothing is on the PFS yet"
    node.publish(*contents)
    settle(evict(node))
    assert node.files(tier) == set(contents[3:])


def test_an_open_file_leaves_later_and_what_is_fetched_again_stays(node: Node) -> None:
    contents = filled(node, 2, room=100, published=True)
    retire(node, contents, [])
    handle = node.db.insert("INSERT INTO handle (inode, content, writer) VALUES (?, ?, 0)", node.inode(contents[0]), contents[0])
    step = evict(node)
    settle(step)
    assert node.files(Tier.RAM) == {contents[0]} and step.next_due_s() is not None
    node.db.run("DELETE FROM handle WHERE id = ?", handle)
    settle(step)
    assert node.files(Tier.RAM) == set() and step.next_due_s() is None
    assert copies.insert_filling_copy(node.db, node.row(contents[0]), Tier.RAM)
    assert copies.mark_copy_good(node.db, node.row(contents[0]), Tier.RAM)
    assert retention_state.list_retired(node.db, Tier.RAM, at_most=1) == []
