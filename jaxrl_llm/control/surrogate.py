"""The clipped surrogate loss of rollouts, by which adversaries compare groups of prompts (GDRO, arXiv 2601.19280)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry

SIGNALS = ("one_minus_pass", "surrogate")


def check_signal(signal: str) -> bool:
    """Whether the signal is the surrogate loss; ValueError with the nearest name for another one."""
    return registry.one_of("signal", signal, SIGNALS) == "surrogate"


def surrogate_loss(rollouts: Rollouts, advantages_PG: Array, *, clip_low: float = 0.2, clip_high: float = 0.28) -> Array:
    """f32[P, G]: mean over trained tokens of `max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))`.

    `rho = exp(old - behaviour log-prob)`: how far the policy of the step is from the policy that sampled. It is 1 for fresh
    rollouts, whose groups then have mean loss 0. The published code takes rho from the update of each mini-batch instead. There
    the first of them has rho = 1 too. Raises ValueError for rollouts without `old_logprobs`.
    """
    if rollouts.old_logprobs is None or rollouts.behavior_logprobs is None:
        raise ValueError("signal='surrogate' compares old_logprobs with behavior_logprobs, and the rollouts lack one of them; "
                         "make several updates on a batch, for example learner.minibatches=4, or set signal='one_minus_pass'")
    mask = rollouts.token_mask
    change = jnp.where(mask, rollouts.old_logprobs, 0) - jnp.where(mask, rollouts.behavior_logprobs, 0)
    ratio, A = jnp.exp(jnp.clip(change, -20, 20)), advantages_PG[..., None]
    return masked.mean(jnp.maximum(-A * ratio, -A * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)), mask, axis=-1)
