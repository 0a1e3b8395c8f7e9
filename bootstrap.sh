#!/usr/bin/env bash
# Set up ckptfs on a bare Debian 12/13 or Ubuntu 24.04 and run its parts. Repeated runs keep what is already set up.
#
#   ./bootstrap.sh setup      install system packages, the environment .venv for demo and tests, the C shim
#   ./bootstrap.sh demo       a training run that survives kill -9 of the mount and the loss of RAM; one on three nodes that loses a node
#   ./bootstrap.sh test       run the tests (arguments go to pytest)
#   ./bootstrap.sh lint       run ruff, mypy and the import contracts
#   ./bootstrap.sh bench      run the benchmarks (arguments go to bench/run.py)
#   ./bootstrap.sh install    install into PREFIX (default /opt/ckptfs), self-contained
#   ./bootstrap.sh uninstall  remove the installation; data and configuration stay
#   ./bootstrap.sh deb        build a Debian package for this release, in dist/
#   ./bootstrap.sh deb-test   try that package in a bare tree: lintian, install, mount, remove, purge
#
# Environment: PREFIX, CKPTFS_VENV (default .venv), CKPTFS_NO_APT=1 (never install system packages), variables of apt and pip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
HERE=$PWD
VENV=${CKPTFS_VENV:-$HERE/.venv}
PREFIX=${PREFIX:-/opt/ckptfs}

# Packages of the daemon, and additional ones of the tests.
PACKAGES_BASE="ca-certificates gcc libc6-dev pkg-config libfuse3-dev fuse3 python3 python3-dev python3-venv"
PACKAGES_TEST="acl attr bindfs btrfs-progs dbench e2fsprogs etcd-server fio fish git gromacs lammps mandoc munge procps rsync shellcheck slurm-client slurmctld slurmd sqlite3 strace stress-ng xfsprogs xxd zsh"
PACKAGES_DEB="build-essential debhelper dpkg-dev"
PACKAGES_DEB_TEST="debootstrap lintian"
# The page is tested in a browser. Ubuntu's chromium is a snap, which the tests cannot drive; they skip there.
if grep -qsx 'ID=debian' /etc/os-release; then PACKAGES_TEST="$PACKAGES_TEST chromium"; fi

# quietly WHAT COMMAND...: run a command, and show its output only if it fails.
quietly() {
  local what=$1 output status=0
  shift
  output=$(mktemp)
  "$@" > "$output" 2>&1 || status=$?
  [ "$status" = 0 ] || { printf '%s\n' "$what failed:" >&2; tail -n 50 "$output" >&2; }
  rm -f "$output"
  return "$status"
}

say() { printf '==> %s\n' "$*"; }
fail() { printf 'bootstrap.sh: %s\n' "$*" >&2; exit 1; }
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

missing_packages() {
  local package
  for package in "$@"; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || printf '%s ' "$package"
  done
}

# system_packages PACKAGE...: install missing packages with apt; on other systems name the requirements.
system_packages() {
  local missing optional package
  if ! command -v apt-get >/dev/null; then
    command -v gcc >/dev/null && pkg-config --exists fuse3 && command -v python3 >/dev/null && return 0
    fail "this is not Debian or Ubuntu; install Python 3.11 or later with headers, gcc, pkg-config, libfuse 3 with headers and fuse3, then run this script again"
  fi
  missing=$(missing_packages "$@")
  [ -n "$missing" ] || return 0
  [ -z "${CKPTFS_NO_APT:-}" ] || fail "these packages are missing: $missing"
  say "installing packages: $missing"
  quietly "apt-get update" as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 update
  # shellcheck disable=SC2086
  if ! quietly "apt-get install" as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends $missing; then
    say "apt failed; installing the packages one by one"
    for package in $missing; do
      quietly "apt-get install $package" \
        as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "$package" \
        || optional="${optional:-} $package"
    done
    # shellcheck disable=SC2086
    missing=$(missing_packages $PACKAGES_BASE)
    [ -z "$missing" ] || fail "these packages could not be installed: $missing"
    say "unavailable packages; tests that need them are skipped:${optional:-}"
  fi
}

# mtab: fusermount3 needs this list to unmount for ordinary users; minimal systems lack it.
mtab() {
  [ -e /etc/mtab ] || [ ! -e /proc/self/mounts ] || [ -n "${CKPTFS_NO_APT:-}" ] || as_root ln -s ../proc/self/mounts /etc/mtab
}

