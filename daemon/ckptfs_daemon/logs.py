"""What a process shows of itself: its log, one line per record on stderr with role and pid, and its name in ps.

When stderr goes to journald, its priorities stand before each line.
"""

import ctypes
import logging
import os
import sys

log = logging.getLogger(__name__)

PR_SET_NAME = 15
PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class OneLine(logging.Formatter):
    """A record is one line, its traceback included, so that lines of several processes can be told apart."""

    def __init__(self, role: str, *, journal: bool) -> None:
        time = "" if journal else "%(asctime)s "
        super().__init__(f"{time}ckptfsd[{role} %(process)d] %(levelname)s %(name)s: %(message)s")
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).replace("\n", " | ")
        return f"<{PRIORITIES.get(record.levelno, 5)}>{text}" if self._journal else text


def goes_to_journal() -> bool:
    """Whether stderr is the stream that systemd named in JOURNAL_STREAM."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return (device, inode) == (str(found.st_dev), str(found.st_ino))


def configure(role: str, level: str) -> None:
    """Log to stderr from now on as `role`; called again when a spare takes its role."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(role, journal=goes_to_journal()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # pyfuse3 and trio say at debug level what each request does.
    for name in ("pyfuse3", "trio", "grpc"):
        logging.getLogger(name).setLevel(logging.WARNING)
    log.debug("logging as the %s", role)


def get_level() -> str:
    """What this process logs at least: "debug", "info"..."""
    return logging.getLevelName(logging.getLogger().level).lower()


def set_level(level: str) -> None:
    """Log from now on at least what has this level."""
    logging.getLogger().setLevel(level.upper())
    log.debug("logging at this level from now on")


def set_process_name(name: str) -> None:
    """The name that ps and top show; at most 15 bytes."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
