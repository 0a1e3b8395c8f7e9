"""mount.ckptfs and umount.ckptfs, called as mount(8) and umount(8) do: exit codes, sentences, and nothing left behind. P11, F2."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ckptfs_client.mount_helper import LOG
from daemon_under_test import REPOSITORY, DaemonUnderTest, ckptfs, environment
from loop_disk import read_only, tmpfs_at
from programs import with_mounts_of_its_own

from ckptfs import __version__
from ckptfs.procfs import is_running

Result = subprocess.CompletedProcess[str]
MakeDaemon = Callable[..., DaemonUnderTest]


def entry_point(name: str) -> str:
    """The program behind mount.ckptfs or umount.ckptfs, as an installer makes it."""
    return f"import sys; from ckptfs_client.mount_helper import {name}_main; sys.exit({name}_main())"


def helper(name: str, *arguments: str | Path) -> Result:
    command = [sys.executable, "-P", "-c", entry_point(name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment(), check=False)


def options(place: DaemonUnderTest, *more: str) -> str:
    return ",".join(["rw", *(f"{key}={value}" for key, value in place.options.items()), *more])


def mount(place: DaemonUnderTest, *more: str) -> Result:
    result = helper("mount", place.name, place.path, "-o", options(place, *more))
    if result.returncode == 0:
        place.device = os.stat(place.path).st_dev
    return result


def test_mount_use_and_unmount(place: DaemonUnderTest) -> None:
    """mount returns when it answers; umount when everything is on the PFS and the daemon has ended."""
    passed = options(place, "noatime", "nosuid", "_netdev", "x-systemd.automount")
    result = helper("mount", place.name, place.path, "-v", "-n", "-o", passed)
    assert result.returncode == 0 and f"{place.name} mounted on {place.path} by process" in result.stdout, result.stderr
    place.device = os.stat(place.path).st_dev
    line = next(line for line in Path("/proc/mounts").read_text().splitlines() if f" {place.path} " in line)
    assert line.startswith(f"{place.name} {place.path} fuse.ckptfs ") and "noatime" in line and "nosuid" in line
    assert stat.S_IMODE(os.stat(place.state / LOG).st_mode) == 0o600 and "is mounted at" in (place.state / LOG).read_text()
    for number in range(30):
        (place.path / f"shard{number}").write_bytes(os.urandom(10_000))
    supervisor = place.pid("supervisor")
    assert os.getpgid(supervisor) == supervisor != os.getpgid(0)
    result = helper("umount", place.path, "-n", "-v")
    assert (result.returncode, result.stderr) == (0, "")
    assert not os.path.ismount(place.path) and not is_running(supervisor)
    assert len([name for name in os.listdir(place.pfs) if name.startswith("shard")]) == 30
    assert f"{place.name}: " not in ckptfs("mounts").stdout, "a name that holds nothing is not kept"


def test_the_daemon_goes_on_until_the_last_mountpoint_is_gone(place: DaemonUnderTest, tmp_path: Path) -> None:
    """A bind mount goes at once, and so does the first mountpoint while there is a bind mount."""
    assert mount(place).returncode == 0
    for first, last in ((tmp_path, place.path), (place.path, tmp_path)):
        subprocess.run(["mount", "--bind", place.path, tmp_path], check=True)
        result = helper("umount", first)
        assert (result.returncode, result.stderr) == (0, f"umount.ckptfs: {place.name} goes on: it is also mounted at {last}\n")
        (last / "file").write_bytes(b"data")
    supervisor = place.pid("supervisor")
    assert helper("umount", tmp_path).returncode == 0
    assert not is_running(supervisor) and (place.pfs / "file").read_bytes() == b"data"


def test_a_second_mount_is_refused(place: DaemonUnderTest) -> None:
    assert mount(place).returncode == 0
    result = mount(place)
    assert result.returncode == 32
    assert result.stderr.startswith("mount.ckptfs: another ckptfsd (pid ") and str(place.state) in result.stderr
    elsewhere = place.path.parent / "elsewhere"
    elsewhere.mkdir()
    result = helper("mount", "another-name", elsewhere, "-o", f"state={place.state},ram=64M")
    assert result.returncode == 32 and str(place.state) in result.stderr, "nor under another name at another place"
    with open(place.path / "busy", "wb"):
        result = helper("umount", place.path)
        assert result.returncode == 32 and "is busy: a process has a file open there" in result.stderr
    assert helper("umount", place.path).returncode == 0


def test_bad_options_are_refused_by_name(place: DaemonUnderTest) -> None:
    """P11, with mount(8)'s exit code for usage; nothing is left behind."""
    result = mount(place, "pfss=/x")
    assert (
        result.returncode == 1
        and "mount.ckptfs: unknown option 'pfss', did you mean pfs?; accepted: mountpoint, state, ram" in result.stderr
    )
    result = helper("mount", place.name, place.root / "none", "-o", options(place))
    assert result.returncode == 1 and "No such file or directory" in result.stderr
    assert helper("mount", place.name).returncode == 1
    assert helper("mount", place.name, place.path, "-o", options(place, "pfss=/x"), "-s", "-f").returncode == 0
    assert not os.path.ismount(place.path) and list(place.state.iterdir()) == []


