"""What `make install` and the Debian package place outside of their environment: every command, unit, man page and completion."""

import os
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

import ckptfs

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def read_layout(system: str) -> dict[str, str]:
    """Return what lies where below `system`: path to the file of the environment, or to nothing for a copy."""
    environment = {**os.environ, "SYSTEM": system, "PREFIX": "/opt/ckptfs"}
    command = [REPOSITORY / "deploy/install.sh", "layout"]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    return {path: target for path, _, target in (line.partition(" ") for line in printed.splitlines())}


@pytest.mark.parametrize(("system", "zsh"), [("/usr/local", "site-functions"), ("/usr", "vendor-completions")])
def test_everything_has_a_place(system: str, zsh: str) -> None:
    pages = [f"share/man/man{page.suffix[1:]}/{page.name}" for page in (REPOSITORY / "docs/man").iterdir()]
    completion = ["share/bash-completion/completions/ckptfs", "share/fish/vendor_completions.d/ckptfs.fish"]
    expected = {f"{system}/{name}": name for name in (*pages, *completion, "bin/ckptfs", "bin/ckptfsd")}
    expected[f"{system}/share/zsh/{zsh}/_ckptfs"] = "share/zsh/site-functions/_ckptfs"
    expected |= {f"{system}/lib/systemd/system/{unit.name}": "" for unit in (REPOSITORY / "deploy/systemd").glob("*.service")}
    found = read_layout(system)
    sbin = {path.removeprefix("/usr"): target for path, target in found.items() if "/sbin/" in path}
    helpers = {f"/sbin/{act}.{kind}": f"bin/{act}.ckptfs" for act in ("mount", "umount") for kind in ("ckptfs", "fuse.ckptfs")}
    assert sbin == {**helpers, "/sbin/umount.fuse": "bin/umount.fuse"}
    assert {path: target for path, target in found.items() if "/sbin/" not in path} == expected


def test_the_environment_has_what_the_links_name() -> None:
    scripts = {f"bin/{name}" for name in PROJECT["project"]["scripts"]}
    shared = {
        f"{directory}/{path.name}"
        for directory, patterns in PROJECT["tool"]["setuptools"]["data-files"].items()
        for pattern in patterns
        for path in REPOSITORY.glob(pattern)
    }
    # The installer makes this one itself.
    assert set(read_layout("/usr/local").values()) - {""} == scripts | shared | {"bin/umount.fuse"}


def test_every_program_of_the_package_has_a_man_page() -> None:
    """A helper that is another name of a program shows its page."""
    pages = {page.name for page in (REPOSITORY / "docs/man").iterdir()}
    links = [line.split() for line in (REPOSITORY / "deploy/debian/ckptfs.links").read_text().splitlines()]
    assert {Path(target).name for target, _ in links} <= pages
    documented = {name.rpartition(".")[0] for name in (*pages, *(Path(link).name for _, link in links))}
    assert {Path(path).name for path in read_layout("/usr") if "bin/" in path} <= documented


def test_the_package_says_its_version_and_its_reasons() -> None:
    debian = REPOSITORY / "deploy/debian"
    assert (debian / "changelog").read_text().startswith(f"ckptfs ({ckptfs.__version__}) ")
    lines = (debian / "ckptfs.lintian-overrides").read_text().splitlines()
    assert all(before.startswith("# ") for before, line in pairwise(lines) if not line.startswith("#"))
