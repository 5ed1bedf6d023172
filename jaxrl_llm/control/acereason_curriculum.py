"""AceReason-Nemotron: longer completions in stages, and only hard problems in the last ones (arXiv 2505.16400, 2506.13284)."""
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller


class LengthStage(NamedTuple):
    """For each of N problems: rollouts of this stage, right ones, i32[N], `kept` bool[N]; `step` and `most` tokens, i32[]."""

    tried: Array
    right: Array
    kept: Array
    step: Array
    most: Array


def hard(tried_N: Array, right_N: Array, cut: float) -> Array:
    """bool[N]: problems with a share of right rollouts of at most `cut`, and problems that were not tried."""
    return right_N <= cut * tried_N + 1e-6


@controller
def acereason_curriculum(*, lengths: Sequence[float] = (0.25, 0.5, 0.75, 1.0), filtered: int = 2, cut: float = 6 / 16,
                         every: int = 100) -> Controller:
    """`max_tokens`, `prompt_weights`: stages of `every` steps, each with a share of `sampling.max_tokens`.

    Each of the last `filtered` stages keeps the previous stage's problems that are `hard` by the rollouts of that stage. The
    paper's limits are 8k, 16k, 24k and 32k tokens, its cut is 6 of 16; it ends stages when validation stagnates, while `every`
    is ours. If no problem is hard, all problems are drawn. Facts: `tried`, `right`. Raises ValueError: shares that do not grow
    from above 0 to at most 1, more filtered stages than there are, stages without a step.
    """
    if not lengths or list(lengths) != sorted(lengths) or lengths[0] <= 0 or lengths[-1] > 1 or every < 1 \
            or not 0 <= filtered <= len(lengths):
        raise ValueError(f"lengths={tuple(lengths)}, filtered={filtered}, every={every}; give shares that grow from above 0 to "
                         f"at most 1, 0 to {len(lengths)} filtered stages, and one step or more")
    shares = jnp.asarray(lengths, jnp.float32)

    def at(step):
        return jnp.minimum(step // every, len(lengths) - 1)

    def propose(stage):
        tokens = jnp.ceil(shares[at(stage.step)] * stage.most - 1e-4).astype(jnp.int32)
        return {"max_tokens": tokens, "prompt_weights": stage.kept.astype(jnp.float32)}

    def observe(stage, facts):
        tried, right, step = stage.tried + facts["tried"], stage.right + facts["right"], stage.step + 1
        new = at(step) > at(stage.step)
        left = stage.kept & hard(tried, right, cut)
        kept = jnp.where(new & (at(step) >= len(lengths) - filtered), left, stage.kept)
        return LengthStage(jnp.where(new, 0, tried), jnp.where(new, 0, right), kept, step, stage.most)

    def init(prompts, max_tokens):
        none = jnp.zeros(prompts, jnp.int32)
        return LengthStage(none, none, jnp.ones(prompts, bool), jnp.int32(0), jnp.int32(max_tokens))

    return Controller(init, propose, observe, facts=("tried", "right"), knobs=("max_tokens", "prompt_weights"))
