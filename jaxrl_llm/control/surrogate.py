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


def surrogate_loss(ratios_PGT: Array, advantages_PG: Array, mask_PGT: Array, *, clip_low: float = 0.2, clip_high: float = 0.28
                   ) -> Array:
    """f32[P, G]: mean over the mask of `max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))`.

    `rho` is the ratio of the policy after the updates of a step to that before. Without drift, with rho = 1, a group of equal
    lengths has the mean loss 0. The published code takes rho from the update of each mini-batch, where the first has rho = 1.
    """
    rho, A = jnp.where(mask_PGT, ratios_PGT, 1), advantages_PG[..., None]
    return masked.mean(jnp.maximum(-A * rho, -A * jnp.clip(rho, 1 - clip_low, 1 + clip_high)), mask_PGT, axis=-1)


def by_place(values_PG: Array, place_P: Array, counted_PG: Array, number: int) -> tuple[Array, Array]:
    """`(mean, count)` f32[N] of the counted values of each place; 0 without any. Several rows may have one place."""
    to = jnp.where(counted_PG, place_P[:, None], number)
    count = jnp.zeros(number).at[to].add(1.0, mode="drop")
    total = jnp.zeros(number).at[to].add(jnp.where(counted_PG, values_PG, 0), mode="drop")
    return total / jnp.maximum(count, 1), count


def losses_of(rollouts: Rollouts, ratios_PGT: Array, place_P: Array, counted_PG: Array, number: int, *, eps: float = 1e-6
              ) -> Array:
    """f32[P, G], the `surrogate_loss` with z-scores over all counted rollouts of a place (sample std), without weights."""
    mean, count = by_place(rollouts.rewards, place_P, counted_PG, number)
    apart = rollouts.rewards - mean[place_P][:, None]
    squares, _ = by_place(apart**2, place_P, counted_PG, number)
    std = jnp.sqrt(squares * count / jnp.maximum(count - 1, 1))
    return surrogate_loss(ratios_PGT, apart / (std[place_P][:, None] + eps), rollouts.token_mask)
