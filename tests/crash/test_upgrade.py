"""X2: another version takes over a running mount, and applications go on; one that could not is refused before anything is touched."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from actors import acting, ended
from daemon_under_test import REPOSITORY, DaemonUnderTest, environment, eventually
from programs import PROGRAM_S, differences, need, with_mounts_of_its_own

from ckptfs import __version__
from ckptfs.catalog.migrations import SCHEMA_VERSION

pytestmark = [pytest.mark.crash, pytest.mark.fuse, pytest.mark.root]
MakeDaemon = Callable[..., DaemonUnderTest]
PACKAGES = (".", "daemon", "client")


class Installation:
    """A copy of this tree that is another version."""

    def __init__(self, directory: Path, version: str) -> None:
        self.directory, self.version = directory, version
        for package in ("ckptfs", "daemon", "client"):
            shutil.copytree(REPOSITORY / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
        self.edit("ckptfs/__init__.py", f'"{__version__}"', f'"{version}"')

    @property
    def path(self) -> str:
        return os.pathsep.join(str(self.directory / package) for package in PACKAGES)

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.directory / file
        assert old in path.read_text(), f"{file} has no {old}"
        path.write_text(path.read_text().replace(old, new))

    def upgrade(self, daemon: DaemonUnderTest, *, code: int = 0) -> str:
        """Run `ckptfs upgrade` of this version; what it says."""
        command = [sys.executable, "-P", "-m", "ckptfs_client", "upgrade", daemon.name]
        done = subprocess.run(
            command, env=environment(PYTHONPATH=self.path), capture_output=True, text=True, timeout=120, cwd="/", check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


class ThisInstallation(Installation):
    """This tree itself."""

    def __init__(self) -> None:
        self.directory, self.version = REPOSITORY, __version__


def get_version(daemon: DaemonUnderTest) -> str:
    found = re.search(r'"version": "([^"]*)"', daemon.command("status", daemon.path, "--json").stdout)
    assert found is not None
    return found[1]


TRAINING = """
import select, sys, torch
from pathlib import Path
model, steps = torch.nn.Linear(64, 64), 0
directory = Path(sys.argv[1])
directory.mkdir()
while steps == 0 or not Path(sys.argv[2]).exists():
    steps += 1
    torch.save({"model": model.state_dict(), "step": steps}, directory / "new.tmp")
    (directory / "new.tmp").rename(directory / "last.pt")
    read = torch.load(directory / "last.pt")
    assert read["step"] == steps and all(torch.equal(read["model"][name], value) for name, value in model.state_dict().items())
    torch.nn.init.uniform_(model.weight)
    select.select([], [], [], 0.05)  # A step of the training.
