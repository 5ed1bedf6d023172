"""R2VPO: a penalty on the ratio's second moment around 1 instead of clipping (arXiv 2601.03320)."""
import jax.numpy as jnp

from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.corrections import ANCHORS, anchor_logprobs
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.tools import registry


@objective
def r2vpo(*, multiplier: float = 0.04, variance_bound: float = 0.01, dual_rate: float = 0.1,
          max_multiplier: float | None = None, anchor: str = "old", aggregation: str = "token_mean",
          max_len: int | None = None) -> Objective:
    """`l_t = -(rho A - lambda (rho - 1)^2)`, the Lagrangian of max E[rho A] with `E[(rho - 1)^2] <= variance_bound`.

    The gradient is that of a surrogate with advantage `A - 2 lambda (rho - 1)`. The state is lambda; after each update
    `lambda <- max(0, lambda + dual_rate (V - variance_bound))`, at most `max_multiplier`. V is the mean of `(rho - 1)^2`
    over the mini-batch's tokens, so the mini-batch is not split (`whole_batch`) unless `dual_rate` is 0.
    `anchor="behavior"` is for replayed rollouts.
    Reconstructed; the paper's lambda, bound and rate are not known: 0.04 is a reimplementation's, the others are our
    choice.
    """
    registry.one_of("anchor", anchor, ANCHORS)
    if max_multiplier is not None and max_multiplier < multiplier:
        raise ValueError(f"max_multiplier={max_multiplier} must be at least multiplier={multiplier}, where it starts")

    def token_loss(logprobs, rollouts, advantages, lagrange):
        ratio = token_ratio(logprobs, anchor_logprobs(rollouts, anchor), rollouts.token_mask)
        distance = (ratio - 1) ** 2
        metrics = {"ratio_variance": distance, "multiplier": jnp.broadcast_to(lagrange, rollouts.valid.shape),
                   "max/ratio": ratio}
        return lagrange * distance - ratio * advantages, metrics

    penalised = token_objective(
        token_loss, aggregation=aggregation, max_len=max_len, init=lambda: jnp.float32(multiplier),
        needs=("behavior_logprobs",) if anchor == "behavior" else (), whole_batch=dual_rate != 0, reads_old=anchor == "old",
        unknown="old")

    def update(logprobs, rollouts, advantages, lagrange):
        loss, (metrics, lagrange) = penalised.update(logprobs, rollouts, advantages, lagrange)
        step = dual_rate * (metrics["ratio_variance"] - variance_bound)
        return loss, (metrics, jnp.clip(lagrange + step, 0, max_multiplier).astype(lagrange.dtype))

    return penalised._replace(update=update) if dual_rate else penalised
