"""GMPO: the geometric mean of token ratios, each of which is clipped on the side of the advantage (arXiv 2507.20673)."""
import jax.numpy as jnp

from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import log_ratio


@objective
def gmpo(*, clip_low: float = 0.4, clip_high: float = 0.4) -> Objective:
    """`l_i = -A_i exp(mean_t c_t)`; `c_t = min(d_t, clip_high)` if A_i > 0, else `max(d_t, -clip_low)`; d = new - old log-prob.

    The loss is the mean of `l_i` over the live rollouts; `A_i` is the mean advantage of the rollout's tokens. The bounds are of
    log-ratios: a token's ratio counts as `exp(clip_high)` at most, or as `exp(-clip_low)` at least. A clipped token has no
    gradient and leaves that of the other tokens. The bound 0.4 is the paper's, for both sides; its equation 4 has two bounds of
    the ratio, of which these are the logarithms, and two different numbers count by the sign, as in verl and TRL. Metrics:
    `clip_fraction` of tokens, `approx_kl` = mean of old - new log-prob, `max/ratio`, the largest ratio of a token before the
    clip.
    """

    def sequence_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        advantage = masked.mean(advantages, mask, axis=-1)
        free = log_ratio(logprobs, rollouts.old_logprobs, mask)
        kept = jnp.where(advantage[..., None] > 0, jnp.minimum(free, clip_high), jnp.maximum(free, -clip_low))
        metrics = {"clip_fraction": kept != free, "max/ratio": jnp.exp(free), "approx_kl": -free}
        return {"sequence": -advantage * jnp.exp(masked.mean(kept, mask, axis=-1))}, metrics

    return token_objective(sequence_loss, reads_old=True, shares="sequence")
