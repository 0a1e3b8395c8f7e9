#!/usr/bin/env bash
# The demonstration: an ordinary training run whose filesystem is killed in the middle of a save and then loses its RAM.
# Usage: demo.sh PYTHON (the python of an environment with ckptfs and torch; bootstrap.sh demo calls it so).
set -euo pipefail
PYTHON=$1
BIN=$(dirname "$PYTHON")
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=$(mktemp -d /tmp/ckptfs-demo.XXXXXX)
NAME=demo-$$
MOUNT=$WORK/mnt PFS=$WORK/pfs STATE=$WORK/state REFERENCE=$WORK/reference
mkdir "$MOUNT" "$PFS" "$STATE" "$REFERENCE"
TRAINING=

say() { printf '\n\033[1m==> %s\033[0m\n' "$*"; }
fail() { printf 'demo: %s\n' "$*" >&2; exit 1; }
mounted() { grep -q " $MOUNT fuse" /proc/mounts; }
do_mount() { "$BIN/mount.ckptfs" "$NAME" "$MOUNT" -o "pfs=$PFS,state=$STATE,ram=4G"; }
do_umount() { "$BIN/umount.ckptfs" "$MOUNT"; }
losses() { grep -h '^step ' "$@" || true; }
# pid_of ROLE: the process that has it now, as `ckptfs status` says.
pid_of() {
  "$BIN/ckptfs" status "$MOUNT" --json | "$PYTHON" -c '
import json, sys
def processes(value):
    if isinstance(value, dict):
        if "role" in value and "pid" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from processes(item)
print(next(process["pid"] for process in processes(json.load(sys.stdin)) if process["role"] == sys.argv[1]))' "$1"
}
# The daemon of this mount has ended when nothing of it is left to unmount.
wait_for_the_end() { for _ in $(seq 600); do [ -e "/proc/$1" ] || return 0; sleep 0.1; done; fail "the daemon did not end"; }
clean_up() {
  [ -z "$TRAINING" ] || kill "$TRAINING" 2>/dev/null || true
  if mounted; then do_umount 2>/dev/null || umount -l "$MOUNT" || true; fi
  for mount in $(awk -v w="$WORK/" 'index($2, w) == 1 {print $2}' /proc/mounts | sort -r); do umount -l "$mount" 2>/dev/null || true; done
  rm -rf "$WORK"
}
trap clean_up EXIT

say "1. The reference: 12 steps without interruption, in an ordinary directory"
"$PYTHON" "$HERE/train.py" "$REFERENCE" --steps 12 > "$WORK/reference.log"
losses "$WORK/reference.log"

say "2. Mount: $MOUNT shows $PFS, at memory speed"
do_mount
"$BIN/ckptfs" status "$MOUNT"

say "3. The same training through the mount, 8 steps; its filesystem is killed (-9) in the middle of a save"
"$PYTHON" "$HERE/train.py" "$MOUNT" --steps 8 > "$WORK/run.log" 2>&1 &
TRAINING=$!
killed=
for step in 0004 0006 0008; do
  victim=$(pid_of mount)
  until grep -q "saved .*step_$step" "$WORK/run.log" || [ -s "$MOUNT/step_$step.pt.tmp" ]; do
    kill -0 "$TRAINING" 2>/dev/null || { cat "$WORK/run.log"; fail "the training ended"; }
  done
  if grep -q "saved .*step_$step" "$WORK/run.log"; then continue; fi
  kill -9 "$victim"
  if ! grep -q "saved .*step_$step" "$WORK/run.log"; then
    killed=$step
    echo "killed the mount process $victim while step_$step.pt was being written"
    break
  fi
done
wait "$TRAINING" || { cat "$WORK/run.log"; fail "the training noticed"; }
TRAINING=
cat "$WORK/run.log"
[ -n "$killed" ] || fail "no save was caught in the middle; run the demo again"
echo "The training noticed nothing. The mount process is now $(pid_of mount)."

say "4. What ckptfs says, and what lies on the PFS"
"$BIN/ckptfs" wait "$MOUNT/step_0008.pt" --level pfs
"$BIN/ckptfs" drain "$MOUNT"
"$BIN/ckptfs" status "$MOUNT"
"$BIN/ckptfs" ls "$MOUNT"
ls -l "$PFS"

say "5. The node loses its RAM"
supervisor=$(pid_of supervisor)
do_umount
wait_for_the_end "$supervisor"
if grep -q " $STATE/ram " /proc/mounts; then umount -l "$STATE/ram"; fi
rm -rf "$STATE/ram"
if [ "$(id -u)" != 0 ]; then rm -rf "/dev/shm/ckptfs-$(id -u)/$NAME"; fi
echo "the RAM tier is gone"

say "6. Mount again, and resume from what is left"
do_mount
"$PYTHON" "$HERE/train.py" "$MOUNT" --steps 12 --resume > "$WORK/resumed.log"
cat "$WORK/resumed.log"

say "7. Does the loss curve continue bit for bit?"
if diff <(losses "$WORK/reference.log") <(losses "$WORK/run.log" "$WORK/resumed.log"); then
  echo "Yes: all 12 losses are the same to the last bit."
else
  fail "the loss curve differs"
fi
