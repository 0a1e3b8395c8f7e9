"""The order to verify: every copy of a file is read and compared with its seal, what the PFS shows included.

Bad copies in tiers are quarantined and remade by the flow from a good one here. When there is none here, the file is fetched as for
somebody who opens it: from another node, or from the PFS. A bad file on the PFS is only told of: it may be a stranger's work.
If we die here: what was found so far stands in the catalog, the rest was not looked at.
"""

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ckptfs import limits
from ckptfs.catalog import fetching, peers, report, settling, wants
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.errors import Busy, CkptfsError
from ckptfs.flow import verify
from ckptfs.lifecycle import Record, published_whole
from ckptfs.model import Content, ContentState
from ckptfs.protocol import control_pb2 as pb
from ckptfs.tiers import pfs_open, transfer
from ckptfs.tiers.place import Places

LOOK_S = 0.02
GOOD, BAD, UNREADABLE, UNKNOWN = "good", "bad", "unreadable", "unknown"
MOVED_ON = {
    errno.ESTALE: "was changed by somebody else; `ckptfs refresh` its directory",
    errno.ENOENT: "the PFS does not show it any more",
}


class Verification:
    """Verifies one file at a time."""

    def __init__(
        self, config: Config, db: Database, places: Places, hurry: Callable[[], None], find: Callable[[int], None] = lambda inode: None
    ) -> None:
        """`hurry` makes the lanes work at once, `find` learns from the other nodes where the PFS shows a file now."""
        self._find = find
        self._config = config
        self._db = db
        self._places = places
        self._hurry = hurry

    def check(self, inode: int) -> tuple[list[pb.Finding], int]:
        """(a finding for every copy of the file, bytes read)."""
        record = report.record(self._db, inode)
        found = self._in_tiers(record) + self._on_pfs(inode, record)
        path = os.fsdecode(report.path_of(self._db, inode)).encode(errors="backslashreplace").decode()
        for finding in found:
            finding.inode, finding.path = inode, path
        size = record.content.size if record.content is not None else 0
        return found, size * sum(finding.verdict in (GOOD, BAD) for finding in found)

    def _in_tiers(self, record: Record) -> list[pb.Finding]:
        content = record.content
        if content is None:
            return []
        if content.state in (ContentState.OPEN, ContentState.CLOSED):
            return [pb.Finding(verdict=UNKNOWN, what="is not sealed yet, so there is nothing to compare it with")]
        try:
            checked = verify.verify(self._db, self._places, content.id)
            if checked and not any(one.ok for one in checked) and self._lies_elsewhere(content.id):
                checked = self._fetched(content, checked)
        except Busy as failure:
            return [pb.Finding(verdict=UNKNOWN, what=str(failure))]
        except (OSError, CkptfsError) as failure:
            return [pb.Finding(verdict=UNREADABLE, what=str(failure))]
        return [_described(one) for one in checked]

    def _lies_elsewhere(self, number: int) -> bool:
        """Whether another node, or the PFS, may have what is bad here."""
        record = settling.record(self._db, number)
        content = record.content
        if content is None or content.state is not ContentState.SEALED:
            return False
        return published_whole(record) or content.peer or bool(peers.elsewhere(self._db, content))

    def _fetched(self, content: Content, before: list[verify.Checked]) -> list[verify.Checked]:
        """The same findings after the file was fetched: what is good now was remade. Where that came to nothing, as they were."""
        want = wants.ask(self._db, wants.FETCH, content.inode, wait_s=limits.FETCH_STALL_S)
        self._hurry()
        while wants.is_open(self._db, want):
            threading.Event().wait(LOOK_S)
        answer = wants.get(self._db, want)
        if answer is None or answer.result != wants.HERE:
            return before
        after = {one.tier: one for one in verify.verify(self._db, self._places, content.id)}
        found = [replace(one, repaired=one.tier in after and (after[one.tier].ok or after[one.tier].repaired)) for one in before]
        return found + [one for tier, one in after.items() if tier not in {bad.tier for bad in before}]

    def _on_pfs(self, inode: int, record: Record) -> list[pb.Finding]:
        """What the PFS shows under the file's ordinary name."""
        if self._config.pfs is None or record.published is None:
            return []
        try:
            self._find(inode)
            return [self._compared(inode, self._config.pfs)]
        except (OSError, CkptfsError) as failure:
            what = MOVED_ON.get(failure.errno or 0, str(failure))
            return [pb.Finding(tier="pfs", verdict=UNREADABLE, what=what)]

    def _compared(self, inode: int, pfs: Path) -> pb.Finding:
        shown = fetching.look(self._db, inode)
        expected = None if shown is None or shown.on_pfs is None else shown.on_pfs.digest
        fd = pfs_open.open_inode(self._db, pfs, inode)
        try:
            _, digest, _ = transfer.read(fd, label="verify")
        finally:
            os.close(fd)
        if expected is None:
            return pb.Finding(tier="pfs", verdict=UNKNOWN, what="was written by others, so its digest is not known")
        if digest == expected:
            return pb.Finding(tier="pfs", verdict=GOOD)
        return pb.Finding(tier="pfs", verdict=BAD, what="its digest differs from what was written there; restore it from another copy")


def _described(checked: verify.Checked) -> pb.Finding:
    what = f"{checked.problem}; it was remade from a good copy" if checked.repaired else checked.problem
    return pb.Finding(tier=checked.tier.value, verdict=GOOD if checked.ok else BAD, what=what)
