"""The log of a process and its name in ps. A record is one line on stderr with role and pid.

If stderr is the journal, each line begins with its priority.
"""

import ctypes
import logging
import os
import sys
import threading

log = logging.getLogger(__name__)

PR_SET_NAME = 15
PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class OneLine(logging.Formatter):
    """Formats a record with its traceback as one line, so that lines of several processes stay apart."""

    def __init__(self, role: str, *, journal: bool) -> None:
        time = "" if journal else "%(asctime)s "
        super().__init__(f"{time}ckptfsd[{role} %(process)d] %(levelname)s %(name)s: %(message)s")
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).replace("\n", " | ")
        return f"<{PRIORITIES.get(record.levelno, 5)}>{text}" if self._journal else text


def goes_to_journal() -> bool:
    """Return True if stderr is the stream that systemd names in JOURNAL_STREAM."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return (device, inode) == (str(found.st_dev), str(found.st_ino))


def configure(role: str, level: str) -> None:
    """Log to stderr as `role` from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(role, journal=goes_to_journal()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    threading.excepthook = _log_end_of_thread
    # At debug level, pyfuse3 and trio log every request.
    for name in ("pyfuse3", "trio", "grpc"):
        logging.getLogger(name).setLevel(logging.WARNING)
    log.debug("logging as the %s", role)


def _log_end_of_thread(end: threading.ExceptHookArgs) -> None:
    if end.exc_value is not None:
        name = "?" if end.thread is None else end.thread.name
        log.error("thread %s: ended unexpectedly", name, exc_info=end.exc_value)


def get_level() -> str:
    """Return the log level of this process: "debug", "info"..."""
    return logging.getLevelName(logging.getLogger().level).lower()


def set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())
    log.debug("the log level is %s", level)


def set_process_name(name: str) -> None:
    """Set the name that ps and top show, at most 15 bytes."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
