#!/usr/bin/env bash
# Build the Debian package of this tree, or try it: `deploy/deb.sh build` leaves it in dist/, `deploy/deb.sh test` tries what is there.
#
# The package fits the release that it was built on, because its environment rests on the Python of that release.
# The test needs root, debootstrap and lintian. It installs the package into a bare tree with the package sources of this machine, mounts,
# writes, unmounts, removes and purges it, and looks for what is left.
#
# Environment: SUITE, MIRROR (of the bare tree; default: those of this machine).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=$PWD/dist

say() { printf '==> %s\n' "$*"; }
fail() { printf 'deb.sh: %s\n' "$*" >&2; exit 1; }

build() {
  local scratch release
  # shellcheck source=/dev/null
  release=$(. /etc/os-release && printf '%s%s' "$ID" "${VERSION_ID:-}")
  scratch=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$scratch'" EXIT
  mkdir -p "$scratch/ckptfs" "$OUT"
  cp -r pyproject.toml setup.py README.md LICENSE ckptfs daemon client docs deploy "$scratch/ckptfs/"
  mv "$scratch/ckptfs/deploy/debian" "$scratch/ckptfs/debian"
  sed -i "1s/(\([^)]*\))/(\1+$release)/" "$scratch/ckptfs/debian/changelog"
  # debhelper hides the home directory from pip.
  if [ -e ~/.config/pip/pip.conf ]; then export PIP_CONFIG_FILE=${PIP_CONFIG_FILE:-~/.config/pip/pip.conf}; fi
  say "package for $release; pip fetches what it needs, which takes some minutes"
  (cd "$scratch/ckptfs" && dpkg-buildpackage -b -us -uc > "$scratch/log" 2>&1) || { tail -n 50 "$scratch/log" >&2; fail "the build failed"; }
  rm -f "$OUT"/ckptfs_*.deb
  mv "$scratch"/ckptfs_*.deb "$OUT/"
  say "built: $(ls "$OUT"/ckptfs_*.deb)"
}

# in_tree COMMAND...: run a command in the bare tree.
in_tree() { env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive chroot "$TREE" "$@"; }

try() {
  local package mirror
  package=$(ls "$OUT"/ckptfs_*.deb) || fail "there is no package in $OUT; build it first"
  # Mounts of the test are seen by the test alone, and end with it.
  [ -n "${CKPTFS_DEB_TEST:-}" ] || exec env CKPTFS_DEB_TEST=1 unshare --mount --propagation private deploy/deb.sh test
  say "lintian"
  lintian --fail-on error,warning "$package"
  TREE=$(mktemp -d)
  trap 'umount -R -l "$TREE"/proc "$TREE"/sys "$TREE"/dev; rm -rf --one-file-system "$TREE"' EXIT
  # shellcheck source=/dev/null
  SUITE=${SUITE:-$(. /etc/os-release && printf '%s' "$VERSION_CODENAME")}
  # shellcheck disable=SC2016
  mirror=${MIRROR:-$(apt-get indextargets --format '$(SITE)' "Created-By: Packages" "Codename: $SUITE" | head -n 1)}
  say "bare tree of $SUITE"
  debootstrap --variant=minbase "$SUITE" "$TREE" "$mirror" > "$TREE.log" || { tail "$TREE.log" >&2; fail "debootstrap failed"; }
  rm -rf "$TREE.log" "$TREE/etc/apt"
  cp -rL /etc/apt "$TREE/etc/"
  cp -L /etc/resolv.conf /etc/hosts "$TREE/etc/"
  local part
  for part in proc sys dev; do mount --rbind "/$part" "$TREE/$part"; done
  cp "$package" "$TREE/tmp/ckptfs.deb"
  say "install, mount, write, unmount, remove, purge"
  in_tree apt-get -q update
  in_tree apt-get -q -y install --no-install-recommends fuse3 python3
  in_tree find / -xdev -not -path '/proc/*' -not -path '/var/*' -not -path '/tmp/*' | sort > "$TREE/tmp/before"
  in_tree apt-get -q -y install --no-install-recommends /tmp/ckptfs.deb
  in_tree sh -eux -c '
    mkdir -p /ckpt /pfs
    ckptfs version
    mount -t ckptfs deb /ckpt -o pfs=/pfs,ram=256M
    head -c 5000000 /dev/urandom > /ckpt/step_1.pt
    ckptfs wait /ckpt/step_1.pt --level pfs --timeout 60s
    ckptfs health /ckpt
    cmp /ckpt/step_1.pt /pfs/step_1.pt
    if dpkg -r ckptfs; then exit 1; fi # Not while it serves.
    umount /ckpt
    ckptfs mounts --delete deb --yes
    dpkg -r ckptfs
    test -e /etc/ckptfs/ckptfs.toml.sample
    dpkg -P ckptfs
    rm -r /ckpt /pfs
  '
  in_tree find / -xdev -not -path '/proc/*' -not -path '/var/*' -not -path '/tmp/*' | sort > "$TREE/tmp/after"
  diff "$TREE/tmp/before" "$TREE/tmp/after" || fail "the package left files"
  [ ! -e "$TREE/var/lib/ckptfs" ] || fail "the package left $(find "$TREE/var/lib/ckptfs" | paste -sd " ")"
  say "nothing left"
}

case ${1:-} in
  build) build ;;
  test) try ;;
  *) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
esac