@pytest.mark.parametrize("name", ["mount", "umount"])
def test_the_version(name: str) -> None:
    """P11: asked as of any other program, without a name and a directory."""
    for option in ("-V", "--version"):
        said = helper(name, option)
        assert (said.returncode, said.stdout, said.stderr) == (0, f"{name}.ckptfs {__version__}\n", "")


def test_what_the_daemon_says_is_shown(place: DaemonUnderTest) -> None:
    (place.state / "catalog.db").write_bytes(b"no catalog at all" * 100)
    result = mount(place)
    assert result.returncode == 32 and str(place.state / "catalog.db") in result.stderr and "no file was changed" in result.stderr
    assert not os.path.ismount(place.path)


def test_unmounting_a_path_that_is_no_mount_is_refused(tmp_path: Path) -> None:
    result = helper("umount", tmp_path)
    assert result.returncode == 32 and "does not lie in a ckptfs mount" in result.stderr
    assert helper("umount").returncode == 1


def test_umount_says_what_was_not_written_back(place: DaemonUnderTest) -> None:
    """F2: with a PFS that refuses, the deadline passes, and the words say what is left; the next mount has it."""
    subprocess.run(["mount", "-t", "tmpfs", "none", str(place.pfs)], check=True)
    assert mount(place, "drain_deadline=1s").returncode == 0
    (place.path / "first").write_bytes(b"x")
    place.settle()
    with read_only(place.pfs):
        (place.path / "kept").write_bytes(b"x" * 1000)
        result = helper("umount", place.path)
    assert result.returncode == 0 and "not everything was written back (1 file (1000 B)" in result.stderr, result.stderr
    assert mount(place).returncode == 0
    assert (place.path / "kept").read_bytes() == b"x" * 1000
    assert helper("umount", place.path).returncode == 0
    assert (place.pfs / "kept").read_bytes() == b"x" * 1000


def test_a_mount_waits_for_the_daemon_that_still_drains(place: DaemonUnderTest) -> None:
    """umount without the helper returns at once; what comes next is not refused because the daemon needs a moment more."""
    assert mount(place, "drain_deadline=2s").returncode == 0
    with tmpfs_at(place.pfs, "ro"):
        (place.path / "kept").write_bytes(b"x" * 1000)
        subprocess.run(["umount", "-i", str(place.path)], check=True)
        assert is_running(place.pid("supervisor"))
        assert mount(place, "drain_deadline=1s").returncode == 0
    assert helper("umount", place.path).returncode == 0


