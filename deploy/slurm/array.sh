#!/bin/sh
#SBATCH --job-name=chain
#SBATCH --array=1-10%1
#SBATCH --time=30
#SBATCH --requeue
# A run as a chain of tasks, one at a time, each perhaps on another node: `sbatch array.sh [DIRECTORY]`, which lies below the mount.
# A task continues from the newest complete checkpoint, whoever wrote it. It does not ask for its number in the array: if a task is
# requeued, Slurm starts the one after it first.
# shellcheck source=deploy/slurm/settings.conf
. "${CKPTFS_SLURM_CONF:-/etc/ckptfs/slurm.conf}"
run=$CKPTFS_MOUNT/${1:-$SLURM_JOB_USER/$SLURM_JOB_NAME}
mkdir -p "$run" || exit

newest=$(ckptfs latest "$run/step_*.pkl") || {
    # Do not begin again beside checkpoints that are only out of reach now.
    [ -z "$(ls "$run")" ] || exit 1
}
${WORK:-python3 work.py} "$run" --limit 10 ${newest:+--resume "$newest"} || exit

# The next task finds this on any node, even if this one fails now.
exec ckptfs wait "$run" --level "$CKPTFS_LEVEL" --timeout 10m
