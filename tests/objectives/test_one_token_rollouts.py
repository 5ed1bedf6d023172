"""One-token rollouts: the worked example, what is drawn, and the same loss and gradient in chunks and in packed rows."""
import functools

import given_texts
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import advantages, objectives
from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.learning import layouts
from jaxrl_llm.learning import state as state_lib
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.learning.step import make_update
from jaxrl_llm.models import ModelConfig, Transformer
from jaxrl_llm.models.logprobs import token_logprobs
from jaxrl_llm.objectives.otr import drawn, expected_loss, loss_of, one_token_loss
from jaxrl_llm.recorders.token_seeds import token_seeds

LOGITS = jnp.log(jnp.array([0.5, 0.3, 0.2]))
MODEL = Transformer(ModelConfig(vocab_size=40, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
                                mlp_size=48))
KEEP = optax.GradientTransformation(  # an optimiser whose state is the gradient
    lambda tree: jax.tree.map(jnp.zeros_like, tree), lambda grads, _, tree: (jax.tree.map(jnp.zeros_like, tree), grads))


def close(result, wanted, **tolerance):
    np.testing.assert_allclose(result, wanted, **{"rtol": 0, "atol": 1e-6, **tolerance})


def test_worked_example():
    """Samples 0, 0, 1, 2 of p = (.5, .3, .2), the given token 0; then the mean over all samples at temperature 1.3."""
    loss, gradient = jax.value_and_grad(loss_of)(LOGITS, 0, jnp.array([0, 0, 1, 2]))
    close(loss, 0.276238)
    close(gradient, [-0.275, 0.16, 0.115])
    close(jax.grad(expected_loss)(LOGITS, 0, 0), [-0.257444, 0.153246, 0.104199])


def test_many_samples_have_the_heated_shares_and_give_the_expected_loss():
    samples = np.asarray(drawn(LOGITS, jnp.uint32(5), samples=20_000, temperature=2.0))
    heated = np.sqrt([0.5, 0.3, 0.2]) / np.sqrt([0.5, 0.3, 0.2]).sum()
    close((samples[:, None] == np.arange(3)).mean(0), heated, atol=0.015)  # four standard errors
    sampled = one_token_loss(LOGITS, 1, jnp.uint32(5), samples=20_000, temperature=2.0)
    close(sampled, expected_loss(LOGITS, 1, 0, temperature=2.0), atol=0.02)


def test_without_heat_and_penalty_it_is_supervised_learning_times_the_probability():
    gradient = jax.grad(functools.partial(expected_loss, temperature=1.0, wrong=0.0))(LOGITS, 1, 0)
    close(gradient, 0.3 * np.array([0.5, 0.3 - 1, 0.2]))


@pytest.mark.parametrize("temperature", [
    0.7, pytest.param(np.array([0.5, 1.0, 1.0, 2.0, 0.9], np.float32), marks=pytest.mark.slow, id="of each token")])
def test_a_function_of_logits_in_chunks_has_the_gradient_of_the_whole(temperature):
    """Beside log-probs and entropies with slopes, with a softcap, in chunks that do not fill up."""
    rng = np.random.default_rng(5)
    h, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((5, 4), (7, 4)))
    tokens, weights = jnp.array([0, 6, 2, 2, 5]), jnp.asarray(rng.normal(size=(3, 5)), jnp.float32)
    seeds = jnp.arange(5, dtype=jnp.uint32)

    def function(logits, token, seed):
        return logits[token] * jnp.sin(jax.nn.logsumexp(logits) + seed)

    def plain(h, w):
        logits = 3 * jnp.tanh(h @ w.T / 2 / 3) / jnp.reshape(temperature, (-1, 1))
        log = jax.nn.log_softmax(logits)
        rows = log[jnp.arange(5), tokens], -(jnp.exp(log) * log).sum(1), jax.vmap(function)(logits, tokens, seeds)
        return (weights * jnp.stack(rows)).sum()

    def chunked(h, w):
        result = token_logprobs(h, w, tokens, temperature=temperature, divisor=2.0, softcap=3.0, chunk=2, slopes=True,
                                position=function, seeds=seeds)
        return (weights * jnp.stack(result)).sum()

    (value, slopes), (wanted, expected) = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(h, w) for f in (chunked, plain))
    close(value, wanted, rtol=1e-5)
    for slope, right in zip(slopes, expected, strict=True):
        close(slope, right, rtol=1e-4)


def test_no_array_of_the_programs_has_a_row_of_the_vocabulary_for_each_token():
    """64 tokens in chunks of 8, a vocabulary of 37 and 5 samples: the largest array that spans it is a chunk's."""
    h, w, tokens = jnp.ones((64, 4)), jnp.ones((37, 4)), jnp.zeros(64, jnp.int32)
    position = functools.partial(one_token_loss, samples=5)
    program = str(jax.make_jaxpr(jax.grad(
        lambda h: token_logprobs(h, w, tokens, chunk=8, position=position)[2].sum()))(h))
    assert "f32[8,37]" in program
    assert not any(shape in program for shape in ("[64,37]", "[8,8,37]", "[64,5]", "[8,8,5]"))


