"""F5: shell completion. The scripts in docs/completion name every command and option, and start no Python."""

import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ckptfs_client.cli import build_command

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = {"bash": "bash/ckptfs", "zsh": "zsh/_ckptfs", "fish": "fish/ckptfs.fish"}
ANSWER_S = 0.2
ASK_BASH = 'source "$1"; read -ra COMP_WORDS <<< "$2"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); %s; printf "%%s\\n" "${COMPREPLY[@]}"'
# What is typed up to TAB; `_` is an empty word. What bash offers; nothing means that it completes names of files.
LINES = {
    "ckptfs dra": "drain",
    "ckptfs lab st": "start stop status start-node",
    "ckptfs wait --level _": "local clique pfs",
    "ckptfs drain --level p": "pfs",
    "ckptfs --version lab kill --d": "--dir",
    "ckptfs log-level d": "debug",
    "ckptfs help adv": "advise",
    "ckptfs ls lab": "",
    "ckptfs ls _": "",
    "ckptfs lab start --pfs _": "",
}


def walk(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(f"{words} {name}", below)


def ask(lines: list[str], call: str = "_ckptfs ckptfs") -> dict[str, set[str]]:
    """Return what bash offers for each line, all of them in one shell."""
    asked = ASK_BASH % f'[ "${{COMP_WORDS[COMP_CWORD]}}" != _ ] || COMP_WORDS[COMP_CWORD]=""; {call}'
    script = "".join(f"set -- {SCRIPTS['bash']} '{line}'; {asked}; echo .\n" for line in lines)
    directory = REPOSITORY / "docs/completion"
    command = [shutil.which("bash") or "bash", "--norc", "-c", script]
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60, check=True, env={"PATH": ""})
    assert result.stderr == ""
    return {line: set(part.split()) for line, part in zip(lines, result.stdout.split(".\n"), strict=False)}


def test_every_command_and_option_is_offered() -> None:
    commands = dict(walk("ckptfs", build_command()))
    assert len(commands) > 40
    zsh, fish = ((REPOSITORY / "docs/completion" / SCRIPTS[shell]).read_text() for shell in ("zsh", "fish"))
    offered = ask([f"{words} -" for words in commands] + [f"{words} _" for words in commands])
    for words, command in commands.items():
        options = {name for one in command.params if one.param_type_name == "option" for name in (*one.opts, *one.secondary_opts)}
        assert offered[f"{words} -"] == options | {"-h", "--help"}, words
        if below := getattr(command, "commands", None):
            assert offered[f"{words} _"] == set(below), words
        for name in options:
            assert f"'{name}:" in zsh and f" -{'l' if name.startswith('--') else 's'} {name.lstrip('-')} " in fish, (words, name)


def test_what_is_offered_fits_what_was_typed() -> None:
    assert ask(list(LINES)) == {line: set(offered.split()) for line, offered in LINES.items()}


def test_it_answers_at_once() -> None:
    """The time of the processor, so that other programs on the machine do not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ask(["ckptfs wait --level _"])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < ANSWER_S


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_shell_accepts_its_script(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"NOT TESTED HERE, not installed: {shell}")
    path = REPOSITORY / "docs/completion" / SCRIPTS[shell]
    result = subprocess.run([shell, "-n", path], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_fish_offers_the_same() -> None:
    if shutil.which("fish") is None:
        pytest.skip("NOT TESTED HERE, not installed: fish")
    path = REPOSITORY / "docs/completion" / SCRIPTS["fish"]
    lines = [line for line, offered in LINES.items() if offered]
    script = f"source {path}\n" + "".join(f"complete -C '{line.removesuffix('_')}'; echo .\n" for line in lines)
    result = subprocess.run(["fish", "--no-config", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    for line, part in zip(lines, result.stdout.split(".\n"), strict=False):
        assert set(LINES[line].split()) <= {offer.split("\t")[0] for offer in part.splitlines()}, line
