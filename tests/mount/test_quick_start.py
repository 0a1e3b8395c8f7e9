"""The quick start of README.md, word by word: only names and paths are put in. N2."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_under_test import REPOSITORY, DaemonUnderTest, environment
from programs import with_mounts_of_its_own

pytestmark = pytest.mark.fuse

OPTIONS = "pfs=/lustre/me/ckpt,nvme=/local/nvme,ram=64G"
TRAIN = """
import os, pickle, sys
what, path = sys.argv[1:]
if what == "--checkpoints":
    for step in (100, 200, 300):
        with open(f"{path}/step_{step}.pt", "wb") as file:
            pickle.dump({"step": step, "weights": [0.5] * 10_000}, file)
            if step == 300:
                file.truncate(9_000)  # The node ran out of memory in the middle of this one.
else:
    with open(path, "rb") as file:
        print("resumed at", pickle.load(file)["step"])
"""


def read_quick_start() -> list[str]:
    """The commands, without their comments."""
    found = re.search(r"^## Quick start\n```sh\n(.*?)^```", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return [line.partition(" # ")[0].rstrip() for line in found[1].splitlines()]


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_the_quick_start_works_word_by_word(place: DaemonUnderTest) -> None:
    """N2: mount, train, wait, resume from the newest complete checkpoint, status, list, umount."""
    lines = read_quick_start()
    assert [line.split()[0] for line in lines] == ["sudo", "sudo", "python", "ckptfs", "python", "ckptfs", "ckptfs", "sudo"]
    assert OPTIONS in lines[1] and "ckptfs latest '/ckpt/step_*.pt'" in lines[4]
    programs, sbin = place.root / "bin", place.root / "sbin"
    write_program(programs / "sudo", '#!/bin/sh\nexec "$@"\n')
    write_program(programs / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    write_program(programs / "ckptfs", f'#!/bin/sh\nexec {sys.executable} -P -m ckptfs_client "$@"\n')
    for kind in ("mount", "umount"):
        entry = f"import sys; from ckptfs_client.mount_helper import {kind}_main; sys.exit({kind}_main())"
        write_program(sbin / f"{kind}.ckptfs", f'#!/bin/sh\nexec {sys.executable} -P -c "{entry}" "$@"\n')
    passing = (REPOSITORY / "deploy/umount.fuse").read_text().replace("/opt/ckptfs/bin/umount.ckptfs", "/sbin/umount.ckptfs")
    write_program(sbin / "umount.fuse", passing)
    (place.root / "train.py").write_text(TRAIN)
    options = ",".join(f"{key}={value}" for key, value in place.options.items())
    commands = [re.sub(r"(?<!me)/ckpt\b", str(place.path), line).replace(OPTIONS, options).replace("run1", place.name) for line in lines]
    script = "\n".join(["set -e", f"mount --bind '{sbin}' $(readlink -f /sbin)", *commands])
    env = {**environment(), "PATH": f"{programs}:{os.environ['PATH']}"}
    command = [*with_mounts_of_its_own(), "sh", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False, cwd=place.root)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resumed at 200" in result.stdout and place.name in result.stdout
    assert f"{place.path}/step_300.pt was passed over: it ends before its pickle is complete" in result.stderr
    assert sorted(os.listdir(place.pfs))[-3:] == ["step_100.pt", "step_200.pt", "step_300.pt"]
