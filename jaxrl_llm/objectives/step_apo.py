"""Step-APO: DPO between sibling steps with a margin equal to their difference in value (CPL, arXiv 2409.08642)."""
import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective


def sibling_pairs(values_PG: Array, final_P: Array, live_PG: Array) -> Array:
    """bool[P, G, G]: child i of node p is preferred to child j.

    All pairs with value_i > 0 > value_j count; where `final` (the children are whole answers), only the pair of the best
    and the worst child, if it is such a pair.
    """
    positive, negative = live_PG & (values_PG > 0), live_PG & (values_PG < 0)
    rows = jnp.arange(values_PG.shape[-1])[None]
    best = positive & (rows == jnp.argmax(jnp.where(live_PG, values_PG, -jnp.inf), axis=1, keepdims=True))
    worst = negative & (rows == jnp.argmin(jnp.where(live_PG, values_PG, jnp.inf), axis=1, keepdims=True))
    final = final_P[:, None].astype(bool)
    preferred, rejected = jnp.where(final, best, positive), jnp.where(final, worst, negative)
    return preferred[:, :, None] & rejected[:, None, :]


def _pairs(rollouts: Rollouts) -> Array:
    return sibling_pairs(rollouts.rewards, rollouts.extras["final"], rollouts.live)


@objective
def step_apo(*, beta: float = 0.3, alpha: float = 1.0, final_scale: float = 0.3, label_smoothing: float = 0.0) -> Objective:
    """Mean over pairs of `-log sigmoid(m)`, `m = beta * (d_i - d_j) - alpha * (q_i - q_j)`; advantages are not used.

    `d` is the sum over the step's tokens of new - reference log-prob, `q` the value of the step; the value of the
    common parent cancels in the difference of advantages. The P axis holds the nodes of a search tree, the G axis their
    children, and `sibling_pairs` selects the pairs. Where `final`, q is multiplied by `final_scale`. `label_smoothing` s:
    `(1 - s) l(m) + s l(-m)`. `alpha=0` is Step-DPO. Metrics: `margin`, mean of `beta * (d_i - d_j)` over the pairs that a
    row wins, `accuracy`, share of them above 0, both 0 for rows that win none; `paired`, the share of rows that win some.
    `rewards` [P, G]: q in [-1, 1]; children without a usable step have `valid` False. Extras: `final` bool[P]. `beta`,
    `alpha` and `final_scale` are those of the published code.
    """

    def pair_weights(rollouts):
        n = masked.count(_pairs(rollouts))
        return {"pairs": jnp.where(rollouts.live, 1 / jnp.maximum(n, 1), 0)}

    def pair_loss(logprobs, rollouts, advantages):
        pairs, q = _pairs(rollouts), rollouts.rewards
        q = q * jnp.where(rollouts.extras["final"].astype(bool), final_scale, 1.0)[:, None]
        d = masked.sum(logprobs - rollouts.ref_logprobs, rollouts.token_mask, axis=-1)
        gap = beta * (d[:, :, None] - d[:, None, :])
        margin = gap - alpha * (q[:, :, None] - q[:, None, :])
        loss = (1 - label_smoothing) * jax.nn.softplus(-margin) + label_smoothing * jax.nn.softplus(margin)
        metrics = {"margin": masked.mean(gap, pairs, axis=-1), "paired": jnp.any(pairs, axis=-1),
                   "accuracy": masked.mean((gap > 0).astype(gap.dtype), pairs, axis=-1)}
        return {"pairs": masked.sum(loss, pairs, axis=-1)}, metrics

    return token_objective(pair_loss, needs=("rewards", "ref_logprobs", "final"), extra_weights=pair_weights,
                           shares="sequence")
