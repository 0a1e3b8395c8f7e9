"""P11: a name belongs to one PFS. Another one is refused before anything is mounted; the same one may move; a first one gets everything."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from ckptfs_client.mount_helper import MOUNT_EXIT_CODES
from daemon_under_test import DaemonUnderTest, NotStarted, environment
from programs import differences

pytestmark = pytest.mark.fuse
Make = Callable[..., DaemonUnderTest]


def with_files(make_daemon: Make, **options: object) -> DaemonUnderTest:
    """An unmounted daemon with files, of which the PFS has all."""
    daemon = make_daemon("auto", **options)
    (daemon.path / "run").mkdir()
    (daemon.path / "run" / "step_1").write_bytes(b"1" * 1000)
    daemon.settle()
    daemon.unmount()
    return daemon


def mount_by_helper(daemon: DaemonUnderTest) -> subprocess.CompletedProcess[str]:
    """As mount(8) mounts it."""
    program = "import sys; from ckptfs_client.mount_helper import mount_main; sys.exit(mount_main())"
    options = ",".join(f"{key}={value}" for key, value in daemon.options.items())
    command = [sys.executable, "-P", "-c", program, daemon.name, str(daemon.path), "-o", options]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment(), check=False)


def test_another_pfs_is_refused(make_daemon: Make) -> None:
    daemon = with_files(make_daemon)
    former, other = daemon.pfs, daemon.root / "other"
    other.mkdir()
    daemon.options["pfs"] = other
    with pytest.raises(NotStarted) as refusal:
        daemon.start()
    sentence = str(refusal.value)
    assert f"the files of {daemon.name} belong to the PFS that was at {former}, and {other} is not that PFS" in sentence
    assert f"give pfs={former}, or another name for pfs={other}" in sentence
    assert os.listdir(other) == [] and not os.path.ismount(daemon.path)
    mounted = mount_by_helper(daemon)
    assert MOUNT_EXIT_CODES[mounted.returncode] == "the mount failed" and str(former) in mounted.stderr and str(other) in mounted.stderr
    daemon.options["pfs"] = former
    daemon.start()
    assert (daemon.path / "run" / "step_1").read_bytes() == b"1" * 1000


def test_a_pfs_that_has_moved_is_accepted(make_daemon: Make) -> None:
    daemon = with_files(make_daemon)
    moved = daemon.root / "moved"
    daemon.wipe_ram()
    daemon.pfs.rename(moved)
    daemon.options["pfs"] = moved
    daemon.expect_warning("the tier was replaced")
    daemon.start()
    assert (daemon.path / "run" / "step_1").read_bytes() == b"1" * 1000
    (daemon.path / "run" / "step_2").write_bytes(b"2")
    daemon.settle()
    assert (moved / "run" / "step_2").read_bytes() == b"2"
    daemon.unmount()


@pytest.mark.alone
def test_a_name_that_gets_its_first_pfs_writes_everything_back(make_daemon: Make) -> None:
    """What was made without a PFS reaches it, and what it has is shown."""
    daemon = make_daemon(pfs=None)
    (daemon.path / "run" / "deep").mkdir(parents=True)
    (daemon.path / "run" / "step_1").write_bytes(b"1" * 5_000_000)
    (daemon.path / "run" / "deep" / "file").write_bytes(b"deep")
    os.link(daemon.path / "run" / "step_1", daemon.path / "linked")
    (daemon.path / "symbolic").symlink_to("run/step_1")
    (daemon.path / "both").write_bytes(b"of the mount")
    daemon.unmount()
    (daemon.pfs / "there").mkdir()
    (daemon.pfs / "there" / "before").write_bytes(b"of the PFS")
    daemon.options["pfs"] = daemon.pfs
    daemon.start()
    daemon.settle()
    assert sorted(os.listdir(daemon.path)) == ["both", "linked", "run", "symbolic", "there"]
    assert (daemon.path / "there" / "before").read_bytes() == b"of the PFS"
    assert differences(daemon.path, daemon.pfs) == []
    assert os.getxattr(daemon.path / "run" / "step_1", "user.ckptfs.level") == b"pfs"
