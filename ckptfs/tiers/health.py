"""Owns what is known of a tier's health: NORMAL -> SUSPECT -> DOWN from errors and from probes that answer late or not at all.

The machine is pure: a frozen value, and functions that give the next one. A tier that is full is not ill: ENOSPC and EDQUOT do not
count. `probe` is the only act, and may hang as long as the tier does: call it in a thread of its own, and let the clock judge.
Nothing here is stored, so dying here costs nothing: the next process begins with NORMAL and probes at once.
"""

import errno
import os
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from ckptfs import disk

disk.declare_labels("health:probe")

FAILURES_DOWN = 3
SUSPECT_S = 5.0
DOWN_S = 30.0
PROBE_NORMAL_S = 15.0
PROBE_UNHEALTHY_S = 3.0
FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}

REMEDIES = {
    errno.EIO: "look into the kernel log for this device or server",
    errno.EROFS: "mount it read-write again",
    errno.ESTALE: "mount it anew",
    errno.ENOENT: "mount it, or create the directory",
    errno.ENOTCONN: "mount it anew",
    errno.EACCES: "give the files' owners the right to write there",
    errno.EPERM: "give the files' owners the right to write there",
    errno.ENOSPC: "make room there, or raise the quota",
    errno.EDQUOT: "make room there, or raise the quota",
    errno.ETIMEDOUT: "look whether its server answers",
}


class HealthState(StrEnum):
    """NORMAL works, SUSPECT failed or is late, DOWN has failed for a while."""

    NORMAL = "normal"
    SUSPECT = "suspect"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Health:
    """What is known: `since_s` is when `state` began, on the clock of whoever asks; `error` says what was last wrong."""

    state: HealthState = HealthState.NORMAL
    since_s: float = 0.0
    failures: int = 0
    error: str = ""
    remedy: str = ""


def after_success(health: Health, now_s: float) -> Health:
    """The tier did what it was asked: it is well."""
    return health if health == replace(Health(), since_s=health.since_s) else Health(since_s=now_s)


def after_failure(health: Health, now_s: float, failure: OSError) -> Health:
    """The tier answered with an error. Being full is not one."""
    if failure.errno in FULL_ERRNOS:
        return after_success(health, now_s)
    failures = health.failures + 1
    state = HealthState.DOWN if failures >= FAILURES_DOWN or health.state is HealthState.DOWN else HealthState.SUSPECT
    return _transition(health, state, now_s, failures, describe(failure), remedy(failure.errno))


def after_wrong_tier(health: Health, now_s: float, error: str, remedy: str) -> Health:
    """The tier answers, and is not the one it should be."""
    return _transition(health, HealthState.DOWN, now_s, health.failures + 1, error, remedy)


def after_silence(health: Health, now_s: float, waiting_s: float) -> Health:
    """A probe has not answered for `waiting_s` so far."""
    if waiting_s < SUSPECT_S:
        return health
    state = HealthState.DOWN if waiting_s >= DOWN_S or health.state is HealthState.DOWN else HealthState.SUSPECT
    return _transition(health, state, now_s, health.failures, f"does not answer for {waiting_s:.0f} s", remedy(errno.ETIMEDOUT))


def probe_after_s(health: Health) -> float:
    """How long to wait before the next probe."""
    return PROBE_NORMAL_S if health.state is HealthState.NORMAL else PROBE_UNHEALTHY_S


def describe(failure: OSError) -> str:
    """An error in a few words: its name and meaning."""
    return f"{errno.errorcode.get(failure.errno or 0, 'error')}: {failure.strerror or failure}"


def remedy(code: int | None) -> str:
    """What a person can do about this errno; empty when nothing is known."""
    return REMEDIES.get(code or 0, "")


def probe(root: Path) -> tuple[int, int]:
    """(total, available) bytes: asked so that the tier's server must answer. Raises OSError; hangs when the tier hangs."""
    disk.act("health:probe", os.stat, root)
    figures = os.statvfs(root)
    return figures.f_blocks * figures.f_frsize, figures.f_bavail * figures.f_frsize


def _transition(health: Health, state: HealthState, now_s: float, failures: int, error: str, remedy: str) -> Health:
    since_s = health.since_s if state is health.state else now_s
    return Health(state, since_s, failures, error, remedy)
