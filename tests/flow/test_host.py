"""P4, P7, P9: a copy from a peer counts after all of it is verified in place, and not before."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from clique_world import MIB, LocalCluster, early, make_cluster, offer_of
from local_node import inject_fault

from ckptfs import digest, disk, limits
from ckptfs.catalog import contents, copies, remote_contents
from ckptfs.catalog.contents import set_state
from ckptfs.clique.peer_api import CopyNotFound, Offer, PeerFailed, PeerRefused
from ckptfs.errors import Busy, InvalidArgument, NoSpace
from ckptfs.flow.recover import Recover
from ckptfs.model import ContentState, CopyState, Tier

BLOCK = limits.BLOCK_BYTES


@pytest.fixture
def two(tmp_path: Path) -> LocalCluster:
    return LocalCluster(tmp_path, 2)


def send(cluster: LocalCluster, content: int, offer: Offer | None = None) -> int:
    """Node 1 sends to node 2; how many bytes moved."""
    one, other = cluster.nodes[:2]
    fd = one.tiers[Tier.RAM].open(content)
    try:
        return one.peers.send(other.member, offer or offer_of(one, content), fd).bytes_moved
    finally:
        os.close(fd)


def test_what_was_received_is_a_verified_copy_of_a_peer(two: LocalCluster) -> None:
    one, other = two.nodes
    data = os.urandom(2 * BLOCK + 77)
    content = one.written(b"a", data)
    assert send(two, content) == len(data)
    assert other.data(content) == data
    (copy,) = copies.list_copies(other.db, content)
    row = other.row(content)
    assert copy.state is CopyState.GOOD and copy.verified_ns > 0
    assert row.is_remote and row.state is ContentState.SEALED and row.digest == digest.hash_content(row.block_digests or b"", len(data))
    assert other.files(Tier.RAM) == {content}
    assert remote_contents.count_hosted_bytes(other.db) == len(data)
    assert send(two, content) == 0, "what is there already is not sent again"


@pytest.mark.parametrize("is_own", [True, False])
def test_a_peer_gives_no_content_of_this_node_to_another_file(two: LocalCluster, is_own: bool) -> None:
    """P5, P9: for the peer it is the previous one of that file. This node has given it back to its own file meanwhile."""
    one, other = two.nodes
    content = one.written(b"a", b"hello")
    send(two, content)
    inode = other.inode(content)
    if is_own:
        remote_contents.mark_own(other.db, content, inode, 1, 1)
    assert send(two, content, replace(offer_of(one, content), inode=inode + 1)) == 0
    assert other.inode(content) == (inode if is_own else inode + 1)


def test_ids_of_this_node_stay_its_own(two: LocalCluster) -> None:
    one, other = two.nodes
    mine = other.make(b"mine", b"x")
    send(two, one.written(b"a", b"hello"))
    assert other.make(b"next", b"y") > mine
    assert one.make(b"more", b"z") >> limits.ID_COUNTER_BITS == 1


def test_a_next_generation_brings_only_what_changed(two: LocalCluster) -> None:
    one, other = two.nodes
    data = os.urandom(8 * BLOCK)
    content = one.written(b"a", data)
    send(two, content)

    def change(bytes_: bytearray) -> None:
        bytes_[3 * BLOCK + 5] ^= 1

    one.rewrite(content, change)
    assert other.copies(content) == {Tier.RAM: CopyState.STALE}, "the older one does not count as soon as the newer one is known"
    assert send(two, content) == BLOCK
    assert other.copies(content) == {Tier.RAM: CopyState.GOOD} and other.data(content) == one.data(content)


def test_another_file_of_the_series_lends_its_blocks(two: LocalCluster) -> None:
    one, other = two.nodes
    frozen = os.urandom(5 * BLOCK)
    send(two, one.written(b"step_10", frozen + os.urandom(BLOCK)))
    content = one.written(b"step_20", frozen + os.urandom(BLOCK))
    assert send(two, content) == BLOCK
    assert other.data(content) == one.data(content)


def test_small_files_that_came_in_between_do_not_hide_blocks_that_are_here(two: LocalCluster) -> None:
    one = two.nodes[0]
    frozen = os.urandom(2 * BLOCK)
    send(two, one.written(b"step_10", frozen + b"1"))
    for number in range(20):
        send(two, one.written(b"small_%d" % number, b"%d" % number))
    assert send(two, one.written(b"step_20", frozen + b"22")) == 2


def test_a_reader_of_the_older_generation_keeps_it(two: LocalCluster) -> None:
    one, other = two.nodes
    data = os.urandom(BLOCK + 9)
    content = one.written(b"a", data)
    send(two, content)
    copy = other.host.open_copy(content, None)
    one.rewrite(content, lambda bytes_: bytes_.reverse())
    send(two, content)
    assert os.pread(copy.fd, len(data), 0) == data
    os.close(copy.fd)
    assert other.data(content) == data[::-1]


def test_holes_do_not_travel(two: LocalCluster) -> None:
    one, other = two.nodes
    content = one.written(b"a", bytes(6 * BLOCK) + b"end")
    assert send(two, content) == 3
    assert other.data(content) == one.data(content)
    found = other.tiers[Tier.RAM].stat(content)
    assert found is not None and found.st_blocks * 512 < BLOCK


def test_a_transfer_that_broke_goes_on_where_it_was(two: LocalCluster) -> None:
    one, other = two.nodes
    data = os.urandom(4 * BLOCK)
    content = one.written(b"a", data)
    left = [3]

    def broken(act: str, _: str) -> None:
        if act == "block":
            left[0] -= 1
            if not left[0]:
                raise PeerFailed("the line broke")

    one.peers.fault = broken
    with pytest.raises(PeerFailed):
        send(two, content)
    assert other.copies(content) == {} and other.state(content) is not None
    one.peers.fault = lambda act, name: None
    assert send(two, content) == 2 * BLOCK
    assert other.data(content) == data and other.files(Tier.RAM) == {content}


def test_blocks_of_a_file_that_is_still_written_come_first(two: LocalCluster) -> None:
    """X7: an early offer makes no copy; the offer after the seal brings the rest, and what changed meanwhile."""
    one, other = two.nodes
    data = bytearray(os.urandom(4 * BLOCK + 5))
    content = one.make(b"a", bytes(data), closed=False)
    assert send(two, content, early(bytes(data), content, one.inode(content), 3)) == 3 * BLOCK
    assert other.copies(content) == {}
    data[BLOCK] ^= 1
    data += b"more"
    path = one.path(content)
    path.write_bytes(data)
    with one.db.transaction():
        from ckptfs.catalog import contents

        contents.mark_closed(one.db, one.inode(content), content, len(data), 1, 2)
    one.seal()
    assert send(two, content) == 2 * BLOCK + 9
    assert other.data(content) == bytes(data)


@pytest.mark.parametrize("state", ["deleted", "newer", "written", "other digest"])
def test_what_is_known_to_be_outdated_is_refused(two: LocalCluster, state: str) -> None:
    one, other = two.nodes
    content = one.written(b"a", b"hello")
    if state == "deleted":
        set_state(other.db, content, ContentState.DOOMED)
    elif state == "newer":
        other.db.run("UPDATE content SET generation = generation + 1 WHERE id = ?", content)
    elif state == "written":
        set_state(other.db, content, ContentState.OPEN)
    else:
        other.db.run("UPDATE content SET digest = zeroblob(16) WHERE id = ?", content)
    with pytest.raises(PeerRefused):
        send(two, content)
    assert other.copies(content) == {} and other.files(Tier.RAM) == set()


def test_a_generation_far_in_the_future_is_refused(two: LocalCluster) -> None:
    """No count of generations can come to its end by a peer's word: the file could never be written again."""
    one, other = two.nodes
    content = one.written(b"a", b"hello")
    send(two, content)
    offer = offer_of(one, content)
    for generation in (offer.generation + limits.GENERATIONS_AHEAD_MAX + 1, 2**63 - 1):
        with pytest.raises(InvalidArgument):
            other.host.begin_reception(replace(offer, generation=generation))
        with pytest.raises(InvalidArgument):
            other.host.begin_reception(replace(offer, content=content + 1, generation=generation))
    assert other.data(content) == b"hello"


