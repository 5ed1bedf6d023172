"""Estimators of KL(policy || reference) from the sampled tokens (Schulman, "Approximating KL divergence", 2020)."""
import jax.numpy as jnp
from jax import Array, lax

from jaxrl_llm.tools import registry

ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "k3+")


def token_kl(logprobs: Array, ref_logprobs: Array, estimator: str = "k3", *, limit: float = 20.0) -> Array:
    """Per-token estimate, any shape, with `d = clamp(ref_logprobs - logprobs, -limit, limit)`.

    `k1` -d, `abs` |d|, `k2` d^2 / 2, `k3` exp(d) - d - 1 clamped to [-10, 10]; `k1+` and `k3+` have the values of k1 and
    k3 and the gradient of k2, which is unbiased on-policy. As a loss term plain k1 does not pull towards the reference at
    all: its gradient is 1 whatever `ref_logprobs` is.
    """
    registry.one_of("KL estimator", estimator, ESTIMATORS)
    d = jnp.clip(lax.stop_gradient(ref_logprobs) - logprobs, -limit, limit)
    if estimator == "k1":
        return -d
    if estimator == "abs":
        return jnp.where(d == 0, 0, jnp.abs(d))  # the slope of jnp.abs at 0 is 1; here it must be 0
    if estimator == "k2":
        return d**2 / 2
    if estimator == "k3":
        return jnp.clip(jnp.exp(d) - d - 1, -10, 10)
    value = token_kl(logprobs, ref_logprobs, estimator[:-1], limit=limit)
    k2 = d**2 / 2
    return lax.stop_gradient(value - k2) + k2
