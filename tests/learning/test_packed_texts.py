"""Given texts in packed rows: loss and gradients are those of each text in a row of its own."""
import functools

import given_texts
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.learning import layouts
from jaxrl_llm.learning import state as state_lib
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.models import ModelConfig, Transformer

MODEL = Transformer(ModelConfig(vocab_size=40, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
                                mlp_size=48))
POLICY = Policy(MODEL, chunk=24)
KEEP = optax.GradientTransformation(  # an optimiser whose state is the gradient
    lambda tree: jax.tree.map(jnp.zeros_like, tree), lambda grads, _, tree: (jax.tree.map(jnp.zeros_like, tree), grads))


def params():
    return jax.tree.map(lambda x: x * 4, MODEL.init(jax.random.key(0)))


def logprobs(tree, ids, lora=None):
    """f32[N - 1], of the tokens of one text behind its first, by a pass over this text alone."""
    tokens = jnp.asarray(ids, jnp.int32)[None]
    states = MODEL.hidden_states(tree, tokens, jnp.ones(tokens.shape, bool), lora=lora)[0]
    every = jax.nn.log_softmax(MODEL.logits(tree, states), -1)
    return jnp.take_along_axis(every[0, :-1], tokens[0, 1:, None], 1)[:, 0]


def sft_of_rows(tree):
    """`-sum(w log p) / sum(w)`, text by text."""
    total, count = 0.0, 0.0
    for text in given_texts.TEXTS:
        total += text.weight * jnp.sum(jnp.where(text.trained[1:], logprobs(tree, text.ids), 0))
        count += text.weight * text.trained.sum()
    return -total / count


def dpo_of_rows(tree, reference):
    """The mean of `-log sigmoid(h)`, pair by pair."""
    losses = []
    for pair in given_texts.PAIRS:
        chosen, rejected = (jnp.sum(jnp.where(text.trained[1:], logprobs(tree, text.ids) - logprobs(reference, text.ids), 0))
                            for text in pair)
        losses.append(jax.nn.softplus(-0.5 * (chosen - rejected)))
    return sum(losses) / len(losses)


@functools.cache
def of_packed(text, size):
    """`(loss, gradient, metrics)` of an update from packed rows of 16 slots, `size` of them at a time."""
    groups = given_texts.PAIRS if "dpo" in text else [(one,) for one in given_texts.TEXTS]
    rollouts, objective = given_texts.rollouts(groups), objectives.of(text)
    layout = layouts.packed(POLICY, objective, KEEP, (16,), size, clip_norm=None)
    if "dpo" in text:
        reference = jax.tree.map(lambda x: x * 0.9, params())
        rollouts = rollouts.replace(ref_logprobs=layout.logprobs(reference, None, rollouts)[0])
    state = state_lib.create(params(), None, KEEP, advantages.make("reinforce"), objective, jax.random.key(1))
    state, metrics = layout.update(state, rollouts, np.zeros(rollouts.mask.shape, np.float32))
    return float(metrics["loss"]), state.opt_state, metrics


@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", ["sft", pytest.param("dpo(beta=0.5)", marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_unpacked_rows(text, size):
    loss, gradient, _ = of_packed(text, size)
    reference = jax.tree.map(lambda x: x * 0.9, params())
    of_rows = sft_of_rows if text == "sft" else functools.partial(dpo_of_rows, reference=reference)
    wanted, slopes = jax.jit(jax.value_and_grad(of_rows))(params())
    assert loss == pytest.approx(float(wanted), rel=1e-5)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(slopes))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest), gradient, slopes)
