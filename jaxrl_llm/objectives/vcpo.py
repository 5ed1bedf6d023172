"""VCPO: sequence weights for stale data; steps shrink with their effective sample size (arXiv 2602.17616)."""
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.corrections import effective_share
from jaxrl_llm.objectives.ratios import sequence_ratio


@objective
def vcpo(*, max_ratio: float = 8.0, ess_base: float = 1.0, exponent: float = 0.5, truncate_ess: bool = False,
         aggregation: str = "seq_mean_token_mean", max_len: int | None = None) -> Objective:
    """`l_t = -min(w_i, max_ratio) A_t log p_t`, `w_i = stop_gradient(exp(sum_t (new - behaviour log-prob)))`.

    Metric `ess_share`: (sum w)^2 / (n sum w^2) over the live rollouts of the mini-batch, with untruncated w, or under
    `truncate_ess`, an option of the released code, with min(w, max_ratio). Metric `step_scale`:
    `min(1, ess_share / ess_base)^exponent`, by which `learning.step.advance` multiplies the learning rate of this update;
    scaling the loss would have no effect under Adam. Both need the mini-batch unsplit (`whole_batch`). The numbers are the
    released code's, which also offers `exponent=1`.
    """

    def token_loss(logprobs, rollouts, advantages):
        ratio = lax.stop_gradient(
            sequence_ratio(logprobs, rollouts.behavior_logprobs, rollouts.token_mask, length_normalised=False))
        share = effective_share(jnp.minimum(ratio, max_ratio) if truncate_ess else ratio, rollouts.live)
        scale = jnp.minimum(share / ess_base, 1) ** exponent
        metrics = {name: jnp.broadcast_to(x, ratio.shape) for name, x in (("ess_share", share), ("step_scale", scale))}
        metrics |= {"truncated_fraction": ratio > max_ratio, "max/ratio": ratio}
        return -jnp.minimum(ratio, max_ratio)[..., None] * advantages * logprobs, metrics

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=("behavior_logprobs",), whole_batch=True,
                           unknown="old")
