"""GDPO: with several rewards, normalise each one inside the group before adding them up (arXiv 2601.05242)."""
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


def decoupled_sum(rewards_PGK: Array, valid_PG: Array, weights: Sequence[float], *, eps: float) -> Array:
    """`S = sum_k w_k * (group z-score of reward k)`, [P, G]."""
    scores = jax.vmap(lambda column: group_z_score(column, valid_PG, eps=eps), in_axes=2, out_axes=2)(rewards_PGK)
    return jnp.einsum("pgk,k->pg", scores, jnp.asarray(weights, scores.dtype))


@estimator
def gdpo(*, weights: Sequence[float] | None = None, conditions: Sequence[tuple[int, int, float]] = (), whiten: str = "seq",
         eps: float = 1e-4, whiten_eps: float = 1e-4) -> Estimator:
    """`A = (S - mean S) / (std S + whiten_eps)` over the batch, `S = sum_k w_k * (group z-score of component k)`.

    Reads `reward_components` [P, G, K], NaN counting as 0. `weights` (default: all 1) needs K entries. Each of `conditions`,
    `(easy, hard, threshold)`, makes the easy component 0 where the hard one is below the threshold. `whiten`: `seq` over the
    valid rollouts (sample std), `token` over all tokens with 1e-8 inside the root, or `none`. Whitening keeps the scale from
    growing with K; with K = 1 there is no whitening, which is GRPO. An all-equal component adds 0 to S. Raises ValueError if
    the number of weights is not K. Both eps are those of the authors' fork of TRL; their fork of verl has 1e-6 for `eps`.
    """
    registry.one_of("whiten", whiten, ("seq", "token", "none"))

    def advantages(rollouts):
        given = rollouts.reward_components
        parts = given = jnp.where(jnp.isnan(given), 0, given)
        for easy, hard, threshold in conditions:
            parts = parts.at[..., easy].set(jnp.where(given[..., hard] >= threshold, parts[..., easy], 0))
        K = parts.shape[-1]
        w = (1.0,) * K if weights is None else weights
        if len(w) != K:
            raise ValueError(f"gdpo got {len(w)} weights for {K} reward components; give one weight per component")
        total = decoupled_sum(parts, rollouts.valid, w, eps=eps)
        if K == 1 or whiten == "none":
            return total
        if whiten == "token":
            return masked.whiten(masked.to_tokens(total, rollouts.token_mask), rollouts.token_mask, eps=1e-8, ddof=1)
        centred = total - masked.mean(total, rollouts.valid, keepdims=True)
        return centred / (masked.std(total, rollouts.valid, ddof=1, keepdims=True) + whiten_eps)

    return stateless(advantages, needs=("reward_components",))
