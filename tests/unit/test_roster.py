"""Who lives, as a node knows it: deaths at once while it is in touch with the store, in doubt later (P9)."""

from ckptfs import limits
from ckptfs.clique.membership import Change, Node, world
from ckptfs.clique.roster import Roster

HERE, A, B, C = (Node(number, f"n{number}", "a:1", number, "d") for number in range(1, 5))


def names(roster: Roster) -> str:
    return " ".join(node.name for node in roster.world().nodes)


def in_touch(*nodes: Node) -> Roster:
    """For long enough to be sure."""
    roster = Roster(HERE)
    roster.answered(0.0)
    roster.read(nodes, 0.0)
    roster.settle(100.0)
    return roster


def test_this_node_always_lives() -> None:
    roster = in_touch(HERE)
    roster.gone(HERE.number, 100.0)
    assert names(roster) == "n1"


def test_a_death_counts_at_once() -> None:
    roster = in_touch(A, B)
    assert names(roster) == "n1 n2 n3"
    roster.gone(A.number, 100.0)
    assert names(roster) == "n1 n3" and roster.due_s() is None


def test_a_death_that_only_a_reading_shows_counts_at_once() -> None:
    roster = in_touch(A, B)
    roster.read([B, C], 100.0)
    assert names(roster) == "n1 n3 n4"


def test_nobody_dies_while_the_store_is_away() -> None:
    """P1: the last World stays, however long that takes."""
    roster = in_touch(A, B)
    roster.out_of_touch()
    roster.gone(A.number, 200.0)
    roster.settle(1e9)
    assert names(roster) == "n1 n2 n3" and roster.due_s() is None


def test_after_an_outage_the_others_have_time_to_come_back() -> None:
    roster = in_touch(A, B, C)
    roster.out_of_touch()
    roster.gone(A.number, 150.0)
    roster.answered(200.0)
    roster.read([C], 200.0)
    roster.gone(C.number, 201.0)
    roster.settle(200.0 + limits.NODE_RETURN_S - 0.1)
    assert names(roster) == "n1 n2 n3 n4" and roster.due_s() == 200.0 + limits.NODE_RETURN_S
    roster.lives(A)
    roster.settle(200.0 + limits.NODE_RETURN_S)
    assert names(roster) == "n1 n2" and roster.due_s() is None
    roster.gone(A.number, 200.0 + limits.NODE_RETURN_S)
    assert names(roster) == "n1"


def test_a_second_outage_puts_deaths_off_no_further_than_it_must() -> None:
    roster = in_touch(A)
    roster.out_of_touch()
    roster.answered(200.0)
    roster.gone(A.number, 201.0)
    due_s = roster.due_s()
    roster.out_of_touch()
    roster.answered(205.0)
    roster.answered(206.0)
    assert roster.due_s() == due_s == 200.0 + limits.NODE_RETURN_S


def test_it_begins_with_who_lived_last_in_doubt() -> None:
    """A mover that starts while the store is away knows its peers."""
    roster = Roster(HERE, [HERE, A, B])
    assert names(roster) == "n1 n2 n3" and not roster.in_touch
    roster.answered(10.0)
    roster.read([A], 10.0)
    assert names(roster) == "n1 n2 n3"
    roster.settle(10.0 + limits.NODE_RETURN_S)
    assert names(roster) == "n1 n2"


def test_a_change_says_who_died_joined_and_returned() -> None:
    again = Node(2, "n2", "a:1", 2, "d", 0, "later")
    change = Change(world([HERE, A, B]), world([HERE, again, C]))
    assert (change.died, change.joined, change.returned) == ((B,), (C,), (again,))
