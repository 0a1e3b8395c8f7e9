"""What the documents say exists: feature ids, tests, labels, versions, links, commands, options, messages."""

import ast
import datetime
import importlib
import itertools
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ckptfs_daemon
import pytest
import typer
from ckptfs_client.cli import app

import ckptfs
from ckptfs import config, disk

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
ARCHITECTURE = REPOSITORY / "ARCHITECTURE.md"
CHANGELOG = REPOSITORY / "CHANGELOG.md"
# The reference is generated from the code, and checked against it elsewhere.
REFERENCE = REPOSITORY / "docs" / "reference.md"
PAGES = sorted(path for path in (REPOSITORY / "docs").rglob("*.md") if path != REFERENCE)
GUIDES = REPOSITORY / "docs" / "guides" / "README.md"
DOCUMENTS = [README, ARCHITECTURE, CHANGELOG, *PAGES]
FEATURE_TABLE = REPOSITORY / "docs" / "features.md"
README_LINES_MAX, README_COLUMNS_MAX, PAGE_COLUMNS_MAX = 120, 100, 120
# What a mount must give its users, by id: promises, Dragon, PyTorch, NVIDIA, HPC practice, Google, filesystems, ours alone, memory.
FEATURES = {"P": 11, "D": 16, "T": 7, "N": 9, "H": 10, "G": 7, "F": 6, "X": 11, "M": 3}
KNOWN = {f"{letter}{number}" for letter, last in FEATURES.items() for number in range(1, last + 1)}
UNTESTED = "no test names it"
# A transfer declares three labels; one that only reads never comes to these.
ONLY_READ = {f"{step}:{act}" for step in ("duplicate:check", "fetch:check", "seal", "verify") for act in ("write", "truncate")}
COMMANDS = ("setup", "demo", "test", "lint", "bench", "install", "uninstall", "deb", "deb-test")
# Programs of others that the documents call.
UNKNOWN = "unknown program"
OTHERS = {
    "apt", "cd", "cp", "docker", "etcdctl", "install", "kubectl", "mkdir", "python", "rm", "sbatch", "scancel", "scontrol", "sinfo",
    "squeue", "systemctl", "umount",
}  # fmt: skip
COMMAND = typer.main.get_command(app)
CHANGES = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}
PATH = re.compile(r"`((?:tests|bench|demo|deploy|ckptfs|daemon|client)/[\w./-]+)`")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def named(text: str) -> set[str]:
    """The feature ids in a text."""
    return set(re.findall(r"\b[PDTNHGFXM][1-9][0-9]?\b", text))


def short(path: Path) -> str:
    """The path as a person writes it."""
    return str(path.relative_to(REPOSITORY))


def prose(path: Path) -> str:
    """A document without its blocks of code."""
    return FENCE.sub("", path.read_text())


def spans(path: Path) -> list[str]:
    """The inline code of a document."""
    return [re.sub(r"\s+", " ", found) for found in re.findall(r"`([^`]+)`", prose(path))]


def docstrings() -> str:
    """What the tests say of themselves."""
    texts = (path.read_text() for path in (REPOSITORY / "tests").rglob("*.py") if path != Path(__file__))
    return "\n".join(found for text in texts for found in re.findall(r'"""(.*?)"""', text, re.DOTALL))


# --- features, tests and files -------------------------------------------------------------------------------------------


def test_tests_name_only_features_that_exist() -> None:
    assert named(docstrings()) - KNOWN == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=short)
def test_a_document_names_only_features_and_files_that_exist(path: Path) -> None:
    text = path.read_text()
    assert named(text) - KNOWN == set()
    assert [one for one in sorted(set(PATH.findall(text))) if not (REPOSITORY / one).exists()] == []


def test_each_promise_has_its_tests() -> None:
    """One item for each promise, and again one with the tests that prove it."""
    text = re.sub(r"\n +", " ", (REPOSITORY / "docs" / "guarantees.md").read_text())
    promises = re.findall(r"^- (P\d+):? ", text, re.MULTILINE)
    proofs = dict(re.findall(r"^- \*\*(P\d+)\*\*(.*)$", text, re.MULTILINE))
    assert promises == list(proofs) == [f"P{number}" for number in range(1, 12)]
    assert [promise for promise, proof in proofs.items() if not PATH.search(proof)] == []
    assert named(text) - named(docstrings()) == set()


