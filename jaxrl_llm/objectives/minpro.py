"""MinPRO: the prefix's importance ratio replaced by the smallest token ratio in it (arXiv 2601.22718)."""
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.corrections import carried
from jaxrl_llm.objectives.ratios import log_ratio, prefix_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate
from jaxrl_llm.tools import registry


def smallest_before(log_ratios: Array, mask: Array) -> Array:
    """[P, G, T]: the minimum of `log_ratios` over the trained tokens before each token, 0 if there are none."""
    running = lax.cummin(jnp.where(mask, log_ratios, jnp.inf), axis=2)
    before = jnp.pad(running[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=jnp.inf)
    return jnp.where(jnp.isfinite(before), before, 0)


@objective
def minpro(*, include_current: bool = True, embed: str = "detached", cap: float | None = None, clip_low: float = 0.2,
           clip_high: float = 0.28, aggregation: str = "token_mean", max_len: int | None = None) -> Objective:
    """`l_t = -stop_gradient(min(w_t, cap)) A_t log p_t`, `w_t = rho_t min_{j<t} rho_j`, rho = new / sampling policy.

    The first token has `w = rho`. `w_t` is at most the square of the largest ratio, however long the completion, where
    the exact product explodes; one token with a vanishing ratio silences all tokens after it. Reconstructed from the
    paper's abstract, which leaves two things open: `include_current=False` drops the factor `rho_t`, and
    `embed="ppo_clip"` clips `w_t` in PPO's surrogate, through which the token's own log-prob is differentiated. The
    paper's numbers are unconfirmed; the defaults are our choice.
    """
    registry.one_of("embed", embed, ("detached", "ppo_clip"))

    def token_loss(logprobs, rollouts, advantages):
        mask, behavior = rollouts.token_mask, rollouts.behavior_logprobs
        log_rho = lax.stop_gradient(log_ratio(logprobs, behavior, mask))
        prefix = smallest_before(log_rho, mask)
        weight = jnp.minimum(jnp.exp(prefix + log_rho if include_current else prefix), jnp.inf if cap is None else cap)
        metrics = {"weight": weight, "max/ratio": jnp.exp(log_rho), "max/prefix_ratio": prefix_ratio(logprobs, behavior, mask)}
        if embed == "detached":
            return -weight * advantages * logprobs, metrics
        loss, metrics["clip_fraction"] = clipped_surrogate(carried(weight, logprobs), advantages, clip_low, clip_high)
        return loss, metrics

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=("behavior_logprobs",), unknown="old")
