"""The worth of POISE's probe without training curves: whether the gradient is unbiased, the values are good, and the cost.

  python experiments/poise.py --part=bias --out=runs/poise_bias
      Enumeration of a one-token policy, then gradients of a warm-started policy: POISE, own features, RLOO, GRPO.
  python experiments/poise.py --part=quality --out=runs/poise_quality [--config=configs/arithmetic.py:smollm2 ...]
      Predicted values against Monte-Carlo values of held-out prompts, beside controls; search over layers and penalties.
  python experiments/poise.py --part=overhead --out=runs/poise_overhead [--config=configs/arithmetic.py:smollm2]
      Seconds of capture, prediction and refit, and their share of a step.

Each prints a table and writes results.json and a figure into --out. The policy is the configuration's after its supervised
warm-up; every key of it can be set (--config.warmup.steps=300).
"""
import json
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from jaxrl_llm.commands import command_line

_CONFIG = config_flags.DEFINE_config_file("config", "configs/arithmetic.py", "The policy, its task and its warm-up.")
_PART = flags.DEFINE_enum("part", None, ("bias", "quality", "overhead"), "What is measured.")
_OUT = flags.DEFINE_string("out", None, "Folder for results.json and the figure.")
_SEED = flags.DEFINE_integer("seed", 0, "Of prompts and completions.")
_BATCHES = flags.DEFINE_integer("batches", 32, "bias: gradient estimates per method.", lower_bound=2)
_COMPLETIONS = flags.DEFINE_integer("completions", 512, "bias: completions per gradient estimate.", lower_bound=16)
_REFERENCE = flags.DEFINE_integer("reference", 4096, "bias: completions behind the reference gradient.", lower_bound=16)
_ROWS = flags.DEFINE_integer("rows", 4096, "quality, overhead: rollouts that the probe is fitted to.", lower_bound=8)
_PROMPTS = flags.DEFINE_integer("prompts", 256, "quality: held-out prompts.", lower_bound=4)
_SAMPLES = flags.DEFINE_integer("samples", 16, "quality: completions behind a Monte-Carlo value.", lower_bound=4)
_CRITIC_EPOCHS = flags.DEFINE_integer("critic_epochs", 0, "quality: also train a critic of policy size on the same rollouts.",
                                      lower_bound=0)
_REPEATS = flags.DEFINE_integer("repeats", 5, "overhead: timed calls, of which the median is reported.", lower_bound=1)


def main():
    from jaxrl_llm.experiments.poise_parts import bias, overhead, quality
    out = Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    if _PART.value == "bias":
        results = bias.measure(_CONFIG.value, batches=_BATCHES.value, completions=_COMPLETIONS.value,
                               reference=_REFERENCE.value, rows=_ROWS.value, seed=_SEED.value)
        part = bias
    elif _PART.value == "quality":
        results = quality.measure(_CONFIG.value, rows=_ROWS.value, prompts=_PROMPTS.value, samples=_SAMPLES.value,
                                  critic_epochs=_CRITIC_EPOCHS.value, seed=_SEED.value)
        part = quality
    else:
        results = overhead.measure(_CONFIG.value, rows=_ROWS.value, repeats=_REPEATS.value)
        part = overhead
    (out / "results.json").write_text(json.dumps(results, indent=1))
    for title, rows in results["tables"].items():
        command_line.print_table(rows, title)
    part.draw(results, out / f"{_PART.value}.png")
    print(f"written: {out / 'results.json'}, {out / f'{_PART.value}.png'}")


if __name__ == "__main__":
    command_line.run(main, "part", "out")
