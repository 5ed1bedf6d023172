"""Resample on correct: of 2G rollouts keep G, all kinds of failures and the cleanest successes (arXiv 2508.20722)."""
import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.maths import masked


def mess_penalty(tool_calls: Array, error_words: Array, answer_blocks: Array, turns: Array, malformed: Array) -> Array:
    """Error part plus format part, both in [0, 1]; counts per rollout, all of one shape, `malformed` bool (broken tags).

    Errors: results that contain the word "error" / calls, 0.5 without a call. Format: 1 if malformed or without an answer
    block or turn, else min((answer blocks - 1) / turns, 1).
    """
    errors = jnp.where(tool_calls > 0, error_words / jnp.maximum(tool_calls, 1), 0.5)
    surplus = jnp.minimum((answer_blocks - 1) / jnp.maximum(turns, 1), 1)
    return errors + jnp.where(malformed | (answer_blocks == 0) | (turns == 0), 1, surplus)


def kept_counts(negatives: Array, positives: Array, size: Array | int, *, min_negative: int, min_positive: int):
    """Numbers of negatives and positives to keep for a group of `size`: their shares, but at least the minima.

    Shares are rounded half to even; any shape, i32. A group of at most `size` rollouts is kept whole.
    """
    total = negatives + positives
    size = jnp.minimum(size, total)
    proportional = [jnp.round(n * size / jnp.maximum(total, 1)).astype(jnp.int32) for n in (negatives, positives)]
    least_negative, least_positive = jnp.minimum(min_negative, negatives), jnp.minimum(min_positive, positives)
    k_negative = jnp.where(proportional[0] <= least_negative, least_negative, proportional[0])
    few_positives = jnp.where(proportional[0] <= least_negative, size - k_negative, proportional[1]) <= least_positive
    k_negative = jnp.where(few_positives, size - least_positive, k_negative)
    return k_negative, size - k_negative


def resample_on_correct(rewards_PG: Array, valid_PG: Array, penalty_PG: Array, *, size: int, min_negative: int = 2,
                        min_positive: int = 2, key: Array | None = None) -> Array:
    """bool[P, G]: `size` rollouts of each prompt, negatives (r <= 0) and positives in about their original proportion.

    As in the published code, the positives of lowest penalty (ties: the first) and the first negatives are kept. With `key`,
    as in the paper, positives are drawn without replacement with probability proportional to 1 / penalty, negatives
    uniformly. Groups with all-equal rewards lose every rollout.
    """
    negative, positive = valid_PG & (rewards_PG <= 0), valid_PG & (rewards_PG > 0)
    def count(m):
        return jnp.sum(m, axis=1, keepdims=True, dtype=jnp.int32)
    k_negative, k_positive = kept_counts(count(negative), count(positive), size, min_negative=min_negative,
                                         min_positive=min_positive)
    bad, good = jnp.zeros_like(penalty_PG), penalty_PG
    if key is not None:  # the top k of log-weight plus Gumbel noise are a draw without replacement
        noise = jax.random.gumbel(key, (2, *penalty_PG.shape), penalty_PG.dtype)
        bad, good = -noise[0], jnp.log(penalty_PG + 1e-6) - noise[1]

    def lowest(score, among, k):
        rank = jnp.argsort(jnp.argsort(jnp.where(among, score, jnp.inf), axis=1, stable=True), axis=1)
        return among & (rank < k)

    disagree = masked.group_std(rewards_PG, valid_PG, ddof=0) > 0
    return disagree & (lowest(bad, negative, k_negative) | lowest(good, positive, k_positive))
