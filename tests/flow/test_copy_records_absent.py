"""P3: what a node wrote and has lost is not counted by the others until it is there again."""

from pathlib import Path

import pytest
from clique_world import Node, bring, cluster_of, level, make_cluster, replicated

from ckptfs.catalog import contents, copies, mover_requests, remote_contents
from ckptfs.clique import locations
from ckptfs.flow.copy_records import AnnounceCopies
from ckptfs.model import ContentState, CopyState, Level, Tier
from ckptfs.store.kv import Get


def tell(node: Node, *, begin: bool = False) -> None:
    flow = AnnounceCopies(node.db, cluster_of(node))
    if begin:
        flow.prepare()
    flow.step()


def hear(node: Node, content: int) -> list[int]:
    """What a node finds in the store: who has it."""
    return locations.refresh(node.db, node.store, [content], node.number)[content].holders


@pytest.mark.parametrize("how", ["wiped", "bad"])
def test_the_level_is_that_of_the_copies_that_are_there(tmp_path: Path, how: str) -> None:
    """On all nodes; and again when the copy has come back."""
    cluster, one, two, three = make_cluster(tmp_path, 3)
    content = replicated(cluster, b"file", b"data" * 1000)
    assert hear(three, content) == [1, 2] and level(three, content) is Level.CLIQUE
    if how == "wiped":
        one.lose_ram()
        tell(one, begin=True)
    else:
        copies.set_copy_state(one.db, content, Tier.RAM, CopyState.QUARANTINED)
        tell(one)
    assert hear(three, content) == [2] and hear(two, content) == [2]
    assert level(one, content) is level(two, content) is level(three, content) is Level.LOCAL
    tell(one, begin=True)
    assert hear(three, content) == [2], "a mover that begins anew changes nothing"
    bring(one, one.inode(content))
    tell(one)
    assert hear(three, content) == hear(two, content) == [1, 2]
    assert level(one, content) is level(two, content) is level(three, content) is Level.CLIQUE
    assert (
        cluster.store.read([Get(locations.build_copy_key(content, 1))]).results[0] == ()
        and remote_contents.list_unannounced(one.db, 10) == []
    )


def test_what_was_away_is_not_when_it_was_written_again(tmp_path: Path) -> None:
    """The word is about one generation."""
    cluster, one, _, three = make_cluster(tmp_path, 3)
    content = replicated(cluster, b"file", b"data" * 1000)
    one.lose_ram()
    tell(one, begin=True)
    bring(one, one.inode(content))
    one.rewrite(content, lambda data: data.reverse())
    assert hear(three, content) == [1], "also before it was taken back"
    tell(one)
    assert cluster.store.read([Get(locations.build_copy_key(content, 1))]).results[0] == ()


def test_what_nobody_else_has_is_not_told_of(tmp_path: Path) -> None:
    """It is lost, which `c/` says; and what the PFS has needs no word."""
    cluster, one, _ = make_cluster(tmp_path, 2)
    there = replicated(cluster, b"file", b"data" * 1000)
    alone = one.written(b"alone", b"data")
    one.publish(there)
    one.lose_ram()
    remote_contents.mark_dropped_unannounced(one.db)
    assert remote_contents.list_unannounced(one.db, 10) == [] and one.copies(alone) == {}


def test_a_holder_that_writes_takes_its_old_word_back(tmp_path: Path) -> None:
    """What it says under `p/` is of what it had before."""
    cluster, one, two = make_cluster(tmp_path, 2)
    content = replicated(cluster, b"file", b"data" * 1000)
    two.rewrite(content, lambda data: data.reverse())
    tell(two)
    assert cluster.store.read([Get(locations.build_copy_key(content, 2))]).results[0] == () and hear(one, content) == [2]


@pytest.mark.parametrize("lives", [True, False])
def test_what_is_taken_for_lost_comes_back_from_who_says_in_the_store_to_have_it(tmp_path: Path, lives: bool) -> None:
    """P9: this node died before it heard that its peer had verified it, and its RAM with it."""
    cluster, one, two = make_cluster(tmp_path, 2)
    content = replicated(cluster, b"file", b"data" * 1000)
    one.lose_ram()
    one.db.run("DELETE FROM peer_copy")
    contents.set_state(one.db, content, ContentState.LOST)
    if not lives:
        two.kill()
    answer = bring(one, one.inode(content))
    assert answer.state == (mover_requests.DONE if lives else mover_requests.FAILED)
    assert one.state(content) is (ContentState.SEALED if lives else ContentState.LOST)
    assert not lives or one.data(content) == b"data" * 1000
