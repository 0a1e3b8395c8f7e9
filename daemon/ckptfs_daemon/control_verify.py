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
from ckptfs.lifecycle import FileRecord, is_on_pfs
from ckptfs.model import Content, ContentState
from ckptfs.protocol import control_pb2 as pb
from ckptfs.tiers import pfs_open, transfer
from ckptfs.tiers.place import Tiers

FETCH_POLL_S = 0.02
GOOD, BAD, UNREADABLE, UNKNOWN = "good", "bad", "unreadable", "unknown"
PFS_CHANGED_TEXT = {
    errno.ESTALE: "was changed by somebody else; `ckptfs refresh` its directory",
    errno.ENOENT: "the PFS does not show it any more",
}


class FileVerifier:
    """Verifies one file at a time."""

    def __init__(
        self,
        config: Config,
        db: Database,
        tiers: Tiers,
        retry_now: Callable[[], None],
        refresh_pfs_path: Callable[[int], None] = lambda inode: None,
    ) -> None:
        """`hurry` makes the lanes work at once, `find` learns from the other nodes where the PFS shows a file now."""
        self._refresh_pfs_path = refresh_pfs_path
        self._config = config
        self._db = db
        self._tiers = tiers
        self._retry_now = retry_now

    def verify_file(self, inode: int) -> tuple[list[pb.Finding], int]:
        """(a finding for every copy of the file, bytes read)."""
        record = report.load_file_record(self._db, inode)
        found = self._verify_in_tiers(record) + self._verify_on_pfs(inode, record)
        path = os.fsdecode(report.get_path(self._db, inode)).encode(errors="backslashreplace").decode()
        for finding in found:
            finding.inode, finding.path = inode, path
        size = record.content.size if record.content is not None else 0
        return found, size * sum(finding.verdict in (GOOD, BAD) for finding in found)

    def _verify_in_tiers(self, record: FileRecord) -> list[pb.Finding]:
        content = record.content
        if content is None:
            return []
        if content.state in (ContentState.OPEN, ContentState.CLOSED):
            return [pb.Finding(verdict=UNKNOWN, what="is not sealed yet, so there is nothing to compare it with")]
        try:
            checked = verify.verify(self._db, self._tiers, content.id)
            if checked and not any(one.ok for one in checked) and self._has_other_source(content.id):
                checked = self._verify_after_fetch(content, checked)
        except Busy as failure:
            return [pb.Finding(verdict=UNKNOWN, what=str(failure))]
        except (OSError, CkptfsError) as failure:
            return [pb.Finding(verdict=UNREADABLE, what=str(failure))]
        return [_build_finding(one) for one in checked]

    def _has_other_source(self, number: int) -> bool:
        """Whether another node, or the PFS, may have what is bad here."""
        record = settling.get_file_record(self._db, number)
        content = record.content
        if content is None or content.state is not ContentState.SEALED:
            return False
        return is_on_pfs(record) or content.is_remote or bool(peers.list_holders(self._db, content))

    def _verify_after_fetch(self, content: Content, before: list[verify.CheckResult]) -> list[verify.CheckResult]:
        """The same findings after the file was fetched: what is good now was remade. Where that came to nothing, as they were."""
        request_id = wants.insert_request(self._db, wants.FETCH, content.inode, wait_s=limits.FETCH_STALL_S)
        self._retry_now()
        while wants.is_open(self._db, request_id):
            threading.Event().wait(FETCH_POLL_S)
        answer = wants.get(self._db, request_id)
        if answer is None or answer.result != wants.FETCHED:
            return before
        after = {one.tier: one for one in verify.verify(self._db, self._tiers, content.id)}
        found = [replace(one, repaired=one.tier in after and (after[one.tier].ok or after[one.tier].repaired)) for one in before]
        return found + [one for tier, one in after.items() if tier not in {bad.tier for bad in before}]

    def _verify_on_pfs(self, inode: int, record: FileRecord) -> list[pb.Finding]:
        """What the PFS shows under the file's ordinary name."""
        if self._config.pfs is None or record.published is None:
            return []
        try:
            self._refresh_pfs_path(inode)
            return [self._compare_with_pfs(inode, self._config.pfs)]
        except (OSError, CkptfsError) as failure:
            what = PFS_CHANGED_TEXT.get(failure.errno or 0, str(failure))
            return [pb.Finding(tier="pfs", verdict=UNREADABLE, what=what)]

    def _compare_with_pfs(self, inode: int, pfs: Path) -> pb.Finding:
        fetch_state = fetching.load_fetch_state(self._db, inode)
        expected = None if fetch_state is None or fetch_state.published is None else fetch_state.published.digest
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


def _build_finding(checked: verify.CheckResult) -> pb.Finding:
    what = f"{checked.problem}; it was remade from a good copy" if checked.repaired else checked.problem
    return pb.Finding(tier=checked.tier.value, verdict=GOOD if checked.ok else BAD, what=what)
