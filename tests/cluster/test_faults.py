"""P1, P8, P9: nodes that are cut off, an etcd that is away, slow links, and restarts under load."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_lab import ClusterUnderTest, NodeUnderTest, wait_for
from daemon_under_test import eventually

SIZE = 2_000_000
SLOW_BITS_PER_S = 20_000_000
# What survivors say about nodes and an etcd that they do not reach.
EXPECTED = "does not answer|has died|is gone|not reach|cannot be reached|lost|took over|no longer|island|etcd"


@pytest.fixture
def places(lab: ClusterUnderTest, places: list[Path]) -> list[Path]:
    lab.expect_warning(EXPECTED)
    return places


def alike(lab: ClusterUnderTest, places: list[Path]) -> dict[str, bytes | int | None]:
    """What all nodes show, when they show the same."""
    eventually(lambda: lab.tree(places[0]) == lab.tree(places[1]) == lab.tree(places[2]), what="all nodes show the same")
    return lab.tree(places[0])


def test_a_node_that_is_cut_off_goes_on_and_comes_back(lab: ClusterUnderTest, places: list[Path]) -> None:
    """P1: as an island; what it did is published when it returns."""
    (places[0] / "before").write_bytes(b"before" * SIZE)
    wait_for(places[0] / "before", "clique")
    lab[0].cut()
    (places[0] / "on the island").write_bytes(b"island" * 1000)
    (places[0] / "before").write_bytes(b"later" * 1000)
    assert (places[0] / "on the island").read_bytes() == b"island" * 1000
    # The others go on too, and see what had reached them.
    assert (places[1] / "before").read_bytes() == b"before" * SIZE
    (places[1] / "on the main land").write_bytes(b"main" * 1000)
    assert (places[2] / "on the main land").read_bytes() == b"main" * 1000
    lab[0].mend()
    expected = {"before": b"later" * 1000, "on the island": b"island" * 1000, "on the main land": b"main" * 1000}
    eventually(lambda: [lab.tree(place) for place in places] == [expected] * 3, what="all nodes show what all did")


@pytest.mark.parametrize("later", [0, 1])
def test_a_file_that_both_sides_changed_becomes_two(lab: ClusterUnderTest, places: list[Path], later: int) -> None:
    """P1: whoever closed it later has the name; the bytes of both are there, on all nodes."""
    (places[0] / "changed").write_bytes(b"before" * SIZE)
    wait_for(places[0] / "changed", "clique")
    lab[0].cut()
    data = [b"island" * SIZE, b"mainland" * SIZE]
    for side in (1 - later, later):
        (places[side] / "changed").write_bytes(data[side])
    lab[0].mend()

    def both() -> bool:
        trees = [lab.tree(place) for place in places]
        return trees[0] == trees[1] == trees[2] and len(trees[0]) == 2

    eventually(both, what=f"all nodes show both: {[sorted(lab.tree(place)) for place in places]}")
    tree = lab.tree(places[2])
    assert tree.pop("changed") == data[later]
    ((name, other),) = tree.items()
    assert name.startswith("changed.ckptfs-conflict-node1-") and other == data[1 - later]


def test_etcd_stops_in_the_middle_and_returns(lab: ClusterUnderTest, places: list[Path]) -> None:
    """P1, G2: writing, closing and reading what is here go on; `status` says so; everything is published afterwards."""
    for number, place in enumerate(places):
        (place / f"before{number}").write_bytes(b"b" * SIZE)
    lab.stop_etcd()
    for number, place in enumerate(places):
        (place / f"during{number}").write_bytes(b"%d" % number * SIZE)
        (place / f"before{number}").rename(place / f"renamed{number}")
        assert (place / f"during{number}").read_bytes() == b"%d" % number * SIZE
        assert (place / f"renamed{number}").read_bytes() == b"b" * SIZE
    assert '"island": true' in lab[0].command("status", "--cluster", "--json", lab[0].path).stdout
    lab.start_etcd()
    expected = {f"{name}{number}" for name in ("during", "renamed") for number in range(3)}
    eventually(lambda: all(set(os.listdir(place)) == expected for place in places), what="all nodes show everything")
    assert set(alike(lab, places)) == expected
    assert '"island": false' in lab[0].command("status", "--cluster", "--json", lab[0].path).stdout


def test_a_slow_link_delays_copies_and_nothing_else(lab: ClusterUnderTest, places: list[Path]) -> None:
    """P1: closing does not wait for a slow peer."""
    lab[1].slow(SLOW_BITS_PER_S)
    written = os.urandom(4 * SIZE)
    (places[0] / "file").write_bytes(written)
    assert (places[0] / "file").read_bytes() == written
    assert (places[2] / "file").read_bytes() == written
    assert (places[1] / "file").read_bytes() == written
    wait_for(places[0] / "file", "clique")


@contextlib.contextmanager
def load(node: NodeUnderTest, place: Path) -> Iterator[Callable[[], list[str]]]:
    """An application that writes, renames and reads again until the block ends; its complaints."""
    ended, complaints, turns = threading.Event(), list[str](), [0]

    def work() -> None:
        while not ended.is_set() and not complaints:
            data = os.urandom(100_000)
            try:
                (place / f"{node.name}.tmp").write_bytes(data)
                (place / f"{node.name}.tmp").rename(place / node.name)
                if (place / node.name).read_bytes() != data:
                    complaints.append(f"{node.name} read something else than it wrote")
            except OSError as failure:
                complaints.append(f"{node.name}: {failure}")
            turns[0] += 1

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        eventually(lambda: turns[0] > 2 or complaints, what="the load has begun")
        yield lambda: complaints
        begun = turns[0]
        eventually(lambda: turns[0] > begun + 2 or complaints, what="the load goes on")
    finally:
        ended.set()
        thread.join(60)


def test_all_daemons_are_replaced_under_load(lab: ClusterUnderTest, places: list[Path]) -> None:
    """P8, X2: mount and mover of one node after the other are killed; applications see pauses and no error."""
    lab.expect_warning(r"\b(mount|mover)\b.*(killed|died|ended|signal)")
    with contextlib.ExitStack() as loads:
        complaints = [loads.enter_context(load(node, place)) for node, place in zip(lab.nodes, places, strict=True)]
        for node in lab.nodes:
            for role in ("mover", "mount"):
                node.replace(role)
        assert [complaint() for complaint in complaints] == [[], [], []]
    tree = alike(lab, places)
    assert set(tree) >= {node.name for node in lab.nodes}


def test_nodes_are_restarted_one_after_the_other(lab: ClusterUnderTest, places: list[Path]) -> None:
    """P9: unmounted in order and mounted again, while the others are under load."""
    (places[0] / "kept").write_bytes(b"kept" * SIZE)
    for chosen in range(3):
        others = [number for number in range(3) if number != chosen]
        with contextlib.ExitStack() as loads:
            complaints = [loads.enter_context(load(lab[number], places[number])) for number in others]
            lab[chosen].restart()
            assert (places[chosen] / "kept").read_bytes() == b"kept" * SIZE
            assert [complaint() for complaint in complaints] == [[], []]
    alike(lab, places)
