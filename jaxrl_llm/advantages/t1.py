"""T1: leave-one-out advantages after a penalty on repetition (arXiv 2501.11651; reconstructed)."""
import functools
import operator

import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked


def repeated_share(tokens: Array, mask: Array, *, n: int) -> Array:
    """f32[P, G]: share of the n-grams of `tokens` i32[P, G, T] that occurred before in the same completion.

    An n-gram is n neighbouring True entries of `mask`; without n-grams the share is 0.
    """
    size = tokens.shape[-1] - n + 1
    if size < 1:
        return jnp.zeros(tokens.shape[:-1])
    real = functools.reduce(operator.and_, (mask[..., i : i + size] for i in range(n)))
    # Sorting puts equal n-grams together: every n-gram that equals its left neighbour is a repetition.
    columns = [(~real).astype(jnp.int32), *(tokens[..., i : i + size] for i in range(n))]
    columns = lax.sort(columns, dimension=-1, num_keys=n + 1)
    same = functools.reduce(operator.and_, (x[..., 1:] == x[..., :-1] for x in columns)) & (columns[0][..., 1:] == 0)
    return masked.count(same, axis=-1) / jnp.maximum(masked.count(real, axis=-1), 1)


@estimator
def t1(*, n: int = 2, threshold: float = 0.5, penalty: float = 1.0) -> Estimator:
    """`A_i = r'_i - mean of the other r'`, `r' = r - penalty` where more than `threshold` of the n-grams are repeated.

    A group of one gets 0. The paper names neither the estimator nor the numbers of its penalty: both are reconstructed.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1, the number of tokens in an n-gram")

    def advantages(rollouts):
        repeats = repeated_share(rollouts.tokens, rollouts.token_mask, n=n) > threshold
        rewards = rollouts.rewards - jnp.where(repeats, penalty, 0)
        return rewards - masked.leave_one_out_mean(rewards, rollouts.valid)

    return stateless(advantages, needs=("rewards", "tokens"))
