"""PROPS: a behaviour policy that prefers tokens that a group has drawn too rarely so far (arXiv 2311.08290)."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller


def sampling_error(counts: Array, probs: Array) -> Array:
    """f32[], nats: KL(empirical || policy), the mean over N states weighted by visits, from `counts` and `probs` f[N, V]."""
    visits = counts.sum(-1, keepdims=True)
    share = counts / jnp.maximum(visits, 1)
    ratio = jnp.where(counts > 0, share / jnp.where(counts > 0, probs, 1), 1)
    return jnp.sum(counts * jnp.log(ratio)) / jnp.maximum(counts.sum(), 1)


def proximal_loss(ratio: Array, eps: float = 0.3) -> Array:
    """`mean max(rho, clip(rho, 1 - eps, 1 + eps))`: descent makes drawn actions rarer until their rho is below 1 - eps.

    This is the paper's update of a copy of the policy; `props` takes one step in closed form.
    """
    return jnp.mean(jnp.maximum(ratio, jnp.clip(ratio, 1 - eps, 1 + eps)))


def divergence(ratio: Array) -> Array:
    """`mean (rho - 1 - log rho)`; the paper's update stops when it reaches a target."""
    return jnp.mean(ratio - 1 - jnp.log(ratio))


@controller
def props(*, step: float = 2.0) -> Controller:
    """`spread`: the first tokens of a group are drawn from `p exp(-step (share so far - p))`.

    See `engines.sampling.spread_out`. At the first token all completions of a group are in one state; other states seldom
    repeat in text. The update treats the tokens as drawn by the policy. The closed form for tokens and `step` are ours. Raises
    ValueError: a negative step.
    """
    if step < 0:
        raise ValueError(f"step={step} away from what was drawn; give 0 (plain draws) or more")
    return Controller(lambda: (), lambda state: {"spread": jnp.float32(step)}, lambda state, facts: state, facts=(),
                      knobs=("spread",))
