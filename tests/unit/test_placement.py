"""Placement of copies (N1, P9): every small cluster, random large ones, and the changes when a node leaves."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.clique.membership import ClusterView, Node, build_view
from ckptfs.clique.placement import choose_new_holders, choose_peers, choose_superfluous

FACTORS = (1, 2, 3, 4)
JUMPS = (1, 2, 3)


def made(domains: Sequence[object], ranks: Sequence[int] | None = None) -> ClusterView:
    """Nodes 1, 2, ... of these failure domains."""
    places = range(len(domains)) if ranks is None else ranks
    return build_view(Node(at + 1, f"n{at:05}", "a:1", places[at], str(domain)) for at, domain in enumerate(domains))


def partitions(count: int) -> Iterator[tuple[int, ...]]:
    """Every way in which `count` nodes can share failure domains."""
    for labels in itertools.product(range(count), repeat=count):
        if all(label <= max(labels[:place], default=-1) + 1 for place, label in enumerate(labels)):
            yield labels


SMALL = [labels for count in range(1, 7) for labels in partitions(count)]


def numbers(nodes: Sequence[Node]) -> list[int]:
    return [node.number for node in nodes]


def check(nodes: ClusterView, factor: int, jump: int) -> Counter[int]:
    """What holds in every world; how many others each node holds copies for."""
    domains = {node.domain for node in nodes.nodes}
    load: Counter[int] = Counter({node.number: 0 for node in nodes.nodes})
    for node in nodes.nodes:
        peers = choose_peers(nodes, node.number, factor, jump)
        assert len(peers) == min(factor, len(nodes)) - 1
        assert len({node.number, *numbers(peers)}) == len(peers) + 1
        assert len({node.domain, *(peer.domain for peer in peers)}) == min(len(peers) + 1, len(domains))
        load.update(numbers(peers))
    return load


def test_every_small_world_has_copies_apart_and_even_load() -> None:
    """P9: all worlds of up to 6 nodes, whatever fails together: copies are apart, and each node has as many to hold as any other."""
    for labels, factor, jump in itertools.product(SMALL, FACTORS, JUMPS):
        load = check(made(labels), factor, jump)
        if max(Counter(labels).values()) * factor <= len(labels):
            assert set(load.values()) == {factor - 1}, (labels, factor, jump)


def test_a_small_world_whose_nodes_fail_alone_changes_no_more_than_it_must() -> None:
    """Whoever did not count on the node that left keeps its peers; whoever did keeps the others."""
    for count, factor, jump in itertools.product(range(2, 8), FACTORS, JUMPS):
        before = made(range(count))
        for gone in before.nodes:
            check_leaving(before, gone, factor, jump)


def check_leaving(before: ClusterView, gone: Node, factor: int, jump: int) -> None:
    after = build_view(node for node in before.nodes if node is not gone)
    for node in after.nodes:
        old, new = (numbers(choose_peers(nodes, node.number, factor, jump)) for nodes in (before, after))
        assert [number for number in old if number != gone.number] == new[: len(old) - (gone.number in old)]


@pytest.mark.parametrize(("size", "count"), [(1, 1000), (16, 625), (18, 500), (4, 20), (16, 80)])
@pytest.mark.parametrize("factor", [2, 3])
def test_racks_that_are_numbered_one_after_the_other(size: int, count: int, factor: int) -> None:
    nodes = made([place // size for place in range(count)])
    load = check(nodes, factor, 1)
    assert max(load.values()) <= factor and sum(value == factor - 1 for value in load.values()) >= 0.95 * count
    for gone in random.Random(size).sample(nodes.nodes, 3):
        check_leaving(nodes, gone, factor, 1)


def test_racks_whose_labels_do_not_follow_ranks() -> None:
    """Many racks: even load, and stable. Few large domains: even load."""
    dice = random.Random(1)
    many = made(dice.sample([place // 16 for place in range(2000)], 2000))
    load = check(many, 2, 1)
    assert max(load.values()) <= 3 and sum(value == 1 for value in load.values()) >= 0.95 * 2000
    check_leaving(many, many.nodes[1000], 2, 1)
    few = made([dice.randrange(3) for _ in range(1000)])
    assert max(check(few, 2, 1).values()) <= 2
    assert max(check(few, 3, 1).values()) <= 5


@pytest.mark.parametrize(("factor", "jump"), [(2, 1), (2, 2), (2, 4), (3, 2), (4, 2), (2, 8)])
def test_ranks_of_a_clique_differ_by_the_jump(factor: int, jump: int) -> None:
    """N1: NVIDIA's group of rank r in a world that can be divided is r, r + jump, ...; ours too, and it begins at any rank."""
    nodes = made(range(48))
    for block, lane in itertools.product(range(0, 48, factor * jump), range(jump)):
        group = [block + lane + place * jump for place in range(factor)]
        assert [
            nodes.by_number[number].rank for number in (group[0] + 1, *numbers(choose_peers(nodes, group[0] + 1, factor, jump)))
        ] == group


