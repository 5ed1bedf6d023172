"""T1's dynamic anchor: a reference policy that follows the trained one (arXiv 2501.11651; form reconstructed)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

Params = Any


def init(params: Params) -> Params:
    """The anchor starts as a copy of the policy's parameters."""
    return jax.tree.map(jnp.array, params)


def observe(anchor: Params, params: Params, *, decay: float = 0.99) -> Params:
    """`decay * anchor + (1 - decay) * params`, after every update."""
    return optax.incremental_update(params, anchor, 1 - decay)


def propose(anchor: Params) -> Params:
    """The parameters that give `ref_logprobs`."""
    return anchor