@pytest.mark.parametrize("known", [True, False])
def test_nobody_else_says_what_a_file_holds(tmp_path: Path, known: bool) -> None:
    """F6: a node with good keys offers bytes of its own for another one's content. Who has what the store says is welcome."""
    cluster, one, other, liar = make_cluster(tmp_path, 3)
    content = one.written(b"a", b"hello")
    if known:
        send(cluster, content)
    offer = offer_of(one, content)
    blocks = digest.hash_block(b"lies!")
    lie = replace(offer, generation=offer.generation + 1, blocks=blocks, digest=digest.hash_content(blocks, 5))
    elsewhere = replace(offer, content=content + 1)
    for wrong in (lie, replace(lie, generation=offer.generation), elsewhere):
        with pytest.raises((Busy, InvalidArgument)):
            other.host.begin_reception(replace(wrong, sender=liar.member.name))
    assert other.files(Tier.RAM) == ({content} if known else set())
    reception = other.host.begin_reception(replace(offer, sender=liar.member.name))
    other.host.abort_reception(reception.token)
    other.host.begin_reception(replace(lie, sender=one.member.name))
    other.host.close()


def test_an_island_believes_its_peers(tmp_path: Path) -> None:
    """P1: what they say the store may hear of later."""
    _, one, other, third = make_cluster(tmp_path, 3)
    offer = replace(offer_of(one, one.written(b"a", b"hello")), sender=third.member.name)
    offer = replace(offer, generation=offer.generation + 1)
    other.store.reachable = False
    other.host.begin_reception(offer)
    other.host.close()


