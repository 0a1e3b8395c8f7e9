"""GROMACS and LAMMPS on the buffered path, killed and continued from their checkpoints; the guides run on the other one. H1, H4."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from daemon_under_test import Area, eventually
from programs import MELT, need, run
from series_tree import prefixes

from ckptfs.series import file_formats
from ckptfs.series.file_formats import FileFormat

pytestmark = [pytest.mark.apps, pytest.mark.parametrize("data_path", ["buffered"], indirect=True, scope="session")]

TOPOLOGY = '#include "oplsaa.ff/forcefield.itp"\n#include "oplsaa.ff/spce.itp"\n[ system ]\nwater\n[ molecules ]\n'
PARAMETERS = """
integrator = md
nsteps = {steps}
dt = 0.001
nstxout = 200
nstenergy = 100
nstlog = 100
cutoff-scheme = Verlet
rlist = 0.6
rcoulomb = 0.6
rvdw = 0.6
gen_vel = yes
gen_seed = 1
"""
CONTINUED = """
read_restart {restart}
pair_style lj/cut 2.5
pair_coeff 1 1 1.0 1.0 2.5
fix 1 all nve
thermo 100
thermo_modify format float %20.15g
run {steps} upto
"""
STEPS = 40_000


def killed_when(command: list[str], directory: Path, ready: Path) -> None:
    """Start a program and kill it with -9 as soon as `ready` exists."""
    with open(directory / "killed.out", "wb") as output:
        process = subprocess.Popen(command, cwd=directory, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    eventually(lambda: ready.exists() or process.poll() is not None, what=f"{ready.name} appears")
    assert process.poll() is None, "it ended before its first checkpoint; make the run longer"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def test_gromacs_goes_on_from_its_checkpoint(mount: Area) -> None:
    """H1: mdrun -cpt, killed, then -cpi: log, trajectory and energies are appended to, and the run comes to its end."""
    need("gmx")
    (mount.path / "t.top").write_text(TOPOLOGY)
    (mount.path / "md.mdp").write_text(PARAMETERS.format(steps=STEPS))
    run("gmx", "-quiet", "solvate", "-cs", "spc216.gro", "-box", "1.9", "1.9", "1.9", "-o", "w.gro", "-p", "t.top", cwd=mount.path)
    run("gmx", "-quiet", "grompp", "-f", "md.mdp", "-c", "w.gro", "-p", "t.top", "-o", "run.tpr", "-maxwarn", "9", cwd=mount.path)
    mdrun = ["gmx", "-quiet", "mdrun", "-nt", "1", "-deffnm", "run"]
    killed_when([*mdrun, "-cpt", "0.003"], mount.path, mount.path / "run_prev.cpt")
    mount.settle()
    newest = Path(mount.command("latest", mount.path).stdout.strip())
    assert newest.name in ("run.cpt", "run_prev.cpt") and newest.parent == mount.path
    check_that_cuts_are_seen(newest, "GROMACS")
    # Without -cpt: on a busy machine, one checkpoint takes longer than such an interval, and so they follow one another to the end.
    run(*mdrun, "-cpi", "run.cpt", cwd=mount.path)
    log = (mount.path / "run.log").read_text(errors="replace")
    assert "Restarting from checkpoint" in log and "Finished mdrun" in log
    assert re.search(rf"^ +{STEPS} +\d", log, re.MULTILINE), "its last step is in the log"
    run("gmx", "-quiet", "check", "-f", "run.trr", cwd=mount.path)
    mount.settle()
    run("gmx", "-quiet", "check", "-f", mount.pfs / "run.trr", cwd=mount.path)
    assert (mount.pfs / "run.log").read_text(errors="replace") == log


def test_lammps_goes_on_from_its_restart_file(mount: Area, tmp_path: Path) -> None:
    """H4: killed after its third restart file; what continues from the second is what an undisturbed run's second gives."""
    need("lmp")
    steps, restart = 1500, "melt.200.restart"
    for directory in (mount.path, tmp_path):
        (directory / "melt.in").write_text(f"{MELT}restart 100 melt.*.restart\nrun {steps}\n")
        (directory / "again.in").write_text(CONTINUED.format(restart=restart, steps=400))
    run("lmp", "-in", "melt.in", cwd=tmp_path)
    killed_when(["lmp", "-in", "melt.in"], mount.path, mount.path / "melt.300.restart")
    assert (mount.path / restart).read_bytes() == (tmp_path / restart).read_bytes()
    mount.settle()
    newest = Path(mount.command("latest", mount.path / "melt.*.restart").stdout.strip())
    assert int(newest.name.split(".")[1]) >= 200
    check_that_cuts_are_seen(newest, "LAMMPS")
    expected = last_energies(run("lmp", "-in", "again.in", cwd=tmp_path), 400)
    assert last_energies(run("lmp", "-in", "again.in", cwd=mount.path), 400) == expected
    mount.settle()
    assert (mount.pfs / restart).read_bytes() == (tmp_path / restart).read_bytes()


def check_that_cuts_are_seen(path: Path, format_name: str) -> None:
    """N7: what the program wrote is whole; wherever it may have been killed, it is not."""
    data = path.read_bytes()

    def inspect(part: bytes) -> FileFormat:
        return file_formats.inspect(os.fsencode(path.name), len(part), lambda offset, length: part[offset : offset + length])

    assert inspect(data) == FileFormat(format_name)
    assert [length for length in prefixes(data, 1000) if not inspect(data[:length]).flaw] == []


def last_energies(output: str, step: int) -> list[float]:
    """The numbers of the thermodynamic line for that step."""
    lines = [line.split() for line in output.splitlines() if line.split()[:1] == [str(step)]]
    assert lines, output[-2000:]
    return [float(value) for value in lines[-1][1:]]
