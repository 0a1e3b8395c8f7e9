"""H10, X3: the catalog is lost, and the sets come back from the PFS by their manifests."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon_under_test import DaemonUnderTest, eventually
from set_history import list_sets, write_archive

pytestmark = pytest.mark.fuse


def listed(daemon: DaemonUnderTest, series: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(daemon.command("list", series, "--json", check=False).stdout or "[]")
    return found


def lose_everything_here(daemon: DaemonUnderTest) -> None:
    """Only the PFS is left, as after the loss of the node's disks."""
    daemon.unmount()
    daemon.wipe_ram()
    for place in (daemon.state, daemon.nvme):
        shutil.rmtree(place)
        place.mkdir()


def test_sets_come_back_after_the_catalog_was_lost(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """A set in its place, a pinned one in the history only, and a series whose directory is gone, with all that is known of them."""
    daemon = make_daemon()
    run, gone = daemon.path / "run", daemon.path / "gone"
    daemon.expect_warning("is no set: its manifest does not fit")
    for directory in (run, gone):
        directory.mkdir()
    for step in (1, 2):
        (run / f"step_{step}").mkdir()
        write_archive(run / f"step_{step}" / "model.pt", b"%d" % step)
        eventually(lambda step=step: f"run/step_*/step_{step}@{step}" in list_sets(daemon), what="it is a set")
    write_archive(gone / "epoch_7.pt")
    eventually(lambda: "gone/epoch_*.pt/epoch_7.pt@1" in list_sets(daemon), what="it is a set")
    daemon.command("pin", run / "step_1")
    daemon.command("annotate", run / "step_1", "before the new learning rate")
    daemon.command("rollback", run / "step_*", "step_1")
    daemon.settle()
    shutil.rmtree(run / "step_1")
    shutil.rmtree(gone)
    daemon.settle()
    before = {where: listed(daemon, where) for where in (run / "step_*", gone / "epoch_*.pt")}
    spoilt = daemon.pfs / ".ckptfs.history" / "run" / "step_*" / "step_9@9"
    spoilt.mkdir()
    (spoilt / "MANIFEST.json").write_text("{}")
    lose_everything_here(daemon)
    daemon.start()
    eventually(lambda: len(list_sets(daemon)) == 3, what="the sets are known again")
    after = {where: listed(daemon, where) for where in before}
    assert after == before
    daemon.command("rollback", run / "step_*", "--undo")
    assert daemon.command("latest", run / "step_*").stdout.strip() == str(run / "step_2")
    assert json.loads(daemon.command("show", f"{run / 'step_*'}@1", "--json").stdout)["producers"]
    daemon.command("restore", f"{gone / 'epoch_*.pt'}@1", daemon.root)
    assert (daemon.root / "epoch_7.pt").stat().st_size
    (run / "step_3").mkdir()
    write_archive(run / "step_3" / "model.pt", b"3")
    eventually(lambda: "run/step_*/step_3@10" in list_sets(daemon), what="no number is used twice")
    assert "run/step_*/step_1@1" in list_sets(daemon), "it is pinned"
