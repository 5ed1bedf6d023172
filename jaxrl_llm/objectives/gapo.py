"""GAPO: the upper clip of a right completion is wider, the fewer of its group are right (arXiv 2609.00444)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.objectives.base import Objective, objective, token_objective
from jaxrl_llm.objectives.gspo import LOG_LIMIT
from jaxrl_llm.objectives.ratios import log_ratio, sequence_ratio, token_ratio
from jaxrl_llm.objectives.trust_region import clipped_surrogate
from jaxrl_llm.tools.registry import Conflict

_CUT = Conflict(("sizes",), "{part} counts the right completions of a prompt, and {0[0]} gives prompts unequal numbers of "
                "rollouts, which are cut into rows", "leave out one of them")


def upper_clip(rollouts: Rollouts, clip_low: float | Array, clip_high: float | Array) -> Array:
    """f[P, G]: `clip_low + (clip_high - clip_low) (n - c) / (n - 1)` for right rollouts, c of the prompt's n; else `clip_low`.

    From `clip_high` for the only right one to `clip_low` where all are right; a group of one has `clip_high`.
    """
    right = rollouts.correct & rollouts.valid
    n, c = masked.group_count(rollouts.valid), masked.group_count(right)
    rare = jnp.where(n > 1, (n - c) / jnp.maximum(n - 1, 1), 1)
    return clip_low + (clip_high - clip_low) * jnp.where(right, rare, 0).astype(rollouts.rewards.dtype)


@objective(conflicts=(_CUT,))
def gapo(*, clip_low: float = 3e-3, clip_high: float = 5e-3) -> Objective:
    """`l_i = max(-A_i s_i, -A_i clip(s_i, 1 - clip_low, 1 + e_i))`, `s_i = exp(mean_t (new - old log-prob))`.

    `e_i` of `upper_clip`: of n rollouts of a prompt, c of them right (`Rollouts.correct`), a right one has
    `e_i = clip_low + (clip_high - clip_low) (n - c) / (n - 1)`, a wrong one `clip_low`. The best ratio within a KL ball around
    the old policy grows with the advantage, which for rewards of 0 and 1 is `(n - c) / n` without division by a deviation: the
    estimator `dr_grpo` has it. The loss is the mean of `l_i` over the live rollouts, `A_i` the mean advantage of the tokens.

    The method is reconstructed from secondary accounts and from a reimplementation on TRL (the recipe `adaptive-clip` of
    zeroproof), which agree on `e_i`. The numbers, which are those for Qwen2.5-Math-1.5B and Llama-3.2-3B, are from secondary
    accounts alone: the reimplementation has the ratios and the numbers of `gapo_token`.

    Metrics: `clip_high`, the mean of `e_i`, and those of `gspo`.
    """

    def sequence_loss(logprobs, rollouts, advantages):
        mask = rollouts.token_mask
        bound = upper_clip(rollouts, clip_low, clip_high)
        ratio = sequence_ratio(logprobs, rollouts.old_logprobs, mask, limit=LOG_LIMIT)
        loss, clipped = clipped_surrogate(ratio, masked.mean(advantages, mask, axis=-1), clip_low, bound)
        drift = -log_ratio(logprobs, rollouts.old_logprobs, mask)
        return {"sequence": loss}, {"clip_fraction": clipped, "clip_high": bound, "max/ratio": ratio, "approx_kl": drift}

    return token_objective(sequence_loss, needs=("rewards",), reads_old=True, shares="sequence")


@objective(conflicts=(_CUT,))
def gapo_token(*, clip_low: float = 0.2, clip_high: float = 0.28, aggregation: str = "token_mean",
               max_len: int | None = None) -> Objective:
    """`l_t = max(-A rho_t, -A clip(rho_t, 1 - clip_low, 1 + e_i))`: the bound of `gapo` on the ratios of tokens.

    The clip range is the paper's for tokens; how it reduces token losses is not known, `token_mean` is verl's default. In the
    paper's ablation `gapo` is the better one. Metrics: `clip_high`, the mean of `e_i`, and those of `ppo_clip`.
    """

    def token_loss(logprobs, rollouts, advantages):
        bound = upper_clip(rollouts, clip_low, clip_high)
        ratio = token_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        loss, clipped = clipped_surrogate(ratio, advantages, clip_low, bound[..., None])
        drift = -log_ratio(logprobs, rollouts.old_logprobs, rollouts.token_mask)
        return loss, {"clip_fraction": clipped, "clip_high": bound, "max/ratio": ratio, "approx_kl": drift}

    return token_objective(token_loss, aggregation=aggregation, max_len=max_len, needs=("rewards",), reads_old=True)
