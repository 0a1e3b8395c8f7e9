"""`ckptfs mounts`: names that still hold data while they are not mounted are listed, with how to mount or delete each. F2, P5."""

import json
import os
import shlex
import subprocess
from collections.abc import Callable

import pytest
from daemon_under_test import END_S, DaemonUnderTest, NotStarted, ckptfs

MakeDaemon = Callable[..., DaemonUnderTest]


def listed(name: str) -> dict[str, object] | None:
    found = json.loads(ckptfs("mounts", "--json").stdout)
    return next((one for one in found if one["name"] == name), None)


def test_a_name_that_holds_data_is_listed_until_it_is_deleted(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(pfs=None, nvme=None, ram="64M")
    one = listed(daemon.name)
    assert one is not None and one["mounted"] and one["mountpoint"] == str(daemon.path)
    assert ckptfs("mounts", "--delete", daemon.name, check=False).returncode == 1
    (daemon.path / "only").write_bytes(b"x" * 1000)
    assert daemon.unmount() == 0
    one = listed(daemon.name)
    assert one is not None and not one["mounted"] and one["has_data"]
    assert f"1 file (1000 B) only in RAM, at {daemon.state}/ram: a reboot loses it" in str(one["what"])
    assert shlex.split(str(one["mount_command"]))[:3] == ["mount", "-t", "ckptfs"]
    text = ckptfs("mounts").stdout
    assert f"{daemon.name}: not mounted; " in text and f"delete it: ckptfs mounts --delete {daemon.name}" in text
    refused = ckptfs("mounts", "--delete", daemon.name, check=False)
    assert refused.returncode == 1 and "still holds data" in refused.stderr and "--yes" in refused.stderr
    assert os.path.ismount(daemon.state / "ram")
    ckptfs("mounts", "--delete", daemon.name, "--yes")
    assert listed(daemon.name) is None and not os.path.ismount(daemon.state / "ram") and not daemon.state.exists()
    (daemon.path / "below").write_bytes(b"the directory is open again")


def test_a_name_that_holds_nothing_is_deleted_at_once(make_daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: after an end in order, the default place of catalogs has the name, and nobody was killed. A mount that fails changes nothing."""
    daemon = make_daemon()
    (daemon.path / "file").write_bytes(b"x" * 1000)
    daemon.settle()
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(daemon.root / "run"))
    (daemon.root / "run").mkdir()
    (daemon.root / "run" / "one.json").write_text(json.dumps({"state": str(daemon.state)}))
    assert daemon.unmount() == 0
    one = listed(daemon.name)
    assert one is not None and one["what"] == "nothing that the PFS does not have" and not one["has_data"]
    daemon.options["data_path"] = "passthrough"
    daemon.env["CKPTFS_KERNEL_WITHOUT"] = "passthrough"
    with pytest.raises(NotStarted):
        daemon.start()
    assert listed(daemon.name) == one
    ckptfs("mounts", "--delete", daemon.name)
    assert listed(daemon.name) is None and not daemon.state.exists()


@pytest.fixture
def refused(make_daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch) -> DaemonUnderTest:
    """A daemon that was not started yet, and cannot mount."""
    daemon = make_daemon(start=False, data_path="passthrough")
    daemon.env["CKPTFS_KERNEL_WITHOUT"] = "passthrough"
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(daemon.root / "run"))
    (daemon.root / "run").mkdir()
    (daemon.root / "run" / "one.json").write_text(json.dumps({"state": str(daemon.state)}))
    return daemon


def test_a_name_that_was_never_mounted_holds_nothing(refused: DaemonUnderTest) -> None:
    with pytest.raises(NotStarted):
        refused.start()
    one = listed(refused.name)
    assert one is not None and one["what"] == "nothing that the PFS does not have" and not one["has_data"]
    ckptfs("mounts", "--delete", refused.name)
    assert listed(refused.name) is None and not refused.state.exists()


def test_a_mount_that_fails_after_a_stop_keeps_what_was_counted(refused: DaemonUnderTest) -> None:
    """The directory underneath stays closed, and nobody is told that the daemon was killed."""
    refused.env.pop("CKPTFS_KERNEL_WITHOUT")
    refused.options["data_path"] = "auto"
    refused.start()
    assert refused.process is not None
    refused.process.terminate()
    assert refused.process.wait(END_S) == 0
    one = listed(refused.name)
    assert one is not None and one["what"] == "nothing that the PFS does not have"
    refused.env["CKPTFS_KERNEL_WITHOUT"], refused.options["data_path"] = "passthrough", "passthrough"
    with pytest.raises(NotStarted):
        refused.start()
    assert listed(refused.name) == one
    with pytest.raises(PermissionError):
        (refused.path / "below").write_bytes(b"")
    ckptfs("mounts", "--delete", refused.name)


def test_a_lost_ram_tier_is_said(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(pfs=None, nvme=None, ram="64M")
    (daemon.path / "only").write_bytes(b"x" * 1000)
    assert daemon.unmount() == 0
    subprocess.run(["umount", str(daemon.state / "ram")], check=True)
    one = listed(daemon.name)
    assert one is not None and "the machine was rebooted since, and the RAM tier is gone" in str(one["what"])
    ckptfs("mounts", "--delete", daemon.name, "--yes")


def test_a_name_whose_daemon_was_killed_is_listed_too(make_daemon: MakeDaemon) -> None:
    """P5: a deletion without --yes refuses what nobody counted."""
    daemon = make_daemon()
    (daemon.path / "file").write_bytes(b"x" * 1000)
    daemon.crash()
    assert ckptfs("mounts").stdout.count(f"{daemon.name}: ") == 1, "its mountpoint is still there"
    subprocess.run(["umount", "-l", str(daemon.path)], check=True)
    one = listed(daemon.name)
    assert one is not None and one["has_data"] and "killed" in str(one["what"])
    assert ckptfs("mounts", "--delete", daemon.name, check=False).returncode == 1
    ckptfs("mounts", "--delete", daemon.name, "--yes")
    assert not list(daemon.nvme.glob("contents-*"))


def test_an_unknown_name_is_refused() -> None:
    result = ckptfs("mounts", "--delete", "no-such-name", check=False)
    assert result.returncode == 2 and "there is no unmounted name no-such-name" in result.stderr
