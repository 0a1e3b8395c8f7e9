"""P9: the living nodes as one node knows them. A death counts at once while the store answers, later after an outage."""

from ckptfs import limits
from ckptfs.clique.membership import MemberTable, Node, ViewChange, build_view

HERE, A, B, C = (Node(number, f"n{number}", "a:1", number, "d") for number in range(1, 5))


def names(roster: MemberTable) -> str:
    return " ".join(node.name for node in roster.build_view().nodes)


def in_touch(*nodes: Node) -> MemberTable:
    """For long enough to be sure."""
    roster = MemberTable(HERE)
    roster.mark_connected(0.0)
    roster.replace_nodes(nodes, 0.0)
    roster.delete_expired(100.0)
    return roster


def test_this_node_always_lives() -> None:
    roster = in_touch(HERE)
    roster.mark_gone(HERE.number, 100.0)
    assert names(roster) == "n1"


def test_a_death_counts_at_once() -> None:
    roster = in_touch(A, B)
    assert names(roster) == "n1 n2 n3"
    roster.mark_gone(A.number, 100.0)
    assert names(roster) == "n1 n3" and roster.next_due_s() is None


def test_a_death_that_only_a_reading_shows_counts_at_once() -> None:
    roster = in_touch(A, B)
    roster.replace_nodes([B, C], 100.0)
    assert names(roster) == "n1 n3 n4"


def test_nobody_dies_while_the_store_is_away() -> None:
    """P1: the last World stays, however long that takes."""
    roster = in_touch(A, B)
    roster.mark_disconnected()
    roster.mark_gone(A.number, 200.0)
    roster.delete_expired(1e9)
    assert names(roster) == "n1 n2 n3" and roster.next_due_s() is None


def test_after_an_outage_the_others_have_time_to_come_back() -> None:
    roster = in_touch(A, B, C)
    roster.mark_disconnected()
    roster.mark_gone(A.number, 150.0)
    roster.mark_connected(200.0)
    roster.replace_nodes([C], 200.0)
    roster.mark_gone(C.number, 201.0)
    roster.delete_expired(200.0 + limits.NODE_RETURN_S - 0.1)
    assert names(roster) == "n1 n2 n3 n4" and roster.next_due_s() == 200.0 + limits.NODE_RETURN_S
    roster.mark_alive(A)
    roster.delete_expired(200.0 + limits.NODE_RETURN_S)
    assert names(roster) == "n1 n2" and roster.next_due_s() is None
    roster.mark_gone(A.number, 200.0 + limits.NODE_RETURN_S)
    assert names(roster) == "n1"


def test_a_second_outage_puts_deaths_off_no_further_than_it_must() -> None:
    roster = in_touch(A)
    roster.mark_disconnected()
    roster.mark_connected(200.0)
    roster.mark_gone(A.number, 201.0)
    due_s = roster.next_due_s()
    roster.mark_disconnected()
    roster.mark_connected(205.0)
    roster.mark_connected(206.0)
    assert roster.next_due_s() == due_s == 200.0 + limits.NODE_RETURN_S


def test_it_begins_with_who_lived_last_in_doubt() -> None:
    roster = MemberTable(HERE, [HERE, A, B])
    assert names(roster) == "n1 n2 n3" and not roster.is_connected
    roster.mark_connected(10.0)
    roster.replace_nodes([A], 10.0)
    assert names(roster) == "n1 n2 n3"
    roster.delete_expired(10.0 + limits.NODE_RETURN_S)
    assert names(roster) == "n1 n2"


def test_a_change_says_who_died_joined_and_returned() -> None:
    again = Node(2, "n2", "a:1", 2, "d", 0, "later")
    change = ViewChange(build_view([HERE, A, B]), build_view([HERE, again, C]))
    assert (change.dead_nodes, change.joined_nodes, change.restarted_nodes) == ((B,), (C,), (again,))