def params():
    return jax.tree.map(lambda x: x * 4, MODEL.init(jax.random.key(0)))


def batch():
    rollouts = given_texts.rollouts([(one,) for one in given_texts.TEXTS])
    rollouts = jax.tree.map(jnp.asarray, rollouts.replace(
        extras={**rollouts.extras, "current_version": np.full(3, 7, np.int32)}))
    return rollouts.replace(extras={**rollouts.extras, "token_seeds": token_seeds(3, rollouts)})


def by_hand(tree, text):
    """The loss text by text, from the logits of a pass over each text alone."""
    total, count, rollouts = 0.0, 0.0, batch()
    for row, one in enumerate(given_texts.TEXTS):
        ids = jnp.asarray(one.ids, jnp.int32)[None]
        logits = MODEL.logits(tree, MODEL.hidden_states(tree, ids, jnp.ones(ids.shape, bool))[0])[0]
        for place in np.flatnonzero(one.trained):
            seed = rollouts.extras["token_seeds"][row, 0, place - one.prompt]
            token = int(one.ids[place])
            value = one_token_loss(logits[place - 1], token, seed, samples=16) if "16" in text else expected_loss(
                logits[place - 1], token, seed)
            total, count = total + one.weight * value, count + one.weight
    return total / count


@functools.cache
def right(text):
    return jax.jit(jax.value_and_grad(functools.partial(by_hand, text=text)))(params())


@pytest.mark.slow
@pytest.mark.parametrize("text, rows", [("otr(samples=16)", "rectangular"), ("otr(samples=16)", "three parts"),
                                        ("otr(samples=16)", "packed one by one"), ("otr(samples=0)", "packed")])
def test_loss_and_gradient_are_those_of_each_text_alone(text, rows):
    wanted, gradient = right(text)
    rollouts, objective, policy = batch(), objectives.of(text), Policy(MODEL, chunk=5)
    state = state_lib.create(params(), None, KEEP, advantages.make("reinforce"), objective, jax.random.key(1))
    if "packed" in rows:
        update = layouts.packed(policy, objective, KEEP, (16,), 1 if "one" in rows else 3, clip_norm=None).update
    else:
        update = make_update(policy, objective, KEEP, clip_norm=None, micro_batches=3 if "parts" in rows else 1)
    state, metrics = update(state, rollouts, jnp.zeros(rollouts.mask.shape))
    close(metrics["loss"], wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: close(a, b, atol=1e-5 * max(1, np.abs(b).max())), state.opt_state, gradient)


@pytest.mark.slow
def test_log_probs_alone_compute_no_function_of_the_logits():
    """In packed rows, where values are measured beside the same log-probs."""
    seen = []

    def position(logits, token, seed):
        seen.append(logits.shape)
        return logits[token]

    layout = layouts.packed(Policy(MODEL, chunk=5), objectives.make("otr")._replace(position=position), KEEP, (16,), 3,
                            clip_norm=None)
    logprobs, _ = layout.logprobs(params(), None, batch())
    assert not seen
    measured, _, values = layout.values(params(), None, batch())
    assert seen == [(40,)] and values.shape == measured.shape
    close(measured, logprobs)


@pytest.mark.parametrize("number", ["wrong=linear(start=-0.1, end=0.0)", "samples=0, temperature=linear(start=1.3, end=1.0)"])
def test_its_numbers_follow_no_schedule_and_those_of_terms_do(number):
    with pytest.raises(ValueError, match="cannot follow a schedule: what is computed"):
        objectives.of(f"otr({number})", steps=10)
    kept = objectives.of("otr(samples=0) + entropy(linear(start=0.1, end=0.0))", steps=10)
    assert kept.position(LOGITS, 0, 0) == expected_loss(LOGITS, 0, 0)


def test_an_update_with_a_policy_that_measures_nothing_is_an_error():
    rollouts = batch()
    with pytest.raises(ValueError, match=r"extras\['position'\]; learn with a policy that measures it"):
        objectives.make("otr").update(jnp.zeros(rollouts.mask.shape), rollouts, jnp.zeros(rollouts.mask.shape), ())


def test_seeds_depend_on_neither_padding_nor_company():
    def seeds(ids, shape, version=4, seed=0):
        mask = np.ones((len(ids), *shape), bool)
        return np.asarray(token_seeds(seed, Rollouts(mask=mask, valid=mask[..., 0], prompt_ids=np.array(ids),
                                                     extras={"current_version": np.full(len(ids), version)})))

    few, many = seeds([8], (1, 3)), seeds([2, 8], (2, 5))
    np.testing.assert_array_equal(many[1, :1, :3], few[0])
    assert len(np.unique(many)) == 20
    assert not {*few.flat} & {*seeds([8], (1, 3), version=5).flat, *seeds([8], (1, 3), seed=1).flat}
