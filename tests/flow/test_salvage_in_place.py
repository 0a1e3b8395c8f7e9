"""P5, P7, P9: if a change in place dies with its writer, the file shows the generation that other nodes have."""

import contextlib
import os
from pathlib import Path

import pytest
from clique_world import cluster_of, send_copy
from local_node import inject_fault
from salvage_world import NEW, OLD, appended, change, decide, file_of, hear, held, make_replicated, publish, send, shown, tidy

from ckptfs import disk
from ckptfs.catalog import copies, mover_requests, namespace
from ckptfs.clique import locations
from ckptfs.clique.peer_api import PeerFailed
from ckptfs.flow.copy_records import AnnounceCopies
from ckptfs.flow.evict import Evict
from ckptfs.flow.fetch import Fetch
from ckptfs.flow.recover import Recover
from ckptfs.model import ROOT, ContentState, CopyState, Tier
from ckptfs.tiers import local_copies

pytestmark = pytest.mark.usefixtures("no_rivals")


@pytest.mark.parametrize("stop", ["open", "closed", "sealed"])
@pytest.mark.parametrize("heard", [False, True])
def test_the_generation_that_others_have_is_shown(tmp_path: Path, stop: str, heard: bool) -> None:
    """P9: whole, with its size and time, on all nodes; and it gets as many copies as before."""
    cluster, content, one, two, three = make_replicated(tmp_path, 3)
    inode = one.inode(content)
    change(one, content, appended, stop=stop)
    if heard:
        hear(two, content)
        assert two.copies(content) == {Tier.RAM: CopyState.GOOD if stop == "open" else CopyState.STALE}
    decide(two)
    assert file_of(cluster, inode).content == content, "its writer lives"
    one.kill()
    decide(three, two)
    former, generation, size, mtime_ns = shown(cluster, inode)
    assert former != content and (generation, size, mtime_ns) == (1, len(OLD), 2)
    assert held(two, inode) == OLD
    assert (file_of(cluster, inode).salvaged or {})["content"] == content
    assert two.db.value("SELECT count(*) FROM report WHERE key LIKE 'trouble:former:%'") == 1
    tidy(two)
    assert two.files(Tier.RAM) == {former}, "one file, and one copy of it"
    send(two, former)
    assert three.data(former) == OLD
    decide(two, three)
    assert shown(cluster, inode)[0] == former


def test_the_next_generation_takes_its_place_when_it_is_there(tmp_path: Path) -> None:
    cluster, content, one, two = make_replicated(tmp_path, 2)
    change(one, content, appended)
    hear(two, content)
    tidy(two)
    assert two.files(Tier.RAM) == {content} and two.data(content) == OLD
    send(one, content)
    hear(two, content)
    one.kill()
    decide(two)
    assert shown(cluster, one.inode(content)) == (content, 2, len(OLD + NEW), 3) and two.data(content) == OLD + NEW
    assert locations.load(cluster.store, [content])[content].holders == [1, 2]


def test_nothing_takes_it_away_while_it_is_all_that_others_have(tmp_path: Path) -> None:
    """P5: neither a sweep nor a tier that is full."""
    cluster, content, one, two, three = make_replicated(tmp_path, 3)
    change(one, content, appended)
    hear(two, content)
    two.squeeze(Tier.RAM, 3000)
    evict = Evict(two.db, two.tiers, two.config, two.told)
    for _ in range(2):
        tidy(two)
        evict.step()
        evict.retry_now()
    assert two.data(content) == OLD
    change(one, content, appended)
    hear(two, content)
    told = locations.load(cluster.store, [content])[content]
    assert [(copy.node, copy.generation) for copy in told.copies] == [(2, 1)], "the others know what it has"
    assert send_copy(one, three, content)
    hear(three, content)
    tidy(two)
    assert content not in two.files(Tier.RAM), "its writer and another node have what came after it"


def test_a_restarted_mover_still_announces_it(tmp_path: Path) -> None:
    cluster, content, one, two = make_replicated(tmp_path, 2)
    change(one, content, appended)
    hear(two, content)
    tell = AnnounceCopies(two.db, cluster_of(two))
    tell.prepare()
    tell.step()
    assert [copy.generation for copy in locations.load(cluster.store, [content])[content].copies] == [1]
    one.kill()
    decide(two)
    assert held(two, one.inode(content)) == OLD


