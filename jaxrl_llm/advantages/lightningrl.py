"""LightningRL: accuracy and efficiency are normalised separately before they are added."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.advantages.base import Estimator, estimator, stateless
from jaxrl_llm.control import lightningrl as filters
from jaxrl_llm.maths import masked
from jaxrl_llm.tools import registry


def exact_z_score(x: Array, mask: Array, axis: masked.Axis, *, ddof: int) -> Array:
    """`(x - mean) / std` over the True entries of `mask`; 0 where the std is 0, and outside `mask`."""
    scale = masked.std(x, mask, axis, ddof=ddof, keepdims=True)
    centred = jnp.where(mask, x - masked.mean(x, mask, axis, keepdims=True), 0)
    return jnp.where(scale > 0, centred / jnp.where(scale > 0, scale, 1), 0)


@estimator
def lightningrl(*, perf: str = "perf", perf_coef: float = 1.0, min_range: float = 0.01) -> Estimator:
    """`R = z(accuracy) + perf_coef * z(perf)` per prompt (population std), then `A = z(R)` over the batch (sample std).

    Prompts without a right answer, or with a range of `perf` below `min_range`, get 0 and do not count in the batch
    statistics (`control.lightningrl`; a trainer that refills its batch drops them before). Because of the z-score,
    shifting or scaling `perf` affects only that threshold.
    `rewards` [P, G]: 0 or 1. Extras: `truncated` bool[P, G] (counts as wrong) and, with `perf="perf"`, `perf`
    f32[P, G], such as tokens per forward pass; `perf="length"` takes minus the length.
    No paper id; method and numbers come from the public code SJTU-DENG-Lab/LightningRL, without its parts for diffusion models.
    """
    registry.one_of("perf", perf, ("perf", "length"))

    def advantages(rollouts):
        valid, acc, speed = rollouts.valid, filters.accuracy(rollouts), filters.efficiency(rollouts, perf)
        keep = valid & filters.has_signal(acc, speed, valid, min_range=min_range)[:, None]
        reward = exact_z_score(acc, keep, 1, ddof=0) + perf_coef * exact_z_score(speed, keep, 1, ddof=0)
        return exact_z_score(reward, keep, None, ddof=1)

    return stateless(advantages, needs=("rewards", "truncated", "perf") if perf == "perf" else ("rewards", "truncated"))
