#!/usr/bin/env bash
# Trains on a Cloud TPU slice, on a TPU VM of its own or on a GKE cluster through XPK. Run it again to continue a run: a VM that
# was preempted is deleted and created again.
# usage: bash scripts/launch_tpu_pod.sh [--dry-run] vm  --name=N --type=v6e-8 --zone=Z [--project=P] [--spot] [--nfs=SERVER:/SHARE] \
#          -- TRAIN
#        bash scripts/launch_tpu_pod.sh [--dry-run] xpk --name=N --type=v6e-8 --zone=Z --project=P --cluster=C --image=I [--slices=K] \
#          -- TRAIN
# TRAIN: options of experiments/train.py, with --workdir=gs://BUCKET/FOLDER, or a folder on storage that all hosts mount.
# --nfs (Filestore, for instance) is mounted at /mnt/SHARE on every host.
# --dry-run, as the first option, prints the commands and does not run them. Exit codes: 0 launched, 2 wrong usage, others from
# gcloud or xpk.
set -euo pipefail
case "${1:-}" in ""|-h|--help) sed -n '2,11p' "$0" | sed 's/^# //'; exit 0;; esac
fail() { echo "$1; see: bash scripts/launch_tpu_pod.sh --help" >&2; exit 2; }
dry=""
if [ "$1" = --dry-run ]; then dry=1; shift; fi
form="${1:-}"; shift || true
[ "$form" = vm ] || [ "$form" = xpk ] || fail "the first word is vm or xpk, not '$form'"
name="" type="" zone="" project="" cluster="" image="" slices=1 spot="" nfs=""
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case "$1" in
    --name=*) name="${1#*=}" ;; --type=*) type="${1#*=}" ;; --zone=*) zone="${1#*=}" ;;
    --project=*) project="${1#*=}" ;; --cluster=*) cluster="${1#*=}" ;; --image=*) image="${1#*=}" ;;
    --slices=*) slices="${1#*=}" ;;
    --nfs=*) nfs="${1#*=}" ;;
    --spot) spot=1 ;; *) fail "unknown option $1" ;;
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
[ "$form" = vm ] || [ -z "$nfs" ] || fail "--nfs is for vm; storage of a cluster is attached by: xpk storage attach"
[ -z "$nfs" ] || [[ "$nfs" =~ ^[A-Za-z0-9.-]+:/[A-Za-z0-9_-]+$ ]] || fail "--nfs=$nfs is no SERVER:/SHARE"
workdir=""
for option in "$@"; do [[ "$option" != --workdir=* ]] || workdir="${option#*=}"; done
[ -n "$workdir" ] || fail "--workdir=... is missing after --"
mount="give --workdir=gs://BUCKET/FOLDER, or mount storage of all hosts and give a folder in it:"
if [ "$form" = vm ]; then mount="$mount --nfs=SERVER:/SHARE, then --workdir=/mnt/SHARE/..."
else mount="$mount xpk storage attach ... --mount-point=/mnt/SHARE, then --workdir=/mnt/SHARE/..."; fi
folder=""  # of an absolute path, without the first slash
case "$workdir" in
  gs://?*/?*) folder="$workdir" ;;
  *://*) fail "--workdir=$workdir is a URL to which several hosts cannot write; $mount" ;;
  /?*) folder="${workdir#/}" ;;
esac
case "$folder" in
  ""|tmp/*|var/*|home/*|root/*|run/*|dev/*|usr/*|opt/*)
    fail "--workdir=$workdir lies on the disk of a host: it is lost with the host, and other hosts cannot read it; $mount" ;;
esac
if [ -n "$nfs" ] && [[ "$workdir" != gs://* && "$workdir" != "/mnt/${nfs#*:/}/"* ]]; then
  fail "--workdir=$workdir is not in /mnt/${nfs#*:/}, where --nfs=$nfs is mounted"
fi
# Weights: models/ is not copied to the hosts, so what a recipe reads there is given by paths on that storage.
config="" weights="" teacher=""
for option in "$@"; do
  case "$option" in
    --config.model.path=[!/]*|--config.teacher.path=[!/]*|--config.teacher.base=[!/]*)
      fail "$option lies beside this script and is not copied to the hosts; copy it to the storage of --workdir and give its path there" ;;
    --config.model.path=*) weights=1 ;;
    --config.teacher.path=*) teacher=1 ;;
    --config=*) config="${option#*=}" ;;
  esac
done
file="${config%%:*}"
[[ "$file" == */* || "$file" == *.py ]] || file="configs/$file.py"  # the name of a recipe
[[ "$file" == /* ]] || file="$(dirname "${BASH_SOURCE[0]}")/../$file"
variant="${config#"${config%%:*}"}"  # begins with a colon; or the file's default, empty if it has no variants
[ -n "$variant" ] || [ ! -f "$file" ] || variant="$(sed -n 's/^def get_config(variant: str = "\(.*\)"):.*/:\1/p' "$file")"
published="" missing=""
case "$variant" in
  :smollm2|:*-*) published=1 ;;
  "") if [ -f "$file" ] && grep -q 'model\.path = "models/' "$file"; then published=1; fi ;;
