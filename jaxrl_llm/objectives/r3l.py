"""R3L: policy gradient on the parts of a rollout and its retry that differ (arXiv 2601.03715)."""
from jax import Array

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.objectives.aggregation import token_weights
from jaxrl_llm.objectives.base import Objective, objective, token_objective


def pivotal_mask(rollouts: Rollouts) -> Array:
    """bool[P, G, T]: trained tokens from the rollout's step `extras["retry_step"]` on (i32[P, G], 0 = all).

    `step_ids` number the model's own turns from 0. A base rollout and its retry share the steps before the retry, which
    therefore get no credit in either.
    """
    return rollouts.token_mask & (rollouts.step_ids >= rollouts.extras["retry_step"][..., None])


@objective
def r3l(*, tau: float = 1.0) -> Objective:
    """`-A log p / (1 + tau)`, mean over the pivotal tokens of the batch.

    There is no ratio and no clipping, although retries are off-policy. `tau` is that of the authors' code, whose KL
    term is `kl(0, estimator=k2)`.
    """

    def shares(rollouts):
        return {"pivotal": token_weights(rollouts.replace(mask=pivotal_mask(rollouts)), "token_mean")}

    def token_loss(logprobs, rollouts, advantages):
        loss, metrics = -advantages * logprobs / (1 + tau), {"pivotal_fraction": pivotal_mask(rollouts)}
        return {"pivotal": loss}, metrics

    return token_objective(token_loss, extra_weights=shares, shares="pivotal",
                           needs=("retry_step", "step_ids"))