print("trained")
"""


class Writers:
    """A training run, fio with verification, and a process that keeps a file open and maps it: they fail at the first call that fails."""

    def __init__(self, daemon: DaemonUnderTest) -> None:
        need("fio")
        self.enough = daemon.root / "enough"
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": daemon.root}
        fio = ["fio", "--name=fio", f"--filename={daemon.path}/fio", "--size=4m", "--bs=13k", "--rw=randwrite", "--rate_iops=100"]
        fio += ["--verify=crc32c", "--verify_fatal=1", "--verify_backlog=40", "--fsync=50", "--time_based", "--runtime=600"]
        self.fio = subprocess.Popen(fio, **pipes)
        self.training = subprocess.Popen([sys.executable, "-c", TRAINING, daemon.path / "training", self.enough], **pipes)
        self.actors = acting(daemon.path, 1, ["overwriter"])
        eventually(lambda: (daemon.path / "fio").exists() and (daemon.path / "training" / "last.pt").exists(), what="all of them write")

    def go_on(self) -> bool:
        return all(process.poll() is None for process in (self.fio, self.training, *self.actors.values()))

    def end(self) -> None:
        """Let them finish, and fail if one of them met an error."""
        self.enough.touch()
        assert ended(self.actors) == []
        said = self.training.communicate(timeout=PROGRAM_S)[0]
        assert said == "trained\n", said
        self.fio.send_signal(signal.SIGINT)
        said = self.fio.communicate(timeout=PROGRAM_S)[0]
        assert re.search(r"err= 0", said) and "verify:" not in said, said


def test_applications_go_on_through_an_upgrade_and_back(data_path: str, tmp_path: Path, make_daemon: MakeDaemon) -> None:
    """X2, P8, P7: no system call fails, no byte is wrong, and the PFS is as the mount at the end."""
    pytest.importorskip("torch", reason="torch is not installed (./bootstrap.sh setup installs it)")
    daemon = make_daemon(data_path)
    assert daemon.process is not None
    other = Installation(tmp_path / "other", "99.1")
    writers = Writers(daemon)
    for installation in (other, ThisInstallation()):
        said = installation.upgrade(daemon)
        assert said.startswith(f"{daemon.name}: version {installation.version}, ")
        assert get_version(daemon) == installation.version
        assert daemon.pid("supervisor") == daemon.process.pid
        assert writers.go_on(), writers.end()
    writers.end()
    assert os.stat(daemon.path).st_dev == daemon.device, "the same mount, not another one on top"
    daemon.settle()
    assert differences(daemon.path, daemon.pfs) == []
    assert daemon.unmount() == 0


def test_what_cannot_take_over_is_refused(tmp_path: Path, make_daemon: MakeDaemon) -> None:
    """X2: the old version goes on with the same processes; both versions of a catalog that is too new are named."""
    daemon = make_daemon("auto")
    daemon.expect_warning("is not handed over")
    newer = Installation(tmp_path / "newer", "99.1")
    newer.edit("ckptfs/catalog/migrations.py", "script=_VERSION_4),", "script=_VERSION_4), _migrate_to_5,")
    newer.edit(
        "ckptfs/catalog/migrations.py", "def _run_script(",
        "def _migrate_to_5(connection):\n    _run_script(connection, 'CREATE TABLE later (id INTEGER);')\n\n\ndef _run_script(",
    )  # fmt: skip
    with open(daemon.path / "open", "w+b", buffering=0) as file:
        file.write(b"before ")
        newer.edit("daemon/ckptfs_daemon/mover/main.py", "import functools", "import functools, of_nobody")
        before = [daemon.pid(role) for role in ("supervisor", "mount", "mover")]
        said = newer.upgrade(daemon, code=1)
        assert "cannot take over: version 99.1: No module named 'of_nobody'; nothing was changed; this version goes on" in said
        assert [daemon.pid(role) for role in ("supervisor", "mount", "mover")] == before
        assert get_version(daemon) == __version__
        newer.edit("daemon/ckptfs_daemon/mover/main.py", "import functools, of_nobody", "import functools")
        newer.upgrade(daemon)
        assert daemon.catalog("SELECT count(*) FROM later") == [(0,)], "the catalog is migrated"
        said = ThisInstallation().upgrade(daemon, code=1)
        assert f"has version {SCHEMA_VERSION + 1}, this ckptfs knows up to {SCHEMA_VERSION}" in said
        assert get_version(daemon) == "99.1" and not (daemon.state / "catalog.db.trial").exists()
        file.write(b"after")
        file.seek(0)
        assert file.read() == b"before after"
    daemon.env["PYTHONPATH"] = newer.path


def test_an_installation_that_is_replaced_waits_for_the_upgrade(tmp_path: Path, make_daemon: MakeDaemon) -> None:
    """X2: until then all processes have one version, those that are started later too."""
    installed = Installation(tmp_path / "installed", "99.1")
    daemon = make_daemon("auto", env={"PYTHONPATH": installed.path})
    with open(daemon.path / "open", "w+b", buffering=0) as file:
        file.write(b"before ")
        installed.edit("ckptfs/__init__.py", "99.1", "99.2")
        for role in ("mover", "mount"):
            daemon.kill(role)
        assert get_version(daemon) == "99.1"
        installed.upgrade(daemon)
        file.write(b"after")
        file.seek(0)
        assert file.read() == b"before after"
    assert get_version(daemon) == "99.2"


SERVICE = """
set -e
mount -t tmpfs none /run
mkdir -p /run/systemd/system "$ROOT/run"
export XDG_RUNTIME_DIR=$ROOT/run HOME=$ROOT
/usr/lib/systemd/systemd --user --log-target=null &
manager=$!
trap 'kill $manager; wait $manager || true' EXIT
for _ in $(seq 100); do systemctl --user is-system-running > /dev/null 2>&1 && break || sleep 0.1; done
systemctl --user is-system-running || exit 77
echo begun
systemctl --user start "$UNIT"
exec 3<> "$MOUNT/open"
pid() { systemctl --user show -P MainPID "$UNIT"; }
first=$(pid)
echo -n "before " >&3
systemctl --user restart "$UNIT"
[ "$(pid)" != "$first" ] && echo restarted
second=$(pid)
echo -n "between " >&3
systemctl --user reload "$UNIT"
[ "$(pid)" = "$second" ] && echo reloaded
echo -n "after" >&3
cat "$MOUNT/open"
exec 3>&-
systemctl --user stop "$UNIT"
mountpoint -q "$MOUNT" || echo unmounted
"""


def test_systemd_restarts_and_reloads_a_service_under_an_open_file(make_daemon: MakeDaemon) -> None:
    """X2: with the shipped unit and a systemd of our own. `restart` leaves the mount, `reload` replaces the version, `stop` drains."""
    need("unshare", "systemctl")
    daemon = make_daemon("auto", start=False)
    unit = (REPOSITORY / "deploy/systemd/ckptfs@.service").read_text()
    options = ",".join(f"{key}={value}" for key, value in daemon.options.items() if value is not None)
    run_of = {
        "ckptfsd %i -o config=/etc/ckptfs/%i.toml": f"ckptfs_daemon {daemon.name} {daemon.path} -o {options}",
        "ckptfs": "ckptfs_client",
    }
    for command, module in run_of.items():
        unit = unit.replace(f"/opt/ckptfs/bin/{command}", f"{sys.executable} -m {module}")
    # What a manager without the rights of PID 1 cannot set up.
    unit = re.sub(
        r"^(DevicePolicy|DeviceAllow|Protect\w+|Restrict\w+|SystemCall\w+|LockPersonality|KeyringMode)=.*\n", "", unit, flags=re.MULTILINE
    )
    places = environment()["PYTHONPATH"]
    log = f"append:{daemon.log_file}"
    unit = unit.replace("[Service]", f"[Service]\nEnvironment=PYTHONPATH={places}\nStandardOutput={log}\nStandardError={log}")
    units = daemon.root / ".config" / "systemd" / "user"
    units.mkdir(parents=True)
    (units / f"ckptfs@{daemon.name}.service").write_text(unit)
    variables = {"ROOT": str(daemon.root), "MOUNT": str(daemon.path), "UNIT": f"ckptfs@{daemon.name}.service"}
    done = subprocess.run(
        [*with_mounts_of_its_own(), "bash", "-c", SERVICE],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    print(done.stdout, done.stderr, daemon.log)
    if done.returncode == 77:
        pytest.skip("no systemd of our own runs here")
    assert done.stdout.split("begun\n")[1].split("\n") == ["restarted", "reloaded", "before between afterunmounted", ""], done.stderr
    assert daemon.log.count("handing over to systemd") == 1 and daemon.log.count("resuming the mount that systemd kept") == 1
    assert daemon.log.count("draining before the unmount") == 1
    assert (daemon.pfs / "open").read_bytes() == b"before between after"