def test_every_feature_has_one_row() -> None:
    """A feature that works is named by a test, or its row says that it is not; one that is absent is named by none."""
    rows = re.findall(r"^\| ([A-Z]\d+) \|[^|]+\| (\w+) \|([^|]*)\|$", FEATURE_TABLE.read_text(), re.MULTILINE)
    assert sorted(row[0] for row in rows) == sorted(one for one in KNOWN if not one.startswith("P"))
    tested = named(docstrings())
    for feature, state, words in rows:
        if state == "works":
            assert (feature in tested) != (UNTESTED in words), feature
        elif state == "partly":
            assert words.strip(), f"{feature}: what is missing?"
        else:
            assert state == "absent" and feature not in tested, feature


def test_the_architecture_says_where_things_are() -> None:
    assert len(set(PATH.findall(ARCHITECTURE.read_text()))) > 20


def test_the_architecture_has_the_floors_of_the_contracts() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    contracts = [one["layers"] for one in settings["tool"]["importlinter"]["contracts"] if one["type"] == "layers"]
    (floors,) = (layers for layers in contracts if "ckptfs.clique" in layers)
    text = ARCHITECTURE.read_text()
    for number, layer in enumerate(reversed(floors)):
        (row,) = re.findall(rf"^ {number}   (.*)$", text, re.MULTILINE)
        assert {name.removeprefix("ckptfs.") for name in layer.split(" | ")} <= set(row.replace("ckptfs.", "").split())
    for place, first in (("daemon", "ckptfs_daemon.__main__"), ("mount", "main")):
        (layers,) = (layers for layers in contracts if layers[0] == first)
        assert f" in the {place}: " in text and " > ".join(layers).replace("ckptfs_daemon.", "") in text


def test_the_architecture_names_only_what_the_code_has() -> None:
    """Classes, functions and modules: a word of two parts, such as `OpenFile` or `open_file`, stands in the code as well."""
    roots = [REPOSITORY / name for name in ("ckptfs", "daemon", "client")]
    files = [path for root in roots for path in root.rglob("*") if path.suffix in (".py", ".c", ".sql")]
    known = {word for path in files for word in [path.stem, *re.findall(r"\w+", path.read_text())]}
    named = {word for span in spans(ARCHITECTURE) for word in re.findall(r"\w+", span)}
    compound = {word for word in named if re.fullmatch(r"[A-Z][a-z]+[A-Z]\w+|[a-z]+(_[a-z]+)+", word)}
    assert len(compound) > 50 and compound - known == set()


# --- form ----------------------------------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= README_LINES_MAX
    assert [number for number, line in enumerate(lines, 1) if len(line) > README_COLUMNS_MAX] == []


@pytest.mark.parametrize("path", [*PAGES, CHANGELOG], ids=short)
def test_a_page_is_not_too_wide(path: Path) -> None:
    assert [number for number, line in enumerate(path.read_text().splitlines(), 1) if len(line) > PAGE_COLUMNS_MAX] == []


def test_the_architecture_names_no_file_inside_a_sentence() -> None:
    """Paths stand in tables: a sentence that is full of them is read twice."""
    assert [line for line in prose(ARCHITECTURE).splitlines() if PATH.search(line) and not line.startswith("|")] == []


def test_the_changelog_keeps_its_form() -> None:
    """Unreleased first, then versions with dates, the newest first; the newest is this version."""
    headings = re.findall(r"^## (.+)$", CHANGELOG.read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    released = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d{2}-\d{2})", heading) for heading in headings[1:]]
    assert released and None not in released
    order = [(tuple(map(int, found.groups()[:3])), datetime.date.fromisoformat(found[4])) for found in released if found]
    assert order == sorted(order, reverse=True)
    assert ".".join(map(str, order[0][0])) == ckptfs.__version__
    assert set(re.findall(r"^### (.+)$", CHANGELOG.read_text(), re.MULTILINE)) <= CHANGES


