"""Seconds and peak memory of updates from one long packed row, at SmolLM2's widths.

  python experiments/benchmark.py rows [--length=8192] [--group=8] [--layers=2] [--updates=3]

The row holds a prompt of 512 tokens and a group of completions that fill it; one update is a forward pass, a backward pass and
an optimiser step of all weights. Peak memory is that of the process, weights, gradients and both moments of AdamW included.
"""
import resource
import time

from absl import app, flags

_LENGTH = flags.DEFINE_integer("length", 8192, "Slots of the row.", lower_bound=1024)
_GROUP = flags.DEFINE_integer("group", 8, "Completions of the prompt.", lower_bound=1)
_LAYERS = flags.DEFINE_integer("layers", 2, "Layers of the model.", lower_bound=1)
_UPDATES = flags.DEFINE_integer("updates", 3, "Updates, the first of which compiles.", lower_bound=2)

PROMPT, VOCABULARY = 512, 49152


def make_update():
    """`(update, state)`: an update that takes a state and returns the next one with metrics, and the first state."""
    import jax
    import numpy as np
    import optax

    from jaxrl_llm import advantages, objectives
    from jaxrl_llm.data.packing import of_groups, pack
    from jaxrl_llm.data.rollouts import Rollouts
    from jaxrl_llm.learning import accumulate, state
    from jaxrl_llm.learning.policy import Policy
    from jaxrl_llm.models import ModelConfig, Transformer

    model = Transformer(ModelConfig(vocab_size=VOCABULARY, hidden_size=576, num_layers=_LAYERS.value, num_heads=9,
                                    num_kv_heads=3, head_dim=64, mlp_size=1536), remat=True)
    rng = np.random.default_rng(0)
    mask = np.ones((1, _GROUP.value, (_LENGTH.value - PROMPT) // _GROUP.value), bool)
    tokens, prompt = rng.integers(0, VOCABULARY, mask.shape), rng.integers(0, VOCABULARY, (1, PROMPT))
    packed = pack(*of_groups(prompt, np.ones(prompt.shape, bool), tokens, mask), mask, [_LENGTH.value])
    optimizer = optax.adamw(1e-5)
    objective, estimator = objectives.make("ppo_clip"), advantages.make("grpo")
    parts = accumulate.make_parts(Policy(model), objective, optimizer)
    rollouts = Rollouts(mask=mask, valid=mask.any(-1), tokens=tokens)
    credit = rng.normal(size=mask.shape).astype(np.float32)
    first = state.create(jax.jit(model.init)(jax.random.key(0)), None, optimizer, estimator, objective, jax.random.key(1))
    return lambda now: accumulate.update(parts, 1, now, packed, rollouts, credit), first


def main(_):
    import jax
    update, state = make_update()
    print(f"{sum(x.size for x in jax.tree.leaves(state.params)) / 1e6:.1f} million weights, a row of {_LENGTH.value} slots")
    for number in range(_UPDATES.value):
        start = time.perf_counter()
        state, metrics = update(state)
        jax.block_until_ready(state)
        print(f"update {number + 1}  {time.perf_counter() - start:6.2f} s  gradient norm {float(metrics['grad_norm']):.3f}"
              f"{'  (compiles)' if number == 0 else ''}", flush=True)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    app.run(main)
