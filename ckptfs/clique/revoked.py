"""Owns the list of revoked keys: a file `revoked` beside the certificates, with a line `NODE COUNT` for each node whose keys were revoked.

A certificate names one DNS name for each number up to the revocations that were known when it was issued (`keys.target_name`); it is good
while it has the name of the newest number. So nothing need be known of the keys that were lost, and TLS itself refuses a server that shows
them. The list is as trusted as the ca.pem beside it. Running nodes read it again when it changes.
If we die here: the list is replaced as a whole or not at all.
"""

import logging
import os
import threading
import time
from pathlib import Path

from ckptfs import limits
from ckptfs.errors import ConfigError

log = logging.getLogger(__name__)

REVOKED_FILE = "revoked"
REVOCATIONS_MAX = 1000


def read_revocations(directory: Path) -> dict[str, int]:
    """{node: how often its keys were revoked}; empty without a list. Raises ConfigError."""
    path = directory / REVOKED_FILE
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as failure:
        raise ConfigError(f"{path} cannot be read: {failure}") from failure
    found: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        node, _, count = line.strip().partition(" ")
        if not (count.isascii() and count.isdigit() and 0 < int(count) <= REVOCATIONS_MAX):
            remedy = "copy it again from where `ckptfs keys revoke` was called"
            raise ConfigError(f"{path}: line {number} is not NODE COUNT: {line[:80]!r}", remedy=remedy)
        found[node] = int(count)
    return found


def write_revocations(directory: Path, revoked: dict[str, int]) -> None:
    """Replace the list in `directory`."""
    temporary = directory / f".{REVOKED_FILE}.{os.getpid()}"
    with open(temporary, "w") as file:
        file.writelines(f"{node} {count}\n" for node, count in sorted(revoked.items()))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, directory / REVOKED_FILE)


class RevocationList:
    """The list as it is now, read again when its file changes. Any thread may ask."""

    def __init__(self, directory: Path | None) -> None:
        """`directory`: where the node's keys are; None for a node without keys, which knows of none."""
        self._directory = directory
        self._lock = threading.Lock()
        self._checked_s = -limits.REVOKED_LOOK_S
        self._file_state: object = None
        self._counts: dict[str, int] = {}

    def get_counts(self) -> dict[str, int]:
        """{node: how often its keys were revoked}; what was known last while the file cannot be read."""
        with self._lock:
            if self._directory is not None and time.monotonic() - self._checked_s >= limits.REVOKED_LOOK_S:
                self._reload_if_changed(self._directory)
                self._checked_s = time.monotonic()
            return self._counts

    def get_count(self, node: str) -> int:
        """How often the keys of `node` were revoked."""
        return self.get_counts().get(node, 0)

    def _reload_if_changed(self, directory: Path) -> None:
        try:
            found = os.stat(directory / REVOKED_FILE)
            seen: object = (found.st_mtime_ns, found.st_ino, found.st_size)
        except OSError as failure:
            seen = failure.errno
        if seen == self._file_state:
            return
        self._file_state = seen
        try:
            self._counts = read_revocations(directory)
        except ConfigError as failure:
            log.warning("revoked keys are those that were known before: %s", failure)
