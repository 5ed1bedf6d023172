"""D3S: the rollouts with the largest variance of advantages, then their tokens of largest weight (arXiv 2509.22115)."""
import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.maths import masked


def portion(share: Array | float, total: Array) -> Array:
    """i32: `ceil(share * total)`, at least 1 and at most `total`."""
    # The small number prevents rounding up a product that is an integer mathematically but not in floats.
    wanted = jnp.ceil(share * total - 1e-4).astype(jnp.int32)
    return jnp.clip(wanted, jnp.minimum(total, 1), total)


def max_variance_subset(x: Array, real: Array, share: Array | float) -> Array:
    """bool[N]: the `portion(share)` real entries of x f32[N] whose population variance is largest.

    Such a subset consists of the k largest and the n - k smallest entries; all k are tried in O(N log N). Among equal
    variances the smallest k is chosen; among equal entries the small end takes the first and the large end the last.
    """
    N, total = x.size, jnp.sum(real, dtype=jnp.int32)
    n = portion(share, total)
    x = jnp.where(real, x - masked.mean(x, real), 0)
    order = jnp.argsort(jnp.where(real, x, jnp.inf), stable=True)
    sums = jnp.pad(jnp.cumsum(jnp.stack([x, x**2])[:, order], axis=1), ((0, 0), (1, 0)))
    k = jnp.arange(N + 1)
    smallest = sums[:, jnp.maximum(n - k, 0)]
    largest = sums[:, [-1]] - sums[:, jnp.maximum(total - k, 0)]
    first, second = (smallest + largest) / jnp.maximum(n, 1)
    variance = jnp.where(k <= n, second - first**2, -1)
    # Subsets often tie mathematically (all of size 1 do): rounding must not choose between them.
    best = jnp.argmax(variance >= jnp.max(variance) - 1e-5 * jnp.max(x**2))
    rank = jnp.argsort(order)
    return real & ((rank < n - best) | (rank >= total - best))


def top_portion(score: Array, real: Array, share: Array | float) -> Array:
    """bool, shape of `score`: the `portion(share)` real entries of highest score; ties go to the first."""
    flat, n = jnp.where(real, -score, jnp.inf).ravel(), portion(share, jnp.sum(real, dtype=jnp.int32))
    rank = jnp.argsort(jnp.argsort(flat, stable=True)).reshape(score.shape)
    return real & (rank < n)


def down_sample(advantages_PG: Array, entropies_PGT: Array, mask_PGT: Array, *, rollout_share: Array | float,
                token_share: Array | float, scope: str = "batch") -> tuple[Array, Array]:
    """(rollouts bool[P, G], tokens bool[P, G, T]) to train on.

    Rollouts: the subset of maximal variance of the advantages, across the batch or in each group (`scope="group"`).
    Tokens: those of these rollouts with the largest `|A| * H`. Rollouts without tokens are never chosen.
    """
    live = jnp.any(mask_PGT, axis=2)
    if scope == "group":
        keep = jax.vmap(max_variance_subset, in_axes=(0, 0, None))(advantages_PG, live, rollout_share)
    else:
        keep = max_variance_subset(advantages_PG.ravel(), live.ravel(), rollout_share).reshape(live.shape)
    weight = jnp.abs(advantages_PG)[..., None] * entropies_PGT
    return keep, top_portion(weight, mask_PGT & keep[..., None], token_share)