def test_mount_umount_and_fstab(place: DaemonUnderTest) -> None:
    """Through the real mount(8) and umount(8), with an fstab, in a mount namespace in which /usr/sbin holds our helpers only."""
    sbin = place.root / "sbin with space"
    sbin.mkdir()
    for kind in ("mount", "umount"):
        script = sbin / f"{kind}.ckptfs"
        script.write_text(f'#!/bin/sh\necho {kind} was called >&2\nexec {sys.executable} -P -c "{entry_point(kind)}" "$@"\n')
        script.chmod(0o755)
    passing = (REPOSITORY / "deploy/umount.fuse").read_text().replace("/opt/ckptfs/bin/umount.ckptfs", "/sbin/umount.ckptfs")
    (sbin / "umount.fuse").write_text(passing)
    (sbin / "umount.fuse").chmod(0o755)
    fstab = place.root / "fstab"
    fstab.write_text(f"{place.name} {place.path} ckptfs {options(place, 'nofail', '_netdev')} 0 0\n")
    script = f"""set -e
mount --bind '{sbin}' $(readlink -f /sbin)
mount -T {fstab} {place.path}
findmnt -n -o FSTYPE,SOURCE {place.path}
echo hello > {place.path}/file
umount {place.path}
cat {place.pfs}/file
mount -t ckptfs -o {options(place)} {place.name} {place.path}
cat {place.path}/file
umount {place.path}
if command -v bindfs > /dev/null; then
    bindfs {place.nvme} {place.pfs} && umount {place.pfs} && ! mountpoint -q {place.pfs}
fi
! mount -t ckptfs -o bogus {place.name} {place.path} || exit 9
"""
    command = [*with_mounts_of_its_own(), "sh", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment(), check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["fuse.ckptfs", place.name, "hello", "hello"]
    assert "unknown option 'bogus'" in result.stderr
    assert result.stderr.count("umount was called") == 2


def test_the_daemon_finds_its_mountpoint_in_the_configuration(place: DaemonUnderTest) -> None:
    """As ckptfs@.service starts it: `ckptfsd NAME -o config=FILE`."""
    file = place.root / "job.toml"
    lines = {"mountpoint": place.path, "state": place.state, "pfs": place.pfs, "ram": "64M"}
    file.write_text("".join(f"{key} = {json.dumps(str(value))}\n" for key, value in lines.items()))
    ready, theirs = os.pipe()
    with open(place.log_file, "ab") as log:
        command = [sys.executable, "-P", "-m", "ckptfs_daemon", place.name, "-o", f"config={file}", "--ready-fd", str(theirs)]
        daemon = subprocess.Popen(command, stdout=log, stderr=log, pass_fds=[theirs], env=environment(), start_new_session=True)
    os.close(theirs)
    with os.fdopen(ready) as pipe:
        assert pipe.readline() == "ok\n"
    daemon.terminate()
    assert daemon.wait(90) == 0 and not os.path.ismount(place.path)


def test_umount_writes_back_before_it_unmounts(place: DaemonUnderTest) -> None:
    """P3: while the PFS refuses, umount names the obstacle early and the mount goes on serving; then everything is on the PFS."""
    subprocess.run(["mount", "-t", "tmpfs", "none", str(place.pfs)], check=True)
    assert mount(place).returncode == 0
    (place.path / "first").write_bytes(b"x")
    place.settle()
    with read_only(place.pfs):
        (place.path / "kept").write_bytes(b"x" * 1000)
        command = [sys.executable, "-P", "-c", entry_point("umount"), str(place.path)]
        running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
        assert running.stderr is not None
        said = running.stderr.readline()
        assert "blocked: " in said and "Read-only" in said and "with the mount attached" in said, said
        assert os.stat(place.path).st_dev == place.device and running.poll() is None
        (place.path / "meanwhile").write_bytes(b"y" * 1000)
    assert running.wait(120) == 0
    assert (place.pfs / "kept").read_bytes() == b"x" * 1000 and (place.pfs / "meanwhile").read_bytes() == b"y" * 1000
    (place.path / "below").write_bytes(b"the administrator's again")


def test_umount_without_a_pfs_says_that_ram_keeps_the_files(place: DaemonUnderTest) -> None:
    """F2: what lies in RAM only is named with its place, and with the command that goes on."""
    place.options.pop("pfs")
    place.options.pop("nvme")
    assert mount(place).returncode == 0
    (place.path / "only").write_bytes(b"x" * 1000)
    result = helper("umount", place.path)
    assert result.returncode == 0
    assert f"1 file (1000 B) only in RAM, at {place.state}/ram: a reboot loses it" in result.stderr, result.stderr
    assert "to go on: mount -t ckptfs" in result.stderr and f"ckptfs mounts --delete {place.name}" in result.stderr
    assert mount(place).returncode == 0
    assert (place.path / "only").read_bytes() == b"x" * 1000
    assert helper("umount", place.path).returncode == 0


def test_a_name_that_is_a_file_in_the_working_directory_stays_a_name(
    place: DaemonUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mount(8) turns `run1` into `/where/you/are/run1` if there is such a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / place.name).mkdir()
    assert helper("mount", tmp_path / place.name, place.path, "-f", "-o", options(place)).returncode == 0
    refused = helper("mount", tmp_path / "missing", place.path, "-f", "-o", options(place))
    assert refused.returncode == 1 and "cannot name a mount" in refused.stderr
