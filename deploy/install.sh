#!/usr/bin/env bash
# Install or uninstall ckptfs: `deploy/install.sh install|uninstall`. Both may be repeated. `layout` prints what lies outside of PREFIX.
#
# PREFIX (default /opt/ckptfs) is a Python environment of its own. Outside are only links (also to man pages), the systemd unit, shell
# completion and the sample configuration. PREFIX/installed lists them for uninstall.
# Configuration in /etc/ckptfs/*.toml and the catalogs in /var/lib/ckptfs are never touched.
#
# Environment: PREFIX; SYSTEM (where commands, unit, man pages and completion are linked; default /usr/local, for packages /usr); DESTDIR
# (for packages and tests: a root for all files); PYTHON (3.11 or later, which every user can execute; default: the first such one of
# python3 and those in /usr).
# Required system packages: gcc, pkg-config, libfuse3-dev, fuse3, python3-venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PREFIX=${PREFIX:-/opt/ckptfs}
DESTDIR=${DESTDIR:-}
PYTHON=${PYTHON:-}
umask 022 # Every user runs the commands.
HOME_OF_ALL=$DESTDIR$PREFIX
MARK=$HOME_OF_ALL/installed
SBIN=/sbin
[ ! -L /sbin ] || SBIN=/usr/sbin # On Debian and others /sbin is a symlink; a package must not contain files below it.
SYSTEM=${SYSTEM:-/usr/local}
UNITS=$SYSTEM/lib/systemd/system
ZSH=site-functions
[ "$SYSTEM" = /usr/local ] || ZSH=vendor-completions # Where Debian's packages have them.
SAMPLE=/etc/ckptfs/ckptfs.toml.sample

say() { printf '==> %s\n' "$*"; }
fail() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }

case $PREFIX in /*[!/]) ;; *) fail "PREFIX=$PREFIX is not an absolute path; give one such as /opt/ckptfs" ;; esac
case $PREFIX$DESTDIR in *[[:space:]]*) fail "PREFIX and DESTDIR must not contain spaces" ;; esac
[ -n "$DESTDIR" ] || [ "$(id -u)" = 0 ] || [ "${1:-}" = layout ] || fail "this needs root: sudo $0 ${1:-install}"

pip() { "$HOME_OF_ALL/bin/python" -m pip --disable-pip-version-check "$@"; }

# place FILE: create the directory of a file outside of PREFIX, and record the file.
place() {
  mkdir -p "$DESTDIR$(dirname "$1")"
  grep -qxF "$1" "$MARK" || printf '%s\n' "$1" >> "$MARK"
}

# fault PYTHON: print why the environment cannot be built from it; nothing if it can. A Python below /root runs for root alone.
fault() {
  command -v "$1" > /dev/null || { printf 'there is no %s' "$1"; return; }
  "$1" -I - << 'END'
import os, stat, sys, sysconfig
from importlib.util import find_spec

def closed(path, need):
    """Return the first part of a path that other users may not use, or an empty string."""
    path = os.path.realpath(path)
    above = os.path.dirname(path)
    shut = closed(above, stat.S_IXOTH) if above != path else ""
    return shut or (path if os.stat(path).st_mode & need != need else "")

shut = closed(sys.executable, stat.S_IROTH | stat.S_IXOTH) or closed(os.__file__, stat.S_IROTH)
if sys.version_info < (3, 11):
    print(f"{sys.executable} is Python {sys.version.split()[0]}; ckptfs needs 3.11 or later", end="")
elif shut:
    print(f"{sys.executable} runs for its owner alone: other users may not use {shut}", end="")
elif not (find_spec("venv") and find_spec("ensurepip")):
    print(f"{sys.executable} cannot make environments (Debian: apt install python3-venv)", end="")
elif not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
    print(f"{sys.executable} has no headers (Debian: apt install python3-dev)", end="")
END
}

# choose_python: set PYTHON to one that every user can execute.
choose_python() {
  local one found first=
  for one in ${PYTHON:-python3 /usr/bin/python3 /usr/local/bin/python3 /usr/bin/python3.13 /usr/bin/python3.12 /usr/bin/python3.11}; do
    found=$(fault "$one") || found="$one does not run"
    if [ -z "$found" ]; then
      [ -z "$first" ] || say "using $one, because $first"
      PYTHON=$one
      return
    fi
    first=${first:-$found}
  done
  fail "$first; give one that every user can execute, such as PYTHON=/usr/bin/python3"
}

environment() {
  local tree
  choose_python
  [ -e "$MARK" ] || [ ! -d "$HOME_OF_ALL" ] || [ -z "$(ls -A "$HOME_OF_ALL")" ] \
    || fail "$HOME_OF_ALL contains other files; PREFIX must be a directory for ckptfs alone"
  mkdir -p "$HOME_OF_ALL"
  touch "$MARK"
  # An environment of an earlier installation may rest on a Python that runs for root alone.
  if [ ! -x "$HOME_OF_ALL/bin/python" ] || [ -n "$(fault "$HOME_OF_ALL/bin/python")" ]; then "$PYTHON" -m venv --clear "$HOME_OF_ALL"; touch "$MARK"; fi
  # Build in a copy, so that this tree stays clean and is not needed afterwards.
  tree=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$tree'" EXIT
  cp -r pyproject.toml setup.py README.md LICENSE ckptfs daemon client docs "$tree/"
  find "$tree" \( -name '*.egg-info' -o -name __pycache__ -o -name '*.so' \) -prune -exec rm -rf {} +
  pip install -q --progress-bar off "$tree" # A directory is installed again, whatever version is there.
  if [ -n "$DESTDIR" ]; then # Scripts that were built below DESTDIR run without it.
    grep -lI -- "$DESTDIR" "$HOME_OF_ALL"/bin/* "$HOME_OF_ALL/pyvenv.cfg" | xargs -r sed -i --follow-symlinks "s|$DESTDIR||g"
  fi
}

# layout: print what lies outside of PREFIX, and the files of PREFIX to which it links. Units are copies.
layout() {
  local name page
  for name in ckptfs ckptfsd; do printf '%s\n' "$SYSTEM/bin/$name bin/$name"; done
  for name in mount umount; do
    printf '%s\n' "$SBIN/$name.ckptfs bin/$name.ckptfs" "$SBIN/$name.fuse.ckptfs bin/$name.ckptfs"
  done
  printf '%s\n' "$SBIN/umount.fuse bin/umount.fuse"
  for page in docs/man/*.[1-8]; do
    name=share/man/man${page##*.}/${page##*/}
    printf '%s\n' "$SYSTEM/$name $name"
  done
  name=share/bash-completion/completions/ckptfs
  printf '%s\n' "$SYSTEM/$name $name"
  name=share/fish/vendor_completions.d/ckptfs.fish
  printf '%s\n' "$SYSTEM/$name $name" "$SYSTEM/share/zsh/$ZSH/_ckptfs share/zsh/site-functions/_ckptfs"
  for name in deploy/systemd/*.service; do printf '%s\n' "$UNITS/${name##*/}"; done
}

