"""PPO's surrogate with bounded importance weights and rejection for a sampler that is not the trainer's old policy.

Truncated and masked importance sampling: arXiv 2505.24034, 2509.23866, and the rollout corrections of current trainers.
"""
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.rollouts import Rollouts, clean
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.aggregation import token_weights
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.corrections import BOUNDS, LEVELS, bounded, effective_share, importance
from jaxrl_llm.objectives.ratios import log_ratio, token_ratio
from jaxrl_llm.objectives.trust_region import check_dual_clip, clipped_surrogate, inside
from jaxrl_llm.objectives.trust_region import dual_clip as dual_clipped
from jaxrl_llm.tools import registry

SCOPES = {
    "token": lambda x, mask: x,
    "seq_sum": lambda x, mask: masked.sum(x, mask, axis=-1, keepdims=True),
    "seq_mean": lambda x, mask: masked.mean(x, mask, axis=-1, keepdims=True),
    "seq_max": lambda x, mask: masked.max(x, mask, axis=-1, initial=0)[..., None],
}
STATISTICS = {"k1": lambda d: -d, "k2": lambda d: d**2 / 2, "k3": lambda d: jnp.expm1(d) - d}
REJECTIONS = tuple(f"{scope}_{k}" for scope in SCOPES for k in STATISTICS if (scope, k) != ("seq_max", "k1"))
NEEDS = ("old_logprobs", "behavior_logprobs")


def correction(rollouts: Rollouts, level: str, bound: str, low: float, high: float) -> Array:
    """[P, G, T] weights `w` of `d = old - behaviour log-prob`: `corrections.importance` at `level`, then `bounded`.

    `bound="seq_mask"` keeps the raw token weights of rollouts whose geometric mean is in [low, high], else 0.
    """
    policies = rollouts.old_logprobs, rollouts.behavior_logprobs, rollouts.token_mask
    if bound == "seq_mask":
        return jnp.where(inside(importance(*policies, "geometric"), low, high), importance(*policies), 0)
    return bounded(importance(*policies, level), bound, low, high)


def accepted(rollouts: Rollouts, reject: str, low: float, high: float) -> Array:
    """bool[P, G, T]: where the statistic of `d = old - behaviour log-prob` is within bounds.

    `k1 = -d` must be in [log low, log high], so the bounds are on the inverse ratio; `k2 = d^2 / 2` and `k3 = exp(d) - d - 1`
    must be at most `high`. `token_k..` judges tokens; `seq_sum_`, `seq_mean_` and `seq_max_` whole rollouts by that reduction.
    """
    mask = rollouts.token_mask
    scope, k = reject.rsplit("_", 1)
    d = log_ratio(rollouts.old_logprobs, rollouts.behavior_logprobs, mask)
    value = SCOPES[scope](STATISTICS[k](d), mask)
    keep = inside(value, jnp.log(low), jnp.log(high)) if k == "k1" else value <= high
    return jnp.broadcast_to(keep, mask.shape)


class _Corrected(NamedTuple):
    """The numbers of `tis_mis` that weigh and drop tokens; `low`, `high` and those of `reject` are bounds."""

    level: str
    bound: str
    low: float
    high: float
    normalise: bool
    reject: str | None
    reject_low: float | None
    reject_high: float | None
    veto: float | None
    denominator: str


def _weighed(part: _Corrected, rollouts: Rollouts) -> tuple[Array, Array]:
    """`(weights f32[P, G, T], tokens kept bool[P, G, T])`"""
    weight, keep = correction(rollouts, part.level, part.bound, part.low, part.high), rollouts.token_mask
    if part.reject is not None:
        assert part.reject_high is not None
        keep &= accepted(rollouts, part.reject, 1 / part.reject_high if part.reject_low is None else part.reject_low,
                         part.reject_high)
    if part.veto is not None:
        ratio = importance(rollouts.old_logprobs, rollouts.behavior_logprobs, rollouts.token_mask)
        keep &= ~jnp.any(rollouts.token_mask & (ratio < part.veto), axis=-1, keepdims=True)
    return weight, keep