def test_the_same_content_arrives_once_at_a_time(two: LocalCluster) -> None:
    one, other = two.nodes
    offer = offer_of(one, one.written(b"a", os.urandom(BLOCK)))
    reception = other.host.begin_reception(offer)
    with pytest.raises(Busy):
        other.host.begin_reception(offer)
    other.host.abort_reception(reception.token)
    with pytest.raises(InvalidArgument):
        other.host.finish_reception(reception.token)
    again = other.host.begin_reception(offer)
    assert again.token != reception.token
    other.host.close()


@pytest.mark.parametrize("came", ["nothing", "some", "nothing after some"])
def test_what_was_offered_and_never_sent_gives_its_room_back(two: LocalCluster, came: str) -> None:
    """P10: at once; what came stays for the next offer."""
    one, other = two.nodes
    content = one.written(b"a", os.urandom(2 * BLOCK))
    reception = other.host.begin_reception(offer_of(one, content))
    if came != "nothing":
        other.host.abort_reception(reception.token)
        reception = other.host.begin_reception(offer_of(one, content))
    other.host.abort_reception(reception.token, keep_blocks=came == "some")
    assert len(other.files(Tier.RAM)) == (came != "nothing")
    other.host.close()


def test_what_is_not_all_there_does_not_count(two: LocalCluster) -> None:
    """The length of the file is looked at; its blocks are the server's word, and on a disk are read back."""
    one, other = two.nodes
    data = os.urandom(BLOCK + 1)
    content = one.written(b"a", data)
    reception = other.host.begin_reception(offer_of(one, content))
    os.pwrite(reception.fd, data + b"!", 0)
    assert other.host.finish_reception(reception.token) is False
    assert other.copies(content) == {} and other.files(Tier.RAM) == set()


def test_on_nvme_the_copy_is_read_back(tmp_path: Path) -> None:
    cluster, one, other = make_cluster(tmp_path, 2, nvme=True)
    data = os.urandom(BLOCK + 1)
    content = one.written(b"a", data)
    other.squeeze(Tier.RAM, 2 * MIB)
    other.renew_host()
    reception = other.host.begin_reception(offer_of(one, content))
    os.pwrite(reception.fd, data[:-1] + bytes([data[-1] ^ 1]), 0)
    assert other.host.finish_reception(reception.token) is False
    assert other.files(Tier.NVME) == set()
    send(cluster, content)
    assert other.copies(content) == {Tier.NVME: CopyState.GOOD}
    assert other.data(content, Tier.NVME) == data


def test_the_share_of_the_peers_is_bounded(two: LocalCluster) -> None:
    one, other = two.nodes
    other.squeeze(Tier.RAM, 40 * MIB)
    other.renew_host()
    with pytest.raises(NoSpace):
        other.host.begin_reception(offer_of(one, one.written(b"c", os.urandom(21 * MIB))))
    send(two, one.written(b"a", os.urandom(12 * MIB)))
    with pytest.raises(NoSpace):
        other.host.begin_reception(offer_of(one, one.written(b"b", os.urandom(9 * MIB))))


