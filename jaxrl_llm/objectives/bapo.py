"""BAPO: clip bounds searched per mini-batch until positive tokens supply their share of the objective (2510.18927)."""
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate
from jaxrl_llm.objectives.trust_region import dual_clip as dual_clipped
from jaxrl_llm.tools import registry

Ladder = tuple[float, float, float]
EPS = 1e-8


def candidates(low: Ladder, high: Ladder, order: str) -> np.ndarray:
    """f64[C, 2]: the (low, high) bounds in the order of the search; one bound rises to its last value, then the other."""

    def rungs(start, stop, step):
        return np.minimum(start + step * np.arange(1 + max(0, np.ceil((stop - start) / step - 1e-9))), stop)

    lows, highs = rungs(*low), rungs(*high)
    if order == "low_first":
        return np.array([(a, highs[0]) for a in lows] + [(lows[-1], b) for b in highs[1:]])
    return np.array([(lows[0], b) for b in highs] + [(a, highs[-1]) for a in lows[1:]])


def contributions(ratio: Array, advantages: Array, mask: Array, low: Array, high: Array, statistic: str) -> tuple[Array, Array]:
    """Contributions of tokens with A >= 0 and with A < 0 to the objective under two bounds, as two sums >= 0.

    `value`: sum of `A min(ratio, high)` and of `-A max(ratio, low)`. `gradient`: sums of `|A| ratio` over the tokens
    that keep a gradient under the bounds, `ratio < high` and `ratio > low`.
    """
    positive, negative = mask & (advantages >= 0), mask & (advantages < 0)
    if statistic == "value":
        gain, pull = jnp.minimum(ratio, high), jnp.maximum(ratio, low)
    else:
        gain, pull = jnp.where(ratio < high, ratio, 0), jnp.where(ratio > low, ratio, 0)
    return masked.sum(gain * advantages, positive), -masked.sum(pull * advantages, negative)


@objective
def bapo(*, target: float = 1.0, low: Ladder = (0.6, 0.8, 0.05), high: Ladder = (1.2, 2.0, 0.05), order: str = "low_first",
         statistic: str = "value", dual_clip: float = 3.0, aggregation: str = "token_mean",
         max_len: int | None = None) -> Objective:
    """`l_t = max(-A rho, -A clip(rho, low, high))`, at most `-A dual_clip` where A < 0, with searched absolute bounds.

    `low` and `high` are (first, last, step). The bounds are the first in the search at which positive tokens contribute at
    least `target` times what negative ones do (a share s is the target s / (1 - s)), else the last. `order="low_first"` is the
    released code's search, `"high_first"` the paper's (with low to 0.9 and high to 3.0). Under the code's `statistic="value"`,
    a higher low bound can only worsen the balance; `"gradient"` counts only tokens that still have a gradient. The search sees
    the whole mini-batch (`whole_batch`). The numbers are the released recipe's, whose target 1 is the paper's share of 0.5
    (order and steps of the paper: unconfirmed); its example script has target 0.5 and low from 0.8 to 0.95.
    """
    registry.one_of("order", order, ("low_first", "high_first"))
    registry.one_of("statistic", statistic, ("value", "gradient"))
    table = candidates(low, high, order)

    def token_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        ratio = token_ratio(logprobs, rollouts.old_logprobs, mask)
        bounds = jnp.asarray(table, ratio.dtype)
        positive, negative = jax.vmap(
            lambda bound: contributions(lax.stop_gradient(ratio), advantages, mask, bound[0], bound[1], statistic))(bounds)
        reached = (negative <= 0) | (positive >= target * (negative + EPS))
        chosen = jnp.where(jnp.any(reached), jnp.argmax(reached), len(table) - 1)
        loss, clipped = clipped_surrogate(ratio, advantages, 1 - bounds[chosen, 0], bounds[chosen, 1] - 1)
        loss, lower = dual_clipped(loss, advantages, dual_clip)
        share = positive[chosen] / jnp.maximum(positive[chosen] + negative[chosen], EPS)
        facts = {"bound_low": bounds[chosen, 0], "bound_high": bounds[chosen, 1], "positive_share": share}
        metrics = {name: jnp.broadcast_to(value, rollouts.valid.shape) for name, value in facts.items()}
        return loss, metrics | {"clip_fraction": clipped, "clip_fraction_lower": lower, "max/ratio": ratio}

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, whole_batch=True, reads_old=True)
