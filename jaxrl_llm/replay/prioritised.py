"""Stored successes drawn in proportion to their advantage, with importance weights (SIL, arXiv 1806.05635)."""
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.maths import masked
from jaxrl_llm.replay.base import Replay, rule


def chances(priority: np.ndarray, exponent: float) -> np.ndarray:
    """f64[B], summing to 1: `p^exponent / sum p^exponent` of priorities p > 0."""
    raised = np.asarray(priority, np.float64) ** exponent
    return raised / raised.sum()


def importance(priority: np.ndarray, exponent: float, correction: float) -> np.ndarray:
    """f64[B], at most 1: `(B P)^-correction`, P the `chances`, over its largest value (arXiv 1511.05952)."""
    weight = (len(priority) * chances(priority, exponent)) ** -correction
    return weight / weight.max()


@rule
def prioritised(*, updates: int = 4, exponent: float = 0.6, correction: float = 0.1, least: float = 1e-6,
                capacity: int = 4096) -> Replay:
    """Rollouts with a positive reward are stored; `updates` batches of stored groups, drawn by their `chances`, follow a step.

    The priority of a group is the mean of `clip(A, least, 1)` over the trained tokens of its stored rollouts: after an update
    on it with the advantages A that this update had, and before the first with A = r - group mean in the place of the critic's.
    `least` keeps every group's probability above 0. `exponent` and `correction` are those of the authors' run scripts, whose
    capacity is 1e5 steps. With a correction of 1, the default of their code, a group of only right rollouts has thousands of
    times the weight of a useful one. Raises ValueError: no update, or a `least` that is not positive.
    """
    if updates < 1 or not least > 0:
        raise ValueError(f"updates={updates}, least={least}; give the updates on stored groups in a step, 1 or more, and a "
                         "positive least priority")

    def admit(rewards, valid):
        return valid & (rewards > 0)

    def priority(rewards, valid):
        better = np.clip(rewards - np.asarray(masked.group_mean(rewards, valid)), least, 1)
        kept = admit(rewards, valid)
        return np.where(kept.any(1), np.sum(better, axis=1, where=kept) / np.maximum(kept.sum(1), 1), least).astype(np.float32)

    def groups(born, version, prompts, rng, priority):
        return rng.choice(len(born), min(prompts, len(born)), replace=False, p=chances(priority, exponent))

    def renew(advantages, mask):
        return masked.mean(jnp.clip(advantages, least, 1), mask, axis=(1, 2))

    return Replay(admit, groups=groups, capacity=capacity, priority=priority, renew=renew, updates=updates,
                  weights=lambda priority: importance(priority, exponent, correction))
