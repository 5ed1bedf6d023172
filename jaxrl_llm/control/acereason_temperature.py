"""Sampling temperature by rule: the one at which the policy's mean token entropy is 0.3 nats (arXiv 2506.13284).

The solver and the band that triggers it anew are ours; the target is the paper's. Positions should be sampled at the
temperature in question: solve, sample again, and solve once or twice more. The learner's log-probs need it too.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm import masked
from jaxrl_llm.control.base import Controller, controller


def mean_entropy(logits: Array, mask: Array, temperature: Array) -> Array:
    """Mean over `mask` bool[N] of the entropy, in nats, of `softmax(logits / temperature)`, logits f32[N, V]."""
    logprobs = jax.nn.log_softmax(logits / temperature, axis=-1)
    return masked.mean(-jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1), mask)


def solve(
    logits: Array, mask: Array, *, target: float = 0.3, coldest: float = 0.05, hottest: float = 3.0, steps: int = 60
) -> Array:
    """The temperature in [coldest, hottest] where `mean_entropy = target`, by bisection, or the end nearest to it."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        too_cold = mean_entropy(logits, mask, middle) < target
        return jnp.where(too_cold, middle, low), jnp.where(too_cold, high, middle)

    low, high = lax.fori_loop(0, steps, halve, (jnp.float32(coldest), jnp.float32(hottest)))
    return (low + high) / 2


@controller
def acereason_temperature(
    *, start: float = 1.0, target: float = 0.3, low: float = 0.2, high: float = 0.4
) -> Controller:
    """`temperature` as it is while the entropy at it lies in [low, high] nats, else `solve`d for `target`.

    Facts: `logits` f32[N, V] of N positions and `mask` bool[N], which of them count.
    """

    def observe(temperature, facts):
        logits, mask = facts["logits"], facts["mask"]
        entropy = mean_entropy(logits, mask, temperature)
        return jnp.where((entropy < low) | (entropy > high), solve(logits, mask, target=target), temperature)

    return Controller(lambda: jnp.float32(start), lambda temperature: {"temperature": temperature}, observe,
                      facts=("logits", "mask"), knobs=("temperature",))
