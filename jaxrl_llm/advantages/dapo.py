"""DAPO's advantage: soft punishment of overlong answers, then the z-score inside the group (arXiv 2503.14476).

The other parts of the recipe are the objective (`ppo_clip` with the higher upper bound and `token_mean`) and the filter
`jaxrl_llm.control.dynamic_sampling`, which looks at the unshaped accuracy.
"""

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import registry
from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score


def overlong_penalty(
    lengths: Array, *, max_len: int, cache_len: int, factor: float = 1.0, variant: str = "paper"
) -> Array:
    """0 up to `max_len - cache_len` tokens, then linear down to `-factor` at `max_len` and beyond (any shape).

    `variant="code"`, the released form, keeps falling beyond `max_len`, which a budget of `max_len` never reaches.
    """
    excess = jnp.maximum(lengths - (max_len - cache_len), 0)
    return -factor * (jnp.minimum(excess, cache_len) if variant == "paper" else excess) / cache_len


@estimator
def dapo(
    *,
    max_len: int = 20480,
    cache_len: int | None = None,
    factor: float = 1.0,
    variant: str = "paper",
    eps: float = 1e-6,
) -> Estimator:
    """`A_i = (r'_i - mean') / (std' + eps)` with `r' = r + overlong_penalty(length)`, sample standard deviation.

    `max_len` is the generation budget in tokens, `cache_len` the part of it that is punished (default: a fifth).
    `variant` ("paper" or "code") is passed to `overlong_penalty`. The lengths and the factor are the paper's and verl's
    recipe's, eps as in `grpo`.
    """
    registry.one_of("variant", variant, ("paper", "code"))
    cache_len = max(max_len // 5, 1) if cache_len is None else cache_len
    if not 0 < cache_len <= max_len:
        raise ValueError(f"cache_len={cache_len} must be between 1 and max_len={max_len}")

    def advantages(rollouts):
        penalty = overlong_penalty(
            rollouts.lengths, max_len=max_len, cache_len=cache_len, factor=factor, variant=variant)
        return group_z_score(rollouts.rewards + penalty, rollouts.valid, eps=eps)

    return stateless(advantages)
