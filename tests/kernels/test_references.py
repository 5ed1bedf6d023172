"""Every kernel against its plain reference, values and gradients; products have a file of their own."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from jaxrl_llm.kernels import attention, grouped, norm, vocabulary


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_equal(kernel, reference, arguments, atol=2e-5):
    """Values, and gradients of a sum that weighs every entry otherwise, in all of `arguments`."""
    def loss(f, arguments):
        leaves = jax.tree.leaves(f(*arguments))
        return sum((jnp.sin(x) * (jnp.arange(x.size).reshape(x.shape) % 7)).sum() for x in leaves), leaves

    result, wanted = (jax.jit(jax.value_and_grad(functools.partial(loss, f), has_aux=True))(arguments)
                      for f in (kernel, reference))
    assert any(np.abs(x).max() > 0.1 for x in jax.tree.leaves(wanted[1]))
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=atol)


def unchanged(bias):
    return bias


@pytest.mark.parametrize("softcap", (None, 3.0))
@pytest.mark.parametrize("block", (512, 2))
@pytest.mark.parametrize("shared", (0, 1, 2))
def test_attention(monkeypatch, softcap, block, shared):
    """Five queries in one block or three; one of them sees nothing of its own, and nothing at all without shared keys.

    `shared` groups have keys of their own: none, both together, or each.
    """
    monkeypatch.setattr(attention, "BLOCK", block)
    P, K, G, H, T, S, d = 2, 2, 3, 2, 5, 4, 8
    own = np.broadcast_to(np.tril(np.ones((T, T), bool)), (P, 1, G, 1, T, T)).copy()
    own[1, 0, 2, 0, 0] = False
    prompt = np.broadcast_to(np.arange(S) < np.array([4, 2])[:, None, None, None, None, None], (P, 1, 1, 1, 1, S))
    biases = [jnp.where(mask, 0.0, attention.MASKED) for mask in (own, prompt)]
    arrays = [normal(P, K, G, H, T, d), normal(P, K, G, T, d, seed=1), normal(P, K, G, T, d, seed=2)]
    arrays += [normal(shared, K, S, d, seed=3), normal(shared, K, S, d, seed=4)] if shared else []

    def over(attend):
        def run(queries, *pairs):
            sources = [(k, v, bias, Partial(unchanged)) for k, v, bias in zip(pairs[::2], pairs[1::2], biases)]
            return attend(softcap, queries, sources)
        return run

    assert_equal(over(attention.attention), over(attention.plain_attention), arrays)


@pytest.mark.parametrize("sizes", ((0, 10, 0, 3), (13, 0, 0, 0), (1, 2, 3, 7)))
def test_grouped_products(sizes):
    sizes = jnp.asarray(sizes)
    assert_equal(lambda x, kernels: grouped.grouped_matmul(x, kernels, sizes),
                 lambda x, kernels: grouped.plain_grouped_matmul(x, kernels, sizes), (normal(13, 6), normal(4, 6, 5, seed=1)))


@pytest.mark.parametrize("shape", ((6,), (1, 5, 6), (2, 3, 4, 6)))
@pytest.mark.parametrize("offset", (0.0, 1.0))
def test_rms_norm(shape, offset):
    by_head = len(shape) > 2
    assert_equal(lambda x, scale: norm.rms_norm(x, scale, offset, 1e-6, by_head),
                 lambda x, scale: norm.plain_rms_norm(x, scale, offset, 1e-6), (normal(*shape), normal(6, seed=1)))


@pytest.mark.parametrize("vocab", (8, 11, 3))
def test_blocks_of_a_vocabulary(vocab):
    logits = normal(5, vocab).at[2, 1].set(-jnp.inf)
    result, wanted = (jax.jit(f, static_argnums=1)(logits, 4) for f in (vocabulary.in_blocks, vocabulary.plain_in_blocks))
    assert result.logits.shape == (-(-vocab // 4), 4, 5)
    for ours, theirs in zip(result, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_of_exponential_sums():
    """Of finite numbers; tokens are drawn, which no gradient passes."""
    assert_equal(lambda x: vocabulary.exponential_sums(x, 1), lambda x: (jnp.exp(x).sum(1), (x * jnp.exp(x)).sum(1)),
                 (normal(4, 7),))
