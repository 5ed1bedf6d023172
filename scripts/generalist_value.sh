#!/usr/bin/env bash
# Makes the measurements of V0 in docs/generalist_value.md: trains several policies, records which problems they solve, fits V0,
# and compares its predictions, budgets and routes. It takes 60 to 90 minutes on two CPU cores; the same
# command continues where it stopped.
# usage: bash scripts/generalist_value.sh [DIR]      default: runs/generalist_value; needs scripts/get_smollm2.sh first
set -euo pipefail
case "${1:-}" in -h|--help) sed -n '2,5p' "$0" | sed 's/^# //'; exit 0;; esac
out="$(realpath -m "${1:-runs/generalist_value}")"
source "$(dirname "$0")/setup.sh" data
python -c "import tensorflow_datasets" || { echo "TFDS, which keeps the histories, cannot be imported: bash scripts/setup.sh data" >&2; exit 1; }
encoder="models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
[ -f "$encoder" ] || { echo "$encoder is missing: bash scripts/get_smollm2.sh" >&2; exit 1; }

# train NAME [OPTION ...]: an embedded policy with a checkpoint every 16 steps.
train() {
  local name="$1"; shift
  bash scripts/keep_training.sh --workdir="$out/$name" --config=configs/arithmetic.py --config.steps=160 \
    --config.task="arithmetic(level=nocarry3+add2, size=8000)" --config.warmup.steps=300 --config.prompts.per_step=64 \
    --config.sampling.group=8 --config.eval.every=0 --config.checkpoint.every=16 --config.checkpoint.keep=100 \
    --config.samples_every=0 "$@"
}
four="arithmetic(level=digit+sub2+mul+sum3, size=3000)"
train seed0
train seed1 --config.seed=1 --config.optimizer.learning_rate=4e-4
train seed2 --config.seed=2 --config.optimizer.learning_rate=1.6e-3
train narrow --config.model.hidden_size=48 --config.model.mlp_size=192
train wide --config.model.hidden_size=192 --config.model.mlp_size=768
train shallow --config.model.num_layers=1
train deep --config.model.num_layers=4
train poise --config.seed=3 --config.method=poise --config.prompts.per_step=256 --config.sampling.group=2
train others --config.task="$four"
train others_wide --config.task="$four" --config.model.hidden_size=192 --config.model.mlp_size=768
bash scripts/keep_training.sh --workdir="$out/smollm2" --config=configs/arithmetic.py:smollm2 --config.steps=16 \
  --config.eval.every=0 --config.checkpoint.every=4 --config.checkpoint.keep=100 --config.samples_every=0

policies="$out/seed0,$out/seed1,$out/seed2,$out/narrow,$out/wide,$out/shallow,$out/deep,$out/poise,$out/others,$out/others_wide,$out/smollm2"
history="$out/history/policy_history/1.0.0"
[ -d "$history" ] || python experiments/record_history.py --runs="$policies" --out="$out/history" --problems=1024
known=(--history="$history" --encoder="$encoder")
[ -f "$out/head.npz" ] || python experiments/pretrain_value.py --stage=prior --out="$out/head.npz"
[ -f "$out/v0.npz" ] || python experiments/pretrain_value.py --stage=adapter --steps=1000 --weights="$out/head.npz" "${known[@]}" --out="$out/v0.npz"
for weights in head v0; do
  python experiments/measure_value.py --weights="$out/$weights.npz" "${known[@]}" --out="$out/report_$weights"
  python experiments/budgets.py --weights="$out/$weights.npz" "${known[@]}" --out="$out/budgets_$weights"
done
# The cost of an answer, in thousands of weights.
python experiments/route.py --weights="$out/v0.npz" "${known[@]}" --out="$out/route" \
  --costs="$out/narrow=86,$out/shallow=173,$out/seed0=320,$out/deep=616,$out/wide=1230"
