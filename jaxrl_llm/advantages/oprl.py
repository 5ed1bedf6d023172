"""OPRL / iStar: step rewards of an implicit process reward model beside the outcome (arXiv 2509.19199)."""
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.maths import masked
from jaxrl_llm.maths.segments import step_totals
from jaxrl_llm.tools import registry

NORMS = ("grpo_std", "grpo", "rloo")


def group_normalise(x_PGK: Array, counted_PGK: Array, norm: str, eps: float) -> Array:
    """`x` normalised by the `counted` entries of its prompt; a single entry is no baseline and leaves x as is (any K).

    `grpo_std` (x - mean) / (std + eps) with the sample deviation (1 for a single entry), `grpo` x - mean,
    `rloo` (x - mean) n / (n - 1).
    """
    prompt: dict[str, Any] = {"axis": (1, 2), "keepdims": True}
    n = masked.count(counted_PGK, dtype=x_PGK.dtype, **prompt)
    centred = x_PGK - jnp.where(n > 1, masked.mean(x_PGK, counted_PGK, **prompt), 0)
    if norm == "grpo_std":
        return centred / (jnp.where(n > 1, masked.std(x_PGK, counted_PGK, ddof=1, **prompt), 1) + eps)
    return centred * jnp.where(n > 1, n / jnp.maximum(n - 1, 1), 1) if norm == "rloo" else centred


@estimator
def oprl(*, beta: float = 0.05, alpha: float = 1.0, norm: str = "grpo_std", group_stats: str = "all_steps",
         eps: float = 1e-6) -> Estimator:
    """`A = N(R) + alpha N(s)` on every token of a step, R the trajectory's outcome, s the score of the step.

    `q_k = beta * sum over the step's tokens of (prm_logprobs - old_logprobs)`, `s = q / (max |q| of the batch + eps)`.
    `extras["prm_logprobs"]` f32[P, G, T] is the reward model, a second copy of the policy; `step_ids` give the steps.
    N is `group_normalise` over the trajectories of the prompt, and over all their steps or, with
    `group_stats="first_step"` as in the released code, the first step of each. The scores are in [-1, 1]: under
    `rloo` and `grpo` outcomes of a larger scale dominate them. The numbers are the released code's, `norm` is the paper's
    (the code has "grpo", or "rloo" for some tasks).
    """
    registry.one_of("norm", norm, NORMS)
    registry.one_of("group_stats", group_stats, ("all_steps", "first_step"))

    def advantages(rollouts):
        mask = rollouts.token_mask
        q, last = step_totals(beta * (rollouts.extras["prm_logprobs"] - rollouts.old_logprobs), rollouts.step_ids, mask)
        scores = q / (masked.max(jnp.abs(q), mask, initial=0) + eps)
        counted = last  # each step once
        if group_stats == "first_step":
            counted = last & (jnp.arange(mask.shape[-1])[None, None] == jnp.argmax(last, axis=-1, keepdims=True))
        outcome = group_normalise(rollouts.rewards[..., None], rollouts.valid[..., None], norm, eps)
        return outcome + alpha * group_normalise(scores, counted, norm, eps)

    return stateless(advantages, needs=("rewards", "prm_logprobs", "old_logprobs", "step_ids"))