esac
if [ -n "$published" ]; then
  models="${workdir%/*}/models/..."
  if [[ "$workdir" == gs://* ]]; then models="/mnt/SHARE/models/..."; fi  # weights are read from mounted storage
  [ -n "$weights" ] || missing=" --config.model.path=$models"
  if [ -z "$teacher" ] && [ -f "$file" ] && grep -q 'taught=True' "$file"; then
    missing="$missing --config.teacher.path=$models"
  fi
fi
[ -z "$missing" ] || fail "--config=$config reads weights in models/, which is not copied to the hosts; copy them to \
mounted storage and add$missing"

# The software image, and the units of the type (cores for v4 and v5p, chips otherwise) on one host.
case "$type" in
  v4-*) image_of_vm=tpu-ubuntu2204-base per_host=8 ;;
  v5litepod-*) image_of_vm=v2-alpha-tpuv5-lite per_host=8 ;;
  v5p-*) image_of_vm=v2-alpha-tpuv5 per_host=8 ;;
  v6e-*) image_of_vm=v2-alpha-tpuv6e per_host=8 ;;
  *) fail "unknown type '$type': v4-N, v5litepod-N, v5p-N or v6e-N" ;;
esac
size="${type#*-}"
[[ "$size" =~ ^[0-9]+$ ]] || fail "'$type' has no size"
if [ "$size" -gt "$per_host" ] || [ "$slices" -gt 1 ]; then set -- "$@" --multihost; fi  # one process per host; they find each other

training="$(printf '%q ' "$@")"; training="${training% }"
quote() { printf "'%s'" "$(sed "s/'/'\\\\''/g" <<< "$1")"; }
commands=()
if [ "$form" = vm ]; then
  where="--zone=$zone${project:+ --project=$project}"
  archive="/tmp/$name.tar.gz"
  python="{ command -v python3.11 > /dev/null || { sudo apt-get update -qq && sudo apt-get install -yqq python3.11 python3.11-venv; }; }"
  start="mkdir -p jaxrl_llm && tar xzf $name.tar.gz -C jaxrl_llm && cd jaxrl_llm && $python && PYTHON=python3.11"
  extras=tpu,data,tasks
  if [[ "$workdir" == gs://* ]]; then extras="$extras,gs"; fi
  start="$start bash scripts/setup.sh $extras && source .venv/bin/activate"
  if [ -n "$nfs" ]; then
    share="/mnt/${nfs#*:/}"
    start="$start && { mountpoint -q $share || { sudo apt-get install -yqq nfs-common && sudo mkdir -p $share"
    start="$start && sudo mount -t nfs $nfs $share; }; }"
    [[ "$workdir" == gs://* ]] || start="$start && sudo install -d -o \$(id -u) $(printf '%q' "$workdir")"
  fi
  start="$start && bash scripts/keep_training.sh --dry-run --mounted $training"  # reports wrong usage in the terminal, not in the log
  start="$start && { setsid nohup bash scripts/keep_training.sh --mounted $training >> train.log 2>&1 < /dev/null & }"
  commands+=("tar czf $archive --exclude=./.git --exclude=./.venv --exclude=./runs --exclude=./models .")
  commands+=("state=\$(gcloud compute tpus tpu-vm describe $name $where --format='value(state)' 2> /dev/null || true)")
  commands+=("case \$state in PREEMPTED|TERMINATED) gcloud compute tpus tpu-vm delete $name $where --quiet; state= ;; esac")
  commands+=("[ -n \"\$state\" ] || gcloud compute tpus tpu-vm create $name $where --accelerator-type=$type --version=$image_of_vm\
${spot:+ --spot}")
  commands+=("gcloud compute tpus tpu-vm scp $archive $name: $where --worker=all")
  commands+=("gcloud compute tpus tpu-vm ssh $name $where --worker=all --command=$(quote "$start")")
else
  commands+=("xpk workload create --workload=$name --cluster=$cluster --project=$project --zone=$zone --tpu-type=$type \
--num-slices=$slices --docker-image=$image --max-restarts=50 --termination-grace-period-seconds=600 \
--command=$(quote "exec bash scripts/keep_training.sh --mounted $training")")
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for command in "${commands[@]}"; do
  echo "$command"
  [ -n "$dry" ] || eval "$command"
done
if [ "$form" = vm ]; then
  echo "# follow it: gcloud compute tpus tpu-vm ssh $name $where --command='tail -f jaxrl_llm/train.log'"
fi
