"""The edge between our handlers and pyfuse3: errors become errnos here and nowhere else, and a handler learns which request it serves.

An exception of any other kind than FUSEError that leaves a pyfuse3 handler would end the whole mount; `answered` lets none out.
If we die here: nothing is kept.
"""

import errno
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from ckptfs.errors import CkptfsError
from ckptfs_daemon import door

# Imported after the door, which must be loaded before pyfuse3.
from pyfuse3 import FUSEError  # isort: skip

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

SENT_AGAIN = 1 << 63

unexpected: Counter[str] = Counter()
"""How often each handler met an error that we did not foresee; `status` shows it."""


@dataclass(frozen=True, slots=True)
class Request:
    """The request being served: its number in this FUSE connection, whether the kernel sent it again, whether it drops set-id bits."""

    number: int
    again: bool
    kill_privileges: bool


def request() -> Request:
    """The request that is being served. To be called before the handler's first await."""
    unique, kill = door.current()
    return Request(unique & ~SENT_AGAIN, bool(unique & SENT_AGAIN), kill)


def code_of(failure: BaseException, where: str) -> int:
    """The errno that stands for `failure`. What we did not foresee is logged with its traceback, counted, and EIO."""
    if isinstance(failure, CkptfsError) or (isinstance(failure, OSError) and failure.errno):
        return failure.errno or errno.EIO
    unexpected[where] += 1
    log.error("unexpected error in %s", where, exc_info=failure)
    return errno.EIO


def answered(handler: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Wrap a pyfuse3 handler so that nothing but FUSEError leaves it."""

    @functools.wraps(handler)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await handler(*args, **kwargs)
        except FUSEError:
            raise
        except Exception as failure:
            raise FUSEError(code_of(failure, handler.__name__)) from failure

    return wrapped
