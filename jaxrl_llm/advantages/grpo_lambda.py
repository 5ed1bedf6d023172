"""GRPO-lambda: reward short answers only on the prompts with the highest accuracy (arXiv 2505.18086)."""
import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.advantages.grpo import group_z_score
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


def best_solved(accuracy_P: Array, real_P: Array, share: float) -> Array:
    """bool[P]: the `max(1, ceil(share * P))` real prompts of highest accuracy; ties go to the first in the batch."""
    # The small number prevents rounding up a product that is an integer mathematically but not in floats.
    top = jnp.maximum(jnp.ceil(share * masked.count(real_P) - 1e-6), 1)
    order = jnp.argsort(jnp.where(real_P, -accuracy_P, jnp.inf), stable=True)
    return real_P & (jnp.argsort(order) < top)


def short_reward(correct_PG: Array, lengths_PG: Array, valid_PG: Array, alpha: float) -> Array:
    """`1 - alpha * sigmoid(z)` for correct rollouts, z the z-score of their length among correct ones; 0 for wrong ones."""
    counted = valid_PG & correct_PG
    mean = masked.group_mean(lengths_PG, counted)
    z = (lengths_PG - mean) / (masked.group_std(lengths_PG, counted, ddof=0) + 1e-8)
    return jnp.where(counted, 1 - alpha * jax.nn.sigmoid(jnp.where(counted, z, 0)), 0)


@estimator
def grpo_lambda(*, variant: str = "top", share: float = 0.2, threshold: float = 0.8, alpha: float = 0.2,
                eps: float = 1e-6) -> Estimator:
    """Group z-score of `1 - alpha sigmoid((L - mean L) / std L)` (correct, well-solved prompt), 1 (correct), 0 (wrong).

    L are the lengths in tokens of the correct rollouts of the group (population std); correct as in `Rollouts.correct`.
    Well-solved: `variant="top"` the ceil(share * P) prompts of the batch with the highest accuracy (ties in batch
    order), `variant="threshold"` those with an accuracy of at least `threshold`. alpha < 1 keeps every correct answer
    above every wrong one. The share is the paper's, eps as in `grpo`; alpha (0.6 in a public re-implementation),
    the kind of std and the tie rule are not from the paper.
    """
    registry.one_of("variant", variant, ("top", "threshold"))
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha={alpha} must be in [0, 1), so that a long correct answer still beats a wrong one")

    def advantages(rollouts):
        valid, correct = rollouts.valid, rollouts.correct
        plain = correct.astype(rollouts.rewards.dtype)
        accuracy = masked.mean(plain, valid, axis=1)
        solved = best_solved(accuracy, jnp.any(valid, axis=1), share) if variant == "top" else accuracy >= threshold
        short = short_reward(correct, rollouts.lengths.astype(plain.dtype), valid, alpha)
        return group_z_score(jnp.where(solved[:, None], short, plain), valid, eps=eps)

    return stateless(advantages)
