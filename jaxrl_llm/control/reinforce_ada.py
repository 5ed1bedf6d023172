"""Reinforce-Ada: sample a prompt in rounds until it shows both outcomes, keep a balanced subset (arXiv 2510.04996).

Rewards are right (1) or wrong (0), in the order of their draws along the second axis; `valid` marks drawn rollouts.
"""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.tools import registry

RULES = ("balanced", "positive_focused")


def wants_more(rewards_PK: Array, valid_PK: Array, *, keep: int = 4, rule: str = "balanced", threshold: float = 0.7) -> Array:
    """bool[P]: prompts to be sampled again.

    `balanced` waits for `keep // 2` right and `keep - keep // 2` wrong rollouts, `positive_focused` for one right rollout.
    """
    right, wrong = _counts(rewards_PK, valid_PK, threshold)
    if registry.one_of("rule", rule, RULES) == "positive_focused":
        return right < 1
    return (right < keep // 2) | (wrong < keep - keep // 2)


def kept(rewards_PK: Array, valid_PK: Array, *, keep: int = 4, rule: str = "balanced", threshold: float = 0.7) -> Array:
    """bool[P, K]: at most `keep` draws of each prompt to train on, the first right and the first wrong ones.

    `balanced`: `min(keep // 2, right)` right ones, then wrong ones; missing ones are replaced by more of the other kind.
    `positive_focused`: right ones in proportion to their share, rounded up, but at least one of each kind if there is one.
    """
    registry.one_of("rule", rule, RULES)
    positive = (rewards_PK > threshold) & valid_PK
    right, wrong = _counts(rewards_PK, valid_PK, threshold)
    take = jnp.minimum(keep, right + wrong)
    if rule == "balanced":
        wanted = jnp.full_like(take, keep // 2)
    else:  # ceil(right * keep / seen) in integers: floats might round an exact quotient up
        wanted = jnp.clip(-(-right * keep // jnp.maximum(right + wrong, 1)), 1, jnp.maximum(take - 1, 1))
    first = jnp.clip(wanted, take - jnp.minimum(take, wrong), jnp.minimum(take, right))
    order = jnp.where(positive, jnp.cumsum(positive, 1), jnp.cumsum(valid_PK & ~positive, 1))
    return valid_PK & (order <= jnp.where(positive, first[:, None], (take - first)[:, None]))


def _counts(rewards_PK, valid_PK, threshold):
    """i32[P] each: right and wrong rollouts so far."""
    positive = rewards_PK > threshold
    return (jnp.sum(positive & valid_PK, 1, dtype=jnp.int32), jnp.sum(~positive & valid_PK, 1, dtype=jnp.int32))