def test_the_writer_returns_with_what_it_changed(tmp_path: Path) -> None:
    """Nobody has written the file meanwhile: it holds what was closed last, and gets its copies."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    inode = one.inode(content)
    change(one, content, appended)
    one.kill()
    decide(two)
    former = shown(cluster, inode)[0]
    one.revive()
    tidy(one)
    decide(two)
    assert shown(cluster, inode) == (content, 2, len(OLD + NEW), 3) and file_of(cluster, inode).salvaged is None
    assert two.db.value("SELECT count(*) FROM report WHERE key LIKE 'trouble:former:%'") == 0
    tidy(two)
    assert former in two.files(Tier.RAM), "it is the former content again"
    send(one, content)
    hear(two, content)
    tidy(two)
    assert two.files(Tier.RAM) == {content} and two.data(content) == OLD + NEW


def test_the_writer_returns_after_the_file_was_written_again(tmp_path: Path) -> None:
    cluster, content, one, two = make_replicated(tmp_path, 2)
    inode = one.inode(content)
    change(one, content, appended)
    one.kill()
    decide(two)
    former = shown(cluster, inode)[0]
    change(two, former, lambda data: data.reverse())
    assert shown(cluster, inode)[:2] == (former, 2)
    one.revive()
    one.db.run("INSERT OR REPLACE INTO cached_key VALUES ('i', ?, x'', 1, x'7b226e616d6573223a5b5d7d')", inode)
    decide(two)
    tidy(one)
    assert shown(cluster, inode)[:2] == (former, 2) and two.data(former) == OLD[::-1]
    beside = namespace.find_child(one.db, ROOT, b"file.ckptfs-conflict-n1-1")
    assert beside is not None and (beside.content, beside.size) == (content, len(OLD + NEW))
    assert one.data(content) == OLD + NEW and one.state(content) is ContentState.SEALED


@pytest.mark.parametrize("stop", ["open", "closed", "sealed"])
@pytest.mark.parametrize("heard", [False, True])
def test_another_node_changed_it(tmp_path: Path, stop: str, heard: bool) -> None:
    """P9: who wrote it first has what the other one destroyed by writing into it."""
    cluster, content, one, two, three = make_replicated(tmp_path, 3)
    inode = one.inode(content)
    change(two, content, appended, stop=stop)
    if heard:
        hear(one, content)
    two.kill()
    decide(three, one)
    assert shown(cluster, inode)[1:] == (1, len(OLD), 2)
    assert held(one, inode) == OLD and one.state(shown(cluster, inode)[0]) is ContentState.SEALED
    assert one.db.value("SELECT remote FROM content WHERE id = ?", shown(cluster, inode)[0]) == 0
    tidy(one)
    assert one.files(Tier.RAM) == {shown(cluster, inode)[0]}


def test_of_several_generations_the_newest_is_shown(tmp_path: Path) -> None:
    """Also when who has an older one looks first; never a mixture of both (P7)."""
    cluster, content, one, two, three, four = make_replicated(tmp_path, 4)
    inode = one.inode(content)
    change(one, content, appended)
    hear(two, content)
    send_copy(one, three, content)
    hear(three, content)
    change(one, content, lambda data: data.reverse())
    hear(two, content)
    hear(three, content)
    one.kill()
    decide(two, four, three, two)
    assert shown(cluster, inode)[1:3] == (2, len(OLD + NEW))
    assert held(three, inode) == OLD + NEW


def test_a_file_changed_in_place_and_then_rewritten_shows_its_replicated_generation(tmp_path: Path) -> None:
    """P9: what nobody else had of the former content does not hide what they had before."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    inode = one.inode(content)
    change(one, content, appended)
    hear(two, content)
    newer = one.write(inode, NEW)
    one.seal()
    publish(one)
    tidy(one, two)
    assert shown(cluster, inode)[0] == newer
    one.kill()
    decide(two)
    assert shown(cluster, inode)[1:3] == (1, len(OLD)) and held(two, inode) == OLD


