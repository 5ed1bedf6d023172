"""Self-imitation: repeat better-than-expected actions (arXiv 1806.05635)."""
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.data.rollouts import seen_returns
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective


@objective
def sil(*, min_count: int = 64, max_nlp: float = 5.0) -> Objective:
    """`sum of w A min(-log p, max_nlp) / max(number of tokens with R > V, min_count)`, A = clip(R - V, 0, 1).

    R are the `rollouts.seen_returns`, V `extras["values"]`, w the replay buffer's importance weights
    `extras["replay_weights"]`, all f32[P, G, T]; A comes from the estimator `sil`. The bound on -log p limits only the value,
    not the gradient. The paper's entropy bonus is the term `entropy(0.01)`, which has the weights `w / max(...)` on tokens with
    R > V. The critic's loss is `value_loss`. Both numbers are those of the authors' code.
    """

    def shares(rollouts):
        better = rollouts.token_mask & (seen_returns(rollouts) > rollouts.extras["values"])
        share = rollouts.extras["replay_weights"] / jnp.maximum(masked.count(better), min_count)
        return {"better": jnp.where(better, share, 0)}

    def token_loss(logprobs, rollouts, advantages):
        bounded = lax.stop_gradient(jnp.minimum(-logprobs, max_nlp) + logprobs) - logprobs
        return {"better": advantages * bounded}, {"better_fraction": advantages > 0}

    return token_objective(token_loss, needs=("rewards", "values", "replay_weights"), extra_weights=shares, shares="better")


def value_loss(values: Array, returns: Array, replay_weights: Array, mask: Array, *, coef: float = 0.01,
               min_count: int = 64) -> Array:
    """Self-imitation's loss of the critic, differentiable in `values` [P, G, T]: it raises V towards R where R > V.

    `coef / 2 * sum of w V sg(clip(V - R, -1, 0)) / max(number of tokens with R > V, min_count)`.
    """
    count = masked.count(mask & (returns > values))
    gap = lax.stop_gradient(jnp.clip(values - returns, -1, 0))
    return coef / 2 * masked.sum(replay_weights * values * gap, mask) / jnp.maximum(count, min_count)
