"""Chunked log-probs and entropies against the plain formula; gradients; memory of one chunk only."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.logprobs import token_logprobs

D, V = 8, 37


def inputs(count, vocab=V):
    random = np.random.default_rng(count)
    return (random.normal(size=(count, D)).astype(np.float32), random.normal(size=(vocab, D)).astype(np.float32),
            random.integers(0, vocab, count).astype(np.int32))


def plain(normed, unembedding, tokens, temperature):
    logp = jax.nn.log_softmax(normed @ unembedding.T / temperature)
    return logp[jnp.arange(len(tokens)), tokens], -(jnp.exp(logp) * logp).sum(-1)


@pytest.mark.parametrize("count, chunk", ((1, 512), (5, 5), (10, 4), (7, 3), (6, 1)))
@pytest.mark.parametrize("temperature", (1.0, 0.6, "of each token"))
def test_values_and_gradients_equal_the_plain_formula(count, chunk, temperature):
    normed, unembedding, tokens = inputs(count)
    if temperature == "of each token":
        temperature = np.linspace(0.5, 2, count).astype(np.float32)
    weights = np.sin(1 + np.arange(count)).astype(np.float32)
    def ours(h, w):
        return token_logprobs(h, w, tokens, temperature=temperature, chunk=chunk)
    def theirs(h, w):
        return plain(h, w, tokens, temperature if np.ndim(temperature) == 0 else temperature[:, None])
    for result, wanted in zip(jax.jit(ours)(normed, unembedding), theirs(normed, unembedding)):
        np.testing.assert_allclose(result, wanted, rtol=2e-5, atol=2e-6)
    def slope(f):
        return jax.grad(lambda h, w: (f(h, w)[0] * weights).sum(), argnums=(0, 1))
    for result, wanted in zip(jax.jit(slope(ours))(normed, unembedding), slope(theirs)(normed, unembedding)):
        np.testing.assert_allclose(result, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7, np.array([0.5, 1.0, 1.0, 2.0, 0.9], np.float32)], ids=str)
def test_entropies_carry_the_exact_gradient_if_a_bonus_needs_it(temperature):
    """Beside that of the log-probs, with chunks that do not fill up and a softcap, against plain autodiff."""
    rng = np.random.default_rng(5)
    h, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((5, 4), (7, 4)))
    tokens, weights = jnp.array([0, 6, 2, 2, 5]), jnp.asarray(rng.normal(size=(2, 5)), jnp.float32)

    def plain(h, w):
        logits = 3 * jnp.tanh(h @ w.T / 2 / 3) / jnp.reshape(temperature, (-1, 1))
        log = jax.nn.log_softmax(logits)
        return (weights * jnp.stack([log[jnp.arange(5), tokens], -(jnp.exp(log) * log).sum(1)])).sum()

    def chunked(h, w):
        result = token_logprobs(h, w, tokens, temperature=temperature, divisor=2.0, softcap=3.0, chunk=2, slopes=True)
        return (weights * jnp.stack(result)).sum()

    (value, slopes), (wanted, expected) = (jax.value_and_grad(f, argnums=(0, 1))(h, w) for f in (chunked, plain))
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for slope, right in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(slope, right, rtol=1e-4, atol=1e-6)


def test_entropies_carry_no_gradient_otherwise():
    normed, unembedding, tokens = inputs(5)
    gradient = jax.grad(lambda h: token_logprobs(h, unembedding, tokens, chunk=2)[1].sum())(normed)
    assert not np.any(gradient)


def test_bfloat16_states_give_float32_results_from_float32_logits():
    normed, unembedding, tokens = inputs(9)
    def half(x):
        return jnp.asarray(x, jnp.bfloat16)
    result, entropies = token_logprobs(half(normed), half(unembedding), tokens, chunk=4)
    assert result.dtype == entropies.dtype == jnp.float32
    def rounded(x):
        return np.asarray(half(x), np.float32)
    np.testing.assert_allclose(result, plain(rounded(normed), rounded(unembedding), tokens, 1.0)[0], rtol=1e-5, atol=1e-5)


def test_memory_does_not_grow_with_the_number_of_tokens():
    vocab, chunk = 4096, 16

    def temporary_bytes(count):
        normed, unembedding, tokens = inputs(count, vocab)
        step = jax.grad(lambda h, w: token_logprobs(h, w, tokens, chunk=chunk)[0].sum(), argnums=(0, 1))
        return jax.jit(step).lower(normed, unembedding).compile().memory_analysis().temp_size_in_bytes

    few, many = temporary_bytes(4 * chunk), temporary_bytes(64 * chunk)
    assert many - few < 2 * 60 * chunk * (D + 4) * 4  # the inputs of the extra rows and little else
    assert many < 64 * chunk * vocab * 4 / 2  # far below one [tokens, V] array of float32


def test_bfloat16_states_leave_the_gradient_of_a_float32_unembedding_exact_over_many_chunks():
    normed, unembedding, tokens = inputs(256)
    half = jnp.asarray(normed, jnp.bfloat16)
    def slope(chunk):
        return jax.grad(lambda w: token_logprobs(half, w, tokens, chunk=chunk)[0].sum())(unembedding)
    whole, chunks = slope(256), slope(2)
    assert whole.dtype == jnp.float32
    assert np.linalg.norm(chunks - whole) < 2e-3 * np.linalg.norm(whole)


def test_unused_chunks_are_not_computed():
    random = np.random.default_rng(5)
    normed, unembedding = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((11, 6), (9, 6)))
    tokens, wanted = jnp.asarray(random.integers(0, 9, 11)), jnp.arange(11) < 5  # of three chunks of four the first two
    pull = jnp.asarray(random.normal(size=11), jnp.float32) * wanted

    @jax.jit
    def run(normed, wanted):
        def loss(h, w):
            result = token_logprobs(h, w, tokens, chunk=4, wanted=wanted)
            return (result[0] * pull).sum(), result

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(normed, unembedding)

    (_, result), gradient = run(jnp.where(jnp.arange(11)[:, None] < 8, normed, jnp.nan), wanted)
    (_, all_of_them), whole = run(normed, jnp.ones(11, bool))
    for ours, theirs in zip(result, all_of_them):
        np.testing.assert_array_equal(ours[:8], theirs[:8])
        np.testing.assert_array_equal(ours[8:], 0)
    for ours, theirs in zip(gradient, whole):
        np.testing.assert_array_equal(ours, theirs)
