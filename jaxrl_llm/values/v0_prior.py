"""The synthetic prior that V0's head is fitted to: random policies on random prompts (as in TabPFN, arXiv 2207.01848).

A task is one policy: prompts have a few latent traits, shown through F noisy features; the policy's success is a random
function of the traits; each context prompt was tried a few times. A head that predicts such tasks well does Bayesian
inference under this prior in one forward pass. Drawn on the host, a few random matrices per task, while the device is busy.
"""
from typing import NamedTuple

import numpy as np

TRAITS, CLUSTERS, UNITS = 8, 6, 16
TRIES = (1, 1, 4, 8, 16)  # rollouts per context prompt, one of these for a whole task


class Tasks(NamedTuple):
    """B tasks: contexts `features` f32[B, N, F], `outcomes` f32[B, N], `mask` bool[B, N]; `queries` f32[B, Q, F] and their
    true `success` f32[B, Q].
    """

    features: np.ndarray
    outcomes: np.ndarray
    mask: np.ndarray
    queries: np.ndarray
    success: np.ndarray


def sample_tasks(rng: np.random.Generator, count: int, *, context: int, queries: int, features: int) -> Tasks:
    """`count` random tasks with 1 to `context` rows each.

    Traits are Gaussian or clustered; the logit of success is a mix of a linear function, a random network and a level
    per cluster, with a random scale (how much prompts differ) and a random offset (how able the policy is).
    """
    traits, cluster = _traits(rng, count, context + queries)
    scale, offset = np.exp(rng.normal(0.7, 0.7, (count, 1))), rng.normal(0, 1.5, (count, 1))
    success = 1 / (1 + np.exp(-scale * _logit(rng, traits, cluster) - offset))
    shown = _features(rng, traits, features)
    outcomes = np.empty((count, context))
    for b, tries in enumerate(rng.choice(TRIES, count)):
        outcomes[b] = rng.binomial(tries, success[b, :context]) / tries
    mask = np.arange(context) < rng.integers(1, context + 1, (count, 1))
    def single(x):
        return x.astype(np.float32)
    return Tasks(single(shown[:, :context]), single(outcomes), mask, single(shown[:, context:]), single(success[:, context:]))


def _traits(rng, count: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(traits f64[B, rows, TRAITS], cluster i64[B, rows]); of the traits a random number is in use, the others are 0."""
    cluster = rng.integers(0, rng.integers(1, CLUSTERS + 1, (count, 1)), (count, rows))
    centres = rng.uniform(0, 2, (count, 1, 1)) * rng.normal(size=(count, CLUSTERS, TRAITS))
    traits = np.take_along_axis(centres, cluster[..., None], axis=1) + rng.normal(size=(count, rows, TRAITS))
    used = np.arange(TRAITS) < rng.integers(1, TRAITS + 1, (count, 1, 1))
    return np.where(used, traits, 0.0), cluster


def _logit(rng, traits: np.ndarray, cluster: np.ndarray) -> np.ndarray:
    """f64[B, rows], of unit size and centred: a random mix of a linear function, a network and a level per cluster."""
    count = len(traits)
    linear = (traits @ rng.normal(size=(count, TRAITS, 1)))[..., 0]
    hidden = np.tanh(traits @ rng.normal(size=(count, TRAITS, UNITS)) + rng.normal(size=(count, 1, UNITS)))
    network = (hidden @ rng.normal(size=(count, UNITS, 1)))[..., 0]
    level = np.take_along_axis(rng.normal(size=(count, CLUSTERS)), cluster, axis=1)
    parts = np.stack([linear, network, level], axis=1)
    parts = (parts - parts.mean(2, keepdims=True)) / (parts.std(2, keepdims=True) + 1e-3)
    return np.einsum("bk,bkn->bn", rng.dirichlet(np.full(3, 0.5), count), parts)


def _features(rng, traits: np.ndarray, features: int) -> np.ndarray:
    """f64[B, rows, features]: traits through a random linear map, half of the time bent, with noise of random size."""
    count = len(traits)
    shown = traits @ rng.normal(size=(count, TRAITS, features)) + rng.normal(size=(count, 1, features))
    shown = np.where(rng.random((count, 1, 1)) < 0.5, np.tanh(shown), shown)
    noise = rng.uniform(0, 0.5, (count, 1, 1)) * shown.std((1, 2), keepdims=True)
    return shown + noise * rng.normal(size=shown.shape)
