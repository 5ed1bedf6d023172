"""Excluding part of a batch from a mean: drop it, and scale up the rest."""
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.maths import masked


def over_kept(x: Array, keep: Array, real: Array, axis: masked.Axis = None) -> Array:
    """`x * n_real / n_kept` where `keep`, 0 elsewhere: a mean over the real entries becomes one over the kept ones.

    `keep` and `real` are boolean with the rank of `x` and are counted over `axis`. A clipped policy loss is
    proportional to the advantage, so scaling advantages this way removes dropped entries from its denominator as well.
    Counted over tokens [P, G, T] this is exact under the aggregation `token_mean`, counted over prompts [P, 1] under
    `prompt_mean`; a KL term is not affected. If nothing is kept, all is 0.
    """
    keep = keep & real
    total, kept = (masked.count(m, axis, keepdims=True, dtype=x.dtype) for m in (real, keep))
    return jnp.where(keep, x * (total / jnp.maximum(kept, 1)), jnp.zeros((), x.dtype))
