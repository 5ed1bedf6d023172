#!/usr/bin/env bash
# Runs the fast tests under the Python of a Debian release, with the newest packages that pip finds for it.
# usage: sudo bash scripts/test_debian.sh [RELEASE] [pytest options]     e.g. sudo bash scripts/test_debian.sh trixie tests/models
# RELEASE: trixie (default: Debian 13, Python 3.13). JAXRL_LLM_ROOT: the folder of the system (default: /var/tmp/jaxrl_llm_RELEASE),
# which debootstrap makes if it is missing, and which is kept. Tests that need PyTorch are skipped.
set -euo pipefail
case "${1:-}" in -h|--help) sed -n '2,5p' "$0" | sed 's/^# //'; exit 0;; esac
release=trixie
if [ $# -gt 0 ] && [[ "$1" =~ ^[a-z]+$ ]]; then release="$1"; shift; fi
root="${JAXRL_LLM_ROOT:-/var/tmp/jaxrl_llm_$release}"
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "debootstrap and chroot need root: sudo bash $0" >&2; exit 1; }
command -v debootstrap > /dev/null || { echo "debootstrap is missing; Debian, Ubuntu: apt-get install debootstrap" >&2; exit 1; }
if [ ! -e "$root/made" ]; then
  echo "Making $root ..."
  rm -rf "$root"
  debootstrap --variant=minbase --include=python3-venv,python3-dev,gcc,libc6-dev,bubblewrap,ca-certificates,git "$release" "$root" > /dev/null
  touch "$root/made"
fi
for file in /etc/resolv.conf /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
  [ ! -e "$file" ] || cp -L "$file" "$root$file"
done
mkdir -p "$root/srv/jaxrl_llm"
find "$root/srv/jaxrl_llm" -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +
git ls-files -z | tar --null -T - -cf - | tar -xf - -C "$root/srv/jaxrl_llm"
mountpoint -q "$root" || mount --bind "$root" "$root"  # sandboxes can change this root
mountpoint -q "$root/proc" || mount -t proc proc "$root/proc"
mountpoint -q "$root/dev" || mount --rbind /dev "$root/dev"
mount --make-rslave "$root/dev"  # the unmounting below does not spread to /dev
trap 'umount -l "$root"' EXIT
chroot "$root" env -u PIP_FIND_LINKS HOME=/root PATH=/usr/bin:/bin:/usr/sbin:/sbin bash -c '
  set -euo pipefail
  cd /srv/jaxrl_llm
  source scripts/setup.sh test-light
  python -c "import sys, importlib.metadata as m; print(\"Python \" + sys.version.split()[0], *(f\"{n} {m.version(n)}\" for n in
             (\"jax\", \"flax\", \"optax\", \"orbax-checkpoint\", \"numpy\")), sep=\", \")"
  exec python -m pytest -q -n "${JAXRL_LLM_TEST_WORKERS:-auto}" --dist worksteal -m "not slow" "$@"' bash "$@"
