"""Small batches with expert, teacher and replayed data, and what an objective makes of them."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objectives
from jaxrl_llm.data.rollouts import Rollouts

close = np.testing.assert_allclose


def run(slug, new, rollouts, advantage, state=None, **hyper):
    """(loss, metrics, gradient) with A given as [P, G] or [P, G, T]; `state` is the number of earlier calls."""
    objective = objectives.of(slug, **hyper)
    advantage = jnp.asarray(advantage)
    if advantage.ndim == 2:
        advantage = jnp.broadcast_to(advantage[..., None], rollouts.mask.shape)
    update = jax.value_and_grad(objective.update, has_aux=True)
    state = objective.init() if state is None else jnp.int32(state)
    (loss, (metrics, after)), gradient = update(jnp.asarray(new), rollouts, advantage, state)
    if jax.tree.leaves(state):
        assert after == state + 1
    return float(loss), metrics, np.asarray(gradient)


def one_group(old, rewards=(0,), mask=None, **fields):
    """Rollouts of one prompt from per-token probabilities `old` [G, T]; other fields are given as arrays."""
    old = np.float32(old)[None]
    rewards = np.float32(rewards if len(rewards) == old.shape[1] else [0] * old.shape[1])[None]
    mask = np.ones(old.shape, bool) if mask is None else np.bool_(mask)[None]
    arrays = dict(mask=mask, valid=np.ones(old.shape[:2], bool), rewards=rewards, old_logprobs=np.log(old), **fields)
    return Rollouts(**jax.tree.map(jnp.asarray, arrays))


def random_batch(seed, P=2, G=4, T=3):
    """(float64 arrays by name) with invalid rollouts, holes in the mask, and log-probs at most 0."""
    rng = np.random.default_rng(seed)
    def lp():
        return -rng.gamma(1.0, size=(P, G, T))
    return dict(new=lp(), old=lp(), behavior=lp(), ref=lp(), teacher=lp(), advantage=rng.normal(size=(P, G)),
                mask=rng.random((P, G, T)) < 0.7, valid=rng.random((P, G)) < 0.8, expert=rng.random((P, G)) < 0.4,
                rewards=rng.integers(0, 2, (P, G)).astype(float), integers=rng.integers(0, 3, (P, G)), rng=rng)


def to_rollouts(b, **extras):
    return Rollouts(mask=jnp.asarray(b["mask"]), valid=jnp.asarray(b["valid"]), rewards=jnp.asarray(b["rewards"]),
                    old_logprobs=jnp.asarray(b["old"]), behavior_logprobs=jnp.asarray(b["behavior"]),
                    ref_logprobs=jnp.asarray(b["ref"]), extras=jax.tree.map(jnp.asarray, extras))


def tokens(b):
    """Indices (p, g, t) that count."""
    return [tuple(i) for i in np.argwhere(b["mask"] & b["valid"][..., None])]


def check(slug, b, rollouts, loss_of, gradient_of=None, **hyper):
    """Compares with `loss_of(new) -> float` and its gradient: given, or by central differences."""
    actual, _, gradient = run(slug, b["new"], rollouts, b["advantage"], **hyper)
    close(actual, loss_of(b["new"]), rtol=1e-8)
    if gradient_of is None:
        expected, h = np.zeros_like(b["new"]), 1e-5
        for i in np.ndindex(*b["new"].shape):
            step = np.zeros_like(b["new"])
            step[i] = h
            expected[i] = (loss_of(b["new"] + step) - loss_of(b["new"] - step)) / (2 * h)
        close(gradient, expected, rtol=1e-6, atol=1e-9)
    else:
        close(gradient, gradient_of(b["new"]), rtol=1e-10, atol=1e-14)
