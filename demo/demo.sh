#!/usr/bin/env bash
# The demo, part 1: a training run whose filesystem is killed during a save and then loses its RAM.
# Usage: demo.sh PYTHON (of an environment with ckptfs and torch; `bootstrap.sh demo` calls it).
set -euo pipefail
PYTHON=$1
BIN=$(dirname "$PYTHON")
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=$(mktemp -d /tmp/ckptfs-demo.XXXXXX)
NAME=demo-$$
MOUNT=$WORK/mnt PFS=$WORK/pfs STATE=$WORK/state REFERENCE=$WORK/reference
mkdir "$MOUNT" "$PFS" "$STATE" "$REFERENCE"
TRAINING= PROBE=

say() { printf '\n\033[1m==> %s\033[0m\n' "$*"; }
fail() { printf 'demo: %s\n' "$*" >&2; exit 1; }
mounted() { grep -q " $MOUNT fuse" /proc/mounts; }
do_mount() { "$BIN/mount.ckptfs" "$NAME" "$MOUNT" -o "pfs=$PFS,state=$STATE,ram=4G"; }
do_umount() { "$BIN/umount.ckptfs" "$MOUNT"; }
losses() { grep -h '^step ' "$@" || true; }
# pid_of ROLE: the process that has the role now.
pid_of() {
  "$BIN/ckptfs" status "$MOUNT" --json | "$PYTHON" -c '
import json, sys
print(next(process["pid"] for process in json.load(sys.stdin)["processes"] if process["role"] == sys.argv[1]))' "$1"
}
wait_for_exit() { for _ in $(seq 600); do [ -e "/proc/$1" ] || return 0; sleep 0.1; done; fail "the daemon did not end"; }
clean_up() {
  [ -z "$TRAINING" ] || kill "$TRAINING" 2>/dev/null || true
  [ -z "$PROBE" ] || kill "$PROBE" 2>/dev/null || true
  if mounted; then do_umount 2>/dev/null || umount -l "$MOUNT" || true; fi
  for mount in $(awk -v w="$WORK/" 'index($2, w) == 1 {print $2}' /proc/mounts | sort -r); do umount -l "$mount" 2>/dev/null || true; done
  rm -rf "$WORK"
}
trap clean_up EXIT

cat <<'INTRO'
This demo trains a small model through a ckptfs mount. It shows two things:
  - a process of the filesystem is killed (-9) during a save: the training gets a pause, and no error (steps 1 to 4)
  - the node loses its RAM: the run resumes from ordinary files on the PFS (steps 5 to 7)
At the end all losses must equal those of a run without interruption, bit for bit. It takes one to two minutes, and needs
1 GB of memory. Everything lies in a directory below /tmp that is deleted at the end.
INTRO

say "1. The reference: 12 steps without interruption, in an ordinary directory"
"$PYTHON" "$HERE/train.py" "$REFERENCE" --steps 12 > "$WORK/reference.log"
echo "(the last column is the exact loss, as a hexadecimal number)"
losses "$WORK/reference.log"

say "2. Mount ckptfs on $MOUNT, with the PFS $PFS"
do_mount
"$BIN/ckptfs" status "$MOUNT"

say "3. The same training through the mount, 8 steps; the mount process is killed (-9) during a save"
echo "(a second program uses the mount all the time and measures the pause; this takes up to half a minute)"
"$PYTHON" "$HERE/probe.py" "$MOUNT" > "$WORK/probe.log" 2>&1 &
PROBE=$!
"$PYTHON" "$HERE/train.py" "$MOUNT" --steps 8 > "$WORK/run.log" 2>&1 &
TRAINING=$!
killed=
for step in 0004 0006 0008; do
  victim=$(pid_of mount)
  until grep -q "saved .*step_$step" "$WORK/run.log" || [ -s "$MOUNT/step_$step.pt.tmp" ]; do
    kill -0 "$TRAINING" 2>/dev/null || { cat "$WORK/run.log"; fail "the training failed before the kill"; }
  done
  if grep -q "saved .*step_$step" "$WORK/run.log"; then continue; fi
  kill -9 "$victim"
  if ! grep -q "saved .*step_$step" "$WORK/run.log"; then
    killed=$step
    echo "killed the mount process $victim while step_$step.pt was being written"
    break
  fi
done
wait "$TRAINING" || { cat "$WORK/run.log"; fail "the training failed after the kill"; }
TRAINING=
kill "$PROBE"
wait "$PROBE" || { cat "$WORK/probe.log"; fail "the program that measures the pause failed after the kill"; }
PROBE=
cat "$WORK/run.log"
[ -n "$killed" ] || fail "the kill came during no save; run the demo again"
pause=$(sed -n 's/.*took //p' "$WORK/probe.log")
cat "$WORK/probe.log"
echo "The training went on without an error. The kill cost a pause of $pause. The mount process is now $(pid_of mount)."

say "4. The state of ckptfs, and the files on the PFS"
"$BIN/ckptfs" wait "$MOUNT/step_0008.pt" --level pfs
"$BIN/ckptfs" drain "$MOUNT"
"$BIN/ckptfs" status "$MOUNT"
"$BIN/ckptfs" ls "$MOUNT"
ls -l "$PFS"

say "5. The node loses its RAM"
supervisor=$(pid_of supervisor)
do_umount
wait_for_exit "$supervisor"
if grep -q " $STATE/ram " /proc/mounts; then umount -l "$STATE/ram"; fi
rm -rf "$STATE/ram"
if [ "$(id -u)" != 0 ]; then rm -rf "/dev/shm/ckptfs-$(id -u)/$NAME"; fi
echo "the RAM tier is gone"

say "6. Mount again, and resume from the PFS"
do_mount
"$PYTHON" "$HERE/train.py" "$MOUNT" --steps 12 --resume > "$WORK/resumed.log"
cat "$WORK/resumed.log"

say "7. Compare the losses with the reference"
if diff <(losses "$WORK/reference.log") <(losses "$WORK/run.log" "$WORK/resumed.log"); then
  echo "All 12 losses equal the reference, bit for bit."
  say "What part 1 has shown"
  echo "  kill -9 of the filesystem during the save of step_$killed cost a pause of $pause, and no error"
  echo "  after the loss of RAM the training resumed from ordinary files on the PFS"
  echo "To try next:"
  echo "  sudo make install; ckptfs doctor"
  echo "  sudo mount -t ckptfs first /mnt -o pfs=\$HOME/pfs       # mkdir ~/pfs before; then save something below /mnt"
  echo "  ckptfs status; ckptfs ls /mnt; ckptfs df /mnt --checkpoint 4G"
else
  fail "the losses differ"
fi
