"""When a child that died is started again, and when that is given up. Pure: times come in, decisions go out.

A child that was ready and was killed (SIGKILL: a person, a test, the OOM killer) is started again at once, however often that
happens. One that dies of itself, or before it was ready, waits longer each time. Kills before it was ready make it wait for less than a
second, and never end what once was ready: whoever kills it again and again must not end the mount (P8).
"""

from dataclasses import dataclass, replace

from ckptfs import limits

LONG_LIFE_S = 10.0
"""A child that has lived so long has not failed to start."""
FIRST_FAILURES_MAX = 5
"""How often the first one may fail: then something is wrong that does not pass, and somebody waits for the mount."""


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """The deaths of one role: how many in all, how many failures in a row, and when it died of itself lately."""

    restarts: int = 0
    failures: int = 0
    deaths: tuple[float, ...] = ()


def record_death(history: RestartHistory, *, now: float, lived_s: float, ready: bool, killed: bool) -> RestartHistory:
    """The history after one more death."""
    history = replace(history, restarts=history.restarts + 1)
    if ready and killed:
        return replace(history, failures=0)
    if killed:
        return replace(history, failures=max(history.failures, min(history.failures + 1, FIRST_FAILURES_MAX)))
    recent = tuple(at for at in history.deaths if now - at < limits.RESTARTS_WINDOW_S)
    failures = 0 if ready and lived_s >= LONG_LIFE_S else history.failures + 1
    return replace(history, failures=failures, deaths=(*recent, now))


def get_restart_delay_s(history: RestartHistory) -> float:
    """How long to wait before the next start."""
    if history.failures == 0:
        return 0.0
    return float(min(limits.RESTART_LAST_S, limits.RESTART_FIRST_S * 2 ** min(history.failures - 1, 16)))


def must_give_up(history: RestartHistory, *, ever_ready: bool) -> str:
    """Why it makes no sense to start it again; empty when it does."""
    if history.failures >= (limits.FAILURES_MAX if ever_ready else FIRST_FAILURES_MAX):
        return f"it failed {history.failures} times in a row"
    if len(history.deaths) > limits.RESTARTS_MAX:
        return f"it died {len(history.deaths)} times in {limits.RESTARTS_WINDOW_S:g} s"
    return ""
