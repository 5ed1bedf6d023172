"""Experts: sorted rows against the plain reference, values and gradients; routing; what padding must not do."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import grouped, moe
from jaxrl_llm.models.config import Experts

N, D, M, E, K = 24, 8, 12, 5, 2


def layer(dtype=np.float32, seed=0):
    """Rows and kernels."""
    random = np.random.default_rng(seed)
    shapes = (N, D), (E, D, M), (E, D, M), (E, M, D)
    return tuple(jnp.asarray(random.normal(size=shape) / np.sqrt(shape[-2]), dtype) for shape in shapes)


def routing(kind):
    """`(weights f32[N, K], experts i32[N, K])` of routers that make it hard."""
    random = np.random.default_rng(1)
    experts = np.argsort(random.random((N, E)))[:, :K]
    if kind == "empty":  # nobody wants experts 0 and 3
        experts = np.array([1, 2, 4])[np.argsort(random.random((N, 3)))[:, :K]]
    elif kind == "one":
        experts = np.tile([3, 1], (N, 1))
    return jnp.asarray(random.uniform(0.1, 1, size=(N, K)), jnp.float32), jnp.asarray(experts)


@pytest.mark.parametrize("kind", ("mixed", "empty", "one"))
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16), ids=("float32", "bfloat16"))
def test_sorted_experts_equal_all_experts_in_values_and_gradients(kind, dtype):
    rows, (weights, experts) = layer(dtype), routing(kind)
    target = np.random.default_rng(2).normal(size=(N, D))

    def loss(way, x, weights, *kernels):
        out = way(x, weights, experts, *kernels, jax.nn.silu)
        return (out.astype(jnp.float32) * target).sum(), out

    run = lambda way: jax.jit(jax.value_and_grad(functools.partial(loss, way), argnums=range(5), has_aux=True))  # noqa: E731
    both = [run(way)(rows[0], weights, *rows[1:]) for way in (moe.sorted_experts, moe.all_experts)]
    tolerance = dict(rtol=1e-5, atol=1e-6) if dtype == jnp.float32 else dict(rtol=0.05, atol=0.03)
    for found, wanted in zip(*map(jax.tree.leaves, both), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found.astype(jnp.float32), wanted.astype(jnp.float32), **tolerance)
    assert both[0][0][1].dtype == dtype


@pytest.mark.parametrize(
    "sizes", ((0, 40, 0, 3, 27), (70, 0, 0, 0, 0), (0, 0, 0, 0, 70), (14, 14, 14, 14, 14), (1, 2, 3, 63, 1)))
def test_blocks_equal_ragged_dot(sizes):
    random = np.random.default_rng(3)
    x, dy = random.normal(size=(70, D)).astype(np.float32), random.normal(size=(70, M)).astype(np.float32)
    kernels, sizes = random.normal(size=(E, D, M)).astype(np.float32), jnp.asarray(sizes)
    np.testing.assert_allclose(
        jax.jit(grouped.times_by_blocks)(x, kernels, sizes), jax.lax.ragged_dot(x, kernels, sizes), rtol=1e-5, atol=1e-5)
    ends = np.cumsum(sizes)
    wanted = [x[a:b].T @ dy[a:b] for a, b in zip(ends - sizes, ends)]
    np.testing.assert_allclose(jax.jit(grouped.sums_by_blocks)(x, dy, sizes), wanted, rtol=1e-4, atol=1e-5)


def test_what_accelerators_are_given_equals_the_blocks(monkeypatch):
    rows, (weights, experts) = layer(), routing("empty")
    loss = lambda *arrays: (moe.sorted_experts(arrays[0], weights, experts, *arrays[1:], jax.nn.silu) ** 2).sum()  # noqa: E731
    blocks = jax.value_and_grad(loss, argnums=range(4))(*rows)
    choose = lambda *arrays, default, cpu: default(*arrays)  # noqa: E731
    monkeypatch.setattr(jax.lax, "platform_dependent", choose)
    ragged = jax.value_and_grad(loss, argnums=range(4))(*rows)
    for found, wanted in zip(*map(jax.tree.leaves, (blocks, ragged)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalize", (True, False))
def test_a_router_takes_the_largest_of_a_softmax_in_float32(normalize):
    logits = np.array([[2.0, 0.0, 1.0, -1.0], [0.0, 0.5, 3.0, 2.0]])
    router = moe.Router(Experts(4, 2, 8, normalize=normalize))
    weights, experts = router.apply({"params": {"kernel": jnp.eye(4)}}, jnp.asarray(logits, jnp.bfloat16))
    np.testing.assert_array_equal(experts, [[0, 2], [2, 3]])
    odds = np.exp(logits)
    wanted = np.take_along_axis(odds, np.asarray(experts), 1)
    wanted /= (wanted if normalize else odds).sum(1, keepdims=True)
    np.testing.assert_allclose(weights, wanted, rtol=1e-6)
    assert weights.dtype == jnp.float32


def test_a_router_tells_whom_it_chose_and_how_probable_all_were():
    x = jnp.asarray(np.random.default_rng(4).normal(size=(3, 6)), jnp.float32)
    router = moe.Router(Experts(4, 2, 8))
    variables = {"params": {"kernel": jnp.asarray(np.random.default_rng(5).normal(size=(6, 4)), jnp.float32)}}
    (_, experts), seen = router.apply(variables, x, mutable=["routing"])
    np.testing.assert_array_equal(seen["routing"]["experts"], experts)
    np.testing.assert_allclose(seen["routing"]["probs"].sum(-1), 1, rtol=1e-6)
    np.testing.assert_array_equal(np.argsort(-seen["routing"]["probs"])[:, :2], experts)


def test_a_token_does_not_depend_on_others():
    rows, (weights, experts) = layer(), routing("mixed")
    run = lambda x: moe.sorted_experts(x, weights, experts, *rows[1:], jax.nn.silu)  # noqa: E731
    other = rows[0].at[5:].set(np.nan)
    np.testing.assert_allclose(run(other)[:5], run(rows[0])[:5], rtol=1e-6)
    assert np.isnan(run(other)[5:]).all()


def test_more_experts_than_there_are_is_refused():
    with pytest.raises(ValueError, match="experts.per_token=5 of experts.count=4"):
        Experts(4, 5, 8)


@pytest.mark.parametrize(("platform", "ragged"), (("tpu", True), ("cuda", True), ("cpu", False)))
def test_accelerators_are_given_ragged_dot(platform, ragged):
    x, kernels, sizes = jnp.ones((16, D)), jnp.ones((4, D, M)), jnp.full(4, 4)
    loss = jax.jit(jax.grad(lambda x, kernels: grouped.grouped_matmul(x, kernels, sizes).sum(), argnums=(0, 1)))
    assert ("ragged_dot" in loss.trace(x, kernels).lower(lowering_platforms=(platform,)).as_text()) == ragged
