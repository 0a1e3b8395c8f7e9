#!/usr/bin/env bash
# The demo, part 2: three nodes on this machine, without a PFS. A job of two ranks saves through two of them. One of the two is
# killed and loses everything. The job resumes with three ranks on the other two nodes, from their memory.
# Usage: cluster.sh PYTHON, as root (of an environment with ckptfs and torch; `bootstrap.sh demo` calls it).
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
  # This also ends ranks that still run on the lab's nodes.
  lab stop 2>/dev/null || true
  rm -rf "$WORK"
}
trap clean_up EXIT

# job DIRECTORY NODES OPTION...: run one rank on each of the nodes, and wait for all. A node may be named twice; "host" is this
# machine. The DIRECTORY "mount" means each node's own mount.
job() {
  local directory=$1 nodes=($2) rank=0 node where meet ranks=()
  shift 2
  if [ "${nodes[0]}" = host ]; then meet=127.0.0.1:$PORT; else meet=$(address "${nodes[0]}"):$PORT; fi
  for node in "${nodes[@]}"; do
    where=$directory
    [ "$directory" != mount ] || where=$(mount_of "$node")
    set -- "$@"
    if [ "$node" = host ]; then
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

cat <<'INTRO'

Part 2 runs a job of several ranks on a cluster of three nodes, in network namespaces of this machine. It shows:
  - a node is killed and loses everything; its files survive in the memory of the others (steps 8 to 11)
  - the job resumes on other nodes with another number of ranks, and the files get their copies again (steps 12 to 14)
At the end all losses must equal those of a run without interruption, bit for bit. It takes two to three minutes.
INTRO

say "8. The reference: $STEPS steps on two ranks without interruption, in an ordinary directory"
mkdir "$WORK/reference"
job "$WORK/reference" "host host" --steps $STEPS > "$WORK/reference.log" || fail "the reference run failed"
losses "$WORK/reference.log"
echo "(the last column is the exact loss, as a hexadecimal number)"

say "9. Three nodes on this machine, two copies of everything, no PFS"
lab start --nodes 3 --factor 2 --no-pfs
"$BIN/ckptfs" status --cluster "$(mount_of node1)"

say "10. Half of the same job: one rank on node1, one on node2, each saves through the mount of its node"
job mount "node1 node2" --steps $((STEPS / 2)) > "$WORK/run.log" || { cat "$WORK/run.log"; fail "the job failed"; }
cat "$WORK/run.log"
newest=$(printf 'step_%04d' $((STEPS / 2)))
"$BIN/ckptfs" wait "$(mount_of node1)/$newest" --level clique --timeout 60s
"$BIN/ckptfs" ls "$(mount_of node1)/$newest"

say "11. Kill node2; delete its RAM, its NVMe and its catalog"
lab wipe node2 --nvme
killed_at=$SECONDS
ls -l "$(mount_of node1)/$newest"

say "12. Resume with three ranks: two on node1, one on node3, which took no part before"
echo "(starting PyTorch on three ranks takes up to a minute)"
job mount "node1 node3 node1" --steps $STEPS --resume > "$WORK/resumed.log" || { cat "$WORK/resumed.log"; fail "the job failed"; }
cat "$WORK/resumed.log"
resumed_s=$((SECONDS - killed_at))

say "13. Compare the losses with the reference"
if diff <(losses "$WORK/reference.log") <(losses "$WORK/run.log" "$WORK/resumed.log"); then
  echo "All $STEPS losses equal the reference, bit for bit."
else
  fail "the losses differ"
fi

say "14. node2 returns as a new machine, and every file gets two copies again"
lab start-node node2
"$BIN/ckptfs" wait "$(mount_of node1)" --level clique --timeout 60s
"$BIN/ckptfs" ls "$(mount_of node1)/$newest"

say "What part 2 has shown"
echo "  node2 was lost with everything on it, and no file: the job was done $resumed_s s after the kill, with other nodes and ranks"
echo "  each file has two copies again (the column copies above)"
echo "To try next, as root:"
echo "  ckptfs lab start --nodes 3; ckptfs lab kill node2; ckptfs lab status; ckptfs lab stop"
echo "  docs/operations.md says how to run ckptfs on a real cluster"