# A sample that was edited stays.
sample() {
  local shipped=$HOME_OF_ALL/share/ckptfs.toml theirs=$DESTDIR$SAMPLE
  mkdir -p "$HOME_OF_ALL/share" "$(dirname "$theirs")"
  if [ ! -e "$theirs" ] || cmp -s "$shipped" "$theirs"; then cp deploy/systemd/ckptfs.toml "$theirs"; fi
  cp deploy/systemd/ckptfs.toml "$shipped"
}

# The scripts of Slurm are used where they lie, and name PREFIX.
slurm() {
  mkdir -p "$HOME_OF_ALL/share/slurm"
  cp deploy/slurm/* "$HOME_OF_ALL/share/slurm/"
  sed -i "s|/opt/ckptfs|$PREFIX|g" "$HOME_OF_ALL/share/slurm/slurm.conf"
}

reload_systemd() { if [ -z "$DESTDIR" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi; }

install() {
  say "environment in $HOME_OF_ALL; the first run takes some minutes"
  environment
  say "commands, mount helpers, unit, completion, man pages, sample configuration"
  local path file
  sed "s|/opt/ckptfs|$PREFIX|g" deploy/umount.fuse > "$HOME_OF_ALL/bin/umount.fuse"
  chmod 755 "$HOME_OF_ALL/bin/umount.fuse"
  layout | while read -r path file; do
    # A foreign umount.fuse stays: umount then returns at once, and the daemon drains in the background.
    if [ "$file" = bin/umount.fuse ] && [ -e "$DESTDIR$path" ] && ! grep -qxF "$path" "$MARK"; then continue; fi
    place "$path"
    if [ -n "$file" ]; then
      ln -sfn "$PREFIX/$file" "$DESTDIR$path"
    else
      sed "s|/opt/ckptfs|$PREFIX|g" "deploy/systemd/${path##*/}" > "$DESTDIR$path"
    fi
  done
  sample
  slurm
  reload_systemd
  say "installed; next: ckptfs doctor, then mount -t ckptfs NAME DIR -o pfs=DIR, or $SAMPLE and systemctl start ckptfs@NAME"
}

# serving: print the pids of daemons that run from PREFIX.
serving() {
  local file line
  for file in /proc/[0-9]*/cmdline; do
    line=$({ tr '\0' ' ' < "$file"; } 2> /dev/null) || continue # The process has ended.
    case $line in "$PREFIX/bin/python"*ckptfsd* | "$PREFIX/bin/python"*ckptfs_daemon*) printf '%s ' "${file//[!0-9]/}" ;; esac
  done
}

uninstall() {
  local file running
  running=$(serving)
  [ -n "$DESTDIR" ] || [ -z "$running" ] || fail "daemons of this installation serve mounts (processes $running); umount them first"
  if [ -e "$MARK" ]; then
    while read -r file; do
      # A link that points to another installation stays.
      if [ -L "$DESTDIR$file" ]; then case $(readlink "$DESTDIR$file") in "$PREFIX"/*) ;; *) continue ;; esac; fi
      rm -f "$DESTDIR$file"
    done < "$MARK"
    if cmp -s "$HOME_OF_ALL/share/ckptfs.toml" "$DESTDIR$SAMPLE"; then rm -f "$DESTDIR$SAMPLE"; fi
    rmdir "$DESTDIR/etc/ckptfs" 2> /dev/null || true
    rm -rf "$HOME_OF_ALL"
  fi
  reload_systemd
  say "uninstalled; /etc/ckptfs/*.toml and /var/lib/ckptfs are kept"
}

case ${1:-} in
  install) install ;;
  uninstall) uninstall ;;
  layout) layout ;;
  *) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
