"""LUFFY: expert tokens enter the policy gradient with a shaped probability instead of the ratio (arXiv 2504.14945)."""
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.experts import expert_tokens
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate
from jaxrl_llm.tools import registry

SHAPINGS = ("rational", "none", "sqrt", "log", "none_plus_log", "target")


def probability(logprobs: Array, mask: Array) -> Array:
    """`exp(logprobs)` as the ratio to a behaviour probability of 1: clamped like every ratio, 1 outside the mask."""
    return token_ratio(logprobs, jnp.zeros_like(logprobs), mask)


def mixed_policy(expert_weight: Callable[[Array, Rollouts], Array], *, clip_low: float, clip_high: float, aggregation: str,
                 max_len: int | None, needs: tuple[str, ...]) -> Objective:
    """`-A rho` (clipped) on own tokens, `-A * expert_weight(logprobs, rollouts)` on the expert's."""

    def token_loss(logprobs, rollouts, advantages):
        expert = expert_tokens(rollouts)
        ratio = token_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        own, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        weight = expert_weight(logprobs, rollouts)
        metrics = {"clip_fraction": clipped & ~expert, "expert_fraction": expert, "max/ratio": jnp.where(expert, 0, ratio)}
        return jnp.where(expert, -advantages * weight, own), metrics

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=("expert", *needs), reads_old=True)


@objective
def luffy(*, shaping: str = "rational", gamma: float = 0.1, log_coef: float = 0.1, off_min: float = 0.0,
          off_max: float = math.inf, clip_low: float = math.inf, clip_high: float = math.inf,
          aggregation: str = "fixed_length", max_len: int | None = None) -> Objective:
    """Own tokens: `l = -A rho`; expert tokens: `l = -A f(p)`, p = exp(logprobs), `f(p) = p / (p + gamma)`.

    The gradient of f with respect to log p, `gamma p / (p + gamma)^2`, is largest at p = gamma, so rare expert tokens
    still learn. Other `shaping`: `none` p, `sqrt` p^0.5, `log` log p, `none_plus_log` p + log_coef * log p, `target`
    p / (expert probability + 1e-6) with `extras["expert_logprobs"]`. f is clipped to [off_min, off_max] (no gradient
    beyond; `log` needs off_min=-inf). By default, as in the authors' code, gamma is 0.1 and no ratio is clipped (if one is,
    to 1 +- 0.2). The published loss is a sum over the micro-batch divided by its padded length; `fixed_length` with the
    generation budget also divides by the number of rollouts and is independent of batch size and padding.
    """
    registry.one_of("shaping", shaping, SHAPINGS)

    def expert_weight(logprobs, rollouts):
        prob = probability(logprobs, rollouts.token_mask)
        weight = {
            "rational": lambda: prob / (prob + gamma),
            "none": lambda: prob,
            "sqrt": lambda: jnp.sqrt(prob),
            "log": lambda: logprobs,
            "none_plus_log": lambda: prob + log_coef * logprobs,
            "target": lambda: prob / (jnp.exp(rollouts.extras["expert_logprobs"]) + 1e-6),
        }[shaping]()
        return jnp.clip(weight, off_min, off_max)

    return mixed_policy(expert_weight, clip_low=clip_low, clip_high=clip_high, aggregation=aggregation, max_len=max_len,
                        needs=("expert_logprobs",) if shaping == "target" else ())
