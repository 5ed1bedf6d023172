"""Two policies at a position, seen as the sampled token against all other tokens; elementwise over log-probs of one shape."""
import jax.numpy as jnp
from jax import Array


def probability(logprobs: Array) -> Array:
    """p, at most 1 where rounding leaves a log-prob above 0."""
    return jnp.exp(jnp.minimum(logprobs, 0))


def complement(logprobs: Array) -> Array:
    """`1 - p` from `log p`, without the rounding of p; at least 0."""
    return -jnp.expm1(jnp.minimum(logprobs, 0))


def total_variation(logprobs: Array, sampler: Array) -> Array:
    """`|q - p|` of `sampler` = log q and `logprobs` = log p: at most the total variation over the vocabulary."""
    return jnp.abs(probability(sampler) - probability(logprobs))


def kl_divergence(logprobs: Array, sampler: Array, *, eps: float = 1e-8) -> Array:
    """`q log(q / p) + (1 - q) log((1 - q + eps) / (1 - p + eps))`: at most `KL(q || p)` over the vocabulary, but for `eps`."""
    rest = jnp.log(complement(sampler) + eps) - jnp.log(complement(logprobs) + eps)
    return probability(sampler) * (sampler - logprobs) + complement(sampler) * rest
