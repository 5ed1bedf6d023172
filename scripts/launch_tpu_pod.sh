#!/usr/bin/env bash
# Trains on a Cloud TPU slice, on a TPU VM of its own or on a GKE cluster through XPK. Run it again to continue a run.
# usage: bash scripts/launch_tpu_pod.sh vm  --name=N --type=v6e-8 --zone=Z [--project=P] [--spot] [--dry-run] -- TRAIN
#        bash scripts/launch_tpu_pod.sh xpk --name=N --type=v6e-8 --zone=Z --project=P --cluster=C --image=I [--slices=K] [--dry-run] \
#          -- TRAIN
# TRAIN: options of experiments/train.py, with --workdir on storage that outlives the machine and that all hosts of a slice see.
# --dry-run prints the commands, which are then run as printed. Exit codes: 0 launched, 2 wrong usage, others of gcloud or xpk.
set -euo pipefail
case "${1:-}" in ""|-h|--help) sed -n '2,7p' "$0" | sed 's/^# //'; exit 0;; esac
fail() { echo "$1; see: bash scripts/launch_tpu_pod.sh --help" >&2; exit 2; }
form="$1"; shift
[ "$form" = vm ] || [ "$form" = xpk ] || fail "the first word is vm or xpk, not '$form'"
name="" type="" zone="" project="" cluster="" image="" slices=1 spot="" dry=""
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case "$1" in
    --name=*) name="${1#*=}" ;; --type=*) type="${1#*=}" ;; --zone=*) zone="${1#*=}" ;;
    --project=*) project="${1#*=}" ;; --cluster=*) cluster="${1#*=}" ;; --image=*) image="${1#*=}" ;;
    --slices=*) slices="${1#*=}" ;;
    --spot) spot=1 ;; --dry-run) dry=1 ;; *) fail "unknown option $1" ;;
  esac
  shift
done
[ $# -gt 0 ] || fail "the options of the training come after --"
shift
needed="name type zone"; [ "$form" = vm ] || needed="$needed project cluster image"
for option in $needed; do [ -n "${!option}" ] || fail "--$option=... is missing"; done
[ "$form" = vm ] || [ -z "$spot" ] || fail "--spot is for vm; with xpk the cluster decides"
[[ "$slices" =~ ^[1-9][0-9]*$ ]] || fail "--slices=$slices is no number of slices"
[ "$form" = xpk ] || [ "$slices" = 1 ] || fail "--slices is for xpk; a TPU VM is one slice"
[[ " $* " == *" --workdir="* ]] || fail "--workdir=... is missing after --"

# Software image, and how many of what the type counts (cores for v4 and v5p, chips otherwise) one host has.
case "$type" in
  v4-*) image_of_vm=tpu-ubuntu2204-base per_host=8 ;;
  v5litepod-*) image_of_vm=v2-alpha-tpuv5-lite per_host=8 ;;
  v5p-*) image_of_vm=v2-alpha-tpuv5 per_host=8 ;;
  v6e-*) image_of_vm=v2-alpha-tpuv6e per_host=8 ;;
  *) fail "unknown type '$type': v4-N, v5litepod-N, v5p-N or v6e-N" ;;
esac
size="${type#*-}"
[[ "$size" =~ ^[0-9]+$ ]] || fail "'$type' has no size"
if [ "$size" -gt "$per_host" ] || [ "$slices" -gt 1 ]; then set -- "$@" --multihost; fi  # a process on each host, which find each other

training="$(printf '%q ' "$@")"; training="${training% }"
quote() { printf "'%s'" "$(sed "s/'/'\\\\''/g" <<< "$1")"; }
commands=()
if [ "$form" = vm ]; then
  where="--zone=$zone${project:+ --project=$project}"
  archive="/tmp/$name.tar.gz"
  python="{ command -v python3.11 > /dev/null || { sudo apt-get update -qq && sudo apt-get install -yqq python3.11 python3.11-venv; }; }"
  start="mkdir -p jaxrl_llm && tar xzf $name.tar.gz -C jaxrl_llm && cd jaxrl_llm && $python && PYTHON=python3.11"
  start="$start bash scripts/setup.sh tpu && source .venv/bin/activate"
  start="$start && { setsid nohup bash scripts/keep_training.sh $training >> train.log 2>&1 < /dev/null & }"
  commands+=("tar czf $archive --exclude=./.git --exclude=./.venv --exclude=./runs --exclude=./models .")
  commands+=("gcloud compute tpus tpu-vm describe $name $where > /dev/null 2>&1 || gcloud compute tpus tpu-vm create $name $where \
--accelerator-type=$type --version=$image_of_vm${spot:+ --spot}")
  commands+=("gcloud compute tpus tpu-vm scp $archive $name: $where --worker=all")
  commands+=("gcloud compute tpus tpu-vm ssh $name $where --worker=all --command=$(quote "$start")")
else
  commands+=("xpk workload create --workload=$name --cluster=$cluster --project=$project --zone=$zone --tpu-type=$type \
--num-slices=$slices --docker-image=$image --max-restarts=50 --termination-grace-period-seconds=600 \
--command=$(quote "exec bash scripts/keep_training.sh $training")")
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for command in "${commands[@]}"; do
  echo "$command"
  [ -n "$dry" ] || eval "$command"
done
if [ "$form" = vm ]; then
  echo "# follow it: gcloud compute tpus tpu-vm ssh $name $where --command='tail -f jaxrl_llm/train.log'"
fi
