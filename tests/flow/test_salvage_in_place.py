"""P5, P7, P9: what others hold of a file that is written in place is its previous content, which never changes (see test_salvage)."""

import os
from pathlib import Path

import pytest
from clique_world import send_copy
from salvage_world import NEW, OLD, appended, change, decide, file_of, hear, held, knows, make_replicated, publish, send, shown, tidy

from ckptfs import disk
from ckptfs.flow.evict import Evict
from ckptfs.flow.recover import Recover
from ckptfs.model import ContentState, Tier

pytestmark = pytest.mark.usefixtures("no_rivals")


@pytest.mark.parametrize("stop", ["open", "closed", "sealed"])
@pytest.mark.parametrize("writer", [0, 1])
def test_the_previous_content_is_shown(tmp_path: Path, stop: str, writer: int) -> None:
    """P9: whole, with its size and time, on all nodes, also if a node that did not make the file has written it."""
    cluster, content, *nodes = make_replicated(tmp_path, 3)
    inode = nodes[0].inode(content)
    if writer:
        knows(nodes[writer], inode, content)
    newer = change(nodes[writer], content, appended, stop=stop)
    assert newer != content and nodes[writer].files(Tier.RAM) == {newer}
    assert file_of(cluster, inode).content == (content if stop == "open" else newer), "an open file is as it was closed"
    nodes[writer].kill()
    survivor = nodes[1 - writer]
    decide(nodes[2], survivor)
    assert shown(cluster, inode) == (content, 1, len(OLD), 2) and held(survivor, inode) == OLD
    tidy(survivor)
    assert survivor.files(Tier.RAM) == {content}, "one file, and one copy of it"


def test_nothing_takes_it_away_while_it_is_all_that_others_have(tmp_path: Path) -> None:
    """P5: neither a sweep nor a tier that is full."""
    _, content, one, two, _ = make_replicated(tmp_path, 3)
    newer = change(one, content, appended)
    hear(two, newer)
    two.squeeze(Tier.RAM, 3000)
    evict = Evict(two.db, two.tiers, two.config, two.told)
    for _ in range(2):
        tidy(two)
        evict.step()
        evict.retry_now()
    assert two.data(content) == OLD


def test_of_several_contents_the_newest_that_anybody_has_is_shown(tmp_path: Path) -> None:
    """Also when a node that has an older one looks first; never a mixture of both (P7)."""
    cluster, content, one, two, three, four = make_replicated(tmp_path, 4)
    inode = one.inode(content)
    newer = change(one, content, appended)
    send(one, newer)
    publish(one)
    assert one.state(content) is ContentState.DOOMED, "enough nodes have what came after it"
    change(one, newer, lambda data: data.reverse())
    one.kill()
    decide(two, four, three, two)
    assert shown(cluster, inode)[:3] == (newer, 2, len(OLD + NEW))
    assert held(two, inode) == OLD + NEW


def test_a_file_changed_in_place_and_then_rewritten_shows_what_others_have(tmp_path: Path) -> None:
    """P9: what nobody else had does not hide what they had before."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    inode = one.inode(content)
    change(one, content, appended)
    newest = one.write(inode, NEW)
    one.seal()
    publish(one)
    tidy(one, two)
    assert shown(cluster, inode)[0] == newest and one.files(Tier.RAM) == {newest}
    one.kill()
    decide(two)
    assert shown(cluster, inode)[1:3] == (1, len(OLD)) and held(two, inode) == OLD


def test_a_reader_of_the_previous_content_shares_nothing_with_the_next_one(tmp_path: Path) -> None:
    """P7: blocks of it are copied, and it goes when the next one is safe."""
    _, content, one, two = make_replicated(tmp_path, 2)
    with disk.closing(two.tiers[Tier.RAM].open(content)) as fd:
        newer = change(one, content, appended)
        send_copy(one, two, newer)
        assert two.data(newer) == OLD + NEW and os.pread(fd, len(OLD) + 1, 0) == OLD
        there = two.tiers[Tier.RAM].stat(newer)
        assert there is not None and there.st_ino != os.fstat(fd).st_ino


@pytest.mark.parametrize("left", ["both names", "the old name", "the new name"])
def test_a_crash_while_the_file_changes_its_name(tmp_path: Path, left: str) -> None:
    """P8: the file has both names until the rows say which one counts."""
    _, content, one, _ = make_replicated(tmp_path, 2)
    storage = one.tiers[Tier.RAM]
    if left == "both names":  # The rows were not recorded.
        assert storage.link(content, content + 1)
        expected = content
    else:
        expected = one.reopen(content, Tier.RAM)
        if left == "the old name":
            assert storage.link(expected, content)
    Recover(one.db, one.tiers, one.told).run()
    tidy(one)
    assert one.data(expected) == OLD and one.row(expected).state is (ContentState.SEALED if expected == content else ContentState.OPEN)


def test_the_previous_content_is_written_back(tmp_path: Path) -> None:
    """The node that shows it writes it back, if its writer did not come to that."""
    _, content, one, two = make_replicated(tmp_path, 2)
    change(one, content, appended)
    two.db.is_journalled = True
    one.kill()
    decide(two)
    assert two.db.rows("SELECT op, inode, content FROM journal") == [("content", one.inode(content), content)]
