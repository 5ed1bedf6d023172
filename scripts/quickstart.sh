#!/usr/bin/env bash
# From a fresh machine to a finished RL run: sets up, then trains a small policy on arithmetic. No download beyond packages.
# usage: bash scripts/quickstart.sh [--workdir=runs/quickstart] [--config.seed=1] [any other option of experiments/train.py]
case "${1:-}" in -h|--help) sed -n '2,3p' "$0" | sed 's/^# //'; exit 0;; esac
source "$(dirname "$0")/setup.sh" ""  # no extras; without this empty argument setup.sh would read the arguments of this script
workdir="runs/quickstart-$(date +%Y%m%d-%H%M%S)"
# The rate falls to the end: with the constant one of the file a run may end in a dip (docs/troubleshooting.md).
exec python experiments/train.py --config=configs/arithmetic.py --config.optimizer.schedule=linear --workdir="$workdir" "$@"
