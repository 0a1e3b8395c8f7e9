"""The health of a tier: NORMAL, SUSPECT, DOWN. What errors of a tier mean, and their remedies.

Errors and probes that answer late or not at all change the state. Transitions are pure functions from one frozen value to the next.
ENOSPC and EDQUOT are no failures: a full tier is healthy. `probe` is the only effect and may hang as long as the tier does, so it
runs in a thread of its own. Nothing is stored: a new process starts with NORMAL and probes at once.
"""

import errno
import os
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from ckptfs import disk
from ckptfs.tiers.space import Capacity, read_capacity

disk.declare_labels("health:probe")

FAILURES_DOWN = 3
SUSPECT_S = 5.0
DOWN_S = 30.0
PROBE_NORMAL_S = 15.0
PROBE_UNHEALTHY_S = 3.0
FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}

TIER_FAILURE_ERRNOS = {
    errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.EREMOTEIO, errno.EUCLEAN,
    errno.ENOTDIR, errno.ETIMEDOUT,
}  # fmt: skip
"""Errors that say something of a tier, not of one file."""

PFS_FAILURE_ERRNOS = TIER_FAILURE_ERRNOS - {errno.ENOTDIR} | {
    errno.ENOSPC, errno.ENOENT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ENOMEM, errno.ENOBUFS, errno.EMFILE, errno.ENFILE,
    errno.EINTR, errno.EAGAIN, errno.ECOMM, errno.EPROTO, errno.ENOLINK, errno.ENOLCK,
}  # fmt: skip
"""Errors of a change on the PFS that say something of its server, the network or the whole filesystem, not of one file."""

_WRITABLE = ("give the owners of the files write permission", "let the file's owner write to this directory on the PFS")
_ALTERABLE = (_WRITABLE[0], f"{_WRITABLE[1]}; lsattr shows whether a flag of chattr forbids it")
_MOUNTED = ("mount it again", "mount the PFS again")
_CHECKED = "check the kernel log for this device or server, then mount it again"
_REMEDIES = {  # (of an error of a tier, of a change on the PFS)
    errno.EIO: (_CHECKED, _CHECKED),
    errno.EROFS: ("mount it read-write again", "mount the PFS for writing"),
    errno.ESTALE: _MOUNTED,
    errno.ENOTCONN: _MOUNTED,
    errno.ENOENT: ("mount it, or create the directory", "mount the PFS, or create its directory"),
    errno.ETIMEDOUT: ("check whether its server or device answers", "check whether the PFS's server answers"),
    errno.EACCES: _WRITABLE,
    errno.EPERM: _ALTERABLE,
    errno.ENOSPC: ("free space or inodes, or raise the quota", "make room on the PFS; df -i shows whether inodes are short"),
    errno.EDQUOT: ("free space, or raise the quota", "make room within the quota on the PFS, or have it raised"),
    errno.ENAMETOOLONG: ("", "give it a shorter name"),
    errno.EINVAL: ("", "give it a name that the PFS takes"),
    errno.EILSEQ: ("", "give it a name that the PFS takes"),
    errno.EXDEV: ("", "copy it to a new name beside it and delete it: it comes from another filesystem or quota project of the PFS"),
    errno.EBUSY: ("", "see whether something is mounted there on the PFS"),
    errno.EMLINK: ("", "make fewer links to the file"),
    errno.EFBIG: ("", "raise the PFS's limit on the size of a file, or keep the file elsewhere"),
}


class HealthState(StrEnum):
    """NORMAL works; SUSPECT failed or is late; DOWN has failed for a while."""

    NORMAL = "normal"
    SUSPECT = "suspect"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a tier since `since_s`. `failures`: consecutive ones; `error`: the last one."""

    state: HealthState = HealthState.NORMAL
    since_s: float = 0.0
    failures: int = 0
    error: str = ""
    remedy: str = ""


def after_success(health: Health, now_s: float) -> Health:
    """Return the health after a call that succeeded."""
    return health if health == replace(Health(), since_s=health.since_s) else Health(since_s=now_s)


def after_failure(health: Health, now_s: float, failure: OSError) -> Health:
    """Return the health after an error; a full tier counts as a success."""
    if failure.errno in FULL_ERRNOS:
        return after_success(health, now_s)
    failures = health.failures + 1
    state = HealthState.DOWN if failures >= FAILURES_DOWN or health.state is HealthState.DOWN else HealthState.SUSPECT
    return _transition(health, state, now_s, failures, describe(failure), remedy(failure.errno))


def after_wrong_tier(health: Health, now_s: float, error: str, remedy: str) -> Health:
    """Return the health of a tier that answers but has another identity than expected."""
    return _transition(health, HealthState.DOWN, now_s, health.failures + 1, error, remedy)


def after_silence(health: Health, now_s: float, waiting_s: float) -> Health:
    """Return the health while a probe has not answered for `waiting_s`."""
    if waiting_s < SUSPECT_S:
        return health
    state = HealthState.DOWN if waiting_s >= DOWN_S or health.state is HealthState.DOWN else HealthState.SUSPECT
    return _transition(health, state, now_s, health.failures, f"does not answer for {waiting_s:.0f} s", remedy(errno.ETIMEDOUT))


def probe_after_s(health: Health) -> float:
    """Return the wait before the next probe, in seconds."""
    return PROBE_NORMAL_S if health.state is HealthState.NORMAL else PROBE_UNHEALTHY_S


def describe(failure: OSError) -> str:
    """Return the name and the meaning of an error."""
    return f"{errno.errorcode.get(failure.errno or 0, 'error')}: {failure.strerror or failure}"


def is_tier_failure(failure: OSError) -> bool:
    """Return True if an error of one call makes it likely that other calls on the tier fail too."""
    return failure.errno in TIER_FAILURE_ERRNOS


def remedy(code: int | None) -> str:
    """Return what the operator can do about an error of a tier; empty if unknown."""
    return _REMEDIES.get(code or 0, ("", ""))[0]


def pfs_remedy(code: int | None) -> str:
    """Return what a user can do about a change that the PFS refuses; empty if unknown."""
    return _REMEDIES.get(code or 0, ("", ""))[1]


def probe(root: Path) -> Capacity:
    """Return the capacity that the server of the tier reports. Raises OSError; may hang."""
    disk.act("health:probe", os.stat, root)
    return read_capacity(root)


def _transition(health: Health, state: HealthState, now_s: float, failures: int, error: str, remedy: str) -> Health:
    since_s = health.since_s if state is health.state else now_s
    return Health(state, since_s, failures, error, remedy)