def test_what_is_read_here_stays_what_it_is(tmp_path: Path) -> None:
    """P7: whoever has the former generation open shares nothing with what the file holds from now on."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    two.hold_open(content)
    fd = two.tiers[Tier.RAM].open(content)
    with disk.closing(fd):
        change(one, content, appended)
        one.kill()
        decide(two)
        former = shown(cluster, one.inode(content))[0]
        assert two.data(former) == OLD
        there = two.tiers[Tier.RAM].stat(former)
        assert there is not None and there.st_ino != os.fstat(fd).st_ino


def test_what_is_not_what_it_was_is_not_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P4, P7: a bad copy is found out before anybody is told of it."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    change(one, content, appended)
    hear(two, content)
    with os.fdopen(two.tiers[Tier.RAM].open(content, os.O_RDWR), "wb") as file:
        file.write(b"rot")
    one.kill()
    decide(two)
    assert shown(cluster, one.inode(content))[0] == content
    assert "is not generation 1" in caplog.text and two.files(Tier.RAM) == set()


@pytest.mark.parametrize("label", ["fallback:shown", "fetch:peer:older:read"])
def test_a_failure_anywhere_is_made_good(tmp_path: Path, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: the former generation is still there, and a mover that begins anew shows it."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    inode = one.inode(content)
    change(one, content, appended)
    one.kill()
    inject_fault(monkeypatch, f"{label}=EIO")
    with contextlib.suppress(OSError):
        decide(two)
    inject_fault(monkeypatch, "")
    Recover(two.db, two.tiers, two.config, two.told).step()
    tidy(two)
    decide(two)
    former = shown(cluster, inode)[0]
    assert former != content and two.data(former) == OLD
    assert not two.row(former).is_remote and two.db.value("SELECT under_replicated FROM content WHERE id = ?", former) == 1


def test_the_previous_generation_is_written_back(tmp_path: Path) -> None:
    """Who shows a former generation writes it back, if its writer did not come to that."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    change(one, content, appended)
    two.db.is_journalled = True
    one.kill()
    decide(two)
    former = shown(cluster, one.inode(content))[0]
    assert two.db.rows("SELECT op, inode, content FROM journal") == [("content", one.inode(content), former)]


def test_a_fetch_that_fails_leaves_what_was_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: the former generation gives way to the next one only when that is here."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    inode = one.inode(content)
    two.learn(one.inode(content), b"file", content, len(OLD))
    change(one, content, appended)
    hear(two, content)

    def broken(*_: object, **__: object) -> int:
        assert two.files(Tier.RAM) > {content}, "the next one is on its way"
        one.kill()
        raise PeerFailed("the writer died in the middle of it")

    monkeypatch.setattr(two.peers, "fetch", broken)
    want = mover_requests.insert_request(two.db, mover_requests.FETCH, inode)
    Fetch(two.db, two.tiers, two.config, two.told, cluster_of(two)).step()
    assert mover_requests.is_open(two.db, want) and two.copies(content) == {Tier.RAM: CopyState.STALE} and two.data(content) == OLD
    decide(two)
    assert shown(cluster, inode)[1:3] == (1, len(OLD)) and held(two, inode) == OLD
    tidy(two)
    assert two.files(Tier.RAM) == {shown(cluster, inode)[0]}


def test_a_successful_fetch_leaves_no_stash(tmp_path: Path) -> None:
    _, content, one, two = make_replicated(tmp_path, 2)
    two.learn(one.inode(content), b"file", content, len(OLD))
    change(one, content, appended)
    hear(two, content)
    mover_requests.insert_request(two.db, mover_requests.FETCH, one.inode(content))
    Fetch(two.db, two.tiers, two.config, two.told, cluster_of(two)).step()
    assert two.data(content) == OLD + NEW and two.files(Tier.RAM) == {content}


@pytest.mark.parametrize("renamed", [True, False])
def test_a_mover_that_dies_while_it_fetches(tmp_path: Path, renamed: bool) -> None:
    """P5, P8: what was put aside is put back, also when its file never got its other name."""
    _, content, one, two = make_replicated(tmp_path, 2)
    change(one, content, appended)
    hear(two, content)
    seen = two.row(content)
    with two.db.transaction():
        number = local_copies.stash(two.db, two.tiers[Tier.RAM], content)
        assert number is not None and copies.insert_filling_copy(two.db, seen, Tier.RAM)
    if renamed:
        os.close(two.tiers[Tier.RAM].create(content))
    else:
        two.tiers[Tier.RAM].rename(number, content)
        two.db.run("DELETE FROM copy WHERE state = 0")
    Recover(two.db, two.tiers, two.config, two.told).step()
    assert two.copies(content) == {Tier.RAM: CopyState.STALE} and two.data(content) == OLD and two.files(Tier.RAM) == {content}
    one.kill()
    decide(two)
    assert held(two, one.inode(content)) == OLD
