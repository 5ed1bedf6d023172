"""AReaL's decoupled PPO: the trust region is around the step's first policy, not the sampling one (arXiv 2505.24298)."""
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.corrections import bounded, importance
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate
from jaxrl_llm.objectives.trust_region import dual_clip as dual_clipped
from jaxrl_llm.tools import registry


def interpolated_logprobs(logprobs: Array, behavior_logprobs: Array, sampled: Array, current: Array) -> Array:
    """Proximal log-probs without a forward pass, detached, [P, G, T]: `behavior + alpha (logprobs - behavior)`.

    `alpha = clamp((v - 1 - v_b) / (v - v_b), 0, 1)`, 0 where v <= v_b or v_b < 0 (no known version), with the versions
    v = `current` (broadcast) and v_b = `sampled` i32[P, G, T]. This would be the policy one version ago if the log-prob
    drifted by a constant amount per version.
    """
    age = current - sampled
    alpha = jnp.clip((age - 1) / jnp.maximum(age, 1).astype(logprobs.dtype), 0, 1)
    alpha = jnp.where(sampled >= 0, alpha, 0)
    return lax.stop_gradient(behavior_logprobs + alpha * (logprobs - behavior_logprobs))


@objective
def areal_decoupled_ppo(*, level: str = "token", bound: str | None = "mask", min_ratio: float = 0.0, max_ratio: float = 5.0,
                        clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None, proximal: str = "old",
                        aggregation: str = "token_mean", max_len: int | None = None) -> Objective:
    """`l_t = w max(-A u, -A clip(u, 1 - clip_low, 1 + clip_high))`, u = exp(new - proximal log-prob).

    `w = exp(proximal - behaviour log-prob)`, detached, per token or (`level="sequence"`) its geometric mean over the
    completion; outside [min_ratio, max_ratio] it is 0 (`bound="mask"`; the token stays in the denominator), clamped
    (`"clip"`) or left alone (None). The proximal policy is `old_logprobs`, recomputed with the weights at the start of
    the step, or with `proximal="interpolated"` an estimate that needs `policy_version` and
    extras["current_version"] i32[P], the version being trained. The clip range is the paper's, `max_ratio` AReaL's
    documented cap; AReaL's code has no weight without a bound.
    """
    registry.one_of("level", level, ("token", "sequence"))
    registry.one_of("proximal", proximal, ("old", "interpolated"))
    if bound is not None:
        registry.one_of("bound", bound, ("mask", "clip"))

    def token_loss(logprobs, rollouts, advantages):
        mask, behavior, near = rollouts.token_mask, rollouts.behavior_logprobs, rollouts.old_logprobs
        if proximal == "interpolated":
            version = rollouts.extras["current_version"][:, None, None]
            near = interpolated_logprobs(logprobs, behavior, rollouts.policy_version, version)
        ratio = importance(near, behavior, mask, "geometric" if level == "sequence" else "token")
        weight = bounded(ratio, bound, min_ratio, max_ratio)
        moved = token_ratio(logprobs, near, mask)
        loss, clipped = clipped_surrogate(moved, advantages, clip_low, clip_high)
        metrics = {"mask_fraction": weight == 0, "clip_fraction": clipped, "max/ratio": moved, "max/weight": weight}
        if dual_clip is not None:
            loss, metrics["clip_fraction_lower"] = dual_clipped(loss, advantages, dual_clip)
        return weight * loss, metrics

    source = ("old_logprobs",) if proximal == "old" else ("policy_version", "current_version")
    return token_objective(
        token_loss, aggregation=aggregation, max_len=max_len, needs=("behavior_logprobs", *source),
        reads_old=proximal == "old", unknown="old")
