"""docs/reference.md and the man pages are what docs/generate.py makes from the code: the public surface cannot change without a diff."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
PAGES = sorted((DOCS / "man").iterdir())
CHECKERS = {"groff": ["groff", "-man", "-Tutf8", "-ww", "-z"], "mandoc": ["mandoc", "-Tlint", "-Werror"]}
# What a caller may have set, and must not be seen in the files.
ELSEWHERE = {"LC_ALL": "C", "COLUMNS": "40", "CKPTFS_RUNTIME_DIR": "/elsewhere", "XDG_STATE_HOME": "/elsewhere", "CKPTFS_LAB": "/elsewhere"}


def generate(docs: Path, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    """Run the generator that lies in `docs`."""
    roots = os.pathsep.join(str(REPOSITORY / part) for part in (".", "daemon", "client"))
    command = [sys.executable, str(docs / "generate.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": roots, **more}
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=120, check=False)


def test_the_reference_is_what_the_code_says() -> None:
    result = generate(DOCS, "--check", **ELSEWHERE)
    assert result.returncode == 0, f"\n{result.stderr}\nThe files are the record of the public surface: look at their diff."


def test_a_difference_is_found_and_mended(tmp_path: Path) -> None:
    """Also a page that is missing; the message says which command to run."""
    docs = Path(shutil.copytree(DOCS, tmp_path / "docs"))
    changed, missing = docs / "reference.md", docs / "man" / "ckptfs.1"
    changed.write_text(changed.read_text().replace("`--checkpoint SIZE`", "`--checkpoints SIZE`"))
    missing.unlink()
    result = generate(docs, "--check")
    assert result.returncode == 1 and not missing.exists()
    lines = result.stderr.splitlines()
    assert [line.split()[0] for line in lines] == ["docs/reference.md", "docs/man/ckptfs.1"]
    assert all("run .venv/bin/python docs/generate.py" in line for line in lines)
    assert generate(docs).returncode == 0
    assert changed.read_text() == (DOCS / "reference.md").read_text() and missing.read_text() == (DOCS / "man" / "ckptfs.1").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_man_page_has_no_error(page: Path, checker: str) -> None:
    if shutil.which(checker) is None:
        pytest.skip(f"NOT TESTED HERE, not installed: {checker}")
    result = subprocess.run([*CHECKERS[checker], page], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
