"""A user without any privilege mounts through fusermount3: the buffered path, the same semantics, and a daemon that may die (P8).

Runs in a mount namespace of its own, in which the interpreter, this tree and /dev/fuse are within that user's reach.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from another_user import STRANGER
from daemon_under_test import REPOSITORY, environment
from programs import with_mounts_of_its_own

pytestmark = [pytest.mark.fuse, pytest.mark.root]

SCENARIO = Path(__file__).with_name("ordinary_user_scenario.py")
SCENARIO_S = 200.0


def _hidden_ancestor(path: Path) -> Path | None:
    """The first directory on the way to `path` that a stranger may not pass."""
    return next((above for above in reversed(path.parents) if not above.stat().st_mode & 0o001), None)


def _preparations(place: Path) -> list[list[str]]:
    """The commands that bring what the user needs within reach, in a mount namespace of its own."""
    commands: list[list[str]] = []
    needed = {Path(part).resolve() for part in (sys.prefix, sys.base_prefix, REPOSITORY)} | {Path(sys.prefix)}
    for ancestor in {hidden for path in needed if (hidden := _hidden_ancestor(path)) is not None}:
        kept = place / f"kept{len(commands)}"
        commands += [["mkdir", kept], ["mount", "--bind", ancestor, kept], ["mount", "-t", "tmpfs", "-o", "mode=0755", "none", ancestor]]
        for path in sorted(path for path in needed if path.is_relative_to(ancestor)):
            commands += [["mkdir", "-p", path], ["mount", "--bind", kept / path.relative_to(ancestor), path]]
    device = place / "fuse"
    commands += [["mknod", "-m", "666", device, "c", "10", "229"], ["mount", "--bind", device, "/dev/fuse"]]
    return [[str(part) for part in command] for command in commands]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the user reaches, with one of its own in it."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    missing = [tool for tool in ("fusermount3", "unshare", "setpriv") if shutil.which(tool) is None]
    if missing or not Path("/dev/fuse").exists():
        pytest.skip(f"NO FUSERMOUNT3 HERE: {missing or '/dev/fuse is missing'}")
    made = Path(tempfile.mkdtemp(prefix="ckptfs-test-", dir="/tmp"))
    made.chmod(0o711)
    for name in ("home", "home/mnt", "home/run", "home/pfs"):
        (made / name).mkdir()
        os.chown(made / name, STRANGER, STRANGER)
    yield made
    shutil.rmtree(made)


@pytest.mark.others
def test_a_user_without_privileges_has_the_same_filesystem(place: Path) -> None:
    steps = " && ".join(" ".join(f"'{part}'" for part in command) for command in _preparations(place))
    user = f"setpriv --reuid {STRANGER} --regid {STRANGER} --clear-groups '{sys.executable}' '{SCENARIO}' '{place / 'home'}'"
    home = {"HOME": str(place / "home"), "XDG_RUNTIME_DIR": str(place / "home" / "run")}
    done = subprocess.run(
        [*with_mounts_of_its_own(), "bash", "-c", f"set -e; {steps}; cd /; exec {user}"],
        capture_output=True, text=True, timeout=SCENARIO_S, env=environment(**home), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert "nosuid" in found["options"] and "nodev" in found["options"]
    assert found["data_path"] == "buffered" and "CAP_SYS_ADMIN" in found["reason"]
    assert found["read"] == ["one two", "one two", "one two"], "as written; after kill -9 of the mount; after kill -9 of the supervisor"
    assert found["owner"] == STRANGER
    assert found["exit_code"] == 0
    assert found["on_pfs"] == "one two"
    assert not Path(found["ram"]).exists(), "the memory is given back when nothing lies only there"
