"""What the documents say exists: feature ids, labels, versions, commands."""

import importlib
import pkgutil
import re
import subprocess
from pathlib import Path

import ckptfs_daemon
import pytest

import ckptfs
from ckptfs import disk

REPOSITORY = Path(__file__).resolve().parents[2]
# What a mount must give its users, by id: promises, Dragon, PyTorch, NVIDIA, HPC practice, Google, filesystems, ours alone.
FEATURES = {"P": 11, "D": 16, "T": 7, "N": 9, "H": 10, "G": 7, "F": 6, "X": 9}
KNOWN = {f"{letter}{number}" for letter, last in FEATURES.items() for number in range(1, last + 1)}
# A transfer declares three labels; one that only reads never comes to these.
ONLY_READ = {f"{step}:{act}" for step in ("duplicate:check", "fetch:check", "seal", "verify") for act in ("write", "truncate")}
COMMANDS = ("setup", "demo", "test", "lint", "bench", "install", "uninstall")


def named(text: str) -> set[str]:
    """The feature ids in a text."""
    return set(re.findall(r"\b[PDTNHGFX][1-9][0-9]?\b", text))


@pytest.mark.parametrize("path", sorted((REPOSITORY / "tests").rglob("test_*.py")), ids=lambda path: path.stem)
def test_a_test_names_only_features_that_exist(path: Path) -> None:
    docstrings = re.findall(r'"""(.*?)"""', path.read_text(), re.DOTALL)
    assert named("\n".join(docstrings)) - KNOWN == set()


def test_the_readme_names_only_features_and_tests_that_exist() -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert named(text) - KNOWN == set()
    assert {f"P{number}" for number in range(1, 12)} <= named(text)
    paths = set(re.findall(r"`((?:tests|bench|demo|deploy|ckptfs|daemon|client)/[\w./-]+)`", text))
    assert [path for path in sorted(paths) if not (REPOSITORY / path).exists()] == []


def test_every_feature_that_the_readme_claims_is_named_by_a_test() -> None:
    text = (REPOSITORY / "README.md").read_text()
    tests = "\n".join(path.read_text() for path in (REPOSITORY / "tests").rglob("*.py") if path != Path(__file__))
    docstrings = "\n".join(re.findall(r'"""(.*?)"""', tests, re.DOTALL))
    assert named(text) - named(docstrings) - {"P9"} == set()


def test_the_architecture_names_only_files_that_exist() -> None:
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    paths = set(re.findall(r"`((?:tests|bench|demo|deploy|ckptfs|daemon|client)/[\w./-]+)`", text))
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not (REPOSITORY / path).exists()] == []


def test_the_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None and first[1] == ckptfs.__version__


def _labels() -> set[str]:
    """Every label of a disk operation that any module declares."""
    for package in (ckptfs, ckptfs_daemon):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(("__main__", "_shim")) and "_pb2" not in module.name:
                importlib.import_module(module.name)
    return {label for label in disk.LABELS if not label.startswith("test:")}


def test_every_label_of_a_disk_operation_is_struck_by_a_test() -> None:
    """By name, or by a loop over all labels of a step (`label.startswith("step:")`)."""
    tests = "\n".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    steps = tuple(re.findall(r'\.startswith\("(\w+:)"\)', tests))
    struck = set(re.findall(r'"(\w+:[\w:]+)["=]', tests)) | ONLY_READ
    assert [label for label in sorted(_labels() - struck) if not label.startswith(steps)] == []


def test_the_crash_tests_name_only_labels_that_exist() -> None:
    named_there = re.findall(r'"(\w+:[\w:]+)"', (REPOSITORY / "tests" / "crash" / "test_labels.py").read_text())
    assert set(named_there) - _labels() == set()


def test_make_and_bootstrap_offer_the_same_commands() -> None:
    script = (REPOSITORY / "bootstrap.sh").read_text()
    make = (REPOSITORY / "Makefile").read_text()
    for command in COMMANDS:
        assert re.search(rf"^  {command}\) ", script, re.MULTILINE), command
        assert command in make, command
    subprocess.run(["bash", "-n", REPOSITORY / "bootstrap.sh"], check=True)
    subprocess.run(["bash", "-n", REPOSITORY / "demo" / "demo.sh"], check=True)
    subprocess.run(["bash", "-n", REPOSITORY / ".ci" / "run"], check=True)


def test_the_contracts_hold() -> None:
    """Imports run one way."""
    result = subprocess.run(["lint-imports"], cwd=REPOSITORY, capture_output=True, text=True, check=False, env=_path())
    assert result.returncode == 0, result.stdout


def _path() -> dict[str, str]:
    import os
    import sys

    roots = os.pathsep.join(str(REPOSITORY / part) for part in (".", "daemon", "client"))
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": roots}