def _shares(part: _Corrected, aggregation: str, max_len: int | None, rollouts: Rollouts) -> dict[str, Array]:
    """Arrays that depend on the whole mini-batch: each token's share of the loss, weight included, and the ESS."""
    rollouts = clean(rollouts, *NEEDS)
    mask, (weight, keep) = rollouts.token_mask, _weighed(part, rollouts)
    counted = token_weights(rollouts.replace(mask=keep) if part.denominator == "kept" else rollouts, aggregation, max_len)
    share = jnp.where(keep, counted * weight, 0)
    if part.normalise:
        by_token = part.level == "token" or part.bound == "seq_mask"
        mean = masked.mean(weight, mask) if by_token else masked.mean(masked.mean(weight, mask, axis=-1), rollouts.live)
        share = share / jnp.where(mean > 1e-8, mean, 1)
    raw = importance(rollouts.old_logprobs, rollouts.behavior_logprobs, mask)
    ess = effective_share(jnp.clip(raw, 1 / part.high, part.high), mask)
    return {"corrected": share, "counted": counted, "ess": jnp.broadcast_to(ess, rollouts.valid.shape)}


@objective
def tis_mis(*, level: str = "token", bound: str = "truncate", min_ratio: float | None = None, max_ratio: float = 2.0,
            normalise: bool = False, reject: str | None = None, reject_min: float | None = None,
            reject_max: float | None = None, veto: float | None = None, denominator: str = "kept", clip_low: float = 0.2,
            clip_high: float = 0.2, dual_clip: float | None = None,
            aggregation: str = "token_mean", max_len: int | None = None) -> Objective:
    """`l_t = w_t max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))`, rho = exp(new - old log-prob).

    `w` is `correction(level, bound, min_ratio, max_ratio)`; a lower bound defaults to 1 / upper bound. `normalise`
    divides it by its mean over the mini-batch (token level: over tokens; else over live rollouts). `reject` drops
    tokens or rollouts by `accepted(reject, reject_min, reject_max)`, and `veto` drops rollouts that have a token with
    `exp(old - behaviour) < veto`. Dropped ones leave the loss, and with `denominator="kept"` its denominator and its
    terms too, as if they had never been in the mask. Tokens of weight 0 stay in both. `dual_clip` c > 1 bounds the
    surrogate of negative advantages by `-A c`, before the weight.
    Metric `ess_share`: effective sample size per token, of the token weights clamped to [1 / max_ratio, max_ratio],
    hence always near 1 if max_ratio is near 1.
    `max_ratio=2` and the kept denominator are verl's; TRL has 3 and masks whole rollouts, AReaL and slime keep the
    original denominator.
    """
    registry.one_of("level", level, LEVELS)
    registry.one_of("bound", bound, (*BOUNDS, "seq_mask"))
    registry.one_of("denominator", denominator, ("kept", "original"))
    check_dual_clip(dual_clip)
    if reject is not None:
        registry.one_of("reject", reject, REJECTIONS)
        if reject_max is None:
            raise ValueError(f"reject={reject!r} needs reject_max, the largest ratio (k1) or k2, k3 to keep")
    part = _Corrected(level, bound, 1 / max_ratio if min_ratio is None else min_ratio, max_ratio, normalise, reject,
                      reject_min, reject_max, veto, denominator)
    shares = functools.partial(_shares, part, aggregation, max_len)

    def token_loss(logprobs, rollouts, advantages):
        whole = shares(rollouts) if rollouts.loss_weights is None else rollouts.loss_weights
        ratio = token_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        loss, clipped = clipped_surrogate(ratio, advantages, clip_low, clip_high)
        weight, keep = _weighed(part, rollouts)
        terms = {"corrected": loss}
        metrics = {"weight": weight, "kept_fraction": keep & (weight > 0), "ess_share": whole["ess"],
                   "clip_fraction": clipped, "max/ratio": ratio}
        if dual_clip is not None:
            terms["corrected"], metrics["clip_fraction_lower"] = dual_clipped(loss, advantages, dual_clip)
        return terms, metrics

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=NEEDS, extra_weights=shares,
                           reads_old=True, shares="counted", unknown="old")
