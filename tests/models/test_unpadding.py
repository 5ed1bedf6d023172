"""Padding removed and restored: every real token in its place, gradients likewise, and an error before any token is lost."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data.rollouts import Rollouts
from jaxrl_llm.learning.policy import Policy
from jaxrl_llm.models.unpadding import unpadding
from jaxrl_llm.values.critic import Critic

P, G, T = 2, 3, 8
MASK = np.arange(T) < np.array([[5, 0, 1], [8, 2, 4]])[..., None]
MASK[1, 0, 3] = False  # a tool's text: not trained, but read by later tokens
REAL = np.arange(T) < np.array([[5, 0, 1], [8, 2, 4]])[..., None]


def test_all_quarters_need_no_unpadding():
    assert unpadding(jnp.asarray(MASK), 4) is None


@pytest.mark.parametrize("shape", ((), (3,), (2, 2)))
def test_real_tokens_stand_in_their_order_and_come_back(shape):
    y = np.random.default_rng(0).normal(size=(P, G, T, *shape)).astype(np.float32)
    slots = unpadding(jnp.asarray(MASK), 2)
    assert slots.token.shape == (24,) and bool(slots.fits)
    np.testing.assert_array_equal(slots.remove(jnp.asarray(y))[:20], y[REAL])
    assert not np.asarray(slots.remove(jnp.asarray(y))[20:]).any()
    expected = np.where(REAL.reshape(*REAL.shape, *(1 for _ in shape)), y, 0)
    np.testing.assert_array_equal(slots.restore(slots.remove(jnp.asarray(y))), expected)


def test_gradients_are_those_of_the_matrix_that_moves_the_tokens():
    slots, random = unpadding(jnp.asarray(MASK), 3), np.random.default_rng(1)
    move = (np.asarray(slots.token)[:, None] == np.arange(P * G * T)).astype(np.float32)  # [slots, P G T]
    y, z = random.normal(size=(P, G, T)).astype(np.float32), random.normal(size=36).astype(np.float32)
    np.testing.assert_allclose(jax.vjp(slots.remove, y)[1](z)[0].reshape(-1), z @ move, rtol=1e-6)
    np.testing.assert_allclose(jax.vjp(slots.restore, z)[1](y)[0], move @ y.reshape(-1), rtol=1e-6)


def test_too_few_slots_are_reported():
    assert not bool(unpadding(jnp.asarray(MASK), 1).fits)


@pytest.fixture(scope="module")
def parts(pair):
    random = np.random.default_rng(2)
    prompt_mask = np.arange(5) >= np.array([2, 0])[:, None]
    rollouts = Rollouts(mask=jnp.asarray(MASK), valid=jnp.ones((P, G), bool).at[1, 2].set(False),
                        tokens=jnp.asarray(random.integers(0, 64, (P, G, T))), prompt_mask=jnp.asarray(prompt_mask),
                        prompt_tokens=jnp.asarray(random.integers(0, 64, (P, 5))))
    model, params = pair("qwen3").model, pair("qwen3").params
    weights = jnp.asarray(random.normal(size=(P, G, T)), jnp.float32) * rollouts.token_mask

    def result(rollouts):
        def loss(params):
            logprobs, entropies = Policy(model, temperature=0.7, chunk=5).logprobs(params, None, rollouts)
            return (logprobs * weights).sum(), (logprobs, entropies)

        return jax.value_and_grad(loss, has_aux=True)(params)

    return model, params, rollouts, jax.jit(result)


@pytest.mark.slow
def test_log_probs_entropies_and_gradients_without_padding(parts):
    _, _, rollouts, result = parts
    (loss, values), gradient = result(rollouts)
    real = np.asarray(rollouts.token_mask)
    for quarters in (2, 3):
        (short_loss, short_values), short_gradient = result(rollouts.replace(filled=quarters))
        np.testing.assert_allclose(short_loss, loss, rtol=1e-5)
        for ours, expected in zip(short_values, values):
            np.testing.assert_allclose(np.asarray(ours)[real], np.asarray(expected)[real], rtol=1e-4, atol=1e-5)
        for ours, expected in zip(jax.tree.leaves(short_gradient), jax.tree.leaves(gradient)):
            np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_a_broken_promise_is_nan_and_no_update(parts):
    _, _, rollouts, result = parts
    (loss, _), _ = result(rollouts.replace(filled=1))
    assert np.isnan(loss)


def test_products_shrink_with_the_promise(parts):
    _, params, rollouts, result = parts
    whole, half = (result.lower(rollouts.replace(filled=n)).compile().cost_analysis()["flops"] for n in (4, 2))
    assert half < 0.75 * whole


@pytest.mark.slow
def test_critic_without_padding(parts):
    model, params, rollouts, _ = parts
    critic = Critic(model, optimizer=None, kind="head")
    head = {"head": {"weight": jnp.linspace(-1, 1, model.config.hidden_size), "bias": jnp.float32(0.5)}}
    whole, half = (critic.values(head, (params, None), rollouts.replace(filled=n)) for n in (4, 2))
    np.testing.assert_allclose(half, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_every_block_of_a_model_reads_the_restored_rows(parts):
    model, params, r, _ = parts
    def pool(prompt, completions):
        return (prompt.sum(-1), completions.sum(-1))
    whole, half = (model.packed_states(params, r.prompt_tokens, r.prompt_mask, r.tokens, mask=r.mask, filled=n, pool=pool)[1]
                   for n in (4, 2))
    np.testing.assert_allclose(half[0], whole[0], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(np.asarray(half[1])[:, REAL], np.asarray(whole[1])[:, REAL], rtol=1e-5, atol=1e-4)
