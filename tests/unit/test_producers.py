"""H10, H3: which job and rank a writing process belongs to, by its environment."""

import json
import subprocess

import pytest
from ckptfs_daemon.mount.open_files.producers import describe_process

BATCH = {"SLURM_JOB_ID": "6", "SLURM_ARRAY_JOB_ID": "4", "SLURM_ARRAY_TASK_ID": "2", "SLURM_PROCID": "0"}
RANKS = {
    "srun": ({"SLURM_PROCID": "3"}, "3"),
    "torchrun in srun": ({"SLURM_PROCID": "1", "RANK": "5"}, "5"),
    "mpirun in a batch script": ({"OMPI_COMM_WORLD_RANK": "3"}, "3"),
    "prterun in a batch script": ({"PMIX_RANK": "3"}, "3"),
    "mpiexec in a batch script": ({"PMI_RANK": "3"}, "3"),
    "a batch script": ({}, "0"),
}


@pytest.mark.parametrize(("variables", "rank"), RANKS.values(), ids=RANKS)
def test_the_rank_is_that_of_the_innermost_launcher(variables: dict[str, str], rank: str) -> None:
    """Ranks that mpirun starts inherit SLURM_PROCID=0 from the batch script, all of them."""
    with subprocess.Popen(["/bin/cat"], env=BATCH | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"ready")
        assert process.stdout.read(5) == b"ready", "before its first call, /proc may show no environment"
        found = json.loads(describe_process(process.pid, "node1"))
        process.communicate()
    assert (found["job"], found["rank"], found["host"]) == ("6", rank, "node1")
