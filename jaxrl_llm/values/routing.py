"""Which policy of a fleet answers a prompt, for predicted success and known cost (decomposed form of arXiv 2602.03584)."""
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array


def scaled_costs(cost: Array) -> Array:
    """Costs between 0 (cheapest of the fleet) and 1 along the last axis; all 0 where they are equal."""
    low, high = jnp.min(cost, axis=-1, keepdims=True), jnp.max(cost, axis=-1, keepdims=True)
    return jnp.where(high > low, (cost - low) / jnp.where(high > low, high - low, 1), 0.0)


def route(success_QM: Array, cost: Array, *, beta: float) -> Array:
    """i32[Q]: the policy of largest `beta p + (1 - beta) (1 - c)`, c the `scaled_costs`; ties go to the lowest index.

    `success_QM` are the predicted probabilities of M policies on Q prompts, `cost` [M] or [Q, M]. `beta` 1 asks for success
    alone, 0 for the cheapest.
    """
    c = jnp.broadcast_to(scaled_costs(jnp.asarray(cost, jnp.float32)), success_QM.shape)
    return jnp.argmax(beta * success_QM + (1 - beta) * (1 - c), axis=1).astype(jnp.int32)


class Curve(NamedTuple):
    """For each beta: share of right answers and mean cost of the policies chosen, f64[B] each."""

    beta: np.ndarray
    score: np.ndarray
    cost: np.ndarray


def curve(success_QM: Array, actual_QM: Array, cost: Array, betas: np.ndarray) -> Curve:
    """The measured success (`actual_QM`) and the cost of `route` by predicted success, for each beta."""
    actual = np.asarray(actual_QM, float)
    paid, rows = np.broadcast_to(np.asarray(cost, float), actual.shape), np.arange(len(actual))
    chosen = [np.asarray(route(success_QM, cost, beta=float(beta))) for beta in betas]
    return Curve(np.asarray(betas, float), np.array([actual[rows, m].mean() for m in chosen]),
                 np.array([paid[rows, m].mean() for m in chosen]))


def pareto(cost: np.ndarray, score: np.ndarray) -> np.ndarray:
    """bool[B]: points that no other point beats in both (at least as cheap and as right, and better in one)."""
    cheaper = (cost[None] <= cost[:, None]) & (score[None] >= score[:, None])
    strictly = (cost[None] < cost[:, None]) | (score[None] > score[:, None])
    return ~np.any(cheaper & strictly, axis=1)
