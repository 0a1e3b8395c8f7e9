#!/usr/bin/env bash
# The demonstration's second act: three nodes on this machine, without any PFS. A job of two ranks saves through the mounts of two of them; one of
# the two is killed with all that it had; the job goes on with three ranks on the other two, from what lies in their memory.
# Usage: cluster.sh PYTHON, as root (the python of an environment with ckptfs and torch; bootstrap.sh demo calls it so).
set -euo pipefail
PYTHON=$1
BIN=$(dirname "$PYTHON")
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=$(mktemp -d /tmp/ckptfs-demo.XXXXXX)
export CKPTFS_LAB=$WORK/lab
export TORCH_CPP_LOG_LEVEL=ERROR
STEPS=8 PORT=29500

say() { printf '\n\033[1m==> %s\033[0m\n' "$*"; }
fail() { printf 'demo: %s\n' "$*" >&2; exit 1; }
lab() { timeout 120 "$BIN/ckptfs" lab "$@"; }
mount_of() { echo "$CKPTFS_LAB/$1/mnt"; }
losses() { grep -h '^step ' "$@" || true; }
clean_up() {
  # Ranks that still run on the lab's nodes end with it.
  lab stop 2>/dev/null || true
  rm -rf "$WORK"
}
trap clean_up EXIT

# job DIRECTORY NODES OPTION...: one rank on each of the nodes (a node may be named twice; "here": on this machine), and waits for all of them.
# A DIRECTORY of "mount" stands for each node's own mount.
job() {
  local directory=$1 nodes=($2) rank=0 node where meet ranks=()
  shift 2
  if [ "${nodes[0]}" = here ]; then meet=127.0.0.1:$PORT; else meet=$(address "${nodes[0]}"):$PORT; fi
  for node in "${nodes[@]}"; do
    where=$directory
    [ "$directory" != mount ] || where=$(mount_of "$node")
    set -- "$@"
    if [ "$node" = here ]; then
      GLOO_SOCKET_IFNAME=lo timeout 300 "$PYTHON" "$HERE/ranks.py" "$where" --rank $rank --ranks ${#nodes[@]} --meet "$meet" "$@" &
    else
      GLOO_SOCKET_IFNAME=eth0 timeout 300 "$BIN/ckptfs" lab exec "$node" -- \
        "$PYTHON" "$HERE/ranks.py" "$where" --rank $rank --ranks ${#nodes[@]} --meet "$meet" "$@" &
    fi
    ranks+=($!)
    rank=$((rank + 1))
  done
  for rank in "${ranks[@]}"; do wait "$rank" || return 1; done
}
address() {
  lab status --json | "$PYTHON" -c '
import json, sys
print(next(node["address"] for node in json.load(sys.stdin)["nodes"] if node["name"] == sys.argv[1]))' "$1"
}

say "8. The second act. The reference: $STEPS steps on two ranks without interruption, in an ordinary directory"
mkdir "$WORK/reference"
job "$WORK/reference" "here here" --steps $STEPS > "$WORK/reference.log" || fail "the reference failed"
losses "$WORK/reference.log"

say "9. Three nodes on this machine, two copies of everything, no PFS"
lab start --nodes 3 --factor 2 --no-pfs
"$BIN/ckptfs" status --cluster "$(mount_of node1)"

say "10. The same job, a rank on node1 and one on node2, each saving through its own node's mount; half of the steps"
job mount "node1 node2" --steps $((STEPS / 2)) > "$WORK/run.log" || { cat "$WORK/run.log"; fail "the job failed"; }
cat "$WORK/run.log"
newest=$(printf 'step_%04d' $((STEPS / 2)))
"$BIN/ckptfs" wait "$(mount_of node1)/$newest" --level clique --timeout 60s
"$BIN/ckptfs" ls "$(mount_of node1)/$newest"

say "11. node2 is killed, and loses its RAM, its NVMe and its catalog"
lab wipe node2 --nvme
ls -l "$(mount_of node1)/$newest"

say "12. The job goes on with three ranks: two on node1, one on node3, which has not seen it before"
job mount "node1 node3 node1" --steps $STEPS --resume > "$WORK/resumed.log" || { cat "$WORK/resumed.log"; fail "the job failed"; }
cat "$WORK/resumed.log"

say "13. Does the loss curve continue bit for bit?"
if diff <(losses "$WORK/reference.log") <(losses "$WORK/run.log" "$WORK/resumed.log"); then
  echo "Yes: all $STEPS losses are the same to the last bit, on another number of ranks, from the memory of the nodes that were left."
else
  fail "the loss curve differs"
fi

say "14. node2 returns as a new machine, and everything has two copies again"
lab start-node node2
"$BIN/ckptfs" wait "$(mount_of node2)" --level clique --timeout 60s
"$BIN/ckptfs" status --cluster "$(mount_of node2)"
