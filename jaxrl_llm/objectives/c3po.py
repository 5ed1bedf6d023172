"""C3PO: an update of a fixed number of tokens, each of the same weight (arXiv 2506.14731)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate


def within_budget(mask_PGT: Array, budget: int, *, truncate: bool = True) -> Array:
    """bool[P, G, T]: the first `budget` trained tokens, counted rollout by rollout; all tokens if there are fewer.

    Rollouts are visited in the order of sampling, the first of every prompt before the second, so that no length is favoured.
    The last one is cut at the budget; without `truncate` it is kept whole.
    """
    counts = masked.count(mask_PGT, axis=2, dtype=jnp.int32).T  # [G, P], in the order of visits
    before = (jnp.cumsum(counts.ravel(), dtype=jnp.int32) - counts.ravel()).reshape(counts.shape).T
    room = (budget - before)[..., None]
    place = jnp.cumsum(mask_PGT, axis=2, dtype=jnp.int32)
    return mask_PGT & (place <= room if truncate else room > 0)


@objective
def c3po(*, budget: int = 409_600, truncate: bool = True, clip_low: float = 0.2, clip_high: float = 0.2) -> Objective:
    """`sum over the tokens within_budget of max(-A rho, -A clip(rho)) / budget`; terms have the same tokens and divisor.

    The divisor is the budget even if there are fewer tokens. Advantages come from all rollouts; rollouts beyond the budget are
    dropped from the loss. The budget is the paper's, per update; it should be a little below the tokens of a batch. The order
    of the rollouts and the cut of the last one are our reading: the paper does not say. Metrics: `clip_fraction`,
    `trained` (the share of tokens within the budget), `max/ratio`. Raises ValueError: a budget below one token.
    """
    if budget < 1:
        raise ValueError(f"budget={budget} tokens of an update; give 1 or more")

    def chosen(rollouts: Rollouts):
        mask = rollouts.token_mask
        return {"budget": jnp.where(within_budget(mask, budget, truncate=truncate), jnp.ones(mask.shape) / budget, 0)}

    def token_loss(logprobs, rollouts, advantages):
        ratio = token_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        share = chosen(rollouts) if rollouts.loss_weights is None else rollouts.loss_weights
        metrics = {"clip_fraction": clipped, "trained": share["budget"] > 0, "max/ratio": ratio}
        return {"budget": loss}, metrics

    return token_objective(token_loss, extra_weights=chosen, reads_old=True, shares="budget")
