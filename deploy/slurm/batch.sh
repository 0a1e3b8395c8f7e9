#!/bin/sh
#SBATCH --job-name=long
#SBATCH --time=60
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
# A run that is longer than its time limit: `sbatch batch.sh [DIRECTORY]`, which lies below the mount.
# A minute before the limit Slurm sends SIGUSR1. The program saves and ends, what it saved becomes safe, and the job is requeued. It continues
# on any node, also after the loss of a node (Slurm requeues it then).
# shellcheck source=deploy/slurm/settings.conf
. "${CKPTFS_SLURM_CONF:-/etc/ckptfs/slurm.conf}"
run=$CKPTFS_MOUNT/${1:-$SLURM_JOB_USER/$SLURM_JOB_NAME}
work=

# make_safe TIME: only the owner of a mount and root may drain it; others wait for their own files.
make_safe() {
    ckptfs drain "$CKPTFS_MOUNT" --deadline "$1" --level "$CKPTFS_LEVEL"
    case $? in
        0) ;;
        5) ckptfs wait "$run" --level "$CKPTFS_LEVEL" --timeout "$1" ;;
        *) return 1 ;;
    esac
}

# end: have the program save and end, in less than the minute that is left.
end() {
    trap '' USR1 TERM
    [ -z "$work" ] || { kill -USR1 "$work"; wait "$work"; }
    make_safe 30s || echo "not all is safe in time: the epilog goes on with it" >&2
}

trap 'end; exec scontrol requeue "$SLURM_JOB_ID"' USR1
trap 'end; exit 143' TERM

mkdir -p "$run" || exit
newest=$(ckptfs latest "$run/step_*.pkl") || {
    # Do not begin again beside checkpoints that are only out of reach now.
    [ -z "$(ls "$run")" ] || exit 1
}
${WORK:-python3 work.py} "$run" ${newest:+--resume "$newest"} &
work=$!
wait "$work" || exit
make_safe 10m
