"""SIRI: a length limit that falls and rises in cycles (arXiv 2509.25176)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller
from jaxrl_llm.tools import registry

SHAPES = ("cosine", "stair", "stair_cosine")


def length_limit(step: Array, low: float, high: float, *, period: int, shape: str = "cosine") -> Array:
    """f32 of the shape of `step`: the limit in tokens, between `low` and `high`, of steps counted from 0.

    `cosine`: `mid + amp cos(2 pi t / period)`. `stair`: `low` in the first half of a period, then `high`. `stair_cosine`: each
    limit for a quarter of the period, a half cosine between them. Raises ValueError for another shape.
    """
    registry.one_of("shape", shape, SHAPES)
    middle, amplitude = (high + low) / 2, (high - low) / 2
    turn = (step % period) / period  # fraction of a period, in [0, 1)
    if shape == "stair":
        return jnp.where(turn < 0.5, jnp.float32(low), jnp.float32(high))
    if shape == "cosine":
        return middle + amplitude * jnp.cos(2 * jnp.pi * turn)
    falling = middle + amplitude * jnp.cos(4 * jnp.pi * (turn - 1 / 8))
    rising = middle + amplitude * jnp.cos(4 * jnp.pi * (turn - 3 / 8))
    return jnp.select([turn < 1 / 8, turn < 3 / 8, turn < 5 / 8, turn < 7 / 8], [high, falling, low, rising], high)


@controller
def siri(*, low: float = 0.5, period: int = 640, shape: str = "cosine") -> Controller:
    """`max_tokens`: the `length_limit` between a share `low` of `sampling.max_tokens` and all of them. Facts: `step`.

    The paper has 8,192 and 16,384 tokens and three periods, and reports that the cosine is best. Raises ValueError: a share
    outside (0, 1], a period without steps, or another shape.
    """
    if not 0 < low <= 1 or period < 1:
        raise ValueError(f"low={low}, period={period}; give a share above 0 and at most 1, and one step or more")
    registry.one_of("shape", shape, SHAPES)

    def propose(state):
        step, most = state
        limit = length_limit(step, low * most, most, period=period, shape=shape)
        return {"max_tokens": jnp.clip(jnp.round(limit), 1, most).astype(jnp.int32)}

    return Controller(lambda max_tokens: (jnp.int32(0), jnp.int32(max_tokens)), propose,
                      lambda state, facts: (jnp.int32(facts["step"]) + 1, state[1]), facts=("step",), knobs=("max_tokens",))
