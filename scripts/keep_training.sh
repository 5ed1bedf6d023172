#!/usr/bin/env bash
# Trains to the last step: continues from the newest checkpoint if there is one, and starts again after a signal kills the run.
# usage: bash scripts/keep_training.sh [--dry-run] [--mounted] [--restarts=10] --workdir=DIR --config=FILE [options of train.py]
# DIR may be gs://BUCKET/FOLDER. --mounted refuses one on the local disk, for machines that can be reclaimed. --dry-run only prints.
# Exit codes: 0 finished; 75 saved and stopped by SIGTERM, SIGUSR1 or Ctrl-C, run this again; 1 an error that a restart would repeat;
# 2 wrong usage; 128 + n killed by signal n more often than --restarts allows. PYTHON picks the interpreter (default: python).
set -uo pipefail
case "${1:-}" in ""|-h|--help) sed -n '2,6p' "$0" | sed 's/^# //'; exit 0;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dry="" mounted="" restarts=10 workdir="" options=()
for option in "$@"; do
  case "$option" in
    --dry-run) dry=1 ;;
    --mounted) mounted=1 ;;
    --restarts=*) restarts="${option#*=}" ;;
    --resume|--resume=*) echo "leave out $option: this script decides whether to resume" >&2; exit 2 ;;
    --workdir=*)
      workdir="${option#*=}"
      if [ -n "${HOME:-}" ]; then workdir="${workdir/#\~\//$HOME/}"; fi  # bash leaves ~ alone behind an equals sign
      options+=("--workdir=$workdir") ;;
    *) options+=("$option") ;;
  esac
done
[ -n "$workdir" ] || { echo "--workdir=DIR is missing" >&2; exit 2; }
[[ "$restarts" =~ ^[0-9]+$ ]] || { echo "--restarts=$restarts is no number" >&2; exit 2; }
if [ -n "$mounted" ] && [[ "$workdir" != *://* ]]; then
  folder="$workdir"
  while [ ! -d "$folder" ]; do folder="$(dirname "$folder")"; done
  if [ "$(df --output=target "$folder" | tail -n 1)" = / ]; then
    echo "--workdir=$workdir lies on the disk of $HOSTNAME: it is lost with the machine, and other hosts cannot read it. Mount storage" \
         "on every host and give a folder in it (sudo mount -t nfs SERVER:/SHARE /mnt/SHARE), or give gs://BUCKET/FOLDER" >&2
    exit 2
  fi
fi

saved() {  # whether there is a checkpoint; a save that a kill cut short has a longer name, and is nothing to resume
  case "$workdir" in
    *://*) "${PYTHON:-python}" -c 'import sys; from jaxrl_llm.store.bucket import place, steps_in
sys.exit(not steps_in(place(sys.argv[1]) / "checkpoints"))' "$workdir" 2> /dev/null ;;
    *) compgen -G "$workdir/checkpoints/[0-9]*" | grep -qE '/[0-9]+$' ;;
  esac
}
stopped() { echo "stopped by a signal; the same command continues" >&2; exit 75; }
stopping="" child=""
trap 'stopping=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM USR1 INT  # a child in the background ignores Ctrl-C
for ((attempt = 0; ; attempt++)); do
  command=("${PYTHON:-python}" experiments/train.py "${options[@]}")
  if saved; then command+=(--resume); fi
  printf '%q ' "${command[@]}" | sed 's/ $/\n/'
  [ -z "$dry" ] || exit 0
  "${command[@]}" &
  child=$!
  wait "$child"; code=$?
  while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done  # a trap ends `wait` before the child has ended
  child=""
  if [ -n "$stopping" ] || [ "$code" = 75 ]; then stopped; fi
  # Only signals from elsewhere are worth a restart (out of memory, an abort of the runtime); other errors would repeat.
  if [ "$code" -le 128 ] || [ "$attempt" -ge "$restarts" ]; then exit "$code"; fi
  echo "killed by signal $((code - 128)); start $((attempt + 1)) of $restarts again in ${JAXRL_LLM_PAUSE:-10} s" >&2
  for ((second = 0; second < ${JAXRL_LLM_PAUSE:-10}; second++)); do
    sleep 1
    if [ -n "$stopping" ]; then stopped; fi
  done
done