# --- links ---------------------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors that a reader's browser knows in a document, as GitHub makes them of its headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(path: Path) -> Iterator[str]:
    """The relative links of a document that lead nowhere."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(path))):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        other = (path.parent / name).resolve() if name else path
        if other == REFERENCE and not REFERENCE.exists():
            continue  # Its generator has not run in this tree.
        if not other.exists() or (anchor and anchor not in anchors(other)):
            yield target


@pytest.mark.parametrize("path", DOCUMENTS, ids=short)
def test_links_lead_somewhere(path: Path) -> None:
    assert list(broken(path)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A head, with `code`\n[a](page.md) [b](#a-head-with-code) [c](none.md) [d](page.md#none) [e](https://x.org/none)\n")
    assert list(broken(page)) == ["none.md", "page.md#none"]


@pytest.mark.parametrize("path", PAGES, ids=short)
def test_every_page_is_reached_from_the_readme(path: Path) -> None:
    """Each guide is a row of their own index."""
    is_guide = path.parent == GUIDES.parent and path != GUIDES
    assert f"({path.name})" in GUIDES.read_text() if is_guide else f"({short(path)})" in README.read_text()


# --- commands and options ------------------------------------------------------------------------------------------------


def simple_commands(block: str) -> Iterator[list[str]]:
    """The commands of a shell block, those inside $(...) too, each as its words."""
    for line in block.replace("\\\n", "").splitlines():
        if block.lstrip().startswith("$ "):
            if not line.startswith("$ "):
                continue  # In a console block the other lines are output.
            line = line[2:]
        for inner in re.findall(r"\$\(([^()]*)\)", line):
            yield from simple_commands(inner)
        lexer = shlex.shlex(re.sub(r"\$\([^()]*\)", "X", line), posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set(";|&"):
                words.append(word)
            elif words:
                yield words
                words = []


def wrong(words: list[str]) -> str:
    """What does not exist in a command; empty when all does."""
    while words and (words[0] in ("sudo", "env") or re.fullmatch(r"[A-Z_]+=.*", words[0])):
        words = words[1:]
    program, rest = words[0], words[1:]
    if program == "ckptfs":
        return wrong_for_ckptfs(rest)
    if program in ("mount", "/sbin/mount.ckptfs", "mount.ckptfs", "ckptfsd"):
        return wrong_options(rest)
    if program in ("make", "./bootstrap.sh"):
        return wrong_target(rest)
    if lost := [word for word in rest if word.startswith("deploy/") and not (REPOSITORY / word).exists()]:
        return f"there is no {lost[0]}"
    script = next((word for word in words if word.startswith("bench/")), "")
    if script:
        return wrong_for_script(script, rest)
    return "" if program in OTHERS else f"{UNKNOWN} {program}"


def wrong_for_ckptfs(words: list[str]) -> str:
    """The subcommands and options of `ckptfs`, as typer knows them."""
    command: Any = COMMAND
    words = list(words)
    while words and words[0] != "--":
        word = words.pop(0)
        commands = getattr(command, "commands", None)
        if word.startswith("-"):
            option, equals, value = word.partition("=")
            found = next((one for one in command.params if option in one.opts), None)
            if found is None and option != "--help":
                return f"{command.name} has no option {option}"
            if found is not None and not found.is_flag and not equals:
                value = words.pop(0)
            if option == "-o" and (unknown := wrong_options(["-o", value])):
                return unknown
        elif commands is not None:
            if word not in commands:
                return f"{command.name} has no command {word}"
            command = commands[word]
    return ""


def wrong_options(words: list[str]) -> str:
    """The options of a mount."""
    for flag, text in itertools.pairwise(words):
        if flag == "-o":
            unknown = [name for name in config.parse_options(text) if not config.is_known_option(name)]
            if unknown:
                return f"a mount has no option {unknown[0]}"
    return ""


def wrong_target(words: list[str]) -> str:
    """A word of make and bootstrap.sh, and what is passed on to the benchmarks."""
    if words[0] not in COMMANDS:
        return f"there is no {words[0]}"
    passed = " ".join(word.removeprefix("ARGS=") for word in words[1:])
    return wrong_for_script("bench/run.py", shlex.split(passed)) if words[0] == "bench" else ""


def wrong_for_script(script: str, words: list[str]) -> str:
    path = REPOSITORY / script
    if not path.exists():
        return f"there is no {script}"
    unknown = [word for word in words if word.startswith("--") and f'"{word}"' not in path.read_text()]
    return f"{script} has no option {unknown[0]}" if unknown else ""


@pytest.mark.parametrize("path", DOCUMENTS, ids=short)
def test_code_blocks_call_what_exists(path: Path) -> None:
    """Programs of others are known, or the page is a guide: a test runs it."""
    blocks = [body for kind, body in FENCE.findall(path.read_text()) if kind in ("sh", "console")]
    found = [(words, what) for block in blocks for words in simple_commands(block) if (what := wrong(words))]
    assert [one for one in found if path.parent.name != "guides" or not one[1].startswith(UNKNOWN)] == []


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path != FEATURE_TABLE], ids=short)
def test_sentences_name_commands_and_options_that_exist(path: Path) -> None:
    """The table of features names commands that are wanted and not there."""
    found = spans(path)
    commands = [(span, what) for span in found if span.startswith("ckptfs ") for words in simple_commands(span) if (what := wrong(words))]
    assert commands == []
    settings = {match[1] for span in found if (match := re.fullmatch(r"(?:-o )?([a-z][a-z_]+)=[^ ]*", span))}
    assert [name for name in sorted(settings) if not config.is_known_option(name)] == []


@pytest.mark.parametrize(
    "line",
    [
        "ckptfs wiat PATH", "ckptfs wait PATH --levle pfs", "ckptfs lab start -o colour=red", "sudo mount -t ckptfs a /b -o rma=1G",
        'python x --resume "$(ckptfs lattest run)"', "make dmeo", 'make bench ARGS="--quik"', "ckptfs status && ckptfs dotcor", "ckptsf ls",
        "$ ckptfs status --clutser\nsome output", "kubectl apply -k deploy/kubernetes/bose",
    ],
)  # fmt: skip
def test_a_wrong_command_is_found(line: str) -> None:
    assert any(wrong(words) for words in simple_commands(line))


def test_every_block_of_code_says_its_language() -> None:
    known = {"sh", "console", "text", "toml", "python"}
    assert {(short(path), kind) for path in DOCUMENTS for kind, _ in FENCE.findall(path.read_text()) if kind not in known} == set()


# --- messages ------------------------------------------------------------------------------------------------------------


def names_of_troubles(package: Path) -> Iterator[str]:
    """The names of troubles, or how they begin: the constants of modules that end in TROUBLE."""
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("TROUBLE"):
                yield str(ast.literal_eval(node.value))


def test_troubleshooting_knows_every_trouble_and_every_check() -> None:
    """The first word of each trouble that `status` may show, the name of each lane, which is one, and of each check of `doctor`."""
    text = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    packages = (REPOSITORY / "ckptfs", REPOSITORY / "daemon" / "ckptfs_daemon")
    troubles = {name for package in packages for name in names_of_troubles(package)}
    assert len(troubles) > 10
    assert [trouble for trouble in sorted(troubles) if f"`{trouble}" not in text] == []
    daemon = "\n".join(path.read_text() for path in packages[1].rglob("*.py"))
    shown = set(re.findall(r'troubles\.add\(where="([^"]+)"', daemon))
    lanes = set(re.findall(r'\(f?"([a-z ]+)(?: \{number\})?", (?:self\.\w+|[A-Z]\w+\(|fsync_replication)', daemon))
    assert shown and len(lanes) > 20
    assert [name for name in sorted(shown | lanes) if not re.search(f"`{name}[ `]", text)] == []
    client = "\n".join(path.read_text() for path in (REPOSITORY / "client").rglob("doctor*.py"))
    checks = set(re.findall(r'Finding\(\s*"([^"]+)"', client))
    assert len(checks) > 8
    assert [check for check in sorted(checks) if f"`{check}`" not in text] == []


# --- labels, versions, scripts -------------------------------------------------------------------------------------------


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
    steps = tuple(re.findall(r'\.startswith\("(\w+:[\w:]*)"\)', tests))
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


def test_bootstrap_refuses_what_it_would_ignore() -> None:
    """P11: `uninstall PREFIX=/x` must not touch another installation."""
    command = ["bash", REPOSITORY / "bootstrap.sh", "uninstall", "PREFIX=/x"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | {"PREFIX": "no/absolute/path"})
    assert result.returncode == 1 and "uninstall takes no arguments; a variable goes first" in result.stderr


def test_the_contracts_hold() -> None:
    """Imports run one way."""
    result = subprocess.run(["lint-imports"], cwd=REPOSITORY, capture_output=True, text=True, check=False, env=_path())
    assert result.returncode == 0, result.stdout


def _path() -> dict[str, str]:
    roots = os.pathsep.join(str(REPOSITORY / part) for part in (".", "daemon", "client"))
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": roots}
