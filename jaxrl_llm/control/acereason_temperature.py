"""Sampling temperature by rule: the one at which the policy's mean token entropy is 0.3 nats (arXiv 2506.13284).

The search for the temperature and the band that triggers it again are ours; the target is the paper's.
"""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller
from jaxrl_llm.data.rollouts import Role
from jaxrl_llm.maths import masked


def newton_step(temperature: Array, entropies: Array, logprobs: Array, mask: Array, *, target: float) -> Array:
    """The temperature with mean entropy `target` if entropy is linear in log T; between half and twice the old temperature.

    dH / d log T is the variance of log p under softmax(logits / T). A drawn token gives an unbiased estimate of it, `(-log p -
    H)^2`, so the sampler's records are enough: `entropies` H and `logprobs` log p f32[N], where `mask` bool[N].
    """
    slope = masked.mean((logprobs + entropies) ** 2, mask)
    gap = target - masked.mean(entropies, mask)
    change = jnp.where(slope > 0, gap / jnp.where(slope > 0, slope, 1), jnp.inf * jnp.sign(gap))
    return temperature * jnp.exp(jnp.clip(change, -jnp.log(2.0), jnp.log(2.0)))


@controller
def acereason_temperature(*, target: float = 0.3, low: float = 0.2, high: float = 0.4, coldest: float = 0.05,
                          hottest: float = 3.0) -> Controller:
    """`temperature`: as configured, then a `newton_step` in [coldest, hottest] whenever the entropy leaves [low, high] nats.

    Facts: the sampler's `entropies` and `behavior_logprobs` in `rollouts`.
    """

    def observe(temperature, facts):
        rollouts = facts["rollouts"]
        entropies, logprobs, mask = rollouts.entropies, rollouts.behavior_logprobs, rollouts.token_mask
        mask = mask if rollouts.role is None else mask & (rollouts.role == Role.POLICY)
        entropy = masked.mean(entropies, mask)
        moved = jnp.clip(newton_step(temperature, entropies, logprobs, mask, target=target), coldest, hottest)
        return jnp.where(jnp.any(mask) & ((entropy < low) | (entropy > high)), moved, temperature)

    return Controller(lambda temperature: jnp.float32(temperature), lambda temperature: {"temperature": temperature}, observe,
                      facts=("rollouts",), knobs=("temperature",))
