"""`ckptfs` on a real mount: files, levels, drains, verification, and waits that outlive the mover. F2, F5, P8."""

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from daemon_under_test import Area, DaemonUnderTest, eventually

MIB = 1 << 20
ONLY_DATA_PATH = "buffered"  # Each machine has it, and how bytes travel plays no part.


def listed(mount: Area | DaemonUnderTest, *arguments: str | Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(mount.command("ls", "--json", *arguments).stdout)
    return found


def test_a_file_on_its_way(mount: Area) -> None:
    """F2, T3, H7: open, local, on the PFS: what `ls` says of it at each point, and nobody had to ask for a copy."""
    path = mount.path / "model.pt"
    with open(path, "wb") as file:
        file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())
        row = listed(mount, path)[0]
        assert (row["state"], row["kind"], row["inode"]) == ("open", "file", os.stat(path).st_ino)
        assert mount.command("wait", path, "--level", "local", "--timeout", "300ms", check=False).returncode == 4
    mount.command("wait", path, "--level", "local", "--timeout", "60s")
    mount.command("wait", path, "--timeout", "120s")
    row = listed(mount, path)[0]
    assert (row["level"], row["state"], row["size"], row["pfs_pending"], row["progress"]) == ("pfs", "sealed", MIB, False, 1.0)
    assert {"pfs": "published", "ram": "good"}.items() <= {copy["tier"]: copy["state"] for copy in row["copies"]}.items()
    assert row["digest"] == os.getxattr(path, "user.ckptfs.digest").decode() and len(row["digest"]) == 32
    assert (mount.pfs / "model.pt").read_bytes() == path.read_bytes()


def test_a_directory_with_all_below(mount: Area) -> None:
    (mount.path / "a" / "b").mkdir(parents=True)
    for number in range(20):
        (mount.path / "a" / "b" / f"shard{number}").write_bytes(b"x" * 1000 * number)
    (mount.path / "a" / "link").symlink_to("b")
    mount.command("wait", mount.path / "a", "--timeout", "120s")
    assert {row["level"] for row in listed(mount, mount.path / "a" / "b")} == {"pfs"}
    rows = listed(mount, mount.path / "a")
    assert [row["name"] for row in rows] == ["b", "link"]
    assert (rows[0]["level"], rows[0]["size"]) == ("pfs", 1000 * sum(range(20))), "a directory shows the lowest level and the size of all"
    assert len(list((mount.pfs / "a" / "b").iterdir())) == 20 and os.readlink(mount.pfs / "a" / "link") == "b"


def test_odd_names(mount: Area) -> None:
    name = b"caf\xe9 \n [red]x"
    (mount.path / os.fsdecode(name)).write_bytes(b"1")
    assert os.fsencode(listed(mount, mount.path)[0]["name"]) == name
    assert "caf\\xe9 \\n [red]x" in mount.command("ls", mount.path).stdout, "on one line, as escapes"


def test_names_that_are_not_there(mount: Area) -> None:
    """F5: a mistyped name is said to be missing."""
    missing = mount.path / "missing"
    refused = mount.command("refresh", missing, check=False)
    assert refused.returncode == 1 and "missing: No such file or directory" in refused.stderr
    (mount.pfs / "missing").write_bytes(b"x")
    assert mount.command("refresh", missing).stderr == ""
    listed = mount.command("list", mount.path / "none_*")
    assert (listed.stdout, listed.stderr) == ("", f"ckptfs: {mount.path}/none_*: no checkpoint sets\n")


def test_status_names_the_processes(mount: Area) -> None:
    """The roles, their pids, memory and restarts; the data path and why."""
    found = json.loads(mount.command("status", mount.path, "--json").stdout)
    assert found["health"] == "ok" and found["mountpoint"] == str(mount.daemon.path)
    assert found["data_path"] == mount.daemon.options["data_path"] and found["data_path_reason"]
    processes = {process["role"]: process for process in found["processes"]}
    assert {"supervisor", "mount", "mover"} <= set(processes)
    assert all(process["pid"] > 0 and process["rss_bytes"] > MIB for process in processes.values())
    assert {tier["name"] for tier in found["tiers"]} == {"ram", "nvme", "pfs"}
    assert f"{mount.daemon.name} on {mount.daemon.path}: ok" in mount.command("status", mount.path).stdout


def test_verify_on_a_mount(mount: Area) -> None:
    """H8: the copies in the tiers and the file on the PFS, both read."""
    path = mount.path / "file"
    path.write_bytes(os.urandom(100_000))
    mount.command("wait", path, "--timeout", "120s")
    found = json.loads(mount.command("verify", path, "--json").stdout)
    assert {(finding["tier"], finding["verdict"]) for finding in found["findings"]} == {("ram", "good"), ("pfs", "good")}
    checked = "SELECT 1 FROM pfs_file WHERE inode = ? AND checked_ns > 0"
    eventually(lambda: mount.catalog(checked, path.stat().st_ino), what="it was read back, and is not read back again")
    on_pfs = mount.pfs / "file"
    times = os.stat(on_pfs)
    with open(on_pfs, "r+b") as file:
        file.write(b"rotten bits")
    os.utime(on_pfs, ns=(times.st_atime_ns, times.st_mtime_ns))
    result = mount.command("verify", path, check=False)
    assert result.returncode == 1 and "bad: 1 copy" in result.stdout and "digest differs" in result.stdout


@pytest.mark.crash
def test_a_wait_outlives_the_mover(make_daemon: Any) -> None:
    """X2, P8: the mover is killed under a waiting client, which only sees a pause."""
    daemon: DaemonUnderTest = make_daemon()
    path = daemon.path / "file"
    results: list[subprocess.CompletedProcess[str]] = []
    waiting = threading.Thread(target=lambda: results.append(daemon.command("wait", path, "--timeout", "110s", check=False)))
    with open(path, "wb") as file:
        waiting.start()
        eventually(lambda: json.loads(daemon.command("status", daemon.path, "--json").stdout)["counts"]["writers"] == 1)
        daemon.kill("mover")
        file.write(b"z" * MIB)
    waiting.join(120)
    assert results and results[0].returncode == 0, results
    restarts = {one["role"]: one["restarts"] for one in json.loads(daemon.command("status", "--json", daemon.path).stdout)["processes"]}
    assert restarts["mover"] == 1 and restarts["mount"] == 0
