"""DOTS: problems with a predicted success rate near 1/2, from a few measured problems (arXiv 2506.05316)."""
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_llm.control.base import Controller, controller
from jaxrl_llm.control.passes import key_of


class Reference(NamedTuple):
    """State of the reference problems.

    `embeddings` f32[N, D] of all problems; `ids` i32[K], problems measured last, and their success `rates` f32[K]; `next_ids`
    i32[K], problems to measure next, below 0: none; `seed` u32[2], `step` i32[].
    """

    embeddings: Array
    ids: Array
    rates: Array
    next_ids: Array
    seed: Array
    step: Array


def attention(queries: Array, references: Array, *, tau: float = 1.0) -> Array:
    """f32[Q, K], rows that sum to 1: `softmax(q . r / sqrt(d) / tau)` of embeddings [Q, d] and [K, d]."""
    return jax.nn.softmax(queries @ references.T / jnp.sqrt(queries.shape[-1]) / tau, axis=-1)


def calibrated(base: Array, temperature: Array, bias: Array) -> Array:
    """`sigmoid(logit(base) / temperature + bias)`, base clipped to [1e-4, 1 - 1e-4]."""
    inside = jnp.clip(base, 1e-4, 1 - 1e-4)
    return jax.nn.sigmoid(jnp.log(inside / (1 - inside)) / temperature + bias)


def calibration(outputs: Array) -> tuple[Array, Array]:
    """Temperature and bias from the two outputs of the paper's head: `clip(softplus(o1), .01, 10)`, `tanh(o2)`."""
    return jnp.clip(jax.nn.softplus(outputs[0]), 0.01, 10), jnp.tanh(outputs[1])


def selection(predicted_N: Array, *, target: float = 0.5, tau: float = 1e-3) -> Array:
    """f32[N], summing to 1: `exp(-|predicted - target| / tau)`; problems whose weight underflows are equal and drawn last."""
    near = -jnp.abs(predicted_N - target) / tau
    return jax.nn.softmax(jnp.maximum(near - near.max(), -80.0))


def fitted(base_K: Array, rates_K: Array, *, steps: int = 20, ridge: float = 1.0) -> tuple[Array, Array]:
    """Temperature and bias that fit `base` to the `rates` by cross-entropy, by Newton's method; 1 and 0 without evidence.

    `ridge` pulls towards 1 and 0 as strongly as that number of measured problems. Bounds are those of `calibration`.
    """
    inside = jnp.clip(base_K, 1e-4, 1 - 1e-4)
    x = jnp.stack([jnp.log(inside / (1 - inside)), jnp.ones_like(base_K)], axis=1)
    prior = jnp.array([1.0, 0.0])

    def newton(_, w):
        p = jax.nn.sigmoid(x @ w)
        slope = x.T @ (p - rates_K) + ridge * (w - prior)
        curvature = (x * (p * (1 - p))[:, None]).T @ x + ridge * jnp.eye(2)
        return w - jnp.linalg.solve(curvature, slope)

    slope, bias = jax.lax.fori_loop(0, steps, newton, prior)
    good = jnp.isfinite(slope) & jnp.isfinite(bias) & (slope > 0)
    return jnp.where(good, jnp.clip(1 / jnp.where(good, slope, 1), 0.01, 10), 1.0), jnp.where(good, jnp.clip(bias, -1, 1), 0.0)


def predictions(embeddings: Array, ids_K: Array, rates_K: Array, *, tau: float = 1.0) -> Array:
    """f32[N], the predicted success rate of every problem, by attention to the measured problems and a calibration on them.

    For the calibration each measured problem is predicted from the others. Before the first measurement all are 1/2.
    """
    known, measured = ids_K >= 0, embeddings[jnp.maximum(ids_K, 0)]

    def of(queries, allowed):
        weights = jnp.where(allowed, attention(queries, measured, tau=tau), 0)
        total = weights.sum(-1)
        mean = jnp.sum(jnp.where(known, rates_K, 0)) / jnp.maximum(known.sum(), 1)
        return jnp.where(total > 0, weights @ rates_K / jnp.where(total > 0, total, 1), mean)

    others = known[None] & ~jnp.eye(ids_K.size, dtype=bool)
    left_out = jnp.where(known, of(measured, others), 0.5)
    temperature, bias = fitted(left_out, jnp.where(known, rates_K, 0.5))
    predicted = calibrated(of(embeddings, jnp.broadcast_to(known, (len(embeddings), ids_K.size))), temperature, bias)
    return jnp.where(known.any(), predicted, 0.5)


@controller
def dots_rr(*, reference: int = 256, every: int = 2, target: float = 0.5, tau: float = 1e-3, tau_attention: float = 1.0
            ) -> Controller:
    """`prompt_weights` f32[N]: `selection` of `predictions`; `reference_ids` i32[K] in every `every`-th step.

    The reference problems are drawn at random and measured with the weights of that step, for the following steps. Embeddings
    come from the run's initial policy, standardised over the problems to mean 0 and deviation 1; the paper's come from another
    model, followed by two trained networks that also calibrate. Facts: `reference_rates`.

    Raises:
      ValueError: fewer than two reference problems, or a step or a tau that is not positive.
    """
    if reference < 2 or every < 1 or tau <= 0 or tau_attention <= 0:
        raise ValueError(f"reference={reference} problems every={every} steps, tau={tau}, tau_attention={tau_attention}; give "
                         "2 or more problems, and the others above 0")

    def asked(seed, step, prompts, count):
        order = jax.random.permutation(key_of(seed, step), prompts)[:count].astype(jnp.int32)
        return jnp.where(step % every == 0, order, -1)

    def init(embeddings, seed):
        x = jnp.asarray(embeddings, jnp.float32)
        spread = x.std(0)
        x = (x - x.mean(0)) / jnp.where(spread > 0, spread, 1)
        count = min(reference, len(x))
        none = jnp.full(count, -1, jnp.int32)
        return Reference(x, none, jnp.zeros(count), asked(seed, jnp.int32(0), len(x), count), jnp.asarray(seed), jnp.int32(0))

    def propose(state):
        predicted = predictions(state.embeddings, state.ids, state.rates, tau=tau_attention)
        return {"prompt_weights": selection(predicted, target=target, tau=tau), "reference_ids": state.next_ids}

    def observe(state, facts):
        rates = facts["reference_rates"]
        new, measured = jnp.any(state.next_ids >= 0), jnp.isfinite(rates) & (state.next_ids >= 0)
        ids = jnp.where(new, jnp.where(measured, state.next_ids, -1), state.ids)
        step = state.step + 1
        return Reference(state.embeddings, ids, jnp.where(new, jnp.where(measured, rates, 0), state.rates),
                         asked(state.seed, step, len(state.embeddings), ids.size), state.seed, step)

    return Controller(init, propose, observe, facts=("reference_rates",), knobs=("prompt_weights", "reference_ids"))
