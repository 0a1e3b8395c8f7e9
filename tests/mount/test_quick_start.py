"""The quick start of README.md, word by word: only names and paths are put in. N2."""

import os

import pytest
from daemon_under_test import REPOSITORY, DaemonUnderTest
from page_commands import read_blocks, run_page

pytestmark = pytest.mark.fuse

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


def test_the_quick_start_works_word_by_word(place: DaemonUnderTest) -> None:
    """N2: mount, train, wait, resume from the newest complete checkpoint, status, list, umount."""
    blocks = read_blocks(REPOSITORY / "README.md", "Quick start")
    assert [line.split()[0] for line in blocks[0].body.splitlines()] == [
        "sudo", "sudo", "python", "ckptfs", "python", "ckptfs", "ckptfs", "sudo",
    ]  # fmt: skip
    (place.root / "train.py").write_text(TRAIN)
    output = run_page(place, blocks)
    assert "resumed at 200" in output and place.name in output
    assert f"{place.path}/step_300.pt was passed over: it ends before its pickle is complete" in output
    assert sorted(os.listdir(place.pfs))[-3:] == ["step_100.pt", "step_200.pt", "step_300.pt"]
