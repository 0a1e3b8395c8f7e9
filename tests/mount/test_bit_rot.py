"""P4, X5: a byte that changes in a tier under the daemon is found without a read, and opens get the right bytes again."""

import json
import os
from collections.abc import Callable

from daemon_under_test import DaemonUnderTest, eventually, shorten

SIZE = 5 << 20


def test_a_flipped_byte_is_found_and_repaired_in_the_background(data_path: str, make_daemon: Callable[..., DaemonUnderTest]) -> None:
    daemon = make_daemon(data_path, env=shorten(**{"flow.verify.INTERVAL_S": 0.5, "flow.verify.POLL_S": 0.1}))
    daemon.expect_warning("the copy in ram is quarantined: its digest differs in block 1")
    path, data = daemon.path / "model.pt", os.urandom(SIZE)
    path.write_bytes(data)
    daemon.command("wait", path, "--timeout", "60s")
    assert path.read_bytes() == data, "the kernel may keep pages of what it read"
    ((content,),) = daemon.catalog("SELECT content FROM inode WHERE id = ?", path.stat().st_ino)
    (backing,) = (daemon.state / "ram").glob(f"contents*/{content:016x}")
    with open(path, "rb") as reader, open(backing, "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes([data[-1] ^ 1]), SIZE - 1)

        def scrubbed() -> bool:
            found = json.loads(daemon.command("status", "--json", daemon.path).stdout)["scrub"]
            return bool(found["bad_found"] == 1 and found["quarantined"] == 0 and found["copies"] == 1)

        eventually(scrubbed, timeout=60.0, what="the copy is good again")
        assert len(reader.read()) == SIZE, "an open file keeps its descriptor"
    assert backing.read_bytes() == data
    eventually(lambda: path.read_bytes() == data, timeout=60.0, what="the kernel has no pages of the bad copy", pause_s=0.2)

    def list_repairs() -> list[dict[str, str]]:
        events = [json.loads(line) for line in daemon.command("events", "--json", daemon.path).stdout.splitlines()]
        return [event for event in events if event["kind"] == "repaired"]

    (repaired,) = eventually(list_repairs, what="the repair is an event")
    assert (repaired["path"], repaired["tier"], repaired["source"]) == ("model.pt", "ram", "the PFS")
    assert "bad so far: 1, of which 0 are not repaired" in daemon.command("status", daemon.path).stdout