# fingerprint EXTRAS: a hash of what the environment is built from; if it changes, pip runs again.
fingerprint() { { printf '%s\n' "$1" "$HERE"; python3 --version; cat pyproject.toml; } | sha256sum | cut -d' ' -f1; }

# environment EXTRAS: install this tree and its requirements into .venv, unless pyproject.toml is unchanged.
environment() {
  local extras=$1 stamp="$VENV/.ckptfs-$1" python="$VENV/bin/python"
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "ckptfs needs Python 3.11 or later; python3 is $(python3 --version)"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$(fingerprint "$extras")" ]; then
    say "python environment in $VENV (extras: ${extras:-none}); the first run takes some minutes"
    [ -x "$python" ] || python3 -m venv "$VENV"
    quietly pip "$python" -m pip install --disable-pip-version-check -q "setuptools>=77" wheel
    quietly pip "$python" -m pip install --disable-pip-version-check --progress-bar off -q -e . \
      || fail "pip could not install ckptfs; its messages are above"
    [ -z "$extras" ] || quietly pip "$python" -m pip install --disable-pip-version-check --progress-bar off -q -e ".[$extras]" \
      || fail "pip could not install the extras $extras; its messages are above"
    fingerprint "$extras" > "$stamp"
  fi
  shim "$python"
}

# shim PYTHON: compile the C shim, which enables kernel passthrough for pyfuse3, for that Python.
shim() { "$1" -m ckptfs_daemon.fuse.shim_build >/dev/null || fail "the C shim could not be compiled; its messages are above"; }

setup() {
  # shellcheck disable=SC2086
  system_packages $PACKAGES_BASE $PACKAGES_TEST
  mtab
  environment test,demo,guides
  say "ready: $VENV/bin/ckptfs"
}

demo() {
  # shellcheck disable=SC2086
  system_packages $PACKAGES_BASE etcd-server procps
  mtab
  environment demo
  bash demo/demo.sh "$VENV/bin/python"
  # The second part creates network namespaces, which needs root.
  as_root bash demo/cluster.sh "$VENV/bin/python"
}

# run_tests ARGUMENT...: run the tests, three modules at a time since they wait more than they compute; `-n 0` runs them one by one.
run_tests() {
  setup
  unset PYTHONDONTWRITEBYTECODE  # Hundreds of processes would compile the same modules.
  exec "$VENV/bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
}

lint() {
  environment test,demo,guides
  say "ruff"; "$VENV/bin/ruff" check .
  say "mypy"; "$VENV/bin/mypy"; "$VENV/bin/mypy" --follow-imports=silent bench
  say "import contracts"; "$VENV/bin/lint-imports"
}

bench() {
  setup
  exec "$VENV/bin/python" bench/run.py "$@"
}

# install_ckptfs, uninstall: install system packages; deploy/install.sh does the rest.
install_ckptfs() {
  # shellcheck disable=SC2086
  [ -n "${DESTDIR:-}" ] || system_packages $PACKAGES_BASE
  PREFIX=$PREFIX exec deploy/install.sh install
}

uninstall() { PREFIX=$PREFIX exec deploy/install.sh uninstall; }

# deb, deb_test: install what deploy/deb.sh needs, and run it.
deb() {
  # shellcheck disable=SC2086
  system_packages $PACKAGES_BASE $PACKAGES_DEB
  exec deploy/deb.sh build
}

deb_test() {
  # shellcheck disable=SC2086
  system_packages $PACKAGES_DEB_TEST
  exec deploy/deb.sh test
}

command=${1:-help}
[ $# = 0 ] || shift
case $command in
  test|bench) ;;
  *) [ $# = 0 ] || fail "$command takes no arguments; a variable goes first: PREFIX=/opt/ckptfs ./bootstrap.sh install" ;;
esac
case $command in
  setup) setup ;;
  demo) demo ;;
  test) run_tests "$@" ;;
  lint) lint ;;
  bench) bench "$@" ;;
  install) install_ckptfs ;;
  uninstall) uninstall ;;
  deb) deb ;;
  deb-test) deb_test ;;
  *) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; [ "$command" = help ] || exit 2 ;;
esac
