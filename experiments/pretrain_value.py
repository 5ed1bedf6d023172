"""Trains the generalist value model V0: its in-context head on synthetic tasks, then its adapter on recorded histories.

  python experiments/pretrain_value.py --stage=prior --out=runs/v0/head.npz
  python experiments/pretrain_value.py --stage=adapter --weights=runs/v0/head.npz --history=runs/history/policy_history/1.0.0 \\
      --encoder=models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out=runs/v0/v0.npz

The adapter sees neither the policies nor the prompts that --seed holds out; experiments/measure_value.py, given the same
history and seed, measures on these. The encoder is a model on disk or the newest policy of a run folder.
"""
from pathlib import Path

from absl import flags

from jaxrl_llm.commands import command_line

_STAGE = flags.DEFINE_enum("stage", None, ("prior", "adapter"), "What is trained.")
_OUT = flags.DEFINE_string("out", None, "The .npz file to write.")
_STEPS = flags.DEFINE_integer("steps", 4000, "Optimiser steps.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 16, "Tasks, or contexts, per step.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer("context", 128, "Rows of a context, N.", lower_bound=1)
_QUERIES = flags.DEFINE_integer("queries", 32, "Queries per context.", lower_bound=2)
_RATE = flags.DEFINE_float("learning_rate", 0.0, "Peak; 0: 1e-3 for the prior, 2e-4 for the adapter.", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 0, "Of weights, tasks, episodes and of what is held out.")
_FEATURES = flags.DEFINE_integer("features", 48, "prior: numbers per prompt, K * E.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 64, "prior: width of the head.", lower_bound=4)
_LAYERS = flags.DEFINE_integer("layers", 3, "prior: layers of the head.", lower_bound=1)
_WEIGHTS = flags.DEFINE_string("weights", None, "adapter: head to start from.")
_HISTORY = flags.DEFINE_string("history", None, "adapter: folder that experiments/record_history.py printed.")
_ENCODER = flags.DEFINE_string("encoder", None, "adapter: model directory, .gguf file or run folder.")
_SIZE = flags.DEFINE_integer("query_size", 6, "adapter: E, a multiple of three attention heads.", lower_bound=3)
_RANKING = flags.DEFINE_float("ranking", 0.25, "adapter: weight of the ranking loss; the rest is cross-entropy.")
_TUNE_HEAD = flags.DEFINE_bool("tune_head", False, "adapter: train the head as well.")


def reporter(progress, steps: int):
    """Shows the mean loss since the last report twenty times in a run."""
    seen: list[float] = []

    def report(step: int, loss: float) -> None:
        seen.append(loss)
        if step % max(steps // 20, 1) < 20 or step == steps:
            progress.phase(f"training, loss {sum(seen) / len(seen):.4f}")
            progress.step(step, {})
            seen.clear()

    return report


def prior(report):
    import jax

    from jaxrl_llm.values import v0, v0_training
    model = v0.V0(v0.Head(_FEATURES.value, width=_WIDTH.value, layers=_LAYERS.value))
    params = jax.jit(model.init)(jax.random.key(_SEED.value))
    return model, v0_training.fit_head(model, params, steps=_STEPS.value, batch=_BATCH.value, context=_CONTEXT.value,
                                       queries=_QUERIES.value, learning_rate=_RATE.value or 1e-3, seed=_SEED.value,
                                       report=report)


def adapter(report):
    import dataclasses

    import jax
    import numpy as np

    from jaxrl_llm.experiments.value_parts import fleet
    from jaxrl_llm.values import history, v0, v0_training
    for name, value in (("weights", _WEIGHTS.value), ("history", _HISTORY.value), ("encoder", _ENCODER.value)):
        if not value:
            raise ValueError(f"--stage=adapter needs --{name}")
    (start, params), data = v0.load(_WEIGHTS.value), history.load(_HISTORY.value)
    features, size = start.head.features, _SIZE.value
    if size % 3 or features % size:
        raise ValueError(f"--query_size={size} must be a multiple of 3 that divides the head's {features} features")
    unseen, hidden = history.held_out(data, np.random.default_rng(_SEED.value))
    data = history.select(data, ~unseen[data.policy] & ~hidden[data.prompt])
    encoder = fleet.load_encoder(_ENCODER.value)
    states, mask = encoder.encode(data.prompts)
    model = dataclasses.replace(start, adapter=v0.QueryAdapter(queries=features // size, size=size), states=encoder.size)
    params = jax.jit(model.init)(jax.random.key(_SEED.value)) | {"head": params["head"]}
    drawn = history.episodes(data, np.random.default_rng(_SEED.value), context=_CONTEXT.value, queries=_QUERIES.value)
    return model, v0_training.fit_adapter(
        model, params, states, mask, drawn, steps=_STEPS.value, batch=_BATCH.value, learning_rate=_RATE.value or 2e-4,
        ranking=_RANKING.value, tune_head=_TUNE_HEAD.value, seed=_SEED.value, report=report)


def main():
    from jaxrl_llm.runs.progress import Progress
    from jaxrl_llm.values import v0
    with Progress(_STEPS.value) as progress:
        progress.phase("compiling")
        model, params = {"prior": prior, "adapter": adapter}[_STAGE.value](reporter(progress, _STEPS.value))
    path = v0.save(_OUT.value, model, params)
    print(f"wrote {path}, {Path(path).stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    command_line.run(main, "stage", "out")
