"""The guides, word for word: only names, paths and sizes are put in. H1, H2, H4, N2, N7, T1, T4, T7."""

import importlib.util
import subprocess
from pathlib import Path

import pytest
from daemon_under_test import REPOSITORY, DaemonUnderTest
from page_commands import prints, read_blocks, run_page
from programs import need

pytestmark = [pytest.mark.apps, pytest.mark.fuse]
ELSEWHERE = {"README", "kubernetes", "slurm"}
"""The index, and pages that have tests of their own."""
GUIDES = sorted(path for path in (REPOSITORY / "docs" / "guides").glob("*.md") if path.stem not in ELSEWHERE)
# What a page needs: Python modules and programs.
MODULES = {
    "pytorch": ["torch"], "dcp": ["torch"], "hf-trainer": ["transformers", "accelerate"], "lightning": ["lightning"],
    "deepspeed": ["deepspeed"],
}  # fmt: skip
PROGRAMS = {"gromacs": ["gmx"], "lammps": ["lmp"], "dmtcp": ["dmtcp_launch"], "criu": ["criu"], "systemd": ["systemd-analyze"]}


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_works_word_by_word(page: Path, place: DaemonUnderTest) -> None:
    need(*PROGRAMS.get(page.stem, []))
    missing = [module for module in MODULES.get(page.stem, []) if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"NOT TESTED HERE, not installed: {', '.join(missing)}")
    if page.stem == "criu" and subprocess.run(["criu", "check"], capture_output=True, check=False).returncode:
        pytest.skip("NOT TESTED HERE: criu check says that CRIU does not run on this kernel")
    run_page(place, read_blocks(page))


def test_a_page_that_says_something_else_is_found() -> None:
    output = "/x/step_1 was passed over: it ends\n/x/step_0\nname  level\nstep_0@1  pfs  complete\n"
    assert prints("/x/step_0\nstep_0@1 ... complete\n", output) and prints("", output)
    assert not prints("/x/step_1\n", output) and not prints("step_0@1 ... complete\n/x/step_0\n", output)
    assert not prints("step_0@1 ... in history only\n", output)
