"""SPEAR's selection of groups to train on and of rollouts to store (arXiv 2509.22601)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Filter, prompt_filter
from jaxrl_llm.maths import masked


def admit(advantages_PG: Array, valid_PG: Array) -> Array:
    """bool[P, G]: fresh rollouts that enter the replay buffer, those with A > 0."""
    return valid_PG & (advantages_PG > 0)


def keep_groups(rewards_PG: Array, valid_PG: Array, *, share: float = 0.75) -> Array:
    """bool[P]: the ceil(share * prompts) prompts of largest reward std, among those with a std above 0; ties by position."""
    spread = masked.std(rewards_PG, valid_PG, axis=1, ddof=0)
    rank = jnp.argsort(jnp.argsort(-spread))
    return (spread > 0) & (rank < jnp.ceil(share * masked.count(jnp.any(valid_PG, axis=1))))


@prompt_filter
def spear_clip(*, share: float = 0.75) -> Filter:
    """The prompts of largest reward std, see `keep_groups`; the others are not replaced."""
    return Filter(lambda rollouts: keep_groups(rollouts.rewards, rollouts.valid, share=share), refills=False)
