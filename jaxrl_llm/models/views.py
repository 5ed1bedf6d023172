"""Layers of stacked weights as arrays of their own that share the memory of the stack, on CPUs."""
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LEAST_BYTES = 2**25  # of smaller stacks a copy is quicker than making the arrays


def of_layers(stacked: Any, dtype: Any) -> list[Any] | None:
    """The trees of single layers in the tree `stacked`, whose leaves are `[L, ...]`, without a copy.

    None where copying is all that XLA offers or costs nothing: on accelerators and meshes, in another dtype than float32,
    under `jit`, and for small models. A program that is given slices of a stack copies them at each call, on CPUs into memory
    that is new each time.

    The stack cannot be updated in place as long as any of the arrays exists: JAX then copies what is donated.
    """
    leaves = jax.tree.leaves(stacked)
    if jnp.dtype(dtype) != jnp.float32 or not all(map(_shareable, leaves)) or sum(x.nbytes for x in leaves) < LEAST_BYTES:
        return None
    # By dlpack, as `np.asarray` would keep its array, and with it a hold on the memory, in the stack.
    on_host = jax.tree.map(np.from_dlpack, jax.block_until_ready(stacked))
    layers = [jax.tree.map(lambda x: x[i], on_host) for i in range(len(leaves[0]))]
    return jax.device_put(layers, next(iter(leaves[0].devices())), may_alias=True)


def _shareable(leaf: Any) -> bool:
    """Whether a leaf is a float32 array of this process, on one CPU."""
    return (isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.dtype == jnp.float32
            and len(leaf.devices()) == 1 and next(iter(leaf.devices())).platform == "cpu")
