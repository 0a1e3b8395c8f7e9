"""When a child is started again, and when not (P8)."""

from ckptfs_daemon.supervisor import children
from ckptfs_daemon.supervisor.children import RestartHistory

from ckptfs import limits


def test_a_hundred_kills_cost_no_wait_and_end_nothing() -> None:
    history = RestartHistory()
    for second in range(1000):
        history = children.record_death(history, now=float(second) / 10, lived_s=0.05, ready=True, killed=True)
        assert children.get_restart_delay_s(history) == 0
        assert not children.must_give_up(history, ever_ready=True)
    assert history.restarts == 1000


def test_failures_wait_longer_each_time_up_to_a_bound_and_then_end() -> None:
    history, waits = RestartHistory(), []
    while not children.must_give_up(history, ever_ready=True):
        history = children.record_death(history, now=0.0, lived_s=0.1, ready=False, killed=False)
        waits.append(children.get_restart_delay_s(history))
    assert len(waits) == limits.FAILURES_MAX
    assert waits == sorted(waits) and waits[0] == limits.RESTART_FIRST_S and waits[-1] == limits.RESTART_LAST_S


def test_who_never_came_up_is_given_up_sooner() -> None:
    history = RestartHistory()
    for _ in range(children.FIRST_FAILURES_MAX):
        assert not children.must_give_up(history, ever_ready=False)
        history = children.record_death(history, now=0.0, lived_s=0.1, ready=False, killed=False)
    assert "in a row" in children.must_give_up(history, ever_ready=False)


def test_a_kill_before_it_was_ready_counts_as_a_failure() -> None:
    history = children.record_death(RestartHistory(), now=0.0, lived_s=0.1, ready=False, killed=True)
    assert history.failures == 1


def test_kills_before_it_was_ready_end_only_what_never_was() -> None:
    history = RestartHistory()
    for second in range(100):
        history = children.record_death(history, now=float(second), lived_s=0.1, ready=False, killed=True)
    assert not children.must_give_up(history, ever_ready=True) and children.get_restart_delay_s(history) < 1
    assert "in a row" in children.must_give_up(history, ever_ready=False)


def test_a_long_life_forgives_what_was_before() -> None:
    history = children.record_death(RestartHistory(failures=7), now=0.0, lived_s=children.LONG_LIFE_S, ready=True, killed=False)
    assert children.get_restart_delay_s(history) == 0


def test_dying_of_itself_often_within_the_window_ends_it_and_outside_does_not() -> None:
    history = RestartHistory()
    step_s = limits.RESTARTS_WINDOW_S / limits.RESTARTS_MAX
    for number in range(limits.RESTARTS_MAX + 1):
        assert not children.must_give_up(history, ever_ready=True)
        history = children.record_death(history, now=number * step_s * 0.9, lived_s=60.0, ready=True, killed=False)
    assert "times in" in children.must_give_up(history, ever_ready=True)
    later = children.record_death(history, now=history.deaths[-1] + limits.RESTARTS_WINDOW_S, lived_s=60.0, ready=True, killed=False)
    assert not children.must_give_up(later, ever_ready=True)