def test_lent_copies_stay_readable_and_only_good_ones_are_lent(two: LocalCluster) -> None:
    one, other = two.nodes
    data = os.urandom(BLOCK)
    content = one.written(b"a", data)
    with pytest.raises(CopyNotFound):
        other.host.open_copy(content, None)
    send(two, content)
    with pytest.raises(CopyNotFound):
        other.host.open_copy(content, b"another digest!!")
    copy = other.host.open_copy(content, None)
    copies.delete_copy(other.db, content, Tier.RAM)
    other.tiers[Tier.RAM].remove(content)
    assert os.pread(copy.fd, BLOCK, 0) == data and copy.digest == digest.hash_content(copy.blocks, copy.size)
    os.close(copy.fd)
    with pytest.raises(CopyNotFound):
        other.host.open_copy(content, None)


def test_a_closed_content_is_sealed_for_who_asks(two: LocalCluster) -> None:
    one, other = two.nodes
    content = one.make(b"a", b"hello")
    assert one.host.seal_and_open(content, 0.0) is None
    record = other.peers.request_seal(one.member, content, 1.0)
    assert record is not None and record.size == 5
    with pytest.raises(CopyNotFound):
        other.host.seal_and_open(content, 0.0)


@pytest.mark.parametrize("tier", [Tier.RAM, Tier.NVME])
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("label", [*sorted(label for label in disk.LABELS if label.startswith("host:")), "tier:rename"])
def test_a_failure_anywhere_leaves_nothing_wrong(
    tmp_path: Path, label: str, older: bool, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P7: whatever fails, no copy counts that is not what it is said to be, and the next offer brings it."""
    cluster, one, other = make_cluster(tmp_path, 2, nvme=True)
    if tier is Tier.NVME:
        other.squeeze(Tier.RAM, MIB)
        other.renew_host()
    content = one.written(b"a", os.urandom(BLOCK + 3))
    if older:
        send(cluster, content)
        one.rewrite(content, lambda data: data.reverse())
    inject_fault(monkeypatch, f"{label}=EIO")
    with contextlib.suppress(OSError, PeerFailed):
        send(cluster, content)
    inject_fault(monkeypatch, "")
    Recover(other.db, other.tiers, other.told).run()
    for copy in copies.list_copies(other.db, content):
        if copy.state is CopyState.GOOD:
            assert other.data(content, copy.tier) == one.data(content)
    send(cluster, content)
    assert other.data(content, tier) == one.data(content) and other.copies(content) == {tier: CopyState.GOOD}


def test_after_a_death_what_was_arriving_is_gone(two: LocalCluster) -> None:
    one, other = two.nodes
    other.host.begin_reception(offer_of(one, one.written(b"a", os.urandom(BLOCK))))
    assert len(other.files(Tier.RAM)) == 1
    Recover(other.db, other.tiers, other.told).run()
    assert other.files(Tier.RAM) == set() and other.db.rows("SELECT * FROM copy WHERE state = 0") == []
    assert other.db.rows("SELECT state FROM content WHERE state IN (3, 4)") == [], "a peer's content that is not here is not lost"


def test_what_is_written_here_while_a_peer_sends_does_not_give_way(two: LocalCluster) -> None:
    """P5: the copy of what was closed here a moment ago goes on to count."""
    one, other = two.nodes
    content = one.written(b"a", b"x" * BLOCK)
    send(two, content)
    offer = offer_of(one, content)
    other.db.run("DELETE FROM copy WHERE content = ?", content)
    reception = other.host.begin_reception(offer)
    os.pwrite(reception.fd, b"x" * BLOCK, 0)
    other.db.run("INSERT INTO copy (content, tier, state, used_ns) VALUES (?, 'ram', 1, 1)", content)
    with other.db.transaction():
        contents.mark_open(other.db, other.inode(content), content, Tier.RAM)
        contents.mark_closed(other.db, other.inode(content), content, 5, 1, 2)
    with pytest.raises(Busy):
        other.host.finish_reception(reception.token)
    assert other.state(content) is ContentState.CLOSED
    assert other.copies(content) == {Tier.RAM: CopyState.GOOD}
