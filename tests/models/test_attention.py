"""Attention over own and shared keys, values and gradients, against one softmax over all keys written out."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels import attention
from jaxrl_llm.models.attention import grouped_attention

P, G, T, H, K, S, d = 2, 3, 5, 4, 2, 6, 8


def plain(queries, keys, values, mask, *shared, scale):
    """The same with every key copied to every head and row that reads it."""
    def heads(y):
        return jnp.repeat(y, H // K, axis=1)  # [P, H, G, U, d]
    def copies(y):
        return jnp.broadcast_to(jnp.repeat(y, P // len(y), axis=0)[:, :, None], (P, K, G, S, d))
    for *pair, seen in shared:
        mask = jnp.concatenate([jnp.broadcast_to(seen, (P, G, T, S)), jnp.broadcast_to(mask, (P, G, T, mask.shape[3]))], axis=3)
        keys, values = (jnp.concatenate([copies(s), own], axis=3) for s, own in zip(pair, (keys, values)))
    scores = jnp.einsum("pgthd,phgud->pghtu", queries * scale, heads(keys))
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], scores, -1e30), axis=-1) * mask.any(-1)[:, :, None, :, None]
    return jnp.einsum("pghtu,phgud->pgthd", weights, heads(values))


def inputs(*shared):
    """Own arrays, and shared ones of each number of prompts in `shared`: P, or fewer that several groups read."""
    random = np.random.default_rng(3)
    def normal(*shape):
        return jnp.asarray(2 * random.normal(size=shape), jnp.float32)
    causal = np.tril(np.ones((T, T), bool))[None, None] & np.ones((P, G, 1, 1), bool)
    causal[1, 2, 0] = False  # with its prompt this query sees something, without it nothing at all
    seen = jnp.asarray(np.arange(S) < np.array([4, 6])[:, None])[:, None, None]
    own = normal(P, G, T, H, d), normal(P, K, G, T, d), normal(P, K, G, T, d), jnp.asarray(causal)
    return own, [(normal(n, K, S, d), normal(n, K, S, d), seen) for n in shared]


@pytest.mark.slow
@pytest.mark.parametrize("shared", ((), (P,), (1,), (P, 1)), ids=("own", "group", "groups", "both"))
@pytest.mark.parametrize("recomputed", (False, True))
@pytest.mark.parametrize("block", (512, 2))
def test_values_and_gradients_are_those_of_one_softmax(monkeypatch, shared, recomputed, block):
    monkeypatch.setattr(attention, "BLOCK", block)
    (queries, keys, values, mask), prompts = inputs(*shared)
    floats = (queries, keys, values), [prompt[:2] for prompt in prompts]

    def loss(attend, floats):
        def run(own, pairs):
            return attend(*own, mask, *((*pair, prompt[2]) for pair, prompt in zip(pairs, prompts)), scale=0.5)
        out = (jax.checkpoint(run) if recomputed else run)(*floats)
        return jnp.sum(jnp.sin(out)), out

    result, expected = (jax.jit(jax.value_and_grad(lambda x: loss(a, x), has_aux=True))(floats)
                        for a in (grouped_attention, plain))
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
def test_bfloat16_keeps_its_dtype_in_both_directions():
    (queries, keys, values, mask), [prompt] = inputs(P)
    def low(*arrays):
        return tuple(x.astype(jnp.bfloat16) for x in arrays)
    floats = low(queries, keys, values, *prompt[:2])
    def loss(x):
        return grouped_attention(*x[:3], mask, (*x[3:], prompt[2]), scale=0.5).astype(jnp.float32).sum()
    gradient = jax.grad(loss)(floats)
    assert {g.dtype for g in gradient} == {jnp.dtype(jnp.bfloat16)}
    exact = jax.grad(loss)((queries, keys, values, *prompt[:2]))
    for ours, theirs in zip(gradient, exact):
        assert np.abs(ours.astype(jnp.float32) - theirs).max() < 0.06 * np.abs(theirs).max()


def test_memory_grows_with_the_queries_not_with_their_square(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 64)

    def temporary(length):
        row = jax.ShapeDtypeStruct((1, 4, length, 4, d), jnp.float32)
        own = jax.ShapeDtypeStruct((1, 2, 4, length, d), jnp.float32)
        seen = jnp.tril(jnp.ones((length, length), bool))[None, None]
        def loss(q, k, v):
            return (grouped_attention(q, k, v, seen, scale=0.5) ** 2).sum()
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(row, own, own).compile().memory_analysis().temp_size_in_bytes

    assert temporary(1024) < 2.5 * temporary(512)
