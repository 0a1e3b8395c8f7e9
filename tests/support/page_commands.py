"""The blocks of a page, run word for word by a shell in a mount namespace of its own: only names, paths and sizes are put in.

A line that ends with a name in backquotes and a colon (`train.py`:) says that the block after it is that file. Blocks `sh` run in the
order of the page. A block `text` right after one is what it prints: its lines come in this order, among others; `...` is any text.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from daemon_under_test import REPOSITORY, DaemonUnderTest, environment
from programs import with_mounts_of_its_own

MARK = "=== end of block"
PAGE_S = 240.0
BLOCK = re.compile(r"(?:^[^\n]*`([^`\n]+)`:\n+)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Stands in for systemd: it checks a unit and does what ExecStart= says, at most twice if the service is restarted on failure.
SYSTEMCTL = r"""
for unit; do :; done
case $1-$unit in
stop-*) umount {mount} ;;
*-ckptfs@*)
    file={repository}/deploy/systemd/ckptfs@.service
    command=$(sed -n 's|^ExecStart=/opt/ckptfs/bin/||p' $file | sed 's|/etc/ckptfs/%i|{root}/etc/run1|; s|%i|{name}|')
    $command > {root}/log 2>&1 &
    until mountpoint -q {mount}; do sleep 0.1; done ;;
start-*)
    file={root}/etc/systemd/system/$unit.service
    ! systemd-analyze verify --recursive-errors=no "$file" 2>&1 | grep "$unit.service" || exit 1
    for setting in ExecStartPre ExecStart; do sed -n "s/^$setting=//p" "$file" | sed 's/\$\$/$/g' > {root}/$setting.sh; done
    sh -e {root}/ExecStartPre.sh
    sh {root}/ExecStart.sh || {{ ckptfs wait {mount} --level local; sh {root}/ExecStart.sh; }} ;;
esac
"""
MODULES = {"ckptfs": "ckptfs_client", "ckptfsd": "ckptfs_daemon", "torchrun": "torch.distributed.run"}


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code; `file` is the name that the line before gives it."""

    kind: str
    body: str
    file: str = ""


def read_blocks(page: Path, section: str = "") -> list[Block]:
    """Return the blocks of a page, or of one of its sections."""
    text = page.read_text()
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    blocks = [Block(kind, body, file) for file, kind, body in BLOCK.findall(text)]
    assert 2 * len(blocks) == len(re.findall("^```", text, re.MULTILINE)), f"{page}: a block is not recognised"
    return blocks


def run_page(place: DaemonUnderTest, blocks: list[Block]) -> str:
    """Run the blocks on a mount at `place`, and compare what they print with the page. Return all that they printed."""
    _install_programs(place)
    commands, expected = [], []
    former = ""
    for block in blocks:
        body = _put_in(place, block.body)
        if block.file:
            path = _put_in(place, block.file)
            commands.append(f"mkdir -p \"$(dirname '{path}')\"; cat > '{path}' <<'END OF {path}'\n{body}END OF {path}")
        elif block.kind == "sh":
            commands += [body, f"echo '{MARK}'"]
            expected.append("")
        elif (former, block.kind) == ("sh", "text"):
            expected[-1] = body
        former = block.kind
    # The page may leave the mount behind, and must not if a command fails.
    leave = f"cd /; ! mountpoint -q '{place.path}' || umount '{place.path}' || umount -l '{place.path}'"
    script = "\n".join(["set -e", f"mount --bind '{place.root}/sbin' $(readlink -f /sbin)", f'trap "{leave}" EXIT', *commands])
    # Ranks that print at once print whole lines, unless the caller has Python write every piece.
    env = {**environment(PYTHONUNBUFFERED=""), "PATH": f"{place.root}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [*with_mounts_of_its_own(), "sh", "-c", script]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, errors="replace", timeout=PAGE_S,
        env=env, check=False, cwd=place.root,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-8000:]
    for lines, output in zip(expected, result.stdout.split(MARK), strict=False):
        assert prints(lines, output), f"the page says:\n{lines}\nand this was printed:\n{output[-4000:]}"
    return result.stdout


def prints(expected: str, output: str) -> bool:
    """Return True if the lines of a block `text` are in an output, in this order.

    The numbers of sets (`@2`) may be others: they follow the order in which the sets were found complete.
    """
    lines = [re.sub("@[0-9]+", "@[0-9]+", ".*".join(map(re.escape, line.strip().split("...")))) for line in expected.splitlines()]
    found = re.search(".*^ *".join(["", *(f"{line} *$" for line in lines)]), output, re.MULTILINE | re.DOTALL)
    return found is not None


def _put_in(place: DaemonUnderTest, text: str) -> str:
    """Put the names and paths of a place into a text of a page."""
    text = re.sub(r"(?<![\w/])/ckpt\b", str(place.path), text)
    text = re.sub(r"(?<![\w/])(/etc/ckptfs|/etc/systemd|/srv)\b", lambda found: f"{place.root}{found[1].replace('/ckptfs', '')}", text)
    text = text.replace("/lustre/me/ckpt", str(place.pfs)).replace("/local/nvme", str(place.nvme))
    text = re.sub(r"^pfs = ", f'state = "{place.state}"\npfs = ', text, flags=re.MULTILINE)
    text = re.sub(r"\bpfs=(?=/)", f"state={place.state},pfs=", text)
    return re.sub(r"\bckptfs run1(?= /)", f"ckptfs {place.name}", text).replace("64G", "3G")


def _install_programs(place: DaemonUnderTest) -> None:
    """Put the commands of this tree, and what a page takes for granted, where the shell finds them."""
    programs, sbin = place.root / "bin", place.root / "sbin"
    _write_program(programs / "sudo", 'exec "$@"')
    for name in ("python", "python3"):
        _write_program(programs / name, f'exec {sys.executable} "$@"')
    _write_program(programs / "systemctl", SYSTEMCTL.format(repository=REPOSITORY, root=place.root, name=place.name, mount=place.path))
    for name, module in MODULES.items():
        _write_program(programs / name, f'exec {sys.executable} -P -m {module} "$@"')
    for kind in ("mount", "umount"):
        entry = f"import sys; from ckptfs_client.mount_helper import {kind}_main; sys.exit({kind}_main())"
        _write_program(sbin / f"{kind}.ckptfs", f'exec {sys.executable} -P -c "{entry}" "$@"')
    passing = (REPOSITORY / "deploy/umount.fuse").read_text().replace("/opt/ckptfs/bin/umount.ckptfs", "/sbin/umount.ckptfs")
    _write_program(sbin / "umount.fuse", passing.partition("\n")[2])


def _write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
