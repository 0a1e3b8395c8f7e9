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

RESENT_BIT = 1 << 63

unexpected_errors: Counter[str] = Counter()
"""How often each handler met an error that we did not foresee; `status` shows it."""


@dataclass(frozen=True, slots=True)
class Request:
    """The request being served: its number in this FUSE connection, whether the kernel sent it again, whether it drops set-id bits."""

    number: int
    is_resent: bool
    kills_set_id: bool


def get_current_request() -> Request:
    """The request that is being served. To be called before the handler's first await."""
    unique, kill = door.get_request_header()
    return Request(unique & ~RESENT_BIT, bool(unique & RESENT_BIT), kill)


def get_errno(failure: BaseException, where: str) -> int:
    """The errno that stands for `failure`. What we did not foresee is logged with its traceback, counted, and EIO."""
    if isinstance(failure, CkptfsError) or (isinstance(failure, OSError) and failure.errno):
        return failure.errno or errno.EIO
    unexpected_errors[where] += 1
    log.error("unexpected error in %s", where, exc_info=failure)
    return errno.EIO


def translate_errors(handler: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Wrap a pyfuse3 handler so that nothing but FUSEError leaves it."""

    @functools.wraps(handler)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await handler(*args, **kwargs)
        except FUSEError:
            raise
        except Exception as failure:
            raise FUSEError(get_errno(failure, handler.__name__)) from failure

    return wrapped