def test_ranks_may_be_missing_equal_or_far_apart() -> None:
    for ranks in ([0, 0, 0, 0], [5, 1000, 70_000, 2**31 - 1], [3, 1, 2, 0]):
        assert set(check(made(range(4), ranks), 2, 1).values()) == {1}
        check(made([0, 0, 1, 1], ranks), 2, 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_large_world(data: st.DataObject) -> None:
    count = data.draw(st.integers(7, 300))
    labels = data.draw(st.lists(st.integers(0, data.draw(st.integers(0, 40))), min_size=count, max_size=count))
    ranks = data.draw(st.one_of(st.none(), st.lists(st.integers(0, 10_000), min_size=count, max_size=count)))
    factor, jump = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 500))
    nodes = made(labels, ranks)
    check(nodes, factor, jump)
    holders = data.draw(st.sets(st.integers(1, count + 3), max_size=8))
    check_wanted(nodes, holders, data.draw(st.integers(1, count + 3)), factor, jump)


def check_wanted(nodes: ClusterView, holders: set[int], home: int, factor: int, jump: int) -> None:
    """Copies are brought to the wanted number, apart where that is possible, and only what is more may go."""
    more, less = (numbers(act(nodes, holders, home, factor, jump)) for act in (choose_new_holders, choose_superfluous))
    living = {holder for holder in holders if holder in nodes}
    assert not set(more) & holders and set(less) <= living and not (more and less)
    after = (living | set(more)) - set(less)
    domains = {nodes.by_number[number].domain for number in after}
    assert len(domains) == min(factor, len({node.domain for node in nodes.nodes}))
    assert len(after) >= min(factor, len(nodes)) and (not less or len(after) == factor)
    assert numbers(choose_new_holders(nodes, after, home, factor, jump)) == []
    assert numbers(choose_superfluous(nodes, after, home, factor, jump)) == [] or more


def test_repair_in_every_small_world() -> None:
    """P9, P5."""
    for labels in SMALL:
        if len(labels) <= 4:
            nodes = made(labels)
            everyone = range(1, len(labels) + 2)
            for size, factor in itertools.product(range(len(labels) + 1), (1, 2, 3)):
                for holders in itertools.combinations(everyone, size):
                    for home in everyone:
                        check_wanted(nodes, set(holders), home, factor, 1)


def test_a_home_and_its_peers_want_nothing() -> None:
    nodes = made([place // 4 for place in range(16)])
    for node in nodes.nodes:
        holders = {node.number, *numbers(choose_peers(nodes, node.number, 3, 1))}
        assert choose_new_holders(nodes, holders, node.number, 3, 1) == () == choose_superfluous(nodes, holders, node.number, 3, 1)


def test_the_copy_that_remains_is_that_of_the_home_and_its_peer() -> None:
    """A node came back: who stood in for it drops its copy."""
    nodes = made(range(6))
    assert numbers(choose_new_holders(nodes, {3, 99}, 3, 2, 1)) == [4]
    assert numbers(choose_superfluous(nodes, {3, 4, 6}, 3, 2, 1)) == [6]
    assert numbers(choose_superfluous(nodes, {4, 6}, 3, 2, 1)) == []


def test_copies_in_one_domain_are_too_few() -> None:
    nodes = made([0, 0, 1])
    assert numbers(choose_new_holders(nodes, {1, 2}, 1, 2, 1)) == [3]
    assert numbers(choose_superfluous(nodes, {1, 2, 3}, 1, 2, 1)) == [2]


def test_nobody_else() -> None:
    assert choose_peers(build_view([]), 1, 2, 1) == () == choose_new_holders(build_view([]), {1}, 1, 2, 1)
    assert choose_peers(made([0]), 1, 3, 1) == ()
