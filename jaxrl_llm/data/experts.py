"""Tokens written by an expert and not by the policy: `extras["expert"]`, bool[P, G] or bool[P, G, T]."""
from jax import Array

from jaxrl_llm.data.rollouts import Rollouts


def expert_tokens(rollouts: Rollouts) -> Array:
    """bool[P, G, T]: trained tokens that were copied from an expert (whole rollouts, or the beginnings of some)."""
    expert = rollouts.extras["expert"]
    return rollouts.token_mask & (expert[..., None] if expert.ndim == 2 else expert)


def expert_rollouts(rollouts: Rollouts) -> Array:
    """bool[P, G]: valid rollouts that hold any expert token."""
    expert = rollouts.extras["expert"]
    return rollouts.valid & (expert if expert.ndim == 2 else expert_tokens(rollouts).any(axis=-1))
