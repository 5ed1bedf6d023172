"""Rank-GRPO: in a generated ranked list every rank gets its own reward and group advantage (arXiv 2510.20150)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


def rank_rewards(hits_PGK: Array, variant: str = "log_decay") -> Array:
    """[P, G, K]: `log_decay` sum_{j >= k} hit_j / log2(j + 1), ranks from 1, the remaining DCG; `exp_inf` hit_k."""
    registry.one_of("variant", variant, ("log_decay", "exp_inf"))
    if variant == "exp_inf":
        return hits_PGK
    gains = hits_PGK / jnp.log2(jnp.arange(2, hits_PGK.shape[-1] + 2, dtype=hits_PGK.dtype))[None, None]
    return jnp.flip(jnp.cumsum(jnp.flip(gains, -1), axis=-1), -1)


@estimator
def rank_grpo(*, variant: str = "log_decay", eps: float = 1e-4, complete_bonus: float = 0.1, early_stop: float = -0.1,
              overflow: float = -0.1) -> Estimator:
    """Tokens of rank k get `(r_k - mean) / (sample std + eps)` of the `rank_rewards` at rank k over the group.

    The stop token gets no rank advantage, but `complete_bonus` after exactly K ranks and `early_stop` after fewer; every
    token of a surplus item gets `overflow`, the stop token included.
    Extras: `hits` [P, G, K] relevance of the item at each rank, 0 where missing or unparsable; `ranks` i32[P, G, T]
    rank of a token from 0 (the published code counts a separator with the item before it), K or more for surplus
    items, -1 for tokens without a rank; `eos` bool[P, G, T]. K must be smaller than T. The numbers are the published code's.
    """
    registry.one_of("variant", variant, ("log_decay", "exp_inf"))

    def advantages(rollouts):
        hits, ranks, mask = rollouts.extras["hits"], rollouts.extras["ranks"], rollouts.token_mask
        size = hits.shape[-1]
        if size >= mask.shape[-1]:
            raise ValueError(f"hits has K={size} ranks, which with a stop token do not fit into T={mask.shape[-1]}")
        rewards = rank_rewards(hits.astype(jnp.result_type(float)), variant)
        valid = jnp.broadcast_to(rollouts.valid[..., None], rewards.shape)
        centred = rewards - masked.mean(rewards, valid, axis=1, keepdims=True)
        scores = centred / (masked.std(rewards, valid, axis=1, ddof=1, keepdims=True) + eps)

        eos = rollouts.extras["eos"] & mask
        listed = (ranks >= 0) & (ranks < size)
        items = jnp.where(listed & ~eos, jnp.take_along_axis(scores, ranks, axis=-1, mode="clip"), 0)
        last = jnp.max(ranks, axis=-1, keepdims=True, where=mask, initial=-1)
        bonus = jnp.where(last == size - 1, complete_bonus, jnp.where(last < size - 1, early_stop, 0))
        return items + jnp.where(eos, bonus, 0) + jnp.where(ranks >= size, overflow, 0)

    return stateless(advantages, needs=("hits", "ranks", "eos"))
