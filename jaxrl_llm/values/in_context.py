"""Predictions of a policy's success on a prompt from its results on other prompts, without training: references for V0.

All read a context of N prompts, features f32[N, F], outcomes f32[N] in [0, 1] and mask bool[N] (False: padding), and give
f32[Q], probabilities of success on queries f32[Q, F]. An empty context gives 0.5. Jit, and vmap over policies.
"""
import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.maths import masked


def standardise(context: Array, mask: Array, queries: Array, *, bound: float = 5.0) -> tuple[Array, Array]:
    """Context and queries with the context's mean taken off and divided by its deviation, per column, within +-`bound`.

    Constant columns and padding rows become 0.
    """
    rows = jnp.broadcast_to(mask[:, None], context.shape)
    centre = masked.mean(context, rows, axis=0, keepdims=True)
    deviation = masked.std(context, rows, axis=0, ddof=0, keepdims=True)
    scale = jnp.where(deviation > 1e-6, deviation, jnp.inf)
    def scaled(x):
        return jnp.clip((x - centre) / scale, -bound, bound)
    return jnp.where(rows, scaled(context), 0.0), scaled(queries)


def context_mean(context: Array, outcomes: Array, mask: Array, queries: Array) -> Array:
    """The mean outcome, the same for every query: the prediction without looking at prompts."""
    rate = jnp.where(jnp.any(mask), masked.mean(outcomes, mask), 0.5)
    return jnp.full(queries.shape[0], rate)


def nearest(context: Array, outcomes: Array, mask: Array, queries: Array, *, k: int = 16, temperature: float = 0.1) -> Array:
    """Mean outcome of the k most similar prompts, weights `exp(cosine / temperature)` of standardised features.

    A context of fewer than k prompts uses all of them.
    """
    x, q = standardise(context, mask, queries)
    def unit(v):
        return v / jnp.maximum(jnp.linalg.norm(v, axis=-1, keepdims=True), 1e-6)
    similarity = jnp.where(mask[None], unit(q) @ unit(x).T, -jnp.inf)
    best, index = jax.lax.top_k(similarity, min(k, mask.size))
    weight = jnp.where(best > -jnp.inf, jnp.exp((best - 1) / temperature), 0.0)
    total = jnp.sum(weight, axis=1)
    return jnp.where(total > 0, jnp.sum(weight * outcomes[index], axis=1) / jnp.where(total > 0, total, 1), 0.5)


def ridge(context: Array, outcomes: Array, mask: Array, queries: Array, *, alphas: tuple[float, ...] = (0.01, 0.1, 1, 10, 100)
          ) -> Array:
    """Least squares with penalty alpha and a free mean, clipped to [0, 1].

    `alpha` minimises the squared error of leave-one-out prediction over the context prompts, which has a closed form:
    `e_i / (1 - H_ii)`, H the matrix that maps outcomes to fits. The kernel is `x x' / F` of standardised features.
    """
    x, q = standardise(context, mask, queries)
    mean = context_mean(context, outcomes, mask, queries)
    y = jnp.where(mask, outcomes - mean[0] if mean.size else outcomes, 0.0)
    values, vectors = jnp.linalg.eigh(x @ x.T / x.shape[1])
    values, n = jnp.maximum(values, 0.0)[None], jnp.maximum(masked.count(mask), 1.0)
    keep = values / (values + jnp.asarray(alphas)[:, None])  # [alphas, N]: what the fit keeps of each direction
    fits = jnp.einsum("ni,ai,i->an", vectors, keep, vectors.T @ y)
    # The free mean is one more fitted number: it takes 1 / n of every prompt.
    own = jnp.einsum("ni,ai->an", vectors**2, keep) + 1 / n
    error = (y[None] - fits) / jnp.maximum(1 - own, 1e-3)
    best = jnp.argmin(masked.sum(error**2, jnp.broadcast_to(mask[None], error.shape), axis=1))
    dual = vectors @ (vectors.T @ y / (values[0] + jnp.asarray(alphas)[best]))
    return jnp.clip(mean + q @ (x.T @ dual) / x.shape[1], 0.0, 1.0)


def logistic(context: Array, outcomes: Array, mask: Array, queries: Array, *, alpha: float = 1.0, iterations: int = 8) -> Array:
    """Kernel logistic regression on outcomes in [0, 1], penalty `alpha / 2 |f|^2`, by Newton's method; kernel as in `ridge`.

    The mean is fitted beforehand: with a half right and a half wrong answer added, it starts at the context's logit.
    """
    x, q = standardise(context, mask, queries)
    kernel, real = x @ x.T / x.shape[1], mask.astype(x.dtype)
    rate = (masked.sum(outcomes, mask) + 0.5) / (jnp.sum(real) + 1)
    offset = jnp.log(rate) - jnp.log1p(-rate)

    def newton(_, dual):
        f = kernel @ dual
        p = jax.nn.sigmoid(f + offset)
        curvature = real * jnp.maximum(p * (1 - p), 1e-4)
        target = curvature * f + real * (outcomes - p)
        # (W K + alpha) dual = W f + (y - p)
        return jnp.linalg.solve(curvature[:, None] * kernel + alpha * jnp.eye(mask.size, dtype=x.dtype), target)

    dual = jax.lax.fori_loop(0, iterations, newton, jnp.zeros_like(real))
    return jax.nn.sigmoid(offset + q @ (x.T @ dual) / x.shape[1])
